"""Compaction while the broker runs: when it starts, and its steps between turns.

A child process reads the rows and writes history, index and snapshot
(`journal.compaction_process`). All else runs here between turns, in steps of milliseconds: trim
rows, remove older snapshots, drop ended tasks. Only one compaction runs at a time. A failure is
logged, the compaction is retried later, and the broker continues. Independent of the turns'
content.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.limits import LAG_SLOW_PERCENT, SECOND_NS
from taskyard.core.states import CANCELLED, DONE
from taskyard.errors import JournalDamaged
from taskyard.journal import snapshot
from taskyard.journal.compaction_process import CompactionChild
from taskyard.journal.ended_tasks import RECALLED_MAX, EndedTasks
from taskyard.journal.store import DISK_RESERVE_BYTES, Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.journal.compaction import DatabaseTerm
    from taskyard.journal.compaction_process import CompactionReport
    from taskyard.journal.store import Head
    from taskyard.net.protocols import Clock

logger = logging.getLogger("taskyard.broker")

#: Rows to replay at a start: some seconds, and as much again for the compaction.
ROWS_MAX: Final = 200_000

#: Disk space of the rows, which may have large payloads. At least the size of the newest snapshot,
#: or rewriting that would be most of the work.
ROWS_BYTES_MAX: Final = 256 * 1024 * 1024

#: Ended tasks in memory, some 240 bytes each. At least the number of unfinished tasks, so memory at
#: most doubles.
ENDED_MAX: Final = 150_000

#: Work that arrives while any compaction starts its process.
LAG_MIN: Final = 20_000

#: How often to check whether a compaction is due, and whether the child has ended.
DUE_CHECK_NS: Final = SECOND_NS // 5
CHILD_POLL_NS: Final = SECOND_NS // 20

#: The longest step between two turns, and the pause after it, in steps. A step that is slow because
#: the machine is loaded lengthens no pause.
STEP_NS: Final = SECOND_NS // 200
PAUSE_STEPS: Final = 4

#: The pause while producers wait for the compaction, in steps.
PAUSE_STEPS_LAGGING: Final = 1

#: The newest rows stay, up to this part of the limits: peers that follow the records, and standbys,
#: go on with them after they were cut off.
KEPT_PART: Final = 10

#: Rows trimmed in a step: up to one transaction, and up to its time. The minimum holds on a
#: loaded machine, where every step takes long.
TRIM_ROWS_MAX: Final = 256
TRIM_ROWS_MIN: Final = 8

#: The delay after a failure, doubled after each further failure: a full disk or a starved machine
#: does not recover at once.
RETRY_NS: Final = 60 * SECOND_NS
RETRY_NS_MAX: Final = 3600 * SECOND_NS


class CompactionLimits(Struct, frozen=True):
    """The limits beyond which a compaction is due."""

    rows: int = ROWS_MAX
    rows_bytes: int = ROWS_BYTES_MAX
    ended: int = ENDED_MAX
    #: Fewer rows and ended tasks than this are not a lag, even with smaller limits.
    lag_min: int = LAG_MIN

    def lenient(self) -> CompactionLimits:
        """Return the limits for measuring the lag."""
        rows, ended = max(self.rows, self.lag_min), max(self.ended, self.lag_min)
        return CompactionLimits(rows, self.rows_bytes, ended)


class Compactor:
    """Runs compactions, a step after each turn."""

    def __init__(
        self,
        directory: Path,
        store: Store,
        archive: EndedTasks,
        clock: Clock,
        limits: CompactionLimits,
    ) -> None:
        self._directory = directory
        self._store = store
        self._archive = archive
        self._clock = clock
        self._limits = limits
        #: For the child process, if the journal is in a database.
        self.database: DatabaseTerm | None = None
        self._child: CompactionChild | None = None
        self._began_ns = 0
        #: The steps being run, and whether they end a compaction.
        self._steps: Iterator[None] | None = None
        self._next_ns = 0
        self._failures = 0
        self._retry_ns = 0
        #: The head at the last step that found nothing to do.
        self._idle_head: Head | None = None
        #: Compactions completed.
        self.completed = 0
        #: Work since the last compaction, in percent of the work that makes a compaction due.
        self.lag_percent = 0

    def run_step(self) -> int | None:
        """Run at most one step. Returns the time until the next step, or None."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_ns:
            return self._next_ns - now_ns if self._is_busy else None
        if self._is_unchanged():
            return None
        self.lag_percent = int(100 * self._largest_ratio(self._limits.lenient()))
        try:
            wait_ns = self._advance(now_ns)
        except JournalDamaged as damage:
            self._steps = None
            self._failed(str(damage))
            wait_ns = DUE_CHECK_NS
        now_ns = self._clock.monotonic_ns()
        self._next_ns = now_ns + wait_ns
        return wait_ns if self._is_busy else None

    def _is_unchanged(self) -> bool:
        """Return whether nothing was committed since a step that found nothing to do."""
        if self._store.head is not self._idle_head or self._is_busy or self._failures:
            return False
        return self.database is None and self._archive.recalled_count <= RECALLED_MAX

    @property
    def _is_busy(self) -> bool:
        return self._child is not None or self._steps is not None

    def _advance(self, now_ns: int) -> int:
        """Run a step and return the pause after it."""
        if self._steps is None and self._child is not None:
            poll = self._child.poll()
            if poll is None:
                return CHILD_POLL_NS
            self._finish_child(poll)
        elif self._steps is None:
            self._begin(now_ns)
        if self._steps is None:
            self._idle_head = None if self._is_busy else self._store.head
            return DUE_CHECK_NS
        self._step(self._steps)
        lagging = self.lag_percent >= LAG_SLOW_PERCENT
        steps = PAUSE_STEPS_LAGGING if lagging else PAUSE_STEPS
        return steps * min(self._clock.monotonic_ns() - now_ns, STEP_NS)

    def _step(self, steps: Iterator[None]) -> None:
        try:
            next(steps)
        except StopIteration:
            self._steps = None

    def _begin(self, now_ns: int) -> None:
        """Start due work: the filter first, because it speeds up every turn."""
        if self._archive.needs_filter:
            self._steps = self._archive.fill_filter()
        elif self._archive.recalled_count > RECALLED_MAX:
            self._steps = self._archive.forget_recalled()
        elif now_ns >= self._retry_ns and self._is_due:
            self._start(now_ns)

    @property
    def _is_due(self) -> bool:
        """Return whether a limit is exceeded, or files of earlier compactions must be fetched."""
        lacks_files = self.database is not None and self.database.lacks_files
        return lacks_files or self._largest_ratio(self._limits) > 1

    def _largest_ratio(self, limits: CompactionLimits) -> float:
        """Return the largest of rows, ended tasks and bytes, each as a ratio to its limit."""
        store, counts = self._store, self._archive.ledger.counts
        unfinished = sum(counts) - counts[DONE] - counts[CANCELLED]
        return max(
            (store.head.sequence - store.anchor.sequence) / limits.rows,
            self._archive.ended_count / max(limits.ended, unfinished),
            store.used_bytes() / max(limits.rows_bytes, self._snapshot_bytes()),
        )

    def _snapshot_bytes(self) -> int:
        newest = next(iter(snapshot.sequences(self._directory)), None)
        return 0 if newest is None else snapshot.path_of(self._directory, newest).stat().st_size

    def _start(self, now_ns: int) -> None:
        # History and index are each smaller than the rows. For a while there are two snapshots.
        needed = DISK_RESERVE_BYTES + 2 * self._store.used_bytes() + self._snapshot_bytes()
        free = self._store.disk_free_bytes()
        if free < needed:
            self._failed(f"it needs {needed} bytes of disk, but only {free} are free")
            return
        try:
            self._child = CompactionChild(
                self._directory, self._store.identity, self._store.head, self.database
            )
        except OSError as error:
            self._failed(f"the child process can't be started ({error})")
            return
        self._began_ns = now_ns
        logger.info("compacting the journal up to row %d", self._child.head.sequence)

    def _finish_child(self, poll: CompactionReport) -> None:
        child, self._child = self._child, None
        assert child is not None  # noqa: S101 - it has just reported
        if poll.failed:
            self._failed(poll.failed)
            return
        logger.info(
            "%d rows added to the history, %d tasks in the snapshot, %d added to the index",
            poll.rows,
            poll.unfinished,
            poll.ended,
        )
        self._steps = self._settle(child.head)

    def _failed(self, why: str) -> None:
        wait_ns = min(RETRY_NS << self._failures, RETRY_NS_MAX)
        self._failures += 1
        self._retry_ns = self._clock.monotonic_ns() + wait_ns
        logger.warning(
            "compaction failed: %s. Nothing is lost, but the journal grows; retrying in %d s",
            why,
            wait_ns // SECOND_NS,
        )

    def _settle(self, head: Head) -> Iterator[None]:
        """Finish a compaction, step by step, if the index still covers exactly this row.

        The child has read back everything that replaces the rows.
        """
        covered = self._archive.index.covered()
        if covered != (self._store.identity, head):
            raise JournalDamaged(
                f"{self._archive.index.path.name} does not cover row {head.sequence}",
                "no row was trimmed: stop other writers",
            )
        yield
        yield from self._archive.forget(head.sequence, head.record)
        yield from self._trim(min(head.sequence, self._store.head.sequence - self._kept_rows()))
        if self._largest_ratio(self._limits) > 1:  # the newest rows are large
            yield from self._trim(head.sequence)
        yield from self._drop_snapshots(head.sequence)
        yield from self._archive.forget_recalled()
        if self.database is not None:
            self.database.lacks_files = False
        self._failures = 0
        self.completed += 1
        took_ns = self._clock.monotonic_ns() - self._began_ns
        logger.info(
            "compacted the journal up to row %d in %.1f s", head.sequence, took_ns / SECOND_NS
        )

    def _kept_rows(self) -> int:
        """Return how many of the newest rows stay. Rows are taken to be of the same size."""
        rows = self._store.head.sequence - self._store.anchor.sequence
        row_bytes = self._store.used_bytes() / max(rows, 1)
        kept = self._limits.rows_bytes / max(row_bytes, 1)
        return int(min(self._limits.rows, kept) / KEPT_PART)

    def _trim(self, through: int) -> Iterator[None]:
        rows = TRIM_ROWS_MAX // 8
        while self._store.anchor.sequence < through:
            began_ns = self._clock.monotonic_ns()
            self._store.trim(min(self._store.anchor.sequence + rows, through))
            rows = _adapted(rows, self._clock.monotonic_ns() - began_ns)
            yield

    def _drop_snapshots(self, newest: int) -> Iterator[None]:
        """Remove older snapshots. A failure is left to the next compaction."""
        for sequence in snapshot.sequences(self._directory):
            if sequence < newest:
                try:
                    snapshot.remove(self._directory, sequence)
                except OSError as error:
                    logger.warning("can't remove an old snapshot: %s", error)
                yield

    def close(self) -> None:
        """Kill the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def _adapted(rows: int, took_ns: int) -> int:
    """Adapt the number of rows to the time of a step, by its duration."""
    if took_ns > STEP_NS:
        return max(rows // 2, TRIM_ROWS_MIN)
    return min(rows * 2, TRIM_ROWS_MAX) if took_ns < STEP_NS // 3 else rows
