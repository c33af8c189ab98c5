// Keys for the whole page: g and a letter open a view, / goes to the filter, j and k move in lists.

const PREFIX_MS = 1500;

/** Handles keys, unless the reader types in a field. */
export function listenToKeys() {
  let prefixedUntil = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || isTyping(event.target)) return;
    const isPrefixed = performance.now() < prefixedUntil;
    prefixedUntil = 0;
    if (isPrefixed) {
      const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
      if (link) act(event, () => link.click());
    } else if (event.key === "g") prefixedUntil = performance.now() + PREFIX_MS;
    else if (event.key === "/") act(event, focusFilter);
    else if (event.key === "j") act(event, () => move(1));
    else if (event.key === "k") act(event, () => move(-1));
    else if (event.key === "?") act(event, () => document.getElementById("keys").showModal());
  });
  for (const button of document.querySelectorAll("[data-help]")) {
    button.addEventListener("click", () => document.getElementById("keys").showModal());
  }
  if (location.hash === "#filter") focusFilter();
}

function isTyping(target) {
  return target.closest?.("input, textarea, select, dialog[open], [contenteditable]") !== null;
}

function act(event, action) {
  event.preventDefault();
  action();
}

function focusFilter() {
  const box = document.querySelector(".filter input");
  if (box) box.select();
  else location.assign("/tasks#filter");
}

/** Focuses the main link of the next or previous row. Enter then opens it. */
function move(step) {
  const links = [...document.querySelectorAll("main tbody tr")]
    .map((row) => row.querySelector("a[href]"))
    .filter((link) => link?.checkVisibility());
  const row = document.activeElement?.closest?.("tbody tr");
  const place = links.findIndex((link) => row?.contains(link));
  const next = place < 0 ? (step > 0 ? 0 : links.length - 1) : place + step;
  links[Math.min(Math.max(next, 0), links.length - 1)]?.focus();
}
