"""Hungry: lines between a worker host and its agents, and the state machine of an agent.

An agent is a child program that reads tasks from its stdin and writes reports to its stdout, a line
each. `ZmailerSession` has the lines of ZMailer's own transport agents. No pipes, no processes, no
clock. Every decoder is total: any line is a message, if only a malformed message.
"""

from __future__ import annotations

import re
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, structs

from taskyard.core.events import Outcome
from taskyard.core.limits import NAME_BYTES_MAX, NUMBER_MAX, SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from re import Match


#: Room for a result of 1 MiB that is all backslashes, with its ID and text. A program with a longer
#: line does not use this protocol.
LINE_BYTES_MAX: Final = 4 * 1024 * 1024

#: Bytes of a malformed line that are shown.
EXCERPT_BYTES: Final = 100

HUNGRY: Final = b"#hungry"
IDLE_LINE: Final = b"#idle\n"
#: Ends a session, as the end of the file does.
LAST_LINE: Final = b"\n"

#: Statuses that an agent reports, and the outcome of each.
STATUSES: Final = {
    b"ok": Outcome.DONE,
    b"ok2": Outcome.DONE,
    b"ok3": Outcome.DONE,
    b"error": Outcome.FAILED_FINAL,
    b"error2": Outcome.FAILED_FINAL,
    b"deferred": Outcome.FAILED,
    b"deferall": Outcome.DEFER_ALL,
    b"deferback": Outcome.DEFER_BACK,
    b"retryat": Outcome.RETRY_AT,
}

#: The most digits of a number of nanoseconds or an attempt.
_DIGITS_MAX: Final = len(str(NUMBER_MAX))

#: A task and its attempt.
Key: TypeAlias = tuple[bytes, int]


# The fields of a line.

_ESCAPES: Final = {b"t": b"\t", b"n": b"\n", b"r": b"\r", b"\\": b"\\", b"#": b"#"}
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)


def escape(field: bytes) -> bytes:
    """Escape a field, so that any bytes fit on a line."""
    field = field.replace(b"\\", rb"\\").replace(b"\t", rb"\t")
    return field.replace(b"\n", rb"\n").replace(b"\r", rb"\r")


def unescape(field: bytes) -> bytes:
    """Reverse `escape`. A backslash before any other character stands for itself, because programs
    forget to escape it."""
    return _ESCAPED.sub(_unescaped, field) if b"\\" in field else field


def _unescaped(found: Match[bytes]) -> bytes:
    return _ESCAPES.get(found[1], found[0])


def task_id(name: bytes, attempt: int) -> bytes:
    """Return the ID of a task. It never begins with `#`, so that no report looks like a comment."""
    encoded = escape(b"%s/%d" % (name, attempt))
    return b"\\" + encoded if encoded.startswith(b"#") else encoded


def key_of(encoded: bytes) -> Key | None:
    """Return the task and the attempt of an ID, or None if it is invalid."""
    name, _, attempt = unescape(encoded).rpartition(b"/")
    if not 0 < len(name) <= NAME_BYTES_MAX or not attempt.isdigit() or len(attempt) > _DIGITS_MAX:
        return None
    return name, int(attempt)


def task_line(name: bytes, attempt: int, lane: bytes, payload: bytes) -> bytes:
    """Encode a task as a line. Without a payload the name is sent."""
    fields = (task_id(name, attempt), escape(lane), escape(payload or name))
    return b"\t".join(fields) + b"\n"


# Messages of an agent.


class Hungry(Struct, frozen=True):
    """It requests a task."""


class Comment(Struct, frozen=True):
    """A line for the log."""

    text: bytes


class Report(Struct, frozen=True):
    """The outcome of a task."""

    key: Key
    outcome: Outcome
    #: The result, if it is DONE.
    detail: bytes = b""
    #: A text for users: the reason, if it is not DONE.
    text: bytes = b""
    #: RETRY_AT: when, by the wall clock or, if `is_from_now`, relative to now.
    retry_ns: int = 0
    is_from_now: bool = False


class PassedOver(Struct, frozen=True):
    """The agent has finished with these tasks, and reported nothing on them."""

    keys: tuple[Key, ...]


class MalformedLine(Struct, frozen=True):
    """A line that is neither report nor comment."""

    reason: str
    #: The task that it seems to report.
    key: Key | None = None


AgentMessage: TypeAlias = Hungry | Comment | Report | PassedOver | MalformedLine


def decode(line: bytes) -> AgentMessage:
    """Decode a line without its newline. Never raises."""
    if line.rstrip() == HUNGRY:
        return Hungry()
    if line.startswith(b"#") or not line.strip():
        return Comment(line[1:].strip())
    encoded, *fields = line.split(b"\t", 2)
    key = key_of(encoded)
    if key is None:
        return not_a_report(line)
    return decode_report(key, fields, unescape)


def not_a_report(line: bytes) -> MalformedLine:
    return MalformedLine(f"{_excerpt(line)}: neither a report nor a comment")


def decode_report(
    key: Key, fields: Sequence[bytes], read: Callable[[bytes], bytes]
) -> Report | MalformedLine:
    """Decode the fields of a report after the ID. `read` undoes the escapes of a field."""
    if len(fields) < 2:  # noqa: PLR2004  # the detail and the status
        return MalformedLine("agent's report: not ID, DETAIL and STATUS separated by tabs", key)
    detail, rest = fields
    status, text = _first_word(rest)
    outcome = STATUSES.get(status)
    if outcome is None:
        return MalformedLine(f"agent's report: unknown status {_excerpt(status)}", key)
    if outcome is not Outcome.RETRY_AT:
        return Report(key, outcome, read(detail), read(text))
    when, text = _first_word(text)
    retry_ns = _seconds_ns(when.removeprefix(b"+"))
    if retry_ns is None:
        return MalformedLine(f"agent's report: invalid time {_excerpt(when)} of retryat", key)
    texts = (read(detail), read(text))
    return Report(key, outcome, *texts, retry_ns, is_from_now=when.startswith(b"+"))


def _first_word(text: bytes) -> tuple[bytes, bytes]:
    """Return the first word and what follows."""
    first, *rest = text.split(None, 1) or [b""]
    return first, rest[0].rstrip() if rest else b""


def _seconds_ns(digits: bytes) -> int | None:
    if not digits.isdigit() or len(digits) > _DIGITS_MAX:
        return None
    nanoseconds = int(digits) * SECOND_NS
    return nanoseconds if nanoseconds <= NUMBER_MAX else None


def _excerpt(text: bytes) -> str:
    cut = "..." if len(text) > EXCERPT_BYTES else ""
    return repr(shown(text[:EXCERPT_BYTES])) + cut


class Lines:
    """Split chunks of bytes into lines, in bounded memory."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._pending = bytearray()
        #: There was too long a line. It and all that follows are dropped.
        self.is_overfull = False

    def add(self, chunk: bytes) -> list[bytes]:
        """Add a chunk and return the lines that are complete now, without their ends."""
        if self.is_overfull:
            return []
        first, *others = chunk.split(b"\n")
        self._pending += first
        whole: list[bytes] = []
        for other in others:
            if not self._fits():
                return whole
            whole.append(bytes(self._pending).removesuffix(b"\r"))
            self._pending = bytearray(other)
        self._fits()
        return whole

    def _fits(self) -> bool:
        if len(self._pending) > self._line_bytes_max:
            self.is_overfull = True
            self._pending = bytearray()
        return not self.is_overfull


# The state machine of an agent.


class AgentState(IntEnum):
    """The state of an agent."""

    LARVA = 0  #: started, and has not requested a task yet
    STUFFING = 1  #: gets tasks
    FINISHING = 2  #: there are no more tasks for it, and it still holds some
    IDLE = 3  #: there are no tasks for it, and it holds none
    LEAVING = 4  #: was sent the last line


class AgentCause(IntEnum):
    """The cause of a change of state."""

    ASKED = 0  #: it sent `#hungry`
    FED = 1  #: it got a task
    RAN_OUT = 2  #: there are no more tasks for it, and it holds some
    RAN_DRY = 3  #: there are no more tasks for it, and it holds none
    DISMISSED = 4  #: it must exit


LARVA, STUFFING, FINISHING, IDLE, LEAVING = AgentState
ASKED, FED, RAN_OUT, RAN_DRY, DISMISSED = AgentCause

#: ASKED is legal in every state, because a program may print anything.
AGENT_TRANSITIONS: Final[dict[AgentState, dict[AgentCause, AgentState]]] = {
    LARVA: {ASKED: STUFFING, DISMISSED: LEAVING},
    STUFFING: {
        ASKED: STUFFING,
        FED: STUFFING,
        RAN_OUT: FINISHING,
        RAN_DRY: IDLE,
        DISMISSED: LEAVING,
    },
    FINISHING: {ASKED: FINISHING, FED: STUFFING, RAN_DRY: IDLE, DISMISSED: LEAVING},
    IDLE: {ASKED: IDLE, FED: STUFFING, DISMISSED: LEAVING},
    LEAVING: {ASKED: LEAVING},
}


class AgentSession:
    """The session of a host with an agent.

    Hunger is counted: each `#hungry` is good for one task, even much later. The count is limited to
    the tasks that an agent may hold at once, which is `overfeed` plus one.
    """

    #: Tasks with equal payloads are sent as one line.
    shares_lines = False

    def __init__(self, overfeed: int = 0) -> None:
        #: Tasks that it may hold beyond the current task. May change.
        self.overfeed = overfeed
        self._hunger = 0
        self._lines = Lines()
        self.state = LARVA
        #: Tasks without a report, oldest first.
        self.held: dict[Key, None] = {}

    @property
    def is_overfull(self) -> bool:
        """Return whether it wrote too long a line. The output is ignored from then on."""
        return self._lines.is_overfull

    @staticmethod
    def problem_of(_payload: bytes, /) -> str:
        """Return why a payload can't be sent, or nothing."""
        return ""

    def can_eat(self) -> bool:
        """Return whether it has requested a task and may hold one more."""
        return self._hunger > 0 and len(self.held) <= self.overfeed and self.state is not LEAVING

    def receive(self, chunk: bytes) -> list[AgentMessage]:
        """Decode output into messages. A last line without an end is ignored."""
        return [self._take(self._decode(line)) for line in self._lines.add(chunk)]

    def _decode(self, line: bytes) -> AgentMessage:
        return decode(line)

    def _take(self, message: AgentMessage) -> AgentMessage:
        if isinstance(message, Hungry):
            self._hunger = min(self._hunger + 1, 1 + self.overfeed)
            self._move(ASKED)
        elif isinstance(message, Report) and message.key not in self.held:
            name = shown(message.key[0])
            return MalformedLine(
                f"report on {name!r}, attempt {message.key[1]}, which the agent does not hold"
            )
        elif isinstance(message, Report):
            del self.held[message.key]
        elif isinstance(message, MalformedLine) and message.key in self.held:
            # The agent has finished with the task, and will not report on it again.
            del self.held[message.key]
            return Report(message.key, Outcome.FAILED, text=message.reason.encode())
        return message

    def feed(self, key: Key, lane: bytes, payload: bytes, *others: Key) -> bytes:
        """Assign a task, only if `can_eat`. Return the line to send.

        `others`: tasks with the same lane and payload, only if `shares_lines`.
        """
        self._move(FED)
        self._hunger -= 1
        self.held |= dict.fromkeys((key, *others))
        return self._task_line(key, lane, payload)

    def _task_line(self, key: Key, lane: bytes, payload: bytes) -> bytes:
        return task_line(*key, lane, payload)

    def run_out(self) -> bytes:
        """Note that there are no more tasks for it now. Return the line to send, if any."""
        if self.held:
            if self.state is STUFFING:
                self._move(RAN_OUT)
            return b""
        if self.state not in (STUFFING, FINISHING):
            return b""
        self._move(RAN_DRY)
        return IDLE_LINE

    def dismiss(self) -> bytes:
        """Make it finish and exit. Return the line to send. The input ends after that."""
        if self.state is LEAVING:
            return b""
        self._move(DISMISSED)
        return LAST_LINE

    def _move(self, cause: AgentCause) -> None:
        target = AGENT_TRANSITIONS[self.state].get(cause)
        if target is None:
            raise IllegalTransition(
                f"agent in state {self.state.name}: {cause.name} is not allowed"
            )
        self.state = target


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
        return self.state not in (LARVA, LEAVING) and not any(self._unanswered)

    def _decode(self, line: bytes) -> AgentMessage:
        if line.startswith(RESYNC) and line.removeprefix(RESYNC).strip() == self._path:
            return PassedOver(tuple(self.held))
        if line.startswith(b"#") or not line.strip():
            return decode(line)
        encoded, *fields = line.split(b"\t", 2)
        if not _RECIPIENT.fullmatch(encoded):
            return not_a_report(line)
        ending = b"/" + encoded
        key = next((key for key in self.held if (b"/" + key[0]).endswith(ending)), None)
        if key is None:  # a recipient of the same line whose task is not due
            return Comment(b"not held: " + line)
        report = decode_report(key, fields, bytes)
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
