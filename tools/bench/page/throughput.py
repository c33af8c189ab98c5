"""The throughput of a broker with and without ten open pages, in alternation.

An open page follows `/live` and asks for its view again when something has changed, at most once a
second, as the script of a page does.
"""

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Final

from msgspec import Struct

from bench.page.process import Page
from bench.peers import PeerTask
from bench.processes import BrokerBench
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import PAGE_THROUGHPUT

TASKS: Final = 1_000_000
_BATCH: Final = 100
_UNFINISHED_MAX: Final = 20_000
_WORKERS: Final = 2

#: What the ten open pages show.
_OPEN: Final = (
    *("/", "/charts/throughput", "/tasks", "/tasks?filter=--failed", "/campaigns"),
    *("/workers", "/lanes", "/timeline", "/charts/timeline", "/graph"),
)

#: An open page asks for its view again at most this often.
_REFRESH_S: Final = 1.0


class _Run(Struct):
    tasks_per_second: float
    broker_us: float
    page_us: float = 0


def run(settings: Settings) -> list[TableLine]:
    """Measure both in turns."""
    alone: list[_Run] = []
    watched: list[_Run] = []
    for number in settings.times():
        settings.say(f"page: throughput, run {number + 1} of {settings.repeats}")
        alone.append(_measure(settings.count(TASKS), pages=0))
        watched.append(_measure(settings.count(TASKS), pages=len(_OPEN)))
    rates = [[one.tasks_per_second for one in runs] for runs in (watched, alone)]
    best, middle = (choose(rates[0]) / choose(rates[1]) for choose in (max, median))
    return [
        table_line("throughput alone", "tasks/s", rates[1], higher_is_better=True),
        table_line("throughput with ten pages", "tasks/s", rates[0], higher_is_better=True),
        table_line("with pages over alone, best", "×", [best], PAGE_THROUGHPUT),
        table_line("with pages over alone, median", "×", [middle]),
        table_line("CPU of the broker alone", "µs/task", [one.broker_us for one in alone]),
        table_line("CPU of the broker with pages", "µs/task", [one.broker_us for one in watched]),
        table_line("CPU of the page", "µs/task", [one.page_us for one in watched]),
    ]


def _measure(count: int, pages: int) -> _Run:
    with BrokerBench("durable") as bench, ExitStack() as stack:
        page = stack.enter_context(Page(bench.state)) if pages else None
        flow = PeerTask(
            "flow", bench.endpoint, count=count, batch=_BATCH, unfinished_max=_UNFINISHED_MAX
        )
        works = [PeerTask("work", bench.endpoint, one, batch=_BATCH) for one in range(_WORKERS)]
        _, *workers = bench.start_peers(flow, *works)
        if page is not None:
            page.wait_until_ready()
            stack.enter_context(_open_pages(page))
        broker_ns, page_ns = bench.broker.cpu_ns(), 0 if page is None else page.cpu_ns()
        start_ns = time.monotonic_ns()
        for peer in bench.peers:
            peer.send_go()
        took_ns = bench.wait_for(workers, count) - start_ns
        broker_ns = bench.broker.cpu_ns() - broker_ns
        page_ns = 0 if page is None else page.cpu_ns() - page_ns
    return _Run(count / took_ns * 1e9, broker_ns / count / 1000, page_ns / count / 1000)


@contextmanager
def _open_pages(page: Page) -> Iterator[None]:
    """Follow the page like browsers until the block ends."""
    stopped = threading.Event()

    def follow(path: str) -> None:
        try:
            with page.follow() as changes:
                while not stopped.is_set() and changes.readline():
                    page.get(path)
                    stopped.wait(_REFRESH_S)
        except (OSError, http.client.HTTPException):
            if not stopped.is_set():  # else the page has ended
                raise

    threads = [threading.Thread(target=follow, args=[path], daemon=True) for path in _OPEN]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
