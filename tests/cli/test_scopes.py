"""Options that choose tasks, `--after-campaign`, and `status --line`."""

from __future__ import annotations

import pytest

from tests.cli.yard import Caller


def names(call: Caller, *words: str) -> list[str]:
    return [task["name"] for task in call("list", "--json", *words).document()["tasks"]]


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_command_applies_to_tasks_that_match_every_option(call: Caller, verb: str) -> None:
    for name in ("fetch-1", "fetch-2", "join"):
        call.submit(f"{verb}-{name}", due="1h", campaign=verb)
    call.submit(f"{verb}-fetch-3", due="1h", campaign="else")
    outcome = call(verb, "--campaign", verb, "--match", "fetch", "--json").document()
    assert outcome[{"retry": "retried", "cancel": "cancelled"}[verb]] == 2
    delayed = names(call, "--match", f"{verb}-", "--only", "delayed")
    assert delayed == [f"{verb}-join", f"{verb}-fetch-3"]
    call("cancel", "--match", f"{verb}-")


def test_wait_is_for_tasks_that_match_now(call: Caller) -> None:
    call.submit("quick-1", lane="w", campaign="w")
    call.submit("quick-2", "false", campaign="w")
    call.submit("slow", due="1h", lane="x", campaign="w")
    assert call("wait", "--match", "quick").code == 1
    assert call("wait", "--lane", "w", "--campaign", "w").code == 0
    assert call("wait", "--lane", "x", "--timeout", "0.05").code == 4
    assert "no matching task" in call("wait", "--match", "nothing-of-the-kind").err
    assert call("wait", "slow", "--match", "s").code == 2
    call("cancel", "slow")


def test_task_after_a_whole_campaign_runs_last(call: Caller) -> None:
    for number in range(3):
        call.submit(f"part-{number}", "sh", "-c", "sleep 0.1", campaign="parts")
    outcome = call(
        "submit", "--name", "report", "--after-campaign", "parts", "--wait", "--", "echo", "ok"
    )
    assert (outcome.code, outcome.out) == (0, "ok\n")
    assert names(call, "--campaign", "parts", "--only", "done") == ["part-0", "part-1", "part-2"]
    again = call("submit", "--name", "report", "--after-campaign", "parts", "--", "echo", "ok")
    assert "exists already" in again.err


def test_task_after_an_unknown_campaign_is_refused(call: Caller) -> None:
    outcome = call("submit", "--after-campaign", "none", "--", "true")
    assert outcome.code == 2
    assert outcome.err == "taskyard: unknown campaign none (submit its tasks first)\n"


def test_status_is_one_line_for_scripts(call: Caller) -> None:
    call.submit("lined", campaign="line")
    call("wait", "lined")
    outcome = call("status", "--campaign", "line", "--line")
    assert outcome == (0, "blocked=0 delayed=0 ready=0 leased=0 done=1 failed=0 cancelled=0\n", "")
    assert call("status", "--line").out.count("\n") == 1
    assert call("status", "--line", "--json").code == 2
