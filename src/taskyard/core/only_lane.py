"""The tasks for an idle worker in the usual case: its only service has one lane without limits.

Has what a `Selection` would choose, without building one, and whether there is nothing to choose.
Where one look can't tell, it says so. Changes no durable state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.limits import LEASE_TASKS_MAX
from taskyard.core.reservations import holds_last_attempt

if TYPE_CHECKING:
    from taskyard.core.entities import Service, Task, Worker
    from taskyard.core.ledger import Ledger


def next_of_only_lane(ledger: Ledger, worker: Worker, count: int) -> list[Task] | None:
    """Return the next tasks for an idle worker whose only service has one lane, without limits.

    The usual case, chosen as a `Selection` would. None: it needs one.
    """
    facts, last = worker.facts, worker.lane
    service = ledger.services.get(facts.services[0]) if len(facts.services) == 1 else None
    if service is None or len(service.lane_groups) != 1 or service.has_wide_tasks:
        return None
    (lane_group,) = service.lane_groups
    rotation, active_rule = lane_group.rotation, lane_group.active_rule
    if not (rotation or worker.reservation or service.last_attempts or (last and last.ready)):
        return []
    if len(rotation) != 1 or not active_rule.is_simple or active_rule.options.lane_rate_interval_ns:
        return None
    lane, room = rotation[0], min(count, worker.slots_free, LEASE_TASKS_MAX)
    is_special = (
        *(worker.leases, worker.reservation, facts.reserved_payloads, last and last.name),
        *(lane.name, lane.extras, lane.other_queues, lane.rate, lane.paused, service.paused),
        *(service.last_attempts, ledger.paused, ledger.has_worker_limits),
    )
    if room <= 0 or any(is_special):
        return None
    if not lane.ready:
        lane_group.note_removed(rotation.popleft())  # added again when it gets work
        return []
    return lane.main_queue.peek(room)


def has_nothing(ledger: Ledger, service: Service, worker: Worker) -> bool:
    """Return whether a service has no task for a worker, if that shows at one look.

    An empty lane leaves the rotation, as a `Selection` would take it out.
    """
    last, lane_groups = worker.lane, service.lane_groups
    if len(lane_groups) != 1 or service.last_attempts or worker.reservation:
        return False
    if worker.leases and holds_last_attempt(worker):
        return False
    rotation, active_rule = lane_groups[0].rotation, lane_groups[0].active_rule
    if len(rotation) > 1 or (last and last.ready) or ledger.paused or ledger.rules.workers_max:
        return False
    if rotation and not rotation[0].ready and active_rule.is_simple:
        lane_groups[0].note_removed(rotation.popleft())  # added again when it gets work
    return not rotation
