"""Which task next, which worker next. Looks and chooses; changes nothing that is durable.

A worker that asks goes on with its lane if it has one, else takes the next lane of its services
in rotation. Limits apply in this order, and the first that refuses is the lane's reason: broker,
service, lane, rate. Workers are served least recently used first.
"""

from __future__ import annotations

from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from taskyard.core.limits import (
    LANE_RUN_TASKS_MAX,
    RATE_SAVED_NS_MAX,
    TASKS_MAX,
    WIDE_LOOKAHEAD,
)
from taskyard.core.states import WorkerState
from taskyard.core.workers import SLOTS_UNLIMITED

if TYPE_CHECKING:
    from taskyard.core.agenda import Lane, Service
    from taskyard.core.ledger import Ledger
    from taskyard.core.tasks import Task
    from taskyard.core.workers import Worker


class Hold(Enum):
    """Why a lane that has ready tasks gives none. The sentences are for people."""

    PAUSED_BROKER = "everything is paused"
    PAUSED_SERVICE = "its service is paused"
    PAUSED_LANE = "its lane is paused"
    LIMIT_BROKER = "the broker's limit of workers at once is reached"
    LIMIT_SERVICE = "its service's limit of workers at once is reached"
    LIMIT_LANE = "its lane's limit of workers at once is reached"
    RATE = "its service's rate is used up for the moment"
    NO_WORKER = "no worker of its service is connected"


def paused(ledger: Ledger, lane: Lane) -> Hold | None:
    """The pause that holds a lane back."""
    if ledger.paused:
        return Hold.PAUSED_BROKER
    if lane.service.paused:
        return Hold.PAUSED_SERVICE
    return Hold.PAUSED_LANE if lane.paused else None


def limit(ledger: Ledger, lane: Lane, now_ns: int) -> Hold | None:
    """The limit that refuses one more worker a task of a lane."""
    rules = lane.service.rules
    if _reached(ledger.rules.workers_max, ledger.serving):
        return Hold.LIMIT_BROKER
    if _reached(rules.workers_max, lane.service.serving):
        return Hold.LIMIT_SERVICE
    if is_full(lane) or (lane.name and lane.workers >= rules.lane_workers_max):
        return Hold.LIMIT_LANE
    return None if rate_room(lane.service, now_ns) else Hold.RATE


def is_full(lane: Lane) -> bool:
    """Nobody can take of a lane before a lease of it ends."""
    rules = lane.service.rules
    return bool(lane.name) and lane.leased >= rules.lane_workers_max * (1 + rules.overfeed)


def _reached(maximum: int, count: int) -> bool:
    return bool(maximum) and count >= maximum


def rate_room(service: Service, now_ns: int) -> int:
    """How many tasks the service's rate allows now."""
    interval_ns = service.rules.rate_interval_ns
    if not interval_ns:
        return TASKS_MAX
    since_ns = max(service.rate_next_ns, now_ns - RATE_SAVED_NS_MAX)
    return (now_ns - since_ns) // interval_ns + 1 if now_ns >= since_ns else 0


def rate_spend(service: Service, count: int, now_ns: int) -> None:
    """Count leased tasks against the service's rate."""
    interval_ns = service.rules.rate_interval_ns
    if interval_ns:
        since_ns = max(service.rate_next_ns, now_ns - RATE_SAVED_NS_MAX)
        service.rate_next_ns = since_ns + count * interval_ns


class Choice:
    """What one worker is given: built lane by lane, within the worker's room and the limits."""

    def __init__(self, ledger: Ledger, worker: Worker, count: int, now_ns: int) -> None:
        self.ledger = ledger
        self.worker = worker
        self.now_ns = now_ns
        self.slots = worker.slots_free
        self.count = min(count, self.slots)
        self.tasks: list[Task] = []
        #: Lanes that it begins to serve by this choice, which count for the limits.
        self.begun = 0
        #: The lane that it went on with.
        self.gone_on: Lane | None = None
        #: Nothing more for this worker, whatever lies in other lanes.
        self.closed = ledger.paused or holds_suspect(worker)

    def make(self) -> list[Task]:
        worker = self.worker
        services = worker.facts.services
        if worker.lane is not None and worker.lane.has_ready and not self.closed:
            self._go_on(worker.lane)
        for turn in range(len(services)):
            if self.closed or len(self.tasks) >= self.count:
                break
            name = services[(worker.service_next + turn) % len(services)]
            service = self.ledger.services.get(name)
            if service is not None and not service.paused:
                self._rotate(service)
        return self.tasks

    def _go_on(self, lane: Lane) -> None:
        """With the lane it served last, unless other lanes have waited long enough."""
        service = lane.service
        known = service.name in self.worker.facts.services
        if not known or service.paused or lane.paused or not lane.name:
            return
        if self.worker.lane_run < LANE_RUN_TASKS_MAX:
            self.gone_on = lane
            self._take(lane)

    def _rotate(self, service: Service) -> None:
        """Give each lane in rotation its turn, once."""
        if service.reserved is self.worker:
            service.reserved = None
        rotation = service.rotation
        for _ in range(len(rotation)):
            if self.closed or len(self.tasks) >= self.count:
                break
            lane = rotation[0]
            if lane is self.gone_on:
                rotation.rotate(-1)
            elif lane.has_ready and not (lane.paused or is_full(lane)):
                self._take(lane)
                rotation.rotate(-1)
            else:
                rotation.popleft()  # offered again when it has work or a worker less
                lane.rotating = False

    def _take(self, lane: Lane) -> None:
        room = self._room(lane)
        if room <= 0:
            return
        if lane.suspect() is not None and self._take_suspect(lane):
            return
        tasks = self._fitting(lane, room) if lane.service.wide else lane.peek(room)
        if tasks and lane not in self.worker.lanes:
            self.begun += 1
        self.tasks = self.tasks + tasks if self.tasks else tasks
        self.slots -= sum(task.terms.slots for task in tasks) if lane.service.wide else len(tasks)

    def _room(self, lane: Lane) -> int:
        """How many tasks of a lane the limits allow this worker."""
        service, rules = lane.service, lane.service.rules
        room = self.count - len(self.tasks)
        if lane not in self.worker.lanes:
            if _reached(self.ledger.rules.workers_max, self.ledger.serving + self.begun):
                return 0
            if _reached(rules.workers_max, service.serving + self.begun):
                return 0
            if lane.name and lane.workers >= rules.lane_workers_max:
                return 0
        if lane.name:
            room = min(room, rules.lane_workers_max * (1 + rules.overfeed) - lane.leased)
        if rules.rate_interval_ns:
            room = min(room, rate_room(service, self.now_ns) - self._of(service))
        return room

    def _of(self, service: Service) -> int:
        return sum(task.lane.service is service for task in self.tasks)

    def _fitting(self, lane: Lane, room: int) -> list[Task]:
        """The next tasks that the worker has slots for. One that must wait for slots is not
        overtaken; one that is wider than the whole worker is left to others."""
        chosen: list[Task] = []
        slots = self.slots
        slots_most = self.worker.facts.slots_total or SLOTS_UNLIMITED
        for task in lane.peek(room + WIDE_LOOKAHEAD):
            if task.terms.slots > slots_most:
                continue
            slots -= task.terms.slots
            if slots < 0 or len(chosen) == room:
                break
            chosen.append(task)
        return chosen

    def _take_suspect(self, lane: Lane) -> bool:
        """A task charged with a lost worker goes alone, to a worker that holds nothing. One
        worker at a time is kept free for that; the others pass it over."""
        suspect, service = lane.suspect(), lane.service
        if suspect is None or suspect.terms.slots > self.worker.slots_free:
            return False
        if not self.worker.leases and not self.tasks:
            self.tasks = [suspect]
            self.closed = True
        elif service.reserved is None:
            service.reserved = self.worker
            self.closed = True
        return self.closed


def holds_suspect(worker: Worker) -> bool:
    """It holds a task that must be alone."""
    if len(worker.leases) != 1:
        return False
    (lease,) = worker.leases.values()
    return lease.left == 1 and len(lease.tasks) == 1 and lease.tasks[0].losses > 0


def park(ledger: Ledger, worker: Worker) -> None:
    """List a worker that waits for work at its services, unless it is listed or has no room."""
    if worker.listed == worker.used or worker.slots_free <= 0:
        return
    worker.listed = worker.used
    for name in worker.facts.services:
        service = ledger.service(name)
        list_again(service, worker)
        ledger.stirred[name] = service


def list_again(service: Service, worker: Worker) -> None:
    """Put a worker back in the list that it was taken from."""
    heappush(service.parked, (worker.used, worker.name, worker))


def next_parked(service: Service) -> Worker | None:
    """The least recently used worker that waits for work; it leaves the list."""
    while service.parked:
        used, _, worker = heappop(service.parked)
        if worker.used != used:
            continue  # it was served since, and is listed anew if it waits again
        if worker.state is WorkerState.PARKED and worker.slots_free > 0:
            return worker
        worker.listed = -1
    return None
