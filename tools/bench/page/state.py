"""A large state directory for the page: campaigns of several shapes, half of their tasks ended.

The scheduler decides everything, so the records are like a real broker's. The scheduler's clock is
simulated: the history covers six hours that end now. The journal is compacted once, so that the
page reads history files, an older snapshot and rows.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from taskyard.core.blobs import Content
from taskyard.core.effects import Assign
from taskyard.core.events import (
    ClockSet,
    Event,
    Outcome,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerRegistered,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import AnyRecord
from taskyard.core.runs import RunColumns
from taskyard.core.scheduler import Scheduler
from taskyard.journal import compaction, recovery
from taskyard.journal.sqlite import SqliteStore

#: The size that the targets are for, and the share of tasks that end.
TASKS: Final = 1_000_000
ENDED_SHARE: Final = 0.5

WORKERS: Final = 200
WORKER_SLOTS: Final = 8

#: Tasks of a submission, and records of a journal row.
_BATCH: Final = 1000
_RECORDS_PER_ROW: Final = 64

_DURATION_NS: Final = 6 * 3600 * SECOND_NS

#: Of this many tasks one fails.
_FAILS_EVERY: Final = 40
_REASONS: Final = (
    b"exit status 1",
    b"exit status 2",
    b"exit status 127: command not found",
    b"killed by signal 9",
    b"time limit of 30 s reached",
    b"HTTP 503 Service Unavailable",
    b"FileNotFoundError: [Errno 2] No such file or directory",
)

#: Campaigns that users would have, with their share of all tasks. The campaign of the mail example
#: has a fixed size.
SHARES: Final = {"thumbs": 0.30, "sweep": 0.20, "nights": 0.10, "chains": 0.10, "crawl": 0.25}
MAIL_TASKS: Final = 2000


def create(state: Path, tasks: int, say: Callable[[str], None]) -> None:
    """Create a state directory with about `tasks` tasks."""
    say(f"page: making a state with {tasks:,} tasks")
    with closing(SqliteStore(state)) as store:
        made = _State(store, tasks)
        for submission in _submissions(tasks):
            made.handle(SubmitRequested(made.now_ns, b"bench", submission))
        made.work(tasks * ENDED_SHARE * 0.9)
        made.write()
        compaction.compact(state, store)
        made.work(tasks * ENDED_SHARE * 0.1)
        made.lease()
        made.write()


class _State:
    """A scheduler with its store, its clock and its workers."""

    def __init__(self, store: SqliteStore, tasks: int) -> None:
        self._store, self._scheduler = store, Scheduler()
        self._records: list[AnyRecord] = []
        self._random = random.Random(1)
        self._workers = [b"node%03d-%d" % divmod(number, 4) for number in range(WORKERS)]
        self._begin_ns = time.time_ns() - _DURATION_NS
        turns = tasks * ENDED_SHARE / WORKER_SLOTS
        self._turn_ns = round(_DURATION_NS * 0.98 / turns)
        self.now_ns = SECOND_NS
        self.handle(ClockSet(self.now_ns, self._begin_ns))
        for worker in self._workers:
            services = (b"convert", b"fetch", b"train", b"default")
            facts = WorkerFacts(services, WORKER_SLOTS, dialect=b"native", host=worker[:7])
            self.handle(WorkerRegistered(self.now_ns, worker, facts))

    def handle(self, event: Event) -> list[object]:
        effects: list[object] = list(self._scheduler.handle(event))
        self._records += self._scheduler.take_records()
        if len(self._records) >= _RECORDS_PER_ROW:
            self.write()
        return effects

    def write(self) -> None:
        """Commit the records as one row."""
        if self._records:
            self._store.commit(recovery.encode(self._records), len(self._records))
            self._records = []

    def work(self, ended: float) -> None:
        """Let the workers end a number of tasks, each with several at once."""
        held: dict[bytes, Assign] = {}
        count = 0
        while count < ended:
            for worker in self._workers:
                self.now_ns += self._turn_ns
                assigned = held.pop(worker, None)
                if assigned is not None:
                    self._report(assigned)
                    count += len(assigned.names)
                found = self._request(worker)
                if found is not None:
                    held[worker] = found
            if not held:
                raise RuntimeError(f"no task is ready after {count:,}")
        for assigned in held.values():
            self._report(assigned)

    def lease(self) -> None:
        """Leave every worker with tasks that run."""
        for worker in self._workers:
            self._request(worker)

    def _request(self, worker: bytes) -> Assign | None:
        request = TasksRequested(self.now_ns, worker, WORKER_SLOTS, parks=False)
        return next((one for one in self.handle(request) if isinstance(one, Assign)), None)

    def _report(self, assigned: Assign) -> None:
        choose, count = self._random, len(assigned.names)
        took_ns = WORKERS * self._turn_ns
        run_ns = [round(took_ns * min(choose.lognormvariate(-1.2, 0.6), 1)) for _ in range(count)]
        fails = [choose.randrange(_FAILS_EVERY) == 0 for _ in range(count)]
        runs = RunColumns(
            assigned.worker[:7],
            [assigned.at_ns + 1] * count,
            run_ns,
            [int(failed) for failed in fails],
            [one * 9 // 10 for one in run_ns],
            [choose.randrange(1 << 24, 1 << 31) for _ in range(count)],
        )
        outcomes = [Outcome.FAILED_FINAL if failed else Outcome.DONE for failed in fails]
        texts: list[Content] = [choose.choice(_REASONS) if failed else b"" for failed in fails]
        self.handle(
            TasksReported(
                self.now_ns,
                assigned.worker,
                assigned.names,
                assigned.attempts,
                outcomes,
                texts,
                runs=runs,
            )
        )


def _submissions(tasks: int) -> Iterator[Submission]:
    """Yield all campaigns. Campaigns that end come first, because lanes take turns otherwise."""
    counts = {name: int(tasks * share) for name, share in SHARES.items()}
    mails = min(MAIL_TASKS, tasks // 50)
    yield from _mail(mails)
    for night in range(20):
        names = [b"compare-%05d" % number for number in range(counts["nights"] // 20)]
        yield from _batches(b"night-%02d" % night, b"default", names, priority=2)
    yield from _sweep(counts["sweep"])
    names = [b"album-%03d/photo-%07d.jpg" % (one % 500, one) for one in range(counts["thumbs"])]
    lanes = [b"disk-%02d" % (number % 24) for number in range(len(names))]
    yield from _batches(b"thumbs", b"convert", names, lanes, priority=1)
    yield from _chains(counts["chains"])
    names = [b"https://www.example.org/articles/%07d" % one for one in range(counts["crawl"])]
    names += [b"n" * 1000 + b"%d" % number for number in range(20)]
    lanes = [b"host-%04d.example.org" % (number % 5000) for number in range(len(names))]
    yield from _batches(b"crawl", b"fetch", names, lanes)
    rest = tasks - sum(counts.values()) - mails
    yield from _batches(b"", b"default", [b"single-%06d" % number for number in range(rest)])


def _batches(  # noqa: PLR0913  # columns of a submission
    campaign: bytes,
    service: bytes,
    names: list[bytes],
    lanes: list[bytes] | None = None,
    *,
    after: list[list[bytes]] | None = None,
    priority: int = 0,
) -> Iterator[Submission]:
    terms = [Terms(campaign, service, priority)]
    for start in range(0, len(names), _BATCH):
        part = slice(start, start + _BATCH)
        yield Submission(
            names[part],
            [b"payload-of-20-bytes."],
            terms,
            lanes=None if lanes is None else lanes[part],
            after=None if after is None else after[part],
        )


def _mail(count: int) -> Iterator[Submission]:
    """Make the graph of the mail example: fetch, parse and score messages, then merge them."""
    names: list[bytes] = []
    after: list[list[bytes]] = []
    mails = (count - 11) // 3
    for number in range(mails):
        names += [step % number for step in (b"fetch-%04d", b"parse-%04d", b"score-%04d")]
        after += [[], [b"fetch-%04d" % number], [b"parse-%04d" % number]]
    for part in range(10):
        names.append(b"merge-%d" % part)
        after.append([b"score-%04d" % number for number in range(part, mails, 10)])
    names.append(b"report")
    after.append([b"merge-%d" % part for part in range(10)])
    yield from _batches(b"mail", b"default", names, after=after, priority=2)


def _sweep(count: int) -> Iterator[Submission]:
    """Make many small graphs: prepare, eight trainings, a score."""
    names: list[bytes] = []
    after: list[list[bytes]] = []
    for run in range(count // 10):
        trainings = [b"train-%05d-%d" % (run, seed) for seed in range(8)]
        names += [b"prepare-%05d" % run, *trainings, b"score-%05d" % run]
        after += [[], *[[b"prepare-%05d" % run]] * 8, trainings]
    yield from _batches(b"sweep", b"train", names, after=after, priority=1)


def _chains(count: int) -> Iterator[Submission]:
    """Make chains of a hundred tasks."""
    numbers = [divmod(number, 100) for number in range(count)]
    names = [b"chain-%04d.step-%02d" % pair for pair in numbers]
    after = [
        [b"chain-%04d.step-%02d" % (chain, step - 1)] if step else [] for chain, step in numbers
    ]
    yield from _batches(b"chains", b"train", names, after=after)
