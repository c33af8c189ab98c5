"""The whole broker: real processes, the journal on disk or in memory, all features on.

A task with a payload of 20 bytes that does nothing is submitted, assigned to a worker, and its
completion is acknowledged. The measure is CPU time of all processes together, because wall times on
a shared machine vary threefold. Tasks per second are shown beside it.
"""

import time
from collections.abc import Callable
from typing import Final

from bench.broker import calls as broker_calls
from bench.broker import campaigns as broker_campaigns
from bench.broker import executor as broker_executor
from bench.peers import BrokerLink, PeerTask
from bench.processes import BrokerBench
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import LISTING_MS, QUEUED_TASK_BYTES, RECOVERY_S
from taskyard.core.events import Scope
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply

COUNT_SMALL: Final = 10_000
COUNT: Final = 1_000_000
BATCH: Final = 100

#: Tasks in a page, as many as the client requests.
PAGE: Final = 1_000

#: A search for it reads the names of all tasks.
NO_NAME: Final = b"no task is called so"


def memory(settings: Settings) -> list[TableLine]:
    """Measure the broker's resident memory with 10⁶ queued tasks, less that with 10⁴."""
    settings.say(f"memory: {settings.count(COUNT):,} tasks queued")
    figures = [_measure_memory(settings) for _ in settings.times()]
    return [table_line("queued task, 20-byte payload", "B/task", figures, QUEUED_TASK_BYTES)]


def _measure_memory(settings: Settings) -> float:
    small, count = settings.count(COUNT_SMALL), settings.count(COUNT)
    with BrokerBench("durable", profile=settings.profile) as broker_bench:
        _submit(broker_bench, 0, small)
        before_bytes = broker_bench.broker.resident_bytes()
        _submit(broker_bench, small, count)
        return (broker_bench.broker.resident_bytes() - before_bytes) / count


def restart(settings: Settings) -> list[TableLine]:
    """Measure the time from the kill of a broker with 10⁶ unfinished tasks until it listens
    again, then pages of their listing."""
    settings.say(f"restart: {settings.count(COUNT):,} tasks queued")
    seconds: list[float] = []
    pages_ms: list[float] = []
    searches_ms: list[float] = []
    with BrokerBench("durable", profile=settings.profile) as broker_bench:
        _submit(broker_bench, 0, settings.count(COUNT))
        for _ in settings.times():
            broker_bench.restart_broker()
            seconds.append(broker_bench.broker.started_ns / 1e9)
            link = BrokerLink(broker_bench.endpoint)
            pages_ms.append(_page_ms(link, b""))
            searches_ms.append(_page_ms(link, NO_NAME))
            link.close()
    return [
        table_line("kill -9 to listening, 10⁶ unfinished", "s", seconds, RECOVERY_S),
        table_line(f"a page of {PAGE:,} of 10⁶ tasks", "ms", pages_ms, LISTING_MS),
        table_line("a search through 10⁶ names", "ms", searches_ms, LISTING_MS),
    ]


def _submit(broker_bench: BrokerBench, first: int, count: int) -> None:
    part = PeerTask("produce", broker_bench.endpoint, count=count, batch=BATCH, first=first)
    (producer,) = broker_bench.start_peers(part)
    producer.send_go()
    producer.done()


def _page_ms(link: BrokerLink, match: bytes) -> float:
    """Return the milliseconds for one page, or with `match` for a search through all names."""
    start_ns = time.monotonic_ns()
    read_pages(link, match, 0 if match else 1)
    return (time.monotonic_ns() - start_ns) / 1e6


def read_pages(link: BrokerLink, match: bytes, count: int) -> None:
    """Read pages of the listing from its start, all of them if `count` is 0."""
    cursor, pages = 0, 0
    while True:
        link.send(peer.list_tasks(1, Scope(), match, cursor, PAGE))
        cursor, pages = Reply(link.receive()).cursor, pages + 1
        if not cursor or pages == count:
            return


#: Every case by name, in the order of the table.
CASES: Final[dict[str, Callable[[Settings], list[TableLine]]]] = {
    "batches": broker_campaigns.batches,
    "shapes": broker_campaigns.shapes,
    "plain": broker_calls.plain,
    "calls": broker_calls.calls,
    "latency": broker_calls.latency,
    "executor": broker_executor.executor,
    "memory": memory,
    "restart": restart,
}


def run(settings: Settings, only: tuple[str, ...] = ()) -> list[TableLine]:
    """Run these cases, or all, and return the lines of the table."""
    if settings.store:
        from bench.broker import stores  # noqa: PLC0415  # needs an extra

        return stores.batches(settings)
    return [one for name in only or tuple(CASES) for one in CASES[name](settings)]
