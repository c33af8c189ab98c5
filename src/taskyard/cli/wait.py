"""`taskyard wait`, and waiting for other commands with --wait."""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from functools import partial
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from taskyard import errors
from taskyard.cli.commands import Command
from taskyard.cli.connection import connect_client, connect_unless_settled
from taskyard.cli.documents import SlowTask, WaitAnyDocument, WaitDocument
from taskyard.cli.format import escape_line, format_count, format_duration, full_name
from taskyard.cli.options import DURATION, CliContext, progress_option
from taskyard.cli.output import example, print_document
from taskyard.cli.progress import ProgressBar, format_counts
from taskyard.cli.scopes import campaign_option, check_campaign, complete_name
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from contextlib import AbstractContextManager

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.documents import JsonDocument
    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient
    from taskyard.core.events import Scope

#: How often progress is polled.
POLL_SECONDS: Final = 0.5

#: The first interval where the broker has to be polled for settled tasks. It doubles.
_LOOK_SECONDS_FIRST: Final = 0.02

#: The most failures that are printed. Later failures are only counted.
FAILURES_LISTED_MAX: Final = 20

#: The extra time for a reply after --timeout.
REPLY_SECONDS: Final = 1.0

_RUNNABLE: Final = ("delayed", "ready", "leased")


@click.command(
    cls=Command,
    epilog=example(
        "wait fetch-a fetch-b",
        "wait --campaign thumbs --timeout 1h30m",
        "wait --any fetch-a fetch-b",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@click.option(
    "--any", "is_any", is_flag=True, help="Return when the first task has settled. Print its name."
)
@campaign_option
@click.option("--timeout", type=DURATION, help="Maximum time to wait, as in 90s or 5m.")
@progress_option
@click.pass_obj
def wait(
    cli_context: CliContext,
    names: tuple[str, ...],
    campaign: str | None,
    timeout: int | None,
    *,
    is_any: bool,
) -> errors.ExitCode:
    """Wait until tasks have settled.

    Waits for tasks by name, for a campaign or for all tasks.

    A task has settled when it is done, failed or cancelled, or is behind a failure and can't run
    without intervention. Exit 0 if all are done, 1 if a task failed or is behind a failure, 5 if
    tasks were cancelled and none failed, 4 on timeout. With --any, the exit code is that of the
    task that settled first.
    """
    if names and campaign is not None:
        raise errors.UserError("names exclude --campaign")
    cli_context.interrupt_message = "interrupted; the tasks continue"
    with _connect(cli_context, names, campaign, is_any=is_any) as client:
        deadline = None if timeout is None else time.monotonic() + timeout / SECOND_NS
        if is_any:
            return _wait_any(
                cli_context, _AnyTask(client, _names(client, names, campaign)), deadline
            )
        target = wait_target(client, client.resolve(names), campaign)
        settled = wait_for(cli_context, target, deadline)
        document = WaitDocument(
            settled=settled, counts=target.counts, behind_failure=target.behind_failure
        )
        report(cli_context, target, document)
    if timeout is not None and not settled:
        raise errors.TimedOut(
            f"{format_count(target.unsettled(), 'task')} not settled after "
            f"{format_duration(timeout / SECOND_NS)} (see `taskyard why NAME`)"
        )
    return target.exit_code()


def _connect(
    cli_context: CliContext, names: Sequence[str], campaign: str | None, *, is_any: bool
) -> AbstractContextManager[InternalClient]:
    """Connect to the broker. Settled tasks of a campaign need none."""
    if is_any or names:
        return connect_client(cli_context)
    return connect_unless_settled(cli_context, partial(_is_settled, campaign))


def _is_settled(campaign: str | None, client: InternalClient) -> bool:
    """Return whether no task of a campaign can run. All tasks, if it is None."""
    status = client.status()
    counts = found = status["counts"]
    if campaign is not None:
        campaigns = {one["name"]: one["counts"] for one in status["campaigns"]}
        found = campaigns.get(campaign, dict.fromkeys(counts, 0))
    # A blocked task may wait for one of another campaign.
    waited = counts if found["blocked"] else found
    return not any(waited[state] for state in _RUNNABLE)


def _wait_any(cli_context: CliContext, target: _AnyTask, deadline: float | None) -> errors.ExitCode:
    """Wait until one task has settled, print its name and return its exit code."""
    settled = wait_for(cli_context, target, deadline)
    first = target.first
    if not settled or first is None:
        raise errors.TimedOut(
            f"none of {format_count(target.unsettled(), 'task')} settled in time "
            "(see `taskyard why NAME`)"
        )
    if cli_context.as_json:
        campaign, name, state = first.campaign, first.name, target.first_state
        print_document(WaitAnyDocument(name=name, campaign=campaign, state=state))
    else:
        click.echo(escape_line(first.full_name))
    return target.exit_code()


class WaitTarget(Protocol):
    """A group of tasks to wait for."""

    #: The label of the progress bar, and the beginning of the summary.
    label: str
    title: str
    #: The number of tasks in each state at the last poll.
    counts: dict[str, int]
    #: The number of blocked tasks behind a failure, if known.
    behind_failure: int

    def poll(self, seconds: float, timeout: float | None = None) -> bool:
        """Wait up to `seconds`, update the counts and return whether all tasks have settled.

        Raises `TimedOut` if the broker does not reply within `timeout` seconds.
        """

    def failures(self) -> Iterator[tuple[str, str]]:
        """Yield failed tasks with their reasons."""

    def slowest(self) -> str:
        """Return a line that names the slowest tasks, or "" if all were fast."""

    def unsettled(self) -> int: ...

    def count_waiting(self) -> None:
        """Count unsettled tasks by state after a timeout."""

    def exit_code(self) -> errors.ExitCode: ...


class _TargetBase:
    """Common parts of wait targets."""

    def __init__(self, client: InternalClient, label: str) -> None:
        self.client = client
        self.label = label
        self.title = ""
        self.counts: dict[str, int] = {state.name.lower(): 0 for state in TaskState}
        self.behind_failure = 0

    def count_waiting(self) -> None:
        """Do nothing: the counts are the broker's."""

    def _scope(self) -> Scope:
        """Return the scope of its tasks."""
        return _scope()

    def slowest(self) -> str:
        if self.client.unanswered_since is not None:
            return ""
        return slowest_line(self.client, self._scope(), sum(self.counts.values()))

    def _failed(self, scope: Scope) -> Iterator[tuple[str, str]]:
        """Yield tasks with their reasons, or nothing while the broker does not reply."""
        if self.client.unanswered_since is None:
            for view in self.client.tasks(scope):
                yield full_name(view), view["reason"]

    def unsettled(self) -> int:
        running = sum(self.counts[state] for state in _RUNNABLE)
        return running + self.counts["blocked"] - self.behind_failure

    def exit_code(self) -> errors.ExitCode:
        if self.counts["failed"] or self.counts["blocked"]:
            return errors.ExitCode.TASK_FAILED
        return errors.ExitCode.CANCELLED if self.counts["cancelled"] else errors.ExitCode.OK


class _AllTasks(_TargetBase):
    """All tasks of the broker. It is polled, because it sends no notice when all have settled."""

    def __init__(self, client: InternalClient) -> None:
        super().__init__(client, "all tasks")
        self._pause = 0.0

    def poll(self, seconds: float, timeout: float | None = None) -> bool:
        time.sleep(min(seconds, self._pause))
        self._pause = min(POLL_SECONDS, max(_LOOK_SECONDS_FIRST, 2 * self._pause))
        status = self.client.status(timeout, awaited=self._scope())
        self.counts, self.behind_failure = status["counts"], status["behind_failure"]
        return not self.unsettled()

    def failures(self) -> Iterator[tuple[str, str]]:
        return self._failed(_scope(states=[TaskState.FAILED]))


class _CampaignTasks(_TargetBase):
    """The tasks of a campaign."""

    def __init__(self, client: InternalClient, campaign: str) -> None:
        super().__init__(client, f"campaign {campaign}")
        self.title = f"campaign {escape_line(campaign)}: "
        self.campaign = campaign
        check_campaign(client, campaign)

    def poll(self, seconds: float, timeout: float | None = None) -> bool:
        settled = True
        try:
            self.client.wait_campaign(self.campaign, seconds)
        except errors.TimedOut:
            settled = False
        self._count(timeout)
        if settled:
            self.behind_failure = self.counts["blocked"]
        return settled

    def _count(self, timeout: float | None = None) -> bool:
        """Update the counts. Return False if the campaign is not among the latest campaigns."""
        for one in self.client.status(timeout)["campaigns"]:
            if one["name"] == self.campaign:
                self.counts = one["counts"]
                return True
        return False

    def failures(self) -> Iterator[tuple[str, str]]:
        return self._failed(_scope(campaign=self.campaign, states=[TaskState.FAILED]))

    def _scope(self) -> Scope:
        return _scope(campaign=self.campaign)


class _NamedTasks(_TargetBase):
    """Tasks by name."""

    def __init__(self, client: InternalClient, names: Sequence[str]) -> None:
        super().__init__(client, format_count(len(names), "task"))
        self._futures = client.futures(list(dict.fromkeys(names)))
        self._waiting: set[Future] = set(self._futures)
        self._ended: Counter[str] = Counter()
        self._failures: list[tuple[str, str]] = []

    def poll(self, seconds: float, timeout: float | None = None) -> bool:  # noqa: ARG002  # from the protocol
        settled, waiting = concurrent.futures.wait(self._waiting, seconds)
        self._waiting = waiting  # type: ignore[assignment]  # the same futures
        for future in settled:
            self._on_settled(future)  # type: ignore[arg-type]
        self.counts |= {state: self._ended[state] for state in ("done", "failed", "cancelled")}
        self.behind_failure = self._ended["blocked"]
        self.counts["blocked"] = self.behind_failure
        self.counts["ready"] = len(self._waiting)
        return not self._waiting

    def count_waiting(self) -> None:
        """Count unsettled tasks by state, as the broker reports them now."""
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
        elif isinstance(error, errors.TaskBlocked):
            self._ended["blocked"] += 1
        elif isinstance(error, errors.TaskFailed):
            self._ended["failed"] += 1
            self._failures.append((future.full_name, error.reason))
        elif isinstance(error, errors.NoBroker | errors.ClientClosed):
            raise error
        else:
            self._ended["done"] += 1  # even if its result is unreadable

    def failures(self) -> Iterator[tuple[str, str]]:
        yield from self._failures

    def _scope(self) -> Scope:
        return _scope(names=[future.full_name for future in self._futures])


class _AnyTask(_NamedTasks):
    """Tasks by name, of which the first to settle counts."""

    #: The task that settled first, and its state. Of several the first by name on the command line.
    first: Future | None = None
    first_state = ""

    def poll(self, seconds: float, timeout: float | None = None) -> bool:  # noqa: ARG002  # from the protocol
        concurrent.futures.wait(
            self._waiting, seconds, return_when=concurrent.futures.FIRST_COMPLETED
        )
        self.counts["ready"] = len(self._waiting)
        self.first = next((future for future in self._futures if future.done()), None)
        if self.first is None:
            return False
        self._on_settled(self.first)
        ((self.first_state, _),) = self._ended.items()
        self.counts |= {"ready": len(self._waiting) - 1, self.first_state: 1}
        return True


def wait_target(
    client: InternalClient, names: Sequence[str] = (), campaign: str | None = None
) -> WaitTarget:
    """Return a target for tasks by name, for a campaign or for all tasks."""
    if names:
        return _NamedTasks(client, names)
    return _AllTasks(client) if campaign is None else _CampaignTasks(client, campaign)


def _names(client: InternalClient, names: Sequence[str], campaign: str | None) -> list[str]:
    """Return the full names of tasks, or of all tasks of a campaign."""
    if names:
        return client.resolve(names)
    found = [full_name(view) for view in client.tasks(_scope(campaign=campaign))]
    if not found:
        raise errors.UnknownName("no matching task (see `taskyard list`)")
    return found


def wait_for(cli_context: CliContext, target: WaitTarget, deadline: float | None = None) -> bool:
    """Wait until a target has settled, and show progress. Return False on timeout."""
    with ProgressBar(cli_context, target.label) as bar:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            timeout = None if left is None else left + REPLY_SECONDS
            seconds = POLL_SECONDS if left is None else min(POLL_SECONDS, left)
            try:
                settled = target.poll(seconds, timeout)
            except errors.TimedOut:
                return False
            bar.count(target.counts, sum(target.counts.values()), target.behind_failure)
            if settled:
                return True
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
    if slowest := target.slowest():
        click.echo(slowest, err=True)


def print_failures(target: WaitTarget) -> None:
    """Print the first failed tasks with their reasons."""
    failed = target.counts["failed"]
    if not failed:
        return
    for _, (name, reason) in zip(range(FAILURES_LISTED_MAX), target.failures(), strict=False):
        click.echo(
            f"  {escape_line(name)} failed: {escape_line(reason) or 'no reason given'}", err=True
        )
    if failed > FAILURES_LISTED_MAX:
        more = f"  and {failed - FAILURES_LISTED_MAX:,} more (see `taskyard list --failed`)"
        click.echo(more, err=True)


def _scope(**values: Any) -> Scope:  # noqa: ANN401  # passed on
    from taskyard.client.requests import scope_of  # noqa: PLC0415  # not needed by completion

    return scope_of(**values)


#: How many tasks a summary names.
SLOWEST_SHOWN: Final = 3

#: More tasks are not searched: some tenths of a second.
SLOWEST_SEARCHED_MAX: Final = 10_000

#: Faster tasks are not named.
SLOW_SECONDS_MIN: Final = 1.0

_MEASURED: Final = (TaskState.DONE, TaskState.FAILED)


def slowest_tasks(
    client: ReadOnlyClient, scope: Scope, names: Container[str] | None = None
) -> list[SlowTask]:
    """Return the slowest ended tasks of a scope by their latest attempts, slowest first.

    With `names`, only tasks with one of these names.
    """
    from msgspec import structs  # noqa: PLC0415  # not needed by `--help`

    ended = client.tasks(structs.replace(scope, states=_MEASURED), measured=True)
    found = (
        view
        for view in ended
        if (view["duration"] or 0.0) >= SLOW_SECONDS_MIN
        and (names is None or view["name"] in names)
    )
    return [
        SlowTask(name=view["name"], campaign=view["campaign"], seconds=view["duration"])
        for view in nlargest(SLOWEST_SHOWN, found, key=lambda view: float(view["duration"]))
    ]


def slowest_line(client: ReadOnlyClient, scope: Scope, total: int) -> str:
    """Return a line that names the slowest of `total` tasks, or "" if all were fast."""
    if total > SLOWEST_SEARCHED_MAX:
        return "  slowest: see `taskyard list --sort duration`"
    return format_slowest(slowest_tasks(client, scope))


def format_slowest(tasks: list[SlowTask]) -> str:
    """Return a line that names slow tasks, or "" if there are none."""
    names = [
        f"{escape_line(full_name({'campaign': one.campaign, 'name': one.name}))} "
        f"{format_duration(one.seconds)}"
        for one in tasks
    ]
    return f"  slowest: {', '.join(names)}" if names else ""
