"""How attempts are shown and listed: measurements, columns and orders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.cli.task_list import COLUMNS
from tests.kit.processes import run_here

if TYPE_CHECKING:
    from tests.cli.yard import Caller, Yard

TASKS: list[dict[str, Any]] = [
    {"name": "nap", "argv": ["sleep", "0.3"], "cwd": "/", "env": {"A": "x y"}},
    {"name": "quick", "argv": ["true"]},
    {"name": "killed", "argv": ["sh", "-c", "echo last words; kill -9 $$"]},
    {"name": "limited", "argv": ["sh", "-c", "echo on it; sleep 9"], "time_limit": "0.1s"},
    {
        "name": "thrice",
        "argv": ["sh", "-c", "echo try $TASKYARD_ATTEMPT; exit 3"],
        "retries": [1, 1],
        "backoff": "0.05s",
    },
    {"name": "greedy", "argv": ["python3", "-c", "b'1' * 200_000_000"]},
    {"name": "x" * 60, "argv": ["true"], "after": ["thrice"]},
]


@pytest.fixture(scope="module", autouse=True)
def campaign(yard: Yard) -> None:
    file = yard.directory / "c.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    assert run_here(yard.directory, "load", "c.jsonl", "--wait")[0] == 1


def attempts(call: Caller, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call("show", name, "--json").document()["task"]["attempts"]
    return found


@pytest.mark.parametrize(
    ("name", "ended", "reason"),
    [
        ("quick", ("finished", 0, None), ""),
        ("killed", ("failed", None, 9), "killed by SIGKILL, last line: last words"),
        ("limited", ("failed", None, 15), "time limit of 0.1 s exceeded, last line: on it"),
    ],
)
def test_attempt_has_how_it_ended(
    call: Caller, name: str, ended: tuple[object, ...], reason: str
) -> None:
    (one,) = attempts(call, name)
    assert (one["outcome"], one["exit_status"], one["signal"]) == ended
    assert one["reason"] == reason
    assert one["started"] <= one["ended"] <= one["settled"]


def test_every_attempt_of_a_retried_task_is_shown(call: Caller) -> None:
    found = attempts(call, "thrice")
    assert [one["attempt"] for one in found] == [1, 2, 3]
    assert [one["outcome"] for one in found] == ["postponed", "postponed", "failed"]
    assert [one["reason"][-5:] for one in found] == ["try 1", "try 2", "try 3"]
    assert all(one["leased"] <= one["started"] for one in found)


def test_show_has_command_directory_environment_and_limits(call: Caller) -> None:
    lines = call("show", "nap").out.splitlines()
    assert lines[:4] == [
        "name        c/nap",
        "command     sleep 0.3",
        "directory   /",
        "environment A='x y'",
    ]
    assert lines[4].startswith("state       done ")
    assert "limits      2 retries after 0.1 s" in call("show", "thrice").out
    assert "SIGKILL" in call("show", "killed").out.splitlines()[-1].split()


def test_running_attempt_has_its_worker_its_host_and_its_start(call: Caller) -> None:
    call.submit("runs", "sleep", "60")
    document: dict[str, Any] = {"state": "ready"}
    while document["state"] != "leased":
        document = call("show", "runs", "--json").document()["task"]
    (one,) = document["attempts"]
    assert (one["outcome"], one["ended"], one["reason"]) == (None, None, "")
    assert one["host"] == document["host"]
    assert one["started"] == one["leased"] == document["leased"]
    assert " running " in call("show", "runs").out.splitlines()[-1]
    seconds = column(call, "duration", "--only", "leased")
    assert len(seconds) == 1
    assert seconds[0].endswith(" s")
    assert call("cancel", "runs").code == 0
    (one,) = attempts(call, "runs")
    assert (one["outcome"], one["ended"]) == ("cancelled", one["settled"])


def test_summaries_name_failures_and_slow_tasks(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.cli.wait.SLOW_SECONDS_MIN", 0.25)
    *lines, slowest = call("wait", "--campaign", "c").err.splitlines()
    assert "  c/killed failed: killed by SIGKILL, last line: last words" in lines
    assert slowest.startswith("  slowest: ")
    assert "c/nap 0." in slowest
    explained = call("why", "--campaign", "c").out.splitlines()
    assert explained[0].startswith("campaign c: 7 tasks: 3 done, 3 failed")
    thrice = "  c/thrice: it failed after 3 attempts: exit status 3: try 3; 1 task waits for it"
    assert thrice in explained
    assert explained[-1] == slowest
    document = call("why", "--campaign", "c", "--json").document()
    assert sorted(one["name"] for one in document["tasks"]) == ["killed", "limited", "thrice"]
    assert "nap" in [one["name"] for one in document["slowest"]]
    assert call("why", "--campaign", "none").code == 2
    assert call("why", "quick", "--campaign", "c").code == 2


def test_slow_tasks_of_many_are_left_to_list(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskyard.cli.wait.SLOWEST_SEARCHED_MAX", 2)
    assert call("wait", "nap", "quick", "greedy").err.splitlines() == [
        "3 tasks: 3 done",
        "  slowest: see `taskyard list --sort duration`",
    ]


def column(call: Caller, name: str, *words: str) -> list[str]:
    _, *lines = call("list", "--columns", name, *words).out.splitlines()
    return lines


def test_list_is_sorted_by_run_time_with_the_longest_first(call: Caller) -> None:
    done = ("--campaign", "c", "--only", "done")
    names = column(call, "name", "--sort", "duration", *done)
    assert sorted(names) == ["c/greedy", "c/nap", "c/quick"]
    assert names.index("c/nap") < names.index("c/quick")
    assert column(call, "name", "--sort", "duration", "--reverse", *done) == names[::-1]
    assert column(call, "name", "--sort", "memory", *done, "--limit", "1") == ["c/greedy"]
    assert column(call, "name", "--sort", "name", *done) == ["c/greedy", "c/nap", "c/quick"]
    # Tasks without a value come last in both directions.
    for words in ((), ("--reverse",)):
        names = column(call, "name", "--sort", "started", "--campaign", "c", *words)
        assert names[-1] == "c/" + "x" * 60


def test_list_has_the_last_worker_of_tasks_that_have_ended(call: Caller) -> None:
    (worker,) = {*column(call, "worker", "--campaign", "c", "--only", "done", "--only", "failed")}
    document = call("show", "nap", "--json").document()
    assert worker == document["task"]["attempts"][-1]["worker"]
    assert column(call, "worker", "--match", "xxx") == ["-"]


def test_list_reverses_the_order_of_submission(call: Caller) -> None:
    names = column(call, "name", "--campaign", "c", "--reverse", "--limit", "2")
    assert names == ["c/" + "x" * 60, "c/greedy"]


def test_every_column_has_cells(call: Caller) -> None:
    outcome = call("list", "--columns", ",".join(COLUMNS), "--campaign", "c")
    assert outcome.code == 0
    head, first, *_ = outcome.out.splitlines()
    assert head.split() == [name.upper() for name in COLUMNS]
    assert first.startswith("c/nap ")
    cells = (
        call("list", "--columns", "exit,memory", "--match", "greedy").out.splitlines()[1].split()
    )
    assert (cells[0], cells[2]) == ("0", "MiB")


def test_unknown_column_is_refused_with_the_known_ones(call: Caller) -> None:
    outcome = call("list", "--columns", "name,size")
    assert outcome.code == 2
    assert "unknown column 'size' (columns: name, line, state, campaign, " in outcome.err


def test_document_has_measurements_if_a_column_or_the_order_needs_them(call: Caller) -> None:
    listed = ("list", "--json", "--match", "nap")
    (task,) = call(*listed).document()["tasks"]
    assert "duration" not in task
    for words in (("--columns", "cpu"), ("--sort", "duration")):
        (task,) = call(*listed, *words).document()["tasks"]
        assert 0.3 <= task["duration"] < 5
        assert (task["exit_status"], task["signal"]) == (0, None)


def test_long_name_is_shortened_on_a_terminal_alone(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--match", "xxx")
    assert column(call, "name", *words) == ["c/" + "x" * 60]
    view = {"campaign": "c", "name": "a" * 30 + "z" * 30}
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert COLUMNS["name"].cell(view, 0) == "c/aaaaaaaaaaaaaa…zzzzzzzzzzzzzzz"
