"""`taskyard wait`: until tasks are settled; and what other verbs need to wait as it does."""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from taskyard.cli.completion import complete_name
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import WaitDocument
from taskyard.cli.format import escape_line, format_count, format_duration, full_name
from taskyard.cli.options import DURATION, CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.progress import ProgressBar, format_counts
from taskyard.cli.scopes import target_options, to_scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import (
    ClientClosed,
    ExitCode,
    NoBroker,
    TaskBlocked,
    TaskFailed,
    TimedOut,
    UserError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.cli.documents import JsonDocument
    from taskyard.client.client import Client
    from taskyard.client.futures import Future
    from taskyard.core.events import Scope

#: How often the progress is looked at: a bar should move, and the broker has better to do.
POLL_SECONDS: Final = 0.5

#: The same where the broker does not tell when all is settled, at first; it doubles.
_LOOK_SECONDS_FIRST: Final = 0.02

#: Failures that are named; the others are counted.
FAILURES_LISTED_MAX: Final = 10

#: After the time of --timeout, a broker that is there has answered by then.
REPLY_SECONDS: Final = 1.0

_RUNNABLE: Final = ("delayed", "ready", "leased")


@click.command(epilog=example("wait fetch-a fetch-b", "wait --campaign thumbs --timeout 1h30m"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@target_options
@click.option("--timeout", type=DURATION, help="Wait no longer than this: 90s, 5m.")
@broker_options
@click.pass_obj
def wait(
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    timeout: int | None,
    **values: Any,  # noqa: ANN401  # the options of a scope
) -> ExitCode:
    """Wait until tasks are settled: some by name, a campaign, or all that there are.

    With --service, --lane or --match for those that there are now and fit everything that is given.

    Settled is what is done, failed, cancelled, or waits behind a failure, so that nothing can run
    any more without somebody's help. Exit 0 if all are done, 1 if some failed or wait behind a
    failure, 5 if some were cancelled and none failed, 4 if the time is up.
    """
    if names and any(values.values()):
        raise UserError(
            "names and options both choose tasks: give names, or --campaign, --service, --lane or "
            "--match"
        )
    cli_context.interrupt_message = "interrupted; the tasks go on"
    with connect_client(cli_context) as client:
        target = _target_from_options(client, names, values)
        deadline = None if timeout is None else time.monotonic() + timeout / SECOND_NS
        settled = wait_for(cli_context, target, deadline)
        document = WaitDocument(
            settled=settled, counts=target.counts, behind_failure=target.behind_failure
        )
        report(cli_context, target, document)
    if timeout is not None and not settled:
        raise TimedOut(
            f"{format_count(target.unsettled(), 'task')} not settled after "
            f"{format_duration(timeout / SECOND_NS)}; "
            "`taskyard why NAME` says what one waits for"
        )
    return target.exit_code()


class WaitTarget(Protocol):
    """Tasks that somebody waits for together."""

    #: What to call them, and what a summary of them opens with.
    label: str
    title: str
    #: How many there are in each state, as of the last look.
    counts: dict[str, int]
    #: How many of the blocked ones are behind a failure, as far as is known.
    behind_failure: int

    def poll(self, seconds: float, timeout: float | None = None) -> bool:
        """Wait up to `seconds`, count, and return whether all are settled. Raises `TimedOut` if
        the broker does not answer within `timeout` seconds."""

    def failures(self) -> Iterator[tuple[str, str]]:
        """Failed tasks and their reasons."""

    def unsettled(self) -> int: ...

    def count_waiting(self) -> None:
        """Count by their states those that are not settled when the time is up."""

    def exit_code(self) -> ExitCode: ...


class _TargetBase:
    """What groups have in common."""

    def __init__(self, client: Client, label: str) -> None:
        self.client = client
        self.label = label
        self.title = ""
        self.counts: dict[str, int] = {state.name.lower(): 0 for state in TaskState}
        self.behind_failure = 0

    def count_waiting(self) -> None:
        """Leave the counts as they are: the broker made them."""

    def _failed(self, scope: Scope) -> Iterator[tuple[str, str]]:
        """Yield the tasks of a scope and their reasons; none while the broker does not answer."""
        if self.client.unanswered_since is None:
            for view in self.client.tasks(scope):
                yield full_name(view), view["reason"]

    def unsettled(self) -> int:
        running = sum(self.counts[state] for state in _RUNNABLE)
        return running + self.counts["blocked"] - self.behind_failure

    def exit_code(self) -> ExitCode:
        if self.counts["failed"] or self.counts["blocked"]:
            return ExitCode.TASK_FAILED
        return ExitCode.CANCELLED if self.counts["cancelled"] else ExitCode.OK


class _AllTasks(_TargetBase):
    """All tasks of the broker. It does not tell when they are settled: it is asked."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, "all tasks")
        self._pause = 0.0

    def poll(self, seconds: float, timeout: float | None = None) -> bool:
        time.sleep(min(seconds, self._pause))
        self._pause = min(POLL_SECONDS, max(_LOOK_SECONDS_FIRST, 2 * self._pause))
        status = self.client.status(timeout)
        self.counts, self.behind_failure = status["counts"], status["behind_failure"]
        return not self.unsettled()

    def failures(self) -> Iterator[tuple[str, str]]:
        return self._failed(_scope(states=[TaskState.FAILED]))


class _CampaignTasks(_TargetBase):
    """The tasks of a campaign."""

    def __init__(self, client: Client, campaign: str) -> None:
        super().__init__(client, f"campaign {campaign}")
        self.title = f"campaign {escape_line(campaign)}: "
        self.campaign = campaign
        if next(client.tasks(_scope(campaign=campaign)), None) is None and not self._count():
            raise UserError(f"no campaign is called {campaign}; `taskyard status` lists them")

    def poll(self, seconds: float, timeout: float | None = None) -> bool:
        settled = True
        try:
            self.client.wait_campaign(self.campaign, seconds)
        except TimedOut:
            settled = False
        self._count(timeout)
        if settled:
            self.behind_failure = self.counts["blocked"]
        return settled

    def _count(self, timeout: float | None = None) -> bool:
        """Whether the broker counts it; it lists the latest campaigns only."""
        for one in self.client.status(timeout)["campaigns"]:
            if one["name"] == self.campaign:
                self.counts = one["counts"]
                return True
        return False

    def failures(self) -> Iterator[tuple[str, str]]:
        return self._failed(_scope(campaign=self.campaign, states=[TaskState.FAILED]))


class _NamedTasks(_TargetBase):
    """Tasks by their names."""

    def __init__(self, client: Client, names: Sequence[str]) -> None:
        super().__init__(client, format_count(len(names), "task"))
        self._waiting: set[Future] = set(client.futures(list(dict.fromkeys(names))))
        self._ended: Counter[str] = Counter()
        self._failures: list[tuple[str, str]] = []

    def poll(self, seconds: float, timeout: float | None = None) -> bool:  # noqa: ARG002  # a Group's
        settled, waiting = concurrent.futures.wait(self._waiting, seconds)
        self._waiting = waiting  # type: ignore[assignment]  # the same ones
        for future in settled:
            self._on_settled(future)  # type: ignore[arg-type]
        self.counts |= {state: self._ended[state] for state in ("done", "failed", "cancelled")}
        self.behind_failure = self._ended["blocked"]
        self.counts["blocked"] = self.behind_failure
        self.counts["ready"] = len(self._waiting)
        return not self._waiting

    def count_waiting(self) -> None:
        """Count the tasks that are not settled by their states, as the broker has them now."""
        if self.client.unanswered_since is not None:
            return
        found = self.client.results([future.full_name for future in self._waiting])
        states = Counter(TaskState(one.state).name.lower() for one in found.values())
        for state in ("delayed", "ready", "leased"):
            self.counts[state] = states[state]
        self.counts["blocked"] = self.behind_failure + states["blocked"]

    def _on_settled(self, future: Future) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            self._ended["cancelled"] += 1
        elif isinstance(error, TaskBlocked):
            self._ended["blocked"] += 1
        elif isinstance(error, TaskFailed):
            self._ended["failed"] += 1
            self._failures.append((future.full_name, str(error).partition(" failed: ")[2]))
        elif isinstance(error, NoBroker | ClientClosed):
            raise error
        else:
            self._ended["done"] += 1  # also where nobody can read its result

    def failures(self) -> Iterator[tuple[str, str]]:
        yield from self._failures


def wait_target(
    client: Client, names: Sequence[str] = (), campaign: str | None = None
) -> WaitTarget:
    """Those tasks, that campaign, or everything."""
    if names:
        return _NamedTasks(client, names)
    return _AllTasks(client) if campaign is None else _CampaignTasks(client, campaign)


def _target_from_options(
    client: Client, names: Sequence[str], values: dict[str, Any]
) -> WaitTarget:
    """Those tasks, a campaign as a whole, or what fits by now."""
    if not any(values[key] for key in ("service", "lane", "match")):
        return wait_target(client, client.resolve(names), values["campaign"])
    found = [full_name(view) for view in client.tasks(to_scope(values))]
    if not found:
        raise UserError("no task fits that; `taskyard list` with the same options shows which do")
    return _NamedTasks(client, found)


def wait_for(cli_context: CliContext, target: WaitTarget, deadline: float | None = None) -> bool:
    """Wait until a group is settled, or until the time is up; show how far it is."""
    with ProgressBar(cli_context, target.label) as meter:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            timeout = None if left is None else left + REPLY_SECONDS
            seconds = POLL_SECONDS if left is None else min(POLL_SECONDS, left)
            try:
                if target.poll(seconds, timeout):
                    return True
            except TimedOut:
                return False
            meter.count(target.counts, sum(target.counts.values()), target.behind_failure)
            if deadline is not None and time.monotonic() >= deadline:
                target.count_waiting()
                return False


def report(cli_context: CliContext, target: WaitTarget, document: JsonDocument) -> None:
    """Print the counts and failures of a target, or the document with --json."""
    if cli_context.as_json:
        print_document(document)
        return
    if cli_context.quiet:
        return
    click.echo(f"{target.title}{format_counts(target.counts, target.behind_failure)}", err=True)
    print_failures(target)


def print_failures(target: WaitTarget) -> None:
    """Name some of the failed tasks, with their reasons."""
    failed = target.counts["failed"]
    if not failed:
        return
    for _, (name, reason) in zip(range(FAILURES_LISTED_MAX), target.failures(), strict=False):
        click.echo(
            f"  {escape_line(name)} failed: {escape_line(reason) or 'no reason values'}", err=True
        )
    if failed > FAILURES_LISTED_MAX:
        more = f"  and {failed - FAILURES_LISTED_MAX:,} more; `taskyard list --failed` names them"
        click.echo(more, err=True)


def _scope(**values: Any) -> Scope:  # noqa: ANN401  # handed on
    from taskyard.client.requests import scope_of  # noqa: PLC0415  # a shell completes without it

    return scope_of(**values)
