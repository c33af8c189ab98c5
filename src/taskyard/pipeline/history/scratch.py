"""Scratch files: tables that wait for a later step of the same run, in some executor.

Arrow's own format, because nothing else reads them. Compared with Parquet, it takes a quarter of
the time to write and read. A file may have parts, each of which can be read by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa
from msgspec import Struct

from taskyard.errors import UnusableFile
from taskyard.pipeline.store.data_file import new_name
from taskyard.pipeline.store.location import Location

_SUFFIX: Final = "arrow"


class ScratchFile(Struct, frozen=True):
    """A file of one table."""

    directory: Location
    name: str
    #: The first record batch of each part, and the number of all.
    bounds: tuple[int, ...]

    def read(self, part: int | None = None, columns: tuple[str, ...] | None = None) -> pa.Table:
        """Read one part or all, and some columns or all."""
        system, path = self.directory.open()
        with system.open_input_file(f"{path}/{self.name}") as source:
            options = pa.ipc.IpcReadOptions(use_threads=False)
            file = pa.ipc.open_file(source, options=options)
            if columns is not None:
                options.included_fields = [*map(file.schema.get_field_index, columns)]
                file = pa.ipc.open_file(source, options=options)
            first, last = (0, self.bounds[-1]) if part is None else self.bounds[part : part + 2]
            batches = [file.get_batch(number) for number in range(first, last)]
            table = pa.Table.from_batches(batches, file.schema)
        return table if columns is None else table.select(columns)


def write_scratch(directory: Location, parts: Iterable[pa.Table], schema: pa.Schema) -> ScratchFile:
    """Write the parts of a table to a new file. Their codes must stand for the same strings."""
    system, path = directory.open()
    name = new_name("part", _SUFFIX)
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    bounds = [0]
    try:
        if directory.is_local:
            system.create_dir(path)
        with (
            system.open_output_stream(f"{path}/{name}") as sink,
            pa.ipc.new_file(sink, schema, options=options) as writer,
        ):
            for part in parts:
                batches = part.to_batches()
                for batch in batches:
                    writer.write_batch(batch)
                bounds.append(bounds[-1] + len(batches))
    except OSError as error:
        raise UnusableFile(f"{directory}: {error}") from error
    return ScratchFile(directory, name, tuple(bounds))
