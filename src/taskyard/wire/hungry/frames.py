"""Hungry: any program is a worker. The lines between a worker host and its agents.

An agent is a child program that reads tasks from its stdin and writes reports to its stdout, a line
each. Here is what the lines mean, and the machine of one agent: bytes in, what was said out. No
pipes, no processes, no clock. Every decoder is total: whatever a program prints means something, if
only that it is garbage.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct

from taskyard.core.events import Outcome
from taskyard.core.limits import NAME_BYTES_MAX, NUMBER_MAX, SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import IllegalTransition

if TYPE_CHECKING:
    from re import Match

#: A result of a mebibyte that is all backslashes, with its ID and text, and room to spare. What is
#: longer is no line but a program that does not speak this language.
LINE_BYTES_MAX: Final = 4 * 1024 * 1024

#: Of a line that makes no sense, so much is shown.
EXCERPT_BYTES: Final = 100

HUNGRY: Final = b"#hungry"
IDLE_LINE: Final = b"#idle\n"
#: Ends a conversation, as the end of the file does.
LAST_LINE: Final = b"\n"

#: What an agent can say of a task, and what that is to the broker.
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

#: More digits than a number of nanoseconds or an attempt can have.
_DIGITS_MAX: Final = len(str(NUMBER_MAX))

#: A task and its attempt.
Key: TypeAlias = tuple[bytes, int]


# The fields of a line.

_ESCAPES: Final = {b"t": b"\t", b"n": b"\n", b"r": b"\r", b"\\": b"\\", b"#": b"#"}
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)


def escape(field: bytes) -> bytes:
    """Any bytes as part of one line."""
    field = field.replace(b"\\", rb"\\").replace(b"\t", rb"\t")
    return field.replace(b"\n", rb"\n").replace(b"\r", rb"\r")


def unescape(field: bytes) -> bytes:
    """What `escape` was given. A backslash before anything else stands for itself: a program that
    forgot to escape its own is understood where it can be."""
    return _ESCAPED.sub(_unescaped, field) if b"\\" in field else field


def _unescaped(found: Match[bytes]) -> bytes:
    return _ESCAPES.get(found[1], found[0])


def task_id(name: bytes, attempt: int) -> bytes:
    """What an agent calls a task. Never begins with `#`, so that no report looks like a comment."""
    encoded = escape(b"%s/%d" % (name, attempt))
    return b"\\" + encoded if encoded.startswith(b"#") else encoded


def key_of(encoded: bytes) -> Key | None:
    """The task and the attempt that an ID names; None if it names none."""
    name, _, attempt = unescape(encoded).rpartition(b"/")
    if not 0 < len(name) <= NAME_BYTES_MAX or not attempt.isdigit() or len(attempt) > _DIGITS_MAX:
        return None
    return name, int(attempt)


def task_line(name: bytes, attempt: int, lane: bytes, payload: bytes) -> bytes:
    """A task, for an agent. One without a payload is its name."""
    fields = (task_id(name, attempt), escape(lane), escape(payload or name))
    return b"\t".join(fields) + b"\n"


# What an agent says.


class Hungry(Struct, frozen=True):
    """It wants the next task."""


class Comment(Struct, frozen=True):
    """It says how it goes, to people."""

    text: bytes


class Report(Struct, frozen=True):
    """It is done with a task, one way or the other."""

    key: Key
    outcome: Outcome
    #: The result, if it is DONE.
    detail: bytes = b""
    #: What it says to people: why, if it is not DONE.
    text: bytes = b""
    #: Of RETRY_AT: when, by the wall clock; or, if `is_from_now`, how long from now.
    retry_ns: int = 0
    is_from_now: bool = False


class MalformedLine(Struct, frozen=True):
    """It says something that makes no sense."""

    reason: str
    #: The task that it seems to be about.
    key: Key | None = None


AgentMessage: TypeAlias = Hungry | Comment | Report | MalformedLine


def decode(line: bytes) -> AgentMessage:
    """What a line means, without its newline. Never raises."""
    if line.rstrip() == HUNGRY:
        return Hungry()
    if line.startswith(b"#") or not line.strip():
        return Comment(line[1:].strip())
    encoded, *fields = line.split(b"\t", 2)
    key = key_of(encoded)
    if key is None:
        return MalformedLine(f"{_excerpt(line)} is neither a report nor a comment")
    if len(fields) < 2:  # noqa: PLR2004  # the detail and the status
        return MalformedLine(
            "the agent's report is not ID, DETAIL and STATUS, with a tab between", key
        )
    return _report(key, *fields)


def _report(key: Key, detail: bytes, said: bytes) -> Report | MalformedLine:
    status, text = _first_word(said)
    outcome = STATUSES.get(status)
    if outcome is None:
        return MalformedLine(f"the agent reported {_excerpt(status)}, which is no status", key)
    if outcome is not Outcome.RETRY_AT:
        return Report(key, outcome, unescape(detail), unescape(text))
    when, text = _first_word(text)
    retry_ns = _seconds_ns(when.removeprefix(b"+"))
    if retry_ns is None:
        return MalformedLine(f"the agent reported retryat {_excerpt(when)}, which is no time", key)
    what = (unescape(detail), unescape(text))
    return Report(key, outcome, *what, retry_ns, is_from_now=when.startswith(b"+"))


def _first_word(text: bytes) -> tuple[bytes, bytes]:
    """The word, and the rest."""
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
    """Bytes in, whole lines out, in bounded memory whatever comes."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._pending = bytearray()
        #: There was too long a line. Nothing is kept of it, nor of what comes after it.
        self.is_overfull = False

    def add(self, chunk: bytes) -> list[bytes]:
        """The lines that are whole now, without their ends."""
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


# The machine of an agent.


class AgentState(IntEnum):
    """What an agent is about."""

    LARVA = 0  #: started, and has not asked for anything yet
    STUFFING = 1  #: being fed
    FINISHING = 2  #: there is nothing more for it, and it has not reported on all that it holds
    IDLE = 3  #: there is nothing for it, and it holds nothing
    LEAVING = 4  #: told to finish


class AgentCause(IntEnum):
    """Why an agent's state changes."""

    ASKED = 0  #: it said that it is hungry
    FED = 1
    RAN_OUT = 2  #: there is nothing more for it, and it holds tasks
    RAN_DRY = 3  #: there is nothing more for it, and it holds none
    DISMISSED = 4


LARVA, STUFFING, FINISHING, IDLE, LEAVING = AgentState
ASKED, FED, RAN_OUT, RAN_DRY, DISMISSED = AgentCause

#: An agent may ask at any time: a program says what it likes.
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
    """What was said between a host and one agent, and what can be said next.

    Hunger is counted: each `#hungry` is good for one task, also one that comes much later. It can't
    be saved up beyond what an agent may hold at once, which is `overfeed` more than one.
    """

    def __init__(self, overfeed: int = 0) -> None:
        #: Tasks that it may hold beyond the one in hand. May change while it lives.
        self.overfeed = overfeed
        self._hunger = 0
        self._lines = Lines()
        self.state = LARVA
        #: The tasks that it was given and has not reported on, the oldest first.
        self.held: dict[Key, None] = {}

    @property
    def is_overfull(self) -> bool:
        """It wrote more in one line than any line has. Nothing that it says is heard any more."""
        return self._lines.is_overfull

    def can_eat(self) -> bool:
        """It has asked for a task, and may hold one more."""
        return self._hunger > 0 and len(self.held) <= self.overfeed and self.state is not LEAVING

    def receive(self, chunk: bytes) -> list[AgentMessage]:
        """What it said, line by line. A last line without an end is never heard."""
        return [self._take(decode(line)) for line in self._lines.add(chunk)]

    def _take(self, heard: AgentMessage) -> AgentMessage:
        if isinstance(heard, Hungry):
            self._hunger = min(self._hunger + 1, 1 + self.overfeed)
            self._move(ASKED)
        elif isinstance(heard, Report) and heard.key not in self.held:
            name = shown(heard.key[0])
            return MalformedLine(
                f"it reported on {name!r}, attempt {heard.key[1]}, which it has not"
            )
        elif isinstance(heard, Report):
            del self.held[heard.key]
        elif isinstance(heard, MalformedLine) and heard.key in self.held:
            # Whatever it meant, it has done with the task; nobody else would ever report on it.
            del self.held[heard.key]
            return Report(heard.key, Outcome.FAILED, text=heard.reason.encode())
        return heard

    def feed(self, key: Key, lane: bytes, payload: bytes) -> bytes:
        """Give it a task; only if it `can_eat`. The line to send."""
        self._move(FED)
        self._hunger -= 1
        self.held[key] = None
        return task_line(*key, lane, payload)

    def run_out(self) -> bytes:
        """There is nothing more for it now. What to send, if it is to be told."""
        if self.held:
            if self.state is STUFFING:
                self._move(RAN_OUT)
            return b""
        if self.state not in (STUFFING, FINISHING):
            return b""
        self._move(RAN_DRY)
        return IDLE_LINE

    def dismiss(self) -> bytes:
        """Tell it to finish and exit. What to send; its input ends after that."""
        if self.state is LEAVING:
            return b""
        self._move(DISMISSED)
        return LAST_LINE

    def _move(self, cause: AgentCause) -> None:
        target = AGENT_TRANSITIONS[self.state].get(cause)
        if target is None:
            raise IllegalTransition(f"an agent that is {self.state.name} can't be {cause.name}")
        self.state = target
