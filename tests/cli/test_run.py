"""`taskyard run`: from start to finish, repeated, interrupted, killed and resumed."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from taskyard.campaign.reader import read_campaign
from taskyard.campaign.shell_lines import line_name
from taskyard.cli.offline import OfflineClient
from taskyard.cli.run_report import RunCounts, RunEnd, RunOptions, RunReport, print_reports
from taskyard.client import waits
from tests.kit.processes import (
    AT_THE_GATE,
    Broker,
    Running,
    Worker,
    all_children_of,
    campaign,
    is_alive,
    marking,
    marks,
    run,
    run_here,
    until,
)

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def counts(directory: Path, state: str = ".taskyard") -> dict[str, int]:
    """Return the counts of a stopped state without empty states."""
    with OfflineClient(directory / state) as stopped:
        return {name: number for name, number in stopped.status()["counts"].items() if number}


def test_example_runs_and_run_again_finds_it_done(tmp_path: Path) -> None:
    file = str(EXAMPLES / "first.jsonl")
    code, out, err = run(tmp_path, "run", "--quiet-output", file)
    assert (code, err) == (0, "first: 12 tasks\n")
    assert out.startswith("first: 12 done (")
    with OfflineClient(tmp_path / ".taskyard") as stopped:
        assert stopped.result("first/farewell") == "good night\n"
    code, out, err = run(tmp_path, "run", "--quiet-output", file)
    assert (code, err) == (0, "first: 12 tasks: 12 already done\n")
    assert out.startswith("first: 12 done (")


def test_list_of_commands_runs_and_keeps_done_lines_when_it_is_edited(tmp_path: Path) -> None:
    """The commands count their runs in a file each."""
    file = tmp_path / "cmds.txt"
    file.write_text("#!/bin/sh -e\necho x >> a.runs && true\necho x >> b.runs; false; true\n")
    code, out, err = run(tmp_path, "run", "--quiet-output", "cmds.txt")
    assert (code, err) == (1, "cmds.txt: shell commands, 2 tasks\ncmds: 2 tasks\n")
    failure = "cmds.txt:3 (echo x >> b.runs; false; true): failed after 1 attempt: exit status 1"
    assert f"\n  {failure} (cmds/{line_name('echo x >> b.runs; false; true')})\n" in out
    assert out.endswith(
        "\nretry:    taskyard run cmds.txt\nresults:  taskyard results --campaign cmds\n"
    )
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "# new", "echo x >> c.runs", "", *lines[1:]]))
    code, out, err = run(
        tmp_path, "run", "--quiet-output", "cmds.txt", "--shell", "--no-retry-failed"
    )
    assert (code, "1 already done, 1 failed and not retried, 1 new" in err) == (1, True)
    assert "retry:    taskyard run cmds.txt --format shell\n" in out
    assert [(tmp_path / f"{name}.runs").read_text() for name in "abc"] == ["x\n"] * 3


def test_tasks_of_removed_lines_neither_count_nor_fail_a_run(tmp_path: Path) -> None:
    file = tmp_path / "cmds.txt"
    file.write_text("true\nfalse\nexit 3\n")
    assert run_here(tmp_path, "run", "--quiet-output", "cmds.txt")[0] == 1
    file.write_text("echo new\nexit 3\n")
    code, out, err = run_here(
        tmp_path, "run", "--quiet-output", "cmds.txt", "--max-failures", "2", "--progress"
    )
    head, line, failure, *_ = out.splitlines()
    assert (code, head.split(" (")[0]) == (1, "cmds: 1 done, 1 failed")
    assert line == "2 other tasks of the campaign are not in the file (1 done, 1 failed)"
    assert "cmds.txt:2 (exit 3): failed after 2 attempts: exit status 3" in failure
    assert err.splitlines()[-1] == "cmds: 1 of 2 done, 1 failed"
    file.write_text("echo new\n")
    code, out, _ = run_here(tmp_path, "run", "--quiet-output", "cmds.txt", "--json")
    document = json.loads(out)
    assert (code, document["failures"]) == (0, [])
    own, others = (
        {state: number for state, number in document[key].items() if number}
        for key in ("counts", "others")
    )
    assert (own, others) == ({"done": 1}, {"failed": 2, "done": 1})


def test_tasks_run_again_after_a_change_of_their_files(tmp_path: Path) -> None:
    files = {"inputs": ["in.txt"], "outputs": ["out.txt"]}
    tasks = [
        {"name": "copy", "argv": ["cp", "in.txt", "out.txt"], **files},
        {"name": "behind", "argv": ["cat", "out.txt"], "after": ["copy"]},
        {"name": "alone", "argv": ["true"]},
    ]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (tmp_path / "in.txt").write_text("1")
    assert run_here(tmp_path, "run", "--quiet-output", "f.jsonl")[0] == 0
    (tmp_path / "in.txt").write_text("2")
    code, out, err = run_here(tmp_path, "run", "--quiet-output", "f.jsonl")
    changed = "f: 3 tasks: 1 already done, 2 run again after changes of files\n"
    assert (code, out[:9], err) == (0, "f: 3 done", changed)
    with OfflineClient(tmp_path / ".taskyard") as stopped:
        assert stopped.result("f/behind") == "2"
        assert stopped.why("f/copy") == (
            "it is done (attempt 2): ran because in.txt is newer than out.txt"
        )


def test_long_output_is_whole_also_after_compaction(tmp_path: Path) -> None:
    command = "head -c 1100000 /dev/zero; printf err >&2"
    task = {"name": "long", "argv": ["sh", "-c", command]}
    (tmp_path / "f.jsonl").write_text(json.dumps(task))
    code, out, _ = run_here(tmp_path, "run", "--quiet-output", "f.jsonl")
    assert code == 0
    assert out.startswith("f: 1 done (")
    assert run_here(tmp_path, "journal", "compact")[0] == 0
    code, out, _ = run_here(tmp_path, "run", "--quiet-output", "f.jsonl", "--json")
    assert (code, json.loads(out)["truncated"]) == (0, 0)
    with OfflineClient(tmp_path / ".taskyard") as stopped:
        assert stopped.result("f/long") == "\0" * 1_100_000
        assert stopped.output("f/long", "stderr") == b"err"


def test_failure_is_reported_with_its_dependents_and_retried(tmp_path: Path) -> None:
    file = str(EXAMPLES / "failing.jsonl")
    code, out, _ = run_here(tmp_path, "run", "--quiet-output", file, "--state", "s")
    assert code == 1
    head, failure, why, again, _results = out.splitlines()
    assert head.startswith("failing: 2 done, 1 failed, 2 behind a failure (")
    assert failure == "  failing/bad failed after 3 attempts: exit status 1"
    assert why.endswith("  taskyard why failing/bad --state s")
    assert again.endswith(f"  taskyard run {file} --state s")
    code, out, _ = run_here(tmp_path, "why", "bad", "--state", "s")
    assert out == "failing/bad: it failed after 3 attempts: exit status 1; 2 tasks wait for it\n"
    code, _, err = run_here(tmp_path, "run", "--quiet-output", file, "--state", "s")
    assert code == 1
    assert "2 already done, 1 failed and retried, 2 waiting since the last run" in err


def test_failure_is_left_if_that_is_asked_for(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("bad", "exit 3"), marking("good")])
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 1
    code, out, err = run_here(
        tmp_path, "run", "--quiet-output", file, "--no-retry-failed", "--json"
    )
    assert code == 1
    assert err == "campaign: 2 tasks: 1 already done, 1 failed and not retried\n"
    document = json.loads(out)
    assert (document["version"], document["document"]) == (1, "run")
    assert (document["counts"]["failed"], document["counts"]["done"]) == (1, 1)
    assert [one["name"] for one in document["failures"]] == ["bad"]
    assert sorted(marks(tmp_path)) == ["bad", "good"]


def test_progress_that_is_forced_ends_with_a_line(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a"), marking("b", "exit 3"), marking("c", after=["b"])])
    _, _, err = run_here(tmp_path, "run", "--quiet-output", file, "-q", "--progress")
    assert err == "campaign: 1 of 3 done, 1 failed, 1 behind a failure\n"


def test_failure_that_is_mended_is_done_the_second_time(tmp_path: Path) -> None:
    file = campaign(
        tmp_path, [marking("a", "test -e mended"), {"name": "b", "argv": ["true"], "after": ["a"]}]
    )
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 1
    (tmp_path / "mended").touch()
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 0
    assert counts(tmp_path) == {"done": 2}


def test_killed_run_leaves_no_processes_and_resumes(tmp_path: Path) -> None:
    tasks = [marking(f"quick-{number}") for number in range(5)]
    tasks += [marking("slow", AT_THE_GATE, after=["quick-0"])]
    tasks += [marking("last", after=["slow"])]
    file = campaign(tmp_path, tasks)
    with Running(tmp_path, "run", "--quiet-output", file, "-j", "2") as running:
        until(lambda: "slow" in marks(tmp_path) and len(marks(tmp_path)) == 6)
        children = all_children_of(running)
        assert len(children) == 2
        running.send(signal.SIGKILL).process.wait()
        until(lambda: not any(map(is_alive, children)))
    with Running(tmp_path, "run", "--quiet-output", file, "-j", "2") as running:
        until(lambda: marks(tmp_path).count("slow") == 2)
        (tmp_path / "gate").write_text("")
        code, _, err = running.end()
    assert (code, "contested" in err) == (0, False)  # the dead worker is replaced at once
    assert counts(tmp_path) == {"done": 7}
    begun = marks(tmp_path)
    assert {name: begun.count(name) for name in begun} == {
        **{f"quick-{number}": 1 for number in range(5)},
        "slow": 2,
        "last": 1,
    }


def test_interrupted_run_ends_tasks_and_prints_how_to_resume(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a", "exec sleep 600"), marking("b", after=["a"])])
    with Running(tmp_path, "run", "--quiet-output", file) as running:
        until(lambda: marks(tmp_path))
        running.send(signal.SIGINT)
        code, out, err = running.end()
    assert (code, out) == (130, "")
    resume = "taskyard: interrupted; resume with `taskyard run campaign.jsonl`"
    assert err.split("\n") == ["campaign: 2 tasks", "", resume, ""]
    assert counts(tmp_path) == {"ready": 1, "blocked": 1}


def test_interrupted_run_finishes_running_tasks_on_request(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    file = campaign(tmp_path, [marking("a", "cat gate > /dev/null"), marking("b", after=["a"])])
    with Running(tmp_path, "run", "--quiet-output", file, "--finish-running") as running:
        until(lambda: marks(tmp_path))
        running.send(signal.SIGINT)
        assert running.error_line() == "campaign: 2 tasks"
        assert running.error_line() == "waiting for running tasks (Ctrl-C ends them)"
        (tmp_path / "gate").write_text("")
        code, out, err = running.end()
    assert (code, out) == (130, "")
    assert err.endswith("taskyard: interrupted; resume with `taskyard run campaign.jsonl`\n")
    assert counts(tmp_path)["done"] == 1
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 0
    assert marks(tmp_path) == ["a", "b"]


def test_run_interrupted_twice_kills_running_tasks(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a", "exec sleep 600")])
    with Running(tmp_path, "run", "--quiet-output", file, "--finish-running") as running:
        until(lambda: marks(tmp_path))
        running.send(signal.SIGTERM)
        assert running.error_line() == "campaign: 1 task"
        assert running.error_line() == "waiting for running tasks (Ctrl-C ends them)"
        running.send(signal.SIGINT)
        assert running.end()[0] == 130
    assert counts(tmp_path) == {"ready": 1}


def test_run_stops_after_too_many_failures_and_resumes(tmp_path: Path) -> None:
    tasks = [{"name": f"bad-{number}", "argv": ["false"], "priority": 1} for number in range(3)]
    file = campaign(tmp_path, [*tasks, marking("slow", "exec sleep 600")])
    words = ("--max-failures", "2", "--slots", "2", "--notify", "cat > told")
    code, out, err = run_here(tmp_path, "run", "--quiet-output", file, *words)
    assert code == 1
    assert "stopped: " in err
    assert " unfinished" in out
    told = json.loads((tmp_path / "told").read_text())
    assert (told["exit_code"], told["stopped"] in err) == (1, True)
    assert counts(tmp_path)["ready"] >= 1
    code, out, _ = run_here(tmp_path, "run", "--quiet-output", file, "--timeout", "0.5s", "--json")
    assert (code, json.loads(out)["stopped"]) == (4, "stopped: not settled after 0.5 s (--timeout)")


def test_broker_and_worker_that_are_killed_are_started_again(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a", AT_THE_GATE), marking("b", after=["a"])])
    with Running(tmp_path, "run", "--quiet-output", file) as running:
        assert running.error_line() == "campaign: 2 tasks"
        until(lambda: marks(tmp_path))
        for child in all_children_of(running):
            os.kill(child, signal.SIGKILL)
        outcome = {running.error_line() for _ in range(2)}
        assert outcome == {
            "the broker died (killed by SIGKILL), restarting it",
            "worker local-1 died (killed by SIGKILL), restarting it",
        }
        until(lambda: marks(tmp_path) == ["a", "a"])
        (tmp_path / "gate").write_text("")
        assert running.end()[0] == 0


def test_run_exits_when_its_broker_is_stopped_from_outside(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a", "exec sleep 600")])
    with Running(tmp_path, "run", "--quiet-output", file) as running:
        until(lambda: marks(tmp_path))
        assert run_here(tmp_path, "down", "--grace", "0.1s")[0] == 4
        code, _, err = running.end()
    assert code == 130
    assert "the broker has ended (run it again to resume)" in err


def test_name_that_is_known_with_another_command_is_refused_and_nothing_is_submitted(
    tmp_path: Path,
) -> None:
    assert (
        run_here(
            tmp_path, "run", "--quiet-output", campaign(tmp_path, [marking("a"), marking("b")])
        )[0]
        == 0
    )
    file = campaign(tmp_path, [marking("new"), marking("a"), marking("b", "exit 0")])
    code, out, err = run_here(tmp_path, "run", "--quiet-output", file)
    assert (code, out) == (2, "")
    assert err == (
        "taskyard: campaign.jsonl:3: task campaign/b is known with another payload (choose another "
        "name), nothing was submitted\n"
    )
    assert counts(tmp_path) == {"done": 2}


def test_same_file_is_run_as_two_campaigns(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a/b"), marking("last", after=["a/b"])])
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 0
    assert run_here(tmp_path, "run", "--quiet-output", file, "--campaign", "other")[0] == 0
    assert counts(tmp_path) == {"done": 4}
    assert marks(tmp_path) == ["a/b", "last"] * 2
    with OfflineClient(tmp_path / ".taskyard") as stopped:
        names = [(view["campaign"], view["name"]) for view in stopped.tasks()]
    assert names == [(one, name) for one in ("campaign", "other") for name in ("a/b", "last")]


def test_file_whose_full_names_are_those_of_other_tasks_is_refused(tmp_path: Path) -> None:
    with Broker(tmp_path):
        assert run_here(tmp_path, "submit", "--name", "campaign/b", "--", "true")[0] == 0
    file = campaign(tmp_path, [marking("a"), marking("b")])
    code, _, err = run_here(tmp_path, "run", "--quiet-output", file)
    assert code == 2
    assert err.startswith(
        "taskyard: campaign.jsonl:2: task campaign/b: the name is that of a task outside any "
        "campaign"
    )
    assert counts(tmp_path) == {"ready": 1}


def test_running_broker_is_used_and_stays(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("a")])
    with Broker(tmp_path) as broker, Running(tmp_path, "worker", "--until-eof"):
        code, out, err = run_here(
            tmp_path, "run", "--quiet-output", file, "-j", "1", "--allow", "os"
        )
        assert (code, out.split(" (")[0]) == (0, "campaign: 1 done")
        assert err == "using the running broker, without --jobs, --allow\ncampaign: 1 task\n"
        code, out, _ = run_here(
            tmp_path, "run", "--quiet-output", file, "--broker", broker.endpoint, "--json"
        )
        assert (code, json.loads(out)["state"]) == (0, "")
        assert broker.poll() is None


def test_tasks_that_no_worker_could_run_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "STALL_NS", 0)
    tasks = [{"name": str(number), "argv": ["true"], "gpus": 2} for number in range(1500)]
    file = campaign(tmp_path, tasks)
    with Broker(tmp_path), Worker(tmp_path, "--gpus", "0,"):
        code, _, err = run_here(tmp_path, "run", "--quiet-output", file, "--timeout", "1")
        words = ("--timeout", "1", "--gpus", "2", "true", ":::", "a")
        map_code, _, map_err = run_here(tmp_path, "map", *words)
    assert code != 0
    assert map_code != 0
    assert map_err.count(" waits: it is ready, but no worker has 2 gpus (the largest") == 1
    (line,) = [line for line in err.splitlines() if "waits" in line]
    assert line == (
        "taskyard: task campaign/0 waits: it is ready, but no worker has 2 gpus (the largest has "
        "1); 1,499 more tasks wait (start a larger worker with `taskyard worker`)"
    )


@pytest.mark.parametrize(
    ("task", "options", "reason"),
    [
        ({"payload": "x"}, [], "service default needs your own worker"),
        ({"argv": ["true"], "slots": 3}, ["--slots", "2"], "needs 3 slots, but a local worker has"),
        ({"argv": ["true"], "memory": "999T"}, [], "needs 999 TiB of memory, but a local worker"),
        ({"call": "os.path:join"}, ["--allow", "o"], "not allowed (give --allow os.path)"),
        ({"argv": "true"}, [], "campaign.jsonl: 1 bad line"),
        ({"argv": ["true"], "after": ["x"]}, [], "waits for 'x', which neither the file nor"),
    ],
)
def test_tasks_that_could_never_run_are_refused_first(
    task: dict[str, Any], options: list[str], reason: str, tmp_path: Path
) -> None:
    file = campaign(tmp_path, [marking("good"), {"name": "a", **task}])
    code, out, err = run_here(tmp_path, "run", "--quiet-output", file, *options)
    assert (code, out) == (2, "")
    assert reason in err.replace('"', "'")
    assert marks(tmp_path) == []


def test_workers_have_the_resources_of_options_or_settings(tmp_path: Path) -> None:
    (tmp_path / "taskyard.toml").write_text('[worker]\ngpus = ["7"]\nresources = ["license=1"]\n')
    needs: dict[str, Any] = {"gpus": 1, "resources": {"license": 1}}
    file = campaign(tmp_path, [marking("a", "echo $TASKYARD_GPUS > gpus", **needs)])
    assert run_here(tmp_path, "run", "--quiet-output", file, "--workers", "2")[0] == 0
    assert (tmp_path / "gpus").read_text() == "7\n"
    too_many = ("--gpus", "1", "--resource", "license=2", "true", ":::", "a")
    code, _, err = run_here(tmp_path, "map", *too_many)
    assert code == 2
    assert err.startswith("taskyard: a task: needs 2 license, but a local worker has ")
    assert "(give --worker-resource license=2)" in err
    words = ("--resource", "license=1", "--", "echo", "{}", ":::", "one")
    assert run_here(tmp_path, "map", "-q", *words) == (0, "one\n", "")
    file = campaign(tmp_path, [marking("b", **needs)])
    code, _, err = run_here(
        tmp_path, "run", "--quiet-output", file, "--campaign", "b", "--worker-gpus", "0"
    )
    assert (code, "task b: needs 1 gpu, but a local worker has" in err) == (2, True)
    more = ("--worker-gpus", "2", "--worker-resource", "license=2")
    assert run_here(tmp_path, "run", "--quiet-output", file, "--campaign", "b", *more)[0] == 0


def test_bad_lines_are_left_out_if_that_is_asked_for(tmp_path: Path) -> None:
    tasks: list[dict[str, Any]] = [marking("good"), {"name": "bad"}]
    tasks += [{"name": "lost", "argv": ["true"], "after": ["none"]}]
    file = campaign(tmp_path, tasks)
    assert run_here(tmp_path, "run", "--quiet-output", file, "--skip-bad")[0] == 0
    rejected = (tmp_path / "campaign.jsonl.rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in rejected] == [2, 3]
    assert counts(tmp_path) == {"done": 1}


def test_functions_and_services_of_the_file_are_served(tmp_path: Path) -> None:
    tasks = [
        {"name": "sum", "call": "operator:add", "args": [1, 2]},
        {"name": "gpu", "argv": ["echo", "gpu"], "service": "gpu"},
    ]
    (tmp_path / "work.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(task) + "\n" for task in tasks).encode())
    )
    code, out, _ = run_here(
        tmp_path, "run", "--quiet-output", "work.jsonl.gz", "--allow", "operator", "--workers", "2"
    )
    assert (code, out.split(" (")[0]) == (0, "work: 2 done")
    with OfflineClient(tmp_path / ".taskyard") as stopped:
        assert stopped.result("work/sum") == 3


def test_file_without_tasks_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    code, out, err = run_here(tmp_path, "run", campaign(tmp_path, []))
    message = "taskyard: campaign.jsonl: no tasks in it (it is empty)\n"
    assert (code, out, err) == (2, "", message)
    assert [one.name for one in tmp_path.iterdir()] == ["campaign.jsonl"]


def test_more_than_one_batch_is_checked_before_any_is_submitted(tmp_path: Path) -> None:
    tasks = [{"name": f"t{number}", "argv": ["true"], "due": "1h"} for number in range(10_001)]
    file = campaign(tmp_path, [marking("other"), {"name": "t9", "argv": ["true"]}])
    assert run_here(tmp_path, "run", "--quiet-output", file, "--campaign", "c")[0] == 0
    tasks[9]["argv"] = ["false"]
    code, _, err = run_here(
        tmp_path, "run", "--quiet-output", campaign(tmp_path, tasks), "--campaign", "c"
    )
    assert code == 2
    assert "campaign.jsonl:10: task c/t9 is known with another payload" in err
    assert counts(tmp_path) == {"done": 2}


def test_truncated_results_are_explained_by_the_workers_that_truncate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = campaign(tmp_path, [marking("a")])
    assert run_here(tmp_path, "run", "--quiet-output", file)[0] == 0
    flags: dict[str, Any] = dict.fromkeys(["skip_bad", "retry_failed", "as_json"], False)
    options = RunOptions(file, "campaign", ".taskyard", "", quiet=True, **flags)
    loaded = read_campaign(str(tmp_path / file))
    with OfflineClient(tmp_path / ".taskyard") as stopped:
        numbers = RunCounts(stopped.counts("campaign"), 1)
        report = RunReport(options, loaded, RunEnd(), numbers, 1.0)
        assert print_reports([report], stopped) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "campaign: 1 done, 1 with truncated output (1.0 s)"
    assert second.startswith("truncated: agents and WMP workers send at most the last 1 MiB")
