// Light and dark. The style sheet has the colours; canvases ask for them here.

import { byId } from "./dom.js";

const NAMES = [
  "ink",
  "muted",
  "line",
  "surface",
  "raised",
  "accent",
  "compute",
  "memory",
  "overhead",
  "free",
  "plain",
  "match",
];

export const colours = {};
let lightness = "";

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// One hue a group; neighbours in rank are far apart. For canvases, which know no variables.
export function groupColour(index, alpha = 1) {
  return `oklch(${lightness} 0.14 ${hue(index)} / ${alpha})`;
}

// The same for the style of an element, which follows the theme by itself.
export function groupPaint(index, alpha = 1) {
  return `oklch(var(--group-lightness) 0.14 ${hue(index)} / ${alpha})`;
}

function hue(index) {
  return ((250 + index * 137.508) % 360).toFixed(1);
}

function read() {
  lightness = getComputedStyle(document.documentElement).getPropertyValue("--group-lightness");
  const probe = document.createElement("span");
  document.body.append(probe);
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

export function watchTheme(changed) {
  const apply = () => {
    byId("theme").textContent = isDark() ? "Light theme" : "Dark theme";
    read();
    changed();
  };
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
