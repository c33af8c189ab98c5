"""Contents of results and streams: bytes in the record itself, or a reference to a blob.

Owns the type of the reference and how a blob is named. Knows no files: a blob may be anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from msgspec import Struct

from taskyard.core.limits import BLOB_BYTES_MIN, STREAM_END_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Bytes of a SHA-256.
DIGEST_BYTES: Final = 32

#: The name of a blob as a regular expression: its SHA-256 in hexadecimal digits, and its length.
NAME: Final = r"[0-9a-f]{64}-[1-9][0-9]{0,15}"


class Blob(Struct, array_like=True, frozen=True, gc=False):
    """Stands for bytes that are not in the record."""

    #: Their SHA-256. b"": only `ends` are kept, the rest is lost or was refused.
    digest: bytes
    #: The length of the whole.
    length: int
    #: Head and tail of results and streams. Of a payload, what the scheduler reads of it.
    ends: bytes = b""

    def __len__(self) -> int:
        """Return the length of the whole, as `len` of bytes does."""
        return self.length


#: Bytes of at least `BLOB_BYTES_MIN` are a blob, if the broker has a store of them.
Content: TypeAlias = bytes | Blob


class Result(NamedTuple):
    """The result of a task, or why there is none, as its client gets it."""

    content: Content
    #: The task has output besides its result.
    has_stderr: bool = False

    @property
    def text(self) -> bytes:
        """The bytes, or head and tail."""
        return text_of(self.content)

    @property
    def is_truncated(self) -> bool:
        """Return whether only a part is kept."""
        return is_truncated(self.content)

    @property
    def blob(self) -> Blob | None:
        """The blob that has all of it. None: `text` has all that is kept."""
        content = self.content
        return content if isinstance(content, Blob) and content.digest else None


def name_of(digest: str, length: int) -> str:
    """Return the name of a blob."""
    return f"{digest}-{length}"


def blob_name(blob: Blob) -> str:
    """Return the name of a blob that is kept."""
    return name_of(blob.digest.hex(), blob.length)


def text_of(content: Content) -> bytes:
    """Return the bytes of a content, or the ends of a blob."""
    return content.ends if isinstance(content, Blob) else content


def texts_of(contents: Iterable[Content]) -> list[bytes]:
    """Return `text_of` each content, without a call for each."""
    return [one.ends if isinstance(one, Blob) else one for one in contents]


def joined(contents: Sequence[Content]) -> bytes:
    """Return the texts of contents one after the other: to look for something in many at once."""
    try:
        return b"".join(contents)  # type: ignore[arg-type]  # nearly always
    except TypeError:  # some are blobs
        return b"".join(texts_of(contents))


def length_of(content: Content) -> int:
    """Return the length of the whole."""
    return content.length if isinstance(content, Blob) else len(content)


def is_truncated(content: Content) -> bool:
    """Return whether only the ends of a content are kept."""
    return isinstance(content, Blob) and not content.digest


def inlined(content: Content) -> Content:
    """Return the bytes of a blob whose ends are all of it: a short stream that was appended."""
    if isinstance(content, Blob) and content.digest and content.length == len(content.ends):
        return content.ends
    return content


def kept_of(stream: Content) -> Content:
    """Return what a record keeps of a stream: all of a short one, the ends of a long one."""
    stream = inlined(stream)
    text = text_of(stream)
    if len(text) < BLOB_BYTES_MIN:
        return stream
    digest = stream.digest if isinstance(stream, Blob) else b""
    length = max(length_of(stream), len(text))
    return Blob(digest, length, text[:STREAM_END_BYTES] + text[-STREAM_END_BYTES:])


def truncated_result_reason(result: Blob) -> bytes:
    """Return the reason for refusing a truncated result."""
    kept = len(result.ends)
    return b"result truncated: only the last %d of %d bytes are kept" % (kept, result.length)
