"""`report`: one HTML page about one or several histories, with its tables beside it.

Takes attempts, tasks, workers and critical paths from the fold, and collects only aggregates of
them. So the page of a million tasks is as large as that of a hundred. The guarantees are counted
over events and edges, independently of the fold. Each table is written as Parquet and as CSV: one
file, or a directory of files if the table is large.

Brokers share neither names nor records. So tables and guarantees are made for each broker, and
united with the column `broker`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from msgspec import Struct
from pyspark.sql import functions as f

from taskyard.errors import UserError
from taskyard.journal.history import FOLDER
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    BROKER,
    CRITICAL_PATH,
    EDGES,
    EVENTS,
    TASKS,
    WORKERS,
    Dataset,
)
from taskyard.pipeline.fold.stays import MEMBER_COLUMNS
from taskyard.pipeline.jobs.broker_tables import BrokerTables, frame_of, make_tables, rows_of
from taskyard.pipeline.jobs.earlier import EarlierCampaign, compare, listed
from taskyard.pipeline.report import marks, page
from taskyard.pipeline.report.charts import WORKERS_SHOWN_MAX
from taskyard.pipeline.report.comparison import Comparison
from taskyard.pipeline.report.format import shorten_name
from taskyard.pipeline.report.headline import page_of
from taskyard.pipeline.report.links import PageLinks
from taskyard.pipeline.report.reasons import (
    failed_rows,
    failure_groups,
    last_outputs,
    setbacks_by_form,
)
from taskyard.pipeline.report.stays import ATTEMPT_COLUMNS, with_work_of
from taskyard.pipeline.report.summary import (
    BrokerSummary,
    ReportSummary,
    TimeSeries,
    campaign_series,
    distributions_of,
    hosts_of,
    interval_width,
    levels_of,
    totals,
    worker_runs_of,
    worker_series,
)
from taskyard.pipeline.share_progress import StageCallback
from taskyard.pipeline.sources.history import HistoryFiles, labels
from taskyard.pipeline.transforms import guarantees, summaries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from taskyard.pipeline.transforms.guarantees import Guarantees

PAGE: Final = "report.html"

#: A larger table is written as a directory of files.
ROWS_PER_FILE_MAX: Final = 2_000_000

#: Columns that the aggregates need.
_TASK_COLUMNS: Final = (
    *("level", "state", "is_behind_failure", "service", "lane", "attempts", "failures", "losses"),
    *("wait_ns", "run_ns", "submitted", "ended", "earliest_end", "waits_for"),
    *("broker", "campaign", "task", "name", "worker", "reason"),
)
_ATTEMPT_COLUMNS: Final = (
    *("broker", "service", "lane", "worker", "outcome", "reason", "wait_ns", "queued_ns"),
    *("run_ns", "leased_ns", "leased_record", "settled", "host", "cpu_ns", "memory_max_bytes"),
)
_STEP_COLUMNS: Final = ("broker", "campaign", "task", "record", "kind", "time_ns")
_PAUSE_COLUMNS: Final = ("broker", "record", "kind", "time_ns", "service", "lane")
_GUARANTEE_COLUMNS: Final = ("task", "record", "kind", "worker", "due")


class ReportHistory(Struct):
    """The histories of a report, and its campaign. Found without Spark."""

    files: list[HistoryFiles]
    #: None: all campaigns together.
    campaign: str | None
    brokers: list[BrokerSummary]
    #: The campaign to compare with.
    earlier: EarlierCampaign | None = None

    @property
    def size_bytes(self) -> int:
        """The approximate size of the files to read."""
        size = sum(one.size_bytes for one in self.files)
        return size if self.earlier is None else size + self.earlier.size_bytes

    @property
    def campaigns(self) -> list[str]:
        """The campaigns of all brokers."""
        return sorted({name for one in self.brokers for name in one.campaigns})


def find_campaign(files: Sequence[HistoryFiles], campaign: str | None) -> ReportHistory:
    """Check the campaign of a report. A campaign of this name may be at several brokers.

    Raises UserError if no history has it, or if none has any task.
    """
    names = labels([one.directory for one in files])
    brokers = [
        BrokerSummary(one.broker, label, one.directory, one.campaigns())
        for one, label in zip(files, names, strict=True)
    ]
    every = sorted({name for one in brokers for name in one.campaigns})
    if campaign is not None and campaign not in every:
        raise UserError(_unknown_campaign(campaign, every))
    if not every:
        raise UserError("this history has no tasks")
    if campaign is None and sum(len(one.campaigns) for one in brokers) == 1:
        (campaign,) = every
    return ReportHistory([*files], campaign, brokers)


class ReportDatasets(Struct):
    """The tables of a report. Workers have the numbers of its campaign."""

    spark: SparkSession
    campaign: str | None
    #: One for each broker, and those of them that have the campaign.
    tables: list[BrokerTables]
    own_tables: list[BrokerTables]
    workers: pa.Table
    #: With guarantees that are counted over the whole history.
    brokers: list[BrokerSummary]
    #: With --compare.
    comparison: Comparison | None = None

    def frame(self, dataset: Dataset, names: Sequence[str] | None = None) -> DataFrame:
        """Return a table of the report's campaign, or some of its columns."""
        return frame_of(self.spark, self.own_tables, dataset, self.campaign, names)

    def rows(self, dataset: Dataset) -> pa.Table | None:
        """Return a table of the report's campaign if it is in memory."""
        if dataset is WORKERS:
            return self.workers
        return rows_of(self.own_tables, dataset, self.campaign)


def _ignore_stage(_stage: str, _rows: int, _total: int | None) -> None:
    """Show no progress."""


def datasets(
    spark: SparkSession,
    found: ReportHistory,
    scratch: Path,
    tables: Path | None = None,
    on_stage: StageCallback = _ignore_stage,
) -> ReportDatasets:
    """Make the tables of a report, and count its guarantees.

    `scratch` must exist until the report is written. With `tables`, the tables are kept there.
    The campaign is compared with the earlier one, if there is one.
    """
    made = []
    for number, one in enumerate(found.files):
        stage = "computing the tables" if len(found.files) == 1 else f"tables of {one.directory}"
        on_stage(stage, 0, None)
        place = scratch / str(number)
        place.mkdir(parents=True, exist_ok=True)
        made.append(make_tables(spark, one, place, tables, on_stage))
    on_stage("verifying the guarantees", 0, None)
    for broker_tables, broker in zip(made, found.brokers, strict=True):
        broker.guarantees = count_guarantees(spark, broker_tables)
    own = [
        one
        for one, broker in zip(made, found.brokers, strict=True)
        if found.campaign is None or found.campaign in broker.campaigns
    ]
    workers = pa.concat_tables([_workers(spark, one, found.campaign) for one in own])
    comparison = None
    if found.earlier is not None:
        on_stage("comparing with the earlier campaign", 0, None)
        place = scratch / "earlier"
        comparison = compare(spark, made, found.campaign, found.earlier, place)
    return ReportDatasets(spark, found.campaign, made, own, workers, found.brokers, comparison)


def _workers(spark: SparkSession, one: BrokerTables, campaign: str | None) -> pa.Table:
    """Return the stays of workers. With a campaign, their numbers count its work only."""
    stays = one.arrow(spark, WORKERS, [*WORKERS.names, BROKER.name])
    if campaign is None:
        return stays
    members = one.frame(spark, EVENTS) if one.rows is None else one.rows[EVENTS.name]
    if not isinstance(members, pa.Table):
        is_member = f.col("kind").isin("worker_joined", "worker_left")
        members = members.where(is_member).select(*MEMBER_COLUMNS).toArrow()
    attempts = rows_of([one], ATTEMPTS, campaign)
    if attempts is None:
        attempts = frame_of(spark, [one], ATTEMPTS, campaign, ATTEMPT_COLUMNS).toArrow()
    return with_work_of(stays, members, attempts)


def count_guarantees(spark: SparkSession, one: BrokerTables) -> Guarantees:
    """Count how the tasks of a broker ended, and every violation of a guarantee.

    From events and edges alone. Only the tasks blocked by a failure come from the fold, because
    they can only be found by a walk along the edges. Few histories have open tasks, so one query
    is usually enough.
    """
    events = frame_of(spark, [one], EVENTS, names=_GUARANTEE_COLUMNS)
    edges = frame_of(spark, [one], EDGES, names=("task", "after", "record"))
    counts = guarantees.Counts(guarantees.counts(events, edges).toArrow().to_pylist())
    left = guarantees.left_leases(events).count() if counts.newest("leased") else 0
    found = counts.guarantees(left=left, blocked_behind_failure=0)
    if not found.unfinished:
        return found
    blocked = ("task", "submitted_record", "is_behind_failure")
    known = frame_of(spark, [one], TASKS, names=blocked)
    behind = summaries.blocked_names(known).count()
    return counts.guarantees(left=left, blocked_behind_failure=behind)


def _unknown_campaign(campaign: str, known: list[str]) -> str:
    return f"unknown campaign {shorten_name(campaign)!r} ({listed(known)})"


def summarize(found: ReportDatasets, address: str = "") -> ReportSummary:
    """Collect the aggregates that the page shows. `address` is that of the state's page."""
    tasks = found.frame(TASKS, _TASK_COLUMNS)
    by_level = summaries.levels(tasks).toArrow()
    stays = found.workers
    if len(found.brokers) > 1:
        stays = _with_broker_labels(stays, found.brokers)
    attempts = _with_labels(found.frame(ATTEMPTS, _ATTEMPT_COLUMNS), found.brokers)
    counts = totals(by_level)
    summary = ReportSummary(
        campaign=found.campaign,
        brokers=found.brokers,
        totals=counts,
        over_time=TimeSeries(1, [], [], [], [], []),
        worker_times={},
        workers=stays,
        worker_runs=_NO_ROWS,
        distributions=_NO_ROWS,
        # Most histories have neither lanes nor failures. A query takes longer than to look.
        lanes=_rows(summaries.lanes(attempts), needed=bool(counts["laned"])),
        setbacks=setbacks_by_form(
            _rows(summaries.setbacks(attempts), needed=counts["attempts"] != counts["done"])
        ),
        levels=levels_of(by_level),
        critical_path=last_path(_collected(found, CRITICAL_PATH)),
        hosts=_NO_ROWS,
        slowest=_slowest(found, tasks),
        failures=failure_groups(_failed(found, tasks)) if counts["failed"] else [],
        links=PageLinks(address, found.campaign) if len(found.brokers) == 1 else PageLinks(),
        comparison=found.comparison,
    )
    failed = [row for group in summary.failures for row in group.tasks]
    if failed:
        printed = _printed(found, [row["task"] for row in failed])
        summary.outputs = last_outputs(failed, printed)
    width_ns = interval_width(summary.makespan_ns)
    are_shown = len(stays.column("worker").unique()) <= WORKERS_SHOWN_MAX
    task_steps = summaries.steps(found.frame(EVENTS, _STEP_COLUMNS))
    began_ns = summary.began_us * 1000
    cells = summaries.cells(task_steps, attempts, began_ns, width_ns, by_worker=are_shown).toArrow()
    summary.distributions, summary.worker_runs = distributions_of(cells), worker_runs_of(cells)
    summary.hosts = hosts_of(cells)
    summary.over_time = campaign_series(cells, width_ns)
    if are_shown:
        summary.worker_times = worker_series(cells, width_ns)
    services = {name for name in by_level["service"].unique().to_pylist() if name is not None}
    summary.marks = summary.span.clip(_marks(found, services))
    return summary


def _marks(found: ReportDatasets, services: set[str]) -> list[marks.Mark]:
    """Return the restarts of the campaign's brokers, and pauses of the services."""
    labels = {one.broker: one.label for one in found.brokers} if len(found.brokers) > 1 else {}
    restarts = [
        mark
        for one in found.own_tables
        for mark in marks.restarts(_state_of(one.files), labels.get(one.broker, ""))
    ]
    rows = rows_of(found.own_tables, EVENTS)
    kinds = ("paused", "resumed")
    if rows is None:
        frame = frame_of(found.spark, found.own_tables, EVENTS, names=_PAUSE_COLUMNS)
        rows = frame.where(f.col("kind").isin(*kinds)).toArrow()
    else:
        rows = rows.filter(pc.is_in(rows["kind"], pa.array(kinds))).select(_PAUSE_COLUMNS)
    return restarts + marks.pauses(rows.to_pylist(), services, labels)


def _state_of(files: HistoryFiles) -> Path:
    """Return the state directory of a history, if it is in one."""
    directory = Path(files.directory)
    return directory.parent if directory.name == FOLDER else directory


def _slowest(found: ReportDatasets, tasks: DataFrame) -> pa.Table:
    """Return the tasks that ran the longest. Rows in memory need no query."""
    rows = found.rows(TASKS)
    if rows is None:
        return summaries.slowest(tasks).toArrow()
    ran = rows.select(summaries.LISTED).filter(pc.greater(rows["run_ns"], 0))
    order = [("run_ns", "descending"), ("task", "ascending")]
    return ran.sort_by(order).slice(0, summaries.SLOWEST_MAX)


def _failed(found: ReportDatasets, tasks: DataFrame) -> pa.Table:
    """Return failed tasks with the `count` that each adds to its reason."""
    rows = found.rows(TASKS)
    return summaries.failures(tasks).toArrow() if rows is None else failed_rows(rows)


def _printed(found: ReportDatasets, names: list[str]) -> pa.Table:
    """Return the events with the output of some tasks."""
    columns = ["task", "record", "reason"]
    rows = found.rows(EVENTS)
    if rows is None:
        is_mine = (f.col("kind") == "progressed") & f.col("task").isin(names)
        return found.frame(EVENTS).where(is_mine).select(*columns).toArrow()
    is_mine = pc.equal(rows["kind"], "progressed")
    return rows.filter(pc.and_(is_mine, pc.is_in(rows["task"], pa.array(names)))).select(columns)


#: In place of an aggregate that is not there yet.
_NO_ROWS: Final = pa.table({})


def _rows(frame: DataFrame, *, needed: bool) -> pa.Table:
    """Collect an aggregate, or return it without rows if it is not needed."""
    if needed:
        return frame.toArrow()
    return pa.table({name: pa.array([], pa.int64()) for name in frame.columns})


def _collected(found: ReportDatasets, dataset: Dataset) -> pa.Table:
    rows = found.rows(dataset)
    return found.frame(dataset).toArrow() if rows is None else rows


def _with_broker_labels(stays: pa.Table, brokers: list[BrokerSummary]) -> pa.Table:
    """Put the broker's label before the name of each worker."""
    label = {one.broker: one.label for one in brokers}
    pairs = zip(stays[BROKER.name].to_pylist(), stays["worker"].to_pylist(), strict=True)
    names = pa.array([f"{label[broker]}: {name}" for broker, name in pairs], pa.string())
    return stays.set_column(stays.schema.get_field_index("worker"), "worker", names)


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
    """Select the critical path that ended last. Each campaign of each broker has one."""
    keys = paths.select([BROKER.name, "campaign"]).group_by([BROKER.name, "campaign"])
    if keys.aggregate([]).num_rows <= 1:
        return paths
    ends = paths.filter(pc.equal(paths.column("ended"), pc.max(paths.column("ended"))))
    # A task of one campaign may be in the path of another one, which it ends for both.
    last = ends.filter(pc.equal(ends["campaign"], ends["task_campaign"]))
    (row, *_) = (last if len(last) else ends).select([BROKER.name, "campaign"]).to_pylist()
    is_mine = [pc.equal(paths.column(name), value) for name, value in row.items()]
    return paths.filter(pc.and_(*is_mine))


def write(
    found: ReportDatasets,
    out: Path,
    footer: str,
    on_stage: StageCallback = _ignore_stage,
    address: str = "",
) -> tuple[Path, ReportSummary]:
    """Write the page and the tables. Returns the path of the page and its summary.

    Charts link to the tasks on the state's page at `address`, if it is given.
    """
    on_stage("summarizing tasks and attempts", 0, None)
    summary = summarize(found, address)
    writing, rows = "writing the page and the tables", 0
    on_stage(writing, rows, None)
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    unfinished = path.with_name(PAGE + ".new")
    unfinished.write_text(page.render(page_of(summary, footer)), encoding="utf-8")
    for dataset in TABLES:
        rows += _write_table(found, dataset, out / "tables")
        on_stage(writing, rows, None)
    unfinished.rename(path)
    return path, summary


#: The tables that are written beside the page.
TABLES: Final = (TASKS, ATTEMPTS, WORKERS, CRITICAL_PATH)


def _write_table(found: ReportDatasets, dataset: Dataset, directory: Path) -> int:
    """Write one table in both formats. Lists and maps become text in CSV. Returns its rows."""
    directory.mkdir(parents=True, exist_ok=True)
    parquet, csv = (directory / f"{dataset.name}.{suffix}" for suffix in ("parquet", "csv"))
    for path in (parquet, csv):
        _remove(path)
    table = found.rows(dataset)
    frame = None if table is not None else found.frame(dataset)
    if frame is not None and frame.limit(ROWS_PER_FILE_MAX + 1).count() > ROWS_PER_FILE_MAX:
        frame.write.parquet(parquet.absolute().as_uri())
        flat = [_text(one.name, one.dataType.typeName()) for one in frame.schema.fields]
        frame.select(*flat).write.csv(csv.absolute().as_uri(), header=True)
        return frame.count()
    if table is None:
        table = _collected(found, dataset)
    pa.parquet.write_table(table, parquet, compression="zstd")
    pa.csv.write_csv(_flat(table), csv)
    return len(table)


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
