// Applies the design to figures: the template, and colours of the reader's light or dark mode.

const darkMode = matchMedia("screen and (prefers-color-scheme: dark)");

function coloured(value, palette) {
  if (typeof value === "string") {
    return value[0] === "@" && value.slice(1) in palette ? palette[value.slice(1)] : value;
  }
  if (Array.isArray(value)) return value.map((one) => coloured(one, palette));
  if (value && typeof value === "object") {
    return Object.fromEntries(
      Object.entries(value).map(([key, one]) => [key, coloured(one, palette)]));
  }
  return value;
}

function styled({ data, layout }, mode = darkMode.matches ? "dark" : "light") {
  return coloured({ data, layout: { template, ...layout } }, palettes[mode]);
}
