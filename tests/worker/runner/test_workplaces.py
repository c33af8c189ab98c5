"""Where commands run: in the directory and with the variables of their submitter."""

import logging
import os
import socket
from pathlib import Path

import pytest

from taskyard.calls.environments import Environment, encode_environment
from taskyard.worker.jobs import Job
from tests.worker.runner_harness import (
    a_runner,
    command,
    done,
    failed,
    failed_final,
    measured_turns,
    result_of,
)


def submitted(cwd: Path | str, host: str | None = None, **variables: str) -> bytes:
    own = socket.gethostname() if host is None else host
    return encode_environment(Environment(own, str(cwd), {"PATH": "/usr/bin:/bin", **variables}))


def note_of(job: Job) -> bytes:
    with a_runner() as runner:
        runner.start(job)
        (result,) = measured_turns(runner)
        assert result.run is not None
        return result.run.note


def test_command_runs_where_it_was_submitted(tmp_path: Path) -> None:
    own = Path.cwd()
    job = command("pwd", environment=submitted(tmp_path))
    assert result_of(job) == done(job, f"{tmp_path}\n".encode())
    assert note_of(job) == b""
    assert Path.cwd() == own


def test_own_directory_of_a_command_is_relative_to_that_of_its_submitter(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for cwd, expected in (("sub", tmp_path / "sub"), ("/", Path("/")), (".", tmp_path)):
        job = command("pwd", "-P", cwd=cwd, environment=submitted(tmp_path))
        assert result_of(job).text.decode() == f"{expected}\n"


def test_variables_of_the_submitter_come_between_those_of_worker_and_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEPT", "PASSED", "SET"):
        monkeypatch.setenv(name, "worker")
    monkeypatch.setenv("VIRTUAL_ENV", "/worker")
    environment = submitted(tmp_path, PASSED="submitter", SET="submitter")
    text = "echo $KEPT $PASSED $SET $TASKYARD_TASK ${VIRTUAL_ENV-unset}"
    job = command("sh", "-c", text, env={"SET": "task"}, environment=environment)
    assert result_of(job).text == b"worker submitter task t unset\n"


def test_program_is_found_by_the_path_and_directory_of_the_submitter(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "greet"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho hi\n")
    program.chmod(0o755)
    environment = submitted(tmp_path, PATH="bin:/bin")
    for word in ("greet", "./bin/greet", "bin/greet"):
        job = command(word, environment=environment)
        assert result_of(job) == done(job, b"hi\n")


def test_deleted_directory_fails_the_command(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    job = command("true", environment=submitted(gone))
    reason = f"can't run in the directory {gone}: No such file or directory"
    assert result_of(job) == failed(job, reason.encode())


def test_command_from_another_host_runs_in_the_worker_s_own_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = submitted(tmp_path, host="elsewhere", HOME="/there")
    jobs = [
        command("sh", "-c", "pwd; echo $HOME", name=name, environment=environment)
        for name in (b"a", b"b")
    ]
    with caplog.at_level(logging.WARNING, "taskyard.worker"), a_runner(2) as runner:
        for job in jobs:
            runner.start(job)
        results = measured_turns(runner, 2)
    own = f"{Path.cwd()}\n{os.environ.get('HOME', '')}\n".encode()
    assert [one.text for one in results] == [own, own]
    note = b"ran in the worker's own directory and environment: submitted on host elsewhere"
    assert [one.run.note for one in results if one.run is not None] == [note, note]
    logged = "commands submitted on host elsewhere run in the worker's own directory"
    assert [record.getMessage() for record in caplog.records] == [logged]


def test_invalid_environment_fails_the_command_for_good() -> None:
    job = command("true", environment=b"nonsense")
    assert result_of(job) == failed_final(job, b"environment: not valid JSON")


def test_command_without_an_environment_has_the_worker_s(tmp_path: Path) -> None:
    with a_runner(2) as runner:
        runner.start(command("pwd", name=b"a", environment=submitted(tmp_path)))
        runner.start(command("pwd", name=b"b"))
        texts = {one.job.name: one.text for one in measured_turns(runner, 2)}
    assert texts == {b"a": f"{tmp_path}\n".encode(), b"b": f"{Path.cwd()}\n".encode()}
