"""`taskyard map`: a task per line, ordered results, a killed broker."""

from __future__ import annotations

import base64
import signal
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.campaign.shell_lines import line_name
from taskyard.cli.map_output import FutureWindow
from tests.cli.yard import Caller, Yard, running
from tests.kit.processes import Running

if TYPE_CHECKING:
    from pathlib import Path


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_results_come_in_the_order_of_the_input(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "0.3\n0.1\n\n0\n")
    script = 'sleep "$1"; echo "$2: slept $1"'
    words = ["--lines", lines, "--campaign", "order", "--", "sh", "-c", script, "sh", "{}", "{#}"]
    assert call("map", *words) == (
        0,
        "1: slept 0.3\n2: slept 0.1\n3: slept 0\n",
        "campaign order: 3 tasks: 3 done\n",
    )


def test_results_come_as_they_are_completed_if_wanted(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "1\n0\n")
    words = ["--lines", lines, "--as-completed", "--", "sh", "-c", "sleep $1; echo $1", "sh", "{}"]
    assert call("map", *words).out == "0\n1\n"


def test_progress_counts_tasks_whose_results_wait_for_their_turn(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.cli.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr("taskyard.cli.map_output._METER_SECONDS", 0.01)
    script = 'test $1 = 2 && exec touch "$2"; until test -e "$2"; do sleep 0.02; done; sleep 0.3'
    words = ("sh", "-c", script, "sh", "{}", str(tmp_path / "second"), ":::", "1", "2")
    err = call("map", "-q", "--progress", "--campaign", "meter", *words).err
    assert "meter: 1 of 2 done, 1 left" in err
    assert err.endswith("meter: 2 of 2 done\n")
    assert call("map", "-q", "--no-progress", "-P", "1", "--campaign", "meter", *words).err == ""


def test_templates_fill_the_files_of_a_task(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    lines = written(tmp_path / "lines", "a.txt\nb.txt\n")
    assert call("map", "--dry-run", "--lines", lines, "cat").out == "cat a.txt\ncat b.txt\n"
    files = ("--inputs", "{}", "--outputs", "{.}.out")
    outcome = call("map", "--lines", lines, *files, "--campaign", "m", "--", "cp", "{}", "{.}.out")
    assert outcome.code == 1
    first, second = (f"m/{line_name(name)}" for name in ("a.txt", "b.txt"))
    assert f"lines:2 (b.txt): failed: input missing: b.txt ({second})" in outcome.err
    assert (tmp_path / "a.out").exists()
    reason = "it is done (attempt 1): ran because a.out is missing"
    assert call("why", first).out == f"{first}: {reason}\n"
    refused = call("map", "--lines", lines, "--outputs", "{column}", "--", "echo", "{}")
    assert refused.code == 2
    refused = call("map", "--lines", lines, "--outputs", "{}", "--call", "m:f")
    assert 'has "inputs" or "outputs", which are for "argv" only' in refused.err


def test_final_exit_status_is_not_retried(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "3\n4\n5\n")
    options = ("--retries", "1", "--backoff", "0.01s", "--campaign", "final")
    final = ("--final-exit-status", "3", "--final-exit-status", "4")
    words = ("--lines", lines, *options, *final, "--", "sh", "-c", 'exit "$1"', "sh", "{}")
    assert call("map", *words).code == 1
    attempts = [
        call("show", f"final/{line_name(line)}", "--json").document()["task"]["attempt"]
        for line in "345"
    ]
    assert attempts == [1, 1, 2]
    refused = call("map", "--lines", lines, *final, "--call", "m:f")
    assert 'has "final_exit_status", which is for "argv" only' in refused.err
    refused = call("submit", "--final-exit-status", "0", "--", "true")
    assert "must be exit statuses from 1 to 255" in refused.err


def test_templates_fill_directory_variables_and_predecessors(call: Caller, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        call("submit", "--name", f"before-{name}", "--", "true")
    place = ("--cwd", f"{tmp_path}/{{}}", "--env", "X={#}-{}{{}}", "--after", "before-{}")
    show = ("sh", "-c", 'echo "$X $(basename "$PWD")"', "sh", "{}", ":::", "a", "b")
    outcome = call("map", "-q", "--campaign", "place", *place, *show)
    assert outcome.out == "1-a{} a\n2-b{} b\n"
    assert "before-c" in call("map", "-q", "--after", "before-{}", "true", ":::", "c").err
    for option in (("--cwd", "{x}"), ("--env", "X={x}"), ("--after", "{x}")):
        refused = call("map", *option, *show)
        assert (refused.code, "unknown template {x}" in refused.err) == (2, True)


def test_names_are_the_campaign_and_the_number(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "a\nb\n")
    outcome = call("map", "--lines", lines, "--", "echo", "{}")
    campaign = outcome.err.splitlines()[0].removeprefix("campaign ")
    assert campaign.startswith("map-")
    listed = call("list", "--campaign", campaign, "--json").document()["tasks"]
    assert [task["name"] for task in listed] == [f"{campaign}-1", f"{campaign}-2"]


def test_fields_of_a_table_go_to_their_places(call: Caller, tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", 'who,what\nann,"good\nday"\nbob,hi\n')
    words = ["--csv", table, "-q", "--", "echo", "{#}", "{who}:", "{what}!", "${who}", "{}"]
    assert call("map", *words) == (
        0,
        '1 ann: good\nday! ${who} ann,"good\nday"\n2 bob: hi! ${who} bob,hi\n',
        "",
    )


def test_fields_of_objects_go_to_their_places(call: Caller, tmp_path: Path) -> None:
    objects = written(
        tmp_path / "o.jsonl", '{"a": "x y", "n": [1, null]}\n\n{"a": "é", "n": 2.5}\n'
    )
    outcome = call("map", "--jsonl", objects, "-q", "--", "echo", "{a}={n}")
    assert outcome == (0, "x y=[1,null]\né=2.5\n", "")


def test_braces_of_other_languages_pass(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "a b\n")
    words = ["--lines", lines, "-q", "--", "sh", "-c", "echo \"$1\" | awk '{print $2}'", "sh", "{}"]
    assert call("map", *words).out == "b\n"


@pytest.mark.parametrize(
    ("word", "made"),
    [
        ("{.}", "a.d/b.tar"),
        ("{/}", "b.tar.gz"),
        ("{//}", "a.d"),
        ("{/.}", "b.tar"),
        ("x{.}.png", "xa.d/b.tar.png"),
        ("{{name}} {{}} {{.}}", "{name} {} {.}"),
        ("{{{name}}}", "{{name}}"),
        ("{1..9} {a,b} ${name} {print x}", "{1..9} {a,b} ${name} {print x}"),
    ],
)
def test_line_gives_the_parts_of_a_path_and_leaves_other_braces(
    call: Caller, tmp_path: Path, word: str, made: str
) -> None:
    lines = written(tmp_path / "lines", "a.d/b.tar.gz\n")
    outcome = call("map", "--lines", lines, "-q", "--", "echo", word, "{}")
    assert outcome == (0, f"{made} a.d/b.tar.gz\n", "")


def test_path_without_directory_or_extension_has_both_parts(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "b\n.b\n")
    outcome = call("map", "--lines", lines, "-q", "--", "echo", "{.} {/} {//} {/.}")
    assert outcome == (0, "b b . b\n.b .b . .b\n", "")


@pytest.mark.parametrize("word", ["{nope}", "{..x}{a.b}", "{/x}", "{1}", "x{-}y"])
def test_unknown_template_is_refused_before_anything_is_submitted(
    call: Caller, tmp_path: Path, word: str
) -> None:
    lines = written(tmp_path / "lines", "a\n")
    outcome = call("map", "--lines", lines, "--campaign", "nothing", "--", "echo", "{}", word)
    assert (outcome.code, outcome.out) == (2, "")
    assert "unknown template {" in outcome.err
    assert call("wait", "--campaign", "nothing").code == 2


def test_column_with_a_space_is_a_template_where_there_is_one(call: Caller, tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "first name,b\nann,1\n")
    outcome = call("map", "--csv", table, "-q", "--", "echo", "{2} {-2/}{3x}")
    assert "unknown column '3x'" in outcome.err
    outcome = call("map", "--csv", table, "-q", "--", "echo", "{2} {-2/}")
    assert outcome.out == "1 ann\n"
    outcome = call("map", "--csv", table, "-q", "--", "echo", "{first name} {print x} {b}")
    assert outcome == (0, "ann {print x} 1\n", "")


def test_failures_are_reported_and_exit_1(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "0\n3\n0\n")
    script = "echo $1-1; printf $1-2; [ $1 = 0 ] || { echo e1; echo e2; } >&2; exit $1"
    words = ("--lines", lines, "--campaign", "f", "--", "sh", "-c", script, "x", "{}")
    outcome = call("map", *words)
    assert (outcome.code, outcome.out) == (1, "0-1\n0-23-1\n3-20-1\n0-2")
    failure = f"taskyard: {lines}:2 (3): failed: exit status 3: e2 (f/{line_name('3')})"
    assert outcome.err.splitlines() == [
        "e1",
        "e2",
        failure,
        "campaign f: 3 tasks: 2 done, 1 failed",
        "run the same command again to retry them",
    ]
    assert call("map", "-q", *words) == (1, outcome.out, f"{failure}\n")
    assert call("map", "--json", *words).document()["tasks"][1]["stdout"] == "3-1\n3-2"


def test_stdout_of_the_last_failed_attempt_is_printed_part_by_part(call: Caller) -> None:
    script = 'head -c 70000 /dev/zero; echo "try $TASKYARD_ATTEMPT"; exec sleep 600'
    limits = ("--time-limit", "0.2s", "--retries", "1", "--backoff", "0s")
    words = ("--", "sh", "-c", script, "{}", ":::", "a\n" + "b" * 70)
    outcome = call("map", "-q", *limits, *words)
    assert (outcome.code, outcome.out) == (1, "\0" * 70_000 + "try 2\n")
    row = f"row 1 (a\\n{'b' * 27}…{'b' * 29}): failed: time limit of 0.2 s exceeded"
    assert outcome.err.startswith(f"taskyard: {row}")
    assert outcome.err.count("\n") == 1


def test_repeated_map_is_harmless_and_another_one_is_refused(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "a\nb\n")
    words = [
        "--lines",
        lines,
        "--campaign",
        "again",
        "-q",
        "--",
        "sh",
        "-c",
        "echo $1; date +%N",
        "x",
        "{}",
    ]
    first = call("map", *words)
    assert call("map", *words) == first
    other = call("map", *words[:-1], "{}{}")
    assert other.code == 2
    refusal = f"taskyard: task again/{line_name('a')}: exists with another command or campaign"
    assert refusal in other.err
    assert other.err.endswith(" (give another --campaign)\n")
    other = call("map", "--no-wait", *words[:-1], "{}{}")
    assert refusal in other.err


def test_edited_input_runs_only_new_lines(call: Caller, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    script = f'echo "$1" | tee -a {ran}'

    def map_lines(text: str) -> tuple[str, list[str]]:
        ran.write_text("")
        lines = written(tmp_path / "lines", text)
        words = [
            "--lines",
            lines,
            "--campaign",
            "edited",
            "-q",
            "--",
            "sh",
            "-c",
            script,
            "x",
            "{}",
        ]
        outcome = call("map", *words)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out, sorted(ran.read_text().split())

    assert map_lines("a\nb\na\n") == ("a\nb\na\n", ["a", "a", "b"])
    assert map_lines("new\nb\na\n\na\na\n") == ("new\nb\na\na\na\n", ["a", "new"])
    assert map_lines("a\nnew\n") == ("a\nnew\n", [])


def test_number_in_the_command_forbids_editing(call: Caller, tmp_path: Path) -> None:
    words = ["--campaign", "numbered", "-q", "--", "echo", "{#}", "{}"]
    lines = written(tmp_path / "lines", "a\n")
    assert call("map", "--lines", lines, *words).out == "1 a\n"
    lines = written(tmp_path / "lines", "b\na\n")
    outcome = call("map", "--lines", lines, *words)
    assert outcome.code == 2
    assert f"task numbered/{line_name('a')}: exists with another command" in outcome.err
    assert "; {#} is a part of the command, and changes when lines are inserted" in outcome.err


def test_numbered_campaign_is_resumed_by_number(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "a\na\n")
    words = ["--", "sh", "-c", "echo {}; date +%N"]
    first = call("map", "--lines", lines, *words)
    campaign = first.err.splitlines()[0].removeprefix("campaign ")
    (tmp_path / "lines").write_text("a\na\nb\n")
    again = call("map", "--lines", lines, "--campaign", campaign, "-q", *words)
    assert again.out.startswith(first.out)
    listed = call("list", "--campaign", campaign, "--json").document()["tasks"]
    assert [task["name"] for task in listed] == [f"{campaign}-{number}" for number in (1, 2, 3)]
    (tmp_path / "lines").write_text("b\na\n")
    refused = call("map", "--lines", lines, "--campaign", campaign, *words)
    assert f"task {campaign}/{campaign}-1: exists with another command" in refused.err
    assert "numbered, so lines can only be added at the end" in refused.err


def test_blocks_of_stdin_reach_the_command_exactly(call: Caller, tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + bytes(range(256)) * 4 + b"\r\n" + "é\n".encode() * 300 + b"end"
    (tmp_path / "input").write_bytes(content)
    words = ["--lines", str(tmp_path / "input"), "--pipe", "--block", "256", "--campaign", "blocks"]
    document = call("map", *words, "--json", "--", "base64", "-w0").document()
    blocks = [base64.b64decode(task["result"]) for task in document["tasks"]]
    assert b"".join(blocks) == content
    assert len(blocks) > 3
    outcome = call("map", *words[:-2], "-q", "--", "cat")
    assert outcome.out.encode(errors="surrogateescape") == content
    assert call("map", *words, "--no-wait", "--", "base64", "-w0").code == 0
    assert call("status", "--campaign", "blocks", "--json").document()["counts"]["done"] == len(
        blocks
    )


def test_file_named_by_a_line_reaches_stdin(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "a b").write_bytes(b"one\xff\n")
    words = ["--stdin", "--cwd", str(tmp_path), "--campaign", "files", "--", "cat", ":::", "a b"]
    outcome = call("map", *words, "none")
    assert (outcome.code, outcome.out) == (1, "one\udcff\n")
    assert "failed: can't read stdin from none: No such file or directory" in outcome.err


def test_array_has_its_index_in_the_environment(call: Caller) -> None:
    words = ["--array", "0-15:5", "--env", "A=b", "-q", "--"]
    outcome = call("map", *words, "sh", "-c", "echo $A $TASKYARD_ARRAY_INDEX {} {#}")
    assert outcome == (0, "b 0 0 1\nb 5 5 2\nb 10 10 3\nb 15 15 4\n", "")


def test_lists_run_as_typed(call: Caller) -> None:
    assert call("map", "-q", "echo", ":::", "a b", "c", ":::", "-n") == (0, "a b -n\nc -n\n", "")


def test_pipe_gets_the_exact_bytes_and_tagged_lines_are_ended(call: Caller) -> None:
    words = ("printf", "%s", ":::", "a", "b\n", "c")
    assert call("map", "-q", *words).out == "ab\nc"
    assert call("map", "-q", "--tag", *words).out == "a\ta\nb\n\tb\nc\tc\n"


def test_names_that_end_with_nul_may_have_newlines(call: Caller, tmp_path: Path) -> None:
    names = written(tmp_path / "names", "a\nb\0 \0c\r\0")
    outcome = call("map", "-0", "--lines", names, "-q", "--", "echo", "<{}>")
    assert outcome == (0, "<a\nb>\n< >\n<c\r>\n", "")


def test_no_wait_only_submits(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "a\nb\n")
    words = [
        "--lines",
        lines,
        "--campaign",
        "later",
        "--due",
        "1h",
        "--no-wait",
        "--",
        "echo",
        "{}",
    ]
    assert call("map", *words) == (0, "", "campaign later: 2 tasks submitted\n")
    assert call("status", "--campaign", "later", "--json").document()["counts"]["delayed"] == 2
    document = call("map", "--json", *words).document()
    assert (document["campaign"], document["submitted"]) == ("later", 2)
    call("cancel", "--campaign", "later")
    words[words.index("--no-wait")] = "--no-retry-failed"
    assert call("map", *words).code == 5


def test_call_gets_the_line_or_the_values_of_places(call: Caller, tmp_path: Path) -> None:
    objects = written(tmp_path / "o.jsonl", '{"a": 1}\n')
    words = ["--jsonl", objects, "--campaign", "calls", "--no-wait", "-q", "--call", "m:f"]
    assert call("map", *words, "{}", "{a}", "{#}", "[0]").code == 0
    name = line_name('{"a":1}')
    words = ["--campaign", "calls", "--name", name, "--call", "m:f", '{"a":1}', "1", "1", "[0]"]
    assert call("submit", *words).err == f"task calls/{name} exists already: nothing submitted\n"


def test_call_gets_the_values_of_json_lines(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", '[1, 2.5]\n\n7\n{"a": null}\n"text"\n')
    words = ["--lines", lines, "--json-lines", "--campaign", "values", "--no-wait", "-q"]
    assert call("map", *words, "--call", "m:f").code == 0
    for value in ("[1, 2.5]", "7", '{"a": null}', '"text"'):
        name = line_name(value)
        known = call("submit", "--campaign", "values", "--name", name, "--call", "m:f", value)
        assert known.err == f"task values/{name} exists already: nothing submitted\n"


def test_json_lines_that_make_no_sense_are_refused(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "1\nword\n")
    outcome = call("map", "--lines", lines, "--json-lines", "--call", "m:f", "--no-wait")
    assert outcome.code == 2
    assert "lines:2: not valid JSON" in outcome.err
    outcome = call("map", "--lines", lines, "--json-lines", "--", "echo", "{}")
    assert "--json-lines needs --call" in outcome.err
    outcome = call("map", "--csv", lines, "--json-lines", "--call", "m:f")
    assert "--json-lines works with --lines, stdin or lists, not with --csv" in outcome.err


def test_tasks_may_wait_for_one_that_is_there_or_will_be(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "a\nb\n")
    words = ["--lines", lines, "-q", "--no-wait", "--after", "signal"]
    refused = call("map", *words, "--", "echo", "{}").err
    assert "unknown predecessor signal (submit it first" in refused
    assert refused.endswith("; --wait-for-unknown accepts it\n")
    words += ["--wait-for-unknown", "--campaign", "signalled"]
    assert call("map", *words, "--", "echo", "{}").code == 0
    call("submit", "--name", "signal", "--", "true")
    assert call("wait", "-q", "--campaign", "signalled") == (0, "", "")


def test_payload_has_places_too(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "x\n")
    words = ["--lines", lines, "--campaign", "pay", "--no-wait", "-q", "--payload", "<{}>"]
    assert call("map", *words).code == 0
    name = line_name("x")
    known = call("submit", "--campaign", "pay", "--name", name, "--payload", "<x>")
    assert known.err.startswith(f"task pay/{name} exists already")


def test_document_has_every_task(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "0\n1\n")
    words = ["--lines", lines, "--campaign", "d", "--json", "--", "sh", "-c", "exit $1", "x", "{}"]
    document = call("map", *words).document()
    done, failed = line_name("0"), line_name("1")
    assert document["tasks"] == [
        {"name": done, "campaign": "d", "state": "done", "result": "", "truncated": False},
        {
            "name": failed,
            "campaign": "d",
            "state": "failed",
            "reason": f"task d/{failed} failed: exit status 1",
        },
    ]
    assert document["counts"] == {"done": 1, "failed": 1}
    assert document["truncated"] == 0


def test_long_result_is_whole(call: Caller, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines", "5\n1100000\n")
    words = ["--lines", lines, "--campaign", "t", "--", "head", "-c", "{}", "/dev/zero"]
    outcome = call("map", *words)
    assert (outcome.code, outcome.out) == (0, "\0" * 1_100_005)
    assert outcome.err == "campaign t: 2 tasks: 2 done\n"
    document = call("map", "--json", *words).document()
    assert document["truncated"] == 0
    assert [len(task["result"]) for task in document["tasks"]] == [5, 1_100_000]


@pytest.mark.parametrize(
    ("kind", "content", "words", "message"),
    [
        ("csv", "a\n1\n", "echo", "add {} for the line"),
        ("lines", "a\n\xff", "echo {}", "lines:2: not valid UTF-8"),
        ("csv", "a,b\n1\n", "echo {a}", "csv:2: 1 cells, but the header has 2"),
        ("csv", "a,b\n1,2\n", "echo {c}", "csv:2: unknown column 'c' (columns: 'a', 'b')"),
        ("csv", "a,a\n1,2\n", "echo {a}", "csv:1: duplicate column 'a'"),
        ("csv", 'a\n"1', "echo {a}", "csv:2: not valid CSV"),
        ("jsonl", "{}\n[1]\n", "echo {}", "jsonl:2: not a JSON object"),
        ("lines", "a\n", "--call m:f x{}", "neither valid JSON nor a single template"),
    ],
)
def test_bad_input_is_reported_with_its_location(  # noqa: PLR0913  # a table
    call: Caller, tmp_path: Path, *, kind: str, content: str, words: str, message: str
) -> None:
    path = tmp_path / kind
    path.write_bytes(content.encode("latin-1"))
    outcome = call("map", f"--{kind}", str(path), *words.split())
    assert outcome.code == 2
    assert message in outcome.err


def test_bad_line_cancels_the_tasks_before_it_unless_the_campaign_is_named(
    call: Caller, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_bytes(b"a\nb\n\xff\nc\n")
    words = ("--lines", str(tmp_path / "lines"), "--due", "1h")
    for how in ("--wait", "--no-wait"):
        code, _, err = call("map", *words, how, "--", "echo", "{}")
        assert (code, err.splitlines()[1]) == (2, "cancelled 2 tasks")
    code, _, err = call("map", *words, "--campaign", "bad", "--", "echo", "{}")
    cancel = "`taskyard cancel --campaign bad` cancels them"
    kept = f"campaign bad: 2 unfinished tasks: {cancel}, the same command resumes"
    assert (code, err.splitlines()[0]) == (2, kept)
    code, _, err = call("map", "--campaign", "none", "--after", "nope", "echo", ":::", "a")
    assert (code, len(err.splitlines())) == (2, 1)


def test_file_that_is_not_there_and_two_files_are_refused(call: Caller, tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    assert f"{none}: No such file" in call("map", "--lines", none, "--", "echo", "{}").err
    assert call("map", "--lines", none, "--csv", none, "--", "echo", "{}").code == 2


def test_line_is_run_before_the_next_one_is_written(yard: Yard) -> None:
    with Running(yard.directory, "map", "--", "echo", "got", "{}") as mapping:
        for word in ("one", "two"):
            mapping.write(f"{word}\n")
            assert mapping.line() == f"got {word}"
        mapping.hang_up()
        assert mapping.end()[0] == 0


def test_resumed_map_reports_options_that_earlier_tasks_keep(call: Caller) -> None:
    words = ("--campaign", "kept", "--", "sh", "-c", "test {} = good", ":::", "good", "bad")
    limits = ("--time-limit", "1m", "--memory", "1G", "--priority", "3")
    kept = "of earlier tasks stay as they were"
    assert kept not in call("map", *limits, *words).err
    assert kept not in call("map", *limits, *words).err
    err = call("map", "--time-limit", "2m", "--cpus", "1", "--priority", "3", *words).err
    assert err.startswith(f"campaign kept: --time-limit, --cpus, --memory {kept} (change waiting")


def test_interrupted_map_prints_how_to_resume(yard: Yard) -> None:
    with Running(yard.directory, "map", "--campaign", "cut", "--", "echo", "{}") as mapping:
        mapping.write("one\n")
        mapping.line()
        code, _, err = mapping.send(signal.SIGINT).end()
    assert code == 130
    assert err.strip().startswith("taskyard: interrupted")
    assert "`taskyard cancel --campaign cut` cancels them, the same command resumes" in err
    assert "Traceback" not in err


def test_reader_that_stops_leaves_the_tasks_to_a_lasting_broker(yard: Yard) -> None:
    with Running(yard.directory, "map", "-q", "--campaign", "read", "--", "echo", "{}") as mapping:
        mapping.write("one\n")
        assert mapping.line() == "one"
        assert mapping.process.stdout is not None
        mapping.process.stdout.close()
        mapping.write("two\n" * 3)
        mapping.hang_up()
        code, _, err = mapping.end()
    assert code == 141
    assert err.startswith("taskyard: stdout was closed; submitted tasks continue: `taskyard cancel")


def test_stopped_map_waits_for_running_tasks_of_a_broker_that_continues(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = '[ "$0" != bad ] || exit 1; sleep 0.4; echo "$0"'
    limits = ("--max-failures", "1", "--finish-running")
    words = ("sh", "-c", script, ":::", "a", "bad", *"cdefghijk")
    # A worker of its own: one with quick tasks before holds tasks beyond its slots.
    with running(tmp_path) as yard:
        call = Caller(yard.state, capsysbinary)
        outcome = call("map", "--campaign", "stopped", *limits, *words)
    done = len(outcome.out.splitlines())
    assert (outcome.code, done > 0) == (1, True)
    reason, cancelled, waiting, failure, summary, _retry = outcome.err.splitlines()
    assert reason.startswith("taskyard: stopped: 1 task failed (--max-failures)")
    assert cancelled == f"cancelled {10 - done} tasks"
    assert waiting == "waiting for running tasks (Ctrl-C leaves them)"
    assert failure.startswith("taskyard: row 2 (bad): failed: exit status 1")
    counts = f"{done} done, 1 failed, {10 - done} cancelled"
    assert summary == f"campaign stopped: 11 tasks: {counts}"


def test_broker_that_is_killed_in_the_middle_loses_and_doubles_nothing(tmp_path: Path) -> None:
    lines = 600
    (tmp_path / "lines").write_text("".join(f"{number}\n" for number in range(lines)))
    script = "echo $1 >> ran; echo $1"
    words = ["map", "--lines", "lines", "-q", "--", "sh", "-c", script, "sh", "{}"]
    with running(tmp_path) as yard, Running(tmp_path, *words) as mapping:
        first = [mapping.line() for _ in range(200)]
        yard.kill_broker()
        yard.start_broker()
        assert mapping.process.stdout is not None
        rest = mapping.process.stdout.read().split()
        assert mapping.end()[0] == 0
    assert [int(line) for line in (*first, *rest)] == list(range(lines))
    ran = (tmp_path / "ran").read_text().split()
    assert sorted(map(int, ran)) == list(range(lines))


def test_window_finishes_the_current_line_on_exit_and_delivers_no_more() -> None:
    delivered: list[Any] = []
    is_writing, may_go_on = threading.Event(), threading.Event()

    def on_settled(future: Any) -> None:
        is_writing.set()
        may_go_on.wait()
        delivered.append(future.result())

    futures: list[Any] = [Future(), Future()]
    with FutureWindow(on_settled, lambda: None, in_order=False) as window:
        for future in futures:
            window.add(future)
        futures[0].set_result("one")
        is_writing.wait()
        threading.Timer(0.05, may_go_on.set).start()
    assert delivered == ["one"]
    futures[1].set_result("two")
    assert delivered == ["one"]
    assert window.added == 2
