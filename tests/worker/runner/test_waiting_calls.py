"""Calls that wait for other tasks give their slots back, and take them again before new tasks."""

import os
import signal
from pathlib import Path

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.worker import call_process, runner
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.runner import CHILD_IDLE_NS_MAX, ProcessRunner
from tests.worker.runner_harness import (
    SetClock,
    a_fifo,
    a_runner,
    call,
    done,
    failed,
    has_ended,
    open_descriptors,
    turn_until_quiet,
    turns,
    wait,
)

NESTED = """
import os
import threading

from taskyard.calls import current_task

def outer(fifo):
    with current_task.slot_given_back():
        return open(fifo).read()

def twice(first, second):
    with current_task.slot_given_back():
        with current_task.slot_given_back():
            text = open(first).read()
    with current_task.slot_given_back():
        return text + open(second).read()

def in_thread(fifo):
    thread = threading.Thread(target=outer, args=[fifo])
    thread.start()
    thread.join()

def in_fork(fifo):
    if os.fork() == 0:
        outer(fifo)
        os._exit(0)
    os.wait()

def read(fifo): return open(fifo).read()
def pid(): return os.getpid()
def nothing(): pass
"""

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(autouse=True)
def nested(home: Path) -> None:
    (home / "nested.py").write_text(NESTED)


def named(name: str, function: str, *args: object, **terms: object) -> Job:
    return call(f"nested:{function}", *args, name=name.encode(), **terms)


def names(results: list[JobResult]) -> list[bytes]:
    return [one.job.name for one in results]


def waiting(pool: ProcessRunner) -> list[Job]:
    return [*pool.waiting_calls()[0]]


def turn_until_waiting(pool: ProcessRunner, count: int = 1) -> None:
    """Drive a runner until calls have given their slots back."""
    while len(waiting(pool)) < count:
        assert pool.turn() == []
        if len(waiting(pool)) < count:
            wait(pool)


def test_other_tasks_run_while_a_call_waits(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    outer, inner = named("outer", "outer", fifo), named("inner", "pid")
    with a_runner(1, allow=["nested"]) as pool:
        pool.start(outer)
        turn_until_waiting(pool)
        assert (pool.slots_used, pool.running()) == (0, [outer])
        pool.start(inner)
        assert names(turns(pool)) == [b"inner"]
        Path(fifo).write_text("x")
        assert turns(pool) == [done(outer, b'"x"')]
        assert waiting(pool) == []


def test_call_that_goes_on_is_served_before_new_tasks(home: Path) -> None:
    fifos = [a_fifo(home / name) for name in ("first", "second")]
    with a_runner(1, allow=["nested"]) as pool:
        pool.start(named("outer", "outer", fifos[0]))
        turn_until_waiting(pool)
        pool.start(named("inner", "read", fifos[1]))
        pool.start(named("later", "pid"))
        assert pool.turn() == []
        Path(fifos[0]).write_text("x")
        while waiting(pool):
            wait(pool)
            assert pool.turn() == []
        assert pool.slots_used == 1
        Path(fifos[1]).write_text("x")
        assert names(turns(pool, 3)) == [b"inner", b"outer", b"later"]


def test_wide_call_that_goes_on_is_not_overtaken(home: Path) -> None:
    fifos = [a_fifo(home / name) for name in ("outer", "first", "second")]
    with a_runner(2, allow=["nested"]) as pool:
        pool.start(named("outer", "outer", fifos[0], slots=2))
        turn_until_waiting(pool)
        pool.start(named("first", "read", fifos[1]))
        pool.start(named("second", "read", fifos[2]))
        pool.start(named("later", "pid"))
        assert pool.turn() == []
        Path(fifos[0]).write_text("x")
        while waiting(pool):
            wait(pool)
            assert pool.turn() == []
        Path(fifos[1]).write_text("x")
        assert names(turns(pool)) == [b"first"]
        assert pool.slots_used == 1  # one slot is kept for it
        Path(fifos[2]).write_text("x")
        assert names(turns(pool, 3)) == [b"second", b"outer", b"later"]


def test_call_may_wait_again_and_inside_a_wait(home: Path) -> None:
    fifos = [a_fifo(home / name) for name in ("first", "second")]
    with a_runner(1, allow=["nested"]) as pool:
        outer = named("outer", "twice", *fifos)
        pool.start(outer)
        for fifo in fifos:
            turn_until_waiting(pool)
            pool.start(named("inner", "pid"))
            assert names(turns(pool)) == [b"inner"]
            Path(fifo).write_text("x")
            while fifo == fifos[0] and waiting(pool):
                assert pool.turn() == []
        assert turns(pool) == [done(outer, b'"xx"')]


@pytest.mark.parametrize("function", ["in_thread", "in_fork"])
def test_only_the_thread_of_the_call_gives_its_slot_back(home: Path, function: str) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(1, allow=["nested"]) as pool:
        pool.start(named("outer", function, fifo))
        pool.start(named("later", "pid"))
        assert pool.turn() == []
        Path(fifo).write_text("x")
        assert names(turns(pool, 2)) == [b"outer", b"later"]


def test_too_many_waiting_calls_keep_their_slots(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CALLS_WAITING_MAX", 1)
    fifos = [a_fifo(home / name) for name in ("first", "second", "third")]
    with a_runner(1, allow=["nested"]) as pool:
        pool.start(named("first", "outer", fifos[0]))
        turn_until_waiting(pool)
        pool.start(named("second", "outer", fifos[1]))
        pool.start(named("third", "outer", fifos[2]))
        while pool.turn() == [] and not pool.waiting_calls()[1]:
            wait(pool)
        assert pool.waiting_calls()[1] == 1
        assert (pool.slots_used, len(pool.running())) == (1, 3)
        # The first one goes on, so the second one gives its slot back.
        for fifo, name in zip(fifos, [b"first", b"second", b"third"], strict=True):
            Path(fifo).write_text("x")
            assert names(turns(pool)) == [name]


def test_waiting_call_can_be_stopped_and_killed(home: Path) -> None:
    before = open_descriptors()
    fifos = [a_fifo(home / name) for name in ("first", "second")]
    with a_runner(1, allow=["nested"]) as pool:
        jobs = [named("first", "outer", fifos[0]), named("second", "outer", fifos[1])]
        for count, job in enumerate(jobs, 1):
            pool.start(job)
            turn_until_waiting(pool, count)
        pids = [one.process.pid for one in pool._waiting_calls.waiting]  # noqa: SLF001
        pool.stop(*jobs[0].key)
        os.kill(pids[1], signal.SIGKILL)
        assert turns(pool) == [failed(jobs[1], b"the process died: killed by SIGKILL")]
        assert has_ended(pids[0])
        turn_until_quiet(pool)
        pool.start(named("later", "pid"))
        assert names(turns(pool)) == [b"later"]
        assert waiting(pool) == []
    assert open_descriptors() == before


def test_stopped_call_keeps_no_task_from_its_slot(home: Path) -> None:
    fifos = [a_fifo(home / name) for name in ("first", "second")]
    with a_runner(1, allow=["nested"]) as pool:
        outer = named("outer", "outer", fifos[0])
        pool.start(outer)
        turn_until_waiting(pool)
        pool.start(named("inner", "read", fifos[1]))
        assert pool.turn() == []
        Path(fifos[0]).write_text("x")
        while waiting(pool):
            wait(pool)
            assert pool.turn() == []
        pool.stop(*outer.key)  # while it waits for its slot
        pool.start(named("later", "pid"))
        Path(fifos[1]).write_text("x")
        assert names(turns(pool, 2)) == [b"inner", b"later"]


def test_time_limit_includes_waiting(home: Path) -> None:
    fifo, clock = a_fifo(home / "fifo"), SetClock()
    with a_runner(1, allow=["nested"], clock=clock) as pool:
        outer = named("outer", "outer", fifo, time_limit_ns=SECOND_NS)
        pool.start(outer)
        turn_until_waiting(pool)
        clock.now_ns += SECOND_NS
        assert turns(pool) == [failed(outer, b"time limit of 1 s exceeded")]


def test_calls_behind_one_that_waits_are_taken_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_process, "_SHORT_CALL_NS", 3600 * SECOND_NS)
    monkeypatch.setattr(call_process, "_LONG_CALL_NS", 3600 * SECOND_NS)
    fifo = a_fifo(home / "fifo")
    with a_runner(1, allow=["nested"]) as pool:
        for number in range(40):
            pool.start(named(f"warm-{number}", "nothing"))
        turns(pool, 40)
        pool.start(named("outer", "outer", fifo))
        for number in range(10):
            pool.start(named(f"inner-{number}", "nothing"))
        assert names(turns(pool, 10)) == [b"inner-%d" % number for number in range(10)]
        Path(fifo).write_text("x")
        assert names(turns(pool)) == [b"outer"]


def test_queued_jobs_start_by_priority() -> None:
    priorities = [0, 0, 1, 3, 1, 0, -1]
    with a_runner(1, allow=["nested"]) as pool:
        for number, priority in enumerate(priorities):
            pool.start(named(str(number), "nothing", priority=priority))
        assert names(turns(pool, 7)) == [b"3", b"2", b"4", b"0", b"1", b"5", b"6"]


def test_processes_beyond_the_slots_end_when_they_are_idle(home: Path) -> None:
    fifo, clock = a_fifo(home / "fifo"), SetClock()
    with a_runner(1, allow=["nested"], clock=clock) as pool:
        pool.start(named("outer", "outer", fifo))
        turn_until_waiting(pool)
        pool.start(named("inner", "pid"))
        turns(pool)
        Path(fifo).write_text("x")
        turns(pool)
        assert len(pool._processes) == 2  # noqa: SLF001
        clock.now_ns += CHILD_IDLE_NS_MAX
        while pool.turn() == [] and len(pool._processes) == 2:  # noqa: SLF001
            wait(pool)
        pool.start(named("later", "pid"))
        assert names(turns(pool)) == [b"later"]
