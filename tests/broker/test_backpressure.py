"""Back-pressure: producers are slowed and refused while compaction lags behind, workers never."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from taskyard.broker import compaction
from taskyard.broker.backpressure import HOLD_NS_A_PERCENT, HOLD_NS_MAX, STEP_PERCENT, Backpressure
from taskyard.broker.compaction import CompactionLimits
from taskyard.core.effects import Accepted, Effect, Refused, ReportAck, Settled
from taskyard.core.events import LagChanged, SubmitRequested, TasksReported, TasksRequested
from taskyard.core.limits import LAG_REFUSE_ALL_PERCENT, LAG_REFUSE_PERCENT, LAG_SLOW_PERCENT
from taskyard.core.model import Refusal, Submission
from tests.broker.compaction_kit import NEVER, Harness
from tests.broker.test_compaction import FakeChild

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOW = LAG_SLOW_PERCENT + 50
HOLD_NS = 50 * HOLD_NS_A_PERCENT


def accepted(request: int, new: int = 1) -> Accepted:
    return Accepted(b"c", request, new)


def settled(request: int) -> Settled:
    return Settled(b"c", request, [], [], [])


@pytest.fixture
def pressure() -> Backpressure:
    made = Backpressure()
    made.update(SLOW)
    return made


class TestHolding:
    def test_nothing_is_held_while_compaction_keeps_up(self) -> None:
        pressure = Backpressure()
        pressure.update(LAG_SLOW_PERCENT)
        effects: list[Effect] = [accepted(16)]
        assert not pressure.is_active
        assert pressure.throttle(effects, 0) == effects
        assert pressure.earlier_ns(None) is None

    def test_delay_of_a_reply_follows_the_lag(self, pressure: Backpressure) -> None:
        assert pressure.throttle([accepted(16)], 100) == []
        assert pressure.earlier_ns(None) == 100 + HOLD_NS
        assert pressure.throttle([], 99 + HOLD_NS) == []
        assert pressure.throttle([], 100 + HOLD_NS) == [accepted(16)]
        assert pressure.earlier_ns(7) == 7

    def test_all_of_a_held_request_keeps_its_order(self, pressure: Backpressure) -> None:
        assert pressure.throttle([accepted(16), settled(16), settled(32)], 0) == [settled(32)]
        assert pressure.throttle([settled(16)], 1) == []
        assert pressure.throttle([settled(16)], HOLD_NS) == [
            accepted(16),
            settled(16),
            settled(16),
            settled(16),
        ]

    def test_only_replies_to_new_tasks_are_held(self, pressure: Backpressure) -> None:
        others: list[Effect] = [accepted(16, new=0), ReportAck(b"w", 32, []), settled(48)]
        assert pressure.throttle(others, 0) == others

    def test_everything_is_released_when_compaction_has_caught_up(
        self, pressure: Backpressure
    ) -> None:
        pressure.throttle([accepted(16)], 0)
        pressure.throttle([accepted(32)], 1)
        pressure.update(0)
        assert pressure.throttle([accepted(48)], 2) == [
            accepted(16),
            accepted(32),
            accepted(48),
        ]

    def test_hold_has_an_end(self, pressure: Backpressure) -> None:
        pressure.update(10**9)
        assert pressure.hold_ns() == HOLD_NS_MAX

    def test_scheduler_gets_the_lag_in_steps(self) -> None:
        pressure = Backpressure()
        assert pressure.update(STEP_PERCENT - 1) is None
        assert pressure.update(SLOW) == LagChanged(0, SLOW)
        assert pressure.update(SLOW + STEP_PERCENT - 1) is None
        assert pressure.update(0) == LagChanged(0, 0)


@pytest.fixture
def _fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make child processes run until the test ends them."""
    for name, value in (("running", 0), ("started", 0), ("ended", 0), ("looks", 10**6)):
        monkeypatch.setattr(FakeChild, name, value)
    monkeypatch.setattr(compaction, "CompactionChild", FakeChild)


@pytest.fixture
def harness(tmp_path: Path, _fake_child: None) -> Iterator[Harness]:
    """Return a broker that compacts after ten ended tasks."""
    limits = CompactionLimits(NEVER.rows, NEVER.rows_bytes, ended=10, lag_min=1)
    with closing(Harness(tmp_path, limits)) as harness:
        harness.fill_filter()
        yield harness


def finish(harness: Harness, count: int) -> None:
    """Finish this many more tasks and run the compactor."""
    first = harness.store.head.sequence
    harness.do(*[b"%d-%d" % (first, number) for number in range(count)])
    look(harness)


def look(harness: Harness) -> None:
    harness.look()
    harness.broker.enqueue(harness.broker.backpressure.update(harness.compactor.lag_percent))
    harness.turn()


def submit(
    harness: Harness, name: bytes, *, request: int = 16, retries: bool = True
) -> list[Effect]:
    asked = SubmitRequested(0, b"c", Submission([name]), request=request, retries=retries)
    return harness.turn(asked)


class TestLag:
    def test_lag_grows_with_ended_tasks_and_falls_with_a_compaction(self, harness: Harness) -> None:
        finish(harness, 8)
        assert (harness.compactor.lag_percent, FakeChild.started) == (80, 0)
        finish(harness, 12)
        look(harness)
        assert (harness.compactor.lag_percent, FakeChild.started) == (200, 1)
        FakeChild.looks = 0
        while harness.compactor.completed < 1:
            look(harness)
        look(harness)
        assert harness.compactor.lag_percent == 0
        assert harness.broker.scheduler.context.lag_percent == 0

    def test_next_one_begins_at_once_where_the_mark_is_passed_again(self, harness: Harness) -> None:
        finish(harness, 11)
        look(harness)
        finish(harness, 11)
        FakeChild.looks = 0
        while harness.compactor.completed < 2:
            look(harness)
        assert FakeChild.started == 2
        assert harness.ledger.tasks == {}

    @pytest.mark.usefixtures("_fake_child")
    def test_little_work_is_no_lag(self, tmp_path: Path) -> None:
        with closing(Harness(tmp_path, CompactionLimits(ended=10))) as harness:
            harness.fill_filter()
            finish(harness, 100)
            assert FakeChild.started == 1
            assert harness.compactor.lag_percent < LAG_SLOW_PERCENT


class TestSubmissions:
    def test_reply_is_held_and_the_task_is_there(self, harness: Harness) -> None:
        finish(harness, LAG_SLOW_PERCENT // 10 + 2)
        assert submit(harness, b"held") == []
        assert harness.found(b"held") == [b"held"]
        wake_at_ns = harness.broker.backpressure.earlier_ns(None)
        assert wake_at_ns is not None
        harness.now_ns = wake_at_ns
        assert harness.turn() == [Accepted(b"c", 16, 1)]

    def test_client_that_repeats_is_refused_and_nothing_is_changed(self, harness: Harness) -> None:
        finish(harness, LAG_REFUSE_PERCENT // 10)
        before = harness.store.head
        [refused] = submit(harness, b"refused")
        assert isinstance(refused, Refused)
        assert refused.refusal is Refusal.RETRY_LATER
        assert refused.text.startswith("journal: compaction lags behind (300 % of its mark)")
        assert harness.store.head == before

    def test_client_that_does_not_repeat_is_refused_last(self, harness: Harness) -> None:
        finish(harness, LAG_REFUSE_PERCENT // 10)
        assert submit(harness, b"held", retries=False) == []
        assert harness.found(b"held") == [b"held"]
        harness.turn(TasksRequested(0, b"w", 1))
        harness.turn(TasksReported(0, b"w", [b"held"], [1]))
        harness.broker.enqueue(harness.broker.backpressure.update(LAG_REFUSE_ALL_PERCENT))
        [refused] = submit(harness, b"refused", request=32, retries=False)
        assert isinstance(refused, Refused)
        assert refused.refusal is Refusal.FULL

    def test_workers_are_served_at_any_lag(self, harness: Harness) -> None:
        assert isinstance(harness.submit(b"a", b"b"), Accepted)
        harness.broker.enqueue(harness.broker.backpressure.update(10 * LAG_REFUSE_ALL_PERCENT))
        assert harness.turn(TasksRequested(0, b"w", 2))
        [noted, *_] = harness.turn(TasksReported(0, b"w", [b"a", b"b"], [1, 1], request=32))
        assert isinstance(noted, ReportAck)
        assert harness.results(b"a", b"b") == [b"", b""]
