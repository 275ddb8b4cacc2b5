// The first screen: totals, where the bytes and the time go, what each group takes off.

import { byId, el } from "./dom.js";
import { bytes, micros, percent } from "./format.js";
import { isView } from "./model.js";
import { selection } from "./state.js";
import { groupPaint } from "./theme.js";

const STEPS = 10; // groups with a bar of their own
const PLACES = 9;
const BEYOND = new Set(["matrix products", "attention", "convolutions"]);

export function drawOverview(model, state, search) {
  byId("headline").textContent = model.headline;
  byId("model").textContent = model.model;
  byId("totals").replaceChildren(
    ...model.totals.map(([name, value]) => {
      const [figure, rest] = value.split(/ (?=\()/, 2); // what stands in brackets is said softly
      return el(
        "div",
        {},
        el("dt", {}, name),
        el("dd", {}, figure, rest ? el("small", {}, ` ${rest}`) : null),
      );
    }),
  );
  byId("setting").replaceChildren(...pairs(model.setting));
  byId("about").replaceChildren(...pairs(model.about));
  drawTimes(model);
  drawBottlenecks(model);
  drawWaterfall(model, state);
  drawPlaces(model, search);
  drawBench(model);
}

function pairs(rows) {
  return rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}

function drawBottlenecks(model) {
  const shown = model.bottlenecks.filter(([, , share]) => share > 0);
  const part = ([name, , share]) =>
    el("span", { class: `bound ${name}`, style: { flexGrow: share } });
  const said = ([name, us, share, moved]) =>
    el(
      "li",
      {},
      el("i", { class: `swatch ${name}` }),
      `${name} ${micros(us)}, ${percent(share)}; ${bytes(moved)}`,
    );
  byId("bottlenecks").replaceChildren(
    el("div", { class: "stack", "aria-hidden": "true" }, shown.map(part)),
    el("ul", { class: "legend" }, shown.map(said)),
  );
}

// The step today and with the groups fused, on one scale: what is beyond fusion stays as it is.
function drawTimes(model) {
  const kind = (name) => `part-${name.replace(/ /g, "-")}`;
  const whole = model.parts.reduce((sum, [, before]) => sum + before, 0) || 1;
  const row = (name, column) => {
    const total = model.parts.reduce((sum, part) => sum + part[column], 0);
    const fills = model.parts.map((part) =>
      el("span", {
        class: kind(part[0]),
        title: `${part[0]} ${micros(part[column])}`,
        style: { width: `${(100 * part[column]) / whole}%` },
      }),
    );
    return el(
      "li",
      {},
      el("span", { class: "name" }, name),
      el("span", { class: "track parts" }, fills),
      el("span", { class: "amount" }, micros(total)),
      el("span", { class: "share" }, percent(total / whole)),
    );
  };
  byId("times").replaceChildren(row("today", 1), row("groups fused", 2));
  byId("times-key").replaceChildren(
    ...model.parts.map(([name, before, after]) =>
      el(
        "li",
        {},
        el("i", { class: `swatch ${kind(name)}` }),
        before === after
          ? `${name} ${micros(before)}`
          : `${name} ${micros(before)} → ${micros(after)}`,
        BEYOND.has(name) ? ", beyond fusion" : "",
      ),
    ),
  );
}

// Bars from the bytes of today to those after fusing. Each group's is a button.
function drawWaterfall(model, state) {
  const { before, after, saveable, steps } = model.traffic;
  const rows = [bar("HBM bytes today", before, { left: 0, size: before }, before, "total")];
  let rest = before;
  for (const step of steps.slice(0, STEPS)) {
    rest -= step.bytes;
    rows.push(stepOf(model.groups[step.group], step.bytes, rest, before, state));
  }
  const others = steps.slice(STEPS);
  if (others.length) {
    const saved = others.reduce((sum, step) => sum + step.bytes, 0);
    rest -= saved;
    rows.push(bar(`${others.length} more`, saved, { left: rest, size: saved }, before, "saved"));
  }
  rows.push(bar("after fusing", after, { left: 0, size: after }, before, "total"));
  const missed = saveable - (before - after);
  if (missed > 0.001 * before) {
    const left = Math.max(0, after - missed);
    rows.push(bar("not reached", missed, { left, size: missed }, before, "missed"));
  }
  byId("waterfall").replaceChildren(...rows);
}

function stepOf(group, saved, rest, before, state) {
  const count = group.instances.length;
  const name = `${group.id} ${group.name}${count > 1 ? ` ×${count}` : ""}`;
  const row = bar(
    name,
    saved,
    { left: rest, size: saved },
    before,
    "saved",
    groupPaint(group.index),
  );
  const button = el("button", {
    type: "button",
    class: "step",
    onclick: () => state.set({ selected: selection(group) }),
  });
  button.append(...row.childNodes);
  return el("li", {}, button);
}

function bar(name, amount, { left, size }, whole, kind, colour = null) {
  const share = (part) => `${(100 * part) / (whole || 1)}%`;
  const sign = kind === "saved" ? "−" : "";
  const fill = el("i", { class: kind, style: { left: share(left), width: share(size) } });
  if (colour) fill.style.background = colour;
  return el(
    "li",
    {},
    el("span", { class: "name" }, name),
    el("span", { class: "track" }, fill),
    el("span", { class: "amount" }, sign + bytes(amount)),
    el("span", { class: "share" }, percent(amount / (whole || 1))),
  );
}

// Today's bytes by what moves them; the full part of a bar is in a group.
function drawPlaces(model, search) {
  const kinds = {
    op: (node) => node.short,
    module: (node) => node.module.replace(/(?<![^._])\d+(?![^._])/g, "*") || "(the model itself)",
    line: (node) => node.source || "(no source)",
  };
  const choice = byId("places-by");
  const draw = () => {
    const sums = new Map();
    for (const node of model.nodes) {
      if (isView(node)) continue;
      const key = kinds[choice.value](node);
      const sum = sums.get(key) ?? { key, bytes: 0, grouped: 0, us: 0 };
      sum.bytes += node.bytes;
      sum.us += node.us;
      if (node.group) sum.grouped += node.bytes;
      sums.set(key, sum);
    }
    const ranked = [...sums.values()].sort((a, b) => b.bytes - a.bytes);
    const whole = model.traffic.before || 1;
    const most = ranked[0]?.bytes || 1;
    const rows = ranked.slice(0, PLACES).map((sum) => {
      const button = el(
        "button",
        {
          type: "button",
          class: "step",
          title: `${sum.key}: ${micros(sum.us)}`,
          onclick: () => search(sum.key.replace(/\*|\(.*\)/g, " ").trim()),
        },
        el("span", { class: "name" }, sum.key),
        el(
          "span",
          { class: "track" },
          part("grouped", 0, sum.grouped / most),
          part("alone", sum.grouped / most, (sum.bytes - sum.grouped) / most),
        ),
        el("span", { class: "amount" }, bytes(sum.bytes)),
        el("span", { class: "share" }, percent(sum.bytes / whole)),
      );
      return el("li", {}, button);
    });
    byId("places").replaceChildren(...rows);
  };
  choice.addEventListener("change", draw);
  draw();
}

function part(kind, left, size) {
  if (!size) return null;
  return el("i", { class: kind, style: { left: `${100 * left}%`, width: `${100 * size}%` } });
}

function drawBench(model) {
  const { bench } = model;
  byId("bench-section").hidden = !bench;
  if (!bench) return;
  byId("bench").replaceChildren(
    el("p", {}, el("b", {}, "The model: "), bench.said),
    waysTable(bench.ways),
    el(
      "p",
      { class: "muted" },
      `On ${bench.machine}. Cold L2, medians with quartiles.${bench.complete ? "" : " Interrupted: what is finished is here."}`,
    ),
  );
}

export function waysTable(ways) {
  const head = ["way", "time", "of copy", ""].map((name) => el("th", { scope: "col" }, name));
  const rows = ways.map((way) =>
    el(
      "tr",
      {},
      way.map((text) => el("td", {}, text)),
    ),
  );
  return el(
    "table",
    { class: "plain" },
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, rows),
  );
}
