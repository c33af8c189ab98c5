// Keeps an open page up to date, and draws its charts.
// A page asks for its own address again when something has changed, and changes the marked parts in place.

import { drawCharts } from "./charts.js";
import { listenToKeys } from "./keyboard.js";
import { morph } from "./morph.js";
import { followOutput } from "./output.js";

let isBusy = false;

async function refresh() {
  // The refusal of an action can't be asked for again.
  if (isBusy || document.hidden || location.pathname.endsWith("/actions")) return;
  isBusy = true;
  try {
    const response = await fetch(location.href, { headers: { Accept: "text/html" } });
    const hasFailed = document.querySelector("main [data-failed]") !== null;
    if (response.ok && hasFailed) return location.reload();
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    const focused = document.activeElement;
    // Of a view that could not be made, only the notes: the last values stay.
    for (const part of fresh.querySelectorAll(response.ok ? "[data-live]" : "#notes")) {
      const shown = document.getElementById(part.id);
      if (shown) morph(shown, part);
    }
    // An element that moved has lost its focus.
    if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
    document.dispatchEvent(new Event("refreshed"));
    if (response.ok) await drawCharts();
  } finally {
    isBusy = false;
  }
}

await drawCharts();
document.body.dataset.drawn = "yes";

followOutput();
listenToKeys();

// On the document, because forms may come with an update.
document.addEventListener("submit", (event) => {
  const { confirm: what } = event.target.dataset;
  if (what === undefined) return;
  const text = what.startsWith("#") ? document.querySelector(what).textContent : what;
  const question = event.submitter?.dataset.question ?? event.submitter?.value ?? "change";
  if (!confirm(`${question} ${text}?`)) event.preventDefault();
});

const source = new EventSource("/live");
source.addEventListener("message", refresh);
const offline = document.getElementById("offline");
let warning; // not at once: the server ends live updates now and then, and they begin again
source.addEventListener("open", () => {
  clearTimeout(warning);
  warning = undefined;
  offline.hidden = true;
});
source.addEventListener("error", () => {
  warning ??= setTimeout(() => { offline.hidden = false; }, 1500);
});
document.addEventListener("visibilitychange", refresh);
