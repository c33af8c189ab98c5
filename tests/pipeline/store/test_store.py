"""The store of tables: versions, killed runs, other readers, and S3 by a real server."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from taskyard.errors import StateLocked, UnknownFormat, UnusableFile
from taskyard.pipeline.store import tables as store_tables
from taskyard.pipeline.store.data_file import DataFile, write_data_file
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.manifest import BrokerMark, read_manifest
from taskyard.pipeline.store.table_formats import Change
from taskyard.pipeline.store.tables import TableStore

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = pa.schema(
    [
        ("broker", pa.string()),
        ("number", pa.int64()),
        ("time", pa.timestamp("us", "UTC")),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("flag", pa.bool_()),
    ]
)
MARK = {"yard-1": BrokerMark("journal-1", 10)}


def rows(*numbers: int) -> pa.Table:
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    each = [
        {"broker": "yard-1", "number": one, "time": moment, "counts": [("a", one)], "flag": True}
        for one in numbers
    ]
    return pa.Table.from_pylist(each, SCHEMA)


def add(store: TableStore, table: str, *numbers: int, prefix: str = "final") -> DataFile:
    return write_data_file(store.directory(table), rows(*numbers), prefix)


def numbers(store: TableStore, table: str = "tasks") -> list[int]:
    """Read a table by the manifest, without Delta."""
    system, _ = store.out.open()
    found = [
        pq.read_table(uri.removeprefix("s3://"), filesystem=system) for uri in store.uris(table)
    ]
    return sorted(
        pa.concat_tables([rows(), *found], promote_options="default")["number"].to_pylist()
    )


@pytest.fixture(params=["delta", "parquet"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TableStore:
    return TableStore.create_or_open(Location.parse(tmp_path / "out"), request.param)


def reopened(store: TableStore, run: int | None = None) -> TableStore:
    return TableStore.open(store.out, run)


def test_versions_are_replaced_together_and_stay_readable(store: TableStore) -> None:
    first_open = add(store, "tasks", 3, prefix="open")
    change = Change(SCHEMA, [add(store, "tasks", 1, 2), first_open])
    store.commit({"tasks": change, "attempts": Change(SCHEMA)}, MARK)
    later = Change(SCHEMA, [add(store, "tasks", 3, 4)], frozenset({first_open.name}))
    store.commit({"tasks": later}, {"yard-1": BrokerMark("journal-1", 20)})

    assert numbers(reopened(store)) == [1, 2, 3, 4]
    assert numbers(reopened(store), "attempts") == []
    assert numbers(reopened(store, run=1)) == [1, 2, 3]
    assert reopened(store).manifest.brokers["yard-1"].last == 20
    assert reopened(store).manifest.run == 2


def test_a_killed_run_leaves_nothing_in_the_next(
    store: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = add(store, "tasks", 1, prefix="open")
    store.commit({"tasks": Change(SCHEMA, [old]), "attempts": Change(SCHEMA)}, MARK)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(store_tables, "write_manifest", killed)
        bad = Change(SCHEMA, [add(store, "tasks", 99)], frozenset({old.name}))
        store.commit({"tasks": bad}, MARK)
    assert numbers(reopened(store)) == [1]

    after = reopened(store)
    after.commit({"tasks": Change(SCHEMA, [add(after, "tasks", 2)])}, MARK)
    assert numbers(reopened(store)) == [1, 2]
    if after.manifest.format == "delta":
        table = DeltaTable(after.directory("tasks").uri).to_pyarrow_table()
        assert sorted(table["number"].to_pylist()) == [1, 2]


def test_a_second_writer_is_refused_by_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Location.parse(tmp_path / "out")
    one, other = TableStore.create_or_open(out), TableStore.create_or_open(out)
    one.commit({"tasks": Change(SCHEMA)}, MARK)
    stale = DeltaTable(out.child("tasks").uri)
    one.commit({"tasks": Change(SCHEMA, [add(one, "tasks", 1)])}, MARK)
    change = Change(SCHEMA, [add(other, "tasks", 2)])
    with monkeypatch.context() as patch:
        patch.setattr("taskyard.pipeline.store.delta_table.DeltaFormat._open", lambda *_: stale)
        with pytest.raises(StateLocked, match="is writing"):
            other.commit({"tasks": change}, MARK)
    assert numbers(reopened(one)) == [1]


def test_new_columns_are_added(tmp_path: Path) -> None:
    store = TableStore.create_or_open(Location.parse(tmp_path / "out"))
    narrow = SCHEMA.remove(SCHEMA.get_field_index("flag"))
    old = write_data_file(store.directory("tasks"), rows(1).select(narrow.names), "final")
    store.commit({"tasks": Change(narrow, [old])}, MARK)
    store.commit({"tasks": Change(SCHEMA, [add(store, "tasks", 2)])}, MARK)
    table = DeltaTable(store.directory("tasks").uri).to_pyarrow_table()
    assert sorted(table["flag"].to_pylist(), key=str) == [None, True]


def test_vacuum_removes_what_no_version_lists(store: TableStore) -> None:
    old = add(store, "tasks", 1, prefix="open")
    store.commit({"tasks": Change(SCHEMA, [old])}, MARK)
    add(store, "tasks", 99)  # left by a killed run
    store.commit({"tasks": Change(SCHEMA, [add(store, "tasks", 2)], frozenset({old.name}))}, MARK)
    assert store.vacuum(dt.timedelta(days=1)) == 0
    assert numbers(reopened(store, run=1)) == [1], "kept"
    assert store.vacuum(dt.timedelta(0)) == 2
    assert numbers(reopened(store)) == [2]
    with pytest.raises(UnusableFile, match="no tables of run 1"):
        reopened(store, run=1)


def test_statistics_of_files(tmp_path: Path) -> None:
    file = write_data_file(Location.parse(tmp_path), rows(3, 1, 2), "final")
    document = json.loads(file.stats)
    assert document["minValues"]["number"] == 1
    assert document["maxValues"]["time"] == "2026-01-01T00:00:00.000000Z"
    assert document["nullCount"]["flag"] == 0
    assert "flag" not in document["minValues"]


def test_numbers_and_times_are_written_as_differences(tmp_path: Path) -> None:
    whole = rows(*range(1000))
    codes = whole["broker"].combine_chunks().dictionary_encode()
    file = write_data_file(Location.parse(tmp_path), whole.set_column(0, "broker", codes), "final")
    with pq.ParquetFile(tmp_path / file.name) as written:
        group = written.metadata.row_group(0)
        assert written.read().equals(whole)
    found = {group.column(n).path_in_schema: group.column(n).encodings for n in range(3)}
    assert "RLE_DICTIONARY" in found.pop("broker")
    assert [*found] == ["number", "time"]
    for encodings in found.values():
        assert "DELTA_BINARY_PACKED" in encodings


def test_what_is_not_a_directory_of_tables(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UnusableFile, match=r"it contains 'notes.txt'"):
        TableStore.create_or_open(Location.parse(tmp_path))
    with pytest.raises(UnusableFile, match="no tables found"):
        TableStore.open(Location.parse(tmp_path / "none"))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UnusableFile, match="not a manifest"):
        read_manifest(Location.parse(tmp_path))
    (tmp_path / "manifest.json").write_text('{"format": "delta", "version": 2}')
    with pytest.raises(UnknownFormat, match="tables of version 2"):
        read_manifest(Location.parse(tmp_path))
    with pytest.raises(UnusableFile, match="unknown scheme ftp"):
        Location.parse("ftp://host/tables")


def test_the_format_stays(store: TableStore) -> None:
    store.commit({}, MARK)
    other = {"delta": "parquet", "parquet": "delta"}[store.manifest.format]
    with pytest.raises(UnusableFile, match=f"not {other}"):
        TableStore.create_or_open(store.out, other)


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_tables_in_s3(bucket: str, table_format: str) -> None:
    out = Location.parse(f"{bucket}-{table_format}")
    store = TableStore.create_or_open(out, table_format)
    old = add(store, "tasks", 1, prefix="open")
    store.commit({"tasks": Change(SCHEMA, [old])}, MARK)
    later = Change(SCHEMA, [add(store, "tasks", 1, 2)], frozenset({old.name}))
    store.commit({"tasks": later}, MARK)
    assert numbers(reopened(store)) == [1, 2]
    assert numbers(reopened(store, run=1)) == [1]
    assert store.vacuum(dt.timedelta(0)) == 1
