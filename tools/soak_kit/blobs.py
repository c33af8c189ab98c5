"""The audit of blobs: each blob that a record names is there, with its bytes, and no stream is
left.

Reads the databases and the directory of a stopped broker by their description in the docs. Imports
nothing of Taskyard, so that both can't be wrong in the same way.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME: Final = re.compile(rb"[0-9a-f]{64}-[1-9][0-9]*")

#: The first line of a payload or a result that names blobs begins so.
_PICKLED: Final = b'{"pickle":'

#: Bytes of a SHA-256, and of the checksum before a column of the index.
_DIGEST_BYTES: Final = 32
_CRC_BYTES: Final = 4

#: The fields of a record or a row that stands for a blob: digest, length, ends.
_BLOB_FIELDS: Final = 3


@dataclass
class BlobAudit:
    """The findings of an audit."""

    #: Blobs that records or the index name.
    named: int = 0
    #: Blobs that are there, and their bytes.
    kept: int = 0
    bytes_total: int = 0
    #: Streams that are not sealed, and files that a process has left behind.
    streams: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    #: Blobs that are missing or have other bytes.
    wrong: list[str] = field(default_factory=list)


def audit_blobs(state: Path, directory: Path) -> BlobAudit:
    """Compare the blobs in a directory with the names in a state."""
    found = BlobAudit()
    kept = {path.name: path for path in directory.glob("[0-9a-f][0-9a-f]/*")}
    for name, path in kept.items():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        found.bytes_total += size
        if f"{digest}-{size}" != name:
            found.wrong.append(f"{name} has other bytes")
    named = {*_named(state)}
    found.named, found.kept = len(named), len(kept)
    found.wrong += [f"{name} is missing" for name in sorted(named - kept.keys())]
    streams = directory.glob("streams/**/*.stream")
    found.streams = sorted(str(path.relative_to(directory / "streams")) for path in streams)
    unfinished = directory / "unfinished"
    found.unfinished = sorted(path.name for path in unfinished.glob("*"))
    return found


def _named(state: Path) -> Iterator[str]:
    """Yield the names of blobs in the rows of the journal and in the index of ended tasks."""
    for row in _columns(state / "journal.sqlite", "SELECT body FROM journal"):
        yield from _blobs_in(msgspec.msgpack.decode(row[1:]))
    for row in _columns(state / "finished.sqlite", "SELECT content FROM ended"):
        yield from _blobs_in(msgspec.msgpack.decode(row[_CRC_BYTES:]))


def _columns(path: Path, query: str) -> Iterator[bytes]:
    if path.exists():
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            yield from (row[0] for row in database.execute(query))


def _blobs_in(value: Any) -> Iterator[str]:  # noqa: ANN401  # anything in MessagePack
    """Yield the names of blobs in a decoded record."""
    if isinstance(value, bytes):
        if value.startswith(_PICKLED):
            for name in _NAME.findall(value.partition(b"\n")[0]):
                yield name.decode()
    elif _is_blob(value):
        yield f"{value[0].hex()}-{value[1]}"
    elif isinstance(value, list | dict):
        for part in value if isinstance(value, list) else value.values():
            yield from _blobs_in(part)


def _is_blob(value: Any) -> bool:  # noqa: ANN401  # as above
    return (
        isinstance(value, list)
        and len(value) == _BLOB_FIELDS
        and isinstance(value[0], bytes)
        and len(value[0]) == _DIGEST_BYTES
        and isinstance(value[1], int)
        and isinstance(value[2], bytes)
    )
