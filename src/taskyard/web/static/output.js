// Shows the output of a task, and what it prints while it runs.

const SHOWN_CHARACTERS_MAX = 500_000;

export function followOutput() {
  const element = document.querySelector("[data-output]");
  if (!element) return;
  const choice = document.getElementById("attempt");
  const status = document.getElementById("output-status");
  let stream = "stdout";
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

  for (const button of document.querySelectorAll("[data-stream]")) {
    button.addEventListener("click", () => {
      for (const other of document.querySelectorAll("[data-stream]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      stream = button.dataset.stream;
      read();
    });
  }
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
