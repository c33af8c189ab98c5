"""The broker's transport, over sockets and a dialect controlled by the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from taskyard.broker import requests, transport
from taskyard.core.effects import Assign, CommandAck
from taskyard.core.events import (
    AssignmentUnsent,
    ClientDisconnected,
    Event,
    StatsRequested,
)
from taskyard.net import outbound
from taskyard.net.outbound import RETRY_NS
from tests.kit.broker import NumbersHarness

if TYPE_CHECKING:
    import pytest

    from taskyard.core.effects import Effect
    from taskyard.wire.dialect import Reply


class Harness(NumbersHarness):
    """Each peer has room for a number of replies. A peer without an entry is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.room: dict[bytes, int] = {b"slow": 2, b"quick": 1000}

    def has_room(self, route: bytes) -> bool:
        self.is_full = route in self.room
        if not self.room.get(route):
            return False
        self.room[route] -= 1
        return True

    def turn(self, route: bytes = b"slow", *numbers: int) -> tuple[list[int], list[Event]]:
        """Receive these messages. Returns the events, and what could not be delivered."""
        asked = [cast("StatsRequested", event) for event in self.deliver(route, *numbers)]
        effects = [CommandAck(event.client, event.request, 0) for event in asked]
        return [event.request for event in asked], [*self.port.send(effects)]


SLOW = ClientDisconnected(0, b"\x00slow")


def test_answers_that_a_peer_does_not_take_are_kept_in_order() -> None:
    harness = Harness()
    assert harness.turn(b"slow", 1, 2, 3, 4, 5) == ([1, 2, 3, 4, 5], [SLOW])
    harness.room[b"slow"] = 2
    harness.now_ns += RETRY_NS
    harness.turn()
    harness.room[b"slow"] = 2
    harness.now_ns += RETRY_NS
    harness.turn()
    assert harness.received == [(b"slow", number) for number in (1, 2, 3, 4, 5)]


def test_new_connection_of_a_peer_with_its_own_id_is_noticed() -> None:
    harness = Harness()
    harness.turn(b"quick", 1, 2)
    assert harness.renewed == []
    for connection, renewed in (
        ((1, 2), 1),  # another socket with the descriptor
        ((1, 2), 1),
        ((1, 0), 1),  # a message that was read after its connection had ended
        ((2, 3), 2),
    ):
        harness.connection = connection
        harness.turn(b"quick", 3)
        assert harness.renewed == [b"\x00quick"] * renewed


def test_connections_of_assigned_ids_are_not_compared() -> None:
    harness = Harness()
    harness.room[b"\x00abcd"] = 10
    for number in (1, 2):
        harness.connection = (number, number)
        harness.turn(b"\x00abcd", number)
    assert harness.renewed == []


def test_number_of_compared_connections_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ROUTES_MAX", 2)
    harness = Harness()
    for route in (b"a", b"b", b"c"):
        harness.deliver(route, 1)
    harness.connection = (9, 9)
    for route in (b"a", b"c"):
        harness.deliver(route, 1)
    assert harness.renewed == [b"\x00c"]


def test_requests_of_a_peer_that_does_not_read_are_ignored() -> None:
    harness = Harness()
    harness.turn(b"slow", 1, 2, 3)
    assert harness.turn(b"slow", 4, 5) == ([], [])
    assert harness.turn(b"quick", 1) == ([1], [])
    harness.room[b"slow"] = 2
    harness.now_ns += RETRY_NS
    assert harness.turn(b"slow", 6) == ([6], [])
    assert [number for route, number in harness.received if route == b"slow"] == [1, 2, 3, 6]


def test_kept_replies_are_sent_again_after_a_while_though_nothing_arrives() -> None:
    harness = Harness()
    harness.turn(b"slow", 1, 2)
    harness.turn(b"slow", 3)
    harness.turn()
    assert harness.waits == [None, None, RETRY_NS]


def test_nothing_is_kept_for_a_peer_that_is_gone() -> None:
    harness = Harness()
    assert harness.turn(b"nobody", 1) == ([1], [ClientDisconnected(0, b"\x00nobody")])
    assert harness.turn(b"nobody", 2) == ([2], [ClientDisconnected(0, b"\x00nobody")])
    harness.turn(b"slow", 1, 2, 3)
    del harness.room[b"slow"]
    harness.now_ns += RETRY_NS
    assert harness.turn(b"slow", 4) == ([4], [SLOW])


class Assigning(Harness):
    """Sends one task to the worker with the name of its route."""

    def reply(self, effect: Effect) -> list[Reply]:
        assert isinstance(effect, Assign)
        return [(b"\x00" + effect.worker, [b"7"])]

    def assign(self, worker: bytes) -> list[Event]:
        return [*self.port.send([Assign(worker, [b"a"], [3], [], [], [], 0)])]


def test_assignment_that_is_not_sent_at_once_is_reported() -> None:
    harness = Assigning()
    assert harness.assign(b"quick") == []
    gone = ClientDisconnected(0, b"\x00nobody")
    assert harness.assign(b"nobody") == [AssignmentUnsent(0, b"nobody", [b"a"], [3]), gone]
    assert harness.assign(b"slow") == harness.assign(b"slow") == []
    unsent = AssignmentUnsent(0, b"slow", [b"a"], [3])
    assert harness.assign(b"slow") == [unsent, SLOW]
    assert harness.assign(b"slow") == [unsent]


def test_kept_replies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "KEPT_MAX", 2)
    harness = Harness()
    harness.turn(b"slow", 1, 2, 3, 4, 5, 6)
    harness.room[b"slow"] = 9
    harness.now_ns += RETRY_NS
    harness.turn()
    assert [number for _, number in harness.received] == [1, 2, 3, 4]


def test_turn_takes_no_more_in_when_decoding_took_long() -> None:
    harness = Harness()
    harness.decoding_ns = requests.DECODING_NS_MAX // 3
    assert harness.turn(b"quick", 1, 2, 3, 4, 5, 6, 7) == ([1, 2, 3, 4], [])


def test_turn_of_a_broker_that_is_suspended_takes_everything_in() -> None:
    harness = Harness()
    harness.suspended_ns = requests.DECODING_NS_MAX
    assert harness.turn(b"quick", 1, 2, 3, 4, 5, 6, 7) == ([1, 2, 3, 4, 5, 6, 7], [])
