"""Commands that change tasks, lanes and workers: their options, and what they print."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import click
from msgspec import Struct, structs

from taskyard.campaign.task_spec import BACKOFF_NS, KEYS
from taskyard.cli import documents, scopes
from taskyard.cli.commands import Command
from taskyard.cli.connection import connect_client
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext, gathered
from taskyard.cli.output import example, print_document
from taskyard.cli.task_list import list_tasks
from taskyard.cli.task_options import TaskKey
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.cli.options import CommandFunction
    from taskyard.client.internal import InternalClient

#: States in which a task can be cancelled.
_UNSETTLED_STATES: Final = ("blocked", "delayed", "ready", "leased", "failed")
_ENDED: Final = ("done", "failed", "cancelled")

#: The value of an option that removes a limit.
_NONE: Final = "none"


def _command(*examples: str) -> Callable[[Callable[..., object]], Command]:
    """Return a decorator that makes a command with the arguments and options that choose tasks."""

    def make(function: Callable[..., object]) -> Command:
        name = click.argument(
            "names", nargs=-1, metavar="[NAME]...", shell_complete=scopes.complete_name
        )
        return click.command(cls=Command, like=list_tasks, most=_MOST, epilog=example(*examples))(
            name(scopes.scope_options(click.pass_obj(function)))
        )

    return make


#: The options of the short help. `list` explains more.
_MOST: Final = (
    *("campaign", "failed", "all_tasks", "yes", "to_lane", "to_service", "priority"),
    *("time_limit", "retries", "backoff", "expiry"),
)


@_command("retry fetch-a", "retry --campaign thumbs --failed", "retry --service smtp --lane a.org")
def retry(cli_context: CliContext, /, names: tuple[str, ...], *, chosen: scopes.TaskChoice) -> None:
    """Retry failed tasks, and make delayed tasks due.

    Choose tasks by name, or by options: then all tasks that match every option. --failed alone
    means every failed task. Dependents continue when the tasks are done.

    With --lane, flush the lane: its delayed tasks become due, and if the settings hold it (`hold`),
    its ready tasks are released. --service may be omitted if only one service has the lane.
    """
    with _connected(cli_context, names, chosen) as (client, targets):
        retried = client.retry(targets)
    if cli_context.as_json:
        print_document(documents.RetryDocument(retried=retried))
    elif retried:
        click.echo(f"retried {format_count(retried, 'task')}")
    else:
        click.echo("nothing to retry: no task is failed, delayed or held")


@_command("cancel fetch-a", "cancel --campaign thumbs")
@click.option(
    "--all", "all_tasks", is_flag=True, help="Every unfinished or failed task. Needs --yes."
)
@click.option("--yes", is_flag=True, help="Confirm --all.")
@scopes.only_option
def cancel(
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    *,
    chosen: scopes.TaskChoice,
    all_tasks: bool,
    yes: bool,
) -> None:
    """Cancel tasks and their dependents.

    Choose tasks by name, or by options: then all tasks that match every option. Running tasks are
    killed. Done tasks stay done.
    """
    if all_tasks:
        if names or chosen.is_given:
            raise UserError("--all excludes names and other options")
        if not yes:
            raise UserError("--all: cancels every task of the broker (confirm with --yes)")
        chosen = scopes.TaskChoice(only=_UNSETTLED_STATES)
    with _connected(cli_context, names, chosen) as (client, targets):
        cancelled = client.cancel(targets)
    if cli_context.as_json:
        print_document(documents.CancelDocument(cancelled=cancelled))
    elif cancelled:
        click.echo(f"cancelled {format_count(cancelled, 'task')}")
    else:
        click.echo("nothing to cancel: no unfinished task matches")


@contextmanager
def _connected(
    cli_context: CliContext, names: tuple[str, ...], chosen: scopes.TaskChoice
) -> Iterator[tuple[InternalClient, Sequence[str] | Scope]]:
    """Yield a client, and the chosen tasks as full names or as a scope.

    Raises `UserError` unless tasks are chosen by name or by options, and for unknown names and
    campaigns. A lane without a service gets the only service that has it.
    """
    if names and chosen.is_given:
        raise UserError(f"names exclude options ({scopes.STATE_FLAGS})")
    if not names and not chosen.is_given:
        raise UserError(f"no tasks chosen (give names or {scopes.STATE_FLAGS})")
    with connect_client(cli_context) as client:
        if names:
            yield client, _resolve_names(client, names)
            return
        scopes.check_campaign(client, chosen.campaign)
        service = scopes.service_of_lane(client, chosen.lane, chosen.service)
        yield client, structs.replace(chosen, service=service).scope()


@_command("move fetch-a --to-lane slow", "move --service smtp --lane a --to-lane b")
@click.option(
    "--to-lane",
    metavar="LANE",
    help="Target lane. '' is the open lane.",
    shell_complete=scopes.complete_lane,
)
@click.option(
    "--to-service",
    metavar="SERVICE",
    help="Target service.",
    shell_complete=scopes.complete_service,
)
def move(
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    *,
    chosen: scopes.TaskChoice,
    to_lane: str | None,
    to_service: str | None,
) -> None:
    """Move tasks to another lane or service.

    Choose tasks by name, or by options: then all tasks that match every option. Leased and ended
    tasks are not moved. Tasks keep their payload, so workers of the new service must understand it.
    Without --to-lane tasks keep their lane.
    """
    if to_lane is None and to_service is None:
        raise UserError("missing target (give --to-lane, --to-service or both)")
    with _connected(cli_context, names, chosen) as (client, targets):
        moved = client.move(targets, to_lane=to_lane, to_service=to_service)
    if cli_context.as_json:
        print_document(documents.MoveDocument(moved=moved))
    elif not moved:
        click.echo("nothing to move: no waiting task matches")
    else:
        click.echo(f"moved {format_count(moved, 'task')}")


@_command("expire fetch-a", "expire --service smtp --lane a.org")
def expire(
    cli_context: CliContext, /, names: tuple[str, ...], *, chosen: scopes.TaskChoice
) -> None:
    """Expire tasks, as if their expiry had passed.

    Choose tasks by name, or by options: then all tasks that match every option. Expired tasks are
    failed: their dependents stay blocked, and `taskyard retry` undoes it. Leased tasks are not
    expired. To end tasks together with their dependents, use `taskyard cancel`.
    """
    with _connected(cli_context, names, chosen) as (client, targets):
        expired = client.expire(targets)
    if cli_context.as_json:
        print_document(documents.ExpireDocument(expired=expired))
    elif not expired:
        click.echo("nothing to expire: no waiting task matches")
    else:
        click.echo(f"expired {format_count(expired, 'task')}")


class _KeyOrNone(TaskKey):
    """The value of a task key, or `none`."""

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        return value if value == _NONE else super().convert(value, param, ctx)


class TaskTerms(Struct, frozen=True):
    """The options that change the terms of tasks. None: not given."""

    priority: object
    time_limit: object
    retries: object
    backoff: object
    expiry: object


@_command(
    "edit fetch-a --priority 10",
    "edit --campaign thumbs --time-limit 5m --retries 3",
    "edit --campaign thumbs --expiry none",
)
@click.option("--priority", type=TaskKey("priority", "N"), help="Higher runs first.")
@click.option(
    "--time-limit",
    type=_KeyOrNone("time_limit", "DURATION"),
    help="Maximum run time of an attempt, as in 5m, or none.",
)
@click.option(
    "--retries",
    type=TaskKey("retries", "N|LIST"),
    help="Number of retries, or a list of delays in multiples of --backoff: '[1, 2, 5]'.",
)
@click.option(
    "--backoff",
    type=TaskKey("backoff", "DURATION"),
    show_default="1s",
    help="Interval between retries. Needs --retries.",
)
@click.option(
    "--expiry",
    type=_KeyOrNone("expiry", "TIME"),
    help="Fail the tasks if they still wait then: 2h from now, or a date, or none.",
)
@gathered(TaskTerms, "terms")
def edit(
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    *,
    chosen: scopes.TaskChoice,
    terms: TaskTerms,
) -> None:
    """Change the priority and limits of tasks that wait.

    Choose tasks by name, or by options: then all tasks that match every option. Blocked, delayed
    and ready tasks are changed. Leased and ended tasks are not, and are counted in the output. A
    ready task with a new priority goes behind the ready tasks of that priority.
    """
    changes = _changes(terms)
    with _connected(cli_context, names, chosen) as (client, targets):
        edited = client.edit(targets, **changes)
        leased, ended = _unchanged(client, targets)
    if cli_context.as_json:
        print_document(documents.EditDocument(edited=edited, leased=leased, ended=ended))
        return
    click.echo(f"edited {format_count(edited, 'task')}")
    if leased and not cli_context.quiet:
        click.echo(f"not changed: {format_count(leased, 'leased task')}", err=True)
    if ended and not cli_context.quiet:
        click.echo(f"not changed: {format_count(ended, 'ended task')}", err=True)


def _changes(terms: TaskTerms) -> dict[str, Any]:
    """Return the changes as keywords of `edit`. Raises `UserError` if there are none."""
    changes: dict[str, Any] = {}
    if terms.priority is not None:
        changes["priority"] = _read("priority", terms.priority)
    if (time_limit := terms.time_limit) is not None:
        limit_ns = 0 if time_limit == _NONE else _read("time_limit", time_limit)
        changes["time_limit"] = limit_ns / SECOND_NS
    if terms.retries is not None:
        backoff = terms.backoff
        interval_ns = BACKOFF_NS if backoff is None else _read("backoff", backoff)
        multiples = _read("retries", terms.retries)
        changes["retry_delays"] = [one * interval_ns / SECOND_NS for one in multiples]
    elif terms.backoff is not None:
        raise UserError("--backoff needs --retries")
    if (expiry := terms.expiry) is not None:
        now_ns = time.time_ns()
        at_ns = 0 if expiry == _NONE else _read("expiry", expiry).at_ns(now_ns)
        if expiry != _NONE and at_ns <= now_ns:
            raise UserError("--expiry: in the past (see `taskyard expire`)")
        changes["expires"] = at_ns / SECOND_NS
    if not changes:
        raise UserError("nothing to change (see `taskyard edit --help`)")
    return changes


def _read(key: str, value: object) -> Any:  # noqa: ANN401  # by key
    """Return the value of a task key as a task has it."""
    return KEYS[key][1](value)


def _resolve_names(client: InternalClient, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return full names. Print what is on each line that was given by its number."""
    resolved = client.resolve(names)
    found = client.existing(resolved)
    labels = client.line_labels([*found.values()])
    for given, name in zip(names, resolved, strict=True):
        if name in labels and given not in (name, found[name]["name"]):
            command = (client.show(name)["argv"] or [""])[-1]
            click.echo(escape_line(f"{labels[name]}: {command}"), err=True)
    return (*resolved,)


def _unchanged(client: InternalClient, targets: Sequence[str] | Scope) -> tuple[int, int]:
    """Return how many of the tasks are leased, and how many of the named tasks have ended."""
    if isinstance(targets, Scope):
        if targets.states is not None and TaskState.LEASED not in targets.states:
            return 0, 0
        leased = client.tasks(structs.replace(targets, states=(TaskState.LEASED,)))
        return sum(1 for _ in leased), 0
    states = [view["state"] for view in client.existing(targets).values()]
    return states.count("leased"), sum(states.count(state) for state in _ENDED)


@click.command(cls=Command, epilog=example("drain host-4711", "drain --every-worker"))
@click.argument("names", nargs=-1, metavar="[WORKER]...")
@click.option("--every-worker", is_flag=True, help="All workers, then the broker.")
@click.pass_obj
def drain(cli_context: CliContext, names: tuple[str, ...], *, every_worker: bool) -> None:
    """Stop assigning tasks and shut workers down when they are idle.

    Workers finish their tasks first. With --every-worker, the broker accepts no more tasks and
    exits when none is running. `taskyard down` does this and waits.
    """
    if bool(names) is every_worker:
        raise UserError("no workers chosen (give names or --every-worker)")
    with connect_client(cli_context) as client:
        drained = client.drain() if every_worker else _drain(client, names)
    if cli_context.as_json:
        print_document(documents.DrainDocument(drained=drained))
    else:
        leaving = ", the broker exits when no task is running" if every_worker else ""
        click.echo(f"drained {format_count(drained, 'worker')}{leaving}")


def _drain(client: InternalClient, names: tuple[str, ...]) -> int:
    """Drain workers by name. If a name is unknown, drain none."""
    known = [worker["name"] for worker in client.workers()]
    for name in names:
        if name not in known:
            raise UnknownName(f"unknown worker {name!r} (see `taskyard workers`)", name)
    return sum(client.drain(name) for name in dict.fromkeys(names))


@click.command(cls=Command, epilog=example("failover"))
@click.option("--force", is_flag=True, help="Even if no standby is ready.")
@click.pass_obj
def failover(cli_context: CliContext, *, force: bool) -> None:
    """Hand over from the broker to its standby.

    The broker answers what it has received, ends its term and stops. The standby takes over at
    once, without waiting for the lease. A broker that was started with --standby is the standby
    then. Any other broker exits.

    Exit 2 if no standby has reported lately, or if it lags behind. `taskyard status` shows that.
    """
    with connect_client(cli_context) as client:
        epoch = client.failover(force=force)
    if cli_context.as_json:
        print_document(documents.FailoverDocument(epoch=epoch))
    else:
        click.echo(f"epoch {epoch} ends, the standby takes over")


def _pause_options(command: CommandFunction) -> CommandFunction:
    for option in (
        click.option("--all", "all_tasks", is_flag=True, help="Everything."),
        click.option(
            "--lane",
            metavar="LANE",
            help="Lane of the service.",
            shell_complete=scopes.complete_lane,
        ),
        click.option(
            "--service", metavar="SERVICE", help="Service.", shell_complete=scopes.complete_service
        ),
    ):
        command = option(command)
    return command


@click.command(cls=Command, epilog=example("pause --service smtp", "pause --all"))
@_pause_options
@click.pass_obj
def pause(
    cli_context: CliContext, service: str | None, lane: str | None, *, all_tasks: bool
) -> None:
    """Stop assigning tasks of a service, of a lane, or all tasks.

    Workers finish their tasks. New tasks are accepted and wait. A pause survives a restart of the
    broker. Prints all pauses.
    """
    _pause_or_resume(cli_context, "pause", (service, lane), all_tasks=all_tasks)


@click.command(cls=Command, epilog=example("resume --service smtp", "resume --all"))
@_pause_options
@click.pass_obj
def resume(
    cli_context: CliContext, service: str | None, lane: str | None, *, all_tasks: bool
) -> None:
    """Undo a pause.

    Give the options of the pause: a service that was paused on its own stays paused after `resume
    --all`. Prints the remaining pauses.
    """
    _pause_or_resume(cli_context, "resume", (service, lane), all_tasks=all_tasks)


def _pause_or_resume(
    cli_context: CliContext,
    verb: Literal["pause", "resume"],
    what: tuple[str | None, str | None],
    *,
    all_tasks: bool,
) -> None:
    service, lane = what
    if all_tasks and (service or lane):
        raise UserError("--all excludes --service and --lane")
    if not all_tasks and not service and lane is None:
        raise UserError(f"nothing chosen to {verb} (give --service, --lane or --all)")
    with connect_client(cli_context) as client:
        service = service or _service_of_lane(client, lane)
        if service and service not in _pause_names(client.status()):
            raise UnknownName(f"unknown service {service!r} (see `taskyard services`)", service)
        act = client.pause if verb == "pause" else client.resume
        act(service, lane)
        stats = client.status()
    if cli_context.as_json:
        kind = documents.PauseDocument if verb == "pause" else documents.ResumeDocument
        print_document(kind(paused=stats["paused"], pauses=stats["pauses"]))
    else:
        pauses = format_pauses(stats)
        still = "still " if pauses and verb == "resume" else ""
        click.echo(f"{still}{pauses}" if pauses else "nothing is paused")


def _service_of_lane(client: InternalClient, lane: str | None) -> str | None:
    """Return the service that has the lane."""
    if lane is None:
        return None
    found = scopes.service_of_lane(client, lane, None)
    if found is None:
        raise UnknownName(f"unknown lane {lane!r} (give its --service)", lane)
    return found


def _pause_names(stats: dict[str, Any]) -> list[str]:
    return [one["name"] for one in stats["services"]]


def format_pauses(stats: dict[str, Any]) -> str:
    """Format the pauses in a broker's status. "" if there are none."""
    parts = ["everything"] if stats["paused"] else []
    parts += [
        f"service {escape_line(one['service'])}"
        if one["lane"] is None
        else f"lane {escape_line(one['lane']) or '-'} of service {escape_line(one['service'])}"
        for one in stats["pauses"]
    ]
    return f"paused: {', '.join(parts)}" if parts else ""


def format_resumes(stats: dict[str, Any]) -> str:
    """Format the commands that undo all pauses in a broker's status."""
    options = ["--all"] if stats["paused"] else []
    options += [
        f"--service {shlex.quote(one['service'])}"
        + ("" if one["lane"] is None else f" --lane {shlex.quote(one['lane'])}")
        for one in stats["pauses"]
    ]
    return " and ".join(f"`taskyard resume {escape_line(one)}`" for one in options)
