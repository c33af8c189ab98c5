"""Output of running programs on its way to the broker, with bounded memory.

A short stream of a short task is kept here and travels with the report. Any other is sent in
chunks, and the report follows when the broker has acknowledged them all. At the limit, `is_full`
makes the pipes pause. Has no pipes and no messages: the loop sends what `take` returns.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.limits import BLOB_BYTES_MIN, STREAM_END_BYTES
from taskyard.core.output import OutputColumns, Stream
from taskyard.wire.native.attempt_columns import StreamChunk
from taskyard.worker.jobs import Tail
from taskyard.worker.limits import (
    APPEND_BYTES_MAX,
    SPOOL_BYTES_DUE,
    SPOOL_BYTES_MAX,
    SPOOL_INTERVAL_NS,
    SPOOL_START_NS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.blobs import Content
    from taskyard.worker.jobs import Job, JobResult

_STREAMS: Final = tuple(Stream)

#: The bytes of a stream without output. Never changed.
_NOTHING: Final = bytearray()

#: The digest of a stream that is not long. Never updated.
_NO_DIGEST: Final = sha256()

#: Paused pipes read again when this much is left.
_RESUME_BYTES: Final = SPOOL_BYTES_MAX // 2


class SpooledStream:
    """A stream of one attempt: its head and tail, and the bytes that are not sent yet."""

    __slots__ = (
        *("_digest", "_head", "_spool", "_tail", "_unacked", "bytes_acked", "bytes_lost"),
        *("bytes_sent", "bytes_total", "due_ns", "ended", "job", "refused", "stream"),
    )

    def __init__(self, spool: OutputSpool, job: Job, stream: Stream) -> None:
        self.job = job
        self.stream = stream
        self.bytes_total = 0
        #: Bytes that are missing from the stream: it was truncated before it came here.
        self.bytes_lost = 0
        #: The program has ended, so nothing is added.
        self.ended = False
        #: Bytes that the broker has acknowledged, or was sent.
        self.bytes_acked = self.bytes_sent = 0
        #: When the next bytes are due.
        self.due_ns = 0
        #: The broker does not take this stream: only head and tail are kept.
        self.refused = False
        self._spool = spool
        #: The whole of a short stream, the head of a long one.
        self._head = _NOTHING
        self._tail: Tail | None = None
        #: Of a long stream: the SHA-256 of its bytes so far.
        self._digest = _NO_DIGEST
        #: Bytes of a long stream from `bytes_acked` on.
        self._unacked = _NOTHING

    @property
    def is_long(self) -> bool:
        return self._tail is not None

    @property
    def bytes_unsent(self) -> int:
        return 0 if self.refused else self.bytes_total - self.bytes_sent

    @property
    def is_appended(self) -> bool:
        """Return whether the broker must have all bytes: some were sent, or they are too many."""
        return (self.is_long or self.bytes_sent > 0) and not self.refused

    def add(self, chunk: bytes) -> None:
        """Add bytes that the program wrote."""
        if not self.bytes_total:
            self._head = bytearray()
            self._spool.add(self)
        self.bytes_total += len(chunk)
        if not self.refused:
            self._spool.bytes_kept += len(chunk)
        if self._tail is None:
            self._head += chunk
            if self.bytes_total >= BLOB_BYTES_MIN:
                self._become_long()
            return
        self._tail.add(chunk)
        self._digest.update(chunk)
        if not self.refused:
            self._unacked += chunk

    def _become_long(self) -> None:
        self._tail = Tail(STREAM_END_BYTES)
        self._digest = sha256(self._head)
        self._tail.add(bytes(self._head[STREAM_END_BYTES:]))
        self._unacked = bytearray() if self.refused else self._head[self.bytes_acked :]
        del self._head[STREAM_END_BYTES:]

    def take(self, bytes_max: int) -> StreamChunk:
        """Return the next bytes to send."""
        offset = self.bytes_sent
        first = offset - (self.bytes_acked if self.is_long else 0)
        source = self._unacked if self.is_long else self._head
        data = bytes(source[first : first + bytes_max])
        self.bytes_sent += len(data)
        return StreamChunk(self.job.name, self.job.attempt, self.stream, offset, data)

    def acknowledge(self, bytes_acked: int) -> int:
        """Drop bytes up to an offset. Return how many."""
        if self.is_long:
            del self._unacked[: bytes_acked - self.bytes_acked]
        dropped, self.bytes_acked = bytes_acked - self.bytes_acked, bytes_acked
        return dropped

    def refuse(self) -> None:
        """Keep head and tail only."""
        self.refused = True
        self._unacked = bytearray()

    def content(self) -> Content:
        """Return the whole stream, or a blob with its head and tail.

        A short stream of which bytes were sent is a blob, too, with all of its bytes: then the
        broker keeps these, and drops what was sent.
        """
        text, length = bytes(self._head), self.bytes_total + self.bytes_lost
        if self._tail is not None:
            text += self._tail.value()
        elif not (self.is_appended or self.bytes_lost):
            return text
        if self.refused or self.bytes_lost:
            return Blob(b"", length, text)
        return Blob((sha256(text) if self._tail is None else self._digest).digest(), length, text)

    def end_text(self) -> bytes:
        """Return the end of the stream."""
        return bytes(self._head) if self._tail is None else self._tail.value()


class OutputSpool:
    """The streams of a worker's running programs."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        #: Streams with output, by task, attempt and stream.
        self.streams: dict[tuple[bytes, int, Stream], SpooledStream] = {}
        #: Bytes in memory of all these streams.
        self.bytes_kept = 0
        #: Called when there is room again.
        self._paused: list[Callable[[], None]] = []

    def stream(self, job: Job, stream: Stream) -> SpooledStream:
        """Return a new stream of an attempt that starts now."""
        return SpooledStream(self, job, stream)

    def add(self, stream: SpooledStream) -> None:
        """Keep a stream that has its first bytes."""
        stream.due_ns = self._now_ns() + SPOOL_START_NS
        self.streams[*stream.job.key, stream.stream] = stream

    def is_full(self) -> bool:
        return self.bytes_kept >= SPOOL_BYTES_MAX

    def pause(self, resume: Callable[[], None]) -> None:
        """Call `resume` when there is room again."""
        self._paused.append(resume)

    def end(self, key: tuple[bytes, int]) -> bool:
        """Note that an attempt is over. Return whether its report must wait for the broker."""
        waits = False
        if not self.streams:
            return waits
        for stream in _STREAMS:
            found = self.streams.get((*key, stream))
            if found is None:
                continue
            found.ended = True
            if not found.is_appended or found.bytes_acked == found.bytes_total:
                self._remove(found)
            else:
                waits = True
        self._resume()
        return waits

    def is_waiting(self, key: tuple[bytes, int]) -> bool:
        """Return whether bytes of an ended attempt are not acknowledged yet."""
        return any((*key, stream) in self.streams for stream in _STREAMS)

    def streams_of(self, job: Job) -> tuple[SpooledStream, SpooledStream]:
        """Return stdout and stderr of an attempt."""
        stdout, stderr = (
            self.streams.get((*job.key, stream)) or self.stream(job, stream) for stream in _STREAMS
        )
        return stdout, stderr

    def drop(self, key: tuple[bytes, int]) -> None:
        """Forget the streams of an attempt, and let its program go on without them."""
        for stream in _STREAMS:
            found = self.streams.get((*key, stream))
            if found is not None:
                found.refuse()
                self._remove(found)
        self._resume()

    def take(self) -> list[StreamChunk]:
        """Return the next chunks to send, if any are due."""
        now_ns, room = self._now_ns(), APPEND_BYTES_MAX
        chunks: list[StreamChunk] = []
        for stream in [*self.streams.values()]:
            if room and stream.bytes_unsent and self._is_due(stream, now_ns):
                chunk = stream.take(room)
                chunks.append(chunk)
                room -= len(chunk.data)
                stream.due_ns = now_ns + SPOOL_INTERVAL_NS
                key = (*stream.job.key, stream.stream)
                self.streams[key] = self.streams.pop(key)  # the next message begins with others
        return chunks

    def _is_due(self, stream: SpooledStream, now_ns: int) -> bool:
        if stream.ended and stream.is_appended:
            return True
        is_much = stream.is_long and stream.bytes_unsent >= SPOOL_BYTES_DUE
        return is_much or stream.due_ns <= now_ns or self.is_full()

    def acknowledge(self, chunks: list[StreamChunk], refused: set[tuple[bytes, int]]) -> None:
        """Note that the broker has written chunks, or that it refuses attempts."""
        for chunk in chunks:
            stream = self.streams.get((chunk.name, chunk.attempt, chunk.stream))
            if stream is None:
                continue
            self.bytes_kept -= stream.acknowledge(chunk.offset + len(chunk.data))
            if stream.ended and stream.bytes_acked == stream.bytes_total:
                self._remove(stream)
        for key in refused:
            self.drop(key)
        self._resume()

    def take_back(self, chunks: list[StreamChunk]) -> list[tuple[bytes, int]]:
        """Take back chunks for which the broker has no room, to be sent again.

        Returns the attempts that can't wait for room: running programs with long output, and all
        when the memory is full. A short stream is in the report, which does not wait for it.
        """
        lost: dict[tuple[bytes, int], None] = {}
        for chunk in chunks:
            stream = self.streams.get((chunk.name, chunk.attempt, chunk.stream))
            if stream is None:
                continue
            stream.bytes_sent = stream.bytes_acked
            if stream.ended and not stream.is_long:
                self._remove(stream)
            elif self.is_full() or (stream.is_long and not stream.ended):
                lost[stream.job.key] = None
        self._resume()
        return [*lost]

    def wake_at_ns(self) -> int | None:
        """Return when the next bytes are due. None: there are none."""
        unsent = [stream for stream in self.streams.values() if stream.bytes_unsent]
        if any(self._is_due(stream, 0) for stream in unsent):
            return self._now_ns()
        return min((stream.due_ns for stream in unsent), default=None)

    def _remove(self, stream: SpooledStream) -> None:
        self.streams.pop((*stream.job.key, stream.stream), None)
        self.bytes_kept -= stream.bytes_total - stream.bytes_acked

    def _resume(self) -> None:
        if self._paused and self.bytes_kept <= _RESUME_BYTES:
            paused, self._paused = self._paused, []
            for resume in paused:
                resume()


def stream_columns(done: Sequence[JobResult]) -> OutputColumns:
    """Return the streams of ended attempts for a report. The stdout of a done task is its text."""
    columns = OutputColumns([], [])
    for one in done:
        stdout: Content = b""
        stderr: Content = b""
        if one.streams is not None:
            stderr = one.streams[1].content()
            if one.outcome is not Outcome.DONE:
                stdout = one.streams[0].content()
        columns.stdouts.append(stdout)
        columns.stderrs.append(stderr)
    return columns
