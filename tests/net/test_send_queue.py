"""Messages that wait for their socket, and the loop that sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.net.outbound import RESEND_NS, SendQueue
from taskyard.wire.round_robin.peer import Client
from taskyard.worker.round_robin import RoundRobinLoop

if TYPE_CHECKING:
    from collections.abc import Sequence


class Socket:
    """Implements `EndpointTransport` and `MonotonicClock`: sends messages while there is room."""

    endpoint = "tcp://127.0.0.1:6714"

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.sent: list[list[bytes]] = []

    def send(self, frames: Sequence[bytes]) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.sent.append([*frames])
        return True

    def receive(self) -> None:
        return None

    def connections(self) -> int:
        return 1

    def monotonic_ns(self) -> int:
        return 7


def test_messages_wait_and_are_sent_in_order() -> None:
    socket = Socket(room=1)
    queue = SendQueue(socket)
    for text in (b"a", b"b", b"c"):
        queue.send([text])
    assert (socket.sent, queue.is_blocked) == ([[b"a"]], True)
    socket.room = 1
    queue.send([b"d"])
    assert socket.sent == [[b"a"], [b"b"]]
    socket.room = 9
    queue.flush()
    assert (socket.sent, queue.is_blocked) == ([[b"a"], [b"b"], [b"c"], [b"d"]], False)


def test_loop_turns_soon_while_a_message_waits() -> None:
    socket = Socket()
    loop = RoundRobinLoop(Client(socket.endpoint), socket, socket, lambda _level, _text: None)
    assert loop.wake_at_ns() == 7 + RESEND_NS
    socket.room = 1
    loop.turn()
    assert len(socket.sent) == 1
    assert loop.wake_at_ns() is None
