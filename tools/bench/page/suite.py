"""The page at a million tasks: every view, the first view of a stopped state, the screens of
`taskyard top`, and the throughput of a broker with ten open pages."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final
from urllib.parse import quote

from msgspec import Struct

from bench.page import state as page_state
from bench.page import throughput, top
from bench.page.process import Page, View
from bench.processes import Broker
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import PAGE_ELEMENTS, PAGE_FIRST_MS, PAGE_VIEW_MS

#: Requests of each view after the first.
_REQUESTS: Final = 7

_MS: Final = 1e6


def _tasks(text: str) -> str:
    return f"/tasks?filter={quote(text)}"


#: Every view that grows with the number of tasks, by the name of its line.
VIEWS: Final = {
    "overview": "/",
    "throughput chart": "/charts/throughput",
    "campaigns": "/campaigns",
    "campaign of 300,000": "/campaign?name=thumbs",
    "run times of all": "/charts/durations",
    "tasks": "/tasks",
    "tasks, the last page": "/tasks?first=999900",
    "tasks by duration": _tasks("--sort duration"),
    "tasks by name": _tasks("--sort name"),
    "tasks with a rare text": _tasks("photo-0001234"),
    "tasks with a frequent text": _tasks("e"),
    "failed tasks of a reason": _tasks("--failed --reason 503"),
    "tasks of a worker": _tasks("--worker node001-1"),
    "tasks of a lane": _tasks("--lane disk-01 --only done"),
    "a task": "/task?name=mail/merge-1",
    "graph of 2,000": "/graph?campaign=mail",
    "graph of 100,000, 100 levels": "/graph?campaign=chains",
    "graph of 200,000": "/graph?campaign=sweep",
    "graph of 300,000, no edges": "/graph?campaign=thumbs",
    "workers": "/workers",
    "lanes": "/lanes",
    "timeline": "/timeline",
    "timeline chart": "/charts/timeline",
    "brokers": "/brokers",
    "health": "/health",
}


class PageBench(Struct):
    """The state of a run. A given directory is kept and used again."""

    settings: Settings
    state: Path | None = None

    def directory(self, stack: ExitStack) -> Path:
        """Return a state directory, made if it is not there."""
        found = self.state
        if found is None:
            found = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))) / "page"
        if not found.exists():
            page_state.create(found, self.tasks, self.settings.say)
        self.state = found
        return found

    @property
    def tasks(self) -> int:
        return self.settings.count(page_state.TASKS)


def run(bench: PageBench, only: Sequence[str]) -> list[TableLine]:
    """Run cases, all of them by default."""
    with ExitStack() as stack:
        return [line for name in only or CASES for line in CASES[name](bench, stack)]


def run_views(bench: PageBench, stack: ExitStack) -> list[TableLine]:
    """Ask for every view of a page beside a broker."""
    state = bench.directory(stack)
    broker = Broker(state, "durable")
    try:
        with Page(state) as page:
            bench.settings.say("page: reading the journal")
            page.wait_until_ready()
            start = [
                table_line("CPU of the page until it is ready", "s", [page.cpu_ns() / 1e9]),
                table_line("memory", "bytes/task", [page.resident_bytes() / bench.tasks]),
            ]
            bench.settings.say("page: asking for every view")
            seen = {name: _ask(page, path) for name, path in VIEWS.items()}
    finally:
        broker.terminate()
    return [*start, *_lines(seen)]


def _ask(page: Page, path: str) -> list[View]:
    return [page.get(path) for _ in range(1 + _REQUESTS)]


def _lines(seen: dict[str, list[View]]) -> list[TableLine]:
    lines = []
    for name, (first, *others) in seen.items():
        took = [one.took_ns / _MS for one in others]
        lines.append(table_line(name, "ms", took, PAGE_VIEW_MS))
        lines.append(table_line(f"{name}: median", "ms", [median(took)]))
        lines.append(table_line(f"{name}: first", "ms", [first.took_ns / _MS], PAGE_FIRST_MS))
        cpu = [one.cpu_ns / _MS for one in others]
        lines.append(table_line(f"{name}: CPU of the page", "ms", [min(cpu), median(cpu)]))
    pages = {name: one[-1] for name, one in seen.items() if one[-1].body[:1] == b"<"}
    most = max(pages, key=lambda name: pages[name].elements)
    lines.append(table_line(f"elements: {most}", "", [pages[most].elements], PAGE_ELEMENTS))
    largest = max(seen, key=lambda name: len(seen[name][-1].body))
    lines.append(table_line(f"bytes: {largest}", "kB", [len(seen[largest][-1].body) / 1000]))
    return lines


def run_stopped(bench: PageBench, stack: ExitStack) -> list[TableLine]:
    """Ask for the first overview of a state without a broker."""
    with Page(bench.directory(stack)) as page:
        page.wait_until_ready()
        ready_ns = page.cpu_ns()
        first, *others = _ask(page, "/")
    took = [one.took_ns / _MS for one in others]
    return [
        table_line("stopped: CPU of the page until it is ready", "s", [ready_ns / 1e9]),
        table_line("stopped: first overview", "ms", [first.took_ns / _MS]),
        table_line("stopped: CPU of the first overview", "ms", [first.cpu_ns / _MS]),
        table_line("stopped: overview", "ms", took, PAGE_VIEW_MS),
    ]


CASES: Final[dict[str, Callable[[PageBench, ExitStack], list[TableLine]]]] = {
    "views": run_views,
    "stopped": run_stopped,
    "top": lambda bench, stack: top.run(bench.directory(stack), bench.settings.say),
    "throughput": lambda bench, _: throughput.run(bench.settings),
}
