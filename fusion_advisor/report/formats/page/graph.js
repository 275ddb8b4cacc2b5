// The graph: boxes in layers, coloured by group, with repeated stretches folded.

import { byId } from "./dom.js";
import { bytes, micros, plural } from "./format.js";
import { BOX, layOut } from "./layout.js";
import { largest } from "./numbers.js";
import { colours, groupColour } from "./theme.js";
import { createCanvas, createViewport } from "./viewport.js";

const READABLE = 0.42; // the scale from which boxes have text
const CURVED = 0.18; // the scale from which edges are curves

export function createGraph(model, state) {
  const canvas = byId("graph");
  const unfolded = new Set();
  const heaviest = largest(
    model.nodes.map((node) => node.bytes),
    1,
  );
  let layout = null;
  let current = null; // the box with the keyboard's focus
  let under = null; // the box under the pointer
  let marks = { selected: new Set(), group: false, found: null }; // boxes

  const redraw = createCanvas(canvas, draw);
  const viewport = createViewport(canvas, {
    changed: redraw,
    clicked: click,
    hovered(point) {
      const box = point && hit(point);
      if (box === under) return;
      under = box;
      canvas.style.cursor = box || (point && frameAt(point)) ? "pointer" : "grab";
      say(box ?? current);
      redraw();
    },
  });

  function arrange() {
    const aspect = Math.max(0.6, canvas.clientWidth / Math.max(canvas.clientHeight, 1));
    layout = layOut(model, { views: byId("graph-views").checked, unfolded, aspect });
    current = null;
    mark();
    byId("graph-size").textContent =
      `${plural(layout.boxes.length, "box")} for ${plural(model.nodes.length, "node")}`;
    if (!model.nodes.some((node) => node.inputs.length)) {
      byId("graph-size").textContent += "; the report is of a version that had no edges";
    }
    byId("graph-fold").hidden = !model.repeats.length;
    byId("graph-fold").textContent = unfolded.size
      ? "Fold repeated layers"
      : "Unfold repeated layers";
    viewport.fit(extent(layout));
  }

  function mark() {
    const { selected, found } = state;
    const chosen = selected?.node ? [selected.node.index] : (selected?.set ?? []);
    marks = {
      selected: layout.boxesFor(chosen),
      group: Boolean(selected?.group),
      found: found && layout.boxesFor(found),
    };
  }

  function fold() {
    if (unfolded.size) unfolded.clear();
    else model.repeats.forEach((_, number) => unfolded.add(number));
    arrange();
  }

  function click(point) {
    const box = hit(point);
    const frame = box ? null : frameAt(point);
    if (frame) {
      if (unfolded.has(frame.number)) unfolded.delete(frame.number);
      else unfolded.add(frame.number);
      arrange();
    } else if (box) {
      go(box, false);
      open(box);
    }
  }

  function open(box) {
    state.set({ selected: { node: box.node } });
  }

  function go(box, centre = true) {
    current = box;
    say(box);
    if (centre) viewport.centre(box.px + BOX.width / 2, box.py + BOX.height / 2, 0.7);
    redraw();
  }

  function say(box) {
    byId("graph-said").textContent = box ? sentence(box.node) : "";
  }

  function hit({ x, y }) {
    const found = layout.boxes.find(
      (box) => x >= box.px && x <= box.px + BOX.width && y >= box.py && y <= box.py + BOX.height,
    );
    return found ?? null;
  }

  function frameAt({ x, y }) {
    return (
      layout.frames.find(
        (frame) =>
          x >= frame.x0 - 8 && x <= frame.x1 + 8 && y >= frame.y0 - 24 && y <= frame.y0 - 2,
      ) ?? null
    );
  }

  const beside = (step) =>
    layout.boxes[
      (layout.boxes.indexOf(current) + step + layout.boxes.length) % layout.boxes.length
    ];
  const keys = {
    ArrowDown: () => go(current?.outs[0] ?? beside(1)),
    ArrowUp: () => go(current?.ins[0] ?? beside(-1)),
    ArrowRight: () => go(beside(1)),
    ArrowLeft: () => go(beside(-1)),
    Enter: () => current && open(current),
    "+": () => viewport.zoom(1.25),
    "=": () => viewport.zoom(1.25),
    "-": () => viewport.zoom(0.8),
    0: () => viewport.fit(extent(layout)),
    f: fold,
  };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || !layout.boxes.length) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("graph-in").addEventListener("click", () => viewport.zoom(1.4));
  byId("graph-out").addEventListener("click", () => viewport.zoom(1 / 1.4));
  byId("graph-fit").addEventListener("click", () => viewport.fit(extent(layout)));
  byId("graph-fold").addEventListener("click", fold);
  byId("graph-views").addEventListener("change", arrange);

  function draw(context, width, height) {
    const { scale, x, y } = viewport.view;
    const seen = {
      x0: -x / scale,
      y0: -y / scale,
      x1: (width - x) / scale,
      y1: (height - y) / scale,
    };
    context.save();
    context.translate(x, y);
    context.scale(scale, scale);
    for (const frame of layout.frames)
      if (overlaps(frame, seen)) drawFrame(context, frame, model, scale);
    drawEdges(context, layout, seen, scale, current ?? under);
    for (const box of layout.boxes)
      if (overlaps(extentOf(box), seen))
        drawBox(context, box, marks, { scale, heaviest, current, under });
    context.restore();
  }

  state.listen((change) => {
    mark();
    const [first] = marks.selected;
    if (change.selected?.group && first) go(first);
    redraw();
  });
  arrange();

  return {
    redraw,
    // Shows the next of the nodes that were found; false where none is drawn.
    next(found) {
      const boxes = [...layout.boxesFor(found)];
      if (!boxes.length) return false;
      go(boxes[(boxes.indexOf(current) + 1) % boxes.length]);
      return true;
    },
  };
}

function sentence(node) {
  const where = node.group ? `in ${node.group.id} ${node.group.name}` : node.reason;
  const cost = node.us
    ? `${bytes(node.bytes)}, ${micros(node.us)}, ${node.bound}-bound`
    : "no launch";
  return `${node.name}: ${node.op} ${node.shape}; ${cost}; ${where}${node.module ? `; ${node.module}` : ""}`;
}

function extentOf(box) {
  return { x0: box.px, y0: box.py, x1: box.px + BOX.width, y1: box.py + BOX.height };
}

function extent({ boxes, frames }) {
  const all = [...boxes.map(extentOf), ...frames.map((frame) => ({ ...frame, y0: frame.y0 - 26 }))];
  const whole = { x0: Infinity, y0: Infinity, x1: -Infinity, y1: -Infinity };
  for (const one of all) {
    whole.x0 = Math.min(whole.x0, one.x0);
    whole.y0 = Math.min(whole.y0, one.y0);
    whole.x1 = Math.max(whole.x1, one.x1);
    whole.y1 = Math.max(whole.y1, one.y1);
  }
  return all.length ? whole : { x0: 0, y0: 0, x1: 1, y1: 1 };
}

function overlaps(one, other) {
  return one.x0 < other.x1 && one.x1 > other.x0 && one.y0 - 26 < other.y1 && one.y1 > other.y0;
}

function drawFrame(context, frame, model, scale) {
  const { count, length, label } = model.repeats[frame.number];
  const { x0, y0, x1, y1 } = frame;
  context.fillStyle = colours.raised;
  context.strokeStyle = frame.folded ? colours.muted : colours.line;
  context.lineWidth = 1;
  if (frame.folded) {
    context.strokeRect(x0 - 2, y0 - 30, x1 - x0 + 16, y1 - y0 + 36); // a pile of them
  }
  context.fillRect(x0 - 8, y0 - 24, x1 - x0 + 16, y1 - y0 + 36);
  context.strokeRect(x0 - 8, y0 - 24, x1 - x0 + 16, y1 - y0 + 36);
  if (scale < READABLE / 2) return;
  context.fillStyle = colours.ink;
  context.font = "600 12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  const what = label || `${length} nodes`;
  const text = frame.folded ? `▸ ×${count}  ${what}` : `▾ ${frame.turn + 1} of ${count}  ${what}`;
  context.fillText(fitted(context, text, x1 - x0 + 4), x0 - 2, y0 - 13);
}

function drawEdges(context, { boxes }, seen, scale, focus) {
  context.lineWidth = Math.min(1.2, 0.8 / scale);
  context.strokeStyle = colours.muted;
  context.globalAlpha = 0.55;
  context.beginPath();
  for (const box of boxes)
    for (const to of box.outs) if (inSight(box, to, seen)) trace(context, box, to, scale);
  context.stroke();
  context.globalAlpha = 1;
  if (!focus) return;
  context.strokeStyle = colours.accent;
  context.lineWidth = 2 / Math.max(scale, 0.4);
  context.beginPath();
  for (const to of focus.outs) trace(context, focus, to, scale);
  for (const from of focus.ins) trace(context, from, focus, scale);
  context.stroke();
}

function inSight(from, to, seen) {
  if (Math.max(from.py, to.py) + BOX.height < seen.y0 || Math.min(from.py, to.py) > seen.y1)
    return false;
  return Math.max(from.px, to.px) + BOX.width >= seen.x0 && Math.min(from.px, to.px) <= seen.x1;
}

// Down to the reader; past other boxes in a bow; over to another column from side to side.
function trace(context, from, to, scale) {
  const middle = BOX.width / 2;
  if (from.column !== to.column) {
    const [x0, y0, x1, y1] = [
      from.px + BOX.width,
      from.py + BOX.height / 2,
      to.px,
      to.py + BOX.height / 2,
    ];
    context.moveTo(x0, y0);
    if (scale < CURVED) context.lineTo(x1, y1);
    else context.bezierCurveTo(x0 + 50, y0, x1 - 50, y1, x1, y1);
    return;
  }
  const [x0, y0, x1, y1] = [from.px + middle, from.py + BOX.height, to.px + middle, to.py];
  const layers = to.row - from.row;
  const reach = (y1 - y0) / 3;
  const bow = layers > 1 ? Math.min(30 + 8 * layers, 130) : 0;
  context.moveTo(x0, y0);
  if (scale < CURVED) context.lineTo(x1, y1);
  else context.bezierCurveTo(x0 + bow, y0 + reach, x1 + bow, y1 - reach, x1, y1);
}

function drawBox(context, box, marks, { scale, heaviest, current, under }) {
  const { node, px, py } = box;
  const marked = marks.selected.has(box);
  const faded = marks.found ? !marks.found.has(box) : marks.group && !marked;
  const { width, height } = BOX;
  context.globalAlpha = faded ? 0.25 : 1;
  if (scale < READABLE) return drawSmall(context, box, marked);
  context.fillStyle = colours.surface;
  context.fillRect(px, py, width, height);
  if (node.group) {
    context.fillStyle = groupColour(node.group.index, 0.3);
    context.fillRect(px, py, width, height);
  }
  context.fillStyle = colours[node.bound] ?? colours.plain;
  context.fillRect(px, py, 5, height);
  context.fillStyle = node.group ? groupColour(node.group.index) : colours.plain;
  context.fillRect(px + 5, py + height - 4, (width - 5) * (node.bytes / heaviest), 4);
  context.strokeStyle =
    marked || box === current
      ? colours.ink
      : node.group
        ? groupColour(node.group.index)
        : colours.line;
  context.lineWidth = marked || box === current || box === under ? 2 / Math.max(scale, 0.5) : 1;
  if (marks.found && !faded) context.strokeStyle = colours.match;
  context.strokeRect(px, py, width, height);
  drawText(context, box);
  context.globalAlpha = 1;
}

// Too small to read: the colour alone.
function drawSmall(context, { node, px, py }, marked) {
  context.fillStyle = node.group ? groupColour(node.group.index, marked ? 1 : 0.7) : colours.free;
  context.fillRect(px, py, BOX.width, BOX.height);
  context.globalAlpha = 1;
}

function drawText(context, { node, px, py }) {
  const room = BOX.width - 18;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.font = "600 12px system-ui, sans-serif";
  context.fillStyle = colours.ink;
  const amount = node.bytes ? bytes(node.bytes) : "";
  context.fillText(fitted(context, node.short, room - 7 * amount.length), px + 12, py + 12);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.fillText(fitted(context, node.shape, room), px + 12, py + 26);
  context.textAlign = "right";
  context.fillText(amount, px + BOX.width - 6, py + 12);
}

const widths = new Map();

// Text cut off where the room ends; what was measured once is remembered.
function fitted(context, text, room) {
  const key = `${context.font}|${text}|${Math.round(room)}`;
  let cut = widths.get(key);
  if (cut === undefined) {
    cut = text;
    while (cut.length > 1 && context.measureText(cut).width > room) cut = `${cut.slice(0, -2)}…`;
    widths.set(key, cut);
  }
  return cut;
}
