"""Unread bytes are counted over real sockets, and released when the peer reads. Messages that a
socket does not accept are kept and sent again."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import zmq

from taskyard.net import outbound, sockets
from taskyard.net.outbound import MARK_BYTES, Outbound
from tests.kit.processes import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.net.zmq_socket import ZmqSocket

ROUTE = b"peer"
BODY = bytes(100_000)


class Conversation:
    """A listener, and a peer that reads on request."""

    def __init__(self, wire: ZmqSocket, peer: zmq.Socket[bytes]) -> None:
        self.wire = wire
        self.peer = peer
        self.outbound = Outbound()
        peer.send(b"here I am")
        until(self.wire.receive, "a first message")

    def send(self, body: bytes = BODY) -> None:
        """Send like the broker's transport."""
        assert self.outbound.send(self.wire, ROUTE, [ROUTE, body])

    def is_all_read(self) -> bool:
        self.wire.is_readable()  # ZeroMQ updates its queues in any call
        self.outbound.refresh()
        return not self.outbound.bytes_all

    def fill(self) -> int:
        """Send until the peer counts as not reading. Return the number of messages."""
        for count in range(1, 900):
            self.send()
            if not self.outbound.is_reading(ROUTE):
                return count
        pytest.fail("it was never noticed")


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[Conversation]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with (
        closing(sockets.listen(f"ipc://{tmp_path}/socket")) as wire,
        context.socket(zmq.DEALER) as peer,
    ):
        peer.linger = 0
        peer.routing_id = ROUTE
        peer.rcvhwm = 1
        peer.connect(wire.endpoint)
        yield Conversation(wire, peer)
    context.term()


def test_peer_that_reads_is_reading(conversation: Conversation) -> None:
    for _ in range(200):
        conversation.send()
        assert conversation.peer.recv() == BODY
    until(conversation.is_all_read, "all is read")
    assert conversation.outbound.is_reading(ROUTE)


def test_peer_that_does_not_read_is_detected_and_recovers(conversation: Conversation) -> None:
    sent = conversation.fill()
    assert conversation.outbound.bytes_all > outbound.PEER_BYTES_MAX
    assert not conversation.outbound.is_full(ROUTE)
    for _ in range(sent):
        assert conversation.peer.recv() == BODY
    until(lambda: conversation.outbound.is_reading(ROUTE), "it reads again")
    until(conversation.is_all_read, "all is read")


def test_disconnected_peer_leaves_nothing(conversation: Conversation) -> None:
    conversation.fill()
    conversation.peer.close()

    until(conversation.is_all_read, "its messages are dropped")
    assert conversation.outbound.is_reading(ROUTE)


def test_peer_is_full_beyond_a_larger_limit(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "FULL_BYTES", 9 << 20)
    conversation.fill()
    while not conversation.outbound.is_full(ROUTE):
        conversation.send()
    assert not conversation.outbound.send(conversation.wire, ROUTE, [ROUTE, BODY])
    assert conversation.wire.is_full
    assert not conversation.outbound.is_full(b"other")


def test_over_the_common_limit_a_peer_must_read_everything_first(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "ALL_BYTES_MAX", 1 << 20)
    conversation.fill()
    assert conversation.outbound.bytes_all < outbound.PEER_BYTES_MAX
    assert conversation.outbound.is_reading(b"other")


def test_small_messages_are_marked_at_intervals(conversation: Conversation) -> None:
    def marks() -> int:
        conversation.send(bytes(5_000))
        return len(conversation.outbound.routes[ROUTE].marks)

    assert [marks() for _ in range(14)] == [0] * 13 + [1]
    assert 13 * 5_000 < MARK_BYTES <= 14 * 5_000


def test_marked_message_to_an_unknown_route_is_refused(conversation: Conversation) -> None:
    assert not conversation.outbound.send(conversation.wire, b"nobody", [b"nobody", BODY])
    assert not conversation.wire.is_full
    assert conversation.outbound.bytes_all == 0


def test_kept_bytes_of_a_peer_and_of_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "FULL_BYTES", 20)
    monkeypatch.setattr(outbound, "FULL_BYTES_CROWDED", 5)
    monkeypatch.setattr(outbound, "ALL_BYTES_MAX", 25)
    kept = Outbound()
    for _ in range(3):
        kept.keep(b"a", [b"", bytes(10)])
    assert (kept.bytes_all, kept.is_reading(b"a"), kept.is_reading(b"b")) == (20, False, True)
    for route in (b"b", b"c", b"c", b"d"):
        kept.keep(route, [bytes(6)])
    assert kept.bytes_all == 20 + 3 * 6
    kept.drop(b"a")
    kept.drop(b"c")
    assert (kept.bytes_all, [*kept.kept]) == (12, [b"b", b"d"])
    kept.refresh()
    assert [*kept.routes] == [b"b", b"d"]
