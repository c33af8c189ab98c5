"""Repeated heartbeats: the replies that they would get if they were decoded."""

from __future__ import annotations

import random

import pytest

from taskyard.core.events import (
    Event,
    HeartbeatsRepeated,
    RequestRejected,
    RulesSet,
    Scope,
    WorkerHeartbeat,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.core.rules import LaneOptions, Rule
from taskyard.wire.native import peer
from taskyard.wire.native.repeats import REPEAT_BYTES_MAX, Repeat, worker_of
from taskyard.wire.roles import AuthenticatedPeer, Role
from tests.wire.native.test_extended import Extended

Held = list[tuple[bytes, int]]

WORKER = AuthenticatedPeer("w", (Role.WORKER,))


def message(*services: bytes) -> peer.WorkerMessage:
    facts = WorkerFacts(
        services=(b"exec", *services), slots_total=9, lease_timeout_ns=15 * SECOND_NS, incarnation=1
    )
    return peer.worker_message(facts)


def heartbeat(
    number: int, held: Held | None = None, seen: int = 0, name: bytes = b"w", waiting: int = 0
) -> bytes:
    return peer.heartbeat(
        number, name, message(), held or [], SECOND_NS, seen=seen, waiting=waiting
    )


class Broker(Extended):
    """A broker with the worker w."""

    def __init__(self) -> None:
        super().__init__()
        #: Heartbeats that were not decoded.
        self.repeated = 0

    def receive(
        self, body: bytes, route: bytes = b"w", peer: AuthenticatedPeer | None = None
    ) -> list[Event]:
        events = [*self.dialect.receive(route, [b"", body], self.now_ns, peer)]
        self.repeated += any(isinstance(event, HeartbeatsRepeated) for event in events)
        return events

    def ask(self, body: bytes, route: bytes = b"peer") -> bytes:
        """Return the reply to a request. It may also end a Steal that waits."""
        return self.frames([b"", body], route)[-1]

    def beat(self, body: bytes) -> bytes:
        """Return the reply to a heartbeat."""
        self.sent = []
        self.handle(self.receive(body))
        (reply,) = [one for _, one in self.sent if peer.Reply(one).kind == peer.HEARTBEAT]
        return reply

    def act(self, act: str, number: int, held: Held) -> Held:
        """Do something between two heartbeats. Return the tasks that w gets."""
        if act in ("steal", "miss"):
            self.create(b"t%d" % number)
            assigned = peer.Reply(self.ask(peer.steal(2, b"w", message(), 1, 0), b"w")).assigned()
            got = [*zip(assigned.names, assigned.attempts, strict=True)]
            return got if act == "steal" else []
        if act == "done" and held:
            names, attempts = zip(*held[:1], strict=True)
            reports = peer.ReportColumns([*names], [*attempts])
            self.ask(peer.complete(3, b"w", reports, message(), 0), b"w")
        elif act == "cancel" and held:
            self.ask(peer.command(4, peer.CANCEL, Scope(names=(held[0][0],))))
        elif act == "register":
            self.ask(peer.steal(5, b"w", message(b"more-%d" % number), 1, 0), b"w")
        elif act == "expire":
            self.pass_time(20 * SECOND_NS)
        elif act == "wait":
            self.frames([b"", peer.steal(6, b"w", message(), 1, SECOND_NS)], b"w")
        elif act == "rules":
            rule = Rule(b"r%d" % number, b"x/*", LaneOptions(overfeed=1))
            self.handle([RulesSet(0, (rule,))])
        elif act == "forget":
            self.handle([*self.dialect.disconnected(b"w")])
        return []


@pytest.mark.parametrize("seed", range(6))
def test_replies_are_those_to_decoded_heartbeats(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices, held, seen, named = random.Random(seed), Held(), 0, 0
    brokers = quick, slow = Broker(), Broker()
    monkeypatch.setattr(slow.dialect, "_receive_repeated", lambda *_: None)
    acts = [*["beat"] * 9, "steal", "miss", "done", "lose", "cancel", "register", "expire"]
    acts += [*["beat"] * 9, "wait", "wait", "rules", "forget"]
    for number in range(1, 150):
        act = choices.choice(acts)
        got, _ = (broker.act(act, number, held) for broker in brokers)
        held = [*held[act in ("done", "lose") :], *got]
        named = 6 if act in ("wait", "forget") else choices.choice([named, 0, named])
        body = heartbeat(number, held, seen, waiting=named)
        reply, decoded = (broker.beat(body) for broker in brokers)
        assert reply == decoded, (number, act)
        stopped = zip(peer.Reply(reply).names, peer.Reply(reply).attempts, strict=True)
        held = [key for key in held if key not in {*stopped}]
        seen = choices.choice([seen, peer.Reply(reply).seen])
    assert quick.repeated > 50
    assert not slow.repeated


def test_repeated_heartbeat_that_needs_another_reply_confirms_the_waiting_steal() -> None:
    broker = Broker()
    broker.act("wait", 1, [])
    for number in (1, 2, 3):
        if number == 3:
            broker.act("rules", 1, [])
        assert peer.Reply(broker.beat(heartbeat(number, waiting=6))).waiting == 6
    assert broker.repeated == 2


def test_heartbeats_in_a_row_are_one_event() -> None:
    broker = Broker()
    names = [b"w", b"x", b"y"]
    for number in (1, 2):  # the second one has the interval of the reply
        for name in names:
            broker.handle(broker.receive(heartbeat(number, name=name), name))
    events = [event for name in names for event in broker.receive(heartbeat(3, name=name), name)]
    (event,) = events
    assert isinstance(event, HeartbeatsRepeated)
    assert [last.worker for last, *_ in event.heartbeats] == names
    broker.sent = []
    broker.handle(events)
    assert [route for route, _ in broker.sent] == names


def test_message_between_heartbeats_stays_in_order() -> None:
    broker = Broker()
    for number in (1, 2):
        for name in (b"w", b"x"):
            broker.handle(broker.receive(heartbeat(number, name=name), name))
    events = broker.receive(heartbeat(3, name=b"x"), b"x")
    events += broker.receive(peer.steal(4, b"w", message(), 1, 0))
    events += broker.receive(heartbeat(5))
    types = [type(event).__name__ for event in events]
    assert types == ["HeartbeatsRepeated", "TasksRequested", "HeartbeatsRepeated"]


def test_heartbeat_of_a_revoked_key_is_refused() -> None:
    broker = Broker()
    for number in (1, 2, 3):
        broker.handle(broker.receive(heartbeat(number), peer=WORKER))
    assert broker.repeated
    for other in (AuthenticatedPeer("w", ()), AuthenticatedPeer("v", (Role.WORKER,))):
        (event,) = broker.receive(heartbeat(4), peer=other)
        assert isinstance(event, RequestRejected)


@pytest.mark.parametrize(
    "body",
    [
        heartbeat(5)[:-1],
        heartbeat(5) + b"\0",
        heartbeat(5)[:8],
        heartbeat(5) + heartbeat(5),
        heartbeat(5, [(b"a", 1)]),
        heartbeat(5, name=b"v"),
        peer.steal(5, b"w", message(), 1, 0),
        b"",
    ],
)
def test_other_messages_do_not_match(body: bytes) -> None:
    repeat = Repeat(heartbeat(1), WorkerHeartbeat(0, b"w"))
    assert repeat.match(heartbeat(2**40, seen=2**30)) == (2**40, 2**30)
    assert repeat.match(body) is None


def test_long_heartbeat_is_decoded() -> None:
    assert worker_of(heartbeat(1)) == b"w"
    assert worker_of(heartbeat(1, [(b"a" * REPEAT_BYTES_MAX, 1)])) == b""
