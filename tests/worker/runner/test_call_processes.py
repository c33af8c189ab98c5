"""The Python processes of `call`: time limits, starts, ends and replacements."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.worker.jobs import (
    CHILD_START_NS_MAX,
    KILL_GRACE_NS,
)
from tests.worker.runner_harness import (
    SetClock,
    a_fifo,
    a_runner,
    call,
    command,
    done,
    failed,
    has_ended,
    open_descriptors,
    read_fifo,
    result_of_call,
    turn_until_quiet,
    turns,
)

pytestmark = pytest.mark.usefixtures("home")


def test_call_is_ended_at_its_time_limit_and_the_next_one_is_done(home: Path) -> None:
    clock, fifo = SetClock(), a_fifo(home / "fifo")
    with a_runner(allow=["yard"], clock=clock) as runner:
        runner.start(call("yard:nothing"))
        turns(runner)
        job = call("yard:hang", fifo, time_limit_ns=5 * SECOND_NS)
        runner.start(job)
        runner.turn()
        pid = int(read_fifo(fifo))
        assert runner.wake_at_ns() == clock.now_ns + 5 * SECOND_NS
        clock.now_ns += 5 * SECOND_NS
        assert turns(runner) == [failed(job, b"time limit of 5 s exceeded")]
        assert has_ended(pid)
        runner.start(call("yard:pid"))
        assert int(turns(runner)[0].text) != pid


def test_call_that_will_not_end_is_killed_after_the_grace_period(home: Path) -> None:
    clock, fifo = SetClock(), a_fifo(home / "fifo")
    with a_runner(allow=["yard"], clock=clock) as runner:
        runner.start(call("yard:nothing"))
        turns(runner)
        job = call("yard:hang", fifo, True, time_limit_ns=SECOND_NS)  # noqa: FBT003 - it is JSON
        runner.start(job)
        runner.turn()
        read_fifo(fifo)
        clock.now_ns += SECOND_NS
        assert runner.turn() == []
        assert runner.wake_at_ns() == clock.now_ns + KILL_GRACE_NS
        clock.now_ns += KILL_GRACE_NS
        assert turns(runner) == [failed(job, b"time limit of 1 s exceeded")]


def test_call_that_returns_after_its_time_limit_has_failed(home: Path) -> None:
    clock, fifo = SetClock(), a_fifo(home / "fifo")
    with a_runner(allow=["yard"], clock=clock) as runner:
        job = call("yard:return_on_sigterm", fifo, time_limit_ns=SECOND_NS)
        runner.start(job)
        runner.turn()
        read_fifo(fifo)
        runner.turn()
        assert runner.wake_at_ns() == clock.now_ns + SECOND_NS
        clock.now_ns += SECOND_NS
        assert turns(runner) == [failed(job, b"time limit of 1 s exceeded")]


def test_call_that_was_answered_is_done_though_its_process_died_then(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:pid"))
        pid = int(turns(runner)[0].text)
        job = call("yard:answer_and_die", fifo)
        runner.start(job)
        runner.turn()
        select.select(runner.filenos(), [], [])
        Path(fifo).write_text("now")
        assert has_ended(pid)
        assert turns(runner) == [done(job, b'"' + b"x" * 30_000 + b'"')]


def test_connection_is_not_inherited_by_processes_of_a_function() -> None:
    assert result_of_call(call("yard:hands_down_connection")).text == b"false"


def test_start_of_python_does_not_count_against_the_time_limit() -> None:
    clock = SetClock()
    with a_runner(allow=["yard"], clock=clock) as runner:
        job = call("yard:add", 1, 2, time_limit_ns=1)
        runner.start(job)
        runner.turn()
        assert runner.wake_at_ns() == clock.now_ns + CHILD_START_NS_MAX
        clock.now_ns += CHILD_START_NS_MAX - 1
        assert turns(runner) == [done(job, b"3")]


def a_program(path: Path, content: str) -> str:
    path.write_text(content)
    path.chmod(0o700)
    return str(path)


def test_python_that_does_not_become_ready_is_reported(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()
    monkeypatch.setattr(sys, "executable", a_program(home / "slow", "#!/bin/sh\nsleep 1000\n"))
    with a_runner(allow=["yard"], clock=clock) as runner:
        job = call("yard:nothing")
        runner.start(job)
        runner.turn()
        clock.now_ns += CHILD_START_NS_MAX
        text = b"the worker's Python process was not ready within a minute"
        assert turns(runner) == [failed(job, text)]


#: Becomes ready after SIGTERM, and does not exit.
READY_TOO_LATE = """#!{python}
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("up", "w").close()
open("go").read()
os.write(int(sys.argv[4]), bytes(4))
signal.pause()
"""


def test_python_that_is_ready_too_late_is_killed_nevertheless(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, up, go = SetClock(), a_fifo(home / "up"), a_fifo(home / "go")
    late = a_program(home / "late", READY_TOO_LATE.format(python=sys.executable))
    monkeypatch.setattr(sys, "executable", late)
    with a_runner(allow=["yard"], clock=clock) as runner:
        runner.start(call("yard:nothing"))
        runner.turn()
        read_fifo(up)
        clock.now_ns += CHILD_START_NS_MAX
        runner.turn()
        Path(go).write_text("")
        select.select(runner.filenos(), [], [])
        runner.turn()
        assert runner.wake_at_ns() == clock.now_ns + KILL_GRACE_NS


def test_missing_python_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", f"{home}/nothing")
    before = open_descriptors()
    found = result_of_call(call("yard:nothing"))
    assert found.outcome == Outcome.REFUSED
    assert found.text.startswith(b"can't start Python: [Errno 2] No such file or directory: ")
    assert open_descriptors() == before


def test_python_that_dies_at_start_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", a_program(home / "bad", "#!/bin/sh\necho no; exit 1\n"))
    job = call("yard:nothing")
    assert result_of_call(job) == failed(job, b"the process died: exit status 1", b"no\n")


def test_process_that_sends_malformed_frames_is_ended() -> None:
    job = call("yard:write_nonsense")
    text = b"the called process wrote to the worker's connection"
    assert result_of_call(job) == failed(job, text)


def test_process_that_closes_its_connection_is_replaced() -> None:
    with a_runner(allow=["yard"]) as runner:
        jobs = [call("yard:close_connection"), call("yard:add", 1)]
        for job in jobs:
            runner.start(job)
        first, second = turns(runner, 2)
        assert first.text == b"the process died: exit status 1"
        assert second == done(jobs[1], b"1")


def test_calls_run_side_by_side(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(slots=2, allow=["yard"]) as runner:
        runner.start(call("yard:read", fifo, name=b"reader"))
        runner.start(call("yard:write", fifo, "hello", name=b"writer"))
        texts = {found.job.name: found.text for found in turns(runner, 2)}
        assert texts == {b"reader": b'"hello"', b"writer": b"null"}


def test_calls_and_programs_share_the_slots(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(slots=2, allow=["yard"]) as runner:
        runner.start(call("yard:read", fifo))
        runner.start(command("true"))
        runner.start(command("true"))
        assert [found.text for found in turns(runner, 2)] == [b"", b""]
        assert runner.slots_used == 1
        Path(fifo).write_text("go on")
        assert turns(runner)[0].text == b'"go on"'
        assert runner.slots_used == 0


def test_stopped_call_is_ended_and_not_reported(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:hang", fifo))
        runner.turn()
        pid = int(read_fifo(fifo))
        runner.stop(b"t", 1)
        assert runner.running() == []
        assert turn_until_quiet(runner) == []
        assert has_ended(pid)
        runner.start(call("yard:add", 1))
        assert turns(runner)[0].text == b"1"


def test_close_leaves_no_process_behind_at_work_or_not(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(slots=2, allow=["yard"]) as runner:
        runner.start(call("yard:hang", fifo, True))  # noqa: FBT003 - it is JSON
        runner.turn()
        hanging = int(read_fifo(fifo))
        runner.start(call("yard:pid"))
        resting = int(turns(runner)[0].text)
        runner.close()
        assert [has_ended(hanging), has_ended(resting)] == [True, True]


#: A worker that runs the test's jobs, and prints only the ids of its processes.
WORKER = """
import select, sys
from tests.worker.runner_harness import RealClock, call, command
from taskyard.worker.runner import ProcessRunner
runner = ProcessRunner(3, ["yard"], RealClock())
runner.start(call("yard:hang", "one", True))
runner.start(command(sys.executable, "-c", "import yard; yard.hang('two', True)"))
runner.start(command(sys.executable, "-c", "import yard; yard.hang('three')", cwd="."))
while True:
    runner.turn()
    select.select(runner.filenos(), [], [])
"""


def test_processes_end_with_a_worker_that_is_killed(home: Path) -> None:
    fifos = [a_fifo(home / name) for name in ("one", "two", "three")]
    root = Path(__file__).parents[3]
    search = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(search)}
    with subprocess.Popen([sys.executable, "-P", "-c", WORKER], env=env) as worker:
        pids = [int(read_fifo(fifo)) for fifo in fifos]
        worker.send_signal(signal.SIGKILL)
    assert [has_ended(pid) for pid in pids] == [True, True, True]


def test_exit_of_a_child_is_noticed_without_pidfds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with a_runner(allow=["yard"]) as runner:
        job = call("yard:leave", 3)
        runner.start(job)
        assert turns(runner) == [failed(job, b"the process died: exit status 3")]
