"""`taskyard run`: several files, one named command, and tasks of no campaign."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.campaign.shell_lines import line_name
from taskyard.cli.offline import OfflineClient
from tests.kit.processes import Running, run_here, until

if TYPE_CHECKING:
    from pathlib import Path


def views(directory: Path) -> list[dict[str, Any]]:
    with OfflineClient(directory / ".taskyard") as stopped:
        return [*stopped.tasks()]


def states(directory: Path) -> list[tuple[str, str]]:
    return [(view["campaign"], view["state"]) for view in views(directory)]


def write_files(directory: Path) -> None:
    (directory / "a.txt").write_text("echo a1\necho a2; exit 3\n")
    (directory / "b.jsonl").write_text('{"name": "x", "argv": ["echo", "bx"]}\n')


def test_each_file_is_a_campaign_and_there_is_one_summary(tmp_path: Path) -> None:
    write_files(tmp_path)
    code, out, err = run_here(tmp_path, "run", "a.txt", "b.jsonl")
    assert (code, out) == (1, "a1\na2\nbx\n")
    name = f"a/{line_name('echo a2; exit 3')}"
    lines = [re.sub(r" \([\d.]+ s\)$", "", line) for line in err.splitlines()]
    assert lines == [
        "a.txt: shell commands, 2 tasks",
        "a: 2 tasks",
        "b: 1 task",
        f"taskyard: a.txt:2 (echo a2; exit 3): failed: exit status 3: a2 ({name})",
        "a: 1 done, 1 failed",
        "b: 1 done",
        "explain:  taskyard why a.txt:2",
        "retry:    taskyard run a.txt b.jsonl",
    ]
    code, out, _ = run_here(tmp_path, "run", "--json", "a.txt", "b.jsonl")
    document = json.loads(out)
    assert (code, document["document"], document["version"]) == (1, "run", 1)
    counts = [(one["campaign"], one["counts"]["done"]) for one in document["runs"]]
    assert counts == [("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("a.txt", "./a.txt"),
            "./a.txt: its campaign a is that of a.txt (run one of them with --campaign)",
        ),
        (("a.txt", "b.jsonl", "--campaign", "c"), "--campaign: needs one FILE, but there are 2"),
        (("a.txt", "none.txt"), "none.txt: No such file or directory"),
        (("a.txt", "--name", "x"), "--name: needs -- COMMAND, not FILE"),
        (("--name", "x", "--", "echo", "{}", ":::", "1"), "--name: names one task "),
    ],
)
def test_what_can_not_be_run_together_is_refused_before_a_start(
    tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    write_files(tmp_path)
    code, _, err = run_here(tmp_path, "run", *words)
    assert (code, problem in err) == (2, True)
    assert not (tmp_path / ".taskyard").exists()


def test_first_failure_stops_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("exit 3\n")
    (tmp_path / "b.txt").write_text("exec sleep 600\n")
    code, _, err = run_here(tmp_path, "run", "-j", "1", "--max-failures", "1", "a.txt", "b.txt")
    assert (code, "b: 0 done, 1 unfinished" in err) == (1, True)
    assert states(tmp_path) == [("a", "failed"), ("b", "ready")]


def test_commands_and_values_belong_to_no_campaign(tmp_path: Path) -> None:
    assert run_here(tmp_path, "run", "--", "echo", "one")[:2] == (0, "one\n")
    code, out, err = run_here(tmp_path, "run", ":::", "echo a", "echo b; exit 4")
    assert (code, out) == (1, "a\nb\n")
    assert err.splitlines()[-2] == "2 tasks: 1 done, 1 failed"
    assert run_here(tmp_path, "run", "--campaign", "c", ":::", "echo c")[0] == 0
    assert states(tmp_path) == [("", "done"), ("", "done"), ("", "failed"), ("c", "done")]


def test_interrupted_values_are_cancelled_and_no_other_task_outside_campaigns(
    tmp_path: Path,
) -> None:
    script = "echo $1 >> marks; exec sleep 600"
    words = ("run", "-j", "1", "--", "sh", "-c", script, "sh", "{}", ":::", "slow", "next")
    with Running(tmp_path, *words) as running:
        until((tmp_path / "marks").exists)
        assert run_here(tmp_path, "submit", "--name", "other", "--due", "1h", "true")[0] == 0
        code, _, err = running.send(signal.SIGINT).end()
    assert (code, "cancelled 2 tasks\n" in err) == (130, True)
    assert states(tmp_path) == [("", "cancelled"), ("", "cancelled"), ("", "delayed")]


def test_named_command_runs_once_and_again_after_a_failure(tmp_path: Path) -> None:
    words = ("run", "--name", "build", "--", "sh", "-c", "echo x >> runs; test -e ok")
    assert run_here(tmp_path, *words)[0] == 1
    assert "build is" not in run_here(tmp_path, "why", "build")[2]
    (tmp_path / "ok").touch()
    assert run_here(tmp_path, *words)[0] == 0
    assert run_here(tmp_path, *words)[0] == 0
    assert (tmp_path / "runs").read_text() == "x\nx\n"
    code, _, err = run_here(tmp_path, "run", "--name", "build", "--", "false")
    assert code == 2
    assert "task build: exists with another command or campaign (give another --name)" in err


def test_json_has_no_outputs(tmp_path: Path) -> None:
    code, out, err = run_here(tmp_path, "run", "--json", "--", "sh", "-c", "echo hi; exit 3")
    document = json.loads(out)
    assert (code, err) == (1, "")
    assert (document["document"], document["campaign"]) == ("run", "")
    assert (document["counts"]["failed"], document["counts"]["done"]) == (1, 0)
    assert [one["reason"] for one in document["failures"]] == ["exit status 3: hi"]


def test_file_of_the_same_name_in_another_directory_is_named_in_a_warning(tmp_path: Path) -> None:
    (tmp_path / ".taskyard").mkdir()
    for name in "xy":
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmds.txt").write_text("echo here\n")
    assert run_here(tmp_path / "x", "run", "cmds.txt")[0] == 0
    code, _, err = run_here(tmp_path / "y", "run", "cmds.txt")
    former = tmp_path / "x" / "cmds.txt"
    assert (code, f"cmds.txt: campaign cmds was loaded from {former} before" in err) == (0, True)
    assert "loaded from" not in run_here(tmp_path / "y", "run", "cmds.txt")[2]
    former.unlink()
    (tmp_path / "z").mkdir()
    (tmp_path / "y" / "cmds.txt").rename(tmp_path / "z" / "cmds.txt")
    assert "loaded from" not in run_here(tmp_path / "z", "run", "cmds.txt")[2]
