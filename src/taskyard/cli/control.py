"""Commands that change tasks, lanes and workers, from `retry` to `drain`, `pause` and `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import click

from taskyard.cli.completion import complete_lane, complete_name, complete_service
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import (
    CancelDocument,
    DrainDocument,
    ExpireDocument,
    FailoverDocument,
    MoveDocument,
    PauseDocument,
    ResumeDocument,
    RetryDocument,
)
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.scopes import (
    STATE_FLAGS,
    check_campaign,
    scope_options,
    to_scope,
    with_service_of_lane,
)
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName, UserError

if TYPE_CHECKING:
    from taskyard.cli.options import CommandFunction
    from taskyard.client.internal import InternalClient

#: States in which a task can be cancelled.
_UNSETTLED_STATES: Final = [
    *(TaskState.BLOCKED, TaskState.DELAYED, TaskState.READY),
    *(TaskState.LEASED, TaskState.FAILED),
]


@click.command(
    epilog=example(
        "retry fetch-a", "retry --campaign thumbs --failed", "retry --service smtp --lane a.org"
    )
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@scope_options
@broker_options
@click.pass_obj
def retry(cli_context: CliContext, /, names: tuple[str, ...], **values: Any) -> None:  # noqa: ANN401  # scope options
    """Retry failed tasks, and delayed ones now.

    Choose tasks by name, or by options: then all tasks that match every option. --failed alone
    means every failed task. Dependents continue when the tasks are done.

    With --lane, flush the lane: its delayed tasks become due, and if the settings hold it (`hold`),
    its ready tasks are released. --service may be omitted if only one service has the lane.
    """
    check_targets(names, values)
    with connect_client(cli_context) as client:
        names, values = resolve_targets(client, names, values)
        retried = client.retry(names or to_scope(values))
    if cli_context.as_json:
        print_document(RetryDocument(retried=retried))
    elif retried:
        click.echo(f"retried {format_count(retried, 'task')}")
    else:
        click.echo("nothing to retry: no task is failed, delayed or held")


@click.command(epilog=example("cancel fetch-a", "cancel --campaign thumbs"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@scope_options
@click.option(
    "--all", "all_tasks", is_flag=True, help="Every unfinished or failed task. Needs --yes."
)
@click.option("--yes", is_flag=True, help="Confirm --all.")
@broker_options
@click.pass_obj
def cancel(
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    *,
    all_tasks: bool,
    yes: bool,
    **values: Any,  # noqa: ANN401  # scope options
) -> None:
    """Cancel tasks and their dependents.

    Choose tasks by name, or by options: then all tasks that match every option. Running tasks are
    killed. Done tasks stay done.
    """
    if all_tasks:
        _check_all(names, values, yes=yes)
        values["only"] = [state.name.lower() for state in _UNSETTLED_STATES]
    check_targets(names, values)
    with connect_client(cli_context) as client:
        names, values = resolve_targets(client, names, values)
        cancelled = client.cancel(names or to_scope(values))
    if cli_context.as_json:
        print_document(CancelDocument(cancelled=cancelled))
    elif cancelled:
        click.echo(f"cancelled {format_count(cancelled, 'task')}")
    else:
        click.echo("nothing to cancel: no unfinished task matches")


def _check_all(names: tuple[str, ...], values: dict[str, Any], *, yes: bool) -> None:
    if names or any(values.values()):
        raise UserError("--all excludes names and other options")
    if not yes:
        raise UserError("--all: cancels every task of the broker (confirm with --yes)")


def check_targets(names: tuple[str, ...], values: dict[str, Any]) -> None:
    """Raise `UserError` unless tasks are chosen by name or by options. Needs no broker."""
    if names and any(_is_set(values)):
        raise UserError(f"names exclude options ({STATE_FLAGS})")
    if not names and not any(_is_set(values)):
        raise UserError(f"no tasks chosen (give names or {STATE_FLAGS})")


def resolve_targets(
    client: InternalClient, names: tuple[str, ...], values: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return full task names, or a scope with its service.

    Unknown names and campaigns raise `UserError`. A lane without a service gets the only service
    that has it.
    """
    if names:
        return (*client.resolve(names),), values
    check_campaign(client, values["campaign"])
    return names, with_service_of_lane(client, values)


def _is_set(values: dict[str, Any]) -> list[bool]:
    """Return whether a value is set. An empty lane is: it is the open lane."""
    return [bool(value) or value == "" for value in values.values()]


@click.command(
    epilog=example("move fetch-a --to-lane slow", "move --service smtp --lane a --to-lane b")
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@click.option(
    "--to-lane",
    metavar="LANE",
    help="Target lane. '' is the open lane.",
    shell_complete=complete_lane,
)
@click.option(
    "--to-service", metavar="SERVICE", help="Target service.", shell_complete=complete_service
)
@scope_options
@broker_options
@click.pass_obj
def move(
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    *,
    to_lane: str | None,
    to_service: str | None,
    **values: Any,  # noqa: ANN401  # scope options
) -> None:
    """Move tasks to another lane or service.

    Choose tasks by name, or by options: then all tasks that match every option. Leased and ended
    tasks are not moved. Tasks keep their payload, so workers of the new service must understand it.
    Without --to-lane tasks keep their lane.
    """
    if to_lane is None and to_service is None:
        raise UserError("missing target (give --to-lane, --to-service or both)")
    check_targets(names, values)
    with connect_client(cli_context) as client:
        names, values = resolve_targets(client, names, values)
        moved = client.move(names or to_scope(values), to_lane=to_lane, to_service=to_service)
    if cli_context.as_json:
        print_document(MoveDocument(moved=moved))
    elif moved:
        click.echo(f"moved {format_count(moved, 'task')}")
    else:
        click.echo("nothing to move: the tasks are leased, ended or there already")


@click.command(epilog=example("expire fetch-a", "expire --service smtp --lane a.org"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@scope_options
@broker_options
@click.pass_obj
def expire(cli_context: CliContext, /, names: tuple[str, ...], **values: Any) -> None:  # noqa: ANN401  # scope options
    """Expire tasks, as if their expiry had passed.

    Choose tasks by name, or by options: then all tasks that match every option. Expired tasks are
    failed: their dependents stay blocked, and `taskyard retry` undoes it. Leased tasks are not
    expired. To end tasks together with their dependents, use `taskyard cancel`.
    """
    check_targets(names, values)
    with connect_client(cli_context) as client:
        names, values = resolve_targets(client, names, values)
        expired = client.expire(names or to_scope(values))
    if cli_context.as_json:
        print_document(ExpireDocument(expired=expired))
    elif expired:
        click.echo(f"expired {format_count(expired, 'task')}")
    else:
        click.echo("nothing to expire: the tasks are leased or ended")


@click.command(epilog=example("drain host-4711", "drain --all"))
@click.argument("names", nargs=-1, metavar="[WORKER]...")
@click.option("--all", "all_tasks", is_flag=True, help="All workers, then the broker.")
@broker_options
@click.pass_obj
def drain(cli_context: CliContext, names: tuple[str, ...], *, all_tasks: bool) -> None:
    """Stop assigning tasks and shut workers down when they are idle.

    Workers finish their tasks first. With --all, the broker accepts no more tasks and exits when
    none is running. `taskyard down` does this and waits.
    """
    if bool(names) is all_tasks:
        raise UserError("no workers chosen (give names or --all)")
    with connect_client(cli_context) as client:
        drained = client.drain() if all_tasks else _drain(client, names)
    if cli_context.as_json:
        print_document(DrainDocument(drained=drained))
    else:
        leaving = ", the broker exits when no task is running" if all_tasks else ""
        click.echo(f"drained {format_count(drained, 'worker')}{leaving}")


def _drain(client: InternalClient, names: tuple[str, ...]) -> int:
    """Drain workers by name. If a name is unknown, drain none."""
    known = [worker["name"] for worker in client.workers()]
    for name in names:
        if name not in known:
            raise UnknownName(f"unknown worker {name!r} (see `taskyard workers`)", name)
    return sum(client.drain(name) for name in dict.fromkeys(names))


@click.command(epilog=example("failover"))
@click.option("--force", is_flag=True, help="Even if no standby is ready.")
@broker_options
@click.pass_obj
def failover(cli_context: CliContext, *, force: bool) -> None:
    """Hand over from the broker to its standby.

    The broker answers what it has received, ends its term and stops. The standby takes over at
    once, without waiting for the lease. A broker that was started with --standby is the standby
    then. Others exit.

    Exit 2 if no standby has reported lately, or if it lags behind. `taskyard status` shows that.
    """
    with connect_client(cli_context) as client:
        epoch = client.failover(force=force)
    if cli_context.as_json:
        print_document(FailoverDocument(epoch=epoch))
    else:
        click.echo(f"epoch {epoch} ends, the standby takes over")


def _pause_options(command: CommandFunction) -> CommandFunction:
    for option in (
        click.option("--all", "all_tasks", is_flag=True, help="Everything."),
        click.option(
            "--lane",
            metavar="LANE",
            help="Lane of the service.",
            shell_complete=complete_lane,
        ),
        click.option(
            "--service", metavar="SERVICE", help="Service.", shell_complete=complete_service
        ),
    ):
        command = option(command)
    return command


@click.command(epilog=example("pause --service smtp", "pause --all"))
@_pause_options
@broker_options
@click.pass_obj
def pause(
    cli_context: CliContext, service: str | None, lane: str | None, *, all_tasks: bool
) -> None:
    """Stop assigning tasks of a service, of a lane, or all tasks.

    Workers finish their tasks. New tasks are accepted and wait. A pause survives a restart of the
    broker. Prints all pauses.
    """
    _pause_or_resume(cli_context, "pause", (service, lane), all_tasks=all_tasks)


@click.command(epilog=example("resume --service smtp", "resume --all"))
@_pause_options
@broker_options
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
        kind = PauseDocument if verb == "pause" else ResumeDocument
        print_document(kind(paused=stats["paused"], pauses=stats["pauses"]))
    else:
        click.echo(format_pauses(stats) or "nothing is paused")


def _service_of_lane(client: InternalClient, lane: str | None) -> str | None:
    """Return the service that has the lane."""
    if lane is None:
        return None
    found: str | None = with_service_of_lane(client, {"service": None, "lane": lane})["service"]
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
