"""A loop around a runner, a clock that tests set, and jobs of each kind."""

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from taskyard.calls.payloads import CALL, EXEC, encode_call, encode_command
from taskyard.core.blobs import Content
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.runner import ProcessRunner

#: Longer than anything takes on the slowest machine. A test that waits longer fails.
PATIENCE_NS = 60 * SECOND_NS


#: Writes to a FIFO, then blocks without using CPU time.
HANG = """
import os, signal, sys
open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""

HANG_IGNORING_SIGTERM = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + HANG


class SetClock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000 * SECOND_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns


class RealClock:
    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()


@contextmanager
def a_runner(
    slots: int = 1,
    allow: Sequence[str] = (),
    clock: SetClock | RealClock | None = None,
    gpus: Sequence[str] = (),
) -> Iterator[ProcessRunner]:
    runner = ProcessRunner(slots, allow, clock or RealClock(), gpus=gpus)
    try:
        yield runner
    finally:
        runner.close()


def turns(runner: ProcessRunner, count: int = 1) -> list[JobResult]:
    """Drive a runner until `count` jobs are done. Return their results without measurements."""
    return [without_run(done) for done in measured_turns(runner, count)]


def without_run(done: JobResult) -> JobResult:
    return structs.replace(done, run=None)


def measured_turns(runner: ProcessRunner, count: int = 1) -> list[JobResult]:
    """Drive a runner until `count` jobs are done. Return their results."""
    done: list[JobResult] = []
    end_ns = time.monotonic_ns() + PATIENCE_NS
    while len(done := done + runner.turn()) < count:
        assert time.monotonic_ns() < end_ns, f"only {done} after a minute"
        wait(runner)
    return done


def wait(runner: ProcessRunner) -> None:
    """Wait until a descriptor is readable, or a turn is due by the real clock."""
    wake_at_ns = runner.wake_at_ns()
    wait_ns = PATIENCE_NS if wake_at_ns is None else wake_at_ns - time.monotonic_ns()
    wait_seconds = min(max(wait_ns, 0), PATIENCE_NS) / SECOND_NS
    select.select(runner.filenos(), [], [], wait_seconds)


def turn_until_quiet(runner: ProcessRunner) -> list[JobResult]:
    """Drive a runner until every process is reaped."""
    done = runner.turn()
    while runner.slots_used:
        wait(runner)
        done += runner.turn()
    return done


_COMMAND_KEYS = ("env", "cwd", "stdin", "stdin_file", "final_exit_status")


def command(*argv: str, name: bytes = b"t", **terms: Any) -> Job:
    """Return a job that runs a program."""
    keys = {key: terms.pop(key, None) for key in _COMMAND_KEYS}
    payload = encode_command(argv, **keys)
    return Job(name, terms.pop("attempt", 1), EXEC, payload, **terms)


def script(code: str, *argv: str, **terms: Any) -> Job:
    """Return a job that runs Python code as a program."""
    return command(sys.executable, "-c", code, *argv, **terms)


def call(function: str, *args: Any, name: bytes = b"t", **terms: Any) -> Job:
    """Return a job that calls a function."""
    kwargs, env, cwd = (terms.pop(key, None) for key in ("kwargs", "env", "cwd"))
    payload = encode_call(function, args, kwargs, env, cwd)
    return Job(name, terms.pop("attempt", 1), CALL, payload, **terms)


def result_of(job: Job, *, slots: int = 1, allow: Sequence[str] = ()) -> JobResult:
    """Run one job alone, and return its result."""
    with a_runner(slots, allow) as runner:
        runner.start(job)
        (done,) = turns(runner)
        return done


def a_fifo(path: Path) -> str:
    """Make a FIFO through which a process can signal the test."""
    os.mkfifo(path)
    return str(path)


def read_fifo(fifo: str) -> str:
    """Wait until a process writes to a FIFO, and return the text."""
    # A plain open would block for ever if the process never opens it.
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        text = b""
        while True:
            readable, _, _ = select.select([descriptor], [], [], PATIENCE_NS / SECOND_NS)
            assert readable, f"nothing was written to {fifo} in a minute"
            if not (chunk := os.read(descriptor, 1000)):
                return text.decode()
            text += chunk
    finally:
        os.close(descriptor)


def has_ended(pid: int) -> bool:
    """Wait for the end of a process: one that was killed takes a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], PATIENCE_NS / SECOND_NS)
        return bool(readable)
    finally:
        os.close(descriptor)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number counts


def done(job: Job, text: bytes, output: Content = b"") -> JobResult:
    return JobResult(job, Outcome.DONE, text, output)


def failed(job: Job, reason: bytes, output: Content = b"") -> JobResult:
    return JobResult(job, Outcome.FAILED, reason, output)


def failed_final(job: Job, reason: bytes) -> JobResult:
    return JobResult(job, Outcome.FAILED_FINAL, reason)


def result_of_call(job: Job) -> JobResult:
    return result_of(job, allow=["yard"])


def assert_is_quiet(runner: ProcessRunner) -> None:
    """Check that no turn is due."""
    assert runner.wake_at_ns() is None
    assert select.select(runner.filenos(), [], [], 0) == ([], [], [])
