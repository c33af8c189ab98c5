"""Compaction: write the journal's rows to history, index and snapshot, then trim them.

A snapshot is a function of an older snapshot and the rows after it. So a compaction does not touch
the live scheduler. It replays the rows with `apply` and derives everything else on the way. Memory
holds only tasks that the rows mention (`ColdLedger`). Rows that mention very many tasks are split
into segments, each with the first three steps. Each step is durable before the next begins and can
be repeated:

    1. history files       existing files are trusted, and the replay skips their rows
    2. finished.sqlite     ended tasks, then the row up to which they are complete
    3. snapshot            without ended tasks, which are in the index
    4. rows trimmed        `compact` only, in bounded steps, after reading back steps 1 to 3
    5. older snapshots     `compact` only

A run that is killed after any step leaves a state from which the next run reaches the same end. The
caller holds the state lock, or is the child of a broker that does: the broker runs `export` in
another process (`compaction_process`) and does everything else itself.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain as chained
from itertools import repeat
from pathlib import Path
from typing import Final

import msgspec

from taskyard.core.apply import apply
from taskyard.core.blobs import Content
from taskyard.core.ledger import Ledger, to_ended_task
from taskyard.core.model import Ending
from taskyard.core.records import AnyRecord, Cancelled, Finished, Progressed, Submitted
from taskyard.core.snapshots.cold_ledger import ColdLedger
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import history, history_rows, recovery, schema, snapshot
from taskyard.journal.archive import (
    Archive,
    ArchiveWriter,
    IndexRow,
    row_of_end,
    row_of_output,
)
from taskyard.journal.history import HistoryPart
from taskyard.journal.row_file import RowFileWriter
from taskyard.journal.snapshot import SnapshotFile, SnapshotReader
from taskyard.journal.store import Head, Row, Store, StoreReader

#: Rows trimmed at a time. A live broker runs a turn in between.
TRIM_ROWS_PER_STEP: Final = 256

#: Tasks that a replay holds in memory, approximately: some 200 MB with everything derived.
TOUCHED_MAX: Final = 250_000

#: Results and output that are collected before they are written to the index, sorted by name.
INDEX_BYTES_MAX: Final = 16 * 1024 * 1024

#: Called with the step, the rows done and the rows in total.
Progress = Callable[[str, int, int], None]


logger = logging.getLogger("taskyard.journal")


class CompactionResult(msgspec.Struct):
    """Counts of one compaction. All zero if there was nothing to do."""

    #: The last row covered.
    sequence: int = 0
    record: int = 0
    rows: int = 0
    events: int = 0
    edges: int = 0
    #: Names of the history files written.
    files: list[str] = []
    #: Tasks that ended in these rows.
    ended: int = 0
    #: Tasks in the snapshot: all that have not ended.
    unfinished: int = 0
    rows_trimmed: int = 0
    snapshots_removed: int = 0


class DatabaseTerm(msgspec.Struct):
    """The database of a journal, and the term of its broker."""

    url: str
    epoch: int
    holder: str
    #: The state directory has not all files of earlier compactions.
    lacks_files: bool = False


def no_progress(_step: str, _done: int, _total: int) -> None:
    """Report nothing."""


#: Opens the index of a journal, in its directory, to add rows.
OpenIndex = Callable[[Path, bytes], ArchiveWriter]


def export(
    directory: Path,
    store: StoreReader,
    progress: Progress = no_progress,
    open_index: OpenIndex = ArchiveWriter,
) -> CompactionResult:
    """Write history, index and snapshot of all rows. Trims nothing."""
    head = store.head  # later rows wait for the next compaction
    with Archive(directory) as index:
        covered = recovery.check_index(index, store)
    try:
        reached = _history_end(directory, store)
        unfinished, sequence = _base(directory, store, reached, covered)
        outcome = CompactionResult(sequence, store.anchor.record, unfinished=unfinished)
        if sequence == reached == covered == head.sequence:
            outcome.record = head.record
            return outcome
        made, total = 0, head.sequence - sequence
        while outcome.sequence < head.sequence:
            base = outcome.sequence
            segment = _next_segment(store, base, head)
            replay = _Replay(directory, store, segment, outcome, reached)
            replay.run(base, total, progress, open_index)
            if made:
                snapshot.remove(directory, made)
            made = outcome.sequence
    except schema.DiskErrors as error:
        raise _failed(directory, error) from error
    return outcome


def compact(directory: Path, store: Store, progress: Progress = no_progress) -> CompactionResult:
    """Run `export`, then trim the covered rows and remove older snapshots."""
    outcome = export(directory, store, progress)
    head = recovery.head_at(store, outcome.sequence) if outcome.sequence else store.anchor
    verify_covered(directory, store, head)
    trim_covered(directory, store, outcome, progress)
    return outcome


def trim_covered(
    directory: Path, store: Store, outcome: CompactionResult, progress: Progress
) -> None:
    """Trim the rows of a compaction, and remove older snapshots."""
    before, through = store.anchor.sequence, outcome.sequence
    while store.anchor.sequence < through:
        store.trim(min(store.anchor.sequence + TRIM_ROWS_PER_STEP, through))
        progress("trimming rows", store.anchor.sequence - before, through - before)
    outcome.rows_trimmed = store.anchor.sequence - before
    older = [sequence for sequence in snapshot.sequences(directory) if sequence < through]
    try:
        for sequence in older:
            snapshot.remove(directory, sequence)
    except OSError as error:
        raise _failed(directory, error) from error
    outcome.snapshots_removed = len(older)


def verify_covered(directory: Path, store: StoreReader, head: Head) -> None:
    """Read back everything that replaces the rows up to `head`, before they are trimmed."""
    if head.sequence == 0:
        return
    with snapshot.read(directory, head.sequence) as found:
        recovery.check_snapshot(found, store)
        found.verify()
    with Archive(directory) as index:
        if recovery.check_index(index, store) < head.sequence:
            raise JournalDamaged(
                f"{index.path.name} does not cover row {head.sequence}", _RETRY_HINT
            )
    whole = history.parts(directory)
    for part in whole:
        if part.last > store.anchor.sequence:
            history.check_part(directory, part, store.anchor.sequence, deep=True)
    if not whole or whole[-1].last < head.sequence:
        raise JournalDamaged(f"the history does not cover row {head.sequence}", _RETRY_HINT)


#: The consequence of a file that covers fewer rows than it did a moment ago.
_RETRY_HINT = "no row was trimmed and nothing is lost: stop other writers, then compact again"


def _failed(directory: Path, error: Exception) -> JournalFailed:
    return schema.write_error(error, "compacting the journal", directory)


def _history_end(directory: Path, store: StoreReader) -> int:
    """Return the last row of the history. Raises JournalDamaged if its files have gaps."""
    whole = history.parts(directory)
    for problem in history.problems(whole, store.anchor.sequence, store.head.sequence):
        wrong = f"{directory / history.FOLDER}: {problem.wrong}"
        raise JournalDamaged(wrong, problem.lost)
    return whole[-1].last if whole else 0


def _base(directory: Path, store: StoreReader, reached: int, covered: int) -> tuple[int, int]:
    """Return the number of tasks where the replay begins, and that row.

    It begins before the first row that history or index lack. Removed history of trimmed rows can't
    be rebuilt, so the replay then continues from the rows that are left.
    """
    try:
        return _sound_base(directory, store, min(reached, covered))
    except JournalDamaged:
        if reached >= covered:
            raise
    tasks, sequence = _sound_base(directory, store, covered)
    logger.warning(
        "%s: the history ends at row %d, and the rows up to %d can't be added any more",
        directory,
        reached,
        sequence,
    )
    return tasks, sequence


def _sound_base(directory: Path, store: StoreReader, through: int) -> tuple[int, int]:
    def verified(found: SnapshotReader) -> int:
        found.verify()
        return found.rest.tasks

    tasks, sequence = recovery.newest_sound(directory, store, through, verified)
    return tasks or 0, sequence


def _next_segment(store: StoreReader, base: int, head: Head) -> tuple[set[bytes], Head]:
    """Read ahead until the names mentioned fill the memory limit, or up to `head`.

    Return all names in the records, except names that they submit, and the head of the last row.
    """
    touched: set[bytes] = set()
    last = head
    for row in store.rows(base):
        for record in recovery.records_of(row, row.record_first - 1):
            touched.update(_names_in(record))
        last = row.head
        if len(touched) >= TOUCHED_MAX or row.sequence == head.sequence:
            break
    return touched, last


def _names_in(record: AnyRecord) -> Iterable[bytes]:
    """Return the names of tasks that a record mentions without submitting them."""
    if isinstance(record, Submitted):
        after, own = record.submission.after, record.submission.names
        if after is None:
            return ()
        return set(chained.from_iterable(after)).difference(own)
    names = getattr(record, "names", ())
    after = getattr(record, "after", None)
    return chained(names, *after) if after else names


class _Replay:
    """A replay over the rows of a segment, with everything that it writes."""

    def __init__(
        self,
        directory: Path,
        store: StoreReader,
        segment: tuple[set[bytes], Head],
        outcome: CompactionResult,
        reached: int,
    ) -> None:
        self._directory = directory
        self._store = store
        self._touched, self._head = segment
        #: The last row in the history.
        self._reached = reached
        self._whole = dict.fromkeys(part.last for part in history.parts(directory))
        self._writer: RowFileWriter | None = None
        self._first = 0
        #: For the index, and how long they are.
        self._index_rows: list[IndexRow] = []
        self._index_bytes = 0
        self._ended: list[bytes] = []
        self._outcome = outcome
        self._file = SnapshotFile(directory, store.identity, self._head)

    def run(self, base: int, total: int, progress: Progress, open_index: OpenIndex) -> None:
        with ExitStack() as stack:
            stack.callback(self._file.close)
            old = None
            if base:
                old = stack.enter_context(snapshot.read(self._directory, base))
            self._open(old)
            index = self._index = open_index(self._directory, self._store.identity)
            stack.callback(index.close)
            stack.callback(self._abandon)
            for row in self._store.rows(base):
                self._replay(row)
                if self._is_full(row.sequence, self._head):
                    self._close_part(row.sequence)
                self._outcome.rows += 1
                progress("exporting rows", self._outcome.rows, total)
                if row.sequence == self._head.sequence:
                    break
            self._archive()
            index.commit(self._head)
            edges = () if old is None else old.edges()
            rest = self._cold.finish(edges, self._file.writer.add_edges)
            self._file.finish(rest)
        outcome = self._outcome
        outcome.sequence, outcome.record = self._head.sequence, self._head.record
        outcome.unfinished = rest.tasks

    def _open(self, old: SnapshotReader | None) -> None:
        """Read the snapshot before these rows."""
        write = self._file.writer.add_tasks
        if old is None:
            self._cold = ColdLedger(self._touched, write)
        else:
            self._cold = cold = ColdLedger(self._touched, write, old.rest)
            if old.rest.edges:
                for columns in old.chunks():
                    cold.survey(columns)
                for edges in old.edges():
                    cold.survey_edges(edges)
            for columns in old.chunks():
                cold.read(columns)
            cold.link(old.edges())
        self._ledger = self._cold.ledger

    def _replay(self, row: Row) -> None:
        is_new = row.sequence > self._reached
        if is_new and self._writer is None:
            self._writer, self._first = history.new_file(self._directory), row.sequence
        for record in recovery.records_of(row, self._ledger.record):
            self._write(row.sequence, record)
            if isinstance(record, Finished | Cancelled):
                self._ended += record.names
                self._keep(_ended_rows(self._ledger, record))
            elif isinstance(record, Progressed):
                number = self._ledger.record
                self._keep(
                    row_of_output(name, attempt, number, (out, err))
                    for name, attempt, out, err in recovery.outputs_in(record)
                )

    def _write(self, sequence: int, record: AnyRecord) -> None:
        """Apply a record, and write its rows unless the history has them."""
        writer, ledger = self._writer, self._ledger
        if isinstance(record, Submitted) and self._cold.enter(record):
            if writer is not None:
                history_rows.write_submission(
                    ledger.record, sequence, record, writer.events, writer.edges
                )
        elif writer is None:
            apply(ledger, record)
        else:
            history_rows.write_rows(ledger, sequence, record, writer.events, writer.edges)
        if writer is not None:
            writer.flush_if_full()

    def _is_full(self, sequence: int, head: Head) -> bool:
        """Return whether a part ends here: an existing part, a full part, or the last."""
        if self._writer is None:
            return sequence in self._whole
        events = self._writer.written["events"] + self._writer.events.rows
        return events >= history.EVENTS_PER_FILE_MAX or sequence == head.sequence

    def _close_part(self, sequence: int) -> None:
        """Close a part and archive ended tasks, so that memory holds tasks of one part only."""
        if self._writer is not None:
            part = HistoryPart(self._first, sequence)
            self._writer.finish(part.path(self._directory), self._first, sequence)
            self._outcome.events += self._writer.written["events"]
            self._outcome.edges += self._writer.written["edges"]
            self._writer = None
            self._outcome.files.append(part.name)
        self._archive()

    def _keep(self, rows: Iterable[IndexRow]) -> None:
        """Keep rows for the index, a bounded number of bytes."""
        for row in rows:
            self._index_rows.append(row)
            self._index_bytes += len(row.content)
        if self._index_bytes > INDEX_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        self._index.add(self._index_rows)
        self._index_rows, self._index_bytes = [], 0

    def _archive(self) -> None:
        self._flush()
        self._ledger.archive(self._ended)
        self._outcome.ended += len(self._ended)
        self._ended = []

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _ended_rows(ledger: Ledger, record: Finished | Cancelled) -> Iterator[IndexRow]:
    """Yield the index rows of the tasks that a record ended, with results or causes."""
    results: Iterable[Content]
    if isinstance(record, Cancelled):
        results = recovery.causes_in(record)
    else:
        results = record.results or repeat(b"")
    ending = Ending(ledger.record, record.at_ns)
    ended = (to_ended_task(task, ending) for task in ledger.named(record.names))
    return map(row_of_end, ended, results)
