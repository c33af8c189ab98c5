"""Chooses the next tasks for a worker. Changes no durable state.

A worker stays with its lane if it has one, else it gets the next lane of its services in rotation.
In the usual case, an idle worker whose only service has one lane without limits, a shorter way
chooses the same tasks (`next_of_only_lane`).

A task that lost workers is isolated step by step: the fewer losses it has left, the fewer tasks
like it share a worker, and its last attempt runs alone. Tasks that do not fit the worker never keep
another task waiting.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING
from zlib import crc32

from taskyard.core.demand_queues import index_queues
from taskyard.core.entities import SLOTS_UNLIMITED
from taskyard.core.holds import (
    block_reason,
    fits_some_worker,
    held_by_isolation,
    hold_reason,
    holds_last_attempt,
    rate_allowance,
    remaining,
    reserve,
    reserved_task,
)
from taskyard.core.lane_queues import lane_rate_allowance, raise_lane_needs, set_lane_rate_timer
from taskyard.core.limits import (
    EXCLUSIVE,
    LANE_RUN_TASKS_MAX,
    LEASE_TASKS_MAX,
    WIDE_LOOKAHEAD,
)
from taskyard.core.model import isolation_room
from taskyard.core.resources import Room, fits, free_beside
from taskyard.core.states import READY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.demand_queues import Demand
    from taskyard.core.entities import Lane, LaneGroup, Reservation, Service, Task, Worker
    from taskyard.core.ledger import Ledger
    from taskyard.core.resources import Resources
    from taskyard.core.rules import ActiveRule


class Selection:
    """The tasks for one worker, chosen lane by lane within its slots and the limits."""

    def __init__(self, ledger: Ledger, worker: Worker, count: int, now_ns: int) -> None:
        self.ledger = ledger
        self.worker = worker
        self.now_ns = now_ns
        self.slots = worker.slots_free
        #: The most slots that one task may take. Prefetch makes no wider task fit.
        self.slots_widest = worker.facts.slots_total or SLOTS_UNLIMITED
        #: How many more tasks to choose.
        self.count = min(count, self.slots, LEASE_TASKS_MAX)
        #: How many more tasks may be overfed, which do not count as requested. 0 if `prefetch` is
        #: negative: `slots_free` includes it already.
        self.extra = max(0, min(worker.prefetch, LEASE_TASKS_MAX - self.count))
        self.tasks: list[Task] = []
        #: The lane that the worker stayed with, if any.
        self.kept_lane: Lane | None = None
        #: Lanes of each rule that the worker begins to serve by this choice, for worker limits.
        self.begun: dict[ActiveRule, int] = {}
        #: Whether any worker limit is set, and whether the broker has one.
        self.has_worker_limits = ledger.has_worker_limits
        self.broker_limited = bool(ledger.rules.workers_max)
        #: Tasks chosen of each rule with a rate.
        self.spent: dict[ActiveRule, int] = {}
        #: Lanes that had their turn, by id. Kept if a lane could come up again.
        self.taken: dict[int, Lane] = {}
        self.reserved_payloads = worker.facts.reserved_payloads
        #: Slots that isolation is measured by. For a worker without a limit, its request.
        self.slots_measure = worker.facts.slots_total or self.count
        #: Held and chosen tasks by isolation. None: not counted yet.
        self.isolated: dict[int, int] | None = None
        #: Tasks without room now, which a worker may be reserved for: the first of each service,
        #: number of slots, resources, and whether it must run alone.
        self.unfit: dict[tuple[bytes, int, Resources, bool], Task] = {}
        #: Named resources that tasks may take, of a worker that is kept for a task. None: all.
        self.resources: dict[bytes, int] | None = None
        #: This worker gets no more tasks.
        self.closed = ledger.paused or holds_last_attempt(worker)

    def select(self) -> list[Task]:
        worker = self.worker
        services = worker.facts.services
        if worker.reservation is not None:
            self._take_reserved(worker.reservation.task)
            if self.tasks or not self._keep_for(worker.reservation):
                return self.tasks
        self._take_last_attempt()
        if worker.lane is not None and worker.lane.ready and not self.closed:
            self._continue_lane(worker.lane)
        for turn in range(len(services)):
            if self.closed or self.count <= 0:
                break
            name = services[(worker.service_next + turn) % len(services)]
            service = self.ledger.services.get(name)
            if service is not None and not service.paused and service.has_work:
                self._rotate(service)
        return self.tasks

    def _keep_for(self, reservation: Reservation) -> bool:
        """Keep the resources of a reserved task from other tasks. Return whether these may go
        ahead.

        They may while it lacks a resource. If it lacks only slots, any other would delay it.
        """
        free, needed = self.worker.resources_free, reservation.task.terms.resources
        if reservation.exclusive or fits(needed, free):
            return False
        self.resources = free_beside(needed, free)
        return True

    def _continue_lane(self, lane: Lane) -> None:
        """Choose tasks of the lane that the worker served last, up to the length of a lane run."""
        service = lane.service
        offered = service.name in self.worker.facts.services
        if not offered or service.paused or lane.paused or not lane.name:
            return
        if not lane.lane_group.active_rule.is_simple and hold_reason(lane, self.now_ns):
            return
        if self.worker.lane_run < LANE_RUN_TASKS_MAX:
            self.kept_lane = lane
            chosen = len(self.tasks)
            self._take(lane)
            if len(service.lane_groups) > 1:
                lane.lane_group.count_tasks(len(self.tasks) - chosen)

    def _rotate(self, service: Service) -> None:
        """Give each lane in rotation one turn."""
        lane_groups = service.lane_groups
        if len(lane_groups) == 1:
            self._rotate_group(lane_groups[0], len(lane_groups[0].rotation))
            return
        turns = {
            lane_group: len(lane_group.rotation)
            for lane_group in lane_groups
            if lane_group.rotation
        }
        while turns and self.count > 0 and not self.closed:
            lane_group = min(turns, key=attrgetter("turn"))
            chosen = len(self.tasks)
            has_more = self._rotate_group(lane_group, 1)
            lane_group.count_turn(len(self.tasks) - chosen)
            turns[lane_group] -= 1
            if not has_more or not turns[lane_group]:
                del turns[lane_group]

    def _rotate_group(self, lane_group: LaneGroup, turns: int) -> bool:
        """Give the next lanes of a group their turns. Return False if its limits allow no more."""
        if lane_group.active_rule.is_simple and not self.broker_limited:
            self._rotate_simple(lane_group, turns)
            return True
        return self._rotate_counting(lane_group, turns)

    def _rotate_simple(self, lane_group: LaneGroup, turns: int) -> None:
        """Give turns to lanes that have only their own limits."""
        rotation, lane_tasks_max, service = (
            lane_group.rotation,
            lane_group.active_rule.lane_tasks_max,
            lane_group.service,
        )
        overfed = lane_group.active_rule.options.overfeed and self.extra
        plain = not (
            service.has_wide_tasks or service.suspects or self.reserved_payloads or overfed
        ) and (lane_tasks_max == 1 or not lane_group.active_rule.options.lane_rate_interval_ns)
        kept_lane, chosen, now_ns = self.kept_lane, self.tasks, self.now_ns
        for _ in range(turns):
            lane = rotation.popleft()
            rate = lane.rate
            if rate is not None and rate.next_ns > now_ns and lane.ready:
                lane.in_rotation = False  # added again by its timer
                set_lane_rate_timer(self.ledger.rate_timers, lane, rate)
                continue
            if not lane.ready or lane.paused or (lane.leased >= lane_tasks_max and lane.name):
                lane_group.note_removed(lane)  # added again when it gets work or a lease ends
                continue
            rotation.append(lane)
            if lane is kept_lane:
                continue
            if plain and not lane.leased and lane.name and lane.other_queues is None:
                # The common case of many lanes: no worker serves it and no limit is counted.
                main_queue = lane.main_queue
                if lane_tasks_max == 1 and not main_queue.front and not main_queue.stale_count:
                    chosen.append(main_queue.items[main_queue.cursor])
                    self.count -= 1
                else:
                    tasks = main_queue.peek(min(lane_tasks_max, self.count))
                    chosen += tasks
                    self.count -= len(tasks)
            else:
                self._take(lane)
                if self.closed:
                    break
            if self.count <= 0:
                break

    def _rotate_counting(self, lane_group: LaneGroup, turns: int) -> bool:
        """Give turns to lanes with limits over several lanes, or with holds."""
        active_rule, rotation = lane_group.active_rule, lane_group.rotation
        for _ in range(turns):
            if not self._is_open(active_rule):
                self._serve_current_lanes(active_rule)
                return False
            if self.count <= 0 or self.closed:
                break
            lane = rotation.popleft()
            full = lane.leased >= active_rule.lane_tasks_max and lane.name
            if not lane.ready or lane.paused or full or hold_reason(lane, self.now_ns):
                lane_group.note_removed(lane)  # added again when that ends
                continue
            if lane.rate is not None and lane.rate.next_ns > self.now_ns:
                lane.in_rotation = False  # added again by its timer
                set_lane_rate_timer(self.ledger.rate_timers, lane, lane.rate)
                continue
            rotation.append(lane)
            if lane is not self.kept_lane:
                self._take(lane)
        return True

    def _is_open(self, active_rule: ActiveRule) -> bool:
        """Return whether the limits of a rule let a worker begin with one more lane."""
        if active_rule.options.rate_interval_ns and self._rate_left(active_rule) <= 0:
            return False
        return self._may_begin(active_rule)

    def _serve_current_lanes(self, active_rule: ActiveRule) -> None:
        """Choose tasks of lanes that the worker serves already, as it may begin no other."""
        if active_rule.options.rate_interval_ns and self._rate_left(active_rule) <= 0:
            return
        leases = self.worker.leases.values()
        own = {id(lane): lane for lease in leases for lane, _ in lease.counts}
        for lane in own.values():
            if self.closed or self.count <= 0:
                break
            fits = (
                lane.lane_group.active_rule is active_rule
                and lane.service.name in self.worker.facts.services
            )
            if not fits or not lane.ready or lane.paused or lane.service.paused:
                continue
            if lane.rate is not None and lane.rate.next_ns > self.now_ns:
                set_lane_rate_timer(self.ledger.rate_timers, lane, lane.rate)
            elif lane is not self.kept_lane and not hold_reason(lane, self.now_ns):
                self._take(lane)

    def _rate_left(self, active_rule: ActiveRule) -> int:
        return rate_allowance(active_rule, self.now_ns) - self.spent.get(active_rule, 0)

    def _take(self, lane: Lane) -> None:
        """Choose tasks of a lane for this worker."""
        active_rule = lane.lane_group.active_rule
        begins = not lane.is_served_by(self.worker)
        if self.has_worker_limits and (
            id(lane) in self.taken or (begins and not self._may_begin(active_rule))
        ):
            return
        room = self._room(lane, begins=begins)
        if room <= 0:
            return
        tasks = []
        if lane.extras is not None and lane.extras.suspects:
            tasks = self._suspects(lane, room)
            self.tasks += tasks
            room -= len(tasks)
        if room > 0:
            more = (
                self._fitting(lane, room) if lane.service.has_wide_tasks else self._next(lane, room)
            )
            if not more and lane.extras is not None and lane.extras.next_run:
                more = self._deferred(lane, room)
            self.tasks += more
            tasks = tasks + more if tasks else more
        extra = self._extra_of(lane, len(tasks), begins=begins)
        self.extra -= extra
        self.count = min(self.count - len(tasks) + extra, self._slots_left())
        if not active_rule.is_simple or self.has_worker_limits:
            self._count_taken(lane, len(tasks), begins=begins)

    def _count_taken(self, lane: Lane, count: int, *, begins: bool) -> None:
        """Count the chosen tasks for limits and rates, and note the lane."""
        active_rule = lane.lane_group.active_rule
        self.taken[id(lane)] = lane
        if count and begins:
            self.begun[active_rule] = self.begun.get(active_rule, 0) + 1
        if active_rule.options.rate_interval_ns:
            self.spent[active_rule] = self.spent.get(active_rule, 0) + count

    def _extra_of(self, lane: Lane, count: int, *, begins: bool) -> int:
        """Return how many of these tasks of a lane are overfed and do not count as requested."""
        overfeed = lane.options.overfeed
        if not self.extra or not overfeed or not lane.name:
            return 0
        in_hand = -(-count // (1 + overfeed))
        return min(self.extra, count - in_hand + (not begins and count > 0))

    def _slots_left(self) -> int:
        if not self.ledger.has_wide_tasks:
            return self.slots - len(self.tasks)
        return self.slots - sum(task.terms.slots for task in self.tasks)

    def _room_left(self) -> Room:
        """Return the slots and resources that are left beside the chosen tasks."""
        kept = self.resources
        resources = self.worker.resources_free if kept is None else dict(kept)
        left = Room(self.slots, self.slots_widest, resources)
        for task in self.tasks:
            left.take(task.terms.slots, task.terms.resources)
        return left

    def _may_begin(self, active_rule: ActiveRule) -> bool:
        """Return whether worker limits allow one more pair of a lane and a worker."""
        if not self.has_worker_limits:
            return True
        ledger, begun = self.ledger, self.begun
        if remaining(ledger.rules.workers_max, ledger.lane_worker_pairs + sum(begun.values())) <= 0:
            return False
        return (
            remaining(
                active_rule.options.workers_max,
                active_rule.lane_worker_pairs + begun.get(active_rule, 0),
            )
            > 0
        )

    def _room(self, lane: Lane, *, begins: bool, is_reserved: bool = False) -> int:
        """Return how many tasks of a lane its own limits and the rates allow this worker. A task
        with a reservation keeps its place in the lane."""
        room, active_rule = self.count, lane.lane_group.active_rule
        if lane.name:
            if begins and remaining(active_rule.options.lane_workers_max, lane.workers) <= 0:
                return 0
            if active_rule.options.overfeed:
                room = min(room + self.extra, self._slots_left())
            kept = 0 if is_reserved else self._reserved_tasks(lane)
            room = min(room, active_rule.lane_tasks_max - lane.leased - kept)
        if active_rule.options.lane_rate_interval_ns:
            room = min(room, lane_rate_allowance(lane, self.now_ns))
        if active_rule.is_simple:
            return room
        if active_rule.options.rate_interval_ns:
            room = min(room, self._rate_left(active_rule))
        if active_rule.options.is_held:
            room = min(room, lane.released - lane.leased)
        return room

    def _reserved_tasks(self, lane: Lane) -> int:
        """Return 1 if the lane keeps a place for a task that waits for another worker, else 0."""
        task = reserved_task(self.ledger, lane)
        if task is None:
            return 0
        return int(not self._room_left().fits(task.terms.slots, task.terms.resources))

    def _fitting(self, lane: Lane, room: int) -> list[Task]:
        """Return the next tasks that the worker has room for, skipping wider tasks."""
        if not self._room_left().fits(lane.slots_min, lane.resources_min):
            self._note_unfit(self._next(lane, WIDE_LOOKAHEAD))
            return []
        chosen, wider, demands = self._search(lane, room)
        if len(chosen) < room and not self.reserved_payloads:  # the whole lane was searched
            raise_lane_needs(lane, demands)
        self._note_unfit(wider)
        if wider and lane.name:
            reserve(self.ledger, self.unfit.values(), self.now_ns)
            # The last place is left for the wide task.
            chosen = chosen[: self._places_left(lane)]
        return chosen

    def _search(self, lane: Lane, room: int) -> tuple[list[Task], list[Task], list[Demand]]:
        """Return the next tasks that the worker has room for, the first that it has none for,
        and the demands of all tasks if there are no more.

        Reads the next tasks in order, and if these are not enough, the index by demand.
        """
        scans = bool(self.reserved_payloads) or lane.options.is_random
        looked = room + WIDE_LOOKAHEAD
        while True:
            seen = self._next(lane, looked)
            chosen, wider = self._first_fit(seen, self._room_left(), room)
            if len(chosen) == room:
                return chosen, wider, []
            if len(seen) < looked:
                each = {id(task.terms): task.terms for task in seen}.values()
                return chosen, wider, [(terms.slots, terms.resources) for terms in each]
            if not scans:
                chosen, demands = self._search_index(lane, room)
                return chosen, wider, demands
            looked *= 4

    def _search_index(self, lane: Lane, room: int) -> tuple[list[Task], list[Demand]]:
        """Return the next tasks that the worker has room for, found by their demands, and the
        demands of all tasks if there are no more."""
        left = self._room_left()
        chosen: list[Task] = []
        for queue in index_queues(lane):
            chosen += queue.fitting(left, room - len(chosen))
            if len(chosen) == room:
                return chosen, []
        return chosen, [demand for queue in index_queues(lane) for demand in queue.demands()]

    def _places_left(self, lane: Lane) -> int:
        """Return how many more tasks of a lane may be leased, beside a reserved task."""
        return max(
            0,
            lane.lane_group.active_rule.lane_tasks_max - lane.leased - self._reserved_tasks(lane),
        )

    def _note_unfit(self, tasks: Iterable[Task], *, exclusive: bool = False) -> None:
        """Note tasks that this worker has no room for now, the first of each size, for a
        reservation."""
        last = None
        for task in islice(tasks, WIDE_LOOKAHEAD):
            terms, service = task.terms, task.lane.service
            if terms is not last:
                last = terms
                key = (service.name, terms.slots, terms.resources, exclusive)
                if key not in self.unfit and fits_some_worker(self.ledger, service, terms):
                    self.unfit[key] = task

    def _next(self, lane: Lane, count: int) -> list[Task]:
        """Return the next tasks whose payload the worker can receive, skipping any number of
        others."""
        if not self.reserved_payloads:
            return (
                lane.peek(count)
                if lane.lane_group.active_rule.is_simple
                else self._peek(lane, count)
            )
        looked = count
        while True:
            seen = self._peek(lane, looked)
            receivable = [task for task in seen if self._can_receive(task)]
            if len(receivable) >= count or len(seen) < looked:
                return receivable[:count]
            looked *= 4

    def _peek(self, lane: Lane, count: int) -> list[Task]:
        """Return the next tasks in the order of the lane's rule. The record number is the seed."""
        if not lane.options.is_random:
            return lane.peek(count)
        return lane.sample(count, crc32(lane.name, self.ledger.record))

    def _can_receive(self, task: Task) -> bool:
        return (task.payload or task.name) not in self.reserved_payloads

    def _suspects(self, lane: Lane, room: int) -> list[Task]:
        """Return the next tasks of a lane that lost workers, as far as their isolation allows."""
        chosen: list[Task] = []
        left = self._room_left()
        for isolation, group in lane.suspect_groups.items():
            if isolation == EXCLUSIVE:
                self._note_unfit(group.values(), exclusive=True)
                continue
            open_count = min(self._isolation_room(isolation), room - len(chosen))
            if open_count <= 0:
                continue
            some = self._fit(group.values(), left, open_count)
            self._isolated()[isolation] += len(some)
            chosen += some
        return chosen

    def _deferred(self, lane: Lane, room: int) -> list[Task]:
        """Return deferred tasks of a lane that has no others for this worker. The others may wait
        for slots that no worker has."""
        next_run = [] if lane.extras is None else lane.extras.next_run.values()
        if lane.name:
            room = min(room, self._places_left(lane))
        return self._fit(next_run, self._room_left(), room)

    def _fit(self, tasks: Iterable[Task], left: Room, count: int) -> list[Task]:
        """Return the first tasks, by priority, that the worker can receive and has room for."""
        receivable = [task for task in tasks if self._can_receive(task)]
        chosen, wider = self._first_fit(_by_priority(receivable), left, count)
        self._note_unfit(wider)
        return chosen

    def _first_fit(
        self, tasks: list[Task], left: Room, count: int
    ) -> tuple[list[Task], list[Task]]:
        """Return the first tasks that fit into the room, and the wider tasks before them."""
        chosen: list[Task] = []
        wider: list[Task] = []
        too_wide = None
        for task in tasks:
            if len(chosen) == count:
                break
            terms = task.terms
            if terms is too_wide:  # room only shrinks
                wider.append(task)
            elif left.fits(terms.slots, terms.resources):
                left.take(terms.slots, terms.resources)
                chosen.append(task)
            else:
                too_wide = terms
                wider.append(task)
        return chosen, wider

    def _isolation_room(self, isolation: int) -> int:
        """Return how many more tasks of an isolation the worker may hold."""
        return isolation_room(isolation, self.slots_measure) - self._isolated()[isolation]

    def _isolated(self) -> dict[int, int]:
        """Return the counts of held and chosen tasks by isolation."""
        if self.isolated is None:
            self.isolated = held_by_isolation(self.worker)
        return self.isolated

    def _take_last_attempt(self) -> None:
        """Choose a task that must run alone, if this worker is idle."""
        worker = self.worker
        if worker.leases or self.closed or self.count <= 0:
            return
        for name in worker.facts.services:
            service = self.ledger.services.get(name)
            if service is not None and service.last_attempts:
                for task in _by_priority(service.last_attempts.values()):
                    self._take_reserved(task)
                    if self.tasks:
                        return

    def _take_reserved(self, task: Task) -> None:
        """Choose this task alone, if the worker has room for it. A reserved task may have been
        leased since the last review."""
        if self.closed or task.state is not READY or not self._has_room_for(task):
            return
        lane = task.lane
        begins = not lane.is_served_by(self.worker)
        if begins and self.has_worker_limits and not self._may_begin(lane.lane_group.active_rule):
            return
        if self.count > 0 and self._room(lane, begins=begins, is_reserved=True) > 0:
            self.tasks = [task]
            self.closed = True

    def _has_room_for(self, task: Task) -> bool:
        """Return whether the worker could take this task now, limits aside."""
        fits_now = self._room_left().fits(task.terms.slots, task.terms.resources)
        if not fits_now or not self._can_receive(task):
            return False
        if block_reason(self.ledger, task.lane, self.now_ns):
            return False
        isolation = task.isolation
        if isolation == EXCLUSIVE:
            return not self.worker.leases
        return not isolation or self._isolation_room(isolation) > 0


def _by_priority(tasks: Iterable[Task]) -> list[Task]:
    """Sort tasks by priority, keeping the order within one priority."""
    return sorted(tasks, key=lambda task: task.terms.priority, reverse=True)


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
