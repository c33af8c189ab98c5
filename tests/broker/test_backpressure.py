"""Back-pressure: submissions wait and are refused while compaction lags behind, workers never."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from taskyard.broker import compaction, requests
from taskyard.broker.compaction import CompactionLimits
from taskyard.broker.requests import HOLD_NS_A_PERCENT, LAG_STEP_PERCENT, Requests
from taskyard.core import events
from taskyard.core.effects import (
    Accepted,
    CommandAck,
    Effect,
    Refused,
    ReportAck,
    Settled,
    StatsReply,
    TaskDetails,
)
from taskyard.core.events import LagChanged, SubmitRequested, TasksReported, TasksRequested
from taskyard.core.ledger import Ledger
from taskyard.core.limits import LAG_REFUSE_ALL_PERCENT, LAG_REFUSE_PERCENT, LAG_SLOW_PERCENT
from taskyard.core.model import Refusal, Submission
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from tests.broker.compaction_kit import NEVER, Harness
from tests.broker.test_compaction import FakeChild
from tests.broker.test_requests import Turns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOW = LAG_SLOW_PERCENT + 50
HOLD_NS = 50 * HOLD_NS_A_PERCENT


def asked(
    client: bytes, request: int, *names: bytes, after: list[list[bytes]] | None = None
) -> SubmitRequested:
    return SubmitRequested(0, client, Submission([*names], after=after), request)


class Slowed(Turns):
    """A broker whose compaction lags behind."""

    def __init__(self) -> None:
        super().__init__()
        self.requests.set_lag(SLOW)

    def after(self, wait_ns: int, *arrived: events.Event) -> list[Effect]:
        """Run a turn after this time."""
        self.now_ns += wait_ns
        return self.turn(*arrived)


class TestWaiting:
    def test_nothing_waits_while_compaction_keeps_up(self) -> None:
        turns = Turns()
        turns.requests.set_lag(LAG_SLOW_PERCENT)
        assert turns.requests.hold_ns == 0
        assert turns.turn(asked(b"c", 1, b"a")) == [Accepted(b"c", 1, 1)]

    def test_wait_of_a_submission_follows_the_lag(self) -> None:
        turns = Slowed()
        assert turns.turn(asked(b"c", 1, b"a")) == []
        assert turns.requests.ready_at_ns() == turns.now_ns + HOLD_NS
        assert turns.after(HOLD_NS - 1) == []
        assert turns.after(1) == [Accepted(b"c", 1, 1)]
        assert turns.requests.ready_at_ns() == NEVER_NS

    def test_submissions_of_a_client_keep_their_order(self) -> None:
        turns = Slowed()
        assert turns.turn(asked(b"c", 1, b"a")) == []
        assert turns.after(1, asked(b"c", 2, b"b", after=[[b"a"]]), asked(b"d", 3, b"d")) == []
        turns.requests.set_lag(LAG_SLOW_PERCENT + 10)
        assert turns.after(1, asked(b"c", 4, b"c", after=[[b"b"]])) == []
        assert turns.after(HOLD_NS) == [
            *(Accepted(b"c", 1, 1), Accepted(b"d", 3, 1)),
            *(Accepted(b"c", 2, 1), Accepted(b"c", 4, 1)),
        ]

    def test_later_requests_of_the_client_wait_behind_it_and_others_are_served(self) -> None:
        turns = Slowed()
        lookup, ping = events.LookupRequested, events.StatsRequested
        turns.turn(asked(b"c", 1, b"a"), lookup(0, b"c", [b"a"], 2, shows_after=False))
        cancel = events.CancelRequested(0, b"c", events.Scope((b"a",)), request=3)
        [answer, status] = turns.turn(
            *(cancel, lookup(0, b"d", [b"a"], 4, shows_after=False)),
            ping(0, b"c", 5, is_brief=True),
        )
        assert isinstance(answer, TaskDetails)
        assert isinstance(status, StatsReply)
        [accepted, found, cancelled] = turns.after(HOLD_NS)
        assert accepted == Accepted(b"c", 1, 1)
        assert isinstance(found, TaskDetails)
        assert (answer.request, answer.views) == (4, [])
        assert (found.request, [view.state for view in found.views]) == (2, [TaskState.READY])
        assert cancelled == CommandAck(b"c", 3, 1)

    def test_reports_of_a_worker_that_submits_do_not_wait(self) -> None:
        turns = Slowed()
        turns.requests.set_lag(0)
        turns.turn(asked(b"w", 1, b"a"), events.WorkerRegistered(0, b"w"))
        turns.turn(TasksRequested(0, b"w", 1, request=2))
        turns.requests.set_lag(SLOW)
        turns.turn(asked(b"w", 3, b"b"))
        assert turns.turn(TasksReported(0, b"w", [b"a"], [1], request=4)) == [
            ReportAck(b"w", 4, [])
        ]

    def test_all_go_on_in_order_when_compaction_has_caught_up(self) -> None:
        turns = Slowed()
        turns.turn(asked(b"c", 1, b"a"))
        turns.after(1, asked(b"c", 2, b"b", after=[[b"a"]]))
        turns.requests.set_lag(0)
        assert turns.requests.ready_at_ns() == 0
        assert turns.turn(asked(b"c", 3, b"c", after=[[b"b"]])) == [
            Accepted(b"c", 1, 1),
            Accepted(b"c", 2, 1),
            Accepted(b"c", 3, 1),
        ]
        assert turns.turn(asked(b"c", 4, b"d")) == [Accepted(b"c", 4, 1)]

    def test_submission_of_a_client_that_is_gone_is_accepted_and_not_watched(self) -> None:
        turns = Slowed()
        watched = asked(b"c", 1, b"a")
        watched.watch = True
        turns.turn(watched, events.ListRequested(0, b"c", events.Scope(), request=2))
        [refused] = turns.turn(events.ClientDisconnected(0, b"c"))
        assert isinstance(refused, Refused)
        assert refused.request == 2
        assert turns.after(HOLD_NS) == [Accepted(b"c", 1, 1)]
        ended = turns.turn(events.CancelRequested(0, b"d", events.Scope((b"a",)), request=3))
        assert not any(isinstance(one, Settled) for one in ended)

    def test_bytes_that_wait_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(requests, "WAITING_NAMES_MAX", 10)
        turns = Slowed()
        large = asked(b"c", 1, b"a")
        large.submission.payloads = [bytes(900)]
        small = asked(b"c", 2, b"b", b"c")
        assert turns.turn(large) == []
        [refused] = turns.turn(small)
        assert isinstance(refused, Refused)
        assert (refused.request, refused.refusal) == (2, Refusal.OVERLOADED)
        assert turns.after(HOLD_NS) == [Accepted(b"c", 1, 1)]
        assert turns.turn(small) == []
        assert turns.after(HOLD_NS) == [Accepted(b"c", 2, 2)]

    def test_wait_has_an_end(self) -> None:
        waiting = Requests(Ledger(), lambda _client: True)
        waiting.set_lag(10**9)
        assert waiting.hold_ns == HOLD_NS_A_PERCENT * (LAG_REFUSE_ALL_PERCENT - LAG_SLOW_PERCENT)

    def test_scheduler_gets_the_lag_in_steps(self) -> None:
        waiting = Requests(Ledger(), lambda _client: True)
        assert waiting.set_lag(LAG_STEP_PERCENT - 1) is None
        assert waiting.set_lag(SLOW) == LagChanged(0, SLOW)
        assert waiting.set_lag(SLOW + LAG_STEP_PERCENT - 1) is None
        assert waiting.set_lag(0) == LagChanged(0, 0)


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
    set_lag(harness, harness.compactor.lag_percent)
    harness.turn()


def set_lag(harness: Harness, percent: int) -> None:
    harness.broker.enqueue(harness.broker.requests.set_lag(percent))


def submit(
    harness: Harness, name: bytes, *, request: int = 16, retries: bool = True
) -> list[Effect]:
    """Submit a task and wait until it is decided."""
    asked = SubmitRequested(0, b"c", Submission([name]), request=request, retries=retries)
    effects = harness.turn(asked)
    while (wait_ns := harness.broker.wait_ns()) is not None and not effects:
        harness.now_ns += wait_ns
        effects = harness.turn()
    return effects


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
    def test_submission_waits_and_nothing_is_committed_before(self, harness: Harness) -> None:
        finish(harness, LAG_SLOW_PERCENT // 10 + 2)
        head = harness.store.head
        assert harness.turn(SubmitRequested(0, b"c", Submission([b"held"]), request=16)) == []
        assert (harness.store.head, b"held" in harness.ledger.tasks) == (head, False)
        wait_ns = harness.broker.wait_ns()
        assert wait_ns is not None
        assert 0 < wait_ns <= 20 * HOLD_NS_A_PERCENT
        harness.now_ns += wait_ns
        assert harness.turn() == [Accepted(b"c", 16, 1)]
        assert harness.found(b"held") == [b"held"]

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
        assert submit(harness, b"held", retries=False) == [Accepted(b"c", 16, 1)]
        harness.turn(TasksRequested(0, b"w", 1))
        harness.turn(TasksReported(0, b"w", [b"held"], [1]))
        set_lag(harness, LAG_REFUSE_ALL_PERCENT)
        [refused] = submit(harness, b"refused", request=32, retries=False)
        assert isinstance(refused, Refused)
        assert refused.refusal is Refusal.FULL

    def test_workers_are_served_at_any_lag(self, harness: Harness) -> None:
        assert isinstance(harness.submit(b"a", b"b"), Accepted)
        set_lag(harness, 10 * LAG_REFUSE_ALL_PERCENT)
        assert harness.turn(TasksRequested(0, b"w", 2))
        [noted, *_] = harness.turn(TasksReported(0, b"w", [b"a", b"b"], [1, 1], request=32))
        assert isinstance(noted, ReportAck)
        assert harness.results(b"a", b"b") == [b"", b""]
