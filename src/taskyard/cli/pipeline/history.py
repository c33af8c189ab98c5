"""`taskyard pipeline history`: options and output. The job is in `taskyard.pipeline`."""

from pathlib import Path

import click

from taskyard.cli.format import format_count
from taskyard.cli.options import (
    CliContext,
    json_option,
    quiet_option,
    state_option,
    verbose_option,
)
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline.documents import PipelineHistoryDocument
from taskyard.cli.pipeline.group import SparkCommand, master_option

#: The default directory of the tables, in the state directory.
FOLDER = "tables"


@click.command(
    cls=SparkCommand,
    epilog=example(
        "pipeline history --state ./.taskyard", "pipeline history --out ./tables --json"
    ),
)
@state_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the tables. STATE/tables if omitted.",
)
@master_option
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def history(
    cli_context: CliContext, state: Path, out: Path | None, master: str, *, as_json: bool
) -> None:
    """Compute tables from the history, incrementally.

    The tables are attempts, tasks, workers, metrics and critical path, as Parquet by campaign and
    day (columns in docs/pipeline.md). Only new history is read, and only campaigns with new events
    are recomputed. Safe to interrupt and run again.

    If no broker is running on the state, its journal is exported first. A running broker exports
    it from time to time, and the tables end there.
    """
    from taskyard.pipeline.jobs import history as job  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.session import session_scope  # noqa: PLC0415

    out = out or state / FOLDER
    is_complete = job.export(state)
    running = job.HistoryJob(state, out)
    try:
        plan = running.plan()
        if plan.is_empty:
            outcome = running.outcome(plan)
        else:
            cli_context.info(f"starting Spark on {master}")
            with session_scope("taskyard history", master, short_job=running.is_small) as spark:
                outcome = running.run(spark)
    finally:
        running.close()
    if not is_complete:
        cli_context.info("a broker is running on this state: the tables end at its last export")
    if as_json:
        document = PipelineHistoryDocument(
            state=str(state),
            out=str(out),
            row_last=outcome.last,
            parts=outcome.parts,
            campaigns=outcome.campaigns,
            complete=is_complete,
        )
        print_document(document)
    elif plan.is_empty:
        click.echo(f"no new history: the tables in {out} cover it up to row {outcome.last}")
    else:
        click.echo(
            f"computed tables of {format_count(outcome.campaigns, 'campaign')} from "
            f"{format_count(outcome.parts, 'new part')} of the history, up to row "
            f"{outcome.last}: {out}"
        )
