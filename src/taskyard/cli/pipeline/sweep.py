"""`taskyard pipeline sweep`: options and output. The job is in `taskyard.pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.options import DURATION, CliContext
from taskyard.cli.output import example, print_document, print_table
from taskyard.cli.pipeline.documents import PipelineSweepDocument, SweepPoint
from taskyard.cli.pipeline.group import SparkCommand, master_option
from taskyard.cli.pipeline.progress import StageProgress, starting_text
from taskyard.cli.pipeline.report import (
    HistoryLocation,
    history_location,
    history_options,
    report,
)
from taskyard.errors import UserError
from taskyard.settings.loader import to_rules_set

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from taskyard.pipeline.sources.history import HistoryFiles
    from taskyard.pipeline.sweep.conclusions import SweepResult
    from taskyard.pipeline.sweep.workload import Workload

#: The most points that are printed. --out and --json have all.
_POINTS_PRINTED_MAX: Final = 60


@click.command(
    cls=SparkCommand,
    like=report,
    most=("campaign", "workers", "slots", "policies", "run_time", "price", "out"),
    epilog=example(
        "pipeline sweep --campaign nightly --workers 1,2,4,…,256 --out ./sweep",
        "pipeline sweep workflow.json --workers 1,2,4,…,64 --slots 1,4",
        "pipeline sweep campaign.jsonl --run-time 30s --policy lane_workers_max=1,2,4",
    ),
)
@click.argument("file", required=False, metavar="[FILE]")
@history_options
@click.option(
    "--workers",
    metavar="NUMBERS",
    default="1,2,4,…,64",
    help="Numbers of workers to simulate. … continues the sequence.",
)
@click.option("--slots", metavar="NUMBERS", default="1", help="Slots per worker.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME=VALUES",
    help=(
        "Rules to vary, in every section of the settings: lane_workers_max, workers_max, "
        "broker_workers_max, overfeed, rate, lane_rate, order."
    ),
)
@click.option(
    "--run-time",
    type=DURATION,
    metavar="TIME",
    help="With FILE: run time of tasks that have none.",
)
@click.option("--price", type=float, metavar="N", help="Price of a slot per hour, for the cost.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory for a page with a chart, and the table as Parquet and CSV.",
)
@master_option
@click.pass_obj
def sweep(cli_context: CliContext, /, **values: Any) -> None:  # noqa: ANN401
    """Simulate a campaign with other numbers of workers.

    Runs the broker's scheduler in simulated time for every combination of the given numbers. The
    workload is a past campaign with its graph, measured run times and overheads, or FILE if its run
    times are known (WfCommons, sleeps, time limits or --run-time). The limits and rates of the
    settings apply. Prints the makespan, the
    utilisation, the waiting times and the limiting factor. For a past campaign, also prints the
    error of the simulation. Tasks of several brokers are simulated at one.
    """
    from taskyard.pipeline import executors, session  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.jobs import sweep as job  # noqa: PLC0415
    from taskyard.pipeline.sweep.from_file import workload_of_file  # noqa: PLC0415
    from taskyard.pipeline.sweep.grid import grid, read_numbers  # noqa: PLC0415
    from taskyard.pipeline.sweep.workload import settings_rules  # noqa: PLC0415

    master = values["master"]
    workers = read_numbers(values["workers"], "--workers")
    points = grid(workers, read_numbers(values["slots"], "--slots"), values["policies"])
    location = _history_location(cli_context, values)
    beside = values["out"] or (location.directories[0] if location else Path.cwd())
    with session.scratch_directory(master, beside) as scratch:
        files = _find(location, scratch, values["campaign"])
        of_file = None if files else workload_of_file(values["file"], values["run_time"])
        conf = session.settings_for_history(master, sum(one.size_bytes for one in files))
        with (
            StageProgress(cli_context, starting_text(master), counts="") as progress,
            session.session_scope("taskyard sweep", master, conf=conf) as spark,
        ):
            if location is None:
                executors.check(spark, master)
            else:
                location.check_shared(spark, master, scratch)
            progress.show("reading the campaign")
            workload = of_file or _workload(spark, files, scratch, values["campaign"])
            workload.rules = settings_rules(to_rules_set(cli_context.settings()))
            sweep_result = job.sweep(spark, workload, points, progress.show)
    cli_context.info(job.speed_text(sweep_result))
    table = job.table_of(sweep_result, values["price"])
    page = None if values["out"] is None else job.write(sweep_result, table, values["out"])
    if cli_context.as_json:
        _print_json(sweep_result, table, page)
        return
    _print(table)
    for sentence in sweep_result.sentences:
        click.echo(sentence)
    if page is not None:
        click.echo(f"chart: {page}")


def _history_location(cli_context: CliContext, values: dict[str, Any]) -> HistoryLocation | None:
    """Return the location of the histories, or None with FILE."""
    if values["file"] is not None:
        for name in ("states", "history", "campaign"):
            if values[name]:
                raise UserError(f"FILE excludes --{name.removesuffix('s')}")
        return None
    if values["run_time"] is not None:
        raise UserError("--run-time needs FILE")
    return history_location(cli_context, values["states"], values["history"])


def _find(
    location: HistoryLocation | None, scratch: Path, campaign: str | None
) -> list[HistoryFiles]:
    """Find the files of the histories, none with FILE. Raises UserError for an unknown campaign."""
    from taskyard.pipeline.jobs.report import find_campaign  # noqa: PLC0415  # imports Spark

    return [] if location is None else find_campaign(location.find(scratch), campaign).files


def _workload(
    spark: SparkSession, files: list[HistoryFiles], scratch: Path, campaign: str | None
) -> Workload:
    from taskyard.pipeline.jobs import sweep  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.jobs.broker_tables import make_tables  # noqa: PLC0415
    from taskyard.pipeline.session import tune_session  # noqa: PLC0415

    found = []
    for number, one in enumerate(files):
        place = scratch / str(number)
        place.mkdir(parents=True, exist_ok=True)
        found.append(make_tables(tune_session(spark, one.size_bytes), one, place))
    return sweep.workload_from_tables(spark, found, campaign)


def _print(table: pa.Table) -> None:
    from taskyard.pipeline.report.format import format_duration, format_percent  # noqa: PLC0415

    rows = table.slice(0, _POINTS_PRINTED_MAX).to_pylist()
    has_policy, has_cost = any(row["policy"] for row in rows), "cost" in table.column_names
    columns = ["workers", "slots", *(["policy"] if has_policy else []), "makespan", "used"]
    columns += ["mean wait", "p95 wait", "slot hours", *(["cost"] if has_cost else [])]
    print_table(
        columns,
        [
            [
                *(row["workers"], row["slots"]),
                *([row["policy"]] if has_policy else []),
                *(format_duration(row["makespan_ns"]), format_percent(row["utilisation"])),
                *(format_duration(row["wait_ns_mean"]), format_duration(row["wait_ns_p95"])),
                f"{row['slot_hours']:,.3g}",
                *([f"{row['cost']:,.3g}"] if has_cost else []),
            ]
            for row in rows
        ],
    )
    if table.num_rows > _POINTS_PRINTED_MAX:
        more = table.num_rows - _POINTS_PRINTED_MAX
        click.echo(f"… and {more:,} more points (see --out or --json)")


def _print_json(sweep_result: SweepResult, table: pa.Table, page: Path | None) -> None:
    document = PipelineSweepDocument(
        tasks=len(sweep_result.workload.names),
        points=[SweepPoint(**row) for row in table.to_pylist()],
        sentences=sweep_result.sentences,
        critical_path_ns=sweep_result.time_bounds.chain_ns,
        work_ns=sweep_result.time_bounds.work_ns,
        measured_ns=sweep_result.workload.makespan_ns or None,
        replayed_ns=None if sweep_result.replayed is None else sweep_result.replayed.makespan_ns,
        error=sweep_result.error,
        page=None if page is None else str(page),
    )
    print_document(document)
