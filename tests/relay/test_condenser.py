"""The native relay's condenser with the broker's half of the dialect. Without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.core import events
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.timer_heap import NEVER_NS
from taskyard.relay.native import HEARTBEAT_DELAY_NS, Condenser
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer, relays
from tests.wire.kit import BROKER, Counter

Q = pb.QueryMsg

FACTS = peer.worker_message(WorkerFacts(slots_total=2, incarnation=1, lease_timeout_ns=SECOND_NS))


class Relayed:
    """A broker, and a chain of relays before it."""

    def __init__(self, depth: int = 1) -> None:
        self.broker = Counter()
        self.chain = [Condenser() for _ in range(depth)]
        #: Messages that the broker received from the relay before it.
        self.above: list[Q] = []

    def up(self, route: bytes, body: bytes) -> None:
        self.chain[0].up(route, [b"", body], self.broker.now_ns)

    def run(self, pass_ns: int = 0) -> list[tuple[bytes, Q]]:
        """Carry messages until none is left. Return the messages to peers."""
        self.broker.now_ns += pass_ns
        found: list[tuple[bytes, Q]] = []
        while more := self._carry():
            found += more[1]
        return found

    def _carry(self) -> tuple[bool, list[tuple[bytes, Q]]] | None:
        now_ns, is_busy = self.broker.now_ns, False
        for lower, upper in zip(self.chain, self.chain[1:], strict=False):
            for message in lower.take(now_ns):
                upper.up(b"lower", message, now_ns)
                is_busy = True
        for message in self.chain[-1].take(now_ns):
            self.above.append(Q.FromString(message[1]))
            self.broker.handle([*self.broker.dialect.receive(b"\0relay", message, now_ns)])
            is_busy = True
        replies = [[b"", body] for _, body in self.broker.sent]
        replies += [frames for _, frames in self.broker.dialect.flush()]
        self.broker.sent = []
        delivered: list[tuple[bytes, list[bytes]]] = []
        for relay in reversed(self.chain):
            delivered = [one for frames in replies for one in relay.down(frames)]
            replies = [frames for _, frames in delivered]
        found = [(route, Q.FromString(frames[1])) for route, frames in delivered]
        return (True, found) if is_busy or found else None

    def ask(self, route: bytes, body: bytes) -> Q:
        self.up(route, body)
        ((to, reply),) = self.run()
        assert to == route
        return reply

    def beat(
        self, request: int, *held: bytes, seen: int = 0, name: bytes = b"w", waiting: int = 0
    ) -> None:
        tasks = [(one, 1) for one in held]
        body = peer.heartbeat(request, name, FACTS, tasks, SECOND_NS, seen=seen, waiting=waiting)
        self.up(name, body)

    def last_seen_ns(self, name: bytes = b"w") -> int:
        return self.broker.scheduler.ledger.workers[name].last_seen_ns


def submitted(*names: bytes) -> bytes:
    return peer.create(1, Submission([*names], [b""], [Terms()]))


def kinds(replies: list[tuple[bytes, Q]]) -> list[Any]:
    return [(to, Q.Type.Name(one.type), one.request) for to, one in replies]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_messages_of_many_peers_share_a_message(depth: int) -> None:
    relayed = Relayed(depth)
    relayed.up(b"a", submitted(b"t"))
    relayed.up(b"b", peer.query(7, peer.OK))
    relayed.up(b"c", bytes.fromhex("0806"))
    assert kinds(relayed.run()) == [(b"a", "OK", 1), (b"b", "OK", 7), (b"c", "OK", 0)]
    assert len(relayed.above) == 1


def test_plain_peers_get_plain_replies() -> None:
    relayed = Relayed()
    relayed.up(b"a", bytes.fromhex("080012080a01411203636c69"))
    ((_, reply),) = relayed.run()
    assert reply.SerializeToString().hex() == "0806"
    relayed.chain[0].up(b"a", [b"no delimiter"], 0)
    ((_, reply),) = relayed.run()
    assert reply.SerializeToString().hex() == "0808"


def test_each_peer_has_requests_of_its_own_that_wait() -> None:
    relayed = Relayed()
    for name in (b"v", b"w"):
        relayed.up(name, peer.steal(5, name, FACTS, 1, SECOND_NS))
    assert relayed.run() == []
    relayed.up(b"c", submitted(b"t1", b"t2"))
    replies = relayed.run()
    assert kinds(replies) == [(b"c", "OK", 1), (b"v", "Transfer", 5), (b"w", "Transfer", 5)]
    assert [one.batch.name[:] for _, one in replies[1:]] == [[b"t1"], [b"t2"]]


def test_peer_that_left_gets_no_task() -> None:
    relayed = Relayed()
    for name in (b"v", b"w"):
        relayed.up(name, peer.steal(5, name, FACTS, 1, SECOND_NS))
    relayed.run()
    relayed.chain[0].drop(b"v")
    relayed.run()
    relayed.up(b"c", submitted(b"t"))
    assert kinds(relayed.run()) == [(b"c", "OK", 1), (b"w", "Transfer", 5)]


def test_heartbeats_wait_for_others_and_share_a_message() -> None:
    relayed = Relayed()
    names = [b"w%d" % number for number in range(5)]
    for name in names:
        relayed.up(name, peer.steal(1, name, FACTS, 1))
    relayed.run()
    relayed.above.clear()
    for name in names:
        relayed.beat(2, name=name)
        assert relayed.run() == []
    assert relayed.above == []
    replies = relayed.run(HEARTBEAT_DELAY_NS)
    assert kinds(replies) == [(name, "Heartbeat", 2) for name in names]
    record = relayed.broker.scheduler.ledger.record
    assert [(one.seen, one.broker) for _, one in replies] == [(record, BROKER)] * 5
    assert [len(one.envelope) for one in relayed.above] == [5]
    assert [relayed.last_seen_ns(name) for name in names] == [relayed.broker.now_ns] * 5


def holding(depth: int = 1) -> Relayed:
    """Return a worker that holds `t`."""
    relayed = Relayed(depth)
    relayed.ask(b"c", submitted(b"t"))
    assert relayed.ask(b"w", peer.steal(1, b"w", FACTS, 1)).batch.name[:] == [b"t"]
    return relayed


@pytest.mark.parametrize("depth", [1, 3])
def test_reply_to_a_heartbeat_names_tasks_to_stop(depth: int) -> None:
    relayed = holding(depth)
    relayed.ask(b"c", peer.command(9, peer.CANCEL, events.Scope(names=(b"t",))))
    relayed.beat(3, b"t")
    ((_, reply),) = relayed.run(HEARTBEAT_DELAY_NS)
    assert (reply.request, reply.batch.name[:]) == (3, [b"t"])


@pytest.mark.parametrize("depth", [1, 3])
def test_heartbeats_keep_a_lease_and_missing_ones_lose_it(depth: int) -> None:
    relayed = holding(depth)
    for request in range(3, 9):
        relayed.beat(request, b"t")
        assert kinds(relayed.run(SECOND_NS // 2)) == [(b"w", "Heartbeat", request)]
        relayed.broker.pass_time(0)
    assert relayed.broker.scheduler.ledger.workers[b"w"].leases
    relayed.broker.pass_time(2 * SECOND_NS)
    assert b"w" not in relayed.broker.scheduler.ledger.workers
    relayed.beat(9, b"t")
    ((_, reply),) = relayed.run(HEARTBEAT_DELAY_NS)
    assert (reply.request, reply.batch.name[:]) == (9, [b"t"])  # it ended without a heartbeat


def test_heartbeat_is_sent_before_later_messages_of_its_peer() -> None:
    relayed = holding()
    relayed.beat(3, b"t")
    relayed.up(b"w", peer.complete(4, b"w", peer.ReportColumns([b"t"], [1]), FACTS))
    assert kinds(relayed.run()) == [(b"w", "Heartbeat", 3), (b"w", "OK", 4)]


def test_heartbeat_that_was_sent_before_an_assignment_returns_nothing() -> None:
    relayed = holding()
    relayed.up(b"w", peer.steal(3, b"w", FACTS, 1, SECOND_NS))
    relayed.run()
    relayed.beat(4, b"t")
    arrived = relayed.broker.dialect.receive(b"\0c", [b"", submitted(b"u")], SECOND_NS)
    relayed.broker.handle([*arrived])
    replies = relayed.run(HEARTBEAT_DELAY_NS)
    assert (b"w", "Transfer", 3) in kinds(replies)
    assert kinds(replies)[-1] == (b"w", "Heartbeat", 4)
    assert len(relayed.broker.scheduler.ledger.workers[b"w"].leases) == 2


def test_heartbeats_keep_a_waiting_steal_and_notice_its_loss() -> None:
    relayed = Relayed()
    relayed.up(b"w", peer.steal(1, b"w", FACTS, 1, SECOND_NS))
    for request in range(2, 9):
        relayed.beat(request, waiting=1)
        ((_, reply),) = relayed.run(HEARTBEAT_DELAY_NS)
        assert (reply.request, reply.waiting) == (request, 1)
        assert relayed.broker.pass_time(SECOND_NS // 2) == []
    relayed.broker.handle([*relayed.broker.dialect._drop(b"\x80relay\0\0\0\1")])  # noqa: SLF001
    for request in (9, 10):
        relayed.beat(request, waiting=1)
        ((_, reply),) = relayed.run(HEARTBEAT_DELAY_NS)
        assert (reply.request, reply.waiting) == (request, 0)
        assert relayed.last_seen_ns() == relayed.broker.now_ns
    relayed.up(b"w", peer.steal(1, b"w", FACTS, 1, SECOND_NS))
    relayed.beat(11, waiting=1)
    ((_, reply),) = relayed.run(HEARTBEAT_DELAY_NS)
    assert (reply.request, reply.waiting) == (11, 1)


@pytest.mark.parametrize("restarted", ["broker", "relay"])
def test_heartbeats_keep_a_lease_when_the_broker_or_the_relay_is_new(restarted: str) -> None:
    relayed = holding()
    if restarted == "broker":
        relayed.broker.dialect.disconnected(b"\0relay")
    else:
        relayed.chain = [Condenser()]
        relayed.up(b"x", peer.query(1, peer.OK))  # it gets a number of before
    for request in range(3, 9):
        relayed.beat(request, b"t")
        assert kinds(relayed.run(SECOND_NS // 2))[-1] == (b"w", "Heartbeat", request)
        relayed.broker.pass_time(0)
    assert relayed.broker.scheduler.ledger.workers[b"w"].leases


def test_relay_that_can_not_be_reached_ends_the_waits_of_all_its_peers() -> None:
    relayed = Relayed(2)
    for name in (b"v", b"w"):
        relayed.up(name, peer.steal(5, name, FACTS, 1, SECOND_NS))
    relayed.run()
    ended = relayed.broker.dialect.disconnected(b"\0relay")
    assert [one.worker for one in ended if isinstance(one, events.WaitEnded)] == [b"v", b"w"]
    assert relayed.broker.dialect.timers.heap[0][0] == NEVER_NS


def test_replies_to_a_relay_that_was_forgotten_are_dropped() -> None:
    relayed = Relayed()
    relayed.up(b"w", peer.query(1, peer.OK))
    (message,) = relayed.chain[0].take(0)
    arrived = relayed.broker.dialect.receive(b"\0relay", message, SECOND_NS)
    relayed.broker.dialect.disconnected(b"\0relay")
    relayed.broker.handle([*arrived])
    assert (relayed.broker.sent, relayed.broker.dialect.flush()) == ([], [])


def malformed() -> dict[str, Q]:
    envelope = pb.Envelope(peer=1, message=b"\x08\x06").SerializeToString()
    return {
        "broken envelope": Q(type=Q.Relay, envelope=[envelope, b"\xff"]),
        "too many envelopes": Q(type=Q.Relay, envelope=[envelope] * 1_001),
        "too many numbers": Q(type=Q.Relay, gone=range(10_001)),
    }


@pytest.mark.parametrize("case", malformed())
def test_malformed_messages_of_relays_are_refused_and_change_nothing(case: str) -> None:
    broker = Counter()
    reply = Q.FromString(broker.ask(malformed()[case].SerializeToString()))
    assert (reply.type, broker.dialect.flush()) == (Q.Error, [])


def test_chains_beyond_the_limit_are_refused() -> None:
    message = b"\x08\x06"
    for _ in range(relays.DEPTH_MAX + 1):
        envelope = pb.Envelope(peer=1, message=message).SerializeToString()
        message = Q(type=Q.Relay, envelope=[envelope]).SerializeToString()
    broker = Counter()
    assert broker.frames([b"", message]) == []
    assert broker.dialect.malformed == 1
    ((_, (_, reply)),) = broker.dialect.flush()
    for _ in range(relays.DEPTH_MAX):
        reply = pb.Envelope.FromString(Q.FromString(reply).envelope[0]).message
    assert Q.FromString(reply).reason.startswith(b"a chain of more than 8 relays")


def test_message_between_relays_in_a_loop_is_dropped() -> None:
    chain = [Condenser(), Condenser()]
    chain[0].up(b"p", [b"", peer.query(1, peer.OK)], SECOND_NS)
    hops = 0
    while messages := [*chain[hops % 2].take(SECOND_NS)]:
        hops += 1
        assert hops <= relays.DEPTH_MAX
        for one in messages:
            chain[hops % 2].up(b"other", one, SECOND_NS)
    assert (hops, chain[0].looped + chain[1].looped) == (relays.DEPTH_MAX, 1)


def test_peers_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "PEERS_MAX", 2)
    broker = Counter()
    envelopes = [pb.Envelope(peer=n, message=b"\x08\x06").SerializeToString() for n in range(3)]
    query = Q(type=Q.Relay, envelope=envelopes).SerializeToString()
    assert Q.FromString(broker.ask(query)).code == b"too-many"


def test_relay_that_was_silent_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "ALL_PEERS_MAX", 1)
    broker = Counter()
    steal = peer.steal(5, b"w", FACTS, 1, SECOND_NS)
    for route in (b"\0a", b"\0b"):
        envelope = pb.Envelope(peer=1, message=steal).SerializeToString()
        query = Q(type=Q.Relay, envelope=[envelope]).SerializeToString()
        assert broker.frames([b"", query], route) == []
    assert broker.dialect.carrier(b"\x80a\0\0\0\1") == b"\x80a\0\0\0\1"
    assert broker.dialect.carrier(b"\x80b\0\0\0\1") == b"\0b"


def test_replies_of_many_bytes_leave_in_several_messages() -> None:
    relayed = Relayed()
    size = relays.BUNDLE_BYTES_MAX // 2
    names = [b"t%d" % number for number in range(3)]
    submission = Submission(names, [bytes(size)] * 3, [Terms()])
    relayed.ask(b"c", peer.create(1, submission))
    for number in range(3):
        relayed.up(b"w", peer.steal(number + 1, b"w%d" % number, FACTS, 1))
    replies = relayed.run()
    assert [one.batch.name[:] for _, one in replies] == [[name] for name in names]
