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
  const columns = [
    { key: "id", label: "id", width: "4.2em", value: (r) => model.todo.indexOf(r), cell: todoId },
    {
      key: "saves",
      label: "saves",
      numeric: true,
      width: "5.4em",
      hint: "predicted, all places; of advice at most",
      value: (r) => r.savedUs,
      cell: (r) => (r.savedUs === null ? "–" : micros(r.savedUs)),
    },
    {
      key: "share",
      label: "of time",
      numeric: true,
      width: "4.8em",
      value: (r) => r.share,
      cell: (r) => (r.savedUs === null ? "–" : percent(r.share)),
    },
    {
      key: "name",
      label: "what",
      width: SHARED,
      value: (r) => r.name,
      cell: (r) => r.name,
    },
    {
      key: "place",
      label: "where",
      width: "13em",
      value: (r) => r.place,
      cell: (r) => el("span", { title: r.place }, r.short),
    },
    {
      key: "layers",
      label: "layers",
      extra: true,
      width: "8em",
      value: (r) => r.group?.layers ?? "",
      cell: (r) => r.group?.layers ?? "",
    },
    {
      key: "action",
      label: "what to do",
      width: SHARED,
      value: (r) => r.action,
      cell: (r) => (r.note ? `${r.note}; ${r.action}` : r.action),
    },
    {
      key: "launches",
      label: "kernels",
      numeric: true,
      extra: true,
      width: "5.4em",
      hint: "in one place",
      value: (r) => r.group?.launches ?? null,
      cell: (r) => of(r, (g) => `${g.launches} → ${g.left}`),
    },
    {
      key: "instances",
      label: "×",
      numeric: true,
      extra: true,
      width: "3.2em",
      hint: "places",
      value: (r) => r.group?.instances.length ?? null,
      cell: (r) => of(r, (g) => String(g.instances.length)),
    },
    {
      key: "bytes",
      label: "HBM saved",
      numeric: true,
      extra: true,
      width: "7em",
      hint: "all places",
      value: (r) => r.group?.savedBytes ?? null,
      cell: (r) => of(r, (g) => amount(g.savedBytes, most, g)),
    },
    {
      key: "speedup",
      label: "predicted",
      numeric: true,
      extra: true,
      width: "5.8em",
      hint: "eager's time over the kernel's, one place",
      value: (r) => r.group?.speedup ?? null,
      cell: (r) => of(r, (g) => times(g.speedup)),
    },
    {
      key: "measured",
      label: "measured",
      numeric: true,
      width: "5.8em",
      value: (r) => r.group?.measured?.speedup ?? null,
      cell: (r) => (r.group?.measured?.speedup ? times(r.group.measured.speedup) : "–"),
    },
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
    { key: "id", label: "id", width: "4.2em", value: (g) => g.index, cell: (g) => named(g) },
    { key: "name", label: "what", width: SHARED, value: (g) => g.name, cell: (g) => g.name },
    {
      key: "place",
      label: "where",
      width: "13em",
      value: (g) => g.place,
      cell: (g) => el("span", { title: g.place }, g.short),
    },
    {
      key: "layers",
      label: "layers",
      extra: true,
      width: "8em",
      value: (g) => g.layers,
      cell: (g) => g.layers,
    },
    {
      key: "decided",
      label: "decided by",
      width: SHARED,
      value: (g) => g.decided,
      cell: (g) => g.decided,
    },
    {
      key: "launches",
      label: "kernels",
      numeric: true,
      width: "5.4em",
      value: (g) => g.launches,
      cell: (g) => String(g.launches),
    },
    {
      key: "instances",
      label: "×",
      numeric: true,
      extra: true,
      width: "3.2em",
      hint: "places",
      value: (g) => g.instances.length,
      cell: (g) => String(g.instances.length),
    },
    {
      key: "fixable",
      label: "what would change that",
      extra: true,
      width: SHARED,
      value: (g) => g.fixable,
      cell: (g) => g.fixable,
    },
  ];
  const table = createTable({
    host: byId("rejected"),
    label: "Rejected candidates",
    columns,
    open: (group) => state.set({ selected: selection(group) }),
  });
  const chosen = new Set(["reject"]);
  const show = () => {
    const rows = candidates.filter(
      (group) => chosen.has(group.kind) && (!state.foundGroups || state.foundGroups.has(group)),
    );
    byId("rejected-count").textContent = `${rows.length} of ${candidates.length}`;
    table.show(rows);
  };
  drawChips(
    byId("rejected-kinds"),
    KINDS,
    chosen,
    (kind) => candidates.filter((group) => group.kind === kind).length,
    show,
  );
  state.listen((change) => {
    if ("query" in change) show();
    if (change.selected?.group) table.reveal(change.selected.group);
  });
  show();
}

export function createLaunches(model, state) {
  const columns = [
    {
      key: "index",
      label: "#",
      numeric: true,
      width: "4.4em",
      value: (n) => n.index,
      cell: (n) => String(n.index),
    },
    { key: "name", label: "node", width: "13em", value: (n) => n.name, cell: (n) => n.name },
    {
      key: "op",
      label: "op",
      width: "9em",
      value: (n) => n.short,
      cell: (n) => el("span", { title: n.op }, n.short),
    },
    {
      key: "shape",
      label: "result",
      width: "13em",
      value: (n) => n.shape,
      cell: (n) => n.shape,
    },
    {
      key: "bytes",
      label: "HBM",
      numeric: true,
      width: "6em",
      value: (n) => n.bytes,
      cell: (n) => bytes(n.bytes),
    },
    {
      key: "us",
      label: "time",
      numeric: true,
      width: "6em",
      value: (n) => n.us,
      cell: (n) => micros(n.us),
    },
    {
      key: "intensity",
      label: "FLOP/B",
      numeric: true,
      width: "5.4em",
      value: (n) => (n.bytes ? n.flops / n.bytes : null),
      cell: (n) => (n.bytes ? ratio(n.flops / n.bytes) : "–"),
    },
    {
      key: "bound",
      label: "bound",
      width: "7em",
      value: (n) => n.bound,
      cell: (n) => el("span", {}, el("i", { class: `swatch ${n.bound}` }), n.bound),
    },
    {
      key: "group",
      label: "group, or why none",
      width: "17em",
      value: (n) => (n.group ? n.group.index : 1e9),
      cell: (n) => (n.group ? named(n.group, true) : n.reason),
    },
    {
      key: "module",
      label: "module",
      width: "14em",
      value: (n) => n.module,
      cell: (n) => n.module,
    },
    {
      key: "source",
      label: "source",
      width: "14em",
      value: (n) => n.source,
      cell: (n) => el("span", { title: n.source }, shortPlace(n.source)),
    },
  ];
  const table = createTable({
    host: byId("launches"),
    label: "Launches and views",
    columns,
    sorted: { key: "bytes", down: true },
    open: (node) => state.set({ selected: { node } }),
  });
  const chosen = new Set(["grouped", "alone"]);
  const kindOf = (node) => (isView(node) ? "view" : node.group ? "grouped" : "alone");
  const show = () => {
    const rows = model.nodes.filter(
      (node) => chosen.has(kindOf(node)) && (!state.found || state.found.has(node.index)),
    );
    const whole = rows.reduce((sum, node) => sum + node.bytes, 0);
    byId("launches-count").textContent = `${plural(rows.length, "row")}, ${bytes(whole)}`;
    table.show(rows);
  };
  const kinds = { grouped: "in a group", alone: "left alone", view: "views" };
  drawChips(
    byId("launches-kinds"),
    kinds,
    chosen,
    (kind) => model.nodes.filter((node) => kindOf(node) === kind).length,
    show,
  );
  state.listen((change) => {
    if ("query" in change) show();
  });
  show();
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
