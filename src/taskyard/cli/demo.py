"""`taskyard demo`: its options and its words. What happens is the demo's affair."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.local import terminated_like_interrupted
from taskyard.cli.options import Talk, json_option, quiet_option, verbose_option
from taskyard.cli.pipeline import SparkVerb
from taskyard.cli.printing import example, print_document
from taskyard.cli.progress import Meter
from taskyard.cli.words import plain
from taskyard.demo.campaign import TASKS, TASKS_MAX, TASKS_MIN
from taskyard.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from taskyard.demo.proof import Counts, Line
    from taskyard.demo.story import Outcome

#: Where it works if nobody says where.
DIRECTORY: Final = "taskyard-demo"


@click.command(cls=SparkVerb, epilog=example("demo", "demo --tasks 10000 --out /tmp/demo"))
@click.option(
    "--tasks",
    type=click.IntRange(TASKS_MIN, TASKS_MAX),
    default=TASKS,
    show_default=True,
    metavar="N",
    help="How many tasks the campaign has.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    default=DIRECTORY,
    show_default=True,
    help="Where to work; what an earlier demo has left there is replaced.",
)
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def demo(talk: Talk, *, tasks: int, out: Path, as_json: bool) -> ExitCode:
    """Show everything once: a campaign, a broker that is killed, and what is left of it.

    Makes a campaign with a graph, lanes and a destination that fails at first. Spark checks and
    loads it; workers of several dialects do it, some of them through a relay; in the middle the
    broker is killed with SIGKILL and comes back. Then Spark makes tables and a report with
    pictures, and the journal is counted: was a task lost, done twice, or begun too early?

    About a minute on two cores. Exit 0 only if every line of the last table holds. Needs the extra:
    pip install 'taskyard[spark]'.
    """
    from taskyard.demo import story  # noqa: PLC0415  # it imports Spark

    talk.interrupted = "interrupted; all that the demo had started has ended. Run it again at will"
    with terminated_like_interrupted():
        outcome = story.run(tasks, out, _Telling(talk))
    if as_json:
        _print_json(outcome)
    else:
        _print(outcome, out)
    return _exit_code(outcome.lines)


class _Telling:
    """A line a step with its time, and a bar while the campaign runs."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._began = time.monotonic()
        self._meter: Meter | None = None

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:5.1f} s  {text}"
        if self._meter is None:
            self._talk.say(line)
        elif not self._talk.quiet:
            self._meter.say(line)

    @contextmanager
    def running(self) -> Iterator[None]:
        with Meter(self._talk, "         demo") as self._meter:
            yield
        self._meter = None

    def count(self, counts: Mapping[str, int], total: int) -> None:
        if self._meter is not None:
            self._meter.count(counts, total)


def _exit_code(lines: list[Line]) -> ExitCode:
    broken = [line.code for line in lines if not line.holds]
    return max(broken, default=ExitCode.GOOD)


def _print(outcome: Outcome, out: Path) -> None:
    click.echo("\nwhat the journal proves:")
    wide = max(len(line.what) for line in outcome.lines)
    for line in outcome.lines:
        mark = "" if line.holds else "   <- DOES NOT HOLD"
        click.echo(f"  {line.what:<{wide}}  {line.figures}{mark}")
    broken = [line.what for line in outcome.lines if not line.holds]
    if broken:
        verdict = f"it does NOT hold: {', '.join(broken)}; what happened is in {outcome.state}"
    else:
        verdict = "all of it holds"
    click.echo(f"{verdict} ({outcome.seconds:.0f} s)\n")
    click.echo(f"report: {plain(str(out / outcome.report.relative_to(outcome.directory)))}")
    click.echo("what to try next (in a clone, with ./yard in place of taskyard):")
    state = shlex.quote(str(out / outcome.state.relative_to(outcome.directory)))
    for command in (
        f"why digest --state {state}",
        f"list --failed --state {state}",
        f"pipeline sweep --state {state} --workers 1,2,4,8",
    ):
        click.echo(f"  taskyard {command}")


def _counted(counts: Counts) -> dict[str, object]:
    tally = counts.tally
    return {
        "submitted": tally.submitted,
        "done": tally.done,
        "failed": tally.failed,
        "cancelled": tally.cancelled,
        "blocked_behind_failure": counts.behind_failure,
        "lost": counts.lost,
        "completed_twice": tally.completed_twice,
        "dependencies_broken": tally.dependencies_broken,
        "stale_refused": tally.stale,
        "done_by": counts.done_by,
    }


def _print_json(outcome: Outcome) -> None:
    print_document(
        "demo",
        directory=str(outcome.directory),
        report=str(outcome.report),
        tables=str(outcome.tables),
        seconds=round(outcome.seconds, 3),
        counts=_counted(outcome.counts),
        lines=[
            {"what": line.what, "figures": line.figures, "holds": line.holds}
            for line in outcome.lines
        ],
        sound=all(line.holds for line in outcome.lines),
    )
