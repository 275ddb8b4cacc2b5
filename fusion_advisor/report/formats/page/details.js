// The panel at the side: all that is known of one group or one node.

import { byId, el } from "./dom.js";
import { bytes, micros, percent, plural, ratio, scaled, shortPlace, times } from "./format.js";
import { waysTable } from "./overview.js";
import { selection } from "./state.js";
import { groupPaint } from "./theme.js";

const MARKS = { holds: "✓", fails: "✕", unknown: "?" };
const INSTANCES = 40; // that are listed by name

export function createDetails(model, state) {
  const panel = byId("details");
  let came = null; // what had the focus before

  function close() {
    panel.hidden = true;
    document.body.classList.remove("with-details");
    state.set({ selected: null });
    if (came?.isConnected) came.focus({ preventScroll: true });
    came = null;
  }

  state.listen((change) => {
    if (!("selected" in change) || !change.selected) return;
    const { group, advice, node } = change.selected;
    if (!panel.contains(document.activeElement)) came = document.activeElement;
    const [titled, parts] = group
      ? [groupTitle(group), groupParts(group, model, state)]
      : advice
        ? [[`${advice.id} ${advice.name}`], adviceParts(advice)]
        : [[node.name], nodeParts(node, model, state)];
    const title = el("h2", { tabindex: "-1" }, ...titled);
    const button = el(
      "button",
      { type: "button", class: "close", "aria-label": "Close", onclick: close },
      "✕",
    );
    panel.replaceChildren(button, title, ...parts);
    panel.hidden = false;
    panel.scrollTop = 0;
    document.body.classList.add("with-details");
    title.focus({ preventScroll: true });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !panel.hidden) close();
  });
}

function groupTitle(group) {
  const swatch = el("i", { class: "swatch" });
  swatch.style.background = group.kind === "fuse" ? groupPaint(group.index) : "var(--plain)";
  return [
    swatch,
    `${group.id} ${group.name}`,
    el("span", { class: `verdict ${group.kind}` }, group.kind === "fuse" ? "fuse" : "rejected"),
  ];
}

function adviceParts(advice) {
  return [
    el("p", {}, advice.action),
    advice.savedUs
      ? el("p", {}, `Saves up to ${micros(advice.savedUs)}, ${percent(advice.share)} of the time.`)
      : null,
    advice.evidence.length ? el("h3", {}, "What it stands on") : null,
    el(
      "ul",
      {},
      advice.evidence.map((fact) => el("li", {}, fact)),
    ),
    el("h3", {}, "These lines"),
    lines(advice.sources),
  ].filter(Boolean);
}

function groupParts(group, model, state) {
  const parts = [
    el("p", {}, group.action),
    group.code ? source(group.code) : null,
    facts([
      ["where", `${group.short}${group.layers ? `, ${group.layers}` : ""}`],
      ["decided by", group.decided],
      [
        group.kind === "fuse" ? "saves" : "",
        `${micros(group.savedUs)}, ${percent(group.share)} of the time, in ${plural(group.instances.length, "instance")}`,
      ],
      [
        "HBM, one instance",
        `${bytes(group.unfusedBytes)} become ${bytes(group.fusedBytes)}, ${times(group.ratio)} fewer`,
      ],
      ["launches", `${group.launches} become ${group.left}`],
      [
        "on chip",
        group.onChip === null
          ? "no plan, so no tile"
          : `${bytes(group.onChip)} of ${bytes(group.budget)}`,
      ],
      ["fixable", group.fixable],
      ["cut from", group.parent ?? ""],
    ]),
    el("h3", {}, "Predicted and measured"),
    ...timing(group),
    el("h3", {}, "Gates"),
    gates(group),
    el("h3", {}, group.kind === "fuse" ? "Replaces these lines" : "These lines"),
    lines(group.sources),
    ...instances(group, model, state),
  ];
  if (group.kind === "fuse") parts.push(...kernel(group));
  return parts.filter(Boolean);
}

// One bar for eager and one for the kernel, on the same scale, as predicted and as measured.
function timing(group) {
  const [low, high] = group.interval;
  const rows = [
    ["eager, predicted", group.unfusedUs],
    ...(group.profiledUs === null ? [] : [["in the profile", group.profiledUs]]),
    ["kernel, predicted", group.fusedUs],
  ];
  if (group.measured?.eagerUs) rows.push(["eager, measured", group.measured.eagerUs]);
  if (group.measured?.us) rows.push(["kernel, measured", group.measured.us]);
  const most = Math.max(...rows.map(([, us]) => us));
  const bars = rows.map(([name, us]) =>
    el(
      "li",
      {},
      el("span", { class: "name" }, name),
      el(
        "span",
        { class: "track" },
        el("i", {
          class: name.startsWith("eager") ? "alone" : "grouped",
          style: { width: `${(100 * us) / most}%` },
        }),
      ),
      el("span", { class: "amount" }, micros(us)),
    ),
  );
  return [
    el("ul", { class: "bars" }, bars),
    el(
      "p",
      {},
      `${times(group.speedup)} predicted (${low.toFixed(2)} to ${high.toFixed(2)} for nine of ten kernels). `,
      group.measured?.said ?? "Not measured: fusion-advisor bench does that on a GPU.",
    ),
    group.disagreement ? el("p", { class: "note" }, `${group.disagreement}.`) : null,
    group.measured ? waysTable(group.measured.ways) : null,
  ];
}

function gates(group) {
  const head = ["", "gate", "measured", "needs", "why"].map((name) =>
    el("th", { scope: "col" }, name),
  );
  const rows = group.gates.map((gate) =>
    el(
      "tr",
      { class: gate.outcome },
      el(
        "td",
        { title: gate.outcome },
        el("span", { class: "mark", "aria-hidden": "true" }, MARKS[gate.outcome] ?? "·"),
        el("span", { class: "unseen" }, gate.outcome),
      ),
      el("td", {}, `${gate.code} ${gate.name}`),
      el("td", { class: "numeric" }, gate.measured),
      el("td", { class: "numeric" }, gate.needs),
      el("td", {}, gate.why),
    ),
  );
  return el(
    "table",
    { class: "plain gates" },
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, rows),
  );
}

function lines(sources) {
  if (!sources.length) return el("p", {}, "No source is known.");
  return el(
    "ul",
    { class: "lines" },
    sources.map((line) =>
      el(
        "li",
        {},
        el("code", { class: "place", title: line.place }, line.short),
        el("code", {}, line.text),
      ),
    ),
  );
}

function instances(group, model, state) {
  const names = group.instances.slice(0, INSTANCES).map((nodes) => {
    const links = nodes.map((i) => nodeLink(model.nodes[i], state));
    return el(
      "li",
      {},
      links.flatMap((link) => [link, " "]),
    );
  });
  const more = group.instances.length - names.length;
  const list = el("ol", { class: "instances" }, names);
  return [
    el(
      "details",
      {},
      el("summary", {}, plural(group.instances.length, "instance")),
      list,
      more > 0 ? el("p", {}, `and ${more} more in the JSON report`) : null,
    ),
  ];
}

function kernel(group) {
  const { kernel: row } = group;
  const parts = [
    el("h3", {}, "Kernel"),
    el("p", {}, `${row.file}${row.schedule ? ` (schedule ${row.schedule})` : ""}: ${row.said}`),
  ];
  if (row.text)
    parts.push(el("details", { open: true }, el("summary", {}, "source"), source(row.text)));
  else if (row.status !== "none")
    parts.push(
      el("p", { class: "muted" }, "Its source was not beside the report when this page was made."),
    );
  return parts;
}

const TOKEN =
  /("""[\s\S]*?"""|"[^"\n]*"|'[^'\n]*')|(#[^\n]*)|\b(def|return|import|from|as|if|else|elif|for|while|in|not|and|or|is|None|True|False|class|with|raise|try|except|lambda|pass)\b|(@[\w.]+)/g;

// Python with its strings, comments and keywords set apart.
function source(text) {
  const code = el("code");
  let last = 0;
  for (const match of text.matchAll(TOKEN)) {
    const kind = ["string", "comment", "keyword", "decorator"][match.slice(1).findIndex(Boolean)];
    code.append(text.slice(last, match.index), el("span", { class: kind }, match[0]));
    last = match.index + match[0].length;
  }
  code.append(text.slice(last));
  return el("pre", { tabindex: "0" }, code);
}

function nodeParts(node, model, state) {
  const rate = node.us
    ? `${scaled(node.bytes / (node.us * 1e-6), "B/s")}, ${scaled(node.flops / (node.us * 1e-6), "FLOP/s")}`
    : "";
  const links = (numbers) =>
    numbers.slice(0, INSTANCES).flatMap((i) => [nodeLink(model.nodes[i], state), " "]);
  return [
    facts([
      ["op", node.op],
      ["result", node.shape],
      ["module", node.module],
      ["source", node.source ? el("span", { title: node.source }, shortPlace(node.source)) : ""],
      ["HBM", node.us ? `${bytes(node.read)} read, ${bytes(node.written)} written` : "no launch"],
      [
        "FLOPs",
        node.flops
          ? `${scaled(node.flops, "FLOP")}, ${ratio(node.flops / node.bytes)} FLOP/B on ${node.unit}`
          : "",
      ],
      ["time", node.us ? `${micros(node.us)} predicted, ${node.bound}-bound` : ""],
      ["measured", node.linked],
      ["attains", rate],
      ["not in a group", node.reason],
    ]),
    node.group ? el("p", {}, "In ", groupLink(node.group, state)) : null,
    node.inputs.length ? el("p", {}, "Reads ", ...links(node.inputs)) : null,
    node.users.length ? el("p", {}, "Read by ", ...links(node.users)) : null,
  ].filter(Boolean);
}

function nodeLink(node, state) {
  return el(
    "button",
    { type: "button", class: "link", onclick: () => state.set({ selected: { node } }) },
    node.name,
  );
}

function groupLink(group, state) {
  return el(
    "button",
    { type: "button", class: "link", onclick: () => state.set({ selected: selection(group) }) },
    `${group.id} ${group.name}`,
  );
}

function facts(rows) {
  const known = rows.filter(([name, value]) => name && value);
  return el(
    "dl",
    { class: "facts" },
    known.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}
