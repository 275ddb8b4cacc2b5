// A canvas that is as sharp as the screen, and that pointer, wheel and keys pan and zoom.

import { eachFrame } from "./dom.js";

const SMALLEST = 0.01; // scales
const LARGEST = 4;
const LARGEST_FIT = 1.25;
const DRAGGED = 4; // pixels that a click may move

// Keeps the canvas at its size on the page, in device pixels. `draw(context, width, height)` works
// in CSS pixels. Returns what asks for another drawing, which waits until the canvas is in sight.
export function createCanvas(canvas, draw) {
  const context = canvas.getContext("2d");
  let inSight = true;
  const redraw = eachFrame(() => {
    if (!inSight) return;
    const { clientWidth: width, clientHeight: height } = canvas;
    const ratio = devicePixelRatio || 1;
    if (
      canvas.width !== Math.round(width * ratio) ||
      canvas.height !== Math.round(height * ratio)
    ) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
  });
  new ResizeObserver(redraw).observe(canvas);
  new IntersectionObserver(
    ([entry]) => {
      inSight = entry.isIntersecting;
      redraw();
    },
    { rootMargin: "200px" },
  ).observe(canvas);
  return redraw;
}

// Pan and zoom: a point p of the drawing is at p * scale + offset. `fit` shows a rectangle of the
// drawing whole.
export function createViewport(canvas, { changed, clicked, hovered }) {
  const view = { scale: 1, x: 0, y: 0 };
  const pointers = new Map();
  let size = { width: canvas.clientWidth, height: canvas.clientHeight }; // kept: to ask is slow
  let moved = 0;

  let whole = null; // the rectangle that is to be seen whole, until the reader moves it

  new ResizeObserver(([entry]) => {
    size = entry.contentRect;
    if (whole) fit(whole);
  }).observe(canvas);

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const inside = (point) => ({
    x: (point.x - view.x) / view.scale,
    y: (point.y - view.y) / view.scale,
  });

  function zoom(factor, centre = { x: size.width / 2, y: size.height / 2 }) {
    const scale = Math.max(SMALLEST, Math.min(LARGEST, view.scale * factor));
    view.x = centre.x - ((centre.x - view.x) * scale) / view.scale;
    view.y = centre.y - ((centre.y - view.y) * scale) / view.scale;
    view.scale = scale;
    touch();
  }

  function touch() {
    whole = null;
    changed();
  }

  function fit(rectangle, margin = 24) {
    const { x0, y0, x1, y1 } = rectangle;
    const { width, height } = size;
    const [across, down] = [
      (width - 2 * margin) / (x1 - x0 || 1),
      (height - 2 * margin) / (y1 - y0 || 1),
    ];
    view.scale = Math.max(Math.min(across, down, LARGEST_FIT), SMALLEST);
    view.x = (width - (x0 + x1) * view.scale) / 2;
    view.y = (height - (y0 + y1) * view.scale) / 2;
    whole = rectangle;
    changed();
  }

  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls
      event.preventDefault();
      zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), at(event));
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const point = at(event);
    const before = pointers.get(event.pointerId);
    if (!before) return hovered(inside(point), point);
    const others = [...pointers].filter(([id]) => id !== event.pointerId);
    pointers.set(event.pointerId, point);
    moved += Math.hypot(point.x - before.x, point.y - before.y);
    if (others.length === 1) {
      const [[, other]] = others;
      const far = (one) => Math.hypot(one.x - other.x, one.y - other.y) || 1;
      zoom(far(point) / far(before), other);
    } else if (moved > DRAGGED) {
      view.x += point.x - before.x;
      view.y += point.y - before.y;
      touch();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (moved <= DRAGGED) clicked(inside(at(event)), event);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => hovered(null, null));

  return {
    view,
    zoom,
    fit,
    // Puts a point of the drawing into the middle, near enough to read.
    centre(x, y, least = 0.8) {
      view.scale = Math.max(view.scale, least);
      view.x = size.width / 2 - x * view.scale;
      view.y = size.height / 2 - y * view.scale;
      touch();
    },
  };
}
