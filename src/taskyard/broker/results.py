"""Results and texts of the journal for replies: the scheduler names the record, the bytes are here.

Rows are decoded once for a reply. A task may have finished in the turn of its reply, so this runs
after the commit. A long result is head and tail in the journal and whole in a file. Native clients
read that file part by part. The other dialects have one reply for a result, so it is completed
here, up to the size of a payload. Knows neither clients nor their requests.
"""

import logging
from collections.abc import Iterator
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Final

from taskyard.broker.rows import Budget, DecodedRows
from taskyard.broker.whole_bytes import read_whole
from taskyard.core.blobs import Blob, Content, text_of
from taskyard.core.effects import (
    ExplanationReply,
    Reason,
    Settled,
    TaskDetails,
    TaskPage,
    TaskView,
)
from taskyard.core.explain import cancelled, done
from taskyard.core.ledger import Ledger
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.model import shown
from taskyard.core.output import Stream
from taskyard.core.records import AnyRecord, Cancelled, Finished, Submitted
from taskyard.core.runs import Attempt
from taskyard.core.states import TaskState
from taskyard.errors import BytesDamaged, BytesMissing, JournalDamaged, UserError
from taskyard.journal.archive import END
from taskyard.journal.blobs import BlobStore
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.recovery import EndedTaskIndex, causes_in, output_in, records_of, results_in
from taskyard.wire.dialect import is_native

logger = logging.getLogger("taskyard.broker")

#: Bytes of results in one reply. The rest follows in the next turns.
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024


class ResultLoader:
    """Completes replies from the journal's rows and, if those are trimmed, from the index."""

    def __init__(
        self,
        rows: DecodedRows,
        index: EndedTaskIndex | None,
        ledger: Ledger,
        store: BlobStore,
    ) -> None:
        """Take the rows, the index of ended tasks if there is one, and long results."""
        self._rows = rows
        self._index = index
        self._ledger = ledger
        self._store = store

    @staticmethod
    def is_due(reply: Settled) -> bool:
        """Return whether a reply misses something."""
        has_blobs = Blob in {*map(type, reply.texts)}
        return bool(reply.records or (has_blobs and not is_native(reply.request)))

    def fill(self, reply: Settled, budget: Budget) -> None:
        """Load the missing results of a reply, as far as the budget goes.

        `records` of a sent reply lists the results still missing. The dialect removes the results
        that it has sent, and clears `records` if the client does not want the rest.
        """
        if reply.records:
            self._fill_results(reply, budget)
        if not reply.records and not is_native(reply.request):
            self._fill_long(reply, budget)

    def fill_details(self, effect: TaskDetails, budget: Budget) -> None:
        """Add attempts and payloads, which memory does not keep."""
        for view in effect.views:
            self._add_attempt(view, budget, is_first=True)
            self._add_payload(view, budget)
            if isinstance(view.payload, Blob):
                view.payload = self._whole(view.payload, view.name, "payload")

    def fill_page(self, page: TaskPage, budget: Budget) -> None:
        """Add the attempts of a page. End it where the budget ends, after one task at least."""
        places = page.positions or ()
        for index, view in enumerate(page.views if places else ()):
            if index and view.finished_record and budget.is_spent:
                del page.views[index:]
                page.cursor = places[index - 1]
                return
            self._add_attempt(view, budget, is_first=not index)

    def fill_explanation(self, effect: ExplanationReply, budget: Budget) -> None:
        """Add the cause of a cancelled task, or the worker's note on a task that is done."""
        if not effect.record:
            return
        record = self.record(effect.record, budget)
        if effect.explanation.reason is Reason.CANCELLED:
            effect.explanation = cancelled(self._cause(record, effect.name))
        elif isinstance(record, Finished) and record.runs is not None and record.runs.notes:
            index = record.names.index(effect.name)
            effect.explanation = done(record.attempts[index], record.runs.notes[index])

    def text(self, number: int, name: bytes, budget: Budget) -> Content:
        """Return a task's output, empty if its row is trimmed. The history still has it then."""
        record = self.record(number, budget)
        return b"" if record is None else output_in(record, number, name)

    def finished(self, number: int, name: bytes, budget: Budget) -> Content:
        """Return the result that a record holds."""
        record = self.record(number, budget)
        if record is None:
            return self._archived(number, name, budget)
        return results_in(record, number, [name])[0]

    def result_of(self, key: bytes, budget: Budget) -> Content | None:
        """Return the result of a task. None: it is not done."""
        task = self._ledger.tasks.get(key)
        if task is None:
            ended = [] if self._index is None else self._index.find([key])
            is_done = bool(ended) and ended[0].state is TaskState.DONE
            return self.archived(key, END, Stream.STDOUT) if is_done else None
        if task.state is not TaskState.DONE or task.ending is None:
            return None
        if task.ending.record > self._rows.store.head.record:
            return b""  # of this turn, whose records name its blobs themselves
        return self.finished(task.ending.record, key, budget)

    def archived(self, name: bytes, attempt: int, stream: Stream) -> Content | None:
        """Return a stream from the index, or None if it is not there."""
        kept = None if self._index is None else self._index.streams(name, attempt)
        return None if kept is None else kept[stream - 1]

    def record(self, number: int, budget: Budget) -> AnyRecord | None:
        """Return a record of the journal, or None if its row is trimmed."""
        return self._rows.record(number, budget)

    def _add_attempt(self, view: TaskView, budget: Budget, *, is_first: bool = False) -> None:
        """Add the attempt that finished a task, unless its row is trimmed.

        The first one is read beyond the budget, too.
        """
        if not view.finished_record or (budget.is_spent and not is_first):
            return
        record = self.record(view.finished_record, budget)
        if isinstance(record, Finished):
            index = record.names.index(view.name)
            attempt = Attempt(record.attempts[index], record.worker, b"finished", record.at_ns)
            view.attempts.append(attempt.with_run(record.runs, index))

    def _add_payload(self, view: TaskView, budget: Budget) -> None:
        """Add the payload, found by a binary search over submission times.

        Nothing is found if the row is trimmed, or if the clock was set back since.
        """
        store = self._rows.store
        first, last = store.anchor.record + 1, store.head.record
        while view.payload is None and first <= last and not budget.is_spent:
            row = store.row_of((first + last) // 2)
            if row is None:
                return
            budget.note_read(len(row.body))
            records = records_of(row, row.record_first - 1)
            if records[0].at_ns > view.submitted_ns:
                last = row.record_first - 1
            elif records[-1].at_ns < view.submitted_ns:
                first = row.record_first + len(records)
            else:
                found = (_payload(one, view) for one in records)
                view.payload = next((one for one in found if one), None)
                return

    def _cause(self, record: AnyRecord | None, name: bytes) -> bytes | None:
        """Return why a record cancelled a task."""
        if isinstance(record, Cancelled) and name in record.names:
            return causes_in(record)[record.names.index(name)]
        kept = None if self._index is None else self._index.streams(name)
        return None if kept is None else text_of(kept[0])

    def _fill_results(self, reply: Settled, budget: Budget) -> None:
        """Add results to a reply, at least one."""
        places = [place for place, text in enumerate(reply.texts) if text is None]
        owed = [*zip(reply.records, places, strict=True)]
        put = 0
        for place, result in self._results(reply.names, sorted(owed), budget):
            size = len(text_of(result))
            if put and (put + size > REPLY_BYTES_MAX or not budget.has_room(size)):
                break
            reply.texts[place] = result
            put += size
            budget.note_reply(size)
        reply.records = [number for number, place in owed if reply.texts[place] is None]

    def _results(
        self, names: list[bytes], owed: list[tuple[int, int]], budget: Budget
    ) -> Iterator[tuple[int, Content]]:
        """Yield results with their places, record by record, up to the turn's budget."""
        for number, group in groupby(owed, key=itemgetter(0)):
            if budget.is_spent:
                return
            places = [place for _, place in group]
            record = self.record(number, budget)
            if record is None:
                for place in takewhile(lambda _: not budget.is_spent, places):
                    yield place, self._archived(number, names[place], budget)
            else:
                wanted = [names[place] for place in places]
                yield from zip(places, results_in(record, number, wanted), strict=True)

    def _archived(self, number: int, name: bytes, budget: Budget) -> Content:
        budget.note_read()
        kept = None if self._index is None else self._index.streams(name)
        if kept is None:
            wrong = f"record {number}, which ended {name!r}, is trimmed and not in the index"
            raise JournalDamaged(wrong, RESTORE_HINT)
        return kept[0]

    # Long results.

    def _fill_long(self, reply: Settled, budget: Budget) -> None:
        """Insert long results as a whole. Those above `PAYLOAD_BYTES_MAX` stay head and tail."""
        for place, content in enumerate(reply.texts):
            if not isinstance(content, Blob) or not content.digest:
                continue
            if content.length <= PAYLOAD_BYTES_MAX:
                text = self._whole(content, reply.names[place], "result")
                reply.texts[place] = (
                    Blob(b"", content.length, content.ends) if text is None else text
                )
                budget.note_reply(content.length)

    def _whole(self, blob: Blob, name: bytes, noun: str) -> bytes | None:
        """Return all of a blob. None: it is lost, which is logged."""
        try:
            return read_whole(self._store, blob)
        except (BytesMissing, BytesDamaged, OSError, UserError) as error:
            logger.warning("task %s: %s: %s", shown(name), noun, error)
        return None


def _payload(record: AnyRecord, view: TaskView) -> Content | None:
    """Return a task's payload if this record submitted it, else None."""
    if not isinstance(record, Submitted) or record.at_ns != view.submitted_ns:
        return None
    submission = record.submission
    if view.name not in submission.names:
        return None
    shared = len(submission.payloads) == 1
    return submission.payloads[0 if shared else submission.names.index(view.name)]
