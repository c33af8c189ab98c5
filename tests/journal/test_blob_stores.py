"""The conformance of all stores of blobs: a directory, and tables of PostgreSQL."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

from taskyard.core.model import Stream
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import (
    BytesDiffer,
    StreamKey,
    length_of,
    name_of,
    upload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from taskyard.journal.blobs import BlobStore

#: A name with any bytes, and a campaign with a separator in it.
KEY = StreamKey(b"1/2", b"\xff/\0", 3, Stream.STDERR)
LONG_KEY = StreamKey(b"c" * 300, b"~" * 300, 1, Stream.STDOUT)

#: More than a row of the tables has.
CONTENT = bytes(range(256)) * 4096 * 2 + b"end"
NAME = name_of(CONTENT)

NEVER = (1 << 63) - 1


@pytest.fixture(params=["directory", "database"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], BlobStore]]:
    """Open a store, and the same store again in place of a process that was killed."""
    with contextlib.ExitStack() as stack:

        def open_directory() -> BlobStore:
            return stack.enter_context(contextlib.closing(BlobFiles(tmp_path / "blobs")))

        if request.param == "database":
            yield stack.enter_context(_database(request, stack))
        else:
            yield open_directory


@contextlib.contextmanager
def _database(
    request: pytest.FixtureRequest, stack: contextlib.ExitStack
) -> Iterator[Callable[[], BlobStore]]:
    from taskyard.postgresql import database, leader  # noqa: PLC0415  # an extra
    from taskyard.postgresql.blobs import BlobRows, Blobs  # noqa: PLC0415

    url = request.getfixturevalue("cluster").database()

    def open_tables() -> BlobStore:
        with database.connect(url) as connection:
            term = leader.acquire(connection, 0)
        return BlobRows(stack.enter_context(contextlib.closing(Blobs(url, term))))

    yield open_tables


@pytest.fixture
def store(reopen: Callable[[], BlobStore]) -> BlobStore:
    return reopen()


def write(store: BlobStore, key: StreamKey, offset: int, data: bytes) -> int:
    length = store.append(key, offset, data)
    store.flush()
    return length


def test_stream_grows_by_offset_and_is_read_in_ranges(store: BlobStore) -> None:
    assert store.read(KEY, 0, 9) is None
    assert store.length(KEY) == 0
    assert write(store, KEY, 0, b"ab") == 2
    assert write(store, KEY, 2, CONTENT) == 2 + len(CONTENT)
    whole = b"ab" + CONTENT
    assert store.read(KEY, 0, len(whole) + 1) == (whole, len(whole))
    for offset in (1, 2, 1 << 20, (1 << 20) + 1, len(whole) - 3):
        assert store.read(KEY, offset, 9) == (whole[offset : offset + 9], len(whole))
    assert store.read(KEY, len(whole), 9) == (b"", len(whole))


def test_equal_bytes_change_nothing_and_others_are_refused(store: BlobStore) -> None:
    write(store, KEY, 0, b"abcdef")
    assert write(store, KEY, 0, b"abc") == 6
    assert write(store, KEY, 4, b"efgh") == 8
    for offset, data in ((0, b"abX"), (6, b"gX"), (7, b"Xlonger")):
        with pytest.raises(BytesDiffer):
            store.append(KEY, offset, data)
    assert write(store, KEY, 10, b"behind a gap") == 8
    assert store.read(KEY, 0, 99) == (b"abcdefgh", 8)


def test_streams_are_apart(store: BlobStore) -> None:
    keys = [
        KEY,
        KEY._replace(attempt=4),
        KEY._replace(stream=Stream.STDOUT),
        KEY._replace(campaign=b""),
        LONG_KEY,
        LONG_KEY._replace(name=b"~" * 299),
        upload_of(NAME),
    ]
    for number, key in enumerate(keys):
        write(store, key, 0, b"%d" % number)
    assert [store.read(key, 0, 9) for key in keys] == [
        (b"%d" % number, 1) for number in range(len(keys))
    ]
    assert {file.id for file in store.walk()} == {*keys}


def test_sealed_stream_has_the_name_of_its_content(store: BlobStore) -> None:
    assert not store.touch(NAME)
    assert store.read(NAME, 0, 9) is None
    write(store, KEY, 0, CONTENT[:1000])
    write(store, KEY, 1000, CONTENT[1000:])
    assert store.seal(KEY, NAME)
    assert store.touch(NAME)
    assert store.read(NAME, 0, len(CONTENT)) == (CONTENT, length_of(NAME))
    assert store.read(KEY, 0, 9) is None
    assert [(file.id, file.bytes_total) for file in store.walk()] == [(NAME, len(CONTENT))]


def test_stream_goes_on_and_is_sealed_by_another_process(
    reopen: Callable[[], BlobStore],
) -> None:
    """The hash of what the first one wrote is not in the memory of the second."""
    write(reopen(), KEY, 0, CONTENT[:2_000_000])
    second = reopen()
    assert second.length(KEY) == 2_000_000
    write(second, KEY, 1_999_999, CONTENT[1_999_999:])
    assert second.seal(KEY, NAME)
    assert reopen().read(NAME, 0, len(CONTENT)) == (CONTENT, len(CONTENT))


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x", b"x" + CONTENT, b""])
def test_other_content_is_not_sealed_and_can_be_sent_again(
    store: BlobStore, content: bytes
) -> None:
    if content:
        write(store, KEY, 0, content)
    assert not store.seal(KEY, NAME)
    store.flush()
    assert not store.touch(NAME)
    assert store.length(KEY) == 0
    write(store, KEY, 0, CONTENT)
    assert store.seal(KEY, NAME)


def test_bytes_beyond_the_length_are_cut(reopen: Callable[[], BlobStore]) -> None:
    write(reopen(), KEY, 0, CONTENT + b"of another history of this state")
    store = reopen()
    write(store, KEY, 0, CONTENT[:10])
    assert store.seal(KEY, NAME)
    assert store.read(NAME, 0, len(CONTENT) + 9) == (CONTENT, len(CONTENT))


def test_equal_contents_are_stored_once(store: BlobStore) -> None:
    for key in (KEY, LONG_KEY, upload_of(NAME)):
        write(store, key, 0, CONTENT)
        assert store.seal(key, NAME)
        store.flush()
        assert [file.id for file in store.walk()] == [NAME]
    assert store.read(NAME, 0, len(CONTENT)) == (CONTENT, len(CONTENT))


def test_dropped_stream_is_gone(store: BlobStore) -> None:
    write(store, KEY, 0, b"abc")
    store.drop(KEY)
    store.flush()
    assert store.read(KEY, 0, 9) is None
    assert not [*store.walk()]
    assert write(store, KEY, 0, b"xy") == 2


def test_what_was_used_is_not_removed(store: BlobStore) -> None:
    write(store, KEY, 0, CONTENT)
    store.seal(KEY, NAME)
    before = time.time_ns()
    assert store.touch(NAME)
    assert not store.remove(NAME, before)
    assert store.read(NAME, 0, 1) is not None
    assert store.remove(NAME, NEVER)
    assert not store.remove(NAME, NEVER)
    assert store.read(NAME, 0, 1) is None
    assert not [*store.walk()]


def test_stream_is_removed_as_a_walk_found_it(store: BlobStore) -> None:
    write(store, LONG_KEY, 0, b"abc")
    (file,) = store.walk()
    assert (file.id, file.bytes_total) == (LONG_KEY, 3)
    assert store.remove(file.id, NEVER)
    assert not [*store.walk()]


def test_stream_that_was_removed_begins_again(store: BlobStore) -> None:
    key = upload_of(name_of(CONTENT))
    store.append(key, 0, CONTENT[:5])
    store.flush()
    assert store.remove(key, time.time_ns())
    assert store.append(key, 5, CONTENT[5:]) == 0  # a gap
    assert not store.seal(key, name_of(CONTENT))
    store.append(key, 0, CONTENT)
    assert store.seal(key, name_of(CONTENT))
    assert store.read(name_of(CONTENT), 0, len(CONTENT)) == (CONTENT, len(CONTENT))


def test_bytes_are_counted(store: BlobStore) -> None:
    write(store, KEY, 0, b"abc")
    write(store, KEY, 1, b"bcde")
    assert store.bytes_used == 5
    write(store, LONG_KEY, 0, CONTENT)
    store.seal(LONG_KEY, NAME)
    assert store.bytes_used == 5 + len(CONTENT)
    write(store, upload_of(NAME), 0, b"x" + CONTENT)
    store.seal(upload_of(NAME), name_of(b"x" + CONTENT[:-1]))  # one byte is cut
    assert store.bytes_used == 5 + 2 * len(CONTENT)
    store.remove(name_of(b"x" + CONTENT[:-1]), NEVER)
    store.drop(KEY)
    store.remove(NAME, NEVER)
    store.flush()
    assert store.bytes_used == 0
