// What the reader has chosen. Every view listens; none tells another what to do.

export function createState() {
  const listeners = [];
  const state = {
    query: "",
    found: null, // the nodes that the search finds, as a Set of positions; null without a search
    foundGroups: null,
    selected: null, // {group}, {advice} or {node}
    set(change) {
      Object.assign(state, change);
      for (const listener of listeners) listener(change);
    },
    listen(listener) {
      listeners.push(listener);
    },
  };
  return state;
}

// Is a node part of what is selected? Without a selection nothing is.
export function isSelected(state, node) {
  const { selected } = state;
  if (!selected) return false;
  return selected.node === node || (selected.group && selected.set.has(node.index));
}

export function selection(group) {
  return { group, set: new Set(group.instances.flat()) };
}
