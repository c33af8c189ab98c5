"""The runner: descriptors, stopping, slots and the order of jobs."""

import os
import resource
import sys
from pathlib import Path

import pytest

from taskyard.core.events import Outcome
from taskyard.worker.jobs import KILL_GRACE_NS, Job, JobResult
from taskyard.worker.programs import UNWATCHED_NS
from taskyard.worker.runner import REAP_INTERVAL_NS
from tests.worker.runner_harness import (
    HANG,
    HANG_IGNORING_SIGTERM,
    SetClock,
    a_fifo,
    a_runner,
    command,
    failed,
    has_ended,
    open_descriptors,
    read_fifo,
    result_of,
    script,
    turn_until_quiet,
    turns,
)


def test_worker_without_processes_left_refuses_tasks() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with a_runner() as runner:
        job = command("true")
        runner.start(job)
        before = open_descriptors()
        next_descriptor = os.dup(0)
        os.close(next_descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor, hard))
        try:
            (refused,) = runner.turn()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert refused == JobResult(
            job,
            Outcome.REFUSED,
            b"the worker can't start a process: Too many open files",
        )
        assert open_descriptors() == before
        assert runner.running() == []


def test_no_descriptor_is_left_open() -> None:
    with a_runner(slots=4) as runner:
        before = open_descriptors()
        jobs = [command("true"), command("no-such-program"), command("pwd", cwd="/nowhere")]
        for number in range(30):
            runner.start(jobs[number % 3])
        turns(runner, 30)
        assert open_descriptors() == before


def test_runner_leaves_nothing_open_when_it_is_closed() -> None:
    before = open_descriptors()
    with a_runner(slots=2) as runner:
        runner.start(command("sleep", "1000"))
        runner.turn()
    assert open_descriptors() == before


def test_program_gets_its_pipes_in_a_worker_without_standard_files() -> None:
    code = (
        "import os\n"
        "from tests.worker.runner_harness import a_runner, command, result_of\n"
        "report = os.dup(2)\n"
        "for descriptor in (0, 1, 2): os.close(descriptor)\n"
        "with a_runner():\n"
        "    for descriptor in (1, 2): os.write(descriptor, b'lost output')\n"
        "    assert os.read(0, 1) == b''\n"
        "found = result_of(command('sh', '-c', 'echo one; echo two >&2'))\n"
        "os.write(report, found.text + found.output)\n"
    )
    job = command(sys.executable, "-c", code)
    assert result_of(job).output == b"one\none\ntwo\n"


def test_exit_status_is_available_if_the_parent_ignored_sigchld() -> None:
    code = (
        "from tests.worker.runner_harness import command, result_of\n"
        "print(result_of(command('sh', '-c', 'exit 3')).text)\n"
    )
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    job = script(ignoring + "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])", code)
    assert result_of(job).text == b"b'exit status 3'\n"


def test_unknown_exit_status_is_a_failure() -> None:
    with a_runner() as runner:
        job = command("true")
        runner.start(job)
        runner.turn()
        os.waitpid(runner._processes[0].process.pid, 0)  # noqa: SLF001  # as nobody should
        text = b"ended, but its exit status was taken by another part of the worker"
        assert turns(runner) == [failed(job, text)]


def without_pidfd(pid: int, flags: int = 0) -> int:
    raise OSError(38, os.strerror(38), pid, None, flags)


def test_exit_is_noticed_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", without_pidfd)
    job = command("sh", "-c", "echo one; exit 3")
    assert result_of(job) == failed(job, b"exit status 3: one", b"one\n")
    clock = SetClock()
    with a_runner(clock=clock) as runner:
        runner.start(command("sleep", "1000"))
        runner.turn()
        assert runner.wake_at_ns() == clock.now_ns + REAP_INTERVAL_NS


def test_stopped_program_is_ended_and_not_reported(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        job = script(HANG, fifo)
        runner.start(job)
        runner.turn()
        pid = int(read_fifo(fifo))
        runner.stop(b"t", 2)
        runner.stop(b"u", 1)
        assert runner.running() == [job]
        runner.stop(b"t", 1)
        runner.stop(b"t", 1)
        assert runner.running() == []
        assert runner.slots_used == 1
        assert turn_until_quiet(runner) == []
        assert has_ended(pid)


def test_stopped_program_that_will_not_end_is_killed(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(clock=clock) as runner:
        runner.start(script(HANG_IGNORING_SIGTERM, fifo))
        runner.turn()
        pid = int(read_fifo(fifo))
        clock.now_ns += UNWATCHED_NS
        runner.stop(b"t", 1)
        assert runner.turn() == []
        assert runner.wake_at_ns() == clock.now_ns + KILL_GRACE_NS
        clock.now_ns += KILL_GRACE_NS
        assert turn_until_quiet(runner) == []
        assert has_ended(pid)


def test_close_leaves_no_process_behind(tmp_path: Path) -> None:
    fifos = [a_fifo(tmp_path / "one"), a_fifo(tmp_path / "two")]
    with a_runner(slots=2) as runner:
        for fifo in fifos:
            runner.start(script(HANG_IGNORING_SIGTERM, fifo))
        runner.start(command("true"))
        runner.turn()
        pids = [int(read_fifo(fifo)) for fifo in fifos]
        runner.close()
        assert [has_ended(pid) for pid in pids] == [True, True]
        with pytest.raises(ChildProcessError):
            os.waitpid(pids[0], os.WNOHANG)
        runner.close()


def test_jobs_beyond_the_slots_wait_in_their_order(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(slots=2, clock=clock) as runner:
        jobs = [
            command("cat", fifo, name=b"first"),
            command("true", name=b"wide", slots=2),
            command("true", name=b"narrow"),
        ]
        for job in jobs:
            runner.start(job)
        assert runner.turn() == []
        assert (runner.slots_used, runner.running()) == (1, jobs)
        assert runner.wake_at_ns() == clock.now_ns + UNWATCHED_NS
        Path(fifo).write_text("go on")
        assert [found.job.name for found in turns(runner, 3)] == [b"first", b"wide", b"narrow"]
        assert (runner.slots_used, runner.running()) == (0, [])


def test_job_wider_than_the_worker_runs_alone() -> None:
    with a_runner(slots=1) as runner:
        runner.start(command("true", slots=3))
        assert turns(runner)[0].outcome == Outcome.DONE


def test_job_that_waits_can_be_stopped() -> None:
    with a_runner() as runner:
        runner.start(command("sleep", "1000", name=b"first"))
        runner.start(command("true", name=b"second"))
        runner.turn()
        runner.stop(b"second", 1)
        assert [job.name for job in runner.running()] == [b"first"]


def test_jobs_that_have_not_begun_can_be_taken_back() -> None:
    with a_runner() as runner:
        names = (b"first", b"second", b"third", b"fourth", b"fifth")
        jobs = [command("sleep", "1000", name=name) for name in names]
        for job in jobs:
            runner.start(job)
        runner.turn()
        assert runner.withdraw(2) == jobs[3:]
        assert runner.unstarted() == jobs[1:3]
        assert runner.withdraw(1) == []
        assert runner.unstarted() == []
        assert runner.running() == jobs[:1]


def test_turn_is_due_at_once_while_jobs_can_start_or_be_reported() -> None:
    clock = SetClock()
    with a_runner(clock=clock) as runner:
        assert runner.wake_at_ns() is None
        runner.start(command("true"))
        assert runner.wake_at_ns() == clock.now_ns
        runner.start(Job(b"bad", 1, b"exec", b""))
        assert [found.job.name for found in runner.turn()] == [b"bad"]
        assert runner.wake_at_ns() == clock.now_ns + UNWATCHED_NS
        clock.now_ns += UNWATCHED_NS
        runner.turn()
        assert runner.wake_at_ns() is None


def test_jobs_run_side_by_side(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner(slots=2) as runner:
        runner.start(command("cat", fifo, name=b"reader"))
        runner.start(command("sh", "-c", 'echo hello > "$0"', fifo, name=b"writer"))
        texts = {found.job.name: found.text for found in turns(runner, 2)}
        assert texts == {b"reader": b"hello\n", b"writer": b""}


def test_polled_descriptors_never_change() -> None:
    with a_runner() as runner:
        before = list(runner.filenos())
        runner.start(command("true"))
        turns(runner)
        assert list(runner.filenos()) == before
