"""Results and texts of the journal for replies: the scheduler names the record, the bytes are here.

Rows are decoded once for a reply. A task may have finished in the turn of its reply, so this runs
after the commit. A long result is head and tail in the journal and whole in a file. Native clients
read that file part by part. The other dialects have one reply for a result, so it is completed
here, up to the size of a payload. Knows neither clients nor their requests.

`Parts` completes replies with parts of streams and blobs. A stream of an ended attempt is in a
record as a whole, or as a reference to a blob. The stream of a running attempt, and of an attempt
that was lost with its worker, is in no record. Records of a task are linked: each names the record
with the output of the attempt before. A blob is read only in the name of a task that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Final

from taskyard.broker.contents import read_whole
from taskyard.broker.rows import Budget, DecodedRows
from taskyard.calls.payloads import CALL
from taskyard.calls.pickled import PICKLE
from taskyard.core.blobs import Blob, Content, blob_name, blobs_of, length_of, text_of
from taskyard.core.effects import (
    ExplanationReply,
    Part,
    Reason,
    Settled,
    TaskDetails,
    TaskPage,
    TaskView,
)
from taskyard.core.explain import cancelled, done
from taskyard.core.identity import split
from taskyard.core.ledger import Ledger
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.model import Stream, shown
from taskyard.core.records import AnyRecord, Cancelled, Finished, Progressed, Submitted
from taskyard.core.runs import Attempt
from taskyard.core.states import TaskState
from taskyard.errors import BytesDamaged, BytesMissing, JournalDamaged, UserError
from taskyard.journal.archive import END
from taskyard.journal.blob_files import REMOVED_HINT
from taskyard.journal.blobs import BlobStore, StreamKey, blobs_needed, is_name, short_name
from taskyard.journal.blobs import length_of as length_in
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.recovery import (
    EndedTaskIndex,
    causes_in,
    output_in,
    records_of,
    results_in,
    stream_in,
)
from taskyard.wire.dialect import is_native

logger = logging.getLogger("taskyard.broker")

#: Bytes of results in one reply. More follows in the next turns.
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024


class ResultLoader:
    """Completes replies from the journal's rows and, if they are trimmed, from the index."""

    def __init__(
        self,
        rows: DecodedRows,
        index: EndedTaskIndex | None,
        ledger: Ledger,
        store: BlobStore,
    ) -> None:
        """Take the rows, the index of ended tasks, if any, and long results."""
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
        that it has sent, and clears `records` if the client wants no more.
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
        indexes = page.positions or ()
        for index, view in enumerate(page.views if indexes else ()):
            if index and view.finished_record and budget.is_spent:
                del page.views[index:]
                page.cursor = indexes[index - 1]
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
        """Return the result of a task, or None if it is not done."""
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

        The first result is read beyond the budget, too.
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
        indexes = [index for index, text in enumerate(reply.texts) if text is None]
        owed = [*zip(reply.records, indexes, strict=True)]
        put = 0
        for index, result in self._results(reply.names, sorted(owed), budget):
            size = len(text_of(result))
            if put and (put + size > REPLY_BYTES_MAX or not budget.has_room(size)):
                break
            reply.texts[index] = result
            put += size
            budget.note_reply(size)
        reply.records = [number for number, index in owed if reply.texts[index] is None]

    def _results(
        self, names: list[bytes], owed: list[tuple[int, int]], budget: Budget
    ) -> Iterator[tuple[int, Content]]:
        """Yield results with their indexes, record by record, up to the turn's budget."""
        for number, group in groupby(owed, key=itemgetter(0)):
            if budget.is_spent:
                return
            indexes = [index for _, index in group]
            record = self.record(number, budget)
            if record is None:
                for index in takewhile(lambda _: not budget.is_spent, indexes):
                    yield index, self._archived(number, names[index], budget)
            else:
                wanted = [names[index] for index in indexes]
                yield from zip(indexes, results_in(record, number, wanted), strict=True)

    def _archived(self, number: int, name: bytes, budget: Budget) -> Content:
        budget.note_read()
        kept = None if self._index is None else self._index.streams(name)
        if kept is None:
            wrong = f"record {number}, which ended {name!r}, is trimmed and not in the index"
            raise JournalDamaged(wrong, RESTORE_HINT)
        return kept[0]

    # Long results.

    def _fill_long(self, reply: Settled, budget: Budget) -> None:
        """Insert long results as a whole. Above `PAYLOAD_BYTES_MAX` they stay head and tail."""
        for index, content in enumerate(reply.texts):
            if not isinstance(content, Blob) or not content.digest:
                continue
            if content.length <= PAYLOAD_BYTES_MAX:
                text = self._whole(content, reply.names[index], "result")
                reply.texts[index] = (
                    Blob(b"", content.length, content.ends) if text is None else text
                )
                budget.note_reply(content.length)

    def _whole(self, blob: Blob, name: bytes, noun: str) -> bytes | None:
        """Return all of a blob. If it is lost, log that and return None."""
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


#: Records followed for one reply. The task's attempts before are found in the index.
LINKS_MAX: Final = 100


class Parts:
    """Completes replies with parts of streams and blobs."""

    def __init__(self, records: ResultLoader, store: BlobStore, ledger: Ledger) -> None:
        self._records = records
        self._store = store
        self._ledger = ledger

    def fill(self, part: Part, budget: Budget) -> None:
        """Insert the requested bytes."""
        if part.blob:
            name = part.blob.decode(errors="replace")
            if not is_name(name):
                part.problem = "not the name of a blob"
            elif part.found and self._is_named(name, part, budget):
                part.bytes_total = length_in(name)
                self._read_blob(part, name, short_name(name))
            else:
                part.problem = f"{short_name(name)}: not of task {shown(part.name)}"
        elif part.found and part.stream is not None:
            self._fill_stream(part, budget)
        elif part.found and not part.problem:
            result = self._records.finished(part.finished_record, part.name, budget)
            self._insert(part, result, "result")

    def _is_named(self, name: str, part: Part, budget: Budget) -> bool:
        """Return whether a task needs a blob or, for a client, has a result that names it."""
        task = self._ledger.tasks[part.name]
        if name in blobs_needed(task, lambda key: self._records.result_of(key, budget)):
            return True
        result = None if part.held else self._records.result_of(part.name, budget)
        return result is not None and name in blobs_of(result)

    def _read_blob(self, part: Part, name: str, about: str) -> None:
        try:
            found = self._store.read(name, part.offset, part.count)
        except (OSError, UserError) as error:  # a bad disk, a link
            part.problem = f"{about}: {getattr(error, 'strerror', None) or error}"
            return
        if found is None:
            part.problem = f"{about} are missing ({REMOVED_HINT})"
        else:
            part.data = found[0]

    def _fill_stream(self, part: Part, budget: Budget) -> None:
        found = self._read_stream(part) if part.live else None
        kept = self._kept(part, budget) if found is None else None
        if kept is None:
            part.data, part.bytes_total = found or self._read_stream(part) or (b"", 0)
        else:
            self._insert(part, kept, "output")

    def _insert(self, part: Part, kept: Content, noun: str) -> None:
        if isinstance(kept, Blob) and kept.digest:
            part.bytes_total, part.digest = kept.length, kept.digest
            about = f"task {shown(part.name)}, attempt {part.attempt}"
            self._read_blob(part, blob_name(kept), f"{about}: {kept.length:,} bytes of {noun}")
        else:
            part.data = text_of(kept)[part.offset : part.offset + part.count]
            part.bytes_total = length_of(kept)

    def _read_stream(self, part: Part) -> tuple[bytes, int] | None:
        assert part.stream is not None  # noqa: S101  # see `fill`
        name = split(part.name, part.campaign)
        key = StreamKey(part.campaign, name, part.attempt, part.stream)
        return self._store.read(key, part.offset, part.count)

    def _kept(self, part: Part, budget: Budget) -> Content | None:
        """Return what the journal keeps of a stream. A file may have it if that is None."""
        assert part.stream is not None  # noqa: S101  # see `fill`
        found = self._printed(part, part.stream, budget)
        printed, is_mixed = (None, False) if found is None else found
        if printed is None and part.attempt:  # before the first attempt nothing was printed
            printed = self._records.archived(part.name, part.attempt, part.stream)
        is_result = part.stream is Stream.STDOUT and not is_mixed and not self._is_call(part.name)
        if part.finished_record and is_result:
            return self._records.finished(part.finished_record, part.name, budget)
        if printed is None and part.finished_record:
            return b""  # done without any output
        return printed

    def _is_call(self, name: bytes) -> bool:
        """Return whether a task is a call, whose result is not what it prints."""
        return self._ledger.tasks[name].terms.service in {CALL, PICKLE}

    def _printed(self, part: Part, stream: Stream, budget: Budget) -> tuple[Content, bool] | None:
        """Return a stream from the task's records, and whether it is both streams together."""
        number = part.record
        for _ in range(LINKS_MAX):
            record = self._records.record(number, budget) if number else None
            if not isinstance(record, Progressed):
                return None
            index = record.names.index(part.name)
            if record.attempts[index] == part.attempt:
                return stream_in(record, index, stream), record.stderrs is None
            number = record.previous[index] if record.previous else 0
        return None
