"""Parquet files: made of row files in place, and read."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from taskyard.errors import JournalDamaged, UnknownFormat
from taskyard.journal import compaction, history, parquet_file
from taskyard.journal.history import PARQUET, ROWS, HistoryPart
from taskyard.journal.parquet_file import EDGES, EVENTS
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import WritingYard, go_on, rich_story

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def yard() -> WritingYard:
    return rich_story(MemoryStore())


@pytest.fixture(scope="module")
def exported(yard: WritingYard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rows")
    compaction.export(directory, yard.store)
    return directory


@pytest.fixture
def state(exported: Path, tmp_path: Path) -> Path:
    """Return a state with one part, in row files."""
    return Path(shutil.copytree(exported, tmp_path / "state"))


def part_in(directory: Path) -> HistoryPart:
    (part,), _ = history.parts(directory)
    return part


def table(directory: Path, name: str) -> Rows:
    """Return all rows of the history, in the order of the files."""
    paths = [part.paths(directory)[name] for part in history.parts(directory)[0]]
    return [row for path in paths for row in parquet_file.read_table(path).to_pylist()]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / history.FOLDER).iterdir())


class TestConvert:
    def test_row_files_are_replaced_and_the_tables_stay(self, state: Path) -> None:
        before = {name: table(state, name) for name in parquet_file.TABLES}
        written = history.convert(state)
        assert names_in(state) == sorted(path.name for path in written)
        assert {path.suffix for path in written} == {f".{PARQUET}"}
        assert {name: table(state, name) for name in parquet_file.TABLES} == before
        assert history.check_part(state, part_in(state), deep=True) == len(before["events"])

    def test_parquet_files_are_private_compressed_and_have_checksums(self, state: Path) -> None:
        for name, path in zip(parquet_file.TABLES, history.convert(state), strict=True):
            assert path.stat().st_mode & 0o777 == 0o600
            assert pq.read_schema(path).equals(parquet_file.TABLES[name])
            assert pq.read_metadata(path).row_group(0).column(0).compression == "ZSTD"

    def test_any_parquet_reader_reads_them(self, state: Path) -> None:
        before = table(state, "events")
        edges, events = history.convert(state)
        assert pq.read_table(events).to_pylist() == before
        assert pq.read_table(edges).schema.equals(EDGES)

    def test_second_conversion_changes_nothing(self, state: Path) -> None:
        history.convert(state)
        before = {path: path.stat() for path in (state / history.FOLDER).iterdir()}
        assert history.convert(state) == []
        assert {path: path.stat() for path in (state / history.FOLDER).iterdir()} == before

    def test_row_files_that_a_killed_conversion_left_are_removed(self, state: Path) -> None:
        rows = part_in(state).paths(state, ROWS)
        kept = {path: path.read_bytes() for path in rows.values()}
        history.convert(state)
        for path, content in kept.items():
            path.write_bytes(content)
        assert part_in(state).suffix(state) == PARQUET
        assert history.convert(state) == []
        assert not any(path.exists() for path in kept)

    def test_half_a_parquet_pair_does_not_count(self, state: Path) -> None:
        parquet = part_in(state).paths(state, PARQUET)
        before = table(state, "events")
        parquet["edges"].write_bytes(b"unfinished")
        assert part_in(state).suffix(state) == ROWS
        assert table(state, "events") == before
        history.convert(state)
        assert names_in(state) == sorted(path.name for path in parquet.values())

    def test_damaged_row_file_is_kept(self, state: Path) -> None:
        path = part_in(state).paths(state)["events"]
        path.write_bytes(path.read_bytes().replace(b"\x78\x01", b"\x78\x02", 1))
        before = names_in(state)
        with pytest.raises(JournalDamaged, match=r"events-.*\.rows can't be read"):
            history.convert(state)
        assert [name for name in names_in(state) if not name.startswith(".")] == before

    def test_progress_counts_the_pairs(self, state: Path) -> None:
        calls: list[tuple[int, int]] = []
        history.convert(state, lambda *done: calls.append(done))
        assert calls == [(1, 1)]


class TestMixed:
    """A history whose first part is Parquet and whose second part is not."""

    @pytest.fixture
    def mixed(self, yard: WritingYard, tmp_path: Path) -> Path:
        store = MemoryStore()
        go_on(store, yard.store, 30)
        compaction.export(tmp_path, store)
        history.convert(tmp_path)
        go_on(store, yard.store, yard.store.head.sequence)
        compaction.compact(tmp_path, store)
        return tmp_path

    def test_compaction_continues_after_parquet_files(
        self, mixed: Path, yard: WritingYard, exported: Path
    ) -> None:
        whole, broken = history.parts(mixed)
        assert whole == [HistoryPart(1, 30), HistoryPart(31, yard.store.head.sequence)]
        assert broken == []
        assert [part.suffix(mixed) for part in whole] == [PARQUET, ROWS]
        for name in parquet_file.TABLES:
            assert table(mixed, name) == table(exported, name)

    def test_missing_file_of_a_pair_is_named_with_its_suffix(self, mixed: Path) -> None:
        for part in history.parts(mixed)[0]:
            part.paths(mixed)["events"].unlink()
        broken = history.parts(mixed)[1]
        missing = [history.missing_file(mixed, part) for part in broken]
        assert [name.rpartition(".")[2] for name in missing] == [PARQUET, ROWS]

    def test_records_of_a_file_are_known_without_reading_it(
        self, mixed: Path, exported: Path
    ) -> None:
        numbers = [row["record"] for row in table(exported, "events")]
        whole = history.parts(mixed)[0]
        found = [parquet_file.record_range(part.paths(mixed)["events"]) for part in whole]
        assert found[0][0] == 1
        assert found[0][1] + 1 == found[1][0]
        assert found[1][1] == max(numbers)

    def test_file_without_rows_has_no_records(self, tmp_path: Path) -> None:
        writer = history.PartWriter(tmp_path)
        writer.finish(HistoryPart(1, 1))
        for _ in range(2):
            first, last = parquet_file.record_range(part_in(tmp_path).paths(tmp_path)["events"])
            assert first > last
            history.convert(tmp_path)

    def test_row_file_replaced_under_a_reader_is_read_as_parquet(self, state: Path) -> None:
        path = part_in(state).paths(state)["events"]
        before, records = parquet_file.read_table(path), parquet_file.record_range(path)
        history.convert(state)
        assert parquet_file.read_table(path) == before
        assert parquet_file.record_range(path) == records


class TestDamage:
    def test_flipped_byte_is_found_by_a_deep_check(self, state: Path) -> None:
        _, path = history.convert(state)
        content = bytearray(path.read_bytes())
        column = pq.read_metadata(path).row_group(0).column(4)
        content[column.dictionary_page_offset + column.total_compressed_size - 3] ^= 0xFF
        path.write_bytes(content)
        with pytest.raises(JournalDamaged, match="can't be read"):
            history.check_part(state, part_in(state), deep=True)

    def test_reason_of_the_reader_is_one_line(
        self, state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        history.convert(state)

        def fail(*_: object, **__: object) -> None:
            raise pa.ArrowInvalid("it is\n  broken\n")

        monkeypatch.setattr(pq, "ParquetFile", fail)
        with pytest.raises(JournalDamaged, match=r"can't be read \(it is broken\)"):
            history.check_part(state, part_in(state))

    def test_file_of_another_schema_is_refused(self, state: Path) -> None:
        edges, events = history.convert(state)
        edges.write_bytes(events.read_bytes())
        with pytest.raises(JournalDamaged, match="unexpected columns"):
            history.check_part(state, part_in(state))


def test_columns_are_read_by_name(state: Path) -> None:
    history.convert(state)
    path = part_in(state).paths(state)["events"]
    events = parquet_file.read_table(path)
    assert events.schema.equals(EVENTS)
    assert events.num_rows == history.check_part(state, part_in(state), deep=True)
    batches = parquet_file.batches(path, ["task", "host"])
    assert [batch.schema.names for batch in batches] == [["task", "host"]]


@pytest.mark.parametrize(
    ("metadata", "error", "problem"),
    [
        (None, UnknownFormat, "has a development format, from before the first release"),
        ({b"TASKYARD history": b"2"}, UnknownFormat, "has format 2, .* reads format 1"),
        ({b"TASKYARD history": b"x"}, JournalDamaged, "the format number is damaged"),
        ({b"other": b"1"}, JournalDamaged, "the format number is damaged"),
    ],
)
def test_files_of_other_formats_are_refused(
    state: Path, metadata: dict[bytes, bytes] | None, error: type[Exception], problem: str
) -> None:
    history.convert(state)
    path = part_in(state).paths(state)["events"]
    pq.write_table(parquet_file.read_table(path).replace_schema_metadata(metadata), path)
    for use in (parquet_file.read_table, parquet_file.record_range, parquet_file.require_format):
        with pytest.raises(error, match=problem):
            use(path)
    with pytest.raises(error, match=problem):
        history.check_part(state, part_in(state))
