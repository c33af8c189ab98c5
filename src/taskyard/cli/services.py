"""`taskyard services`: what kinds of work there are, what waits, who works, and what holds it up.

A service is put together from what the broker says of it and of its lanes.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.connection import connect_read_only
from taskyard.cli.format import format_count, format_slots
from taskyard.cli.lanes import time_since, time_until
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENDED: Final = ("done", "failed", "cancelled")

_COLUMNS: Final = (
    *("SERVICE", "WORKERS", "USED", "SECTION", "LIMIT", "TASKS", "DUE", "RUNNING", "FAILED"),
    *("OLDEST", "NEXT DUE", "WHY"),
)

#: What can be done without where there is little room.
_OPTIONAL_COLUMNS: Final = ("SECTION", "FAILED", "OLDEST", "NEXT DUE")

#: Sections of the settings that a row names; the rest is counted.
_SECTIONS_LISTED_MAX: Final = 2


@click.command(epilog=example("services"))
@broker_options
@click.pass_obj
def services(cli_context: CliContext) -> None:
    """List the services, with what waits and who works.

    Slots are those of all workers that offer a service, shared with whatever else they offer. The
    limit is how many of its lanes may be served at once, by the sections of the settings that
    they are run by. What its lanes wait for `taskyard lanes` tells one by one.
    """
    with connect_read_only(cli_context) as broker:
        stats, workers = broker.status(), broker.workers()
        lanes = _by_service(broker.lanes())
        found = [_service(one, stats, workers, lanes) for one in stats["services"]]
    if cli_context.as_json:
        print_document("services", services=found, paused=stats["paused"])
        return
    if not found and not cli_context.quiet:
        click.echo("there are no services: no task was submitted, no worker has come", err=True)
        return
    now = time.time()
    print_table(
        _COLUMNS, [_row(one, now) for one in found], wrapped=("WHY",), optional=_OPTIONAL_COLUMNS
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
) -> dict[str, Any]:
    """What the broker says of a service, with its workers' slots, its pauses and its lanes."""
    own = [worker for worker in workers if one["name"] in worker["services"]]
    paused = [pause["lane"] for pause in stats["pauses"] if pause["service"] == one["name"]]
    found = one | {
        "slots": sum(worker["slots"] for worker in own),
        "slots_used": sum(worker["slots_used"] for worker in own),
        "paused": None in paused,
        "lanes_paused": [lane for lane in paused if lane is not None],
    }
    found |= _lane_totals(lanes.get(one["name"], []))
    if found["paused"] or stats["paused"]:
        found["why"] = "it is paused" if found["paused"] else "everything is paused"
    return found


def _lane_totals(lanes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the lanes of a service come to."""
    oldest = [one["oldest"] for one in lanes if one["oldest"] is not None]
    due = [one["next_due"] for one in lanes if one["next_due"] is not None]
    limits = {one["clause"]: one["clause_limit"] for one in lanes}
    reasons = Counter(one["reason"] for one in lanes)
    return {
        "lanes": len(lanes),
        "clauses": [{"name": name, "limit": limit} for name, limit in limits.items()],
        "oldest": min(oldest, default=None),
        "next_due": min(due, default=None),
        "reasons": dict(reasons.most_common()),
        "why": _why(lanes, reasons),
    }


def _why(lanes: list[dict[str, Any]], reasons: Counter[str]) -> str:
    """What its lanes wait for; of a single one, its own sentence."""
    if not lanes:
        return "nothing waits or runs"
    if len(lanes) == 1:
        return str(lanes[0]["why"])
    return ", ".join(
        f"{format_count(number, 'lane')}: {why}" for why, number in reasons.most_common()
    )


def _row(one: dict[str, Any], now: float) -> tuple[object, ...]:
    used = format_slots(one)
    counts, clauses = one["counts"], one["clauses"]
    tasks = sum(number for state, number in counts.items() if state not in _ENDED)
    return (
        *(one["name"], one["workers"], used),
        _first_few([clause["name"] or "defaults" for clause in clauses]),
        _first_few([str(clause["limit"] or "none") for clause in clauses]),
        *(tasks, counts["ready"], counts["leased"], counts["failed"]),
        *(time_since(one["oldest"], now), time_until(one["next_due"], now), one["why"]),
    )


def _first_few(words: list[str]) -> str:
    named = ", ".join(words[:_SECTIONS_LISTED_MAX])
    return named if len(words) <= _SECTIONS_LISTED_MAX else f"{named}, …"
