"""Round-robin at the broker after a restart."""

from __future__ import annotations

import pytest

from taskyard.core import events
from taskyard.core.model import Submission
from taskyard.core.states import DONE, LEASED, READY
from taskyard.wire.round_robin.leases import identity_of, name_of
from taskyard.wire.round_robin.server import make_server
from tests.wire.round_robin.kit import C1, KEY, LMQ, SERVER, SRV, W1, W2, Hall, lmq

# After a restart.

#: The server's PING to a worker that has not registered since the restart.
RESTARTED = [b"", LMQ, b"\x01", b"RESTARTED", b"", SRV]


@pytest.mark.parametrize(
    "arguments", [[b"key"], [b""], [b"key", b""], [b"key", b"one"], [b"k", b"1", b"", b"\xff"]]
)
@pytest.mark.parametrize("command", [3, 4])
def test_worker_gets_the_original_message_after_a_restart(
    hall: Hall, arguments: list[bytes], command: int
) -> None:
    hall.send(C1, *lmq(command, b"id", *arguments))
    hall.restart()
    assert hall.register(W1) == [
        [b"", LMQ, bytes([command]), b"id", *arguments, b"", C1, SRV],
    ]


def test_responses_and_increments_for_messages_of_a_former_broker_count(hall: Hall) -> None:
    hall.register(W1, b"4")
    hall.send(C1, *lmq(4, b"answered", KEY))
    hall.send(C1, *lmq(4, b"open", KEY))
    hall.send(C1, *lmq(3, b"exec", KEY))
    hall.create(Submission([b"foreign"]))
    hall.send(W1, C1, *lmq(6, b"answered"))
    hall.restart()
    assert hall.send(W1, C1, *lmq(6, b"open", b"x")) == [RESTARTED]
    assert hall.send(W1, *lmq(6, b"1/foreign", b"y")) == []
    assert hall.received(C1) == []  # the client sends its message again
    assert hall.states() == [DONE, DONE, LEASED, DONE]
    assert hall.free(W1) == 0
    for free in (1, 2, 3):
        hall.increment(W1)
        assert hall.free(W1) == free
    assert hall.states() == [DONE, DONE, LEASED, DONE]
    hall.increment(W1)
    assert hall.states() == [DONE] * 4
    assert hall.free(W1) == 4


def test_idle_worker_is_pinged_after_a_restart_and_continues_when_it_replies(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.restart()
    hall.send(C1, *lmq(4, b"m", KEY))
    assert hall.received(W1) == []
    hall.dead = [W1]
    hall.later(0.25)  # it has not reconnected
    assert hall.received(W1) == []
    hall.dead = []
    hall.later(0.25)
    assert hall.received(W1) == [RESTARTED]
    assert [frames[3] for frames in hall.send(W1, *lmq(2, b"RESTARTED"))] == [b"m", b"RESTARTED"]


def keep_alive(hall: Hall, seconds: int, *identities: bytes) -> None:
    """Let time pass while these workers reply to every PING."""
    for _ in range(seconds):
        hall.later(1)
        for identity in identities:
            for frames in hall.received(identity):
                assert frames[2] == b"\x01"
                hall.send(identity, *lmq(2, frames[3]))
            hall.received(identity)


def test_lease_from_before_a_restart_ends_after_a_minute_even_if_its_worker_replies(
    hall: Hall,
) -> None:
    hall.register(W1, b"2")
    hall.send(C1, *lmq(4, b"tracked", KEY))
    hall.send(C1, *lmq(3, b"exec", KEY))
    hall.restart()
    hall.send(W1, *lmq(2, b"pong"))
    hall.received(W1)
    keep_alive(hall, 59, W1)
    assert (hall.states(), hall.free(W1)) == ([LEASED, LEASED], 0)
    hall.register(W2, b"2")
    hall.later(1)
    assert [frames[3] for frames in hall.received(W2)] == [b"tracked", b"exec"]
    assert hall.free(W1) == 2
    tasks = hall.scheduler.ledger.tasks.values()
    assert [(task.attempt, task.losses) for task in tasks] == [(2, 0), (2, 0)]


def test_worker_that_dies_with_the_server_is_not_charged_to_its_messages(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.send(C1, *lmq(4, b"m", KEY))
    hall.restart()
    hall.later(60)
    (task,) = hall.scheduler.ledger.tasks.values()
    assert (task.state, task.losses) == (READY, 0)
    assert hall.workers() == []


@pytest.mark.parametrize("rounds", [0, 5])
def test_slots_whose_increments_a_restart_lost_are_free_after_a_minute(
    hall: Hall, rounds: int
) -> None:
    hall.register(W1, b"4")
    for number in (b"1", b"2"):
        hall.send(C1, *lmq(4, number, KEY))
        hall.send(W1, C1, *lmq(6, number))
    hall.restart()
    hall.send(W1, *lmq(2, b"pong"))
    for turn in range(rounds):  # each INCREMENT frees the oldest slot, and the newest leaks
        hall.send(C1, *lmq(4, b"n%d" % turn, KEY))
        hall.send(W1, C1, *lmq(6, b"n%d" % turn))
        hall.increment(W1)
    assert hall.free(W1) == 2
    keep_alive(hall, 60, W1)
    assert hall.free(W1) == 4
    for number in (b"3", b"4", b"5", b"6"):
        hall.send(C1, *lmq(4, number, KEY))
    assert hall.free(W1) == 0
    hall.send(W1, C1, *lmq(6, b"3"))
    assert hall.free(W1) == 0
    hall.increment(W1)
    assert hall.free(W1) == 1


def test_slots_freed_since_a_restart_are_not_freed_again(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.send(C1, *lmq(4, b"1", KEY))
    hall.send(W1, C1, *lmq(6, b"1"))
    hall.restart()
    hall.increment(W1)
    hall.send(C1, *lmq(4, b"2", KEY))
    hall.send(W1, C1, *lmq(6, b"2"))  # it keeps this slot for longer
    keep_alive(hall, 90, W1)
    assert hall.free(W1) == 1
    hall.increment(W1)
    assert hall.free(W1) == 2


def test_slot_of_a_message_that_was_cancelled_after_a_restart_is_free_after_a_minute(
    hall: Hall,
) -> None:
    hall.register(W1, b"1")
    hall.send(C1, *lmq(4, b"m", KEY))
    hall.restart()
    hall.send(W1, *lmq(2, b"pong"))
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.CancelRequested(0, b"", events.Scope(names=(name,)))])
    keep_alive(hall, 59, W1)
    assert hall.free(W1) == 0
    keep_alive(hall, 2, W1)
    assert hall.free(W1) == 1


def test_late_response_to_a_message_that_was_taken_back_after_a_restart_is_stale(
    hall: Hall,
) -> None:
    hall.register(W1, b"1")
    hall.send(C1, *lmq(4, b"m", KEY))
    hall.restart()
    hall.send(W1, *lmq(2, b"pong"))
    hall.register(W2, b"1")
    keep_alive(hall, 59, W1, W2)
    hall.later(1)
    assert b"m" in [frames[3] for frames in hall.received(W2)]
    hall.send(W1, C1, *lmq(6, b"m", b"late"))
    assert hall.states() == [LEASED]
    assert hall.dialect.stale == 1
    assert hall.received(C1) == []


def test_worker_with_messages_at_a_restart_is_sent_tracked_messages_until_it_registers(
    hall: Hall,
) -> None:
    hall.register(W1, b"2")
    hall.send(C1, *lmq(3, b"old", KEY))
    hall.restart()
    hall.send(W1, *lmq(2, b"pong"))
    hall.received(W1)
    hall.send(C1, *lmq(3, b"new", b"do", b"it"))
    new = [*hall.scheduler.ledger.tasks][1]
    (message,) = hall.received(W1)
    tracked = message[3]
    assert message == [b"", LMQ, b"\x04", tracked, b"do", b"it", b"", SRV]
    hall.increment(W1)  # for an unknown one of them
    assert hall.states() == [LEASED, LEASED]
    hall.send(W1, *lmq(6, tracked, b"done"))
    assert hall.states() == [LEASED, DONE]
    assert hall.results[new] == b"done"
    assert hall.received(C1) == []
    keep_alive(hall, 59, W1)
    hall.later(1)
    (again,) = [frames for frames in hall.received(W1) if frames[2] != b"\x01"]
    assert again[2] == b"\x04"
    hall.send(W1, *lmq(6, again[3]))
    hall.increment(W1)
    assert hall.states() == [DONE, DONE]
    hall.register(W1, b"2")
    hall.send(C1, *lmq(3, b"last", KEY))
    assert hall.received(W1) == [[b"", LMQ, b"\x03", b"last", KEY, b"", C1, SRV]]


def test_increment_settles_no_message_that_a_restart_may_have_lost(hall: Hall) -> None:
    hall.register(W1, b"3")
    for number in (b"1", b"2"):
        hall.send(C1, *lmq(3, number, KEY))
    hall.send(C1, *lmq(4, b"tracked", KEY))
    hall.restart()
    hall.increment(W1)  # its RESPONSE may be lost
    assert hall.states() == [LEASED, LEASED, LEASED]
    hall.send(W1, C1, *lmq(6, b"tracked"))
    assert hall.free(W1) == 1
    hall.increment(W1)
    assert hall.states() == [LEASED, LEASED, DONE]


def test_message_sent_as_tracked_is_matched_by_its_response_after_another_restart(
    hall: Hall,
) -> None:
    hall.register(W1, b"2")
    hall.send(C1, *lmq(3, b"old", KEY))
    hall.restart()
    hall.send(W1, *lmq(2, b"pong"))
    hall.received(W1)
    hall.send(C1, *lmq(3, b"new", KEY))
    ((_, _, _, tracked, *_),) = hall.received(W1)
    hall.restart()
    hall.send(W1, *lmq(6, tracked, b"done"))
    assert hall.states() == [LEASED, DONE]


def test_worker_that_leaves_and_registers_again_has_free_slots_at_once(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.send(C1, *lmq(3, b"m", KEY))
    hall.restart()
    hall.send(W1, *lmq(3, b"WORKER", b"\x09"))
    hall.received(W1)
    assert hall.register(W1, b"1") == [[b"", LMQ, b"\x03", b"m", KEY, b"", C1, SRV]]
    hall.later(5)
    (ping,) = hall.received(W1)
    assert ping[3] == b"PING"
    assert hall.increment(W1) == []
    assert hall.states() == [DONE]


def test_assignment_that_crosses_a_deregister_is_not_sent_after_a_new_register() -> None:
    hall = Hall()
    hall.register(W1, b"1")
    frames = lmq(3, b"m", KEY), lmq(3, b"WORKER", b"\x09"), lmq(4, b"reg", b"\x08", b"1")
    routes = SERVER + C1, SERVER + W1, SERVER + W1
    taken = [
        hall.board.receive(route, one, hall.now_ns)
        for route, one in zip(routes, frames, strict=True)
    ]
    hall.handle([event for events in taken for event in events])
    assert [one[2] for one in hall.received(W1)] == [b"\x06", b"\x03"]
    hall.increment(W1)
    assert hall.states() == [DONE]


def test_worker_that_never_reconnects_after_a_restart_is_pinged_less_and_less(
    hall: Hall,
) -> None:
    hall.register(W1, b"1")
    hall.restart()
    pings = []
    for quarter in range(1, 240):
        hall.later(0.25)
        pings += [quarter / 4] * len(hall.received(W1))
    assert pings[:8] == [0.25, 0.5, 1, 2, 4, 8, 13, 18]
    assert hall.workers()
    hall.later(0.25)
    assert hall.workers() == []


def test_messages_before_the_table_is_restored_are_handled_after_it() -> None:
    hall = Hall()
    hall.register(W1, b"1")
    hall.send(C1, *lmq(4, b"m", KEY))
    hall.sent = []
    hall.dialect = make_server(1, lambda: 9, socket_numbers=[1])
    hall.board._dialects[1] = hall.board._dialect_of_socket[1] = hall.dialect  # noqa: SLF001  # a restart
    hall.board._prefixes = [(hall.dialect.prefix, hall.dialect)]  # noqa: SLF001
    hall.handle(
        [
            *hall.board.receive(SERVER + W1, [C1, *lmq(6, b"m", b"x")], hall.now_ns),
            *hall.board.receive(SERVER + W1, lmq(3, b"inc", b"\x07"), hall.now_ns),
        ]
    )
    assert hall.states() == [DONE]
    assert hall.free(W1) == 1


@pytest.mark.parametrize("identity", [b"tcp://x:1:a", b"\0\1\2", b"0xff", b"a b", "é".encode()])
def test_identities_are_names_and_names_are_identities(identity: bytes) -> None:
    assert identity_of(name_of(identity)) == identity
    assert name_of(identity).isascii()
