"""Tasks of `call` and `pickle`: functions, called in Python processes that are kept.

A child runs one call at a time. Its output between a call and the result belongs to that call. A
child that dies or is ended fails its call, and a new child replaces it. Threads and globals that a
call leaves behind stay until the process ends.
"""

import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import Final

from taskyard.core.events import Outcome
from taskyard.core.runs import Run
from taskyard.process.child import STATUS_UNKNOWN, status_text
from taskyard.worker import call_frames
from taskyard.worker.devices import Shares, resource_env
from taskyard.worker.jobs import Job, JobResult, Tail
from taskyard.worker.limits import (
    CHILD_START_NS_MAX,
    OUTPUT_TAIL_BYTES,
    PICKLED_BYTES_MAX,
    READ_BYTES_MAX,
)
from taskyard.worker.processes import (
    Pipe,
    Process,
    RunnerContext,
    Streams,
    SupervisedProcess,
    fork,
    start,
)

#: `-P` keeps the current directory off `sys.path`: a user's `json.py` must not replace Python's.
_PROGRAM: Final = ("-P", "-m", "taskyard.worker.call_child")

#: The longest result. More comes from other code that writes to the socket.
_REPLY_BYTES_MAX: Final = PICKLED_BYTES_MAX + READ_BYTES_MAX


class CallProcess(SupervisedProcess):
    """A Python process, the socket to it, and its current call."""

    def __init__(
        self,
        process: Process,
        connection: socket.socket,
        output: Tail,
        pipe: Pipe,
        runner_context: RunnerContext,
    ) -> None:
        super().__init__(process, runner_context)
        self._socket = connection
        self._output = output
        self._pipe = pipe
        self._inbox = call_frames.FrameBuffer()
        #: The rest of a call that did not fit the socket's buffer. A view, so nothing is copied.
        self._unsent = memoryview(b"")
        self._is_ready = False
        self._is_connected = True
        runner_context.selector.register(connection, EVENT_READ, self._on_socket)

    def is_free(self) -> bool:
        return self.job is None and self._is_connected and not self.is_ending()

    def call(self, job: Job, gpus: Shares) -> None:
        """Start a job with parts of GPUs. Only for a process that is free."""
        self._assign(job)
        self.gpus = gpus
        if not self._is_ready:
            # The start of Python does not count against the task's time limit.
            self.due_ns = self._context.now_ns() + CHILD_START_NS_MAX
        # Threads of an earlier call may have printed since.
        self._output.clear()
        env = resource_env(job.resources, gpus)
        frame = call_frames.pack_call(job.name, job.attempt, job.payload, job.campaign, env)
        self._send(memoryview(frame))

    def _limit_text(self) -> bytes:
        if self._is_ready:
            return super()._limit_text()
        return b"the worker's Python process was not ready within a minute"

    def _send(self, frame: memoryview) -> None:
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(frame)  # it died, and its pidfd is ready
        was_waiting, self._unsent = bool(self._unsent), frame[sent:]
        if bool(self._unsent) != was_waiting:
            events = EVENT_READ | EVENT_WRITE if self._unsent else EVENT_READ
            self._context.selector.modify(self._socket, events, self._on_socket)

    def _on_socket(self, events: int) -> None:
        if self._is_connected and events & EVENT_WRITE:
            self._send(self._unsent)
        if self._is_connected and events & EVENT_READ:
            self._receive()

    def _receive(self) -> bool:
        """Read once from the socket. Return whether more may come."""
        try:
            received = self._socket.recv(READ_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if not received:
            self._close_socket()
            return False
        for frame in self._inbox.add(received):
            self._on_frame(frame)
        if self._inbox.bytes_pending() > _REPLY_BYTES_MAX:
            self._on_malformed()
        return self._is_connected

    def _close_socket(self) -> None:
        if self._is_connected:
            self._is_connected = False
            self._context.selector.unregister(self._socket)
            self._socket.close()

    def _on_frame(self, frame: bytes) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._began_ns = self._context.now_ns()
            if not self.is_ending():
                self._start_limit()
            return
        try:
            result = call_frames.unpack_result(frame)
        except ValueError:
            self._on_malformed()
        else:
            self._on_result(*result)

    def _on_result(self, outcome: Outcome, text: bytes, output_end: bytes, run: Run | None) -> None:
        if self.job is None:
            self._on_malformed()
        elif self.is_ending():
            # Too late: the call was already ended.
            self.process.signal(signal.SIGKILL)
        else:
            # The call's whole output was in the pipe before its result was sent.
            self._pipe.drain()
            done = self._done(self.job, outcome, text)
            done.output += output_end
            done.output_bytes_total += len(output_end) if done.output_bytes_total else 0
            done.run = run
            self._clear_job()
            self._context.report(done)
            if self.gpus:
                self.end(b"its GPUs belong to another call now")

    def _on_malformed(self) -> None:
        """End the process: its socket can't be trusted any more."""
        self._close_socket()
        self.end(b"the called process wrote to the worker's connection")

    def _on_ended(self, status: int) -> JobResult | None:
        # It may have sent a result before it died.
        while self._is_connected and self._receive():
            pass
        self._close_socket()
        self._pipe.drain()
        self._pipe.close()
        if self.job is None:
            return None
        died = f"the process died: {status_text(status)}".encode()
        done = self._done(self.job, Outcome.FAILED, self._ending or died)
        # The process's usage covers all its calls, so only the time is recorded.
        done.run = self._run_record(None if status == STATUS_UNKNOWN else status)
        return done

    def _done(self, job: Job, outcome: Outcome, text: bytes) -> JobResult:
        output, bytes_total = self._output.with_size()
        return JobResult(job, outcome, text, output, output_bytes_total=bytes_total)


def start_child(
    allow: Sequence[str], runner_context: RunnerContext, *, forked: bool = False
) -> CallProcess:
    """Start a Python process. Raises `OSError` if the system has no room for it.

    `forked`: fork this process, which must have one thread. That takes a tenth of the time.
    """
    output = Tail(OUTPUT_TAIL_BYTES)
    pipe = Pipe(runner_context.selector, output.add)
    with pipe as writing:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            argv = [sys.executable, *_PROGRAM, str(descriptor), *allow]
            streams = Streams(runner_context.dev_null, writing, writing, [descriptor])
            try:
                if forked:
                    from taskyard.worker import call_child  # noqa: PLC0415  # slow to import

                    process = fork(partial(call_child.run, descriptor, allow), streams)
                else:
                    process = start(argv, streams, runner_context.env)
            except BaseException:
                ours.close()
                raise
    ours.settimeout(0)
    return CallProcess(process, ours, output, pipe, runner_context)
