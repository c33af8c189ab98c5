"""The verbs that hold work back for a while: `pause`, `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from taskyard.cli.completion import complete_lane, complete_service
from taskyard.cli.format import escape_line
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.reaching import connect_client
from taskyard.cli.scopes import with_service_of_lane
from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.cli.options import CommandFunction
    from taskyard.client.client import Client


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
        print_document(verb, paused=stats["paused"], pauses=stats["pauses"])
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
