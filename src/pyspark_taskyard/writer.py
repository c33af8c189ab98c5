"""The writer: submits each row as a task. A write can be retried and repeated.

The columns of a row are the keys of a task in a file. Each partition submits its own rows in
batches. The broker skips a name that it has with the same payload. So Spark may run a partition any
number of times, and an abort need not undo anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from taskyard.campaign.parquet import check_columns
from taskyard.core.events import UnknownPolicy
from taskyard.errors import UserError
from taskyard.pipeline.arrow_rows import prepare
from taskyard.pipeline.submit import make_target, submit

if TYPE_CHECKING:
    from pyspark_taskyard.options import SourceOptions

_UNKNOWN: Final = {"wait": UnknownPolicy.WAIT, "refuse": UnknownPolicy.REFUSE}


@dataclass
class SubmitCommit(WriterCommitMessage):
    """The counts of one partition."""

    new: int
    existing: int


class TaskWriter(DataSourceArrowWriter):
    """Submits a task for each row. Created by the driver, used in the executors."""

    def __init__(self, options: SourceOptions, columns: list[str]) -> None:
        check_columns(columns, "the frame")
        # Partitions run in any order, so a dependency may be submitted later.
        unknown = options.unknown or ("wait" if "after" in columns else "refuse")
        if unknown not in _UNKNOWN:
            raise UserError(f"option unknown: {unknown!r} is not wait or refuse")
        self._service = options.service
        self._to = make_target(
            options.endpoint(), options.key, options.campaign or "", _UNKNOWN[unknown]
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SubmitCommit:
        taken = submit(self._prepared(iterator), self._to)
        return SubmitCommit(taken.new, taken.existing)

    def _prepared(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        row = 0
        for batch in batches:
            places = np.arange(row, row + batch.num_rows)
            row += batch.num_rows
            for prepared in prepare(self._with_service(batch), places, self._to.campaign):
                _check(prepared)
                yield prepared

    def _with_service(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Set the default service of rows that have none."""
        if self._service is None:
            return batch
        if "service" in batch.schema.names:
            at = batch.schema.get_field_index("service")
            filled = pc.fill_null(batch.column(at), self._service)
            return batch.set_column(at, "service", filled)
        return batch.append_column("service", pa.repeat(self._service, batch.num_rows))


def _check(prepared: pa.RecordBatch) -> None:
    """Raise UserError if a row is not a valid task."""
    bad = prepared.filter(pc.is_valid(prepared["reason"]))
    if bad.num_rows:
        first = bad.slice(0, 1).to_pylist()[0]
        name = f"task {first['name']!r}" if first["name"] else f"row {first['place'] + 1}"
        raise UserError(
            f"{name} {first['reason']} ({bad.num_rows} invalid rows in this batch, earlier ones "
            "may be submitted, and writing them again is harmless)"
        )
