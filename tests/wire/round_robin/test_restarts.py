"""Round-robin at the broker after a restart."""

from __future__ import annotations

import pytest

from taskyard.core import events
from taskyard.core.model import Submission
from taskyard.core.states import DONE, LEASED, READY
from taskyard.wire.round_robin.server import RoundRobin
from taskyard.wire.round_robin.workers import identity_of, name_of
from tests.wire.round_robin.kit import C1, KEY, LMQ, SERVER, SRV, W1, W2, Harness, lmq

# After a restart.

#: The server's PING to a worker that has not registered since the restart.
RESTARTED = [b"", LMQ, b"\x01", b"RESTARTED", b"", SRV]


@pytest.mark.parametrize(
    "arguments", [[b"key"], [b""], [b"key", b""], [b"key", b"one"], [b"k", b"1", b"", b"\xff"]]
)
@pytest.mark.parametrize("command", [3, 4])
def test_worker_gets_the_original_message_after_a_restart(
    harness: Harness, arguments: list[bytes], command: int
) -> None:
    harness.send(C1, *lmq(command, b"id", *arguments))
    harness.restart()
    assert harness.register(W1) == [
        [b"", LMQ, bytes([command]), b"id", *arguments, b"", C1, SRV],
    ]


def test_responses_and_increments_for_messages_of_a_former_broker_count(harness: Harness) -> None:
    harness.register(W1, b"4")
    harness.send(C1, *lmq(4, b"answered", KEY))
    harness.send(C1, *lmq(4, b"open", KEY))
    harness.send(C1, *lmq(3, b"exec", KEY))
    harness.create(Submission([b"foreign"]))
    harness.send(W1, C1, *lmq(6, b"answered"))
    harness.restart()
    assert harness.send(W1, C1, *lmq(6, b"open", b"x")) == [RESTARTED]
    assert harness.send(W1, *lmq(6, b"1/foreign", b"y")) == []
    assert harness.received(C1) == []  # the client sends its message again
    assert harness.states() == [DONE, DONE, LEASED, DONE]
    assert harness.free(W1) == 0
    for free in (1, 2, 3):
        harness.increment(W1)
        assert harness.free(W1) == free
    assert harness.states() == [DONE, DONE, LEASED, DONE]
    harness.increment(W1)
    assert harness.states() == [DONE] * 4
    assert harness.free(W1) == 4


def test_idle_worker_is_pinged_after_a_restart_and_continues_when_it_replies(
    harness: Harness,
) -> None:
    harness.register(W1, b"1")
    harness.restart()
    harness.send(C1, *lmq(4, b"m", KEY))
    assert harness.received(W1) == []
    harness.dead = [W1]
    harness.later(0.25)  # it has not reconnected
    assert harness.received(W1) == []
    harness.dead = []
    harness.later(0.25)
    assert harness.received(W1) == [RESTARTED]
    assert [frames[3] for frames in harness.send(W1, *lmq(2, b"RESTARTED"))] == [b"m", b"RESTARTED"]


def keep_alive(harness: Harness, seconds: int, *identities: bytes) -> None:
    """Let time pass while these workers reply to every PING."""
    for _ in range(seconds):
        harness.later(1)
        for identity in identities:
            for frames in harness.received(identity):
                assert frames[2] == b"\x01"
                harness.send(identity, *lmq(2, frames[3]))
            harness.received(identity)


def test_lease_from_before_a_restart_ends_after_a_minute_even_if_its_worker_replies(
    harness: Harness,
) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(4, b"tracked", KEY))
    harness.send(C1, *lmq(3, b"exec", KEY))
    harness.restart()
    harness.send(W1, *lmq(2, b"pong"))
    harness.received(W1)
    keep_alive(harness, 59, W1)
    assert (harness.states(), harness.free(W1)) == ([LEASED, LEASED], 0)
    harness.register(W2, b"2")
    harness.later(1)
    assert [frames[3] for frames in harness.received(W2)] == [b"tracked", b"exec"]
    assert harness.free(W1) == 2
    tasks = harness.scheduler.ledger.tasks.values()
    assert [(task.attempt, task.losses) for task in tasks] == [(2, 0), (2, 0)]


def test_worker_that_dies_with_the_server_is_not_charged_to_its_messages(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.restart()
    harness.later(60)
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.state, task.losses) == (READY, 0)
    assert harness.workers() == []


@pytest.mark.parametrize("rounds", [0, 5])
def test_slots_whose_increments_a_restart_lost_are_free_after_a_minute(
    harness: Harness, rounds: int
) -> None:
    harness.register(W1, b"4")
    for number in (b"1", b"2"):
        harness.send(C1, *lmq(4, number, KEY))
        harness.send(W1, C1, *lmq(6, number))
    harness.restart()
    harness.send(W1, *lmq(2, b"pong"))
    for turn in range(rounds):  # each INCREMENT frees the oldest slot, and the newest leaks
        harness.send(C1, *lmq(4, b"n%d" % turn, KEY))
        harness.send(W1, C1, *lmq(6, b"n%d" % turn))
        harness.increment(W1)
    assert harness.free(W1) == 2
    keep_alive(harness, 60, W1)
    assert harness.free(W1) == 4
    for number in (b"3", b"4", b"5", b"6"):
        harness.send(C1, *lmq(4, number, KEY))
    assert harness.free(W1) == 0
    harness.send(W1, C1, *lmq(6, b"3"))
    assert harness.free(W1) == 0
    harness.increment(W1)
    assert harness.free(W1) == 1


def test_slots_freed_since_a_restart_are_not_freed_again(harness: Harness) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.send(W1, C1, *lmq(6, b"1"))
    harness.restart()
    harness.increment(W1)
    harness.send(C1, *lmq(4, b"2", KEY))
    harness.send(W1, C1, *lmq(6, b"2"))  # it keeps this slot for longer
    keep_alive(harness, 90, W1)
    assert harness.free(W1) == 1
    harness.increment(W1)
    assert harness.free(W1) == 2


def test_slot_of_a_message_that_was_cancelled_after_a_restart_is_free_after_a_minute(
    harness: Harness,
) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.restart()
    harness.send(W1, *lmq(2, b"pong"))
    (name,) = harness.scheduler.ledger.tasks
    harness.handle([events.CancelRequested(0, b"", events.Scope(names=(name,)))])
    keep_alive(harness, 59, W1)
    assert harness.free(W1) == 0
    keep_alive(harness, 2, W1)
    assert harness.free(W1) == 1


def test_late_response_to_a_message_that_was_taken_back_after_a_restart_is_stale(
    harness: Harness,
) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.restart()
    harness.send(W1, *lmq(2, b"pong"))
    harness.register(W2, b"1")
    keep_alive(harness, 59, W1, W2)
    harness.later(1)
    assert b"m" in [frames[3] for frames in harness.received(W2)]
    harness.send(W1, C1, *lmq(6, b"m", b"late"))
    assert harness.states() == [LEASED]
    assert harness.dialect.stale == 1
    assert harness.received(C1) == []


def test_worker_with_messages_at_a_restart_is_sent_tracked_messages_until_it_registers(
    harness: Harness,
) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(3, b"old", KEY))
    harness.restart()
    harness.send(W1, *lmq(2, b"pong"))
    harness.received(W1)
    harness.send(C1, *lmq(3, b"new", b"do", b"it"))
    new = [*harness.scheduler.ledger.tasks][1]
    (message,) = harness.received(W1)
    tracked = message[3]
    assert message == [b"", LMQ, b"\x04", tracked, b"do", b"it", b"", SRV]
    harness.increment(W1)  # for an unknown one of them
    assert harness.states() == [LEASED, LEASED]
    harness.send(W1, *lmq(6, tracked, b"done"))
    assert harness.states() == [LEASED, DONE]
    assert harness.results[new] == b"done"
    assert harness.received(C1) == []
    keep_alive(harness, 59, W1)
    harness.later(1)
    (again,) = [frames for frames in harness.received(W1) if frames[2] != b"\x01"]
    assert again[2] == b"\x04"
    harness.send(W1, *lmq(6, again[3]))
    harness.increment(W1)
    assert harness.states() == [DONE, DONE]
    harness.register(W1, b"2")
    harness.send(C1, *lmq(3, b"last", KEY))
    assert harness.received(W1) == [[b"", LMQ, b"\x03", b"last", KEY, b"", C1, SRV]]


def test_increment_settles_no_message_that_a_restart_may_have_lost(harness: Harness) -> None:
    harness.register(W1, b"3")
    for number in (b"1", b"2"):
        harness.send(C1, *lmq(3, number, KEY))
    harness.send(C1, *lmq(4, b"tracked", KEY))
    harness.restart()
    harness.increment(W1)  # its RESPONSE may be lost
    assert harness.states() == [LEASED, LEASED, LEASED]
    harness.send(W1, C1, *lmq(6, b"tracked"))
    assert harness.free(W1) == 1
    harness.increment(W1)
    assert harness.states() == [LEASED, LEASED, DONE]


def test_message_sent_as_tracked_is_matched_by_its_response_after_another_restart(
    harness: Harness,
) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(3, b"old", KEY))
    harness.restart()
    harness.send(W1, *lmq(2, b"pong"))
    harness.received(W1)
    harness.send(C1, *lmq(3, b"new", KEY))
    ((_, _, _, tracked, *_),) = harness.received(W1)
    harness.restart()
    harness.send(W1, *lmq(6, tracked, b"done"))
    assert harness.states() == [LEASED, DONE]


def test_worker_that_leaves_and_registers_again_has_free_slots_at_once(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(3, b"m", KEY))
    harness.restart()
    harness.send(W1, *lmq(3, b"WORKER", b"\x09"))
    harness.received(W1)
    assert harness.register(W1, b"1") == [[b"", LMQ, b"\x03", b"m", KEY, b"", C1, SRV]]
    harness.later(5)
    (ping,) = harness.received(W1)
    assert ping[3] == b"PING"
    assert harness.increment(W1) == []
    assert harness.states() == [DONE]


def test_assignment_that_crosses_a_deregister_is_not_sent_after_a_new_register() -> None:
    harness = Harness()
    harness.register(W1, b"1")
    frames = lmq(3, b"m", KEY), lmq(3, b"WORKER", b"\x09"), lmq(4, b"reg", b"\x08", b"1")
    routes = SERVER + C1, SERVER + W1, SERVER + W1
    taken = [
        harness.board.receive(route, one, harness.now_ns)
        for route, one in zip(routes, frames, strict=True)
    ]
    harness.handle([event for events in taken for event in events])
    assert [one[2] for one in harness.received(W1)] == [b"\x06", b"\x03"]
    harness.increment(W1)
    assert harness.states() == [DONE]


def test_worker_that_never_reconnects_after_a_restart_is_pinged_less_and_less(
    harness: Harness,
) -> None:
    harness.register(W1, b"1")
    harness.restart()
    pings = []
    for quarter in range(1, 240):
        harness.later(0.25)
        pings += [quarter / 4] * len(harness.received(W1))
    assert pings[:8] == [0.25, 0.5, 1, 2, 4, 8, 13, 18]
    assert harness.workers()
    harness.later(0.25)
    assert harness.workers() == []


def test_messages_before_the_table_is_restored_are_handled_after_it() -> None:
    harness = Harness()
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.sent = []
    harness.dialect = RoundRobin(1, lambda: 9, socket_numbers=[1])
    harness.dialect.timers.join(harness.board.timers)
    harness.board._dialects[1] = harness.board._dialect_of_socket[1] = harness.dialect  # noqa: SLF001  # a restart
    harness.board._prefixes = [(harness.dialect.prefix, harness.dialect)]  # noqa: SLF001
    harness.handle(
        [
            *harness.board.receive(SERVER + W1, [C1, *lmq(6, b"m", b"x")], harness.now_ns),
            *harness.board.receive(SERVER + W1, lmq(3, b"inc", b"\x07"), harness.now_ns),
        ]
    )
    assert harness.states() == [DONE]
    assert harness.free(W1) == 1


@pytest.mark.parametrize("identity", [b"tcp://x:1:a", b"\0\1\2", b"0xff", b"a b", "é".encode()])
def test_identities_are_names_and_names_are_identities(identity: bytes) -> None:
    assert identity_of(name_of(identity)) == identity
    assert name_of(identity).isascii()
