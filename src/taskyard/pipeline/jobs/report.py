"""`pipeline report`: one HTML page about one or several histories, with its tables beside it.

Reads events and edges, calls the transforms, and collects only aggregates. So the page of a million
tasks is as large as that of a hundred. Each table is written as Parquet and as CSV: one file, or a
directory of files if the table is large.

Brokers share neither names nor records. So datasets and guarantees are computed for each broker,
and united with the column `broker`.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from msgspec import Struct
from pyspark.sql import functions as f

from taskyard.errors import UserError
from taskyard.pipeline.datasets import BROKER, of_broker, united
from taskyard.pipeline.placement import placed_tasks
from taskyard.pipeline.report import page
from taskyard.pipeline.report.charts import WORKERS_SHOWN_MAX
from taskyard.pipeline.report.format import shorten_name
from taskyard.pipeline.report.headline import page_of
from taskyard.pipeline.report.summary import (
    BrokerSummary,
    ReportSummary,
    TimeSeries,
    interval_width,
    over_time,
)
from taskyard.pipeline.session import cache
from taskyard.pipeline.sources.history import HistoryFrames, labels
from taskyard.pipeline.transforms import summaries
from taskyard.pipeline.transforms.guarantees import (
    Guarantees,
    broken_dependencies,
    lost_tasks,
    repeated_completions,
    task_ends,
    unknown_tasks,
)
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.metrics import attempt_deltas, campaign_deltas
from taskyard.pipeline.transforms.steps import attempts_from_steps, steps
from taskyard.pipeline.transforms.tasks import critical_path, tasks_without_graph
from taskyard.pipeline.transforms.workers import workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import Column, DataFrame

PAGE: Final = "report.html"

#: A larger table is written as a directory of files.
ROWS_PER_FILE_MAX: Final = 2_000_000

#: Campaigns that an error lists.
_CAMPAIGNS_LISTED_MAX: Final = 10


class ReportDatasets(Struct):
    """The datasets of a report. Call `release` to free Spark's cache."""

    campaign: str | None
    #: Rows of the campaign, with the column `broker`. Workers are shared by all campaigns of a
    #: broker.
    task_steps: DataFrame
    tasks: DataFrame
    attempts: DataFrame
    workers: DataFrame
    critical_path: DataFrame
    #: With guarantees that are counted over the whole history.
    brokers: list[BrokerSummary]
    cached: list[DataFrame]

    def release(self) -> None:
        for frame in self.cached:
            frame.unpersist()


def datasets(histories: Sequence[HistoryFrames], campaign: str | None) -> ReportDatasets:
    """Compute the datasets of one campaign, or of all campaigns as one.

    A campaign of this name may be at several brokers. Violations of guarantees are counted over the
    whole histories.
    """
    names = labels([one.directory for one in histories])
    known = [one.campaigns() for one in histories]
    every = [name for names_of_one in known for name in names_of_one]
    if campaign is None and len(every) == 1:
        campaign = every[0]
    elif campaign is not None and campaign not in every:
        raise UserError(_unknown_campaign(campaign, sorted(set(every))))
    return _united(
        [
            _broker_datasets(one, campaign, BrokerSummary(one.broker, label, one.directory, found))
            for one, label, found in zip(histories, names, known, strict=True)
        ]
    )


def _united(parts: list[ReportDatasets]) -> ReportDatasets:
    first, *others = parts
    if not others:
        return first
    return ReportDatasets(
        campaign=first.campaign,
        **{name: united([getattr(one, name) for one in parts]) for name in ("task_steps", *TABLES)},
        brokers=[broker for one in parts for broker in one.brokers],
        cached=[frame for one in parts for frame in one.cached],
    )


def _broker_datasets(
    history: HistoryFrames, campaign: str | None, broker: BrokerSummary
) -> ReportDatasets:
    """Compute the datasets of one broker."""
    events, edges = history.events, history.edges
    if campaign is None:
        together = f.when(f.col("campaign").isNotNull(), f.lit(""))
        events = events.withColumn("campaign", together)
    task_steps = cache(steps(events))
    attempts = cache(attempts_from_steps(task_steps))
    without_graph = cache(tasks_without_graph(task_steps))
    task_links = cache(links(without_graph, edges))
    tasks = cache(placed_tasks(without_graph, task_links))
    stays = cache(workers(events, attempts))
    path = cache(critical_path(tasks))
    own = f.lit(True) if campaign is None else f.col("campaign") == campaign  # noqa: FBT003  # Spark's
    is_there = f.lit(campaign is None or campaign in broker.campaigns)
    broker.guarantees = count_guarantees(events, task_steps, tasks, task_links)
    return ReportDatasets(
        campaign=campaign,
        task_steps=of_broker(task_steps.where(own), history.broker),
        tasks=of_broker(tasks.where(own), history.broker),
        attempts=of_broker(attempts.where(own), history.broker),
        workers=of_broker(stays.where(is_there), history.broker),
        critical_path=of_broker(path.where(own), history.broker),
        brokers=[broker],
        cached=[task_steps, attempts, without_graph, task_links, tasks, stays, path],
    )


def count_guarantees(
    events: DataFrame, task_steps: DataFrame, tasks: DataFrame, task_links: DataFrame
) -> Guarantees:
    """Count how tasks ended, and every violation of a guarantee.

    Each count is a query of its own: Spark takes twice as long to plan all of them as one.
    """
    lost = cache(lost_tasks(events, task_steps, tasks, task_links))
    try:
        rows = task_ends(tasks, lost).toArrow().to_pylist()
    finally:
        lost.unpersist()
    ends = {row["end"]: row["count"] for row in rows}
    return Guarantees(
        submitted=sum(ends.values()),
        done=ends.get("DONE", 0),
        failed=ends.get("FAILED", 0),
        cancelled=ends.get("CANCELLED", 0),
        blocked_behind_failure=ends.get("blocked_behind_failure", 0),
        unfinished=ends.get("unfinished", 0),
        lost=ends.get("lost", 0),
        completed_twice=repeated_completions(task_steps).count(),
        dependencies_broken=broken_dependencies(task_steps, task_links).count(),
        unknown=unknown_tasks(task_steps).count(),
        stale_refused=events.where(f.col("kind") == "stale").count(),
    )


def _unknown_campaign(campaign: str, known: list[str]) -> str:
    text = f"unknown campaign {shorten_name(campaign)!r}"
    if not known:
        return f"{text} (this history has no tasks)"
    names = ", ".join(shorten_name(one) or "(none)" for one in known[:_CAMPAIGNS_LISTED_MAX])
    more = ", …" if len(known) > _CAMPAIGNS_LISTED_MAX else ""
    return f"{text} (this history has {names}{more})"


def summarize(found: ReportDatasets) -> ReportSummary:
    """Collect the aggregates that the page shows."""
    totals = summaries.totals(found.tasks).toArrow().to_pylist()[0]
    attempts = _with_labels(found.attempts, found.brokers)
    stays = _with_labels(found.workers, found.brokers).toArrow()
    summary = ReportSummary(
        campaign=found.campaign,
        brokers=found.brokers,
        totals=totals,
        over_time=TimeSeries(1, [], [], [], [], []),
        worker_times={},
        workers=stays,
        worker_runs=summaries.runs_by_worker(attempts).toArrow(),
        distributions=summaries.distributions(found.attempts).toArrow(),
        lanes=summaries.lanes(attempts).toArrow(),
        setbacks=summaries.setbacks(found.attempts).toArrow(),
        levels=summaries.levels(found.tasks).toArrow(),
        critical_path=last_path(found.critical_path.toArrow()),
    )
    began_ns, width_ns = summary.began_us * 1000, interval_width(summary.makespan_ns)
    marks = campaign_deltas(found.task_steps, found.attempts)
    summed = summaries.interval_sums(marks, began_ns, width_ns, ()).toArrow()
    summary.over_time = over_time(summed, width_ns)
    if len(stays.column("worker").unique()) <= WORKERS_SHOWN_MAX:
        marks = attempt_deltas(attempts)
        summed = summaries.interval_sums(marks, began_ns, width_ns, ("worker",)).toArrow()
        summary.worker_times = _by_worker(summed, width_ns)
    return summary


def _with_labels(frame: DataFrame, brokers: list[BrokerSummary]) -> DataFrame:
    """Put the broker's label before names of workers and lanes, if there are several brokers.

    A worker or lane of the same name at another broker is another one.
    """
    if len(brokers) == 1:
        return frame
    texts = [f.lit(text) for one in brokers for text in (one.broker, one.label)]
    label = f.create_map(*texts)[f.col(BROKER.name)]
    return frame.withColumns(
        {
            name: f.when(f.col(name) == "", f.col(name)).otherwise(
                f.concat(label, f.lit(": "), f.col(name))
            )
            for name in ("worker", "lane")
            if name in frame.columns
        }
    )


def last_path(paths: pa.Table) -> pa.Table:
    """Select the critical path of the broker that ended last. Each broker has one."""
    if len(paths.column(BROKER.name).unique()) <= 1:
        return paths
    last = pc.equal(paths.column("ended"), pc.max(paths.column("ended")))
    broker = paths.filter(last).column(BROKER.name)[0]
    return paths.filter(pc.equal(paths.column(BROKER.name), broker))


def _by_worker(summed: pa.Table, width_ns: int) -> dict[str, TimeSeries]:
    names = summed.column("worker").unique().to_pylist()
    return {
        name: over_time(summed.filter(pc.equal(summed.column("worker"), name)), width_ns)
        for name in names
    }


def write(found: ReportDatasets, out: Path, footer: str) -> tuple[Path, ReportSummary]:
    """Write the page and the tables. Returns the path of the page and its summary."""
    summary = summarize(found)
    if not summary.number("tasks"):
        raise UserError("nothing to report: this history has no tasks")
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    unfinished = path.with_name(PAGE + ".new")
    unfinished.write_text(page.render(page_of(summary, footer)), encoding="utf-8")
    for name in TABLES:
        _write_table(getattr(found, name), out / "tables", name)
    unfinished.rename(path)
    return path, summary


#: The tables that are written beside the page.
TABLES: Final = ("tasks", "attempts", "workers", "critical_path")


def _write_table(frame: DataFrame, directory: Path, name: str) -> None:
    """Write one table in both formats. Lists and maps become text in CSV."""
    directory.mkdir(parents=True, exist_ok=True)
    parquet, csv = directory / f"{name}.parquet", directory / f"{name}.csv"
    for path in (parquet, csv):
        _remove(path)
    if frame.limit(ROWS_PER_FILE_MAX + 1).count() > ROWS_PER_FILE_MAX:
        frame.write.parquet(parquet.absolute().as_uri())
        flat = [_text(one.name, one.dataType.typeName()) for one in frame.schema.fields]
        frame.select(*flat).write.csv(csv.absolute().as_uri(), header=True)
        return
    table = frame.toArrow()
    pa.parquet.write_table(table, parquet, compression="zstd")
    pa.csv.write_csv(_flat(table), csv)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _text(name: str, kind: str) -> Column:
    column = f.col(name)
    return f.to_json(column).alias(name) if kind in ("array", "map") else column


def _flat(table: pa.Table) -> pa.Table:
    """Replace lists and maps by text."""
    for place, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            texts = [None if one is None else str(one) for one in table.column(place).to_pylist()]
            table = table.set_column(place, field.name, pa.array(texts, pa.string()))
    return table
