"""`taskyard lanes`: what waits in which lane, and why.

Owns the order and the size of the table. What a lane waits for is the broker's to say.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.choosing import service_option
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document, print_table
from taskyard.cli.reaching import looking
from taskyard.cli.words import span

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Lanes that a table has on a terminal unless asked otherwise: a screen of them.
ROWS_SHOWN: Final = 40

_COLUMNS: Final = (
    *("SERVICE", "LANE", "TASKS", "DUE", "RUNNING", "LIMIT", "OLDEST", "ATTEMPTS", "NEXT DUE"),
    "WHY",
)

#: What can be done without where there is little room.
_SPARE: Final = ("LIMIT", "ATTEMPTS", "NEXT DUE")

#: By `rank`: lanes that nobody serves, though they have tasks, come before these.
_SERVED: Final = 3


@click.command(epilog=example("lanes", "lanes --service smtp --waiting", "lanes --lane '*.org'"))
@service_option
@click.option("--lane", "pattern", metavar="GLOB", help="Only lanes whose names fit: '*.org'.")
@click.option("--waiting", is_flag=True, help="Only those that have tasks and that nobody serves.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="At most so many.")
@click.option("--all", "everything", is_flag=True, help="All of them, also on a terminal.")
@broker_options
@click.pass_obj
def lanes(  # noqa: PLR0913  # one for each option
    talk: Talk,
    *,
    service: str | None,
    pattern: str | None,
    waiting: bool,
    limit: int | None,
    everything: bool,
) -> None:
    """List the lanes, with what waits in them and why.

    Those that wait come first, the one with the oldest task on top. On a terminal the table ends
    after a screen; --all shows the rest.
    """
    with looking(talk) as broker:
        found = [one for one in broker.lanes(service, pattern) if _fits(one, waiting=waiting)]
    found.sort(key=_order)
    if limit is None and not everything and not talk.as_json and is_on_terminal():
        limit = ROWS_SHOWN
    shown = found if limit is None else found[:limit]
    more = len(found) - len(shown)
    if talk.as_json:
        print_document("lanes", lanes=shown, more=more)
        return
    if not found:
        talk.say(_nothing(waiting=waiting, chosen=service is not None or pattern is not None))
        return
    rows = [row(one, time.time()) for one in shown]
    print_table(_COLUMNS, rows, prose=("WHY",), spare=_SPARE)
    if more:
        talk.say(f"… and {more:,} more; --all shows them")


def _nothing(*, waiting: bool, chosen: bool) -> str:
    if waiting:
        return "no lane waits"
    return "no such lane has tasks" if chosen else "there are no lanes: all tasks have ended"


def is_on_terminal() -> bool:
    return sys.stdout.isatty()


def _fits(one: dict[str, Any], *, waiting: bool) -> bool:
    return not waiting or rank(one) < _SERVED


def rank(one: dict[str, Any]) -> int:
    """What is due and not served, what waits for a time, what waits for tasks, what is served,
    and what has nothing to do."""
    if one["leased"]:
        return _SERVED
    kinds = ("ready", "delayed", "blocked")
    return next((index for index, kind in enumerate(kinds) if one[kind]), _SERVED + 1)


def _order(one: dict[str, Any]) -> tuple[object, ...]:
    return rank(one), one["oldest"] or 0.0, one["service"], one["lane"]


def row(one: dict[str, Any], now: float) -> Sequence[object]:
    """A lane, for people."""
    return (
        *(one["service"], one["lane"], one["tasks"], one["ready"], one["leased"]),
        one["limit"] or "none",
        ago(one["oldest"], now),
        one["attempts"],
        ahead(one["next_due"], now),
        one["why"],
    )


def ago(at: float | None, now: float) -> str:
    return "" if at is None else span(max(0.0, now - at))


def ahead(at: float | None, now: float) -> str:
    """How soon something is."""
    if at is None:
        return ""
    return f"in {span(at - now)}" if at > now else "now"
