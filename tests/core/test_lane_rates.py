"""Rates of single lanes: kept by each lane on its own, also by one that was deleted meanwhile."""

import pytest

from bench.core.rated_lanes import RatedLanes, measure
from taskyard.core import lane_queues
from taskyard.core.events import PauseRequested, ResumeRequested
from taskyard.core.limits import RATE_BURST_NS_MAX, SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.timer_heap import NEVER_NS
from tests.core.kit import Yard, assigned


def a_yard(**fields: int) -> Yard:
    """Return a yard whose lanes lease one task a second, and a worker."""
    yard = Yard()
    yard.later(10)
    yard.rules(**{"lane_rate_interval_ns": SECOND_NS, "lane_workers_max": 0, **fields})
    yard.join(b"w")
    return yard


def fill(yard: Yard, *lanes: bytes, count: int = 5) -> None:
    """Submit tasks of the lanes: x0, x1 and so on."""
    for lane in lanes:
        names = [b"%s%d" % (lane, number) for number in range(count)]
        yard.submit(*names, lanes=[lane] * count)


def test_each_lane_has_its_own_rate() -> None:
    yard = a_yard()
    fill(yard, b"x", b"y")
    assert yard.take(b"w", 9) == [b"x0", b"y0"]
    yard.later(0.5)
    fill(yard, b"z")
    assert yard.take(b"w", 9) == [b"z0"]
    yard.later(0.5)
    assert yard.take(b"w", 9) == [b"x1", b"y1"]
    yard.later(0.5)
    assert yard.take(b"w", 9) == [b"z1"]


def test_open_lane_counts_as_one_lane() -> None:
    yard = a_yard()
    yard.submit(b"a", b"b")
    assert yard.take(b"w", 9) == [b"a"]
    yard.later(1)
    assert yard.take(b"w", 9) == [b"b"]


def test_rate_of_the_rule_applies_beside_that_of_the_lane() -> None:
    yard = a_yard(rate_interval_ns=SECOND_NS // 2)
    fill(yard, b"x", b"y", b"z")
    taken = [yard.take(b"w", 9)]
    for _ in range(6):
        yard.later(0.5)
        taken.append(yard.take(b"w", 9))
    assert [len(names) for names in taken] == [1] * 7
    by_lane = [name[:1] for names in taken for name in names]
    assert all(by_lane[place] != by_lane[place + 1] for place in range(6))


def test_waiting_worker_gets_the_task_when_the_timer_of_its_lane_ends() -> None:
    yard = a_yard()
    fill(yard, b"x", b"y")
    yard.take(b"w", 2)
    yard.ask(b"w", parks=True)
    at_ns = 11 * SECOND_NS - RATE_BURST_NS_MAX
    assert yard.scheduler.wake_at_ns() == at_ns
    yard.now_ns = at_ns - 1
    assert yard.later(0) == []
    yard.now_ns = at_ns
    assert assigned(yard.later(0)) == [b"y1"]  # a worker stays with its lane


def test_worker_that_may_begin_no_other_lane_waits_for_the_rate_of_its_own() -> None:
    yard = a_yard(workers_max=1)
    yard.submit(b"a", b"b")
    yard.take(b"w")
    yard.ask(b"w", parks=True)
    assert assigned(yard.later(1)) == [b"b"]


def test_lanes_of_one_millisecond_wait_for_one_time() -> None:
    yard = a_yard()
    for number in range(4):
        yard.now_ns += 100_000
        fill(yard, b"%d" % number)
        yard.take(b"w")
    yard.ask(b"w", 9, parks=True)
    *times_ns, _never_ns = sorted(timer[0] for timer in yard.scheduler.ledger.rate_timers.heap)
    at_ns = yard.scheduler.wake_at_ns()
    assert times_ns == [at_ns] * 4
    yard.now_ns = at_ns
    assert len(assigned(yard.later(0))) == 4


def test_unused_rate_is_saved_for_a_moment() -> None:
    yard = a_yard(lane_rate_interval_ns=SECOND_NS // 100)
    fill(yard, b"x", count=99)
    assert len(yard.take(b"w", 99)) == 11
    yard.later(0.05)
    assert len(yard.take(b"w", 99)) == 5
    yard.later(60)
    assert len(yard.take(b"w", 99)) == 11


def test_lane_that_was_deleted_keeps_its_used_up_rate() -> None:
    """Else single tasks, one after the other, are not limited."""
    yard = a_yard()
    leased = 0
    for number in range(40):
        yard.submit(b"%d" % number, lanes=[b"x"])
        leased += len(taken := yard.take(b"w"))
        yard.finish(b"w", *taken)
        if not taken:
            yard.cancel(b"%d" % number)
        assert b"x" not in yard.scheduler.ledger.services[b"default"].lanes
        yard.later(0.25)
    assert leased == 10


def test_lane_that_was_created_anew_while_it_waits_has_one_timer() -> None:
    yard = a_yard()
    fill(yard, b"x", count=1)
    yard.finish(b"w", *yard.take(b"w"))
    for number in range(3):
        yard.submit(b"new%d" % number, lanes=[b"x"])
        yard.ask(b"w", parks=True)
        if number < 2:
            yard.cancel(b"new%d" % number)
    assert len(yard.scheduler.ledger.rate_timers.heap) == 2
    assert assigned(yard.later(1)) == [b"new2"]


def test_retries_count() -> None:
    yard = a_yard()
    fill(yard, b"x", count=1)
    assert yard.take(b"w") == [b"x0"]
    yard.leave(b"w")
    yard.join(b"w")
    assert yard.take(b"w") == []
    yard.later(1)
    assert yard.take(b"w") == [b"x0"]


def test_rate_of_a_paused_lane_reopens_meanwhile() -> None:
    yard = a_yard()
    fill(yard, b"x")
    yard.take(b"w")
    yard.ask(b"w", parks=True)
    yard.handle(PauseRequested(0, b"client", b"default", b"x"))
    assert yard.later(2) == []
    assert assigned(yard.handle(ResumeRequested(0, b"client", b"default", b"x"))) == [b"x1"]


# Other settings.


def test_used_up_rate_survives_a_reload_but_no_longer_than_its_new_interval() -> None:
    yard = a_yard(lane_rate_interval_ns=100 * SECOND_NS)
    fill(yard, b"x")
    fill(yard, b"y", count=1)
    yard.finish(b"w", *yard.take(b"w", 2))
    yard.submit(b"y1", lanes=[b"y"])
    yard.rules(lane_rate_interval_ns=100 * SECOND_NS, lane_workers_max=0)
    yard.ask(b"w", 9, parks=True)
    assert yard.later(50) == []
    fast = Rule(b"fast", b"*/[xy]", LaneOptions(lane_rate_interval_ns=2 * SECOND_NS))
    assert assigned(yard.set_rules(fast)) == []
    assert yard.later(1) == []
    assert assigned(yard.later(1)) == [b"x1", b"y1"]


def test_rate_that_is_removed_lets_lanes_go_at_once() -> None:
    yard = a_yard()
    fill(yard, b"x")
    yard.take(b"w")
    yard.ask(b"w", 9, parks=True)
    assert len(assigned(yard.rules(lane_workers_max=0))) == 4
    assert yard.scheduler.wake_at_ns() == NEVER_NS


# Bounds.


def lanes_one_by_one(yard: Yard, count: int) -> None:
    """Lease and finish one task in each of many lanes, which are deleted then."""
    names = [b"t%d" % number for number in range(count)]
    yard.submit(*names, lanes=names)
    while taken := yard.take(b"w", 10):
        yard.finish(b"w", *taken)


def kept(yard: Yard) -> int:
    (lane_group,) = yard.scheduler.ledger.services[b"default"].lane_groups
    return len(lane_group.lane_rates)


def test_rates_of_deleted_lanes_are_dropped_when_they_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_queues, "RATES_SWEEP_MIN", 20)
    yard = a_yard()
    lanes_one_by_one(yard, 50)
    assert kept(yard) == 50
    yard.later(2)
    fill(yard, *(b"l%d" % number for number in range(40)), count=1)
    yard.take(b"w", 40)
    assert kept(yard) < 80
    assert yard.scheduler.take_warnings() == []


def test_number_of_kept_rates_is_bounded_and_the_excess_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_queues, "RATES_SWEEP_MIN", 20)
    monkeypatch.setattr(lane_queues, "LANE_RATES_MAX", 30)
    yard = a_yard()
    lanes_one_by_one(yard, 200)
    assert kept(yard) <= 60
    (first, *_) = yard.scheduler.take_warnings()
    assert first == "too many lanes with used-up rates: 25 without tasks forgotten"


# Many lanes.


@pytest.mark.slow
def test_a_thousand_lanes_each_keep_their_rate() -> None:
    case = measure(RatedLanes(lanes=1000, rate=10, seconds=12, rated=True))
    assert case.deviation < 0.01


@pytest.mark.parametrize(
    ("interval_ns", "text"),
    [
        (SECOND_NS // 5, "5/s"),
        (SECOND_NS // 7, "7/s"),
        (60 * SECOND_NS // 90, "90/m"),
        (3600 * SECOND_NS // 100, "100/h"),
        (86_400 * SECOND_NS, "1/d"),
        (SECOND_NS // 999_999_999, "1000000000/s"),
        (5 * 86_400 * SECOND_NS, "1 in 432000 s"),
    ],
)
def test_rate_is_shown_as_in_the_settings(interval_ns: int, text: str) -> None:
    assert lane_queues.rate_text(interval_ns) == text
