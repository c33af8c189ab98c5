"""`taskyard wait` by name, campaign or all, and its exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.campaign.shell_lines import line_name
from tests.cli.yard import Caller

if TYPE_CHECKING:
    from pathlib import Path


def test_done_tasks_exit_0(call: Caller) -> None:
    call.submit("a")
    call.submit("b", "sleep", "0.2", after="a")
    assert call("wait", "a", "b", "a") == (0, "", "2 tasks: 2 done\n")


def test_failed_tasks_exit_1_and_are_named_with_their_reasons(call: Caller) -> None:
    call.submit("bad", "false", campaign="sad")
    call.submit("behind", campaign="sad", after="bad")
    by_name = call("wait", "bad", "behind")
    assert by_name.code == 1
    assert by_name.err.splitlines() == [
        "2 tasks: 1 failed, 1 behind a failure",
        "  sad/bad failed: exit status 1",
    ]
    by_campaign = call("wait", "--campaign", "sad")
    assert by_campaign.code == 1
    assert by_campaign.err == "campaign sad: " + by_name.err
    document = call("wait", "--campaign", "sad", "--json").document()
    assert (document["settled"], document["counts"]["failed"]) == (True, 1)
    assert (document["counts"]["blocked"], document["behind_failure"]) == (1, 1)
    call("cancel", "bad")


def test_cancelled_tasks_exit_5_where_none_failed(call: Caller) -> None:
    call.submit("gone", due="1h", campaign="gone")
    call("cancel", "gone")
    assert call("wait", "gone").code == 5
    assert call("wait", "--campaign", "gone").code == 5


def test_timeout_exits_4_and_counts_unsettled_tasks(call: Caller) -> None:
    call.submit("late", due="1h", campaign="late")
    for what in (["late"], ["--campaign", "late"], []):
        outcome = call("wait", *what, "--timeout", "0.1s")
        assert outcome.code == 4
        assert "taskyard: 1 task not settled after 0.1 s (see `taskyard why NAME`)" in outcome.err
    document = call("wait", "late", "--timeout", "0.1s", "--json").document()
    assert document["settled"] is False
    assert (document["counts"]["delayed"], document["counts"]["ready"]) == (1, 0)
    call("cancel", "late")


def test_everything_is_waited_for_without_names(call: Caller) -> None:
    call.submit("poor", "false")
    call.submit("slow", "sleep", "0.3")
    assert call("wait").code == 1
    assert call("show", "slow", "--json").document()["task"]["state"] == "done"


def test_any_returns_the_first_settled_task_with_its_exit_code(call: Caller) -> None:
    call.submit("never", due="1h", campaign="any")
    call.submit("fails", "false", campaign="any")
    assert call("wait", "--any", "never", "fails") == (1, "any/fails\n", "")
    document = call("wait", "--any", "--json", "never", "fails").document()
    assert (document["name"], document["campaign"], document["state"]) == ("fails", "any", "failed")
    call.submit("works", campaign="any")
    assert call("wait", "works").code == 0
    # Of several settled ones it is the first on the command line.
    assert call("wait", "--any", "never", "works", "fails") == (0, "any/works\n", "")
    outcome = call("wait", "--any", "never", "--timeout", "0.1s")
    assert (outcome.code, outcome.out) == (4, "")
    assert "none of 1 task settled in time" in outcome.err
    call("cancel", "never")
    assert call("wait", "--any", "never").code == 5
    assert call("wait", "--any", "--campaign", "any").out == "any/never\n"


@pytest.mark.parametrize("command", ["wait", "list", "cancel", "watch", "why", "results", "submit"])
def test_second_campaign_is_refused(command: str, call: Caller) -> None:
    outcome = call(command, "--campaign", "e1", "--campaign", "e2")
    assert outcome.code == 2
    assert "--campaign: takes one value, got 2 (e1, e2)" in outcome.err


def test_repeated_campaign_is_one(call: Caller) -> None:
    call.submit("twice", campaign="same")
    outcome = call("wait", "--campaign", "same", "--campaign", "same")
    assert outcome == (0, "", "campaign same: 1 task: 1 done\n")


def test_unknown_names_are_not_waited_for(call: Caller) -> None:
    outcome = call("wait", "no-such", "nor-this")
    assert outcome.code == 2
    assert "unknown task 'no-such' and 1 more (see `taskyard list`)" in outcome.err
    assert call("wait", "--campaign", "no-such").code == 2
    assert call("wait", "a", "--campaign", "b").code == 2


def test_many_names_are_waited_for_at_once(call: Caller, tmp_path: Path) -> None:
    lines = [f"many {number}" for number in range(1500)]
    (tmp_path / "lines").write_text("\n".join(lines))
    options = ["--lines", str(tmp_path / "lines"), "--campaign", "many", "--no-wait", "-q"]
    assert call("map", *options, "--service", "none", "--payload", "{}").code == 0
    assert call("cancel", "--campaign", "many").out == "cancelled 1,500 tasks\n"
    assert call("wait", *map(line_name, lines)).err == "1,500 tasks: 1,500 cancelled\n"
