"""The commands retry, cancel and drain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.yard import Caller, running
from tests.kit.processes import until

if TYPE_CHECKING:
    from pathlib import Path


def state(call: Caller, name: str) -> str:
    return str(call("show", name, "--json").document()["task"]["state"])


def test_retry_releases_dependents(call: Caller, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    call.submit("flaky", "test", "-e", str(flag))
    call.submit("next", after="flaky")
    assert call("wait", "flaky", "next").code == 1
    flag.touch()
    assert call("retry", "flaky") == (0, "retried 1 task\n", "")
    assert call("wait", "flaky", "next").code == 0
    assert call("retry", "flaky").out.startswith("nothing to retry")


def test_retry_of_everything_that_failed(call: Caller) -> None:
    for name, campaign in (("f1", "x"), ("f2", "y")):
        call.submit(name, "false", campaign=campaign)
    call("wait", "f1", "f2")
    assert call("retry", "--failed", "--campaign", "x", "--json").document()["retried"] == 1
    call("wait", "f1")
    assert call("retry", "--failed").out == "retried 2 tasks\n"
    call("wait", "f1", "f2")
    assert call("cancel", "--failed").out == "cancelled 2 tasks\n"


def test_retry_makes_a_delayed_task_due(call: Caller) -> None:
    call.submit("sleepy", due="1h")
    assert call("retry", "--match", "sleepy").out == "retried 1 task\n"
    assert call("wait", "sleepy").code == 0


def test_cancel_includes_dependents_and_kills_running_tasks(call: Caller) -> None:
    call.submit("long", "sleep", "600")
    call.submit("after-long", after="long")
    call.submit("beside", due="1h", lane="beside")
    assert call("cancel", "long") == (0, "cancelled 2 tasks\n", "")
    assert (state(call, "after-long"), state(call, "beside")) == ("cancelled", "delayed")
    assert call("why", "long").out == "long: it was cancelled on request\n"
    text = "after-long: it waited for long, which was cancelled on request\n"
    assert call("why", "after-long").out == text
    assert call("cancel", "--lane", "beside", "--json").document()["cancelled"] == 1
    assert call("cancel", "long").out.startswith("nothing to cancel")


def test_edit_changes_tasks_that_wait_and_counts_the_others(call: Caller) -> None:
    call.submit("waits", due="1h", campaign="e", expiry="2h")
    call.submit("ends", campaign="e")
    call("wait", "ends")
    outcome = call("edit", "waits", "ends", "--priority", "7", "--retries", "[1, 2]")
    assert outcome == (0, "edited 1 task\n", "not changed: 1 ended task\n")
    task = call("show", "waits", "--json").document()["task"]
    assert (task["priority"], task["retry_delays"]) == (7, [1.0, 2.0])
    options = ("--campaign", "e", "--time-limit", "90s", "--expiry", "none", "--json")
    document = call("edit", *options).document()
    assert (document["edited"], document["leased"], document["ended"]) == (1, 0, 0)
    task = call("show", "waits", "--json").document()["task"]
    assert (task["time_limit"], task["expires_hard"], task["priority"]) == (90.0, None, 7)
    assert "runs at most 1 min 30 s, 2 retries after 1.0 s, 2.0 s" in call("show", "waits").out
    call("cancel", "waits")


def test_edit_reports_leased_tasks_as_not_changed(call: Caller) -> None:
    call.submit("busy", "sleep", "600", campaign="b")
    until(lambda: state(call, "busy") == "leased", "the task runs")
    unchanged = (0, "edited 0 tasks\n", "not changed: 1 leased task\n")
    assert call("edit", "busy", "--priority", "1") == unchanged
    assert call("edit", "--campaign", "b", "--priority", "1") == unchanged
    call("cancel", "busy")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("x", "nothing to change (see `taskyard edit --help`)"),
        ("x --backoff 5s", "--backoff needs --retries"),
        ("x --expiry 2001-01-01T00:00:00Z", "--expiry: in the past (see `taskyard expire`)"),
        ("x --priority high", "--priority"),
        ("x --priority 1", "unknown task 'x'"),
        ("--priority 1", "no tasks chosen"),
        ("--campaign e --priority 1001", "--priority"),
    ],
)
def test_wrong_edit_changes_nothing(call: Caller, words: str, problem: str) -> None:
    outcome = call("edit", *words.split())
    assert outcome.code == 2
    assert problem in outcome.err


def test_cancelling_everything_wants_a_yes(call: Caller) -> None:
    call.submit("one", due="1h")
    call.submit("two", due="1h", campaign="c")
    refused = call("cancel", "--all")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert state(call, "one") == "delayed"
    assert call("cancel", "--all", "--campaign", "c", "--yes").code == 2
    assert call("cancel", "--all", "--yes").out == "cancelled 2 tasks\n"


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_commands_need_names_or_options(call: Caller, verb: str) -> None:
    assert "no tasks chosen" in call(verb).err
    assert "names exclude options" in call(verb, "a", "--failed").err
    there = f"there-{verb}"
    call.submit(there, due="1h")
    unknown = call(verb, there, "not-there")
    assert unknown.code == 2
    assert "unknown task 'not-there'" in unknown.err
    assert state(call, there) == "delayed"
    call("cancel", there)


def test_drained_worker_exits_and_the_broker_after_the_last(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with running(tmp_path, worker=False) as yard:
        call = Caller(yard.state, capsysbinary)
        yard.start_worker("--name", "one").start_worker("--name", "two")
        while len(call("workers", "--json").document()["workers"]) < 2:
            pass  # the second one has not come yet
        assert call("drain").code == 2
        assert "unknown worker 'three'" in call("drain", "one", "three").err
        assert call("drain", "one") == (0, "drained 1 worker\n", "")
        while [worker["name"] for worker in call("workers", "--json").document()["workers"]] != [
            "two"
        ]:
            pass  # it sends its exit message
        outcome = call("drain", "--every-worker")
        assert outcome.out.startswith("drained 1 worker, the broker exits")
        assert yard.broker.end()[0] == 0


@pytest.mark.parametrize("words", [["retry"], ["cancel"], ["expire"], ["edit", "--priority", "1"]])
def test_unknown_campaign_is_an_error(call: Caller, words: list[str]) -> None:
    text = "taskyard: unknown campaign 'nosuch' (see `taskyard status`)\n"
    assert call(*words, "--campaign", "nosuch") == (2, "", text)
