"""`taskyard keys` and `taskyard join`: create access keys, invite peers, and start what they join.

A secret is written only to its file. It is printed only on request, by `keys invite --line`. An
endpoint for all addresses of a machine is no address, and only the user can choose an address
that the other machine reaches: then the choice is printed.
"""

from __future__ import annotations

import shlex
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.commands import Command, Group
from taskyard.cli.daemon_options import DIALECT_SIDES, check_dialect
from taskyard.cli.documents import (
    KeyRecord,
    KeysInviteDocument,
    KeysListDocument,
    KeysNewDocument,
    KeysRevokeDocument,
)
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, moment_cell, print_document, print_table
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UnusableEndpoint, UserError
from taskyard.journal import schema, state_check
from taskyard.net import endpoints
from taskyard.net import keys as key_files
from taskyard.net.keyring import Keyring
from taskyard.net.keys import Invitation, KeyEntry, PeerKey
from taskyard.process.state_files import OpenListener, open_listeners
from taskyard.wire.roles import Role, gateway_roles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.settings.loader import Settings

_ROLES: Final = [role.value for role in Role]


@click.group(cls=Group, no_args_is_help=True)
def keys() -> None:
    """Create, list and revoke access keys.

    Peers on other machines need a key. On loopback TCP they need one if the broker runs with
    --secure. The broker may be running: changes apply at its next turn. All brokers of a store in
    PostgreSQL have the same keys, and changes apply within seconds.
    """


@keys.command(epilog=example("keys new ci-bot --role producer", "keys new gpu --role worker"))
@click.argument("name")
@click.option(
    "--role",
    "roles",
    required=True,
    multiple=True,
    type=click.Choice(_ROLES),
    help="viewer: read. producer: also submit, cancel, retry. worker: run tasks. relay: forward "
    "for workers of any name, with another role. admin: all. Repeatable.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key file. Must not exist. NAME.key if omitted.",
)
@click.pass_obj
def new(  # one per option
    cli_context: CliContext,
    name: str,
    roles: tuple[str, ...],
    out: Path | None,
) -> None:
    """Create an access key and write it to a file.

    The file (mode 0600) is the only copy of the secret. Move it over a secure channel to the
    machine that uses it. The key authenticates the peer to the broker and the broker to the peer. A
    worker's key is bound to its name: the worker is called NAME or NAME/anything.
    """
    path = out or Path(f"{name}.key")
    entry = _keyring(cli_context, cli_context.state_directory()).create(
        name, map(Role, roles), path
    )
    if cli_context.as_json:
        print_document(KeysNewDocument(file=str(path), key=_record(entry)))
        return
    click.echo(f"{path}: key of {name} ({_roles_text(entry)}), the only copy")
    click.echo(f"use it:    {_usage_hint(entry, path)}")
    state = shlex.quote(str(cli_context.state_directory()))
    click.echo(f"revoke it: taskyard keys revoke {name} --state {state}")


def _usage_hint(entry: KeyEntry, path: Path) -> str:
    command = "worker" if Role.WORKER in entry.roles else "status"
    file = shlex.quote(path.name)
    return f"taskyard {command} --broker tcp://HOST:PORT --key {file}"


@keys.command(
    epilog=example(
        "keys invite worker gpu --broker tcp://head.example:6125",
        "keys invite --for wmp site --broker tcp://head.example:6014",
        "keys invite --for wmp worker gpu",
    )
)
@click.argument("words", nargs=-1, metavar="[ROLE[,ROLE...]] NAME")
@click.option(
    "--for",
    "dialect",
    metavar="DIALECT",
    show_default="dwork",
    help="The peer's dialect. Without a role, the invitation is for a gateway of unmodified "
    "programs, with the roles that they need.",
)
@click.option(
    "--broker",
    metavar="URL",
    show_default="of the running broker, or from [listen] in the settings",
    help="Endpoint that the peer connects to. For a relay of ping-pong: BACKEND,FRONTEND.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Invitation file. Must not exist. NAME.invite if omitted.",
)
@click.option("--line", is_flag=True, help="Print the invitation as one line and write no file.")
@click.pass_obj
def invite(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    words: tuple[str, ...],
    dialect: str | None,
    broker: str | None,
    out: Path | None,
    *,
    line: bool,
) -> None:
    """Create a key and an invitation for a peer on another machine.

    The invitation is a file (mode 0600) or a line with all that the peer needs: the endpoint, the
    broker's public key, and the peer's name, roles and secret. It is the only copy of the secret.
    Move it over a secure channel. `taskyard join FILE` uses it there, and so do the commands with
    --invite. It can replace a key file.
    """
    if line and out is not None:
        raise UserError("--line and --out exclude each other")
    is_gateway = dialect is not None and len(words) == 1
    dialect = check_dialect(dialect or "dwork")
    roles, name = _roles_and_name(words, dialect if is_gateway else None)
    state = cli_context.state_directory()
    found = invited_endpoints(broker, dialect, roles, cli_context.settings(), state)
    path = None if line else out or Path(f"{name}.invite")
    issued: list[Invitation] = []

    def deliver(key: PeerKey) -> None:
        issued.append(key.invite(dialect, found))
        if path is not None:
            key_files.create_key_file(path, key_files.format_invitation_file(issued[0]))

    def withdraw() -> None:
        if path is not None:
            path.unlink(missing_ok=True)

    entry = _keyring(cli_context, state).issue(name, roles, deliver, withdraw)
    text = key_files.format_invitation(issued[0]) if path is None else None
    if cli_context.as_json:
        document = KeysInviteDocument(
            file=None if path is None else str(path),
            line=text,
            dialect=dialect,
            endpoints=[*found],
            key=_record(entry),
        )
        print_document(document)
        return
    click.echo(text or f"{path}: invitation of {name} ({_roles_text(entry)}), the only copy")
    cli_context.info(f"connects:  to {dialect} at {','.join(found)}")
    cli_context.info(f"use it:    {_invite_hint(entry, dialect, path)}")
    cli_context.info(f"revoke it: taskyard keys revoke {name} --state {shlex.quote(str(state))}")


def _roles_and_name(words: tuple[str, ...], gateway: str | None) -> tuple[list[Role], str]:
    """Return the roles and the name of an invitation. A gateway has those its programs need."""
    if len(words) != (1 if gateway else 2):
        raise click.UsageError("give ROLE and NAME, or --for DIALECT and NAME")
    if gateway is not None:
        return [Role.RELAY, *gateway_roles(gateway)], words[0]
    return _read_roles(words[0]), words[1]


def _read_roles(given: str) -> list[Role]:
    try:
        return [Role(one.strip()) for one in given.split(",")]
    except ValueError:
        raise UserError(f"role {given!r}: must be one of {', '.join(_ROLES)}") from None


def _invite_hint(entry: KeyEntry, dialect: str, path: Path | None) -> str:
    """Return the command that uses an invitation. A line is better passed by the environment."""
    is_worker = Role.WORKER in entry.roles
    joins = Role.RELAY in entry.roles or (is_worker and dialect in ("dwork", "wmp"))
    if path is not None and joins:
        return f"taskyard join {shlex.quote(path.name)}"
    if Role.RELAY in entry.roles:
        address = ",".join(["tcp://127.0.0.1:PORT"] * DIALECT_SIDES[dialect])
        command = f"relay --listen {dialect}={address}"
    elif dialect == "round-robin":
        command = f"rr {'worker' if is_worker else 'client'}"
    elif is_worker and dialect == "ping-pong":
        command = "worker --command PROGRAM"
    elif is_worker or dialect == "dwork":
        command = "worker" if is_worker else "status"
    else:
        return f"by a program that speaks {dialect}, with the key in it"
    if path is None:
        return f"TASKYARD_INVITE=LINE taskyard {command}"
    return f"taskyard {command} --invite {shlex.quote(path.name)}"


@keys.command("list", epilog=example("keys list --json"))
@click.pass_obj
def list_keys(cli_context: CliContext) -> None:
    """List all keys, also revoked keys, oldest first."""
    entries = _keyring(cli_context, cli_context.state_directory()).entries()
    if cli_context.as_json:
        print_document(KeysListDocument(keys=[_record(entry) for entry in entries]))
        return
    rows = [
        (
            entry.name,
            ", ".join(entry.roles),
            entry.fingerprint,
            _cell(entry.made_ns),
            _cell(entry.revoked_ns),
        )
        for entry in entries
    ]
    print_table(("NAME", "ROLES", "FINGERPRINT", "CREATED", "REVOKED"), rows)


@keys.command(epilog=example("keys revoke ci-bot"))
@click.argument("name")
@click.pass_obj
def revoke(cli_context: CliContext, name: str) -> None:
    """Revoke a key at once.

    Connected peers are cut off: their next message is refused and they get no more replies. Tasks
    leased to a worker with this key return to the queue when the lease expires.
    """
    entry = _keyring(cli_context, cli_context.state_directory()).revoke(name)
    if cli_context.as_json:
        print_document(KeysRevokeDocument(key=_record(entry)))
        return
    click.echo(f"revoked the key of {name} ({_roles_text(entry)}, {entry.fingerprint})")


def _keyring(cli_context: CliContext, state: Path) -> Keyring:
    """Return the keys of a state directory, or of its store in PostgreSQL."""
    known = schema.database_url(state)
    if not known and not state_check.has_journal(state):
        known = cli_context.settings().broker.store
    if not known:
        return Keyring(state)
    from taskyard.postgresql.driver import keyring_of  # noqa: PLC0415  # slow to import

    return keyring_of(state, known)


def _record(entry: KeyEntry) -> KeyRecord:
    return KeyRecord(
        name=entry.name,
        role=",".join(entry.roles),
        roles=[role.value for role in entry.roles],
        fingerprint=entry.fingerprint,
        public=entry.public,
        created=entry.made_ns / SECOND_NS,
        revoked=entry.revoked_ns / SECOND_NS if entry.revoked_ns else None,
    )


def _roles_text(entry: KeyEntry) -> str:
    """Return `role worker`, or `roles producer, worker`."""
    return f"role{'s' if len(entry.roles) > 1 else ''} {', '.join(entry.roles)}"


def _cell(at_ns: int) -> str:
    return moment_cell(at_ns / SECOND_NS if at_ns else None, time.time())


#: An address of the documentation range. Nothing is sent there: the system only chooses a route.
_ELSEWHERE: Final = ("192.0.2.1", 9)


def invited_endpoints(
    given: str | None, dialect: str, roles: Sequence[Role], settings: Settings, state: Path
) -> tuple[str, ...]:
    """Return the endpoints that a peer connects to. Raises `UserError`.

    Two for a relay of ping-pong, which has a backend and a frontend, else one.
    """
    count = DIALECT_SIDES[dialect] if Role.RELAY in roles else 1
    if given is not None:
        return _check_given(given, dialect, count)
    listeners = [one for one in open_listeners(state) if one.dialect == dialect]
    listeners += _configured(settings, dialect)
    remote = [one for one in listeners if _is_remote(one)]
    if not remote:
        raise UserError(f"{dialect}: {_missing(listeners)} (give --broker {_form(count)})")
    sides = remote[0].endpoints
    if count == 1 and len(sides) > 1:  # workers use the backend, clients the frontend
        sides = sides[:1] if Role.WORKER in roles else sides[1:]
    if remote[0].identity:
        with suppress(UserError):  # it may be any text
            return (endpoints.peer_endpoint(remote[0].identity),)
    if any(endpoints.is_wildcard(endpoints.parse(one)) for one in sides):
        choice = " or ".join(f"--broker {_with_host(sides, host)}" for host in _own_addresses())
        raise UnusableEndpoint(
            f"{dialect} at {','.join(sides)}: stands for all addresses of this machine (give the "
            f"one that the peer reaches, such as {choice})"
        )
    return tuple(sides)


def _check_given(given: str, dialect: str, count: int) -> tuple[str, ...]:
    found = [endpoints.parse_addresses(one) for one in endpoints.split_endpoints(given)]
    if not all(isinstance(address, endpoints.Tcp) for addresses in found for address in addresses):
        raise UserError(f"--broker {given}: must be a TCP endpoint, as in tcp://HOST:PORT")
    if len(found) != count:
        wanted = "BACKEND,FRONTEND" if count > 1 else "one endpoint"
        raise UserError(f"--broker {given}: expected {wanted} of {dialect}, as in {_form(count)}")
    return tuple("+".join(map(str, addresses)) for addresses in found)


def _configured(settings: Settings, dialect: str) -> Iterator[OpenListener]:
    """Yield the listeners of a dialect in the settings, one for each socket."""
    for name, found in settings.listen.items():
        section = settings.listeners.get(name)
        if dialect != (name if section is None else section.dialect):
            continue
        identity = (section.identity or "") if section is not None else ""
        for addresses in [found] if DIALECT_SIDES[dialect] > 1 else [(one,) for one in found]:
            yield OpenListener(dialect, tuple(addresses), identity)


def _is_remote(listener: OpenListener) -> bool:
    """Return whether other machines reach all endpoints of a listener, whose ports are fixed."""
    addresses = [endpoints.parse(one) for one in listener.endpoints]
    return all(
        isinstance(one, endpoints.Tcp) and one.port and endpoints.is_remote(one)
        for one in addresses
    )


def _missing(listeners: Sequence[OpenListener]) -> str:
    if not listeners:
        return "no broker is running with such a listener, and the settings have none in [listen]"
    addresses = ", ".join(dict.fromkeys(",".join(one.endpoints) for one in listeners))
    return f"other machines can't reach {addresses}"


def _form(count: int) -> str:
    """Return the form of endpoints, for a hint."""
    return ",".join(["tcp://HOST:PORT"] * count)


def _with_host(addresses: Sequence[str], host: str) -> str:
    """Return endpoints with another host, joined by commas."""
    found = (endpoints.parse(one) for one in addresses)
    return ",".join(f"tcp://{host}:{one.port}" for one in found if isinstance(one, endpoints.Tcp))


def _own_addresses() -> list[str]:
    """Return the name of this machine, and the address from which it reaches other machines."""
    names = [socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        names.append(probe.getsockname()[0])
    return names


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
    """Start what an invitation is for: a worker or a gateway.

    A worker runs what the broker sends with your rights, so it asks first. A gateway serves
    unmodified programs of the invitation's dialect on this machine: they connect to the dialect's
    usual port on loopback.

    On the broker's machine, `taskyard keys invite worker NAME` makes an invitation of a worker, and
    `taskyard keys invite --for DIALECT NAME` an invitation of a gateway. `taskyard keys revoke
    NAME` ends it.
    """
    cli_context: CliContext = context.obj
    if file == key_files.STDIN:  # the command would read it again
        raise UserError("join: needs a file (`taskyard worker --invite -` reads stdin)")
    invitation = key_files.read_invitation(file)
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
        address = GATEWAYS[invitation.dialect]
        return ["relay", "--listen", f"{invitation.dialect}={address}", "--invite", file]
    if Role.WORKER in invitation.roles and invitation.dialect == "round-robin":
        return ["rr", "worker", "--invite", file]
    if Role.WORKER in invitation.roles and invitation.dialect == "ping-pong":
        # Without a program it would fail every job that is not JSON.
        raise UserError(
            f"{file}: for a worker with a program (use `taskyard worker --command PROGRAM --invite "
            f"{shlex.quote(file)}`)"
        )
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
