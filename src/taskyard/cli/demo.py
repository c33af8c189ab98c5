"""`taskyard demo`: options and output. The steps are in `taskyard.demo`."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.documents import DemoCounts, DemoDocument, DemoLine
from taskyard.cli.format import escape_line
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline import SparkCommand
from taskyard.cli.progress import ProgressBar
from taskyard.demo.campaign import TASKS, TASKS_MAX, TASKS_MIN
from taskyard.errors import ExitCode
from taskyard.process.supervisor import stop_signals_as_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from taskyard.demo import campaign
    from taskyard.demo.campaign import ProofLine
    from taskyard.demo.walkthrough import DemoResult

#: The default of --out.
DIRECTORY: Final = "taskyard-demo"


@click.command(cls=SparkCommand, epilog=example("demo", "demo --tasks 10000 --out /tmp/demo"))
@click.option(
    "--tasks",
    type=click.IntRange(TASKS_MIN, TASKS_MAX),
    default=TASKS,
    metavar="N",
    help="Number of tasks in the campaign.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    default=DIRECTORY,
    help="Working directory. The files of an earlier demo are replaced.",
)
@click.pass_obj
def demo(cli_context: CliContext, *, tasks: int, out: Path) -> ExitCode:
    """Run a demonstration: a campaign, a broker crash and a report.

    Generates a campaign with a graph, with lanes and with a destination that fails at first. Spark
    checks and loads it. Workers of several dialects run it, some of them through a relay. Halfway
    through, the broker is killed with SIGKILL and restarted. Then Spark computes tables and a
    report with charts, and the journal is audited for lost tasks, double completions and broken
    dependencies.

    Takes about a minute on two cores. Exit 0 only if every check passes. Needs the extra: pip
    install 'taskyard[spark]'.
    """
    from taskyard.demo import walkthrough  # noqa: PLC0415  # imports Spark

    cli_context.interrupt_message = "interrupted; all processes of the demo have ended"
    with stop_signals_as_interrupt():
        outcome = walkthrough.run(tasks, out, DemoOutput(cli_context))
    if cli_context.as_json:
        print_document(_document(outcome))
    else:
        _print(outcome, out)
    return exit_code(outcome.lines)


class DemoOutput:
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


def exit_code(lines: list[ProofLine]) -> ExitCode:
    broken = [line.code for line in lines if not line.passed]
    return max(broken, default=ExitCode.OK)


def print_lines(lines: list[ProofLine]) -> None:
    click.echo("\nchecks against the journal:")
    wide = max(len(line.what) for line in lines)
    for line in lines:
        mark = "" if line.passed else "   <- FAILED"
        click.echo(f"  {line.what:<{wide}}  {line.figures}{mark}")


def verdict(lines: list[ProofLine], where: str = "") -> str:
    broken = [line.what for line in lines if not line.passed]
    return f"FAILED: {', '.join(broken)}{where}" if broken else "all checks passed"


def _print(outcome: DemoResult, out: Path) -> None:
    print_lines(outcome.lines)
    ending = verdict(outcome.lines, f" (see {outcome.state})")
    click.echo(f"{ending} ({outcome.seconds:.0f} s)\n")
    click.echo(f"report: {escape_line(str(out / outcome.report.relative_to(outcome.directory)))}")
    click.echo("to try next (in a clone, use ./yard instead of taskyard):")
    state = shlex.quote(str(out / outcome.state.relative_to(outcome.directory)))
    for command in (
        f"why digest --state {state}",
        f"list --failed --state {state}",
        f"pipeline sweep --state {state} --workers 1,2,4,8",
    ):
        click.echo(f"  taskyard {command}")


def _counts(counts: campaign.DemoCounts) -> DemoCounts:
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
