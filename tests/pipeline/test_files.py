"""Shares of work on files: splitting parts and placing tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema

from taskyard.journal.history import HistoryPart
from taskyard.pipeline.datasets import TASKS, TASKS_WITHOUT_GRAPH
from taskyard.pipeline.files import PartSplit
from taskyard.pipeline.layout import campaign_key, folder
from taskyard.pipeline.placement import GraphPlacement
from tests.pipeline.scenarios import START, EventLog, write_part

if TYPE_CHECKING:
    from pathlib import Path


def write_rows(path: Path, schema: pa.Schema, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


def test_part_is_split_by_campaign_and_day_repeatably(tmp_path: Path) -> None:
    log = EventLog("night run")
    log.join(0, "w")
    log.submit(0, "a")
    log.submit(86_400, "b", "a")
    write_part(tmp_path, 1, 9, log)
    share = PartSplit(tmp_path, HistoryPart(1, 9), tmp_path / "out")
    for _ in range(2):
        assert share() == [None, "night run"]
    found = {
        str(path.relative_to(tmp_path / "out").parent): pq.read_table(path, partitioning=None)
        for path in (tmp_path / "out").rglob("*.parquet")
    }
    key = folder(campaign_key("night run"))
    assert {place: len(table) for place, table in found.items()} == {
        "events/campaign_key=yard/day=2026-03-01": 1,
        f"events/{key}/day=2026-03-01": 2,
        f"events/{key}/day=2026-03-02": 1,
        f"edges/{key}/day=2026-03-02": 1,
    }
    edge = found[f"edges/{key}/day=2026-03-02"].to_pylist()[0]
    assert (edge["task"], edge["after"], edge["campaign"]) == ("b", "a", "night run")


def test_linked_campaigns_are_placed_together(tmp_path: Path) -> None:
    schema = to_arrow_schema(TASKS_WITHOUT_GRAPH.schema, timezone="UTC")
    given = {"generation": 1, "attempts": 1, "state": "DONE", "submitted": START}
    rows: list[dict[str, object]] = [
        {"campaign": campaign, "task": task, "run_last_ns": run_ns, "submitted_record": n, **given}
        for n, (campaign, task, run_ns) in enumerate(
            (("one", "a", 5), ("two", "b", 7), ("three", "c", 11))
        )
    ]
    names = pa.schema([(name, pa.string()) for name in ("campaign", "task", "after")])
    edge_schema = names.append(pa.field("record", pa.int64()))
    edges: list[dict[str, object]] = [
        {"campaign": "two", "task": "b", "after": "a", "record": 1},
        {"campaign": "three", "task": "c", "after": "b", "record": 2},
    ]
    keys = ("k", "k", "j")  # two of the names have the same key
    for number, (key, row) in enumerate(zip(keys, rows, strict=True)):
        write_rows(tmp_path / f"alone/{folder(key)}/day=x/{number}.parquet", schema, [row])
    for key, edge in zip(keys[1:], edges, strict=True):
        write_rows(tmp_path / f"edges/{folder(key)}/day=x/1.parquet", edge_schema, [edge])
    GraphPlacement(("j", "k"), tmp_path / "alone", tmp_path / "edges", tmp_path / "tasks")()
    placed = {
        path.relative_to(tmp_path / "tasks").parts[0]: pq.read_table(path, partitioning=None)
        for path in sorted(tmp_path.glob("tasks/*/*/*"))
    }
    assert sorted(placed) == [folder("j"), folder("k")]
    assert all(one.column_names == TASKS.names for one in placed.values())
    found = [
        pq.read_table(path, partitioning=None).to_pylist()[0]
        for path in sorted(tmp_path.glob("tasks/*/*/*"), key=lambda path: path.name)
    ]
    assert [(row["campaign"], row["task"], row["level"], row["path_ns"]) for row in found] == [
        ("one", "a", 0, 5),
        ("two", "b", 1, 12),
        ("three", "c", 2, 23),
    ]


def test_events_without_a_submission_give_no_task(tmp_path: Path) -> None:
    GraphPlacement(("k",), tmp_path / "alone", tmp_path / "edges", tmp_path / "tasks")()
    assert not (tmp_path / "tasks").exists()
