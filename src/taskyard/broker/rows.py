"""Decoded rows of the journal, the budget of a turn, and pages for clients that follow the records.

Replies often need neighbouring records, and followers the newest. So a few rows stay decoded.

The scheduler emits a `RecordPage` with a cursor. `RecordStreams` holds it until there are newer
records and fills it after the commit, so a client never sees records that a crash could undo. A
page is bounded, and the client asks for the next with the number of the last record. No cursor is
kept, so a slow client costs nothing and a restart loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct, structs

from taskyard.core import identity
from taskyard.core.effects import RecordPage
from taskyard.core.entities import Task
from taskyard.core.events import Scope
from taskyard.core.ledger import Ledger
from taskyard.core.records import AnyRecord, Paused, Resumed, Submitted
from taskyard.errors import JournalDamaged
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.recovery import EndedTaskIndex, recall_for, records_of
from taskyard.journal.store import StoreReader

#: Rows that are kept, the tasks that they name, and their bytes in the journal: enough for clients
#: that ask in order, and little compared with the tasks in memory.
ROWS_KEPT: Final = 64
NAMES_KEPT: Final = 40_000
BYTES_KEPT: Final = 8 * 1024 * 1024

#: What completing replies may cost in a turn, which delays all other clients. Costs are counted,
#: never measured, so the same events give the same turns. A unit is about a nanosecond.
TURN_COST_MAX: Final = 100_000_000

#: The cost of an access to the journal or the index, and of each byte read there.
READ_COST: Final = 200_000
READ_BYTE_COST: Final = 3

#: The cost of each byte in a reply.
REPLY_BYTE_COST: Final = 6


class Budget:
    """The cost that one turn may still have."""

    def __init__(self) -> None:
        self.left = TURN_COST_MAX

    @property
    def is_spent(self) -> bool:
        return self.left <= 0

    def note_read(self, bytes_total: int = 0) -> None:
        """Pay for an access to the journal or the index."""
        self.left -= READ_COST + READ_BYTE_COST * bytes_total

    def note_reply(self, bytes_total: int) -> None:
        """Pay for bytes of a reply."""
        self.left -= REPLY_BYTE_COST * bytes_total

    def has_room(self, bytes_total: int) -> bool:
        """Return whether so many bytes of a reply can be paid."""
        return REPLY_BYTE_COST * bytes_total <= self.left


def task_count(record: AnyRecord) -> int:
    """Return the number of tasks that a record names."""
    names = getattr(record, "names", None)
    if names is None:
        submission = getattr(record, "submission", None)
        names = () if submission is None else submission.names
    return len(names)


class _Row(Struct):
    first: int
    records: Sequence[AnyRecord]
    names: int
    bytes_total: int


class DecodedRows:
    """Reads records, and keeps the latest rows."""

    def __init__(self, store: StoreReader) -> None:
        self.store = store
        self._rows: deque[_Row] = deque()
        self._names = self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, number: int, budget: Budget) -> AnyRecord | None:
        """Return a record, or None if its row is trimmed."""
        found = self.row_of(number, budget)
        return None if found is None else found[1][number - found[0]]

    def row_of(self, number: int, budget: Budget) -> tuple[int, Sequence[AnyRecord]] | None:
        """Return the first number and all records of a record's row, unless it is trimmed."""
        for row in reversed(self._rows):
            if row.first <= number < row.first + len(row.records):
                return row.first, row.records
        found = self.store.row_of(number)
        if found is None:
            return None
        size = len(found.body)
        budget.note_read(size)
        records = records_of(found, found.record_first - 1)
        self.add(found.record_first, records, size)
        return found.record_first, records

    def add(self, first: int, records: Sequence[AnyRecord], bytes_total: int) -> None:
        """Keep a row. The oldest leave, but never the last: see `trim`."""
        row = _Row(first, records, sum(map(task_count, records)), bytes_total)
        self._rows.append(row)
        self._names += row.names
        self._bytes += row.bytes_total
        while len(self._rows) > 1 and self._are_many():
            left = self._rows.popleft()
            self._names -= left.names
            self._bytes -= left.bytes_total

    def trim(self) -> None:
        """Drop a single row that is too large to be kept. Called at the end of a turn."""
        if self._bytes > BYTES_KEPT:
            self.clear()

    def clear(self) -> None:
        self._rows.clear()
        self._names = self._bytes = 0

    def _are_many(self) -> bool:
        return len(self._rows) > ROWS_KEPT or self._names > NAMES_KEPT or self._bytes > BYTES_KEPT


#: Records in one page, and the tasks that they name: some hundred kilobytes, and a few milliseconds
#: to encode.
RECORDS_MAX: Final = 1000
NAMES_MAX: Final = 10_000

#: Reasons of failures in one page: each may be long.
REASON_BYTES_MAX: Final = 1024 * 1024

#: The cost of a record that is examined, and of each task that it names, in the budget of a turn.
RECORD_COST: Final = 50_000
NAME_COST: Final = 5_000

#: New rows are kept decoded until this many rows after the last request.
ROWS_FOLLOWED: Final = 1000

#: Pages that are held. Beyond it the oldest is sent empty, and its client asks again.
WAITING_MAX: Final = 1000

_EVERYTHING: Final = Scope()


class RecordStreams:
    """Fills the pages of clients that follow the records."""

    def __init__(self, rows: DecodedRows, ledger: Ledger, index: EndedTaskIndex | None) -> None:
        self._rows = rows
        self._store = rows.store
        self._ledger = ledger
        self._index = index
        #: Pages that wait for a new record, by request.
        self._waiting: dict[int, RecordPage] = {}
        #: Rows left that are kept.
        self._rows_left = 0

    @property
    def is_followed(self) -> bool:
        """Return whether new rows are of interest to clients."""
        return self._rows_left > 0

    def note(self, records: Sequence[AnyRecord], bytes_total: int) -> list[RecordPage]:
        """Keep a new row while a client follows. Return the pages that waited for it."""
        due = [*self._waiting.values()]
        self._waiting.clear()
        self._rows_left = ROWS_FOLLOWED if due else self._rows_left - 1
        if self._rows_left:
            self._rows.add(self._store.head.record - len(records) + 1, records, bytes_total)
        else:
            self._rows.clear()
        return due

    def time_over(self, request: int) -> RecordPage | None:
        """Return the waiting page of a request whose time is over, as it is, if it has one."""
        return self._waiting.pop(request, None)

    def fill(self, page: RecordPage, budget: Budget) -> RecordPage | None:
        """Fill a page. If it waits for a new record it is held, and another may be sent empty."""
        self._rows_left = ROWS_FOLLOWED
        if page.text or not self._check(page):
            return page
        if page.cursor == self._store.head.record:
            self._waiting[page.request] = page
            is_crowd = len(self._waiting) > WAITING_MAX
            return self._waiting.pop(next(iter(self._waiting))) if is_crowd else None
        self._fill_page(page, budget)
        return page

    def _check(self, one: RecordPage) -> bool:
        """Return whether the journal has, or will have, the records after the cursor.

        Otherwise put the reason into the page.
        """
        head, first, identity = self._store.head.record, self._store.anchor.record, one.journal
        one.journal = self._store.identity
        if (identity and identity != one.journal) or one.cursor > head:
            one.text = (
                f"record {one.cursor} belongs to another journal or to a restored one: start again "
                "without a cursor"
            )
            one.cursor = head
        elif one.cursor < first:
            one.text = (
                f"records {one.cursor + 1} to {first} are no longer in the journal, only in the "
                f"history: continue from record {first}"
            )
            one.cursor = first
        return not one.text

    def _fill_page(self, page: RecordPage, budget: Budget) -> None:
        """Fill a page, with at least one record."""
        count, names, reasons = min(page.count, RECORDS_MAX), NAMES_MAX, REASON_BYTES_MAX
        for number, record in self._after(page.cursor, budget):
            budget.left -= RECORD_COST + NAME_COST * task_count(record)
            part = self._part(record, page.scope)
            if part is not None:
                names -= task_count(part)
                reasons -= sum(map(len, getattr(part, "reasons", None) or ()))
                if page.records and (names < 0 or reasons < 0):
                    return
                page.records.append((number, part))
            page.cursor = number
            if len(page.records) == count or budget.is_spent:
                return

    def _after(self, cursor: int, budget: Budget) -> Iterator[tuple[int, AnyRecord]]:
        """Yield the records after this record, as far as the turn's budget goes."""
        number = cursor + 1
        while number <= self._store.head.record:
            found = self._rows.row_of(number, budget)
            if found is None:
                wrong = f"record {number} is neither trimmed nor in the journal"
                raise JournalDamaged(wrong, RESTORE_HINT)
            first, records = found
            for record in records[number - first :]:
                yield number, record
                number += 1
            if budget.is_spent:
                return

    def _part(self, record: AnyRecord, scope: Scope) -> AnyRecord | None:
        """Return the part of a record about a scope's tasks, or None."""
        if scope == _EVERYTHING:
            return record
        if self._index is not None:
            recall_for(self._ledger, self._index, getattr(record, "names", ()))
        return filter_record(record, scope, self._ledger.tasks)


_T = TypeVar("_T")

#: Fields with an entry for each task of a record.
_COLUMNS: Final = (
    *("names", "attempts", "results", "reasons"),
    *("due_ns", "percents", "texts", "after"),
)


def filter_record(record: AnyRecord, scope: Scope, tasks: Mapping[bytes, Task]) -> AnyRecord | None:
    """Return a record with only the tasks of a scope in its columns, or None if none is left.

    The scope's states and names are ignored. Pauses are kept if they concern the scope. Records of
    workers are dropped. Tasks are looked up in the ledger, except tasks of a submission, which the
    record describes itself.
    """
    if isinstance(record, Paused | Resumed):
        return record if _pause_in_scope(record, scope) else None
    if isinstance(record, Submitted):
        return _of_submitted(record, scope)
    names: Sequence[bytes] | None = getattr(record, "names", None)
    if names is None:
        return None
    found = map(tasks.get, names)
    indexes = [at for at, task in enumerate(found) if task is not None and _fits(scope, task)]
    return _select(record, indexes, len(names))


def _pause_in_scope(record: Paused | Resumed, scope: Scope) -> bool:
    if scope.service is not None and record.service not in (b"", scope.service):
        return False
    return scope.lane is None or record.lane in (None, scope.lane)


def _fits(scope: Scope, task: Task) -> bool:
    terms = task.terms
    return _is_within(scope, task.name, terms.campaign, terms.service, task.lane.name)


def _is_within(scope: Scope, name: bytes, campaign: bytes, service: bytes, lane: bytes) -> bool:
    return (
        (scope.campaign is None or campaign == scope.campaign)
        and (scope.service is None or service == scope.service)
        and (scope.lane is None or lane == scope.lane)
        and (not scope.match or identity.matches(name, scope.match, scope.campaign))
    )


def _of_submitted(record: Submitted, scope: Scope) -> Submitted | None:
    submission = record.submission
    indexes: list[int] = []
    for at, name in enumerate(submission.names):
        terms = submission.terms_of(at)
        lane = b"" if submission.lanes is None else submission.lanes[at]
        if _is_within(scope, name, terms.campaign, terms.service, lane):
            indexes.append(at)
    if not indexes or len(indexes) == len(submission.names):
        return record if indexes else None
    after_done, attempts = _pick(record.after_done, indexes), _pick(record.attempts, indexes)
    return Submitted(record.at_ns, submission.part(indexes), after_done, attempts, by=record.by)


def _select(record: AnyRecord, indexes: list[int], total: int) -> AnyRecord | None:
    if not indexes or len(indexes) == total:
        return record if indexes else None
    fields = [field for field in _COLUMNS if field in record.__struct_fields__]
    columns: dict[str, Any] = {field: _pick(getattr(record, field), indexes) for field in fields}
    return structs.replace(record, **columns)


def _pick(column: list[_T] | None, indexes: list[int]) -> list[_T] | None:
    return None if column is None else [column[index] for index in indexes]
