"""Tasks of `call` and `pickle`: functions, called in Python processes that are kept.

A child runs one call at a time. All output between a call and the result belongs to that call. A
child that dies or is ended fails its call, and a new child replaces it. Threads and globals that a
call leaves behind stay until the process ends.

A child whose calls are short gets the next calls ahead, so that it need not wait for the worker. It
receives one at a time. The worker holds the child's end of the socket too: it takes back calls that
wait as soon as a call takes long. Meanwhile the worker does not read the child's output. The child
marks a result whose call has printed, and goes on when that output was read.

A call that waits for other tasks gives its slots back, so that these can run here. It goes on when
the runner has slots for it again.
"""

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import Final, NamedTuple

from msgspec import DecodeError

from taskyard.core.blobs import Blob, Content
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.process.child import STATUS_UNKNOWN, status_text
from taskyard.worker import call_frames, jobs, processes
from taskyard.worker.call_frames import CallFrame, ResultFrame
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.processes import SupervisedProcess
from taskyard.worker.slots import DeviceParts

#: `-P` keeps the current directory off `sys.path`: a user's `json.py` must not replace Python's.
_PROGRAM: Final = ("-P", "-m", "taskyard.worker.call_child")

#: The longest result. More comes from other code that writes to the socket.
_REPLY_BYTES_MAX: Final = jobs.PICKLED_BYTES_MAX + jobs.READ_BYTES_MAX


#: A call is short below this time, and long above the second time.
_SHORT_CALL_NS: Final = SECOND_NS // 500
_LONG_CALL_NS: Final = SECOND_NS // 50

#: Short calls in a row that allow one more job ahead, and the most jobs ahead. Linux holds ten
#: packets.
_SHORT_PER_AHEAD: Final = 4
_AHEAD_MAX: Final = 8

#: The longest job that is sent ahead, with its names: its frame is one packet.
_AHEAD_BYTES_MAX: Final = call_frames.PACKET_BYTES_MAX // 2


class CallOptions(NamedTuple):
    """How Python children run calls."""

    #: Calls after which a child is replaced. 0: never.
    calls_max: int = 0
    #: A call prints to the worker's stdout and stderr, and not to its task's output.
    passes_output: bool = False


def is_small(job: Job) -> bool:
    """Return whether a job may be sent ahead, or have jobs behind it."""
    is_plain = job.slots == 1 and not (job.time_limit_ns or job.resources or job.inputs)
    size = len(job.payload) + len(job.name) + len(job.campaign)
    return is_plain and size <= _AHEAD_BYTES_MAX


def _ignore(_event: object) -> None:
    """Do nothing."""


class CallProcess(SupervisedProcess):
    """A Python process, the socket to it, and its current call."""

    def __init__(  # noqa: PLR0913, PLR0917  # parts of one process
        self,
        process: processes.Process,
        sockets: tuple[socket.socket, socket.socket],
        resuming: int,
        output: jobs.Tail,
        pipe: processes.Pipe,
        runner_context: processes.RunnerContext,
    ) -> None:
        """Use the two ends of a socket, the worker's and the child's.

        A byte to the descriptor `resuming` lets a call go on that has waited.
        """
        super().__init__(process, runner_context)
        self._socket, self._far = sockets
        self._resuming = resuming
        self._output = output
        self._pipe = pipe
        self._inbox = call_frames.FrameBuffer()
        #: Jobs that were sent after the current job.
        self.ahead: deque[Job] = deque()
        #: Called with jobs that were sent ahead and have not begun.
        self.on_returned: Callable[[Sequence[Job]], None] = _ignore
        #: Called when its call waits for other tasks, and when it goes on.
        self.on_wait: Callable[[CallProcess], None] = _ignore
        self.on_resume: Callable[[CallProcess], None] = _ignore
        #: The call waits for other tasks, or for its slots after that.
        self._is_waiting = False
        #: Since when it has no job, by the monotonic clock.
        self.idle_since_ns = runner_context.now_ns()
        #: Short calls in a row that printed nothing.
        self._short_count = 0
        #: Calls until it exits. None: it does not.
        self.calls_left: int | None = None
        #: What is left of a call that did not fit the socket's buffer. A view, so nothing is
        #: copied.
        self._unsent = memoryview(b"")
        self._is_ready = False
        self._is_connected = True
        runner_context.selector.register(self._socket, EVENT_READ, self._on_socket)

    def is_free(self) -> bool:
        return self.job is None and self._is_connected and self.ending is None

    def let_exit(self) -> bool:
        """Close the socket of an idle child, so that it exits. Return whether it was idle."""
        is_idle = self._is_ready and self.is_free()
        if is_idle:
            self._close_socket()
        return is_idle

    def call(self, job: Job, gpus: DeviceParts) -> None:
        """Start a job with parts of GPUs. Only for a process that is free."""
        self._assign(job)
        self.gpus = gpus
        if not self._is_ready:
            # The start of Python does not count against the task's time limit.
            self.due_ns = self._context.now_ns() + jobs.CHILD_START_NS_MAX
        # Threads of an earlier call may have printed since.
        self._output.clear()
        self._send(_frame(job, gpus))

    def ahead_max(self) -> int:
        """Return how many jobs may wait in the child."""
        if self.job is None or self._unsent or not self.is_wanted or self._is_waiting:
            return 0
        can = self._is_connected and not self.is_ending() and is_small(self.job)
        can = can and self.calls_left is None
        return min(self._short_count // _SHORT_PER_AHEAD, _AHEAD_MAX) if can else 0

    def call_ahead(self, job: Job) -> None:
        """Send a small job while the current job runs."""
        self._pipe.unwatch()  # first: the output from now on may be of another job
        self.watch_at_ns = self._context.now_ns() + _LONG_CALL_NS
        try:
            self._socket.send(_frame(job))
        except OSError:  # it is full, or it died
            self.on_returned([job])
        else:
            self.ahead.append(job)

    def give_slots_back(self) -> None:
        """Use no slots while its call waits. The memory and GPUs stay."""
        self.slots = 0

    def resume(self) -> None:
        """Let its call go on, with its slots."""
        self._is_waiting = False
        self.slots = 0 if self.job is None else self.job.slots
        with suppress(OSError):  # it died, and its pidfd is ready
            os.write(self._resuming, call_frames.RESUME)

    def watch(self) -> None:
        """Take back the jobs that have not begun, and read the output of the current job."""
        self.watch_at_ns = None
        self._short_count = 0
        # In this order: a result is sent before the next call is received.
        self._take_back()
        self._receive_all()
        self._pipe.watch()

    def _take_back(self) -> None:
        """Take back the jobs that the child has not received.

        Meanwhile it may receive a call that follows returned calls.
        """
        taken = self._take_unread()
        if self.job is None or not taken:
            return
        sent = [self.job, *self.ahead]
        returned = [job for job in sent if job.key in taken]
        begun = [job for job in sent if job.key not in taken]
        if not begun:  # the current job has not begun either
            begun, returned = sent[:1], sent[1:]
            self._send(_frame(self.job))
        elif begun[0] is not self.job:
            self._assign(begun[0])
        self.ahead = deque(begun[1:])
        self.on_returned(returned)

    def _take_unread(self) -> set[tuple[bytes, int]]:
        """Remove the calls that the child has not received. Return the keys of their jobs."""
        taken = set()
        while self.ahead:
            try:
                frame = self._far.recv(jobs.READ_BYTES_MAX, socket.MSG_DONTWAIT)
            except OSError:
                break
            taken.add(call_frames.key_of_packet(frame))
        return taken

    def _limit_text(self) -> bytes:
        if self._is_ready:
            return super()._limit_text()
        return b"the worker's Python process was not ready within a minute"

    def _send(self, frame: memoryview) -> None:
        was_waiting = bool(self._unsent)
        try:
            while frame:
                frame = frame[self._socket.send(frame[: call_frames.PACKET_BYTES_MAX]) :]
        except BlockingIOError:
            pass
        except OSError:
            frame = frame[:0]  # it died, and its pidfd is ready
        self._unsent = frame
        if bool(self._unsent) != was_waiting:
            events = EVENT_READ | EVENT_WRITE if self._unsent else EVENT_READ
            self._context.selector.modify(self._socket, events, self._on_socket)

    def _on_socket(self, events: int) -> None:
        if self._is_connected and events & EVENT_WRITE:
            self._send(self._unsent)
        if events & EVENT_READ:
            self._receive_all()

    def _receive_all(self) -> None:
        """Read from the socket until nothing is left, or it is closed."""
        while self._is_connected:
            try:
                received = self._socket.recv(jobs.READ_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            if not received:
                self._close_socket()
            for frame in self._inbox.add(received):
                self._on_frame(frame)
            if self._inbox.bytes_pending() > _REPLY_BYTES_MAX:
                self._on_malformed()

    def _close_socket(self) -> None:
        if self._is_connected:
            self._is_connected = False
            self._context.selector.unregister(self._socket)
            self._socket.close()
            self._far.close()

    def _on_frame(self, frame: bytes) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._began_ns = self._context.now_ns()
            if not self.is_ending():
                self._start_limit()
            return
        if frame in (call_frames.WAIT, call_frames.RESUME):
            self._on_notice(frame)
            return
        try:
            result = call_frames.decode_result(frame)
        except DecodeError:
            self._on_malformed()
        else:
            self._on_result(result)

    def _on_notice(self, notice: bytes) -> None:
        """Note that the call waits for other tasks, or that it needs its slots again."""
        if self.job is None:
            self._on_malformed()
        elif self.is_ending():
            return
        elif notice == call_frames.WAIT:
            self._is_waiting = True
            if self.watch_at_ns is not None:
                self.watch()  # no call waits behind a waiting call
            self.on_wait(self)
        else:
            self.on_resume(self)

    def _clear_job(self) -> None:
        super()._clear_job()
        self._is_waiting = False
        self.idle_since_ns = self._context.now_ns()

    def _on_result(self, result: ResultFrame) -> None:
        if self.job is None:
            self._on_malformed()
        elif self.is_ending():
            # Too late: the call was already ended.
            self.process.signal(signal.SIGKILL)
        else:
            # The call's whole output was in the pipe before its result was sent. While jobs are
            # sent ahead, other output is of a later job.
            run = result.run
            if result.printed or self.watch_at_ns is None:
                self._pipe.drain()
            is_short = run is not None and run.run_ns < _SHORT_CALL_NS and not result.printed
            self._short_count = self._short_count + 1 if is_short else 0
            done = JobResult(self.job, result.outcome, result.text, self._output.content())
            if result.outcome is Outcome.RETRY_AT:  # the broker has no room for its result
                done.retry_at_ns = jobs.no_room_retry_ns(self.job, self._context.wall_ns())
            if result.output_end:
                done.printed = _appended(done.printed, result.output_end)
            done.run = run
            self._clear_job()
            self._context.report(done)
            if self.gpus:
                self.end(b"its GPUs belong to another call now")
            elif self.calls_left is not None:
                self._count_call(self.calls_left)
            elif self.ahead:
                self._begin_next()
            elif self.watch_at_ns is not None:
                self.watch_at_ns = None
                self._pipe.watch()

    def _count_call(self, calls_left: int) -> None:
        """Let the child exit after its last call. SIGTERM follows if it takes too long."""
        self.calls_left = calls_left - 1
        if calls_left <= 1:
            self._close_socket()
            self.due_ns = self._context.now_ns() + jobs.KILL_GRACE_NS

    def _begin_next(self) -> None:
        """Make the first job that was sent ahead the current job."""
        job = self.ahead.popleft()
        self._assign(job)
        self._output.clear()
        self.watch_at_ns = self._context.now_ns() + _LONG_CALL_NS

    def _on_malformed(self) -> None:
        """End the process: its socket can't be trusted any more."""
        self._close_socket()
        self.end(b"the called process wrote to the worker's connection")

    def _on_ended(self, status: int) -> JobResult | None:
        # It may have sent results before it died.
        self._receive_all()
        unread = self._take_unread() if self._is_connected else set()
        has_begun = self.job is None or self.job.key not in unread
        self.on_returned([*([] if has_begun or self.job is None else [self.job]), *self.ahead])
        self.ahead.clear()
        self._close_socket()
        os.close(self._resuming)
        self._pipe.drain()
        self._pipe.close()
        if self.job is None or not has_begun:
            return None
        died = f"the process died: {status_text(status)}".encode()
        done = JobResult(self.job, Outcome.FAILED, self.ending or died, self._output.content())
        # The process's usage covers all its calls, so only the time is recorded.
        done.run = self.run_record(None if status == STATUS_UNKNOWN else status)
        return done


def _appended(output: Content, end: bytes) -> Content:
    if isinstance(output, Blob):
        return Blob(b"", output.length + len(end), output.ends + end)
    return output + end


def _frame(job: Job, gpus: DeviceParts | None = None) -> memoryview:
    env = processes.job_env(job, gpus or {})
    call = CallFrame(job.name, job.attempt, job.payload, job.campaign, env, job.inputs)
    return memoryview(call_frames.pack(call))


def start_child(
    allow: Sequence[str],
    runner_context: processes.RunnerContext,
    options: CallOptions,
    *,
    forked: bool = False,
) -> CallProcess:
    """Start a Python process. Raises `OSError` if the system has no room for it.

    `forked`: fork this process, which must have one thread. That takes a tenth of the time.
    """
    output = jobs.Tail(jobs.OUTPUT_TAIL_BYTES)
    pipe = processes.Pipe(runner_context.selector, output.add)
    with pipe as writing:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = theirs.fileno()
        resumed, resuming = os.pipe()
        if options.passes_output:
            log = writing
            streams = processes.Streams(runner_context.dev_null, 1, 2, [descriptor, resumed, log])
        else:
            log = 2
            streams = processes.Streams(
                runner_context.dev_null, writing, writing, [descriptor, resumed]
            )
        numbers = (descriptor, resumed, log)
        argv = [sys.executable, *_PROGRAM, *map(str, numbers), *allow]
        try:
            if forked:
                from taskyard.worker import call_child  # noqa: PLC0415  # slow to import

                env = runner_context.task_env
                process = processes.fork(partial(call_child.run, *numbers, allow, env), streams)
            else:
                process = processes.start(argv, streams, runner_context.env, runner_context.paths)
        except BaseException:
            ours.close()
            theirs.close()
            os.close(resuming)
            raise
        finally:
            os.close(resumed)
    ours.settimeout(0)
    child = CallProcess(process, (ours, theirs), resuming, output, pipe, runner_context)
    child.calls_left = options.calls_max or None
    return child
