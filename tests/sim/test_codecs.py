"""The codecs of model peers, frame by frame."""

import pytest

from simulator.codecs.dialects import (
    PingPongClientCodec,
    PingPongWorkerCodec,
    PlainCodec,
    RoundRobinClientCodec,
    RoundRobinWorkerCodec,
    WmpWorkerCodec,
)
from simulator.codecs.native import NativeCodec
from simulator.listeners import Listener, open_all
from simulator.models import Violation
from simulator.plan import draw
from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.core.model import Submission, WorkerFacts
from taskyard.wire import dwork_pb2 as pb

FACTS = WorkerFacts((b"default",), 2, 5, 7)


def done(name: bytes, outcome: Outcome = Outcome.DONE) -> events.TasksReported:
    return events.TasksReported(0, b"w", [name], [1], [outcome], [b"text"], request=3)


def test_worker_of_ping_pong_has_four_words_and_an_error() -> None:
    codec = PingPongWorkerCodec(b"w")
    assert codec.encode([events.TasksRequested(0, b"w")]) == [b"", b"READY"]
    assert codec.encode([events.WorkerHeartbeat(0, b"w")]) == [b"", b"PING"]
    assert codec.encode([events.WorkerExited(0, b"w")]) == [b"", b"DISCONNECT"]
    assert codec.encode([done(b"a")]) == [b"", b"text"]
    assert codec.encode([done(b"a", Outcome.FAILED)]) == [b"", b"ERROR", b"text"]


def test_worker_of_ping_pong_hears_jobs_and_two_words() -> None:
    codec = PingPongWorkerCodec(b"w")
    assert codec.decode([b"", b"PONG"]) == [effects.HeartbeatAck(b"w", 0, 0)]
    assert codec.decode([b"", b"EXIT"]) == [effects.Shutdown(b"w")]
    (assign,) = codec.decode([b"", b"do a"])
    assert isinstance(assign, effects.Assign)
    assert (assign.names, assign.attempts) == ([b"a"], [0])


def test_client_of_ping_pong_takes_answers_in_the_order_of_its_jobs() -> None:
    codec = PingPongClientCodec()
    for request in (1, 2):
        asked = events.SubmitRequested(0, b"", Submission([b"job"], [b"job"]), request)
        assert codec.encode([asked]) == [b"", b"job"]
    answers = [*codec.decode([b"", b"one"]), *codec.decode([b"", b"ERROR", b"two"])]
    assert [answer.request for answer in answers] == [1, 2]  # type: ignore[attr-defined]
    with pytest.raises(Violation, match="no open request"):
        codec.decode([b"", b"three"])


def test_worker_of_round_robin_answers_by_the_way_back() -> None:
    codec = RoundRobinWorkerCodec(b"w")
    message = [b"", b"LMQv100", b"\x04", b"id", b"work", b"do a", b"", b"client", b"relay"]
    (assign,) = codec.decode(message)
    assert isinstance(assign, effects.Assign)
    assert assign.names == [b"a"]
    answer = [b"relay", b"client", b"", b"LMQv100", b"\x06", b"id", b"text", b""]
    assert codec.encode([done(b"a")]) == answer


def test_worker_of_round_robin_registers_frees_and_leaves() -> None:
    codec = RoundRobinWorkerCodec(b"w")
    registers = [b"", b"LMQv100", b"\x04", b"hello", b"\x08", b"2", b""]
    assert codec.encode([events.WorkerRegistered(0, b"w", FACTS)]) == registers
    assert codec.encode([events.SlotFreed(0, b"w")])[-2] == b"\x07"
    assert codec.encode([events.WorkerExited(0, b"w")])[-2] == b"\x09"


def test_client_of_round_robin_is_answered_by_its_id() -> None:
    codec = RoundRobinClientCodec()
    asked = events.SubmitRequested(0, b"", Submission([b"job"], [b"job"]), 9)
    assert codec.encode([asked]) == [b"", b"LMQv100", b"\x04", b"9", b"work", b"job", b""]
    (answer,) = codec.decode([b"", b"LMQv100", b"\x06", b"9", b"text", b"", b"w"])
    assert answer == effects.Settled(b"", 9, [], [], [b"text"])


def test_wmp_worker_sends_ready_and_reports_to_its_manager() -> None:
    codec = WmpWorkerCodec(b"wmp:w")
    ready = codec.encode(
        [events.WorkerRegistered(0, b"wmp:w", FACTS), events.TasksRequested(0, b"wmp:w", 2)]
    )
    assert ready[:3] == [b"", b"WMP01", b"\x01"]
    assert ready[3] == (
        b'{"worker":"w","slots":2,"services":["default"],"incarnation":7,"heartbeat_ms":0,'
        b'"replaces":0}'
    )
    receive = (
        b'{"request":"4","task":"a","attempt":1,"service":"default","lease_ms":5,"manager":"m"}'
    )
    (assign,) = codec.decode([b"", b"WMP01", b"\x04", receive, b"do a"])
    assert isinstance(assign, effects.Assign)
    assert (assign.names, assign.attempts, assign.request) == ([b"a"], [1], 4)
    report = codec.encode([done(b"a", Outcome.FAILED)])
    assert report[2:] == [
        b"\x06",
        b'{"worker":"w","task":"a","status":"error","attempt":1,"manager":"m"}',
        b"text",
    ]


def test_plain_peer_raises_when_it_is_answered_twice() -> None:
    codec = PlainCodec()
    codec.encode([events.TasksRequested(0, b"w", 1, parks=False)])
    answer = [b"", pb.QueryMsg(type=pb.QueryMsg.NotFound).SerializeToString()]
    assert codec.decode(answer) == [effects.NoWork(b"w", settled=False)]
    with pytest.raises(Violation, match="no open request"):
        codec.decode(answer)


def test_native_peer_raises_when_it_is_answered_twice_without_duplicates() -> None:
    answer = [b"", pb.QueryMsg(type=pb.QueryMsg.OK, request=3).SerializeToString()]
    for may_duplicate in (True, False):
        codec = NativeCodec(may_duplicate=may_duplicate)
        codec.encode([done(b"a")])
        assert codec.decode(answer) == [effects.ReportAck(b"w", 3, [])]
        if may_duplicate:
            codec.decode(answer)
        else:
            with pytest.raises(Violation, match="more answers"):
                codec.decode(answer)


@pytest.mark.parametrize("door", Listener)
def test_every_door_has_a_dialect_that_survives_nonsense(door: Listener) -> None:
    doors = open_all(draw(0), lambda: 1)
    for frames in ([], [b""], [b"", b"nonsense"], [b"x"] * 70):
        doors.receive(bytes([door]) + b"peer", frames, 1)
