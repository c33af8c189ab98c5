"""Blobs: bytes that are larger than a record holds, and what their stores share.

A blob that is complete is named by its content and never changes. Equal contents are stored once.
Bytes that still arrive are a stream with an id of its own: that of an attempt's stdout or stderr,
or that of an upload. A stream is written by offset. Sealing gives it the name of its content.
Knows neither tasks' states nor messages. Also finds which tasks name a blob, in the records of the
journal and in the index of ended tasks.
"""

from __future__ import annotations

import errno
import hashlib
import re
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from taskyard.core import blobs, identity
from taskyard.core.blobs import NAME, PICKLE_MARK, Blob, blobs_of, results_needed, text_of
from taskyard.core.model import Stream
from taskyard.core.records import Finished, Progressed, Submitted
from taskyard.journal.recovery import records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.entities import Task
    from taskyard.core.records import AnyRecord
    from taskyard.journal.archive import Archive
    from taskyard.journal.store import StoreReader


#: The directory in a state directory.
FOLDER: Final = "blobs"

_NAME: Final = re.compile(NAME, re.ASCII)

#: Characters of a name in errors.
_SHOWN_CHARACTERS: Final = 12

#: Attempts begin at 1. An upload is of none.
_NO_ATTEMPT: Final = 0

#: Streams whose hash is in memory. All other streams are read again when they are sealed.
HASHES_MAX: Final = 10_000

#: Bytes that are read at once to be hashed.
HASHED_BYTES: Final = 1 << 20


class BytesDiffer(Exception):
    """A stream has other bytes at the same offset."""


class StreamKey(NamedTuple):
    """The id of bytes that arrive."""

    #: Empty without a campaign. Of an upload, the key of its sender.
    campaign: bytes
    #: The name in its campaign. Of an upload, the name of its content.
    name: bytes
    attempt: int
    stream: Stream

    @property
    def is_upload(self) -> bool:
        return self.attempt == _NO_ATTEMPT

    def encode(self) -> bytes:
        """Return the id as stores keep it."""
        numbers = (self.attempt, self.stream, len(self.campaign))
        return b"%d.%d.%d." % numbers + self.campaign + self.name

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Return the id as `encode` has made it. Raises ValueError."""
        attempt, stream, length, names = encoded.split(b".", 3)
        end = int(length)
        return cls(names[:end], names[end:], int(attempt), Stream(int(stream)))


#: The name of a blob, or the id of a stream.
BlobId = str | StreamKey


class BlobFile(NamedTuple):
    """A blob or a stream as a walk finds it."""

    id: BlobId
    bytes_total: int
    #: When it was written, or found again by a process that would have stored it.
    used_ns: int


def is_name(text: str) -> bool:
    """Return whether a text is the name of a blob."""
    return _NAME.fullmatch(text) is not None


def name_of(content: bytes | bytearray | memoryview) -> str:
    """Return the name of a content."""
    return blobs.name_of(hashlib.sha256(content).hexdigest(), memoryview(content).nbytes)


def length_of(name: str) -> int:
    """Return the length of a blob, which its name contains."""
    return int(name.rpartition("-")[2])


def short_name(name: str) -> str:
    """Return a name for errors and logs."""
    return f"{name[:_SHOWN_CHARACTERS]}… of {length_of(name):,} bytes"


def upload_of(name: str, sender: bytes = b"") -> StreamKey:
    """Return the id of the stream in which a blob of this name arrives.

    Each `sender` that has to prove that it has all bytes has a stream of its own.
    """
    return StreamKey(sender, name.encode(), _NO_ATTEMPT, Stream.STDOUT)


class StreamHashes:
    """The SHA-256 of streams as far as they were written in order."""

    def __init__(self) -> None:
        self._known: dict[StreamKey, tuple[hashlib._Hash, int]] = {}

    def add(self, key: StreamKey, offset: int, data: bytes | memoryview) -> None:
        """Note bytes that were written at the end of a stream."""
        found = self._known.pop(key, None)
        if found is None and offset == 0:
            found = hashlib.sha256(), 0
        if found is None or found[1] != offset:
            return
        found[0].update(data)
        self._known[key] = found[0], offset + len(data)
        if len(self._known) > HASHES_MAX:
            self.forget(next(iter(self._known)))

    def digest(self, key: StreamKey, length: int, read: Callable[[int, int], bytes]) -> bytes:
        """Return the digest of a whole stream. `read` takes an offset and a count."""
        made, at = self._known.get(key) or (hashlib.sha256(), 0)
        while at < length:
            data = read(at, min(HASHED_BYTES, length - at))
            if not data:
                return b""
            made.update(data)
            at += len(data)
        self._known[key] = made, at
        return made.digest()

    def forget(self, key: StreamKey) -> None:
        self._known.pop(key, None)


class BlobStore:
    """Keeps blobs and streams: in a directory, or in a database. This class itself keeps nothing.

    Subclasses write and read. Offsets and digests are checked here, for all of them.
    """

    def __init__(self) -> None:
        #: Bytes of everything, as of the last count. The owner sets it, and writes add to it.
        self.bytes_used = 0
        self._hashes = StreamHashes()

    def append(self, key: StreamKey, offset: int, data: bytes) -> int:
        """Write bytes of a stream, and return how many it has then.

        Nothing is written behind a gap. Bytes that are there are compared. Raises `OSError`, or
        `BytesDiffer`.
        """
        length = self.length(key)
        if offset > length:
            return length
        known = min(length - offset, len(data))
        if known:
            self.flush()
            if self._part(key, offset, known) != data[:known]:
                raise BytesDiffer(f"bytes from {offset:,} on differ from what is there")
        new = data[known:]
        if new:
            self._extend(key, length, new)
            self._hashes.add(key, length, new)
            self.bytes_used += len(new)
        return length + len(new)

    def flush(self) -> None:
        """Complete the writes and removals of a turn, before their senders get a reply."""

    def seal(self, key: StreamKey, name: str) -> bool:
        """Make a stream the blob of this name, durably. Raises `OSError`.

        Bytes beyond the length are cut. Return False if it has another content, or is missing.
        Another content is dropped.
        """
        self.flush()
        length = length_of(name)
        if self.length(key) > length:  # of another history of this state
            self._hashes.forget(key)
            self._cut(key, length)
        digest = self._hashes.digest(key, length, partial(self._part, key))
        if not digest or not name.startswith(digest.hex()):
            self.drop(key)
            return False
        self._seal(key, name)
        return True

    def length(self, key: StreamKey) -> int:  # noqa: ARG002  # it has none
        """Return the bytes of a stream, 0 if it is missing. Raises `OSError`."""
        return 0

    def drop(self, key: StreamKey) -> None:
        """Remove a stream."""

    def read(self, blob: BlobId, offset: int, count: int) -> tuple[bytes, int] | None:  # noqa: ARG002
        """Return some bytes, unchecked, and the length, unless it is missing. Raises `OSError`."""
        return None

    def touch(self, name: str) -> bool:  # noqa: ARG002
        """Note that a blob is used, so that no sweep removes it for some time.

        Return whether it is there.
        """
        return False

    def remove(self, blob: BlobId, unused_since_ns: int) -> bool:  # noqa: ARG002
        """Remove a blob or stream unless it was used since then. Return whether it was removed."""
        return False

    def walk(self) -> Iterator[BlobFile]:
        """Yield all blobs and streams. Skip what disappears meanwhile."""
        return iter(())

    def close(self) -> None:
        """Close what is open."""

    def _part(self, key: StreamKey, offset: int, count: int) -> bytes:
        found = self.read(key, offset, count)
        return b"" if found is None else found[0]

    def _extend(self, key: StreamKey, length: int, new: bytes) -> None:
        """Write bytes at the end of a stream, which is created if it is missing."""
        raise OSError(errno.EROFS, f"{length + len(new):,} bytes of {key.name!r} are kept nowhere")

    def _cut(self, key: StreamKey, length: int) -> None:
        """Remove the end of a stream. `_seal` may do that, too."""

    def _seal(self, key: StreamKey, name: str) -> None:
        """Give a stream the name of its content, or remove it if there is a blob of that name."""
        raise NotImplementedError


#: The records that may name blobs.
NAMING: Final[frozenset[type]] = frozenset((Submitted, Finished, Progressed))


def blobs_named(record: AnyRecord) -> Iterator[tuple[str, Sequence[bytes]]]:
    """Yield the blobs that a record names, each with the tasks that it is of."""
    if type(record) is Submitted:
        submission = record.submission
        if len(submission.payloads) == 1:
            for name in blobs_of(submission.payloads[0]):
                yield name, submission.names
        else:
            yield from _of_contents(submission.names, submission.payloads)
    elif type(record) is Finished and record.results is not None:
        yield from _of_contents(record.names, record.results)
    elif type(record) is Progressed:
        yield from _of_contents(record.names, record.texts)
        yield from _of_contents(record.names, record.stderrs or ())


def _of_contents(
    names: Sequence[bytes], contents: Sequence[Content]
) -> Iterator[tuple[str, Sequence[bytes]]]:
    try:
        if PICKLE_MARK not in b"".join(contents):  # type: ignore[arg-type]  # nearly always
            return
    except TypeError:  # some are blobs
        pass
    for index, content in enumerate(contents):
        if isinstance(content, Blob) or content.startswith(PICKLE_MARK):  # few of many
            for blob in blobs_of(content):
                yield blob, names[index : index + 1]


def blobs_needed(task: Task, result_of: Callable[[bytes], Content | None]) -> set[str]:
    """Return the blobs that a task needs: of its payload, and of results that its payload needs.

    `result_of` returns the result of a task that is done.
    """
    found = {*blobs_of(task.payload)}
    for name in results_needed(text_of(task.payload)):
        key = name.encode()
        content = result_of(identity.spelling(task.terms.campaign, key))
        if content is None:  # it is outside the task's campaign
            content = result_of(key)
        found.update(blobs_of(content or b""))
    return found


def tasks_by_blob(rows: StoreReader, index: Archive) -> dict[str, set[bytes]]:
    """Return the tasks that name each blob, but unfinished tasks whose rows are trimmed."""
    found: dict[str, set[bytes]] = {}
    for row in rows.rows(rows.anchor.sequence):
        for record in records_of(row, row.record_first - 1):
            for blob, tasks in blobs_named(record):
                found.setdefault(blob, set()).update(tasks)
    for blob, task in index.all_blobs():
        found.setdefault(blob, set()).add(task)
    return found
