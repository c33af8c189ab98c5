"""Inspect SQLite's files before SQLite opens them. Pure functions over bytes.

SQLite repairs without an error: it treats a log with a damaged header as empty, deletes the log of
an empty database, and cuts an unfinished write. So the database header is checked and the end of
the log is measured first. The formats are SQLite's: sqlite.org/fileformat2.html.
"""

import struct
import sys
from array import array
from collections.abc import Iterator

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal.schema import FILE_NAME

DATABASE_HEADER_BYTES = 100
_DATABASE_MAGIC = b"SQLite format 3\0"
#: WAL mode for writing and reading, no reserved bytes in a page.
_WAL_MODE = bytes([2, 2, 0])
#: Writing and reading without a log.
_NO_LOG_MODE = bytes([1, 1])
_MODE_PLACE = 18

_HEADER = struct.Struct(">IIIIIIII")
_FRAME = struct.Struct(">IIIIII")
#: The lowest bit selects the byte order of the checksums.
MAGIC_LITTLE, MAGIC_BIG = 0x377F0682, 0x377F0683
_WORD = 0xFFFFFFFF


class Tail(msgspec.Struct, frozen=True):
    """The end of a log."""

    #: The end of the last complete transaction.
    committed_bytes: int
    #: Bytes after it of the same generation: an unfinished write, never acknowledged.
    torn_bytes: int


def check_database_header(header: bytes) -> None:
    """Refuse a file that SQLite might treat as an empty database and delete the log of."""
    if header[:16] != _DATABASE_MAGIC or header[18:21] != _WAL_MODE:
        raise JournalDamaged(
            f"the header of {FILE_NAME} is damaged", "none of its rows can be read"
        )


def tail(log: bytes) -> Tail:
    """Find the end of the log's last complete transaction, and measure the bytes after it.

    Zeros at the end of the file are not part of the log: the store fills it ahead of its commits.
    """
    header = log[: _HEADER.size]
    if len(header) < _HEADER.size:
        return Tail(0, len(log.rstrip(b"\0")))
    magic, _, page_bytes, _, *salts_and_sums = _HEADER.unpack(header)
    salts, sums = tuple(salts_and_sums[:2]), tuple(salts_and_sums[2:])
    if magic not in (MAGIC_LITTLE, MAGIC_BIG) or checksum((0, 0), header[:24], magic) != sums:
        return Tail(0, len(log.rstrip(b"\0")))
    frame_bytes = _FRAME.size + page_bytes
    committed = _committed(log, frame_bytes, magic, salts, sums)
    return Tail(committed, _generation_end(log, committed, frame_bytes, salts) - committed)


def _committed(
    log: bytes, frame_bytes: int, magic: int, salts: tuple[int, ...], sums: tuple[int, ...]
) -> int:
    """Return the end of the last commit frame before the first invalid frame."""
    end = _HEADER.size
    for start in range(_HEADER.size, len(log) - frame_bytes + 1, frame_bytes):
        _, pages_after_commit, *rest = _FRAME.unpack_from(log, start)
        body = start + _FRAME.size
        sums = checksum(sums, log[start : start + 8] + log[body : start + frame_bytes], magic)
        if tuple(rest) != salts + sums:
            break
        if pages_after_commit:
            end = start + frame_bytes
    return end


def _generation_end(log: bytes, start: int, frame_bytes: int, salts: tuple[int, ...]) -> int:
    """Find the end of this generation. Frames from before the last restart have other salts."""
    for frame in range(start, len(log), frame_bytes):
        header = log[frame : frame + _FRAME.size]
        if len(header) == _FRAME.size and _FRAME.unpack(header)[2:4] != salts:
            return frame
    return len(log)


def merged(database: bytes, log: bytes) -> bytes:
    """Apply a log's complete transactions to a database, as one file without a log."""
    image = bytearray(database)
    end = tail(log).committed_bytes
    if end > _HEADER.size:
        page_bytes: int = _HEADER.unpack_from(log)[2]
        pages = 0
        for start in range(_HEADER.size, end, _FRAME.size + page_bytes):
            number, pages_after_commit = _FRAME.unpack_from(log, start)[:2]
            place, body = (number - 1) * page_bytes, start + _FRAME.size
            if place > len(image):
                image.extend(bytes(place - len(image)))
            image[place : place + page_bytes] = log[body : body + page_bytes]
            pages = pages_after_commit or pages
        del image[pages * page_bytes :]
    image[_MODE_PLACE : _MODE_PLACE + len(_NO_LOG_MODE)] = _NO_LOG_MODE
    return bytes(image)


def checksum(sums: tuple[int, ...], content: bytes, magic: int) -> tuple[int, int]:
    """Continue SQLite's checksum from `sums`."""
    first, second = sums
    for left, right in _pairs(content, little=magic == MAGIC_LITTLE):
        first = (first + left + second) & _WORD
        second = (second + right + first) & _WORD
    return first, second


def _pairs(content: bytes, *, little: bool) -> Iterator[tuple[int, int]]:
    words = array("I", content)
    if little != (sys.byteorder == "little"):
        words.byteswap()
    return zip(words[::2], words[1::2], strict=True)
