"""Worker facts: reserved payloads and queue orders. Workers that their dialect reports as lost."""

from __future__ import annotations

from msgspec import msgpack

from taskyard.core.events import WorkerLost
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import QueueOrder, WorkerFacts
from taskyard.core.records import LeaseExpired, Returned, ReturnReason, WorkerLeft
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned

READY, LEASED = TaskState.READY, TaskState.LEASED

#: Facts of a ping-pong worker, for which PONG and EXIT are words of the protocol.
PING_PONG = {
    "always_ready": True,
    "reserved_payloads": (b"PONG", b"EXIT"),
    "queue_order": QueueOrder.FIFO,
}


def test_task_with_a_reserved_payload_is_skipped() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", payloads=[b"EXIT", b"PONG", b"good"])
    assert assigned(yard.join(b"w", **PING_PONG)) == [b"c"]
    assert yard.states(b"a", b"b", b"c") == [READY, READY, LEASED]
    yard.join(b"other", slots_total=2)
    assert yard.take(b"other", 2) == [b"a", b"b"]


def test_task_without_a_payload_is_sent_by_its_name() -> None:
    yard = Yard()
    yard.submit(b"EXIT", b"good", payloads=[b""])
    assert assigned(yard.join(b"w", **PING_PONG)) == [b"good"]


def test_reserved_name_with_another_payload_is_assigned() -> None:
    yard = Yard()
    yard.submit(b"EXIT", payloads=[b"good"])
    assert assigned(yard.join(b"w", **PING_PONG)) == [b"EXIT"]


def test_task_behind_any_number_of_reserved_payloads_is_found() -> None:
    yard = Yard()
    words = [b"w%d" % number for number in range(1000)]
    yard.submit(*words, payloads=[b"PONG"])
    assert assigned(yard.join(b"w", **PING_PONG)) == []
    assert assigned(yard.submit(b"good")) == [b"good"]


def test_reserved_payloads_are_skipped_in_lanes() -> None:
    yard = Yard()
    payloads, lanes = [b"EXIT", b"EXIT", b"good"], [b"x", b"y", b"y"]
    yard.submit(b"a", b"b", b"c", payloads=payloads, lanes=lanes)
    assert assigned(yard.join(b"w", **PING_PONG)) == [b"c"]


def test_reserved_payloads_are_skipped_in_wide_services_lanes_and_priorities() -> None:
    yard = Yard()
    yard.submit(b"wide", slots=2)
    yard.submit(b"a", b"b", payloads=[b"EXIT", b"good"], lanes=[b"lane", b"lane"])
    yard.submit(b"c", payloads=[b"PONG"], priority=5)
    yard.submit(b"d", payloads=[b"good"], priority=3)
    given = assigned(yard.join(b"w", **PING_PONG))
    while (more := assigned(yard.finish(b"w", given[-1]))) != []:
        given += more
    assert sorted(given) == [b"b", b"d"]


def test_suspect_with_a_reserved_payload_is_left_to_others() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", payloads=[b"EXIT", b"good"])
    yard.lose(b"lost", b"a", b"b")
    assert assigned(yard.join(b"w", **PING_PONG)) == [b"b"]
    yard.finish(b"w", b"b")
    assert yard.states(b"a") == [READY]
    yard.join(b"other")
    assert yard.take(b"other") == [b"a"]


def test_worker_without_reserved_payloads_gets_every_task() -> None:
    yard = Yard()
    yard.submit(b"a", payloads=[b"EXIT"])
    assert assigned(yard.join(b"w", always_ready=True, queue_order=QueueOrder.LIFO)) == [b"a"]


def test_fifo_workers_are_served_by_how_long_they_have_waited() -> None:
    yard = Yard()
    yard.join(b"b", **PING_PONG)
    yard.join(b"a", **PING_PONG)
    yard.submit(b"1", b"2")
    assert [yard[name].lease.worker.name for name in (b"1", b"2")] == [b"b", b"a"]  # type: ignore[union-attr]
    yard.finish(b"a", b"2")
    yard.finish(b"b", b"1")
    yard.join(b"c", **PING_PONG)
    yard.submit(b"3", b"4", b"5")
    holders = [yard[name].lease.worker.name for name in (b"3", b"4", b"5")]  # type: ignore[union-attr]
    assert holders == [b"a", b"b", b"c"]


def test_lost_worker_is_gone_and_charged_to_what_it_held() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a")
    yard.take(b"w")
    assert yard.handle(WorkerLost(0, b"w")) == []
    expired, left = yard.records
    assert isinstance(expired, LeaseExpired)
    assert isinstance(left, WorkerLeft)
    assert (left.reason, yard[b"a"].losses, yard.state(b"a")) == (b"silent", 1, READY)
    assert not yard.scheduler.ledger.workers


def test_worker_that_never_got_its_task_is_lost_without_a_charge() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    yard.submit(b"a")
    yard.take(b"w")
    yard.handle(WorkerLost(0, b"w", b"unreachable", charged=False))
    returned, left = yard.records
    assert isinstance(returned, Returned)
    assert isinstance(left, WorkerLeft)
    assert (returned.reason, left.reason) == (ReturnReason.UNLISTED, b"unreachable")
    assert (yard[b"a"].losses, yard.state(b"a")) == (0, READY)


def test_lost_unknown_worker_changes_nothing() -> None:
    yard = Yard()
    assert yard.handle(WorkerLost(0, b"w")) == []
    assert yard.records == []


def test_facts_of_an_older_journal_reserve_nothing() -> None:
    facts = WorkerFacts(dialect=b"ping-pong", heartbeat_ns=7)
    older = msgpack.encode(msgpack.decode(msgpack.encode(facts))[:-2])
    assert msgpack.decode(older, type=WorkerFacts) == facts
    assert facts.queue_order is QueueOrder.LEAST_RECENTLY_USED
