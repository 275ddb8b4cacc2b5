// A table that sorts, filters and keeps only the rows in sight in the document.

import { eachFrame, el } from "./dom.js";

const ROW = 30; // pixels; the style sheet has the same
const SPARE = 8; // rows above and below those in sight

// `columns` have {key, label, value, cell, numeric, width, hint, extra}: `value` sorts, and is shown
// where there is no `cell`; `extra` ones only where there is room.
// `open` is called with a row that is clicked or entered. Returns {show, reveal}.
export function createTable({ host, label, columns, open, sorted = null }) {
  let all = [];
  let rows = [];
  let sort = sorted; // {key, down}
  let active = -1;
  const head = el("tr", { "aria-rowindex": "1" });
  const body = el("tbody");
  const grid = el(
    "table",
    { role: "grid", tabindex: "0", "aria-label": label },
    el(
      "colgroup",
      {},
      columns.map((column) => el("col", { class: extra(column), style: { width: column.width } })),
    ),
    el("thead", {}, head),
    body,
  );
  const scroller = el("div", { class: "scroller" }, grid);
  host.replaceChildren(scroller);

  function drawHead() {
    head.replaceChildren(
      ...columns.map((column) => {
        const here = sort?.key === column.key;
        const direction = here ? (sort.down ? "descending" : "ascending") : "none";
        const arrow = here ? (sort.down ? " ▾" : " ▴") : "";
        return el(
          "th",
          {
            scope: "col",
            "aria-sort": direction,
            class: `${column.numeric ? "numeric" : ""} ${extra(column)}`,
            title: column.hint ?? "",
          },
          el("button", { type: "button", onclick: () => sortBy(column) }, column.label + arrow),
        );
      }),
    );
  }

  function sortBy(column) {
    const down = sort?.key === column.key ? !sort.down : Boolean(column.numeric);
    sort = { key: column.key, down };
    arrange();
  }

  function arrange() {
    const column = sort && columns.find((one) => one.key === sort.key);
    rows = column ? all.toSorted(comparison(column.value, sort.down)) : all;
    active = -1;
    grid.setAttribute("aria-rowcount", String(rows.length + 1));
    drawHead();
    scroller.scrollTop = 0;
    drawRows();
  }

  function drawRows() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - SPARE);
    const count = Math.ceil((scroller.clientHeight || 480) / ROW) + 2 * SPARE;
    const shown = rows.slice(first, first + count);
    const after = rows.length - first - shown.length;
    body.replaceChildren(
      space(first),
      ...shown.map((row, i) => line(row, first + i)),
      space(after),
    );
    if (active >= first && active < first + shown.length) {
      grid.setAttribute("aria-activedescendant", `${host.id}-${active}`);
    } else grid.removeAttribute("aria-activedescendant");
  }

  function space(count) {
    const cell = el("td", {
      colspan: String(columns.length),
      style: { height: `${count * ROW}px` },
    });
    return el("tr", { class: "space", role: "presentation", hidden: !count }, cell);
  }

  function line(row, i) {
    return el(
      "tr",
      {
        id: `${host.id}-${i}`,
        "aria-rowindex": String(i + 2),
        "aria-selected": String(i === active),
        onclick: () => {
          activate(i);
          open(row);
        },
      },
      columns.map((column) => {
        const content = column.cell ? column.cell(row) : String(column.value(row) ?? "");
        const title = typeof content === "string" ? content : "";
        const kind = `${column.numeric ? "numeric" : ""} ${extra(column)}`;
        return el("td", { class: kind, title }, content);
      }),
    );
  }

  function activate(i) {
    active = Math.max(0, Math.min(rows.length - 1, i));
    const top = active * ROW;
    const space = scroller.clientHeight - head.offsetHeight;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (top + ROW > scroller.scrollTop + space) scroller.scrollTop = top + ROW - space;
    drawRows();
  }

  const page = () => Math.max(1, Math.floor(scroller.clientHeight / ROW) - 2);
  const moves = {
    ArrowDown: () => active + 1,
    ArrowUp: () => active - 1,
    PageDown: () => active + page(),
    PageUp: () => active - page(),
    Home: () => 0,
    End: () => rows.length - 1,
  };
  grid.addEventListener("keydown", (event) => {
    if (event.target !== grid || !rows.length) return;
    if (event.key === "Enter" && active >= 0) open(rows[active]);
    else if (event.key in moves) activate(moves[event.key]());
    else return;
    event.preventDefault();
  });
  scroller.addEventListener("scroll", eachFrame(drawRows), { passive: true });
  new ResizeObserver(eachFrame(drawRows)).observe(scroller);

  return {
    show(found) {
      all = found;
      arrange();
    },
    reveal(row) {
      const at = rows.indexOf(row);
      if (at >= 0) activate(at);
    },
  };
}

function extra(column) {
  return column.extra ? "extra" : "";
}

function comparison(value, down) {
  const sign = down ? -1 : 1;
  return (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === b) return 0;
    if (a === null) return 1; // what is not known comes last, either way
    if (b === null) return -1;
    return a < b ? -sign : sign;
  };
}
