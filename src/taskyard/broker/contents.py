"""The bytes of payloads, results and output, which are kept as blobs.

Long payloads and results that a message brings are stored before the scheduler decides, and a
`Blob` takes their place in the event. So records and memory have only that. Payloads that an
assignment needs are read and checked between commit and send, and not kept.

Output arrives in chunks. A file is durable before the record that refers to it. Chunks that can't
be written are refused: the worker stops programs with long output, and returns their tasks
uncharged. Knows no dialect.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from itertools import repeat
from typing import TYPE_CHECKING, Final

from msgspec import structs

from taskyard.core.blobs import (
    PICKLE_MARK,
    Blob,
    blob_name,
    joined,
    payload_ends,
    result_ends,
    text_of,
)
from taskyard.core.effects import (
    Assign,
    Effect,
    LongAssign,
    NoWork,
    OutputEnded,
    OutputWritten,
    Refused,
)
from taskyard.core.events import AssignmentUnsent, Outcome, SubmitRequested, TasksReported
from taskyard.core.identity import spelling
from taskyard.core.limits import BLOB_BYTES_MIN, NUMBER_MAX, PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.membership import holds
from taskyard.core.model import Refusal, shown
from taskyard.core.shape import columns_match
from taskyard.errors import BytesDamaged, BytesMissing, BytesNotStored, JournalFailed, UserError
from taskyard.journal.blob_files import REMOVED_HINT
from taskyard.journal.blobs import BytesDiffer, StreamKey, short_name, upload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.broker.blobs import BrokerBlobs
    from taskyard.core.blobs import Content
    from taskyard.core.context import Context
    from taskyard.core.events import Event
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import OutputChunk
    from taskyard.journal.blobs import BlobStore

logger = logging.getLogger("taskyard.broker")

_HINT: Final = "free some space, or see `taskyard clean`"

#: The delay of a task whose result was refused. Without a delay, a faulty worker would keep busy.
MISSING_RETRY_NS: Final = 10 * SECOND_NS


# What arrives.

#: Events that bring bytes, or name some.
WITH_BYTES: Final = frozenset((SubmitRequested, TasksReported))


def take_in(blobs: BrokerBlobs, event: Event, context: Context) -> Refused | None:
    """Store the long bytes of an event. Return why it is refused.

    It may name other bytes that are not here, or there is no room.
    """
    if isinstance(event, SubmitRequested):
        payloads, refused = event.submission.payloads, None
        texts = joined(payloads)
        if PICKLE_MARK in texts:
            refused = blobs.missing_in(event)
        if refused is None and len(texts) >= BLOB_BYTES_MIN <= max(map(len, payloads)):
            refused = keep_payloads(blobs, event)
        return refused
    if isinstance(event, TasksReported) and event.texts:
        texts = joined(event.texts)
        if PICKLE_MARK in texts:
            return_unstored(blobs, event, event.now_ns + context.wall_offset_ns)
        if len(texts) >= BLOB_BYTES_MIN <= max(map(len, event.texts)):
            keep_results(blobs, event, context.ledger)
    return None


def keep_payloads(blobs: BrokerBlobs, event: SubmitRequested) -> Refused | None:
    """Store the long payloads of a submission, or refuse it: there is no room."""
    submission = event.submission
    payloads: list[Content] = []
    last: Content = b""
    for index, payload in enumerate(submission.payloads):
        is_long = BLOB_BYTES_MIN <= len(payload) <= PAYLOAD_BYTES_MAX  # longer payloads are refused
        if isinstance(payload, Blob) or not is_long:
            payloads.append(payload)
            continue
        if payload is last:
            payloads.append(payloads[-1])
            continue
        blob = Blob(_digest(payload), len(payload), payload_ends(payload))
        try:
            if not blobs.store.touch(blob_name(blob)):
                blobs.update_terms()
                blobs.check_room(len(payload), has_quota=True)
                _store(blobs, blob, payload)
        except (BytesNotStored, OSError, UserError) as error:
            name = shown(submission.names[index]) if index < len(submission.names) else ""
            text = f"task {name}: its payload can't be stored: {_text_of(error)}"
            return Refused(event.client, event.request, Refusal.FULL, text)
        payloads.append(blob)
        last = payload
    event.submission = structs.replace(submission, payloads=payloads)
    return None


def return_unstored(blobs: BrokerBlobs, event: TasksReported, wall_ns: int) -> None:
    """Refuse the results of a report that name bytes which are not here: their tasks run again.

    A worker stores such bytes before it reports, and they may be removed meanwhile. Only another
    attempt has them.
    """
    columns = (event.texts, event.outcomes, event.attempts, event.retry_at_ns)
    if event.texts is None or not columns_match(event.names, *columns):
        return  # the scheduler refuses it
    texts = [*event.texts]
    outcomes = [*(event.outcomes or repeat(Outcome.DONE, len(texts)))]
    retry_at_ns = [*(event.retry_at_ns or repeat(0, len(texts)))]
    for index, text in enumerate(texts):
        if outcomes[index] == Outcome.DONE and (missing := blobs.missing(text_of(text))):
            names = ", ".join(map(short_name, missing))
            outcomes[index] = Outcome.RETRY_AT
            retry_at_ns[index] = wall_ns + MISSING_RETRY_NS
            texts[index] = f"its result names bytes that are not at the broker: {names}".encode()
    event.texts, event.outcomes, event.retry_at_ns = texts, outcomes, retry_at_ns


def keep_results(blobs: BrokerBlobs, event: TasksReported, ledger: Ledger) -> None:
    """Store the long results of a report of tasks that its worker holds. Raises `JournalFailed`.

    They are of running tasks: neither the quota nor the reserve of the disk stops them.
    """
    columns = (event.texts, event.outcomes, event.attempts)
    if event.texts is None or not columns_match(event.names, *columns):
        return  # the scheduler refuses it
    texts = [*event.texts]
    outcomes = event.outcomes or [Outcome.DONE] * len(texts)
    attempts: Sequence[int | None] = event.attempts or [None] * len(texts)
    for index, (name, text) in enumerate(zip(event.names, texts, strict=True)):
        if isinstance(text, Blob) or len(text) < BLOB_BYTES_MIN:
            continue
        is_held = holds(event.worker, ledger.tasks.get(name), attempts[index])
        if not is_held or outcomes[index] != Outcome.DONE:
            continue
        blob = Blob(_digest(text), len(text), result_ends(text))
        try:
            if not blobs.store.touch(blob_name(blob)):
                _store(blobs, blob, text)
        except OSError as error:
            about = f"result of task {shown(name)}: {error.strerror} ({_HINT})"
            raise JournalFailed(about) from error
        texts[index] = blob
    event.texts = texts


def _store(blobs: BrokerBlobs, blob: Blob, content: bytes) -> None:
    """Store a content durably. Raises `OSError`."""
    store, name = blobs.store, blob_name(blob)
    key = upload_of(name)
    try:
        store.append(key, 0, content)
    except BytesDiffer:  # an upload has sent something else under this name
        store.drop(key)
        store.append(key, 0, content)
    if not store.seal(key, name):
        raise OSError(errno.EIO, f"{len(content):,} bytes were not kept")
    blobs.bytes_written += len(content)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


# What leaves.


def read_whole(store: BlobStore, blob: Blob) -> bytes:
    """Return all of a blob. Raises `BytesMissing`, `BytesDamaged` or `OSError`.

    A damaged blob is removed, so that it can be stored again.
    """
    name = blob_name(blob)
    found = store.read(name, 0, blob.length)
    if found is None:
        raise BytesMissing(f"{blob.length:,} bytes are missing ({REMOVED_HINT})")
    if _digest(found[0]) != blob.digest:
        store.remove(name, NUMBER_MAX)
        text = f"{blob.length:,} bytes are damaged"
        raise BytesDamaged(f"{text} (they were removed: submit the task again)")
    return found[0]


class PayloadReader:
    """Inserts the payloads of assignments."""

    def __init__(self, store: BlobStore, enqueue: Callable[[Event], None]) -> None:
        """`enqueue` adds an event to the next turn."""
        self._store = store
        self._enqueue = enqueue
        #: Payloads of this turn: many tasks may share one. The owner clears it.
        self.read: dict[Blob, bytes] = {}

    def fill(self, effect: LongAssign) -> Effect:
        """Return an assignment with its payloads, without the tasks whose payload is lost."""
        assign, lost = effect.assign, dict[int, bytes]()
        for index, payload in enumerate(effect.payloads):
            try:
                assign.payloads.append(self.whole(payload))
            except (BytesMissing, BytesDamaged, OSError, UserError) as error:
                text = f"payload: {_text_of(error)}"
                logger.warning("task %s: %s", shown(assign.names[index]), text)
                lost[index] = text.encode()
        return self._without(assign, lost) if lost else assign

    def whole(self, payload: Content) -> bytes:
        if not isinstance(payload, Blob):
            return payload
        found = self.read.get(payload)
        if found is None:
            found = self.read[payload] = read_whole(self._store, payload)
        return found

    def _without(self, assign: Assign, lost: dict[int, bytes]) -> Effect:
        """Return an assignment without some tasks, which the next turn fails."""
        names, attempts = assign.names, assign.attempts
        unsent, unsent_attempts = [names[at] for at in lost], [attempts[at] for at in lost]
        self._enqueue(
            AssignmentUnsent(0, assign.worker, unsent, unsent_attempts, reasons=[*lost.values()])
        )
        kept = [index for index in range(len(names)) if index not in lost]
        if not kept:
            return NoWork(assign.worker, settled=False, request=assign.request)
        envelopes = assign.envelopes
        return structs.replace(
            assign,
            names=[names[index] for index in kept],
            attempts=[attempts[index] for index in kept],
            terms=[assign.terms[index] for index in kept],
            lanes=[assign.lanes[index] for index in kept],
            envelopes=None if envelopes is None else [envelopes[index] for index in kept],
        )


def _text_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


class OutputWriter:
    """Writes the output of a turn."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        #: Without room no chunks are written: what is left is for the journal.
        self.has_room = True
        #: Bytes written, and whether the store has writes or removals to complete.
        self.bytes_written = 0
        self.is_dirty = False
        #: Streams that ended in this turn. A chunk of such a stream was sent twice.
        self._ended: set[StreamKey] = set()
        #: Why the last chunk could not be written. Empty if it could.
        self._problem = ""

    def end(self, effect: OutputEnded) -> None:
        """Seal the streams of an ended attempt, before the commit of its record.

        Raises `JournalFailed` if that fails.
        """
        for stream, blob in effect.kept:
            key = StreamKey(effect.campaign, effect.name, effect.attempt, stream)
            about, name = shown(spelling(key.campaign, key.name)), blob_name(blob)
            self._ended.add(key)
            try:
                is_there = self._store.seal(key, name) or self._store.touch(name)
            except OSError as error:
                text = f"output of task {about}: {error.strerror} ({_HINT})"
                raise JournalFailed(text) from error
            if not is_there:
                text = "task %s, attempt %d: its %s is lost, but for head and tail"
                logger.warning(text, about, key.attempt, stream.name.lower())

    def drop(self, effect: OutputEnded) -> None:
        """Remove the files of streams that the journal needs no more."""
        for stream in effect.dropped:
            self._store.drop(StreamKey(effect.campaign, effect.name, effect.attempt, stream))
            self.is_dirty = True

    def flush(self) -> None:
        """Complete the writes and removals of a turn, before any reply."""
        self._ended.clear()
        if self.is_dirty:
            self._store.flush()
            self.is_dirty = False

    def write(self, effect: OutputWritten) -> Effect:
        """Write chunks. Return the reply, which is a refusal if they can't be written."""
        size = sum(len(chunk.data) for chunk in effect.chunks)
        self.is_dirty = True
        reply = self._write(effect)
        self.bytes_written += size if reply is effect else 0
        return reply

    def _write(self, effect: OutputWritten) -> Effect:
        if effect.chunks and not self.has_room:
            return self._refused(effect, "the disk is nearly full")
        try:
            for chunk in effect.chunks:
                if not self._append(chunk):
                    name = spelling(chunk.campaign, chunk.name)
                    effect.missing.append((name, chunk.attempt))
                    text = "task %s, attempt %d: its output from byte %d on does not fit"
                    logger.warning(text, shown(name), chunk.attempt, chunk.offset)
        except OSError as error:
            return self._refused(effect, error.strerror or str(error))
        self._problem = ""
        effect.chunks = []
        return effect

    def _append(self, chunk: OutputChunk) -> bool:
        """Write a chunk. Return False if bytes before it are missing, or different."""
        key = StreamKey(chunk.campaign, chunk.name, chunk.attempt, chunk.stream)
        if key in self._ended:
            return True
        try:
            return self._store.append(key, chunk.offset, chunk.data) >= chunk.offset
        except BytesDiffer:
            if chunk.offset:
                return False
        self._store.drop(key)  # of another history of this state: a backup was restored
        self._store.flush()
        return self._store.append(key, 0, chunk.data) >= 0

    def _refused(self, effect: OutputWritten, why: str) -> Refused:
        """Refuse chunks. Log a new problem."""
        if why != self._problem:
            text = (
                "output of tasks can't be written: %s (%s). Workers stop programs with long output."
            )
            logger.warning(text, why, _HINT)
        self._problem = why
        text = f"the broker can't write its output: {why}"
        return Refused(effect.worker, effect.request, Refusal.FULL, text)
