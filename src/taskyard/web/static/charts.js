// Draws the charts of a page with Plotly, in colours that follow light and dark mode.
// The palette is Okabe and Ito's, made for every kind of colour vision.

const palettes = {
  light: { blue: "#0072b2", orange: "#e69f00", green: "#009e73", red: "#d55e00", sky: "#56b4e9",
    purple: "#cc79a7", grey: "#8b95a1", ink: "#1b2430", quiet: "#5a6675", line: "#e4e8ed",
    card: "#ffffff", pale: "#c9d1da" },
  dark: { blue: "#4aa8e0", orange: "#f0b429", green: "#2fc79b", red: "#f07f3c", sky: "#8fd0f5",
    purple: "#dd9dc0", grey: "#7d8997", ink: "#e6eaf0", quiet: "#9aa7b6", line: "#2a323c",
    card: "#1c222a", pale: "#465260" },
};
const dark = matchMedia("(prefers-color-scheme: dark)");

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

export async function drawCharts() {
  const palette = palettes[dark.matches ? "dark" : "light"];
  for (const element of document.querySelectorAll("[data-chart]")) {
    const response = await fetch(element.dataset.chart);
    if (!response.ok) continue;
    const { data, layout } = coloured(await response.json(), palette);
    await Plotly.react(element, data, layout, { responsive: true, displayModeBar: false });
  }
}

dark.addEventListener("change", drawCharts);
