"""TaskMsgs that differ only in their names: nearly all messages of plain peers.

An object for each task costs microseconds. Here the names are cut out of the bytes, by the guess
that all tasks have the fields of the first one. If the guess is right, the other fields need to be
decoded only once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A TaskMsg begins with the tag and the length of its name. Lengths above this one have two bytes.
_NAME_TAG: Final = bytes([pb.TaskMsg.NAME_FIELD_NUMBER << 3 | 2])
_LENGTH_MAX: Final = 127
_NAME_HEADS: Final = [_NAME_TAG + bytes([length]) for length in range(_LENGTH_MAX + 1)]
_NAME_HEAD_BYTES: Final = 2

#: In a QueryMsg, each TaskMsg follows a tag and its length.
TASK_TAG: Final = bytes([pb.QueryMsg.TASK_FIELD_NUMBER << 3 | 2])
_TASK_HEAD_BYTES: Final = 2


def split(encoded: list[bytes]) -> list[bytes] | None:
    """Return the names of TaskMsgs that are equal but for their names. None: decode each one."""
    first = encoded[0]
    rest = first[_NAME_HEAD_BYTES + first[1] :] if len(first) > _NAME_HEAD_BYTES else b""
    if not rest:
        return None
    end = -len(rest)
    names = [one[_NAME_HEAD_BYTES:end] for one in encoded]
    if b"" in names or max(map(len, names)) > _LENGTH_MAX:
        return None
    return names if [_NAME_HEADS[len(name)] + name + rest for name in names] == encoded else None


def split_run(body: bytes, at: int) -> tuple[bytes, list[bytes], int] | None:
    """Take apart the tasks of a QueryMsg from an offset on whose names have one length.

    Return the bytes after the name, which all have, the names, and the offset after these tasks.
    None: they differ.
    """
    start = at + _TASK_HEAD_BYTES + _NAME_HEAD_BYTES
    head = body[at:start]
    if len(head) < start - at or head[2:3] != _NAME_TAG:
        return None
    task_bytes, name_bytes = head[1], head[3]
    rest = body[start + name_bytes : at + _TASK_HEAD_BYTES + task_bytes]
    if not name_bytes or not rest or max(task_bytes, name_bytes) > _LENGTH_MAX:
        return None
    *names, last = body[start:].split(rest + head)
    names.append(last[:name_bytes])
    if not last.startswith(rest, name_bytes) or set(map(len, names)) != {name_bytes}:
        return None  # a name contains the bytes between two others
    return rest, names, at + len(names) * (_TASK_HEAD_BYTES + task_bytes)


def join(names: Sequence[bytes], rest: bytes) -> bytes | None:
    """Encode the tasks of a QueryMsg with these bytes after each name. None: one is too long."""
    lengths = set(map(len, names))
    if _NAME_HEAD_BYTES + max(lengths) + len(rest) > _LENGTH_MAX:
        return None
    heads = {length: _head(length, rest) for length in lengths}
    if len(heads) > 1:
        return b"".join([heads[len(name)] + name + rest for name in names])
    (head,) = heads.values()
    return head + (rest + head).join(names) + rest


def _head(name_bytes: int, rest: bytes) -> bytes:
    """Encode the bytes of a task before its name."""
    task_bytes = _NAME_HEAD_BYTES + name_bytes + len(rest)
    return b"%b%c%b" % (TASK_TAG, task_bytes, _NAME_HEADS[name_bytes])
