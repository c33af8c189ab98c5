"""`taskyard web`: the page alone, over a running broker or a state directory without one."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
from taskyard.cli.scopes import scope_options
from taskyard.cli.task_list import list_tasks
from taskyard.core.limits import SECOND_NS
from taskyard.errors import NoBroker, NotInstalled, UserError
from taskyard.process.locks import BrokerWatch
from taskyard.web import address

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.internal import InternalClient
    from taskyard.client.task_filters import Filter

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

    def __call__(self, *, is_live: bool) -> InternalClient:
        check_not_standby(self._state)
        if not is_live:
            self._watch.check_last_state()
            return open_last_state(self._cli_context, self._state)
        self._watch.check_running()
        from taskyard.client.internal import InternalClient  # noqa: PLC0415

        return InternalClient(
            state=self._state, timeout=_REPLY_SECONDS, connect_timeout=_REPLY_SECONDS
        )


#: Nanoseconds until a request to the broker is given up, and the banner says so.
_REPLY_NS: Final = 5 * SECOND_NS

#: Seconds without a broker until its last state is read instead. A restart is quicker, and reading
#: a large state would keep the new broker from its lock.
_RESTART_SECONDS: Final = 15.0


@click.command(
    cls=Command,
    like=list_tasks,
    most=("campaign", "failed"),
    epilog=example(
        "top", "top --campaign thumbs --failed", "top --broker tcp://head:6170 --key viewer.key"
    ),
)
@click.argument("part", required=False, metavar="[PART-OF-NAME]")
@scope_options
@click.pass_obj
def top(cli_context: CliContext, /, part: str | None, **given: Any) -> None:  # noqa: ANN401  # scope options
    """Show counters, lanes, workers, tasks and output in the terminal.

    Options select tasks, as in `taskyard list`. The last line lists the keys. Without a broker,
    shows the last state of the directory.
    """
    try:
        from taskyard.client.broker_link import BrokerLink  # noqa: PLC0415  # slow to import
        from taskyard.tui.app import Top  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(f"top: needs {error.name} (`pip install 'taskyard[tui]'`)") from error
    wanted = _filter(part, given)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("top: not a terminal (use `taskyard status` or `taskyard list`)")
    connector = BrokerConnector(cli_context)
    connector.check()
    link = BrokerLink(connector)
    try:
        Top(link, connector.name, wanted).run()
    finally:
        link.close()


def _filter(part: str | None, given: dict[str, Any]) -> Filter:
    """Return the filter of the options. A word is a part of a name, as in the filter box."""
    from taskyard.client.task_filters import Filter  # noqa: PLC0415  # slow to import

    if part is not None and given["match"] not in (None, part):
        raise UserError(f"--match: takes one value, got {given['match']!r} and {part!r}")
    only = (*given["only"], *(["failed"] if given["failed"] else []))
    names = {name: given[name] for name in ("campaign", "service", "lane")}
    return Filter(**names, match=part or given["match"], only=tuple(dict.fromkeys(only)))


class BrokerConnector:
    """Opens a client of the broker, or of its last state. See `BrokerLink`."""

    def __init__(self, cli_context: CliContext) -> None:
        location = broker_location(cli_context)
        self._cli_context, self._state = cli_context, location.state
        self._is_remote = location.broker is not None
        self.name = location.broker or str(location.state)
        self._watch = BrokerWatch(location.state, _RESTART_SECONDS)
        cli_context.broker_timeout = _REPLY_NS

    def check(self) -> None:
        """Raise `NoBroker` before the screen is cleared: there is no such state, or a standby."""
        if self._is_remote:
            return
        if not has_journal(self._state):
            raise NoBroker(
                f"no broker is running: {self._state} has no journal (start one with "
                "`taskyard up`, or give another --state)"
            )
        check_not_standby(self._state)

    def __call__(self, *, is_live: bool) -> InternalClient:
        if not is_live:
            return self._last_state()
        if not self._is_remote:
            self._watch.check_running()
        return connect_client(self._cli_context, report=lambda _line: None)  # there is a banner

    def _last_state(self) -> InternalClient:
        if self._is_remote:
            raise NoBroker(f"no broker answers at {self.name}")
        check_not_standby(self._state)
        self._watch.check_last_state()
        return open_last_state(self._cli_context, self._state)
