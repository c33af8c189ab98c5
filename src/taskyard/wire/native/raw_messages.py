"""Native messages as bytes, not parsed yet: entries are counted, and alike tasks cut out.

A message of 30 MB can hold 30 million numbers or 15 million empty names: half a gigabyte in the
parser, and two as Python objects. Owns the limit of every repeated field. A large message is
counted before it is parsed, by tags and lengths only. For smaller messages the parsed columns are
measured before they are used. Invalid bytes are left to the parser. Runs of entries with equal
lengths, which task names mostly are, are counted at the speed of C.

TaskMsgs that differ only in their names are nearly all messages of plain peers, and an object for
each task costs microseconds. The names are cut out of the bytes, by the guess that all tasks have
the fields of the first. If the guess is right, the other fields are decoded only once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from msgspec import Struct

from taskyard.core.limits import (
    AFTER_A_MESSAGE_MAX,
    AFTER_MAX,
    REFUSED_TASKS_MAX,
    RETRIES_MAX,
    SERVICES_MAX,
    TASKS_PER_MESSAGE_MAX,
)
from taskyard.core.resources import RESOURCES_MAX
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message


#: Shorter messages are not counted before parsing: the parser takes at most 64 MB and 0.1 s for
#: them. Our own producers send longer messages only where payloads are long.
COUNTED_BYTES_MIN: Final = 4 << 20

#: The columns of shorter messages are not measured.
MEASURED_BYTES_MIN: Final = 64 << 10

#: LogMsgs of a task, which has few states.
LOGS_MAX: Final = 100

#: States in a scope. Each is needed only once.
STANDINGS_MAX: Final = 100

#: Fields of a large message that are not repeated, unknown, or numbers that are not packed. All
#: encoders pack numbers, so a message has few of these.
OTHERS_MAX: Final = 10_000

#: Messages of peers in one message of a relay, and peers that left or sent a heartbeat.
ENVELOPES_MAX: Final = 1_000
RELAYED_MAX: Final = 10_000

#: Limits of repeated fields, by full name without the package. A field that is not listed is a
#: column of tasks.
LIMITS: Final = {
    "Batch.after": AFTER_A_MESSAGE_MAX,
    "TaskMsg.pred": AFTER_MAX,
    "TaskMsg.succ": AFTER_MAX,
    "TaskMsg.log": LOGS_MAX,
    "Terms.Retry.delay_ns": RETRIES_MAX,
    "Terms.resources": RESOURCES_MAX,
    "WorkerMsg.resources": RESOURCES_MAX,
    "WorkerMsg.service": SERVICES_MAX,
    "ScopeMsg.standing": STANDINGS_MAX,
    "QueryMsg.refused": REFUSED_TASKS_MAX,
    "QueryMsg.envelope": ENVELOPES_MAX,
    "QueryMsg.gone": RELAYED_MAX,
}

_PACKAGE: Final = pb.DESCRIPTOR.package + "."

#: Wire types of protobuf.
_VARINT: Final = 0
_FIXED_64: Final = 1
_DELIMITED: Final = 2
_GROUP: Final = 3
_GROUP_END: Final = 4
_FIXED_32: Final = 5

_FIXED_BYTES: Final = {_FIXED_64: 8, _FIXED_32: 4}

#: A byte with the high bit is followed by another byte of that number.
_HIGH: Final = 0x80
_HIGH_BYTES: Final = bytes(range(_HIGH, 256))

#: Bytes of the longest number.
_VARINT_BYTES_MAX: Final = 10

#: The longest value that an outline copies. Names are not longer.
_SHORT_BYTES_MAX: Final = 2048

#: Field numbers from here on have tags of two bytes.
_LONG_TAG: Final = 16

#: Equal headers in a row before a run is searched. A search that finds none costs as much as some
#: entries.
_ALIKE_MIN: Final = 3

#: Headers of a run that are compared at once: first, and at most.
_RUN_MIN: Final = 16
_RUN_MAX: Final = 8192


class TooMany(Malformed):
    """A message or its sender goes beyond a limit."""


class _Field(Struct, frozen=True):
    """A field with more than one value, or a message that contains such a field."""

    number: int = 0
    name: str = ""
    limit: int = 0
    #: Numbers, which may be packed.
    is_number: bool = False
    #: The fields of the message in it. It may be split into several pieces.
    inner: _Kind | None = None


def check_counts(kind: type[Message], raw: bytes) -> None:
    """Raise `Malformed` if a message has more entries in a repeated field than its limit."""
    if len(raw) >= COUNTED_BYTES_MIN:
        count_entries(kind, raw)


def check_lengths(message: Message, raw: bytes) -> None:
    """Raise `Malformed` if a parsed message or a part of it has too many entries in a field."""
    if len(raw) >= MEASURED_BYTES_MIN:
        _measure(message)


def _measure(message: Message) -> None:
    for field, value in message.ListFields():
        if field.is_repeated:
            name = field.full_name.removeprefix(_PACKAGE)
            _check(name, len(value), LIMITS.get(name, TASKS_PER_MESSAGE_MAX))
        elif field.message_type is not None:
            _measure(value)


def _check(name: str, entries: int, limit: int) -> None:
    if entries > limit:
        raise TooMany(f"{name}: more than {limit} entries in one message")


def count_entries(kind: type[Message], raw: bytes) -> dict[str, int]:
    """Return the number of entries of each repeated field, by name. Raise `Malformed`."""
    counter = _Counter(raw)
    counter.walk(0, len(raw), _KINDS[kind.DESCRIPTOR.full_name])
    return counter.counts


def outline(kind: type[Message], raw: bytes) -> bytes:
    """Return a large message without repeated fields and parts, for its type and sender."""
    return _Counter(raw).outline(_KINDS[kind.DESCRIPTOR.full_name])


class _Kind:
    """The fields of a message type."""

    def __init__(self, kind: Descriptor) -> None:
        #: Fields that may have many entries or be long, by number.
        self.fields = {field.number: field for field in map(_field, kind.fields) if field.number}
        #: Fields of bytes with a tag of one byte, by tag.
        self.columns = {
            number << 3 | _DELIMITED: field
            for number, field in self.fields.items()
            if number < _LONG_TAG and field.inner is None and not field.is_number
        }


class _Counter:
    """Count one message. Stops silently where it is truncated."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.counts: dict[str, int] = {}
        self._others = 0

    def walk(self, at: int, end: int, kind: _Kind) -> None:
        """Count the entries between two offsets, which hold a message of this kind."""
        raw, columns = self._raw, kind.columns
        counts = dict.fromkeys(columns, 0)
        former = alike = 0
        while 0 <= at < end - 1:
            tag, size = raw[at], raw[at + 1]
            if tag not in columns:
                at = self._step(at, end, kind.fields)
                continue
            if size >= _HIGH:
                size, at = self._number(at + 1, end)
                counts[tag] += 1
                if at < 0 or counts[tag] > columns[tag].limit:
                    break
                at += size
                continue
            header = tag << 8 | size
            alike = alike + 1 if header == former else 0
            former = header
            entries = self._run(at, end, columns[tag].limit) if alike > _ALIKE_MIN else 1
            counts[tag] += entries
            if counts[tag] > columns[tag].limit:
                break
            at += entries * (size + 2)
        for tag, entries in counts.items():
            if entries:
                self._add(columns[tag], entries)

    def _run(self, at: int, end: int, limit: int) -> int:
        """Count consecutive entries with the same header, at least one. Stop beyond the limit."""
        raw = self._raw
        tag, size = raw[at : at + 1], raw[at + 1 : at + 2]
        step = 2 + size[0]
        entries, window = 0, _RUN_MIN
        while at < end and entries <= limit:
            stop = min(end, at + step * window)
            tags, sizes = raw[at:stop:step], raw[at + 1 : stop : step]
            alike = min(len(tags) - len(tags.lstrip(tag)), len(sizes) - len(sizes.lstrip(size)))
            entries += alike
            if alike < window:
                break
            at += step * alike
            window = min(2 * window, _RUN_MAX)
        return max(entries, 1)

    def _step(self, at: int, end: int, fields: dict[int, _Field]) -> int:
        """Count one entry of any kind. Return the offset of the next entry, or -1 if truncated."""
        tag, at, after = self._entry(at, end)
        if after < 0:
            return -1
        field = fields.get(tag >> 3)
        if tag & 7 == _DELIMITED:
            self._delimited(field, at, after)
            return after
        if field is not None and field.is_number and tag & 7 == _VARINT:
            self._add(field, 1)
        self._add_other()
        return after

    def _entry(self, at: int, end: int) -> tuple[int, int, int]:
        """Return an entry's tag, the offset of its value, and that of the next entry, or -1 if it
        is truncated. A group consists of the entries inside it."""
        tag, at = self._number(at, end)
        wire_type, after = tag & 7, -1
        if at < 0:
            return 0, 0, -1
        if wire_type == _DELIMITED:
            size, at = self._number(at, end)
            after = at + size if at >= 0 else -1
        elif wire_type == _VARINT:
            after = self._number(at, end)[1]
        elif wire_type in (_GROUP, _GROUP_END):
            after = at
        elif wire_type in _FIXED_BYTES:
            after = at + _FIXED_BYTES[wire_type]
        return tag, at, after if after <= end else -1

    def outline(self, kind: _Kind) -> bytes:
        """Return the entries with a single short value, as far as they are near the front."""
        raw, at, parts = self._raw, 0, list[bytes]()
        for _ in range(OTHERS_MAX):
            if not 0 <= at < len(raw):
                break
            start = at
            tag, _, at = self._entry(at, len(raw))
            if tag >> 3 not in kind.fields and 0 < at - start <= _SHORT_BYTES_MAX:
                parts.append(raw[start:at])
            elif tag in kind.columns and at > 0 and raw[start + 1] < _HIGH:
                at = start + self._run(start, len(raw), len(raw)) * (raw[start + 1] + 2)
        return b"".join(parts)

    def _delimited(self, field: _Field | None, at: int, end: int) -> None:
        if field is None:
            self._add_other()
        elif field.inner is not None:
            self._add_other()
            self.walk(at, end, field.inner)
        elif field.is_number:
            self._add(field, len(self._raw[at:end].translate(None, _HIGH_BYTES)))
            self._add_other()
        else:
            self._add(field, 1)

    def _number(self, at: int, end: int) -> tuple[int, int]:
        """Return a number and the offset after it, or -1 if it is truncated or too long."""
        number = shift = 0
        for byte in self._raw[at : min(end, at + _VARINT_BYTES_MAX)]:
            at += 1
            if byte < _HIGH:
                return number | byte << shift, at
            number |= (byte - _HIGH) << shift
            shift += 7
        return 0, -1

    def _add(self, field: _Field, entries: int) -> None:
        count = self.counts[field.name] = self.counts.get(field.name, 0) + entries
        _check(field.name, count, field.limit)

    def _add_other(self) -> None:
        self._others += 1
        if self._others > OTHERS_MAX:
            raise TooMany(f"more than {OTHERS_MAX} fields in one message")


def _field(field: FieldDescriptor) -> _Field:
    """Return how to count a field. It has no number if it need not be counted."""
    name = field.full_name.removeprefix(_PACKAGE)
    if field.is_repeated:
        is_number = field.type != field.TYPE_BYTES
        limit = LIMITS.get(name, TASKS_PER_MESSAGE_MAX)
        return _Field(field.number, name, limit, is_number=is_number)
    if field.message_type is not None:
        return _Field(field.number, name, inner=_Kind(field.message_type))
    return _Field()


_KINDS: Final = {
    kind.DESCRIPTOR.full_name: _Kind(cast("Descriptor", kind.DESCRIPTOR))
    for kind in (pb.QueryMsg, pb.TaskMsg, pb.Terms)
}


#: A TaskMsg begins with the tag and the length of its name. Lengths above this have two bytes.
_NAME_TAG: Final = bytes([pb.TaskMsg.NAME_FIELD_NUMBER << 3 | 2])
_LENGTH_MAX: Final = 127
_NAME_HEADS: Final = [_NAME_TAG + bytes([length]) for length in range(_LENGTH_MAX + 1)]
_NAME_HEAD_BYTES: Final = 2

#: In a QueryMsg, each TaskMsg follows a tag and its length.
TASK_TAG: Final = bytes([pb.QueryMsg.TASK_FIELD_NUMBER << 3 | 2])
_TASK_HEAD_BYTES: Final = 2


def split_alike(encoded: list[bytes]) -> list[bytes] | None:
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


def split_alike_run(body: bytes, at: int) -> tuple[bytes, list[bytes], int] | None:
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
        return None  # a name contains the bytes between two names
    return rest, names, at + len(names) * (_TASK_HEAD_BYTES + task_bytes)


def join_alike(names: Sequence[bytes], rest: bytes) -> bytes | None:
    """Encode the tasks of a QueryMsg with these bytes after each name. None: one is too long."""
    lengths = set(map(len, names))
    if _NAME_HEAD_BYTES + max(lengths) + len(rest) > _LENGTH_MAX:
        return None
    heads = {length: _task_head(length, rest) for length in lengths}
    if len(heads) > 1:
        return b"".join([heads[len(name)] + name + rest for name in names])
    (head,) = heads.values()
    return head + (rest + head).join(names) + rest


def _task_head(name_bytes: int, rest: bytes) -> bytes:
    """Encode the bytes of a task before its name."""
    task_bytes = _NAME_HEAD_BYTES + name_bytes + len(rest)
    return b"%b%c%b" % (TASK_TAG, task_bytes, _NAME_HEADS[name_bytes])
