// Lets the reader zoom into the timeline and open the task of a bar. The range is in the address.

const element = document.querySelector("[data-timeline]");

function listen() {
  element.on("plotly_click", ({ points }) => {
    location.href = `/task?${new URLSearchParams({ name: points[0].customdata })}`;
  });
  element.on("plotly_relayout", (change) => {
    const [from, to] = [0, 1].map((end) => Date.parse(`${change[`xaxis.range[${end}]`]}Z`));
    if (Number.isFinite(from) && Number.isFinite(to)) {
      location.href = `/timeline?${new URLSearchParams({ from: Math.floor(from), to: Math.ceil(to) })}`;
    } else if (change["xaxis.autorange"]) {
      location.href = "/timeline";
    }
  });
}

// Plotly adds `on` to an element when it draws there.
if (element.on) {
  listen();
} else {
  const wait = new MutationObserver(() => {
    if (element.on) {
      wait.disconnect();
      listen();
    }
  });
  wait.observe(element, { childList: true });
}
