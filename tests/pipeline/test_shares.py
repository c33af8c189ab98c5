"""Shares of the work of `pipeline history`: their sizes, their rows, and where they run."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from msgspec import Struct

from taskyard.journal.history import HistoryPart
from taskyard.pipeline import shares
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    CRITICAL_PATH,
    METRICS,
    TASKS_WITHOUT_GRAPH,
    WORKERS,
    Dataset,
)
from taskyard.pipeline.files import PartSplit, run_shares
from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.metrics import WIDTHS_SECONDS, chart_width_ns, divisor_ns
from taskyard.pipeline.layout import campaign_key
from taskyard.pipeline.shares import CampaignMetrics, arrow_schema, fold_shares
from tests.pipeline.scenarios import SECOND_NS, EventLog, write_part

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


@pytest.mark.parametrize(
    ("dataset", "schema"),
    [
        (ATTEMPTS, schemas.ATTEMPTS),
        (TASKS_WITHOUT_GRAPH, schemas.TASKS_WITHOUT_GRAPH),
        (WORKERS, schemas.WORKERS),
        (METRICS, schemas.METRICS),
        (CRITICAL_PATH, schemas.CRITICAL_PATH),
    ],
)
def test_fold_has_the_columns_of_a_dataset_and_a_broker(
    dataset: Dataset, schema: pa.Schema
) -> None:
    wanted = {field.name: field.type for field in arrow_schema(dataset)}
    found = {field.name: field.type for field in schema}
    assert {"broker": found["broker"], **wanted} == found


def test_parts_of_a_campaign_give_the_rows_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count(1)
    log, small = EventLog("large", numbers), EventLog("small", numbers)
    for number in range(12):
        log.submit(number, f"t{number}")
        log.run(f"t{number}", 30 * number, 30 * number + 9)
    small.submit(0, "a")
    write_part(tmp_path, 1, 99, log, small)
    assert PartSplit(tmp_path, HistoryPart(1, 99), tmp_path / "split")() == ["large", "small"]
    keys = [campaign_key(name) for name in ("large", "small")]
    events = tmp_path / "split" / "events"
    found = {}
    for limit in (1_000, 10):
        monkeypatch.setattr(shares, "EVENTS_PER_SHARE", limit)
        staged = tmp_path / f"staged-{limit}"
        made = [*fold_shares(keys, events, staged)]
        assert [one.number for one in made] == [*range(len(made))]
        assert [one.parts for one in made] == ([1] if limit == 1_000 else [5, 5, 5, 5, 5, 1])
        for share in made:
            share()
        CampaignMetrics(staged)()
        found[limit] = {
            dataset.name: rows_of(staged / dataset.name)
            for dataset in (ATTEMPTS, TASKS_WITHOUT_GRAPH, METRICS)
        }
    assert found[10] == found[1_000]
    assert len(found[10]["attempts"]) == 12


def rows_of(table: Path) -> list[dict[str, Any]]:
    files = sorted(table.rglob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    return sorted(rows, key=str)


def test_width_of_a_part_divides_all_wider_ones() -> None:
    for seconds in WIDTHS_SECONDS:
        divisor = divisor_ns(seconds * SECOND_NS) // SECOND_NS
        assert all(one % divisor == 0 for one in WIDTHS_SECONDS if one >= seconds)
    assert chart_width_ns(0) == SECOND_NS
    assert chart_width_ns(241 * SECOND_NS) == 2 * SECOND_NS
    assert chart_width_ns(1 << 62) == WIDTHS_SECONDS[-1] * SECOND_NS


class Square(Struct, frozen=True):
    """A share whose result has its number, and the process that ran it."""

    number: int

    def __call__(self) -> tuple[int, int]:
        return self.number**2, os.getpid()


def test_shares_run_in_executors_and_return_in_order(spark: SparkSession) -> None:
    found = run_shares(spark, [Square(number) for number in range(5)])
    assert [number for number, _ in found] == [0, 1, 4, 9, 16]
    assert os.getpid() not in {process for _, process in found}


def test_shares_of_a_small_history_run_here(small_spark: SparkSession) -> None:
    assert run_shares(small_spark, [Square(3)]) == [(9, os.getpid())]
