// A canvas that is as sharp as the screen, and that pointer, wheel and keys pan and zoom.

import { eachFrame } from "./dom.js";

// Keeps the canvas at its size on the page, in device pixels. `draw(context, width, height)` works
// in CSS pixels. Returns what asks for another drawing, which waits until the canvas is in sight.
export function createCanvas(canvas, draw) {
  const context = canvas.getContext("2d");
  let inSight = true;
  const redraw = eachFrame(() => {
    if (!inSight) return;
    const { clientWidth: width, clientHeight: height } = canvas;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
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

// Pan and zoom: a point p of the drawing is at p * scale + offset.
export function createViewport(canvas, { changed, clicked, hovered }) {
  const view = { scale: 1, x: 0, y: 0, touched: false };
  const pointers = new Map();
  let size = { width: canvas.clientWidth, height: canvas.clientHeight }; // kept: to ask is slow
  let moved = 0;

  new ResizeObserver(([entry]) => (size = entry.contentRect)).observe(canvas);

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const inside = (point) => ({ x: (point.x - view.x) / view.scale, y: (point.y - view.y) / view.scale });

  function zoom(factor, centre = { x: size.width / 2, y: size.height / 2 }) {
    const scale = Math.max(0.01, Math.min(4, view.scale * factor));
    view.x = centre.x - ((centre.x - view.x) * scale) / view.scale;
    view.y = centre.y - ((centre.y - view.y) * scale) / view.scale;
    view.scale = scale;
    touch();
  }

  function touch() {
    view.touched = true;
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
    } else if (moved > 4) {
      view.x += point.x - before.x;
      view.y += point.y - before.y;
      touch();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (moved <= 4) clicked(inside(at(event)), event);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => hovered(null, null));

  return {
    view,
    zoom,
    // Shows a rectangle of the drawing whole.
    fit({ x0, y0, x1, y1 }, margin = 24) {
      const { width, height } = size;
      const scale = Math.min((width - 2 * margin) / (x1 - x0 || 1), (height - 2 * margin) / (y1 - y0 || 1), 1.25);
      view.scale = Math.max(scale, 0.01);
      view.x = (width - (x0 + x1) * view.scale) / 2;
      view.y = (height - (y0 + y1) * view.scale) / 2;
      view.touched = false;
      changed();
    },
    // Puts a point of the drawing into the middle, near enough to read.
    centre(x, y, least = 0.8) {
      view.scale = Math.max(view.scale, least);
      view.x = size.width / 2 - x * view.scale;
      view.y = size.height / 2 - y * view.scale;
      touch();
    },
  };
}
