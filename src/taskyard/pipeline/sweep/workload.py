"""A campaign as the simulation needs it, and the bounds of its makespan.

Columns of plain numbers and bytes, small enough to send to every executor: dependencies, queue, run
time and failures of each task. Times are nanoseconds from the campaign's beginning. The bounds say
why more workers stop helping, and how far the simulation may prefetch without changing its result.
Knows neither Spark nor the origin of the columns.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct, field, structs

from taskyard.core.events import RulesSet, SubmitRequested, UnknownPolicy
from taskyard.core.limits import TASKS_PER_MESSAGE_MAX
from taskyard.core.model import Submission, Terms
from taskyard.core.rules import LaneOptions, Rule

#: The client that submits in a simulation.
CLIENT: Final = b"sweep"


class TaskKind(Struct, frozen=True, array_like=True):
    """Properties that tasks share. Most campaigns have a handful of kinds."""

    service: bytes = b"default"
    priority: int = 0
    slots: int = 1
    #: 0 for at once.
    due_ns: int = 0


class Setback(Struct, frozen=True, array_like=True):
    """A failed attempt, and the time until the next could start."""

    run_ns: int
    delay_ns: int


class Stay(Struct, frozen=True, array_like=True):
    """A worker of the measured run: when it joined and left, and its slots."""

    name: bytes
    services: tuple[bytes, ...]
    slots: int
    joined_ns: int
    #: 0 if it stayed until the end.
    left_ns: int = 0
    #: It was lost without an exit message, so its tasks are charged.
    is_lost: bool = False


class SettingsRules(Struct, frozen=True, array_like=True):
    """The rules of a broker, as far as they decide when a task is leased."""

    rules: tuple[Rule, ...] = ()
    defaults: LaneOptions = LaneOptions()
    workers_max: int = 0


#: Options that decide when a task is leased. The others act on failures, on old tasks or in agents,
#: and a workload has their effects as it has run times.
_LEASE_OPTIONS: Final = (
    *("workers_max", "lane_workers_max", "overfeed", "rate_interval_ns", "lane_rate_interval_ns"),
    *("weight", "is_random", "debounce_ns"),
)


def settings_rules(rules_set: RulesSet) -> SettingsRules | None:
    """Return the rules of the settings for a simulation, or None if they are the defaults."""
    rules = tuple(
        structs.replace(rule, options=_lease_options(rule.options)) for rule in rules_set.rules
    )
    made = SettingsRules(rules, _lease_options(rules_set.defaults), rules_set.workers_max)
    plain = all(rule.options == LaneOptions() for rule in rules)
    return None if plain and structs.replace(made, rules=()) == SettingsRules() else made


def _lease_options(options: LaneOptions) -> LaneOptions:
    return LaneOptions(**{name: getattr(options, name) for name in _LEASE_OPTIONS})


class Workload(Struct, array_like=True):
    """The tasks of a campaign by number, in order of submission."""

    names: list[bytes]
    #: How long each holds its slots, by its last attempt.
    run_ns: list[int]
    kinds: list[TaskKind] = field(default_factory=lambda: [TaskKind()])
    #: The index in `kinds` of each task. None: all are of the first kind.
    kind_at: list[int] | None = None
    #: The lane of each task, b"" for the open one. None: all are in the open lane.
    lanes: list[bytes] | None = None
    #: The numbers of the tasks that each waits for. None: there are no dependencies.
    after: list[list[int]] | None = None
    #: When each was submitted, in ascending order. None: all at the beginning.
    arrivals_ns: list[int] | None = None
    #: By task: its failed attempts before the last.
    setbacks: dict[int, list[Setback]] = field(default_factory=dict)
    #: Tasks that failed.
    failing: list[int] = field(default_factory=list)
    #: The measured cost of broker and wire: from a free slot and a ready task to the lease.
    gap_ns: int = 0
    #: The workers of the measured run, and its makespan.
    stays: list[Stay] = field(default_factory=list)
    makespan_ns: int = 0
    #: Tasks whose run time is the median of their service.
    estimated_count: int = 0
    #: Brokers that had the tasks.
    broker_count: int = 1
    #: The rules of the settings. None: the defaults.
    rules: SettingsRules | None = None

    def kind(self, number: int) -> TaskKind:
        return self.kinds[0 if self.kind_at is None else self.kind_at[number]]

    @property
    def services(self) -> tuple[bytes, ...]:
        return tuple(dict.fromkeys(kind.service for kind in self.kinds))

    def earliest_ns(self) -> list[int]:
        """Return the time from which each task is submitted and due."""
        arrivals = self.arrivals_ns or [0] * len(self.names)
        if not any(kind.due_ns for kind in self.kinds):
            return list(arrivals)
        return [max(at_ns, self.kind(number).due_ns) for number, at_ns in enumerate(arrivals)]

    def dependents(self) -> list[list[int]] | None:
        """Return the tasks that wait for each task, or None without dependencies."""
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
    """Return the events that submit the campaign, in order of time."""
    return [
        SubmitRequested(now_ns, CLIENT, _part(workload, first, last), 0, UnknownPolicy.WAIT)
        for now_ns, first, last in message_bounds(workload)
    ]


def message_bounds(workload: Workload) -> list[tuple[int, int, int]]:
    """Return the messages that submit the campaign: the time, the first task, and the one after
    the last."""
    arrivals = workload.arrivals_ns
    bounds: list[tuple[int, int, int]] = []
    first, count = 0, len(workload.names)
    while first < count:
        last = min(first + TASKS_PER_MESSAGE_MAX, count)
        now_ns = 0
        if arrivals is not None:
            now_ns = arrivals[first]
            last = _end_of_batch(arrivals, first, last)
        bounds.append((now_ns, first, last))
        first = last
    return bounds


def _end_of_batch(arrivals: list[int], first: int, last: int) -> int:
    """Return the first task after `first` that was submitted at another time."""
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
    """Lower bounds of a campaign's makespan. Times include the broker's cost per task."""

    tasks: int
    #: The sum of run times, each multiplied by its slots.
    work_ns: int
    #: The longest chain of dependent tasks, from its submission on.
    chain_ns: int
    #: The most tasks in sequence, in a chain or in a lane.
    steps: int
    #: The lane with the most work, and its work. 0 if nothing is in a lane.
    lane: bytes = b""
    lane_ns: int = 0
    #: When the last task is submitted.
    arrival_ns: int = 0

    def bound_ns(self, slots: int, lane_workers: int) -> int:
        """Return the least makespan with this many slots, and workers per lane."""
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
    """Return how long each task holds its slots, over all attempts."""
    times = [run_ns + workload.gap_ns for run_ns in workload.run_ns]
    for number, setbacks in workload.setbacks.items():
        times[number] += sum(setback.run_ns + workload.gap_ns for setback in setbacks)
    return times


def _walk(workload: Workload, times: list[int]) -> tuple[list[int], list[int]]:
    """Return when each task could end at the earliest, and the length of its chain.

    A task that can never run counts as if it could.
    """
    ends = [at_ns + time for at_ns, time in zip(workload.earliest_ns(), times, strict=True)]
    for number, setbacks in workload.setbacks.items():
        ends[number] += sum(setback.delay_ns for setback in setbacks)
    levels = [1] * len(times)
    dependents = workload.dependents()
    if dependents is None or workload.after is None:
        return ends, levels
    left = [len(after) for after in workload.after]
    line = [number for number, waits in enumerate(left) if not waits]
    for number in line:  # grows during the walk
        for dependent in dependents[number]:
            ends[dependent] = max(ends[dependent], ends[number] + times[dependent])
            levels[dependent] = max(levels[dependent], levels[number] + 1)
            left[dependent] -= 1
            if not left[dependent]:
                line.append(dependent)
    return ends, levels


def _longest_lane(workload: Workload, times: list[int]) -> tuple[bytes, int, int]:
    """Return the lane with the most work, its work, and the most tasks of any lane."""
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
