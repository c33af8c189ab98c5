"""Tasks of `exec`, with real programs: results, output, ends of every kind, and limits."""

import contextlib
import os
import resource
import sys
import tracemalloc
from pathlib import Path

import pytest

from taskyard.core.events import Outcome
from taskyard.core.limits import REASON_BYTES_MAX, SECOND_NS
from taskyard.worker.limits import (
    KILL_GRACE_NS,
    LAST_LINE_BYTES_MAX,
    OUTPUT_TAIL_BYTES,
    REAP_INTERVAL_NS,
    RESULT_BYTES_MAX,
)
from taskyard.worker.runner import Job, JobResult
from tests.worker.running_kit import (
    SetClock,
    a_fifo,
    a_runner,
    command,
    has_ended,
    open_descriptors,
    result_of,
    script,
    told,
    turn_until_quiet,
    turns,
    without_run,
)

#: Tells where it is, then hangs without using time.
HANG = """
import os, signal, sys
open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""

HANG_WHATEVER_IT_IS_TOLD = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + HANG

LEAVE_WELL_WHEN_TOLD = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""

#: Ends at once; what it started stays and holds its pipes.
LEAVE_SOMEBODY_BEHIND = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(sys.argv[1], "w").write(str(child.pid))
print("done", flush=True)
os._exit(0)
"""

#: Ends at once; what it started prints after that.
LET_SOMEBODY_ELSE_PRINT = """
import os, signal, sys
ended, ends = os.pipe()
if os.fork():
    os._exit(0)
os.close(ends)
os.read(ended, 1)
os.write(1, b"late\\n")
open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""

PRINT_INTO_A_WIDE_PIPE = """
import fcntl, os, sys
fcntl.fcntl(1, 1031, 1 << 20)  # F_SETPIPE_SZ
os.write(1, bytes(500_000))
open(sys.argv[1], "w").write(str(os.getpid()))
"""


def done(job: Job, text: bytes, output: bytes = b"") -> JobResult:
    return JobResult(job, Outcome.DONE, text, output)


def failed(job: Job, reason: bytes, output: bytes = b"") -> JobResult:
    return JobResult(job, Outcome.FAILED, reason, output)


def test_result_is_what_was_written_to_stdout() -> None:
    job = command("echo", "hello")
    assert result_of(job) == done(job, b"hello\n")


def test_bytes_of_any_kind_come_back_as_they_are() -> None:
    job = script("import os; os.write(1, bytes(range(256)))")
    assert result_of(job) == done(job, bytes(range(256)))


def test_words_reach_the_program_without_a_shell() -> None:
    job = command("echo", "$HOME; exit 1", "ä€😀", "*", "")
    assert result_of(job) == done(job, "$HOME; exit 1 ä€😀 * \n".encode())


def test_stderr_is_output_and_no_result() -> None:
    job = command("sh", "-c", "echo one; echo two >&2")
    assert result_of(job) == done(job, b"one\n", b"one\ntwo\n")


def test_failure_is_told_with_the_exit_status_and_the_last_line() -> None:
    job = command("sh", "-c", "echo one; echo two >&2; exit 3")
    assert result_of(job) == failed(job, b"exit status 3: two", b"one\ntwo\n")


def test_failure_without_a_word_is_told_by_its_exit_status() -> None:
    job = command("false")
    assert result_of(job) == failed(job, b"exit status 1")


def test_last_line_is_made_fit_to_be_shown() -> None:
    job = command("printf", r"one\n \033[31mred\377 \n\n\n")
    assert result_of(job) == done(job, b"one\n \x1b[31mred\xff \n\n\n")
    job = command("sh", "-c", r"printf 'one\n \033[31mred\377 \n\n\n'; exit 1")
    assert result_of(job).text == "exit status 1: [31mred\ufffd".encode()


def test_signal_is_told_by_its_name() -> None:
    job = command("sh", "-c", "echo one; kill -SEGV $$")
    assert result_of(job) == failed(job, b"killed by SIGSEGV", b"one\n")


def test_signal_without_a_name_is_told_by_its_number() -> None:
    job = command("sh", "-c", "kill -40 $$")
    assert result_of(job) == failed(job, b"killed by signal 40")


@pytest.mark.parametrize("program", ["no-such-program", "./no-such-program", "/no/such/program"])
@pytest.mark.parametrize("cwd", [None, "."])
def test_program_that_is_not_there(program: str, cwd: str | None) -> None:
    job = command(program, cwd=cwd)
    assert result_of(job) == failed(job, f"no such program: {program}".encode())


def test_reason_is_bounded() -> None:
    reason = result_of(command("x" * 5000)).text
    assert reason.startswith(b"no such program: xxx")
    assert reason.endswith(b"xxx [...]")
    assert len(reason) == REASON_BYTES_MAX


def a_file(path: Path, content: str, mode: int) -> str:
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_program_that_can_not_be_run(tmp_path: Path) -> None:
    plain = command(a_file(tmp_path / "plain", "#!/bin/sh\n", 0o600))
    assert result_of(plain).text.endswith(b"/plain: Permission denied")
    bare = command(a_file(tmp_path / "bare", "echo never a shell\n", 0o700))
    assert result_of(bare).text.endswith(
        b"/bare: Exec format error; see that its first line names a program"
    )
    orphan = command(a_file(tmp_path / "orphan", "#!/no/such/interpreter\n", 0o700))
    assert result_of(orphan).text.endswith(
        b"/orphan: No such file or directory; see that its first line names a program"
    )
    assert result_of(command(str(tmp_path))).text.endswith(b": Permission denied")


def test_file_on_the_path_that_is_no_program_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "first" / "tool").mkdir(parents=True)
    (tmp_path / "second").mkdir()
    a_file(tmp_path / "second" / "tool", "#!/bin/sh\necho mine\n", 0o700)
    job = command("tool", env={"PATH": f"{tmp_path}/first:{tmp_path}/second:{os.environ['PATH']}"})
    assert result_of(job) == done(job, b"mine\n")


def test_too_long_a_command_line_is_told() -> None:
    job = command("true", "x" * 10_000_000)
    assert result_of(job) == failed(job, b"can't start true: Argument list too long")


def test_payload_that_is_no_command_is_failed_for_good() -> None:
    job = Job(b"t", 1, b"exec", b"{}")
    text = b"payload is not valid for service exec: Object missing required field "
    assert result_of(job) == JobResult(job, Outcome.FAILED_FINAL, text + b"`argv`")


def test_program_runs_where_the_worker_is_or_where_it_says(tmp_path: Path) -> None:
    assert result_of(command("pwd")).text == f"{Path.cwd()}\n".encode()
    assert result_of(command("pwd", cwd=str(tmp_path))).text == f"{tmp_path}\n".encode()


def test_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    job = command("pwd", cwd=f"{tmp_path}/nowhere")
    reason = f"can't run in the directory {tmp_path}/nowhere: No such file or directory"
    assert result_of(job) == failed(job, reason.encode())


@pytest.mark.parametrize("cwd", [None, "/"])
def test_environment_is_the_workers_and_the_tasks(
    cwd: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_WORKER", "one")
    monkeypatch.setenv("OF_BOTH", "two")
    code = "import os; print([os.environ[name] for name in ('OF_THE_WORKER', 'OF_BOTH', 'OWN')])"
    job = script(code, env={"OF_BOTH": "three", "OWN": "ä"}, cwd=cwd)
    assert result_of(job).text == "['one', 'three', 'ä']\n".encode()


@pytest.mark.parametrize(("name", "shown"), [(b"a/b", b"a/b"), (b"\xff\0", b"\xff\\0")])
def test_program_is_told_for_what_it_runs(name: bytes, shown: bytes) -> None:
    job = command("sh", "-c", 'printf %s/%s "$TASKYARD_TASK" $TASKYARD_ATTEMPT', name=name)
    assert result_of(job) == done(job, shown + b"/1")


def test_stdin_is_empty() -> None:
    job = command("cat")
    assert result_of(job) == done(job, b"")


def test_program_leads_its_own_session() -> None:
    code = "import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())"
    assert result_of(script(code)).text == b"True\n"


@pytest.mark.parametrize("cwd", [None, "/"])
def test_program_has_no_signal_ignored(cwd: str | None) -> None:
    job = command("grep", "SigIgn", "/proc/self/status", cwd=cwd)
    assert int(result_of(job).text.split()[1], 16) & (1 << 12 | 1 << 24) == 0


def given_to_us_for_our_children() -> set[int]:
    """By whoever started the tests."""
    given = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(path.name)):
                given.add(int(path.name))
    return given


@pytest.mark.parametrize("cwd", [None, "/"])
def test_program_inherits_its_standard_files_and_its_lifeline(cwd: str | None) -> None:
    with a_runner(slots=2) as runner:
        runner.start(command("sleep", "1000", name=b"other"))
        runner.start(command("ls", "/proc/self/fd", cwd=cwd))
        inherited = set(map(int, turns(runner)[0].text.split()))
    standard = {0, 1, 2}
    assert inherited >= standard
    # The lifeline, and what `ls` has open to look.
    assert len(inherited - standard - given_to_us_for_our_children()) <= 2


def test_long_result_is_cut_and_reported_with_its_length() -> None:
    size = RESULT_BYTES_MAX + 10
    job = script(f"import os, sys; sys.stdout.write('x' * {size - 4} + 'end\\n')")
    found = result_of(job)
    assert found.outcome == Outcome.DONE
    assert found.text == b"x" * (RESULT_BYTES_MAX - 4) + b"end\n"
    assert found.output == b"x" * (OUTPUT_TAIL_BYTES - 4) + b"end\n"
    assert (found.result_bytes_total, found.output_bytes_total) == (size, size)


def test_long_output_of_a_failure_is_reported_with_its_length() -> None:
    size = OUTPUT_TAIL_BYTES + 10
    found = result_of(script(f"import sys; sys.stderr.write('x' * {size}); sys.exit(1)"))
    assert found.text == b"exit status 1: [...] " + b"x" * LAST_LINE_BYTES_MAX
    assert (len(found.output), found.output_bytes_total) == (OUTPUT_TAIL_BYTES, size)
    assert found.result_bytes_total == 0


def test_result_of_the_very_limit_is_whole() -> None:
    job = command("head", "-c", str(RESULT_BYTES_MAX), "/dev/zero")
    assert result_of(job) == done(job, bytes(RESULT_BYTES_MAX))


@pytest.mark.parametrize("where", ["1", "2"])
def test_memory_is_bounded_whatever_is_printed(where: str) -> None:
    tracemalloc.start()
    found = result_of(command("sh", "-c", f"head -c 200000000 /dev/zero >&{where}; exit 1"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.text == b"exit status 1"
    assert found.output.endswith(bytes(OUTPUT_TAIL_BYTES))
    assert peak_bytes < 5 * RESULT_BYTES_MAX


def test_program_is_ended_at_its_time_limit(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(clock=clock) as runner:
        job = script(HANG, fifo, time_limit_ns=5 * SECOND_NS)
        runner.start(job)
        assert runner.turn() == []
        pid = int(told(fifo))
        assert runner.wake_at_ns() == clock.now_ns + 5 * SECOND_NS
        clock.now_ns += 5 * SECOND_NS - 1
        assert runner.turn() == []
        clock.now_ns += 1
        assert turns(runner) == [failed(job, b"time limit of 5 s exceeded")]
        assert has_ended(pid)
        assert runner.wake_at_ns() is None


def test_program_that_will_not_end_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(clock=clock) as runner:
        job = script(HANG_WHATEVER_IT_IS_TOLD, fifo, time_limit_ns=SECOND_NS // 4)
        runner.start(job)
        runner.turn()
        pid = int(told(fifo))
        clock.now_ns += SECOND_NS
        runner.turn()
        assert runner.wake_at_ns() == clock.now_ns + KILL_GRACE_NS
        clock.now_ns += KILL_GRACE_NS
        assert turns(runner) == [failed(job, b"time limit of 0.25 s exceeded")]
        assert has_ended(pid)


def test_program_that_ends_well_when_told_has_failed_nevertheless(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(clock=clock) as runner:
        job = script(LEAVE_WELL_WHEN_TOLD, fifo, time_limit_ns=SECOND_NS)
        runner.start(job)
        runner.turn()
        told(fifo)
        clock.now_ns += SECOND_NS
        assert turns(runner) == [failed(job, b"time limit of 1 s exceeded")]


def test_program_that_ended_in_time_is_done_however_late_the_loop_looks(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(clock=clock) as runner:
        job = script(
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))",
            fifo,
            time_limit_ns=SECOND_NS,
        )
        runner.start(job)
        runner.turn()
        assert has_ended(int(told(fifo)))
        clock.now_ns += 100 * SECOND_NS
        assert [without_run(one) for one in runner.turn()] == [done(job, b"")]


def test_what_a_program_left_behind_does_not_hold_up_its_task(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        job = script(LEAVE_SOMEBODY_BEHIND, fifo)
        runner.start(job)
        runner.turn()
        pid = int(told(fifo))
        assert turns(runner) == [done(job, b"done\n")]
        assert has_ended(pid)


def test_what_is_in_the_pipes_at_the_end_is_taken(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        job = script(LET_SOMEBODY_ELSE_PRINT, fifo)
        runner.start(job)
        runner.turn()
        told(fifo)
        assert turns(runner) == [done(job, b"late\n")]


def test_what_is_in_a_wide_pipe_at_the_end_is_taken(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        job = script(PRINT_INTO_A_WIDE_PIPE, fifo)
        runner.start(job)
        runner.turn()
        assert has_ended(int(told(fifo)))
        assert turns(runner) == [done(job, bytes(500_000))]


def test_program_that_closes_its_pipes_goes_on(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        code = "import os, sys; os.close(1); os.close(2); open(sys.argv[1]).read(); os._exit(7)"
        job = script(code, fifo)
        runner.start(job)
        runner.turn()
        with Path(fifo).open("w"):
            pass
        assert turns(runner) == [failed(job, b"exit status 7")]


def test_worker_without_room_for_a_process_refuses() -> None:
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
            b"the worker has no room to start a process: Too many open files",
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
        "from tests.worker.running_kit import a_runner, command, result_of\n"
        "report = os.dup(2)\n"
        "for descriptor in (0, 1, 2): os.close(descriptor)\n"
        "with a_runner():\n"
        "    for descriptor in (1, 2): os.write(descriptor, b'nobody gets this')\n"
        "    assert os.read(0, 1) == b''\n"
        "found = result_of(command('sh', '-c', 'echo one; echo two >&2'))\n"
        "os.write(report, found.text + found.output)\n"
    )
    job = command(sys.executable, "-c", code)
    assert result_of(job).output == b"one\none\ntwo\n"


def test_exit_status_is_known_to_a_worker_whose_parent_ignored_sigchld() -> None:
    code = (
        "from tests.worker.running_kit import command, result_of\n"
        "print(result_of(command('sh', '-c', 'exit 3')).text)\n"
    )
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    job = script(ignoring + "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])", code)
    assert result_of(job).text == b"b'exit status 3'\n"


def test_status_that_somebody_else_took_is_a_failure() -> None:
    with a_runner() as runner:
        job = command("true")
        runner.start(job)
        runner.turn()
        os.waitpid(runner._processes[0].process.pid, 0)  # noqa: SLF001  # as nobody should
        text = b"ended, but its exit status was taken by another part of the worker"
        assert turns(runner) == [failed(job, text)]


def without_pidfd(pid: int, flags: int = 0) -> int:
    raise OSError(38, os.strerror(38), pid, None, flags)


def test_end_is_seen_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
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
        pid = int(told(fifo))
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
        runner.start(script(HANG_WHATEVER_IT_IS_TOLD, fifo))
        runner.turn()
        pid = int(told(fifo))
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
            runner.start(script(HANG_WHATEVER_IT_IS_TOLD, fifo))
        runner.start(command("true"))
        runner.turn()
        pids = [int(told(fifo)) for fifo in fifos]
        runner.close()
        assert [has_ended(pid) for pid in pids] == [True, True]
        with pytest.raises(ChildProcessError):
            os.waitpid(pids[0], os.WNOHANG)
        runner.close()


def test_jobs_beyond_the_slots_wait_in_their_order(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner(slots=2) as runner:
        jobs = [
            command("cat", fifo, name=b"first"),
            command("true", name=b"wide", slots=2),
            command("true", name=b"narrow"),
        ]
        for job in jobs:
            runner.start(job)
        assert runner.turn() == []
        assert (runner.slots_used, runner.slots_free, runner.running()) == (1, 0, jobs)
        assert runner.wake_at_ns() is None
        Path(fifo).write_text("go on")
        assert [found.job.name for found in turns(runner, 3)] == [b"first", b"wide", b"narrow"]
        assert (runner.slots_used, runner.slots_free, runner.running()) == (0, 2, [])


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
        jobs = [command("sleep", "1000", name=name) for name in (b"first", b"second", b"third")]
        for job in jobs:
            runner.start(job)
        runner.turn()
        assert runner.unstarted() == jobs[1:]
        assert runner.unstarted() == []
        assert runner.running() == jobs[:1]


def test_turn_is_due_at_once_while_there_is_something_to_start_or_to_tell() -> None:
    clock = SetClock()
    with a_runner(clock=clock) as runner:
        assert runner.wake_at_ns() is None
        runner.start(command("true"))
        assert runner.wake_at_ns() == clock.now_ns
        runner.start(Job(b"bad", 1, b"exec", b""))
        assert [found.job.name for found in runner.turn()] == [b"bad"]
        assert runner.wake_at_ns() is None


def test_jobs_run_side_by_side(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner(slots=2) as runner:
        runner.start(command("cat", fifo, name=b"reader"))
        runner.start(command("sh", "-c", 'echo hello > "$0"', fifo, name=b"writer"))
        texts = {found.job.name: found.text for found in turns(runner, 2)}
        assert texts == {b"reader": b"hello\n", b"writer": b""}


def test_what_is_polled_stays_the_same() -> None:
    with a_runner() as runner:
        before = list(runner.filenos())
        runner.start(command("true"))
        turns(runner)
        assert list(runner.filenos()) == before
