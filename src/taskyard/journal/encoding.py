"""Records to bytes and back: what stands in a journal row.

A row's body is one byte of format version and the turn's records as MessagePack. The ritual for a
change of format: a new version number with its writer, the old reader kept in `_READERS`, a golden
file of the new version in the tests, all in one commit. Adding a field with a default at the end of
a record is no change of format; anything else is.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from taskyard.core.records import AnyRecord, Submitted
from taskyard.errors import JournalDamaged, StateError
from taskyard.journal.files import RESTORE_HINT

#: Written by this version. Since 2 there are Moved, Reported and Released. Since 3 there are
#: WorkerReplaced and Refunded. Since 4 tasks are named by their keys, which begin with their
#: campaign (`core.identity`).
JOURNAL_FORMAT: Final = 4

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyRecord])


def _decode_bare(body: bytes) -> list[AnyRecord]:
    """Decode records of tasks whose keys are their names alone."""
    records = _decoder.decode(body)
    for record in records:
        if type(record) is Submitted:
            record.bare = True
    return records


#: Every version that was ever written can be read.
_READERS: dict[int, Callable[[bytes], list[AnyRecord]]] = {
    1: _decode_bare,
    2: _decode_bare,
    3: _decode_bare,
    4: _decoder.decode,
}


def encode(records: list[AnyRecord]) -> bytes:
    """The body of a row."""
    buffer = bytearray([JOURNAL_FORMAT])
    _encoder.encode_into(records, buffer, 1)
    return bytes(buffer)


def decode(body: bytes) -> list[AnyRecord]:
    """The records of a row's body."""
    if not body:
        raise JournalDamaged("a row of the journal is empty", RESTORE_HINT)
    reader = _READERS.get(body[0])
    if reader is None:
        raise StateError(
            f"the journal is written in format {body[0]}, and this version reads up to "
            f"{JOURNAL_FORMAT}; use a newer Taskyard"
        )
    try:
        return reader(body[1:])
    except msgspec.MsgspecError as error:
        raise JournalDamaged(
            f"a row of the journal can't be read ({error})", RESTORE_HINT
        ) from error
