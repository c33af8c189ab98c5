"""Names of a stream's rows that have none: the same row of the same batch gets the same name.

A name is made of the query, the number of the batch and the content of the row, not of its
partition and position: Spark may spread a repeated batch over other partitions, in another order.
Equal rows of a partition are counted. Equal rows of two partitions can't be, and are refused.
Knows nothing of Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from taskyard.errors import UserError

_NAME: Final = "name"
_DIGEST_BYTES: Final = 8

#: Columns in any order, and columns that are null or missing, give the same bytes.
_encode = msgspec.json.Encoder(enc_hook=repr, order="sorted").encode


class RowNames:
    """Names the rows of one partition of a batch."""

    def __init__(self, query: str, batch: int) -> None:
        self._query, self._batch = query.encode(), batch
        self._rows_by_digest: Counter[bytes] = Counter()

    def fill(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows that all have a name. Given names stay."""
        at = rows.schema.get_field_index(_NAME)
        given = [None] * rows.num_rows if at < 0 else rows.column(at).to_pylist()
        if None not in given:
            return rows
        contents = (rows if at < 0 else rows.remove_column(at)).to_pylist()
        names = [
            self._next(content) if name is None else name
            for name, content in zip(given, contents, strict=True)
        ]
        column = pa.array(names, pa.string())
        if at < 0:
            return rows.append_column(_NAME, column)
        return rows.set_column(at, _NAME, column)

    def _next(self, content: dict[str, object]) -> str:
        known = {key: value for key, value in content.items() if value is not None}
        digest = blake2b(_encode(known), digest_size=_DIGEST_BYTES, key=self._query).digest()
        number = self._rows_by_digest[digest]
        self._rows_by_digest[digest] = number + 1
        return f"batch-{self._batch}-{digest.hex()}{f'-{number}' if number else ''}"

    def digests(self) -> bytes:
        """Return the digests of all different rows that were named."""
        return b"".join(self._rows_by_digest)


def check_apart(digests_by_partition: Iterable[bytes]) -> None:
    """Raise UserError if two partitions have named equal rows: they got the same name."""
    found = [np.frombuffer(digests, np.uint64) for digests in digests_by_partition]
    rows = np.concatenate(found) if found else np.zeros(0, np.uint64)
    repeated = len(rows) - len(np.unique(rows))
    if repeated:
        raise UserError(
            f"equal rows without a name in several partitions: {repeated} (give each row a name, "
            "or repartition by all columns before writing)"
        )
