"""Weights between lanes of a service: shares while workers are short, and nothing saved up."""

from collections import Counter

import pytest

from taskyard.core.events import (
    RulesSet,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerRegistered,
)
from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.scheduler import Scheduler
from tests.core.kit import Yard, assigned


class Fleet:
    """A scheduler and workers that report and request in turn. Lanes with an `a` have a weight."""

    def __init__(self, weight: int, workers: int = 1, slots: int = 1, workers_max: int = 0) -> None:
        self.scheduler = Scheduler()
        rule = Rule(b"a", b"*/a*", LaneOptions(workers_max, weight=weight))
        self.scheduler.handle(RulesSet(0, (rule,), LaneOptions(workers_max)))
        self.held: dict[bytes, list[bytes]] = {b"w%d" % number: [] for number in range(workers)}
        self.slots = slots
        for name in self.held:
            self.scheduler.handle(WorkerRegistered(0, name, WorkerFacts(slots_total=slots)))

    def fill(self, letter: bytes, lanes: int, count: int) -> None:
        for lane in [b"%s%d" % (letter, number) for number in range(lanes)]:
            names = [b"%s-%d" % (lane, number) for number in range(count)]
            submission = Submission(names, lanes=[lane] * count)
            self.scheduler.handle(SubmitRequested(0, b"client", submission))

    def lease(self, count: int) -> Counter[bytes]:
        """Lease so many tasks. Return how many of them each letter had."""
        leased: Counter[bytes] = Counter()
        while True:
            for name in self.held:
                if self.held[name]:
                    self.scheduler.handle(TasksReported(0, name, self.held[name]))
                wanted = TasksRequested(0, name, self.slots, parks=False)
                self.held[name] = assigned(self.scheduler.handle(wanted))
                assert self.held[name]
                leased.update(task[:1] for task in self.held[name])
                if leased.total() >= count:
                    return leased


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes_a", "lanes_b", "weight", "workers", "slots"),
    [(1, 1, 3, 1, 1), (8, 8, 3, 2, 1), (3, 30, 7, 1, 4), (10, 10, 3, 2, 4)],
)
def test_lanes_get_tasks_in_proportion_to_their_weights(
    lanes_a: int, lanes_b: int, weight: int, workers: int, slots: int
) -> None:
    fleet = Fleet(weight, workers, slots)
    fleet.fill(b"a", lanes_a, 8000 // lanes_a)
    fleet.fill(b"b", lanes_b, 8000 // lanes_b)
    leased = fleet.lease(4000 * workers)
    ratio = (leased[b"a"] / lanes_a) / (leased[b"b"] / lanes_b)
    assert ratio == pytest.approx(weight, rel=0.05)


@pytest.mark.slow
def test_group_of_a_limit_over_its_lanes_has_its_share_too() -> None:
    fleet = Fleet(3, workers=2, workers_max=100)
    fleet.fill(b"a", 4, 2000)
    fleet.fill(b"b", 4, 2000)
    leased = fleet.lease(8000)
    assert leased[b"a"] / leased[b"b"] == pytest.approx(3, rel=0.05)


def test_lane_that_was_idle_has_saved_nothing_up() -> None:
    fleet = Fleet(3)
    fleet.fill(b"b", 2, 4000)
    fleet.lease(3000)
    fleet.fill(b"a", 2, 2000)
    leased = fleet.lease(1000)
    assert leased[b"a"] == pytest.approx(750, abs=100)  # a run of one lane


@pytest.mark.slow
def test_lane_of_a_limit_saves_nothing_up_while_it_is_reached() -> None:
    """The lanes a… may use one worker of four. With the limit gone they get their share only."""
    fleet = Fleet(1, workers=4)
    full = Rule(b"a", b"*/a*", LaneOptions(weight=3, workers_max=1))
    fleet.scheduler.handle(RulesSet(0, (full,)))
    fleet.fill(b"a", 6, 4000)
    fleet.fill(b"b", 6, 4000)
    leased = fleet.lease(8000)
    assert leased[b"a"] == pytest.approx(2000, rel=0.05)
    group, _ = fleet.scheduler.ledger.services[b"default"].lane_groups
    behind = (fleet.scheduler.ledger.services[b"default"].turn - group.turn) / (1 << 40)
    assert behind < 100  # tasks of one lane of weight 1


def test_served_lanes_keep_their_part_in_the_weight_of_their_group() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"a", b"*/a*", LaneOptions(weight=3)))
    lanes = [b"a1", b"a2", b"a3", b"b1"]
    yard.submit(*[b"%s-%d" % (lane, n) for lane in lanes for n in (0, 1)], lanes=sorted(lanes * 2))
    for worker in (b"u", b"v", b"w"):
        yard.join(worker, slots_total=1)
        yard.take(worker)
    group = yard.scheduler.ledger.services[b"default"].lane_groups[0]
    yard.join(b"x", slots_total=0)
    assert yard.take(b"x", 9) == [b"a3-0"]
    assert (len(group.rotation), group.lanes_full) == (1, 2)
    turn = group.turn
    group.count_tasks(1)
    assert group.turn - turn == (1 << 40) // (3 * 3)  # lanes and weight
