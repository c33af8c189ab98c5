"""Invariants can fail: a contradiction of each kind is planted and must be found."""

from collections.abc import Callable

import pytest

from simulator import invariants
from simulator.invariants import InvariantViolated
from taskyard.core import lane_queues
from taskyard.core.context import TimerKind
from taskyard.core.entities import (
    Lane,
    LaneGroup,
    Lease,
    Reservation,
    Service,
    Task,
    Worker,
)
from taskyard.core.events import Outcome, RulesSet, UnknownPolicy, WorkerLost
from taskyard.core.ledger import Ledger
from taskyard.core.limits import EXCLUSIVE, SECOND_NS
from taskyard.core.model import Ending
from taskyard.core.queues import Queue
from taskyard.core.rules import ActiveRule
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState, WorkerState
from taskyard.core.timer_heap import TimerHeap
from tests.core.kit import Yard, a_lane

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


def full_yard() -> Yard:
    """Return a yard with a task in every state, a last attempt, an awaited name, and a parked
    worker that holds two tasks and is reserved for the last attempt."""
    yard = Yard()
    yard.handle(RulesSet(0, workers_max=100))  # so that pairs are counted
    yard.submit(b"suspect", lanes=[b"s"])
    yard.lose(b"u", b"suspect", times=3)
    yard.join(b"u")
    yard.take(b"u")
    yard.submit(b"done", b"failed")
    yard.join(b"w", slots_total=4, lease_timeout_ns=60 * SECOND_NS)
    yard.take(b"w", 2)
    yard.finish(b"w", b"done")
    yard.report(b"w", b"failed", Outcome.FAILED)
    yard.submit(b"leased", b"held", b"ready", b"more", b"cancelled", lanes=[b"", b"x"] + [b"x"] * 3)
    yard.take(b"w", 2)
    yard.cancel(b"cancelled")
    yard.submit(b"blocked", after=[[b"leased", b"awaited"]], unknown=UnknownPolicy.WAIT)
    yard.submit(b"delayed", due_ns=SECOND_NS)
    yard.ask(b"w", parks=True)
    yard.join(b"v")
    yard.handle(WorkerLost(0, b"u"))
    assert yard.scheduler.ledger.reservations[0].worker.name == b"w"
    return yard


@pytest.fixture
def yard() -> Yard:
    yard = full_yard()
    states = [READY, DONE, FAILED, LEASED, LEASED, READY, READY, CANCELLED, BLOCKED, DELAYED]
    assert [task.state for task in yard.scheduler.ledger.tasks.values()] == states
    return yard


def test_yard_without_contradictions_passes(yard: Yard) -> None:
    invariants.check(yard.scheduler)


Plant = Callable[[Yard], None]


def plant_task(name: bytes, field: str, value: object) -> Plant:
    def plant(yard: Yard) -> None:
        setattr(yard[name], field, value)

    return plant


def plant_extras(name: bytes, **fields: int) -> Plant:
    return lambda yard: yard[name].change_extras(**fields)


def lane_of(yard: Yard, name: bytes) -> Lane:
    return yard[name].lane


def worker_of(yard: Yard) -> Worker:
    return yard.scheduler.ledger.workers[b"w"]


def lease_of(yard: Yard) -> Lease:
    lease = yard[b"held"].lease
    assert lease is not None
    return lease


def service_of(yard: Yard) -> Service:
    return yard.scheduler.ledger.services[b"default"]


def ledger_of(yard: Yard) -> Ledger:
    return yard.scheduler.ledger


def active_rule_of(yard: Yard) -> ActiveRule:
    return service_of(yard).lane_groups[0].active_rule


def queue_of(yard: Yard, name: bytes = b"ready") -> Queue[Task]:
    return lane_of(yard, name).queue(0)


def bump(owner: object, field: str, by: int = 1) -> None:
    setattr(owner, field, getattr(owner, field) + by)


def count_up(counts: list[int], state: TaskState) -> None:
    counts[state] += 1


def queue_twice(yard: Yard) -> None:
    queue_of(yard).items.append(yard[b"ready"])
    lane_of(yard, b"ready").ready += 1


def queue_foreign(yard: Yard) -> None:
    """Queue a ready task in another lane as well."""
    queue = service_of(yard).lane(b"").queue(0)
    queue.items.append(yard[b"ready"])


def queue_nowhere(yard: Yard) -> None:
    queue_of(yard).discard(yard[b"ready"])


def queue_under_another_priority(yard: Yard) -> None:
    queue_of(yard).discard(yard[b"ready"])
    lane_of(yard, b"ready").queue(7).items.append(yard[b"ready"])


def unset_suspect(yard: Yard) -> None:
    lane = lane_of(yard, b"suspect")
    lane_queues.remove(lane, yard[b"suspect"])
    lane.ready += 1
    lane.queue(0).items.append(yard[b"suspect"])


def suspect_without_loss(yard: Yard) -> None:
    lane, task = lane_of(yard, b"ready"), yard[b"ready"]
    lane.queue(0).discard(task)
    lane_queues.add_suspect(lane, task, front=False)


def suspect_of_another_isolation(yard: Yard) -> None:
    lane = lane_of(yard, b"suspect")
    groups = lane.ensure_extras().suspects
    assert groups is not None
    groups[1] = groups.pop(EXCLUSIVE)


def forget_last_attempts(yard: Yard) -> None:
    service_of(yard).last_attempts.clear()


def reservation_that_its_worker_does_not_have(yard: Yard) -> None:
    worker_of(yard).reservation = None


def reserve_twice(yard: Yard) -> None:
    other = Reservation(yard.scheduler.ledger.workers[b"v"], yard[b"suspect"], exclusive=True)
    yard.scheduler.ledger.reserve(other)


def reserve_for_a_leased_task(yard: Yard) -> None:
    yard.scheduler.ledger.reservations[0].task = yard[b"held"]


def idle_beside_work(yard: Yard) -> None:
    yard.submit(b"idle")
    yard.scheduler.ledger.unreserve(worker_of(yard))
    yard.scheduler.ledger.dirty.clear()


def slots_bound_too_high(yard: Yard) -> None:
    lane_of(yard, b"ready").slots_min = 2


def out_of_rotation(yard: Yard) -> None:
    lane = lane_of(yard, b"suspect")
    lane.in_rotation = False
    if lane in lane.lane_group.rotation:
        lane.lane_group.rotation.remove(lane)


def rotating_and_not_in_rotation(yard: Yard) -> None:
    lane = lane_of(yard, b"suspect")
    lane.in_rotation = True
    while lane in lane.lane_group.rotation:
        lane.lane_group.rotation.remove(lane)


def twice_in_rotation(yard: Yard) -> None:
    lane = lane_of(yard, b"suspect")
    lane.in_rotation = True
    lane.lane_group.rotation.extend([lane, lane])


def in_rotation_unmarked(yard: Yard) -> None:
    lane = Lane(b"odd", service_of(yard), service_of(yard).lane_groups[0])
    lane.lane_group.rotation.append(lane)


def rotate_among_others(yard: Yard) -> None:
    """Put a lane into the rotation of a group that it does not belong to."""
    lane = lane_of(yard, b"ready")
    lane.lane_group = LaneGroup(lane.service, lane.lane_group.active_rule)


def deferred(yard: Yard, name: bytes, run_left: int) -> None:
    """Defer a ready task to the next run of its lane."""
    lane, task = lane_of(yard, name), yard[name]
    lane.main_queue.discard(task)
    task.attempt = 1
    task.change_extras(losses_excused=1)
    lane.ensure_extras().next_run = {id(task): task}
    lane.ensure_extras().run_left = run_left


def wait_for_ever(yard: Yard) -> None:
    yard.submit(b"one", b"two", lanes=[b"run", b"run"])
    deferred(yard, b"two", run_left=0)


def wait_for_nothing(yard: Yard) -> None:
    yard.submit(b"one", lanes=[b"run"])
    deferred(yard, b"one", run_left=1)


def wait_untried(yard: Yard) -> None:
    yard.submit(b"one", b"two", lanes=[b"run", b"run"])
    deferred(yard, b"two", run_left=1)
    yard[b"two"].attempt = 0
    yard[b"two"].change_extras(losses_excused=0)


def empty_lease(yard: Yard) -> None:
    worker = worker_of(yard)
    worker.leases[999] = Lease(worker, 999, 0, 0, 0, [], [], [], [])


def lease_of_other_names(yard: Yard) -> None:
    lease_of(yard).names = [b"other"] * len(lease_of(yard).names)


def lease_of_other_attempts(yard: Yard) -> None:
    lease_of(yard).attempts = [9] * len(lease_of(yard).attempts)


def lease_of_other_lanes(yard: Yard) -> None:
    lease_of(yard).counts = []


def lease_of_another(yard: Yard) -> None:
    lease_of(yard).worker = yard.scheduler.ledger.workers[b"v"]


def suspect_among_others(yard: Yard) -> None:
    for task in worker_of(yard).held():
        task.attempt += EXCLUSIVE


def forget_timeout(yard: Yard) -> None:
    yard.scheduler.context.timers = TimerHeap()


def check_timeout_late(yard: Yard) -> None:
    worker = worker_of(yard)
    forget_timeout(yard)
    worker.timeout_check_ns = late_ns = worker.timeout_at_ns + 1
    yard.scheduler.context.timers.add(late_ns, TimerKind.HEARTBEATS, worker.name)


def forget_parked(yard: Yard) -> None:
    assert worker_of(yard).state is WorkerState.PARKED
    service_of(yard).parked.clear()


def await_known(yard: Yard) -> None:
    ledger_of(yard).awaited.tasks[b"ready"] = []


def forget_due_heap(yard: Yard) -> None:
    ledger_of(yard).due_heap.due.clear()


def plan_at_another_time(yard: Yard) -> None:
    yard[b"delayed"].change_extras(due_ns=yard[b"delayed"].due_ns + 1)


def lose_dependent(yard: Yard) -> None:
    yard[b"leased"].dependents = None


def unknown_service(yard: Yard) -> None:
    yard[b"ready"].lane = a_lane(b"x")


def share_alone(yard: Yard, name: bytes) -> None:
    lane = lane_of(yard, name)
    lane.holder, lane.leased_by_worker = None, {worker_of(yard): lane.leased}


PLANTS: dict[str, Plant] = {
    "leased without a lease": plant_task(b"leased", "lease_or_ending", None),
    "a lease without being leased": lambda y: setattr(y[b"ready"], "lease_or_ending", lease_of(y)),
    "done without an ending": plant_task(b"done", "lease_or_ending", None),
    "an ending without being ended": plant_task(b"ready", "lease_or_ending", Ending(1, 1)),
    "negative failures": plant_extras(b"failed", failures=-1),
    "negative excuses": plant_extras(b"failed", losses_excused=-1),
    "more charges than attempts": plant_extras(b"failed", failures=5),
    "blocked by nothing": plant_task(b"blocked", "waits", 0),
    "ready and waiting": plant_task(b"ready", "waits", 1),
    "leased and waiting": plant_task(b"leased", "waits", 1),
    "delayed and waiting": plant_task(b"delayed", "waits", 1),
    "waits for more than it has edges": plant_task(b"blocked", "waits", 3),
    "an edge that is lost": lose_dependent,
    "an awaited name that exists": await_known,
    "a lane that its service does not have": unknown_service,
    "a count of tasks": lambda y: count_up(ledger_of(y).counts, READY),
    "a count of ended tasks": lambda y: count_up(ledger_of(y).counts, DONE),
    "a count of a campaign": lambda y: count_up(ledger_of(y).campaigns[b""].counts, READY),
    "a count of a service": lambda y: count_up(service_of(y).counts, READY),
    "pairs of lanes and workers": lambda y: bump(ledger_of(y), "lane_worker_pairs"),
    "pairs of a rule": lambda y: bump(active_rule_of(y), "lane_worker_pairs"),
    "workers of a service": lambda y: bump(service_of(y), "workers"),
    "suspects of a service": lambda y: bump(service_of(y), "suspects"),
    "isolation of a suspect": suspect_of_another_isolation,
    "last attempts of a service": forget_last_attempts,
    "a reservation that its worker does not have": reservation_that_its_worker_does_not_have,
    "two reservations of a kind in a service": reserve_twice,
    "a reservation for a leased task": reserve_for_a_leased_task,
    "an idle worker beside a task for it": idle_beside_work,
    "a bound on slots that is too high": slots_bound_too_high,
    "tasks of a lane": lambda y: bump(lane_of(y, b"ready"), "tasks"),
    "ready tasks of a lane": lambda y: bump(lane_of(y, b"ready"), "ready"),
    "leased tasks of a lane": lambda y: bump(lane_of(y, b"held"), "leased"),
    "worker of a lane": lambda y: setattr(lane_of(y, b"held"), "holder", None),
    "queued twice": queue_twice,
    "queued in another lane": queue_foreign,
    "queued nowhere": queue_nowhere,
    "queued under another priority": queue_under_another_priority,
    "stale entries of a queue": lambda y: bump(queue_of(y), "stale_count"),
    "a suspect in a common queue": unset_suspect,
    "a suspect without a loss": suspect_without_loss,
    "a lane out of rotation": out_of_rotation,
    "a lane marked as rotating that is in no rotation": rotating_and_not_in_rotation,
    "a lane twice in rotation": twice_in_rotation,
    "a lane in rotation that is not marked": in_rotation_unmarked,
    "slots in use": lambda y: bump(worker_of(y), "slots_used"),
    "a single worker counted as shared": lambda y: share_alone(y, b"held"),
    "leases of a worker": lambda y: worker_of(y).leases.clear(),
    "tasks left of a lease": lambda y: bump(lease_of(y), "tasks_left"),
    "a lease that names another worker": lease_of_another,
    "a lease of nothing": empty_lease,
    "names of a lease": lease_of_other_names,
    "attempts of a lease": lease_of_other_attempts,
    "lanes of a lease": lease_of_other_lanes,
    "a suspect among others": suspect_among_others,
    "delayed and not in the due heap": forget_due_heap,
    "delayed and in the due heap for another time": plan_at_another_time,
    "a dirty service that was not assigned": lambda y: ledger_of(y).dirty.update(
        ledger_of(y).services
    ),
    "a heartbeat check that is missing": forget_timeout,
    "a heartbeat check that is too late": check_timeout_late,
    "parked and not listed": forget_parked,
    "a lane in the rotation of others": rotate_among_others,
    "a run that is over, and tasks that wait for its end": wait_for_ever,
    "a lane with only deferred tasks": wait_for_nothing,
    "deferred and never tried": wait_untried,
    "released more than there is": lambda y: setattr(
        lane_of(y, b"ready").ensure_extras(), "released", 99
    ),
    "a debounce without a timer": lambda y: setattr(
        lane_of(y, b"ready").ensure_extras(), "debounce_until_ns", 5
    ),
    "a lane that got work and whose debounce was not decided": lambda y: ledger_of(
        y
    ).debouncing.append(lane_of(y, b"ready")),
    "late and ended": lambda y: ledger_of(y).reported.update({b"done": None}),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_contradiction_is_seen(yard: Yard, plant: Plant) -> None:
    plant(yard)
    with pytest.raises(InvariantViolated):
        invariants.check(yard.scheduler)


def test_violation_shows_stored_and_derived_values(yard: Yard) -> None:
    bump(active_rule_of(yard), "lane_worker_pairs", 5)
    with pytest.raises(InvariantViolated) as raised:
        invariants.check(yard.scheduler)
    assert str(raised.value) == "pairs of rule b'': stored 7, derived 2"


def test_new_scheduler_has_no_contradictions() -> None:
    invariants.check(Scheduler())
