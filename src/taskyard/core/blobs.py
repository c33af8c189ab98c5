"""Contents of payloads, results and streams: bytes in the record, or a reference to a blob.

Owns the type of the reference, how a blob is named, and which blobs and results of other tasks a
payload names in its first line. That line of a command or a call may name tasks in `results`, as in
`after`. That of a pickled call or result may name blobs. Nothing else of a payload is looked at.
Knows no files: a blob may be anywhere.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec
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

    #: Their SHA-256. b"": only `ends` are kept, all else is lost or was refused.
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
    """Return what a record keeps of a stream: all of a short stream, the ends of a long stream."""
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


class _FirstLine(Struct):
    results: list[str] = []


class _Needs(Struct, omit_defaults=True):
    """All that this module reads of a payload."""

    pickle: int | None = None
    call: str | None = None
    values: list[str] = []
    results: list[str] = []


#: Payloads and results of pickled calls begin so.
PICKLE_MARK: Final = b'{"pickle":'

_BLOB: Final = re.compile(f'"({NAME})"'.encode())

#: Payloads of commands and calls begin so. Users' own payloads may have any keys.
_STARTS: Final = (b'{"argv":', b'{"call":', PICKLE_MARK)

_first_lines = msgspec.json.Decoder(_FirstLine)
_encode = msgspec.json.Encoder().encode


def results_needed(payload: bytes) -> list[str]:
    """Return the names of tasks whose results a payload needs."""
    if b'"results":[' not in payload or not payload.startswith(_STARTS):
        return []
    try:
        return _first_lines.decode(payload.partition(b"\n")[0]).results
    except (msgspec.MsgspecError, RecursionError, ValueError):  # bytes of another kind
        return []


def blobs_in(text: bytes) -> list[str]:
    """Return the blobs that the first line of a payload or result names, each once."""
    if not text.startswith(PICKLE_MARK):
        return []
    found = _BLOB.findall(text, 0, text.find(b"\n") + 1 or len(text))
    return [name.decode() for name in dict.fromkeys(found)]


def blobs_of(content: Content) -> Sequence[str]:
    """Return the blobs that a content names: its own, and the blobs of a pickled call."""
    if isinstance(content, Blob):
        own = (blob_name(content),) if content.digest else ()
        return (*own, *blobs_in(content.ends))
    return blobs_in(content)


def payload_ends(payload: bytes) -> bytes:
    """Return the part of a payload that a record needs: a first line with what it names."""
    values, results = blobs_in(payload), results_needed(payload)
    if not values and not results:
        return b""
    if payload.startswith(PICKLE_MARK):
        return _encode(_Needs(pickle=1, values=values, results=results)) + b"\n"
    return _encode(_Needs(call="", results=results)) + b"\n"


def result_ends(result: bytes) -> bytes:
    """Return head and tail of a result. The head has all blobs that a pickled result names."""
    head = STREAM_END_BYTES
    if result.startswith(PICKLE_MARK):
        head = max(head, result.find(b"\n") + 1)
    return result[:head] + result[-STREAM_END_BYTES:]
