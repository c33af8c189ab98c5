"""Round-robin at the broker: timeouts, unreachable routes, and other dialects."""

from __future__ import annotations

import msgspec
import pytest

from taskyard.core import events
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.states import CANCELLED, DONE, LEASED, READY
from taskyard.wire.round_robin import workers as round_robin_workers
from tests.wire.round_robin.kit import C1, KEY, LMQ, NATIVE, SERVER, SRV, W1, W2, Hall, lmq

# Timeouts and unreachable routes.


def test_silent_worker_is_pinged_every_period_and_lost_in_the_end(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.send(C1, *lmq(4, b"m", KEY))
    hall.received(W1)
    pings = 0
    for _ in range(11):
        hall.later(5)
        ((empty, version, command, *_),) = hall.received(W1)
        assert [empty, version, command] == [b"", LMQ, b"\x01"]
        pings += 1
    hall.later(4)
    hall.register(W2, b"1")
    hall.later(1)
    assert hall.workers() == [b"round-robin:" + W2]
    assert [frames[3] for frames in hall.received(W2)] == [b"m"]
    assert pings == 11


def test_pong_keeps_a_worker_registered(hall: Hall) -> None:
    hall.register(W1)
    for _ in range(30):
        hall.later(5)
        assert hall.received(W1)
        hall.send(W1, *lmq(2, b"PING"))
    assert hall.workers() == [b"round-robin:" + W1]


def test_task_with_a_longer_lease_extends_its_worker_s_timeout(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.create(Submission([b"slow"], terms=[Terms(lease_ns=200 * SECOND_NS)]))
    for _ in range(39):
        hall.later(5)
    assert hall.workers() == [b"round-robin:" + W1]
    hall.later(5)
    assert hall.workers() == []


def test_late_response_of_a_lost_worker_is_stale_and_the_client_gets_one(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.send(C1, *lmq(4, b"m", KEY))
    hall.later(60)
    hall.register(W2, b"1")
    hall.received(W2)
    hall.send(W1, C1, *lmq(6, b"m", b"late"))
    assert hall.received(C1) == []
    hall.send(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4] for frames in hall.received(C1)] == [b"good"]
    assert hall.dialect.stale == 1


def test_worker_that_left_is_forgotten_after_a_while(hall: Hall) -> None:
    hall.register(W1)
    hall.send(W1, *lmq(3, b"WORKER", b"\x09"))
    hall.later(600)
    assert hall.board.wake_at_ns() is None


def test_message_that_can_not_be_sent_goes_to_the_next_worker(hall: Hall) -> None:
    hall.register(W2, b"1")
    hall.register(W1, b"2")
    hall.dead = [W1]
    hall.send(C1, *lmq(4, b"m", KEY))
    assert [frames[3] for frames in hall.received(W2)] == [b"m"]
    hall.send(C1, *lmq(4, b"n", KEY))
    assert hall.received(W1) == []  # it gets nothing until it sends a message
    hall.dead = []
    assert [frames[3] for frames in hall.send(W1, *lmq(2, b"PING"))] == [b"n"]
    hall.send(W1, C1, *lmq(6, b"n", b"x"))
    assert [frames[4] for frames in hall.received(C1)] == [b"x"]


def test_response_to_a_reassigned_message_is_not_forwarded(hall: Hall) -> None:
    hall.register(W2, b"1")
    hall.register(W1, b"1")
    hall.dead = [W1]
    hall.send(C1, *lmq(4, b"m", KEY))  # for W1, delivered although it seems undelivered
    hall.dead = []
    hall.send(W1, C1, *lmq(6, b"m", b"late"))
    assert hall.received(C1) == []
    hall.send(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4] for frames in hall.received(C1)] == [b"good"]
    assert hall.dialect.stale == 1


def test_late_response_to_an_earlier_attempt_leaves_the_worker_the_next_one(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.dead = [W1]
    hall.create(Submission([b"task"], [b"payload"]))  # delivered although it seems undelivered
    hall.dead = []
    assert [frames[3] for frames in hall.send(W1, *lmq(2, b"PING"))] == [b"2/task"]
    hall.send(W1, *lmq(6, b"1/task", b"late"))
    assert (hall.states(), hall.dialect.stale) == ([LEASED], 1)
    hall.send(W1, *lmq(6, b"2/task", b"good"))
    assert hall.states() == [DONE]
    assert results(hall, b"task") == [b"good"]


@pytest.mark.parametrize("leaves", ["cut", "silent"])
def test_message_that_a_worker_gets_again_has_a_new_id(hall: Hall, leaves: str) -> None:
    hall.register(W1, b"2")
    hall.dead = [W1] if leaves == "cut" else []
    hall.send(C1, *lmq(4, b"m", KEY, b"x"))
    hall.dead = []
    if leaves == "cut":
        (again,) = hall.send(W1, *lmq(2, b"PING"))
    else:
        hall.later(60)
        hall.received(W1)
        (again,) = hall.register(W1, b"2")
    (name,) = hall.scheduler.ledger.tasks
    assert again == [b"", LMQ, b"\x04", b"2/" + name, KEY, b"x", b"", SRV]
    hall.send(W1, C1, *lmq(6, b"m", b"late"))
    assert (hall.received(C1), hall.states()) == ([], [LEASED])
    hall.send(W1, *lmq(6, b"2/" + name, b"good", b"more"))
    assert hall.received(C1) == [[b"", LMQ, b"\x06", b"m", b"good", b"more", b"", W1, SRV]]
    assert hall.dialect.stale == 1


def test_increment_for_a_message_that_is_sent_again_settles_no_exec(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.dead = [W1]
    hall.send(C1, *lmq(3, b"m", KEY))
    hall.dead = []
    (again,) = hall.send(W1, *lmq(2, b"PING"))
    hall.increment(W1)  # for the message that seemed undelivered
    assert hall.states() == [LEASED]
    hall.send(W1, *lmq(6, again[3]))
    assert hall.states() == [DONE]


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_client_gets_the_valid_response_even_with_a_late_one_in_the_same_turn(
    hall: Hall, places: tuple[int, int]
) -> None:
    hall.register(W2, b"1")
    hall.register(W1, b"1")
    hall.dead = [W1]
    hall.send(C1, *lmq(4, b"m", KEY))
    hall.dead = []
    answers = (
        (SERVER + W1, [C1, *lmq(6, b"m", b"late", b"x")]),
        (SERVER + W2, [C1, *lmq(6, b"m", b"good", b"y")]),
    )
    taken = [hall.board.receive(*answers[place], hall.now_ns) for place in places]
    hall.handle([event for events in taken for event in events])
    assert hall.received(C1) == [[b"", LMQ, b"\x06", b"m", b"good", b"y", b"", W2, SRV]]


def test_unreachable_worker_keeps_its_messages(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.send(C1, *lmq(4, b"held", KEY))
    hall.received(W1)
    hall.dead = [W1]
    hall.later(5)  # a PING does not reach it
    hall.send(C1, *lmq(4, b"new", KEY))
    assert hall.states() == [LEASED, READY]
    hall.dead = []
    hall.send(W1, C1, *lmq(6, b"held", b"x"))
    assert [frames[4] for frames in hall.received(C1)] == [b"x"]
    assert hall.states() == [DONE, LEASED]


def test_worker_that_becomes_unreachable_in_the_turn_of_a_cancellation_gets_nothing(
    hall: Hall,
) -> None:
    """The scheduler must get the slot of the cancelled message first, and the lost route last.
    Otherwise it would lease the second message again and again."""
    hall.register(W1, b"3")
    hall.send(C1, *lmq(4, b"cancelled", KEY))
    (first,) = hall.scheduler.ledger.tasks
    hall.dead = [W1]
    cancel = events.CancelRequested(0, NATIVE, events.Scope(names=(first,)), 16)
    second = hall.board.receive(SERVER + C1, lmq(4, b"new", KEY), hall.now_ns)
    hall.handle([cancel, *second])
    assert hall.states() == [CANCELLED, READY]
    assert hall.free(W1) < 0


def test_response_to_a_disconnected_client_is_dropped_and_counted(hall: Hall) -> None:
    hall.register(W1)
    hall.send(C1, *lmq(4, b"1", KEY))
    hall.send(C1, *lmq(4, b"2", KEY))
    hall.dead = [C1]
    hall.send(W1, C1, *lmq(6, b"1"))
    assert hall.dialect.dropped == 1
    assert hall.states() == [DONE, LEASED]
    hall.dead = []  # it is back, under its name
    hall.send(W1, C1, *lmq(6, b"2", b"x"))
    assert [frames[3:5] for frames in hall.received(C1)] == [[b"2", b"x"]]


def test_drained_worker_gets_no_more_and_is_removed_when_it_holds_nothing(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.send(C1, *lmq(4, b"1", KEY))
    hall.received(W1)
    hall.handle([events.DrainRequested(0, NATIVE, None, 16)])
    hall.send(C1, *lmq(4, b"2", KEY))
    hall.send(W1, C1, *lmq(6, b"1"))
    assert hall.workers() == []
    assert hall.send(W1, *lmq(4, b"o", b"ongoing")) == [[b"", LMQ, b"\x06", b"o", b"", SRV]]
    hall.increment(W1)
    assert [frames[3] for frames in hall.register(W1)] == [b"2"]  # it wants more


def test_broker_that_shuts_down_refuses_register(hall: Hall) -> None:
    hall.dialect.leaving = True
    (answer,) = hall.send(W1, *lmq(4, b"r", b"\x08", b"1"))
    assert answer[4] == b"ERROR the server is shutting down"


def test_table_is_bounded_and_a_worker_that_left_makes_room(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_robin_workers, "PEERS_MAX", 2)
    hall.register(W1)
    hall.register(W2)
    (answer,) = hall.send(C1, *lmq(4, b"r", b"\x08", b"1"))
    assert answer[4] == b"ERROR too many workers are registered"
    hall.send(W1, *lmq(3, b"WORKER", b"\x09"))
    hall.register(C1)


# Other dialects.


def test_task_of_another_dialect_is_sent_to_a_worker_and_its_result_kept(hall: Hall) -> None:
    hall.register(W1)
    hall.create(Submission([b"task", b"bare"], [b"payload", b""]))
    one, two = hall.received(W1)
    assert one == [b"", LMQ, b"\x04", b"1/task", b"payload", b"", SRV]
    assert two == [b"", LMQ, b"\x04", b"1/bare", b"bare", b"", SRV]
    hall.send(W1, *lmq(6, b"1/task", b"result"))
    hall.send(W1, *lmq(6, b"1/bare", b"a", b"b"))
    assert hall.states() == [DONE, DONE]
    assert results(hall, b"task", b"bare") == [b"result", msgspec.msgpack.encode([b"a", b"b"])]


def results(hall: Hall, *names: bytes) -> list[bytes]:
    """Return the results in the records of this broker."""
    return [hall.results[name] for name in names]


def test_task_of_another_dialect_with_a_long_name_has_a_short_id(hall: Hall) -> None:
    hall.register(W1)
    hall.create(Submission([b"n" * 1024], [b"payload"]))
    ((_, _, _, number, *_),) = hall.received(W1)
    assert len(number) <= 255
    hall.send(W1, *lmq(6, number, b"x"))
    assert hall.states() == [DONE]


@pytest.mark.parametrize(
    ("arguments", "payload"),
    [
        ([b"key"], b"key"),
        ([b"key", b"one"], b"one"),
        ([b"key", b""], b""),
        ([b"key", b"one", b"two"], msgspec.msgpack.encode([b"one", b"two"])),
    ],
)
def test_message_is_a_payload_to_other_dialects(
    hall: Hall, arguments: list[bytes], payload: bytes
) -> None:
    hall.send(C1, *lmq(4, b"1", *arguments))
    (task,) = hall.scheduler.ledger.tasks.values()
    assert task.payload == payload
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    hall.handle([events.TasksReported(0, b"w", [task.name], texts=[b"result"])])
    assert hall.received(C1) == [[b"", LMQ, b"\x06", b"1", b"result", b"", SRV]]


def test_empty_result_of_another_worker_is_a_response_without_arguments(hall: Hall) -> None:
    hall.send(C1, *lmq(4, b"1", KEY))
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    hall.handle([events.TasksReported(0, b"w", [name])])
    assert hall.received(C1) == [[b"", LMQ, b"\x06", b"1", b"", SRV]]


def test_truncated_result_of_another_worker_is_an_error(hall: Hall) -> None:
    hall.send(C1, *lmq(4, b"1", KEY))
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    hall.handle([events.TasksReported(0, b"w", [name], texts=[b"end"], result_bytes_total=[9])])
    ((*_, error, _, _),) = hall.received(C1)
    assert error.endswith(b"result truncated: only the last 3 of 9 bytes are kept")


def test_task_of_another_dialect_with_its_own_envelope_is_foreign(hall: Hall) -> None:
    hall.register(W1)
    terms = [Terms(dialect=b"round-robin")]
    envelopes = [b"", b"\xc1", msgspec.msgpack.encode(["x"]), b"\x91" * 100_000]
    names = [b"%d" % number for number in range(len(envelopes))]
    submission = Submission(names, [b"p"], terms, envelopes=envelopes)
    hall.handle([events.SubmitRequested(0, b"", submission)])
    assert [frames[3:5] for frames in hall.received(W1)] == [[b"1/" + name, b"p"] for name in names]
