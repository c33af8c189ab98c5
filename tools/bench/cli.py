"""The command line of the benchmarks: runs a suite, prints its table, writes its JSON."""

import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench import commands, heartbeats, lanes, steady
from bench.broker import growth
from bench.broker import suite as broker_suite
from bench.calls import suite as calls
from bench.core import suite as core_suite
from bench.dialects import suite as dialects
from bench.page import suite as page_suite
from bench.pipeline import suite as pipeline_suite
from bench.rivals import suite as rivals_suite
from bench.settings import Settings
from bench.table import TableLine
from taskyard.errors import UserError

#: The width of the table in a file.
_FILE_WIDTH: Final = 110

#: Figures from here on are printed without decimals.
_NO_DECIMALS: Final = 1000


class Report(msgspec.Struct):
    """The JSON document of a run."""

    suite: str
    python: str
    machine: str
    lines: list[TableLine]
    version: int = 1


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure Taskyard and compare it with its targets."""


repeats_option = click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Runs of each case.",
)


def _numbers(_context: click.Context, option: click.Parameter, text: str) -> list[int]:
    """Read numbers that are separated by commas."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: not a list of numbers such as 100,1000") from error
    low = 0 if option.name == "relays" else 1
    if min(numbers) < low:
        raise click.BadParameter(f"{text!r}: a number is below {low}")
    return numbers


json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to this file."
)


@main.command("core")
@repeats_option
@click.option(
    "--huge", is_flag=True, help="Also measure ten million tasks, which takes minutes and 6 GB."
)
@json_option
def core_command(repeats: int, json_file: Path | None, *, huge: bool) -> None:
    """Measure the scheduler alone, and with the journal.

    Example: ./yard bench core --repeats 5 --json core.json
    """
    _finish(
        "core", core_suite.run(repeats=repeats, huge=huge, say=_progress_to_stderr()), json_file
    )


@main.command("broker")
@repeats_option
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(broker_suite.CASES)),
    help="Run only this case. May be given several times.",
)
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@click.option(
    "--huge",
    is_flag=True,
    help="Compare ten million queued tasks with a million instead: 15 minutes, 4 GB.",
)
@click.option("--profile", is_flag=True, help="Print where the broker spends its time.")
@click.option(
    "--store",
    default="",
    metavar="URL",
    help="Compare an empty store in PostgreSQL on this machine with SQLite instead. "
    "`postgresql` starts a server of its own, in TMPDIR.",
)
@json_option
def broker_command(  # noqa: PLR0913  # an option each
    repeats: int,
    only: tuple[str, ...],
    json_file: Path | None,
    *,
    quick: bool,
    huge: bool,
    profile: bool,
    store: str,
) -> None:
    """Measure the whole broker: processes, sockets, journal.

    State directories are made in TMPDIR, which should be on the disk to measure.

    Example: ./yard bench broker --only batches --only plain --json broker.json
    """
    if huge + bool(only) + bool(store) > 1:
        raise click.UsageError("--huge, --only and --store exclude each other")
    settings = Settings(_progress_to_stderr(), repeats, quick, profile, store)
    suite = " ".join(["broker", *["--huge"] * huge, *["--quick"] * quick])
    made = growth.run(settings) if huge else broker_suite.run(settings, only)
    _finish(suite, made, json_file)


@main.command("calls")
@click.option("--keep", is_flag=True, help="Write the numbers of this run as the kept numbers.")
def calls_command(*, keep: bool) -> None:
    """Count the Python calls of each usual message. No clock: the same on any machine.

    Calls of our own code are compared with the kept numbers, which may only fall.

    Example: ./yard bench calls
    """
    found, idle = calls.run(_progress_to_stderr())
    calls.show(found, idle)
    if keep:
        calls.keep(found)
    elif lines := calls.changed(found):
        raise click.ClickException("\n".join([*lines, "--keep writes these numbers"]))


@main.command("dialects")
@repeats_option
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@json_option
def dialects_command(repeats: int, json_file: Path | None, *, quick: bool) -> None:
    """Measure one task at a time in every dialect, beside the native dialect.

    Example: ./yard bench dialects --json dialects.json
    """
    settings = Settings(_progress_to_stderr(), repeats, quick)
    suite = "dialects --quick" if quick else "dialects"
    _finish(suite, dialects.run(settings), json_file)


@main.command("lanes")
@repeats_option
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@click.option("--profile", is_flag=True, help="Print where the broker spends its time.")
@json_option
def lanes_command(repeats: int, json_file: Path | None, *, quick: bool, profile: bool) -> None:
    """Compare 100,000 lanes with one, with and without limits, and 1,000 with a rate each.

    Example: ./yard bench lanes --json lanes.json
    """
    settings = Settings(_progress_to_stderr(), repeats, quick, profile=profile)
    suite = "lanes --quick" if quick else "lanes"
    _finish(suite, lanes.run(settings), json_file)


@main.command("commands")
@repeats_option
@click.option(
    "--python",
    default=sys.executable,
    help="The Python that has HyperQueue, Celery, RQ and Dask, e.g. of another environment.",
)
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@json_option
def commands_command(repeats: int, python: str, json_file: Path | None, *, quick: bool) -> None:
    """Compare 1,000 shell commands with other tools, with the parts of Taskyard's CPU time.

    The tools are xargs, GNU parallel, HyperQueue, Slurm, Celery, RQ and Dask. Tools that are not
    installed are left out, and so is Slurm if slurmctld is not running.

    Example: ./yard bench commands --python peers/bin/python --json commands.json
    """
    settings = Settings(_progress_to_stderr(), repeats, quick)
    suite = "commands --quick" if quick else "commands"
    _finish(suite, commands.run(settings, python), json_file)


@main.command("heartbeats")
@click.option(
    "--workers",
    default=",".join(map(str, heartbeats.WORKERS)),
    show_default=True,
    callback=_numbers,
    help="Numbers of workers.",
)
@click.option(
    "--relays",
    default=",".join(map(str, heartbeats.RELAYS)),
    show_default=True,
    callback=_numbers,
    help="Numbers of relays between workers and broker. 0: the workers connect to the broker.",
)
@click.option("--busy", is_flag=True, help="Each worker runs a task that does not end.")
@click.option(
    "--repeats",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Windows of 20 s for each case.",
)
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@click.option("--profile", is_flag=True, help="Print where the broker spends its time.")
@json_option
def heartbeats_command(  # noqa: PLR0913  # one an option
    workers: list[int],
    relays: list[int],
    repeats: int,
    json_file: Path | None,
    *,
    busy: bool,
    quick: bool,
    profile: bool,
) -> None:
    """Measure a broker with many connected workers: CPU, memory and reply time.

    The workers have default settings and wait for tasks. All cases take five minutes.

    Example: ./yard bench heartbeats --workers 10000 --relays 0,10 --json heartbeats.json
    """
    settings = Settings(_progress_to_stderr(), repeats, quick, profile=profile)
    suite = "heartbeats --quick" if quick else "heartbeats"
    cases = [heartbeats.Case(count, number, busy) for number in relays for count in workers]
    try:
        lines = heartbeats.run(settings, cases)
    except UserError as error:
        raise click.ClickException(str(error)) from error
    _finish(suite, lines, json_file)


@main.command("steady")
@click.option(
    "--tasks",
    default=5_000_000,
    show_default=True,
    type=click.IntRange(min=1000),
    help="Number of tasks. Fewer make compactions smaller, too.",
)
@click.option("--queued", is_flag=True, help="Compact a queue of that many tasks instead.")
@json_option
def steady_command(tasks: int, json_file: Path | None, *, queued: bool) -> None:
    """Measure a steady flow of tasks: memory at a tenth, at half and at the end, and compactions.

    Example: ./yard bench steady --tasks 1000000 --json steady.json
    """
    run = steady.run_queued if queued else steady.run
    _finish(f"steady --tasks {tasks}", run(tasks, _progress_to_stderr()), json_file)


@main.command("pipeline")
@repeats_option
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(pipeline_suite.CASES)),
    help="Run only this case. May be given several times.",
)
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@json_option
def pipeline_command(
    repeats: int, only: tuple[str, ...], json_file: Path | None, *, quick: bool
) -> None:
    """Measure the data pipeline on Spark: tables, report, data source, sweep.

    Events to attempts are compared with DuckDB on the same files. Files are made in TMPDIR.

    Example: ./yard bench pipeline --only report --only submit --json pipeline.json
    """
    settings = Settings(_progress_to_stderr(), repeats, quick)
    suite = "pipeline --quick" if quick else "pipeline"
    _finish(suite, pipeline_suite.run(settings, only), json_file)


@main.command("page")
@repeats_option
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the large state in this directory, or use the state that is there.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(page_suite.CASES)),
    help="Run only this case. May be given several times.",
)
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@json_option
def page_command(
    state: Path | None, only: tuple[str, ...], json_file: Path | None, repeats: int, *, quick: bool
) -> None:
    """Measure the page at a million tasks: the time of every view, and its cost.

    `throughput` compares a broker with ten open pages and without, in alternation.

    Example: ./yard bench page --state /var/tmp/million --only views --json page.json
    """
    bench = page_suite.PageBench(Settings(_progress_to_stderr(), repeats, quick), state)
    suite = "page --quick" if quick else "page"
    _finish(suite, page_suite.run(bench, only), json_file)


@main.command("peers")
@repeats_option
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Measure only systems whose names start so, and Taskyard. May be given several times.",
)
@click.option(
    "--dhub",
    type=click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True),
    help="The program of dwork's own server.",
)
@click.option("--install", is_flag=True, help="Install Dask into a temporary environment.")
@click.option("--quick", is_flag=True, help="Use small numbers, to see whether it runs.")
@json_option
def peers_command(  # noqa: PLR0913  # an option each
    repeats: int,
    only: tuple[str, ...],
    dhub: Path | None,
    json_file: Path | None,
    *,
    install: bool,
    quick: bool,
) -> None:
    """Compare Taskyard with other task queues and pools, interleaved in one run.

    The systems are gearmand, beanstalkd, Redis, PostgreSQL, ProcessPoolExecutor and Dask. Systems
    that are not installed are named, with the command that installs them.

    Example: ./yard bench peers --only gearmand --only redis --json peers.json
    """
    settings = Settings(_progress_to_stderr(), repeats, quick)
    suite = "peers --quick" if quick else "peers"
    _finish(suite, rivals_suite.run(settings, only, dhub, install=install), json_file)


def _progress_to_stderr() -> Callable[[str], None]:
    """Return a function that prints progress to stderr."""
    console = Console(file=getattr(sys.stderr, "stream", sys.stderr))  # without escapes
    return lambda text: console.print(text, style="dim")


def _finish(suite: str, lines: list[TableLine], json_file: Path | None) -> None:
    show(suite, lines)
    if json_file is not None:
        report = Report(suite, platform.python_version(), platform.machine(), lines)
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def show(suite: str, lines: Sequence[TableLine]) -> None:
    """Print the table: best of several, spread, floor, goal, verdict."""
    table = Table(title=f"bench {suite}: best of several", title_justify="left")
    table.add_column("what", no_wrap=True)
    for column in ("best", "worst", "unit", "floor", "goal", "reached"):
        table.add_column(column, justify="left" if column in {"unit", "reached"} else "right")
    for one in lines:
        bounds = ["" if mark is None else f"{mark:g}" for mark in (one.floor, one.goal)]
        figures = (_shown(one.best), _shown(one.worst))
        table.add_row(one.what, *figures, one.unit, *bounds, one.verdict)
    console = Console(file=getattr(sys.stdout, "stream", sys.stdout))  # without escapes
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table)


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= _NO_DECIMALS else f"{figure:.2f}"
