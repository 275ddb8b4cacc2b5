// Arithmetic intensity against what is attained, on log axes, below the device's roofs.

import { byId, el } from "./dom.js";
import { bytes, micros, plural, ratio, scaled, times } from "./format.js";
import { isView } from "./model.js";
import { largest, smallest } from "./numbers.js";
import { isSelected, selection } from "./state.js";
import { colours, groupColour } from "./theme.js";
import { createCanvas } from "./viewport.js";

const EDGE = { right: 24, top: 18, bottom: 46 };
const NARROW = 620; // pixels below which labels are short
const NEAR = 14; // pixels within which a point is meant

export function createRoofline(model, state) {
  const canvas = byId("roofline");
  const tip = byId("roofline-tip");
  const points = [...nodePoints(model), ...groupPoints(model)];
  const range = ranges(model, points);
  let current = -1;
  let frame = null;

  const redraw = createCanvas(canvas, (context, width, height) => {
    frame = axes(range, width, height);
    for (const point of points) locate(point, frame, model.roofs);
    drawAxes(context, frame, model.roofs);
    for (const point of points) if (!point.group || point.node) drawNode(context, point, state);
    for (const point of points) if (!point.node) drawGroup(context, point, state);
    if (points[current]) {
      ring(context, points[current]);
      place(points[current]);
    }
  });

  function show(number) {
    current = number;
    const point = points[number];
    tip.hidden = !point;
    byId("roofline-said").textContent = point ? linesOf(point).join("; ") : "";
    if (point) tip.replaceChildren(...linesOf(point).map((line, i) => el(i ? "div" : "b", {}, line)));
    redraw();
  }

  // Beside its point, wherever that is drawn now.
  function place(point) {
    const right = point.px > canvas.clientWidth / 2;
    tip.style.left = right ? "auto" : `${point.px + 14}px`;
    tip.style.right = right ? `${canvas.clientWidth - point.px + 14}px` : "auto";
    tip.style.top = `${Math.max(0, Math.min(point.py - 10, canvas.clientHeight - tip.offsetHeight))}px`;
  }

  function nearest(x, y) {
    let best = -1;
    let least = NEAR;
    points.forEach((point, number) => {
      const far = Math.hypot(point.px - x, point.py - y) - Math.min(point.size, 10) / 2;
      if (far <= least) [best, least] = [number, far];
    });
    return best;
  }

  function open() {
    const point = points[current];
    if (point) state.set({ selected: point.node ? { node: point.node } : selection(point.group) });
  }

  const at = (event) => [event.offsetX, event.offsetY];
  canvas.addEventListener("pointermove", (event) => {
    const number = nearest(...at(event));
    if (number !== current) show(number);
  });
  canvas.addEventListener("pointerleave", () => show(-1));
  canvas.addEventListener("click", (event) => {
    show(nearest(...at(event)));
    open();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) show((current + step + points.length) % points.length);
    else if (event.key === "Enter") open();
    else if (event.key === "Escape") show(-1);
    else return;
    event.preventDefault();
  });
  state.listen(redraw);
  return redraw;
}

// Launches at the same place are one point.
function nodePoints(model) {
  const found = new Map();
  for (const node of model.nodes) {
    if (isView(node) || !node.us || !node.bytes) continue;
    const key = `${node.short} ${node.flops} ${node.bytes} ${node.us} ${node.group?.index}`;
    const point = found.get(key);
    if (point) {
      point.nodes.push(node);
    } else {
      const { flops, us } = node;
      found.set(key, {
        node,
        nodes: [node],
        group: node.group,
        x: flops / node.bytes,
        y: rate(flops, us),
        bytes: node.bytes,
        us,
      });
    }
  }
  const points = [...found.values()];
  const most = largest(
    points.map((point) => point.us * point.nodes.length),
    1e-9,
  );
  for (const point of points)
    point.size = 5 + 15 * Math.sqrt((point.us * point.nodes.length) / most);
  return points.sort((a, b) => a.x - b.x);
}

// A group as it is and as it would be; where it was measured, as it is then.
function groupPoints(model) {
  return model.accepted.map((group) => ({
    group,
    x: group.flops / group.fusedBytes,
    y: rate(group.flops, group.fusedUs),
    bytes: group.fusedBytes,
    us: group.fusedUs,
    before: {
      x: group.flops / group.unfusedBytes,
      y: rate(group.flops, group.unfusedUs),
      bytes: group.unfusedBytes,
      us: group.unfusedUs,
    },
    measured: group.measured?.us
      ? {
          x: group.flops / group.fusedBytes,
          y: rate(group.flops, group.measured.us),
          bytes: group.fusedBytes,
          us: group.measured.us,
        }
      : null,
    size: 14,
  }));
}

function rate(flops, us) {
  return flops / (us * 1e-6);
}

function ranges(model, points) {
  const all = points
    .flatMap((point) => [point, point.before ?? point])
    .filter((point) => point.x > 0);
  const ridges = Object.values(model.roofs.peaks).map((peak) => peak / model.roofs.datasheet);
  const xs = [...all.map((point) => point.x), ...ridges, 0.1];
  const ys = [...all.map((point) => point.y), ...Object.values(model.roofs.peaks)];
  const down = (value) => Math.floor(Math.log10(value) - 0.1);
  const up = (value) => Math.ceil(Math.log10(value) + 0.25);
  const [x0, x1] = [down(smallest(xs)), up(largest(xs))];
  return {
    x0,
    x1,
    y0: down(smallest(ys, 10 ** x0 * model.roofs.datasheet)),
    y1: up(largest(ys, 1)),
  };
}

function axes({ x0, x1, y0, y1 }, width, height) {
  const narrow = width < NARROW;
  const gutter = narrow ? 48 : 84; // left of the axis, for launches without FLOPs
  const left = (narrow ? 44 : 104) + gutter;
  const w = Math.max(10, width - left - EDGE.right);
  const h = Math.max(10, height - EDGE.top - EDGE.bottom);
  return {
    x0,
    x1,
    y0,
    y1,
    left,
    gutter,
    narrow,
    step: Math.ceil((36 * (x1 - x0)) / w), // powers of ten from label to label
    right: left + w,
    bottom: EDGE.top + h,
    x: (value) => left + ((Math.log10(value) - x0) / (x1 - x0)) * w,
    y: (value) => EDGE.top + h - ((Math.log10(value) - y0) / (y1 - y0)) * h,
  };
}

// A launch without FLOPs has no place on a log axis: it stands left of it, as far below the roof
// of the memory as its bytes a second are below the bandwidth.
function locate(point, frame, roofs) {
  Object.assign(point, spot(point, frame, roofs));
  if (point.before) Object.assign(point.before, spot(point.before, frame, roofs));
  if (point.measured) Object.assign(point.measured, spot(point.measured, frame, roofs));
}

function spot({ x, y, bytes: moved, us }, frame, roofs) {
  if (x > 0) return { px: frame.x(x), py: frame.y(y) };
  const share = moved / (us * 1e-6) / roofs.datasheet;
  const py = frame.y(10 ** frame.x0 * roofs.datasheet * share);
  return { px: frame.left - frame.gutter / 2, py: Math.min(py, frame.bottom) };
}

function drawAxes(context, frame, roofs) {
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 1;
  grid(context, frame);
  context.save();
  context.beginPath();
  context.rect(
    frame.left - frame.gutter,
    EDGE.top,
    frame.right - frame.left + frame.gutter,
    frame.bottom - EDGE.top,
  );
  context.clip();
  const peaks = Object.entries(roofs.peaks).sort((a, b) => b[1] - a[1]);
  const highest = peaks[0]?.[1] ?? 10 ** frame.y1;
  diagonal(context, frame, roofs.datasheet, highest, colours.ink, []);
  diagonal(context, frame, roofs.bandwidth, highest, colours.muted, [5, 4]);
  for (const [, peak] of peaks) roof(context, frame, peak, roofs.datasheet);
  context.restore();
  roofLabels(context, frame, peaks, roofs);
}

function grid(context, frame) {
  context.strokeStyle = colours.line;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (let power = frame.x0; power <= frame.x1; power++) {
    line(context, frame.x(10 ** power), EDGE.top, frame.x(10 ** power), frame.bottom);
    if (power % frame.step === 0 && !(frame.narrow && power === frame.x0))
      context.fillText(String(Number(`1e${power}`)), frame.x(10 ** power), frame.bottom + 6);
  }
  context.fillText("no FLOPs", frame.left - frame.gutter / 2, frame.bottom + 6);
  context.fillText(
    frame.narrow ? "FLOP/B; upwards FLOP/s" : "arithmetic intensity, FLOP/B",
    (frame.left + frame.right) / 2,
    frame.bottom + 24,
  );
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let power = frame.y0; power <= frame.y1; power++) {
    line(
      context,
      frame.left - frame.gutter,
      frame.y(10 ** power),
      frame.right,
      frame.y(10 ** power),
    );
    context.fillText(
      scaled(10 ** power, frame.narrow ? "" : "FLOP/s"),
      frame.left - frame.gutter - 6,
      frame.y(10 ** power),
    );
  }
}

function diagonal(context, frame, bandwidth, peak, colour, dash) {
  const start = 10 ** frame.x0;
  context.strokeStyle = colour;
  context.setLineDash(dash);
  line(context, frame.left, frame.y(start * bandwidth), frame.x(peak / bandwidth), frame.y(peak));
  line(
    context,
    frame.left - frame.gutter,
    frame.y(start * bandwidth),
    frame.left,
    frame.y(start * bandwidth),
  );
  context.setLineDash([]);
}

function roof(context, frame, peak, bandwidth) {
  const ridge = frame.x(peak / bandwidth);
  context.strokeStyle = colours.ink;
  line(context, ridge, frame.y(peak), frame.right, frame.y(peak));
  context.strokeStyle = colours.muted;
  context.setLineDash([2, 4]);
  line(context, ridge, frame.y(peak), ridge, frame.bottom);
  context.setLineDash([]);
}

function roofLabels(context, frame, peaks, roofs) {
  context.textAlign = "right";
  context.textBaseline = "bottom";
  let above = -Infinity;
  for (const [unit, peak] of peaks) {
    const y = Math.max(frame.y(peak) - 3, above + 13);
    const text = `${unit} ${scaled(peak, "FLOP/s")}`;
    context.fillStyle = colours.surface;
    context.fillRect(frame.right - context.measureText(text).width - 3, y - 11, frame.right, 11);
    context.fillStyle = colours.ink;
    context.fillText(text, frame.right, y);
    above = y;
  }
  context.fillStyle = colours.muted;
  context.textAlign = "left";
  peaks.forEach(([unit, peak], i) => {
    const ridge = peak / roofs.datasheet;
    const text = `ridge ${ratio(ridge)} ${unit}`;
    const x = Math.min(frame.x(ridge) + 4, frame.right - context.measureText(text).width);
    context.fillText(text, x, frame.bottom - 4 - 13 * i);
  });
  context.fillStyle = colours.ink;
  context.fillText(
    `${scaled(roofs.datasheet, "B/s")}, copy ${scaled(roofs.bandwidth, "B/s")} (dashed)`,
    frame.left + 6,
    EDGE.top + 14,
  );
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function drawNode(context, point, state) {
  const marked = point.nodes.some((node) => isSelected(state, node));
  const faded = state.found
    ? !point.nodes.some((node) => state.found.has(node.index))
    : state.selected && !marked;
  context.globalAlpha = faded ? 0.12 : 0.75;
  context.fillStyle = point.group ? groupColour(point.group.index) : colours.plain;
  context.strokeStyle = marked ? colours.ink : colours.surface;
  context.lineWidth = marked ? 2 : 1;
  context.beginPath();
  context.arc(point.px, point.py, point.size / 2, 0, 2 * Math.PI);
  context.fill();
  context.stroke();
  context.globalAlpha = 1;
}

function drawGroup(context, point, state) {
  const { before, group, measured } = point;
  const marked = state.selected?.group === group;
  const faded = state.foundGroups ? !state.foundGroups.has(group) : state.selected && !marked;
  const colour = groupColour(group.index);
  context.globalAlpha = faded ? 0.15 : 1;
  context.strokeStyle = colour;
  context.lineWidth = marked ? 2.5 : 1.25;
  line(context, before.px, before.py, point.px, point.py);
  diamond(context, before, 5);
  context.fillStyle = colours.surface;
  context.fill();
  context.stroke();
  diamond(context, point, marked ? 9 : 7);
  context.fillStyle = colour;
  context.fill();
  context.strokeStyle = colours.ink;
  context.stroke();
  if (measured) {
    line(context, measured.px - 8, measured.py, measured.px + 8, measured.py);
  }
  context.globalAlpha = 1;
}

function diamond(context, { px, py }, size) {
  context.beginPath();
  context.moveTo(px, py - size);
  context.lineTo(px + size, py);
  context.lineTo(px, py + size);
  context.lineTo(px - size, py);
  context.closePath();
}

function ring(context, point) {
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  context.beginPath();
  context.arc(point.px, point.py, Math.max(point.size / 2, 7) + 4, 0, 2 * Math.PI);
  context.stroke();
}

function linesOf(point) {
  return point.node ? nodeLines(point) : fusedLines(point.group);
}

function nodeLines({ node, nodes, x, y }) {
  const more = nodes.length > 1 ? ` and ${nodes.length - 1} more like it` : "";
  return [
    `${node.name} (${node.short})${more}`,
    `${node.shape}; ${node.bound}-bound on ${node.unit}`,
    `${ratio(x)} FLOP/B, ${scaled(y, "FLOP/s")}`,
    `${bytes(node.bytes)} in ${micros(node.us)}: ${scaled(node.bytes / (node.us * 1e-6), "B/s")}`,
    node.group ? `in ${node.group.id} ${node.group.name}` : node.reason,
    node.module ? `${node.module}, ${node.source}` : node.source,
  ];
}

function fusedLines(group) {
  return [
    `${group.id} ${group.name}, fused: ${plural(group.instances.length, "instance")}`,
    `${bytes(group.unfusedBytes)} become ${bytes(group.fusedBytes)}`,
    `${micros(group.unfusedUs)} become ${micros(group.fusedUs)}, ${times(group.speedup)} predicted`,
    group.measured?.said ?? "not measured",
  ];
}
