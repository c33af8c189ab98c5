"""The report of `taskyard run`: the outcome, failures, the slowest tasks and how to resume.

Prints counts of the caller, and requests only the failures and the slowest tasks.
"""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import click
from msgspec import Struct

from taskyard.campaign.detection import Format
from taskyard.campaign.reader import default_campaign_name
from taskyard.cli.documents import RunDocument, RunFailure, SlowTask
from taskyard.cli.file_tasks import UNSETTLED
from taskyard.cli.format import escape_line, format_count, format_duration, shorten_middle
from taskyard.cli.output import print_document
from taskyard.cli.run_policy import StoppedEarly
from taskyard.cli.wait import (
    SLOW_SECONDS_MIN,
    SLOWEST_SEARCHED_MAX,
    format_slowest,
    slowest_tasks,
)
from taskyard.core.events import Scope
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.campaign.reader import LoadedCampaign
    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.cli.file_tasks import RunCounts
    from taskyard.client.internal import InternalClient

#: The most failures that are printed. `taskyard list --failed` has all.
FAILURES_SHOWN_MAX: Final = 20

#: The most characters of a shell command that a failure shows.
COMMAND_SHOWN_MAX: Final = 60

#: The reason of truncated results. Those of commands are kept whole.
TRUNCATED: Final = (
    "truncated: agents and WMP workers send at most the last 1 MiB of a result (see `taskyard "
    "result NAME`)"
)


class RunOptions(Struct, frozen=True):
    """The options of a run."""

    file: str
    campaign: str
    #: The state directory. Empty if the broker is named by its endpoint.
    state: str
    #: The options that lead to the same broker, for commands that are printed.
    location: str
    skip_bad: bool
    retry_failed: bool
    as_json: bool
    #: None: detected.
    form: Format | None = None
    #: Submit nothing, and wait for the failed tasks only.
    retry_failed_only: bool = False
    quiet: bool = False
    #: Outputs of tasks go to stdout, and the summary to stderr.
    shows_output: bool = False


class RunEnd(Struct):
    """How a run ended."""

    #: Why it was stopped early.
    stopped: StoppedEarly | None = None
    #: Other tasks of the campaign may still run.
    is_partial: bool = False
    #: The exit code of tasks that it waited for. None: that of all tasks of the file.
    exit_code: ExitCode | None = None


def print_report(  # noqa: PLR0913  # the parts of a report
    run_options: RunOptions,
    client: InternalClient,
    seconds: float,
    end: RunEnd,
    numbers: RunCounts,
    *,
    loaded: LoadedCampaign,
) -> ExitCode:
    """Print the outcome of the file's tasks and return the exit code."""
    counts, truncated = numbers.counts, numbers.truncated
    failures = _failures(run_options, client, numbers) if counts["failed"] else []
    code = _exit_code(end, counts, truncated)
    slowest: list[SlowTask] = []
    total, longest = sum(counts.values()), numbers.longest_seconds
    if total <= SLOWEST_SEARCHED_MAX and (longest is None or longest >= SLOW_SECONDS_MIN):
        scope = Scope(campaign=run_options.campaign.encode())
        slowest = slowest_tasks(client, scope, numbers.names)
    if run_options.as_json:
        document = RunDocument(
            campaign=run_options.campaign,
            state=run_options.state,
            seconds=round(seconds, 3),
            counts=counts,
            truncated=truncated,
            failures=failures,
            stopped=str(end.stopped or ""),
            slowest=slowest,
            others=numbers.others or dict.fromkeys(counts, 0),
        )
        print_document(document)
    else:
        echo = partial(click.echo, err=run_options.shows_output)
        echo(
            f"{escape_line(run_options.campaign)}: {_outcome(end, counts, truncated)} "
            f"({format_duration(seconds)})"
        )
        if others_line := numbers.others_line():
            echo(others_line)
        if truncated:
            echo(TRUNCATED)
        if total > SLOWEST_SEARCHED_MAX:
            echo(f"slowest:  taskyard list --sort duration{run_options.location}")
        elif slowest:
            echo(format_slowest(slowest))
        _print_failures(run_options, failures, loaded, echo)
        if not run_options.shows_output:
            _print_results_hint(run_options, counts)
    return code


def _print_results_hint(run_options: RunOptions, counts: dict[str, int]) -> None:
    if not run_options.quiet and (counts["done"] or counts["failed"]):
        name = shlex.quote(escape_line(run_options.campaign))
        click.echo(f"results:  taskyard results --campaign {name}{run_options.location}")


def _failures(
    run_options: RunOptions, client: InternalClient, numbers: RunCounts
) -> list[RunFailure]:
    """Return the failed tasks of the file."""
    scope = Scope(campaign=run_options.campaign.encode(), states=(TaskState.FAILED,))
    return [
        RunFailure(**{field: task[field] for field in RunFailure.__struct_fields__})
        for task in client.tasks(scope)
        if numbers.names is None or task["name"] in numbers.names
    ]


def _exit_code(end: RunEnd, counts: dict[str, int], truncated: int) -> ExitCode:
    if end.stopped is not None:
        return end.stopped.exit_code
    if end.exit_code is not None:
        return end.exit_code
    if counts["failed"] or counts["blocked"] or truncated:
        return ExitCode.TASK_FAILED
    return ExitCode.CANCELLED if counts["cancelled"] else ExitCode.OK


def _outcome(end: RunEnd, counts: dict[str, int], truncated: int) -> str:
    unfinished = 0
    if end.is_partial:
        unfinished = sum(counts[state] for state in UNSETTLED)
        counts = counts | {"blocked": 0}
    parts = [
        f"{counts[state]:,} {word}"
        for state, word in (
            ("done", "done"),
            ("failed", "failed"),
            ("blocked", "behind a failure"),
            ("cancelled", "cancelled"),
        )
        if counts[state] or state == "done"
    ]
    if unfinished:
        parts.append(f"{unfinished:,} unfinished")
    if truncated:
        parts.append(f"{truncated:,} with truncated output")
    return ", ".join(parts)


def _print_failures(
    run_options: RunOptions,
    failures: list[RunFailure],
    loaded: LoadedCampaign,
    echo: Callable[[str], None],
) -> None:
    """Print failures, unless they were printed with the outputs, and how to go on."""
    if not failures:
        return
    shown = [] if run_options.shows_output else failures[:FAILURES_SHOWN_MAX]
    lines = _shell_lines(loaded, [one.name for one in shown])
    for one in shown:
        reason = escape_line(one.reason) or "no reason given"
        attempts = format_count(one.attempt, "attempt")
        name = escape_line(spelling(one.campaign, one.name))
        if line := lines.get(one.name):
            place = f"{escape_line(loaded.file)}:{line.number} ({line.command})"
            echo(f"  {place}: failed after {attempts}: {reason} ({name})")
        else:
            echo(f"  {name} failed after {attempts}: {reason}")
    if len(failures) > FAILURES_SHOWN_MAX and shown:
        more = len(failures) - FAILURES_SHOWN_MAX
        echo(f"  … and {more:,} more: taskyard list --failed{run_options.location}")
    first = failures[0]
    line = _shell_lines(loaded, [first.name]).get(first.name)
    name = f"{loaded.file}:{line.number}" if line else spelling(first.campaign, first.name)
    name = shlex.quote(escape_line(name))
    echo(f"explain:  taskyard why {name}{run_options.location}")
    echo(f"retry:    {resume_command(run_options)}")


class _ShellLine(NamedTuple):
    """A line of a file of commands."""

    number: int
    #: Its command, shortened.
    command: str


def _shell_lines(loaded: LoadedCampaign, names: Iterable[str]) -> dict[str, _ShellLine]:
    """Return the lines of tasks by name. Empty for other formats than shell lines."""
    if loaded.choice.format is not Format.SHELL:
        return {}
    wanted = frozenset(names)
    return {
        spec.name: _ShellLine(line, _shorten_command(spec))
        for spec, line in zip(loaded.specs, loaded.lines, strict=True)
        if spec.name in wanted
    }


def _shorten_command(spec: TaskSpec) -> str:
    command = spec.argv[-1] if spec.argv else ""
    return shorten_middle(escape_line(command), COMMAND_SHOWN_MAX)


def resume_command(run_options: RunOptions) -> str:
    own = (
        ""
        if run_options.campaign == default_campaign_name(run_options.file)
        else f" --campaign {run_options.campaign}"
    )
    form = "" if run_options.form is None else f" --format {run_options.form.value}"
    file = shlex.quote(run_options.file)
    return f"taskyard run {file}{form}{own}{run_options.location}"
