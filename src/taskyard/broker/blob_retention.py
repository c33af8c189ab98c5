"""Counts blobs, and removes what no task names, in steps between turns.

A blob stays for some time after its last use, and while a task names it: by its payload while it
may still run, and by its result and output. The index of ended tasks lists the latter up to the row
that it covers, and the rows after that are read. With an age, blobs of ended tasks go after that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.core.blobs import PICKLE_MARK, Blob
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TASK_STATES_ENDED, TaskState
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import StreamKey, blobs_named, blobs_needed
from taskyard.journal.recovery import records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from taskyard.broker.blobs import BrokerBlobs
    from taskyard.core.blobs import Content
    from taskyard.core.ledger import Ledger
    from taskyard.journal.archive import Archive
    from taskyard.journal.blobs import BlobFile, BlobStore
    from taskyard.journal.store import StoreReader
    from taskyard.net.protocols import Clock

logger = logging.getLogger("taskyard.broker")

#: Files or tasks looked at in one step: a millisecond or two.
FILES_PER_STEP: Final = 100
TASKS_PER_STEP: Final = 2_000

#: The pause between two scans, and the same as a multiple of the time that the last scan took.
SCAN_NS: Final = 10 * SECOND_NS
SCAN_PAUSES: Final = 50


class BlobRetention:
    """Counts and removes the blobs of a broker, a step after each turn."""

    def __init__(  # noqa: PLR0913, PLR0917  # all that may name a blob
        self,
        blobs: BrokerBlobs,
        ledger: Ledger,
        clock: Clock,
        rows: StoreReader,
        index: Archive | None,
        result_of: Callable[[bytes], Content | None],
    ) -> None:
        """`rows` are of the journal, and `index` has ended tasks.

        `result_of` returns the result of a task that is done.
        """
        self._blobs = blobs
        self._store: BlobStore = blobs.store
        self._ledger = ledger
        self._clock = clock
        self._rows = rows
        self._index = index
        self._result_of = result_of
        self._started_ns = clock.monotonic_ns()
        self._scan: Iterator[None] | None = self._scanned()
        self._next_ns = 0
        #: The time that the steps of a scan took.
        self._busy_ns = 0

    def run_step(self) -> int | None:
        """Run one step. Return the time until the next one."""
        now_ns = self._clock.monotonic_ns()
        if self._scan is None:
            interval_ns = min(SCAN_NS, max(self._blobs.limits().grace_ns, SECOND_NS // 10))
            wait_ns = self._next_ns + interval_ns - now_ns
            if wait_ns > 0:
                return wait_ns
            self._scan = self._scanned()
        try:
            has_ended = next(self._scan, self) is self
        except OSError as error:  # a full disk: the next scan tries again
            logger.warning("blobs: %s", error.strerror)
            has_ended = True
        ended_ns = self._clock.monotonic_ns()
        self._busy_ns += ended_ns - now_ns
        if has_ended:
            self._next_ns = ended_ns + SCAN_PAUSES * self._busy_ns
            self._scan, self._busy_ns = None, 0
        return 0

    def _scanned(self) -> Iterator[None]:
        """Count everything and remove what is unused, in steps."""
        used_before, used = self._store.bytes_used, 0
        removable: list[BlobFile] = []
        for count, file in enumerate(self._store.walk()):
            used += file.bytes_total
            if self._is_old(file):
                removable.append(file)
            if count % FILES_PER_STEP == FILES_PER_STEP - 1:
                yield
        if isinstance(self._store, BlobFiles):
            since_ns = self._clock.wall_ns() - self._blobs.limits().grace_ns
            used += self._store.remove_unfinished(since_ns)
        self._store.bytes_used = used + max(0, self._store.bytes_used - used_before)
        if removable:
            yield from self._sweep(removable)
        self._store.flush()
        self._blobs.update_terms()

    def _is_old(self, file: BlobFile) -> bool:
        """Return whether the task that names a file is there by now, if there is one."""
        grace_ns = self._blobs.limits().grace_ns
        # After a start, clients may still have tasks that name it.
        is_new = self._clock.monotonic_ns() - self._started_ns < grace_ns
        return not is_new and self._clock.wall_ns() - file.used_ns >= grace_ns

    def _is_over(self, file: BlobFile) -> bool:
        """Return whether a file is older than files of ended tasks may be."""
        keep_ns = self._blobs.limits().keep_ns
        return keep_ns is not None and self._clock.wall_ns() - file.used_ns > keep_ns

    def _sweep(self, files: list[BlobFile]) -> Iterator[None]:
        """Remove files that nothing names, in steps."""
        needed: set[str] = set()
        yield from self._add_needed(needed)
        named: set[str] = set()
        yield from self._add_recent(named)
        count = bytes_total = 0
        for start in range(0, len(files), FILES_PER_STEP):
            some = files[start : start + FILES_PER_STEP]
            listed = self._listed([file.id for file in some if isinstance(file.id, str)])
            since_ns = self._clock.wall_ns() - self._blobs.limits().grace_ns
            for file in some:
                is_used = self._is_used(file, needed, (named, listed))
                if not is_used and self._store.remove(file.id, since_ns):
                    count += 1
                    bytes_total += file.bytes_total
            yield
        if count:
            logger.info("removed %d unused blobs of %d bytes", count, bytes_total)

    def _add_needed(self, names: set[str]) -> Iterator[None]:
        """Add the blobs of tasks that may still run, in steps."""
        tasks = [*self._ledger.tasks.values()]
        for start in range(0, len(tasks), TASKS_PER_STEP):
            for task in tasks[start : start + TASKS_PER_STEP]:
                if task.state in TASK_STATES_ENDED:
                    continue
                if isinstance(task.payload, Blob) or task.payload.startswith(PICKLE_MARK):
                    names |= blobs_needed(task, self._result_of)
            yield

    def _add_recent(self, names: set[str]) -> Iterator[None]:
        """Add the blobs that rows name which the index does not cover, in steps."""
        covered = None if self._index is None else self._index.covered()
        number = 1 if covered is None else covered[1].record + 1
        while (number := max(number, self._rows.anchor.record + 1)) <= self._rows.head.record:
            row = self._rows.row_of(number)
            assert row is not None  # noqa: S101  # it is after the anchor
            for record in records_of(row, row.record_first - 1):
                names.update(name for name, _ in blobs_named(record))
            number = row.record_last + 1
            yield

    def _listed(self, names: list[str]) -> set[str]:
        return set() if self._index is None else self._index.blobs_named(names)

    def _is_used(self, file: BlobFile, needed: set[str], named: Iterable[set[str]]) -> bool:
        blob = file.id
        if isinstance(blob, str):
            is_named = any(blob in names for names in named)
            return blob in needed or (is_named and not self._is_over(file))
        return not blob.is_upload and not (self._is_over(file) and self._is_settled(blob))

    def _is_settled(self, key: StreamKey) -> bool:
        """Return whether a stream's task has ended or failed. Tasks not in memory have ended."""
        known = self._ledger.tasks
        task = known.get(spelling(key.campaign, key.name)) or known.get(key.name)
        if task is None or task.state is TaskState.FAILED:
            return True
        return task.state in TASK_STATES_ENDED
