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
  const stretches = stretchesOf(model, unfolded);
  const levels = layers(boxes, stretches);
  order(levels);
  const columns = columnsOf(levels, aspect);
  place(columns);
  const boxFor = (index) => boxOf.get(stands[index]) ?? null;
  const boxesFor = (indices) => new Set(Array.from(indices, boxFor).filter(Boolean));
  return { boxes, boxesFor, frames: frames(boxes, stretches) };
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

// For each node the stretch that it is in: a folded repeat, one turn of a repeat that is not, or
// null between them.
function stretchesOf(model, unfolded) {
  const of = new Array(model.nodes.length).fill(null);
  model.repeats.forEach(({ start, length, count }, number) => {
    const folded = !unfolded.has(number);
    let stretch = null;
    for (let i = 0; i < length * count; i++) {
      const turn = Math.floor(i / length);
      if (i === 0 || (!folded && i % length === 0)) stretch = { number, turn, folded };
      of[start + i] = stretch;
    }
  });
  return of;
}

// The longest path from the start; what reads nothing stands right above its first reader. What
// comes after a stretch stands below all of it, so that its frame holds nothing else.
function layers(boxes, stretches) {
  let stretch = null;
  let within = { floor: 0, deepest: -1 }; // the layers from one border of a stretch to the next
  for (const box of boxes) {
    if (stretches[box.node.index] !== stretch) {
      stretch = stretches[box.node.index];
      within = { floor: within.deepest + 1, deepest: within.deepest };
    }
    box.depth = largest(
      box.ins.map((one) => one.depth + 1),
      within.floor,
    );
    box.within = within;
    within.deepest = Math.max(within.deepest, box.depth);
  }
  for (const box of boxes) {
    if (box.ins.length || !box.outs.length) continue;
    const above = smallest(box.outs.map((one) => one.depth)) - 1;
    box.depth = Math.max(box.within.floor, Math.min(box.within.deepest, above));
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

// A frame a column around each stretch.
function frames(boxes, stretches) {
  const found = new Map();
  for (const box of boxes) {
    const stretch = stretches[box.node.index];
    if (!stretch) continue;
    const columns = found.get(stretch) ?? new Map();
    found.set(stretch, columns);
    const frame = columns.get(box.column) ?? {
      ...stretch,
      x0: Infinity,
      y0: Infinity,
      x1: -Infinity,
      y1: -Infinity,
    };
    frame.x0 = Math.min(frame.x0, box.px);
    frame.y0 = Math.min(frame.y0, box.py);
    frame.x1 = Math.max(frame.x1, box.px + BOX.width);
    frame.y1 = Math.max(frame.y1, box.py + BOX.height);
    columns.set(box.column, frame);
  }
  return [...found.values()].flatMap((columns) => [...columns.values()]);
}
