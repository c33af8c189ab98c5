"""`taskyard web`: the page alone, over a running broker or a state directory without one."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.command import Command
from taskyard.cli.connection import check_not_standby, open_last_state
from taskyard.cli.daemon_options import page_option, until_eof_option
from taskyard.cli.log_options import log_options, open_log
from taskyard.cli.options import CliContext
from taskyard.cli.output import example
from taskyard.errors import NotInstalled
from taskyard.process.locks import BrokerWatch
from taskyard.web import address

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.client import Client

#: Workers and the broker come first on a busy machine.
_NICENESS: Final = 10

#: Seconds until a request to the broker is given up, and the page says so.
_REPLY_SECONDS: Final = 5.0


@click.command(cls=Command, epilog=example("web --state ./.taskyard", "web --share viewer"))
@page_option
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST",
    help="Another host name by which browsers reach the page. Repeatable.",
)
@click.option(
    "--share",
    type=click.Choice([role.value for role in address.Role]),
    help="Print an address with a token for a colleague, for the page that is running.",
)
@click.option(
    "--metrics-token",
    is_flag=True,
    help="Print the token with which Prometheus reads `/metrics`. It stays good.",
)
@click.option("--inherited", type=int, metavar="FD", hidden=True)
@log_options
@until_eof_option
@click.pass_obj
def web(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    *,
    page: str,
    names: tuple[str, ...],
    share: str | None,
    metrics_token: bool,
    inherited: int | None,
    until_eof: bool,
) -> None:
    """Serve a page about a state directory.

    With a broker on it, the page follows what happens, and shows actions to those who may act.
    Without one, it shows the last state.

    Prints the address with a token, which is good until the page ends. If the state directory has a
    page, as that of `taskyard up`, prints its address and ends. An operator can retry, cancel,
    pause and change priorities. A viewer can only look.
    """
    state = cli_context.state_directory()
    if share is not None:
        click.echo(address.invitation(state, address.Role(share)))
        return
    if metrics_token:
        click.echo(address.metrics_token(state))
        return
    if inherited is None and (found := address.find_page(state)) is not None:
        _print_running(cli_context, found)
        return
    serve = _server(cli_context, state, names, until_eof=until_eof)
    open_log(cli_context, "web")
    if inherited is not None:  # of `up`, with the secret in the first line of stdin
        secret = bytes.fromhex(sys.stdin.buffer.readline().decode("ascii"))
        serve(socket.socket(fileno=inherited), secret)
        return
    try:
        with (
            address.bind(page or address.DEFAULT_ADDRESS) as bound,
            address.published(state, bound) as published,
        ):
            click.echo(f"page {published.with_token(address.Role.OPERATOR)}")
            serve(bound, published.secret)
    except address.PageRunning as running:
        _print_running(cli_context, running.page)


def _print_running(cli_context: CliContext, page: address.PageAddress) -> None:
    click.echo(f"page {page.with_token(address.Role.OPERATOR)}")
    cli_context.info(f"the page of process {page.pid} is running, no other one was started")


def _server(
    cli_context: CliContext, state: Path, names: tuple[str, ...], *, until_eof: bool
) -> Callable[[socket.socket, bytes], None]:
    """Return a function that serves the page on a socket with a secret. Raises NotInstalled."""
    with suppress(OSError):
        os.nice(_NICENESS)
    from taskyard.client.broker_link import BrokerLink  # noqa: PLC0415

    try:
        from taskyard.web import server  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(
            f"the page needs {error.name} (`pip install 'taskyard[web]'`)"
        ) from error

    connect = _Connector(cli_context, state)

    def serve(bound: socket.socket, secret: bytes) -> None:
        server.serve(
            state,
            BrokerLink(connect, connect.is_away),
            bound,
            address.Secret(secret),
            names=names,
            until_eof=until_eof,
        )

    return serve


class _Connector:
    """Opens a client of the broker on a state directory, or of the directory without one."""

    def __init__(self, cli_context: CliContext, state: Path) -> None:
        self._cli_context, self._state = cli_context, state
        self._watch = BrokerWatch(state)
        self.is_away = self._watch.is_away

    def __call__(self, *, is_live: bool) -> Client:
        check_not_standby(self._state)
        if not is_live:
            self._watch.check_last_state()
            return open_last_state(self._cli_context, self._state)
        self._watch.check_running()
        from taskyard.client.client import Client  # noqa: PLC0415

        return Client(state=self._state, timeout=_REPLY_SECONDS, connect_timeout=_REPLY_SECONDS)
