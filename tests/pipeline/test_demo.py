"""The demo: the run that the README shows, and each of its parts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from docs.schemas import check
from taskyard.cli.entry import run, taskyard
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import Failed, Finished, Submitted, WorkerJoined
from taskyard.demo import campaign, cluster
from taskyard.demo import tasks as demo_tasks
from taskyard.demo.campaign import AuditCounts, BrokerKill, DemoCounts, RecordFold
from taskyard.demo.cluster import DemoCluster
from taskyard.errors import ExitCode, ProcessEnded, UserError
from taskyard.pipeline.transforms.guarantees import Guarantees
from tests.test_docs_commands import Block, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

#: The note at the README's blocks that this file runs.
NOTE = "run by tests/pipeline/test_demo.py"

#: Tasks of the demo in place of the README's, unless --whole is given.
FEWER_TASKS = 400

PLANNED = campaign.make_campaign(campaign.TASKS)
KILL = BrokerKill(status=-9, settled=1, tasks=2, seconds_down=0.1)
OK = DemoCounts(
    AuditCounts(
        submitted=PLANNED.tasks,
        done=PLANNED.tasks - PLANNED.failing_count - PLANNED.blocked_count,
        failed=PLANNED.failing_count,
        unfinished=PLANNED.blocked_count,
    ),
    PLANNED.blocked_count,
    {"native": PLANNED.tasks - PLANNED.failing_count - PLANNED.blocked_count - 1, "wmp": 1},
)


# The whole demo.


def of_readme() -> list[Block]:
    return [block for block in blocks("README.md") if block.note == NOTE]


def shape(line: str) -> str:
    """Replace the numbers of a line, which differ between runs."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "#", line)).strip()


@pytest.mark.timeout(900)  # a minute on two free cores
def test_readme_demo_exits_0_and_prints_the_shown_output(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    assert spark.version  # the demo uses this session and leaves it running
    command, shown = of_readme()
    program, *arguments = shlex.split(command.body)
    assert program == "./yard"
    monkeypatch.chdir(tmp_path)
    size = [] if pytestconfig.getoption("--whole") else ["--tasks", str(FEWER_TASKS)]
    code = run(taskyard, [*arguments, *size])
    output = capfd.readouterr()
    assert code == 0, output
    # In this order. The README marks omitted lines.
    printed = iter(map(shape, (output.err + output.out).splitlines()))
    for line in shown.body.splitlines():
        if line.strip() not in ("", "…"):
            assert shape(line) in printed, (line, output)
    assert (tmp_path / "taskyard-demo/report/report.html").stat().st_size > 100_000
    assert (tmp_path / "taskyard-demo/tables/tasks").is_dir()


# The closing table.


def guarantees(counts: DemoCounts, **changed: int) -> Guarantees:
    """Return Spark's counts, equal to the journal's unless changed."""
    audit_counts = counts.audit_counts
    return Guarantees(
        **{
            "submitted": audit_counts.submitted,
            "done": audit_counts.done,
            "failed": audit_counts.failed,
            "cancelled": audit_counts.cancelled,
            "blocked_behind_failure": counts.behind_failure,
            "unfinished": 0,
            "lost": counts.lost,
            "completed_twice": audit_counts.completed_twice,
            "dependencies_broken": audit_counts.dependencies_broken,
            "unknown": audit_counts.unknown,
            "stale_refused": audit_counts.stale,
        }
        | changed
    )


def broken(counts: DemoCounts, kill: BrokerKill = KILL, **changed: int) -> dict[str, ExitCode]:
    lines = campaign.lines(counts, guarantees(counts, **changed), PLANNED, kill)
    return {line.what: line.code for line in lines if not line.passed}


def changed(behind: int = PLANNED.blocked_count, **values: int) -> DemoCounts:
    audit_counts = {
        name: getattr(OK.audit_counts, name) for name in OK.audit_counts.__struct_fields__
    } | values
    return DemoCounts(AuditCounts(**audit_counts), behind, OK.done_by)


def test_planned_run_passes() -> None:
    assert broken(OK) == {}
    assert broken(changed(stale=3)) == {}


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (changed(completed_twice=1), "completed twice"),
        (changed(dependencies_broken=1), "dependencies broken"),
        (changed(unfinished=PLANNED.blocked_count + 1), "lost"),
        (changed(unknown=1), "counted by Spark"),
        (changed(submitted=PLANNED.tasks + 1), "submitted"),
    ],
)
def test_broken_guarantee_exits_as_damaged_state(counts: DemoCounts, line: str) -> None:
    assert broken(counts)[line] is ExitCode.STATE_DAMAGED


def test_differing_counts_exit_as_damaged_state() -> None:
    assert broken(OK, stale_refused=1) == {"counted by Spark": ExitCode.STATE_DAMAGED}


def test_more_failures_than_planned_exit_as_failed_tasks() -> None:
    other = changed(done=OK.audit_counts.done - 1, failed=OK.audit_counts.failed + 1)
    assert broken(other)["submitted"] is ExitCode.TASK_FAILED


def test_broker_that_was_not_killed_does_not_pass() -> None:
    assert broken(OK, BrokerKill(0, 1, 2, 0.1)) == {"broker killed": ExitCode.TASK_FAILED}


def test_dialect_without_tasks_does_not_pass() -> None:
    idle = DemoCounts(OK.audit_counts, OK.behind_failure, OK.done_by | {"ping-pong": 0})
    assert broken(idle) == {"done by dialect": ExitCode.TASK_FAILED}


def test_records_are_counted_by_dialect_and_blocking_failure() -> None:
    names = [b"mail", b"receipt", b"digest", b"other", b"late"]
    after = [[], [b"mail"], [b"receipt", b"other"], [], [b"other"]]
    submission = Submission(names, [b""], [Terms()], after=after)
    fold = RecordFold()
    fold.add(
        [
            WorkerJoined(0, b"agents", WorkerFacts(dialect=b"dwork")),
            WorkerJoined(0, b"w", WorkerFacts(dialect=b"dwork")),
            WorkerJoined(0, b"p", WorkerFacts(dialect=b"ping-pong")),
            Submitted(0, submission),
            Failed(0, b"agents", [b"mail"], [1], [b"550"]),
            Finished(0, b"p", [b"other"], [1]),
        ]
    )
    assert (
        fold.behind_failure() == 2
    )  # the receipt and the digest, but not the late task, which could run
    assert fold.done_by["ping-pong"] == 1


# The campaign.


@pytest.mark.parametrize("tasks", [campaign.TASKS_MIN, 777, campaign.TASKS, campaign.TASKS_MAX])
def test_campaign_has_the_planned_tasks_and_failures(tasks: int) -> None:
    planned = campaign.make_campaign(tasks)
    found = {task["name"]: task for task in campaign.tasks_of(planned)}
    assert len(found) == planned.tasks == tasks
    strict = [name for name, task in found.items() if host_of(task) == demo_tasks.STRICT]
    assert len(strict) == planned.failing_count > 0
    receipts = [name for name, task in found.items() if set(task.get("after", ())) & {*strict}]
    assert len(receipts) + 1 == planned.blocked_count
    assert set(receipts) <= set(found["digest"]["after"])
    hosts = Counter(host_of(task) for task in found.values())
    assert len(hosts) - 1 == planned.lanes
    assert hosts[demo_tasks.DOWN] > 0


def host_of(task: dict[str, Any]) -> str | None:
    payload = task.get("payload")
    return payload["host"] if isinstance(payload, dict) else None


def test_agent_accepts_defers_and_refuses_by_destination(tmp_path: Path) -> None:
    hosts = ("host-01.example", demo_tasks.STRICT, demo_tasks.DOWN)
    fed = "".join(f"mail-{number}/1\t{host}\t{{}}\n" for number, host in enumerate(hosts))
    command = [sys.executable, demo_tasks.__file__]
    done = subprocess.run(
        command, cwd=tmp_path, input=fed + "#idle\n\n", capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "#hungry",
        "mail-0/1\t\tok 250 accepted",
        "#hungry",
        "mail-1/1\t\terror 550 no such user here",
        "#hungry",
        "mail-2/1\t\tdeferall 421 connection refused",
        "#hungry",
    ]


def test_destination_recovers_after_its_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo_tasks.deliver(demo_tasks.DOWN).startswith("deferall")
    before_s = demo_tasks.OUTAGE_FILE.stat().st_mtime - demo_tasks.OUTAGE_SECONDS
    os.utime(demo_tasks.OUTAGE_FILE, (before_s, before_s))
    assert demo_tasks.deliver(demo_tasks.DOWN) == "ok 250 accepted"


# The directory.


def test_foreign_directory_is_left_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report").mkdir()
    assert run(taskyard, ["demo", "--out", str(tmp_path)]) == 2
    assert "exists and is not of an earlier demo, left unchanged" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_next_demo_replaces_only_files_of_the_last(tmp_path: Path) -> None:
    cluster.prepare_directory(tmp_path).__exit__()
    (tmp_path / "report").mkdir()
    (tmp_path / "campaign.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    with cluster.prepare_directory(tmp_path):
        kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [".taskyard-demo", "log", "notes.txt", "taskyard.toml"]


def test_two_demos_do_not_share_a_directory(tmp_path: Path) -> None:
    with (
        cluster.prepare_directory(tmp_path),
        pytest.raises(UserError, match="another demo is running here"),
    ):
        cluster.prepare_directory(tmp_path)


def test_demo_settings_are_valid(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster.prepare_directory(tmp_path / "with a space") as here:
        assert run(taskyard, ["config", "--check", str(here.settings)]) == 0
        assert run(taskyard, ["config", "--config", str(here.settings), "--json"]) == 0
        settings = capfd.readouterr().out.splitlines()[-1]
    assert f"{sys.executable} {demo_tasks.__file__}" in settings


# The processes.


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[DemoCluster]:
    with cluster.prepare_directory(tmp_path) as here, DemoCluster(here) as yard:
        yield yard


def test_broker_restarts_on_its_ports_and_all_processes_end(yard: DemoCluster) -> None:
    before = yard.listening
    assert yard.kill_broker() == -9
    with pytest.raises(ProcessEnded, match=r"broker: killed by SIGKILL \(see .*broker\.log\)"):
        yard.check()
    yard.restart_broker()
    assert yard.listening == before
    yard.check()
    pids = [process.pid for process in (yard.broker, *yard.others)]
    yard.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# The command.


def test_missing_spark_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("taskyard.cli.pipeline.find_spec", lambda _name: None)
    assert run(taskyard, ["demo"]) == 2
    err = capfd.readouterr().err
    assert "pyspark, pandas, pyarrow not installed" in err
    assert "pip install 'taskyard[spark]'" in err
    assert err.count("\n") == 1


def test_document_matches_its_schema(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from taskyard.demo import walkthrough  # noqa: PLC0415  # patched here

    lines = campaign.lines(changed(completed_twice=1), guarantees(OK), PLANNED, KILL)
    outcome = walkthrough.DemoResult(tmp_path, tmp_path, tmp_path, tmp_path, OK, lines, 1.0)
    monkeypatch.setattr(walkthrough, "run", lambda *_: outcome)
    assert run(taskyard, ["demo", "--json"]) == 6
    printed = capfd.readouterr().out
    check(printed)
    assert json.loads(printed)["sound"] is False
    assert run(taskyard, ["demo"]) == 6
    table = capfd.readouterr().out
    assert re.search(r"completed twice +1 +<- FAILED", table)
    assert "FAILED: completed twice" in table
