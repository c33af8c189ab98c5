"""The compact copy of the scheduler's rules: every task starts as with the scheduler itself."""

from __future__ import annotations

import random

import pytest

from taskyard.core.events import RulesSet
from taskyard.core.limits import LANE_RUN_TASKS_MAX, SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from taskyard.errors import UserError
from taskyard.pipeline.sweep.compact import CompactSimulation, can_compact
from taskyard.pipeline.sweep.grid import Point
from taskyard.pipeline.sweep.per_worker import WorkerSimulation, uniform_workers
from taskyard.pipeline.sweep.simulation import check_accepted
from taskyard.pipeline.sweep.workload import (
    Setback,
    SettingsRules,
    TaskKind,
    Workload,
    settings_rules,
)

#: Run times as (most units, unit): many equal times, and hardly any.
SPANS = [(5, SECOND_NS), (5, SECOND_NS // 5), (10**10, 1)]

#: Rules for workers with one slot, and for all. Those over all lanes exclude `lane_rate`.
ONE_SLOT_POLICIES = [
    *[("workers_max=3",), ("broker_workers_max=2",), ("workers_max=4", "broker_workers_max=3")],
    *[("rate=1/s",), ("rate=5/s", "workers_max=2"), ("rate=30/s",)],
    *[("overfeed=2",), ("overfeed=1", "lane_rate=2/s")],
]
POLICIES = [(), (), (), ("lane_rate=1/s",), ("lane_rate=30/s",)]


#: Options in sections of the settings, likewise.
ONE_SLOT_OPTIONS = [
    *[LaneOptions(workers_max=2), LaneOptions(workers_max=3, lane_workers_max=2)],
    *[LaneOptions(rate_interval_ns=SECOND_NS // 5), LaneOptions(overfeed=2)],
    LaneOptions(rate_interval_ns=SECOND_NS, workers_max=1),
]
OPTIONS = [
    *[LaneOptions(), LaneOptions(lane_workers_max=0), LaneOptions(lane_workers_max=3)],
    *[LaneOptions(lane_rate_interval_ns=SECOND_NS // rate) for rate in (1, 5)],
]


def assert_equal_runs(workload: Workload, point: Point) -> None:
    assert can_compact(workload, point)
    quick = CompactSimulation(workload, point)
    exact = WorkerSimulation(workload, point, uniform_workers(workload, point))
    quick.run()
    exact.run()
    assert quick.begun_ns == exact.begun_ns
    assert (quick.done, quick.failed, quick.busy_ns) == (exact.done, exact.failed, exact.busy_ns)
    assert (quick.makespan_ns, quick.ready_ns) == (exact.makespan_ns, exact.ready_ns)


def random_workload(rng: random.Random) -> Workload:
    """Return tasks in lanes of some services, each with some of everything that decides."""
    longest, unit_ns = rng.choice(SPANS)
    names = [b"t%d" % number for number in range(rng.randrange(1, 150))]
    workload = Workload(names, [rng.randint(1, longest) * unit_ns for _ in names])
    workload.gap_ns = rng.choice([0, 0, SECOND_NS // 1000])
    lane_count, open_share = rng.choice([1, 3, 10, 40]), rng.choice([0, 0, 0.3, 1])
    workload.lanes = [
        b"" if rng.random() < open_share else b"lane-%d" % rng.randrange(lane_count) for _ in names
    ]
    services, priorities = rng.choice([1, 1, 3]), rng.choice([[0], [0], [0, 1, -2]])
    dues_ns = rng.choice([[0], [0], [0, 0, 3 * SECOND_NS]])
    workload.kinds = [
        TaskKind(b"s%d" % rng.randrange(services), rng.choice(priorities), 1, rng.choice(dues_ns))
        for _ in range(rng.choice([1, 5]))
    ]
    workload.kind_at = [rng.randrange(len(workload.kinds)) for _ in names]
    if rng.random() < 0.4:
        workload.after = [
            [rng.randrange(number) for _ in range(rng.randrange(3))] if number else []
            for number in range(len(names))
        ]
    if rng.random() < 0.4:
        workload.arrivals_ns = sorted(rng.randrange(12) * SECOND_NS // 3 for _ in names)
    if rng.random() < 0.4:
        workload.setbacks = {
            number: [
                Setback(rng.randint(1, longest) * unit_ns, rng.randrange(3) * SECOND_NS)
                for _ in range(rng.randrange(1, 3))
            ]
            for number in rng.sample(range(len(names)), len(names) // 6)
        }
    workload.failing = rng.sample(range(len(names)), rng.choice([0, 0, len(names) // 10]))
    return workload


@pytest.mark.parametrize(
    "seed",
    [*range(100), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(100, 2000))],
)
def test_copy_starts_every_task_when_the_scheduler_does(seed: int) -> None:
    rng = random.Random(seed)
    workload, slots = random_workload(rng), rng.choice([1, 1, 2, 4])
    policy = rng.choice(POLICIES + ONE_SLOT_POLICIES if slots == 1 else POLICIES)
    limit = rng.choice([(), ("lane_workers_max=0",), ("lane_workers_max=2",)])
    assert_equal_runs(workload, Point(rng.randrange(1, rng.choice([4, 40])), slots, policy + limit))


@pytest.mark.parametrize(
    "seed",
    [*range(100), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(100, 1000))],
)
def test_copy_follows_the_sections_of_the_settings(seed: int) -> None:
    rng = random.Random(seed)
    workload, slots = random_workload(rng), rng.choice([1, 1, 2, 4])
    options = OPTIONS + ONE_SLOT_OPTIONS if slots == 1 else OPTIONS
    names = [name for name in workload.services if rng.random() < 0.8]
    rules = [Rule(name, name + b"/*", rng.choice(options)) for name in names]
    workload.rules = SettingsRules(tuple(rules), rng.choice(OPTIONS))
    assert_equal_runs(workload, Point(rng.randrange(1, rng.choice([4, 40])), slots))


@pytest.mark.parametrize("policy", [(), ("lane_workers_max=3",), ("workers_max=2",)])
def test_lane_run_ends_after_the_most_tasks(policy: tuple[str, ...]) -> None:
    count = 3 * LANE_RUN_TASKS_MAX
    rng = random.Random(7)
    workload = Workload(
        [b"t%d" % number for number in range(count)],
        [rng.randrange(1, SECOND_NS) for _ in range(count)],
        lanes=[b"short" if number % 10 == 9 else b"long" for number in range(count)],
    )
    assert_equal_runs(workload, Point(1, 1, policy))
    assert_equal_runs(workload, Point(2, 1, policy))


@pytest.mark.parametrize("arrivals_ns", [[0] * 9, [0, *[SECOND_NS] * 8]])
def test_messages_of_one_time_are_submitted_in_order(
    arrivals_ns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.pipeline.sweep.workload.TASKS_PER_MESSAGE_MAX", 2)
    workload = Workload([b"%d" % n for n in range(9)], [SECOND_NS] * 9)
    workload.lanes = [b"x", b"x", b"y", b"z", b"z", b"x", b"y", b"y", b"z"]
    workload.arrivals_ns = arrivals_ns
    assert_equal_runs(workload, Point(2, 2))


def test_defaults_of_the_settings_apply() -> None:
    rules = settings_rules(RulesSet(0, defaults=LaneOptions(lane_workers_max=2), workers_max=3))
    workload = Workload([b"%d" % n for n in range(12)], [SECOND_NS] * 12, lanes=[b"x", b"y"] * 6)
    workload.rules = rules
    assert_equal_runs(workload, Point(8, 1))
    run = CompactSimulation(workload, Point(8, 1))
    run.run()
    assert run.makespan_ns == 4 * SECOND_NS


@pytest.mark.parametrize(
    ("slots", "policy"),
    [
        (1, ("order=random",)),
        (1, ("lane_rate=1/s", "rate=1/s")),
        (1, ("lane_rate=1/s", "workers_max=1")),
        (1, ("lane_rate=1/s", "broker_workers_max=1")),
        (2, ("workers_max=1",)),
        (2, ("broker_workers_max=1",)),
        (2, ("rate=1/s",)),
        (2, ("overfeed=1",)),
        (20_000, ()),
    ],
)
def test_copy_is_not_used_under_other_rules(slots: int, policy: tuple[str, ...]) -> None:
    workload = Workload([b"a", b"b"], [1, 1], lanes=[b"x", b"y"])
    assert can_compact(workload, Point(2, 1))
    assert not can_compact(workload, Point(2, slots, policy))


def test_copy_is_not_used_for_wide_tasks_several_rules_of_a_service_and_debounce() -> None:
    wide = Workload([b"a", b"b"], [1, 1], [TaskKind(), TaskKind(slots=2)], [0, 1])
    assert not can_compact(wide, Point(2, 1))
    rule = Rule(b"s", b"default/x", LaneOptions(lane_workers_max=2))
    ruled = Workload([b"a"], [1], rules=SettingsRules((rule,)))
    assert not can_compact(ruled, Point(2, 1))
    collected = Workload(
        [b"a"], [1], rules=settings_rules(RulesSet(0, (), LaneOptions(debounce_ns=1)))
    )
    assert not can_compact(collected, Point(2, 1))


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (Workload([b"a" * 2000], [1], lanes=[b"x"]), "bytes"),
        (Workload([b"a", b"b"], [1, 1], after=[[1], [0]], lanes=[b"x", b"x"]), "each other"),
    ],
)
def test_campaign_that_a_broker_would_refuse_raises(workload: Workload, text: str) -> None:
    with pytest.raises(UserError, match=f"the scheduler refuses the campaign: .*{text}"):
        check_accepted(workload)
