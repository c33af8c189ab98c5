"""The writers: submit each row as a task. A write can be retried and repeated.

The columns of a row are the keys of a task in a file. Each partition submits its own rows in
batches. The broker skips a name that it has with the same payload. So Spark may run a partition any
number of times, and an abort need not undo anything.

The writer of a stream also names rows that have no name. The name is made of the query, the number
of the batch and the content of the row. After a kill, Spark repeats the batch with the same number
and the same rows, perhaps in other partitions, and each row gets the same name again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from pyspark_taskyard.row_names import RowNames, check_apart
from taskyard.campaign.tables import check_columns
from taskyard.core.events import UnknownPolicy
from taskyard.errors import UserError
from taskyard.pipeline.arrow_rows import prepare
from taskyard.pipeline.submit import make_target, submit

if TYPE_CHECKING:
    from pyspark_taskyard.options import SourceOptions
    from taskyard.campaign.submitter import SubmitCounts

_UNKNOWN: Final = {"wait": UnknownPolicy.WAIT, "refuse": UnknownPolicy.REFUSE}


@dataclass
class SubmitCommit(WriterCommitMessage):
    """The counts of one partition."""

    new: int
    existing: int


@dataclass
class BatchCommit(SubmitCommit):
    """Adds the digests of the rows that were named here."""

    digests: bytes


class TaskWriter(DataSourceArrowWriter):
    """Submits a task for each row. Created by the driver, used in the executors."""

    def __init__(self, options: SourceOptions, columns: list[str]) -> None:
        self._rows = _RowSubmitter(options, columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SubmitCommit:
        taken = self._rows.submit(iterator)
        return SubmitCommit(taken.new, taken.existing)


#: Properties that Spark sets for the jobs of a stream.
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


class TaskStreamWriter(DataSourceStreamArrowWriter):
    """Submits a task for each row of a stream, exactly once."""

    def __init__(self, options: SourceOptions, columns: list[str]) -> None:
        self._rows = _RowSubmitter(options, [*dict.fromkeys([*columns, "name"])])

    def write(self, iterator: Iterator[pa.RecordBatch]) -> BatchCommit:
        names = RowNames(*_query_and_batch())
        taken = self._rows.submit(map(names.fill, iterator))
        return BatchCommit(taken.new, taken.existing, names.digests())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002  # Spark's
        """Refuse the batch if rows in two partitions share a name. Spark then repeats it."""
        check_apart(one.digests for one in messages if isinstance(one, BatchCommit))


def _query_and_batch() -> tuple[str, int]:
    """Return the id of the streaming query, which its checkpoint keeps, and the batch's number."""
    context = TaskContext.get()
    query = context and context.getLocalProperty(_QUERY)
    batch = context and context.getLocalProperty(_BATCH)
    if not query or not batch:
        raise UserError("writeStream: this trigger has no batches (use another one)")
    return query, int(batch)


class _RowSubmitter:
    """Submits rows with the keys of a task, in the executors."""

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

    def submit(self, batches: Iterable[pa.RecordBatch]) -> SubmitCounts:
        # Durations start now: a stream may have been running for days.
        target = structs.replace(self._to, now_ns=time.time_ns())
        return submit(self._prepared(batches), target)

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
