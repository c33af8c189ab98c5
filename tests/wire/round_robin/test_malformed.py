"""Malformed messages of round-robin: none raises, and none changes anything."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from simulator import invariants
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire.dialect import PROBE
from taskyard.wire.round_robin.frames import FRAMES_MAX, Message, parse
from tests.wire.round_robin.kit import C1, C2, LMQ, SRV, W1, W2, Harness, lmq

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Valid messages, to be corrupted.
SEEDS = [
    lmq(1, b"hand"),
    lmq(4, b"reg", b"\x08", b"10"),
    lmq(3, b"WORKER", b"\x09"),
    lmq(3, b"inc", b"\x07"),
    lmq(4, b"live", b"ongoing"),
    lmq(4, b"id", b"\x0a", b"stream", b"1024"),
    [C1, *lmq(6, b"id", b"data")],
    [*lmq(4, b"id", b"key"), b"far"],
    [C2, *lmq(5, b"id")],
]

#: Frames that have a meaning somewhere.
WORDS = [b"", LMQ, b"LMQv200", C1, W1, b"\x04", b"\x06", b"\x08", b"\x07", b"x" * 256, b"\xff" * 9]


def spoilt(count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield messages with frames removed, doubled, inserted and changed, and random ones."""
    random_bits = random.Random(seed)
    for _ in range(count):
        frames = [*random_bits.choice(SEEDS)]
        for _ in range(random_bits.randrange(1, 4)):
            at, way = random_bits.randrange(len(frames) + 1), random_bits.randrange(5)
            if way == 0:
                del frames[at : at + 1]
            elif way == 1:
                frames[at:at] = [random_bits.choice(WORDS)]
            elif way == 2 and at < len(frames):
                frames[at] = random_bits.choice(WORDS)
            elif way == 3:
                frames[at:at] = frames[at : at + 2]
            else:
                frames = [
                    random_bits.randbytes(random_bits.randrange(4))
                    for _ in range(random_bits.randrange(12))
                ]
        yield frames


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_malformed_messages_are_counted_and_change_nothing(seed: int) -> None:
    harness, random_bits, malformed = Harness(), random.Random(seed), 0
    for frames in spoilt(1_000, seed):
        before = ledger_fingerprint(harness.scheduler.ledger)
        record, count = harness.scheduler.ledger.record, harness.dialect.malformed
        harness.send(random_bits.choice((W1, W2, C1)), *frames)
        if harness.dialect.malformed > count:
            malformed += 1
            assert harness.scheduler.ledger.record == record
            assert ledger_fingerprint(harness.scheduler.ledger) == before
    invariants.check(harness.scheduler)
    assert malformed > 300
    harness.send(W2, *lmq(3, b"WORKER", b"\x09"))
    assert harness.send(C1, *lmq(1, b"p")) == [[b"", LMQ, b"\x02", b"p", b"", SRV]]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b""] * 10_000,
        [b"x"] * 10_000,
        [LMQ, b"\x04", b"id", b"key"],
        [b"", LMQ, b"\x04", b"id", b"key"],
        [b"", b"LMQv200", b"\x04", b"id", b"key", b""],
        [b"", LMQ, b"\x00", b"id", b"key", b""],
        [b"", LMQ, b"\x0b", b"id", b"key", b""],
        [b"", LMQ, b"", b"id", b"key", b""],
        [b"", LMQ, b"\x04\x04", b"id", b"key", b""],
        [b"", LMQ, b"\x04", b"", b"key", b""],
        [b"", LMQ, b"\x04", b"i" * 256, b"key", b""],
        [b"a" * 256, *lmq(4, b"id", b"key")],
        [*lmq(4, b"id", b"key"), b"a" * 256],
        lmq(5, b"id"),
        lmq(3, b"id"),
        lmq(4, b"id", *[b"x"] * FRAMES_MAX),
        lmq(3, b"id", b"\x08", b"[" * 100_000),
        lmq(3, b"id", b"\x08"),
    ],
    ids=lambda frames: f"{len(frames)} frames",
)
def test_nasty_messages_are_counted_and_change_nothing(frames: list[bytes]) -> None:
    harness = Harness()
    harness.register(W1)
    before = ledger_fingerprint(harness.scheduler.ledger)
    assert harness.send(W1, *frames) == []
    assert harness.dialect.malformed == 1
    assert ledger_fingerprint(harness.scheduler.ledger) == before


def test_commands_from_the_wrong_side_change_nothing() -> None:
    harness = Harness()
    before = ledger_fingerprint(harness.scheduler.ledger)
    for frames in (lmq(6, b"id", b"x"), lmq(2, b"id"), [C2, *lmq(6, b"id")], lmq(3, b"i", b"\x07")):
        assert harness.send(C1, *frames) == []
    assert ledger_fingerprint(harness.scheduler.ledger) == before


def test_ids_and_arguments_are_opaque() -> None:
    number, argument = bytes(range(255)), b"[" * 100_000
    frames = [b"top", *lmq(4, number, b"key", b"", argument, b""), b"bottom"]
    assert parse(frames) == Message(
        b"\x04", number, (b"key", b"", argument, b""), (b"top",), (b"bottom",)
    )
    assert parse(frames).frames() == frames


def test_probe_of_a_relay_is_dropped_without_a_reply() -> None:
    harness = Harness()
    harness.register(W1)
    for route in (W1, b"relay"):
        assert harness.send(route, PROBE, b"token") == []
    assert harness.dialect.malformed == 0
