"""`taskyard services`: what kinds of work there are, what waits, who works, and what holds it up.

A service is put together from what the broker says of it and of its lanes.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.lanes import ago, ahead
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document, print_table
from taskyard.cli.reaching import looking
from taskyard.cli.words import count, slots_in_use

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENDED: Final = ("done", "failed", "cancelled")

_COLUMNS: Final = (
    *("SERVICE", "WORKERS", "USED", "SECTION", "LIMIT", "TASKS", "DUE", "RUNNING", "FAILED"),
    *("OLDEST", "NEXT DUE", "WHY"),
)

#: What can be done without where there is little room.
_SPARE: Final = ("SECTION", "FAILED", "OLDEST", "NEXT DUE")

#: Sections of the settings that a row names; the rest is counted.
_SECTIONS_NAMED: Final = 2


@click.command(epilog=example("services"))
@broker_options
@click.pass_obj
def services(talk: Talk) -> None:
    """List the services, with what waits and who works.

    Slots are those of all workers that offer a service, shared with whatever else they offer. The
    limit is how many of its lanes may be served at once, by the sections of the settings that
    they are run by. What its lanes wait for `taskyard lanes` tells one by one.
    """
    with looking(talk) as broker:
        told, workers = broker.status(), broker.workers()
        lanes = _by_service(broker.lanes())
        found = [_service(one, told, workers, lanes) for one in told["services"]]
    if talk.as_json:
        print_document("services", services=found, paused=told["paused"])
        return
    if not found and not talk.quiet:
        click.echo("there are no services: no task was submitted, no worker has come", err=True)
        return
    now = time.time()
    print_table(_COLUMNS, [_row(one, now) for one in found], prose=("WHY",), spare=_SPARE)


def _by_service(lanes: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in lanes:
        found.setdefault(one["service"], []).append(one)
    return found


def _service(
    one: dict[str, Any],
    told: dict[str, Any],
    workers: list[dict[str, Any]],
    lanes: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """What the broker says of a service, with its workers' slots, its pauses and its lanes."""
    own = [worker for worker in workers if one["name"] in worker["services"]]
    paused = [pause["lane"] for pause in told["pauses"] if pause["service"] == one["name"]]
    found = one | {
        "slots": sum(worker["slots"] for worker in own),
        "slots_used": sum(worker["slots_used"] for worker in own),
        "paused": None in paused,
        "lanes_paused": [lane for lane in paused if lane is not None],
    }
    found |= _of_lanes(lanes.get(one["name"], []))
    if found["paused"] or told["paused"]:
        found["why"] = "it is paused" if found["paused"] else "everything is paused"
    return found


def _of_lanes(lanes: list[dict[str, Any]]) -> dict[str, Any]:
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
    return ", ".join(f"{count(number, 'lane')}: {why}" for why, number in reasons.most_common())


def _row(one: dict[str, Any], now: float) -> tuple[object, ...]:
    used = slots_in_use(one)
    counts, clauses = one["counts"], one["clauses"]
    tasks = sum(number for state, number in counts.items() if state not in _ENDED)
    return (
        *(one["name"], one["workers"], used),
        _some([clause["name"] or "defaults" for clause in clauses]),
        _some([str(clause["limit"] or "none") for clause in clauses]),
        *(tasks, counts["ready"], counts["leased"], counts["failed"]),
        *(ago(one["oldest"], now), ahead(one["next_due"], now), one["why"]),
    )


def _some(words: list[str]) -> str:
    named = ", ".join(words[:_SECTIONS_NAMED])
    return named if len(words) <= _SECTIONS_NAMED else f"{named}, …"
