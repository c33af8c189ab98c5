"""`taskyard relay`: relay messages between peers and their broker, in the foreground."""

import shlex
from pathlib import Path

import click

from taskyard.cli.daemon_options import (
    DIALECT_SIDES,
    check_dialect,
    log_to_stderr,
    until_eof_option,
)
from taskyard.cli.options import (
    CliContext,
    config_option,
    key_option,
    quiet_option,
    verbose_option,
)
from taskyard.cli.output import example
from taskyard.client import discovery
from taskyard.errors import UnusableEndpoint, UnusableKey, UserError
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey
from taskyard.relay.process import WMP, RelayOptions, serve


@click.command(
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
    required=True,
    metavar="[DIALECT=]ENDPOINT",
    help="A broker, or another relay, with the same dialect. Repeatable for wmp. Keep the order "
    "across restarts.",
)
@key_option
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory with the keys that peers need (see `taskyard keys`), if other machines can "
    "reach --listen.",
)
@config_option
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def relay(
    cli_context: CliContext,
    *,
    listen: str,
    upstreams: tuple[str, ...],
    state: Path | None,
    until_eof: bool,
) -> None:
    """Relay messages between peers on this machine and a broker on another one.

    Programs that can't use keys connect to a relay as to a broker, in their own dialect: dwork,
    ping-pong, round-robin or wmp. The relay connects to the broker with --key. Its peers can do
    what the key allows, and every program of this machine can be a peer.

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
    log_to_stderr(cli_context, "relay")
    dialect, places = _read("--listen", listen)
    below = tuple(map(endpoints.listen_endpoint, places))
    keyring = _keyring(below, state)
    above = tuple(_read_upstream(dialect, given) for given in upstreams)
    if len(above) > 1 and dialect != WMP:
        raise UserError(f"--to: a {dialect} relay has one broker")
    for one in above:
        for place in set(below) & set(one):
            raise UserError(f"--to {place}: the relay's own --listen endpoint")
    upstream_keys: tuple[PeerKey | None, ...] = ()
    if len(cli_context.keys) > 1 and len(above) > 1:
        upstream_keys = tuple(discovery.keys_for([one[0] for one in above], cli_context.keys))
        cli_context.keys = cli_context.keys[:1]
    key = _key(cli_context, [place for one in above for place in one])
    options = RelayOptions(dialect, below, above, key, keyring, upstream_keys=upstream_keys)
    serve(options, click.echo, until_eof=until_eof)


def _key(cli_context: CliContext, above: list[str]) -> PeerKey | None:
    """Return the relay's key. Raise UserError if one is needed and not given."""
    found = {
        place: discovery.key_for(place, cli_context.key, settings=cli_context.settings())
        for place in above
    }
    for place, key in found.items():
        if key is None and endpoints.is_remote(endpoints.parse_peer(place)):
            raise UnusableKey(f"--to {place}: on another machine, which needs a key (give --key)")
    return next((key for key in found.values() if key is not None), None)


def _read(option: str, given: str) -> tuple[str, list[str]]:
    """Parse `[DIALECT=]ENDPOINT`. Return the dialect and its endpoints."""
    dialect, sign, rest = given.partition("=")
    if not sign or "://" in dialect:
        dialect, rest = WMP, given
    sides = DIALECT_SIDES[check_dialect(dialect)]
    places = endpoints.split_endpoints(rest)
    if len(places) != sides:
        form = "BACKEND,FRONTEND" if sides > 1 else "ENDPOINT"
        raise UserError(f"{option} {given}: expected {dialect}={form}")
    return dialect, places


def _read_upstream(dialect: str, given: str) -> tuple[str, ...]:
    """Parse a --to option. Its dialect must be that of --listen."""
    named, places = _read("--to", given)
    if named != dialect:
        raise UserError(
            f"--to {given}: a relay does not translate {named} to {dialect} (give "
            f"{dialect}=ENDPOINT)"
        )
    return tuple(map(endpoints.peer_endpoint, places))


def _keyring(places: tuple[str, ...], state: Path | None) -> Keyring | None:
    """Return the keys that peers need. Raise UserError if there are none and some are needed."""
    if state is None:
        for place in places:
            if endpoints.is_remote(endpoints.parse(place)):
                raise UnusableEndpoint(
                    f"--listen {place}: other machines can reach it, so peers need keys (give "
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
