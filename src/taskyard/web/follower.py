"""The follower: a thread that keeps the view up to date with a state directory.

Owns the feed of events, from the history files and then from the journal, and the pace. It follows
a journal that a broker writes, without a lock and without a request to it, or reads a journal
without a broker. It has a low priority and pauses, so that workers and the broker come first on a
busy machine. The view then lags behind, and every page shows by how much. The first reading has no
pauses. Requests take the lock for one answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from taskyard.errors import JournalDamaged, TaskyardError
from taskyard.journal import history, lock, recovery, schema, state_check, witness
from taskyard.journal.history_rows import RowFollower
from taskyard.journal.row_file import TABLES, Block, ColumnBuilder, RowFile
from taskyard.journal.state_store import open_reader
from taskyard.journal.store import StoreReader
from taskyard.web.events import Batch
from taskyard.web.view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from taskyard.core.ledger import Ledger
    from taskyard.journal.history import HistoryPart
    from taskyard.journal.row_file import ColumnRuns
    from taskyard.journal.store import Head

#: The share of a core in any case, for each of the two parts: the follower and the open pages.
SHARE_MIN: Final = 0.02

#: A machine with less idle cores than this is busy.
IDLE_CORES_MIN: Final = 0.75

#: Seconds between two looks at the machine.
_LOOK_SECONDS: Final = 1.0

#: Seconds between two changes of an open page.
ROUND_SECONDS_MIN: Final = 1.0
ROUND_SECONDS_MAX: Final = 10.0

_STAT: Final = Path("/proc/stat")
#: The fields of the idle time in the first line: without work, and waiting for a disk.
_IDLE_FIELDS: Final = slice(4, 6)


def idle_seconds() -> float | None:
    """Return the idle time of all cores since the start of the machine, if it is known."""
    try:
        with _STAT.open() as file:
            ticks = sum(map(int, file.readline().split()[_IDLE_FIELDS]))
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


class Pace:
    """Follows the idle time of the machine."""

    def __init__(
        self,
        idle: Callable[[], float | None] = idle_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle, self._clock = idle, clock
        self._share = 1.0
        self._seen = (clock(), idle())
        self._round_seconds = ROUND_SECONDS_MIN
        self._round_seen: tuple[float, float] | None = None

    @property
    def share(self) -> float:
        """Return the share of a core that a part of the page may take now."""
        now, (then, before) = self._clock(), self._seen
        if now - then >= _LOOK_SECONDS:
            idle = self._idle()
            self._seen = (now, idle)
            if idle is not None and before is not None:
                self._adapt((idle - before) / (now - then))
        return self._share

    def _adapt(self, idle_cores: float) -> None:
        if idle_cores < IDLE_CORES_MIN:
            self._share = max(self._share / 2, SHARE_MIN)
        else:
            self._share = min(self._share + idle_cores / 2, 1.0)

    def pause_seconds(self, cpu_seconds: float) -> float:
        """Return how long a part pauses after it has used this much CPU time."""
        return cpu_seconds * (1 / self.share - 1)

    def round_seconds(self, cpu_seconds: float) -> float:
        """Return the time until open pages are changed again.

        `cpu_seconds` is the CPU time of their thread since it started.
        """
        now = self._clock()
        if self._round_seen is None:
            self._round_seen = (now, cpu_seconds)
        then, before = self._round_seen
        if now - then >= self._round_seconds:
            used = (cpu_seconds - before) / (now - then)
            wanted = self._round_seconds * used / self.share
            self._round_seconds = min(max(wanted, ROUND_SECONDS_MIN), ROUND_SECONDS_MAX)
            self._round_seen = (now, cpu_seconds)
        return self._round_seconds


#: Events that are collected before they are handed over: some milliseconds of work for the view.
_EVENTS_PER_BLOCK: Final = 8192

#: A broker may trim rows and replace files while they are read. Then the read is repeated.
_TRIES_MAX: Final = 5


class EventFeed:
    """Reads events from where it last stopped."""

    def __init__(self, state: Path) -> None:
        """Open a state directory. Raises UnusableState if it has no journal."""
        state_check.require_state(state)
        self._state = state
        #: At the last row that was read. None while its ledger has to be loaded.
        self._follower: RowFollower | None = None
        #: The last row whose events were read.
        self._sequence = 0
        #: The last record up to which ended tasks are archived.
        self._archived_record = 0
        #: The last row of the journal, as of the last read.
        self.head_sequence = 0
        #: Rows that are neither in the journal nor in history files.
        self.rows_missing = 0

    @property
    def sequence(self) -> int:
        """Return the last journal row that was read."""
        return self._sequence

    def read(self) -> Iterator[Batch]:
        """Yield blocks of new events and edges, up to the newest row."""
        for attempt in range(1, _TRIES_MAX + 1):
            try:
                yield from self._read()
            except (JournalDamaged, FileNotFoundError):
                if attempt == _TRIES_MAX:
                    raise
            else:
                return

    def _read(self) -> Iterator[Batch]:
        witnessed = witness.read(self._state)
        if witnessed is None:
            return
        identity, head = witnessed
        self.head_sequence = head.sequence
        if head.sequence <= self._sequence:
            return
        with open_reader(self._state, identity, head) as reader:
            if self._follower is None or self._sequence < reader.anchor.sequence:
                if self._awaits_files(reader.anchor):
                    return
                self._follower = None
                yield from self._read_files(reader.anchor)
                self._follower = RowFollower(self._state, reader, self._sequence)
                yield _states_of(self._follower.ledger.tasks, self._follower.ledger)
            yield from self._read_rows(reader, self._follower)

    def _awaits_files(self, anchor: Head) -> bool:
        """Return whether a broker still fetches history from its database."""
        whole = history.parts(self._state)
        reached = whole[-1].last if whole else 0
        return reached < anchor.sequence and bool(schema.database_url(self._state))

    def _read_files(self, anchor: Head) -> Iterator[Batch]:
        """Read the history files after the last row. They reach at least to the last trimmed row.

        Rows of files that were removed are skipped and counted.
        """
        whole = history.parts(self._state)
        for part in whole:
            if part.last > self._sequence:
                self.rows_missing += max(part.first - self._sequence - 1, 0)
                yield from self._read_part(part)
                self._sequence = part.last
        self.rows_missing += max(anchor.sequence - self._sequence, 0)
        self._sequence = max(self._sequence, anchor.sequence)

    def _read_part(self, part: HistoryPart) -> Iterator[Batch]:
        """Read a file, without rows that were read from the journal already."""
        with RowFile(part.path(self._state)) as file:
            for block in file.blocks("events"):
                yield Batch(rows_after(block, self._sequence), _NO_ROWS)
            for block in file.blocks("edges"):
                yield Batch(_NO_ROWS, rows_after(block, self._sequence))

    def _read_rows(self, reader: StoreReader, follower: RowFollower) -> Iterator[Batch]:
        ledger = follower.ledger
        self._archive(ledger, reader.anchor)
        events, edges = ColumnBuilder("events"), ColumnBuilder("edges")
        try:
            for row in follower.follow(reader, events, edges):
                self._sequence = row.sequence
                if events.rows >= _EVENTS_PER_BLOCK or row.sequence == reader.head.sequence:
                    yield _batch(events, edges, ledger)
        except JournalDamaged:  # also if the broker trims rows that were not read yet
            if events.rows:
                yield _batch(events, edges, ledger)
            raise

    def _archive(self, ledger: Ledger, anchor: Head) -> None:
        """Drop the ended tasks of trimmed rows, which the broker has dropped too."""
        if anchor.record > self._archived_record:
            ledger.archive(recovery.archivable(ledger, anchor.record))
            self._archived_record = anchor.record


#: A block without rows, for a table that has none.
_NO_ROWS: Final = Block(0, [])


def _batch(events: ColumnBuilder, edges: ColumnBuilder, ledger: Ledger) -> Batch:
    """Return the collected rows, and the states of their tasks now."""
    block = events.take()
    runs = block.columns[_TASK]
    batch = _states_of([] if runs is None else {name for name in runs[0] if name}, ledger)
    batch.events, batch.edges = block, edges.take()
    return batch


_TASK: Final = TABLES["events"].index("task")


def _states_of(names: Iterable[bytes], ledger: Ledger) -> Batch:
    known = [task for name in names if (task := ledger.tasks.get(name)) is not None]
    states = [int(task.state) for task in known]
    return Batch(_NO_ROWS, _NO_ROWS, [task.name for task in known], states)


def rows_after(block: Block, sequence: int) -> Block:
    """Return the rows of a block that come after a journal row."""
    first = block.columns[0]  # `sequence`, which never falls
    if first is None:
        return block
    values, counts = first
    skipped = index = 0
    for count in counts:
        if count > 0:
            skipped += count if values[index] <= sequence else 0
            index += 1
        else:
            skipped += sum(value <= sequence for value in values[index : index - count])
            index -= count
    if not skipped:
        return block
    kept = [None if runs is None else _without_first(*runs, skipped) for runs in block.columns]
    return Block(block.rows - skipped, kept)


def _without_first(values: list[Any], counts: list[int], skipped: int) -> ColumnRuns:
    index = 0
    for number, count in enumerate(counts):
        size = abs(count)
        if skipped < size:
            if count > 0:
                return values[index:], [count - skipped, *counts[number + 1 :]]
            return values[index + skipped :], [count + skipped, *counts[number + 1 :]]
        skipped -= size
        index += 1 if count > 0 else size
    return None


#: The time between two reads when there is nothing new.
POLL_SECONDS: Final = 0.25

#: The longest pause on a busy machine.
_PAUSE_SECONDS_MAX: Final = 2.0

#: After an error of the disk or the journal.
_RETRY_SECONDS: Final = 2.0

#: The time between two reads of the broker's restarts, which are rare.
_RESTARTS_SECONDS: Final = 3.0

logger = logging.getLogger("taskyard.web")


class TurnLock:
    """A lock that goes to the thread that waits longest.

    The follower would otherwise take it again before a request that waits for it wakes up.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Follower:
    """Owns the feed and the view of one state directory."""

    def __init__(self, state: Path) -> None:
        """Open a state directory. Raises UnusableState if it has no journal."""
        self._feed = EventFeed(state)
        self._state = state
        self._restarts: list[lock.Start] = []
        self._restarts_until = 0.0
        self.view = View()
        self.lock = TurnLock()
        self.pace = Pace()
        #: The last error while reading. Pages show it.
        self.error: str | None = None
        #: Set once the view has reached the end of the journal.
        self.caught_up = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def restarts(self) -> list[lock.Start]:
        """Return the restarts of the broker. The file is read every few seconds at most."""
        now = time.monotonic()
        if now >= self._restarts_until:
            self._restarts = lock.read_starts(self._state)
            self._restarts_until = now + _RESTARTS_SECONDS
        return self._restarts

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def rows_behind(self) -> int:
        """Return how many journal rows the view has not read yet."""
        return max(self._feed.head_sequence - self._feed.sequence, 0)

    @property
    def rows_missing(self) -> int:
        return self._feed.rows_missing

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause = POLL_SECONDS
            try:
                self._read()
                self.error = None
            except (TaskyardError, OSError) as error:
                logger.warning("can't follow the journal: %s", error)
                self.error, pause = str(error), _RETRY_SECONDS
            self._stopped.wait(pause)

    def _read(self) -> None:
        used = time.thread_time()
        for batch in self._feed.read():
            for change in self.view.changes(batch):
                with self.lock:
                    change()
                pause = self.pace.pause_seconds(time.thread_time() - used)
                if self.caught_up.is_set() and pause:
                    self._stopped.wait(min(pause, _PAUSE_SECONDS_MAX))
                used = time.thread_time()
                if self._stopped.is_set():
                    return
        if not self.caught_up.is_set():
            with self.lock:
                self.view.prepare()
            self.caught_up.set()
