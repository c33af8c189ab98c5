"""Snapshots: the ledger after one row of the journal, so that recovery need not begin at the first.

A snapshot is a file, `snapshots/NNNNNNNNNNNN.snapshot`, named by the row's sequence:

    magic, format version        which file this is, and how to read the rest
    sealed head                  the row and its chain, the journal's identity, a checksum
    body length, body sha256
    body                         `core.image.Image` as MessagePack

Every byte is compared with something, so a damaged snapshot is refused. The format changes by
ritual: a new version with its writer, the old reader kept in `_READERS`, a golden file, one commit;
a field added at the end of an image with a default is no change. This file reads and writes; which
snapshot to believe, and what to do without one, is `recovery`'s to say.
"""

import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from taskyard.core import image
from taskyard.core.image import Image
from taskyard.core.ledger import Ledger
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import schema
from taskyard.journal.chain import SEALED_BYTES, Head, seal, unseal
from taskyard.journal.files import make_private_directory, put_private

FOLDER: Final = "snapshots"

#: Written by this version. Since 2 tasks may share a payload: `payload_at` says which one each has.
FORMAT: Final = 2

MAGIC: Final = b"taskyard snapshot\n"

_OPENING = struct.Struct(f">{len(MAGIC)}sI")
_MEASURES = struct.Struct(">Q32s")
HEADER_BYTES: Final = _OPENING.size + SEALED_BYTES + _MEASURES.size

_NAME = re.compile(r"(\d{12,})\.snapshot")

_decoder = msgspec.msgpack.Decoder(Image)

#: Every version that was ever written can be read.
_READERS: dict[int, Callable[[bytes | memoryview], Image]] = {
    1: _decoder.decode,
    2: _decoder.decode,
}


class Snapshot(msgspec.Struct, frozen=True):
    """What stands in a snapshot's file."""

    identity: bytes
    #: The row after which it was taken.
    head: Head
    image: Image


def path_of(directory: Path, sequence: int) -> Path:
    return directory / FOLDER / f"{sequence:012}.snapshot"


def sequences(directory: Path) -> list[int]:
    """The rows that there are snapshots of, the newest first."""
    names = [path.name for path in (directory / FOLDER).glob("*.snapshot")]
    return sorted(
        (int(found[1]) for name in names if (found := _NAME.fullmatch(name))), reverse=True
    )


def write(directory: Path, identity: bytes, head: Head, ledger: Ledger) -> Path:
    """Put the snapshot of a ledger in place; it is durable when this returns."""
    if ledger.record != head.record:
        raise ValueError(f"the ledger is at record {ledger.record}, the row ends at {head.record}")
    path = path_of(directory, head.sequence)
    make_private_directory(path.parent)
    put_private(path, encode(identity, head, image.take(ledger)))
    return path


def read(directory: Path, sequence: int) -> Snapshot:
    """The snapshot of that row, whole and as it was written. Raises JournalDamaged if it is not."""
    path = path_of(directory, sequence)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JournalFailed(
            f"can't read {path} ({error.strerror}); see what the system's log says about this disk"
        ) from error
    snapshot = decode(content, path.name)
    if snapshot.head.sequence != sequence:
        raise damaged(path.name, f"is that of row {snapshot.head.sequence}")
    return snapshot


def remove(directory: Path, sequence: int) -> None:
    path_of(directory, sequence).unlink(missing_ok=True)


def encode(identity: bytes, head: Head, taken: Image) -> bytes:
    """The content of a snapshot's file."""
    body = msgspec.msgpack.encode(taken)
    opening = _OPENING.pack(MAGIC, FORMAT)
    measures = _MEASURES.pack(len(body), hashlib.sha256(body).digest())
    return b"".join((opening, seal(identity, head), measures, body))


def decode(content: bytes, name: str) -> Snapshot:
    """What `encode` made these bytes of; `name` is the file's, for the words of an error."""
    if len(content) < HEADER_BYTES:
        raise damaged(name, "has lost its end")
    magic, version = _OPENING.unpack_from(content)
    if magic != MAGIC:
        raise damaged(name, "does not begin as one")
    if version not in _READERS:
        schema.check_format(f"snapshot {name}", b"%d" % version, b"%d" % FORMAT, _LOST)
    sealed = unseal(content[_OPENING.size : _OPENING.size + SEALED_BYTES])
    if sealed is None:
        raise damaged(name, "does not say soundly which row it is of")
    identity, head = sealed
    taken = _decode_body(content, version, name)
    if taken.record != head.record:
        raise damaged(name, f"holds record {taken.record} where {head.record} should be")
    return Snapshot(identity, head, taken)


def _decode_body(content: bytes, version: int, name: str) -> Image:
    length, digest = _MEASURES.unpack_from(content, _OPENING.size + SEALED_BYTES)
    body = memoryview(content)[HEADER_BYTES:]
    if len(body) != length:
        raise damaged(name, f"has a body of {len(body)} bytes where {length} were written")
    if hashlib.sha256(body).digest() != digest:
        raise damaged(name, "has a body that does not match its digest")
    try:
        return _READERS[version](body)
    except msgspec.MsgspecError as error:
        raise damaged(name, f"has a body that can't be read ({error})") from error


_LOST: Final = "the state as of its row can't be told from it: put the file back from a copy"


def damaged(name: str, how: str) -> JournalDamaged:
    return JournalDamaged(f"snapshot {name} {how}", _LOST)
