"""Files of blocks, which are written once: snapshots and row files.

    header     bytes of the caller
    blocks     kind, length, CRC-32, body
    trailer    bytes of the caller, then a CRC-32

Each CRC-32 also covers the header, and that of a block its kind, its offset in the file and its
length. So every byte is verified, in any order. A file gets its name when it is complete and on the
disk. Knows neither kinds nor bodies.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Self
from zlib import crc32

from taskyard.journal.files import PRIVATE_FILE, SYNC_BYTES, sync_directory

_BLOCK: Final = struct.Struct(">BQI")
_COVERED: Final = struct.Struct(">BQQ")
_CHECKSUM: Final = struct.Struct(">I")

#: Bytes of a block besides its body.
BLOCK_BYTES: Final = _BLOCK.size


class BlockWriter:
    """Writes to a file opened by the caller."""

    def __init__(self, file: BinaryIO, header: bytes) -> None:
        self._file = file
        self._crc = crc32(header)
        #: Where the next block begins.
        self.offset = file.write(header)
        self.blocks = 0

    def add(self, kind: int, body: bytes) -> None:
        """Write a block."""
        checksum = _checksum(self._crc, kind, self.offset, body)
        self._file.write(_BLOCK.pack(kind, len(body), checksum))
        self._file.write(body)
        self.offset += BLOCK_BYTES + len(body)
        self.blocks += 1

    def end(self, trailer: bytes) -> None:
        """Write the trailer."""
        self._file.write(trailer + _CHECKSUM.pack(crc32(trailer, self._crc)))


class BlockFile(BlockWriter):
    """An unfinished file, which `finish` renames into place. Replaces that of a killed writer."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        super().__init__(os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb"), header)
        self._synced = 0

    def add(self, kind: int, body: bytes) -> None:
        """Write a block. A long file is synced in portions: a long sync delays the broker's."""
        super().add(kind, body)
        if self.offset - self._synced >= SYNC_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._synced = self.offset

    def finish(self, target: Path, trailer: bytes) -> None:
        """Write the trailer and rename the file. It is durable on return."""
        with self._file:
            self.end(trailer)
            self._file.flush()
            os.fsync(self._file.fileno())
        self.path.rename(target)
        sync_directory(target.parent)

    def close(self) -> None:
        """Close an abandoned file. Write errors don't matter."""
        with contextlib.suppress(OSError):
            self._file.close()


class BlockReader:
    """An open file. Subclasses check its header, and name the file in errors."""

    def __init__(self, file: BinaryIO, header_bytes: int) -> None:
        self._file = file
        try:
            self._header = file.read(header_bytes)
        except OSError as error:
            raise self._failed(error) from error
        self._crc = crc32(self._header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _damaged(self, problem: str) -> Exception:
        """Return the error for a file that is damaged."""
        raise NotImplementedError

    def _failed(self, error: OSError) -> Exception:
        """Return the error for a disk that can't be read."""
        raise NotImplementedError

    def _trailer(self, length: int) -> bytes:
        """Read the trailer, which comes before all blocks."""
        self._end = self._file.seek(0, os.SEEK_END) - length - _CHECKSUM.size
        if self._end < len(self._header):
            raise self._damaged("truncated")
        trailer, checksum = self._read_at(self._end, length), self._file.read()
        if _CHECKSUM.pack(crc32(trailer, self._crc)) != checksum:
            raise self._damaged("its end does not match its checksum")
        return trailer

    def _block_offsets(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and the kind of each block."""
        offset = len(self._header)
        while offset < self._end:
            kind, length, _ = self._block_header(offset)
            yield offset, kind
            offset += BLOCK_BYTES + length

    def _block(self, offset: int) -> tuple[int, bytes]:
        """Return the kind and the body of a block."""
        kind, length, checksum = self._block_header(offset)
        body = self._read_at(offset + BLOCK_BYTES, length)
        if _checksum(self._crc, kind, offset, body) != checksum:
            raise self._damaged(f"the block at byte {offset} does not match its checksum")
        return kind, body

    def _block_header(self, offset: int) -> tuple[int, int, int]:
        left = self._end - offset - BLOCK_BYTES
        if left < 0:
            raise self._damaged(f"the block at byte {offset} is truncated")
        kind, length, checksum = _BLOCK.unpack(self._read_at(offset, BLOCK_BYTES))
        if length > left:
            raise self._damaged(f"the block at byte {offset} has a wrong header")
        return kind, length, checksum

    def _read_at(self, offset: int, length: int) -> bytes:
        try:
            self._file.seek(offset)
            found = self._file.read(length)
        except OSError as error:
            raise self._failed(error) from error
        if len(found) < length:
            raise self._damaged("truncated")
        return found


def _checksum(crc: int, kind: int, offset: int, body: bytes) -> int:
    return crc32(body, crc32(_COVERED.pack(kind, offset, len(body)), crc))
