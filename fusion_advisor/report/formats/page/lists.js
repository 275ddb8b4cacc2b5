// The two tables: groups with rejected candidates, and every launch.

import { byId, el } from "./dom.js";
import { bytes, micros, percent, plural, ratio, shortPlace, times } from "./format.js";
import { isView, searcher, todoText } from "./model.js";
import { largest } from "./numbers.js";
import { selection } from "./state.js";
import { createTable } from "./table.js";
import { groupPaint } from "./theme.js";

const SHARED = ""; // a width: what the other columns leave
const KINDS = { reject: "rejected", part: "part of a fused one" };

// One ranked list: groups, and advice that is no fusion.
export function createTodo(model, state) {
  const groups = model.accepted;
  const most = largest(
    groups.map((group) => group.savedBytes),
    1,
  );
  const timed = groups.some((group) => group.measured);
  const of = (row, say) => (row.group ? say(row.group) : "");
  const unsaid = (r, say) => (r.savedUs === null ? "–" : say());
  const columns = [
    text("id", "id", "4.2em", (r) => model.todo.indexOf(r), { cell: todoId }),
    number("saves", "saves", "5.4em", (r) => r.savedUs, {
      hint: "predicted, all places; of advice at most",
      cell: (r) => unsaid(r, () => micros(r.savedUs)),
    }),
    number("share", "of time", "4.8em", (r) => r.share, {
      cell: (r) => unsaid(r, () => percent(r.share)),
    }),
    text("name", "what", SHARED, (r) => r.name),
    text("place", "where", "13em", (r) => r.place, { cell: placed }),
    text("layers", "layers", "8em", (r) => r.group?.layers ?? "", { extra: true }),
    text("action", "what to do", SHARED, (r) => r.action, {
      cell: (r) => (r.note ? `${r.note}; ${r.action}` : r.action),
    }),
    number("launches", "kernels", "5.4em", (r) => r.group?.launches ?? null, {
      extra: true,
      hint: "in one place",
      cell: (r) => of(r, (g) => `${g.launches} → ${g.left}`),
    }),
    number("instances", "×", "3.2em", (r) => r.group?.instances.length ?? null, {
      extra: true,
      hint: "places",
    }),
    number("bytes", "HBM saved", "7em", (r) => r.group?.savedBytes ?? null, {
      extra: true,
      hint: "all places",
      cell: (r) => of(r, (g) => amount(g.savedBytes, most, g)),
    }),
    number("speedup", "predicted", "5.8em", (r) => r.group?.speedup ?? null, {
      extra: true,
      hint: "eager's time over the kernel's, one place",
      cell: (r) => of(r, (g) => times(g.speedup)),
    }),
    number("measured", "measured", "5.8em", (r) => r.group?.measured?.speedup ?? null, {
      cell: (r) => (r.group?.measured?.speedup ? times(r.group.measured.speedup) : "–"),
    }),
  ];
  const table = createTable({
    host: byId("todo"),
    label: "What to do",
    columns: columns.filter((column) => column.key !== "measured" || timed),
    open: (row) => state.set({ selected: chosenOf(row) }),
  });
  const show = () => {
    const fits = state.query ? searcher(state.query) : null;
    const rows = model.todo.filter((row) =>
      row.group
        ? !state.foundGroups || state.foundGroups.has(row.group)
        : !fits || fits(todoText(row)),
    );
    byId("todo-count").textContent =
      rows.length === model.todo.length ? "" : `${rows.length} of ${model.todo.length}`;
    table.show(rows);
  };
  state.listen((change) => {
    if ("query" in change) show();
    const { group, advice } = change.selected ?? {};
    if (group || advice) {
      table.reveal(model.todo.find((row) => (group ? row.group === group : row === advice)));
    }
  });
  show();
}

// What a row of the list opens.
export function chosenOf(row) {
  return row.group ? selection(row.group) : { advice: row };
}

// What could share a kernel and should not: what decides, and nothing that looks like a saving.
export function createRejected(model, state) {
  const candidates = model.groups.filter((group) => group.kind !== "fuse");
  byId("rejected-section").hidden = !candidates.length;
  const columns = [
    text("id", "id", "4.2em", (g) => g.index, { cell: (g) => named(g) }),
    text("name", "what", SHARED, (g) => g.name),
    text("place", "where", "13em", (g) => g.place, { cell: placed }),
    text("layers", "layers", "8em", (g) => g.layers, { extra: true }),
    text("decided", "decided by", SHARED, (g) => g.decided),
    number("launches", "kernels", "5.4em", (g) => g.launches),
    number("instances", "×", "3.2em", (g) => g.instances.length, { extra: true, hint: "places" }),
    text("fixable", "what would change that", SHARED, (g) => g.fixable, { extra: true }),
  ];
  const table = createFiltered(state, {
    id: "rejected",
    label: "Rejected candidates",
    columns,
    open: (group) => state.set({ selected: selection(group) }),
    all: candidates,
    kinds: KINDS,
    kindOf: (group) => group.kind,
    chosen: new Set(["reject"]),
    fits: (group) => !state.foundGroups || state.foundGroups.has(group),
    told: (rows) => `${rows.length} of ${candidates.length}`,
  });
  state.listen((change) => {
    if (change.selected?.group) table.reveal(change.selected.group);
  });
}

export function createLaunches(model, state) {
  const columns = [
    number("index", "#", "4.4em", (n) => n.index),
    text("name", "node", "13em", (n) => n.name),
    text("op", "op", "9em", (n) => n.short, { cell: (n) => el("span", { title: n.op }, n.short) }),
    text("shape", "result", "13em", (n) => n.shape),
    number("bytes", "HBM", "6em", (n) => n.bytes, { cell: (n) => bytes(n.bytes) }),
    number("us", model.profiled ? "predicted" : "time", "6em", (n) => n.us, {
      cell: (n) => micros(n.us),
    }),
    ...(model.profiled ? [measuredColumn()] : []),
    number("intensity", "FLOP/B", "5.4em", (n) => (n.bytes ? n.flops / n.bytes : null), {
      cell: (n) => (n.bytes ? ratio(n.flops / n.bytes) : "–"),
    }),
    text("bound", "bound", "7em", (n) => n.bound, {
      cell: (n) => el("span", {}, el("i", { class: `swatch ${n.bound}` }), n.bound),
    }),
    text("group", "group, or why none", "17em", (n) => (n.group ? n.group.index : 1e9), {
      cell: (n) => (n.group ? named(n.group, true) : n.reason),
    }),
    text("module", "module", "14em", (n) => n.module),
    text("source", "source", "14em", (n) => n.source, {
      cell: (n) => el("span", { title: n.source }, shortPlace(n.source)),
    }),
  ];
  createFiltered(state, {
    id: "launches",
    label: "Launches and views",
    columns,
    sorted: { key: "bytes", down: true },
    open: (node) => state.set({ selected: { node } }),
    all: model.nodes,
    kinds: { grouped: "in a group", alone: "left alone", view: "views" },
    kindOf: (node) => (isView(node) ? "view" : node.group ? "grouped" : "alone"),
    chosen: new Set(["grouped", "alone"]),
    fits: (node) => !state.found || state.found.has(node.index),
    told: (rows) => {
      const whole = rows.reduce((sum, node) => sum + node.bytes, 0);
      return `${plural(rows.length, "row")}, ${bytes(whole)}`;
    },
  });
}

function measuredColumn() {
  return number("measured", "measured", "6em", (n) => n.measured, {
    cell: (n) => (n.measured === null ? "" : micros(n.measured)),
    hint: "in the profile; empty where another launch's kernel computes it, or none is linked",
  });
}

// A table of the rows whose kind is `chosen` and that the search `fits`; `told` counts them.
function createFiltered(
  state,
  { id, label, columns, open, sorted, all, kinds, kindOf, chosen, fits, told },
) {
  const table = createTable({ host: byId(id), label, columns, open, sorted });
  const show = () => {
    const rows = all.filter((row) => chosen.has(kindOf(row)) && fits(row));
    byId(`${id}-count`).textContent = told(rows);
    table.show(rows);
  };
  const count = (kind) => all.filter((row) => kindOf(row) === kind).length;
  drawChips(byId(`${id}-kinds`), kinds, chosen, count, show);
  state.listen((change) => {
    if ("query" in change) show();
  });
  show();
  return table;
}

// Columns: what `value` gives is shown where `more` has no cell.
function text(key, label, width, value, more = {}) {
  return { key, label, width, value, ...more };
}

function number(key, label, width, value, more = {}) {
  return text(key, label, width, value, { numeric: true, ...more });
}

function placed(row) {
  return el("span", { title: row.place }, row.short);
}

function named(group, long = false) {
  const swatch = el("i", { class: "swatch" });
  if (group.kind === "fuse") swatch.style.background = groupPaint(group.index);
  return el("span", {}, swatch, long ? `${group.id} ${group.name}` : group.id);
}

function todoId(row) {
  return row.group ? named(row.group) : el("span", {}, el("i", { class: "swatch advised" }), row.id);
}

function amount(saved, most, group) {
  const fill = el("i", { style: { width: `${(100 * Math.max(saved, 0)) / most}%` } });
  fill.style.background = groupPaint(group.index);
  return el("span", { class: "within" }, fill, bytes(saved));
}

// Buttons that are pressed or not; those of kinds that do not occur are left out.
function drawChips(host, kinds, chosen, count, changed) {
  const chips = Object.entries(kinds)
    .filter(([kind]) => count(kind))
    .map(([kind, name]) =>
      el(
        "button",
        {
          type: "button",
          class: "chip",
          "aria-pressed": String(chosen.has(kind)),
          onclick: (event) => {
            if (!chosen.delete(kind)) chosen.add(kind);
            event.currentTarget.setAttribute("aria-pressed", String(chosen.has(kind)));
            changed();
          },
        },
        `${name} ${count(kind)}`,
      ),
    );
  host.replaceChildren(...chips);
}
