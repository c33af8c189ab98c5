"""Input and output files of commands: missing, up to date, or changed."""

import os
import socket
from pathlib import Path

import pytest

from taskyard.calls.environments import Environment, encode_environment
from taskyard.calls.payloads import EXEC, encode_command
from taskyard.core.events import Outcome
from taskyard.worker.jobs import Job, JobResult
from tests.worker.runner_harness import a_runner, measured_turns


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(
    script: str, inputs: list[str], outputs: list[str], attempt: int = 1, environment: bytes = b""
) -> Job:
    payload = encode_command(["sh", "-c", script], None, None, inputs, outputs)
    return Job(b"t", attempt, EXEC, payload, environment=environment)


def ran(given: Job) -> tuple[Outcome, bytes, bytes]:
    """Run a job. Return its outcome, its result or reason, and its note."""
    done = result(given)
    assert done.run is not None
    return done.outcome, done.text, done.run.note


def result(given: Job) -> JobResult:
    with a_runner() as runner:
        runner.start(given)
        (done,) = measured_turns(runner)
        return done


def touch(name: str, at_ns: int = 0) -> None:
    Path(name).touch()
    if at_ns:
        os.utime(name, ns=(at_ns, at_ns))


def test_missing_input_fails_the_task_before_it_runs() -> None:
    touch("a")
    assert ran(job("touch ran", ["a", "data/b.csv"], [])) == (
        *(Outcome.FAILED, b"input missing: data/b.csv"),
        b"",
    )
    assert not Path("ran").exists()


def test_missing_output_fails_the_task_after_it_ran() -> None:
    done = result(job("echo hi; touch a", [], ["a", "b.png"]))
    assert (done.outcome, done.text, done.output) == (
        *(Outcome.FAILED, b"output missing: b.png"),
        b"hi\n",
    )
    assert done.run is not None
    assert done.run.status == 0


def test_failure_of_the_program_is_reported_as_it_is() -> None:
    assert ran(job("exit 3", [], ["b"]))[:2] == (Outcome.FAILED, b"exit status 3")


def test_task_that_is_up_to_date_does_not_run() -> None:
    touch("in", 1_000)
    touch("out", 2_000)
    assert ran(job("echo ran", ["in"], ["out"])) == (
        *(Outcome.DONE, b""),
        b"up to date: out is newer than all inputs",
    )
    assert ran(job("echo ran", [], ["out"]))[2] == b"up to date: out exists"
    assert ran(job("echo ran", [], ["out", "in"]))[2] == b"up to date: all 2 outputs exist"


def test_note_names_the_file_that_changed() -> None:
    touch("in", 2_000)
    touch("out", 1_000)
    assert ran(job("echo ran", ["in"], ["out"])) == (
        *(Outcome.DONE, b"ran\n"),
        b"ran because in is newer than out",
    )
    assert ran(job("touch made", ["in"], ["made"]))[2] == b"ran because made is missing"


def test_later_attempt_runs_because_outputs_may_be_incomplete() -> None:
    touch("out")
    assert ran(job("echo ran", [], ["out"], attempt=2)) == (
        *(Outcome.DONE, b"ran\n"),
        b"ran because this is not its first attempt",
    )


def test_task_with_inputs_alone_always_runs() -> None:
    touch("in")
    assert ran(job("echo ran", ["in"], [])) == (Outcome.DONE, b"ran\n", b"")


def test_paths_begin_in_the_directory_of_the_task(directory: Path) -> None:
    (directory / "there").mkdir()
    touch("there/in")
    here = Environment(socket.gethostname(), str(directory / "there"))
    made = job("cp in out", ["in"], ["out"], environment=encode_environment(here))
    assert ran(made)[0] is Outcome.DONE
    assert Path("there/out").exists()


def test_notes_of_place_and_files_are_joined() -> None:
    elsewhere = encode_environment(Environment("elsewhere", "/there"))
    note = ran(job("touch out", [], ["out"], environment=elsewhere))[2]
    assert note.endswith(b"submitted on host elsewhere; ran because out is missing")


def test_stopped_command_leaves_nothing_behind() -> None:
    with a_runner() as runner:
        runner.start(job("sleep 60", [], ["out"]))
        runner.turn()
        runner.stop(b"t", 1)
        runner.start(job("touch out", [], ["out"]))
        (done,) = measured_turns(runner)
    assert done.outcome is Outcome.DONE
