"""Simulated runs of whole lanes: the same leases at the same times as worker by worker."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from taskyard.core.limits import LANE_RUN_TASKS_MAX, SECOND_NS
from taskyard.errors import UserError
from taskyard.pipeline.sweep.grid import Point
from taskyard.pipeline.sweep.lane_runs import LaneRunSimulation, has_lane_runs
from taskyard.pipeline.sweep.per_worker import WorkerSimulation, uniform_workers
from taskyard.pipeline.sweep.workload import Setback, SettingsRules, TaskKind, Workload


def lanes(sizes: list[int], run_ns: list[int]) -> Workload:
    """Return tasks in lanes of these sizes, submitted in turns."""
    order = sorted((place, lane) for lane, size in enumerate(sizes) for place in range(size))
    names = [b"t%d" % number for number in range(len(order))]
    return Workload(names, run_ns, lanes=[b"lane-%d" % lane for _, lane in order])


def random_lanes(rng: random.Random) -> Workload:
    """Return lanes with failures. Half of them have many tasks of equal length."""
    count, lane_count = rng.randrange(1, 200), rng.randrange(1, 40)
    longest, unit_ns = rng.choice([(5, SECOND_NS), (10**10, 1)])
    names = [b"t%d" % number for number in range(count)]
    workload = Workload(names, [rng.randint(1, longest) * unit_ns for _ in names])
    workload.gap_ns = rng.choice([0, SECOND_NS // 1000])
    workload.lanes = [b"lane-%d" % rng.randrange(lane_count) for _ in names]
    workload.failing = [number for number in range(count) if rng.random() < 0.1]
    return workload


def assert_equal_runs(workload: Workload, point: Point) -> None:
    quick = LaneRunSimulation(workload, point)
    exact = WorkerSimulation(workload, point, uniform_workers(workload, point))
    quick.run()
    exact.run()
    assert quick.begun_ns == exact.begun_ns
    assert (quick.done, quick.failed, quick.busy_ns) == (exact.done, exact.failed, exact.busy_ns)
    assert (quick.makespan_ns, quick.ready_ns) == (exact.makespan_ns, exact.ready_ns)


@pytest.mark.parametrize(
    "seed", [*range(25), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(25, 500))]
)
def test_lane_runs_start_every_task_when_single_workers_do(seed: int) -> None:
    rng = random.Random(seed)
    workload = random_lanes(rng)
    lane_count = len(Counter(workload.lanes))
    assert_equal_runs(workload, Point(rng.randrange(1, lane_count + 2), 1))
    assert_equal_runs(workload, Point(-(-lane_count // 2), 2))


def test_longest_lane_run_is_equal_and_a_longer_one_is_not_used() -> None:
    sizes = [LANE_RUN_TASKS_MAX, 3, 40, LANE_RUN_TASKS_MAX]
    rng = random.Random(5)
    workload = lanes(sizes, [rng.randrange(1, SECOND_NS) for _ in range(sum(sizes))])
    assert_equal_runs(workload, Point(2, 1))
    longer = lanes([*sizes, LANE_RUN_TASKS_MAX + 1], [1] * (sum(sizes) + LANE_RUN_TASKS_MAX + 1))
    assert not has_lane_runs(longer, Point(2, 1))
    assert has_lane_runs(longer, Point(5, 1))
    assert_equal_runs(longer, Point(5, 1))


def test_request_divides_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskyard.core.selection.LEASE_TASKS_MAX", 10)
    monkeypatch.setattr("taskyard.pipeline.sweep.lane_runs.LEASE_TASKS_MAX", 10)
    sizes = [4, 1, 2, 4, 4, 3, 4]
    assert_equal_runs(lanes(sizes, list(range(1, sum(sizes) + 1))), Point(3, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"lanes": None},
        {"lanes": [b"", b"a", b"b", b"c"]},
        {"after": [[], [], [], [0]]},
        {"arrivals_ns": [0, 0, 0, 1]},
        {"setbacks": {2: [Setback(1, 1)]}},
        {"kinds": [TaskKind(slots=2)]},
        {"kinds": [TaskKind(due_ns=1)]},
        {"kinds": [TaskKind(b"x"), TaskKind(b"y")]},
        {"kinds": [TaskKind(priority=1), TaskKind(priority=2)]},
        {"rules": SettingsRules(workers_max=1)},
    ],
)
def test_lane_runs_are_not_used_for_other_tasks(change: dict[str, object]) -> None:
    workload = lanes([1, 2, 1], [SECOND_NS] * 4)
    assert has_lane_runs(workload, Point(2, 1))
    for name, value in change.items():
        setattr(workload, name, value)
    assert not has_lane_runs(workload, Point(2, 1))


@pytest.mark.parametrize(
    "policy",
    ["lane_workers_max=2", "workers_max=1", "broker_workers_max=1", "overfeed=1", "order=random"],
)
def test_lane_runs_are_not_used_under_other_rules(policy: str) -> None:
    workload = lanes([1, 2, 1], [SECOND_NS] * 4)
    assert has_lane_runs(workload, Point(2, 1, ("lane_workers_max=1",)))
    assert not has_lane_runs(workload, Point(2, 1, (policy,)))
    assert not has_lane_runs(workload, Point(1, 2))


def test_refused_lanes_raise() -> None:
    with pytest.raises(UserError, match="the scheduler refuses the campaign"):
        LaneRunSimulation(Workload([b"a" * 2000], [1], lanes=[b"x"]), Point(1, 1)).run()
