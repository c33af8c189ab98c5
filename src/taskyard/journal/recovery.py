"""Recovery: load the newest sound snapshot, then `apply` the rows after it.

Owns the encoding of records into row bodies and the choice of the snapshot. A damaged snapshot is
skipped with a warning if an older snapshot, or the rows alone, still give the complete state.
Otherwise recovery raises. Also finds ended tasks that a compaction moved out of memory:
`recall_for` loads tasks that an event names, `output_in` finds a task's output.

Decides nothing and writes nothing. A row's body is one byte of format version and the turn's
records as MessagePack. A new format needs a new version number with its writer, the old reader and
a golden file, all in one commit. A field added at the end of a record, with a default, is not a new
format.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from taskyard.core import events, identity
from taskyard.core.apply import apply
from taskyard.core.blobs import Blob, Content, length_of, text_of
from taskyard.core.ledger import Ledger
from taskyard.core.model import EndedTask, Stream
from taskyard.core.records import AnyRecord, Cancelled, Finished, Progressed
from taskyard.errors import JournalDamaged
from taskyard.journal import chain, snapshot
from taskyard.journal.archive import END, Archive, Streams
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.snapshot import SnapshotReader
from taskyard.journal.store import Head, Row, StoreReader

_T = TypeVar("_T")

logger = logging.getLogger("taskyard.journal")


#: The format of a row's body, as written by this version.
JOURNAL_FORMAT: Final = 1

_encoder = msgspec.msgpack.Encoder()


@cache
def _decoder() -> msgspec.msgpack.Decoder[list[AnyRecord]]:
    """Return the decoder of records. A new journal needs none, and it takes long to build."""
    return msgspec.msgpack.Decoder(list[AnyRecord])


def encode(records: list[AnyRecord]) -> bytes:
    """Encode records into the body of a row."""
    buffer = bytearray([JOURNAL_FORMAT])
    _encoder.encode_into(records, buffer, 1)
    return bytes(buffer)


def decode(body: bytes) -> list[AnyRecord]:
    """Decode the records of a row's body."""
    if not body:
        raise JournalDamaged("a row of the journal is empty", RESTORE_HINT)
    if body[0] != JOURNAL_FORMAT:
        raise chain.unknown_format("the journal", body[0], JOURNAL_FORMAT)
    try:
        return _decoder().decode(body[1:])
    except msgspec.MsgspecError as error:
        raise JournalDamaged(
            f"a row of the journal can't be read ({error})", RESTORE_HINT
        ) from error


def open_ledger(directory: Path, store: StoreReader, index: Archive | None = None) -> Ledger:
    """Load the ledger as of the newest row. A given index stays open."""
    with Archive(directory) as own:
        covered = check_index(index or own, store)
    ledger, sequence = recovery_base(directory, store, covered)
    return recover(store, ledger, sequence)


def recover(store: StoreReader, ledger: Ledger | None = None, after: int = 0) -> Ledger:
    """Apply all rows after `after` to a snapshot's ledger, or to an empty ledger."""
    ledger = Ledger() if ledger is None else ledger
    for row in store.rows(after):
        apply_row(ledger, row)
    return ledger


def apply_row(ledger: Ledger, row: Row) -> list[AnyRecord]:
    """Apply the records of a row that follows the ledger, and return them."""
    records = records_of(row, ledger.record)
    for record in records:
        apply(ledger, record)
    return records


def records_of(row: Row, before: int) -> list[AnyRecord]:
    """Decode a row that follows record number `before`, and check the numbers of its records."""
    if row.record_first != before + 1:
        raise JournalDamaged(
            f"row {row.sequence} begins with record {row.record_first}",
            f"records {before + 1} to {row.record_first - 1} are missing ({RESTORE_HINT})",
        )
    records = decode(row.body)
    if len(records) != row.record_last - before:
        raise JournalDamaged(
            f"row {row.sequence} should end with record {row.record_last}, "
            f"but ends with {before + len(records)}",
            RESTORE_HINT,
        )
    return records


def last_time_ns(store: StoreReader) -> int:
    """Return the time of the newest record in the rows of a journal, or 0 without rows."""
    for row in store.rows(max(store.head.sequence - 1, 0)):
        return max(record.at_ns for record in decode(row.body))
    return 0


def recovery_base(directory: Path, store: StoreReader, through: int) -> tuple[Ledger, int]:
    """Return the ledger to start from and its row.

    That is the newest sound snapshot up to row `through`. If no row was ever trimmed, it may be an
    empty ledger and row 0. Raises JournalDamaged if rows in between are lost.
    """
    ledger, sequence = newest_sound(directory, store, through, SnapshotReader.restore)
    return (Ledger() if ledger is None else ledger), sequence


def newest_sound(
    directory: Path, store: StoreReader, through: int, use: Callable[[SnapshotReader], _T]
) -> tuple[_T | None, int]:
    """Call `use` with the newest sound snapshot up to row `through`; return its result and the row.

    Returns None and 0 if no snapshot is sound and no row was ever trimmed. `use` reads the whole
    snapshot.
    """
    wrong: list[str] = []
    for sequence in _usable_snapshots(directory, store, through):
        try:
            with snapshot.read(directory, sequence) as found:
                check_snapshot(found, store)
                return use(found), sequence
        except JournalDamaged as damage:
            logger.warning("%s: %s; trying an older snapshot", directory, damage.wrong)
            wrong.append(damage.wrong)
    if store.anchor.sequence:
        raise _no_base(store.anchor, wrong)
    return None, 0


def _usable_snapshots(directory: Path, store: StoreReader, through: int) -> Iterator[int]:
    """Yield the rows of snapshots up to `through` that kept rows continue, newest first."""
    for sequence in snapshot.sequences(directory):
        if sequence > store.head.sequence:
            raise JournalDamaged(
                f"the journal ends at row {store.head.sequence}, but there is a snapshot of row "
                f"{sequence}",
                f"rows {store.head.sequence + 1}..{sequence} are lost ({RESTORE_HINT})",
            )
        if store.anchor.sequence <= sequence <= through:
            yield sequence


def check_snapshot(found: SnapshotReader, store: StoreReader) -> None:
    """Raise unless a snapshot was taken of this journal's own row."""
    name = snapshot.path_of(Path(), found.head.sequence).name
    if found.identity != store.identity:
        raise snapshot.damaged(name, "belongs to another journal")
    if found.head != head_at(store, found.head.sequence):
        raise snapshot.damaged(name, "belongs to another version of this journal")


def head_at(store: StoreReader, sequence: int) -> Head:
    """Return the head of a kept row, or of the last trimmed row."""
    if sequence == store.anchor.sequence:
        return store.anchor
    return next(store.rows(sequence - 1)).head


def _no_base(anchor: Head, wrong: list[str]) -> JournalDamaged:
    reasons = "; ".join(wrong) if wrong else "no snapshot covers them"
    return JournalDamaged(
        f"rows 1..{anchor.sequence} are trimmed, and {reasons}",
        f"the state up to row {anchor.sequence} is lost ({RESTORE_HINT})",
    )


def check_index(index: Archive, store: StoreReader) -> int:
    """Return the last row that the index covers. Raises if it lacks trimmed rows."""
    covered = index.covered()
    if covered is None:
        sequence = 0
    else:
        identity, head = covered
        sequence = head.sequence
        if identity != store.identity:
            raise JournalDamaged(f"{index.path.name} belongs to another journal", RESTORE_HINT)
        if sequence > store.head.sequence:
            raise JournalDamaged(
                f"the journal ends at row {store.head.sequence}, but {index.path.name} covers row "
                f"{sequence}",
                f"rows {store.head.sequence + 1}..{sequence} are lost ({RESTORE_HINT})",
            )
    if sequence < store.anchor.sequence:
        missing = f"covers rows up to {sequence}" if covered else "is missing"
        raise JournalDamaged(
            f"rows 1..{store.anchor.sequence} are trimmed, and {index.path.name} {missing}",
            f"names and results of tasks that ended before are lost ({RESTORE_HINT})",
        )
    return sequence


class EndedTaskIndex(Protocol):
    """Ended tasks that are no longer in memory."""

    @property
    def has_any(self) -> bool:
        """Return False if all ended tasks are in memory, so that a lookup is needless."""

    def find(self, names: list[bytes]) -> list[EndedTask]:
        """Return the ended tasks among these names, in no order."""

    def streams(self, name: bytes, attempt: int = END) -> Streams | None:
        """Return stdout and stderr of an attempt, or None if they are not kept here.

        Without an attempt, stdout is the result of a DONE task, or the cause of a CANCELLED task as
        in `causes_in`.
        """


def recall_for(ledger: Ledger, index: EndedTaskIndex, names: Iterable[bytes]) -> None:
    """Load archived tasks into memory before the scheduler handles their names."""
    known = ledger.tasks
    unknown = [name for name in names if name not in known]
    if unknown:
        for ended in index.find(unknown):
            ledger.recall(ended)


def recall_for_event(ledger: Ledger, index: EndedTaskIndex, event: events.Event) -> None:
    """Load the archived tasks that an event names. The broker calls it before `handle`."""
    if not index.has_any:
        return
    if type(event) is events.SubmitRequested:
        recall_for(ledger, index, identity.candidates_of(event.submission))
        return
    names = _NAMES_BY_EVENT.get(type(event))
    if names is not None:
        recall_for(ledger, index, names(event))
        scope = getattr(event, "scope", None)
        if scope is not None and scope.any_campaign:
            keys = (key for name in names(event) for key in identity.everywhere(ledger, name))
            recall_for(ledger, index, keys)
        if type(event) is events.TasksReturned:
            recall_for(ledger, index, _returned_after(ledger, event))
        held = ledger.tasks.get(getattr(event, "held", b""))
        if held is not None and held.terms.campaign:
            campaign = held.terms.campaign
            recall_for(ledger, index, [identity.spelling(campaign, one) for one in names(event)])


def _returned_after(ledger: Ledger, event: events.TasksReturned) -> Iterator[bytes]:
    """Yield the keys that returned tasks may depend on."""
    for name, after in zip(event.names, event.after or (), strict=False):
        task = ledger.tasks.get(name)
        yield from after
        if task is not None and task.terms.campaign:
            yield from [identity.spelling(task.terms.campaign, one) for one in after]


def _names_of_scope(
    event: events.CancelRequested | events.RetryRequested | events.ListRequested,
) -> Iterable[bytes]:
    return event.scope.names or ()


_NAMES_BY_EVENT: dict[type[events.Event], Callable[[Any], Iterable[bytes]]] = {
    events.TasksReturned: attrgetter("names"),
    events.CancelRequested: _names_of_scope,
    events.RetryRequested: _names_of_scope,
    events.WatchRequested: lambda event: event.names or (),
    events.TasksReported: attrgetter("names"),
    events.TasksProgressed: attrgetter("names"),
    events.LookupRequested: attrgetter("names"),
    events.ListRequested: _names_of_scope,
    events.ResultsRequested: attrgetter("names"),
    events.ExplainRequested: lambda event: (event.name,),
    events.PartRequested: lambda event: (event.name,),
}


def archivable(ledger: Ledger, record: int, among: Iterable[bytes] | None = None) -> list[bytes]:
    """Return the tasks that a ledger can drop (`Ledger.archive`) once the index covers `record`.

    These ended up to that record, or were recalled since. With `among`, only tasks of these names
    are looked at, which may have ended again since.
    """
    known = ledger.tasks
    tasks = known.values() if among is None else [known[name] for name in among if name in known]
    return [task.name for task in tasks if task.ending is not None and task.ending.record <= record]


def results_in(record: AnyRecord, number: int, names: list[bytes]) -> list[Content]:
    """Return the results of these tasks, which the given record must have finished."""
    results: dict[bytes, Content] = {}
    if isinstance(record, Finished):
        results = dict(zip(record.names, record.results or repeat(b""), strict=False))
    for name in names:
        if name not in results:
            raise JournalDamaged(f"record {number} has no result of {name!r}", RESTORE_HINT)
    return [results[name] for name in names]


def causes_in(record: Cancelled) -> list[bytes]:
    """Return why each task of a record was cancelled.

    The name of the cancelled task that it depended on, or b"" if the request named the task itself.
    """
    asked = len(record.names) - len(record.causes)
    return [*[b""] * asked, *(record.names[at] for at in record.causes)]


def outputs_in(record: Progressed) -> list[tuple[bytes, int, Content, Content]]:
    """Return each task in a record of output, with its attempt, its stdout and its stderr.

    Both streams together count as stdout. Tasks without output are left out.
    """
    stderrs = record.stderrs or [b""] * len(record.names)
    columns = zip(record.names, record.attempts, record.texts, stderrs, strict=True)
    return [found for found in columns if found[2] or found[3]]


def stream_in(record: Progressed, index: int, stream: Stream) -> Content:
    """Return a stream of an attempt from a record. Both streams together count as stdout."""
    if stream is Stream.STDOUT:
        return record.texts[index]
    return b"" if record.stderrs is None else record.stderrs[index]


def output_in(record: AnyRecord, number: int, name: bytes) -> Content:
    """Return the kept output of a task from a decoded record: stdout, then stderr."""
    found = outputs_in(record) if isinstance(record, Progressed) else []
    texts = [(out, err) for own, _, out, err in found if own == name]
    if not texts:
        raise JournalDamaged(f"record {number} has no output of {name!r}", RESTORE_HINT)
    text = b"".join(map(text_of, texts[-1]))
    bytes_total = sum(map(length_of, texts[-1]))
    return Blob(b"", bytes_total, text) if bytes_total > len(text) else text
