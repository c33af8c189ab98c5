"""`taskyard join`: start what an invitation is for, a worker or a gateway of unmodified programs.

Owns the choice and the question. The commands `worker` and `relay` do the work.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.command import Command
from taskyard.cli.output import example
from taskyard.errors import UserError
from taskyard.net.keys import KeyEntry, read_invitation
from taskyard.wire.roles import Role

if TYPE_CHECKING:
    from taskyard.cli.options import CliContext
    from taskyard.net.keys import Invitation

#: Where unmodified programs of a dialect look for their broker. Only loopback: they have no keys.
GATEWAYS: Final = {
    "dwork": "tcp://127.0.0.1:6125",
    "ping-pong": "tcp://127.0.0.1:6002,tcp://127.0.0.1:6001",
    "round-robin": "tcp://127.0.0.1:6714",
    "wmp": "tcp://127.0.0.1:6014",
}


@click.command(cls=Command, epilog=example("join gpu.invite --yes", "join site.invite"))
@click.argument("file", metavar="FILE")
@click.option("--yes", is_flag=True, help="Start a worker without a question.")
@click.pass_context
def join(context: click.Context, file: str, *, yes: bool) -> object:
    """Start what an invitation is for.

    A worker, which runs what the broker sends with your rights. Or a gateway, to which programs of
    the invitation's dialect connect on this machine as they are, on the dialect's usual port.
    Gateways listen on loopback only. On the broker's machine, `taskyard keys invite worker NAME`
    makes an invitation of a worker, `taskyard keys invite --for DIALECT NAME` that of a gateway,
    and `taskyard keys revoke NAME` ends it.
    """
    cli_context: CliContext = context.obj
    invitation = read_invitation(file)
    words = _command(invitation, file)
    for line in _description(invitation, words):
        click.echo(line)
    if words[0] != "relay" and not yes:
        _ask(cli_context)
    root = context.find_root()
    _, command, rest = root.command.resolve_command(root, words)  # type: ignore[attr-defined]  # a group
    with command.make_context(words[0], rest, parent=root) as started:
        return command.invoke(started)


def _command(invitation: Invitation, file: str) -> list[str]:
    """Return the command that an invitation is for. Raises `UserError`."""
    if Role.RELAY in invitation.roles:
        place = GATEWAYS[invitation.dialect]
        return ["relay", "--listen", f"{invitation.dialect}={place}", "--invite", file]
    if Role.WORKER in invitation.roles and invitation.dialect == "round-robin":
        return ["rr", "worker", "--invite", file]
    if Role.WORKER in invitation.roles:
        return ["worker", "--invite", file]
    raise UserError(f"{file}: for a client (use it with --invite {file})")


def _description(invitation: Invitation, words: list[str]) -> list[str]:
    """Return what is joined, and what is started."""
    key = KeyEntry(invitation.name, invitation.roles, invitation.secret.public(), 0)
    started = "a worker, which runs commands of the broker with your rights"
    if words[0] == "relay":
        started = f"a gateway at {words[2].partition('=')[2]}"
    return [
        f"broker   {','.join(invitation.endpoints)}",
        f"key      {invitation.name}, {', '.join(invitation.roles)}, {key.fingerprint}",
        f"dialect  {invitation.dialect}",
        f"starts   {started}",
    ]


def _ask(cli_context: CliContext) -> None:
    """Ask whether to start a worker. Raises `UserError` without a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("join: a worker runs what the broker sends (confirm with --yes)")
    cli_context.interrupt_message = "not joined"
    click.confirm("Start it?", abort=True)
