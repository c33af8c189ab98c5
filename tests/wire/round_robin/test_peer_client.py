"""The round-robin client's half of the protocol: batches, and a server that is played."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.limits import SECOND_NS
from taskyard.wire.round_robin.peer import ANSWER_NS, WINDOW, Client, Print, Send

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.wire.round_robin.peer import Action

SRV, WRK = b"tcp://127.0.0.1:6714", b"tcp://127.0.0.1:6714:wrk"
LMQ = b"LMQv100"


class Stage:
    """A server that is played: delivers its messages, and collects the client's."""

    endpoint = SRV.decode()

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self.printed: list[str] = []
        self.client = Client(self.endpoint)
        assert self.does(self.client.taken()) == [lmq(1, b"1")]

    def does(self, actions: Iterable[Action]) -> list[list[bytes]]:
        """Carry out actions. Return the messages that the server gets."""
        sent = []
        for action in actions:
            if isinstance(action, Send):
                assert action.frames[0] == SRV
                sent.append(action.frames[1:])
            else:
                assert isinstance(action, Print)
                self.printed.append(action.text)
        return sent

    def pings(self, total: int, command: str = "bulkping") -> list[list[bytes]]:
        return self.does(self.client.start_pings(command, total, self.now_ns))

    def streams(self, total: int, command: str = "data") -> list[list[bytes]]:
        return self.does(self.client.start_streams(command, total, self.now_ns))

    def hears(self, number: bytes, *arguments: bytes) -> list[list[bytes]]:
        """Deliver an answer. Return the messages that follow."""
        frames = [SRV, *lmq(6, number, *arguments), WRK]
        return self.does(self.client.take(frames, self.now_ns)) + self.later(0)

    def later(self, ns: int, *, is_blocked: bool = False) -> list[list[bytes]]:
        self.now_ns += ns
        return self.does(self.client.time_passed(self.now_ns, is_blocked=is_blocked))


def lmq(command: int, number: bytes, *arguments: bytes) -> list[bytes]:
    return [b"", LMQ, bytes([command]), number, *arguments, b""]


def test_ping_expects_no_answer() -> None:
    stage = Stage()
    assert stage.does(stage.client.ping()) == [lmq(3, b"2", b"\x01")]
    assert not stage.client.is_busy


def test_tracked_ping_is_over_when_it_is_answered() -> None:
    stage = Stage()
    assert stage.pings(1, "pingt") == [lmq(4, b"2", b"\x01")]
    assert stage.client.is_busy is True
    assert stage.hears(b"2") == []
    assert stage.printed == [f"pingt: answered by {WRK.decode()}"]


def test_answer_to_another_message_is_ignored() -> None:
    stage = Stage()
    stage.pings(1, "pingt")
    stage.hears(b"1")
    stage.hears(b"3")
    assert stage.client.is_busy


def test_batch_has_ten_messages_in_flight_and_prints_progress() -> None:
    stage = Stage()
    sent = stage.pings(100)
    assert len(sent) == WINDOW
    while sent:
        sent += stage.hears(sent.pop(0)[3])
        assert len(sent) <= WINDOW
    assert stage.printed[:2] == ["bulkping: 10 of 100", "bulkping: 20 of 100"]
    assert stage.printed[-1] == "bulkping: 100 sent, 100 succeeded"
    assert not stage.client.is_busy


def test_errors_and_late_answers_count_as_failed() -> None:
    stage = Stage()
    first, second, third = stage.pings(3)
    stage.hears(first[3], b"ERROR the queue is full")
    stage.hears(second[3])
    assert stage.client.wake_at_ns() == stage.now_ns + ANSWER_NS
    stage.later(ANSWER_NS)
    assert "bulkping failed: the queue is full" in stage.printed
    assert f"bulkping failed: no answer from {stage.endpoint}" in stage.printed
    assert stage.printed[-1] == "bulkping: 3 sent, 1 succeeded"
    stage.hears(third[3])  # too late
    assert stage.printed[-1] == "bulkping: 3 sent, 1 succeeded"


def test_ping_of_the_server_is_answered() -> None:
    stage = Stage()
    frames = [SRV, *lmq(1, b"there?")]
    assert stage.does(stage.client.take(frames, stage.now_ns)) == [lmq(2, b"there?")]


def test_full_queue_holds_a_batch_back() -> None:
    stage = Stage()
    assert len(stage.pings(WINDOW + 5)) == WINDOW
    assert stage.later(ANSWER_NS, is_blocked=True) == []
    assert stage.printed.count(f"bulkping failed: no answer from {stage.endpoint}") == WINDOW
    assert len(stage.later(0)) == 5
