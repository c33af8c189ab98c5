"""Sends output of running programs, and holds their reports until the broker has all of it.

One message is in flight at a time. The channel resends it, and the broker writes by offset, so that
a repeated message changes nothing. If the broker refuses output, the report has head and tail
only. If it has no room, the output of programs that have ended waits, and others are stopped. Lines
of agents are sent as progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal
from taskyard.wire.native import attempt_columns, peer
from taskyard.worker.jobs import JobResult, cut_reason, no_room_retry_ns
from taskyard.worker.limits import NO_ROOM_PAUSE_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from taskyard.core.blobs import Content
    from taskyard.net.channel import Channel
    from taskyard.net.protocols import Clock
    from taskyard.wire.native.attempt_columns import StreamChunk
    from taskyard.wire.native.peer import Reply
    from taskyard.worker.jobs import Runner
    from taskyard.worker.settings import WorkerSettings
    from taskyard.worker.spool import OutputSpool

#: How often to send output of running tasks, at most: each time is a record in the journal.
PROGRESS_NS: Final = SECOND_NS

_FULL: Final = Refusal.FULL.value


class OutputSender:
    """The way of a worker's output to its broker."""

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
        """Send what is there, if no message is in flight and the last one is old enough."""
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
