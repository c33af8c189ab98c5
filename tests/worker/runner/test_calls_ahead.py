"""Calls that are sent to a Python process before its current call is done."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskyard.core.blobs import length_of
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.worker import call_process
from taskyard.worker.jobs import Job
from taskyard.worker.runner import ProcessRunner
from tests.kit.processes import until
from tests.worker.runner_harness import (
    a_fifo,
    a_runner,
    call,
    done,
    has_ended,
    read_fifo,
    turn_until_quiet,
    turns,
)

pytestmark = pytest.mark.usefixtures("home")

#: Short calls after which a process gets as many calls ahead as it may.
WARM = 40


@pytest.fixture(autouse=True)
def any_call_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count calls as short on a busy machine too."""
    monkeypatch.setattr(call_process, "_SHORT_CALL_NS", 3600 * SECOND_NS)


def named(function: str, *args: object, name: str) -> Job:
    return call(function, *args, name=name.encode())


@contextmanager
def a_warm_runner(slots: int = 1) -> Iterator[ProcessRunner]:
    """Make a runner whose processes have made many short calls."""
    with a_runner(slots, allow=["yard"]) as runner:
        for number in range(WARM * slots):
            runner.start(named("yard:nothing", name=f"warm-{number}"))
        turns(runner, WARM * slots)
        yield runner


def start_all(runner: ProcessRunner, jobs: list[Job]) -> None:
    for job in jobs:
        runner.start(job)
    assert runner.turn() == []


def is_waiting(runner: ProcessRunner) -> int:
    """Return how many jobs are not in a process."""
    return len(runner._waiting)  # noqa: SLF001  # not seen from outside


def test_process_with_short_calls_gets_the_next_ones_ahead(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner() as runner:
        jobs = [named("yard:read", fifo, name="first")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(20)]
        start_all(runner, jobs)
        assert is_waiting(runner) == 20 - 8
        assert runner.running() == jobs
        Path(fifo).write_text("x")
        assert [one.job for one in turns(runner, 21)] == jobs


@pytest.mark.parametrize("long_call_ns", [0, SECOND_NS // 50, 3600 * SECOND_NS])
def test_output_belongs_to_the_call_that_printed_it(
    long_call_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_process, "_LONG_CALL_NS", long_call_ns)
    count = 150
    with a_warm_runner() as runner:
        jobs = [
            named("yard:echo", f"line {number}", name=f"n{number}")
            if number % 7 == 3 or number > count - 10
            else named("yard:nothing", name=f"n{number}")
            for number in range(count)
        ]
        for job in jobs:
            runner.start(job)
        results = turns(runner, count)
    expected = [
        done(job, b"null", b"line %d\n" % number if b"echo" in job.payload else b"")
        for number, job in enumerate(jobs)
    ]
    order = {job.name: number for number, job in enumerate(jobs)}
    # A call that was taken back may end after the next one.
    assert sorted(results, key=lambda one: order[one.job.name]) == expected


def test_more_output_than_a_pipe_holds_is_read_from_a_call_with_others_behind_it() -> None:
    with a_warm_runner() as runner:
        jobs = [
            named("yard:flood", 300_000, name="flood"),
            *(named("yard:nothing", name=f"n{number}") for number in range(5)),
        ]
        start_all(runner, jobs)
        results = turns(runner, 6)
    assert [one.job for one in results] == jobs
    assert length_of(results[0].printed) == 300_000
    assert [one.output for one in results[1:]] == [b""] * 5


def test_calls_behind_a_long_one_run_in_other_processes(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner(slots=2) as runner:
        jobs = [named("yard:hang", fifo, name="hang")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(12)]
        for job in jobs:
            runner.start(job)
        assert {one.job.name for one in turns(runner, 12)} == {job.name for job in jobs[1:]}
        assert [job.name for job in runner.running()] == [b"hang"]


def test_death_of_a_process_fails_its_call_and_no_call_behind_it(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner() as runner:
        jobs = [named("yard:hang", fifo, name="hang")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(12)]
        start_all(runner, jobs)
        pid = int(read_fifo(fifo))
        assert is_waiting(runner) == 12 - 8
        os.kill(pid, signal.SIGKILL)
        first, *others = turns(runner, 13)
        assert (first.job, first.text) == (jobs[0], b"the process died: killed by SIGKILL")
        assert [(one.job, one.outcome) for one in others] == [
            (job, Outcome.DONE) for job in jobs[1:]
        ]


def test_every_call_is_made_once_although_processes_die(home: Path) -> None:
    with a_warm_runner(slots=2) as runner:
        jobs = [
            named("yard:leave", 1, name=f"n{number}")
            if number % 10 == 5
            else named("yard:note", number, name=f"n{number}")
            for number in range(100)
        ]
        for job in jobs:
            runner.start(job)
        results = turns(runner, 100)
    assert len({one.job.name for one in results}) == 100
    failed = [one.job.name for one in results if one.outcome is not Outcome.DONE]
    assert sorted(failed) == sorted(b"n%d" % number for number in range(5, 100, 10))
    noted = sorted(map(int, (home / "notes").read_text().split()))
    assert noted == [number for number in range(100) if number % 10 != 5]


def test_call_behind_another_can_be_stopped(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner() as runner:
        jobs = [named("yard:read", fifo, name="first")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(4)]
        start_all(runner, jobs)
        runner.stop(b"n2", 1)
        Path(fifo).write_text("x")
        assert [one.job.name for one in turns(runner, 4)] == [b"first", b"n0", b"n1", b"n3"]


def test_stopped_call_is_ended_and_the_calls_behind_it_are_made(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner() as runner:
        jobs = [named("yard:hang", fifo, name="hang")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(4)]
        start_all(runner, jobs)
        pid = int(read_fifo(fifo))
        runner.stop(b"hang", 1)
        assert [one.job for one in turns(runner, 4)] == jobs[1:]
        assert has_ended(pid)


def test_calls_behind_another_are_returned_as_unstarted(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner() as runner:
        jobs = [named("yard:read", fifo, name="first")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(12)]
        start_all(runner, jobs)
        assert runner.unstarted() == jobs[1:]
        Path(fifo).write_text("x")
        assert [one.job for one in turn_until_quiet(runner)] == jobs[:1]


def test_calls_with_limits_or_large_arguments_are_not_sent_ahead(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner() as runner:
        limited = call("yard:nothing", name=b"limited", time_limit_ns=SECOND_NS)
        jobs = [named("yard:read", fifo, name="first"), limited]
        start_all(runner, [*jobs, named("yard:size", "x" * 50_000, name="large")])
        assert is_waiting(runner) == 2
        Path(fifo).write_text("x")
        assert [one.text for one in turns(runner, 3)] == [b'"x"', b"null", b"50000"]


class InterruptedTaking:
    """The child's end of a socket. The worker is interrupted after it took the first call back."""

    def __init__(self, far: socket.socket, meanwhile: Callable[[], None]) -> None:
        self._far = far
        self._meanwhile: Callable[[], None] | None = meanwhile
        self.close = far.close

    def recv(self, size: int, flags: int) -> bytes:
        taken = self._far.recv(size, flags)
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return taken


def take_back(runner: ProcessRunner, meanwhile: Callable[[], None]) -> None:
    """Take calls back that have not begun. Call `meanwhile` after the first."""
    (child,) = runner._call_processes()  # noqa: SLF001
    child._far = InterruptedTaking(child._far, meanwhile)  # type: ignore[assignment]  # noqa: SLF001
    runner.stop(b"unknown", 1)


def test_results_are_of_their_calls_if_the_process_goes_on_while_calls_are_taken_back(
    home: Path,
) -> None:
    first, second = a_fifo(home / "first"), a_fifo(home / "second")
    with a_warm_runner() as runner:
        jobs = [named("yard:read", first, name="first"), named("yard:add", 0, name="n0")]
        jobs += [named("yard:read", second, name="n1")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(2, 6)]
        start_all(runner, jobs)
        # Blocks until `first` has begun.
        gate = Path(first).open("w")  # noqa: SIM115 - closed below

        def meanwhile() -> None:
            """Let `first` end, and the call begin that follows the one that was taken back."""
            with gate:
                gate.write("first")
            Path(second).write_text("n1")  # blocks until it has begun

        take_back(runner, meanwhile)
        results = {one.job.name: one.text for one in turns(runner, 7)}
    assert results == {b"first": b'"first"', b"n1": b'"n1"', b"n0": b"0"} | {
        b"n%d" % number: b"%d" % number for number in range(2, 6)
    }


def test_call_that_was_taken_back_before_it_began_is_made_after_the_next_one(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_warm_runner() as runner:
        (child,) = runner._call_processes()  # noqa: SLF001
        child.process.signal(signal.SIGSTOP)
        until(lambda: ") T " in Path(f"/proc/{child.process.pid}/stat").read_text())
        jobs = [named("yard:add", 7, name="first"), named("yard:read", fifo, name="n0")]
        jobs += [named("yard:add", number, name=f"n{number}") for number in range(1, 4)]
        start_all(runner, jobs)

        def meanwhile() -> None:
            child.process.signal(signal.SIGCONT)
            Path(fifo).write_text("n0")  # blocks until it has begun

        take_back(runner, meanwhile)
        results = {one.job.name: one.text for one in turns(runner, 5)}
    assert results == {b"first": b"7", b"n0": b'"n0"', b"n1": b"1", b"n2": b"2", b"n3": b"3"}
