"""Many lanes with a rate each, in simulated time: how exact the rates are, and their CPU cost.

The scheduler alone. A worker reports and requests tasks every 10 ms of a simulated clock. With
rates it requests more than they allow. Without, it requests as many as they would allow, so that
both runs lease the same number of tasks in the same number of events.
"""

from time import process_time_ns
from typing import Final

from msgspec import Struct

from taskyard.core.effects import Assign
from taskyard.core.events import (
    Event,
    RulesSet,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerRegistered,
)
from taskyard.core.limits import LEASE_TASKS_MAX, SECOND_NS
from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.rules import LaneOptions
from taskyard.core.scheduler import Scheduler

_WORKER: Final = b"worker"
_TICK_NS: Final = SECOND_NS // 100


class RatedLanes(Struct):
    """Lanes, their rate, and the figures of a run."""

    lanes: int
    #: Tasks per second and lane. It divides 100, so that lanes start spread over one interval.
    rate: int
    seconds: int
    #: False: the same events without rates.
    rated: bool
    #: CPU time of the scheduler.
    cpu_ns: int = 0
    leased: int = 0
    #: The largest deviation of a lane from its rate, as a share of it.
    deviation: float = 0.0

    @property
    def task_us(self) -> float:
        return self.cpu_ns / 1e3 / self.leased


class _Run:
    """A scheduler, its clock, and the leases of each lane."""

    def __init__(self, case: RatedLanes) -> None:
        self.case = case
        self.scheduler = Scheduler()
        self.now_ns = SECOND_NS
        self.held: list[bytes] = []
        #: Tasks leased of each lane since the end of its first interval.
        self.counts: dict[bytes, int] = {}

    def handle(self, event: Event) -> list[object]:
        event.now_ns = self.now_ns
        start_ns = process_time_ns()
        effects = self.scheduler.handle(event)
        self.scheduler.take_records()
        self.case.cpu_ns += process_time_ns() - start_ns
        return list(effects)

    def tick(self, count: int) -> None:
        """Report the tasks of the last tick and request the next tasks."""
        self.now_ns += _TICK_NS
        if self.held:
            self.handle(TasksReported(0, _WORKER, self.held))
        effects = self.handle(TasksRequested(0, _WORKER, count, parks=False))
        self.held = [name for one in effects if isinstance(one, Assign) for name in one.names]
        self.case.leased += len(self.held)

    def count_leases(self) -> None:
        for name in self.held:
            lane = name.partition(b"/")[0]
            self.counts[lane] += 1


def measure(case: RatedLanes) -> RatedLanes:
    """Fill in the figures of a case."""
    run = _Run(case)
    interval_ns = SECOND_NS // case.rate if case.rated else 0
    run.handle(RulesSet(0, defaults=LaneOptions(lane_rate_interval_ns=interval_ns)))
    run.handle(WorkerRegistered(0, _WORKER, WorkerFacts(slots_total=0)))
    ticks = SECOND_NS // case.rate // _TICK_NS
    due = case.lanes // ticks
    wanted = LEASE_TASKS_MAX if case.rated else due
    for tick in range(ticks):
        for number in range(tick * due, (tick + 1) * due):
            run.handle(_submission(b"%d" % number, case.rate * (case.seconds + 2)))
        run.tick(wanted)
    for _ in range(2 * ticks):  # until what a rate may save up is used
        run.tick(wanted)
    run.counts = {b"%d" % number: 0 for number in range(ticks * due)}
    for _ in range(case.seconds * case.rate * ticks):
        run.tick(wanted)
        run.count_leases()
    exact = case.rate * case.seconds
    case.deviation = max(abs(count - exact) for count in run.counts.values()) / exact
    return case


def _submission(lane: bytes, count: int) -> SubmitRequested:
    names = [b"%s/%d" % (lane, number) for number in range(count)]
    return SubmitRequested(0, b"client", Submission(names, lanes=[lane] * count))
