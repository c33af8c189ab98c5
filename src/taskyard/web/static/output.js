// Shows the output of a task, and what it prints while it runs.

const POLL_MS = 1000;
const SHOWN_CHARACTERS_MAX = 500_000;

export function followOutput() {
  const element = document.querySelector("[data-output]");
  if (!element) return;
  let stream = "stdout";
  let next = 0;
  let generation = 0;

  async function read(mine) {
    const address = `${element.dataset.output}&stream=${stream}&offset=${next}`;
    const response = await fetch(address);
    if (mine !== generation) return;
    if (!response.ok) {
      element.textContent = "no output is kept";
      return;
    }
    const page = await response.json();
    const isAtEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 4;
    element.textContent = (element.textContent + page.text).slice(-SHOWN_CHARACTERS_MAX);
    if (isAtEnd) element.scrollTop = element.scrollHeight;
    next = page.next;
    if (page.next < page.total) await read(mine);
    else if (page.live) setTimeout(() => read(mine), POLL_MS);
  }

  for (const button of document.querySelectorAll("[data-stream]")) {
    button.addEventListener("click", () => {
      for (const other of document.querySelectorAll("[data-stream]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      stream = button.dataset.stream;
      next = 0;
      generation += 1;
      element.textContent = "";
      read(generation);
    });
  }
  read(generation);
}
