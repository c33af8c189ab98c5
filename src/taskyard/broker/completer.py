"""Completes replies between commit and send: replies that need bytes of the journal or of files.

The scheduler keeps no results and no output. The effects name the record or the stream, and their
types decide who completes them, so that a turn without such an effect costs one look at its types.
All replies share one budget a turn. A reply that exceeds it waits in one queue and goes on in the
next turn. Independent of dialects and sockets.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from taskyard.broker.contents import OutputWriter, PayloadReader
from taskyard.broker.results import Parts, ResultLoader
from taskyard.broker.rows import Budget, DecodedRows, RecordStreams
from taskyard.core.effects import (
    Effect,
    ExplanationReply,
    LongAssign,
    OutputEnded,
    OutputWritten,
    Part,
    RecordPage,
    ReplyDue,
    Settled,
    StoreReply,
    TaskDetails,
    TaskPage,
    ValueReceived,
)
from taskyard.journal.blobs import BlobStore, blobs_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.broker.blobs import BrokerBlobs
    from taskyard.core.blobs import Content
    from taskyard.core.events import Event
    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord
    from taskyard.journal.recovery import EndedTaskIndex
    from taskyard.journal.store import StoreReader

_Reply = TypeVar("_Reply", bound=Effect)

#: The effects that need bytes, beside some `Settled`. A turn without them costs one look at its
#: types.
KINDS: Final = frozenset(
    (
        *(RecordPage, ReplyDue, Part, TaskDetails, TaskPage, ExplanationReply),
        *(OutputWritten, OutputEnded, LongAssign, StoreReply, ValueReceived),
    )
)


class Completer:
    """Completes the replies of a broker."""

    def __init__(  # noqa: PLR0913, PLR0917  # everything that replies may need
        self,
        rows: StoreReader,
        ledger: Ledger,
        index: EndedTaskIndex | None = None,
        is_reading: Callable[[bytes], bool] = lambda _client: True,
        enqueue: Callable[[Event], None] = lambda _event: None,
        blobs: BrokerBlobs | None = None,
        blob_store: BlobStore | None = None,
    ) -> None:
        """Take what replies need: `blobs` of a broker, or a store of them.

        `is_reading` returns whether a client reads its replies. `enqueue` adds an event to the next
        turn.
        """
        self._is_reading = is_reading
        self._ledger = ledger
        self._rows = decoded = DecodedRows(rows)
        kept = blob_store or (BlobStore() if blobs is None else blobs.store)
        if blobs is not None:
            blobs.drop_ended(rows, ledger)
        self._results = results = ResultLoader(decoded, index, ledger, kept)
        parts = Parts(results, kept, ledger)
        self._streams = RecordStreams(decoded, ledger, index)
        self._writer = OutputWriter(kept)
        self._payloads = PayloadReader(kept, enqueue)
        self._blobs = blobs
        #: Replies that wait for the budget of a later turn, or for their client to read, and
        #: whether a part of each was sent.
        self._queue: deque[tuple[Settled | RecordPage, bool]] = deque()
        #: Replies of which this turn sends a part. They go on behind replies that were not reached.
        self._begun: list[tuple[Settled | RecordPage, bool]] = []
        self._budget, self._bytes_written = Budget(), 0
        #: How each type of effect is completed: to the effects that are sent.
        self._by_type: dict[type[Effect], Callable[[Any], Sequence[Effect]]] = {
            Settled: self._settled,
            RecordPage: self._proceed,
            ReplyDue: self._reply_due,
            Part: partial(self._filled, parts.fill),
            TaskDetails: partial(self._filled, results.fill_details),
            TaskPage: partial(self._filled, results.fill_page),
            ExplanationReply: partial(self._filled, results.fill_explanation),
            OutputWritten: lambda effect: (self._writer.write(effect),),
            OutputEnded: self._output_ended,
            LongAssign: lambda effect: (self._payloads.fill(effect),),
            StoreReply: self._of_blobs,
            ValueReceived: self._of_blobs,
        }
        #: Replies wait, or a client follows the records.
        self.is_waiting = False

    @staticmethod
    def owes_results(effects: Sequence[Effect]) -> bool:
        """Return whether results are missing in a reply."""
        replies = [effect for effect in effects if type(effect) is Settled]
        return any(map(ResultLoader.is_due, replies))

    def has_pending(self) -> bool:
        """Return whether a reply can go on in the next turn."""
        return any(_is_wanted(*one) and self._is_reading(one[0].client) for one in self._queue)

    def sync(self, effects: Sequence[Effect]) -> None:
        """Make the files durable that the records of a turn name. Raises `JournalFailed`."""
        for effect in effects:
            if type(effect) is OutputEnded:
                self._writer.end(effect)

    def complete(
        self,
        effects: Sequence[Effect],
        records: Sequence[AnyRecord] = (),
        row_bytes: int = 0,
        *,
        has_room: bool = True,
    ) -> list[Effect]:
        """Return the effects of a turn with what they need, after replies of earlier turns.

        `records` are of the turn, in a row of `row_bytes`. Without room on the disk, no
        output is written.
        """
        self._budget, self._writer.has_room = Budget(), has_room
        completed: list[Effect] = []
        waiting, self._queue = self._queue, deque()
        for reply, is_begun in waiting:
            if _is_wanted(reply, is_begun):
                completed += self._proceed(reply, is_begun=is_begun)
        if records and self._streams.is_followed:
            for page in self._streams.note(records, row_bytes):
                completed += self._proceed(page)
        for effect in effects:
            complete = self._by_type.get(type(effect))
            completed += (effect,) if complete is None else complete(effect)
        self._queue.extend(self._begun)
        self._begun.clear()
        self._payloads.read.clear()
        self._writer.flush()
        self._rows.trim()
        self.is_waiting = bool(self._queue) or self._streams.is_followed
        return completed

    def result_of(self, key: bytes) -> Content | None:
        """Return the result of a task, or None if it is not done."""
        return self._results.result_of(key, self._budget)

    def blobs_needed(self, key: bytes) -> set[str]:
        """Return the blobs that a task needs to run."""
        task = self._ledger.tasks.get(key)
        return set() if task is None else blobs_needed(task, self.result_of)

    def take_bytes_written(self) -> int:
        """Return the bytes that were written to files since the last call."""
        total = self._writer.bytes_written
        if self._blobs is not None:
            total += self._blobs.bytes_written
        written, self._bytes_written = total - self._bytes_written, total
        return written

    def _proceed(self, reply: Settled | RecordPage, *, is_begun: bool = False) -> Sequence[Effect]:
        """Complete a reply as far as the budget goes, or queue it. Return what is sent."""
        if self._budget.is_spent or not self._is_reading(reply.client):
            self._queue.append((reply, is_begun))
            return ()
        if isinstance(reply, RecordPage):
            page = self._streams.fill(reply, self._budget)
            return () if page is None else (page,)
        self._results.fill(reply, self._budget)
        if reply.records:
            self._begun.append((reply, True))
        return (reply,)

    def _settled(self, reply: Settled) -> Sequence[Effect]:
        return self._proceed(reply) if self._results.is_due(reply) else (reply,)

    def _reply_due(self, effect: ReplyDue) -> Sequence[Effect]:
        page = self._streams.time_over(effect.request)
        return (effect,) if page is None else (effect, page)

    def _filled(self, fill: Callable[[_Reply, Budget], None], effect: _Reply) -> Sequence[_Reply]:
        fill(effect, self._budget)
        return (effect,)

    def _of_blobs(self, effect: StoreReply | ValueReceived) -> Sequence[Effect]:
        if self._blobs is None:
            return (effect,)
        self._writer.is_dirty = True
        return (self._blobs.fill(effect),)

    def _output_ended(self, effect: OutputEnded) -> Sequence[Effect]:
        self._writer.drop(effect)
        return ()


def _is_wanted(reply: Settled | RecordPage, is_begun: bool) -> bool:  # noqa: FBT001  # of the queue
    """Return whether a waiting reply goes on. A dialect clears `records` if its client is gone."""
    return bool(not is_begun or reply.records)
