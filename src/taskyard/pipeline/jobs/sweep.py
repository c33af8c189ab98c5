"""`pipeline sweep`: simulate a campaign at every point of a grid, in the executors.

Reads the workload, gives each executor a share of the points, and writes the results as a table and
as a page with charts. The simulation itself is in `taskyard.pipeline.sweep`.
"""

from __future__ import annotations

import gc
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from msgspec import structs

from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.pipeline.datasets import ATTEMPTS, EDGES, TASKS, WORKERS
from taskyard.pipeline.executors import cores_of
from taskyard.pipeline.jobs.broker_tables import BrokerTables
from taskyard.pipeline.report.format import format_duration, shorten_name
from taskyard.pipeline.sources.history import labels
from taskyard.pipeline.sweep.conclusions import SweepResult, check_text, sentences
from taskyard.pipeline.sweep.from_history import (
    COLUMNS,
    HistoryTables,
    workload_of,
    workload_of_brokers,
)
from taskyard.pipeline.sweep.grid import Forecast, Point
from taskyard.pipeline.sweep.page import page_of
from taskyard.pipeline.sweep.simulation import check_accepted, replay, simulate
from taskyard.pipeline.sweep.workload import (
    CampaignBounds,
    Workload,
    campaign_bounds,
    decode_workload,
    encode_workload,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

#: Shares per core. Several, because points differ in how long they take.
SHARES_PER_CORE: Final = 4

#: Points are simulated in rounds of about so much CPU time for each core, and progress is shown
#: after each. A round costs Spark about 0.4 s of CPU.
ROUND_SECONDS: Final = 5.0

#: A round has at most so many times the points of the one before, which may have been fast ones.
ROUND_GROWTH_MAX: Final = 8

#: The broker's own setting. Many live objects make each collection expensive.
GC_THRESHOLD: Final = 50_000

#: Limit of the tasks in a sweep. All of them are sent to every executor.
TASKS_MAX: Final = 2_000_000

_POINTS: Final = "number long, workers long, slots long, policy array<string>"
_FORECASTS: Final = (
    "number long, makespan_ns long, busy_ns long, utilisation double, wait_ns_mean long, "
    "wait_ns_p50 long, wait_ns_p95 long, wait_ns_max long, done long, failed long, "
    "unfinished long, cpu_ns long"
)

_HOUR_NS: Final = 3_600_000_000_000


def sweep(
    spark: SparkSession,
    workload: Workload,
    points: Sequence[Point],
    show: Callable[[str, int, int | None], None] = lambda *_: None,
) -> SweepResult:
    """Simulate a campaign at every point. Raises UserError for too few or too many tasks, and for
    tasks that a broker would refuse.

    `show` is called with the stage, the points that are done, and all points if they count.
    """
    if not workload.names:
        raise UserError("no tasks to simulate (check the campaign's name)")
    if len(workload.names) > TASKS_MAX:
        raise UserError(
            f"{len(workload.names):,} tasks, the limit is {TASKS_MAX:,} (use --campaign)"
        )
    # The first ones start Python in the executors, which must not count for the remaining time.
    show("simulating the first points", 0, len(points))
    check_accepted(workload)
    time_bounds = campaign_bounds(workload)
    made: list[Forecast] = []
    for some in forecasts(spark, workload, points):
        made += some
        show("simulating points", len(made), len(points))
    results = list(zip(points, made, strict=True))
    sweep_result = SweepResult(
        workload, time_bounds, results, sentences(workload, time_bounds, results)
    )
    if workload.stays and workload.makespan_ns:
        show("simulating the measured run", 0, None)
        sweep_result.replayed = replay(workload)
        sweep_result.sentences.append(check_text(workload, sweep_result.replayed))
    return sweep_result


def workload_from_tables(
    spark: SparkSession, found: Sequence[BrokerTables], campaign: str | None
) -> Workload:
    """Build the workload of a past campaign, or of all campaigns of all brokers together.

    Raises UserError if several brokers have the campaign: it is another one at each.
    """
    if len(found) == 1:
        (one,) = found
        return workload_of(**structs.asdict(history_tables(spark, one, campaign)))
    names = labels([one.files.directory for one in found])
    if campaign is None:
        of_all = {
            name: history_tables(spark, one, None) for name, one in zip(names, found, strict=True)
        }
        return workload_of_brokers(of_all)
    having = [
        (name, one)
        for name, one in zip(names, found, strict=True)
        if campaign in one.files.campaigns()
    ]
    if len(having) > 1:
        raise UserError(
            f"campaign {shorten_name(campaign)!r}: another one at each of the brokers "
            f"{', '.join(name for name, _ in having)} (give one of them)"
        )
    return workload_from_tables(spark, [one for _, one in having] or found[:1], campaign)


def history_tables(spark: SparkSession, one: BrokerTables, campaign: str | None) -> HistoryTables:
    """Collect the tables of one broker. With a campaign, only its tasks."""
    made = {
        dataset.name: one.arrow(spark, dataset, COLUMNS[dataset.name])
        for dataset in (ATTEMPTS, EDGES, WORKERS)
    }
    tasks = one.arrow(spark, TASKS, ("campaign", *COLUMNS[TASKS.name]))
    if campaign is not None:
        tasks = tasks.filter(pc.equal(tasks["campaign"], campaign))
    return HistoryTables(tasks=tasks.drop_columns(["campaign"]), **made)


def forecasts(
    spark: SparkSession, workload: Workload, points: Sequence[Point]
) -> Iterator[list[Forecast]]:
    """Simulate all points in rounds. Yield the forecasts of each, in the order of the points.

    The first round is one point for each core. It shows how many the next ones can have.
    """
    simulate_share, cores = _simulate_share(encode_workload(workload)), cores_of(spark)
    first, count = 0, cores
    while first < len(points):
        some = points[first : first + count]
        rows = [
            (number, one.workers, one.slots, list(one.policy)) for number, one in enumerate(some)
        ]
        shares = min(len(some), SHARES_PER_CORE * cores)
        frame = spark.createDataFrame(rows, _POINTS).repartition(shares)
        table = frame.mapInPandas(simulate_share, _FORECASTS).toArrow().sort_by("number")
        made = [Forecast(**row) for row in table.drop_columns("number").to_pylist()]
        yield made
        first += len(made)
        cpu_s = sum(one.cpu_ns for one in made) / SECOND_NS
        count = points_per_round(len(made), cpu_s, cores)


def points_per_round(count: int, cpu_s: float, cores: int) -> int:
    """Return the points of the next round, after one of so many points took so much CPU time."""
    growth = min(ROUND_GROWTH_MAX, ROUND_SECONDS * cores / max(cpu_s, 0.001))
    return max(1, int(count * growth) // cores) * cores


def _simulate_share(encoded: bytes) -> Callable[[Iterable[pd.DataFrame]], Iterator[pd.DataFrame]]:
    """Return the function that simulates an executor's share of the points."""

    def run(frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        gc.freeze()  # imported modules are never collected
        gc.set_threshold(GC_THRESHOLD)
        workload, time_bounds = _decoded(encoded)
        for frame in frames:
            rows = []
            for number, count, slots, policy in frame.itertuples(index=False):
                point = Point(int(count), int(slots), tuple(policy))
                made = structs.asdict(simulate(workload, time_bounds, point))
                rows.append({"number": number, **made})
            yield pd.DataFrame(rows)

    return run


@lru_cache(maxsize=1)
def _decoded(encoded: bytes) -> tuple[Workload, CampaignBounds]:
    """Decode a workload, once in each process of an executor."""
    workload = decode_workload(encoded)
    return workload, campaign_bounds(workload)


def table_of(sweep_result: SweepResult, price: float | None = None) -> pa.Table:
    """Return the sweep as a table with one row for each point. `price` is per slot and hour."""
    rows = []
    for point, forecast in sweep_result.results:
        slot_hours = point.slots_total * forecast.makespan_ns / _HOUR_NS
        row: dict[str, object] = {
            "workers": point.workers,
            "slots": point.slots,
            "policy": " ".join(point.policy),
            **structs.asdict(forecast),
            "slot_hours": slot_hours,
        }
        if price is not None:
            row["cost"] = slot_hours * price
        rows.append(row)
    return pa.Table.from_pylist(rows)


def write(sweep_result: SweepResult, table: pa.Table, directory: Path) -> Path:
    """Write the table and the page. Returns the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(table, directory / "sweep.parquet", compression="zstd")
    pa.csv.write_csv(table, directory / "sweep.csv")
    path = directory / "sweep.html"
    path.write_text(page_of(sweep_result, table), encoding="utf-8")
    return path


def speed_text(sweep_result: SweepResult) -> str:
    """Describe the speed of the simulation."""
    cpu_ns = sum(forecast.cpu_ns for _, forecast in sweep_result.results)
    tasks = len(sweep_result.workload.names) * len(sweep_result.results)
    rate = tasks / cpu_ns * 1e9 if cpu_ns else 0
    return (
        f"{len(sweep_result.results):,} points of {len(sweep_result.workload.names):,} tasks took "
        f"{format_duration(cpu_ns)} of CPU: {rate:,.0f} simulated tasks per second and core"
    )
