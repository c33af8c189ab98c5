"""Contents: bytes of records, and references to blobs."""

import msgspec
import pytest

from taskyard.core.blobs import (
    Blob,
    Content,
    inlined,
    is_truncated,
    kept_of,
    length_of,
    text_of,
    texts_of,
)
from taskyard.core.limits import BLOB_BYTES_MIN, STREAM_END_BYTES

DIGEST = bytes(range(32))
LONG = Blob(DIGEST, 90_000, b"ends")
CUT = Blob(b"", 90_000, b"end")


def test_column_has_bytes_and_blobs_beside_each_other() -> None:
    column: list[Content] = [b"short", LONG, b"", CUT]
    encoded = msgspec.msgpack.encode(column)
    assert msgspec.msgpack.decode(encoded, type=list[Content]) == column
    assert msgspec.msgpack.encode([b"short"]) == msgspec.msgpack.encode(column[:1])


def test_text_and_length_of_bytes_and_blobs() -> None:
    contents: list[Content] = [b"short", LONG, CUT]
    assert [*map(text_of, contents)] == texts_of(contents) == [b"short", b"ends", b"end"]
    assert [*map(length_of, contents)] == [5, 90_000, 90_000]
    assert [*map(is_truncated, contents)] == [False, False, True]


def test_blob_whose_ends_are_all_of_it_is_inlined() -> None:
    assert inlined(Blob(DIGEST, 5, b"short")) == b"short"
    for content in (b"short", LONG, CUT, Blob(b"", 3, b"end")):
        assert inlined(content) is content


@pytest.mark.parametrize(
    ("stream", "kept"),
    [
        (bytes(BLOB_BYTES_MIN - 1), bytes(BLOB_BYTES_MIN - 1)),
        (bytes(BLOB_BYTES_MIN), Blob(b"", BLOB_BYTES_MIN, bytes(2 * STREAM_END_BYTES))),
        (Blob(DIGEST, 3, b"all"), b"all"),
        (LONG, LONG),
        (CUT, CUT),
        (
            Blob(DIGEST, 20, bytes(BLOB_BYTES_MIN)),
            Blob(DIGEST, BLOB_BYTES_MIN, bytes(2 * STREAM_END_BYTES)),
        ),
    ],
)
def test_record_keeps_short_streams_and_ends_of_long_ones(stream: Content, kept: Content) -> None:
    assert kept_of(stream) == kept
