"""Shell completion: suggestions, and silence on any failure."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import click
import pytest

from taskyard.cli import scopes
from taskyard.cli.entry import run, taskyard
from tests.cli.yard import Caller, Yard
from tests.kit.processes import TASKYARD, environment

if TYPE_CHECKING:
    from pathlib import Path


def completed(directory: Path, *words: str) -> list[str]:
    """Return bash's suggestions for the last of these words."""
    typed = " ".join(["taskyard", *words])
    done = subprocess.run(
        TASKYARD,
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=environment(
            _TASKYARD_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(len(words))
        ),
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_calls_back_with_the_name_that_is_answered(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(taskyard, ["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_TASKYARD_COMPLETE={shell}_complete" in script
    assert run(taskyard, ["completion", "tcsh"]) == 2


def test_verbs_and_options_are_completed(tmp_path: Path) -> None:
    assert completed(tmp_path, "wa") == ["wait", "watch"]
    assert "--campaign" in completed(tmp_path, "list", "--c")


def test_verbs_are_completed_without_importing_them(tmp_path: Path) -> None:
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", *TASKYARD[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(
            _TASKYARD_COMPLETE="bash_complete", COMP_WORDS="taskyard w", COMP_CWORD="1"
        ),
    )
    assert "worker" in loaded.stdout
    heavy = ("taskyard.cli.worker", "msgspec", "zmq", "google.protobuf", "traceback", "difflib")
    names = [line.rpartition("|")[2].strip() for line in loaded.stderr.splitlines()]
    assert [name for name in names if name in heavy] == []


def test_name_completion_does_not_import_listeners(yard: Yard, call: Caller) -> None:
    call.submit("lean-1")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *TASKYARD[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=yard.directory,
        env=environment(
            _TASKYARD_COMPLETE="bash_complete", COMP_WORDS="taskyard show lean", COMP_CWORD="2"
        ),
    )
    assert done.stdout == "plain,lean-1\n"
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    heavy = ("taskyard.net.context", "taskyard.net.keys", "taskyard.client.client", "asyncio")
    assert [name for name in names if name in heavy] == []


def test_names_and_campaigns_are_the_brokers(yard: Yard, call: Caller) -> None:
    call.submit("tab-1", campaign="tabs")
    call.submit("tab-2", campaign="tables")
    call.submit("un-tab", campaign="other")
    assert completed(yard.directory, "show", "tab") == ["tabs/tab-1", "tables/tab-2"]
    assert completed(yard.directory, "retry", "tab-1", "un") == ["un-tab"]
    assert sorted(completed(yard.directory, "list", "--campaign", "tab")) == ["tables", "tabs"]
    assert completed(yard.directory, "pause", "--service", "ex") == ["exec"]


def test_lanes_are_completed_of_the_service_that_was_typed(yard: Yard, call: Caller) -> None:
    call.submit("in-a", lane="lane-a", due="1h")
    call.submit("in-b", lane="lane-b", service="gpu", due="1h")
    assert completed(yard.directory, "retry", "--lane", "lane") == ["lane-a", "lane-b"]
    assert completed(yard.directory, "why", "--service", "gpu", "--lane", "lane") == ["lane-b"]
    assert completed(yard.directory, "move", "in-a", "--to-lane", "la[n") == []


def test_state_that_was_typed_is_the_one_that_is_asked(
    yard: Yard, call: Caller, tmp_path: Path
) -> None:
    call.submit("far-1")
    assert completed(tmp_path, "show", "--state", str(yard.state), "far") == ["far-1"]


def test_without_a_broker_there_are_no_names_and_no_words(tmp_path: Path) -> None:
    assert completed(tmp_path, "show", "x") == []
    assert [*tmp_path.iterdir()] == []


def test_broker_that_does_not_answer_is_waited_for_a_moment_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    context = click.Context(taskyard)
    parameter = click.Argument(["name"])
    scopes.complete_name(context, parameter, "x")  # what takes time to import is there now
    took: list[float] = []  # the shortest counts, because a busy machine may be slow
    for _ in range(5):
        begun = time.monotonic()
        assert scopes.complete_name(context, parameter, "x") == []
        took.append(time.monotonic() - begun)
    assert min(took) < 5 * scopes.REPLY_SECONDS
