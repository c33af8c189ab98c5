"""`taskyard web`: the page alone, over a running broker or a state directory without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.daemon_options import log_to_stderr, until_eof_option
from taskyard.cli.options import CliContext, quiet_option, state_option, verbose_option
from taskyard.cli.output import example
from taskyard.errors import NoBroker, NotInstalled, UserError

if TYPE_CHECKING:
    from taskyard.client.client import Client

#: Where the page is by default.
DEFAULT_ADDRESS: Final = "127.0.0.1:6180"

#: Seconds until a request to the broker is given up, and the page says so.
_REPLY_SECONDS: Final = 5.0

_PORT_MAX: Final = 65535


@click.command(epilog=example("web --state ./.taskyard", "web --invite viewer"))
@state_option
@click.option(
    "--page",
    metavar="ADDRESS",
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="Host and port of the page. If the port is taken, a free one is used.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST",
    help="Another host name by which browsers reach the page. Repeatable.",
)
@click.option(
    "--invite",
    type=click.Choice(["operator", "viewer"]),
    help="Print an address with a token for a colleague, for the page that is running.",
)
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def web(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    state: Path,
    page: str,
    names: tuple[str, ...],
    invite: str | None,
    *,
    until_eof: bool,
) -> None:
    """Serve a page about a state directory.

    With a broker on it, the page follows what happens, and shows actions to those who may act.
    Without one, it shows the last state.

    Prints the address with a token, which is good until the page ends. An operator can retry,
    cancel, pause and change priorities. A viewer can only look.
    """
    try:
        from taskyard.web import access, server  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(
            f"the page needs {error.name} (`pip install 'taskyard[web]'`)"
        ) from error
    if invite is not None:
        click.echo(access.invitation(state, access.Role(invite)))
        return
    host, port = _parsed(page)
    log_to_stderr(cli_context, "web")

    def connect(*, is_live: bool) -> Client:
        return _connect(cli_context, state, is_live=is_live)

    server.serve(
        state,
        connect,
        server.bind(host, port),
        lambda address: click.echo(f"page {address}"),
        names=names,
        until_eof=until_eof,
    )


def _connect(cli_context: CliContext, state: Path, *, is_live: bool) -> Client:
    """Open a client of the broker on a state directory, or of the directory without one."""
    from taskyard.process.locks import LOCK_FILE, lock_holder  # noqa: PLC0415
    from taskyard.settings import rules  # noqa: PLC0415

    if not is_live:
        from taskyard.cli.offline import OfflineClient  # noqa: PLC0415

        return OfflineClient(state, rules.to_rules_set(cli_context.settings()), keeps_lock=False)
    if lock_holder(state / LOCK_FILE) is None:
        raise NoBroker(f"no broker is running on {state}")
    from taskyard.client.client import Client  # noqa: PLC0415

    return Client(state=state, timeout=_REPLY_SECONDS, connect_timeout=_REPLY_SECONDS)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise UserError(f"--page {address}: not HOST:PORT, as in {DEFAULT_ADDRESS}")
    return host.removeprefix("[").removesuffix("]"), int(port)
