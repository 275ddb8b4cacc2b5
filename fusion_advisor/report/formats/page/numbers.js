// Extremes of any number of values: Math.max takes only as many as the stack holds.

export function largest(values, start = -Infinity) {
  let most = start;
  for (const value of values) if (value > most) most = value;
  return most;
}

export function smallest(values, start = Infinity) {
  let least = start;
  for (const value of values) if (value < least) least = value;
  return least;
}
