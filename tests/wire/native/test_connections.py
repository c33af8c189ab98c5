"""New connections of extended workers: the events that make their assignments uncertain."""

from __future__ import annotations

import pytest

from taskyard.core import effects, events
from taskyard.core.events import WorkerReconnected
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, WorkerFacts
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer, pending
from taskyard.wire.native.server import NativeServer

FORMER, NEXT, LAST = b"\0\0a", b"\0\0b", b"\0\0c"
#: A route whose peer chose its routing id.
CHOSEN = b"\0me"


def worker(incarnation: int = 1, slots: int = 4) -> peer.WorkerMessage:
    return peer.worker_message(
        WorkerFacts(slots_total=slots, lease_timeout_ns=15 * SECOND_NS, incarnation=incarnation)
    )


def steal(incarnation: int = 1, slots: int = 4) -> bytes:
    return peer.steal(1, b"w", worker(incarnation, slots), 1)


def heartbeat(number: int = 1) -> bytes:
    return peer.heartbeat(number, b"w", worker(), [(b"a", 1)], SECOND_NS, seen=0)


def complete() -> bytes:
    return peer.complete(1, b"w", peer.ReportColumns([b"a"], [1]), worker(), 1)


class Server(NativeServer):
    """A server that returns the new connections in a message."""

    def __init__(self) -> None:
        super().__init__(1, lambda: 5)

    def new(self, route: bytes, body: bytes) -> list[events.Event]:
        found = self.receive(route, [b"", body], 7)
        assert type(found[0]) is WorkerReconnected or not any(
            isinstance(one, WorkerReconnected) for one in found
        )
        return [one for one in found if isinstance(one, WorkerReconnected)]


@pytest.mark.parametrize("body", [steal(), steal(slots=2), complete(), heartbeat()])
def test_first_message_of_a_process_by_another_route_is_a_new_connection(body: bytes) -> None:
    server = Server()
    assert server.new(FORMER, steal()) == []
    assert server.new(FORMER, steal()) == []
    assert server.new(NEXT, body) == [WorkerReconnected(0, b"w", 1)]
    assert server.new(NEXT, body) == []
    assert server.new(FORMER, steal()) == []  # both connections are open
    assert server.new(LAST, body) == [WorkerReconnected(0, b"w", 1)]


def test_next_process_of_a_name_is_no_new_connection_of_the_former() -> None:
    server = Server()
    server.new(FORMER, steal())
    assert server.new(NEXT, steal(incarnation=2)) == []
    assert server.new(LAST, steal(incarnation=2)) == [WorkerReconnected(0, b"w", 2)]


def test_chosen_route_is_a_new_connection_once_the_same_process_sends_by_it() -> None:
    server = Server()
    server.new(CHOSEN, steal())
    assert server.reconnected(CHOSEN, 7) == []
    assert server.new(CHOSEN, steal()) == [WorkerReconnected(0, b"w", 1)]
    assert server.new(CHOSEN, steal()) == []
    assert server.reconnected(CHOSEN, 7) == []
    assert server.new(CHOSEN, steal(incarnation=2)) == []


def test_repeated_heartbeat_on_a_new_connection_is_decoded() -> None:
    server = Server()
    known = server.receive(FORMER, [b"", heartbeat(1)], 7)[-1]
    assert isinstance(known, events.WorkerHeartbeat)
    assert server.new(NEXT, heartbeat(2)) == [WorkerReconnected(0, b"w", 1)]


def relayed(number: int, body: bytes) -> bytes:
    envelope = pb.Envelope(peer=number, message=body).SerializeToString()
    return pb.QueryMsg(type=pb.QueryMsg.Relay, envelope=[envelope]).SerializeToString()


def test_connections_behind_a_relay_and_of_the_relay_are_noticed() -> None:
    server = Server()
    assert server.new(FORMER, relayed(1, steal())) == []
    assert server.new(FORMER, relayed(2, steal())) == [WorkerReconnected(0, b"w", 1)]
    lost = server.disconnected(FORMER)
    assert lost[-1:] == [WorkerReconnected(0, b"w", 1)]
    assert server.new(NEXT, relayed(1, steal())) == [WorkerReconnected(0, b"w", 1)]


def test_route_of_a_dead_worker_makes_none_of_its_assignments_uncertain() -> None:
    server = Server()
    server.new(FORMER, steal())
    assert server.disconnected(FORMER) == [events.ClientDisconnected(0, FORMER)]


def report(kind: pb.QueryMsg.Type) -> bytes:
    """Return a report of the first process on its task. It has no facts."""
    query = pb.QueryMsg(type=kind, request=1, location=b"w", incarnation=1)
    query.batch.MergeFrom(pb.Batch(name=[b"a"], attempt=[1]))
    if kind == pb.QueryMsg.Append:
        query.batch.MergeFrom(pb.Batch(stream=[1], offset=[0], output=[b"text"]))
    return query.SerializeToString()


@pytest.mark.parametrize(
    "body",
    [report(kind) for kind in (peer.PROGRESS, pb.QueryMsg.Append, peer.TRANSFER, peer.COMPLETE)],
    ids=["Progress", "Append", "Transfer", "Complete"],
)
def test_report_with_the_incarnation_shows_a_new_connection(body: bytes) -> None:
    server = Server()
    assert server.new(FORMER, body) == []  # the first message since the broker's start
    assert server.new(FORMER, steal()) == []
    assert server.new(NEXT, body) == [WorkerReconnected(0, b"w", 1)]
    assert server.new(NEXT, steal()) == []


def test_refused_process_of_a_name_leaves_the_connections_of_the_holder_known() -> None:
    server = Server()
    server.new(FORMER, steal())
    assert server.new(NEXT, steal(incarnation=2)) == []
    server.reply(effects.Refused(b"w", 2, Refusal.NAME_HELD, "held"))
    assert server.new(NEXT, peer.leave(2, b"w", 2)) == []
    assert server.new(LAST, steal()) == [WorkerReconnected(0, b"w", 1)]


def test_tasks_of_a_process_whose_connections_are_forgotten_are_doubted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending, "PROCESSES_MAX", 1)
    server = Server()
    server.new(FORMER, steal())
    assert server.new(NEXT, peer.steal(1, b"x", worker(), 1)) == [WorkerReconnected(0, b"w", 1)]


def test_connection_in_use_is_kept_and_another_one_forgotten() -> None:
    server = Server()
    server.new(FORMER, steal())
    for number in range(pending.ROUTES_MAX + 1):
        assert len(server.new(b"\0\0%d" % number, steal())) == 1
        assert server.new(FORMER, steal()) == []
