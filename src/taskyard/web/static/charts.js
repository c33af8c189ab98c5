// Draws the charts of a page with Plotly, in colours that follow light and dark mode.

import { darkMode, styled } from "./design.js";

export async function drawCharts() {
  for (const element of document.querySelectorAll("[data-chart]")) {
    const response = await fetch(element.dataset.chart);
    if (!response.ok) continue;
    const { data, layout } = styled(await response.json());
    await Plotly.react(element, data, layout, { responsive: true, displayModeBar: false });
  }
}

darkMode.addEventListener("change", drawCharts);
