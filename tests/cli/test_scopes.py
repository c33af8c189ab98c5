"""Tasks chosen by campaign, service, lane and a part of the name, for every verb that chooses;
whole campaigns to wait for; the line of `status` for scripts.
"""

from __future__ import annotations

import pytest

from tests.cli.yard import Caller


def names(call: Caller, *words: str) -> list[str]:
    return [task["name"] for task in call("list", "--json", *words).document()["tasks"]]


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_act_is_on_what_fits_the_match_and_the_rest(call: Caller, verb: str) -> None:
    for name in ("fetch-1", "fetch-2", "join"):
        call.submit(f"{verb}-{name}", due="1h", campaign=verb)
    call.submit(f"{verb}-fetch-3", due="1h", campaign="else")
    said = call(verb, "--campaign", verb, "--match", "fetch", "--json").document()
    assert said[{"retry": "retried", "cancel": "cancelled"}[verb]] == 2
    delayed = names(call, "--match", f"{verb}-", "--only", "delayed")
    assert delayed == [f"{verb}-join", f"{verb}-fetch-3"]
    call("cancel", "--match", f"{verb}-")


def test_wait_is_for_what_fits_by_now(call: Caller) -> None:
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
    said = call(
        "submit", "--name", "report", "--after-campaign", "parts", "--wait", "--", "echo", "ok"
    )
    assert (said.code, said.out) == (0, "ok\n")
    assert names(call, "--campaign", "parts", "--only", "done") == ["part-0", "part-1", "part-2"]
    again = call("submit", "--name", "report", "--after-campaign", "parts", "--", "echo", "ok")
    assert "is known already" in again.err


def test_task_after_a_campaign_that_nobody_knows_is_refused(call: Caller) -> None:
    said = call("submit", "--after-campaign", "nobody", "--", "true")
    assert said.code == 2
    assert said.err == "taskyard: unknown campaign nobody (submit its tasks first)\n"


def test_status_is_one_line_for_scripts(call: Caller) -> None:
    call.submit("lined", campaign="line")
    call("wait", "lined")
    said = call("status", "--campaign", "line", "--line")
    assert said == (0, "blocked=0 delayed=0 ready=0 leased=0 done=1 failed=0 cancelled=0\n", "")
    assert call("status", "--line").out.count("\n") == 1
    assert call("status", "--line", "--json").code == 2
