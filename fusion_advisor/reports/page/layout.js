// The graph in layers: what reads stands below what it reads. Repeated stretches are drawn once.

import { isView } from "./model.js";
import { largest, smallest } from "./numbers.js";

export const BOX = { width: 168, height: 38, gapX: 22, gapY: 34 };

const WIDEST = 10; // boxes in a row
const SWEEPS = 6;
const COLUMN_GAP = 70;

// What is drawn of the model: boxes with positions, edges between them, frames around repeats.
export function layOut(model, { views, unfolded, aspect }) {
  const { shown, stands, edges } = visible(model, views, unfolded);
  const boxes = shown.map((index) => ({
    node: model.nodes[index],
    ins: [],
    outs: [],
    depth: 0,
    x: 0,
    y: 0,
  }));
  const boxOf = new Map(boxes.map((box) => [box.node.index, box]));
  for (const [from, to] of edges) {
    boxOf.get(from).outs.push(boxOf.get(to));
    boxOf.get(to).ins.push(boxOf.get(from));
  }
  const levels = layers(boxes);
  order(levels);
  const columns = columnsOf(levels, aspect);
  place(columns);
  const boxFor = (index) => boxOf.get(stands[index]) ?? null;
  const boxesFor = (indices) => new Set(Array.from(indices, boxFor).filter(Boolean));
  return { boxes, boxesFor, frames: frames(model, boxes, unfolded) };
}

// Which nodes are drawn, which of them each node is stood for by, and the edges between those. A
// folded stretch has the edges of its first turn, and shows a turn that has others on both sides.
function visible(model, views, unfolded) {
  const { nodes } = model;
  const firsts = Int32Array.from(nodes, (_, i) => i);
  const stands = Int32Array.from(nodes, (_, i) => i);
  model.repeats.forEach(({ start, length, count }, number) => {
    if (unfolded.has(number)) return;
    const typical = count > 2 ? start + length : start;
    for (let i = 0; i < length * count; i++) {
      firsts[start + i] = start + (i % length);
      stands[start + i] = typical + (i % length);
    }
  });
  const shown = [];
  const edges = [];
  const origins = new Array(nodes.length); // of each node, the boxes that its result comes from
  for (const node of nodes) {
    const i = node.index;
    if (firsts[i] !== i) {
      origins[i] = origins[firsts[i]];
      continue;
    }
    const from = new Set();
    for (const input of node.inputs) if (input < i) for (const one of origins[input]) from.add(one);
    if (!views && isView(node)) {
      origins[i] = from;
      continue;
    }
    origins[i] = new Set([stands[i]]);
    shown.push(stands[i]);
    for (const one of from) edges.push([one, stands[i]]);
  }
  return { shown, stands, edges };
}

// The longest path from the start; what reads nothing stands right above its first reader.
function layers(boxes) {
  for (const box of boxes)
    for (const one of box.ins) box.depth = Math.max(box.depth, one.depth + 1);
  for (const box of boxes) {
    if (!box.ins.length && box.outs.length) {
      box.depth = Math.max(0, smallest(box.outs.map((one) => one.depth)) - 1);
    }
  }
  const levels = [];
  for (const box of boxes) (levels[box.depth] ??= []).push(box);
  return levels.filter(Boolean);
}

// Each box as near as it can be to the middle of what it reads, then of what reads it.
function order(levels) {
  levels.forEach((level, row) =>
    level.forEach((box, i) => Object.assign(box, { row, x: i - (level.length - 1) / 2 })),
  );
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (const level of down ? levels : levels.toReversed()) {
      if (level.length <= WIDEST) settle(level, down ? "ins" : "outs");
    }
  }
}

function settle(level, side) {
  for (const box of level) {
    const near = box[side];
    box.wish = near.length ? near.reduce((sum, one) => sum + one.x, 0) / near.length : box.x;
  }
  level.sort((a, b) => a.wish - b.wish);
  let last = -Infinity;
  for (const box of level) last = box.x = Math.max(box.wish, last + 1);
  const drift = level.reduce((sum, box) => sum + box.wish - box.x, 0) / level.length;
  for (const box of level) box.x += drift;
}

// The layers are set in columns, as text is, so that the whole fills a screen of this aspect.
function columnsOf(levels, aspect) {
  const crossing = new Array(levels.length).fill(0); // edges between a layer and the one below
  for (const level of levels) {
    for (const box of level)
      for (const to of box.outs)
        for (let r = box.row; r < to.row && r < box.row + 40; r++) crossing[r]++;
  }
  let best = null;
  for (let rows = 8; ; rows = Math.ceil(rows * 1.2)) {
    const columns = split(levels, crossing, rows);
    const width = columns.reduce((sum, column) => sum + column.width + COLUMN_GAP, 0);
    const height = largest(columns.map((column) => column.height));
    const size = Math.max(width / aspect, height);
    if (!best || size < best.size) best = { columns, size };
    if (columns.length <= 1) return best.columns;
  }
}

function split(levels, crossing, rows) {
  const columns = [];
  let start = 0;
  while (start < levels.length) {
    let end = start;
    let used = 0;
    while (end < levels.length && used < rows) used += rowsOf(levels[end++]);
    if (end < levels.length)
      end = quietest(crossing, Math.max(start + 1, end - Math.ceil(rows / 4)), end);
    columns.push(column(levels.slice(start, end)));
    start = end;
  }
  return columns;
}

// Where the fewest edges are cut, late rather than early.
function quietest(crossing, from, to) {
  let best = to;
  for (let end = to; end >= from; end--) if (crossing[end - 1] < crossing[best - 1]) best = end;
  return best;
}

function rowsOf(level) {
  return level.length <= WIDEST ? 1 : Math.ceil(level.length / WIDEST);
}

function column(levels) {
  let low = Infinity;
  let high = -Infinity;
  let rows = 0;
  for (const level of levels) {
    const wide = level.length > WIDEST;
    for (const box of level) {
      low = Math.min(low, wide ? 0 : box.x);
      high = Math.max(high, wide ? WIDEST - 1 : box.x);
    }
    rows += rowsOf(level);
  }
  const width = (high - low) * (BOX.width + BOX.gapX) + BOX.width;
  return { levels, low, width, height: rows * (BOX.height + BOX.gapY) };
}

function place(columns) {
  let left = 0;
  columns.forEach((column, number) => {
    let row = 0;
    for (const level of column.levels) {
      level.forEach((box, i) => {
        const wide = level.length > WIDEST;
        const x = wide ? column.low + (i % WIDEST) : box.x;
        box.px = left + (x - column.low) * (BOX.width + BOX.gapX);
        box.py = (row + (wide ? Math.floor(i / WIDEST) : 0)) * (BOX.height + BOX.gapY);
        box.column = number;
      });
      row += rowsOf(level);
    }
    left += column.width + COLUMN_GAP;
  });
}

// A frame a column around a folded stretch, or around each stretch that is not folded.
function frames(model, boxes, unfolded) {
  const found = new Map();
  for (const box of boxes) {
    const number = model.repeats.findIndex(
      ({ start, length, count }) =>
        box.node.index >= start && box.node.index < start + length * count,
    );
    if (number < 0) continue;
    const { start, length } = model.repeats[number];
    const folded = !unfolded.has(number);
    const turn = Math.floor((box.node.index - start) / length);
    const key = `${number} ${turn} ${box.column}`;
    const frame = found.get(key) ?? {
      number,
      turn,
      folded,
      x0: Infinity,
      y0: Infinity,
      x1: -Infinity,
      y1: -Infinity,
    };
    frame.x0 = Math.min(frame.x0, box.px);
    frame.y0 = Math.min(frame.y0, box.py);
    frame.x1 = Math.max(frame.x1, box.px + BOX.width);
    frame.y1 = Math.max(frame.y1, box.py + BOX.height);
    found.set(key, frame);
  }
  return [...found.values()];
}
