"""Round-robin at the broker: timeouts, unreachable routes, and other dialects."""

from __future__ import annotations

import msgspec
import pytest

from taskyard.core import events
from taskyard.core.blobs import Blob
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.states import CANCELLED, DONE, LEASED, READY
from taskyard.core.timer_heap import NEVER_NS
from taskyard.wire.round_robin import workers as round_robin_workers
from tests.wire.round_robin.kit import C1, KEY, LMQ, NATIVE, SERVER, SRV, W1, W2, Harness, lmq

# Timeouts and unreachable routes.


def test_silent_worker_is_pinged_every_period_and_lost_in_the_end(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.received(W1)
    pings = 0
    for _ in range(11):
        harness.later(5)
        ((empty, version, command, *_),) = harness.received(W1)
        assert [empty, version, command] == [b"", LMQ, b"\x01"]
        pings += 1
    harness.later(4)
    harness.register(W2, b"1")
    harness.later(1)
    assert harness.workers() == [b"round-robin:" + W2]
    assert [frames[3] for frames in harness.received(W2)] == [b"m"]
    assert pings == 11


def test_pong_keeps_a_worker_registered(harness: Harness) -> None:
    harness.register(W1)
    for _ in range(30):
        harness.later(5)
        assert harness.received(W1)
        harness.send(W1, *lmq(2, b"PING"))
    assert harness.workers() == [b"round-robin:" + W1]


def test_task_with_a_longer_lease_extends_its_worker_s_timeout(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.create(Submission([b"slow"], terms=[Terms(lease_ns=200 * SECOND_NS)]))
    for _ in range(39):
        harness.later(5)
    assert harness.workers() == [b"round-robin:" + W1]
    harness.later(5)
    assert harness.workers() == []


def test_late_response_of_a_lost_worker_is_stale_and_the_client_gets_one(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.later(60)
    harness.register(W2, b"1")
    harness.received(W2)
    harness.send(W1, C1, *lmq(6, b"m", b"late"))
    assert harness.received(C1) == []
    harness.send(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4] for frames in harness.received(C1)] == [b"good"]
    assert harness.dialect.stale == 1


def test_worker_that_left_is_forgotten_after_a_while(harness: Harness) -> None:
    harness.register(W1)
    harness.send(W1, *lmq(3, b"WORKER", b"\x09"))
    harness.later(600)
    assert harness.board.timers.heap[0][0] == NEVER_NS


def test_message_that_can_not_be_sent_goes_to_the_next_worker(harness: Harness) -> None:
    harness.register(W2, b"1")
    harness.register(W1, b"2")
    harness.dead = [W1]
    harness.send(C1, *lmq(4, b"m", KEY))
    assert [frames[3] for frames in harness.received(W2)] == [b"m"]
    harness.send(C1, *lmq(4, b"n", KEY))
    assert harness.received(W1) == []  # it gets nothing until it sends a message
    harness.dead = []
    assert [frames[3] for frames in harness.send(W1, *lmq(2, b"PING"))] == [b"n"]
    harness.send(W1, C1, *lmq(6, b"n", b"x"))
    assert [frames[4] for frames in harness.received(C1)] == [b"x"]


def test_response_to_a_reassigned_message_is_not_forwarded(harness: Harness) -> None:
    harness.register(W2, b"1")
    harness.register(W1, b"1")
    harness.dead = [W1]
    harness.send(C1, *lmq(4, b"m", KEY))  # for W1, delivered although it seems undelivered
    harness.dead = []
    harness.send(W1, C1, *lmq(6, b"m", b"late"))
    assert harness.received(C1) == []
    harness.send(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4] for frames in harness.received(C1)] == [b"good"]
    assert harness.dialect.stale == 1


def test_late_response_to_an_earlier_attempt_leaves_the_worker_the_next_one(
    harness: Harness,
) -> None:
    harness.register(W1, b"2")
    harness.dead = [W1]
    harness.create(Submission([b"task"], [b"payload"]))  # delivered although it seems undelivered
    harness.dead = []
    assert [frames[3] for frames in harness.send(W1, *lmq(2, b"PING"))] == [b"2/task"]
    harness.send(W1, *lmq(6, b"1/task", b"late"))
    assert (harness.states(), harness.dialect.stale) == ([LEASED], 1)
    harness.send(W1, *lmq(6, b"2/task", b"good"))
    assert harness.states() == [DONE]
    assert results(harness, b"task") == [b"good"]


@pytest.mark.parametrize("leaves", ["cut", "silent"])
def test_message_that_a_worker_gets_again_has_a_new_id(harness: Harness, leaves: str) -> None:
    harness.register(W1, b"2")
    harness.dead = [W1] if leaves == "cut" else []
    harness.send(C1, *lmq(4, b"m", KEY, b"x"))
    harness.dead = []
    if leaves == "cut":
        (again,) = harness.send(W1, *lmq(2, b"PING"))
    else:
        harness.later(60)
        harness.received(W1)
        (again,) = harness.register(W1, b"2")
    (name,) = harness.scheduler.ledger.tasks
    assert again == [b"", LMQ, b"\x04", b"2/" + name, KEY, b"x", b"", SRV]
    harness.send(W1, C1, *lmq(6, b"m", b"late"))
    assert (harness.received(C1), harness.states()) == ([], [LEASED])
    harness.send(W1, *lmq(6, b"2/" + name, b"good", b"more"))
    assert harness.received(C1) == [[b"", LMQ, b"\x06", b"m", b"good", b"more", b"", W1, SRV]]
    assert harness.dialect.stale == 1


def test_increment_for_a_message_that_is_sent_again_settles_no_exec(harness: Harness) -> None:
    harness.register(W1, b"2")
    harness.dead = [W1]
    harness.send(C1, *lmq(3, b"m", KEY))
    harness.dead = []
    (again,) = harness.send(W1, *lmq(2, b"PING"))
    harness.increment(W1)  # for the message that seemed undelivered
    assert harness.states() == [LEASED]
    harness.send(W1, *lmq(6, again[3]))
    assert harness.states() == [DONE]


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_client_gets_the_valid_response_even_with_a_late_one_in_the_same_turn(
    harness: Harness, places: tuple[int, int]
) -> None:
    harness.register(W2, b"1")
    harness.register(W1, b"1")
    harness.dead = [W1]
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.dead = []
    answers = (
        (SERVER + W1, [C1, *lmq(6, b"m", b"late", b"x")]),
        (SERVER + W2, [C1, *lmq(6, b"m", b"good", b"y")]),
    )
    taken = [harness.board.receive(*answers[place], harness.now_ns) for place in places]
    harness.handle([event for events in taken for event in events])
    assert harness.received(C1) == [[b"", LMQ, b"\x06", b"m", b"good", b"y", b"", W2, SRV]]


def test_unreachable_worker_keeps_its_messages(harness: Harness) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(4, b"held", KEY))
    harness.received(W1)
    harness.dead = [W1]
    harness.later(5)  # a PING does not reach it
    harness.send(C1, *lmq(4, b"new", KEY))
    assert harness.states() == [LEASED, READY]
    harness.dead = []
    harness.send(W1, C1, *lmq(6, b"held", b"x"))
    assert [frames[4] for frames in harness.received(C1)] == [b"x"]
    assert harness.states() == [DONE, LEASED]


def test_worker_that_becomes_unreachable_in_the_turn_of_a_cancellation_gets_nothing(
    harness: Harness,
) -> None:
    """The scheduler must get the slot of the cancelled message first, and the lost route last.
    Otherwise it would lease the second message again and again."""
    harness.register(W1, b"3")
    harness.send(C1, *lmq(4, b"cancelled", KEY))
    (first,) = harness.scheduler.ledger.tasks
    harness.dead = [W1]
    cancel = events.CancelRequested(0, NATIVE, events.Scope(names=(first,)), 64)
    second = harness.board.receive(SERVER + C1, lmq(4, b"new", KEY), harness.now_ns)
    harness.handle([cancel, *second])
    assert harness.states() == [CANCELLED, READY]
    assert harness.free(W1) < 0


def test_response_to_a_disconnected_client_is_dropped_and_counted(harness: Harness) -> None:
    harness.register(W1)
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.send(C1, *lmq(4, b"2", KEY))
    harness.dead = [C1]
    harness.send(W1, C1, *lmq(6, b"1"))
    assert harness.dialect.dropped == 1
    assert harness.states() == [DONE, LEASED]
    harness.dead = []  # it is back, under its name
    harness.send(W1, C1, *lmq(6, b"2", b"x"))
    assert [frames[3:5] for frames in harness.received(C1)] == [[b"2", b"x"]]


def test_drained_worker_gets_no_more_and_is_removed_when_it_holds_nothing(harness: Harness) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.received(W1)
    harness.handle([events.DrainRequested(0, NATIVE, None, 64)])
    harness.send(C1, *lmq(4, b"2", KEY))
    harness.send(W1, C1, *lmq(6, b"1"))
    assert harness.workers() == []
    assert harness.send(W1, *lmq(4, b"o", b"ongoing")) == [[b"", LMQ, b"\x06", b"o", b"", SRV]]
    harness.increment(W1)
    assert [frames[3] for frames in harness.register(W1)] == [b"2"]  # it wants more


def test_broker_that_shuts_down_refuses_register(harness: Harness) -> None:
    harness.dialect.leaving = True
    (answer,) = harness.send(W1, *lmq(4, b"r", b"\x08", b"1"))
    assert answer[4] == b"ERROR the server is shutting down"


def test_table_is_bounded_and_a_worker_that_left_makes_room(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_robin_workers, "PEERS_MAX", 2)
    harness.register(W1)
    harness.register(W2)
    (answer,) = harness.send(C1, *lmq(4, b"r", b"\x08", b"1"))
    assert answer[4] == b"ERROR too many workers are registered"
    harness.send(W1, *lmq(3, b"WORKER", b"\x09"))
    harness.register(C1)


# Other dialects.


def test_task_of_another_dialect_is_sent_to_a_worker_and_its_result_kept(harness: Harness) -> None:
    harness.register(W1)
    harness.create(Submission([b"task", b"bare"], [b"payload", b""]))
    one, two = harness.received(W1)
    assert one == [b"", LMQ, b"\x04", b"1/task", b"payload", b"", SRV]
    assert two == [b"", LMQ, b"\x04", b"1/bare", b"bare", b"", SRV]
    harness.send(W1, *lmq(6, b"1/task", b"result"))
    harness.send(W1, *lmq(6, b"1/bare", b"a", b"b"))
    assert harness.states() == [DONE, DONE]
    assert results(harness, b"task", b"bare") == [b"result", msgspec.msgpack.encode([b"a", b"b"])]


def results(harness: Harness, *names: bytes) -> list[bytes]:
    """Return the results in the records of this broker."""
    return [harness.results[name] for name in names]


def test_task_of_another_dialect_with_a_long_name_has_a_short_id(harness: Harness) -> None:
    harness.register(W1)
    harness.create(Submission([b"n" * 1024], [b"payload"]))
    ((_, _, _, number, *_),) = harness.received(W1)
    assert len(number) <= 255
    harness.send(W1, *lmq(6, number, b"x"))
    assert harness.states() == [DONE]


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
    harness: Harness, arguments: list[bytes], payload: bytes
) -> None:
    harness.send(C1, *lmq(4, b"1", *arguments))
    (task,) = harness.scheduler.ledger.tasks.values()
    assert task.payload == payload
    harness.handle(
        [events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")]
    )
    harness.handle([events.TasksReported(0, b"w", [task.name], texts=[b"result"])])
    assert harness.received(C1) == [[b"", LMQ, b"\x06", b"1", b"result", b"", SRV]]


def test_empty_result_of_another_worker_is_a_response_without_arguments(harness: Harness) -> None:
    harness.send(C1, *lmq(4, b"1", KEY))
    (name,) = harness.scheduler.ledger.tasks
    harness.handle(
        [events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")]
    )
    harness.handle([events.TasksReported(0, b"w", [name])])
    assert harness.received(C1) == [[b"", LMQ, b"\x06", b"1", b"", SRV]]


def test_truncated_result_of_another_worker_is_an_error(harness: Harness) -> None:
    harness.send(C1, *lmq(4, b"1", KEY))
    (name,) = harness.scheduler.ledger.tasks
    harness.handle(
        [events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")]
    )
    harness.handle([events.TasksReported(0, b"w", [name], texts=[Blob(b"", 9, b"end")])])
    ((*_, error, _, _),) = harness.received(C1)
    assert error.endswith(b"result truncated: only the last 3 of 9 bytes are kept")


def test_task_of_another_dialect_with_its_own_envelope_is_foreign(harness: Harness) -> None:
    harness.register(W1)
    terms = [Terms(dialect=b"round-robin")]
    envelopes = [b"", b"\xc1", msgspec.msgpack.encode(["x"]), b"\x91" * 100_000]
    names = [b"%d" % number for number in range(len(envelopes))]
    submission = Submission(names, [b"p"], terms, envelopes=envelopes)
    harness.handle([events.SubmitRequested(0, b"", submission)])
    assert [frames[3:5] for frames in harness.received(W1)] == [
        [b"1/" + name, b"p"] for name in names
    ]
