"""Load results and output from the journal into replies: the scheduler does not keep them.

The scheduler names the record that holds a result or a text. `ResultLoader` puts it into the reply
after the commit and before sending, because a task may have finished in this very turn. The bytes
of a turn are bounded. The rest of a large reply follows in later turns, and for a client that does
not read, when it reads again. Rows are decoded once for a reply, and the latest few are kept:
clients often ask for neighbouring results. Independent of the client and its request.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Final

from taskyard.broker.output_pages import OutputPages
from taskyard.broker.output_store import OutputMemory, OutputStore
from taskyard.core.effects import (
    Effect,
    ExplanationReply,
    Reason,
    Settled,
    TaskDetails,
    TaskOutput,
    TaskPage,
    TaskView,
)
from taskyard.core.explain import cancelled, done
from taskyard.core.model import Result
from taskyard.core.output import Stream
from taskyard.core.records import AnyRecord, Cancelled, Finished, Submitted
from taskyard.core.runs import Attempt
from taskyard.errors import JournalDamaged
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.recovery import EndedTaskIndex, causes_in, output_in, records_of, results_in
from taskyard.journal.store import StoreReader

#: Decoded rows kept from one turn to the next, and their total bytes: enough for clients that fetch
#: results in order, and little compared with the tasks in memory.
ROWS_KEPT: Final = 8
ROWS_KEPT_BYTES: Final = 8 * 1024 * 1024

#: Bytes of results in one reply, and in all replies of a turn: a request may exceed the memory. The
#: rest follows in the next turns.
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024
TURN_BYTES_MAX: Final = 4 * REPLY_BYTES_MAX

#: Rows and index entries read for the replies of a turn, and the rows' bytes: small results may be
#: in many rows, or in large ones. Some 0.1 s, which delays all other clients.
TURN_READS_MAX: Final = 500
TURN_READ_BYTES_MAX: Final = 2 * TURN_BYTES_MAX


#: Replies about one task, which are completed by `_look_up`.
_OF_ONE_TASK: Final = (TaskOutput, TaskDetails, ExplanationReply)


class ResultLoader:
    """Completes replies from the journal's rows and, if those are trimmed, from the index."""

    def __init__(
        self,
        store: StoreReader,
        index: EndedTaskIndex | None,
        is_reading: Callable[[bytes], bool] = lambda _client: True,
        outputs: OutputStore | None = None,
    ) -> None:
        """`is_reading` returns whether a client reads its replies. `outputs` has long streams."""
        self._store = store
        self._pages = OutputPages(self, OutputMemory() if outputs is None else outputs)
        self._index = index
        self._is_reading = is_reading
        #: The first record of a row, all its records, and their bytes.
        self._rows: deque[tuple[int, list[AnyRecord], int]] = deque(maxlen=ROWS_KEPT)
        #: Replies that the last turn left incomplete.
        self._incomplete: list[Settled] = []
        #: The budget left in this turn.
        self._reads = TURN_READS_MAX
        self._read_bytes = TURN_READ_BYTES_MAX

    def has_pending(self) -> bool:
        """Return whether the last turn left incomplete replies for a client that reads."""
        return bool(self._incomplete) and any(
            reply.records and self._is_reading(reply.client) for reply in self._incomplete
        )

    def fill(self, effects: list[Effect]) -> None:
        """Load the missing results of a turn's effects, up to the budget. Most effects miss none.

        `records` of a sent reply lists the results still missing. The dialect removes the results
        that it has sent, and clears `records` if the client does not want the rest. Incomplete
        replies come first in the next turn. Replies that were not reached are removed here.
        """
        if self._incomplete:
            effects[:0] = [reply for reply in self._incomplete if reply.records]
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
            elif isinstance(effect, _OF_ONE_TASK):
                self._look_up(effect)
            elif type(effect) is TaskPage and effect.places:
                self._complete_page(effect, effect.places)
        if unreached:
            _remove_effects(effects, unreached)
        self._incomplete = [*unreached, *[reply for reply in owing if reply.records]]
        if self._rows and self._kept_bytes() > ROWS_KEPT_BYTES:
            self._rows.clear()

    def _look_up(self, effect: TaskOutput | TaskDetails | ExplanationReply) -> None:
        """Complete a reply about one task."""
        if isinstance(effect, TaskDetails):
            self._complete_views(effect.views)
        elif isinstance(effect, TaskOutput) and effect.stream is not None:
            self._pages.load(effect)
        elif isinstance(effect, TaskOutput) and effect.record:
            found = self._text(effect.record, effect.name)
            effect.text, effect.text_bytes_total = found.text, found.bytes_total
        elif isinstance(effect, ExplanationReply) and effect.record:
            self._complete_explanation(effect)

    def _complete_explanation(self, effect: ExplanationReply) -> None:
        """Add the cause of a cancelled task, or the worker's note on a task that is done."""
        if effect.explanation.reason is Reason.CANCELLED:
            effect.explanation = cancelled(self._cause(effect.record, effect.name))
            return
        record = self.record(effect.record)
        if isinstance(record, Finished) and record.runs is not None and record.runs.notes:
            index = record.names.index(effect.name)
            effect.explanation = done(record.attempts[index], record.runs.notes[index])

    def _text(self, number: int, name: bytes) -> Result:
        """Return a task's output, empty if its row is trimmed. The history still has it then."""
        record = self.record(number)
        return Result(b"") if record is None else output_in(record, number, name)

    def finished(self, number: int, name: bytes) -> Result:
        """Return the result that a record holds."""
        record = self.record(number)
        return (
            self._archived(number, name)
            if record is None
            else results_in(record, number, [name])[0]
        )

    def archived(self, name: bytes, attempt: int, stream: Stream) -> Result | None:
        """Return a stream from the index, or None if it is not there."""
        return None if self._index is None else self._index.output(name, attempt, stream)

    def _complete_views(self, views: list[TaskView]) -> None:
        """Add attempts and payloads, which memory does not keep."""
        for view in views:
            self._add_attempt(view)
            self._add_payload(view)

    def _complete_page(self, page: TaskPage, places: list[int]) -> None:
        """Add the attempts of a page. End it where the budget ends, after one task at least."""
        for index, view in enumerate(page.views):
            if index and view.finished_record and not self._may_read():
                del page.views[index:]
                page.cursor = places[index - 1]
                return
            self._add_attempt(view, is_first=not index)

    def _add_attempt(self, view: TaskView, *, is_first: bool = False) -> None:
        """Add the attempt that finished a task, unless its row is trimmed.

        The first one is read beyond the budget, too.
        """
        if not view.finished_record or not (is_first or self._may_read()):
            return
        record = self.record(view.finished_record)
        if isinstance(record, Finished):
            index = record.names.index(view.name)
            attempt = Attempt(record.attempts[index], record.worker, b"finished", record.at_ns)
            view.attempts.append(attempt.with_run(record.runs, index))

    def _add_payload(self, view: TaskView) -> None:
        """Add the payload, found by a binary search over submission times.

        Nothing is found if the row is trimmed, or if the clock was set back since.
        """
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
        """Return why a record cancelled a task."""
        record = self.record(number)
        if isinstance(record, Cancelled) and name in record.names:
            return causes_in(record)[record.names.index(name)]
        return None if self._index is None else self._index.cause(name)

    def _fill_results(self, reply: Settled, room: int) -> int:
        """Add results to a reply, at least one. Returns the bytes added."""
        places = [place for place, text in enumerate(reply.texts) if text is None]
        owed = [*zip(reply.records, places, strict=True)]
        put = 0
        for place, result in self._results(reply.names, sorted(owed)):
            if put and put + len(result.text) > room:
                break
            reply.texts[place] = result.text
            if result.in_file:
                reply.in_files = {**(reply.in_files or {}), reply.names[place]: None}
            if result.bytes_total:
                reply.truncated = {
                    **(reply.truncated or {}),
                    reply.names[place]: result.bytes_total,
                }
            put += len(result.text)
        reply.records = [number for number, place in owed if reply.texts[place] is None]
        return put

    def _results(
        self, names: list[bytes], owed: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Result]]:
        """Yield results with their places, record by record, up to the turn's budget."""
        for number, group in groupby(owed, key=itemgetter(0)):
            if not self._may_read():
                return
            places = [place for _, place in group]
            record = self.record(number)
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
            wrong = f"record {number}, which ended {name!r}, is trimmed and not in the index"
            raise JournalDamaged(wrong, RESTORE_HINT)
        return result

    def record(self, number: int) -> AnyRecord | None:
        """Return a record of the journal, or None if its row is trimmed."""
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
    """Return a task's payload if this record submitted it, else None."""
    if not isinstance(record, Submitted) or record.at_ns != view.submitted_ns:
        return None
    submission = record.submission
    if view.name not in submission.names:
        return None
    shared = len(submission.payloads) == 1
    return submission.payloads[0 if shared else submission.names.index(view.name)]


def _remove_effects(effects: list[Effect], unreached: list[Settled]) -> None:
    """Remove these effects by identity: others may be equal."""
    gone = set(map(id, unreached))
    effects[:] = [effect for effect in effects if id(effect) not in gone]
