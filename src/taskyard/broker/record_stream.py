"""Who follows what is decided: record by record, from any record that the journal still has.

The scheduler says after which record somebody wants to be told; this keeps the answer back until
there is something, and puts it in after the commit, so nobody hears of what a crash could undo. An
answer is bounded, and who wants more asks again with the number of the last record: no place in
the stream is kept here for anybody, so a slow follower costs nothing, and a restart loses nothing.

The latest rows are at hand while somebody follows; what is older is read from the journal, a little
each turn. It must not know how answers are written, nor what they are for.
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

#: Records in one answer, and the tasks that they name: some hundred kilobytes, and a few
#: milliseconds for whoever writes it.
RECORDS_MAX: Final = 1000
NAMES_MAX: Final = 10_000

#: Reasons of failures in one answer: each may be long.
REASON_BYTES_MAX: Final = 1024 * 1024

#: Records that are looked at for one turn's answers, the tasks that they name, and the bytes of the
#: rows that are read for that: who is far behind must not hold up everybody else's answers.
TURN_RECORDS_MAX: Final = 2 * RECORDS_MAX
TURN_NAMES_MAX: Final = 2 * NAMES_MAX
TURN_BYTES_MAX: Final = 4 * 1024 * 1024

#: The latest rows that are kept at hand, the tasks that they name, and their payloads, results and
#: other texts: who has just been told asks again within some turns.
ROWS_KEPT: Final = 64
NAMES_KEPT: Final = 4 * NAMES_MAX
BYTES_KEPT: Final = 8 * 1024 * 1024

#: So many rows after somebody asked last, nobody follows any more.
ROWS_FOLLOWED: Final = 1000

#: Answers that are kept back; the oldest is told that there is nothing, and asks again.
WAITING_MAX: Final = 1000

_EVERYTHING: Final = Scope()

#: Columns of records and submissions that may be long.
_TEXTS: Final = ("names", "payloads", "envelopes", "results", "reasons", "texts")
_LISTS: Final = ("after", "after_done")


class _TurnBudget:
    """What may still be looked at and read in this turn."""

    def __init__(self) -> None:
        self.records = TURN_RECORDS_MAX
        self.names = TURN_NAMES_MAX
        self.bytes = TURN_BYTES_MAX

    def __bool__(self) -> bool:
        return self.records > 0 and self.names > 0 and self.bytes > 0


class RecordStreams:
    """Completes the answers to those who follow."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        index: EndedTaskIndex | None,
        is_reading: Callable[[bytes], bool] = lambda _client: True,
    ) -> None:
        """`is_reading` tells whether a client takes its answers."""
        self._is_reading = is_reading
        self._store = store
        self._ledger = ledger
        self._index = index
        #: Answers that wait for something to be decided, by request.
        self._waiting: dict[int, RecordPage] = {}
        #: Answers that there is something for.
        self._due: deque[RecordPage] = deque()
        #: The latest rows: the first record's number, the records, the tasks that they name, and
        #: how many bytes they hold.
        self._rows: deque[tuple[int, Sequence[AnyRecord], int, int]] = deque()
        self._names_kept = 0
        self._bytes_kept = 0
        #: Somebody follows for so many rows more.
        self._streamed = 0

    @property
    def rows_kept(self) -> int:
        """How many rows are at hand."""
        return len(self._rows)

    def has_pending(self) -> bool:
        """Some answers were not reached in the last turn."""
        return any(self._is_reading(one.client) for one in self._due)

    def fill(self, effects: list[Effect], records: Sequence[AnyRecord]) -> None:
        """Take answers to followers out of these effects, and put in those that can be told now.
        Called every turn, with the records that it has made durable."""
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
        if self._bytes_kept > BYTES_KEPT:  # one large row, of which who waited is told by now
            self._drop_rows()

    def _keep(self, records: Sequence[AnyRecord]) -> None:
        """Have the latest rows at hand, for as long as somebody follows."""
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
        """Who asks either waits or is due. Returns those who have waited long enough, which may be
        no time at all."""
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
        """Whether there is, or will be, something after its cursor; else say why not."""
        head, first, identity = self._store.head.record, self._store.anchor.record, one.journal
        one.journal = self._store.identity
        if (identity and identity != one.journal) or one.cursor > head:
            one.text = (
                f"record {one.cursor} is of another journal, or of one that was put back: begin "
                "anew, without a cursor"
            )
            one.cursor = head
        elif one.cursor < first:
            one.text = (
                f"records {one.cursor + 1} to {first} are no longer in the journal; the history "
                f"has them. Go on from record {first}"
            )
            one.cursor = first
        return not one.text

    def _ready(self) -> list[RecordPage]:
        """The answers whose turn it is, as far as a turn has room for them."""
        told: list[RecordPage] = []
        room = _TurnBudget()
        for _ in range(len(self._due)):
            if not room:
                break
            one = self._due.popleft()
            if not self._is_reading(one.client):
                self._due.append(one)
                continue
            if not one.text and self._check(one):  # what it wants may have been trimmed meanwhile
                self._fill_page(one, room)
            told.append(one)
        return told

    def _fill_page(self, one: RecordPage, room: _TurnBudget) -> None:
        """Fill an answer up, at least with one record, if it is wanted."""
        count, names, reasons = min(one.count, RECORDS_MAX), NAMES_MAX, REASON_BYTES_MAX
        for number, record in self._after(one.cursor, room):
            room.records -= 1
            room.names -= task_count(record)
            part = self._part(record, one.scope)
            if part is not None:
                names -= task_count(part)
                reasons -= sum(map(len, getattr(part, "reasons", ())))
                if one.records and (names < 0 or reasons < 0):
                    return
                one.records.append((number, part))
            one.cursor = number
            if len(one.records) == count or not room:
                return

    def _after(self, cursor: int, room: _TurnBudget) -> Iterator[tuple[int, AnyRecord]]:
        """The records after this one, as far as a turn reads."""
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
            raise JournalDamaged(f"record {number} is neither trimmed nor there", RESTORE_HINT)
        room.bytes -= len(row.body)
        return row.record_first, records_of(row, row.record_first - 1)

    def _part(self, record: AnyRecord, scope: Scope) -> AnyRecord | None:
        """What a record says of the tasks of a scope; None if nothing."""
        if scope == _EVERYTHING:
            return record
        if self._index is not None:
            recall_for(self._ledger, self._index, getattr(record, "names", ()))
        return filter_record(record, scope, self._ledger.tasks)


def _bytes_in(record: AnyRecord) -> int:
    """About how many bytes a record holds: its texts, without their numbers."""
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

#: Fields that have an entry for each of a record's tasks.
_COLUMNS: Final = (
    *("names", "attempts", "results", "reasons"),
    *("due_ns", "percents", "texts", "after"),
    *("result_bytes_total", "text_bytes_total"),
)


def task_count(record: AnyRecord) -> int:
    """How many tasks a record names."""
    if type(record) is Submitted:
        return len(record.submission.names)
    return len(getattr(record, "names", ()))


def filter_record(record: AnyRecord, scope: Scope, tasks: Mapping[bytes, Task]) -> AnyRecord | None:
    """What a record says of the tasks of a scope; None if nothing. Its states and names are not
    looked at. A pause is told to whom it may concern, a worker's coming and going to nobody."""
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
    return Submitted(record.at_ns, submission.part(places), after_done, attempts)


def _select(record: AnyRecord, places: list[int], total: int) -> AnyRecord | None:
    if not places or len(places) == total:
        return record if places else None
    fields = [field for field in _COLUMNS if field in record.__struct_fields__]
    columns: dict[str, Any] = {field: _pick(getattr(record, field), places) for field in fields}
    return structs.replace(record, **columns)


def _pick(column: list[_T] | None, places: list[int]) -> list[_T] | None:
    return None if column is None else [column[place] for place in places]
