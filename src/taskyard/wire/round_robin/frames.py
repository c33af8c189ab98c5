"""Round-robin's messages, frame by frame, and what a task keeps of one. No sockets, no clock.

A message is `[address…, "", "LMQv100", command, id, argument…, "", address…]`. Those on top are
where it still has to go, nearest first; those at the bottom are where it came from, nearest last.
An address is never empty, so the first empty frame ends the ones and the last empty frame begins
the others, whatever the arguments are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Malformed

#: The dialect's name, in facts and terms.
DIALECT: Final = b"round-robin"

VERSION: Final = b"LMQv100"

# Commands.
PING: Final = b"\x01"
PONG: Final = b"\x02"
EXEC: Final = b"\x03"
TRACKEXEC: Final = b"\x04"
TRACKADDRESS: Final = b"\x05"
RESPONSE: Final = b"\x06"
COMMANDS: Final = (PING, PONG, EXEC, TRACKEXEC, TRACKADDRESS, RESPONSE)

# Keys: the first argument of EXEC and TRACKEXEC. A worker's own, to the server:
INCREMENT: Final = b"\x07"
REGISTER: Final = b"\x08"
DEREGISTER: Final = b"\x09"
ONGOING: Final = b"ongoing"

# And what our workers do.
PING_KEY: Final = b"\x01"
STREAM: Final = b"\x0a"

#: Where a server usually is.
ENDPOINT: Final = "tcp://127.0.0.1:6714"

#: The id of a PING of the server to a worker that has not registered since the server started. Ours
#: registers anew then. To others it is an id like any.
RESTARTED: Final = b"RESTARTED"

#: An argument of a RESPONSE that begins so says what went wrong.
ERROR: Final = b"ERROR "

#: ZeroMQ takes no longer names of peers; an id has one byte for its length in some LMQ programs.
ADDRESS_BYTES_MAX: Final = 255
ID_BYTES_MAX: Final = 255

#: The key of a message that has arguments besides: it is a word, and kept beside the payload.
KEY_BYTES_MAX: Final = 1024

#: A wire takes 64 frames. Whoever passes a message on adds an address to it, and so does whoever
#: receives it: the server takes messages that are not too long for a worker after that.
FRAMES_MAX: Final = 60
PEER_FRAMES_MAX: Final = 64

#: Workers are handed all that they have slots for, and ZeroMQ keeps 1,000 messages for a peer that
#: does not read.
SLOTS_MAX: Final = 1000

#: Empty, version, command, id, empty.
_FRAMES_MIN: Final = 5

#: Names of tasks up to this length are ids as they are.
_NAME_BYTES_MAX: Final = 200


class Settings(Struct, frozen=True):
    """What a broker can be told about round-robin."""

    #: How often a worker that says nothing is asked whether it is there.
    heartbeat_ns: int = 5 * SECOND_NS
    #: The silence after which it has left the table.
    expire_ns: int = 60 * SECOND_NS
    #: What the workers do, and what the clients' messages are.
    services: tuple[bytes, ...] = (b"default",)
    #: Messages of clients that may be unfinished at once; further ones are refused.
    queue_max: int = 100_000


class Message(Struct, frozen=True):
    command: bytes
    id: bytes
    arguments: Sequence[bytes] = ()
    #: Where it still has to go, nearest first.
    top: Sequence[bytes] = ()
    #: Where it came from, nearest last.
    bottom: Sequence[bytes] = ()

    def frames(self) -> list[bytes]:
        body = [b"", VERSION, self.command, self.id, *self.arguments, b""]
        return [*self.top, *body, *self.bottom]

    def way_back(self) -> tuple[bytes, ...]:
        """The addresses on top of an answer."""
        return tuple(reversed(self.bottom))


def parse(frames: Sequence[bytes], frames_max: int = FRAMES_MAX) -> Message:
    """What the frames say. Raises `Malformed`, whatever they are."""
    if not _FRAMES_MIN <= len(frames) <= frames_max:
        raise Malformed(f"a message has {_FRAMES_MIN} to {frames_max} frames, not {len(frames)}")
    empty = [place for place, frame in enumerate(frames) if not frame]
    if not empty or empty[-1] < empty[0] + _FRAMES_MIN - 1:
        raise Malformed("the command, its id and its arguments stand between two empty frames")
    first, last = empty[0], empty[-1]
    version, command, number = frames[first + 1 : first + 4]
    if version != VERSION:
        raise Malformed("the version is not LMQv100")
    if command not in COMMANDS:
        raise Malformed("there is no such command")
    if not 0 < len(number) <= ID_BYTES_MAX:
        raise Malformed(f"an id has 1 to {ID_BYTES_MAX} bytes")
    top, bottom = frames[:first], frames[last + 1 :]
    if max(map(len, [*top, *bottom]), default=0) > ADDRESS_BYTES_MAX:
        raise Malformed(f"an address has at most {ADDRESS_BYTES_MAX} bytes")
    return Message(command, number, tuple(frames[first + 4 : last]), tuple(top), tuple(bottom))


def parse_at_peer(frames: Sequence[bytes]) -> Message:
    """The same, at a peer: what came with the sender's name in front has it at the bottom."""
    return parse([*frames[1:], frames[0]], PEER_FRAMES_MAX)


def error(text: str) -> bytes:
    """The argument of a RESPONSE that says what went wrong."""
    return ERROR + text.encode()


def failure(arguments: Sequence[bytes]) -> str:
    """What went wrong, by the arguments of a RESPONSE; empty: nothing did."""
    if not arguments or not arguments[0].startswith(ERROR):
        return ""
    return arguments[0][len(ERROR) :].decode(errors="backslashreplace")


def pack(arguments: Sequence[bytes]) -> bytes:
    """Arguments as other dialects see them: one as it is, several as a MessagePack array."""
    if len(arguments) > 1:
        return msgspec.msgpack.encode([*arguments])
    return arguments[0] if arguments else b""


class Envelope(Struct, array_like=True, frozen=True):
    """What a task keeps of its message, besides the payload. It is journalled: a new field is a new
    version."""

    command: bytes
    id: bytes
    key: bytes
    #: How many arguments followed the key, and are the payload. 0: the key is.
    arguments: int
    #: Where the answer goes, nearest first.
    way_back: tuple[bytes, ...]
    version: int = 1


_envelopes: Final = msgspec.msgpack.Decoder(Envelope)
_arguments: Final = msgspec.msgpack.Decoder(tuple[bytes, ...])


def envelop(message: Message, sender: bytes) -> tuple[bytes, bytes]:
    """The payload of a client's message, and what is kept beside it."""
    key, *arguments = message.arguments
    payload = pack(arguments) if arguments else key
    way_back = (sender, *message.way_back())
    kept = key if arguments else b""
    envelope = Envelope(message.command, message.id, kept, len(arguments), way_back)
    return payload, msgspec.msgpack.encode(envelope)


def open_envelope(envelope: bytes) -> Envelope | None:
    """None: another dialect's, or of another version."""
    try:
        kept = _envelopes.decode(envelope)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return kept if kept.version == 1 else None


def unfold(payload: bytes, kept: Envelope) -> Message:
    """The very message that became a task."""
    arguments: tuple[bytes, ...] = (payload,)
    if kept.arguments > 1:
        # What is no array was not packed here, whatever its envelope says.
        with suppress(msgspec.MsgspecError, RecursionError, ValueError):
            arguments = _arguments.decode(payload)
    if kept.arguments:
        arguments = (kept.key, *arguments)
    return Message(kept.command, kept.id, arguments, (), tuple(reversed(kept.way_back)))


def foreign_id(name: bytes, attempt: int) -> bytes:
    """The id of a task that came in by another dialect: the same after a restart."""
    short = name if len(name) <= _NAME_BYTES_MAX else hashlib.sha256(name).hexdigest().encode()
    return b"%d/%s" % (attempt, short)
