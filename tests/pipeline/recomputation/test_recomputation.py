"""Every column of every table of `pipeline history`, recomputed by other means.

The histories are a real run (`live_run`), hand-written ones and simulated schedules (`histories`).
`replay` and the modules beside it recompute the tables in plain Python.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from taskyard.pipeline import tables
from taskyard.pipeline.datasets import BROKER
from taskyard.pipeline.jobs.history import HistoryJob
from tests.pipeline.recomputation import live_run
from tests.pipeline.recomputation.comparison import DATASETS, Tables, compare, rows_of
from tests.pipeline.recomputation.histories import HistoryRows, read_rows, united, write_rows

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.pipeline.recomputation.replay import Row

pytestmark = pytest.mark.timeout(900)

#: Kinds of events that the real run must have.
KINDS = (
    *("submitted", "ready", "leased", "finished", "failed", "postponed", "returned", "expired"),
    *("due", "aged", "cancelled", "retried", "progressed", "stale", "extended", "moved", "edited"),
    *("worker_joined", "worker_left"),
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> HistoryRows:
    return read_rows(live_run.make_state(tmp_path_factory.mktemp("live")))


@pytest.fixture(scope="module")
def rows(live: HistoryRows) -> HistoryRows:
    return united(live)


@pytest.fixture(scope="module")
def at_once(
    spark: SparkSession, rows: HistoryRows, tmp_path_factory: pytest.TempPathFactory
) -> Tables:
    """Return the tables of the whole history, folded in one run."""
    directory = tmp_path_factory.mktemp("whole")
    write_rows(directory / "state", 1, rows.last, rows)
    return make_tables(spark, directory / "state", directory / "out")


def make_tables(spark: SparkSession, state: Path, out: Path) -> Tables:
    with closing(HistoryJob(state, out)) as job:
        job.run(spark)
    return {one.name: rows_of(tables.read(spark, out, one)) for one in DATASETS}


def differences(found: Tables, rows: HistoryRows) -> str:
    """Return the differences to the recomputed tables, a line for each."""
    return "\n".join(map(str, compare(found, *rows)))


def test_real_run_has_events_of_all_kinds(live: HistoryRows) -> None:
    assert {str(row["kind"]) for row in live.events} >= {*KINDS}
    dialects = {row["dialect"] for row in live.events if row["kind"] == "leased"}
    assert dialects == {"dwork", "wmp", "ping-pong", "round-robin"}
    assert any(row["signal"] for row in live.events)


def test_tables_are_the_recomputed_ones(at_once: Tables, rows: HistoryRows) -> None:
    assert not differences(at_once, rows)


def test_history_folded_in_parts_gives_the_same_tables(
    spark: SparkSession, at_once: Tables, rows: HistoryRows, tmp_path: Path
) -> None:
    """Fold the history in two runs. The tables of the first part are checked, too."""
    middle = rows.last * 2 // 3
    state, out = tmp_path / "state", tmp_path / "out"
    write_rows(state, 1, middle, rows)
    assert not differences(make_tables(spark, state, out), rows.part(1, middle))
    write_rows(state, middle + 1, rows.last, rows)
    for name, found in make_tables(spark, state, out).items():
        assert _sorted(found) == _sorted(at_once[name]), name


def _sorted(table: list[Row]) -> list[str]:
    """Return rows in one order. Their broker is the path of the tables."""
    return sorted(str({**row, BROKER.name: ""}) for row in table)
