"""Scratch files: parts and columns of a table, read by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from taskyard.errors import UnusableFile
from taskyard.pipeline.fold.columns import CODED_TYPE
from taskyard.pipeline.history.scratch import ScratchFile, write_scratch
from taskyard.pipeline.store.location import Location

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = pa.schema([("kind", CODED_TYPE), ("number", pa.int64()), ("name", pa.string())])


def whole() -> pa.Table:
    kinds = pa.array(["a", "b", None, "a", "b"]).dictionary_encode().cast(CODED_TYPE)
    return pa.table([kinds, pa.array([1, 2, 3, 4, None]), pa.array([*"vwxyz"])], schema=SCHEMA)


def written(directory: Path) -> ScratchFile:
    """Write a table in three parts: two record batches, nothing, and one record batch."""
    table = whole()
    first = pa.concat_tables([table.slice(0, 1), table.slice(1, 2)])
    parts = [first, table.slice(0, 0), table.slice(3)]
    return write_scratch(Location.parse(directory / "new"), parts, SCHEMA)


def test_a_part_is_read_by_itself(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert file.read() == whole()
    assert [file.read(part) for part in range(3)] == [
        whole().slice(0, 3),
        whole().slice(0, 0),
        whole().slice(3),
    ]


def test_columns_are_read_in_the_order_of_the_request(tmp_path: Path) -> None:
    names = ("name", "kind")
    assert written(tmp_path).read(columns=names) == whole().select(names)
    assert written(tmp_path).read(2, ("number",)) == whole().slice(3).select(["number"])


def test_a_directory_that_can_not_be_created_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("a file")
    with pytest.raises(UnusableFile, match="new"):
        written(tmp_path)
