// Draws the charts of a page with Plotly, in colours that follow light and dark mode.

import { darkMode, styled } from "./design.js";

// The document of each chart as it was drawn last.
const drawn = new WeakMap();

export async function drawCharts() {
  for (const element of document.querySelectorAll("[data-chart]")) {
    const response = await fetch(element.dataset.chart);
    if (!response.ok) continue;
    const text = `${darkMode.matches} ${await response.text()}`;
    if (drawn.get(element) === text) continue;
    drawn.set(element, text);
    const { data, layout } = styled(JSON.parse(text.slice(text.indexOf(" "))));
    layout.uirevision ??= "kept"; // a zoomed chart stays zoomed
    await Plotly.react(element, data, layout, { responsive: true, displayModeBar: false });
  }
}

darkMode.addEventListener("change", drawCharts);
