// How numbers are said; as in reports/wording.py.

function digits(value, count = 3) {
  return String(Number(value.toPrecision(count)));
}

export function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(count) < 1000) return `${digits(count)} ${unit}`;
    count /= 1000;
  }
  return `${digits(count)} TB`;
}

export function micros(us) {
  if (Math.abs(us) >= 1e6) return `${digits(us / 1e6)} s`;
  return Math.abs(us) >= 1000 ? `${digits(us / 1000)} ms` : `${digits(us)} µs`;
}

export function percent(share) {
  if (share && Math.abs(share) < 0.0001) return "< 0.01 %";
  return share >= 0.01 || !share ? `${Math.round(100 * share)} %` : `${digits(100 * share, 1)} %`;
}

export function times(ratio) {
  return `${ratio.toFixed(2)}x`;
}

// FLOP/B and the like: three digits, never an exponent.
export function ratio(value) {
  return value >= 100 ? String(Math.round(value)) : digits(value);
}

// A rate or an amount in steps of a thousand: 989 T.
export function scaled(value, unit) {
  for (const prefix of ["", "k", "M", "G", "T"]) {
    if (Math.abs(value) < 1000) return `${digits(value)} ${prefix}${unit}`;
    value /= 1000;
  }
  return `${digits(value)} P${unit}`;
}

// A line without the folders of its file: modeling_qwen3.py:62.
export function shortPlace(place) {
  return place.replace(/^.*[/\\]/, "");
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : /(ch|s|x)$/.test(noun) ? "es" : "s"}`;
}
