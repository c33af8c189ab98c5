"""A campaign as the simulation needs it: columns of plain numbers and bytes, small enough to send.

Owns what is known of the tasks: what each waits for, where it queues, how long it takes, how often
it failed before. Times are nanoseconds from the campaign's beginning. Knows neither Spark nor where
the columns came from.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct, field

from taskyard.core.events import SubmitRequested, UnknownPolicy
from taskyard.core.limits import TASKS_PER_MESSAGE_MAX
from taskyard.core.model import Submission, Terms

#: Who submits in a simulation.
CLIENT: Final = b"sweep"


class TaskKind(Struct, frozen=True, array_like=True):
    """What tasks have in common; most campaigns have a handful of kinds."""

    service: bytes = b"default"
    priority: int = 0
    slots: int = 1
    #: Not before this time; 0 for at once.
    due_ns: int = 0


class Setback(Struct, frozen=True, array_like=True):
    """An attempt that failed, and how long it was until the next could begin."""

    run_ns: int
    delay_ns: int


class Stay(Struct, frozen=True, array_like=True):
    """A worker of the measured run: when it came, when it went, what it had room for."""

    name: bytes
    services: tuple[bytes, ...]
    slots: int
    joined_ns: int
    #: 0: it stayed until the end.
    left_ns: int = 0
    #: It went without a goodbye, so that its tasks are charged.
    is_lost: bool = False


class Workload(Struct, array_like=True):
    """The tasks of a campaign by number, in the order of their submission."""

    names: list[bytes]
    #: How long each keeps its slots, by the attempt that settled it.
    run_ns: list[int]
    kinds: list[TaskKind] = field(default_factory=lambda: [TaskKind()])
    #: Which of `kinds` each task is of; None: all are of the first.
    kind_at: list[int] | None = None
    #: The lane of each task, b"" for the open one; None: all are in the open lane.
    lanes: list[bytes] | None = None
    #: The numbers of the tasks that each waits for; None: nobody waits.
    after: list[list[int]] | None = None
    #: When each was submitted; None: all at the beginning. It never falls from one to the next.
    arrivals_ns: list[int] | None = None
    #: By number: what went wrong before the attempt that settled the task.
    setbacks: dict[int, list[Setback]] = field(default_factory=dict)
    #: Tasks that failed for good.
    failing: list[int] = field(default_factory=list)
    #: From a slot that is free, and a task that is ready, to the lease: what the broker and the
    #: wire cost a task, as measured.
    gap_ns: int = 0
    #: The workers as they were, and how long it took; of a campaign that was run.
    stays: list[Stay] = field(default_factory=list)
    makespan_ns: int = 0
    #: Tasks whose time is not their own but the median of their service.
    estimated_count: int = 0

    def kind(self, number: int) -> TaskKind:
        return self.kinds[0 if self.kind_at is None else self.kind_at[number]]

    @property
    def services(self) -> tuple[bytes, ...]:
        return tuple(dict.fromkeys(kind.service for kind in self.kinds))

    def earliest_ns(self) -> list[int]:
        """When each task has arrived and is due."""
        arrivals = self.arrivals_ns or [0] * len(self.names)
        if not any(kind.due_ns for kind in self.kinds):
            return list(arrivals)
        return [max(at_ns, self.kind(number).due_ns) for number, at_ns in enumerate(arrivals)]

    def dependents(self) -> list[list[int]] | None:
        """Who waits for each task; None: nobody for anybody."""
        if self.after is None:
            return None
        waiting: list[list[int]] = [[] for _ in self.names]
        for number, after in enumerate(self.after):
            for before in after:
                waiting[before].append(number)
        return waiting


def encode_workload(workload: Workload) -> bytes:
    return msgspec.msgpack.encode(workload)


def decode_workload(data: bytes) -> Workload:
    return msgspec.msgpack.decode(data, type=Workload)


def submissions(workload: Workload) -> list[SubmitRequested]:
    """The events that submit it, in the order of their times."""
    arrivals = workload.arrivals_ns
    asked: list[SubmitRequested] = []
    first, count = 0, len(workload.names)
    while first < count:
        last = min(first + TASKS_PER_MESSAGE_MAX, count)
        now_ns = 0
        if arrivals is not None:
            now_ns = arrivals[first]
            last = _end_of_batch(arrivals, first, last)
        asked.append(
            SubmitRequested(now_ns, CLIENT, _part(workload, first, last), 0, UnknownPolicy.WAIT)
        )
        first = last
    return asked


def _end_of_batch(arrivals: list[int], first: int, last: int) -> int:
    """The first task after `first` that came at another time."""
    now_ns = arrivals[first]
    if arrivals[last - 1] == now_ns:
        return last
    while arrivals[first] == now_ns:
        first += 1
    return first


def _part(workload: Workload, first: int, last: int) -> Submission:
    names = workload.names
    part = Submission(names[first:last], terms=[_terms(workload.kinds[0])])
    if workload.kind_at is not None:
        used = {kind: place for place, kind in enumerate(sorted({*workload.kind_at[first:last]}))}
        part.terms = [_terms(workload.kinds[kind]) for kind in used]
        part.terms_at = [used[kind] for kind in workload.kind_at[first:last]]
    if workload.lanes is not None:
        part.lanes = workload.lanes[first:last]
    if workload.after is not None:
        part.after = [[names[before] for before in after] for after in workload.after[first:last]]
    return part


def _terms(kind: TaskKind) -> Terms:
    return Terms(service=kind.service, priority=kind.priority, slots=kind.slots, due_ns=kind.due_ns)


class CampaignBounds(Struct, frozen=True):
    """The bounds of a campaign; times with what the broker costs a task."""

    tasks: int
    #: All tasks one after the other, each as often as it has slots.
    work_ns: int
    #: The longest chain of tasks that wait for each other, from its arrival on.
    chain_ns: int
    #: The most tasks one after the other, in a chain or in a lane.
    steps: int
    #: The lane with the most work, and how much that is; 0 where nothing is in a lane.
    lane: bytes = b""
    lane_ns: int = 0
    #: When the last task arrives.
    arrival_ns: int = 0

    def bound_ns(self, slots: int, lane_workers: int) -> int:
        """What so many slots, and so many workers a lane, can't be quicker than."""
        lane_ns = self.lane_ns // lane_workers if lane_workers else 0
        return max(self.chain_ns, self.work_ns // slots, lane_ns, self.arrival_ns)


def campaign_bounds(workload: Workload) -> CampaignBounds:
    times = _times(workload)
    ends, levels = _walk(workload, times)
    lane, lane_ns, lane_tasks = _longest_lane(workload, times)
    slots = [workload.kind(number).slots for number in range(len(times))]
    return CampaignBounds(
        tasks=len(times),
        work_ns=sum(time * wide for time, wide in zip(times, slots, strict=True)),
        chain_ns=max(ends, default=0),
        steps=max(max(levels, default=0), lane_tasks),
        lane=lane,
        lane_ns=lane_ns,
        arrival_ns=max(workload.arrivals_ns or [0]),
    )


def _times(workload: Workload) -> list[int]:
    """How long each task keeps its slots, all its attempts together."""
    times = [run_ns + workload.gap_ns for run_ns in workload.run_ns]
    for number, setbacks in workload.setbacks.items():
        times[number] += sum(setback.run_ns + workload.gap_ns for setback in setbacks)
    return times


def _walk(workload: Workload, times: list[int]) -> tuple[list[int], list[int]]:
    """When each task could end at the earliest, and how many tasks its chain has. A task that can
    never run, behind a failure, counts as if it could."""
    ends = [at_ns + time for at_ns, time in zip(workload.earliest_ns(), times, strict=True)]
    for number, setbacks in workload.setbacks.items():
        ends[number] += sum(setback.delay_ns for setback in setbacks)
    levels = [1] * len(times)
    dependents = workload.dependents()
    if dependents is None or workload.after is None:
        return ends, levels
    left = [len(after) for after in workload.after]
    line = [number for number, waits in enumerate(left) if not waits]
    for number in line:  # grows while it is walked
        for dependent in dependents[number]:
            ends[dependent] = max(ends[dependent], ends[number] + times[dependent])
            levels[dependent] = max(levels[dependent], levels[number] + 1)
            left[dependent] -= 1
            if not left[dependent]:
                line.append(dependent)
    return ends, levels


def _longest_lane(workload: Workload, times: list[int]) -> tuple[bytes, int, int]:
    """The lane with the most work: its name, its work, and the most tasks that a lane has."""
    if workload.lanes is None:
        return b"", 0, 0
    work: dict[bytes, int] = {}
    tasks: dict[bytes, int] = {}
    for lane, time in zip(workload.lanes, times, strict=True):
        if lane:
            work[lane] = work.get(lane, 0) + time
            tasks[lane] = tasks.get(lane, 0) + 1
    if not work:
        return b"", 0, 0
    lane = max(work, key=lambda name: work[name])
    return lane, work[lane], max(tasks.values())
