"""The few bytes of protobuf that a plain dwork peer needs, by hand, from the dialect's page."""

from collections.abc import Iterator

CREATE, STEAL, COMPLETE, TRANSFER, LOOKUP, NOT_FOUND, OK, EXIT, ERROR = range(9)

#: Wire types.
_VARINT, _BYTES = 0, 2

#: Field numbers of QueryMsg and TaskMsg.
_TYPE, _TASK, _QUERY_NAME, _LOCATION = 1, 2, 3, 6
_NAME, _ORIGIN, _PRED = 1, 2, 4


def query(kind: int, *tasks: bytes, name: bytes = b"", location: bytes = b"") -> bytes:
    """Encode a QueryMsg."""
    encoded = bytes([_TYPE << 3, kind]) + b"".join(_field(_TASK, one) for one in tasks)
    if name:
        encoded += _field(_QUERY_NAME, name)
    return encoded + (_field(_LOCATION, location) if location else b"")


def task(name: bytes, origin: bytes, *after: bytes) -> bytes:
    """Encode a TaskMsg with its predecessors."""
    preds = b"".join(_field(_PRED, _field(_NAME, one)) for one in after)
    return _field(_NAME, name) + _field(_ORIGIN, origin) + preds


def type_of(message: bytes) -> int:
    """Return the type of a QueryMsg."""
    return next(value for number, value in _fields(message) if number == _TYPE)  # type: ignore[return-value]


def tasks_of(message: bytes) -> list[tuple[bytes, bytes]]:
    """Return the tasks of a QueryMsg: name and origin of each."""
    parts = [dict(_fields(value)) for number, value in _fields(message) if number == _TASK]  # type: ignore[arg-type]
    return [(part[_NAME], part[_ORIGIN]) for part in parts]  # type: ignore[misc]


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 127:  # noqa: PLR2004  # seven bits a byte
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    place = 0
    while place < len(message):
        tag, place = _read_varint(message, place)
        value, place = _read_varint(message, place)
        if tag & 7 == _BYTES:
            yield tag >> 3, message[place : place + value]
            place += value
        else:
            yield tag >> 3, value


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while message[place] > 127:  # noqa: PLR2004  # seven bits a byte
        value |= (message[place] & 127) << shift
        shift += 7
        place += 1
    return value | message[place] << shift, place + 1
