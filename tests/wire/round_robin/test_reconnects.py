"""Round-robin workers that reconnect under their address and do not register again."""

from __future__ import annotations

from taskyard.core.events import CancelRequested, Scope
from taskyard.core.states import TaskState
from tests.wire.round_robin.kit import C1, KEY, LMQ, SERVER, SRV, W1, W2, Harness, lmq

LEASED, READY, DONE = TaskState.LEASED, TaskState.READY, TaskState.DONE

PONG = lmq(2, b"PING")


def reconnect(harness: Harness, identity: bytes = W1) -> None:
    """Connect a peer anew, and let it send a PONG."""
    harness.handle(harness.board.reconnected(SERVER + identity, harness.now_ns))
    harness.send(identity, *PONG)


def pong(harness: Harness, seconds: int, *identities: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """Let time pass while these workers answer pings. Return the receivers, commands and ids of
    other messages to them."""
    messages = []
    for _ in range(seconds):
        harness.later(1)
        for identity in identities:
            found = harness.send(identity, *PONG)
            messages += [(identity, one[2], one[3]) for one in found if one[2] != b"\x01"]
    return messages


def with_message(command: int = 4) -> Harness:
    """Return a server whose worker was just sent a message."""
    harness = Harness()
    harness.register(W1, b"1")
    harness.send(C1, *lmq(command, b"1", KEY))
    assert len(harness.received(W1)) == 1
    return harness


def test_message_lost_with_its_connection_goes_to_the_next_worker_after_a_minute() -> None:
    harness = with_message()
    reconnect(harness)
    harness.register(W2, b"1")
    assert pong(harness, 59, W1, W2) == []
    assert harness.states() == [LEASED]
    assert pong(harness, 1, W1, W2) == [(W2, b"\x04", b"1")]
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)
    assert harness.free(W1) == 1


def test_response_on_the_new_connection_counts_until_the_deadline() -> None:
    harness = with_message()
    reconnect(harness)
    pong(harness, 59, W1)
    harness.send(W1, C1, *lmq(6, b"1", b"result"))
    assert harness.received(C1) == [[b"", LMQ, b"\x06", b"1", b"result", b"", W1, SRV]]
    assert harness.states() == [DONE]


def test_message_sent_on_the_new_connection_has_no_deadline() -> None:
    harness = Harness()
    harness.register(W1, b"1")
    reconnect(harness)
    harness.send(C1, *lmq(4, b"1", KEY))
    pong(harness, 100, W1)
    assert harness.states() == [LEASED]


def test_increment_settles_no_exec_that_may_be_lost_with_a_connection() -> None:
    harness = Harness()
    harness.register(W1, b"2")
    for number in (b"1", b"2"):
        harness.send(C1, *lmq(3, number, KEY))
    harness.received(W1)
    reconnect(harness)
    harness.increment(W1)
    assert harness.states() == [LEASED, LEASED]
    # It gets both again, and their RESPONSEs name them.
    assert [command for _, command, _ in pong(harness, 60, W1)] == [b"\x04", b"\x04"]


def test_slot_whose_increment_is_lost_with_a_connection_is_free_after_a_minute() -> None:
    harness = with_message()
    harness.send(W1, C1, *lmq(6, b"1", b"result"))
    reconnect(harness)
    assert harness.free(W1) == 0
    pong(harness, 60, W1)
    assert harness.free(W1) == 1


def test_slot_of_a_cancelled_message_on_a_lost_connection_is_free_after_a_minute() -> None:
    harness = with_message()
    (name,) = harness.scheduler.ledger.tasks
    reconnect(harness)
    harness.handle([CancelRequested(0, b"c", Scope(names=(name,)))])
    pong(harness, 59, W1)
    assert harness.free(W1) == 0
    pong(harness, 1, W1)
    assert harness.free(W1) == 1


def test_worker_that_registers_anew_on_a_new_connection_holds_nothing() -> None:
    harness = with_message(command=3)
    harness.handle(harness.board.reconnected(SERVER + W1, harness.now_ns))
    harness.send(W1, *lmq(3, b"WORKER", b"\x09"))
    (again,) = harness.register(W1, b"1")
    assert again[2] == b"\x03"


def test_client_that_reconnects_changes_nothing() -> None:
    harness = with_message()
    reconnect(harness, C1)
    pong(harness, 100, W1)
    assert harness.states() == [LEASED]
