"""WMP's messages: frames to values and back, for managers, workers and relays.

    [path…, "", "WMP01", command, headers, payload…]

`path` is the route back to a worker: the identity of each relay in between, nearest first. The
command is one byte. The headers are one JSON object, with a type for each command, so that they are
checked in one place. Unknown keys are ignored. Decoding returns a value or raises Malformed. Knows
nothing of ready workers, leases or routing.
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

#: Relays between a worker and its manager. More mean a loop.
PATH_MAX: Final = 8

#: A heartbeat lists the tasks of a worker: room for some thousands. Any content of this size is
#: checked in a few milliseconds.
HEADER_BYTES_MAX: Final = 256 << 10

#: The headers here are three deep (an object, a list, a pair). This leaves room for extensions, and
#: protects the stack of later readers.
HEADER_DEPTH_MAX: Final = 16

#: As long as a ZeroMQ identity, which a worker's id replaces.
WORKER_BYTES_MAX: Final = 255

#: More slots than one worker can have.
SLOTS_MAX: Final = 100_000

#: The worker chooses the id of a lock, but the manager repeats it.
REQUEST_CHARACTERS_MAX: Final = 255

#: A delimiter, a version, a command and headers.
_FIXED_FRAMES: Final = 4

#: A message whose headers are missing.
_NO_HEADERS_FRAMES: Final = 3

#: The distance from the delimiter to the headers.
HEADERS_AFTER: Final = 3


#: Codes in a manager's BYE: another process has the worker's id, or got it for good.
NAME_HELD: Final = "name-held"
NAME_LOST: Final = "name-lost"
FORBIDDEN: Final = "forbidden"


class Side(Enum):
    """The sender of a message."""

    WORKER = "worker"
    MANAGER = "manager"


Number: TypeAlias = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
LockId: TypeAlias = (
    Annotated[int, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
    | Annotated[str, Meta(max_length=REQUEST_CHARACTERS_MAX)]
)
Services: TypeAlias = Annotated[list[Text], Meta(min_length=1, max_length=SERVICES_MAX)]

#: The numbers of upstreams that relays have added on a message's way down.
Back: TypeAlias = Annotated[list[Number], Meta(max_length=PATH_MAX)]


class Ready(Struct, omit_defaults=True):
    """Worker: it has free slots. Without `slots`: it requests one task."""

    worker: Text
    slots: Annotated[int, Meta(ge=1, le=SLOTS_MAX)] | None = None
    services: Services | None = None
    #: Distinguishes this process from other processes of the same id.
    incarnation: Number = 0
    #: A supervisor saw all processes of its id end, from this incarnation on. 0: unknown.
    replaces: Number = 0
    #: The interval of its PINGs. 0: it does not promise any.
    heartbeat_ms: Number = 0
    #: The worker forwards tasks to another broker, and its name for that broker.
    forwards: bool = False
    forwards_to: Text | None = None


class Wake(Struct, omit_defaults=True):
    """Manager: there are tasks to request."""

    service: Text
    #: The manager that sends this, as in all its messages but `Take`.
    manager: str | None = None
    back: Back | None = None


class Give(Struct, omit_defaults=True):
    """Worker: it has locked a slot, and requests a task."""

    worker: Text
    request: LockId
    services: Services | None = None
    back: Back | None = None
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None
    #: The worker forwards tasks to another broker, and needs the time of their submission.
    forwards: bool = False


class Take(Struct, omit_defaults=True):
    """Manager: run this task."""

    request: LockId
    task: Text
    attempt: Number
    service: Text
    lease_ms: Number
    #: The owner of the task. Repeated in all reports on it.
    manager: str | None = None
    #: How long it may run. The worker enforces it. 0: no limit.
    time_limit_ms: Number = 0
    #: Slots that it takes in the worker.
    slots: Annotated[int, Meta(ge=1, le=SLOTS_MAX)] = 1
    back: Back | None = None
    #: When it was submitted, for workers that forward. 0: unknown.
    submitted_ns: Number = 0


class No(Struct, omit_defaults=True):
    """Manager: there is no task, unlock the slot."""

    request: LockId
    manager: str | None = None
    back: Back | None = None


class Done(Struct, omit_defaults=True):
    """Worker: the outcome of a task."""

    worker: Text
    task: Text
    attempt: Number
    status: Literal["ok", "error", "refused", "cancelled"]
    manager: str | None = None
    back: Back | None = None
    #: Length of the result before the worker truncated it. 0: the payload is complete.
    bytes_total: Number = 0
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None


class Status(Struct, omit_defaults=True):
    """Worker: the progress of a task."""

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
    """Manager: stop this task."""

    task: Text
    attempt: Number
    manager: str | None = None
    back: Back | None = None
    #: The task has ended. Otherwise another worker may hold it, or the manager does not send this.
    ended: bool = False


class _WorkerHeartbeat(Struct, omit_defaults=True):
    worker: Text
    #: Tasks and attempts that it holds for this manager. None: unknown.
    held: list[tuple[Text, Number]] | None = None
    #: The interval of its heartbeats. 0: it does not promise any.
    heartbeat_ms: Number = 0
    manager: str | None = None
    back: Back | None = None
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None
    #: Rises with each PING and PONG of this process. 0: none.
    number: Number = 0
    #: It uses the interval of the manager's last PING or PONG.
    follows: bool = False


class WorkerPing(_WorkerHeartbeat):
    """Worker: a heartbeat that wants a reply."""


class WorkerPong(_WorkerHeartbeat):
    """Worker: a heartbeat as a reply."""


class _ManagerHeartbeat(Struct, omit_defaults=True):
    worker: Text
    #: False: the manager has no READY of this worker.
    ready: bool = True
    manager: str | None = None
    back: Back | None = None
    #: The interval of PINGs to use from now on. 0: as before.
    heartbeat_ms: Number = 0


class ManagerPing(_ManagerHeartbeat):
    """Manager: a request for a heartbeat."""


class ManagerPong(_ManagerHeartbeat):
    """Manager: the reply to a PING."""


class WorkerBye(Struct, omit_defaults=True):
    """Worker: it exits and returns its tasks."""

    worker: Text
    reason: str = ""
    #: The process that sends it, as in its READY.
    incarnation: Number | None = None


class ManagerBye(Struct, omit_defaults=True):
    """Manager: it has no more tasks for this worker."""

    #: Empty: the worker has sent no id.
    worker: str = ""
    reason: str = ""
    manager: str | None = None
    back: Back | None = None
    #: The code of a refusal. NAME_HELD is temporary: send READY again. FORBIDDEN: the key does not
    #: allow the message.
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

#: All errors of the JSON decoder: too deep, too long a number, not UTF-8.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, ValueError)

#: A string, even if it is unterminated. Possessive: no byte is visited twice.
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


class RawMessage(NamedTuple):
    """A message with encoded headers."""

    #: The number of frames in its path. The delimiter is next.
    path_length: int
    command: bytes
    headers: bytes


def split_frames(frames: Sequence[bytes], sender: Side) -> RawMessage:
    """Split a message of a worker or a manager into its parts. Raise Malformed."""
    try:
        at = frames.index(b"", 0, PATH_MAX + 1)
    except ValueError:
        raise Malformed(f"no delimiter after at most {PATH_MAX} hops") from None
    if len(frames) < at + _FIXED_FRAMES:
        raise Malformed("a message needs a delimiter, a version, a command and headers")
    version, command, headers = frames[at + 1 : at + _FIXED_FRAMES]
    if version != VERSION:
        raise Malformed("another version or another protocol")
    if command not in _DECODERS[sender]:
        raise Malformed(f"unknown command of a {sender.value}")
    _check_headers(headers)
    return RawMessage(at, command, headers)


def _check_headers(headers: bytes) -> None:
    """Raise Malformed for headers that would be dangerous to decode."""
    if len(headers) > HEADER_BYTES_MAX:
        raise Malformed(f"headers must have at most {HEADER_BYTES_MAX} bytes")
    try:
        headers.decode()
    except UnicodeDecodeError:
        raise Malformed("headers must be UTF-8") from None
    if _is_deep(headers):
        raise Malformed(f"headers must be at most {HEADER_DEPTH_MAX} deep")


def _is_deep(headers: bytes) -> bool:
    if headers.count(b"[") + headers.count(b"{") <= HEADER_DEPTH_MAX:
        return False  # the usual case
    steps = _STRINGS.sub(b"", headers).translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > HEADER_DEPTH_MAX


def decode(frames: Sequence[bytes], sender: Side) -> tuple[tuple[bytes, ...], Any, bytes]:
    """Return the path, the decoded headers and the payload. Raise Malformed."""
    at, command, headers = split_frames(frames, sender)
    try:
        message = _DECODERS[sender][command].decode(headers)
    except _DECODE_ERRORS as error:
        raise Malformed(f"invalid headers: {error}") from error
    return tuple(frames[:at]), message, _payload(frames[at + _FIXED_FRAMES :])


def is_empty_ready(frames: Sequence[bytes]) -> bool:
    """Return whether a message is a READY without headers, as in the draft.

    The frame of the headers may be missing as well.
    """
    is_short = [*frames[-_NO_HEADERS_FRAMES:]] == [b"", VERSION, READY]
    try:
        _, command, headers = split_frames([*frames, b""] if is_short else frames, Side.WORKER)
    except Malformed:
        return False
    return command == READY and b"".join(headers.split()) in (b"", b"{}")


def _payload(frames: Sequence[bytes]) -> bytes:
    """Return one frame as it is, and several as a MessagePack array."""
    if len(frames) > 1:
        return msgspec.msgpack.encode(list(frames))
    return frames[0] if frames else b""


def encode(
    path: Sequence[bytes], message: FromWorker | FromManager, payload: bytes | None = None
) -> list[bytes]:
    """Encode a message. Without a payload it has no frame for it."""
    frames = [*path, b"", VERSION, _BYTES_OF[type(message)], _encode(message)]
    return frames if payload is None else [*frames, payload]


def encoded_size(message: FromWorker | FromManager) -> int:
    """Return the size of the encoded headers."""
    return len(_encode(message))


# Headers that relays forward.


def decode_raw_headers(headers: bytes) -> dict[str, Raw]:
    """Return all keys, each with its encoded value. Raise Malformed."""
    try:
        return _raw_decoder.decode(headers)
    except _DECODE_ERRORS as error:
        raise Malformed(f"invalid headers: {error}") from error


def encode_raw_headers(headers: dict[str, Raw]) -> bytes:
    return _encode(headers)


_backs = msgspec.json.Decoder(Back)


def back_of(headers: dict[str, Raw]) -> list[int]:
    """Return the numbers of upstreams in the headers. Raise Malformed."""
    try:
        return _backs.decode(headers["back"]) if "back" in headers else []
    except _DECODE_ERRORS as error:
        raise Malformed(f"invalid `back`: {error}") from error


def set_back(headers: dict[str, Raw], back: list[int]) -> None:
    if back:
        headers["back"] = Raw(_encode(back))
    else:
        headers.pop("back", None)


# Names: bytes in the core, text in headers.

#: Precedes a name that is not UTF-8 or begins with it. Then each character is one byte.
_BYTEWISE: Final = "\0"


def text_of(name: bytes) -> str:
    """Return a name as text. `name_of` reverses it for any bytes."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return _BYTEWISE + name.decode("latin-1")
    return _BYTEWISE + name.decode("latin-1") if text.startswith(_BYTEWISE) else text


def name_of(text: str, what: str = "name", bytes_max: int = NAME_BYTES_MAX) -> bytes:
    """Return the name in a header as bytes. Raise Malformed."""
    try:
        name = text[1:].encode("latin-1") if text.startswith(_BYTEWISE) else text.encode()
    except UnicodeEncodeError:
        raise Malformed(f"a {what} has characters that are not bytes") from None
    if not 0 < len(name) <= bytes_max:
        raise Malformed(f"a {what} must have 1 to {bytes_max} bytes")
    return name
