"""Record streams: reply to clients that follow the records, from any record still in the journal.

The scheduler emits a `RecordPage` with a cursor. This module holds it until there are newer records
and fills it after the commit, so a client never sees records that a crash could undo. A page is
bounded, and the client asks for the next one with the number of the last record. No cursor is kept
here, so a slow client costs nothing and a restart loses nothing.

The latest rows are cached while a client follows. Older ones are read from the journal, a few each
turn. Independent of how replies are encoded.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import structs

from taskyard.core import identity
from taskyard.core.effects import Effect, RecordPage, ReplyDue
from taskyard.core.entities import Task
from taskyard.core.events import Scope
from taskyard.core.ledger import Ledger
from taskyard.core.records import AnyRecord, Paused, Resumed, Submitted
from taskyard.errors import JournalDamaged
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.recovery import EndedTaskIndex, recall_for, records_of
from taskyard.journal.store import Store

#: Records in one page, and the tasks that they name: some hundred kilobytes, and a few milliseconds
#: to encode.
RECORDS_MAX: Final = 1000
NAMES_MAX: Final = 10_000

#: Reasons of failures in one page: each may be long.
REASON_BYTES_MAX: Final = 1024 * 1024

#: Records examined for one turn's pages, the tasks that they name, and the bytes of rows read for
#: them: a client that is far behind must not delay the replies to others.
TURN_RECORDS_MAX: Final = 2 * RECORDS_MAX
TURN_NAMES_MAX: Final = 2 * NAMES_MAX
TURN_BYTES_MAX: Final = 4 * 1024 * 1024

#: The latest rows in the cache, the tasks that they name, and the bytes of their payloads, results
#: and other texts: a client usually asks again within some turns.
ROWS_KEPT: Final = 64
NAMES_KEPT: Final = 4 * NAMES_MAX
BYTES_KEPT: Final = 8 * 1024 * 1024

#: The cache is dropped this many rows after the last request.
ROWS_FOLLOWED: Final = 1000

#: Pages that are held. Beyond it the oldest is sent empty, and its client asks again.
WAITING_MAX: Final = 1000

_EVERYTHING: Final = Scope()

#: Columns of records and submissions that may be long.
_TEXTS: Final = ("names", "payloads", "envelopes", "results", "reasons", "texts")
_LISTS: Final = ("after", "after_done")


class _TurnBudget:
    """The work that is left for pages in this turn."""

    def __init__(self) -> None:
        self.records = TURN_RECORDS_MAX
        self.names = TURN_NAMES_MAX
        self.bytes = TURN_BYTES_MAX

    def __bool__(self) -> bool:
        return self.records > 0 and self.names > 0 and self.bytes > 0


class RecordStreams:
    """Fills the pages of clients that follow the records."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        index: EndedTaskIndex | None,
        is_reading: Callable[[bytes], bool] = lambda _client: True,
    ) -> None:
        """`is_reading` returns whether a client reads its replies."""
        self._is_reading = is_reading
        self._store = store
        self._ledger = ledger
        self._index = index
        #: Pages that wait for a new record, by request.
        self._waiting: dict[int, RecordPage] = {}
        #: Pages to fill.
        self._due: deque[RecordPage] = deque()
        #: The latest rows: the first record's number, the records, the number of tasks that they
        #: name, and their bytes.
        self._rows: deque[tuple[int, Sequence[AnyRecord], int, int]] = deque()
        self._names_kept = 0
        self._bytes_kept = 0
        #: Rows left until the cache is dropped.
        self._streamed = 0

    @property
    def rows_kept(self) -> int:
        """The number of cached rows."""
        return len(self._rows)

    def has_pending(self) -> bool:
        """Return whether the last turn left pages to fill."""
        return bool(self._due) and any(self._is_reading(one.client) for one in self._due)

    def fill(self, effects: list[Effect], records: Sequence[AnyRecord]) -> None:
        """Take pages out of a turn's effects, and put in those that are complete.

        Called every turn, with the records that it made durable.
        """
        asked = [effect for effect in effects if type(effect) is RecordPage]
        if asked:
            effects[:] = [effect for effect in effects if type(effect) is not RecordPage]
            self._streamed = ROWS_FOLLOWED
        if not self._streamed:
            return
        if records:
            self._keep(records)
            self._due.extend(self._waiting.values())
            self._waiting.clear()
        effects += self._timed_out(effects, asked)
        effects += self._ready()
        if self._bytes_kept > BYTES_KEPT:  # one large row, already sent to waiting clients
            self._drop_rows()

    def _keep(self, records: Sequence[AnyRecord]) -> None:
        """Cache a new row while a client follows."""
        if not self._waiting and not self._due:
            self._streamed -= 1
        if not self._streamed:
            self._drop_rows()
            return
        names, size = sum(map(task_count, records)), sum(map(_bytes_in, records))
        self._rows.append((self._store.head.record - len(records) + 1, records, names, size))
        self._names_kept += names
        self._bytes_kept += size
        while len(self._rows) > 1 and self._are_many():
            _, _, names, size = self._rows.popleft()
            self._names_kept -= names
            self._bytes_kept -= size

    def _are_many(self) -> bool:
        return (
            len(self._rows) > ROWS_KEPT
            or self._names_kept > NAMES_KEPT
            or self._bytes_kept > BYTES_KEPT
        )

    def _drop_rows(self) -> None:
        self._rows.clear()
        self._names_kept = self._bytes_kept = 0

    def _timed_out(self, effects: list[Effect], asked: list[RecordPage]) -> list[RecordPage]:
        """Queue new pages as waiting or due. Returns those whose time is over, maybe at once."""
        for one in asked:
            if self._check(one) and one.cursor == self._store.head.record:
                self._waiting[one.request] = one
            else:
                self._due.append(one)
        over = [effect.request for effect in effects if type(effect) is ReplyDue]
        ended = [self._waiting.pop(number) for number in over if number in self._waiting]
        while len(self._waiting) > WAITING_MAX:
            ended.append(self._waiting.pop(next(iter(self._waiting))))
        return ended

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

    def _ready(self) -> list[RecordPage]:
        """Fill due pages, as far as the turn's budget goes."""
        filled: list[RecordPage] = []
        room = _TurnBudget()
        for _ in range(len(self._due)):
            if not room:
                break
            one = self._due.popleft()
            if not self._is_reading(one.client):
                self._due.append(one)
                continue
            if not one.text and self._check(one):  # its records may have been trimmed meanwhile
                self._fill_page(one, room)
            filled.append(one)
        return filled

    def _fill_page(self, one: RecordPage, room: _TurnBudget) -> None:
        """Fill a page, with at least one record."""
        count, names, reasons = min(one.count, RECORDS_MAX), NAMES_MAX, REASON_BYTES_MAX
        for number, record in self._after(one.cursor, room):
            room.records -= 1
            room.names -= task_count(record)
            part = self._part(record, one.scope)
            if part is not None:
                names -= task_count(part)
                reasons -= sum(map(len, getattr(part, "reasons", None) or ()))
                if one.records and (names < 0 or reasons < 0):
                    return
                one.records.append((number, part))
            one.cursor = number
            if len(one.records) == count or not room:
                return

    def _after(self, cursor: int, room: _TurnBudget) -> Iterator[tuple[int, AnyRecord]]:
        """Yield the records after this one, as far as the turn's budget goes."""
        number = cursor + 1
        while number <= self._store.head.record:
            first, records = self._row_of(number, room)
            for record in records[number - first :]:
                yield number, record
                number += 1
            if not room:
                return

    def _row_of(self, number: int, room: _TurnBudget) -> tuple[int, Sequence[AnyRecord]]:
        if self._rows and self._rows[0][0] <= number:
            for first, records, _, _ in reversed(self._rows):
                if first <= number:
                    return first, records
        row = self._store.row_of(number)
        if row is None:
            raise JournalDamaged(
                f"record {number} is neither trimmed nor in the journal", RESTORE_HINT
            )
        room.bytes -= len(row.body)
        return row.record_first, records_of(row, row.record_first - 1)

    def _part(self, record: AnyRecord, scope: Scope) -> AnyRecord | None:
        """Return the part of a record about a scope's tasks, or None."""
        if scope == _EVERYTHING:
            return record
        if self._index is not None:
            recall_for(self._ledger, self._index, getattr(record, "names", ()))
        return filter_record(record, scope, self._ledger.tasks)


def _bytes_in(record: AnyRecord) -> int:
    """Estimate the bytes of a record from its texts."""
    held: list[object] = [record]
    if type(record) is Submitted:
        held.append(record.submission)
    size = 0
    for one in held:
        for field in _TEXTS:
            size += sum(map(len, getattr(one, field, None) or ()))
        for field in _LISTS:
            size += sum(sum(map(len, names)) for names in getattr(one, field, None) or ())
    return size


_T = TypeVar("_T")

#: Fields with an entry for each task of a record.
_COLUMNS: Final = (
    *("names", "attempts", "results", "reasons"),
    *("due_ns", "percents", "texts", "after"),
    *("result_bytes_total", "text_bytes_total"),
)


def task_count(record: AnyRecord) -> int:
    """Return the number of tasks that a record names."""
    if type(record) is Submitted:
        return len(record.submission.names)
    return len(getattr(record, "names", ()))


def filter_record(record: AnyRecord, scope: Scope, tasks: Mapping[bytes, Task]) -> AnyRecord | None:
    """Return a record with only the tasks of a scope in its columns, or None if none is left.

    The scope's states and names are ignored. Pauses are kept if they concern the scope. Records of
    workers are dropped. Tasks are looked up in the ledger, except those of a submission, which the
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
    places = [at for at, task in enumerate(found) if task is not None and _fits(scope, task)]
    return _select(record, places, len(names))


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
    places: list[int] = []
    for at, name in enumerate(submission.names):
        terms = submission.terms_of(at)
        lane = b"" if submission.lanes is None else submission.lanes[at]
        if _is_within(scope, name, terms.campaign, terms.service, lane):
            places.append(at)
    if not places or len(places) == len(submission.names):
        return record if places else None
    after_done, attempts = _pick(record.after_done, places), _pick(record.attempts, places)
    return Submitted(record.at_ns, submission.part(places), after_done, attempts, by=record.by)


def _select(record: AnyRecord, places: list[int], total: int) -> AnyRecord | None:
    if not places or len(places) == total:
        return record if places else None
    fields = [field for field in _COLUMNS if field in record.__struct_fields__]
    columns: dict[str, Any] = {field: _pick(getattr(record, field), places) for field in fields}
    return structs.replace(record, **columns)


def _pick(column: list[_T] | None, places: list[int]) -> list[_T] | None:
    return None if column is None else [column[place] for place in places]
