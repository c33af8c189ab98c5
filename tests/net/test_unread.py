"""Unread bytes are counted over real sockets, and released when the peer reads."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import zmq

from taskyard.net import sockets, unread
from taskyard.net.unread import MARK_BYTES, Unread
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
        self.unread = Unread()
        peer.send(b"here I am")
        until(self.wire.receive, "a first message")

    def send(self, body: bytes = BODY) -> None:
        """Send like the broker's transport."""
        if not self.unread.wants_mark(ROUTE, len(body)):
            assert self.wire.send([ROUTE, body])
            return
        tracker = self.wire.send_marked([ROUTE, body])
        assert tracker is not None
        self.unread.mark(ROUTE, tracker)

    def is_all_read(self) -> bool:
        self.wire.is_readable()  # ZeroMQ updates its queues in any call
        self.unread.refresh()
        return not self.unread.bytes_all

    def fill(self) -> int:
        """Send until the peer counts as not reading. Return the number of messages."""
        for count in range(1, 900):
            self.send()
            if not self.unread.is_reading(ROUTE):
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
    assert conversation.unread.is_reading(ROUTE)


def test_peer_that_does_not_read_is_detected_and_recovers(conversation: Conversation) -> None:
    sent = conversation.fill()
    assert conversation.unread.bytes_all > unread.PEER_BYTES_MAX
    assert not conversation.unread.is_full(ROUTE)
    for _ in range(sent):
        assert conversation.peer.recv() == BODY
    until(lambda: conversation.unread.is_reading(ROUTE), "it reads again")
    until(conversation.is_all_read, "all is read")


def test_disconnected_peer_leaves_nothing(conversation: Conversation) -> None:
    conversation.fill()
    conversation.peer.close()

    until(conversation.is_all_read, "its messages are dropped")
    assert conversation.unread.is_reading(ROUTE)


def test_peer_is_full_beyond_a_larger_limit(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "FULL_BYTES", 9 << 20)
    conversation.fill()
    for _ in range(20):
        conversation.send()
    assert conversation.unread.is_full(ROUTE)
    assert not conversation.unread.is_full(b"other")


def test_over_the_common_limit_a_peer_must_read_everything_first(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "ALL_BYTES_MAX", 1 << 20)
    conversation.fill()
    assert conversation.unread.bytes_all < unread.PEER_BYTES_MAX
    assert conversation.unread.is_reading(b"other")


def test_small_messages_are_marked_at_intervals() -> None:
    counts = Unread()
    marks = [counts.wants_mark(ROUTE, 5_000) for _ in range(14)]
    assert marks == [False] * 13 + [True]
    assert 13 * 5_000 < MARK_BYTES <= 14 * 5_000


def test_marked_message_to_an_unknown_route_is_refused(conversation: Conversation) -> None:
    assert conversation.wire.send_marked([b"nobody", BODY]) is None
    assert not conversation.wire.is_full
