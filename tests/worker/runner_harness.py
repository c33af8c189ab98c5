"""What the tests of the runner share: a loop around it, a clock that they set, and processes seen
from outside."""

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from taskyard.core.limits import SECOND_NS
from taskyard.wire.payloads import CALL, EXEC, encode_call, encode_command
from taskyard.worker.runner import Job, JobResult, ProcessRunner

#: Longer than anything here takes on the slowest machine: a test that waits so long has failed.
PATIENCE_NS = 60 * SECOND_NS


class SetClock:
    """Time passes only when the test says so."""

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
    slots: int = 1, allow: Sequence[str] = (), clock: SetClock | RealClock | None = None
) -> Iterator[ProcessRunner]:
    runner = ProcessRunner(slots, allow, clock or RealClock())
    try:
        yield runner
    finally:
        runner.close()


def turns(runner: ProcessRunner, count: int = 1) -> list[JobResult]:
    """As a worker's loop does it, until so many jobs are done. Without what was measured."""
    return [without_run(done) for done in measured_turns(runner, count)]


def without_run(done: JobResult) -> JobResult:
    return structs.replace(done, run=None)


def measured_turns(runner: ProcessRunner, count: int = 1) -> list[JobResult]:
    """Take turns until so many jobs are done."""
    done: list[JobResult] = []
    end_ns = time.monotonic_ns() + PATIENCE_NS
    while len(done := done + runner.turn()) < count:
        assert time.monotonic_ns() < end_ns, f"only {done} after a minute"
        wait(runner)
    return done


def wait(runner: ProcessRunner) -> None:
    """Until there is something to read, or a turn is due by the real clock."""
    wake_at_ns = runner.wake_at_ns()
    wait_ns = PATIENCE_NS if wake_at_ns is None else wake_at_ns - time.monotonic_ns()
    wait_seconds = min(max(wait_ns, 0), PATIENCE_NS) / SECOND_NS
    select.select(runner.filenos(), [], [], wait_seconds)


def turn_until_quiet(runner: ProcessRunner) -> list[JobResult]:
    """Turns until every process is reaped: for what is not reported."""
    done = runner.turn()
    while runner.slots_used:
        wait(runner)
        done += runner.turn()
    return done


def command(*argv: str, name: bytes = b"t", **terms: Any) -> Job:
    """A job that runs a program."""
    payload = encode_command(argv, terms.pop("env", None), terms.pop("cwd", None))
    return Job(name, terms.pop("attempt", 1), EXEC, payload, **terms)


def script(code: str, *argv: str, **terms: Any) -> Job:
    """A job that runs Python code as a program."""
    return command(sys.executable, "-c", code, *argv, **terms)


def call(function: str, *args: Any, name: bytes = b"t", **terms: Any) -> Job:
    """A job that calls a function."""
    kwargs, env, cwd = (terms.pop(key, None) for key in ("kwargs", "env", "cwd"))
    payload = encode_call(function, args, kwargs, env, cwd)
    return Job(name, terms.pop("attempt", 1), CALL, payload, **terms)


def result_of(job: Job, *, slots: int = 1, allow: Sequence[str] = ()) -> JobResult:
    """What comes of one job alone."""
    with a_runner(slots, allow) as runner:
        runner.start(job)
        (done,) = turns(runner)
        return done


def a_fifo(path: Path) -> str:
    """By which a process tells the test where it is."""
    os.mkfifo(path)
    return str(path)


def told(fifo: str) -> str:
    """What a process writes there; waits until it does."""
    # Not by a plain open: it would wait for ever for a process that did not come so far.
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        text = b""
        while True:
            readable, _, _ = select.select([descriptor], [], [], PATIENCE_NS / SECOND_NS)
            assert readable, f"nothing was told by {fifo} in a minute"
            if not (chunk := os.read(descriptor, 1000)):
                return text.decode()
            text += chunk
    finally:
        os.close(descriptor)


def has_ended(pid: int) -> bool:
    """Waits for it: a process that was killed takes a moment to be gone."""
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
