"""Connections that send and are never received: found by their bytes, one interval at a time."""

import os
from collections.abc import Iterator

import pytest
from msgspec import field

from taskyard.net.accepted import (
    EXAMINE_NS,
    HANDSHAKE_NS_MAX,
    SMALL_BYTES_MAX,
    Arrivals,
    Connection,
    UnroutedPeers,
)


class Scripted(Connection, eq=False):
    """A connection with given numbers of received bytes. All segments are of one size."""

    numbers: list[int] = field(default_factory=list)
    segment_bytes: int = 100
    segments: int = 0

    def count_received(self) -> int:
        received = self.numbers.pop(0)
        self.segments = received // self.segment_bytes
        return received

    def count_segments(self) -> int:
        return self.segments


@pytest.fixture
def arrivals() -> Iterator[Arrivals]:
    read, write = os.pipe()
    yield Arrivals(read, is_local=False, has_keys=True)
    os.close(read)
    os.close(write)


def found_at(arrivals: Arrivals, numbers: list[int], segment_bytes: int = 100) -> list[int]:
    """Return the intervals at which a connection is found."""
    connection = Scripted(3, 4, arrivals, 0, numbers=[*numbers], segment_bytes=segment_bytes)
    peers = UnroutedPeers()
    results = [
        peers.find([connection], HANDSHAKE_NS_MAX + number * EXAMINE_NS)
        for number in range(len(numbers))
    ]
    return [number for number, found in enumerate(results) if found]


@pytest.mark.parametrize(
    ("numbers", "intervals"),
    [
        ([600, 700, 800, 900], [3]),  # sends a little again and again
        ([600, 700, 700, 800, 900], [4]),
        ([600, 700, 700, 700, 700], []),  # sent once, which may be on its way
        ([600, 600, 600, 600], []),  # is silent
        ([0, *range(0, 5 << 20, SMALL_BYTES_MAX + 1)], []),  # sends a long message
        ([600, 700, 800, 800 + 2 * SMALL_BYTES_MAX, 900 + 2 * SMALL_BYTES_MAX], []),
    ],
)
def test_connection_that_sends_a_little_and_is_never_received_is_found(
    arrivals: Arrivals, numbers: list[int], intervals: list[int]
) -> None:
    assert found_at(arrivals, numbers) == intervals


def test_long_message_over_a_slow_link_is_in_transit(arrivals: Arrivals) -> None:
    slow, pause = [*range(0, 1 << 20, 2 << 10)], [1 << 20] * 10
    assert found_at(arrivals, [*slow, *pause, *(one + (1 << 20) for one in slow)], 512) == []
    very_slow = [at // 2 * 1_448 for at in range(100)]
    assert found_at(arrivals, very_slow, 1_448) == []


def test_messages_of_one_segment_with_pauses_are_found(arrivals: Arrivals) -> None:
    assert found_at(arrivals, [at // 3 * 1_448 for at in range(10)], 1_448) == [9]


def test_nothing_is_found_while_messages_wait_to_be_received(arrivals: Arrivals) -> None:
    arrivals.is_empty = False
    assert found_at(arrivals, [600, 700, 800, 900, 1_000]) == []


def test_connection_in_its_handshake_is_not_examined(arrivals: Arrivals) -> None:
    young, peers = Scripted(3, 4, arrivals, 0, numbers=[]), UnroutedPeers()
    assert peers.find([young], HANDSHAKE_NS_MAX - 1) == []
    assert not peers.is_due(HANDSHAKE_NS_MAX)
    assert peers.is_due(HANDSHAKE_NS_MAX - 1 + EXAMINE_NS)
