"""The frames between a worker and its Python child processes.

A frame is its length and that many bytes: a `CallFrame` to the child, a `ResultFrame` back. Between
them a child may send notices of one byte. The first frame is empty: the child is ready. A long
frame is sent in several packets. Knows no sockets.
"""

import struct
from typing import Final

from msgspec import Struct, msgpack

from taskyard.calls.inputs import Input
from taskyard.core.events import Outcome
from taskyard.core.runs import Run

_LENGTH: Final = struct.Struct("<I")

READY: Final = _LENGTH.pack(0)

#: The call waits for other tasks and gives its slots back, and needs them again. The worker replies
#: to the second one through a pipe, because calls may be queued in the socket.
WAIT: Final = b"w"
RESUME: Final = b"r"

#: The longest packet. Longer packets would need more memory of the kernel in one piece.
PACKET_BYTES_MAX: Final = 32 << 10


class CallFrame(Struct, array_like=True, gc=False):
    """A call of a task."""

    name: bytes
    attempt: int
    payload: bytes
    #: b"": none.
    campaign: bytes = b""
    #: Environment variables of this call.
    env: dict[str, str] = {}
    #: The results of other tasks that it needs.
    inputs: tuple[Input, ...] = ()


class ResultFrame(Struct, array_like=True, gc=False):
    """The result of a call."""

    outcome: Outcome
    #: The result, or the reason.
    text: bytes
    #: A last line for the output.
    output_end: bytes = b""
    run: Run | None = None
    #: The call has printed, and its output is in the pipe.
    printed: bool = False


_encode: Final = msgpack.Encoder().encode
decode_call: Final = msgpack.Decoder(CallFrame).decode

#: Raises `DecodeError` for a frame that no child sends.
decode_result: Final = msgpack.Decoder(ResultFrame).decode


class FrameBuffer:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def add(self, received: bytes) -> list[bytes]:
        """Add bytes. Return the frames that are complete now, without their lengths."""
        self._pending += received
        frames = []
        while len(self._pending) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._pending)[0]
            if len(self._pending) < end:
                break
            frames.append(bytes(self._pending[_LENGTH.size : end]))
            del self._pending[:end]
        return frames

    def bytes_pending(self) -> int:
        return len(self._pending)


def pack(frame: CallFrame | ResultFrame | bytes) -> bytes:
    """Return a frame or a notice with its length."""
    body = frame if isinstance(frame, bytes) else _encode(frame)
    return _LENGTH.pack(len(body)) + body


def key_of_packet(packet: bytes) -> tuple[bytes, int]:
    """Return the name and the attempt of a call whose frame is one packet."""
    call = decode_call(packet[_LENGTH.size :])
    return call.name, call.attempt
