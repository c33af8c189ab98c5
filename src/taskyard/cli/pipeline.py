"""`taskyard pipeline`: its commands, a Spark session with progress, and options of all Spark jobs.

Owns `history` and `fleet`. Spark is imported only when a command runs. So help and completion are
fast, and work without the extra `spark`. Jobs call `StageProgress.show` and know no terminal.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import click

from taskyard.cli.commands import Command, LazyCommand, LazyGroup
from taskyard.cli.documents import (
    PipelineFleetDocument,
    PipelineHistoryDocument,
    StateHistory,
)
from taskyard.cli.format import format_count, format_duration
from taskyard.cli.options import DURATION, NEAREST_STATE, CliContext, SettingOption
from taskyard.cli.output import example, print_document
from taskyard.cli.progress import ProgressBar
from taskyard.client import discovery
from taskyard.client.progress import LINE_SECONDS
from taskyard.errors import NotInstalled, UserError
from taskyard.journal import state_check
from taskyard.settings.keys import SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from taskyard.pipeline.jobs.history import HistoryJob, HistoryResult


COMMANDS: dict[str, LazyCommand] = {
    "history": LazyCommand(
        "taskyard.cli.pipeline:history",
        "Compute tables from the history, incrementally.",
    ),
    "sweep": LazyCommand(
        "taskyard.cli.report:sweep",
        "Simulate a campaign with other numbers of workers.",
    ),
    "fleet": LazyCommand(
        "taskyard.cli.pipeline:fleet",
        "Run workers inside Spark executors.",
    ),
}

#: Packages of the extra `spark` that every command needs.
_NEEDED = ("pyspark", "pandas", "pyarrow")


def require_spark() -> None:
    """Raise NotInstalled if a package of the extra is missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise NotInstalled(f"{', '.join(missing)} not installed (`pip install 'taskyard[spark]'`)")


class SparkCommand(Command):
    """A command that needs Spark. Without it, it raises a `UserError`."""

    def invoke(self, ctx: click.Context) -> object:
        require_spark()
        from taskyard.pipeline.jvm import end_jvm_on_signals  # noqa: PLC0415  # not needed by `--help`

        with end_jvm_on_signals():
            return super().invoke(ctx)


#: All cores of this machine.
LOCAL_MASTER: Final = "local[*]"

master_option = click.option(
    "--master",
    metavar="URL",
    default=LOCAL_MASTER,
    envvar="SPARK_REMOTE",
    show_envvar=True,
    help="Spark master: this machine, a cluster as in spark://HOST:7077, or a Spark Connect "
    "server as in sc://HOST:15002.",
)


#: For commands that read the histories of several brokers. Without it, the state of the settings.
states_option = click.option(
    "--state",
    "states",
    type=click.Path(path_type=Path, readable=False),
    cls=SettingOption,
    envvar="TASKYARD_STATE",
    show_default=NEAREST_STATE,
    multiple=True,
    metavar="DIR",
    help="State directory. Repeatable: one for each broker.",
)


#: Commands that are not in this group.
_SUGGESTIONS: dict[str, tuple[str, ...]] = {
    "load": ("`taskyard load --spark`",),
    "report": ("`taskyard report`",),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, suggestions=_SUGGESTIONS, no_args_is_help=True)
def pipeline() -> None:
    """Run Spark jobs: history, sweep, fleet.

    Needs the extra: pip install 'taskyard[spark]', which includes Java. A Spark session takes some
    seconds to start.
    """


#: The time of a stage without rows is shown where no bar is drawn, first after this long.
_SILENT_SECONDS_MAX: Final = 3 * LINE_SECONDS


class StageProgress:
    """A context manager that shows the stages of a job. Any thread may call its methods."""

    def __init__(self, cli_context: CliContext, stage: str, *, counts: str = "rows") -> None:
        self._cli_context = cli_context
        self._bar = ProgressBar(cli_context, participle=counts)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._stage = ""
        self._begun = self._printed = time.monotonic()
        self._first = stage
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._bar)
        self.show(self._first)
        if self._bar.is_shown and not self._bar.is_drawn:
            thread = threading.Thread(target=self._print_waits, daemon=True)
            thread.start()
            self._stack.callback(thread.join)
        self._stack.callback(self._ended.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, stage: str, rows: int = 0, rows_total: int | None = None) -> None:
        """Show a stage, and how many of its rows are done. A total of None is unknown."""
        with self._lock:
            if stage != self._stage:
                self._stage = stage
                self._begun = self._printed = time.monotonic()
                self._bar.set_label(stage, replaces=True)
                if not self._bar.is_drawn:
                    self._cli_context.info(stage)
            if rows or rows_total is not None or self._bar.is_drawn:
                self._printed = time.monotonic()
                self._bar.update(rows, rows_total)

    def _print_waits(self) -> None:
        """Print the time of a stage that reports no rows."""
        while not self._ended.wait(LINE_SECONDS):
            with self._lock:
                now = time.monotonic()
                if now - self._printed >= _SILENT_SECONDS_MAX:
                    self._printed = now
                    took = format_duration(round(now - self._begun))
                    self._cli_context.info(f"{self._stage}: {took} so far")


def starting_text(master: str) -> str:
    """Return the first stage of every job."""
    return f"starting Spark on {master}"


@contextmanager
def started_session(
    cli_context: CliContext,
    name: str,
    master: str,
    **how: Any,  # noqa: ANN401  # the options of `session_scope`
) -> Iterator[SparkSession]:
    """Yield a session, and show progress only until it has started."""
    from taskyard.pipeline.session import session_scope  # noqa: PLC0415  # imports Spark

    with ExitStack() as stack:
        with StageProgress(cli_context, starting_text(master)):
            spark = stack.enter_context(session_scope(name, master, **how))
        yield spark


#: The default directory of the tables, in the state directory.
TABLES_FOLDER = "tables"


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
    appended once, and only other rows are computed again. Readers see all tables of one run or of
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
    targets = [out or str(state / TABLES_FOLDER) for state in states]
    kept = timedelta(microseconds=keep / 1000)
    with ExitStack() as stack:
        jobs = []
        for state, target in zip(states, targets, strict=True):
            jobs.append(job.HistoryJob(state, target, table_format=table_format, keep=kept))
            stack.callback(jobs[-1].close)
        local = [Path(target) for target in targets if "://" not in target]
        results = _run_histories(cli_context, jobs, master, (states, local))
    rows = zip(states, targets, results, are_complete, strict=True)
    _print_histories(cli_context, [_state_history(*row) for row in rows])


def _state_history(
    state: Path,
    target: str,
    result: HistoryResult,
    is_complete: bool,  # noqa: FBT001  # a row
) -> StateHistory:
    return StateHistory(
        state=str(state),
        out=target,
        row_last=result.last,
        parts=result.parts,
        campaigns=result.campaigns,
        complete=is_complete,
    )


def _run_histories(
    cli_context: CliContext,
    jobs: list[HistoryJob],
    master: str,
    directories: tuple[Sequence[Path], Sequence[Path]],
) -> list[HistoryResult]:
    """Run the jobs in turn, in one session. All histories are checked before the first.

    A single part gains nothing from a session on this machine, so it is done here.
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


def _print_histories(cli_context: CliContext, made: list[StateHistory]) -> None:
    for one in made:
        if not one.complete:
            which = "this state" if len(made) == 1 else one.state
            cli_context.info(f"a broker is running on {which}: the tables end at its last export")
    if cli_context.as_json:
        print_document(PipelineHistoryDocument(states=made))
        return
    for one in made:
        if not (one.parts or one.campaigns):
            click.echo(f"no new history: the tables in {one.out} cover it up to row {one.row_last}")
        else:
            click.echo(
                f"added {format_count(one.parts, 'new part')} of the history with events of "
                f"{format_count(one.campaigns, 'campaign')}, up to row {one.row_last}: {one.out}"
            )


@click.command(
    cls=SparkCommand,
    epilog=example(
        "pipeline fleet --workers 2 --state ./.taskyard",
        "pipeline fleet --workers 40 --slots 4 --broker tcp://head:6125 --master spark://head:7077",
    ),
)
@click.option(
    "--workers",
    type=click.IntRange(1, SLOTS_MAX),
    required=True,
    metavar="N",
    help="Number of workers. Each takes one Spark core.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    default=1,
    metavar="N",
    help="Tasks at once per worker.",
)
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="S",
    show_default="exec, call",
    help="Service that the workers offer. Repeatable.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module of the executors. Repeatable.",
)
@master_option
@click.pass_obj
def fleet(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    *,
    workers: int,
    slots: int,
    services: tuple[str, ...],
    allow: tuple[str, ...],
    master: str,
) -> None:
    """Run workers inside Spark executors.

    They run until the broker drains or the command is interrupted. Then their running tasks are
    killed and go to other workers. If an executor is lost, Spark restarts its workers elsewhere. On
    a cluster, the executors need Taskyard installed and a broker that they can reach: --listen
    dwork=tcp://… with keys. A Spark Connect server restarts a worker as often as its own
    spark.task.maxFailures allows. With several brokers, each worker works for all of them, until
    all drain.
    """
    from taskyard.pipeline import executors  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.jobs import fleet as fleet_job  # noqa: PLC0415

    found = discovery.worker_endpoints(
        cli_context.brokers, cli_context.state, cli_context.settings()
    )
    for endpoint in found:
        fleet_job.check(workers, master, endpoint)
    name = "taskyard pipeline fleet"
    with started_session(cli_context, name, master, conf=fleet_job.CONF) as spark:
        fleet_job.check_server(spark)
        executors.check(spark, master)
        cores = executors.cores_of(spark)
        size = f"{format_count(workers, 'worker')} of {format_count(slots, 'slot')}"
        brokers = f"the broker{'s' if len(found) > 1 else ''} at {', '.join(found)}"
        cli_context.info(f"{size} for {brokers}, {_print_free_cores(cores - workers)}")
        arguments = ["--slots", str(slots)]
        for service in services:
            arguments += ["--service", service]
        for module in allow:
            arguments += ["--allow", module]
        arguments += _broker_arguments(cli_context, found)
        left = fleet_job.run(spark, workers, arguments)
    if cli_context.as_json:
        print_document(PipelineFleetDocument(workers=left))
    else:
        click.echo(f"{format_count(left, 'worker')} exited")


def _print_free_cores(free: int) -> str:
    if free < 0:
        return f"{-free} of them waiting for cores"
    return f"{format_count(free, 'core')} of Spark unused"


def _broker_arguments(cli_context: CliContext, brokers: Sequence[str]) -> list[str]:
    """Return the options by which each worker connects."""
    arguments: list[str] = []
    for broker in brokers:
        arguments += ["--broker", broker]
    configured = discovery.configured_key_file(cli_context.settings())
    for key in cli_context.keys or (() if configured is None else (configured,)):
        arguments += ["--key", str(key)]
    return arguments
