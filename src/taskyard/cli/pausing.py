"""The verbs that hold work back for a while: `pause`, `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from taskyard.cli.choosing import lane_meant
from taskyard.cli.completion import complete_lane, complete_service
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document
from taskyard.cli.reaching import connected
from taskyard.cli.words import plain
from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.cli.options import Decorated
    from taskyard.client.client import Client


def _pause_options(command: Decorated) -> Decorated:
    for option in (
        click.option("--all", "everything", is_flag=True, help="Everything."),
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
def pause(talk: Talk, service: str | None, lane: str | None, *, everything: bool) -> None:
    """Give workers nothing more of a service, a lane, or at all.

    What they have they finish. Tasks are taken as before, and wait. It outlives a restart of the
    broker. Says what is paused then.
    """
    _act(talk, "pause", (service, lane), everything=everything)


@click.command(epilog=example("resume --service smtp", "resume --all"))
@_pause_options
@broker_options
@click.pass_obj
def resume(talk: Talk, service: str | None, lane: str | None, *, everything: bool) -> None:
    """Undo a pause.

    The one that was made with the same options: a service that was paused by itself stays paused
    when everything goes on. Says what is paused then.
    """
    _act(talk, "resume", (service, lane), everything=everything)


def _act(
    talk: Talk,
    verb: Literal["pause", "resume"],
    what: tuple[str | None, str | None],
    *,
    everything: bool,
) -> None:
    service, lane = what
    if everything and (service or lane):
        raise UserError("--all means everything: give it alone, or --service without it")
    if not everything and not service and lane is None:
        raise UserError(f"say what to {verb}: --service, with --lane for one lane of it, or --all")
    with connected(talk) as client:
        service = service or _service_of(client, lane)
        if service and service not in _names(client.status()):
            raise UserError(f"no service is called {service}; `taskyard services` lists them")
        act = client.pause if verb == "pause" else client.resume
        act(service, lane)
        told = client.status()
    if talk.as_json:
        print_document(verb, paused=told["paused"], pauses=told["pauses"])
    else:
        click.echo(pauses_of(told) or "nothing is paused")


def _service_of(client: Client, lane: str | None) -> str | None:
    """The one that is meant, where only a lane was given."""
    if lane is None:
        return None
    found: str | None = lane_meant(client, {"service": None, "lane": lane})["service"]
    if found is None:
        raise UserError(f"no service has a lane {lane}; say which is meant with --service")
    return found


def _names(told: dict[str, Any]) -> list[str]:
    return [one["name"] for one in told["services"]]


def pauses_of(told: dict[str, Any]) -> str:
    """What is paused, of a broker's status; "" if nothing is."""
    parts = ["everything"] if told["paused"] else []
    parts += [
        f"service {plain(one['service'])}"
        if one["lane"] is None
        else f"lane {plain(one['lane']) or '-'} of service {plain(one['service'])}"
        for one in told["pauses"]
    ]
    return f"paused: {', '.join(parts)}" if parts else ""
