"""Snapshots of formats 1 and 2, which are only read. `columns` has the current format.

`restore` builds a ledger and its indexes from the one struct that these formats consist of.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from msgspec import Struct, field

from taskyard.core.entities import Lease, Task, Worker
from taskyard.core.lane_queues import add_suspect, lane_counts
from taskyard.core.ledger import Ledger
from taskyard.core.model import Ending, Replaced, Terms, restored_extras
from taskyard.core.runs import Attempt
from taskyard.core.snapshots.columns import LeaseSnapshot, ServiceSnapshot, WorkerSnapshot
from taskyard.core.states import DELAYED, TaskState

if TYPE_CHECKING:
    from taskyard.core.entities import Lane


class QueueSnapshot(Struct, array_like=True, gc=False):
    """The ready tasks of one lane and priority, by their places in the task columns."""

    priority: int
    items: list[int]
    front: list[int]


class LaneSnapshot(Struct, array_like=True, gc=False):
    service: int
    name: bytes
    paused: bool
    queues: list[QueueSnapshot]
    suspects: list[int]
    #: Deferred tasks, and how many tasks are left in this run, at most.
    next_run: list[int] = field(default_factory=list)
    run_left: int = 0
    #: Tasks released from a held lane.
    released: int = 0


class LedgerSnapshot(Struct, array_like=True, gc=False):
    """All durable state. Tasks refer to terms and lanes, and others to tasks, by place."""

    record: int
    paused: bool
    counts: list[int]
    campaigns: list[tuple[bytes, list[int]]]
    services: list[ServiceSnapshot]
    lanes: list[LaneSnapshot]
    workers: list[WorkerSnapshot]
    terms: list[Terms]
    # The columns of tasks.
    names: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    terms_at: list[int] = field(default_factory=list)
    lane_at: list[int] = field(default_factory=list)
    states: list[TaskState] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    losses_excused: list[int] = field(default_factory=list)
    due_ns: list[int] = field(default_factory=list)
    # Fields of some tasks only.
    endings: dict[int, tuple[int, int]] = field(default_factory=dict)
    dependents: dict[int, list[int]] = field(default_factory=dict)
    dependents_of_unknown: dict[bytes, list[int]] = field(default_factory=dict)
    leases: list[LeaseSnapshot] = field(default_factory=list)
    reasons: dict[bytes, bytes] = field(default_factory=dict)
    envelopes: dict[bytes, bytes] = field(default_factory=dict)
    outputs: dict[bytes, int] = field(default_factory=dict)
    #: Index into `payloads` for each task. Empty: each has its own. Tasks may share large ones.
    payload_at: list[int] = field(default_factory=list)
    #: Tasks that were reported as late.
    reported: list[bytes] = field(default_factory=list)
    #: Campaigns with truncated results, and how many.
    truncated: dict[bytes, int] = field(default_factory=dict)
    #: Processes that lost their name, by worker and incarnation, oldest first.
    replaced: list[tuple[bytes, int, Replaced]] = field(default_factory=list)
    failed_attempts: dict[bytes, list[Attempt]] = field(default_factory=dict)


def restore(snapshot: LedgerSnapshot) -> Ledger:
    """Return a ledger in the state of the snapshot."""
    ledger = Ledger()
    ledger.record, ledger.paused, ledger.counts = snapshot.record, snapshot.paused, snapshot.counts
    for name, counts in snapshot.campaigns:
        campaign = ledger.campaign(name)
        campaign.counts, campaign.truncated = counts, snapshot.truncated.get(name, 0)
    ledger.bare.update(dict.fromkeys(name for name, _ in snapshot.campaigns if name))
    for one in snapshot.services:
        service = ledger.service(one.name)
        service.paused, service.has_wide_tasks, service.counts = (
            one.paused,
            one.has_wide_tasks,
            one.counts,
        )
        ledger.has_wide_tasks = ledger.has_wide_tasks or one.has_wide_tasks
    tasks = _restore_tasks(ledger, snapshot)
    _restore_graph(ledger, snapshot, tasks)
    _restore_workers(ledger, snapshot, tasks)
    ledger.schedule_due([task for task in tasks if task.state is DELAYED])
    if any(terms.expires_ns or terms.expires_hard_ns for terms in snapshot.terms):
        ledger.schedule_expiry([task for task in tasks if task.ending is None])
    ledger.reported = dict.fromkeys(snapshot.reported)
    _restore_lateness(ledger, snapshot, tasks)
    ledger.reasons, ledger.envelopes = snapshot.reasons, snapshot.envelopes
    ledger.outputs, ledger.failed_attempts = snapshot.outputs, snapshot.failed_attempts
    ledger.replaced = {(name, number): one for name, number, one in snapshot.replaced}
    return ledger


def _restore_tasks(ledger: Ledger, snapshot: LedgerSnapshot) -> list[Task]:
    lanes = [
        ledger.services[snapshot.services[one.service].name].lane(one.name)
        for one in snapshot.lanes
    ]
    columns = zip(
        snapshot.names,
        [snapshot.payloads[place] for place in snapshot.payload_at] or snapshot.payloads,
        [snapshot.terms[place] for place in snapshot.terms_at],
        [lanes[place] for place in snapshot.lane_at],
        snapshot.states,
        snapshot.waits,
        repeat(None),  # dependents
        repeat(None),  # lease or ending
        snapshot.attempts,
        map(restored_extras, snapshot.failures, snapshot.losses_excused, snapshot.due_ns),
    )
    tasks = [Task(*row) for row in columns]
    ledger.tasks = dict(zip(snapshot.names, tasks, strict=True))
    for place, (record, at_ns) in snapshot.endings.items():
        tasks[place].lease_or_ending = Ending(record, at_ns)
    for task in tasks:
        task.lane.tasks += task.ending is None
    for lane, one in zip(lanes, snapshot.lanes, strict=True):
        _restore_lane(lane, one, tasks)
    return tasks


def _restore_lane(lane: Lane, one: LaneSnapshot, tasks: list[Task]) -> None:
    lane.paused = lane.paused or one.paused
    for queue_snapshot in one.queues:
        queue = lane.queue(queue_snapshot.priority)
        queue.items += [tasks[place] for place in queue_snapshot.items]
        queue.front += [tasks[place] for place in queue_snapshot.front]
        lane.ready += len(queue_snapshot.items) + len(queue_snapshot.front)
    for place in one.suspects:
        add_suspect(lane, tasks[place], front=False)
    if one.next_run or one.released:
        extras = lane.ensure_extras()
        extras.next_run = {id(tasks[place]): tasks[place] for place in one.next_run}
        extras.run_left, extras.released = one.run_left, one.released
        lane.ready += len(one.next_run)
    lane.ready += len(one.suspects)
    if lane.ready:
        lane.lane_group.add_to_rotation(lane)
    lane.service.drop_if_empty(lane)


def _restore_lateness(ledger: Ledger, snapshot: LedgerSnapshot, tasks: list[Task]) -> None:
    """Schedule the late reports that were not made yet."""
    if not any(terms.report_ns for terms in snapshot.terms):
        return
    together: dict[int, list[bytes]] = {}
    for task in tasks:
        if task.terms.report_ns and task.ending is None and task.name not in ledger.reported:
            together.setdefault(task.terms.report_ns, []).append(task.name)
    for late_ns, names in together.items():
        ledger.due_heap.push_late(late_ns, names)


def _restore_graph(ledger: Ledger, snapshot: LedgerSnapshot, tasks: list[Task]) -> None:
    for place, dependents in snapshot.dependents.items():
        waiting = [tasks[one] for one in dependents]
        tasks[place].dependents = waiting[0] if len(waiting) == 1 else waiting or None
    for name, places in snapshot.dependents_of_unknown.items():
        ledger.awaited.restore(name, [tasks[place] for place in places])


def _restore_workers(ledger: Ledger, snapshot: LedgerSnapshot, tasks: list[Task]) -> None:
    workers = [Worker(one.name, one.facts, slots_kept=one.slots_kept) for one in snapshot.workers]
    for worker in workers:
        ledger.add_worker(worker)
    for one in snapshot.leases:
        out = [tasks[place] for place in one.tasks]
        given = (workers[one.worker], one.number, one.at_ns, one.lease_ns)
        names, attempts = [task.name for task in out], [task.attempt for task in out]
        lease = Lease(*given, len(out), out, names, attempts, lane_counts(out))
        for task in out:
            task.lease_or_ending = lease
        ledger.add_lease(lease, out)
