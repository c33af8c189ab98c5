"""`taskyard top`: the broker's state in a terminal, drawn every second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.command import Command
from taskyard.cli.connection import (
    broker_location,
    check_not_standby,
    connect_client,
    has_journal,
    open_last_state,
)
from taskyard.cli.options import CliContext
from taskyard.cli.output import example
from taskyard.cli.scopes import scope_options
from taskyard.cli.task_list import list_tasks
from taskyard.core.limits import SECOND_NS
from taskyard.errors import NoBroker, NotInstalled, UserError
from taskyard.process.locks import BrokerWatch

if TYPE_CHECKING:
    from taskyard.client.client import Client
    from taskyard.client.task_filters import Filter

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

    Options select tasks, as in `taskyard list`. Keys retry, cancel, pause and change priorities
    after a confirmation: ? lists them. Without a broker, shows the last state of the directory.
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

    def __call__(self, *, is_live: bool) -> Client:
        if not is_live:
            return self._last_state()
        if not self._is_remote:
            self._watch.check_running()
        return connect_client(self._cli_context, report=lambda _line: None)  # there is a banner

    def _last_state(self) -> Client:
        if self._is_remote:
            raise NoBroker(f"no broker answers at {self.name}")
        check_not_standby(self._state)
        self._watch.check_last_state()
        return open_last_state(self._cli_context, self._state)
