// Keeps an open page up to date, draws its charts, and shows times in the reader's zone.
// A page asks for its own address again when something has changed, and replaces the marked parts.

import { drawCharts } from "./charts.js";
import { followOutput } from "./output.js";

const times = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });

function showTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    element.textContent = times.format(new Date(element.getAttribute("datetime")));
    element.title = element.getAttribute("datetime");
  }
}

// Parts with the focus, or with a changed field, stay as they are.
function isUsed(part) {
  if (part.contains(document.activeElement) && document.activeElement !== document.body) return true;
  return [...part.querySelectorAll("input")].some((field) => field.value !== field.defaultValue);
}

let isBusy = false;

async function refresh() {
  if (isBusy || document.hidden) return;
  isBusy = true;
  try {
    const response = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!response.ok) return;
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    showTimes(fresh);
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const shown = document.getElementById(part.id);
      if (shown && !isUsed(shown) && shown.innerHTML !== part.innerHTML) shown.innerHTML = part.innerHTML;
    }
    await drawCharts();
  } finally {
    isBusy = false;
  }
}

showTimes(document);
await drawCharts();
document.body.dataset.drawn = "yes";

followOutput();

// On the document, because forms are replaced with the parts around them.
document.addEventListener("submit", (event) => {
  const { confirm: what } = event.target.dataset;
  if (what === undefined) return;
  const text = what.startsWith("#") ? document.querySelector(what).textContent : what;
  const question = event.submitter?.dataset.question ?? event.submitter?.value ?? "change";
  if (!confirm(`${question} ${text}?`)) event.preventDefault();
});

const source = new EventSource("/live");
source.addEventListener("message", refresh);
document.addEventListener("visibilitychange", refresh);
