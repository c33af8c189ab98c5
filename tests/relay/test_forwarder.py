"""A relay's routing: the receivers of a message, and its new headers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taskyard.relay.server import Forwarder
from tests.wire.wmp.kit import frames


def headers_of(message: list[bytes]) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(message[message.index(b"") + 3])
    return decoded


@pytest.mark.parametrize("command", ["READY", "BYE", "PING"])
def test_broadcast_goes_unchanged_to_all_upstreams(command: str) -> None:
    message = [b"id", b"hop", *frames(command, {"worker": "w"})]
    assert Forwarder(3).up(message) == [(0, message), (1, message), (2, message)]


@pytest.mark.parametrize("command", ["GIVE", "DONE", "STATUS", "PING", "PONG"])
def test_everything_else_follows_its_way_back_and_loses_a_step(command: str) -> None:
    message = [b"id", *frames(command, {"worker": "w", "back": [4, 1]}, b"payload")]
    ((upstream, sent),) = Forwarder(3).up(message)
    assert upstream == 1
    assert headers_of(sent) == {"worker": "w", "back": [4]}
    assert [sent[:4], sent[5:]] == [message[:4], message[5:]]
    message = [b"id", *frames(command, {"worker": "w", "back": [2]})]
    ((upstream, sent),) = Forwarder(3).up(message)
    assert (upstream, headers_of(sent)) == (2, {"worker": "w"})


@pytest.mark.parametrize("command", ["WAKE", "TAKE", "NO", "CANCEL", "PING", "PONG", "BYE"])
def test_on_the_way_down_the_upstream_is_noted_last(command: str) -> None:
    message = [b"id", b"hop", *frames(command, {"worker": "w", "back": [4]}, b"payload")]
    sent = Forwarder(3).down(2, message)
    assert sent is not None
    assert headers_of(sent) == {"worker": "w", "back": [4, 2]}
    assert [sent[:5], sent[6:]] == [message[:5], message[6:]]


def test_headers_that_it_does_not_know_are_handed_on_as_they_stand() -> None:
    raw = b'{"x": [1, 2.50, {"y":null}], "big": 123456789012345678901234567890, "back":[0]}'
    ((_, sent),) = Forwarder(1).up([b"id", b"", b"WMP01", b"\x03", raw])
    assert sent[4] == b'{"x":[1, 2.50, {"y":null}],"big":123456789012345678901234567890}'


def test_way_down_and_up_again_are_the_same_through_a_chain() -> None:
    near, far = Forwarder(3), Forwarder(5)
    wake = [b"near's id", b"worker's id", *frames("WAKE", {"service": "s"})]
    passed = far.down(4, wake)
    assert passed is not None
    arrived = near.down(2, passed[1:])
    assert arrived is not None
    assert arrived[:2] == [b"worker's id", b""]
    back = headers_of(arrived)["back"]
    assert back == [4, 2]
    give = frames("GIVE", {"worker": "w", "request": 1, "back": back})
    ((upstream, sent),) = near.up([b"worker's id", *give])
    assert upstream == 2
    ((upstream, sent),) = far.up([b"near's id", *sent])
    assert upstream == 4
    assert sent[:3] == [b"near's id", b"worker's id", b""]
    assert headers_of(sent) == {"worker": "w", "request": 1}


@pytest.mark.parametrize("headers", [[], [b""], [b"{}"]])
def test_ready_without_headers_reaches_the_managers_which_give_the_reason(
    headers: list[bytes],
) -> None:
    relay = Forwarder(2)
    message = [b"id", b"hop", b"", b"WMP01", b"\x01", *headers]
    assert relay.up(message) == [(0, message), (1, message)]
    bye = relay.down(1, [b"id", b"hop", *frames("BYE", {"reason": "why"})])
    assert bye is not None
    assert headers_of(bye) == {"reason": "why", "back": [1]}
    assert relay.up([b"id", b"", b"WMP01", b"\x03"]) == []  # no other command
    assert relay.malformed == 1


def test_longer_path_is_dropped_and_counted() -> None:
    relay = Forwarder(1)
    hops = [b"%d" % number for number in range(9)]
    ready = frames("READY", {"worker": "w"})
    assert relay.up([*hops[:8], *ready]) != []
    assert relay.malformed == 0
    assert relay.up([*hops, *ready]) == []
    assert relay.down(0, [*hops, *frames("WAKE", {"service": "s"})]) is None
    wake = frames("WAKE", {"service": "s", "back": [0] * 8})
    assert relay.down(0, [b"id", *wake]) is None
    assert relay.malformed == 3


@pytest.mark.parametrize(
    "message",
    [
        [b"id", *frames("GIVE", {"worker": "w", "request": 1})],
        [b"id", *frames("GIVE", {"worker": "w", "request": 1, "back": [2]})],
        [b"id", *frames("GIVE", {"worker": "w", "request": 1, "back": [-1]})],
        [b"id", *frames("GIVE", {"worker": "w", "request": 1, "back": ["0"]})],
        [b"id", *frames("GIVE", {"worker": "w", "request": 1, "back": 0})],
        [b"id", *frames("WAKE", {"service": "s"})],
        [b"id", *frames("TAKE", {"back": [0]})],
        [b"id", b"", b"WMP02", b"\x01", b"{}"],
        [b"id", b"", b"WMP01", b"\x03", b"[]"],
        [b"id", b"", b"WMP01", b"\x03", b'{"back":[0],' + b'"x":[' * 99_999],
        [b"id"],
    ],
    ids=range(11),
)
def test_unroutable_message_or_one_from_the_wrong_side_is_dropped(message: list[bytes]) -> None:
    relay = Forwarder(2)
    assert relay.up(message) == []
    assert relay.malformed == 1


@pytest.mark.parametrize(
    "message",
    [
        frames("WAKE", {"service": "s"}),
        [b"id", *frames("READY", {"worker": "w"})],
        [b"id", *frames("GIVE", {"worker": "w", "request": 1, "back": [0]})],
        [b"id", *frames("DONE", {"worker": "w", "back": [0]})],
    ],
    ids=range(4),
)
def test_same_from_above(message: list[bytes]) -> None:
    relay = Forwarder(2)
    assert relay.down(0, message) is None
    assert relay.malformed == 1
