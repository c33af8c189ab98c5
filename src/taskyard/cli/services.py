"""`taskyard services`: what kinds of work there are, what waits, and who works."""

from __future__ import annotations

from typing import Any

import click

from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document, print_table
from taskyard.cli.reaching import looking

_STATES = ("blocked", "delayed", "ready", "leased", "done", "failed", "cancelled")


@click.command(epilog=example("services"))
@broker_options
@click.pass_obj
def services(talk: Talk) -> None:
    """List the services, with what waits and who works.

    Slots are those of all workers that offer a service, shared with whatever else they offer.
    """
    with looking(talk) as broker:
        told = broker.status()
        found = [_service(one, told, broker.workers()) for one in told["services"]]
    if talk.as_json:
        print_document("services", services=found, paused=told["paused"])
        return
    if not found and not talk.quiet:
        click.echo("there are no services: no task was submitted, no worker has come", err=True)
        return
    columns = ("SERVICE", "WORKERS", "USED", *map(str.upper, _STATES), "PAUSED")
    print_table(columns, [_row(one, everything=told["paused"]) for one in found])


def _service(
    one: dict[str, Any], told: dict[str, Any], workers: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the broker says of a service, with its workers' slots and its pauses."""
    own = [worker for worker in workers if one["name"] in worker["services"]]
    lanes = [pause["lane"] for pause in told["pauses"] if pause["service"] == one["name"]]
    return one | {
        "slots": sum(worker["slots"] for worker in own),
        "slots_used": sum(worker["slots_used"] for worker in own),
        "paused": None in lanes,
        "lanes_paused": [lane for lane in lanes if lane is not None],
    }


def _row(one: dict[str, Any], *, everything: bool) -> tuple[object, ...]:
    used = f"{one['slots_used']} of {one['slots']}" if one["slots"] else str(one["slots_used"])
    paused = "yes" if one["paused"] or everything else ""
    if not paused and one["lanes_paused"]:
        paused = f"{len(one['lanes_paused'])} of its lanes"
    counts = [one["counts"][state] for state in _STATES]
    return (one["name"], one["workers"], used, *counts, paused)
