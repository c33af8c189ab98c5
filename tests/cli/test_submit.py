"""`taskyard submit`: names, options, results, refusals."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.core.limits import BLOB_BYTES_MIN
from tests.cli.yard import Caller, Yard
from tests.kit.processes import TASKYARD

if TYPE_CHECKING:
    from pathlib import Path


def test_name_is_printed_when_the_broker_has_the_task(call: Caller) -> None:
    assert call("submit", "--name", "plain", "--", "true") == (0, "plain\n", "")
    assert call("show", "plain").code == 0


def test_generated_name_starts_with_the_campaign(call: Caller) -> None:
    assert call("submit", "--", "true").out.startswith("task-")
    assert call("submit", "--campaign", "week-7", "--", "true").out.startswith("week-7/week-7-")


def test_options_of_the_command_are_passed_on_without_dashes(call: Caller) -> None:
    assert call("submit", "--wait", "sh", "-c", "echo $0", "--wait") == (0, "--wait\n", "")


def test_wait_prints_the_result_as_it_is(call: Caller) -> None:
    outcome = call("submit", "--wait", "--", "printf", r"a\0\377b")
    assert outcome == (0, "a\0\udcffb", "")


def test_wait_ends_the_line_of_the_result_on_a_terminal(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call("submit", "--wait", "--", "printf", "open").out == "open\n"
    assert call("submit", "--wait", "--", "echo", "ended").out == "ended\n"


def test_wait_for_a_failure_prints_the_reason_and_exits_1(call: Caller) -> None:
    outcome = call("submit", "--wait", "--name", "sad", "--", "sh", "-c", "echo oh >&2; exit 3")
    assert outcome == (1, "", "taskyard: task sad: it failed after 1 attempt: exit status 3: oh\n")


def test_wait_for_a_cancelled_task_exits_5(call: Caller) -> None:
    call("submit", "--name", "late", "--due", "1h", "--", "true")
    call("cancel", "late")
    outcome = call("submit", "--name", "late", "--wait", "--due", "1h", "--", "true")
    assert outcome.code == 5
    assert "cancelled" in outcome.err


def test_wait_behind_a_failure_exits_1(call: Caller) -> None:
    call("submit", "--name", "broken", "--", "false")
    outcome = call("submit", "--after", "broken", "--wait", "--", "true")
    assert outcome.code == 1
    assert "behind a failure" in outcome.err
    assert "broken failed (exit status 1)" in outcome.err


def test_function_gets_its_arguments_as_json(call: Caller) -> None:
    outcome = call("submit", "--call", "operator:add", "--name", "sum", "20", "22")
    assert outcome == (0, "sum\n", "")
    # This worker allows no module, so the error shows the call as it arrived.
    assert (
        "operator"
        in call("submit", "--name", "sum", "--call", "operator:add", "--wait", "20", "22").err
    )


def test_argument_that_is_not_json_is_reported_with_the_right_form(call: Caller) -> None:
    outcome = call("submit", "--call", "imaging:thumbnail", "a.png")
    assert outcome.code == 2
    assert (
        "argument 1 of the call: 'a.png' is not valid JSON (a string is written '\"a.png\"')"
        in outcome.err
    )


def test_payload_comes_from_a_file(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\0\1")
    for payload, name in (("text", "p1"), (f"@{tmp_path / 'data'}", "p2")):
        assert call("submit", "--name", name, "--payload", payload).out == f"{name}\n"
    assert call("submit", "--name", "p1", "--payload", "text").err.startswith("task p1 exists")
    assert call("submit", "--payload", f"@{tmp_path / 'none'}").code == 2
    assert call("show", "p2", "--json").document()["task"]["service"] == "default"


def test_terms_reach_the_broker(call: Caller) -> None:
    options = ["--name", "rich", "--service", "gpu", "--lane", "l", "--priority", "7"]
    options += ["--slots", "3", "--campaign", "terms", "--due", "1h", "--expiry", "2h"]
    options += ["--retries", "[1, 2]", "--backoff", "5s", "--time-limit", "90s"]
    options += ["--cpus", "2", "--memory", "4G", "--gpus", "0.5", "--resource", "license=1"]
    assert call("submit", *options, "--env", "A=b=c", "--cwd", ".", "--", "true").code == 0
    task = call("show", "rich", "--json").document()["task"]
    shown = {
        key: task[key] for key in ("service", "lane", "priority", "slots", "campaign", "state")
    }
    assert task["resources"] == {"cpus": 2, "gpus": 0.5, "license": 1, "memory": 4 << 30}
    assert "2 cpus, 0.5 gpus, 1 license and 4 GiB of memory" in call("show", "rich").out
    assert shown == {
        "service": "gpu",
        "lane": "l",
        "priority": 7,
        "slots": 3,
        "campaign": "terms",
        "state": "delayed",
    }
    assert 3590 < task["due"] - task["submitted"] < 3610


def test_environment_reaches_the_command(call: Caller) -> None:
    outcome = call(
        "submit", "--wait", "--env", "GREETING=hi there", "--", "sh", "-c", "echo $GREETING"
    )
    assert outcome.out == "hi there\n"


def test_command_runs_in_the_directory_of_the_submitter(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    assert call("submit", "--wait", "--name", "here", "--", "pwd").out == f"{tmp_path}\n"
    assert call("submit", "--wait", "--cwd", "sub", "--", "pwd").out == f"{tmp_path}/sub\n"
    assert call("submit", "--wait", "--no-env", "--", "pwd").out == f"{tmp_path}\n"
    monkeypatch.chdir(tmp_path / "sub")  # the first stays, and is not compared
    assert call("submit", "--wait", "--name", "here", "--", "pwd").out == f"{tmp_path}\n"
    assert str(tmp_path) not in call("show", "here", "--json").out


def test_variables_of_the_submitter_are_chosen_by_options(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Mars")
    monkeypatch.setenv("SECRET", "s3cret")
    echo = ("--", "sh", "-c", "echo ${TZ-none} ${SECRET-none}")
    assert call("submit", "--wait", *echo).out == "Mars none\n"
    assert call("submit", "--wait", "--env", "SECRET", *echo).out == "Mars s3cret\n"
    assert call("submit", "--wait", "--env-all", *echo).out == "Mars s3cret\n"
    assert call("submit", "--wait", "--no-env", *echo).out != "Mars none\n"
    assert call("submit", "--wait", "--env", "SECRET", "--env", "TZ=UTC", *echo).out == (
        "UTC s3cret\n"
    )
    refused = call("submit", "--env-all", "--no-env", "--", "true")
    assert refused.code == 2
    assert "exclude each other" in refused.err
    unset = call("submit", "--env", "NO_SUCH", "--", "true")
    assert (unset.code, unset.err) == (
        2,
        "taskyard: variable NO_SUCH: not set (give NO_SUCH=VALUE)\n",
    )


def test_known_task_that_is_cancelled_says_how_to_run_it_again(call: Caller) -> None:
    words = ("--name", "ended", "--", "true")
    call("submit", "--due", "1h", *words)
    call("cancel", "ended")
    assert call("submit", *words).err == (
        "task ended exists already: nothing submitted "
        "(it is cancelled: `taskyard run` with the same words runs it again)\n"
    )
    assert call("run", *words).code == 0
    assert call("why", "ended").out == "ended: it is done (attempt 1)\n"


def test_known_task_is_harmless_with_the_same_command_alone(call: Caller) -> None:
    call("submit", "--name", "twice", "--", "true")
    again = call("submit", "--name", "twice", "--", "true")
    assert again == (0, "twice\n", "task twice exists already: nothing submitted\n")
    other = call("submit", "--name", "twice", "--", "false")
    assert other.code == 2
    told = "taskyard: task twice: exists with another {} or campaign (give another --name)\n"
    assert other.err == told.format("command")
    other = call("submit", "--name", "twice", "--call", "m:f")
    assert other.err == told.format("call")
    other = call("submit", "--name", "twice", "--payload", "x")
    assert other.err == told.format("payload")


def test_unknown_dependency_is_refused_by_default(call: Caller) -> None:
    refused = call("submit", "--after", "ghost", "--", "true")
    assert refused.code == 2
    assert refused.err == (
        "taskyard: unknown predecessor ghost (submit it first, or in the same batch); "
        "--wait-for-unknown accepts it\n"
    )
    taken = call(
        "submit", "--name", "hopes", "--after", "ghost", "--wait-for-unknown", "--", "true"
    )
    assert taken.code == 0
    assert call("why", "hopes").out == "hopes: it waits for 1 task: ghost (not submitted)\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "missing work"),
        (["--payload", "x", "--", "true"], "--payload excludes a command"),
        (["--payload", "x", "--call", "a:b"], "exclude each other"),
        (["--due", "soon", "--", "true"], "submit: --due: must be a time"),
        (["--retries", "many", "--", "true"], "submit: --retries: must be a number"),
        (["--env", "=A", "--", "true"], "expected NAME[=VALUE]"),
        (["--name", "", "--", "true"], "submit: --name: must not be empty"),
        (["--name", "a\nb", "--", "true"], "submit: --name: "),
        (["--backoff", "1s", "--", "true"], '"backoff" without "retries"'),
    ],
)
def test_wrong_usage_is_reported_and_exits_2(call: Caller, words: list[str], told: str) -> None:
    outcome = call("submit", *words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert told in outcome.err


def test_documents_have_name_and_state(call: Caller) -> None:
    document = call("submit", "--name", "doc", "--json", "--", "true").document()
    assert document == {
        "version": 1,
        "document": "submit",
        "name": "doc",
        "campaign": "",
        "new": True,
    }
    waited = call("submit", "--name", "doc2", "--json", "--wait", "--", "echo", "é").document()
    assert (waited["state"], waited["result"]) == ("done", "é\n")
    failed = call("submit", "--name", "doc3", "--json", "--wait", "--", "false").document()
    assert (failed["state"], "exit status 1" in failed["reason"]) == ("failed", True)


@pytest.mark.parametrize("size", [BLOB_BYTES_MIN - 1, BLOB_BYTES_MIN, 1_100_000])
def test_result_of_any_length_is_whole(call: Caller, tmp_path: Path, size: int) -> None:
    made, name = ["head", "-c", str(size), "/dev/zero"], f"long-{size}"
    expected = (0, "\0" * size, "")
    assert call("submit", "--wait", "--name", name, "--", *made) == expected
    for verb in ("results", "log"):
        assert call(verb, name) == expected
    document = call("results", name, "--json").document()
    assert (document["truncated"], document["result"]) == (False, "\0" * size)
    assert call("log", name, "--json").document()["stdout"] == "\0" * size
    again = call("submit", "--wait", "--name", name, "--json", "--", *made)
    assert (again.code, again.document()["result"]) == (0, "\0" * size)
    assert call("results", name, "--output", str(tmp_path / "copy")).code == 0
    assert (tmp_path / "copy").read_bytes() == bytes(size)


WARNING = (
    "taskyard: warning: stdin is not passed to the task: name a file in the command, or add "
    "</dev/null to silence this\n"
)


def submit_cat(yard: Yard, *options: str, **stdin: Any) -> tuple[int, str, str]:
    """Submit `cat` and wait for its output."""
    words = [*TASKYARD, "submit", "--state", str(yard.state), "--wait", *options, "--", "cat"]
    outcome = subprocess.run(words, text=True, capture_output=True, check=False, **stdin)
    return outcome.returncode, outcome.stdout, outcome.stderr


def test_input_that_does_not_reach_the_task_is_warned_of(yard: Yard, tmp_path: Path) -> None:
    assert submit_cat(yard, input="hi") == (0, "", WARNING)
    assert submit_cat(yard, "--quiet", input="hi") == (0, "", "")
    (tmp_path / "file").write_text("hi")
    with (tmp_path / "file").open() as file:
        assert submit_cat(yard, stdin=file) == (0, "", WARNING)


def test_no_input_is_no_warning_and_is_not_waited_for(yard: Yard) -> None:
    assert submit_cat(yard, stdin=subprocess.DEVNULL) == (0, "", "")
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing):
        assert submit_cat(yard, stdin=pipe) == (0, "", "")


def test_loop_over_a_file_submits_each_line_without_a_warning(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a\nb\nc\n")
    program = shlex.join([*TASKYARD, "submit", "--state", str(yard.state)])
    loop = f'while read -r name; do {program} --name "of-$name" -- true; done < list'
    outcome = subprocess.run(
        ["/bin/sh", "-c", loop], cwd=tmp_path, text=True, capture_output=True, check=True
    )
    assert (outcome.stdout, outcome.stderr) == ("of-a\nof-b\nof-c\n", "")


def test_name_that_was_forgotten_is_not_taken_from_the_dashes(call: Caller) -> None:
    outcome = call("submit", "--name", "--", "echo", "hi")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--name: missing value" in outcome.err
