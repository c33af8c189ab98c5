"""The events of a running broker for a stream: its records, each requested once.

Campaign, service, lane and priority are known only for tasks submitted within a batch, so that a
repeated batch is the same.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pyspark_taskyard import broker_tables
from pyspark_taskyard.record_ranges import BatchEnd, RecordRange, packed_ranges
from pyspark_taskyard.tables import ARROW

if TYPE_CHECKING:
    from pyspark_taskyard.options import SourceOptions


class BrokerLog:
    """The events of one broker. Implements `EventLog`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        #: Records after `_after`, up to `_read_up_to`.
        self._after = self._read_up_to = 0
        self._records: list[dict[str, Any]] = []

    def first(self) -> int:
        """Return the last record that the broker's journal no longer has."""
        with broker_tables.connect(self._options) as client:
            reply = client.poll_records(0)
        return reply.cursor if reply.gap else 0

    def newest(self) -> int:
        return broker_tables.last_record(self._options)

    def end_within(self, after: int, newest: int, rows_max: int) -> int:
        self._read(after, newest, rows_max)
        rows = [(one["record"], _rows_in(one)) for one in self._records if one["record"] > after]
        numbers, counts = zip(*rows, strict=True) if rows else ((), ())
        end = BatchEnd(after, rows_max)
        end.add(np.repeat(np.array(numbers, np.int64), np.array(counts, np.int64)))
        return end.record if end.is_full else newest

    def ranges(self, after: int, last: int) -> list[RecordRange]:
        self._read(after, last, None)
        wanted = [one for one in self._records if after < one["record"] <= last]
        batches = broker_tables.event_batches([wanted])
        return packed_ranges(pa.Table.from_batches(batches, ARROW["events"]), after, last)

    def forget(self, last: int) -> None:
        if last > self._after:
            self._records = [one for one in self._records if one["record"] > last]
            self._after, self._read_up_to = last, max(last, self._read_up_to)

    def _read(self, after: int, last: int, rows_max: int | None) -> None:
        """Request records up to `last`, or until there are more than `rows_max` rows of them."""
        if after < self._after or after > self._read_up_to:
            self._records, self._after, self._read_up_to = [], after, after
        known = sum(_rows_in(one) for one in self._records if one["record"] > after)
        pages = broker_tables.records(self._options, self._read_up_to, last)
        while self._read_up_to < last and (rows_max is None or known <= rows_max):
            page = next(islice(pages, 1), None)
            if page is None:
                self._read_up_to = last
                return
            self._records += page.records
            self._read_up_to = min(page.cursor, last)
            known += sum(map(_rows_in, page.records))


def _rows_in(one: dict[str, Any]) -> int:
    names = one.get("names")
    return 1 if names is None else len(names)
