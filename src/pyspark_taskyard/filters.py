"""Spark's filters as Arrow expressions, to leave out rows before they reach the JVM.

Spark evaluates every filter again. So a filter that has no expression here costs time but changes
nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource

_COMPARISONS: Final[dict[type, Callable[[Any, Any], pc.Expression]]] = {
    datasource.EqualTo: operator.eq,
    datasource.GreaterThan: operator.gt,
    datasource.GreaterThanOrEqual: operator.ge,
    datasource.LessThan: operator.lt,
    datasource.LessThanOrEqual: operator.le,
}

_TEXTS: Final[dict[type, Callable[[pc.Expression, str], pc.Expression]]] = {
    datasource.StringStartsWith: pc.starts_with,
    datasource.StringEndsWith: pc.ends_with,
    datasource.StringContains: pc.match_substring,
}


def expression_of(filters: Iterable[datasource.Filter], schema: pa.Schema) -> pc.Expression | None:
    """Return what all known filters on these columns demand. None if there are none."""
    found: pc.Expression | None = None
    for one in filters:
        known = _expression(one, schema)
        if known is not None:
            found = known if found is None else found & known
    return found


def equal_value(filters: Iterable[datasource.Filter], column: str) -> str | None:
    """Return the text that a column must equal. None if it may have several."""
    for one in filters:
        if isinstance(one, datasource.EqualTo) and one.attribute == (column,):
            return one.value if isinstance(one.value, str) else None
    return None


def filtered(
    batches: Iterable[pa.RecordBatch], wanted: pc.Expression | None
) -> Iterator[pa.RecordBatch]:
    """Leave out rows that do not fulfil an expression."""
    for batch in batches:
        yield from (
            [batch]
            if wanted is None
            else pa.Table.from_batches([batch]).filter(wanted).to_batches()
        )


def _expression(one: datasource.Filter, schema: pa.Schema) -> pc.Expression | None:
    path: datasource.ColumnPath = getattr(one, "attribute", ())
    if len(path) != 1 or path[0] not in schema.names:
        return None
    column, kind = pc.field(path[0]), schema.field(path[0]).type
    if isinstance(one, datasource.IsNull | datasource.IsNotNull):
        return column.is_null() if isinstance(one, datasource.IsNull) else column.is_valid()
    try:
        return _with_value(one, column, kind)
    except (pa.ArrowException, TypeError):  # a value of another type
        return None


def _with_value(
    one: datasource.Filter, column: pc.Expression, kind: pa.DataType
) -> pc.Expression | None:
    value: Any = getattr(one, "value", None)
    if isinstance(one, datasource.In):
        return column.isin(pa.array(value, kind))
    if type(one) in _COMPARISONS:
        return _COMPARISONS[type(one)](column, pa.scalar(value, kind))
    is_text = type(one) in _TEXTS and pa.types.is_string(kind)
    return _TEXTS[type(one)](column, value) if is_text else None
