"""--retry-failed-only of `run` and `map`: the failed tasks run again, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from taskyard.cli.offline import OfflineClient
from tests.kit.processes import Broker, campaign, marking, marks, run_here

if TYPE_CHECKING:
    from pathlib import Path

ONLY = "--retry-failed-only"


def states(directory: Path) -> dict[str, str]:
    """Return the states of all tasks of a stopped state."""
    with OfflineClient(directory / ".taskyard") as stopped:
        return {view["name"]: view["state"] for view in stopped.tasks()}


def test_run_retries_failed_tasks_with_those_behind_and_submits_nothing(tmp_path: Path) -> None:
    tasks = [marking("bad", "test -e mended"), marking("behind", after=["bad"]), marking("good")]
    assert run_here(tmp_path, "run", "--quiet-output", campaign(tmp_path, tasks))[0] == 1
    file = campaign(tmp_path, [*tasks, marking("new")])
    code, out, err = run_here(tmp_path, "run", "--quiet-output", file, ONLY)
    assert code == 1
    assert err == "campaign campaign: 1 failed task retried; 1 new task not submitted\n"
    assert out.startswith("campaign: 1 done, 1 failed, 1 behind a failure (")
    (tmp_path / "mended").touch()
    code, out, _ = run_here(tmp_path, "run", "--quiet-output", file, ONLY, "--json")
    assert (code, json.loads(out)["counts"]["done"]) == (0, 3)
    assert marks(tmp_path).count("good") == 1
    code, out, err = run_here(tmp_path, "run", "--quiet-output", file, ONLY)
    assert (code, out[:17]) == (0, "campaign: 3 done ")
    nothing = "campaign campaign: no failed task, nothing to retry; 1 new task not submitted\n"
    assert err == nothing
    assert "new" not in states(tmp_path)


def test_unfinished_tasks_are_not_waited_for(tmp_path: Path) -> None:
    """The delayed one would take an hour, and one is behind it."""
    late = {"name": "late", "argv": ["true"], "due": "1h"}
    behind_both = marking("both", after=["bad", "late"])
    tasks = [marking("bad", "test -e mended"), late, behind_both]
    file = campaign(tmp_path, tasks)
    assert run_here(tmp_path, "run", "--quiet-output", file, "--max-failures", "1")[0] == 1
    (tmp_path / "mended").touch()
    code, out, err = run_here(tmp_path, "run", "--quiet-output", file, ONLY)
    assert (code, out[:32]) == (0, "campaign: 1 done, 2 unfinished (")
    assert err == "campaign campaign: 1 failed task retried; 1 unfinished task may run too\n"
    assert states(tmp_path) == {"bad": "done", "late": "delayed", "both": "blocked"}


def test_map_retries_without_command_and_input_and_prints_results(tmp_path: Path) -> None:
    script = 'echo "run $1" >> "$1.runs"; test "$1" = a -o -e mended && echo "did $1"'
    words = ("sh", "-c", script, "sh", "{}", ":::", "a", "b", "c")
    code, out, _ = run_here(tmp_path, "map", "--campaign", "week", *words)
    assert (code, out) == (1, "did a\n")
    (tmp_path / "mended").touch()
    code, out, err = run_here(tmp_path, "map", "--campaign", "week", ONLY)
    assert (code, out) == (0, "did b\ndid c\n")
    first = "campaign week: 2 failed tasks retried\n"
    assert err == f"{first}campaign week: 2 tasks: 2 done\n"
    runs = [len((tmp_path / f"{one}.runs").read_text().splitlines()) for one in "abc"]
    assert runs == [1, 2, 2]
    code, out, err = run_here(tmp_path, "map", "--campaign", "week", ONLY, "--", *words)
    assert (code, out) == (0, "")
    assert err.startswith("campaign week: no failed task, nothing to retry\n")


def test_map_waits_for_tasks_behind_the_failed_ones_too(tmp_path: Path) -> None:
    behind = {"name": "behind", "argv": ["echo", "after"], "after": ["bad"]}
    file = campaign(tmp_path, [marking("bad", "test -e mended && echo mended"), behind])
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 1
    (tmp_path / "mended").touch()
    words = ("map", "--campaign", "campaign", ONLY, "-q")
    assert run_here(tmp_path, *words) == (0, "mended\nafter\n", "")


def test_repeated_map_retries_failed_and_cancelled_rows(tmp_path: Path) -> None:
    script = 'echo "$1" >> marks; test "$1" = a -o -e mended && echo "did $1"'

    def repeat(values: str, *options: str) -> tuple[int, str, list[str]]:
        words = ("map", "--campaign", "week", "-j", "1", *options, "sh", "-c", script, "sh", "{}")
        code, out, err = run_here(tmp_path, *words, ":::", *values)
        return code, out, err.splitlines()

    assert repeat("ab")[2][-1] == "run the same command again to retry them"
    with Broker(tmp_path):
        assert repeat("cd", "--no-wait")[0] == 0
        assert run_here(tmp_path, "cancel", "-q", "--campaign", "week", "--only", "ready")[0] == 0
    code, out, err = repeat("abc", "--no-retry-failed", "--max-failures", "1")
    assert (code, out) == (1, "did a\n")
    assert err[-2:] == [
        "campaign week: 3 tasks: 1 done, 1 failed, 1 cancelled",
        "run the same command again without --no-retry-failed to retry them",
    ]
    assert "--max-failures" not in "".join(err)
    assert marks(tmp_path) == ["a", "b"]
    (tmp_path / "mended").touch()
    summary = ["campaign week: 3 tasks: 3 done"]
    assert repeat("abc", "--max-failures", "1") == (0, "did a\ndid b\ndid c\n", summary)
    assert marks(tmp_path) == ["a", "b", "b", "c"]
    assert sorted(states(tmp_path).values()) == ["cancelled", "done", "done", "done"]


def test_changed_command_of_a_failed_row_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    assert run_here(tmp_path, "map", "--campaign", "week", "false", ":::", "a")[0] == 1
    code, _, err = run_here(tmp_path, "map", "--campaign", "week", "true", ":::", "a")
    assert (code, "exists with another command" in err) == (2, True)
    assert [*states(tmp_path).values()] == ["failed"]


def test_campaign_that_does_not_exist_is_an_error_and_creates_nothing(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a")])
    unknown = "taskyard: unknown campaign {!r}: nothing to retry (see `taskyard status`)\n"
    for verb, name in ((["run", "--quiet-output", file], "campaign"), (["map"], "week")):
        assert run_here(tmp_path, *verb, "--campaign", name, ONLY) == (2, "", unknown.format(name))
    assert not (tmp_path / ".taskyard" / "journal.sqlite").exists()
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 0
    for verb, name in ((["run", "--quiet-output", file], "x"), (["map"], "y")):
        assert run_here(tmp_path, *verb, "--campaign", name, ONLY) == (2, "", unknown.format(name))
    assert marks(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("run", "x.jsonl", "--no-retry-failed"), "--no-retry-failed and --retry-failed-only"),
        (("map",), "--retry-failed-only: needs --campaign"),
        (("map", "--campaign", "c", "--dry-run"), "--retry-failed-only and --dry-run exclude"),
        (("map", "--campaign", "c", "--no-wait"), "--retry-failed-only and --no-wait exclude"),
        (("map", "--campaign", "c", "--tag"), "--retry-failed-only and --tag exclude"),
        (("map", "--campaign", "c", "--no-retry-failed"), "and --no-retry-failed exclude"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    code, _, err = run_here(tmp_path, *words, ONLY)
    assert (code, reason in err) == (2, True)
