// Puts the page together.

import { createDetails } from "./details.js";
import { byId } from "./dom.js";
import { plural } from "./format.js";
import { createGraph } from "./graph.js";
import { chosenOf, createLaunches, createRejected, createTodo } from "./lists.js";
import { groupText, nodeText, readModel, searcher } from "./model.js";
import { drawOverview } from "./overview.js";
import { createRoofline } from "./roofline.js";
import { createState, selection } from "./state.js";
import { watchTheme } from "./theme.js";

const PAUSE = 80; // milliseconds after the last key before a search runs

function start() {
  const model = readModel();
  const state = createState();
  const canvases = [];
  watchTheme(() => canvases.forEach((redraw) => redraw()));
  createTodo(model, state);
  createRejected(model, state);
  createLaunches(model, state);
  const graph = createGraph(model, state);
  canvases.push(graph.redraw, createRoofline(model, state));
  createDetails(model, state);
  drawOverview(model, state, createSearch(model, state, graph));
  followLinks(model, state);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

// An address that ends in #g1 opens that group, and what is open stands in the address.
function followLinks(model, state) {
  const open = () => {
    const id = decodeURIComponent(location.hash.slice(1));
    const row = model.todo.find((one) => one.id === id);
    const group = model.groups.find((one) => one.id === id);
    if (row) state.set({ selected: chosenOf(row) });
    else if (group) state.set({ selected: selection(group) });
  };
  state.listen((change) => {
    if (!("selected" in change)) return;
    const { group, advice } = change.selected ?? {};
    const id = group?.id ?? advice?.id;
    if (id) history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  });
  addEventListener("hashchange", open);
  open();
}

// Returns what searches for a text as if it had been typed.
function createSearch(model, state, graph) {
  const field = byId("search");
  let waiting = 0;

  function search(query) {
    const fits = searcher(query);
    field.value = query;
    if (!fits) {
      byId("found").textContent = "";
      state.set({ query, found: null, foundGroups: null });
      return;
    }
    const found = new Set(
      model.nodes.filter((node) => fits(nodeText(node))).map((node) => node.index),
    );
    const holds = (group) => group.instances.some((nodes) => nodes.some((i) => found.has(i)));
    const foundGroups = new Set(
      model.groups.filter((group) => fits(groupText(group)) || holds(group)),
    );
    byId("found").textContent =
      `${plural(found.size, "node")}, ${plural(foundGroups.size, "group")}`;
    state.set({ query, found, foundGroups });
  }

  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => search(field.value), PAUSE);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      clearTimeout(waiting);
      if (state.query !== field.value) search(field.value);
      if (state.found) graph.next(state.found);
    } else if (event.key === "Escape") {
      search("");
      field.blur();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
  return search;
}

start();
