"""`taskyard pipeline history`: options and output. The job is in `taskyard.pipeline`."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from taskyard.cli.format import format_count
from taskyard.cli.options import DURATION, CliContext
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline.documents import (
    PipelineHistoriesDocument,
    PipelineHistoryDocument,
    StateHistory,
)
from taskyard.cli.pipeline.group import SparkCommand, master_option, states_option
from taskyard.cli.pipeline.progress import StageProgress, starting_text
from taskyard.errors import UserError
from taskyard.journal import state_check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from taskyard.pipeline.jobs.history import HistoryJob, HistoryResult

#: The default directory of the tables, in the state directory.
FOLDER = "tables"


@click.command(
    cls=SparkCommand,
    epilog=example(
        "pipeline history --state ./.taskyard",
        "pipeline history --out ./tables --json",
        "pipeline history --state ./north/.taskyard --state ./south/.taskyard",
    ),
)
@states_option
@click.option(
    "--out",
    metavar="DIR",
    help="Directory of the tables, or s3://BUCKET/PATH. STATE/tables if omitted.",
)
@click.option(
    "--format",
    "table_format",
    type=click.Choice(["delta", "parquet"]),
    help="Format of the tables, delta if omitted. Chosen by the first run.",
)
@click.option(
    "--keep",
    type=DURATION,
    default="7d",
    show_default=True,
    help="Keep the tables of earlier runs that long. Older files are removed now and then.",
)
@master_option
@click.pass_obj
def history(  # noqa: PLR0913  # one for each option
    cli_context: CliContext,
    states: tuple[Path, ...],
    out: str | None,
    table_format: str | None,
    *,
    keep: int,
    master: str,
) -> None:
    """Compute tables from the history, incrementally.

    The tables are attempts, tasks, workers, metrics and critical path, beside events and edges
    (columns in docs/pipeline.md). Only new history is read. Rows that can't change any more are
    appended once, and only the others are computed again. Readers see all tables of one run or of
    the next, never a mixture. Safe to interrupt and run again.

    If no broker is running on the state, its journal is exported first. A running broker exports
    it from time to time, and the tables end there.

    Each of several states has tables of its own. `taskyard report` reads them together.
    """
    from taskyard.pipeline.jobs import history as job  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.sources import history as source  # noqa: PLC0415

    states = states or (Path(cli_context.settings().value("broker.state")),)
    if out is not None and len(states) > 1:
        raise UserError(f"--out: one directory for {len(states)} states (omit it)")
    for state in states:
        state_check.require_state(state)
    source.require_distinct(states)
    are_complete = [job.export(state) for state in states]
    places = [out or str(state / FOLDER) for state in states]
    options: Any = {"table_format": table_format, "keep": timedelta(microseconds=keep / 1000)}
    with ExitStack() as stack:
        jobs = []
        for state, place in zip(states, places, strict=True):
            jobs.append(job.HistoryJob(state, place, **options))
            stack.callback(jobs[-1].close)
        local = [Path(place) for place in places if "://" not in place]
        results = _run(cli_context, jobs, master, (states, local))
    rows = zip(states, places, results, are_complete, strict=True)
    _print(cli_context, [_state_history(*row) for row in rows])


def _state_history(
    state: Path,
    place: str,
    result: HistoryResult,
    is_complete: bool,  # noqa: FBT001  # a row
) -> StateHistory:
    return StateHistory(
        state=str(state),
        out=place,
        row_last=result.last,
        parts=result.parts,
        campaigns=result.campaigns,
        complete=is_complete,
    )


def _run(
    cli_context: CliContext,
    jobs: list[HistoryJob],
    master: str,
    directories: tuple[Sequence[Path], Sequence[Path]],
) -> list[HistoryResult]:
    """Run the jobs one by one in one session. All histories are checked before the first.

    One share gains nothing from a session on this machine, so it is done here.
    Executors read from the first `directories`, and write to the second.
    """
    from taskyard.pipeline import executors  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.session import is_local, session_scope  # noqa: PLC0415

    plans = [one.plan() for one in jobs]
    if all(plan.is_empty for plan in plans):
        return [one.outcome(plan) for one, plan in zip(jobs, plans, strict=True)]
    if is_local(master) and not any(plan.needs_spark for plan in plans):
        with StageProgress(cli_context, "reading the history") as progress:
            return _run_jobs(jobs, None, progress)
    with (
        StageProgress(cli_context, starting_text(master)) as progress,
        session_scope("taskyard history", master, conf=executors.PYTHON_ONLY) as spark,
    ):
        states, outs = directories
        executors.check(spark, master, executors.SharedPaths((), outs, states))
        return _run_jobs(jobs, spark, progress)


def _run_jobs(
    jobs: list[HistoryJob], spark: SparkSession | None, progress: StageProgress
) -> list[HistoryResult]:
    results = []
    for number, one in enumerate(jobs):
        which = f"state {number + 1} of {len(jobs)}: " if len(jobs) > 1 else ""

        def show(stage: str, rows: int, rows_total: int | None, which: str = which) -> None:
            progress.show(which + stage, rows, rows_total)

        results.append(one.run(spark, show))
    return results


def _print(cli_context: CliContext, made: list[StateHistory]) -> None:
    for one in made:
        if not one.complete:
            which = "this state" if len(made) == 1 else one.state
            cli_context.info(f"a broker is running on {which}: the tables end at its last export")
    if cli_context.as_json:
        print_document(
            PipelineHistoryDocument(**structs.asdict(made[0]))
            if len(made) == 1
            else PipelineHistoriesDocument(states=made)
        )
        return
    for one in made:
        if not (one.parts or one.campaigns):
            click.echo(f"no new history: the tables in {one.out} cover it up to row {one.row_last}")
        else:
            click.echo(
                f"added {format_count(one.parts, 'new part')} of the history with events of "
                f"{format_count(one.campaigns, 'campaign')}, up to row {one.row_last}: {one.out}"
            )
