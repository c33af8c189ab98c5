"""The commands that only read: text and JSON output."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from tests.cli.yard import Caller, Yard, running
from tests.kit.processes import TASKYARD, Running, environment, run_here
from tests.kit.requirements import need

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def campaign(yard: Yard) -> None:
    """Load a few tasks in every state."""
    lines = [
        '{"name": "done", "argv": ["sh", "-c", "echo out; echo err >&2"]}',
        '{"name": "quiet", "argv": ["true"]}',
        '{"name": "bytes", "argv": ["printf", "\\\\377\\\\0"]}',
        '{"name": "bad", "argv": ["sh", "-c", "echo trouble >&2; exit 4"]}',
        '{"name": "behind", "argv": ["true"], "after": ["bad"]}',
        '{"name": "far", "argv": ["true"], "after": ["behind"]}',
        '{"name": "late", "argv": ["true"], "due": "1h", "lane": "l"}',
        '{"name": "idle", "payload": "x", "service": "none"}',
    ]
    (yard.directory / "looks.jsonl").write_text("\n".join(lines))
    assert run_here(yard.directory, "load", "looks.jsonl")[0] == 0
    assert run_here(yard.directory, "wait", "done", "quiet", "bytes", "bad", "behind")[0] == 1


def test_status_counts_as_the_contract_says(call: Caller) -> None:
    document = call("status", "--json").document()
    assert document["counts"] == {
        "blocked": 2,
        "delayed": 1,
        "ready": 1,
        "leased": 0,
        "done": 3,
        "failed": 1,
        "cancelled": 0,
    }
    assert document["behind_failure"] == 2
    assert document["document"] == "status"
    one = call("status", "--campaign", "looks", "--json").document()
    assert one["counts"] == document["counts"]
    assert call("status", "--campaign", "none").code == 2


def test_status_in_words_opens_with_a_summary(call: Caller) -> None:
    lines = call("status").out.splitlines()
    assert lines[:2] == [
        "8 tasks: 3 done, 1 failed, 1 ready, 1 delayed, 2 behind a failure",
        "1 worker",
    ]
    assert lines[3].split()[:2] == ["CAMPAIGN", "BLOCKED"]
    assert lines[4].split() == ["looks", "2", "1", "1", "0", "3", "1", "0"]


def names(call: Caller, *words: str) -> list[str]:
    return [task["name"] for task in call("list", "--json", *words).document()["tasks"]]


def test_list_chooses_by_everything_that_is_given(call: Caller) -> None:
    everything = ["done", "quiet", "bytes", "bad", "behind", "far", "late", "idle"]
    assert names(call) == everything
    assert names(call, "--campaign", "looks") == everything
    assert names(call, "--campaign", "looks", "--lane", "none") == []
    assert call("list", "--campaign", "other").code == 2
    assert names(call, "--failed") == ["bad"]
    assert names(call, "--only", "blocked", "--only", "DELAYED") == ["behind", "far", "late"]
    assert names(call, "--service", "none") == ["idle"]
    assert names(call, "--lane", "l") == ["late"]
    assert names(call, "--match", "ui") == ["quiet"]
    assert call("list", "--only", "lost").code == 2


def test_list_reports_that_there_are_more(call: Caller) -> None:
    said = call("list", "--limit", "2")
    assert [line.split()[0] for line in said.out.splitlines()] == [
        "NAME",
        "looks/done",
        "looks/quiet",
    ]
    assert said.err == "only the first 2 tasks are listed (use --all or --limit)\n"
    assert call("list", "--limit", "2", "--json").document()["more"] is True
    assert call("list", "--limit", "8").err == ""
    assert len(call("list", "--all", "--limit", "2").out.splitlines()) == 9


def test_show_has_all_fields_and_the_reason(call: Caller) -> None:
    lines = dict(line.split(maxsplit=1) for line in call("show", "behind").out.splitlines())
    assert (lines["state"], lines["campaign"], lines["after"]) == ("blocked", "looks", "looks/bad")
    assert lines["why"].startswith("it is behind a failure: looks/bad failed (exit status 4")
    document = call("show", "late", "--json").document()
    assert document["task"]["lane"] == "l"
    assert document["why"].startswith("it is due in 59 min")


def test_show_has_how_each_attempt_ran(call: Caller) -> None:
    document = call("show", "bad", "--json").document()["task"]
    assert document["argv"] == ["sh", "-c", "echo trouble >&2; exit 4"]
    (attempt,) = document["attempts"]
    assert (attempt["attempt"], attempt["outcome"]) == (1, "failed")
    assert (attempt["exit_status"], attempt["signal"]) == (4, None)
    assert document["submitted"] <= attempt["started"] <= attempt["ended"] <= attempt["settled"]
    assert attempt["host"] == socket.gethostname()
    assert attempt["cpu_seconds"] > 0
    assert call("show", "done", "--json").document()["task"]["argv"][:2] == ["sh", "-c"]
    (last,) = call("show", "quiet", "--json").document()["task"]["attempts"]
    assert (last["outcome"], last["exit_status"]) == ("finished", 0)
    assert call("show", "late", "--json").document()["task"]["attempts"] == []
    head, line = call("show", "bad").out.splitlines()[-2:]
    assert head.split()[:5] == ["ATTEMPT", "WORKER", "HOST", "STARTED", "RAN"]
    assert line.split()[:3] == ["1", attempt["worker"], attempt["host"]]
    assert line.endswith("  4     failed   exit status 4: trouble")


def test_result_is_byte_for_byte(call: Caller, tmp_path: Path) -> None:
    assert call("results", "done") == (0, "out\n", "")
    assert call("results", "bytes").out == "\udcff\0"
    assert call("results", "bytes", "--output", str(tmp_path / "r")) == (0, "", "")
    assert (tmp_path / "r").read_bytes() == b"\xff\0"
    document = call("results", "bytes", "--json").document()
    assert (document["result"], document["result_base64"]) == (None, "/wA=")
    assert call("results", "bytes", "--output", str(tmp_path / "no" / "r")).code == 2


def test_result_ends_its_line_on_a_terminal(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call("results", "bytes").out == "\\xff\\x00\n"
    assert call("log", "bytes").out == "\\xff\\x00"
    assert call("results", "done").out == "out\n"
    assert call("results", "quiet").out == ""


def test_task_without_a_result_exits_1_with_the_reason(call: Caller) -> None:
    said = call("results", "bad")
    assert said.code == 1
    assert said.err == (
        "taskyard: task looks/bad has no result, it is FAILED: exit status 4: trouble "
        "(see `taskyard why looks/bad`)\n"
    )
    assert call("results", "late").code == 1


def test_log_has_stdout_and_stderr(call: Caller) -> None:
    assert call("log", "done").out == "out\nerr\n"
    assert call("log", "done", "--stdout").out == "out\n"
    assert call("log", "done", "--stderr").out == "err\n"
    assert call("log", "bad", "--attempt", "1").out == "trouble\n"
    assert call("log", "bytes").out == "\udcff\0"
    assert call("log", "quiet") == (
        0,
        "",
        "task looks/quiet (done): no output\n",
    )
    assert call("log", "idle").err == "task looks/idle (ready): no output\n"
    document = call("log", "done", "--json").document()
    assert (document["attempt"], document["stdout"], document["stderr"]) == (1, "out\n", "err\n")
    missing = call("log", "done", "--attempt", "2")
    text = "taskyard: task looks/done: no attempt 2 (the latest is 1)\n"
    assert (missing.code, missing.err) == (2, text)


def test_why_names_failures_and_dependents(call: Caller) -> None:
    said = call("why", "bad", "far", "idle")
    behind = "it is behind a failure: looks/bad failed (exit status 4: trouble)"
    assert said.code == 0
    assert said.out.splitlines() == [
        "looks/bad: it failed after 1 attempt: exit status 4: trouble; 2 tasks wait for it",
        f"looks/far: {behind}; it waits for looks/behind (BLOCKED)",
        "looks/idle: it is ready, but no worker of its service is connected (service none)",
    ]
    tasks = call("why", "far", "--json").document()["tasks"]
    assert [(task["name"], task["after"]) for task in tasks] == [("far", ["looks/behind"])]


@pytest.mark.parametrize("verb", ["show", "results", "log", "why"])
def test_unknown_name_exits_2(call: Caller, verb: str) -> None:
    said = call(verb, "no\nsuch")
    assert said.code == 2
    assert "unknown task 'no such' (see `taskyard list`)" in said.err.replace("\\n", " ")


def test_workers_are_listed_with_their_slots(call: Caller) -> None:
    header, row = call("workers").out.splitlines()
    columns = ["NAME", "STATE", "SERVICES", "USED", "TASKS", "SEEN", "HOST", "PID", "DIALECT"]
    assert header.split() == [*columns, "FREE"]
    assert "exec, call" in row
    (worker,) = call("workers", "--json").document()["workers"]
    assert worker["services"] == ["exec", "call"]
    assert worker["slots"] == 2
    assert worker["resources_free"] == worker["resources"] != {}
    assert " of " in row
    assert worker["host"] == socket.gethostname()
    assert f" {worker['pid']} " in row
    os.kill(worker["pid"], 0)


def test_name_can_not_play_tricks_with_the_terminal(call: Caller, yard: Yard) -> None:
    trick = "\x1b]0;owned\x07\u202e"
    with InternalClient(state=yard.state) as client:
        client.create(Submission([trick.encode()], [b""], [Terms(service=b"none")]))
    for verb in (["list", "--all"], ["show", trick], ["why", trick], ["results", trick]):
        said = call(*verb)
        assert "\x1b" not in said.out + said.err
        assert "\u202e" not in said.out + said.err
        assert r"\x1b]0;owned\x07\u202e" in said.out + said.err
    call("cancel", trick)


def test_table_that_is_cut_short_is_no_error(yard: Yard) -> None:
    script = f"set -o pipefail; {shlex.join(TASKYARD)} list --all | head -1"
    done = subprocess.run(
        [need("bash"), "-c", script],
        capture_output=True,
        check=False,
        cwd=yard.directory,
        env=environment(),
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_missing_broker_exits_3_within_5_seconds_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / ".taskyard").mkdir()
    code, out, err = run_here(tmp_path, "status")
    assert (code, out) == (3, "")
    waiting, message = err.splitlines()
    start = f"taskyard: broker at ipc://{tmp_path}/.taskyard/broker.sock: no answer since "
    assert waiting.startswith(start)
    assert waiting.endswith("; waiting")
    assert "broker at ipc://" in message
    assert ": no answer within 4.5 s (start one" in message
    assert "`taskyard up`" in message


def test_map_names_its_campaign_to_a_broker_that_is_there_alone(tmp_path: Path) -> None:
    # Both at once, because each waits some seconds for a broker. A broker that is named is not
    # started.
    words = ("--broker", "ipc://none", "--", "echo", "{}")
    with (
        Running(tmp_path, "map", "-q", *words) as quiet,
        Running(tmp_path, "map", *words) as usual,
    ):
        (code, out, err), message = quiet.end(), usual.end()
    assert (code, out) == (3, "")
    assert err.count("\n") == 2  # the outage and the error, no campaign
    err = message[2]
    assert [line.split()[0] for line in err.splitlines()] == ["taskyard:", "taskyard:"]


def test_broker_is_found_by_the_environment(yard: Yard, tmp_path: Path) -> None:
    done = subprocess.run(
        [*TASKYARD, "status", "--json"],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env=environment(TASKYARD_BROKER=yard.broker.endpoint),
    )
    assert done.returncode == 0, done.stderr


def test_state_that_a_broker_has_left_can_be_looked_at(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with running(tmp_path) as left:
        call = Caller(left.state, capsysbinary)
        assert call("submit", "--name", "sad", "--wait", "--", "false").code == 1
        assert call("submit", "--name", "fine", "--wait", "--", "echo", "hi").code == 0
    assert call("status", "--json").document()["counts"]["failed"] == 1
    assert call("why", "sad").out == "sad: it failed after 1 attempt: exit status 1\n"
    assert call("results", "fine").out == "hi\n"
    assert [line.split()[0] for line in call("list").out.splitlines()] == ["NAME", "sad", "fine"]
    assert call("retry", "sad").code == 3


def test_status_counts_tasks_of_no_campaign_last(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with running(tmp_path, worker=False) as yard:
        call = Caller(yard.state, capsysbinary)
        call.submit("alone")
        call.submit("joined", campaign="some")
        rows = [line.split() for line in call("status").out.splitlines()]
    assert rows[4:6] == [
        ["some", "0", "0", "1", "0", "0", "0", "0"],
        ["-", "0", "0", "1", "0", "0", "0", "0"],
    ]
