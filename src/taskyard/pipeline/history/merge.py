"""Merging of small files: a table that grows by some rows each minute stays quick to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import pyarrow as pa
from msgspec import Struct

from taskyard.pipeline.history.memory import Files, coded
from taskyard.pipeline.store.data_file import DataFile, write_data_file

#: A file with fewer rows is small.
ROWS_SMALL: Final = 100_000

#: Small files are merged when there are this many.
FILES_SMALL_MAX: Final = 24


class FilesMerge(Struct, frozen=True):
    """Merges files of a table, in their order."""

    files: Files
    schema: pa.Schema
    name: str

    def __call__(self) -> DataFile:
        rows = self.files.read(coded(self.schema))
        return write_data_file(self.files.directory, rows, "", self.name)


def small_tail(files: Sequence[DataFile]) -> list[DataFile]:
    """Return the small files at the end, if there are many."""
    small = [*takewhile(lambda file: file.rows < ROWS_SMALL, reversed(files))][::-1]
    return small if len(small) >= FILES_SMALL_MAX else []
