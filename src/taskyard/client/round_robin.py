"""Round-robin's client program: one client and the commands of its prompt.

The command line reads commands and prints. The protocol is in `wire.round_robin.peer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.net.round_robin import RoundRobinLoop
from taskyard.wire.round_robin.peer import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.protocols import EndpointTransport, MonotonicClock


class RoundRobinClient(RoundRobinLoop):
    """A client, connected to one server, and its commands."""

    def __init__(
        self, wire: EndpointTransport, clock: MonotonicClock, print_line: Callable[[int, str], None]
    ) -> None:
        self.client = Client(wire.endpoint)
        super().__init__(self.client, wire, clock, print_line)
        self.is_finished = False
        self.commands: dict[str, Callable[[], None]] = {
            "ping": lambda: self.run_actions(self.client.ping()),
            "pingt": lambda: self._ping("pingt", 1),
            "data": lambda: self._stream("data", 1),
            "quit": self._quit,
        }
        #: Commands that take a number.
        self.counted_commands: dict[str, Callable[[int], None]] = {
            "bulkping": lambda total: self._ping("bulkping", total),
            "bulkdata": lambda total: self._stream("bulkdata", total),
        }

    @property
    def is_busy(self) -> bool:
        """Return whether the last command is unfinished."""
        return self.client.is_busy

    def _ping(self, command: str, total: int) -> None:
        self.run_actions(self.client.start_pings(command, total, self.now_ns()))

    def _stream(self, command: str, total: int) -> None:
        self.run_actions(self.client.start_streams(command, total, self.now_ns()))

    def _quit(self) -> None:
        self.is_finished = True
