"""The frames between a worker and its Python child processes.

A frame is its length and that many bytes. A call has the task's name, attempt, campaign,
environment variables, inputs and payload. A result has an outcome byte with a bit for output, the
run's measurements, the text, and a last line for the output. Between them a child may send notices
of one byte. Its first frame is empty: it is ready. A long frame is sent in several packets. Knows
no sockets.
"""

from collections.abc import Mapping
from struct import Struct
from typing import Final

import msgspec

from taskyard.core.events import Outcome
from taskyard.core.runs import Run
from taskyard.wire.inputs import Input

_LENGTH = Struct("<I")
#: Length of the rest, attempt, lengths of the name, the campaign, the variables and the inputs.
_CALL = Struct("<IQHHHI")
_CALL_REST = Struct("<QHHHI")
#: Length of the rest, outcome, start, duration, CPU time, peak memory, length of the text.
_RESULT = Struct("<IBQQQQI")
_RESULT_REST = Struct("<BQQQQI")

_inputs = msgspec.msgpack.Decoder(list[Input])

READY = _LENGTH.pack(0)

#: The call waits for other tasks and gives its slots back, and needs them again. The worker replies
#: to the second one through a pipe, because calls may be queued in the socket.
WAIT: Final = b"w"
RESUME: Final = b"r"

#: The longest packet. Longer ones would need more memory of the kernel in one piece.
PACKET_BYTES_MAX: Final = 32 << 10

#: Of the outcome byte: the call has printed, and its output is in the pipe.
_PRINTED: Final = 0x80


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


def pack_notice(kind: bytes) -> bytes:
    """Return the frame of `WAIT` or `RESUME`."""
    return _LENGTH.pack(len(kind)) + kind


def pack_call(
    name: bytes,
    attempt: int,
    payload: bytes,
    campaign: bytes = b"",
    env: Mapping[str, str] | None = None,
    *inputs: Input,
) -> bytes:
    variables = "\0".join([f"{key}={value}" for key, value in (env or {}).items()]).encode()
    results = msgspec.msgpack.encode(inputs) if inputs else b""
    lengths = (len(name), len(campaign), len(variables), len(results))
    length = _CALL_REST.size + sum(lengths) + len(payload)
    return _CALL.pack(length, attempt, *lengths) + name + campaign + variables + results + payload


def unpack_call(
    frame: bytes,
) -> tuple[bytes, int, bytes, bytes, dict[str, str], *tuple[Input, ...]]:
    """Return the name, the attempt, the payload, the campaign, the variables and the inputs."""
    attempt, *lengths = _CALL_REST.unpack_from(frame)
    parts, start = [], _CALL_REST.size
    for length in lengths:
        parts.append(frame[start : start + length])
        start += length
    name, campaign, variables, results = parts
    pairs = [one.partition("=") for one in variables.decode().split("\0") if one]
    env = {key: value for key, _, value in pairs}
    inputs = _inputs.decode(results) if results else ()
    return name, attempt, frame[start:], campaign, env, *inputs


def key_of_packet(packet: bytes) -> tuple[bytes, int]:
    """Return the name and the attempt of a call whose frame is one packet."""
    name, attempt, *_ = unpack_call(packet[_LENGTH.size :])
    return name, attempt


def pack_result(
    outcome: Outcome,
    text: bytes,
    output_end: bytes = b"",
    run: Run | None = None,
    *,
    printed: bool = False,
) -> bytes:
    length = _RESULT_REST.size + len(text) + len(output_end)
    measured = _NOT_MEASURED
    if run is not None:
        measured = (run.started_ns, run.run_ns, run.cpu_ns, run.memory_max_bytes)
    kind = outcome | _PRINTED if printed else outcome
    return _RESULT.pack(length, kind, *measured, len(text)) + text + output_end


def unpack_result(frame: bytes) -> tuple[Outcome, bytes, bytes, Run | None, bool]:
    """Decode a result, and whether the call has printed. Raises `ValueError` for a frame that no
    child sends."""
    if len(frame) < _RESULT_REST.size:
        raise ValueError("result frame too short")
    outcome, *measured, text_length = _RESULT_REST.unpack_from(frame)
    started_ns, run_ns, cpu_ns, peak = measured
    run = Run(started_ns, run_ns, None, cpu_ns, peak) if started_ns else None
    text, end = _RESULT_REST.size, _RESULT_REST.size + text_length
    kind, printed = Outcome(outcome & ~_PRINTED), bool(outcome & _PRINTED)
    return kind, frame[text:end], frame[end:], run, printed


_NOT_MEASURED = (0, 0, 0, 0)
