"""The fingerprint of a ledger, to compare ledgers: with the same fingerprint they behave alike.

It holds the durable state as plain values, without indexes. Tests, the simulator and
`journal check` compare a recovered and a live ledger by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskyard.core.entities import Task
    from taskyard.core.ledger import Ledger


def ledger_fingerprint(ledger: Ledger, *, ended: bool = True) -> dict[str, Any]:
    """Return all durable state that a ledger's behaviour depends on, as plain values. Ended tasks
    may be left out, because the archive may hold them instead."""
    tasks = sorted(task.name for task in ledger.tasks.values() if ended or task.ending is None)
    awaited, attempts = ledger.awaited.tasks, ledger.failed_attempts
    return {
        "record": ledger.record,
        "paused": ledger.paused,
        "counts": list(ledger.counts),
        "campaigns": {one.name: list(one.counts) for one in ledger.campaigns.values()},
        "truncated": {one.name: one.truncated for one in ledger.campaigns.values()},
        "restarted": {one.name: one.restarted for one in ledger.campaigns.values()},
        "services": {
            one.name: (one.paused, one.has_wide_tasks, list(one.counts))
            for one in ledger.services.values()
        },
        "workers": {one.name: (one.facts, list(one.slots_kept)) for one in ledger.workers.values()},
        "tasks": {name: _task_fingerprint(ledger.tasks[name]) for name in tasks},
        "leases": {
            lease.number: (lease.worker.name, lease.at_ns, lease.lease_ns, lease.tasks_left)
            for worker in ledger.workers.values()
            for lease in worker.leases.values()
        },
        "queues": {
            (lane.service.name, lane.name): _names(lane.in_order())
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.ready
        },
        "runs": {
            (lane.service.name, lane.name): (len(lane.extras.next_run), lane.extras.run_left)
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.extras is not None and lane.extras.next_run
        },
        "released": {
            (lane.service.name, lane.name): lane.released
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.released
        },
        "reported": sorted(ledger.reported),
        "replaced": list(ledger.replaced.items()),
        "numbered": [(one.campaign, one.path, one.parts) for one in ledger.numbered.values()],
        "awaited": {
            name: waiting for name, some in sorted(awaited.items()) if (waiting := _names(some))
        },
        "reasons": dict(ledger.reasons),
        "envelopes": dict(ledger.envelopes),
        "outputs": {name: ledger.outputs[name] for name in tasks if name in ledger.outputs},
        "tries": {name: list(attempts[name]) for name in tasks if name in attempts},
    }


def _task_fingerprint(task: Task) -> tuple[Any, ...]:
    ending = None if task.ending is None else (task.ending.record, task.ending.at_ns)
    return (
        task.payload,
        task.terms,
        task.lane.name,
        task.state,
        0 if task.ending else task.waits,
        [] if task.ending else _names(task.dependents_list()),
        ending,
        task.attempt,
        task.failures,
        task.losses_excused,
        task.due_ns,
    )


def _names(tasks: list[Task]) -> list[bytes]:
    return [task.name for task in tasks if task.ending is None]
