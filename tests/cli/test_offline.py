"""Reading a state directory without a broker: same replies, nothing changed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.cli.offline import OfflineClient
from taskyard.client.internal import InternalClient
from taskyard.core.events import Scope
from taskyard.core.states import TaskState
from taskyard.errors import NoBroker, StateLocked, UserError
from tests.kit.processes import Broker, campaign, run_here

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the state of a finished `run`."""
    directory = tmp_path_factory.mktemp("left")
    tasks = [
        {"name": "good", "argv": ["echo", "well done"]},
        {"name": "bad", "argv": ["sh", "-c", "echo trouble >&2; exit 4"]},
        {"name": "behind", "argv": ["true"], "after": ["bad"]},
    ]
    assert run_here(directory, "run", campaign(directory, tasks))[0] == 1
    return directory


@pytest.fixture
def state(left: Path, tmp_path: Path) -> Path:
    """Return a copy of the state for one test."""
    shutil.copytree(left / ".taskyard", tmp_path / ".taskyard")
    return tmp_path / ".taskyard"


def test_it_answers_as_the_broker_does(state: Path) -> None:
    with OfflineClient(state) as stopped:
        offline = (
            stopped.status(),
            stopped.show("campaign/bad"),
            stopped.explain("campaign/behind"),
        )
        more = (
            stopped.output("campaign/good", "result"),
            stopped.output("campaign/bad"),
            [*stopped.tasks()],
        )
    with Broker(state.parent), InternalClient(state=state) as client:
        assert (
            client.status() | {"health": None},  # of a running broker only
            client.show("campaign/bad"),
            client.explain("campaign/behind"),
        ) == offline
        assert (
            client.output("campaign/good", "result"),
            client.output("campaign/bad"),
            [*client.tasks()],
        ) == more


def test_tasks_that_were_moved_out_of_the_journal_are_found(state: Path) -> None:
    assert run_here(state.parent, "journal", "compact")[0] == 0
    with OfflineClient(state) as stopped:
        assert stopped.output("campaign/good", "result") == b"well done\n"
        assert stopped.why("campaign/good") == "it is done (attempt 1)"


def test_it_changes_nothing(state: Path) -> None:
    with OfflineClient(state) as stopped:
        records = stopped.status()["records"]
        stopped.why("campaign/behind")
        list(stopped.tasks(Scope(states=(TaskState.FAILED,))))
    with OfflineClient(state) as stopped:
        assert stopped.status()["records"] == records


@pytest.mark.parametrize("act", ["cancel", "retry"])
def test_changes_need_a_broker(state: Path, act: str) -> None:
    with OfflineClient(state) as stopped:
        with pytest.raises(NoBroker, match="start one with `taskyard up"):
            getattr(stopped, act)(["bad"])
        with pytest.raises(NoBroker):
            stopped.submit(["true"])
        with pytest.raises(NoBroker):
            stopped.drain()


def test_unknown_task_is_reported_as_usual(state: Path) -> None:
    with OfflineClient(state) as stopped, pytest.raises(UserError, match="unknown task 'none'"):
        stopped.show("none")


def test_state_in_use_is_left_alone(state: Path) -> None:
    with Broker(state.parent), pytest.raises(StateLocked):
        OfflineClient(state)


def test_broker_that_is_started_meanwhile_changes_no_reply(state: Path) -> None:
    with OfflineClient(state) as stopped, Broker(state.parent):
        counts = stopped.status()["counts"]
        assert run_here(state.parent, "submit", "--name", "late", "--", "true")[0] == 0
        assert stopped.status()["counts"] == counts
        assert stopped.why("campaign/bad").startswith("it failed")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["why", "bad"], "campaign/bad: it failed after 1 attempt: exit status 4"),
        (
            ["why", "behind"],
            "campaign/behind: it is behind a failure: campaign/bad failed (exit status 4",
        ),
        (["results", "good"], "well done\n"),
        (["log", "bad"], "trouble\n"),
        (["log", "-f", "bad"], "trouble\n"),
        (["status"], "3 tasks: 1 done, 1 failed, 1 behind a failure"),
        (["list", "--failed"], "NAME"),
        (["show", "good"], "name "),
    ],
)
def test_read_only_commands_work_on_a_stopped_state(
    words: list[str],
    answer: str,
    left: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(left)
    assert run(taskyard, words) == 0
    out, err = capsys.readouterr()
    assert err == "no broker is running on .taskyard: showing its last state\n"
    assert out.startswith(answer)


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["wait", "--campaign", "campaign"], 1, "campaign campaign: 3 tasks: 1 done, 1 failed"),
        (["wait"], 1, "3 tasks: 1 done"),
        (["wait", "--campaign", "nosuch"], 2, "unknown campaign 'nosuch' (see `taskyard status`)"),
        (["list", "--campaign", "nosuch"], 2, "unknown campaign 'nosuch' (see `taskyard status`)"),
        (["clean", "--campaign", "nosuch"], 2, "unknown campaign 'nosuch' (see `taskyard status`)"),
        (["list", "--state", "nosuch"], 3, "no broker is running: nosuch does not exist"),
        (["retry"], 2, "no tasks chosen (give names or --campaign"),
        (["cancel", "a", "--failed"], 2, "names exclude options"),
    ],
)
def test_stopped_state_never_waits_for_a_broker_in_vain(  # noqa: PLR0913, PLR0917  # a table
    words: list[str],
    code: int,
    answer: str,
    left: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(left)
    monkeypatch.setattr("taskyard.cli.connection.connect_to", lambda *_: pytest.fail("connected"))
    assert run(taskyard, words) == code
    assert answer in capsys.readouterr().err
