"""Replies to a process with the name of another live worker."""

from __future__ import annotations

from msgspec import structs

from taskyard.core.events import TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.core.states import TaskState
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply
from tests.wire.native.test_extended import Extended

FACTS = WorkerFacts((b"exec",), 4, 15 * SECOND_NS, incarnation=1, heartbeat_ns=SECOND_NS)
REPORTS = peer.ReportColumns(names=[b"a"], attempts=[1])


def introduced(incarnation: int, replaces: int = 0) -> peer.WorkerMessage:
    return peer.worker_message(structs.replace(FACTS, incarnation=incarnation), replaces=replaces)


def steal(counter: Extended, worker: peer.WorkerMessage) -> Reply:
    return counter.request(peer.steal(2, b"w", worker, 1), b"%d" % worker.incarnation)


def held() -> Extended:
    """Return a broker where process 1 holds the name `w` and the task a."""
    counter = Extended()
    counter.create(b"a")
    assert steal(counter, introduced(1)).assigned().names == [b"a"]
    return counter


def test_every_request_of_a_newcomer_is_refused_with_a_code() -> None:
    counter = held()
    newcomer = introduced(2)
    requests = [
        peer.steal(1, b"w", newcomer, 1),
        peer.heartbeat(2, b"w", newcomer, [], SECOND_NS),
        peer.complete(3, b"w", REPORTS, newcomer),
        peer.complete(4, b"w", REPORTS, newcomer, 1),
        peer.progress(5, b"w", [(b"a", 1)], [b"output"], 2),
        peer.leave(6, b"w", 2),
    ]
    for number, request in enumerate(requests, 1):
        reply = counter.request(request, b"2")
        assert (reply.kind, reply.code, reply.request) == (peer.ERROR, peer.NAME_HELD, number)
        assert "held by another process (incarnation 1)" in reply.reason
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.LEASED


def test_plain_peer_does_not_get_the_name_of_a_live_worker() -> None:
    counter = held()
    plain = pb.QueryMsg(type=pb.QueryMsg.Steal, location=b"w").SerializeToString()
    assert counter.ask(plain, b"plain") == b"\x08\x08"  # a plain Error
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.LEASED


def test_newcomer_takes_over_and_the_replaced_process_is_refused_for_good() -> None:
    counter = held()
    assert steal(counter, introduced(2)).code == peer.NAME_HELD
    counter.now_ns += 3 * SECOND_NS
    counter.handle([TimePassed(counter.now_ns)])
    assert steal(counter, introduced(2)).assigned().names == [b"a"]
    reply = counter.request(peer.complete(3, b"w", REPORTS, introduced(1)), b"1")
    assert (reply.kind, reply.code) == (peer.ERROR, peer.NAME_LOST)
    assert counter.scheduler.ledger.tasks[b"a"].losses == 0


def test_report_of_a_supervisor_lets_the_next_process_take_over_at_once() -> None:
    counter = held()
    assert steal(counter, introduced(2, replaces=1)).assigned().attempts == [2]


def test_worker_without_a_heartbeat_interval_has_three_heartbeats_per_timeout() -> None:
    counter = Extended()
    counter.steal()
    assert counter.scheduler.ledger.workers[b"w"].facts.heartbeat_ns == 5 * SECOND_NS


def test_every_refusal_has_a_code() -> None:
    counter = Extended()
    counter.create(b"a")
    assert counter.request(peer.query(1, peer.NOT_FOUND)).code == "malformed"
