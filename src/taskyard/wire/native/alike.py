"""TaskMsgs that differ only in their names: nearly all messages of plain peers.

An object for each task costs microseconds. Here the names are cut out of the bytes, by the guess
that all tasks have the fields of the first one. Then they are encoded again. If that gives the same
bytes, the guess was right, and the other fields need to be decoded only once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A name begins with its tag and its length, by which it is found here. Longer lengths have two
#: bytes.
_TAG: Final = bytes([pb.TaskMsg.NAME_FIELD_NUMBER << 3 | 2])
_NAME_BYTES_MAX: Final = 127
_HEADS: Final = [_TAG + bytes([length]) for length in range(_NAME_BYTES_MAX + 1)]
_HEAD_BYTES: Final = 2


def split(encoded: list[bytes]) -> list[bytes] | None:
    """Return the names of TaskMsgs that are equal but for their names. None: decode each one."""
    first = encoded[0]
    rest = first[_HEAD_BYTES + first[1] :] if len(first) > _HEAD_BYTES else b""
    if not rest:
        return None
    end = -len(rest)
    names = [one[_HEAD_BYTES:end] for one in encoded]
    return names if b"" not in names and join(names, rest) == encoded else None


def join(names: Sequence[bytes], rest: bytes) -> list[bytes] | None:
    """Encode TaskMsgs with the same other fields. None: a name is too long for that."""
    try:
        return [_HEADS[len(name)] + name + rest for name in names]
    except IndexError:
        return None


def rest_of(origin: bytes, log: Sequence[bytes]) -> bytes:
    """Encode all but the name of a TaskMsg."""
    encoded = pb.TaskMsg(name=b"", origin=origin, log=log).SerializeToString()
    return encoded[_HEAD_BYTES:]
