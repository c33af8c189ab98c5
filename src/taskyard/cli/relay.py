"""`taskyard relay`: relay messages between peers and their broker, in the foreground."""

import shlex
from pathlib import Path

import click

from taskyard.cli.commands import Command
from taskyard.cli.daemon_options import (
    DIALECT_SIDES,
    check_dialect,
    log_options,
    open_log,
    until_eof_option,
)
from taskyard.cli.options import CliContext
from taskyard.cli.output import example
from taskyard.client import discovery
from taskyard.errors import UnusableEndpoint, UnusableKey, UserError
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey
from taskyard.relay.process import ROUND_ROBIN, WMP, RelayOptions, serve
from taskyard.settings import keys
from taskyard.settings.values import InvalidValue
from taskyard.wire import roles


@click.command(
    cls=Command,
    is_peer=True,
    epilog=example(
        "relay --listen dwork=tcp://127.0.0.1:6125 --to dwork=tcp://head.example:6125 --key my.key"
    ),
)
@click.option(
    "--listen",
    required=True,
    metavar="[DIALECT=]ENDPOINT",
    help="Endpoint for peers and other relays. Port 0 picks a free port. Without a dialect: wmp.",
)
@click.option(
    "--to",
    "upstreams",
    multiple=True,
    metavar="[DIALECT=]ENDPOINT",
    show_default="from --invite",
    help="A broker, or another relay, with the same dialect. `+` joins the endpoints of one "
    "broker. Repeatable for wmp. Keep the order across restarts.",
)
@click.option(
    "--identity",
    metavar="TEXT",
    show_default="the endpoint of --listen",
    help="Address by which round-robin peers send to the relay: the endpoint that they connect "
    "to. Required with the address 0.0.0.0 or [::].",
)
@log_options
@until_eof_option
@click.pass_obj
def relay(  # click's options
    cli_context: CliContext,
    *,
    listen: str,
    upstreams: tuple[str, ...],
    identity: str | None,
    until_eof: bool,
) -> None:
    """Relay messages between peers on this machine and a broker on another machine.

    Programs that can't use keys connect to a relay as to a broker, in their own dialect: dwork,
    ping-pong, round-robin or wmp. The relay connects to the broker with --key. Peers can do
    what the key allows, and every program of this machine can be a peer. --invite replaces --to and
    --key.

    With --state the relay has keys of its own for its peers, which may then be on other machines.
    Create them with `taskyard keys new NAME --role worker --state DIR`. A peer of the relay can do
    what the relay's own key allows.

    WMP workers work for all managers behind a relay. A broker is a manager if it runs with
    `--listen wmp=ENDPOINT`. Relays can be chained, those of WMP up to eight, and run side by side.
    A relay has no state, so it can be killed and restarted without losing tasks.

    With several --to, each broker that requires a key needs a --key, in the same order.

    When ready, it prints `listening DIALECT ENDPOINT`. It waits for brokers that are not running.
    SIGTERM and Ctrl-C stop it.
    """
    open_log(cli_context, "relay")
    dialect, addresses = _read("--listen", listen)
    below = tuple(map(endpoints.listen_endpoint, addresses))
    routing_id = _identity(dialect, below[0], identity)
    keyring = _keyring(below, cli_context.state)
    above = tuple(_read_upstream(dialect, given) for given in upstreams)
    above = above or (_invited_upstream(cli_context, dialect),)
    if len(above) > 1 and dialect != WMP:
        raise UserError(f"--to: a {dialect} relay has one broker")
    for one in above:
        for address in set(below) & {
            str(at) for each in one for at in endpoints.parse_addresses(each)
        }:
            raise UserError(f"--to {address}: the relay's own --listen endpoint")
    key, upstream_keys = _upstream_keys(cli_context, dialect, above)
    options = RelayOptions(
        dialect, below, above, key, keyring, routing_id, upstream_keys=upstream_keys
    )
    serve(options, click.echo, until_eof=until_eof)


def _identity(dialect: str, address: str, given: str | None) -> str:
    """Return the routing id of a round-robin listener. Raise UserError. Empty: its endpoint."""
    if dialect != ROUND_ROBIN:
        if given is not None:
            raise UserError(
                f"--identity: only round-robin's peers address a relay, not {dialect}'s"
            )
        return ""
    if given is None and endpoints.is_wildcard(endpoints.parse(address)):
        raise UnusableEndpoint(
            f"--listen {address}: peers address the relay by the endpoint that they connect to, "
            "and no peer connects to this one (give --identity tcp://HOST:PORT)"
        )
    try:
        return "" if given is None else keys.IDENTITY.read(given)
    except InvalidValue as error:
        raise UserError(f"--identity {error}") from error


def _invited_upstream(cli_context: CliContext, dialect: str) -> tuple[str, ...]:
    """Return the broker of an invitation. Raise UserError if there is none for the dialect."""
    invitation = cli_context.find_invitation()
    if invitation is None:
        raise UserError("no broker (give --to, or --invite)")
    if invitation.dialect != dialect:
        raise UserError(
            f"invitation: it is for the dialect {invitation.dialect}, not {dialect} (give "
            f"--listen {invitation.dialect}=ENDPOINT)"
        )
    sides = DIALECT_SIDES[dialect]
    if len(invitation.endpoints) < sides:
        raise UserError(
            f"invitation: it has one endpoint of {dialect}, and a relay needs both (give --to "
            f"{dialect}=BACKEND,FRONTEND)"
        )
    return invitation.endpoints[:sides]


def _upstream_keys(
    cli_context: CliContext, dialect: str, above: tuple[tuple[str, ...], ...]
) -> tuple[PeerKey | None, tuple[PeerKey | None, ...]]:
    """Return the relay's key, and one for each upstream if several are given. Raise UserError."""
    each: tuple[PeerKey | None, ...] = ()
    if len(cli_context.keys) > 1 and len(above) > 1:
        each = tuple(discovery.keys_for([one[0] for one in above], cli_context.keys))
        cli_context.keys = cli_context.keys[:1]
    addresses = [address for one in above for address in one]
    key = _key(cli_context, addresses)
    if any(map(endpoints.uses_tcp, addresses)):
        for used in each or (key,):
            _check_roles(used, dialect)
    return key, each


def _key(cli_context: CliContext, above: list[str]) -> PeerKey | None:
    """Return the relay's key. Raise UserError if it is needed and not given."""
    if cli_context.key is None and cli_context.invitation is not None:
        return cli_context.invitation.key
    found = {
        address: discovery.key_for(address, cli_context.key, settings=cli_context.settings())
        for address in above
    }
    for address, key in found.items():
        if key is None and any(map(endpoints.is_remote, endpoints.parse_addresses(address))):
            raise UnusableKey(
                f"--to {address}: on another machine, which needs a key (give --key or --invite)"
            )
    return next((key for key in found.values() if key is not None), None)


def _check_roles(key: PeerKey | None, dialect: str) -> None:
    """Raise UserError if a key permits nothing that peers of the dialect send."""
    needed = roles.relayed_roles(dialect)
    if key is not None and not {*key.roles} & {*needed}:
        raise UnusableKey(
            f"key {key.name!r}: {roles.roles_text(key.roles)}'s key is of no use to a relay of "
            f"{dialect} (it needs the role {' or '.join(needed)})"
        )


def _read(option: str, given: str) -> tuple[str, list[str]]:
    """Parse `[DIALECT=]ENDPOINT`. Return the dialect and its endpoints."""
    dialect, sign, rest = given.partition("=")
    if not sign or "://" in dialect:
        dialect, rest = WMP, given
    sides = DIALECT_SIDES[check_dialect(dialect)]
    addresses = endpoints.split_endpoints(rest)
    if len(addresses) != sides:
        form = "BACKEND,FRONTEND" if sides > 1 else "ENDPOINT"
        raise UserError(f"{option} {given}: expected {dialect}={form}")
    return dialect, addresses


def _read_upstream(dialect: str, given: str) -> tuple[str, ...]:
    """Parse a --to option, which must have the dialect of --listen."""
    named, addresses = _read("--to", given)
    if named != dialect:
        raise UserError(
            f"--to {given}: a relay does not translate {named} to {dialect} (give "
            f"{dialect}=ENDPOINT)"
        )
    return tuple(map(endpoints.peer_endpoint, addresses))


def _keyring(addresses: tuple[str, ...], state: Path | None) -> Keyring | None:
    """Return the keys that peers need. Raise UserError if there are none and some are needed."""
    if state is None:
        for address in addresses:
            if endpoints.is_remote(endpoints.parse(address)):
                raise UnusableEndpoint(
                    f"--listen {address}: other machines can reach it, so peers need keys (give "
                    "--state DIR, or tcp://127.0.0.1:PORT)"
                )
        return None
    keyring = Keyring(state)
    if not keyring.has_keys():
        quoted = shlex.quote(str(state))
        raise UnusableKey(
            f"--state {state}: no valid key (create one with `taskyard keys new NAME --role "
            f"worker --state {quoted}`)"
        )
    return keyring
