"""The tasks of a run: which they are, their counts, what is retried, its end and the report.

An edited file leaves tasks of removed lines in the campaign. A run reports the tasks of its file.
The broker counts the whole campaign, so the other tasks are subtracted. Only failures and the
slowest tasks are requested for the report.

Also owns when `run` and `map` stop early, and how they announce their end: --max-failures,
--timeout, --finish-running and --notify. `EarlyStop` raises an error, and the caller stops tasks.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import click
from msgspec import Struct, structs

from taskyard.campaign.batches import encode_text
from taskyard.campaign.formats import Format
from taskyard.campaign.reader import default_campaign_name
from taskyard.cli.connection import broker_location, has_journal
from taskyard.cli.documents import RunDocument, RunFailure, RunsDocument, SlowTask
from taskyard.cli.format import (
    escape_line,
    format_count,
    format_duration,
    full_name,
    shorten_middle,
)
from taskyard.cli.options import DURATION, CliContext, CommandFunction, progress_option
from taskyard.cli.output import encode_json, print_document
from taskyard.cli.wait import (
    SLOW_SECONDS_MIN,
    SLOWEST_SEARCHED_MAX,
    format_slowest,
    slowest_tasks,
)
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, TaskyardError, UnknownName, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

    from taskyard.campaign.reader import LoadedCampaign
    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.cli.options import CliContext
    from taskyard.client.internal import InternalClient
    from taskyard.core.model import Submission


#: How long a notification may take. The command has ended otherwise.
NOTIFY_SECONDS: Final = 30.0

#: Wakes the main thread. Nothing else of Taskyard uses it.
_SIGNAL: Final = signal.SIGUSR1

_STDERR: Final = 2

_OPTIONS: Final = (
    progress_option,
    click.option(
        "--notify",
        metavar="CMD|URL",
        help="Run this shell command at the end, or POST to this URL. The command gets the summary "
        "as JSON on stdin, and TASKYARD_CAMPAIGN, TASKYARD_EXIT_CODE and counts such as "
        "TASKYARD_FAILED in its environment.",
    ),
    click.option(
        "--finish-running",
        is_flag=True,
        help="When stopped early, wait for running tasks instead of ending them.",
    ),
    click.option(
        "--timeout",
        type=DURATION,
        metavar="D",
        help="Stop after this time, as in 90s or 2h, and exit 4.",
    ),
    click.option(
        "--max-failures",
        type=click.IntRange(1),
        metavar="N",
        help="Stop as soon as N tasks have failed, and exit 1.",
    ),
)


def run_policy_options(command: CommandFunction) -> CommandFunction:
    """Add the options of a `RunPolicy`."""
    for option in _OPTIONS:
        command = option(command)
    return command


class StoppedEarly(TaskyardError):
    """A run was stopped, because too many of its tasks failed or at its timeout."""

    code = "too-many-failures"
    exit_code = ExitCode.TASK_FAILED


class RunTimedOut(StoppedEarly):
    """A run was stopped at its timeout. No `TimedOut`, which loops that wait catch."""

    code = "timed-out"
    exit_code = ExitCode.TIMED_OUT


class RunSummary(Struct):
    """The end of a run, as a notification gets it."""

    campaign: str
    exit_code: int
    seconds: float
    counts: dict[str, int]
    #: Why the run stopped early. Empty: it did not.
    stopped: str = ""


class RunPolicy(Struct, frozen=True):
    """The limits of a run, and the notification at its end."""

    max_failures: int | None = None
    timeout_ns: int | None = None
    #: How much of the timeout has passed.
    seconds_before: float = 0.0
    #: Running tasks of a run that is stopped early end by themselves.
    finish_running: bool = False
    #: A shell command or an http(s) URL.
    notify: str | None = None

    @property
    def has_limits(self) -> bool:
        """Whether a run may be stopped early."""
        return self.max_failures is not None or self.timeout_ns is not None

    def left_after(self, seconds: float) -> RunPolicy:
        """Return the policy for a run that has taken `seconds`."""
        return structs.replace(self, seconds_before=seconds)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunPolicy:
        """Return the policy of an option list. Raises `UserError` for an invalid URL."""
        notify = values["notify"]
        if notify is not None and not notify.strip():
            raise UserError("--notify: must not be empty")
        if notify is not None and _is_url(notify) and not urlsplit(notify).hostname:
            raise UserError(f"--notify {notify}: not a valid URL")
        return cls(
            max_failures=values["max_failures"],
            timeout_ns=values["timeout"],
            finish_running=values["finish_running"],
            notify=notify,
        )

    def announce(self, cli_context: CliContext, summary: RunSummary) -> None:
        """Send the notification. Report a failure, and raise nothing."""
        if self.notify is None:
            return
        try:
            problem = (_post if _is_url(self.notify) else _run)(self.notify, summary)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            problem = str(error)
        if problem:
            target = escape_line(self.notify)
            cli_context.info(f"taskyard: warning: --notify {target}: {escape_line(problem)}")


class EarlyStop:
    """Raises `StoppedEarly` in the main thread, wherever it waits.

    A context manager for the main thread, which may be blocked by its input. Without limits it does
    nothing, in any thread.
    """

    def __init__(self, policy: RunPolicy) -> None:
        self._policy = policy
        self._error: StoppedEarly | None = None
        #: Held to send the signal: none may arrive after the old handler is back.
        self._lock = threading.Lock()
        self._is_over = False
        self._timer: threading.Timer | None = None
        self._handler_before: signal._HANDLER = signal.SIG_DFL

    def __enter__(self) -> Self:
        if not self._policy.has_limits:
            return self
        self._handler_before = signal.signal(_SIGNAL, self._on_signal)
        if self._policy.timeout_ns is not None:
            seconds = self._policy.timeout_ns / SECOND_NS
            text = f"stopped: not settled after {format_duration(seconds)} (--timeout)"
            left = max(0.0, seconds - self._policy.seconds_before)
            self._timer = threading.Timer(left, self._stop, [RunTimedOut(text)])
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._policy.has_limits:
            return
        signal.signal(_SIGNAL, _do_nothing)
        with self._lock:
            self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        signal.signal(_SIGNAL, self._handler_before)

    def count_failures(self, failed: int, latest: str = "") -> None:
        """Stop the main thread if too many tasks have failed, the latest with this reason.

        Any thread may call it.
        """
        failed_max = self._policy.max_failures
        if failed_max is not None and failed >= failed_max and self._error is None:
            text = f"stopped: {format_count(failed, 'task')} failed (--max-failures)"
            self._stop(StoppedEarly(f"{text}, the latest: {latest}" if latest else text))

    def _stop(self, error: StoppedEarly) -> None:
        with self._lock:
            if not self._is_over:
                self._error = self._error or error
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._error is not None:
            raise self._error


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal that comes too late."""


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _run(command: str, summary: RunSummary) -> str:
    """Run a shell command with the summary. Return its problem, or ""."""
    env = {
        **os.environ,
        "TASKYARD_CAMPAIGN": summary.campaign,
        "TASKYARD_EXIT_CODE": str(summary.exit_code),
        "TASKYARD_STOPPED": summary.stopped,
        **{f"TASKYARD_{state.upper()}": str(number) for state, number in summary.counts.items()},
    }
    ended = subprocess.run(
        ["/bin/sh", "-c", command],
        input=encode_json(summary),
        env=env,
        stdout=_STDERR,  # stdout has the results
        timeout=NOTIFY_SECONDS,
        check=False,
    )
    return f"exit status {ended.returncode}" if ended.returncode else ""


def _post(url: str, summary: RunSummary) -> str:
    """Post the summary to a URL as JSON. Return "", or raise `OSError`."""
    from urllib.request import Request, urlopen  # noqa: PLC0415  # slow to import

    headers = {"Content-Type": "application/json"}
    request = Request(url, encode_json(summary), headers)  # noqa: S310  # http or https
    with urlopen(request, timeout=NOTIFY_SECONDS):  # noqa: S310
        return ""


#: States from which a task may still run.
UNSETTLED: Final = ("blocked", "delayed", "ready", "leased")

_ENDED_WITHOUT_RESULT: Final = (TaskState.FAILED, TaskState.CANCELLED)


class TaskGroup(Struct, frozen=True):
    """The tasks of a run: a campaign, or some tasks outside any campaign."""

    #: Empty: they belong to none.
    campaign: str
    #: A part of the names of tasks outside any campaign.
    match: str = ""
    #: The full name of the only task. Empty: there may be several.
    name: str = ""

    def scope(self, *states: TaskState) -> Scope:
        """Return the scope of these tasks, or of the tasks in some states."""
        if self.name:
            return Scope(names=(encode_text(self.name),), states=states or None)
        campaign, match = encode_text(self.campaign), encode_text(self.match)
        return Scope(campaign=campaign, match=match, states=states or None)

    @property
    def options(self) -> str:
        """The words that choose these tasks, in a command that is printed."""
        if self.name:
            return shlex.quote(escape_line(self.name))
        if self.campaign:
            return f"--campaign {shlex.quote(escape_line(self.campaign))}"
        return f"--match {self.match}"

    @property
    def label(self) -> str:
        """The words before their counts, with a colon."""
        return f"campaign {escape_line(self.campaign)}: " if self.campaign else ""


class RunCounts(Struct):
    """The tasks of a file by state, and other tasks of its campaign."""

    counts: dict[str, int]
    #: Tasks of the campaign with a truncated result.
    truncated: int = 0
    #: Other tasks of the campaign by state. Empty: there are none.
    others: dict[str, int] = {}
    #: The names of the file's tasks. None: there are no other tasks.
    names: frozenset[str] | None = None
    #: No attempt of the campaign ran for longer. None: unknown.
    longest_seconds: float | None = None

    def others_line(self) -> str:
        """Return a line about the other tasks. "" if there are none."""
        if not self.others:
            return ""
        number = sum(self.others.values())
        states = ", ".join(f"{count:,} {state}" for state, count in self.others.items() if count)
        verb = "is" if number == 1 else "are"
        tasks = format_count(number, "other task")
        return f"{tasks} of the campaign {verb} not in the file ({states})"


class FileTasks:
    """Counts the tasks of a file."""

    def __init__(self, client: InternalClient, campaign: str, specs: Sequence[TaskSpec]) -> None:
        self._client = client
        self._campaign = campaign
        self._specs = specs
        #: The tasks of the file that the broker has. None: not submitted yet.
        self._total: int | None = None
        #: Other tasks of the campaign that had ended at the start.
        self._ended: Counter[str] = Counter()
        #: When the broker was started, if it has counted every attempt of the campaign that ended.
        self._counted_since: float | None = None

    def begin(self, total: int, unsettled: int) -> int:
        """Count other tasks of the campaign. Return how many of them are unsettled.

        `total` is the number of tasks of the file that the broker has, and `unsettled` how many of
        them may still run. If workers run some meanwhile, the result may be too small.
        """
        self._total = total
        status = self._client.status()
        counts, _ = self._campaign_counts(status)
        has_ended = sum(counts.values()) > sum(counts[state] for state in UNSETTLED)
        if status["health"] and not has_ended:
            self._counted_since = status["health"]["started"]
        others = sum(counts.values()) - total
        if others <= 0:
            return 0
        unsettled = sum(counts[state] for state in UNSETTLED) - unsettled
        unsettled = min(max(unsettled, 0), others)
        self._ended = self._count_others(_ENDED_WITHOUT_RESULT)
        self._ended["done"] = max(others - unsettled - self._ended.total(), 0)
        return unsettled

    def progress(self) -> dict[str, int]:
        """Return the tasks by state without other tasks that had ended at the start."""
        counts, _ = self._campaign_counts(self._client.status())
        return {state: number - self._ended[state] for state, number in counts.items()}

    def run_counts(self) -> RunCounts:
        """Return the tasks of the file by state. Of the whole campaign, if it is not submitted."""
        status = self._client.status()
        counts, truncated = self._campaign_counts(status)
        number = 0 if self._total is None else sum(counts.values()) - self._total
        if number <= 0:
            return RunCounts(counts, truncated, longest_seconds=self._longest_seconds(status))
        others = self._count_others([state for state in TaskState if state is not TaskState.DONE])
        others["done"] = max(number - others.total(), 0)
        own = {state: count - others[state] for state, count in counts.items()}
        return RunCounts(own, truncated, {state: others[state] for state in counts}, self._names())

    def _names(self) -> frozenset[str]:
        return frozenset([spec.name for spec in self._specs])

    def _count_others(self, states: Sequence[TaskState]) -> Counter[str]:
        """Count tasks of the campaign in these states that are not in the file."""
        names = self._names()
        scope = Scope(campaign=self._campaign.encode(), states=tuple(states))
        views = self._client.tasks(scope)
        return Counter(view["state"] for view in views if view["name"] not in names)

    def _longest_seconds(self, status: dict[str, Any]) -> float | None:
        """Return the longest run that the broker has counted; None if it has not counted all."""
        health = status["health"]
        if health is None or health["started"] != self._counted_since:
            return None
        return max((one["run"]["longest"] for one in health["services"]), default=0.0)

    def _campaign_counts(self, status: dict[str, Any]) -> tuple[dict[str, int], int]:
        """Return the tasks of the campaign by state, and how many have a truncated result."""
        for one in status["campaigns"]:
            if one["name"] == self._campaign:
                counts: dict[str, int] = one["counts"]
                # A task that ran again after it was done counts once here.
                return counts | {"done": counts["done"] - one["restarted"]}, one["truncated"]
        return {state.name.lower(): 0 for state in TaskState}, 0


#: States of tasks that workers may run while failed tasks are retried.
_MAY_RUN: Final = ("delayed", "ready", "leased")


def check_journal(cli_context: CliContext, campaign: str) -> None:
    """Raise `UnknownName` if there is no journal, before it is created."""
    if not has_journal(broker_location(cli_context).state):
        raise _unknown_campaign(campaign)


def _unknown_campaign(campaign: str) -> UnknownName:
    text = f"unknown campaign {campaign!r}: nothing to retry (see `taskyard status`)"
    return UnknownName(text, campaign)


class FailedTasks:
    """The failed tasks of a campaign, and those behind them."""

    def __init__(self, client: InternalClient, campaign: str) -> None:
        """Count the tasks of a campaign. Raises `UnknownName` if there is none."""
        self._client = client
        self._campaign = campaign
        self._counts = client.counts(campaign)
        if not any(self._counts.values()):
            raise _unknown_campaign(campaign)

    @property
    def runnable(self) -> int:
        """How many other tasks of the campaign may run beside the failed tasks."""
        return sum(self._counts[state] for state in _MAY_RUN)

    def find(self) -> tuple[list[str], list[str]]:
        """Return the full names of the failed tasks, and of the tasks that are blocked behind them.

        If other tasks may run, blocked tasks may wait for them, and are left out.
        """
        states = [TaskState.FAILED] if self.runnable else [TaskState.FAILED, TaskState.BLOCKED]
        return self._names(states[:1]), self._names(states[1:]) if states[1:] else []

    def _names(self, states: list[TaskState]) -> list[str]:
        from taskyard.client.requests import scope_of  # noqa: PLC0415  # not for `--help`

        scope = scope_of(campaign=self._campaign, states=states)
        return [full_name(view) for view in self._client.tasks(scope)]

    def retry(self, cli_context: CliContext, failed: Sequence[str], skipped: int = 0) -> bool:
        """Retry failed tasks and report that. Return False if there are none.

        `skipped` is the number of tasks in a file that are not submitted.
        """
        label = f"campaign {escape_line(self._campaign)}"
        notes = []
        if skipped:
            notes.append(f"{format_count(skipped, 'new task')} not submitted")
        if not failed:
            cli_context.info("; ".join([f"{label}: no failed task, nothing to retry", *notes]))
            return False
        retried = self._client.retry(failed)
        if self.runnable:
            notes.append(f"{format_count(self.runnable, 'unfinished task')} may run too")
        first = f"{label}: {format_count(retried, 'failed task')} retried"
        cli_context.info("; ".join([first, *notes]))
        return True


class EndedRows:
    """The tasks of a run that failed or were cancelled before it."""

    def __init__(self, client: InternalClient, group: TaskGroup) -> None:
        self._client = client
        scope = group.scope(*_ENDED_WITHOUT_RESULT)
        self._states: dict[str, str] = {full_name(one): one["state"] for one in client.tasks(scope)}

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def __bool__(self) -> bool:
        return bool(self._states)

    def retry(self, name: str, task: Submission, *, wait_for_unknown: bool) -> None:
        """Queue a task again, by its full name. Raises `Refused` if its command has changed."""
        self._client.create(task, UnknownPolicy.WAIT, check_only=True)
        if self._states.pop(name) == "failed":
            self._client.retry([name])
        else:
            unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
            self._client.create(task, unknown, restart=True)


#: The most failures that are printed. `taskyard list --failed` has all.
FAILURES_SHOWN_MAX: Final = 20

#: The most characters of a shell command that a failure shows.
COMMAND_SHOWN_MAX: Final = 60

#: The reason of truncated results. Results of commands are kept whole.
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
    #: None if it is detected.
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
    #: The command, shortened.
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
