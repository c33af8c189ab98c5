"""`taskyard pipeline history`: its options and its words. What it does is the job's affair."""

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

#: Where the tables are if nobody says so, in the state directory.
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
    help="Where the tables go; STATE/tables if not given.",
)
@master_option
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def history(
    cli_context: CliContext, state: Path, out: Path | None, master: str, *, as_json: bool
) -> None:
    """Turn a state's history into tables: attempts, tasks, workers, metrics, critical path.

    Only what is new is read, and only campaigns with something new are computed anew; with nothing
    new, nothing is written. Ended at any point and run again it makes the same tables. They are
    Parquet, by campaign and day; docs/pipeline.md has every column.

    If no broker runs on the state, its journal is exported first. A running broker exports by
    itself, now and then: then the tables go as far as it did.
    """
    from taskyard.pipeline.jobs import history as job  # noqa: PLC0415  # it imports Spark
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
        cli_context.info(
            "a broker runs on this state: the tables go as far as it has exported; stop it, and "
            "run this again, for all"
        )
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
        click.echo(f"nothing new: the tables in {out} go up to row {outcome.last}")
    else:
        click.echo(
            f"made tables of {format_count(outcome.campaigns, 'campaign')} with "
            f"{format_count(outcome.parts, 'new part')} of the history, up to row {outcome.last}: "
            f"{out}"
        )
