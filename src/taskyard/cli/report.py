"""`taskyard report` and `taskyard pipeline sweep`, which read the histories of past campaigns.

Owns options and output. The jobs are in `taskyard.pipeline`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct

from taskyard import __version__
from taskyard.cli import documents, pipeline
from taskyard.cli.options import DURATION, CliContext, gathered
from taskyard.cli.output import example, print_document, print_table
from taskyard.cli.scopes import OnceOption
from taskyard.errors import ExitCode, UserError
from taskyard.journal import state_check
from taskyard.settings.loader import to_rules_set
from taskyard.web.address import page_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from taskyard.pipeline.report.comparison import Comparison
    from taskyard.pipeline.report.summary import BrokerSummary, ReportSummary
    from taskyard.pipeline.sources.history import HistoryFiles
    from taskyard.pipeline.sweep.conclusions import SweepResult
    from taskyard.pipeline.sweep.workload import Workload


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
        pipeline.states_option,
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
    cls=pipeline.SparkCommand,
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
@pipeline.master_option
@click.pass_obj
def report(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    *,
    states: tuple[Path, ...],
    history: tuple[Path, ...],
    campaign: str | None,
    out: Path,
    tables: Path | None,
    page: str | None,
    compare: str | None,
    master: str,
) -> ExitCode:
    """Write an HTML report with charts, and tables.

    DIR/report.html opens in any browser without a network. It shows outcomes, timing, workers and
    delays. From the events alone it verifies that no task was lost, completed twice or started too
    early. Exit 6 if one was. The tables are in DIR/tables, as Parquet and CSV. A broker may be
    running: the report covers the history so far.

    With several brokers, the report covers all of them, and shows which broker has a campaign or a
    worker.
    """
    location = history_location(cli_context, states, history)
    path, facts = make_report(
        cli_context,
        location,
        campaign,
        out,
        master=master,
        tables=tables,
        page=page,
        compare=compare,
    )
    _print_result(cli_context, path, facts)
    return ExitCode.OK if facts.guarantees.is_clean else ExitCode.STATE_DAMAGED


def make_report(  # noqa: PLR0913  # options of a command
    cli_context: CliContext,
    location: HistoryLocation,
    campaign: str | None,
    out: Path,
    *,
    master: str = pipeline.LOCAL_MASTER,
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
            known, directory = chosen.campaigns, scratch / "earlier"
            chosen.earlier = find_earlier(compare, chosen.campaign, known, directory)
        size = chosen.size_bytes
        is_short = size <= session.SMALL_BYTES
        conf = session.settings_for_history(master, size)
        with (
            pipeline.StageProgress(cli_context, pipeline.starting_text(master)) as progress,
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
        document = documents.PipelineReportDocument(
            page=str(path),
            tables=str(path.parent / "tables"),
            campaign=facts.campaign,
            summary=sentences(facts),
            makespan_ns=facts.makespan_ns,
            guarantees=msgspec.convert(guarantees, documents.GuaranteeCounts, from_attributes=True),
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


def _comparison(found: Comparison) -> documents.ReportComparison:
    from taskyard.pipeline.report.comparison import sentence  # noqa: PLC0415

    return documents.ReportComparison(
        campaign=found.campaign,
        source=found.source,
        sentence=sentence(found),
        figures=[
            msgspec.convert(one, documents.ComparedFigure, from_attributes=True)
            for one in found.figures
        ],
    )


def _broker_document(one: BrokerSummary) -> documents.ReportBroker:
    return documents.ReportBroker(
        broker=one.broker,
        history=one.directory,
        campaigns=one.campaigns,
        guarantees=msgspec.convert(one.guarantees, documents.GuaranteeCounts, from_attributes=True),
    )


class SweepOptions(Struct, frozen=True):
    """The options of `sweep`."""

    file: str | None
    states: tuple[Path, ...]
    history: tuple[Path, ...]
    campaign: str | None
    workers: str
    slots: str
    policies: tuple[str, ...]
    run_time: int | None
    price: float | None
    out: Path | None
    master: str


#: The most points that are printed. --out and --json have all.
_POINTS_PRINTED_MAX: Final = 60


@click.command(
    cls=pipeline.SparkCommand,
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
@pipeline.master_option
@click.pass_obj
@gathered(SweepOptions, "options")
def sweep(cli_context: CliContext, *, options: SweepOptions) -> None:
    """Simulate a campaign with other numbers of workers.

    Runs the broker's scheduler in simulated time for every combination of the given numbers. The
    workload is a past campaign with its graph, measured run times and overheads, or FILE if its run
    times are known (WfCommons, sleeps, time limits or --run-time). The limits and rates of the
    settings apply. Prints the makespan, the
    utilisation, the waiting times and the limiting factor. For a past campaign, also prints the
    error of the simulation. Tasks of several brokers are simulated at one.
    """
    from taskyard.pipeline import executors, session  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.jobs import sweep as sweep_job  # noqa: PLC0415
    from taskyard.pipeline.sweep.from_file import workload_of_file  # noqa: PLC0415
    from taskyard.pipeline.sweep.grid import grid, read_numbers  # noqa: PLC0415
    from taskyard.pipeline.sweep.workload import settings_rules  # noqa: PLC0415

    master = options.master
    workers = read_numbers(options.workers, "--workers")
    points = grid(workers, read_numbers(options.slots, "--slots"), options.policies)
    location = _history_location(cli_context, options)
    beside = options.out or (location.directories[0] if location else Path.cwd())
    with session.scratch_directory(master, beside) as scratch:
        files = _find_swept(location, scratch, options.campaign)
        file = options.file
        of_file = None if file is None else workload_of_file(file, options.run_time)
        conf = session.settings_for_history(master, sum(one.size_bytes for one in files))
        with (
            pipeline.StageProgress(
                cli_context, pipeline.starting_text(master), counts=""
            ) as progress,
            session.session_scope("taskyard sweep", master, conf=conf) as spark,
        ):
            if location is None:
                executors.check(spark, master)
            else:
                location.check_shared(spark, master, scratch)
            progress.show("reading the campaign")
            workload = of_file or _workload(spark, files, scratch, options.campaign)
            workload.rules = settings_rules(to_rules_set(cli_context.settings()))
            sweep_result = sweep_job.sweep(spark, workload, points, progress.show)
    cli_context.info(sweep_job.speed_text(sweep_result))
    table = sweep_job.table_of(sweep_result, options.price)
    page = None if options.out is None else sweep_job.write(sweep_result, table, options.out)
    if cli_context.as_json:
        _print_json(sweep_result, table, page)
        return
    _print_points(table)
    for sentence in sweep_result.sentences:
        click.echo(sentence)
    if page is not None:
        click.echo(f"chart: {page}")


def _history_location(cli_context: CliContext, options: SweepOptions) -> HistoryLocation | None:
    """Return the location of the histories, or None with FILE."""
    if options.file is not None:
        excluded = {"state": options.states, "history": options.history}
        for name, given in {**excluded, "campaign": options.campaign}.items():
            if given:
                raise UserError(f"FILE excludes --{name}")
        return None
    if options.run_time is not None:
        raise UserError("--run-time needs FILE")
    return history_location(cli_context, options.states, options.history)


def _find_swept(
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
        directory = scratch / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        found.append(make_tables(tune_session(spark, one.size_bytes), one, directory))
    return sweep.workload_from_tables(spark, found, campaign)


def _print_points(table: pa.Table) -> None:
    from taskyard.pipeline.report.format import format_duration, format_percent  # noqa: PLC0415

    rows = table.slice(0, _POINTS_PRINTED_MAX).to_pylist()
    has_policy, has_cost = any(row["policy"] for row in rows), "cost" in table.column_names
    columns = ["workers", "slots", *(["policy"] if has_policy else []), "makespan", "used"]
    columns += ["mean wait", "p95 wait", "slot hours", *(["cost"] if has_cost else [])]
    print_table(
        columns,
        [
            [
                row["workers"],
                row["slots"],
                *([row["policy"]] if has_policy else []),
                format_duration(row["makespan_ns"]),
                format_percent(row["utilisation"]),
                format_duration(row["wait_ns_mean"]),
                format_duration(row["wait_ns_p95"]),
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
    document = documents.PipelineSweepDocument(
        tasks=len(sweep_result.workload.names),
        points=[documents.SweepPoint(**row) for row in table.to_pylist()],
        sentences=sweep_result.sentences,
        critical_path_ns=sweep_result.time_bounds.chain_ns,
        work_ns=sweep_result.time_bounds.work_ns,
        measured_ns=sweep_result.workload.makespan_ns or None,
        replayed_ns=None if sweep_result.replayed is None else sweep_result.replayed.makespan_ns,
        error=sweep_result.error,
        page=None if page is None else str(page),
    )
    print_document(document)
