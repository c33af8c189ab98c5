"""`taskyard demo`: options and output. The steps are in `taskyard.demo`."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.format import escape_line
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline.documents import (
    DemoCounts,
    DemoDocument,
    DemoLine,
    PairDemoDocument,
)
from taskyard.cli.pipeline.group import SparkCommand
from taskyard.cli.progress import ProgressBar
from taskyard.demo.campaign import PAIR_TASKS, TASKS, TASKS_MAX, TASKS_MIN
from taskyard.errors import ExitCode, NotInstalled
from taskyard.process.supervisor import stop_signals_as_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from taskyard.demo import audit
    from taskyard.demo.audit import ProofLine
    from taskyard.demo.pair import PairResult
    from taskyard.demo.walkthrough import DemoResult

#: The default of --out.
DIRECTORY: Final = "taskyard-demo"


class DemoCommand(SparkCommand):
    """A command that needs Spark, but not with --pair."""

    def invoke(self, ctx: click.Context) -> object:
        return click.Command.invoke(self, ctx) if ctx.params["pair"] else super().invoke(ctx)


@click.command(
    cls=DemoCommand, epilog=example("demo", "demo --tasks 10000 --out /tmp/demo", "demo --pair")
)
@click.option(
    "--tasks",
    type=click.IntRange(TASKS_MIN, TASKS_MAX),
    show_default=f"{TASKS}, or {PAIR_TASKS} with --pair",
    metavar="N",
    help="Number of tasks in the campaign.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default=DIRECTORY,
    help="Working directory. The files of an earlier demo are replaced. Not with --pair.",
)
@click.option(
    "--pair",
    is_flag=True,
    help="Instead: two brokers on a throw-away PostgreSQL. The leader is killed, the other one "
    "takes over.",
)
@click.option(
    "--postgresql",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    show_default="in PATH, by pg_config, or of a package",
    help="Directory with the programs of PostgreSQL, for --pair.",
)
@click.pass_obj
def demo(  # one for each option
    cli_context: CliContext,
    *,
    tasks: int | None,
    out: Path | None,
    pair: bool,
    postgresql: Path | None,
) -> ExitCode:
    """Run a demonstration: a campaign, a broker crash and a report.

    Generates a campaign with a graph, with lanes and with a destination that fails at first. Spark
    checks and loads it. Workers of several dialects run it, some of them through a relay. Halfway
    through, the broker is killed with SIGKILL and restarted. Then Spark computes tables and a
    report with charts, and the journal is audited for lost tasks, double completions and broken
    dependencies.

    Takes about a minute on two cores. Exit 0 only if every check passes. Needs the extra: pip
    install 'taskyard[spark]'.

    With --pair: starts a PostgreSQL in a temporary directory, two brokers and two workers. While a
    client submits tasks, the broker that leads is killed with SIGKILL. The other one takes over.
    Then the journal is audited. Takes 20 seconds, and needs PostgreSQL's programs and pip install
    'taskyard[postgres]'.
    """
    cli_context.interrupt_message = "interrupted; all processes of the demo have ended"
    with stop_signals_as_interrupt():
        if pair:
            if out is not None:
                raise click.UsageError("--out: can't be used with --pair, which keeps no files")
            return _run_pair(cli_context, tasks or PAIR_TASKS, postgresql)
        if postgresql is not None:
            raise click.UsageError("--postgresql: needs --pair")
        return _run(cli_context, tasks or TASKS, out or Path(DIRECTORY))


def _run(cli_context: CliContext, tasks: int, out: Path) -> ExitCode:
    from taskyard.demo import walkthrough  # noqa: PLC0415  # imports Spark

    outcome = walkthrough.run(tasks, out, _DemoOutput(cli_context))
    if cli_context.as_json:
        print_document(_document(outcome))
    else:
        _print(outcome, out)
    return _exit_code(outcome.lines)


def _run_pair(cli_context: CliContext, tasks: int, postgresql: Path | None) -> ExitCode:
    try:
        from taskyard.demo import pair  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(
            f"demo --pair: needs {error.name} (`pip install 'taskyard[postgres]'`)"
        ) from error
    outcome = pair.run(tasks, postgresql, _DemoOutput(cli_context))
    if cli_context.as_json:
        print_document(_pair_document(outcome))
    else:
        _print_lines(outcome.lines)
        click.echo(f"{_verdict(outcome.lines)} ({outcome.seconds:.0f} s)")
    return _exit_code(outcome.lines)


class _DemoOutput:
    """Prints each step with its time, and a progress bar while the campaign runs."""

    def __init__(self, cli_context: CliContext) -> None:
        self._cli_context = cli_context
        self._began = time.monotonic()
        self._bar: ProgressBar | None = None

    def step(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:5.1f} s  {text}"
        if self._bar is None:
            self._cli_context.info(line)
        elif not self._cli_context.quiet:
            self._bar.print_above(line)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ProgressBar(self._cli_context, "         demo") as self._bar:
            yield
        self._bar = None

    def count(self, counts: Mapping[str, int], total: int) -> None:
        if self._bar is not None:
            self._bar.count(counts, total)


def _exit_code(lines: list[ProofLine]) -> ExitCode:
    broken = [line.code for line in lines if not line.passed]
    return max(broken, default=ExitCode.OK)


def _print_lines(lines: list[ProofLine]) -> None:
    click.echo("\nchecks against the journal:")
    wide = max(len(line.what) for line in lines)
    for line in lines:
        mark = "" if line.passed else "   <- FAILED"
        click.echo(f"  {line.what:<{wide}}  {line.figures}{mark}")


def _verdict(lines: list[ProofLine], place: str = "") -> str:
    broken = [line.what for line in lines if not line.passed]
    return f"FAILED: {', '.join(broken)}{place}" if broken else "all checks passed"


def _print(outcome: DemoResult, out: Path) -> None:
    _print_lines(outcome.lines)
    verdict = _verdict(outcome.lines, f" (see {outcome.state})")
    click.echo(f"{verdict} ({outcome.seconds:.0f} s)\n")
    click.echo(f"report: {escape_line(str(out / outcome.report.relative_to(outcome.directory)))}")
    click.echo("to try next (in a clone, use ./yard instead of taskyard):")
    state = shlex.quote(str(out / outcome.state.relative_to(outcome.directory)))
    for command in (
        f"why digest --state {state}",
        f"list --failed --state {state}",
        f"pipeline sweep --state {state} --workers 1,2,4,8",
    ):
        click.echo(f"  taskyard {command}")


def _counts(counts: audit.DemoCounts) -> DemoCounts:
    audit_counts = counts.audit_counts
    return DemoCounts(
        submitted=audit_counts.submitted,
        done=audit_counts.done,
        failed=audit_counts.failed,
        cancelled=audit_counts.cancelled,
        blocked_behind_failure=counts.behind_failure,
        lost=counts.lost,
        completed_twice=audit_counts.completed_twice,
        dependencies_broken=audit_counts.dependencies_broken,
        stale_refused=audit_counts.stale,
        done_by=counts.done_by,
    )


def _document(outcome: DemoResult) -> DemoDocument:
    return DemoDocument(
        directory=str(outcome.directory),
        report=str(outcome.report),
        tables=str(outcome.tables),
        seconds=round(outcome.seconds, 3),
        counts=_counts(outcome.counts),
        lines=_document_lines(outcome.lines),
        sound=all(line.passed for line in outcome.lines),
    )


def _document_lines(lines: list[ProofLine]) -> list[DemoLine]:
    return [DemoLine(check=line.what, figures=line.figures, passed=line.passed) for line in lines]


def _pair_document(outcome: PairResult) -> PairDemoDocument:
    counts, takeover = outcome.counts.audit_counts, outcome.takeover
    return PairDemoDocument(
        seconds=round(outcome.seconds, 3),
        submitted=counts.submitted,
        done=counts.done,
        failed=counts.failed,
        lost=counts.unfinished,
        completed_twice=counts.completed_twice,
        stale_refused=counts.stale,
        rows=outcome.counts.rows,
        epoch_before=takeover.epoch_before,
        epoch_after=takeover.epoch_after,
        takeover_seconds=round(takeover.seconds, 3),
        lines=_document_lines(outcome.lines),
        sound=all(line.passed for line in outcome.lines),
    )
