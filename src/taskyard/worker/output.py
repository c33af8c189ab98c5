"""Output of running programs on its way to the broker, with bounded memory.

A short stream of a short task is kept here and travels with the report. Any other is sent in
chunks, and the report follows when the broker has acknowledged them all. At the limit, `is_full`
makes the pipes pause. A message is resent by the channel, and the broker writes by offset, so that
a repeated message changes nothing. Has no pipes: runners add what they read.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.limits import BLOB_BYTES_MIN, SECOND_NS, STREAM_END_BYTES
from taskyard.core.model import OutputColumns, Refusal, Stream
from taskyard.wire.native import attempt_columns, peer
from taskyard.wire.native.attempt_columns import StreamChunk
from taskyard.worker.jobs import (
    OUTPUT_TAIL_BYTES,
    RESULT_BYTES_MAX,
    JobResult,
    Tail,
    cut_reason,
    last_line,
    no_room_retry_ns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from taskyard.core.blobs import Content
    from taskyard.net.channel import Channel
    from taskyard.net.protocols import Clock
    from taskyard.wire.native.peer import Reply
    from taskyard.worker.jobs import Job, Runner
    from taskyard.worker.settings import WorkerSettings

#: Output of running programs that the broker has not acknowledged, of all tasks together. Beyond
#: it the worker stops reading, and the programs wait as behind a slow pipe.
SPOOL_BYTES_MAX: Final = 4 << 20

#: Output in one message.
APPEND_BYTES_MAX: Final = 1 << 20

#: A program that runs for this long gets its output sent while it runs, and then this often. Short
#: programs cost no message of their own.
SPOOL_START_NS: Final = SECOND_NS
SPOOL_INTERVAL_NS: Final = SECOND_NS // 2

#: More unsent output than this is sent at once.
SPOOL_BYTES_DUE: Final = 256 << 10

#: How soon to send output again that the broker has no room for, and that can wait.
NO_ROOM_PAUSE_NS: Final = SECOND_NS


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
        #: The whole of a short stream, the head of a long stream.
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
                self.streams[key] = self.streams.pop(key)  # other streams go first next time
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


class ProgramOutput:
    """The result and output of a program."""

    def __init__(self) -> None:
        self.result = Tail(RESULT_BYTES_MAX)
        self.output = Tail(OUTPUT_TAIL_BYTES)

    def add_stdout(self, chunk: bytes) -> None:
        self.result.add(chunk)
        self.output.add(chunk)

    def add_stderr(self, chunk: bytes) -> None:
        self.output.add(chunk)

    def add_lost(self, stream: Stream, count: int) -> None:
        """Count bytes of a stream that are not there."""
        self.output.add_lost(count)
        if stream is Stream.STDOUT:
            self.result.add_lost(count)

    def done(self, job: Job) -> JobResult:
        """Return the result of a program that succeeded."""
        done = JobResult(job, Outcome.DONE, self.result.content())
        # Else the output would repeat the result.
        if self.output.bytes_total != self.result.bytes_total or self.result.is_cut():
            done.printed = self.output.content()
        return done

    def failed(self, job: Job, outcome: Outcome, reason: bytes) -> JobResult:
        """Return the result of a program that failed."""
        return JobResult(job, outcome, reason, self.output.content())

    def last_line(self) -> bytes:
        """Return the last line of the output, for a reason."""
        return last_line(self.output.value())


class SpooledOutput:
    """The two streams of a program, which a spool keeps whole."""

    def __init__(self, spool: OutputSpool, job: Job) -> None:
        self._stdout = spool.stream(job, Stream.STDOUT)
        self._stderr = spool.stream(job, Stream.STDERR)
        self.add_stdout, self.add_stderr = self._stdout.add, self._stderr.add

    def add_lost(self, stream: Stream, count: int) -> None:
        """Count bytes of a stream that are not there."""
        (self._stdout if stream is Stream.STDOUT else self._stderr).bytes_lost += count

    def done(self, job: Job) -> JobResult:
        """Return the result of a program that succeeded."""
        if self._stdout.is_appended:
            return JobResult(job, Outcome.DONE, streams=(self._stdout, self._stderr))
        done = JobResult(job, Outcome.DONE, self._stdout.content())
        if self._stderr.bytes_total:
            done.streams = (self._stdout, self._stderr)
        return done

    def failed(self, job: Job, outcome: Outcome, reason: bytes) -> JobResult:
        """Return the result of a program that failed."""
        failed = JobResult(job, outcome, reason)
        if self._stdout.bytes_total or self._stderr.bytes_total:
            failed.streams = (self._stdout, self._stderr)
        return failed

    def last_line(self) -> bytes:
        """Return the last line of stderr, or else of stdout, for a reason."""
        return last_line(self._stderr.end_text()) or last_line(self._stdout.end_text())


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


#: How often to send output of running tasks, at most: each time is a record in the journal.
PROGRESS_NS: Final = SECOND_NS

_FULL: Final = Refusal.FULL.value


class OutputSender:
    """Sends output of running programs, and holds their reports until the broker has all of it.

    A single message is in flight at a time. If the broker refuses output, the report has head and
    tail only. If it has no room, the output of ended programs waits, and running programs stop.
    """

    def __init__(
        self,
        spool: OutputSpool,
        channel: Channel,
        settings: WorkerSettings,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._spool = spool
        self._channel = channel
        self._settings = settings
        #: Results whose output the broker does not have yet.
        self.held: list[JobResult] = []
        #: The message in flight, and its chunks.
        self.request = 0
        self._chunks: list[StreamChunk] = []
        #: When the next may be sent, after the broker had no room. 0: at once.
        self._due_ns = 0
        #: Attempts that can't go on because the broker has no room for their output, and why.
        self._unwritten: list[tuple[bytes, int]] = []
        self._problem = b""

    def hold(self, done: JobResult) -> bool:
        """Keep the result of an ended program if its output is on its way. Return whether."""
        waits = self._spool.end(done.job.key)
        if waits:
            self.held.append(done)
        return waits

    def send(self) -> None:
        """Send output that is due, if no message is in flight."""
        if self.request or (self._due_ns and self._clock.monotonic_ns() < self._due_ns):
            return
        if not (chunks := self._spool.take()):
            return
        name, incarnation = self._settings.name, self._settings.incarnation
        self._chunks = chunks
        self.request = self._channel.request(
            lambda number: attempt_columns.append(number, name, chunks, incarnation)
        )

    def on_reply(self, reply: Reply) -> list[JobResult]:
        """Drop output that the broker has. Return the results that may be reported now."""
        chunks, self._chunks, self.request = self._chunks, [], 0
        if reply.kind == peer.ERROR and reply.code == _FULL:
            self._due_ns = self._clock.monotonic_ns() + NO_ROOM_PAUSE_NS
            self._unwritten = self._spool.take_back(chunks)
            self._problem = cut_reason(reply.reason.encode())
            return self._take_ready()
        self._due_ns = 0
        refused = set(zip(reply.names, reply.attempts, strict=True))
        if reply.kind == peer.ERROR:  # another process has the name
            refused = {(chunk.name, chunk.attempt) for chunk in chunks}
        self._spool.acknowledge(chunks, refused)
        return self._take_ready()

    def stop_unwritten(
        self, runner: Runner, stop: Callable[[tuple[bytes, int]], None]
    ) -> list[JobResult]:
        """Stop programs for whose output the broker has no room. They begin again later.

        Returns their results, with head and tail of the output.
        """
        if not self._unwritten:
            return []
        unwritten, self._unwritten = self._unwritten, []
        jobs = {job.key: (job, runner.run_so_far(*job.key)) for job in runner.running()}
        jobs |= {done.job.key: (done.job, done.run) for done in self.held}
        self.forget(unwritten)
        stopped: list[JobResult] = []
        for key in unwritten:
            stop(key)
            if key in jobs:
                job, run = jobs[key]
                back = JobResult(job, Outcome.RETRY_AT, self._problem, run=run)
                back.retry_at_ns = no_room_retry_ns(job, self._clock.wall_ns())
                back.streams = self._spool.streams_of(job)
                stopped.append(back)
            self._spool.drop(key)
        return stopped

    def _take_ready(self) -> list[JobResult]:
        waiting, self.held = self.held, []
        ready: list[JobResult] = []
        for done in waiting:
            (self.held if self._spool.is_waiting(done.job.key) else ready).append(done)
        return ready

    def forget(self, keys: Container[tuple[bytes, int]]) -> None:
        """Forget the results of attempts."""
        self.held = [done for done in self.held if done.job.key not in keys]

    def wake_at_ns(self) -> int | None:
        """Return when output is due. None: there is none, or a message is in flight."""
        due_ns = None if self.request else self._spool.wake_at_ns()
        return None if due_ns is None else max(due_ns, self._due_ns)


class ProgressSender:
    """The newest lines of running tasks, on their way to the broker. Older lines are replaced."""

    def __init__(self, channel: Channel, settings: WorkerSettings) -> None:
        self._channel = channel
        self._settings = settings
        #: Output that was not sent yet, by task and attempt.
        self.printed: dict[tuple[bytes, int], Content] = {}
        #: The message in flight, and when the next may be sent.
        self.request = self._due_ns = 0

    def send(self, now_ns: int) -> None:
        """Send what is there, if no message is in flight and the last message is old enough."""
        if not self.printed or self.request or now_ns < self._due_ns:
            return
        self._due_ns = now_ns + PROGRESS_NS
        name, incarnation = self._settings.name, self._settings.incarnation
        held, printed = [*self.printed], [*self.printed.values()]
        self.printed.clear()
        self.request = self._channel.request(
            lambda number: peer.progress(number, name, held, printed, incarnation)
        )

    def wake_at_ns(self) -> int | None:
        """Return when lines may be sent. None: there are none, or a message is in flight."""
        return self._due_ns if self.printed and not self.request else None
