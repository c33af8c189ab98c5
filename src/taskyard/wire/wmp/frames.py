"""WMP's messages: frames to values and values to frames, for managers, workers and relays.

    [path…, "", "WMP01", command, headers, payload…]

`path` is the way back to a worker, one identity for each relay in between, the nearest first. The
command is one byte; the headers are one JSON object, with a type for each command here, so that a
header that is missing or of a wrong kind is met in one place. Keys that are not known are passed
over. Decoding returns a value or raises Malformed, whatever the bytes are. Knows nothing of who is
ready, what is leased, or where a message goes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from taskyard.core.limits import NAME_BYTES_MAX, NUMBER_MAX, SERVICES_MAX
from taskyard.errors import Malformed

VERSION: Final = b"WMP01"

#: Relays between a worker and its manager. More are a loop.
PATH_MAX: Final = 8

#: A heartbeat lists what a worker holds: room for some thousand tasks. Whatever is in it, it is
#: looked at in a few milliseconds.
HEADER_BYTES_MAX: Final = 256 << 10

#: The headers of this page are three deep (an object, a list, a pair). Room for what others add,
#: and none for what would exhaust the stack of whoever reads it next.
HEADER_DEPTH_MAX: Final = 16

#: As long as a ZeroMQ identity, which a worker's id stands in for.
WORKER_BYTES_MAX: Final = 255

#: A worker that takes more at once is many workers, or a mistake.
SLOTS_MAX: Final = 100_000

#: A lock's id is the worker's own affair, but the manager says it again.
REQUEST_CHARACTERS_MAX: Final = 255

#: A delimiter, a version, a command and headers.
_FIXED_FRAMES: Final = 4

#: How far behind the delimiter the headers are.
HEADERS_AFTER: Final = 3


#: Codes in a manager's BYE: another process has the worker's id; it was given to another for good.
NAME_HELD: Final = "name-held"
NAME_LOST: Final = "name-lost"


class Side(Enum):
    """Who sends a message."""

    WORKER = "worker"
    MANAGER = "manager"


Number: TypeAlias = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
LockId: TypeAlias = (
    Annotated[int, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
    | Annotated[str, Meta(max_length=REQUEST_CHARACTERS_MAX)]
)
Services: TypeAlias = Annotated[list[Text], Meta(min_length=1, max_length=SERVICES_MAX)]

#: The numbers of upstreams, as relays have noted them on a message's way down.
Back: TypeAlias = Annotated[list[Number], Meta(max_length=PATH_MAX)]


class Ready(Struct, omit_defaults=True):
    """Worker: it has free slots."""

    worker: Text
    slots: Annotated[int, Meta(ge=1, le=SLOTS_MAX)] = 1
    services: Services | None = None
    #: Tells this process from others of the same id.
    incarnation: Number = 0
    #: Its supervisor saw the processes of its id end, from this incarnation on; 0: it does not say.
    replaces: Number = 0
    #: How often it sends PING; 0: it does not promise anything.
    heartbeat_ms: Number = 0


class Wake(Struct, omit_defaults=True):
    """Manager: there is work, ask for it."""

    service: Text
    #: The end node that this comes from, as in all that a manager sends but `Take`.
    manager: str | None = None
    back: Back | None = None


class Give(Struct, omit_defaults=True):
    """Worker: it has locked a slot, and asks for a task."""

    worker: Text
    request: LockId
    services: Services | None = None
    back: Back | None = None
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None


class Take(Struct, omit_defaults=True):
    """Manager: take this task."""

    request: LockId
    task: Text
    attempt: Number
    service: Text
    lease_ms: Number
    #: Whose task it is. Said again in all reports on it.
    manager: str | None = None
    #: How long it may run; the worker ends it. 0: as long as it takes.
    time_limit_ms: Number = 0
    #: Room that it takes in the worker.
    slots: Annotated[int, Meta(ge=1, le=SLOTS_MAX)] = 1
    back: Back | None = None


class No(Struct, omit_defaults=True):
    """Manager: there is nothing, unlock the slot."""

    request: LockId
    manager: str | None = None
    back: Back | None = None


class Done(Struct, omit_defaults=True):
    """Worker: what came of a task."""

    worker: Text
    task: Text
    attempt: Number
    status: Literal["ok", "error", "refused", "cancelled"]
    manager: str | None = None
    back: Back | None = None
    #: Length of the result before the worker cut it; 0: the payload is all of it.
    bytes_total: Number = 0
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None


class Status(Struct, omit_defaults=True):
    """Worker: how far it is with a task."""

    worker: Text
    task: Text
    attempt: Number
    percent: int | float | None = None
    text: str | None = None
    manager: str | None = None
    back: Back | None = None
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None


class Cancel(Struct, omit_defaults=True):
    """Manager: that task of yours is not wanted any more."""

    task: Text
    attempt: Number
    manager: str | None = None
    back: Back | None = None


class _WorkerHeartbeat(Struct, omit_defaults=True):
    worker: Text
    #: Tasks and attempts that it holds for this manager; None: it does not say.
    held: list[tuple[Text, Number]] | None = None
    #: How often it says so; 0: it does not promise anything.
    heartbeat_ms: Number = 0
    manager: str | None = None
    back: Back | None = None
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None
    #: Rises with each PING and PONG of this process; 0: it does not say.
    number: Number = 0


class WorkerPing(_WorkerHeartbeat):
    """Worker: it is alive; is the manager?"""


class WorkerPong(_WorkerHeartbeat):
    """Worker: it is alive, now that it is asked."""


class _ManagerHeartbeat(Struct, omit_defaults=True):
    worker: Text
    #: False: no READY of this worker is remembered here.
    ready: bool = True
    manager: str | None = None
    back: Back | None = None


class ManagerPing(_ManagerHeartbeat):
    """Manager: is the worker alive?"""


class ManagerPong(_ManagerHeartbeat):
    """Manager: it is alive, now that it is asked."""


class WorkerBye(Struct, omit_defaults=True):
    """Worker: it leaves; what it holds is given back."""

    worker: Text
    reason: str = ""
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None


class ManagerBye(Struct, omit_defaults=True):
    """Manager: it has no more work for this worker, ever."""

    worker: Text
    reason: str = ""
    manager: str | None = None
    back: Back | None = None
    #: Which refusal it is, where it is one. NAME_HELD is not for ever: send READY again.
    code: str = ""


FromWorker: TypeAlias = Ready | Give | Done | Status | WorkerPing | WorkerPong | WorkerBye
FromManager: TypeAlias = Wake | Take | No | Cancel | ManagerPing | ManagerPong | ManagerBye

READY, WAKE, GIVE, TAKE, NO, DONE, STATUS, CANCEL, PING, PONG, BYE = (
    bytes([number]) for number in range(0x01, 0x0C)
)

_COMMANDS_OF: Final[dict[Side, dict[bytes, type[Struct]]]] = {
    Side.WORKER: {
        READY: Ready,
        GIVE: Give,
        DONE: Done,
        STATUS: Status,
        PING: WorkerPing,
        PONG: WorkerPong,
        BYE: WorkerBye,
    },
    Side.MANAGER: {
        WAKE: Wake,
        TAKE: Take,
        NO: No,
        CANCEL: Cancel,
        PING: ManagerPing,
        PONG: ManagerPong,
        BYE: ManagerBye,
    },
}
_DECODERS: Final[dict[Side, dict[bytes, msgspec.json.Decoder[Any]]]] = {
    side: {command: msgspec.json.Decoder(kind) for command, kind in kinds.items()}
    for side, kinds in _COMMANDS_OF.items()
}
_BYTES_OF: Final = {
    kind: command for kinds in _COMMANDS_OF.values() for command, kind in kinds.items()
}
_encode = msgspec.json.Encoder().encode
_raw_decoder = msgspec.json.Decoder(dict[str, Raw])

#: What the JSON decoder raises, whatever it is fed: too deep, too long a number, not UTF-8.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, ValueError)

#: A string, also one that does not end: no byte is looked at twice, whatever comes.
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


class RawMessage(NamedTuple):
    """A message whose headers are not read yet."""

    #: How many frames its path has; the delimiter is next.
    path_length: int
    command: bytes
    headers: bytes


def split_frames(frames: Sequence[bytes], sender: Side) -> RawMessage:
    """The parts of a message that a worker or a manager sent. Raises Malformed."""
    try:
        at = frames.index(b"", 0, PATH_MAX + 1)
    except ValueError:
        raise Malformed(f"there is no delimiter after at most {PATH_MAX} hops") from None
    if len(frames) < at + _FIXED_FRAMES:
        raise Malformed("a message is a delimiter, a version, a command, headers and a payload")
    version, command, headers = frames[at + 1 : at + _FIXED_FRAMES]
    if version != VERSION:
        raise Malformed("it is of another version or another protocol")
    if command not in _DECODERS[sender]:
        raise Malformed(f"a {sender.value} sends no such command")
    _check_headers(headers)
    return RawMessage(at, command, headers)


def _check_headers(headers: bytes) -> None:
    """Whoever reads them need not be afraid of them."""
    if len(headers) > HEADER_BYTES_MAX:
        raise Malformed(f"headers have at most {HEADER_BYTES_MAX} bytes")
    try:
        headers.decode()
    except UnicodeDecodeError:
        raise Malformed("headers are UTF-8") from None
    if _is_deep(headers):
        raise Malformed(f"headers are at most {HEADER_DEPTH_MAX} deep")


def _is_deep(headers: bytes) -> bool:
    if headers.count(b"[") + headers.count(b"{") <= HEADER_DEPTH_MAX:
        return False  # nearly always
    steps = _STRINGS.sub(b"", headers).translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > HEADER_DEPTH_MAX


def decode(frames: Sequence[bytes], sender: Side) -> tuple[tuple[bytes, ...], Any, bytes]:
    """The path, the headers by their type, and the payload. Raises Malformed."""
    at, command, headers = split_frames(frames, sender)
    try:
        message = _DECODERS[sender][command].decode(headers)
    except _DECODE_ERRORS as error:
        raise Malformed(f"headers that can't be used: {error}") from error
    return tuple(frames[:at]), message, _payload(frames[at + _FIXED_FRAMES :])


def _payload(frames: Sequence[bytes]) -> bytes:
    """One frame is the payload; several are one as a MessagePack array."""
    if len(frames) > 1:
        return msgspec.msgpack.encode(list(frames))
    return frames[0] if frames else b""


def encode(
    path: Sequence[bytes], message: FromWorker | FromManager, payload: bytes | None = None
) -> list[bytes]:
    """A message's frames; without a payload it has no frame for one."""
    frames = [*path, b"", VERSION, _BYTES_OF[type(message)], _encode(message)]
    return frames if payload is None else [*frames, payload]


def encoded_size(message: FromWorker | FromManager) -> int:
    """How many bytes the headers would have."""
    return len(_encode(message))


# Headers that are handed on.


def decode_raw_headers(headers: bytes) -> dict[str, Raw]:
    """All keys, each with its value as it stands. Raises Malformed."""
    try:
        return _raw_decoder.decode(headers)
    except _DECODE_ERRORS as error:
        raise Malformed(f"headers that can't be read: {error}") from error


def encode_raw_headers(headers: dict[str, Raw]) -> bytes:
    return _encode(headers)


_backs = msgspec.json.Decoder(Back)


def back_of(headers: dict[str, Raw]) -> list[int]:
    """The numbers of upstreams that a message has noted. Raises Malformed."""
    try:
        return _backs.decode(headers["back"]) if "back" in headers else []
    except _DECODE_ERRORS as error:
        raise Malformed(f"a way back that can't be followed: {error}") from error


def set_back(headers: dict[str, Raw], back: list[int]) -> None:
    if back:
        headers["back"] = Raw(_encode(back))
    else:
        headers.pop("back", None)


# Names: bytes here, text there.

#: Stands before a name that is not UTF-8, or begins with it; what follows is a character a byte.
_BYTEWISE: Final = "\0"


def text_of(name: bytes) -> str:
    """A name as a header says it; `name_of` gives it back, whatever bytes it has."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return _BYTEWISE + name.decode("latin-1")
    return _BYTEWISE + name.decode("latin-1") if text.startswith(_BYTEWISE) else text


def name_of(text: str, what: str = "name", bytes_max: int = NAME_BYTES_MAX) -> bytes:
    """The name that a header says. Raises Malformed."""
    try:
        name = text[1:].encode("latin-1") if text.startswith(_BYTEWISE) else text.encode()
    except UnicodeEncodeError:
        raise Malformed(f"a {what} has characters that no bytes stand for") from None
    if not 0 < len(name) <= bytes_max:
        raise Malformed(f"a {what} has 1 to {bytes_max} bytes")
    return name
