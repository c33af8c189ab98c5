"""Columns as arrays: Arrow to numpy and back, groups of equal keys, running values within groups.

Owns the treatment of nulls: texts are codes with -1 for null, numbers have a mask. Knows nothing of
events or tables.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Flags: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
#: Numbers of any width.
Array: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]

TIME: Final = pa.timestamp("us", tz="UTC")

#: Strings as codes.
CODED_TYPE: Final = pa.dictionary(pa.int32(), pa.string())
INT_MAX: Final = int(np.iinfo(np.int64).max)
INT_MIN: Final = int(np.iinfo(np.int64).min)

_MICROSECOND_NS: Final = 1000

#: Groups are found without a sort if there are at most this many possible keys for each row.
_KEYS_PER_ROW_MAX: Final = 8


class Text(Struct, frozen=True):
    """A column of strings: a code for each row, -1 for null, and the string of each code."""

    codes: Array
    values: pa.Array

    def at(self, rows: Array) -> Text:
        return Text(self.codes[rows], self.values)

    def where(self, is_kept: Flags) -> Text:
        """Return the column with null where the flag is not set."""
        return Text(np.where(is_kept, self.codes, -1), self.values)

    def is_any(self, wanted: tuple[str, ...]) -> Flags:
        """Return whether each row is one of these strings."""
        found = pc.is_in(self.values, pa.array(wanted, pa.string())).to_numpy(zero_copy_only=False)
        return np.append(found.astype(bool), values=False)[self.codes]

    @property
    def arrow(self) -> pa.Array:
        indices = pa.array(self.codes, pa.int32(), mask=self.codes < 0)
        return pa.DictionaryArray.from_arrays(indices, self.values)


class Number(Struct, frozen=True):
    """A column of integers, with a mask of the rows that are not null. None: no row is null."""

    values: Ints
    known: Flags | None = None

    @property
    def is_known(self) -> Flags:
        return np.ones(len(self.values), bool) if self.known is None else self.known

    def at(self, rows: Array) -> Number:
        return Number(self.values[rows], None if self.known is None else self.known[rows])

    def where(self, is_kept: Flags) -> Number:
        """Return the column with null where the flag is not set."""
        return Number(self.values, is_kept if self.known is None else self.known & is_kept)

    def filled(self, value: int) -> Ints:
        """Return the values, with this one in place of null."""
        return self.values if self.known is None else np.where(self.known, self.values, value)

    @property
    def is_true(self) -> Flags:
        """Return whether each row is known and not 0."""
        is_set: Flags = self.values != 0
        return is_set if self.known is None else is_set & self.known

    @property
    def arrow(self) -> pa.Array:
        return pa.array(self.values, pa.int64(), mask=None if self.known is None else ~self.known)

    @property
    def flags(self) -> pa.Array:
        """Return the column as booleans."""
        mask = None if self.known is None else ~self.known
        return pa.array(self.values != 0, pa.bool_(), mask=mask)

    @property
    def micros(self) -> pa.Array:
        """Return microseconds since the epoch as times."""
        return self.arrow.cast(TIME)

    @property
    def times(self) -> pa.Array:
        """Return nanoseconds since the epoch as times, rounded down."""
        return Number(self.values // _MICROSECOND_NS, self.known).micros


def text(column: pa.ChunkedArray | pa.Array) -> Text:
    """Read a column of strings, plain or coded."""
    whole = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    if not len(whole):
        return Text(np.empty(0, np.int32), pa.array([], pa.string()))
    if pa.types.is_dictionary(whole.type):
        chunks = whole.unify_dictionaries().chunks
    else:
        chunks = pc.dictionary_encode(whole).chunks  # they share their strings
    codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in chunks]
    return Text(np.concatenate(codes), chunks[0].dictionary.cast(pa.string()))


def number(column: pa.ChunkedArray | pa.Array) -> Number:
    """Read a column of integers, booleans or times. Times become microseconds."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_boolean(whole.type):
        whole = whole.cast(pa.int8())
    whole = whole.cast(pa.int64())
    known = whole.is_valid().to_numpy(zero_copy_only=False) if whole.null_count else None
    return Number(whole.fill_null(0).to_numpy(zero_copy_only=False), known)


def codes_of(strings: pa.Array) -> pa.Array:
    """Return strings as codes."""
    coded = strings if pa.types.is_dictionary(strings.type) else strings.dictionary_encode()
    return coded.cast(CODED_TYPE)


def constant(value: str | None, count: int) -> pa.Array:
    """Return a column with the same string in each row."""
    if value is None:
        return pa.nulls(count, pa.string())
    return pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(count, np.int32)), pa.array([value], pa.string())
    )


def plain(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema, with their exact types and no codes."""
    columns = [_decoded(table[field.name]).cast(field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def kept(table: pa.Table, is_kept: Flags) -> pa.Table:
    """Return the flagged rows of a table. A table of all rows is not copied."""
    if is_kept.all():
        return table
    return table.filter(pa.array(is_kept)) if is_kept.any() else table.slice(0, 0)


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        return column
    return column.cast(column.type.value_type)


class Groups(Struct, frozen=True):
    """Rows with equal keys. Groups are numbered in the order of their keys."""

    #: The group of each row.
    of_row: Ints
    #: The key of each group.
    keys: Ints

    @property
    def count(self) -> int:
        return len(self.keys)

    def sums(self, values: Array) -> Ints:
        """Add up values by group, exactly."""
        found = np.zeros(self.count, np.int64)
        np.add.at(found, self.of_row, values)
        return found

    def counts(self, flags: Flags) -> Ints:
        """Count the flagged rows of each group."""
        return np.bincount(self.of_row[flags], minlength=self.count)

    def maxima(self, values: Number) -> Number:
        """Return the largest known value of each group."""
        found = np.full(self.count, INT_MIN)
        known = values.is_known
        np.maximum.at(found, self.of_row[known], values.values[known])
        return Number(found, found != INT_MIN)


def grouped(keys: Ints) -> Groups:
    """Group rows by keys of 0 and more."""
    size = int(keys.max()) + 1 if len(keys) else 0
    if size <= _KEYS_PER_ROW_MAX * len(keys):
        is_used = np.zeros(size, bool)
        is_used[keys] = True
        return Groups((np.cumsum(is_used) - 1)[keys], np.flatnonzero(is_used))
    found, of_row = np.unique(keys, return_inverse=True)
    return Groups(of_row, found)


def distinct(values: Ints) -> Ints:
    """Return each value once, sorted. Sorting is quicker here than the hashes of `np.unique`."""
    found = np.sort(values)
    return found[is_first(found)]


def combined(*columns: Array) -> Ints:
    """Return one key for each row from several columns of -1 and more. They sort like the rows."""
    keys = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:
        width = int(column.max()) + 2 if len(column) else 1
        if size > INT_MAX // width:
            keys = grouped(keys).of_row
            size = int(keys.max()) + 1
        keys = keys * width + column + 1
        size *= width
    return keys


def is_first(keys: Array) -> Flags:
    """Return whether each row of sorted keys is the first of its key."""
    found = np.ones(len(keys), bool)
    found[1:] = keys[1:] != keys[:-1]
    return found


def is_last(keys: Array) -> Flags:
    """Return whether each row of sorted keys is the last of its key."""
    found = np.ones(len(keys), bool)
    found[:-1] = keys[1:] != keys[:-1]
    return found


def running_sums(values: Ints, starts: Flags) -> Ints:
    """Add up values from the start of each run of rows to each row."""
    totals = np.cumsum(values)
    begins = np.flatnonzero(starts)
    base = (totals - values)[begins]
    lengths = np.diff(np.append(begins, len(values)))
    return totals - np.repeat(base, lengths)


def maxima_before(values: Ints, starts: Flags) -> Number:
    """Return the largest value of the rows before each row in its run. Null for the first."""
    # Ranks keep values of all runs apart in one pass: a later run has larger numbers.
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values))
    offsets = (np.cumsum(starts) - 1) * len(values)
    best = np.maximum.accumulate(ranks + offsets)
    before = np.empty(len(values), np.int64)
    before[1:] = best[:-1]
    before[starts] = offsets[starts]
    return Number(values[order][before - offsets], ~starts)
