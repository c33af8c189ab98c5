"""A worker measures each attempt: start and end, status, CPU time and memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING

from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run
from tests.worker.agents_harness import a_pool, job, shell
from tests.worker.runner_harness import (
    RealClock,
    SetClock,
    a_runner,
    call,
    command,
    measured_turns,
    script,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.worker.jobs import Job

MEGABYTE = 1024 * 1024

#: Uses 0.3 s of CPU time.
BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"

#: Touches the given number of megabytes.
LARGE = "import sys\nx = b'x' * (int(sys.argv[1]) * 1024 * 1024)"


def runs_of(*jobs: Job, slots: int = 1, allow: Sequence[str] = ()) -> list[Run]:
    """Return the measurements of jobs, in the order of their ends."""
    with a_runner(slots, allow) as runner:
        for one in jobs:
            runner.start(one)
        done = measured_turns(runner, len(jobs))
    assert all(one.run is not None for one in done)
    return [one.run for one in done if one.run is not None]


def test_job_that_waits_for_a_slot_starts_when_it_gets_one() -> None:
    begin_ns = time.time_ns()
    first, second = runs_of(command("sleep", "0.2"), command("sleep", "0.1", name=b"u"))
    assert begin_ns <= first.started_ns
    assert first.started_ns + first.run_ns <= second.started_ns + SECOND_NS // 100
    assert first.run_ns >= SECOND_NS // 5
    assert second.run_ns >= SECOND_NS // 10
    assert second.started_ns + second.run_ns <= time.time_ns()


def test_status_of_a_program_is_its_exit_status_or_minus_its_signal() -> None:
    jobs = [command("sh", "-c", text) for text in ("exit 0", "exit 7", "kill -KILL $$")]
    assert [runs_of(one)[0].status for one in jobs] == [0, 7, -9]


def test_program_that_exceeds_its_time_limit_shows_the_signal_that_ended_it() -> None:
    (run,) = runs_of(command("sleep", "60", time_limit_ns=SECOND_NS // 10))
    assert run.status == -15
    assert SECOND_NS // 10 <= run.run_ns < 30 * SECOND_NS


def test_cpu_time_of_a_program_comes_from_the_system() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    (run,) = runs_of(script(BUSY))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    counted = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert run.cpu_ns >= 0.3 * SECOND_NS
    assert abs(run.cpu_ns / SECOND_NS - counted) < 0.01


def test_peak_memory_is_measured_for_large_programs_only() -> None:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    megabytes = own // MEGABYTE + 100
    large, small = runs_of(script(LARGE, str(megabytes)), command("true", name=b"u"))
    assert megabytes <= large.memory_max_bytes / MEGABYTE < megabytes + 50
    assert small.memory_max_bytes == 0


def test_each_call_is_measured_separately_in_a_kept_process() -> None:
    large = call("builtins:exec", "x = b'x' * (100 * 1024 * 1024)")
    busy = call("builtins:exec", BUSY)
    small = call("builtins:len", "four")
    used = runs_of(large, busy, small, allow=["builtins"])
    assert [run.status for run in used] == [None] * 3
    peaks = [run.memory_max_bytes / MEGABYTE for run in used]
    assert peaks[0] >= 100
    if sys.platform == "linux":
        assert peaks[2] < peaks[0] - 90
    assert 0.3 * SECOND_NS <= used[1].cpu_ns < SECOND_NS
    assert used[2].cpu_ns < 0.1 * SECOND_NS
    assert used[2].run_ns < used[1].run_ns


def test_start_of_python_is_not_in_the_run_time() -> None:
    begin_ns = time.monotonic_ns()
    (run,) = runs_of(call("builtins:len", "four"), allow=["builtins"])
    assert run.run_ns < (time.monotonic_ns() - begin_ns) / 2


def test_call_whose_process_dies_shows_how_it_died() -> None:
    dies = "import os\nos.kill(os.getpid(), 9)"
    (run,) = runs_of(call("builtins:exec", dies), allow=["builtins"])
    assert (run.status, run.cpu_ns, run.memory_max_bytes) == (-9, 0, 0)


def test_task_that_could_not_start_ran_for_no_time() -> None:
    clock = SetClock()
    with a_runner(clock=clock) as runner:
        runner.start(command("no-such-program"))
        (done,) = measured_turns(runner)
        runner.start(call("not.allowed:at_all"))
        (refused,) = measured_turns(runner)
    assert done.run == refused.run == Run(clock.now_ns, 0)


def test_overfed_agent_runs_its_tasks_one_after_the_other() -> None:
    agent = shell('sleep 0.2; printf "$id\\t$id\\tok\\tdone\\n"')
    with a_pool(agent, clock=RealClock(), overfeed=1) as pool:
        pool.start(job(b"a", lane=b"l"))
        pool.start(job(b"b", lane=b"l"))
        first, second = (done.run for done in measured_turns(pool, 2))
    assert first is not None
    assert second is not None
    for run in (first, second):
        assert run.run_ns >= 0.2 * SECOND_NS
        assert (run.status, run.cpu_ns, run.memory_max_bytes) == (None, 0, 0)
    assert first.started_ns + first.run_ns <= second.started_ns + SECOND_NS // 100


def test_job_that_is_stopped_has_run_so_far() -> None:
    with a_runner() as runner:
        running, waiting = command("sleep", "60"), command("sleep", "60", name=b"u")
        runner.start(running)
        runner.start(waiting)
        runner.turn()
        time.sleep(0.01)
        run = runner.run_so_far(*running.key)
        assert run is not None
        assert run.run_ns >= SECOND_NS // 100
        assert runner.run_so_far(*waiting.key) is None
