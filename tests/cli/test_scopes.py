"""Options that choose tasks, and `--after-campaign`."""

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
