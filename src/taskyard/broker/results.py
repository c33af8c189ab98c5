"""What answers owe to the journal: results and output that the scheduler does not keep.

The scheduler says in which record a result or a text lies; this puts it into the answer, after the
commit and before it is sent, because a task may have been done in this very turn. Only so much is
put in at once: the rest of a large answer follows in the next turns, and that of a client which
does not read when it does. Each row is read and decoded
once an answer, and the latest few are kept: who asks for one result often asks for its neighbours
next. It must not know who is answered, nor why.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Final

from taskyard.core.effects import (
    Effect,
    ExplanationReply,
    Settled,
    TaskDetails,
    TaskOutput,
    TaskView,
)
from taskyard.core.explain import cancelled
from taskyard.core.model import Result
from taskyard.core.records import AnyRecord, Cancelled, Finished, Submitted
from taskyard.core.runs import Attempt
from taskyard.errors import JournalDamaged
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.recovery import EndedTaskIndex, causes_in, output_in, records_of, results_in
from taskyard.journal.store import StoreReader

#: Decoded rows that are kept from one turn to the next, and their bytes in all: enough for clients
#: that fetch results in the order in which they came, nothing against the tasks in memory.
ROWS_KEPT: Final = 8
ROWS_KEPT_BYTES: Final = 8 * 1024 * 1024

#: Results put into one answer, and into all answers of a turn: what is asked for may be more than
#: fits the memory. The rest is put in in the next turns.
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024
TURN_BYTES_MAX: Final = 4 * REPLY_BYTES_MAX

#: Rows and entries of the index that are read for the answers of a turn, and the rows' bytes:
#: small results may lie in as many rows, or in large ones. Some 0.1 s, which everybody else waits.
TURN_READS_MAX: Final = 500
TURN_READ_BYTES_MAX: Final = 2 * TURN_BYTES_MAX


class ResultLoader:
    """Completes answers from the journal's rows and, where those are trimmed, from the index."""

    def __init__(
        self,
        store: StoreReader,
        index: EndedTaskIndex | None,
        is_reading: Callable[[bytes], bool] = lambda _client: True,
    ) -> None:
        """`is_reading` tells whether a client takes its answers."""
        self._store = store
        self._index = index
        self._is_reading = is_reading
        #: The first record of a row, all of them, and how many bytes they were.
        self._rows: deque[tuple[int, list[AnyRecord], int]] = deque(maxlen=ROWS_KEPT)
        #: Answers of the last turn that were not whole.
        self._incomplete: list[Settled] = []
        #: What may still be read in this turn.
        self._reads = TURN_READS_MAX
        self._read_bytes = TURN_READ_BYTES_MAX

    def has_pending(self) -> bool:
        """Some answers of the last turn were not told whole, and whoever asked waits for it."""
        return bool(self._incomplete) and any(
            told.records and self._is_reading(told.client) for told in self._incomplete
        )

    def fill(self, effects: list[Effect]) -> None:
        """Put in what these effects owe, as far as it fits a turn. Called every turn: most owe
        nothing.

        An answer that is told with `records` still owes those: whoever tells it takes out what it
        told, and clears `records` where nobody wants the rest. What is left comes again in front of
        the next turn's effects, and so does what was not reached, which is taken out of these.
        """
        if self._incomplete:
            effects[:0] = [told for told in self._incomplete if told.records]
        unreached: list[Settled] = []
        owing: list[Settled] = []
        room = TURN_BYTES_MAX
        self._reads, self._read_bytes = TURN_READS_MAX, TURN_READ_BYTES_MAX
        for effect in effects:
            if type(effect) is Settled:
                if (
                    effect.records
                    and room > 0
                    and self._may_read()
                    and self._is_reading(effect.client)
                ):
                    room -= self._fill_results(effect, min(room, REPLY_BYTES_MAX))
                    owing.append(effect)
                elif effect.records:
                    unreached.append(effect)
            elif isinstance(effect, TaskOutput | TaskDetails | ExplanationReply):
                self._look_up(effect)
        if unreached:
            _remove_effects(effects, unreached)
        self._incomplete = [*unreached, *[told for told in owing if told.records]]
        if self._rows and self._kept_bytes() > ROWS_KEPT_BYTES:
            self._rows.clear()

    def _look_up(self, effect: TaskOutput | TaskDetails | ExplanationReply) -> None:
        """Complete the answer to a question about a task."""
        if isinstance(effect, TaskDetails):
            self._complete_views(effect.views)
        elif isinstance(effect, TaskOutput) and effect.record:
            effect.text, effect.text_bytes_total = self._text(effect.record, effect.name)
        elif isinstance(effect, ExplanationReply) and effect.record:
            effect.explanation = cancelled(self._cause(effect.record, effect.name))

    def _text(self, number: int, name: bytes) -> Result:
        """What a task printed. It is gone from here when its row is trimmed: the history has it."""
        record = self._record(number)
        return Result(b"") if record is None else output_in(record, number, name)

    def _complete_views(self, views: list[TaskView]) -> None:
        """Add what tasks are shown with and memory does not keep."""
        for view in views:
            self._add_attempt(view)
            self._add_payload(view)

    def _add_attempt(self, view: TaskView) -> None:
        """Add the attempt that finished a task, if its row is not trimmed."""
        if not view.finished_record or not self._may_read():
            return
        record = self._record(view.finished_record)
        if isinstance(record, Finished):
            index = record.names.index(view.name)
            attempt = Attempt(record.attempts[index], record.worker, b"finished", record.at_ns)
            view.attempts.append(attempt.with_run(record.runs, index))

    def _add_payload(self, view: TaskView) -> None:
        """Add the payload that memory does not keep. Its row is searched for by its time, so it is
        not found if it is trimmed, or if the clock was set back since."""
        first, last = self._store.anchor.record + 1, self._store.head.record
        while view.payload is None and first <= last and self._may_read():
            row = self._store.row_of((first + last) // 2)
            if row is None:
                return
            self._reads -= 1
            self._read_bytes -= len(row.body)
            records = records_of(row, row.record_first - 1)
            if records[0].at_ns > view.submitted_ns:
                last = row.record_first - 1
            elif records[-1].at_ns < view.submitted_ns:
                first = row.record_first + len(records)
            else:
                view.payload = next(filter(None, (_payload(one, view) for one in records)), None)
                return

    def _cause(self, number: int, name: bytes) -> bytes | None:
        """Why that record cancelled a task."""
        record = self._record(number)
        if isinstance(record, Cancelled) and name in record.names:
            return causes_in(record)[record.names.index(name)]
        return None if self._index is None else self._index.cause(name)

    def _fill_results(self, told: Settled, room: int) -> int:
        """Fill an answer up, at least with one result. Returns how many bytes were put in."""
        places = [place for place, text in enumerate(told.texts) if text is None]
        owed = [*zip(told.records, places, strict=True)]
        put = 0
        for place, result in self._results(told.names, sorted(owed)):
            if put and put + len(result.text) > room:
                break
            told.texts[place] = result.text
            if result.bytes_total:
                told.truncated = {**(told.truncated or {}), told.names[place]: result.bytes_total}
            put += len(result.text)
        told.records = [number for number, place in owed if told.texts[place] is None]
        return put

    def _results(
        self, names: list[bytes], owed: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Result]]:
        """Places and what belongs there, record by record, as far as a turn reads; each is read
        when it is needed."""
        for number, group in groupby(owed, key=itemgetter(0)):
            if not self._may_read():
                return
            places = [place for _, place in group]
            record = self._record(number)
            if record is None:
                for place in takewhile(lambda _: self._may_read(), places):
                    yield place, self._archived(number, names[place])
            else:
                wanted = [names[place] for place in places]
                yield from zip(places, results_in(record, number, wanted), strict=True)

    def _may_read(self) -> bool:
        return self._reads > 0 and self._read_bytes > 0

    def _archived(self, number: int, name: bytes) -> Result:
        self._reads -= 1
        result = None if self._index is None else self._index.result(name)
        if result is None:
            wrong = f"record {number}, which says how {name!r} ended, is trimmed and not indexed"
            raise JournalDamaged(wrong, RESTORE_HINT)
        return result

    def _record(self, number: int) -> AnyRecord | None:
        """A record of the journal; None if its row is trimmed."""
        for first, records, _ in self._rows:
            if first <= number < first + len(records):
                return records[number - first]
        row = self._store.row_of(number)
        if row is None:
            return None
        self._reads -= 1
        self._read_bytes -= len(row.body)
        while self._rows and self._kept_bytes() + len(row.body) > ROWS_KEPT_BYTES:
            self._rows.popleft()
        records = records_of(row, row.record_first - 1)
        self._rows.append((row.record_first, records, len(row.body)))
        return records[number - row.record_first]

    def _kept_bytes(self) -> int:
        return sum(size for _, _, size in self._rows)


def _payload(record: AnyRecord, view: TaskView) -> bytes | None:
    """Return a task's payload from the record that submitted it; None from any other."""
    if not isinstance(record, Submitted) or record.at_ns != view.submitted_ns:
        return None
    submission = record.submission
    if view.name not in submission.names:
        return None
    shared = len(submission.payloads) == 1
    return submission.payloads[0 if shared else submission.names.index(view.name)]


def _remove_effects(effects: list[Effect], unreached: list[Settled]) -> None:
    """Remove these very objects: others may be equal to them."""
    gone = set(map(id, unreached))
    effects[:] = [effect for effect in effects if id(effect) not in gone]
