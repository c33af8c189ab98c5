"""Tasks of `exec` with real programs: results, output, exits of every kind, and limits."""

import contextlib
import os
import tracemalloc
from pathlib import Path

import pytest

from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.limits import REASON_BYTES_MAX, SECOND_NS
from taskyard.worker.jobs import (
    KILL_GRACE_NS,
    LAST_LINE_BYTES_MAX,
    OUTPUT_TAIL_BYTES,
    RESULT_BYTES_MAX,
    Job,
    JobResult,
)
from taskyard.worker.programs import UNWATCHED_NS
from tests.worker.runner_harness import (
    HANG,
    HANG_IGNORING_SIGTERM,
    SetClock,
    a_fifo,
    a_runner,
    command,
    done,
    failed,
    has_ended,
    read_fifo,
    result_of,
    script,
    turns,
    without_run,
)

EXIT_0_ON_SIGTERM = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""

#: Exits at once. Its child stays, and holds its pipes.
LEAVE_CHILD_BEHIND = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(sys.argv[1], "w").write(str(child.pid))
print("done", flush=True)
os._exit(0)
"""

#: Exits at once. Its child prints after that.
LET_CHILD_PRINT = """
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


def test_result_is_the_text_on_stdout() -> None:
    job = command("echo", "hello")
    assert result_of(job) == done(job, b"hello\n")


def test_bytes_of_any_kind_come_back_as_they_are() -> None:
    job = script("import os; os.write(1, bytes(range(256)))")
    assert result_of(job) == done(job, bytes(range(256)))


def test_arguments_reach_the_program_without_a_shell() -> None:
    job = command("echo", "$HOME; exit 1", "ä€😀", "*", "")
    assert result_of(job) == done(job, "$HOME; exit 1 ä€😀 * \n".encode())


def test_bytes_of_the_payload_reach_stdin_exactly() -> None:
    stdin = bytes(range(256)) * 300
    job = command("cat", stdin=stdin)
    assert result_of(job) == done(job, stdin)


def test_file_is_read_as_stdin_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "words").write_bytes(b"\xffone\n")
    for job in (
        command("cat", stdin_file="words", cwd=str(tmp_path)),
        command("cat", stdin_file=str(tmp_path / "words")),
    ):
        assert result_of(job) == done(job, b"\xffone\n")
    assert (tmp_path / "words").read_bytes() == b"\xffone\n"


def test_file_that_can_not_be_stdin_fails_with_its_name(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    for path, reason in (
        ("no/such", "No such file or directory"),
        (str(tmp_path), "Not a regular file"),
        (fifo, "Not a regular file"),
    ):
        job = command("cat", stdin_file=path)
        assert result_of(job) == failed(job, f"can't read stdin from {path}: {reason}".encode())


def test_stderr_is_output_and_no_result() -> None:
    job = command("sh", "-c", "echo one; echo two >&2")
    assert result_of(job) == done(job, b"one\n", b"one\ntwo\n")


def test_failure_has_the_exit_status_and_the_last_line() -> None:
    job = command("sh", "-c", "echo one; echo two >&2; exit 3")
    assert result_of(job) == failed(job, b"exit status 3: two", b"one\ntwo\n")


def test_failure_without_output_has_the_exit_status() -> None:
    job = command("false")
    assert result_of(job) == failed(job, b"exit status 1")


def test_last_line_is_printable() -> None:
    job = command("printf", r"one\n \033[31mred\377 \n\n\n")
    assert result_of(job) == done(job, b"one\n \x1b[31mred\xff \n\n\n")
    job = command("sh", "-c", r"printf 'one\n \033[31mred\377 \n\n\n'; exit 1")
    assert result_of(job).text == "exit status 1: [31mred\ufffd".encode()


def test_signal_is_reported_by_name() -> None:
    job = command("sh", "-c", "echo one; kill -SEGV $$")
    assert result_of(job) == failed(job, b"killed by SIGSEGV, last line: one", b"one\n")


def test_signal_without_a_name_is_reported_by_number() -> None:
    job = command("sh", "-c", "kill -40 $$")
    assert result_of(job) == failed(job, b"killed by signal 40")


@pytest.mark.parametrize("program", ["no-such-program", "./no-such-program", "/no/such/program"])
@pytest.mark.parametrize("cwd", [None, "."])
def test_missing_program_is_reported(program: str, cwd: str | None) -> None:
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


def test_program_that_can_not_be_run_fails(tmp_path: Path) -> None:
    plain = command(a_file(tmp_path / "plain", "#!/bin/sh\n", 0o600))
    assert result_of(plain).text.endswith(b"/plain: Permission denied")
    bare = command(a_file(tmp_path / "bare", "echo never a shell\n", 0o700))
    assert result_of(bare).text.endswith(
        b"/bare: Exec format error (a script needs a #! line: add one, or run it with sh)"
    )
    orphan = command(a_file(tmp_path / "orphan", "#!/no/such/interpreter\n", 0o700))
    assert result_of(orphan).text.endswith(
        b"/orphan: No such file or directory (check its first line)"
    )
    assert result_of(command(str(tmp_path))).text.endswith(b": Permission denied")


def test_non_executable_file_on_the_path_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "first" / "tool").mkdir(parents=True)
    (tmp_path / "second").mkdir()
    a_file(tmp_path / "second" / "tool", "#!/bin/sh\necho mine\n", 0o700)
    job = command("tool", env={"PATH": f"{tmp_path}/first:{tmp_path}/second:{os.environ['PATH']}"})
    assert result_of(job) == done(job, b"mine\n")


def test_too_long_command_line_is_reported() -> None:
    job = command("true", "x" * 10_000_000)
    assert result_of(job) == failed(job, b"can't start true: Argument list too long")


def test_malformed_payload_fails_for_good() -> None:
    job = Job(b"t", 1, b"exec", b"{}")
    text = b"payload is not valid for service exec: Object missing required field "
    assert result_of(job) == JobResult(job, Outcome.FAILED_FINAL, text + b"`argv`")


def test_program_runs_where_the_worker_is_or_where_it_says(tmp_path: Path) -> None:
    assert result_of(command("pwd")).text == f"{Path.cwd()}\n".encode()
    assert result_of(command("pwd", cwd=str(tmp_path))).text == f"{tmp_path}\n".encode()


def test_missing_directory_is_in_the_reason(tmp_path: Path) -> None:
    job = command("pwd", cwd=f"{tmp_path}/nowhere")
    reason = f"can't run in the directory {tmp_path}/nowhere: No such file or directory"
    assert result_of(job) == failed(job, reason.encode())


@pytest.mark.parametrize("cwd", [None, "/"])
def test_environment_has_variables_of_the_worker_and_the_task(
    cwd: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_WORKER", "one")
    monkeypatch.setenv("OF_BOTH", "two")
    code = "import os; print([os.environ[name] for name in ('OF_THE_WORKER', 'OF_BOTH', 'OWN')])"
    job = script(code, env={"OF_BOTH": "three", "OWN": "ä"}, cwd=cwd)
    assert result_of(job).text == "['one', 'three', 'ä']\n".encode()


@pytest.mark.parametrize(("name", "shown"), [(b"a/b", b"a/b"), (b"\xff\0", b"\xff\\0")])
def test_program_gets_its_task_in_the_environment(name: bytes, shown: bytes) -> None:
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


def inherited_descriptors() -> set[int]:
    """Return the descriptors that the caller of the tests lets children inherit."""
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
    # The parent pipe, and the directory that `ls` has open.
    assert len(inherited - standard - inherited_descriptors()) <= 2


def test_long_result_is_cut_and_reported_with_its_length() -> None:
    size = RESULT_BYTES_MAX + 10
    job = script(f"import os, sys; sys.stdout.write('x' * {size - 4} + 'end\\n')")
    found = result_of(job)
    assert found.outcome == Outcome.DONE
    assert found.content == Blob(b"", size, b"x" * (RESULT_BYTES_MAX - 4) + b"end\n")
    assert found.printed == Blob(b"", size, b"x" * (OUTPUT_TAIL_BYTES - 4) + b"end\n")


def test_long_output_of_a_failure_is_reported_with_its_length() -> None:
    size = OUTPUT_TAIL_BYTES + 10
    found = result_of(script(f"import sys; sys.stderr.write('x' * {size}); sys.exit(1)"))
    assert found.text == b"exit status 1: [...] " + b"x" * LAST_LINE_BYTES_MAX
    assert found.printed == Blob(b"", size, b"x" * OUTPUT_TAIL_BYTES)


def test_result_at_the_limit_is_whole() -> None:
    job = command("head", "-c", str(RESULT_BYTES_MAX), "/dev/zero")
    assert result_of(job) == done(job, bytes(RESULT_BYTES_MAX))


@pytest.mark.parametrize("where", ["1", "2"])
def test_memory_is_bounded_whatever_is_printed(where: str) -> None:
    tracemalloc.start()
    found = result_of(command("sh", "-c", f"head -c 50000000 /dev/zero >&{where}; exit 1"))
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
        pid = int(read_fifo(fifo))
        assert runner.wake_at_ns() == clock.now_ns + UNWATCHED_NS
        clock.now_ns += UNWATCHED_NS
        assert runner.turn() == []
        assert runner.wake_at_ns() == clock.now_ns - UNWATCHED_NS + 5 * SECOND_NS
        clock.now_ns += 5 * SECOND_NS - 1
        assert runner.turn() == []
        clock.now_ns += 1
        assert turns(runner) == [failed(job, b"time limit of 5 s exceeded")]
        assert has_ended(pid)
        assert runner.wake_at_ns() is None


def test_program_that_will_not_end_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(clock=clock) as runner:
        job = script(HANG_IGNORING_SIGTERM, fifo, time_limit_ns=SECOND_NS // 4)
        runner.start(job)
        runner.turn()
        pid = int(read_fifo(fifo))
        clock.now_ns += SECOND_NS
        runner.turn()
        assert runner.wake_at_ns() == clock.now_ns + KILL_GRACE_NS
        clock.now_ns += KILL_GRACE_NS
        assert turns(runner) == [failed(job, b"time limit of 0.25 s exceeded")]
        assert has_ended(pid)


def test_program_that_exits_with_0_after_sigterm_has_failed(tmp_path: Path) -> None:
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    with a_runner(clock=clock) as runner:
        job = script(EXIT_0_ON_SIGTERM, fifo, time_limit_ns=SECOND_NS)
        runner.start(job)
        runner.turn()
        read_fifo(fifo)
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
        assert has_ended(int(read_fifo(fifo)))
        clock.now_ns += 100 * SECOND_NS
        assert [without_run(one) for one in runner.turn()] == [done(job, b"")]


def test_process_left_behind_does_not_delay_its_task(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        job = script(LEAVE_CHILD_BEHIND, fifo)
        runner.start(job)
        runner.turn()
        pid = int(read_fifo(fifo))
        assert turns(runner) == [done(job, b"done\n")]
        assert has_ended(pid)


def test_pipes_are_drained_at_exit(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        job = script(LET_CHILD_PRINT, fifo)
        runner.start(job)
        runner.turn()
        read_fifo(fifo)
        assert turns(runner) == [done(job, b"late\n")]


def test_wide_pipe_is_drained_at_exit(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        job = script(PRINT_INTO_A_WIDE_PIPE, fifo)
        runner.start(job)
        runner.turn()
        assert has_ended(int(read_fifo(fifo)))
        assert turns(runner) == [done(job, bytes(500_000))]


def test_program_that_closes_its_pipes_keeps_running(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        code = "import os, sys; os.close(1); os.close(2); open(sys.argv[1]).read(); os._exit(7)"
        job = script(code, fifo)
        runner.start(job)
        runner.turn()
        with Path(fifo).open("w"):
            pass
        assert turns(runner) == [failed(job, b"exit status 7")]


@pytest.mark.parametrize(
    ("status", "outcome"), [(3, Outcome.FAILED_FINAL), (4, Outcome.FAILED), (0, Outcome.DONE)]
)
def test_final_exit_status_is_not_retried(status: int, outcome: Outcome) -> None:
    found = result_of(command("sh", "-c", f"exit {status}", final_exit_status=[3, 7]))
    assert found.outcome == outcome


def test_program_that_is_killed_or_stopped_is_retried(tmp_path: Path) -> None:
    job = command("sh", "-c", "kill -9 $$", final_exit_status=[9, 137])
    assert result_of(job) == failed(job, b"killed by SIGKILL")
    clock, fifo = SetClock(), a_fifo(tmp_path / "fifo")
    code = EXIT_0_ON_SIGTERM.replace("exit(0)", "exit(3)")
    job = script(code, fifo, final_exit_status=[3], time_limit_ns=SECOND_NS)
    with a_runner(clock=clock) as runner:
        runner.start(job)
        runner.turn()
        read_fifo(fifo)
        clock.now_ns += SECOND_NS
        assert turns(runner) == [failed(job, b"time limit of 1 s exceeded")]
