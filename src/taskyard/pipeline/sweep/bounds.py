"""What a campaign can't be quicker than, whoever works: its work, its longest chain, its lanes.

Walks the graph once, in numbers. The bounds say why more workers stop helping, and how far the
simulation may hand tasks ahead without changing what comes out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from taskyard.pipeline.sweep.workload import Workload


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
