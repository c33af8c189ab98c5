"""The report of `taskyard run`: the outcome, failures, the slowest tasks and how to resume.

Prints counts of the caller, and requests only the failures and the slowest tasks.
"""

from __future__ import annotations

import shlex
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from msgspec import Struct

from taskyard.campaign.detection import Format
from taskyard.campaign.reader import default_campaign_name
from taskyard.cli.documents import RunDocument, RunFailure, RunsDocument, SlowTask
from taskyard.cli.file_tasks import UNSETTLED
from taskyard.cli.format import escape_line, format_count, format_duration, shorten_middle
from taskyard.cli.output import print_document
from taskyard.cli.run_policy import RunSummary, StoppedEarly
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
    from collections.abc import Callable, Iterable, Sequence

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


class RunReport(NamedTuple):
    """The facts of a run of a file, to be reported."""

    options: RunOptions
    loaded: LoadedCampaign
    end: RunEnd
    numbers: RunCounts
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        return _exit_code(self.end, self.numbers.counts, self.numbers.truncated)


def print_reports(reports: Sequence[RunReport], client: InternalClient) -> ExitCode:
    """Print the outcome of the tasks of all files, and return the exit code."""
    documents = [_document(one, client) for one in reports]
    if reports[0].options.as_json:
        print_document(documents[0] if len(documents) == 1 else RunsDocument(runs=documents))
    else:
        for report, document in zip(reports, documents, strict=True):
            _print_outcome(report, document)
        _print_next_steps(reports, documents)
    return combined_code([one.exit_code for one in reports])


def combined_code(codes: Sequence[ExitCode]) -> ExitCode:
    """Return the exit code of several runs: that of a failure before a cancellation."""
    order = (ExitCode.TIMED_OUT, ExitCode.TASK_FAILED, ExitCode.CANCELLED)
    return next((one for one in order if one in codes), max(codes, default=ExitCode.OK))


def summary_of(reports: Sequence[RunReport], code: ExitCode) -> RunSummary:
    """Return the summary of all files."""
    counts: Counter[str] = Counter()
    for one in reports:
        counts.update(one.numbers.counts)
    stopped = next((str(one.end.stopped) for one in reports if one.end.stopped), "")
    campaigns = ", ".join(one.options.campaign for one in reports)
    return RunSummary(campaigns, code, round(reports[-1].seconds, 3), dict(counts), stopped)


def _document(report: RunReport, client: InternalClient) -> RunDocument:
    """Return the document of the run of a file."""
    run_options, _, end, numbers, seconds = report
    counts = numbers.counts
    slowest: list[SlowTask] = []
    longest = numbers.longest_seconds
    is_small = sum(counts.values()) <= SLOWEST_SEARCHED_MAX
    if is_small and (longest is None or longest >= SLOW_SECONDS_MIN):
        scope = Scope(campaign=run_options.campaign.encode())
        slowest = slowest_tasks(client, scope, numbers.names)
    return RunDocument(
        campaign=run_options.campaign,
        state=run_options.state,
        seconds=round(seconds, 3),
        counts=counts,
        truncated=numbers.truncated,
        failures=_failures(run_options, client, numbers) if counts["failed"] else [],
        stopped=str(end.stopped or ""),
        slowest=slowest,
        others=numbers.others or dict.fromkeys(counts, 0),
    )


def _print_outcome(report: RunReport, document: RunDocument) -> None:
    """Print the counts of a file, its slowest tasks and its failures."""
    run_options, loaded, end, numbers, seconds = report
    echo = partial(click.echo, err=run_options.shows_output)
    outcome = _outcome(end, numbers.counts, numbers.truncated)
    echo(f"{escape_line(run_options.campaign)}: {outcome} ({format_duration(seconds)})")
    if others_line := numbers.others_line():
        echo(others_line)
    if numbers.truncated:
        echo(TRUNCATED)
    if sum(numbers.counts.values()) > SLOWEST_SEARCHED_MAX:
        echo(f"slowest:  taskyard list --sort duration{run_options.location}")
    elif document.slowest:
        echo(format_slowest(document.slowest))
    _print_failures(run_options, document.failures, loaded, echo)


def _print_next_steps(reports: Sequence[RunReport], documents: Sequence[RunDocument]) -> None:
    """Print how to explain and retry failures, and where the results are."""
    options = [one.options for one in reports]
    echo, location = partial(click.echo, err=options[0].shows_output), options[0].location
    pairs = zip(reports, documents, strict=True)
    first = next(((one, two.failures[0]) for one, two in pairs if two.failures), None)
    if first is not None:
        loaded, failed = first[0].loaded, first[1]
        line = _shell_lines(loaded, [failed.name]).get(failed.name)
        name = f"{loaded.file}:{line.number}" if line else spelling(failed.campaign, failed.name)
        echo(f"explain:  taskyard why {shlex.quote(escape_line(name))}{location}")
        echo(f"retry:    {resume_command(*options)}")
    if options[0].quiet or options[0].shows_output:
        return
    for report in reports:
        if report.numbers.counts["done"] or report.numbers.counts["failed"]:
            name = shlex.quote(escape_line(report.options.campaign))
            click.echo(f"results:  taskyard results --campaign {name}{location}")


def _failures(
    run_options: RunOptions, client: InternalClient, numbers: RunCounts
) -> list[RunFailure]:
    """Return the failed tasks of the file."""
    scope = Scope(campaign=run_options.campaign.encode(), states=(TaskState.FAILED,))
    return [
        run_failure(task)
        for task in client.tasks(scope)
        if numbers.names is None or task["name"] in numbers.names
    ]


def run_failure(task: dict[str, Any]) -> RunFailure:
    """Return the part of a document about a failed task."""
    return RunFailure(**{field: task[field] for field in RunFailure.__struct_fields__})


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
    """Print failures, unless they were printed with the outputs."""
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


def resume_command(*runs: RunOptions) -> str:
    """Return the command that continues the run of these files."""
    first = runs[0]
    own = (
        ""
        if first.campaign == default_campaign_name(first.file)
        else f" --campaign {first.campaign}"
    )
    form = "" if first.form is None else f" --format {first.form.value}"
    files = " ".join(shlex.quote(one.file) for one in runs)
    return f"taskyard run {files}{form}{own}{first.location}"
