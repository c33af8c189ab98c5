"""Messages that wait until their socket can send them, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.net.protocols import Transport

#: How soon to try a message again that could not be sent.
RESEND_NS: Final = SECOND_NS // 10


class SendQueue:
    """Sends messages over one transport, and keeps those that it can't send yet."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._unsent: list[Sequence[bytes]] = []

    @property
    def is_blocked(self) -> bool:
        """Return whether a message waits. Try `flush` again after `RESEND_NS`."""
        return bool(self._unsent)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message after those that wait."""
        self._unsent.append(frames)
        self.flush()

    def flush(self) -> None:
        """Send messages that wait, as far as possible."""
        while self._unsent and self._transport.send(self._unsent[0]):
            del self._unsent[0]
