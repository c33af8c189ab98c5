"""A measurement of the scheduler, in a process with its own memory and caches.

`python -m bench.core.case SHAPE COUNT BATCH STORE` prints one JSON document. Times are CPU time of
this process around the measured calls, without the time to make events.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, process_time_ns

import msgspec

from bench.workloads import Shape, submissions
from simulator import snapshots
from taskyard.core.effects import Assign
from taskyard.core.events import Event, TasksReported, TasksRequested, WorkerRegistered
from taskyard.core.model import WorkerFacts
from taskyard.core.scheduler import Scheduler
from taskyard.journal.recovery import encode, recover
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore, Store

#: The broker's value: with millions of live objects each collection is expensive.
GC_THRESHOLD = 50_000

_WORKER = b"worker"


class CoreCase(msgspec.Struct):
    """Measured times in nanoseconds of CPU time, all tasks together."""

    shape: str
    count: int
    batch: int
    store: str
    submit_ns: int = 0
    lease_ns: int = 0
    finish_ns: int = 0
    #: Resident memory of the queued tasks.
    queued_bytes: int = 0
    #: Wall time to recover the queued tasks from the journal's rows, and from a snapshot.
    recover_rows_ns: int = 0
    recover_snapshot_ns: int = 0


class Bench:
    """A scheduler with a store, and the CPU time that it takes."""

    def __init__(self, store: Store | None) -> None:
        self.scheduler = Scheduler()
        self.store = store
        self.time_ns = 0

    def handle(self, event: Event) -> list[object]:
        start_ns = process_time_ns()
        effects = self.scheduler.handle(event)
        records = self.scheduler.take_records()
        if self.store is not None and records:
            self.store.commit(encode(records), len(records))
        self.time_ns += process_time_ns() - start_ns
        return list(effects)

    def lap(self) -> int:
        time_ns, self.time_ns = self.time_ns, 0
        return time_ns


def measure(case: CoreCase, store: Store | None) -> CoreCase:
    """Submit, lease and finish a whole campaign."""
    bench = Bench(store)
    bench.handle(WorkerRegistered(0, _WORKER, WorkerFacts(slots_total=0)))
    bench.lap()
    empty_bytes = _resident_bytes()
    for event in submissions(case.shape, case.count, case.batch):  # type: ignore[arg-type]
        bench.handle(event)
    case.submit_ns = bench.lap()
    case.queued_bytes = _resident_bytes() - empty_bytes
    if store is not None:
        _measure_recovery(case, bench, store)
    while True:
        effect = bench.handle(TasksRequested(0, _WORKER, case.batch, parks=False))[0]
        case.lease_ns += bench.lap()
        if not isinstance(effect, Assign):
            break
        bench.handle(TasksReported(0, _WORKER, effect.names, effect.attempts))
        case.finish_ns += bench.lap()
    return case


def _measure_recovery(case: CoreCase, bench: Bench, store: Store) -> None:
    case.recover_rows_ns = _wall_ns(lambda: recover(store))
    encoded = snapshots.encode(store.identity, store.head, bench.scheduler.ledger)
    case.recover_snapshot_ns = _wall_ns(lambda: snapshots.decode(encoded, "bench"))


def _wall_ns(call: Callable[[], object]) -> int:
    start_ns = perf_counter_ns()
    kept = call()
    taken_ns = perf_counter_ns() - start_ns
    del kept
    return taken_ns


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(shape: Shape, count: int, batch: int, store: str) -> None:
    gc.set_threshold(GC_THRESHOLD)
    case = CoreCase(shape, count, batch, store)
    if store == "none":
        measure(case, None)
    elif store == "memory":
        measure(case, MemoryStore())
    else:
        with tempfile.TemporaryDirectory() as directory:
            measure(case, SqliteStore(Path(directory)))
    sys.stdout.write(msgspec.json.encode(case).decode() + "\n")


if __name__ == "__main__":
    shape, count, batch, store = sys.argv[1:]
    main(shape, int(count), int(batch), store)  # type: ignore[arg-type]
