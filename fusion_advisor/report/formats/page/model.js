// The report's data as objects that refer to each other.

export function readModel() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const groups = data.groups.map((group, index) => ({ ...group, index }));
  const nodes = readNodes(data.nodes, groups);
  const todo = data.todo.map((row) => ({ ...row, group: groups[row.group] ?? null }));
  return { ...data, groups, nodes, todo, accepted: groups.filter((group) => group.kind === "fuse") };
}

function readNodes(columns, groups) {
  const coded = (column, i) => column.values[column.codes[i]];
  const nodes = columns.name.map((name, i) => ({
    index: i,
    name,
    op: coded(columns.op, i),
    short: shortOp(coded(columns.op, i)),
    shape: coded(columns.shape, i),
    bound: coded(columns.bound, i),
    unit: coded(columns.unit, i),
    module: coded(columns.module, i),
    source: coded(columns.source, i),
    reason: coded(columns.reason, i),
    flops: columns.flops[i],
    read: columns.read[i],
    written: columns.written[i],
    bytes: columns.read[i] + columns.written[i],
    us: columns.us[i],
    measured: columns.measured[i] ?? null,
    linked: columns.linked[i] ?? "",
    group: groups[columns.group[i]] ?? null,
    inputs: columns.inputs[i],
    users: [],
  }));
  for (const node of nodes) for (const i of node.inputs) nodes[i].users.push(node.index);
  return nodes;
}

// aten.add.Tensor as people say it: add.
function shortOp(op) {
  const [, name] = op.split(".");
  return (name ?? op).replace(/^_+/, "");
}

export function isView(node) {
  return node.bound === "free";
}

// Words that all have to occur somewhere in what a row says of itself.
export function searcher(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return words.length ? (text) => words.every((word) => text.includes(word)) : null;
}

export function nodeText(node) {
  node.text ??= [
    node.name,
    node.op,
    node.shape,
    node.module,
    node.source,
    node.bound,
    node.reason,
    node.group?.id ?? "",
  ]
    .join(" ")
    .toLowerCase();
  return node.text;
}

export function todoText(row) {
  if (row.group) return groupText(row.group);
  row.text ??= [row.id, row.name, row.action, row.place, ...row.evidence].join(" ").toLowerCase();
  return row.text;
}

export function groupText(group) {
  group.text ??= [
    group.id,
    group.name,
    group.kind,
    group.route,
    group.decided,
    group.layers,
    group.place,
    group.kernel.file,
    ...group.sources.map((line) => `${line.place} ${line.text}`),
  ]
    .join(" ")
    .toLowerCase();
  return group.text;
}
