"""`taskyard lanes`: what waits in which lane, and why.

Owns the order and the size of the table. What a lane waits for is the broker's to say.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.connection import connect_read_only
from taskyard.cli.format import format_duration
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document, print_table
from taskyard.cli.scopes import service_option

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Lanes that a table has on a terminal unless asked otherwise: a screen of them.
ROWS_SHOWN: Final = 40

_COLUMNS: Final = (
    *("SERVICE", "LANE", "TASKS", "DUE", "RUNNING", "LIMIT", "OLDEST", "ATTEMPTS", "NEXT DUE"),
    "WHY",
)

#: What can be done without where there is little room.
_OPTIONAL_COLUMNS: Final = ("LIMIT", "ATTEMPTS", "NEXT DUE")

#: By `sort_key`: lanes that nobody serves, though they have tasks, come before these.
_SERVED: Final = 3


@click.command(epilog=example("lanes", "lanes --service smtp --waiting", "lanes --lane '*.org'"))
@service_option
@click.option("--lane", "pattern", metavar="GLOB", help="Only lanes whose names fit: '*.org'.")
@click.option("--waiting", is_flag=True, help="Only those that have tasks and that nobody serves.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="At most so many.")
@click.option("--all", "all_tasks", is_flag=True, help="All of them, also on a terminal.")
@broker_options
@click.pass_obj
def lanes(  # noqa: PLR0913  # one for each option
    cli_context: CliContext,
    *,
    service: str | None,
    pattern: str | None,
    waiting: bool,
    limit: int | None,
    all_tasks: bool,
) -> None:
    """List the lanes, with what waits in them and why.

    Those that wait come first, the one with the oldest task on top. On a terminal the table ends
    after a screen; --all shows the rest.
    """
    with connect_read_only(cli_context) as broker:
        found = [one for one in broker.lanes(service, pattern) if _is_wanted(one, waiting=waiting)]
    found.sort(key=_order)
    if limit is None and not all_tasks and not cli_context.as_json and is_on_terminal():
        limit = ROWS_SHOWN
    shown = found if limit is None else found[:limit]
    more = len(found) - len(shown)
    if cli_context.as_json:
        print_document("lanes", lanes=shown, more=more)
        return
    if not found:
        cli_context.info(
            _empty_text(waiting=waiting, chosen=service is not None or pattern is not None)
        )
        return
    rows = [row(one, time.time()) for one in shown]
    print_table(_COLUMNS, rows, wrapped=("WHY",), optional=_OPTIONAL_COLUMNS)
    if more:
        cli_context.info(f"… and {more:,} more; --all shows them")


def _empty_text(*, waiting: bool, chosen: bool) -> str:
    if waiting:
        return "no lane waits"
    return "no such lane has tasks" if chosen else "there are no lanes: all tasks have ended"


def is_on_terminal() -> bool:
    return sys.stdout.isatty()


def _is_wanted(one: dict[str, Any], *, waiting: bool) -> bool:
    return not waiting or sort_key(one) < _SERVED


def sort_key(one: dict[str, Any]) -> int:
    """What is due and not served, what waits for a time, what waits for tasks, what is served,
    and what has nothing to do."""
    if one["leased"]:
        return _SERVED
    kinds = ("ready", "delayed", "blocked")
    return next((index for index, kind in enumerate(kinds) if one[kind]), _SERVED + 1)


def _order(one: dict[str, Any]) -> tuple[object, ...]:
    return sort_key(one), one["oldest"] or 0.0, one["service"], one["lane"]


def row(one: dict[str, Any], now: float) -> Sequence[object]:
    """A lane, for people."""
    return (
        *(one["service"], one["lane"], one["tasks"], one["ready"], one["leased"]),
        one["limit"] or "none",
        time_since(one["oldest"], now),
        one["attempts"],
        time_until(one["next_due"], now),
        one["why"],
    )


def time_since(at: float | None, now: float) -> str:
    return "" if at is None else format_duration(max(0.0, now - at))


def time_until(at: float | None, now: float) -> str:
    """How soon something is."""
    if at is None:
        return ""
    return f"in {format_duration(at - now)}" if at > now else "now"
