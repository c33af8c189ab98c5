"""`taskyard load`: dry runs, rejected lines, repeated loading, waiting."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from taskyard.cli import spark_load as pipeline_load
from taskyard.cli.entry import run, taskyard
from tests.cli.yard import Caller

OK = """\
{"name": "%s-a", "argv": ["echo", "a"]}
{"name": "%s-b", "argv": ["echo", "b"], "after": ["%s-a"]}
{"name": "%s-c", "argv": ["echo", "c"], "after": ["%s-a", "%s-b"]}
"""

BAD = """\
{"name": "a", "argv": ["true"], "after": ["b"]}
{"name": "b", "argv": ["true"], "after": ["a"]}
{"name": "c", "argv": ["true"]}
{"name": "c", "argv": ["true"]}
{"name": "d", "argv": ["true"], "after": ["stranger"]}
{"nom": "e"}
"""


def good(tmp_path: Path, prefix: str) -> str:
    path = tmp_path / f"{prefix}.jsonl"
    path.write_text(OK.replace("%s", prefix))
    return str(path)


def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.jsonl"
    path.write_text(BAD)
    return str(path)


def test_dry_run_needs_no_broker_and_counts(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    none = Caller(tmp_path / "none", capsysbinary)
    outcome = none("load", good(tmp_path, "dry"), "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    counts = dict(line.split(maxsplit=1) for line in outcome.out.splitlines()[1:])
    assert counts == {
        "tasks": "3",
        "edges": "3",
        "roots": "1",
        "depth": "3",
        "width": "1 (on level 1)",
        "services": "exec 3",
        "unknown": "0",
        "duplicates": "0",
        "cycles": "0",
    }
    document = none("load", good(tmp_path, "dry"), "--dry-run", "--json").document()
    assert (document["tasks"], document["depth"], document["rejected_lines"]) == (3, 3, 0)


def test_dry_run_of_a_bad_file_exits_2_and_reports_every_line(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    none = Caller(tmp_path / "none", capsysbinary)
    file = bad(tmp_path)
    outcome = none("load", file, "--dry-run")
    assert outcome.code == 2
    message = [line.partition(": ")[0] for line in outcome.err.splitlines()]
    assert message == [f"{file}:{line}" for line in (1, 2, 4, 5, 6)] + ["taskyard"]
    assert outcome.err.endswith(": 5 bad lines, nothing submitted\n")
    document = none("load", file, "--dry-run", "--json").document()
    assert [one["line"] for one in document["rejected"]] == [1, 2, 4, 5, 6]
    assert document["cycles"] == [["a", "b"]]
    taken = none("load", file, "--dry-run", "--json", "--wait-for-unknown").document()
    assert [one["line"] for one in taken["rejected"]] == [1, 2, 4, 6]


def test_dry_run_that_skips_bad_lines_counts_them_and_exits_0(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    none = Caller(tmp_path / "none", capsysbinary)
    file = bad(tmp_path)
    outcome = none("load", file, "--dry-run", "--skip-bad")
    assert outcome.code == 0
    *lines, last = outcome.err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{file}:{n}" for n in (1, 2, 4, 5, 6)]
    assert last == "5 bad lines would be skipped and 1 task submitted"
    outcome = none("load", file, "--dry-run", "--skip-bad", "--json")
    assert (outcome.code, outcome.document()["rejected_lines"]) == (0, 5)
    assert [one.name for one in tmp_path.iterdir()] == ["bad.jsonl"]


def test_dry_run_that_skips_bad_rows_exits_0_in_the_pipeline_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replace the Spark job, so that only the command is under test."""
    validation = SimpleNamespace(rows=[0, 1])
    checked = SimpleNamespace(
        revalidate=lambda existing: None,  # noqa: ARG005
        rejects=["x:3: bad"],
        validation=validation,
    )
    monkeypatch.setattr(pipeline_load, "_spark", lambda *_: nullcontext())
    job = importlib.import_module("taskyard.pipeline.jobs.load")
    monkeypatch.setattr(job, "read", lambda *_, **__: checked)
    monkeypatch.setattr(pipeline_load, "_print", lambda *_: None)
    words = ["load", "--spark", "local[1]", good(tmp_path, "rows"), "--dry-run"]
    assert run(taskyard, words) == 2
    assert run(taskyard, [*words, "--skip-bad"]) == 0
    last = "x:3: bad\n1 bad row would be skipped and 2 tasks submitted\n"
    assert capsys.readouterr().err.endswith(last)


def test_many_bad_lines_are_counted(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "many.jsonl").write_text("{}\n" * 100)
    none = Caller(tmp_path / "none", capsysbinary)
    lines = none("load", str(tmp_path / "many.jsonl"), "--dry-run").err.splitlines()
    assert len(lines) == 23
    assert lines[20] == "… and 80 more"
    assert "read as JSONL, because its name ends in .jsonl" in lines[21]  # no line is good


def test_file_is_loaded_and_loading_it_again_is_harmless(call: Caller, tmp_path: Path) -> None:
    file = good(tmp_path, "twice")
    assert call("load", file) == (0, "campaign twice: 3 tasks: 3 new, 0 existing\n", "")
    assert call("wait", "--campaign", "twice").code == 0
    assert call("load", file) == (0, "campaign twice: 3 tasks: 0 new, 3 existing\n", "")
    document = call("load", file, "--json").document()
    assert (document["new"], document["existing"], document["campaign"]) == (0, 3, "twice")


def test_wait_lasts_until_all_tasks_have_settled(call: Caller, tmp_path: Path) -> None:
    outcome = call("load", good(tmp_path, "waits"), "--campaign", "w", "--wait")
    assert outcome == (
        0,
        "",
        "campaign w: 3 tasks: 3 new, 0 existing\ncampaign w: 3 tasks: 3 done\n",
    )
    document = call(
        "load", good(tmp_path, "waits"), "--campaign", "w", "--wait", "--json"
    ).document()
    assert (document["existing"], document["counts"]["done"]) == (3, 3)
    failing = tmp_path / "failing.jsonl"
    failing.write_text('{"name": "fails", "argv": ["false"]}\n')
    assert call("load", str(failing), "--wait").code == 1


def test_nothing_of_a_bad_file_is_submitted_unless_bad_lines_are_skipped(
    call: Caller, tmp_path: Path
) -> None:
    file = bad(tmp_path)
    assert call("load", file).code == 2
    assert call("list", "--campaign", "bad").code == 2
    outcome = call("load", file, "--skip-bad")
    assert (outcome.code, outcome.out) == (0, "campaign bad: 1 task: 1 new, 0 existing\n")
    assert f"see {file}.rejected.jsonl" in outcome.err


def test_unknown_dependencies_can_be_accepted(call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "hopes.jsonl"
    file.write_text('{"name": "hopes", "argv": ["true"], "after": ["later"]}\n')
    refused = call("load", str(file))
    assert refused.code == 2
    assert f"{file}:1: waits for 'later', which neither the file nor the broker has" in refused.err
    assert call("load", str(file), "--wait-for-unknown").code == 0
    call("submit", "--name", "later", "--", "true")
    assert call("wait", "hopes").code == 0


def test_replay_sleeps_instead(call: Caller) -> None:
    options = ["--replay", "--speedup", "1000", "--campaign", "replay", "--wait"]
    assert call("load", "examples/workflow.json", *options).code == 0
    assert call("load", "examples/first.jsonl", "--replay").code == 2


def cmds(tmp_path: Path, content: str, name: str = "cmds.txt") -> str:
    (tmp_path / name).write_text(content)
    return str(tmp_path / name)


def test_shell_commands_are_detected_counted_and_run(call: Caller, tmp_path: Path) -> None:
    file = cmds(tmp_path, "# jobs\n\necho a | tr a b\necho 'it''s'\necho a | tr a b\n")
    outcome = call("load", file, "--dry-run")
    assert outcome.out.startswith(f"{file}: shell commands\n  tasks       3\n")
    assert outcome.out.endswith("  skipped     1 blank line and 1 comment\n")
    document = call("load", file, "--dry-run", "--json").document()
    facts = [document[key] for key in ("format", "skipped_blank", "skipped_comments")]
    assert facts == ["shell", 1, 1]
    outcome = call("load", file, "--wait")
    begin = f"{file}: shell commands, 3 tasks (skipped 1 blank line and 1 comment)\n"
    assert (outcome.code, outcome.err.startswith(begin)) == (0, True)
    tasks = call("list", "--campaign", "cmds", "--json").document()["tasks"]
    results = [call("results", f"cmds/{task['name']}").out for task in tasks]
    assert sorted(results) == ["b\n", "b\n", "its\n"]
    (tmp_path / "cmds.txt").write_text("echo new\necho a | tr a b\n")
    assert "2 tasks: 1 new, 1 existing" in call("load", file).out


def test_wrong_guess_names_the_format_and_the_option(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    none = Caller(tmp_path / "none", capsysbinary)
    file = cmds(tmp_path, "echo a\necho 'b\n")
    outcome = none("load", file, "--dry-run")
    bad, explained, last = outcome.err.splitlines()
    assert (outcome.code, bad.startswith(f"{file}:2: ' is never closed")) == (2, True)
    assert explained == (
        f"{file}: read as shell commands, because its lines look like commands "
        "(--format shell|jsonl|csv|parquet|wfcommons|dwork|zmailer forces another)"
    )
    assert last.endswith("1 bad line, nothing submitted")
    prose = cmds(tmp_path, "one of these\n", "prose.txt")
    outcome = none("load", prose, "--dry-run")
    assert (outcome.code, "(--shell runs each line" in outcome.err) == (2, True)
    assert none("load", prose, "--dry-run", "--shell").code == 0
    outcome = none("load", prose, "--shell", "--format", "csv")
    assert "--shell and --format csv exclude each other" in outcome.err


def test_bad_shell_lines_are_skipped_and_written(call: Caller, tmp_path: Path) -> None:
    file = cmds(tmp_path, "echo a\necho 'b\necho c |\n", "skips.txt")
    outcome = call("load", file, "--skip-bad")
    assert (outcome.code, outcome.out) == (0, "campaign skips: 1 task: 1 new, 0 existing\n")
    rejected = [
        json.loads(line) for line in Path(f"{file}.rejected.jsonl").read_text().splitlines()
    ]
    assert [(one["line"], one["raw"]) for one in rejected] == [(2, "echo 'b"), (3, "echo c |")]


def test_missing_file_is_reported(call: Caller, tmp_path: Path) -> None:
    outcome = call("load", str(tmp_path / "none.jsonl"))
    assert (outcome.code, outcome.out) == (2, "")
    assert "none.jsonl: No such file" in outcome.err


def test_tasks_of_a_file_run_here_with_the_variables_that_are_named(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "s3cret")
    path = tmp_path / "here.jsonl"
    path.write_text('{"name": "a", "argv": ["sh", "-c", "pwd; echo $SECRET"], "cwd": "sub"}\n')
    assert call("load", str(path), "--env", "SECRET", "--wait").code == 0
    assert call("results", "here/a").out == f"{tmp_path}/sub\ns3cret\n"
    monkeypatch.chdir("/")  # neither directory nor variables are compared
    assert call("load", str(path)).out == "campaign here: 1 task: 0 new, 1 existing\n"
