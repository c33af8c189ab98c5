"""Which task next, which worker next. Looks and chooses; changes nothing that is durable.

A worker that asks goes on with its lane if it has one, else takes the next lane of its services
in rotation. Limits apply in this order, and the first that refuses is the lane's reason: broker,
service, lane, rate; the service's are those of the clause that the lane is run by. Workers are
served least recently used first.
"""

from __future__ import annotations

from enum import Enum
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final
from zlib import crc32

from taskyard.core.agenda import unreserve
from taskyard.core.limits import (
    LANE_RUN_TASKS_MAX,
    LEASE_TASKS_MAX,
    PARKED_VOID_MAX,
    RATE_SAVED_NS_MAX,
    TASKS_MAX,
    WIDE_LOOKAHEAD,
)
from taskyard.core.states import PARKED
from taskyard.core.workers import SLOTS_UNLIMITED

if TYPE_CHECKING:
    from taskyard.core.agenda import Branch, Lane, Service
    from taskyard.core.ledger import Ledger
    from taskyard.core.regimes import Regime
    from taskyard.core.tasks import Task
    from taskyard.core.workers import Worker


#: What workers of a dialect can't be told, because it means something else there: a task with such
#: a payload, or such a name and no payload, is left to other workers.
UNTELLABLE: Final[dict[bytes, tuple[bytes, ...]]] = {b"ping-pong": (b"PONG", b"EXIT")}

#: Workers of these dialects stand in line: who has waited longest is served first.
IN_LINE: Final = (b"ping-pong",)

#: Workers of these dialects come in at the top: who came last is served first, once.
AT_TOP: Final = (b"round-robin",)


class Hold(Enum):
    """Why a lane that has ready tasks gives none. The sentences are for people."""

    PAUSED_BROKER = "everything is paused"
    PAUSED_SERVICE = "its service is paused"
    PAUSED_LANE = "its lane is paused"
    HELD = "its lane is held until somebody asks for it"
    GATHERING = "its lane gathers more tasks before it begins"
    LIMIT_BROKER = "the broker's limit of workers at once is reached"
    LIMIT_SERVICE = "its service's limit of workers at once is reached"
    LIMIT_LANE = "its lane's limit of workers at once is reached"
    RATE = "its service's rate is used up for the moment"
    NO_WORKER = "no worker of its service is connected"
    TROUBLE = "no worker of its service can start its agent"


def paused(ledger: Ledger, lane: Lane) -> Hold | None:
    """The pause that holds a lane back."""
    if ledger.paused:
        return Hold.PAUSED_BROKER
    if lane.service.paused:
        return Hold.PAUSED_SERVICE
    return Hold.PAUSED_LANE if lane.paused else None


def held_back(lane: Lane, now_ns: int) -> Hold | None:
    """What the rules of a lane let it wait for, beside limits."""
    if lane.rules.is_held and lane.released <= lane.leased:
        return Hold.HELD
    return Hold.GATHERING if lane.begins_ns > now_ns else None


def limit(ledger: Ledger, lane: Lane, now_ns: int) -> Hold | None:
    """The limit that refuses one more worker a task of a lane."""
    regime = lane.branch.regime
    if _left(ledger.rules.workers_max, ledger.serving) <= 0:
        return Hold.LIMIT_BROKER
    if _left(regime.rules.workers_max, regime.serving) <= 0:
        return Hold.LIMIT_SERVICE
    if lane.name and _left(regime.rules.lane_workers_max, lane.workers) <= 0:
        return Hold.LIMIT_LANE
    if lane.name and lane.leased >= regime.lane_room:
        return Hold.LIMIT_LANE
    return None if rate_room(regime, now_ns) else Hold.RATE


def rate_room(regime: Regime, now_ns: int) -> int:
    """How many tasks the regime's rate allows now."""
    interval_ns = regime.rules.rate_interval_ns
    if not interval_ns:
        return TASKS_MAX
    since_ns = max(regime.rate_next_ns, now_ns - RATE_SAVED_NS_MAX)
    return (now_ns - since_ns) // interval_ns + 1 if now_ns >= since_ns else 0


def rate_spend(regime: Regime, count: int, now_ns: int) -> None:
    """Count leased tasks against the regime's rate."""
    interval_ns = regime.rules.rate_interval_ns
    if interval_ns:
        since_ns = max(regime.rate_next_ns, now_ns - RATE_SAVED_NS_MAX)
        regime.rate_next_ns = since_ns + count * interval_ns


class Choice:
    """What one worker is given: built lane by lane, within the worker's room and the limits."""

    def __init__(self, ledger: Ledger, worker: Worker, count: int, now_ns: int) -> None:
        self.ledger = ledger
        self.worker = worker
        self.now_ns = now_ns
        self.slots = worker.slots_free
        #: How many tasks more.
        self.count = min(count, self.slots, LEASE_TASKS_MAX)
        #: How many of these in lanes that are overfed, which don't count as tasks of their own.
        self.extra = min(worker.ahead, LEASE_TASKS_MAX - self.count)
        self.tasks: list[Task] = []
        #: The lane that it went on with.
        self.gone_on: Lane | None = None
        #: Lanes of each regime that it begins to serve by this choice, which count for limits.
        self.begun: dict[Regime, int] = {}
        #: There are such limits at all; there is one of the broker as a whole.
        self.limited = ledger.limited
        self.broker_limited = bool(ledger.rules.workers_max)
        #: Tasks chosen of each regime that has a rate.
        self.spent: dict[Regime, int] = {}
        #: Lanes that have had their turn, by id; kept where a lane could be met again.
        self.taken: dict[int, Lane] = {}
        self.untellable = UNTELLABLE.get(worker.facts.dialect, ())
        #: Nothing more for this worker, whatever lies in other lanes.
        self.closed = ledger.paused or holds_suspect(worker) or is_reserved(worker)

    def make(self) -> list[Task]:
        worker = self.worker
        services = worker.facts.services
        if worker.reserved is not None and not self.closed:
            self._redeem(worker.reserved)
        if worker.lane is not None and worker.lane.ready and not self.closed:
            self._go_on(worker.lane)
        for turn in range(len(services)):
            if self.closed or self.count <= 0:
                break
            name = services[(worker.service_next + turn) % len(services)]
            service = self.ledger.services.get(name)
            if service is not None and not service.paused and service.has_work:
                self._rotate(service)
        return self.tasks

    def _go_on(self, lane: Lane) -> None:
        """With the lane it served last, unless other lanes have waited long enough."""
        service = lane.service
        known = service.name in self.worker.facts.services
        if not known or service.paused or lane.paused or not lane.name:
            return
        if not lane.branch.regime.is_plain and held_back(lane, self.now_ns):
            return
        if self.worker.lane_run < LANE_RUN_TASKS_MAX:
            self.gone_on = lane
            self._take(lane)

    def _rotate(self, service: Service) -> None:
        """Give each lane in rotation its turn, once."""
        branches = service.branches
        if len(branches) == 1:
            self._rotate_branch(branches[0], len(branches[0].rotation))
            return
        turns = {branch: len(branch.rotation) for branch in branches if branch.rotation}
        while turns and self.count > 0 and not self.closed:
            branch = min(turns, key=_turn_of_branch)
            goes_on = self._rotate_branch(branch, 1)
            branch.had_turn()
            turns[branch] -= 1
            if not goes_on or not turns[branch]:
                del turns[branch]

    def _rotate_branch(self, branch: Branch, turns: int) -> bool:
        """Give the next lanes of a branch their turn; False when its limits allow no more."""
        if branch.regime.is_plain and not self.broker_limited:
            self._rotate_plainly(branch, turns)
            return True
        return self._rotate_counting(branch, turns)

    def _rotate_plainly(self, branch: Branch, turns: int) -> None:
        """Lanes that have no limits but their own."""
        rotation, lane_room, service = branch.rotation, branch.regime.lane_room, branch.service
        overfed = branch.regime.rules.overfeed and self.extra
        plain = not (service.wide or service.suspects or self.untellable or overfed)
        gone_on, chosen = self.gone_on, self.tasks
        for _ in range(turns):
            lane = rotation.popleft()
            if not lane.ready or lane.paused or (lane.leased >= lane_room and lane.name):
                lane.rotating = False  # offered again when it has work, or a lease less
                continue
            rotation.append(lane)
            if lane is gone_on:
                continue
            if plain and not lane.leased and lane.name and lane.others is None:
                # The common case of many lanes: nobody serves it, and no limit needs counting.
                line = lane.line
                if lane_room == 1 and not line.front and not line.stale:
                    chosen.append(line.items[line.cursor])
                    self.count -= 1
                else:
                    tasks = line.peek(min(lane_room, self.count))
                    chosen += tasks
                    self.count -= len(tasks)
            else:
                self._take(lane)
                if self.closed:
                    break
            if self.count <= 0:
                break

    def _rotate_counting(self, branch: Branch, turns: int) -> bool:
        """Lanes that others count for, or that wait for more than a worker."""
        regime, rotation = branch.regime, branch.rotation
        for _ in range(turns):
            if not self._is_open(regime):
                self._serve_own(regime)
                return False
            if self.count <= 0 or self.closed:
                break
            lane = rotation.popleft()
            full = lane.leased >= regime.lane_room and lane.name
            if not lane.ready or lane.paused or full or held_back(lane, self.now_ns):
                lane.rotating = False  # offered again when that is over
                continue
            rotation.append(lane)
            if lane is not self.gone_on:
                self._take(lane)
        return True

    def _is_open(self, regime: Regime) -> bool:
        """Its limits, over all its lanes, let a worker begin with one more."""
        if regime.rules.rate_interval_ns and self._rate_left(regime) <= 0:
            return False
        return self._may_begin(regime)

    def _serve_own(self, regime: Regime) -> None:
        """No lane may be begun, but those that the worker serves already have room perhaps."""
        if regime.rules.rate_interval_ns and self._rate_left(regime) <= 0:
            return
        leases = self.worker.leases.values()
        own = {id(lane): lane for lease in leases for lane, _ in lease.counts}
        for lane in own.values():
            if self.closed or self.count <= 0:
                break
            fits = lane.branch.regime is regime and lane.service.name in self.worker.facts.services
            if not fits or not lane.ready or lane.paused or lane.service.paused:
                continue
            if lane is not self.gone_on and not held_back(lane, self.now_ns):
                self._take(lane)

    def _rate_left(self, regime: Regime) -> int:
        return rate_room(regime, self.now_ns) - self.spent.get(regime, 0)

    def _take(self, lane: Lane) -> None:
        """Choose what a lane has for this worker."""
        regime = lane.branch.regime
        begins = not lane.is_served_by(self.worker)
        if self.limited and (id(lane) in self.taken or (begins and not self._may_begin(regime))):
            return
        room = self._room(lane, begins=begins)
        if room <= 0 or (lane.rare is not None and lane.suspects and self._take_suspect(lane)):
            return
        tasks = self._fitting(lane, room) if lane.service.wide else self._next(lane, room)
        self.tasks += tasks
        extra = self._extra_of(lane, len(tasks), begins=begins)
        self.extra -= extra
        self.count = min(self.count - len(tasks) + extra, self._slots_left())
        if not regime.is_plain or self.limited:
            self._count_taken(lane, len(tasks), begins=begins)

    def _count_taken(self, lane: Lane, count: int, *, begins: bool) -> None:
        """Keep what limits and rates are counted by, and what must not be met twice."""
        regime = lane.branch.regime
        self.taken[id(lane)] = lane
        if count and begins:
            self.begun[regime] = self.begun.get(regime, 0) + 1
        if regime.rules.rate_interval_ns:
            self.spent[regime] = self.spent.get(regime, 0) + count

    def _extra_of(self, lane: Lane, count: int, *, begins: bool) -> int:
        """How many of so many tasks of a lane are beyond the one in hand: a worker that takes tasks
        ahead asks for tasks in hand, and gets these with them."""
        overfeed = lane.rules.overfeed
        if not self.extra or not overfeed or not lane.name:
            return 0
        in_hand = -(-count // (1 + overfeed))
        return min(self.extra, count - in_hand + (not begins and count > 0))

    def _slots_left(self) -> int:
        if not self.ledger.wide:
            return self.slots - len(self.tasks)
        return self.slots - sum(task.terms.slots for task in self.tasks)

    def _may_begin(self, regime: Regime) -> bool:
        """The limits of workers at once allow one more pair of a lane and a worker."""
        if not self.limited:
            return True
        ledger, begun = self.ledger, self.begun
        if _left(ledger.rules.workers_max, ledger.serving + sum(begun.values())) <= 0:
            return False
        return _left(regime.rules.workers_max, regime.serving + begun.get(regime, 0)) > 0

    def _room(self, lane: Lane, *, begins: bool) -> int:
        """How many tasks of a lane its own limits and the rate allow this worker."""
        room, regime = self.count, lane.branch.regime
        if lane.name:
            if begins and _left(regime.rules.lane_workers_max, lane.workers) <= 0:
                return 0
            if regime.rules.overfeed:
                room = min(room + self.extra, self._slots_left())
            room = min(room, regime.lane_room - lane.leased)
        if regime.is_plain:
            return room
        if regime.rules.rate_interval_ns:
            room = min(room, self._rate_left(regime))
        if regime.rules.is_held:
            room = min(room, lane.released - lane.leased)
        return room

    def _fitting(self, lane: Lane, room: int) -> list[Task]:
        """The next tasks that the worker has slots for. One that must wait for slots is not
        overtaken; one that is wider than the whole worker is left to others."""
        chosen: list[Task] = []
        slots = self._slots_left()
        slots_most = self.worker.facts.slots_total or SLOTS_UNLIMITED
        for task in self._next(lane, room + WIDE_LOOKAHEAD):
            if task.terms.slots > slots_most:
                continue
            slots -= task.terms.slots
            if slots < 0 or len(chosen) == room:
                break
            chosen.append(task)
        return chosen

    def _next(self, lane: Lane, count: int) -> list[Task]:
        """The next tasks that the worker can be told of. What is behind others is found, however
        many those are."""
        if not self.untellable:
            return lane.peek(count) if lane.branch.regime.is_plain else self._see(lane, count)
        looked = count
        while True:
            seen = self._see(lane, looked)
            tellable = [task for task in seen if self._can_tell(task)]
            if len(tellable) >= count or len(seen) < looked:
                return tellable[:count]
            looked *= 4

    def _see(self, lane: Lane, count: int) -> list[Task]:
        """The next tasks, in the order of the lane's rules. Luck is where the journal stands."""
        if not lane.rules.is_random:
            return lane.peek(count)
        return lane.draw(count, crc32(lane.name, self.ledger.record))

    def _can_tell(self, task: Task) -> bool:
        return (task.payload or task.name) not in self.untellable

    def _take_suspect(self, lane: Lane) -> bool:
        """A task charged with a lost worker goes alone, to a worker that holds nothing. One
        worker at a time is kept free for that; the others pass it over."""
        service, worker = lane.service, self.worker
        suspect = self._suspect(lane)
        if suspect is None:
            return False
        if worker.leases or self.tasks or suspect.terms.slots > self.slots:
            if service.reserved is None and worker.reserved is None:
                service.reserved, worker.reserved = worker, service
                self.closed = True
        else:
            self.tasks = [suspect]
            self.closed = True
        return self.closed

    def _suspect(self, lane: Lane) -> Task | None:
        """The suspect of a lane that this worker could be lent."""
        slots_most = self.worker.facts.slots_total or SLOTS_UNLIMITED
        suspect = lane.suspect(slots_most)
        if suspect is None or self._can_tell(suspect):
            return suspect
        others = [task for task in lane.suspects or () if self._can_tell(task)]
        fitting = [task for task in others if task.terms.slots <= slots_most]
        return max(fitting, key=lambda task: task.terms.priority, default=None)

    def _redeem(self, service: Service) -> None:
        """An empty worker gets the suspect that it was kept free for, if it is still there. A lane
        without one for it has its turn later, and only once: what it took would be taken twice."""
        unreserve(service)
        for lane in service.rotating():
            if self.closed or lane.paused or service.paused or held_back(lane, self.now_ns):
                continue
            if self._suspect(lane) is not None:
                self._take(lane)


def _left(maximum: int, count: int) -> int:
    """How many more a limit allows; 0 as a maximum means no limit."""
    return maximum - count if maximum else TASKS_MAX


def _turn_of_branch(branch: Branch) -> int:
    return branch.turn


def begins_to_wait_in_line(worker: Worker) -> bool:
    """Its place is behind those that wait already, whenever it was used last."""
    in_line = worker.facts.dialect in IN_LINE
    return in_line and worker.listed != worker.used and worker.slots_free > 0


def is_reserved(worker: Worker) -> bool:
    """It is kept free for a suspect, and not free yet."""
    service = worker.reserved
    return service is not None and service.suspects > 0 and bool(worker.leases)


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
        list_again(ledger, service, worker)
        ledger.stirred[name] = service


def list_again(ledger: Ledger, service: Service, worker: Worker) -> None:
    """Put a worker in a service's list. Entries that are void are thrown out now and then."""
    parked = service.parked
    if len(parked) > PARKED_VOID_MAX + 2 * service.workers:
        known = ledger.workers
        valid = [(used, name) for used, name in parked if _is_used(known.get(name), used)]
        parked[:] = dict.fromkeys(valid)
        heapify(parked)
    heappush(parked, (worker.used, worker.name))


def _is_used(worker: Worker | None, used: int) -> bool:
    return worker is not None and worker.used == used


def next_parked(ledger: Ledger, service: Service) -> Worker | None:
    """The least recently used worker that waits for work; it leaves the list."""
    while service.parked:
        used, name = heappop(service.parked)
        worker = ledger.workers.get(name)
        if worker is None or worker.used != used:
            continue  # it is gone, or was served since and is listed anew if it waits again
        if worker.state is PARKED and worker.slots_free > 0:
            return worker
        worker.listed = -1
    return None
