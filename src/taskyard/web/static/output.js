// Shows the output of a task, and what it prints while it runs.

const SHOWN_CHARACTERS_MAX = 500_000;

export function followOutput() {
  const element = document.querySelector("[data-output]");
  if (!element) return;
  const choice = document.getElementById("attempt");
  const status = document.getElementById("output-status");
  let stream = ""; // until one is chosen
  let source = null;

  function write(text) {
    const isAtEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 4;
    if (element.textContent.length + text.length <= SHOWN_CHARACTERS_MAX) element.append(text);
    else element.textContent = (element.textContent + text).slice(-SHOWN_CHARACTERS_MAX);
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  }

  function read() {
    source?.close();
    element.textContent = "";
    status.textContent = "Reading";
    const wanted = choice.value ? `&attempt=${choice.value}` : "";
    const mine = new EventSource(`${element.dataset.output}&stream=${stream}${wanted}`);
    mine.addEventListener("stderr", () => choose("stderr"));
    source = mine;
    mine.addEventListener("message", (event) => {
      const { text, skipped } = JSON.parse(event.data);
      status.textContent = "Live";
      if (text) write(text);
      else write(`(${skipped.toLocaleString()} earlier bytes: taskyard log prints all)\n`);
    });
    mine.addEventListener("end", () => {
      mine.close();
      status.textContent = element.textContent ? "Ended" : "No output";
    });
    mine.addEventListener("error", () => {
      const isOver = mine.readyState === EventSource.CLOSED;
      status.textContent = isOver ? "No output is kept" : "Connecting again";
    });
  }

  const buttons = document.querySelectorAll("[data-stream]");

  function choose(name) {
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(button.dataset.stream === name));
    }
    stream = name;
    read();
  }

  for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.stream));
  choice.addEventListener("change", read);
  const attemptNow = () => document.querySelector("[data-attempt]")?.dataset.attempt;
  let attempt = attemptNow();
  document.addEventListener("refreshed", () => {
    if (attempt === attemptNow()) return;
    attempt = attemptNow();
    if (!choice.value) read(); // another attempt runs now
  });
  read();
}
