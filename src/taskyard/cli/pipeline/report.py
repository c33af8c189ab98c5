"""`taskyard pipeline report`: its options and its words. What it does is the job's affair."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from taskyard import __version__
from taskyard.cli.options import (
    CliContext,
    config_option,
    json_option,
    quiet_option,
    verbose_option,
)
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline.documents import GuaranteeCounts, PipelineReportDocument
from taskyard.cli.pipeline.group import SparkCommand, master_option
from taskyard.errors import ExitCode, UserError

if TYPE_CHECKING:
    from taskyard.pipeline.report.summary import ReportSummary


def history_options(command: Any) -> Any:  # noqa: ANN401  # click's
    """Where the history is; a state or its files."""
    for option in (
        config_option,
        click.option("--campaign", metavar="NAME", help="One campaign; all together if not given."),
        click.option(
            "--history",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            metavar="DIR",
            help="In place of a state: its history files, or the tables of `pipeline history`.",
        ),
        click.option(
            "--state",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="The state directory; ./.taskyard if not given.",
        ),
    ):
        command = option(command)
    return command


def history_location(cli_context: CliContext, state: Path | None, history: Path | None) -> Path:
    """Where to look, as it was given or as the settings say."""
    if state is not None and history is not None:
        raise UserError("give --state or --history, not both")
    if history is not None:
        return history
    return state or Path(cli_context.settings().value("broker.state"))


@click.command(
    cls=SparkCommand,
    epilog=example("pipeline report --out ./report", "pipeline report --campaign nightly --json"),
)
@history_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    default="report",
    show_default=True,
    help="Where the page and the tables go.",
)
@master_option
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def report(cli_context: CliContext, /, out: Path, master: str, **values: Any) -> ExitCode:  # noqa: ANN401
    """Make a page with pictures of what happened, and tables beside it.

    DIR/report.html stands alone: it opens in any browser, without a network. It says how many tasks
    came to which end, when, by whom, what held them back, and counts from the events alone that
    none was lost, completed twice, or begun too early; exit 6 if one was. The tables are in
    DIR/tables, as Parquet and as CSV. A broker may run meanwhile: the page tells what is so far.
    """
    from taskyard.pipeline import session  # noqa: PLC0415  # it imports Spark
    from taskyard.pipeline.jobs import report as job  # noqa: PLC0415
    from taskyard.pipeline.sources import history  # noqa: PLC0415

    place = history_location(cli_context, values["state"], values["history"])
    size = history.size_bytes(place)
    cli_context.info(f"starting Spark on {master}")
    with (
        tempfile.TemporaryDirectory(prefix="taskyard-report-") as scratch,
        session.session_scope(
            "taskyard report", master, short_job=size <= session.SMALL_BYTES
        ) as spark,
    ):
        tune_session = session.tune_session(spark, size)
        if values["history"] is None:
            frames = history.read(tune_session, place, Path(scratch))
        else:
            frames = history.read_directory(tune_session, place)
        found = job.datasets(frames.events, frames.edges, values["campaign"])
        try:
            path, facts = job.write(found, out, f"Made by Taskyard {__version__}.")
        finally:
            found.release()
    _print_result(path, facts, as_json=values["as_json"])
    return ExitCode.OK if facts.guarantees.is_clean else ExitCode.STATE_DAMAGED


def _print_result(path: Path, facts: ReportSummary, *, as_json: bool) -> None:
    from taskyard.pipeline.report.headline import sentences  # noqa: PLC0415

    guarantees = facts.guarantees
    if as_json:
        document = PipelineReportDocument(
            page=str(path),
            tables=str(path.parent / "tables"),
            campaign=facts.campaign,
            summary=sentences(facts),
            makespan_ns=facts.makespan_ns,
            guarantees=msgspec.convert(guarantees, GuaranteeCounts, from_attributes=True),
            sound=guarantees.is_clean,
        )
        print_document(document)
        return
    for sentence in sentences(facts):
        click.echo(sentence)
    word = "hold" if guarantees.is_clean else "are BROKEN"
    click.echo(
        f"The promises {word}: lost {guarantees.lost}, completed twice "
        f"{guarantees.completed_twice}, dependencies broken {guarantees.dependencies_broken}, "
        f"stale results refused {guarantees.stale_refused}."
    )
    click.echo(f"report: {path}")
