"""Malformed messages: managers, workers and relays count them, and they change nothing."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from simulator import invariants
from taskyard.core.limits import NAME_BYTES_MAX
from taskyard.core.timer_heap import NEVER_NS
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.relay.server import Forwarder
from taskyard.wire.wmp import frames as wmp_frames
from taskyard.wire.wmp import peer as wmp_peer
from tests.wire.wmp.kit import Manager, frames

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Valid messages of both sides, to be corrupted.
SEEDS = [
    frames("READY", {"worker": "w", "slots": 2, "services": ["default", "x"], "incarnation": 3}),
    frames("GIVE", {"worker": "w", "request": "1", "services": ["default"], "back": [0]}),
    frames("DONE", {"worker": "w", "task": "a", "attempt": 1, "status": "ok"}, b"result"),
    frames("DONE", {"worker": "w", "task": "b", "attempt": 1, "status": "error"}, b"reason"),
    frames("STATUS", {"worker": "w", "task": "a", "attempt": 1, "percent": 3, "text": "t"}),
    frames("PING", {"worker": "w", "held": [["a", 1], ["b", 2]], "heartbeat_ms": 1000}),
    frames("PONG", {"worker": "w", "held": []}),
    frames("BYE", {"worker": "w", "reason": "r"}),
    frames("WAKE", {"service": "default", "manager": "m", "back": [1, 2]}),
    frames(
        "TAKE", {"request": "1", "task": "a", "attempt": 1, "service": "x", "lease_ms": 1}, b"p"
    ),
    frames("NO", {"request": "1", "back": [0]}),
    frames("CANCEL", {"task": "a", "attempt": 1}),
    frames("PING", {"worker": "w", "ready": False, "back": [0]}),
    [b"hop-1", b"hop-2", *frames("PING", {"worker": "w", "back": [0, 1]})],
]


def spoilt(count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield messages with frames and bytes flipped, cut, doubled, swapped and inserted."""
    random_bits = random.Random(seed)
    for _ in range(count):
        message = [bytearray(frame) for frame in random_bits.choice(SEEDS)]
        for _ in range(random_bits.randrange(1, 4)):
            at = random_bits.randrange(len(message) + 1)
            way = random_bits.randrange(6)
            if way == 0 and at < len(message):
                del message[at]
            elif way == 1:
                message.insert(
                    at, bytearray(random_bits.randbytes(random_bits.choice((0, 1, 5, 300))))
                )
            elif way == 2:
                message[at:] = message[: random_bits.randrange(3)]
            elif message:
                _spoil(random_bits.choice(message), random_bits)
        yield [bytes(frame) for frame in message]


def _spoil(frame: bytearray, random_bits: random.Random) -> None:
    at = random_bits.randrange(len(frame) + 1)
    way = random_bits.randrange(4)
    if way == 0 and at < len(frame):
        frame[at] ^= 1 << random_bits.randrange(8)
    elif way == 1:
        del frame[at:]
    elif way == 2:
        frame[at:at] = random_bits.choice(
            [b"[", b"{", b'"', b"null", b"-1", b"1e999", b"\xff", b"\\ud800"]
        )
    else:
        frame[at:at] = frame[at : at + random_bits.randrange(1, 20)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_malformed_messages_to_a_manager_are_counted_and_change_nothing(seed: int) -> None:
    manager = Manager()
    manager.submit(b"a", b"b", b"c")
    manager.ready()
    manager.given()
    for message in spoilt(1_000, seed):
        before = ledger_fingerprint(manager.scheduler.ledger)
        records, malformed = manager.scheduler.ledger.record, manager.dialect.malformed
        replies = manager.take(message)
        if manager.dialect.malformed > malformed:
            assert [one.command for one in replies] == ["BYE"] * wmp_frames.is_empty_ready(message)
            assert manager.scheduler.ledger.record == records
            assert ledger_fingerprint(manager.scheduler.ledger) == before
    invariants.check(manager.scheduler)
    assert manager.dialect.malformed > 500
    manager.ready("sane")
    assert [said.command for said in manager.send("PING", {"worker": "sane"})] == ["PONG"]


@pytest.mark.parametrize("seed", range(5))
def test_malformed_messages_to_a_worker_are_counted_and_a_relay_survives(seed: int) -> None:
    worker = wmp_peer.Worker(wmp_peer.Settings(b"w", slots=2), 2, 1)
    relay = Forwarder(2)
    for number, message in enumerate(spoilt(1_000, seed)):
        worker.take(number % 2, message, number)
        worker.time_passed(number)
        relay.up([b"route", *message])
        relay.down(number % 2, message)
    assert worker.malformed > 500
    assert relay.malformed > 500


def header(raw: bytes) -> list[bytes]:
    return [b"", b"WMP01", b"\x01", raw]


READY = {"worker": "w"}
NASTY: list[list[bytes]] = [
    [],
    [b"WMP01", b"\x01", b'{"worker":"w"}'],
    [b""] * 10_000,
    [b"hop"] * 10_000,
    [*[b"hop"] * 9, *frames("READY", READY)],
    [b"", b"WMP02", b"\x01", b'{"worker":"w"}'],
    [b"", b"WMP01", b"", b'{"worker":"w"}'],
    [b"", b"WMP01", b"\x01\x01", b'{"worker":"w"}'],
    [b"", b"WMP01", b"\x0c", b'{"worker":"w"}'],
    [b"", b"WMP01", b"READY", b'{"worker":"w"}'],
    [b"", b"WMP01", b"\x03"],
    frames("WAKE", {"service": "default"}),
    frames("TAKE", {"request": 1, "task": "a", "attempt": 1, "service": "x", "lease_ms": 1}),
    frames("NO", {"request": 1}),
    frames("CANCEL", {"task": "a", "attempt": 1}),
    header(b"null"),
    header(b"[]"),
    header(b"{"),
    header(b'{"worker":"w"} x'),
    header(b'{"worker":"\xff"}'),
    header(b'{"worker":"w","x":"\xff"}'),
    header(b'{"worker":"\\ud800"}'),
    header(b'{"worker":"w","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    header(b'{"a":' * 100_000 + b'"worker"' + b"}" * 100_000),
    header(b'{"worker":"w","x":"' + b"x" * wmp_frames.HEADER_BYTES_MAX + b'"}'),
    frames("READY", {"worker": None}),
    frames("READY", {"worker": ""}),
    frames("READY", {"worker": 7}),
    frames("READY", {"worker": "w" * 256}),
    frames("READY", {"worker": "é" * 128}),
    frames("READY", {"worker": "\0€"}),
    frames("READY", {**READY, "slots": 0}),
    frames("READY", {**READY, "slots": -1}),
    frames("READY", {**READY, "slots": 1.5}),
    frames("READY", {**READY, "slots": 10**30}),
    frames("READY", {**READY, "services": []}),
    frames("READY", {**READY, "services": "default"}),
    frames("READY", {**READY, "services": [""]}),
    frames("READY", {**READY, "services": ["s"] * 1001}),
    frames("READY", {**READY, "services": ["s" * (NAME_BYTES_MAX + 1)]}),
    frames("READY", {**READY, "incarnation": -1}),
    frames("READY", {**READY, "incarnation": 1 << 63}),
    frames("GIVE", READY),
    frames("GIVE", {**READY, "request": None}),
    frames("GIVE", {**READY, "request": {}}),
    frames("GIVE", {**READY, "request": "r" * 256}),
    frames("DONE", {**READY, "task": "a", "attempt": 1}),
    frames("DONE", {**READY, "task": "a", "attempt": 1, "status": "perhaps"}),
    frames("DONE", {**READY, "task": "", "attempt": 1, "status": "ok"}),
    frames("DONE", {**READY, "task": "a" * (NAME_BYTES_MAX + 1), "attempt": 1, "status": "ok"}),
    frames("DONE", {**READY, "task": "a", "attempt": -1, "status": "ok"}),
    frames("DONE", {**READY, "task": "a", "attempt": True, "status": "ok"}),
    frames("STATUS", {**READY, "task": "a", "attempt": 1, "percent": "half"}),
    frames("PING", {**READY, "held": {"a": 1}}),
    frames("PING", {**READY, "held": [["a"]]}),
    frames("PING", {**READY, "held": [["a", 1, 2]]}),
    frames("PING", {**READY, "held": [["", 1]]}),
    frames("PING", {**READY, "heartbeat_ms": -5}),
    frames("PING", {**READY, "back": [0] * 9}),
]


@pytest.mark.parametrize("message", NASTY, ids=range(len(NASTY)))
def test_nasty_message_is_counted_and_changes_nothing(message: list[bytes]) -> None:
    manager = Manager()
    manager.submit(b"a")
    before = ledger_fingerprint(manager.scheduler.ledger)
    assert manager.take(message) == []
    assert manager.dialect.malformed == 1
    assert ledger_fingerprint(manager.scheduler.ledger) == before
    assert manager.dialect.timers.heap[0][0] == NEVER_NS


@pytest.mark.parametrize(
    "message",
    [
        frames("READY", {**READY, "x": {"deep": [[[[1]]]]}, "slots": 1}),
        frames("READY", {**READY, "text": "[" * 100_000}),
        frames("READY", {**READY, "text": '\\"' * 10_000 + "[" * 100}),
        [*[b"hop"] * 8, *frames("READY", READY)],
        frames("READY", {"worker": "w" * 255}),
        [*frames("READY", READY), *[b"payload"] * 50],
    ],
    ids=range(6),
)
def test_unusual_valid_message_is_accepted(message: list[bytes]) -> None:
    manager = Manager()
    manager.take(message)
    assert manager.dialect.malformed == 0
    assert len(manager.scheduler.ledger.workers) == 1


def test_words_of_the_protocol_are_valid_payloads() -> None:
    for payload in (b"WMP01", b"", b"\x0b", b"\x00" * 3):
        manager = Manager()
        manager.ready()
        manager.submit(b"a", payload=payload or b"a")
        (take,) = manager.given()
        assert take.payload == (payload or b"a")


@pytest.mark.parametrize(
    "raw",
    [
        b'"' * wmp_frames.HEADER_BYTES_MAX,
        b'"\\' * (wmp_frames.HEADER_BYTES_MAX // 2),
        b"[" * 20 + b'"\\"' * (wmp_frames.HEADER_BYTES_MAX // 3 - 20),
        b"[{" * (wmp_frames.HEADER_BYTES_MAX // 2),
        b"[]" * (wmp_frames.HEADER_BYTES_MAX // 2),
    ],
    ids=range(5),
)
def test_headers_are_checked_fast_whatever_they_contain(raw: bytes) -> None:
    manager = Manager()
    begun = time.process_time()
    for _ in range(3):
        manager.take(header(raw))
    assert time.process_time() - begun < 3
    assert manager.dialect.malformed == 3


@pytest.mark.parametrize("depth", [15, 16])
def test_depth_of_headers_is_limited(depth: int) -> None:
    manager = Manager()
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    manager.take(header(json.dumps({"worker": "w", "x": nested}).encode()))
    assert manager.dialect.malformed == (depth >= wmp_frames.HEADER_DEPTH_MAX)
