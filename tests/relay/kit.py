"""A listener in memory, and a clock, for the relays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Sequence


class Listener:
    """Peers below. A route is connected while its connection is in `open`."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.arrived: list[tuple[tuple[int, int], list[bytes]]] = []
        self.sent: list[list[bytes]] = []
        self.open: set[tuple[int, int]] = set()
        self.connection = (0, 0)
        self.is_full = False
        self.refuses = False

    def say(self, number: int, *frames: bytes, route: bytes = b"") -> None:
        connection = (number, 1000 + number)
        self.open.add(connection)
        self.arrived.append((connection, [route or b"peer-%d" % number, *frames]))

    def receive(self) -> list[bytes] | None:
        if not self.arrived:
            return None
        self.connection, frames = self.arrived.pop(0)
        return frames

    def send(self, frames: Sequence[bytes]) -> bool:
        if not self.refuses:
            self.sent.append([*frames])
        return not self.refuses

    def is_open(self, connection: tuple[int, int]) -> bool:
        return connection in self.open

    def cut(self, connection: tuple[int, int]) -> None:
        self.open.discard(connection)


class Clock:
    now_ns = SECOND_NS

    def monotonic_ns(self) -> int:
        return self.now_ns
