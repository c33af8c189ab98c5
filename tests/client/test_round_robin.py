"""The round-robin client's batches, with a server that is played."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.client.round_robin import RoundRobinClient
from taskyard.core.limits import SECOND_NS
from taskyard.wire.round_robin.peer import ANSWER_NS, STREAM_BYTES, WINDOW

if TYPE_CHECKING:
    from collections.abc import Sequence

SRV, WRK = b"tcp://127.0.0.1:6714", b"tcp://127.0.0.1:6714:wrk"
LMQ = b"LMQv100"


class Stage:
    """A wire and a clock in one."""

    endpoint = SRV.decode()

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self.sent: list[list[bytes]] = []
        self.arriving: list[list[bytes]] = []
        self.is_full = False
        self.printed: list[str] = []
        self.program = RoundRobinClient(self, self, lambda _level, text: self.printed.append(text))
        assert self.take_sent() == [lmq(1, b"1")]

    def monotonic_ns(self) -> int:
        return self.now_ns

    def receive(self) -> list[bytes] | None:
        return self.arriving.pop(0) if self.arriving else None

    def connections(self) -> int:
        return 1

    def send(self, frames: Sequence[bytes]) -> bool:
        if not self.is_full:
            self.sent.append([*frames])
        return not self.is_full

    def take_sent(self) -> list[list[bytes]]:
        sent, self.sent = self.sent, []
        assert all(frames[0] == SRV for frames in sent)
        return [frames[1:] for frames in sent]

    def does(self, word: str, *number: int) -> list[list[bytes]]:
        """Run a command. Return the messages that the server gets."""
        (self.program.counted_commands if number else self.program.commands)[word](*number)
        return self.take_sent()

    def hears(self, number: bytes, *arguments: bytes) -> list[list[bytes]]:
        """Deliver an answer. Return the messages that follow."""
        self.arriving.append([SRV, *lmq(6, number, *arguments), WRK])
        self.program.turn()
        return self.take_sent()


def lmq(command: int, number: bytes, *arguments: bytes) -> list[bytes]:
    return [b"", LMQ, bytes([command]), number, *arguments, b""]


def test_ping_expects_no_answer() -> None:
    stage = Stage()
    assert stage.does("ping") == [lmq(3, b"2", b"\x01")]
    assert not stage.program.is_busy


def test_tracked_ping_is_over_when_it_is_answered() -> None:
    stage = Stage()
    assert stage.does("pingt") == [lmq(4, b"2", b"\x01")]
    assert stage.program.is_busy is True
    assert stage.hears(b"2") == []
    assert stage.printed == [f"pingt: answered by {WRK.decode()}"]


def test_answer_to_another_message_is_ignored() -> None:
    stage = Stage()
    stage.does("pingt")
    stage.hears(b"1")
    stage.hears(b"3")
    assert stage.program.is_busy


def test_data_must_be_complete() -> None:
    stage = Stage()
    assert stage.does("data") == [lmq(4, b"3", b"\x0a", b"stream-2", b"1024")]
    stage.hears(b"3", bytes(STREAM_BYTES - 1))
    assert stage.printed == ["data failed: got 1023 bytes, expected 1024"]
    stage.does("data")
    stage.hears(b"5", bytes(STREAM_BYTES))
    assert stage.printed[1:] == [f"data: answered by {WRK.decode()}"]


def test_batch_has_ten_messages_in_flight_and_prints_progress() -> None:
    stage = Stage()
    sent = stage.does("bulkping", 100)
    assert len(sent) == WINDOW
    while sent:
        sent += stage.hears(sent.pop(0)[3])
        assert len(sent) <= WINDOW
    assert stage.printed[:2] == ["bulkping: 10 of 100", "bulkping: 20 of 100"]
    assert stage.printed[-1] == "bulkping: 100 sent, 100 succeeded"
    assert not stage.program.is_busy


def test_errors_and_late_answers_count_as_failed() -> None:
    stage = Stage()
    first, second, third = stage.does("bulkping", 3)
    stage.hears(first[3], b"ERROR the queue is full")
    stage.hears(second[3])
    assert stage.program.wake_at_ns() == stage.now_ns + ANSWER_NS
    stage.now_ns += ANSWER_NS
    stage.program.turn()
    assert "bulkping failed: the queue is full" in stage.printed
    assert f"bulkping failed: no answer from {stage.endpoint}" in stage.printed
    assert stage.printed[-1] == "bulkping: 3 sent, 1 succeeded"
    stage.hears(third[3])  # too late
    assert stage.printed[-1] == "bulkping: 3 sent, 1 succeeded"


def test_ping_of_the_server_is_answered() -> None:
    stage = Stage()
    stage.arriving.append([SRV, *lmq(1, b"there?")])
    stage.program.turn()
    assert stage.take_sent() == [lmq(2, b"there?")]


def test_full_queue_holds_a_batch_back() -> None:
    stage = Stage()
    stage.is_full = True
    assert stage.does("bulkping", 5) == []
    stage.is_full = False
    stage.program.turn()
    assert len(stage.take_sent()) == 5
