"""`taskyard report`, also under `pipeline`: options and output. The job is in `pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct

from taskyard import __version__
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline.documents import (
    ComparedFigure,
    GuaranteeCounts,
    PipelineReportDocument,
    ReportBroker,
    ReportComparison,
)
from taskyard.cli.pipeline.group import (
    LOCAL_MASTER,
    SparkCommand,
    master_option,
    states_option,
)
from taskyard.cli.pipeline.progress import StageProgress, starting_text
from taskyard.cli.scopes import OnceOption
from taskyard.errors import ExitCode, UserError
from taskyard.journal import state_check
from taskyard.web.address import page_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from taskyard.pipeline.report.comparison import Comparison
    from taskyard.pipeline.report.summary import BrokerSummary, ReportSummary
    from taskyard.pipeline.sources.history import HistoryFiles


def history_options(command: Any) -> Any:  # noqa: ANN401  # click's decorator
    """Add options that locate a history."""
    for option in (
        click.option(
            "--campaign",
            cls=OnceOption,
            metavar="NAME",
            help="Only this campaign. All campaigns if omitted.",
        ),
        click.option(
            "--history",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            metavar="DIR",
            multiple=True,
            help="History files, or the tables of `pipeline history`, instead of a state. "
            "Repeatable: one for each broker.",
        ),
        states_option,
    ):
        command = option(command)
    return command


class HistoryLocation(Struct):
    """The directories of one or several histories, each of another broker."""

    directories: tuple[Path, ...]
    #: False for directories of --history.
    are_states: bool

    def find(self, scratch: Path) -> list[HistoryFiles]:
        """Find the files. Journal rows after them are copied to `scratch`."""
        from taskyard.pipeline.sources import history  # noqa: PLC0415  # it imports Spark

        return history.find_all(self.directories, scratch, are_states=self.are_states)

    def check_shared(
        self, spark: SparkSession, master: str, scratch: Path, more: Sequence[Path] = ()
    ) -> None:
        """Raise UserError if a machine of a cluster does not see the histories and `more`."""
        from taskyard.pipeline import executors  # noqa: PLC0415  # it imports Spark

        shared = executors.SharedPaths((), [scratch], (*self.directories, *more))
        executors.check(spark, master, shared)


def history_location(
    cli_context: CliContext, states: tuple[Path, ...], histories: tuple[Path, ...]
) -> HistoryLocation:
    """Return the directories of histories, by default the state of the settings."""
    from taskyard.pipeline.sources import history  # noqa: PLC0415

    if states and histories:
        raise UserError("--state and --history exclude each other")
    directories = histories or states or (Path(cli_context.settings().value("broker.state")),)
    for state in () if histories else directories:
        state_check.require_state(state)
    history.require_distinct(directories)
    return HistoryLocation(directories, are_states=not histories)


@click.command(
    cls=SparkCommand,
    epilog=example(
        "report --out ./report",
        "report --campaign nightly --json",
        "report --campaign tuesday --compare monday",
        "report --state ./north/.taskyard --state ./south/.taskyard",
    ),
)
@history_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    default="report",
    help="Directory for the report and the tables.",
)
@click.option(
    "--tables",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Compute the tables in DIR as `pipeline history` does, and keep them for the next report. "
    "For one state.",
)
@click.option(
    "--page",
    cls=OnceOption,
    metavar="URL",
    help="Let charts and names link to tasks on this page of `taskyard web`. By default the page "
    "that runs on the state.",
)
@click.option(
    "--compare",
    cls=OnceOption,
    metavar="EARLIER",
    help="Compare with an earlier campaign: a campaign of this history, or PATH or PATH:CAMPAIGN "
    "of a state, of the tables of `pipeline history`, or of an earlier report.",
)
@master_option
@click.pass_obj
def report(cli_context: CliContext, /, out: Path, master: str, **values: Any) -> ExitCode:  # noqa: ANN401
    """Write an HTML report with charts, and tables.

    DIR/report.html opens in any browser without a network. It shows outcomes, timing, workers and
    delays. From the events alone it verifies that no task was lost, completed twice or started too
    early. Exit 6 if one was. The tables are in DIR/tables, as Parquet and CSV. A broker may be
    running: the report covers the history so far.

    With several brokers, the report covers all of them, and shows which broker has a campaign or a
    worker.
    """
    location = history_location(cli_context, values["states"], values["history"])
    path, facts = make_report(
        cli_context,
        location,
        values["campaign"],
        out,
        master=master,
        tables=values["tables"],
        page=values["page"],
        compare=values["compare"],
    )
    _print_result(cli_context, path, facts)
    return ExitCode.OK if facts.guarantees.is_clean else ExitCode.STATE_DAMAGED


def make_report(  # noqa: PLR0913  # options of a command
    cli_context: CliContext,
    location: HistoryLocation,
    campaign: str | None,
    out: Path,
    *,
    master: str = LOCAL_MASTER,
    tables: Path | None = None,
    page: str | None = None,
    compare: str | None = None,
) -> tuple[Path, ReportSummary]:
    """Write the report. Input errors are raised before Spark starts."""
    from taskyard.pipeline import session  # noqa: PLC0415  # it imports Spark
    from taskyard.pipeline.jobs import report as job  # noqa: PLC0415
    from taskyard.pipeline.jobs.earlier import find_earlier  # noqa: PLC0415

    address = _page_address(location, page)
    with session.scratch_directory(master, out) as scratch:
        files = _find(cli_context, location, scratch, tables)
        chosen = job.find_campaign(files, campaign)
        if compare is not None:
            known, place = chosen.campaigns, scratch / "earlier"
            chosen.earlier = find_earlier(compare, chosen.campaign, known, place)
        size = chosen.size_bytes
        is_short = size <= session.SMALL_BYTES
        conf = session.settings_for_history(master, size)
        with (
            StageProgress(cli_context, starting_text(master)) as progress,
            session.session_scope(
                "taskyard report", master, short_job=is_short, conf=conf
            ) as spark,
        ):
            more = [] if chosen.earlier is None else chosen.earlier.directories
            location.check_shared(spark, master, scratch, more)
            tuned = session.tune_session(spark, size)
            found = job.datasets(tuned, chosen, scratch, tables, progress.show)
            footer = f"Made by Taskyard {__version__}."
            return job.write(found, out, footer, progress.show, address)


def _page_address(location: HistoryLocation, given: str | None) -> str:
    """Return the address that links begin with. Empty if no page is known. Raises UserError."""
    if given is None:
        is_one = location.are_states and len(location.directories) == 1
        return (page_address(location.directories[0]) or "") if is_one else ""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--page {given}: not the address of a page (such as http://HOST:PORT)")
    return f"{parts.scheme}://{parts.netloc}"


def _find(
    cli_context: CliContext, location: HistoryLocation, scratch: Path, tables: Path | None
) -> list[HistoryFiles]:
    """Find the files of the report. With --tables, all rows must be in history files."""
    from taskyard.pipeline.jobs import history as job  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.sources import history  # noqa: PLC0415

    if tables is None:
        return location.find(scratch)
    if not location.are_states or len(location.directories) > 1:
        raise UserError("--tables: needs exactly one state (see `taskyard pipeline history`)")
    (state,) = location.directories
    if not job.export(state):
        cli_context.info(
            "a broker is running on this state: the report ends at its last export (omit --tables "
            "to include later rows)"
        )
    return [history.find_directory(state, scratch)]


def _print_result(cli_context: CliContext, path: Path, facts: ReportSummary) -> None:
    from taskyard.pipeline.report.headline import sentences  # noqa: PLC0415

    guarantees = facts.guarantees
    if cli_context.as_json:
        document = PipelineReportDocument(
            page=str(path),
            tables=str(path.parent / "tables"),
            campaign=facts.campaign,
            summary=sentences(facts),
            makespan_ns=facts.makespan_ns,
            guarantees=msgspec.convert(guarantees, GuaranteeCounts, from_attributes=True),
            sound=guarantees.is_clean,
            brokers=[_broker_document(one) for one in facts.brokers],
            comparison=None if facts.comparison is None else _comparison(facts.comparison),
        )
        print_document(document)
        return
    for sentence in sentences(facts):
        click.echo(sentence)
    word = "hold" if guarantees.is_clean else "are BROKEN"
    click.echo(
        f"The guarantees {word}: lost {guarantees.lost}, completed twice "
        f"{guarantees.completed_twice}, dependencies broken "
        f"{guarantees.dependencies_broken}, stale results refused "
        f"{guarantees.stale_refused}."
    )
    click.echo(f"report: {path}")


def _comparison(found: Comparison) -> ReportComparison:
    from taskyard.pipeline.report.comparison import sentence  # noqa: PLC0415

    return ReportComparison(
        campaign=found.campaign,
        source=found.source,
        sentence=sentence(found),
        figures=[
            msgspec.convert(one, ComparedFigure, from_attributes=True) for one in found.figures
        ],
    )


def _broker_document(one: BrokerSummary) -> ReportBroker:
    return ReportBroker(
        broker=one.broker,
        history=one.directory,
        campaigns=one.campaigns,
        guarantees=msgspec.convert(one.guarantees, GuaranteeCounts, from_attributes=True),
    )
