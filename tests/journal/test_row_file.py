"""Row files: what is written is read back, and every change of a byte is found."""

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskyard.errors import JournalDamaged, UnknownFormat
from taskyard.journal import history, row_file
from taskyard.journal.history import HistoryPart
from taskyard.journal.row_file import Block, ColumnBuilder, RowFile, RowFileWriter
from tests.journal.row_files import read_rows

Rows = list[dict[str, Any]]

PART = HistoryPart(7, 9)


def edge(sequence: int, task: bytes, after: bytes) -> dict[str, Any]:
    return {"sequence": sequence, "record": sequence + 1, "task": task, "after": after}


#: Three records, in two blocks.
EDGES: Rows = [
    edge(7, b"a", b"x"),
    edge(7, b"b", b"x"),
    edge(8, b"c\xff", b"y"),
    edge(9, b"d", b"y"),
]


EVENT = {"sequence": 7, "record": 8, "kind": b"submitted"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a file with two blocks of edges, and one of events."""
    writer = history.new_file(tmp_path)
    edges = writer.edges
    edges.add(2, {"sequence": 7, "record": 8, "task": [b"a", b"b"], "after": b"x"})
    edges.add(1, {"sequence": 8, "record": 9, "task": [b"c\xff"], "after": [b"y"]})
    writer.write(edges)
    writer.events.add(1, EVENT)
    edges.add(1, edge(9, b"d", b"y"))
    found = PART.path(tmp_path)
    writer.finish(found, PART.first, PART.last)
    return found


def test_rows_come_back_as_they_were(path: Path) -> None:
    assert list(read_rows(path, "edges")) == EDGES
    (event,) = read_rows(path, "events")
    assert {name: value for name, value in event.items() if value is not None} == EVENT


def test_trailer_has_the_ranges_and_counts(path: Path) -> None:
    with RowFile(path) as file:
        assert file.trailer == row_file.Trailer(7, 9, edges=4, events=1, blocks=3)


def test_file_without_rows_is_sound(tmp_path: Path) -> None:
    history.new_file(tmp_path).finish(PART.path(tmp_path), 7, 9)
    assert history.check_part(tmp_path, PART, deep=True) == 0


def test_header_is_text_that_names_the_columns(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    assert lines[:2] == [b"TASKYARD history 1", b"edges sequence record task after"]
    assert lines[2].startswith(b"events sequence record time_ns kind task ")


def test_shared_values_are_stored_once(path: Path) -> None:
    with RowFile(path) as file:
        first, _ = file.blocks("edges")
    assert first.columns == [
        ([7, 8], [2, 1]),
        ([8, 9], [2, 1]),
        ([b"a", b"b", b"c\xff"], [-3]),
        ([b"x", b"y"], [2, -1]),
    ]


def test_columns_without_values_are_nulls() -> None:
    columns = ColumnBuilder("events")
    columns.add(2, {"sequence": 1, "record": 1, "task": [b"a", None]})
    columns.add(1, {"sequence": 2, "record": 2, "worker": b"w"})
    columns.add(1, {"sequence": 2, "record": 2})
    block = columns.take()
    found = dict(zip(row_file.TABLES["events"], block.columns, strict=True))
    assert found["task"] == ([b"a", None, None], [-2, 2])
    assert found["worker"] == ([None, b"w", None], [2, 1, 1])
    assert found["host"] is None


def test_equal_values_of_adjacent_records_are_one_run() -> None:
    columns = ColumnBuilder("edges")
    for _ in range(5):
        columns.add(2, {"task": b"a", "after": None})
    assert columns.take().columns[2] == ([b"a"], [10])


def damaged(path: Path, content: bytes) -> str:
    """Return the error for a changed file, also if it is found only by reading everything."""
    path.write_bytes(content)
    with pytest.raises(JournalDamaged) as caught:
        history.check_part(path.parents[1], PART, deep=True)
    assert caught.value.lost.startswith("nothing is lost, rows 7..9 are still in the journal")
    return caught.value.wrong


def test_every_flipped_byte_is_found(path: Path) -> None:
    content = path.read_bytes()
    for offset in range(len(content)):
        for mask in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[offset] ^= mask
            assert path.name in damaged(path, bytes(changed))


def test_every_truncation_is_found(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        assert path.name in damaged(path, content[:length])


def test_every_missing_and_inserted_byte_is_found(path: Path) -> None:
    content = path.read_bytes()
    for offset in range(len(content)):
        assert path.name in damaged(path, content[:offset] + content[offset + 1 :])
        assert path.name in damaged(path, content[:offset] + b"\0" + content[offset:])


def test_swapped_blocks_are_found(path: Path) -> None:
    content = path.read_bytes()
    start = row_file.HEADER_BYTES
    middle = start + 13 + int.from_bytes(content[start + 1 : start + 9], "big")
    end = len(content) - 44
    swapped = content[:start] + content[middle:end] + content[start:middle] + content[end:]
    assert f"the block at byte {start} does not match its checksum" in damaged(path, swapped)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a history file"),
        (b"PAR1", "not a history file"),
        (b"TASKYARD history 1\nedges", "its header is damaged"),
    ],
)
def test_other_files_are_refused(path: Path, content: bytes, problem: str) -> None:
    assert damaged(path, content) == f"history/{path.name} can't be read ({problem})"


def test_file_of_a_newer_version_is_refused(path: Path) -> None:
    magic = b"TASKYARD history 2"
    path.write_bytes(magic + path.read_bytes()[len(magic) :])
    problem = "has format 2, but this version of Taskyard reads format 1"
    with pytest.raises(UnknownFormat, match=f"history/{path.name} {problem}"):
        RowFile(path)


def test_missing_file_and_directory_are_refused(path: Path) -> None:
    path.unlink()
    with pytest.raises(JournalDamaged, match=r"can't be read \(No such file or directory\)"):
        RowFile(path)
    path.mkdir()
    with pytest.raises(JournalDamaged, match=r"can't be read \(Is a directory\)"):
        RowFile(path)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"plain", ": Error"),
        (zlib.compress(b"\xc1"), ": MessagePack"),
        (zlib.compress(msgspec.msgpack.encode((1, []))), "has incomplete columns"),
        (
            zlib.compress(msgspec.msgpack.encode(Block(2, [([1], [1])] * 4))),
            "has incomplete columns",
        ),
    ],
)
def test_block_with_a_right_checksum_and_wrong_content_is_refused(
    path: Path, body: bytes, problem: str
) -> None:
    header = path.read_bytes()[: row_file.HEADER_BYTES]
    crc = zlib.crc32(header)
    covered = struct.pack(">BQQ", 0, len(header), len(body))
    checksum = zlib.crc32(body, zlib.crc32(covered, crc))
    trailer = struct.pack(">QQQQQ", 7, 9, 2, 0, 1)
    content = header + struct.pack(">BQI", 0, len(body), checksum) + body
    content += trailer + struct.pack(">I", zlib.crc32(trailer, crc))
    assert problem in damaged(path, content)


def test_long_file_is_synced_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(row_file, "SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    writer = RowFileWriter(tmp_path / "new")
    for sequence in (1, 2):
        writer.edges.add(1, edge(sequence, b"a", b"b"))
        writer.write(writer.edges)
    writer.finish(tmp_path / "a", 1, 2)
    assert len(synced) == 2
    assert len(list(read_rows(tmp_path / "a", "edges"))) == 2


def test_abandoned_file_is_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        writer = RowFileWriter(tmp_path / "a")
        writer.edges.add(1, edge(1, b"a", b"b"))
        writer.write(writer.edges)
        writer.close()
    assert (tmp_path / "a").stat().st_size > 0
