"""`taskyard lanes` and `taskyard services`: waiting tasks and the reasons why they wait.

Owns the order and the size of the tables. The broker explains each lane.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from taskyard.cli.command import Command
from taskyard.cli.connection import connect_read_only
from taskyard.cli.documents import LanesDocument, ServiceRow, ServiceRule, ServicesDocument
from taskyard.cli.format import format_count, format_duration, format_moment, format_slots
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document, print_table
from taskyard.cli.scopes import service_option
from taskyard.wire.views import Service

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: The most lanes in a table on a terminal: one screen.
ROWS_SHOWN: Final = 40

_LANE_COLUMNS: Final = (
    *("SERVICE", "LANE", "TASKS", "DUE", "RUNNING", "LIMIT", "OLDEST", "ATTEMPTS", "NEXT DUE"),
    "WHY",
)

#: Left out on a narrow terminal.
_OPTIONAL_LANE_COLUMNS: Final = ("LIMIT", "ATTEMPTS", "NEXT DUE")

#: The `sort_key` of a lane that has workers. Waiting lanes are below it.
_SERVED: Final = 3

_ENDED: Final = ("done", "failed", "cancelled")

_SERVICE_COLUMNS: Final = (
    *("SERVICE", "WORKERS", "USED", "RULE", "LIMIT", "TASKS", "DUE", "RUNNING", "FAILED"),
    *("OLDEST", "NEXT DUE", "WHY"),
)

#: Left out on a narrow terminal.
_OPTIONAL_SERVICE_COLUMNS: Final = ("RULE", "FAILED", "OLDEST", "NEXT DUE")

#: Rules that a row names. An ellipsis stands for the rest.
_RULES_LISTED_MAX: Final = 2


@click.command(
    cls=Command, epilog=example("lanes", "lanes --service smtp --waiting", "lanes --lane '*.org'")
)
@service_option
@click.option(
    "--lane", "pattern", metavar="GLOB", help="Only lanes that match this pattern, as in '*.org'."
)
@click.option("--waiting", is_flag=True, help="Only lanes with tasks and without a worker.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Maximum number of lanes.")
@click.option("--every-lane", is_flag=True, help="List all lanes, even on a terminal.")
@click.pass_obj
def lanes(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    *,
    service: str | None,
    pattern: str | None,
    waiting: bool,
    limit: int | None,
    every_lane: bool,
) -> None:
    """List the lanes and why they wait.

    Waiting lanes come first, the lane with the oldest task on top. On a terminal the table is
    limited to one screen (see --every-lane).
    """
    with connect_read_only(cli_context) as broker:
        found = [one for one in broker.lanes(service, pattern) if _is_wanted(one, waiting=waiting)]
    found.sort(key=_order)
    if limit is None and not every_lane and not cli_context.as_json and is_on_terminal():
        limit = ROWS_SHOWN
    shown = found if limit is None else found[:limit]
    more = len(found) - len(shown)
    if cli_context.as_json:
        print_document(LanesDocument(lanes=shown, more=more))
        return
    if not found:
        cli_context.info(
            _empty_text(waiting=waiting, chosen=service is not None or pattern is not None)
        )
        return
    rows = [row(one, time.time()) for one in shown]
    more_options = {"wrapped": ("WHY",), "optional": _OPTIONAL_LANE_COLUMNS}
    print_table(_LANE_COLUMNS, rows, **more_options)
    if more:
        cli_context.info(f"… and {more:,} more (use --every-lane)")


def _empty_text(*, waiting: bool, chosen: bool) -> str:
    if waiting:
        return "no lane is waiting"
    return "no matching lane has tasks" if chosen else "no lanes: all tasks have ended"


def is_on_terminal() -> bool:
    return sys.stdout.isatty()


def _is_wanted(one: dict[str, Any], *, waiting: bool) -> bool:
    return not waiting or sort_key(one) < _SERVED


def sort_key(one: dict[str, Any]) -> int:
    """Return the rank of a lane: ready, delayed, blocked, served, without tasks."""
    if one["leased"]:
        return _SERVED
    kinds = ("ready", "delayed", "blocked")
    return next((index for index, kind in enumerate(kinds) if one[kind]), _SERVED + 1)


def _order(one: dict[str, Any]) -> tuple[object, ...]:
    return sort_key(one), one["oldest"] or 0.0, one["service"], one["lane"]


def row(one: dict[str, Any], now: float) -> Sequence[object]:
    """Return the table row of a lane."""
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
    """Format the time until a moment."""
    if at is None:
        return ""
    return format_moment(at, now) if at > now else "now"


@click.command(cls=Command, epilog=example("services"))
@click.pass_obj
def services(cli_context: CliContext) -> None:
    """List the services with their workers and waiting tasks.

    USED counts slots of all workers that offer the service. They share the slots with their other
    services. LIMIT is the number of lanes that may be served at once under the rules of the
    settings. `taskyard lanes` explains single lanes.
    """
    with connect_read_only(cli_context) as broker:
        stats, workers = broker.status(), broker.workers()
        lanes = _by_service(broker.lanes())
        found = [_service(one, stats, workers, lanes) for one in stats["services"]]
    if cli_context.as_json:
        print_document(ServicesDocument(services=found, paused=stats["paused"]))
        return
    if not found and not cli_context.quiet:
        click.echo("no services: no task was submitted and no worker has connected", err=True)
        return
    now = time.time()
    print_table(
        _SERVICE_COLUMNS,
        [_service_row(one, now) for one in found],
        wrapped=("WHY",),
        optional=_OPTIONAL_SERVICE_COLUMNS,
    )


def _by_service(lanes: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in lanes:
        found.setdefault(one["service"], []).append(one)
    return found


def _service(
    one: dict[str, Any],
    stats: dict[str, Any],
    workers: list[dict[str, Any]],
    lanes: dict[str, list[dict[str, Any]]],
) -> ServiceRow:
    """Return a service with its slots, its pauses and the sums over its lanes."""
    own = [worker for worker in workers if one["name"] in worker["services"]]
    paused = [pause["lane"] for pause in stats["pauses"] if pause["service"] == one["name"]]
    row = ServiceRow(
        **{field: one[field] for field in Service.__struct_fields__},
        slots=sum(worker["slots"] for worker in own),
        slots_used=sum(worker["slots_used"] for worker in own),
        paused=None in paused,
        lanes_paused=[lane for lane in paused if lane is not None],
        **_lane_totals(lanes.get(one["name"], [])),
    )
    if row.paused or stats["paused"]:
        row.why = "the service is paused" if row.paused else "all services are paused"
    return row


def _lane_totals(lanes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over the lanes of a service."""
    oldest = [one["oldest"] for one in lanes if one["oldest"] is not None]
    due = [one["next_due"] for one in lanes if one["next_due"] is not None]
    limits = {one["rule"]: one["rule_limit"] for one in lanes}
    reasons = Counter(one["reason"] for one in lanes)
    return {
        "lanes": len(lanes),
        "rules": [ServiceRule(name=name, limit=limit) for name, limit in limits.items()],
        "oldest": min(oldest, default=None),
        "next_due": min(due, default=None),
        "reasons": dict(reasons.most_common()),
        "why": _why(lanes, reasons),
    }


def _why(lanes: list[dict[str, Any]], reasons: Counter[str]) -> str:
    """Summarize the reasons of the lanes. A single lane has its full sentence."""
    if not lanes:
        return "no waiting or running tasks"
    if len(lanes) == 1:
        return str(lanes[0]["why"])
    return ", ".join(
        f"{format_count(number, 'lane')}: {reason.replace('-', ' ')}"
        for reason, number in reasons.most_common()
    )


def _service_row(one: ServiceRow, now: float) -> tuple[object, ...]:
    counts: dict[str, int] = msgspec.to_builtins(one.counts)
    tasks = sum(number for state, number in counts.items() if state not in _ENDED)
    return (
        *(one.name, one.workers, format_slots(one.slots, one.slots_used)),
        _first_few([rule.name or "defaults" for rule in one.rules]),
        _first_few([str(rule.limit or "none") for rule in one.rules]),
        *(tasks, counts["ready"], counts["leased"], counts["failed"]),
        *(time_since(one.oldest, now), time_until(one.next_due, now), one.why),
    )


def _first_few(words: list[str]) -> str:
    named = ", ".join(words[:_RULES_LISTED_MAX])
    return named if len(words) <= _RULES_LISTED_MAX else f"{named}, …"
