"""When `run` and `map` stop early, and how they announce their end.

Owns --max-failures, --timeout, --finish-running, --bell and --notify. Counts come from the caller.
Stops nothing itself: it raises `StoppedEarly` or `TimedOut`, and the caller stops the tasks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click
from msgspec import Struct

from taskyard.cli.format import escape_line, format_count, format_duration
from taskyard.cli.options import DURATION, CliContext, CommandFunction
from taskyard.cli.output import encode_json
from taskyard.core.limits import SECOND_NS
from taskyard.errors import ExitCode, TaskyardError, TimedOut, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: How long a notification may take. The command has ended otherwise.
NOTIFY_SECONDS: Final = 30.0

_STDERR: Final = 2

_OPTIONS: Final = (
    click.option(
        "--notify",
        metavar="CMD|URL",
        help="Run this shell command at the end, or POST to this URL. The command gets the summary "
        "as JSON on stdin, and TASKYARD_CAMPAIGN, TASKYARD_EXIT_CODE and counts such as "
        "TASKYARD_FAILED in its environment.",
    ),
    click.option("--bell", is_flag=True, help="Ring the terminal's bell at the end."),
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
    """A run was stopped because too many of its tasks failed."""

    code = "too-many-failures"
    exit_code = ExitCode.TASK_FAILED


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
    #: Running tasks of a run that is stopped early end by themselves.
    finish_running: bool = False
    bell: bool = False
    #: A shell command or an http(s) URL.
    notify: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunPolicy:
        """Return the policy of an option list. Raises `UserError` for an invalid URL."""
        notify = values["notify"]
        if notify is not None and not notify.strip():
            raise UserError("--notify: must not be empty")
        if notify is not None and _is_url(notify) and not urlsplit(notify).hostname:
            raise UserError(f"--notify {notify}: not a valid URL")
        return cls(
            values["max_failures"],
            values["timeout"],
            values["finish_running"],
            values["bell"],
            notify,
        )

    def check(self, counts: Mapping[str, int], seconds: float) -> None:
        """Raise `StoppedEarly` or `TimedOut` if the run must stop after `seconds`."""
        failed = counts.get("failed", 0)
        if self.max_failures is not None and failed >= self.max_failures:
            raise StoppedEarly(f"stopped: {format_count(failed, 'task')} failed (--max-failures)")
        if self.timeout_ns is not None and seconds * SECOND_NS >= self.timeout_ns:
            duration = format_duration(self.timeout_ns / SECOND_NS)
            raise TimedOut(f"stopped: not settled after {duration} (--timeout)")

    def announce(self, cli_context: CliContext, summary: RunSummary) -> None:
        """Ring the bell and send the notification. Report a failed one, and raise nothing."""
        if self.bell:
            click.echo("\a", nl=False, err=True)
            sys.stderr.flush()
        if self.notify is None:
            return
        try:
            problem = (_post if _is_url(self.notify) else _run)(self.notify, summary)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            problem = str(error)
        if problem:
            target = escape_line(self.notify)
            cli_context.info(f"taskyard: warning: --notify {target}: {escape_line(problem)}")


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
