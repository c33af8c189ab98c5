"""When `run` and `map` stop early, and how they announce their end.

Owns --max-failures, --timeout, --finish-running and --notify. Counts come from the caller.
Stops nothing itself: `EarlyStop` raises an error, and the caller stops the tasks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import click
from msgspec import Struct, structs

from taskyard.cli.format import escape_line, format_count, format_duration
from taskyard.cli.options import DURATION, CliContext, CommandFunction, progress_option
from taskyard.cli.output import encode_json
from taskyard.core.limits import SECOND_NS
from taskyard.errors import ExitCode, TaskyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

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
