"""ZMailer's own lines between a host and its transport agents.

A task is one recipient in a transport control file. Its name ends with the number of the file, a
slash, and the offset of the recipient's line. Its payload is what the host writes: the path of the
file, or the path, a tab and a host. All recipients with that payload share the line, and the agent
reports on each. No pipes, no files, no clock.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import structs

from taskyard.core.events import Outcome
from taskyard.wire.hungry import frames
from taskyard.wire.hungry.frames import AgentSession, Comment, Hungry, PassedOver, Report

if TYPE_CHECKING:
    from taskyard.wire.hungry.frames import AgentMessage, Key

RESYNC: Final = b"#resync"

#: A payload: a path, and perhaps a host.
_PAYLOAD: Final = re.compile(rb"[^#\s\0][^\t\r\n\0]*(\t[^\t\r\n\0]+)?")

#: The ID of a report.
_RECIPIENT: Final = re.compile(rb"[0-9]+/[0-9]+")

# A recipient's line: `r`, a mark, the process that has locked it, a delay, and the address.

RECIPIENT: Final = b"r"
WAITING, LOCKED, DELIVERED, REFUSED = b" ", b"~", b"+", b"-"
LOCK_BYTES: Final = 6
DELAY_BYTES: Final = 4


def path_of(payload: bytes) -> bytes:
    """Return the path of the control file."""
    return payload.partition(b"\t")[0]


class ZmailerSession(AgentSession):
    """The session of a host with a transport agent of ZMailer.

    The agent answers each line with `#hungry`, also `#idle`, when it has finished with it. So lines
    without an answer are counted, as in the original, and not the agent's hunger.
    """

    shares_lines = True

    def __init__(self, overfeed: int = 0) -> None:
        super().__init__(overfeed)
        #: The tasks of each line without an answer. Empty for `#idle`.
        self._unanswered: deque[tuple[Key, ...]] = deque()
        #: The path of the control file of the last line.
        self._path = b""

    @staticmethod
    def problem_of(payload: bytes, /) -> str:
        is_line = _PAYLOAD.fullmatch(payload)
        return "" if is_line else "payload: not SPOOLFILE, or SPOOLFILE tab HOST, on one line"

    def can_eat(self) -> bool:
        return self.state not in (frames.LARVA, frames.LEAVING) and not any(self._unanswered)

    def _decode(self, line: bytes) -> AgentMessage:
        if line.startswith(RESYNC) and line.removeprefix(RESYNC).strip() == self._path:
            return PassedOver(tuple(self.held))
        if line.startswith(b"#") or not line.strip():
            return frames.decode(line)
        encoded, *fields = line.split(b"\t", 2)
        if not _RECIPIENT.fullmatch(encoded):
            return frames.not_a_report(line)
        ending = b"/" + encoded
        key = next((key for key in self.held if (b"/" + key[0]).endswith(ending)), None)
        if key is None:  # a recipient of the same line whose task is not due
            return Comment(b"not held: " + line)
        report = frames.decode_report(key, fields, bytes)
        if isinstance(report, Report) and report.outcome is Outcome.DONE:
            return structs.replace(report, detail=report.text, text=report.detail)
        return report

    def _take(self, message: AgentMessage) -> AgentMessage:
        message = super()._take(message)
        if isinstance(message, Hungry) and self._unanswered:
            left = [key for key in self._unanswered.popleft() if key in self.held]
            message = PassedOver(tuple(left)) if left else message
        if isinstance(message, PassedOver):
            self.held = {key: None for key in self.held if key not in message.keys}
        return message

    def _task_line(self, key: Key, lane: bytes, payload: bytes) -> bytes:
        del key, lane
        self._unanswered.append(tuple(self.held))
        self._path = path_of(payload)
        return payload + b"\n"

    def run_out(self) -> bytes:
        line = super().run_out()
        if line:
            self._unanswered.append(())
        return line


#: The usual lines.
HUNGRY_LINES: Final = "hungry"

#: The sessions by the name of their lines.
SESSIONS: Final[dict[str, type[AgentSession]]] = {
    HUNGRY_LINES: AgentSession,
    "zmailer": ZmailerSession,
}
