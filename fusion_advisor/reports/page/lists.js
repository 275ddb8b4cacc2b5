// The two tables: groups with rejected candidates, and every launch.

import { byId, el } from "./dom.js";
import { bytes, micros, percent, plural, ratio, times } from "./format.js";
import { isView } from "./model.js";
import { largest } from "./numbers.js";
import { selection } from "./state.js";
import { createTable } from "./table.js";
import { groupPaint } from "./theme.js";

const KINDS = { fuse: "fuse", reject: "rejected", part: "part of a fused one" };

export function createGroups(model, state) {
  const most = largest(
    model.groups.map((group) => group.savedBytes),
    1,
  );
  const timed = model.groups.some((group) => group.measured);
  const columns = [
    { key: "id", label: "id", width: "4.6em", value: (g) => g.index, cell: (g) => named(g) },
    {
      key: "name",
      label: "what",
      width: "11em",
      value: (g) => g.name,
      cell: (g) => g.name,
    },
    {
      key: "kind",
      label: "verdict",
      width: "6.2em",
      value: (g) => g.kind,
      cell: (g) =>
        el("span", { class: `verdict ${g.kind}` }, g.kind === "fuse" ? "fuse" : "rejected"),
    },
    {
      key: "saves",
      label: "saves",
      numeric: true,
      width: "6em",
      hint: "predicted, all instances",
      value: (g) => g.savedUs,
      cell: (g) => would(micros(g.savedUs), g),
    },
    {
      key: "share",
      label: "of time",
      numeric: true,
      width: "5em",
      value: (g) => g.share,
      cell: (g) => would(percent(g.share), g),
    },
    {
      key: "bytes",
      label: "HBM saved",
      numeric: true,
      width: "9em",
      hint: "all instances",
      value: (g) => g.savedBytes,
      cell: (g) => amount(g.savedBytes, most, g),
    },
    {
      key: "ratio",
      label: "traffic",
      numeric: true,
      width: "5em",
      hint: "bytes unfused over bytes fused",
      value: (g) => g.ratio,
      cell: (g) => would(times(g.ratio), g),
    },
    {
      key: "instances",
      label: "×",
      numeric: true,
      width: "3.4em",
      hint: "instances",
      value: (g) => g.instances.length,
      cell: (g) => String(g.instances.length),
    },
    {
      key: "launches",
      label: "kernels",
      numeric: true,
      width: "5.4em",
      value: (g) => g.launches,
      cell: (g) => would(`${g.launches} → ${g.left}`, g),
    },
    {
      key: "speedup",
      label: "predicted",
      numeric: true,
      width: "5.8em",
      hint: "eager's time over the kernel's, one instance",
      value: (g) => g.speedup,
      cell: (g) => would(times(g.speedup), g),
    },
    {
      key: "measured",
      label: "measured",
      numeric: true,
      width: "5.8em",
      value: (g) => g.measured?.speedup ?? null,
      cell: (g) => (g.measured?.speedup ? times(g.measured.speedup) : "–"),
    },
    {
      key: "decided",
      label: "decided by",
      width: "9em",
      value: (g) => g.decidedBy,
      cell: (g) => el("span", { title: g.decided }, g.decidedBy),
    },
    {
      key: "kernel",
      label: "kernel",
      width: "7em",
      value: (g) => g.kernel.status,
      cell: (g) =>
        el("span", { title: g.kernel.said }, g.kernel.status === "none" ? "–" : g.kernel.status),
    },
    {
      key: "place",
      label: "source",
      width: "15em",
      value: (g) => g.place,
      cell: (g) => g.place,
    },
  ];
  const table = createTable({
    host: byId("groups"),
    label: "Groups and rejected candidates",
    columns: columns.filter((column) => column.key !== "measured" || timed),
    open: (group) => state.set({ selected: selection(group) }),
  });
  const chosen = new Set(["fuse", "reject"]);
  const show = () => {
    const rows = model.groups.filter(
      (group) => chosen.has(group.kind) && (!state.foundGroups || state.foundGroups.has(group)),
    );
    byId("groups-count").textContent = `${rows.length} of ${model.groups.length}`;
    table.show(rows);
  };
  drawChips(
    byId("groups-kinds"),
    KINDS,
    chosen,
    (kind) => model.groups.filter((group) => group.kind === kind).length,
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
      cell: (n) => n.source,
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

// What a rejected candidate would save if it could be fused is said softly.
function would(text, group) {
  return group.kind === "fuse"
    ? text
    : el("span", { class: "would", title: "if it could be fused" }, text);
}

function amount(saved, most, group) {
  const fill = el("i", { style: { width: `${(100 * Math.max(saved, 0)) / most}%` } });
  if (group.kind === "fuse") fill.style.background = groupPaint(group.index);
  return el("span", { class: "within" }, fill, would(bytes(saved), group));
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
