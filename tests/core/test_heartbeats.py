"""The interval of heartbeats: the policy, and the rules of two heartbeats while it changes."""

from __future__ import annotations

import pytest

from taskyard.core import deadlines
from taskyard.core.effects import Effect, HeartbeatAck, Refused
from taskyard.core.events import (
    ExplainRequested,
    RulesSet,
    WorkerHeartbeat,
    WorkerRegistered,
)
from taskyard.core.limits import HEARTBEATS_PER_LEASE_MIN, SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.core.records import LeaseExpired, Returned, ReturnReason, WorkerLeft, WorkerReplaced
from tests.core.kit import Yard

LEASE_NS = 15 * SECOND_NS

#: Workers that make the broker request the longest interval, a third of the lease.
CROWD = 2_500


def facts(incarnation: int = 1, heartbeat_ns: int = LEASE_NS // 3) -> WorkerFacts:
    return WorkerFacts(
        slots_total=4,
        lease_timeout_ns=LEASE_NS,
        incarnation=incarnation,
        heartbeat_ns=heartbeat_ns,
    )


class Crowd(Yard):
    """A worker w that holds task a and uses the broker's interval, among many others or few."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.workers = 1
        policy = deadlines.heartbeat_interval_ns
        idle = deadlines.idle_heartbeat_ns
        monkeypatch.setattr(
            deadlines, "heartbeat_interval_ns", lambda _, lease: policy(self.workers, lease)
        )
        monkeypatch.setattr(
            deadlines, "idle_heartbeat_ns", lambda _, lease: idle(self.workers, lease)
        )
        self.handle(WorkerRegistered(0, b"w", facts()))
        self.submit(b"a")
        assert self.take(b"w") == [b"a"]

    def beat(self, seconds: float, *, held: bool = True, seen: int | None = 0) -> float:
        """Send a heartbeat with this interval. Return the interval of the reply."""
        listed = [(b"a", 1)] if held else []
        event = WorkerHeartbeat(0, b"w", listed, int(seconds * SECOND_NS), request=7, seen=seen)
        event.follows, event.incarnation = True, 1
        ack = self.handle(event)[-1]
        assert isinstance(ack, HeartbeatAck)
        return ack.heartbeat_ns / SECOND_NS

    def repeat(self, held: list[tuple[bytes, int]]) -> list[Effect]:
        """Send a heartbeat with an interval of 1 s again. Return the effects."""
        last = WorkerHeartbeat(0, b"w", held, SECOND_NS, 8, 0, follows=True, incarnation=1)
        last.registration = WorkerRegistered(0, b"w", facts())
        return self.handle(last)

    def contest(self) -> None:
        """Let another process try to register the name."""
        self.handle(WorkerRegistered(0, b"w", facts(2, SECOND_NS)))

    def is_lost_after(self, seconds: float) -> bool:
        """Return whether the contested name is lost after this time, and not before."""
        self.later(seconds - 0.001)
        before = list(self.records)
        self.later(0.001)
        types = [type(record) for record in self.records]
        return not before and types == [LeaseExpired, WorkerLeft, WorkerReplaced]


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    return Crowd(monkeypatch)


@pytest.mark.parametrize(
    ("workers", "lease_s", "seconds"),
    [
        (1, 15, 1),
        (500, 15, 1),
        (501, 15, 1.1),
        (1_000, 15, 2),
        (2_500, 15, 5),
        (10_000, 15, 5),
        (10_000, 60, 20),
        (10_000, 600, 20),
        (100_000, 600, 60),
        (100_000, 0, 60),
        (1, 0, 1),
        (1, 0.9, 0.3),
        (10_000, 0.9, 0.3),
    ],
)
def test_interval_by_workers_and_lease(workers: int, lease_s: float, seconds: float) -> None:
    lease_ns = int(lease_s * SECOND_NS)
    found_ns = deadlines.heartbeat_interval_ns(workers, lease_ns)
    assert found_ns == int(seconds * SECOND_NS)
    assert not lease_ns or HEARTBEATS_PER_LEASE_MIN * found_ns <= lease_ns


@pytest.mark.parametrize(
    ("workers", "lease_s", "seconds"),
    [
        (1, 15, 1),
        (2_500, 15, 5),
        (5_000, 15, 10),
        (10_000, 15, 15),
        (10_000, 60, 20),
        (100_000, 600, 60),
        (100_000, 0, 60),
        (1, 0.9, 0.3),
        (10_000, 0.9, 0.9),
    ],
)
def test_interval_without_tasks(workers: int, lease_s: float, seconds: float) -> None:
    lease_ns = int(lease_s * SECOND_NS)
    assert deadlines.idle_heartbeat_ns(workers, lease_ns) == int(seconds * SECOND_NS)


def test_more_workers_never_shorten_the_interval() -> None:
    found = [deadlines.heartbeat_interval_ns(workers, LEASE_NS) for workers in range(1, 4_000)]
    assert found == sorted(found)


def test_worker_with_its_own_interval_gets_none() -> None:
    yard = Yard()
    yard.handle(WorkerRegistered(0, b"w", facts(heartbeat_ns=SECOND_NS)))
    (ack,) = yard.handle(WorkerHeartbeat(0, b"w", [], SECOND_NS, request=7, incarnation=1))
    assert isinstance(ack, HeartbeatAck)
    assert ack.heartbeat_ns == 0
    assert yard.scheduler.ledger.workers[b"w"].heartbeat_ns == SECOND_NS


def test_heartbeat_writes_no_record(crowd: Crowd) -> None:
    for crowd.workers in (1, CROWD, 1):
        crowd.beat(1)
        assert crowd.records == []


def test_request_never_exceeds_the_longest_interval_of_the_worker(crowd: Crowd) -> None:
    crowd.handle(WorkerRegistered(0, b"w", facts(heartbeat_ns=4 * SECOND_NS)))
    crowd.workers = CROWD
    assert crowd.beat(1) == 4


@pytest.mark.parametrize(("rest_s", "seconds"), [(0, 5), (3, 5), (12, 12), (60, 15)])
def test_longer_interval_without_tasks_needs_consent(
    rest_s: int, seconds: int, crowd: Crowd
) -> None:
    crowd.workers = 10_000
    event = WorkerHeartbeat(0, b"w", [], SECOND_NS, 7, incarnation=1, follows=True)
    event.rest_ns = rest_s * SECOND_NS
    ack = crowd.handle(event)[-1]
    assert isinstance(ack, HeartbeatAck)
    assert ack.heartbeat_ns == seconds * SECOND_NS


def test_longer_interval_counts_from_the_reply_on(crowd: Crowd) -> None:
    crowd.workers = CROWD
    assert crowd.beat(1) == 5  # the worker may use it already
    crowd.contest()
    assert crowd.is_lost_after(15)


def test_shorter_interval_counts_when_the_worker_has_confirmed_it(crowd: Crowd) -> None:
    crowd.workers = CROWD
    crowd.beat(1)
    crowd.workers = 1
    assert crowd.beat(5) == 1  # the reply may be lost
    crowd.contest()
    crowd.later(10)
    assert crowd.records == []
    assert crowd.beat(1) == 1
    crowd.contest()
    assert crowd.is_lost_after(3)


def test_contested_name_follows_a_confirmed_change(crowd: Crowd) -> None:
    crowd.workers = CROWD
    crowd.beat(1)
    crowd.workers = 1
    crowd.beat(5)
    crowd.contest()
    crowd.beat(1)
    assert crowd.is_lost_after(3)


def test_unconfirmed_longer_interval_is_requested_again(crowd: Crowd) -> None:
    crowd.workers = CROWD
    assert crowd.beat(1) == 5
    crowd.workers = 1
    assert crowd.beat(1) == 5  # sent before the reply arrived, or a second time
    assert crowd.beat(5) == 1


def test_longest_interval_counts_after_a_restart_of_the_broker(crowd: Crowd) -> None:
    assert crowd.scheduler.ledger.workers[b"w"].heartbeat_requested_ns == 0
    crowd.contest()
    assert crowd.is_lost_after(15)


@pytest.mark.parametrize(("first_s", "second_s"), [(1, 5), (5, 1)])
def test_unlisted_task_is_lost_after_two_of_the_longer_interval(
    crowd: Crowd, first_s: int, second_s: int
) -> None:
    crowd.workers = CROWD if second_s == 5 else 1
    crowd.beat(first_s)
    crowd.later(9.999)
    crowd.beat(first_s, held=False, seen=None)
    assert crowd.records == []
    crowd.later(0.001)
    crowd.beat(first_s, held=False, seen=None)
    (returned,) = crowd.records
    assert isinstance(returned, Returned)
    assert returned.reason is ReturnReason.UNLISTED


def test_loss_is_noticed_in_the_time_of_the_lease(crowd: Crowd) -> None:
    crowd.workers = CROWD
    crowd.beat(1)
    crowd.later(14.999)
    assert crowd.records == []
    crowd.later(0.001)
    assert [type(record) for record in crowd.records] == [LeaseExpired, WorkerLeft]


def test_newcomer_is_refused_while_the_holder_keeps_a_long_interval(crowd: Crowd) -> None:
    crowd.workers = CROWD
    crowd.beat(1)
    for _ in range(4):
        crowd.later(5)
        crowd.contest()
        refused = crowd.handle(WorkerHeartbeat(0, b"w", request=8, incarnation=2))
        assert [type(effect) for effect in refused] == [Refused]
        crowd.beat(5)
    assert crowd[b"a"].lease is not None


def test_heartbeat_of_a_long_interval_is_not_late(crowd: Crowd) -> None:
    crowd.workers = CROWD
    crowd.beat(1)
    for seconds, code in ((10, "leased"), (0.1, "heartbeat-late")):
        crowd.later(seconds)
        (found,) = crowd.handle(ExplainRequested(0, b"client", b"a", 1))
        assert found.explanation.reason.value == code  # type: ignore[attr-defined]


def test_repeated_heartbeat_renews_the_lease(crowd: Crowd) -> None:
    crowd.beat(1)
    crowd.later(14)
    (ack,) = crowd.repeat([(b"a", 1)])
    assert isinstance(ack, HeartbeatAck)
    assert (ack.request, ack.heartbeat_ns) == (8, SECOND_NS)
    crowd.later(14)
    assert crowd.records == []


def test_repeated_heartbeat_gets_a_changed_interval(crowd: Crowd) -> None:
    crowd.beat(1)
    crowd.workers = CROWD
    (ack,) = crowd.repeat([(b"a", 1)])
    assert isinstance(ack, HeartbeatAck)
    assert (ack.request, ack.heartbeat_ns) == (8, 5 * SECOND_NS)


def test_repeated_heartbeat_gets_the_version_of_changed_rules(crowd: Crowd) -> None:
    crowd.beat(1)
    former = crowd.scheduler.ledger.rule_table.version
    crowd.handle(RulesSet(0, (), workers_max=9))
    (ack,) = crowd.repeat([(b"a", 1)])
    assert isinstance(ack, HeartbeatAck)
    assert ack.rules_version == crowd.scheduler.ledger.rule_table.version
    assert ack.rules_version != former


def test_repeated_heartbeat_of_another_process_is_refused(crowd: Crowd) -> None:
    crowd.beat(1)
    crowd.handle(WorkerRegistered(0, b"w", facts(2), replaces=1))
    crowd.handle(WorkerHeartbeat(0, b"w", [], SECOND_NS, 9, incarnation=2, follows=True))
    (refused,) = crowd.repeat([])
    assert isinstance(refused, Refused)
    assert refused.request == 8


def test_repeated_heartbeat_registers_a_lost_worker(crowd: Crowd) -> None:
    crowd.beat(1)
    crowd.later(16)
    assert b"w" not in crowd.scheduler.ledger.workers
    (ack,) = crowd.repeat([])
    assert isinstance(ack, HeartbeatAck)
    assert b"w" in crowd.scheduler.ledger.workers


def test_repeated_heartbeat_shortens_the_timeout_of_a_contested_name(crowd: Crowd) -> None:
    crowd.beat(1)
    crowd.contest()
    assert crowd.repeat([(b"a", 1)])
    assert crowd.is_lost_after(3)
