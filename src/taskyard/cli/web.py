"""`taskyard web`: the page alone, over a running broker or a state directory without one."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.commands import Command
from taskyard.cli.connection import (
    broker_location,
    check_not_standby,
    connect_client,
    has_journal,
    open_last_state,
)
from taskyard.cli.daemon_options import log_options, open_log, page_option, until_eof_option
from taskyard.cli.options import CliContext
from taskyard.cli.output import example
from taskyard.cli.scopes import campaign_option
from taskyard.core.limits import SECOND_NS
from taskyard.errors import NoBroker, NotInstalled, UserError
from taskyard.process.state_files import BrokerWatch
from taskyard.web import address

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.internal import InternalClient

#: Workers and the broker come first on a busy machine.
_NICENESS: Final = 10

#: The reader of `/metrics`, beside the roles of the page.
_METRICS: Final = "metrics"

#: Seconds until a request to the broker is given up, and a banner shows it.
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
    type=click.Choice([*(role.value for role in address.Role), _METRICS]),
    help="Print an address with a token for a colleague, for the page that is running. metrics: "
    "print the token with which Prometheus reads `/metrics`, which stays good.",
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
    inherited: int | None,
    until_eof: bool,
) -> None:
    """Serve a page about a state directory.

    With a broker on it, the page follows what happens, and shows actions to users who may
    act. Without a broker, it shows the last state.

    Prints the address with a token, which is good until the page ends. If the state directory has a
    page, as that of `taskyard up`, prints its address and ends. An operator can retry, cancel,
    pause and change priorities. A viewer can only look.
    """
    state = cli_context.state_directory()
    if share == _METRICS:
        click.echo(address.metrics_token(state))
        return
    if share is not None:
        click.echo(address.invitation(state, address.Role(share)))
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
    cli_context.info(f"the page of process {page.pid} is running, no second page was started")


def _server(
    cli_context: CliContext, state: Path, names: tuple[str, ...], *, until_eof: bool
) -> Callable[[socket.socket, bytes], None]:
    """Return a function that serves the page on a socket with a secret. Raises NotInstalled."""
    with suppress(OSError):
        os.nice(_NICENESS)
    from taskyard.client.internal import BrokerLink  # noqa: PLC0415

    try:
        from taskyard.web import server  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(
            f"the page needs {error.name} (`pip install 'taskyard[web]'`)"
        ) from error

    connect = BrokerConnector(cli_context, state)

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


#: Seconds without a broker until its last state is read instead. A restart is quicker, and reading
#: a large state would keep the new broker from its lock.
_RESTART_SECONDS: Final = 15.0


@click.command(
    cls=Command,
    epilog=example(
        "top", "top --campaign thumbs --failed", "top --broker tcp://head:6170 --key viewer.key"
    ),
)
@click.argument("part", required=False, metavar="[PART-OF-NAME]")
@campaign_option
@click.option("--failed", is_flag=True, help="Only failed tasks.")
@click.pass_obj
def top(cli_context: CliContext, *, part: str | None, campaign: str | None, failed: bool) -> None:
    """Show counters, lanes, workers, tasks and output in the terminal.

    The last line lists the keys. `/` selects tasks by the options of `taskyard list`. Without a
    broker, shows the last state of the directory.
    """
    try:
        from taskyard.client.internal import BrokerLink  # noqa: PLC0415  # slow to import
        from taskyard.client.task_filters import Filter  # noqa: PLC0415
        from taskyard.tui.app import Top  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(f"top: needs {error.name} (`pip install 'taskyard[tui]'`)") from error
    wanted = Filter(campaign=campaign, match=part, only=("failed",) if failed else ())
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("top: not a terminal (use `taskyard status` or `taskyard list`)")
    connector = top_connector(cli_context)
    connector.check()
    link = BrokerLink(connector)
    try:
        Top(link, connector.name, wanted).run()
    finally:
        link.close()


def top_connector(cli_context: CliContext) -> BrokerConnector:
    """Return the connector for the broker that the options or the settings name."""
    location = broker_location(cli_context)
    cli_context.broker_timeout = int(_REPLY_SECONDS * SECOND_NS)
    return BrokerConnector(cli_context, location.state, location.broker, _RESTART_SECONDS)


class BrokerConnector:
    """Opens a client of the broker, or of its last state. See `BrokerLink`."""

    def __init__(
        self,
        cli_context: CliContext,
        state: Path,
        remote: str | None = None,
        restart_seconds: float = 0.0,
    ) -> None:
        """Connect to the broker on a state directory, or to one at an endpoint."""
        self._cli_context, self._state, self._remote = cli_context, state, remote
        self.name = remote or str(state)
        self._watch = BrokerWatch(state, restart_seconds)
        self.is_away = self._watch.is_away

    def check(self) -> None:
        """Raise `NoBroker` before the screen is cleared: there is no such state, or a standby."""
        if self._remote is not None:
            return
        if not has_journal(self._state):
            raise NoBroker(
                f"no broker is running: {self._state} has no journal (start one with "
                "`taskyard up`, or give another --state)"
            )
        check_not_standby(self._state)

    def __call__(self, *, is_live: bool) -> InternalClient:
        if self._remote is not None:
            if not is_live:
                raise NoBroker(f"no broker answers at {self._remote}")
            return connect_client(self._cli_context, report=_ignore_report)
        check_not_standby(self._state)
        if not is_live:
            self._watch.check_last_state()
            return open_last_state(self._cli_context, self._state)
        self._watch.check_running()
        from taskyard.client.internal import InternalClient  # noqa: PLC0415  # slow to import

        return InternalClient(
            state=self._state,
            timeout=_REPLY_SECONDS,
            connect_timeout=_REPLY_SECONDS,
            report=_ignore_report,
        )


def _ignore_report(_line: str) -> None:
    """Ignore that a broker does not answer: the page and `top` have a banner."""
