"""The verbs that act on tasks, lanes and workers: `retry`, `cancel`, `move`, `expire`, `drain`,
`pause`, `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import click

from taskyard.cli.completion import complete_lane, complete_name, complete_service
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import (
    CancelDocument,
    DrainDocument,
    ExpireDocument,
    MoveDocument,
    PauseDocument,
    ResumeDocument,
    RetryDocument,
)
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.scopes import STATE_FLAGS, scope_options, to_scope, with_service_of_lane
from taskyard.core.states import TaskState
from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.cli.options import CommandFunction
    from taskyard.client.client import Client

#: What can still be cancelled.
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
def retry(cli_context: CliContext, /, names: tuple[str, ...], **values: Any) -> None:  # noqa: ANN401  # a scope
    """Try failed tasks again, and delayed ones now.

    By name, or all that fit what is given; --failed alone means every failed task. What waits
    behind them goes on when they are done.

    With --lane it is a flush: what is in the lane is due now, and if the settings hold the lane
    (`hold`), what is ready in it is let go. Without --service the one that has such a lane is
    meant.
    """
    with connect_client(cli_context) as client:
        names, values = _resolve_targets(client, names, values)
        retried = client.retry(names or to_scope(values))
    if cli_context.as_json:
        print_document(RetryDocument(retried=retried))
    elif retried:
        click.echo(f"retried {format_count(retried, 'task')}")
    else:
        click.echo("nothing to retry: none of them has failed, is delayed or is held")


@click.command(epilog=example("cancel fetch-a", "cancel --campaign thumbs"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@scope_options
@click.option("--all", "all_tasks", is_flag=True, help="Every task that is not ended; needs --yes.")
@click.option("--yes", is_flag=True, help="Yes, all of them.")
@broker_options
@click.pass_obj
def cancel(
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    *,
    all_tasks: bool,
    yes: bool,
    **values: Any,  # noqa: ANN401  # the options of a scope
) -> None:
    """Cancel tasks, and all that wait for them.

    By name, or all that fit what is given. A task that runs is ended. What is done stays done.
    """
    if all_tasks:
        _check_all(names, values, yes=yes)
        values["only"] = [state.name.lower() for state in _UNSETTLED_STATES]
    with connect_client(cli_context) as client:
        names, values = _resolve_targets(client, names, values)
        cancelled = client.cancel(names or to_scope(values))
    if cli_context.as_json:
        print_document(CancelDocument(cancelled=cancelled))
    elif cancelled:
        click.echo(f"cancelled {format_count(cancelled, 'task')}")
    else:
        click.echo("nothing to cancel: all of them have ended already, or there are none")


def _check_all(names: tuple[str, ...], values: dict[str, Any], *, yes: bool) -> None:
    if names or any(values.values()):
        raise UserError("--all means every task: give it alone, or say which tasks without it")
    if not yes:
        raise UserError("--all cancels every task of the broker; give --yes, too, if you mean it")


def _resolve_targets(
    client: Client, names: tuple[str, ...], values: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return what an act is on: full names, or a scope.

    Names have to be known: a mistyped one should not pass. The scope has the service of a lane that
    one service alone has.
    """
    if names and any(_is_set(values)):
        raise UserError(f"names and options both choose tasks: give names, or {STATE_FLAGS}")
    if not names and not any(_is_set(values)):
        raise UserError(f"say which tasks: names, {STATE_FLAGS}")
    if names:
        return (*client.resolve(names),), values
    return names, with_service_of_lane(client, values)


def _is_set(values: dict[str, Any]) -> list[bool]:
    """The open lane is an empty text, and is something."""
    return [bool(value) or value == "" for value in values.values()]


@click.command(
    epilog=example("move fetch-a --to-lane slow", "move --service smtp --lane a --to-lane b")
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@click.option(
    "--to-lane", metavar="LANE", help="Into this lane; '' is none.", shell_complete=complete_lane
)
@click.option(
    "--to-service", metavar="SERVICE", help="To this service.", shell_complete=complete_service
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
    **values: Any,  # noqa: ANN401  # the options of a scope
) -> None:
    """Put tasks into another lane, or another service.

    By name, or all that fit what is given. What a worker holds stays where it is, and what has
    ended, too. Tasks that go to another service keep their payload: its workers have to know what
    to do with it. Without --to-lane they keep their lane.
    """
    if to_lane is None and to_service is None:
        raise UserError("say where to: --to-lane, --to-service, or both")
    with connect_client(cli_context) as client:
        names, values = _resolve_targets(client, names, values)
        moved = client.move(names or to_scope(values), to_lane=to_lane, to_service=to_service)
    if cli_context.as_json:
        print_document(MoveDocument(moved=moved))
    elif moved:
        click.echo(f"moved {format_count(moved, 'task')}")
    else:
        click.echo("nothing to move: workers hold them, they have ended, or are there already")


@click.command(epilog=example("expire fetch-a", "expire --service smtp --lane a.org"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@scope_options
@broker_options
@click.pass_obj
def expire(cli_context: CliContext, /, names: tuple[str, ...], **values: Any) -> None:  # noqa: ANN401  # a scope
    """Give up tasks, as if they were too old.

    By name, or all that fit what is given. They end as failed: what waits for them goes on
    waiting, and `taskyard retry` undoes it. What a worker holds is left to it. To be rid of tasks
    and all that wait for them, cancel them.
    """
    with connect_client(cli_context) as client:
        names, values = _resolve_targets(client, names, values)
        expired = client.expire(names or to_scope(values))
    if cli_context.as_json:
        print_document(ExpireDocument(expired=expired))
    elif expired:
        click.echo(f"expired {format_count(expired, 'task')}")
    else:
        click.echo("nothing to expire: workers hold them, or they have ended")


@click.command(epilog=example("drain host-4711", "drain --all"))
@click.argument("names", nargs=-1, metavar="[WORKER]...")
@click.option("--all", "all_tasks", is_flag=True, help="All workers, and then the broker, too.")
@broker_options
@click.pass_obj
def drain(cli_context: CliContext, names: tuple[str, ...], *, all_tasks: bool) -> None:
    """Give workers no more tasks, and send them home.

    They finish what they have. With --all the broker takes no more tasks either, and leaves when
    nothing runs any more; `taskyard down` does that and waits.
    """
    if bool(names) is all_tasks:
        raise UserError("say which workers: names, or --all; `taskyard workers` lists them")
    with connect_client(cli_context) as client:
        drained = client.drain() if all_tasks else _drain(client, names)
    if cli_context.as_json:
        print_document(DrainDocument(drained=drained))
    else:
        leaving = ", and the broker leaves when nothing runs any more" if all_tasks else ""
        click.echo(f"drained {format_count(drained, 'worker')}{leaving}")


def _drain(client: Client, names: tuple[str, ...]) -> int:
    """All of them, or none if one is not known."""
    known = [worker["name"] for worker in client.workers()]
    for name in names:
        if name not in known:
            raise UserError(f"no worker is called {name}; `taskyard workers` lists them")
    return sum(client.drain(name) for name in dict.fromkeys(names))


def _pause_options(command: CommandFunction) -> CommandFunction:
    for option in (
        click.option("--all", "all_tasks", is_flag=True, help="Everything."),
        click.option(
            "--lane",
            metavar="LANE",
            help="This lane of the service.",
            shell_complete=complete_lane,
        ),
        click.option(
            "--service", metavar="SERVICE", help="This service.", shell_complete=complete_service
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
    """Give workers nothing more of a service, a lane, or at all.

    What they have they finish. Tasks are taken as before, and wait. It outlives a restart of the
    broker. Says what is paused then.
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

    The one that was made with the same options: a service that was paused by itself stays paused
    when everything goes on. Says what is paused then.
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
        raise UserError("--all means everything: give it alone, or --service without it")
    if not all_tasks and not service and lane is None:
        raise UserError(f"say what to {verb}: --service, with --lane for one lane of it, or --all")
    with connect_client(cli_context) as client:
        service = service or _service_of_lane(client, lane)
        if service and service not in _pause_names(client.status()):
            raise UserError(f"no service is called {service}; `taskyard services` lists them")
        act = client.pause if verb == "pause" else client.resume
        act(service, lane)
        stats = client.status()
    if cli_context.as_json:
        kind = PauseDocument if verb == "pause" else ResumeDocument
        print_document(kind(paused=stats["paused"], pauses=stats["pauses"]))
    else:
        click.echo(format_pauses(stats) or "nothing is paused")


def _service_of_lane(client: Client, lane: str | None) -> str | None:
    """The one that is meant, where only a lane was given."""
    if lane is None:
        return None
    found: str | None = with_service_of_lane(client, {"service": None, "lane": lane})["service"]
    if found is None:
        raise UserError(f"no service has a lane {lane}; say which is meant with --service")
    return found


def _pause_names(stats: dict[str, Any]) -> list[str]:
    return [one["name"] for one in stats["services"]]


def format_pauses(stats: dict[str, Any]) -> str:
    """What is paused, of a broker's status; "" if nothing is."""
    parts = ["everything"] if stats["paused"] else []
    parts += [
        f"service {escape_line(one['service'])}"
        if one["lane"] is None
        else f"lane {escape_line(one['lane']) or '-'} of service {escape_line(one['service'])}"
        for one in stats["pauses"]
    ]
    return f"paused: {', '.join(parts)}" if parts else ""
