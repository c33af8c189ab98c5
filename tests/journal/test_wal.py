"""The end of SQLite's log, compared with SQLite itself."""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from taskyard.errors import JournalDamaged
from taskyard.journal import wal
from taskyard.journal.wal import Tail, check_database_header, tail

PAGE_BYTES = 512
FRAME_BYTES = 24 + PAGE_BYTES
HEADER_BYTES = 32


@pytest.fixture
def database(tmp_path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(tmp_path / "some.sqlite", isolation_level=None)
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE story(line)")
    return connection


def log_of(directory: Path) -> bytes:
    return (directory / "some.sqlite-wal").read_bytes()


def test_log_of_whole_transactions_has_no_tail(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    for number in range(5):
        database.execute("INSERT INTO story VALUES (?)", (number,))
    log = log_of(tmp_path)
    assert tail(log) == Tail(len(log), 0)
    database.close()


def test_empty_log_has_no_tail() -> None:
    assert tail(b"") == tail(bytes(10)) == tail(bytes(100_000)) == Tail(0, 0)


def test_zeros_after_the_last_frame_are_no_tail(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    log = log_of(tmp_path)
    database.close()
    for zeros in (FRAME_BYTES, 10 * FRAME_BYTES + 100):
        assert tail(log + bytes(zeros)) == Tail(len(log), 0)


@pytest.mark.slow
def test_every_cut_leaves_a_tail_after_the_last_whole_transaction(
    database: sqlite3.Connection,
    tmp_path: Path,
    sample: Callable[[Sequence[int]], list[int]],
) -> None:
    """Cut at each end of a frame, before and after it, and at a sample of the other places."""
    ends = [HEADER_BYTES]
    for number in range(4):
        database.execute("INSERT INTO story VALUES (?)", (b"x" * 400 * number,))
        ends.append(len(log_of(tmp_path)))
    log = log_of(tmp_path)
    database.close()
    whole = [HEADER_BYTES, *ends_of_commits(log)]
    around = {
        end + by for end in range(HEADER_BYTES, len(log) + 1, FRAME_BYTES) for by in (-1, 0, 1)
    }
    sizes = range(HEADER_BYTES, len(log) + 1)
    for size in sorted({*sample(sizes), *around.intersection(sizes)}):
        committed = max(end for end in whole if end <= size)
        assert tail(log[:size]) == Tail(committed, size - committed)
    assert set(ends[1:]) <= set(ends_of_commits(log))


def ends_of_commits(log: bytes) -> list[int]:
    return [
        start + FRAME_BYTES
        for start in range(HEADER_BYTES, len(log), FRAME_BYTES)
        if any(log[start + 4 : start + 8])
    ]


def test_flipped_byte_ends_the_log_before_its_frame(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    database.execute("INSERT INTO story VALUES (1)")
    log = bytearray(log_of(tmp_path))
    database.close()
    log[-1] ^= 1
    found = tail(bytes(log))
    assert found.torn_bytes >= FRAME_BYTES
    assert found.committed_bytes + found.torn_bytes == len(log)


@pytest.mark.parametrize("offset", [0, 3, 8, 16, 31])
def test_damaged_header_makes_all_of_it_a_tail(
    database: sqlite3.Connection, tmp_path: Path, offset: int
) -> None:
    log = bytearray(log_of(tmp_path))
    database.close()
    log[offset] ^= 1
    assert tail(bytes(log)) == Tail(0, len(log.rstrip(b"\0")))
    assert tail(bytes(log[:20])) == Tail(0, 20)


def test_frames_of_an_earlier_generation_are_no_tail(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    database.execute("INSERT INTO story VALUES (?)", (b"x" * 5000,))
    before = len(log_of(tmp_path))
    database.execute("PRAGMA wal_checkpoint(RESTART)")
    database.execute("INSERT INTO story VALUES (1)")
    log = log_of(tmp_path)
    database.close()
    assert len(log) == before
    assert tail(log).torn_bytes == 0
    assert tail(log).committed_bytes < before


@pytest.mark.parametrize(
    ("magic", "content"),
    [
        (wal.MAGIC_LITTLE, bytes([1, 0, 0, 0, 2, 0, 0, 0])),
        (wal.MAGIC_BIG, bytes([0, 0, 0, 1, 0, 0, 0, 2])),
    ],
)
def test_checksums_are_counted_in_either_byte_order(magic: int, content: bytes) -> None:
    assert wal.checksum((0, 0), content, magic) == (1, 3)
    assert wal.checksum((5, 7), content, magic) == (13, 22)


def test_sound_database_header_passes(database: sqlite3.Connection, tmp_path: Path) -> None:
    database.close()
    check_database_header((tmp_path / "some.sqlite").read_bytes()[:100])


@pytest.mark.parametrize("offset", [0, 15, 18, 19, 20])
def test_damaged_database_header_is_refused(
    database: sqlite3.Connection, tmp_path: Path, offset: int
) -> None:
    database.close()
    header = bytearray((tmp_path / "some.sqlite").read_bytes()[:100])
    header[offset] ^= 1
    with pytest.raises(JournalDamaged, match=r"the header of journal\.sqlite is damaged"):
        check_database_header(bytes(header))


def test_empty_database_is_refused() -> None:
    with pytest.raises(JournalDamaged):
        check_database_header(b"")
