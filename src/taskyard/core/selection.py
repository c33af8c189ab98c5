"""Which task next, which worker next. Looks and chooses; changes nothing that is durable.

A worker that asks goes on with its lane if it has one, else takes the next lane of its services
in rotation. Limits apply in this order, and the first that refuses is the lane's reason: broker,
service, lane, rate; the service's are those of the clause that the lane is run by. Workers are
served least recently used first.

A task that lost workers is isolated step by step: the fewer losses it has left, the fewer of its
kind share a worker, and its last attempt is alone. A task that takes more slots than any worker has
free, or must be alone while every worker is busy, has one worker kept free for it. Neither keeps
another task waiting: whatever fits is chosen past them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING
from zlib import crc32

from taskyard.core.entities import SLOTS_UNLIMITED
from taskyard.core.holds import block_reason, hold_reason, rate_allowance, remaining
from taskyard.core.limits import (
    EXCLUSIVE,
    LANE_RUN_TASKS_MAX,
    LEASE_TASKS_MAX,
    PARKED_STALE_MAX,
    WIDE_LOOKAHEAD,
)
from taskyard.core.model import QueueOrder, isolation_room
from taskyard.core.reservations import (
    held_by_isolation,
    holds_last_attempt,
    reserve,
    reserved_task,
    worker_slots_max,
)
from taskyard.core.states import PARKED, READY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.entities import Lane, LaneGroup, Service, Task, Worker
    from taskyard.core.ledger import Ledger
    from taskyard.core.rules import ActiveRule


class Selection:
    """What one worker is given: built lane by lane, within the worker's room and the limits."""

    def __init__(self, ledger: Ledger, worker: Worker, count: int, now_ns: int) -> None:
        self.ledger = ledger
        self.worker = worker
        self.now_ns = now_ns
        self.slots = worker.slots_free
        #: The most slots of one task: what is taken ahead makes no wide task fit.
        self.slots_widest = worker.facts.slots_total or SLOTS_UNLIMITED
        #: How many tasks more.
        self.count = min(count, self.slots, LEASE_TASKS_MAX)
        #: How many of these in lanes that are overfed, which don't count as tasks of their own.
        #: None where slots are taken away: `slots_free` counts that already.
        self.extra = max(0, min(worker.prefetch, LEASE_TASKS_MAX - self.count))
        self.tasks: list[Task] = []
        #: The lane that it went on with.
        self.gone_on: Lane | None = None
        #: Lanes of each regime that it begins to serve by this choice, which count for limits.
        self.begun: dict[ActiveRule, int] = {}
        #: There are such limits at all; there is one of the broker as a whole.
        self.has_worker_limits = ledger.has_worker_limits
        self.broker_limited = bool(ledger.rules.workers_max)
        #: Tasks chosen of each regime that has a rate.
        self.spent: dict[ActiveRule, int] = {}
        #: Lanes that have had their turn, by id; kept where a lane could be met again.
        self.taken: dict[int, Lane] = {}
        self.reserved_payloads = worker.facts.reserved_payloads
        #: Slots that isolation is measured by; a worker without a limit has as many as it wants.
        self.slots_measure = worker.facts.slots_total or self.count
        #: Tasks of each isolation that it holds or was chosen here; None: not counted yet.
        self.isolated: dict[int, int] | None = None
        #: Tasks that it has no room for now, which a worker may be reserved for: the first of each
        #: service, number of slots, and whether it must be alone.
        self.unfit: dict[tuple[bytes, int, bool], Task] = {}
        #: Nothing more for this worker, whatever lies in other lanes.
        self.closed = ledger.paused or holds_last_attempt(worker)

    def select(self) -> list[Task]:
        worker = self.worker
        services = worker.facts.services
        if worker.reservation is not None:
            self._take_reserved(worker.reservation.task)
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

    def _continue_lane(self, lane: Lane) -> None:
        """With the lane it served last, unless other lanes have waited long enough."""
        service = lane.service
        known = service.name in self.worker.facts.services
        if not known or service.paused or lane.paused or not lane.name:
            return
        if not lane.lane_group.active_rule.is_simple and hold_reason(lane, self.now_ns):
            return
        if self.worker.lane_run < LANE_RUN_TASKS_MAX:
            self.gone_on = lane
            self._take(lane)

    def _rotate(self, service: Service) -> None:
        """Give each lane in rotation its turn, once."""
        lane_groups = service.lane_groups
        if len(lane_groups) == 1:
            self._rotate_branch(lane_groups[0], len(lane_groups[0].rotation))
            return
        turns = {
            lane_group: len(lane_group.rotation)
            for lane_group in lane_groups
            if lane_group.rotation
        }
        while turns and self.count > 0 and not self.closed:
            lane_group = min(turns, key=_turn_of_branch)
            goes_on = self._rotate_branch(lane_group, 1)
            lane_group.count_turn()
            turns[lane_group] -= 1
            if not goes_on or not turns[lane_group]:
                del turns[lane_group]

    def _rotate_branch(self, lane_group: LaneGroup, turns: int) -> bool:
        """Give the next lanes of a branch their turn; False when its limits allow no more."""
        if lane_group.active_rule.is_simple and not self.broker_limited:
            self._rotate_simple(lane_group, turns)
            return True
        return self._rotate_counting(lane_group, turns)

    def _rotate_simple(self, lane_group: LaneGroup, turns: int) -> None:
        """Lanes that have no limits but their own."""
        rotation, lane_tasks_max, service = (
            lane_group.rotation,
            lane_group.active_rule.lane_tasks_max,
            lane_group.service,
        )
        overfed = lane_group.active_rule.options.overfeed and self.extra
        plain = not (
            service.has_wide_tasks or service.suspects or self.reserved_payloads or overfed
        )
        gone_on, chosen = self.gone_on, self.tasks
        for _ in range(turns):
            lane = rotation.popleft()
            if not lane.ready or lane.paused or (lane.leased >= lane_tasks_max and lane.name):
                lane.in_rotation = False  # offered again when it has work, or a lease less
                continue
            rotation.append(lane)
            if lane is gone_on:
                continue
            if plain and not lane.leased and lane.name and lane.other_queues is None:
                # The common case of many lanes: nobody serves it, and no limit needs counting.
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
        """Lanes that others count for, or that wait for more than a worker."""
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
                lane.in_rotation = False  # offered again when that is over
                continue
            rotation.append(lane)
            if lane is not self.gone_on:
                self._take(lane)
        return True

    def _is_open(self, active_rule: ActiveRule) -> bool:
        """Its limits, over all its lanes, let a worker begin with one more."""
        if active_rule.options.rate_interval_ns and self._rate_left(active_rule) <= 0:
            return False
        return self._may_begin(active_rule)

    def _serve_current_lanes(self, active_rule: ActiveRule) -> None:
        """No lane may be begun, but those that the worker serves already have room perhaps."""
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
            if lane is not self.gone_on and not hold_reason(lane, self.now_ns):
                self._take(lane)

    def _rate_left(self, active_rule: ActiveRule) -> int:
        return rate_allowance(active_rule, self.now_ns) - self.spent.get(active_rule, 0)

    def _take(self, lane: Lane) -> None:
        """Choose what a lane has for this worker."""
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
        """Keep what limits and rates are counted by, and what must not be met twice."""
        active_rule = lane.lane_group.active_rule
        self.taken[id(lane)] = lane
        if count and begins:
            self.begun[active_rule] = self.begun.get(active_rule, 0) + 1
        if active_rule.options.rate_interval_ns:
            self.spent[active_rule] = self.spent.get(active_rule, 0) + count

    def _extra_of(self, lane: Lane, count: int, *, begins: bool) -> int:
        """How many of so many tasks of a lane are beyond the one in hand: a worker that takes tasks
        ahead asks for tasks in hand, and gets these with them."""
        overfeed = lane.options.overfeed
        if not self.extra or not overfeed or not lane.name:
            return 0
        in_hand = -(-count // (1 + overfeed))
        return min(self.extra, count - in_hand + (not begins and count > 0))

    def _slots_left(self) -> int:
        if not self.ledger.has_wide_tasks:
            return self.slots - len(self.tasks)
        return self.slots - sum(task.terms.slots for task in self.tasks)

    def _may_begin(self, active_rule: ActiveRule) -> bool:
        """The limits of workers at once allow one more pair of a lane and a worker."""
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
        """How many tasks of a lane its own limits and the rate allow this worker. A task that a
        worker is reserved for keeps its place in the lane."""
        room, active_rule = self.count, lane.lane_group.active_rule
        if lane.name:
            if begins and remaining(active_rule.options.lane_workers_max, lane.workers) <= 0:
                return 0
            if active_rule.options.overfeed:
                room = min(room + self.extra, self._slots_left())
            kept = 0 if is_reserved else self._reserved_places(lane)
            room = min(room, active_rule.lane_tasks_max - lane.leased - kept)
        if active_rule.is_simple:
            return room
        if active_rule.options.rate_interval_ns:
            room = min(room, self._rate_left(active_rule))
        if active_rule.options.is_held:
            room = min(room, lane.released - lane.leased)
        return room

    def _reserved_places(self, lane: Lane) -> int:
        """Count the places in a lane that are kept for a task which waits for another worker."""
        task = reserved_task(self.ledger, lane)
        return int(task is not None and task.terms.slots > self._slots_left())

    def _fitting(self, lane: Lane, room: int) -> list[Task]:
        """Return the next tasks that the worker has slots for, however many wider ones are before
        them."""
        slots = self._slots_left()
        if lane.slots_min > slots:
            self._note_unfit(self._next(lane, WIDE_LOOKAHEAD))
            return []
        looked = room + WIDE_LOOKAHEAD
        while True:
            seen = self._next(lane, looked)
            chosen, wider = self._first_fit(seen, slots, room)
            if len(chosen) == room or len(seen) < looked:
                break
            looked *= 4
        if len(chosen) < room and not self.reserved_payloads:  # all of it was looked at
            lane.slots_min = min((task.terms.slots for task in seen), default=1)
        self._note_unfit(wider)
        if wider and lane.name:
            reserve(self.ledger, self.unfit.values(), self.now_ns)
            # None takes the last place before a wide one.
            chosen = chosen[: self._places_left(lane)]
        return chosen

    def _places_left(self, lane: Lane) -> int:
        """Return how many more tasks of a lane may be out, beside one that a worker is kept for."""
        return max(
            0,
            lane.lane_group.active_rule.lane_tasks_max - lane.leased - self._reserved_places(lane),
        )

    def _note_unfit(self, tasks: Iterable[Task], *, exclusive: bool = False) -> None:
        """Note tasks that this worker has no room for now, and another worker may be kept free
        for: the first of each number of slots."""
        slots_seen = 0
        for task in islice(tasks, WIDE_LOOKAHEAD):
            slots = task.terms.slots
            if slots != slots_seen:
                slots_seen = slots
                service = task.lane.service
                if slots <= worker_slots_max(self.ledger, service):
                    self.unfit.setdefault((service.name, slots, exclusive), task)

    def _next(self, lane: Lane, count: int) -> list[Task]:
        """The next tasks that the worker can be told of. What is behind others is found, however
        many those are."""
        if not self.reserved_payloads:
            return (
                lane.peek(count)
                if lane.lane_group.active_rule.is_simple
                else self._peek(lane, count)
            )
        looked = count
        while True:
            seen = self._peek(lane, looked)
            tellable = [task for task in seen if self._can_receive(task)]
            if len(tellable) >= count or len(seen) < looked:
                return tellable[:count]
            looked *= 4

    def _peek(self, lane: Lane, count: int) -> list[Task]:
        """The next tasks, in the order of the lane's rules. Luck is where the journal stands."""
        if not lane.options.is_random:
            return lane.peek(count)
        return lane.sample(count, crc32(lane.name, self.ledger.record))

    def _can_receive(self, task: Task) -> bool:
        return (task.payload or task.name) not in self.reserved_payloads

    def _suspects(self, lane: Lane, room: int) -> list[Task]:
        """Return the next tasks of a lane that lost workers, as far as their isolation allows."""
        chosen: list[Task] = []
        slots = self._slots_left()
        for isolation, group in lane.suspect_groups.items():
            if isolation == EXCLUSIVE:
                self._note_unfit(group.values(), exclusive=True)
                continue
            open_count = min(self._isolation_room(isolation), room - len(chosen))
            if open_count <= 0:
                continue
            some = self._fit(group.values(), slots, open_count)
            slots -= sum(task.terms.slots for task in some)
            self._isolated()[isolation] += len(some)
            chosen += some
        return chosen

    def _deferred(self, lane: Lane, room: int) -> list[Task]:
        """Return tasks that wait for the next run of a lane, which has no others for this worker:
        those may wait for slots that no worker has."""
        next_run = [] if lane.extras is None else lane.extras.next_run.values()
        if lane.name:
            room = min(room, self._places_left(lane))
        return self._fit(next_run, self._slots_left(), room)

    def _fit(self, tasks: Iterable[Task], slots: int, count: int) -> list[Task]:
        """Return the first of these tasks, by priority, that the worker can be told and has slots
        for."""
        tellable = [task for task in tasks if self._can_receive(task)]
        chosen, wider = self._first_fit(_by_priority(tellable), slots, count)
        self._note_unfit(wider)
        return chosen

    def _first_fit(
        self, tasks: list[Task], slots: int, count: int
    ) -> tuple[list[Task], list[Task]]:
        """Return the first tasks that go into so many slots, and those before them that do not."""
        chosen: list[Task] = []
        wider: list[Task] = []
        for task in tasks:
            if len(chosen) == count:
                break
            if task.terms.slots > min(slots, self.slots_widest):
                wider.append(task)
            else:
                slots -= task.terms.slots
                chosen.append(task)
        return chosen, wider

    def _isolation_room(self, isolation: int) -> int:
        """Return how many tasks more of an isolation the worker may hold."""
        return isolation_room(isolation, self.slots_measure) - self._isolated()[isolation]

    def _isolated(self) -> dict[int, int]:
        """Count the tasks of each isolation that the worker holds or was chosen."""
        if self.isolated is None:
            self.isolated = held_by_isolation(self.worker)
        return self.isolated

    def _take_last_attempt(self) -> None:
        """Choose a task that must be the only one in its worker, if this one is idle."""
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
        """Choose one task, and nothing else, if the worker has room for it. One that a worker is
        reserved for may have been leased since the last review."""
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
        """Return whether the worker could begin with this task now, limits aside."""
        if task.terms.slots > min(self.slots, self.slots_widest) or not self._can_receive(task):
            return False
        if block_reason(self.ledger, task.lane, self.now_ns):
            return False
        isolation = task.isolation
        if isolation == EXCLUSIVE:
            return not self.worker.leases
        return not isolation or self._isolation_room(isolation) > 0


def _turn_of_branch(lane_group: LaneGroup) -> int:
    return lane_group.turn


def _by_priority(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks by priority, those of one priority in the order given."""
    return sorted(tasks, key=lambda task: task.terms.priority, reverse=True)


def queues_fifo(worker: Worker) -> bool:
    """Its place is behind those that wait already, whenever it was used last."""
    is_fifo = worker.facts.queue_order is QueueOrder.FIFO
    return is_fifo and worker.listed_as != worker.last_used and worker.slots_free > 0


def park(ledger: Ledger, worker: Worker) -> None:
    """List a worker that waits for work at its services, unless it is listed or has no room."""
    if worker.listed_as == worker.last_used or worker.slots_free <= 0:
        return
    worker.listed_as = worker.last_used
    for name in worker.facts.services:
        service = ledger.service(name)
        relist(ledger, service, worker)
        ledger.dirty[name] = service


def relist(ledger: Ledger, service: Service, worker: Worker) -> None:
    """Put a worker in a service's list. Entries that are void are thrown out now and then."""
    parked = service.parked
    if len(parked) > PARKED_STALE_MAX + 2 * service.workers:
        known = ledger.workers
        valid = [
            (last_used, name) for last_used, name in parked if _is_used(known.get(name), last_used)
        ]
        parked[:] = dict.fromkeys(valid)
        heapify(parked)
    heappush(parked, (worker.last_used, worker.name))


def _is_used(worker: Worker | None, last_used: int) -> bool:
    return worker is not None and worker.last_used == last_used


def next_parked(ledger: Ledger, service: Service) -> Worker | None:
    """The least recently used worker that waits for work; it leaves the list."""
    while service.parked:
        last_used, name = heappop(service.parked)
        worker = ledger.workers.get(name)
        if worker is None or worker.last_used != last_used:
            continue  # it is gone, or was served since and is listed anew if it waits again
        if worker.state is PARKED and worker.slots_free > 0:
            return worker
        worker.listed_as = -1
    return None
