"""`load --spark`: files of every format are submitted completely, and only once."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from docs import schemas
from taskyard import testing
from taskyard.campaign.formats import FileOptions, Format
from taskyard.campaign.lines import LINE_BYTES_MAX, InvalidCampaign
from taskyard.campaign.reader import read_campaign, write_rejected
from taskyard.campaign.submitter import SubmitCounts, submit_campaign
from taskyard.cli.entry import run, taskyard
from taskyard.client.client import Client
from taskyard.core.events import UnknownPolicy
from taskyard.demo.campaign import Auditor
from taskyard.errors import Refused, UserError
from taskyard.journal import recovery
from taskyard.journal.sqlite import JournalReader
from taskyard.journal.witness import read as witnessed
from taskyard.pipeline import session
from taskyard.pipeline.arrow_rows import PREPARED_SCHEMA
from taskyard.pipeline.datasets import REJECTS
from taskyard.pipeline.jobs import load
from taskyard.pipeline.sources import campaigns
from taskyard.pipeline.submit import make_target
from tests.kit.clients import internal
from tests.kit.processes import Broker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from taskyard.testing import InMemoryBroker

#: A diamond and a chain after it: four levels.
DIAMOND: list[dict[str, Any]] = [
    {"name": "end", "argv": ["true", "end"], "after": ["left", "right"]},
    {"name": "left", "argv": ["true", "left"], "after": ["top"], "priority": 2},
    {"name": "right", "argv": ["true", "right"], "after": ["top"], "lane": "l"},
    {"name": "top", "argv": ["true", "top"], "after": []},
    {"name": "last", "argv": ["true", "last"], "after": ["end"]},
]


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with testing.broker() as broker:
        yield broker


def _lines(tasks: list[dict[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)


def _write(path: Path, tasks: list[dict[str, Any]]) -> str:
    path.write_bytes(_lines(tasks))
    return str(path)


def _read(spark: SparkSession, *files: str, **options: Any) -> load.CheckedCampaign:
    return load.read(spark, campaigns.plan(files, FileOptions(campaign="c", **options)))


def _submit(checked: load.CheckedCampaign, broker: InMemoryBroker, **how: Any) -> SubmitCounts:
    return load.submit_all(
        checked, make_target(broker.endpoint, None, "c", UnknownPolicy.REFUSE), **how
    )


def _views(client: Client) -> dict[str, dict[str, Any]]:
    return {view["name"]: view for view in client.tasks()}


def _cells(tasks: list[dict[str, Any]]) -> str:
    rows = [
        (
            *(task["name"], json.dumps(task["argv"]), ";".join(task["after"])),
            *(task.get("lane", ""), str(task.get("priority", ""))),
        )
        for task in tasks
    ]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    return "\n".join(["name,argv,after,lane,priority", *quoted]) + "\n"


def test_every_format_submits_the_same_tasks(spark: SparkSession, tmp_path: Path) -> None:
    keys = ("name", "argv", "after", "lane", "priority")
    columns = {key: [task.get(key) for task in DIAMOND] for key in keys}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet", row_group_size=2)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(_lines(DIAMOND)))
    (tmp_path / "d.csv").write_text(_cells(DIAMOND))
    files = [_write(tmp_path / "d.jsonl", DIAMOND)]
    files += [str(tmp_path / name) for name in ("d.parquet", "d.jsonl.gz", "d.csv")]
    found = [_prepared(_read(spark, file)) for file in files]
    assert found == [found[0]] * 4
    assert [task["name"] for task in found[0]] == ["end", "left", "right", "top", "last"]
    assert [task["lane"] for task in found[0]] == ["", "", "l", "", ""]


def _prepared(checked: load.CheckedCampaign) -> list[dict[str, Any]]:
    """Return the tasks that would be submitted."""
    chunks = checked.chunks.toArrow()
    tables = [campaigns.tasks_of(chunks, number) for number in range(len(chunks))]
    rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
    return [
        {name: row[name] for name in PREPARED_SCHEMA.names if name != "place"}
        for row in rows
        if row["reason"] is None
    ]


def test_tasks_are_submitted_unchanged(
    spark: SparkSession, tmp_path: Path, broker: InMemoryBroker
) -> None:
    checked = _read(spark, _write(tmp_path / "d.jsonl", DIAMOND))
    assert _submit(checked, broker) == SubmitCounts(5, 0)
    with internal(broker.client()) as client:
        views = _views(client)
    assert views["end"]["waits_for"] == 2
    assert (views["right"]["lane"], views["left"]["priority"]) == ("l", 2)
    names = ("top", "left", "right", "end", "last")
    assert broker.run_all() == [f"c/{name}" for name in names]


def test_dwork_lines_and_workflows_are_read(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "c.dwork").write_text("b,a\na\nc,a,b\n")
    assert _read(spark, str(tmp_path / "c.dwork")).validation.sizes == [1, 1, 1]
    specified = [{"id": "x", "parents": []}, {"id": "y", "parents": ["x"]}]
    ran = [
        {"id": one, "runtimeInSeconds": seconds, "command": {"program": "true"}}
        for one, seconds in (("x", 2.0), ("y", 40.0))
    ]
    workflow = {"specification": {"tasks": specified}, "execution": {"tasks": ran}}
    document = {"schemaVersion": "1.5", "workflow": workflow}
    (tmp_path / "w.json").write_text(json.dumps(document))
    checked = _read(spark, str(tmp_path / "w.json"), replay=True, speedup=10)
    assert checked.validation.critical_path.names == ["x", "y"]
    assert checked.validation.critical_path.seconds == pytest.approx(4.2)


def test_shell_commands_have_the_names_of_a_plain_load(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "cmds.txt").write_text("# jobs\n\necho a \\\n  b\necho 'c\necho c\necho c\n")
    path = str(tmp_path / "cmds.txt")
    checked = _read(spark, path)
    loaded = read_campaign(path)
    assert [task["name"] for task in _prepared(checked)] == [spec.name for spec in loaded.specs]
    assert [str(one) for one in checked.rejects] == [str(one) for one in loaded.rejected]
    assert checked.campaign.shell_files() == [path]


def test_files_are_found_by_pattern_and_in_directories(tmp_path: Path) -> None:
    marks = ("_SUCCESS", ".c.crc", "a.jsonl.rejected.jsonl")
    for name in ("a.jsonl", "b.jsonl", "README.md", "part-0", *marks):
        (tmp_path / name).write_text("")
    wanted = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    others = [str(tmp_path / "README.md"), str(tmp_path / "part-0")]
    assert campaigns.find([str(tmp_path)]) == campaigns.FoundFiles(wanted, others)
    assert campaigns.find([str(tmp_path), *others]).skipped == []
    assert campaigns.find([str(tmp_path)], Format.JSONL).files == sorted([*wanted, *others])
    assert campaigns.find([str(tmp_path / "?.jsonl"), wanted[0]]).files == wanted
    with pytest.raises(UserError, match="no such file"):
        campaigns.find([str(tmp_path / "z*")])
    with pytest.raises(UserError, match="not a path that executors can open"):
        campaigns.find(["s3a://bucket/a.jsonl"])


def test_lines_keep_their_numbers_when_a_file_is_split(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaigns, "SPLIT_BYTES", 100)
    tasks = [{"name": f"t{n}", "payload": "x" * (n % 7)} for n in range(30)]
    tasks[17] = {"name": "t17"}
    tasks[29] = {"name": "t3", "payload": ""}
    checked = _read(spark, _write(tmp_path / "a.jsonl", tasks))
    assert len(checked.campaign.splits) > 5
    assert checked.validation.tasks == 28
    assert [(one.line, one.reason) for one in checked.rejects] == [
        (18, 'has no work (give "argv", "call" or "payload")'),
        (30, "duplicate name 't3', first on line 4"),
    ]


def test_rows_keep_their_numbers_when_a_row_group_is_split(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaigns, "SLICE_ROWS", 10)
    names = [f"t{n}" for n in range(35)]
    names[25] = ""
    table = pa.table({"name": names, "payload": ["x"] * 35})
    pq.write_table(table, tmp_path / "a.parquet")
    checked = _read(spark, str(tmp_path / "a.parquet"))
    assert len(checked.campaign.splits) == 4
    assert [one.line for one in checked.rejects] == [26]
    assert checked.validation.tasks == 34


def test_every_error_is_rejected_with_place_and_reason(spark: SparkSession, tmp_path: Path) -> None:
    ring = [{"name": f"r{n}", "payload": "x", "after": [f"r{(n + 1) % 50}"]} for n in range(50)]
    bad: list[dict[str, Any]] = [
        {"name": "good", "payload": "x"},
        {"name": "self", "payload": "x", "after": ["self"]},
        {"name": "one", "payload": "x", "after": ["two"]},
        {"name": "two", "payload": "x", "after": ["one"]},
        {"name": "lost", "payload": "x", "after": ["missing"]},
        {"name": "slow", "payload": "x", "priority": "high"},
        {"name": "behind", "payload": "x", "after": ["slow", "good"]},
    ]
    first = _write(tmp_path / "a.jsonl", [*bad, *ring])
    second = _write(tmp_path / "b.jsonl", [{"name": "good", "payload": "y"}])
    checked = _read(spark, first, second)
    checked.revalidate(existing=())
    reasons = {(one.file, one.line): one.reason for one in checked.rejects}
    assert reasons[first, 2].startswith("waits for itself")
    assert reasons[first, 3] == "is in a cycle: 'one' after 'two' after 'one'"
    assert reasons[first, 5] == "waits for 'missing', which neither the file nor the broker has"
    assert reasons[first, 6].startswith('"priority" must be a whole number')
    assert reasons[first, 7] == "waits for 'slow', which was rejected (line 6)"
    assert reasons[first, 8].startswith("is in a cycle: 'r0' after 'r1'")
    assert reasons[second, 1] == f"duplicate name 'good', first in {first}:1"
    assert len(reasons) == 57
    assert len(checked.validation.rows) == 1
    raws = {one.line: one.raw for one in checked.rejects if one.file == first}
    rows = {line: msgspec.json.decode(msgspec.json.encode(raw)) for line, raw in raws.items()}
    assert rows[6] == bad[5]
    assert rows[3] == bad[2]
    frame = REJECTS.check(checked.rejects_frame(spark))
    assert frame.count() == 57


def _corpus(directory: Path) -> dict[str, str]:
    """Write invalid files, and return the expected error of each."""
    good = [{"name": f"g{n}", "payload": "x" * 50} for n in range(200)]
    packed = gzip.compress(_lines(good))
    (directory / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    pq.write_table(pa.table({"name": ["p"], "payload": ["x"]}), directory / "whole.parquet")
    whole = (directory / "whole.parquet").read_bytes()
    (directory / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (directory / "drift.parquet").write_bytes(b"")
    table = pa.table({"name": ["p"], "payload": ["x"], "prio": [1]})
    pq.write_table(table, directory / "drift.parquet")
    (directory / "head.csv").write_text("name,payload,colour\na,x,red\n")
    (directory / "wide.jsonl").write_bytes(_lines(good).decode().encode("utf-16"))
    return {
        "cut.jsonl.gz": "the compressed file is truncated",
        "cut.parquet": "not a complete Parquet file",
        "drift.parquet": "has an unknown column 'prio'",
        "head.csv": "has an unknown column 'colour'",
        "wide.jsonl": "the file is UTF-16",
    }


def test_file_that_cannot_be_read_to_its_end_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name, reason in _corpus(tmp_path).items():
        with pytest.raises(UserError, match=reason) as refused:
            _read(spark, str(tmp_path / "whole.parquet"), str(tmp_path / name))
        assert str(refused.value).startswith(str(tmp_path / name)), name


def test_missing_file_is_refused_before_spark_reads(spark: SparkSession) -> None:
    with pytest.raises(InvalidCampaign, match=r"nonexistent\.jsonl"):
        _read(spark, "/nonexistent.jsonl")


def test_invalid_rows_are_rejected_and_others_unchanged(
    spark: SparkSession, tmp_path: Path, broker: InMemoryBroker
) -> None:
    path = tmp_path / "a.jsonl"
    long = b'{"name": "long", "payload": "' + b"x" * LINE_BYTES_MAX + b'"}\n'
    path.write_bytes(
        _lines([{"name": "../../etc", "argv": ["../x"], "cwd": "../y", "lane": "../z"}])
        + b'{"name": "\xff", "payload": "x"}\n'
        + long
        + b'{"name": "cut", "payl\n'
        + _lines([{"name": "after", "payload": "x", "after": ["../../etc"]}])
    )
    checked = _read(spark, str(path))
    assert [one.line for one in checked.rejects] == [2, 3, 4]
    assert "not valid UTF-8" in checked.rejects[0].reason
    assert "the limit is 16777216" in checked.rejects[1].reason
    with internal(broker.client()) as client:
        assert _submit(checked, broker) == SubmitCounts(2, 0)
        view = client.show("c/../../etc")
        assert (view["lane"], view["campaign"]) == ("../z", "c")
    (place,) = write_rejected(checked.rejects)
    assert place == tmp_path / "a.jsonl.rejected.jsonl"
    assert [json.loads(line)["line"] for line in place.read_text().splitlines()] == [2, 3, 4]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.jsonl", place.name]


def test_columns_may_differ_between_files(
    spark: SparkSession, tmp_path: Path, broker: InMemoryBroker
) -> None:
    pq.write_table(pa.table({"name": ["a"], "payload": [b"x"]}), tmp_path / "a.parquet")
    table = pa.table({"priority": ["7"], "name": ["b"], "argv": ["echo hi"], "after": [["a"]]})
    pq.write_table(table, tmp_path / "b.parquet")
    checked = _read(spark, str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    assert _submit(checked, broker) == SubmitCounts(2, 0)
    with internal(broker.client()) as client:
        views = _views(client)
    assert (views["b"]["priority"], views["b"]["service"]) == (7, "exec")


def test_waves_follow_the_levels_and_a_second_run_submits_nothing(
    spark: SparkSession, tmp_path: Path, broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load.plan, "__kwdefaults__", {"wave": 4, "portion": 2})
    tasks = [
        {"name": f"l{level}-{n}", "payload": "x", "after": [f"l{level - 1}-{n}"] if level else []}
        for level in (2, 0, 1)
        for n in range(5)
    ]
    checked = _read(spark, _write(tmp_path / "a.jsonl", tasks))
    seen: list[tuple[str, int, int | None]] = []
    assert _submit(checked, broker, on_stage=lambda *far: seen.append(far)) == SubmitCounts(15, 0)
    assert seen == [("submitting", done, 15) for done in (0, 5, 10, 15)]
    assert _submit(checked, broker) == SubmitCounts(0, 15)


def test_files_that_name_dependencies_first_are_submitted_in_their_order(
    spark: SparkSession, tmp_path: Path, broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaigns, "SPLIT_BYTES", 200)
    monkeypatch.setattr(load, "JOB_TASKS", 12)
    tasks = [
        {"name": f"t{n}", "argv": ["true"], "after": [f"t{n - 3}"] if n >= 3 else []}
        for n in range(40)
    ]
    tasks[20]["priority"] = "high"
    checked = _read(spark, _write(tmp_path / "a.jsonl", tasks))
    assert len(checked.chunk_rows) == 9
    assert checked.validation.is_topological
    seen: list[int] = []
    counts = _submit(checked, broker, on_stage=lambda _stage, done, _total: seen.append(done))
    behind = len(range(20, 40, 3))
    assert counts == SubmitCounts(40 - behind, 0)
    assert len(seen) > 3
    assert len(broker.run_all()) == 40 - behind


def test_bundles_are_submitted_like_those_of_a_plain_load(
    spark: SparkSession, tmp_path: Path, broker: InMemoryBroker
) -> None:
    to = [{"id": f"r{n}", "host": f"h{n % 2}"} for n in range(5)]
    tasks: list[dict[str, Any]] = [
        {"name": "sent", "payload": "", "after": ["mail/0", "mail/4"]},
        {"name": "mail", "payload": {"text": "hi"}, "recipients": to, "lane": "{host}"},
        {"name": "plain", "payload": "hi", "recipients": ["x", "y"], "after": ["sent"]},
        {"name": "mail/2", "payload": ""},
        {"name": "twice/1", "payload": ""},
        {"name": "twice", "payload": "hi", "recipients": ["x", "y"], "lane": "{recipient}"},
        {"name": "lost", "payload": "hi", "recipients": ["x"], "lane": "{host}"},
    ]
    file = _write(tmp_path / "a.jsonl", tasks)
    checked, loaded = _read(spark, file), read_campaign(file, FileOptions(campaign="c"))
    assert [str(one) for one in checked.rejects] == [str(one) for one in loaded.rejected]
    raws = [msgspec.json.decode(msgspec.json.encode(one.raw)) for one in checked.rejects]
    assert raws == [tasks[3], tasks[5], tasks[6]]
    assert _submit(checked, broker) == SubmitCounts(9, 0)
    with internal(broker.client()) as client:
        lanes = {name: view["lane"] for name, view in _views(client).items()}
        assert (lanes["mail/1"], lanes["plain/1"]) == ("h1", "y")
        again = submit_campaign(client, loaded, "c", on_rejected=lambda *_rows: None)
        assert (again.new, again.existing.total()) == (0, 9)


def test_relative_path_is_absolute_in_executors_and_as_given_in_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "a.jsonl", [{"name": "a"}])
    planned = campaigns.plan(["a.jsonl"], FileOptions(campaign="c"))
    assert planned.splits[0].path == str(tmp_path / "a.jsonl")
    assert planned.where(1) == ("a.jsonl", 1)
    (tmp_path / "a.jsonl").unlink()
    (rejected,) = campaigns.read_split(planned, 0, lambda _service: "")
    (reason,) = rejected["reason"].to_pylist()
    assert reason.startswith(f"a.jsonl: not found on {socket.gethostname()}, which runs a Spark")


def test_name_of_another_task_stops_the_load_before_it_begins(
    spark: SparkSession, tmp_path: Path, broker: InMemoryBroker
) -> None:
    with internal(broker.client()) as client:
        client.submit(["true"], name="a", campaign="c")
        client.submit(["false"], name="b", campaign="c")
        client.submit(["true"], name="c/c")
        client.submit(["false"], name="d", campaign="other")
        client.status()
        tasks = [{"name": name, "argv": ["true"]} for name in "abcd"]
        checked = _read(spark, _write(tmp_path / "a.jsonl", tasks))
        found = load.conflicts(
            checked, make_target(broker.endpoint, None, "c", UnknownPolicy.REFUSE)
        )
        assert len(found) == 2
        assert f"{tmp_path}/a.jsonl:2: task c/b is known with another payload" in found[0]
        assert (
            f"{tmp_path}/a.jsonl:3: task c/c: the name is that of a task outside any campaign"
            in found[1]
        )
        assert len(client.existing(["c/a", "c/b", "c/c", "other/d", "c/d"])) == 4
        with pytest.raises(Refused, match="task c/b is known"):
            _submit(checked, broker)


def test_task_never_depends_on_another_files_task_of_the_same_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    def tasks(own: str) -> list[dict[str, Any]]:
        first = {"name": "first", "argv": ["echo", own]}
        last = {"name": f"last-{own}", "argv": ["true"], "after": ["first"]}
        return [first, last, {"name": f"alone-{own}", "argv": ["true"]}]

    _write(tmp_path / "one.jsonl", tasks("1"))
    _write(tmp_path / "two.jsonl", tasks("2"))
    files = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    checked = _read(spark, *files)
    rejects = [str(one).partition("two.jsonl:")[2] for one in checked.rejects]
    assert rejects[0].startswith("1: duplicate name 'first', first in ")
    assert rejects[1] == "2: waits for 'first', which was rejected (line 1)"
    assert len(rejects) == 2
    assert len(checked.validation.rows) == 4


#: The sizes of waves and portions, and the tasks after which a load is killed.
SMALL_WAVES = {"wave": 20, "portion": 10}
KILLED_AT_TASKS = 40

_KILLED = """
import os, signal, sys
from taskyard.campaign.formats import FileOptions
from taskyard.core.events import UnknownPolicy
from taskyard.pipeline.jobs import load
from taskyard.pipeline.session import session
from taskyard.pipeline.sources import campaigns
from taskyard.pipeline.submit import make_target
from tests.pipeline.scenarios import SMALL
from tests.pipeline.test_load import KILLED_AT_TASKS, SMALL_WAVES

load.plan.__kwdefaults__ = SMALL_WAVES
spark = session("tests", "local[2]", conf=SMALL)
checked = load.read(spark, campaigns.plan([sys.argv[1]], FileOptions(campaign="c")))
def kill(stage, done, total):
    if done >= KILLED_AT_TASKS:
        os.kill(os.getpid(), signal.SIGKILL)
load.submit_all(checked, make_target(sys.argv[2], None, "c", UnknownPolicy.REFUSE), kill)
"""


class Killed(Exception):
    """Ends a load in place of a kill."""


def raise_killed(_stage: str, done: int, _total: int | None) -> None:
    if done >= KILLED_AT_TASKS:
        raise Killed


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_rerun_after_a_kill_submits_nothing_twice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_real: bool
) -> None:
    """End a load between two waves. A real kill there costs a JVM, and no task is on its way."""
    tasks = [
        {"name": f"t{n}", "argv": ["true", str(n)], "after": [f"t{n - 20}"] if n >= 20 else []}
        for n in reversed(range(100))
    ]
    file = _write(tmp_path / "a.jsonl", tasks)
    with Broker(tmp_path) as broker:
        to = make_target(broker.endpoint, None, "c", UnknownPolicy.REFUSE)
        checked = _read(spark, file)
        if is_real:
            command = [sys.executable, "-c", _KILLED, file, broker.endpoint]
            path = {"PYTHONPATH": os.pathsep.join(sys.path)}
            killed = subprocess.run(command, env=os.environ | path, check=False)
            assert killed.returncode == -signal.SIGKILL
        else:
            with monkeypatch.context() as patch:
                patch.setattr(load.plan, "__kwdefaults__", SMALL_WAVES)
                with pytest.raises(Killed):
                    load.submit_all(checked, to, raise_killed)
        assert load.conflicts(checked, to) == []
        assert load.submit_all(checked, to) == SubmitCounts(60, 40)
        broker.terminate()
    tally = _tally(tmp_path / ".taskyard")
    assert (tally.submitted, tally.unfinished, tally.unknown) == (100, 100, 0)


def _tally(state: Path) -> Any:
    seen = witnessed(state)
    assert seen is not None
    counting, number = Auditor(), 0
    with JournalReader(state, *seen) as reader:
        for row in reader.rows():
            counting.add(recovery.records_of(row, number))
            number = row.record_last
    return counting.tally()


# The command.


def _call(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(taskyard, ["load", "--spark", "local[*]", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("spark")
def test_dry_run_needs_no_broker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(tmp_path / "d.jsonl", DIAMOND)
    code, out, _ = _call(file, "--dry-run", capsys=capsys)
    assert code == 0
    lines = [line.split(maxsplit=1) for line in out.splitlines()[1:]]
    printed = {first: rest for first, rest in lines if first != "critical"}
    assert (printed["tasks"], printed["depth"], printed["width"]) == ("5", "4", "2 (on level 2)")
    assert "critical path  4 tasks: top → left → end → last" in out
    _, out, _ = _call(file, "--dry-run", "--json", capsys=capsys)
    schemas.check(out)
    assert json.loads(out)["critical_path"] == ["top", "left", "end", "last"]


@pytest.mark.usefixtures("spark")
def test_command_submits_all_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broker: InMemoryBroker
) -> None:
    tasks = [*DIAMOND, {"name": "bad"}, {"name": "behind", "payload": "", "after": ["bad"]}]
    file = _write(tmp_path / "d.jsonl", tasks)
    to = ("--broker", broker.endpoint)
    rejects = tmp_path / "rejects.jsonl"
    code, _, err = _call(file, *to, "--rejects", str(rejects), capsys=capsys)
    assert code == 2
    assert f"{file}:6: has no work" in err
    assert "nothing submitted" in err
    assert len(rejects.read_text().splitlines()) == 2
    code, _, err = _call(file, "--dry-run", "--skip-bad", capsys=capsys)
    assert (code, err.splitlines()[-1]) == (0, "2 bad rows would be skipped and 5 tasks submitted")
    with internal(broker.client()) as client:
        assert _views(client) == {}
        code, out, _ = _call(file, *to, "--skip-bad", "--json", capsys=capsys)
        schemas.check(out)
        assert (code, json.loads(out)["new"], json.loads(out)["rejected"]) == (0, 5, 2)
        _, out, _ = _call(file, *to, "--skip-bad", capsys=capsys)
        assert out == "campaign d: 5 tasks: 0 new, 5 existing\n"
        assert client.counts("d")["ready"] == 1
        code, out, _ = _call(file, *to, "--skip-bad", "--campaign", "e", capsys=capsys)
        assert (code, out) == (0, "campaign e: 5 tasks: 5 new, 0 existing\n")
        tasks[0] = {**tasks[0], "argv": ["false"]}
        changed = _write(tmp_path / "changed.jsonl", tasks)
        code, _, err = _call(changed, *to, "--skip-bad", "--campaign", "d", capsys=capsys)
        assert code == 2
        assert "1 task refused, nothing submitted" in err


@pytest.mark.usefixtures("spark")
def test_lanes_follow_the_brokers_templates_or_nothing_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taskyard.toml").write_text('[service.mail]\nlane = "{host}"\n')
    tasks: list[dict[str, Any]] = [
        {"name": "a", "service": "mail", "payload": {"host": "h1"}},
        {"name": "b", "service": "mail", "payload": {"host": "h2"}, "lane": "own"},
        {"name": "c", "service": "other", "payload": {"host": "h3"}},
        {"name": "e", "service": "mail", "payload": "", "recipients": [{"id": "r", "host": "h4"}]},
    ]
    good = _write(tmp_path / "good.jsonl", tasks)
    unplaced = {"name": "d", "service": "mail", "payload": {"text": ""}}
    bad = _write(tmp_path / "bad.jsonl", [*tasks, unplaced])
    with Broker(tmp_path) as broker, Client(broker.endpoint) as client:
        code, _, err = _call(bad, "--broker", broker.endpoint, capsys=capsys)
        assert code == 2
        lane = "the lane of service mail is '{host}', but the task has no field 'host'"
        assert f"{bad}:5: {lane}" in err
        assert "the input has 1 bad row" in err
        assert _views(client) == {}
        assert _call(good, "--broker", broker.endpoint, capsys=capsys)[0] == 0
        assert {name: view["lane"] for name, view in _views(client).items()} == {
            "a": "h1",
            "b": "own",
            "c": "",
            "e/0": "h4",
        }
        broker.terminate()


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a session is started."""

    def start(*_arguments: object, **_options: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(session, "session_scope", start)


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            "README.md",
            "# Read me\n",
            "no campaign files in this directory (1 file without a suffix",
        ),
        ("a.csv", "name,colour\na,red\n", "a.csv:1: the table has an unknown column"),
        ("a.parquet", "PAR1", "a.parquet:1: not a complete Parquet file"),
        ("a.jsonl", "\xff\xfe{\0", "a.jsonl:1: the file is UTF-16"),
        ("a.jsonl", '{"name": "a", "payload": ""}\n', "broker"),
    ],
)
def test_errors_of_input_are_found_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, problem: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(text.encode("latin-1"))
    to = ("--broker", f"ipc://{tmp_path}/none.sock", "--broker-timeout", "0.1s")
    code, _, err = _call(str(tmp_path / "in"), *to, capsys=capsys)
    assert code == (3 if problem == "broker" else 2)
    assert problem in err


@pytest.mark.usefixtures("spark")
def test_files_of_a_directory_that_are_skipped_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "a.jsonl", DIAMOND)
    (tmp_path / "README.md").write_text("# Read me\n")
    code, out, err = _call(str(tmp_path), "--dry-run", capsys=capsys)
    assert (code, "tasks          5" in out) == (0, True)
    assert "skipped 1 file without a suffix of campaign files: README.md\n" in err


def test_several_files_require_a_campaign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [_write(tmp_path / f"{name}.jsonl", DIAMOND) for name in "ab"]
    code, _, err = _call(*files, "--dry-run", capsys=capsys)
    assert code == 2
    assert "--campaign" in err
