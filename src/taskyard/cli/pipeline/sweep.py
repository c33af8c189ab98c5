"""`taskyard pipeline sweep`: its options and its words. What it does is the job's affair."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.options import DURATION, CliContext, json_option, quiet_option, verbose_option
from taskyard.cli.output import example, print_document, print_table
from taskyard.cli.pipeline.documents import PipelineSweepDocument, SweepPoint
from taskyard.cli.pipeline.group import SparkCommand, master_option
from taskyard.cli.pipeline.report import history_location, history_options
from taskyard.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from taskyard.pipeline.sweep.conclusions import SweepResult
    from taskyard.pipeline.sweep.workload import Workload

#: Points that are printed one by one; more are for a table, or a picture.
_POINTS_PRINTED_MAX: Final = 60


@click.command(
    cls=SparkCommand,
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
    show_default=True,
    help="How many workers to try; … goes on as the numbers before it do.",
)
@click.option(
    "--slots", metavar="NUMBERS", default="1", show_default=True, help="Slots of each worker."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME=VALUES",
    help="Rules to try: lane_workers_max, workers_max, broker_workers_max, overfeed, order.",
)
@click.option(
    "--run-time",
    type=DURATION,
    metavar="TIME",
    help="With FILE: how long tasks run that do not say it.",
)
@click.option("--price", type=float, metavar="N", help="What a slot costs an hour, for the cost.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where to write a page with a picture, and the table as Parquet and CSV.",
)
@master_option
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def sweep(cli_context: CliContext, /, master: str, **values: Any) -> None:  # noqa: ANN401
    """Say how long a campaign would take with other workers.

    Runs the broker's own scheduler, in simulated time, for every combination of the numbers given:
    on a past campaign, by its history (its graph, its measured run times and overheads), or on one
    in FILE, if that says how long its tasks run (WfCommons, sleeps, time limits, or --run-time).
    Tells the makespan, how much of the slots is used, how long tasks wait, and what decides beyond
    that. Of a history it says, too, how far the simulation is from what was measured.
    """
    from taskyard.pipeline.jobs import sweep as job  # noqa: PLC0415  # it imports Spark
    from taskyard.pipeline.session import session_scope  # noqa: PLC0415
    from taskyard.pipeline.sweep.grid import grid, read_numbers  # noqa: PLC0415

    workers = read_numbers(values["workers"], "--workers")
    points = grid(workers, read_numbers(values["slots"], "--slots"), values["policies"])
    _check_history_location(values)
    cli_context.info(f"starting Spark on {master}")
    with session_scope("taskyard sweep", master) as spark:
        sweep_result = job.sweep(spark, _workload(cli_context, spark, values), points)
    cli_context.info(job.speed_text(sweep_result))
    table = job.table_of(sweep_result, values["price"])
    page = None if values["out"] is None else job.write(sweep_result, table, values["out"])
    if values["as_json"]:
        _print_json(sweep_result, table, page)
        return
    _print(table)
    for sentence in sweep_result.sentences:
        click.echo(sentence)
    if page is not None:
        click.echo(f"picture: {page}")


def _check_history_location(values: dict[str, Any]) -> None:
    if values["file"] is not None:
        for option in ("state", "history", "campaign"):
            if values[option] is not None:
                raise UserError(f"a FILE has no --{option}; leave one of them out")
    elif values["run_time"] is not None:
        raise UserError("--run-time goes with a FILE; a history has measured times")


def _workload(cli_context: CliContext, spark: SparkSession, values: dict[str, Any]) -> Workload:
    from taskyard.pipeline import session  # noqa: PLC0415
    from taskyard.pipeline.jobs import sweep  # noqa: PLC0415
    from taskyard.pipeline.sources import history  # noqa: PLC0415
    from taskyard.pipeline.sweep.from_file import workload_of_file  # noqa: PLC0415

    if values["file"] is not None:
        return workload_of_file(values["file"], values["run_time"])
    place = history_location(cli_context, values["state"], values["history"])
    tune_session = session.tune_session(spark, history.size_bytes(place))
    with tempfile.TemporaryDirectory(prefix="taskyard-sweep-") as scratch:
        if values["history"] is None:
            frames = history.read(tune_session, place, Path(scratch))
        else:
            frames = history.read_directory(tune_session, place)
        return sweep.workload_from_history(frames.events, frames.edges, values["campaign"])


def _print(table: pa.Table) -> None:
    from taskyard.pipeline.report.format import format_duration, format_percent  # noqa: PLC0415

    rows = table.slice(0, _POINTS_PRINTED_MAX).to_pylist()
    has_policy, has_cost = any(row["policy"] for row in rows), "cost" in table.column_names
    columns = ["workers", "slots", *(["policy"] if has_policy else []), "makespan", "used"]
    columns += ["mean wait", "19 of 20 wait up to", "slot hours", *(["cost"] if has_cost else [])]
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
        click.echo(f"… and {more:,} points more: --out DIR or --json has all of them")


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
