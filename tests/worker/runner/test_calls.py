"""Tasks of `call` in real Python processes: results, output, crashes, limits, allow-list."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from taskyard.core.events import Outcome
from taskyard.core.limits import REASON_BYTES_MAX, SECOND_NS
from taskyard.worker.limits import (
    CHILD_START_NS_MAX,
    KILL_GRACE_NS,
    OUTPUT_TAIL_BYTES,
    RESULT_BYTES_MAX,
)
from taskyard.worker.runner import Job, JobResult, ProcessRunner
from tests.worker.runner_harness import (
    SetClock,
    a_fifo,
    a_runner,
    call,
    command,
    has_ended,
    open_descriptors,
    read_fifo,
    result_of,
    turn_until_quiet,
    turns,
)

#: A user's module, in the directory where the worker is started.
YARD = """
import os, signal, sys, threading
from os.path import join
from subprocess import run

SIZE = 7

def nothing(): pass
def add(a, b=0): return a + b
def echo(text): print(text)
def where(): return os.getcwd()
def go(directory): os.chdir(directory)
def look(name): return os.environ.get(name)
def pid(): return os.getpid()
def size(text): return len(text)
def letters(count): return "x" * count
def flood(count): os.write(1, bytes(count))
def strange(): return {1}
def lost(): return float("nan")
def raise_error(text):
    print("before")
    raise ValueError(text)
def raise_cancelled():
    import asyncio
    raise asyncio.CancelledError
def leave(status): sys.exit(status)
def leave_at_once(status):
    print("last words")
    os._exit(status)
def crash(): os.kill(os.getpid(), signal.SIGSEGV)
def close_all():
    sys.stdout.close()
    sys.stderr.close()
def connection(): return int(sys.argv[1])
def hands_down_connection(): return os.get_inheritable(connection())
def write_nonsense():
    os.write(connection(), b"\\1\\0\\0\\0\\xff")
    signal.pause()
def close_connection(): os.close(connection())
def hang(fifo, ignore=False):
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(fifo, "w") as file:
        file.write(str(os.getpid()))
    signal.pause()
def read(fifo): return open(fifo).read()
def write(fifo, text): open(fifo, "w").write(text)
def return_when_told(fifo):
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    with open(fifo, "w") as file:
        file.write(str(os.getpid()))
    while not signals:
        signal.sigtimedwait([], 0.01)
    return "late"
def answer_and_die(fifo):
    threading.Thread(target=lambda: (open(fifo).read(), os._exit(9))).start()
    return "x" * 100_000
def die_later():
    threading.Thread(target=lambda: (open("fifo").read(), os._exit(9))).start()
    return os.getpid()

class Unprintable(Exception):
    def __str__(self): raise RuntimeError

def raise_unprintable(): raise Unprintable

class Adder:
    @staticmethod
    def add(a, b): return a + b
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the worker's directory, with a module to call, and modules that shadow others."""
    (tmp_path / "yard.py").write_text(YARD)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json that was wanted')\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from os import getpid, getppid\n__all__ = ['getpid']\n")
    (package / "inner.py").write_text("def f(): return 'inner'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


def done(job: Job, text: bytes, output: bytes = b"") -> JobResult:
    return JobResult(job, Outcome.DONE, text, output)


def failed(job: Job, reason: bytes, output: bytes = b"") -> JobResult:
    return JobResult(job, Outcome.FAILED, reason, output)


def refused(job: Job, reason: bytes) -> JobResult:
    return JobResult(job, Outcome.FAILED_FINAL, reason)


def result_of_call(job: Job) -> JobResult:
    return result_of(job, allow=["yard"])


def test_result_is_the_return_value_as_json() -> None:
    job = call("yard:add", 2, kwargs={"b": 3})
    assert result_of_call(job) == done(job, b"5")
    job = call("yard:add", "ä", "€")
    assert result_of_call(job) == done(job, '"ä€"'.encode())
    job = call("yard:nothing")
    assert result_of_call(job) == done(job, b"null")


def test_method_of_a_class_can_be_called() -> None:
    job = call("yard:Adder.add", 1, 2)
    assert result_of_call(job) == done(job, b"3")


def test_call_of_a_custom_service_is_run() -> None:
    plain = call("yard:add", 1, 2)
    job = Job(b"t", 1, b"cpu", plain.payload)
    assert result_of_call(job) == done(job, b"3")


def test_process_is_kept_for_the_next_call() -> None:
    with a_runner(allow=["yard"]) as runner:
        for _ in range(3):
            runner.start(call("yard:pid"))
        pids = {found.text for found in turns(runner, 3)}
        assert len(pids) == 1
        assert pids != {str(os.getpid()).encode()}


def test_output_belongs_to_its_call() -> None:
    with a_runner(allow=["yard"]) as runner:
        jobs = [call("yard:echo", "one"), call("yard:nothing"), call("yard:echo", "ä")]
        for job in jobs:
            runner.start(job)
        outputs = [found.output for found in turns(runner, 3)]
        assert outputs == [b"one\n", b"", "ä\n".encode()]


def test_exception_is_the_reason_and_its_traceback_is_the_output() -> None:
    found = result_of_call(call("yard:raise_error", "no\nsuch thing"))
    assert (found.outcome, found.text) == (Outcome.FAILED, b"ValueError: no\nsuch thing")
    assert found.output.startswith(b"before\nTraceback (most recent call last):\n  File ")
    assert found.output.endswith(b"ValueError: no\nsuch thing\n")
    assert b"/yard.py" in found.output
    assert b"child.py" not in found.output


def test_text_of_an_exception_is_bounded() -> None:
    found = result_of_call(call("yard:raise_error", "x" * 3_000_000))
    assert found.text.startswith(b"ValueError: xxx")
    assert len(found.text) == REASON_BYTES_MAX
    assert len(found.output) == OUTPUT_TAIL_BYTES


def test_exception_with_a_broken_str_is_still_reported() -> None:
    found = result_of_call(call("yard:raise_unprintable"))
    assert found.text == b"yard.Unprintable: (its message can't be shown)"


def test_exception_that_is_not_an_error_does_not_end_the_process() -> None:
    found = result_of_call(call("yard:raise_cancelled"))
    assert found.text == b"asyncio.exceptions.CancelledError"


@pytest.mark.parametrize(
    ("job", "how", "output"),
    [
        (call("yard:leave_at_once", 3), b"exit status 3", b"last words\n"),
        (call("yard:leave", 4), b"exit status 4", b""),
        (call("yard:leave", None), b"exit status 0", b""),
        (call("yard:leave", "too bad"), b"exit status 1", b"too bad\n"),
    ],
)
def test_call_that_ends_its_process_has_failed(job: Job, how: bytes, output: bytes) -> None:
    assert result_of_call(job) == failed(job, b"the process died: " + how, output)


def test_crash_shows_where_it_was() -> None:
    found = result_of_call(call("yard:crash"))
    assert (found.outcome, found.text) == (
        Outcome.FAILED,
        b"the process died: killed by SIGSEGV",
    )
    assert b"in crash" in found.output


def test_process_that_died_is_replaced() -> None:
    with a_runner(allow=["yard"]) as runner:
        before = open_descriptors()
        for number in range(6):
            runner.start(call("yard:crash") if number % 2 else call("yard:add", number))
        outcomes = [found.outcome for found in turns(runner, 6)]
        assert outcomes == [Outcome.DONE, Outcome.FAILED] * 3
        assert open_descriptors() == before


def test_process_that_dies_between_calls_is_replaced_silently(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:die_later"))
        pid = int(turns(runner)[0].text)
        Path(fifo).write_text("now")
        assert has_ended(pid)
        job = call("yard:add", 1, 2)
        runner.start(job)
        assert turns(runner) == [done(job, b"3")]


def test_result_that_is_not_json_fails_for_good() -> None:
    job = call("yard:strange")
    text = b"result of type set can't be sent as JSON: Object of type set is not JSON serializable"
    text += b"; give plain data"
    assert result_of_call(job) == refused(job, text)
    assert result_of_call(call("yard:lost")).text.startswith(
        b"result of type float can't be sent as"
    )


def test_too_large_result_fails_for_good() -> None:
    job = call("yard:letters", RESULT_BYTES_MAX - 2)
    assert result_of_call(job) == done(job, b'"' + b"x" * (RESULT_BYTES_MAX - 2) + b'"')
    job = call("yard:letters", RESULT_BYTES_MAX - 1)
    text = (
        b"result too large: 1048577 bytes, at most 1048576 (write it to a file and return the "
        b"file's name)"
    )
    assert result_of_call(job) == refused(job, text)


def assert_is_quiet(runner: ProcessRunner) -> None:
    """Check that no turn is due."""
    assert runner.wake_at_ns() is None
    assert select.select(runner.filenos(), [], [], 0) == ([], [], [])


def test_payload_larger_than_the_sockets_room_arrives_whole() -> None:
    with a_runner(allow=["yard"]) as runner:
        jobs = [call("yard:size", "x" * 5_000_000), call("yard:size", "x")]
        for job in jobs:
            runner.start(job)
        assert turns(runner, 2) == [done(jobs[0], b"5000000"), done(jobs[1], b"1")]
        assert_is_quiet(runner)


def test_memory_is_bounded_whatever_a_call_prints() -> None:
    job = call("yard:flood", 10_000_000)
    whole = done(job, b"null", bytes(OUTPUT_TAIL_BYTES))
    assert result_of_call(job) == structs.replace(whole, output_bytes_total=10_000_000)


def test_call_may_close_stdout() -> None:
    with a_runner(allow=["yard"]) as runner:
        jobs = [call("yard:close_all"), call("yard:add", 1)]
        for job in jobs:
            runner.start(job)
        assert turns(runner, 2) == [done(jobs[0], b"null"), done(jobs[1], b"1")]


def test_refused_module_is_named_with_the_option_that_allows_it() -> None:
    job = call("os:getpid")
    reason = b"module os is not allowed (start the worker with --allow os)"
    assert result_of_call(job) == refused(job, reason)


def test_refusal_costs_no_process() -> None:
    with a_runner() as runner:
        before = open_descriptors()
        runner.start(call("yard:add"))
        assert [found.outcome for found in runner.turn()] == [Outcome.FAILED_FINAL]
        assert open_descriptors() == before


@pytest.mark.parametrize(
    ("function", "allow", "text"),
    [
        ("package.inner:f", ["package"], b'"inner"'),
        ("package.inner:f", ["package.inner"], b'"inner"'),
        ("operator:add", ["operator"], b"3"),
        ("math:hypot", ["builtins", "math"], b"2.23606797749979"),
        ("datetime:date.fromordinal", ["datetime"], b"result of type date"),
    ],
)
def test_function_of_an_allowed_module_can_be_called(
    function: str, allow: list[str], text: bytes
) -> None:
    args = {"operator:add": (1, 2), "math:hypot": (1, 2), "datetime:date.fromordinal": (1,)}
    found = result_of(call(function, *args.get(function, ())), allow=allow)
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("package2:f", b"module package2 is not allowed (start the worker with --allow pack"),
        ("yard:run", b"yard:run is defined in subprocess: module subprocess is not allowed "),
        ("yard:join", b"yard:join is defined in posixpath: module posixpath is not allowed "),
        ("yard:os.system", b"yard:os.system: <module 'os' "),
        ("yard:SIZE", b"yard:SIZE: not callable (type int)"),
        ("package:getppid", b"package:getppid is defined in posix: module posix is not allowed"),
    ],
)
def test_function_outside_the_allowed_modules_is_refused(function: str, reason: bytes) -> None:
    found = result_of(call(function), allow=["yard", "package"])
    assert found.outcome == Outcome.FAILED_FINAL
    assert found.text.startswith(reason)


def test_names_in_all_are_allowed_wherever_they_are_defined() -> None:
    assert result_of(call("package:getpid"), allow=["package"]).outcome == Outcome.DONE


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("missing:f", b"ModuleNotFoundError: No module named 'missing'"),
        ("yard:missing", b"AttributeError: module 'yard' has no attribute 'missing'"),
        ("broken:f", b"SyntaxError: invalid syntax (broken.py, line 1)"),
    ],
)
def test_function_that_can_not_be_found_is_a_failure(function: str, reason: bytes) -> None:
    found = result_of(call(function), allow=["missing", "yard", "broken"])
    assert (found.outcome, found.text) == (Outcome.FAILED, reason)


def test_module_of_the_user_is_found_and_replaces_none_of_ours(home: Path) -> None:
    assert (home / "json.py").exists()
    assert result_of_call(call("yard:where")).text == f'"{home}"'.encode()


def test_environment_and_directory_are_for_one_call(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_BOTH", "the worker's")
    env = {"OF_BOTH": "the task's", "OWN": "also"}
    with a_runner(allow=["yard"]) as runner:
        for own_env, cwd in ((env, "/"), (None, None)):
            runner.start(call("yard:look", "OF_BOTH", env=own_env, cwd=cwd))
            runner.start(call("yard:look", "OWN", env=own_env, cwd=cwd))
            runner.start(call("yard:where", env=own_env, cwd=cwd))
        texts = [found.text.decode() for found in turns(runner, 6)]
        assert texts == ['"the task\'s"', '"also"', '"/"', '"the worker\'s"', "null", f'"{home}"']


def test_each_call_begins_in_the_directory_of_the_worker(home: Path) -> None:
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:go", "/"))
        runner.start(call("yard:where"))
        assert turns(runner, 2)[1].text == f'"{home}"'.encode()


def test_missing_directory_is_in_the_reason() -> None:
    found = result_of_call(call("yard:where", cwd="/nowhere"))
    assert found.text == b"FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'"


def test_function_gets_its_task_in_the_environment() -> None:
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:look", "TASKYARD_TASK", name=b"a/b"))
        runner.start(call("yard:look", "TASKYARD_ATTEMPT", attempt=7))
        assert [found.text for found in turns(runner, 2)] == [b'"a/b"', b'"7"']


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
        job = call("yard:return_when_told", fifo, time_limit_ns=SECOND_NS)
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
        assert turns(runner) == [done(job, b'"' + b"x" * 100_000 + b'"')]


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
