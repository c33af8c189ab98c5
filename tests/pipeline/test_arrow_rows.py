"""Tasks as Arrow columns: the fast path gives the same as the slow one."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.tables import rows_of
from taskyard.campaign.task_spec import check_task
from taskyard.pipeline import arrow_rows
from taskyard.pipeline.arrow_rows import (
    PREPARED_SCHEMA,
    RowCollector,
    SharedTerms,
    prepare,
    prepared_to_row,
)
from taskyard.pipeline.submit import submission_of

_NAMES = st.text("ab{ .é\n\0", min_size=0, max_size=4)
_TEXT = pa.string()
_LIST = pa.list_(pa.string())


def _slowly(table: pa.RecordBatch) -> list[dict[str, Any]]:
    gathering = RowCollector("c")
    for place, raw in enumerate(rows_of(table)):
        gathering.add_row(place, raw)
    rows: list[dict[str, Any]] = gathering.flush().to_pylist()
    return rows


def _quickly(table: pa.RecordBatch) -> list[dict[str, Any]]:
    batches = prepare(table, range(table.num_rows), "c")
    return [row for flush in batches for row in flush.to_pylist()]


def _table(**keys: tuple[list[Any], pa.DataType]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array(*one) for name, one in keys.items()})


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            _NAMES,
            st.one_of(st.none(), st.lists(_NAMES, max_size=3)),
            st.one_of(st.none(), st.lists(st.one_of(st.none(), _NAMES), max_size=3)),
            st.one_of(st.none(), _NAMES),
            st.one_of(st.none(), st.integers(-2000, 2000)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_columns_and_rows_give_the_same_tasks(rows: list[tuple[Any, ...]]) -> None:
    names, argv, after, lane, priority = (list(column) for column in zip(*rows, strict=True))
    table = _table(
        name=(names, _TEXT),
        argv=(argv, _LIST),
        after=(after, _LIST),
        lane=(lane, _TEXT),
        priority=(priority, pa.int64()),
    )
    assert _quickly(table) == _slowly(table)


@pytest.mark.parametrize(
    "more",
    [
        {"payload": (["x", "y"], _TEXT)},
        {"payload": (["x", ""], _TEXT)},
        {"payload": ([b"x", b""], pa.binary())},
        {"argv": ([["a", "b"], ["c"]], _LIST), "service": (["s", None], _TEXT)},
        {"argv": ([["a"], ["c"]], _LIST), "after": ([["p", "p"], ["p"]], _LIST)},
        {"argv": ([["a"], ["c"]], _LIST), "slots": ([2, 0], pa.int32())},
        {"argv": ([["a"], ["c"]], _LIST), "due": (["5m", "2031-05-04T12:00:00Z"], _TEXT)},
        {"call": (["m:f", "m:g"], _TEXT), "kwargs": (['{"a": 1}', "[]"], _TEXT)},
        {"argv": (["echo 'a b'", "true"], _TEXT)},
        {"argv": ([["a", ""], ['"', "\\", "é"]], _LIST)},
        {"argv": ([["a", ""], ['"', "b"]], _LIST)},
        {"argv": ([["a", ""], ["\\", "b"]], _LIST)},
        {"argv": ([["a", ""], ["\t", "\x1f"]], _LIST)},
        {"argv": ([["a", ""], ["b c"]], pa.large_list(pa.large_string()))},
        {"argv": ([["", "b"], ["c"]], _LIST)},
        {"argv": ([[], ["c"]], _LIST)},
        {"argv": ([["a\0"], ["c"]], _LIST)},
        {"argv": ([["a"], ["c"]], _LIST), "lane": ([" l", "m "], _TEXT)},
        {"argv": ([["a"], ["c"]], _LIST), "after": ([["x "], [" y", "z"]], _LIST)},
        {"argv": ([["a"], ["c"]], _LIST), "lane": (["{name}", "b"], _TEXT)},
        {"argv": ([["a"], ["c"]], _LIST), "lane": (["l\x7f", "m"], _TEXT)},
        {"argv": ([["a"], ["c"]], _LIST), "after": ([["x\ty"], ["z"]], _LIST)},
    ],
)
def test_other_column_types_give_the_same_tasks(more: dict[str, Any]) -> None:
    table = _table(name=(["n", "m"], _TEXT), **more)
    assert _quickly(table) == _slowly(table)


def test_slice_of_a_table_is_read_from_its_offset() -> None:
    table = _table(
        name=(["a", "b", "c"], _TEXT),
        argv=([["x"], ["y", "z"], ["q"]], _LIST),
        after=([["o"], None, ["p", "r"]], _LIST),
    )
    assert _quickly(table.slice(1)) == _slowly(table.slice(1))
    assert arrow_rows._fast_columns(table.slice(1)) is not None  # noqa: SLF001  # the quick way was taken


def test_submission_of_columns_equals_submission_of_tasks() -> None:
    raws: list[dict[str, Any]] = [
        {"name": "a", "argv": ["true"], "env": {"A": "1"}},
        {"name": "b", "call": "m:f", "args": [1], "after": ["a", "x"], "priority": 3, "lane": "l"},
        {"name": "c", "payload": "p", "service": "s", "retries": [1, 2], "backoff": "5s"},
        {"name": "d", "payload": "q", "due": "1h", "expiry": "2h", "slots": 2, "time_limit": 9},
    ]
    gathering = RowCollector("c")
    for place, raw in enumerate(raws):
        gathering.add_row(place, raw)
    whole = encode_batch([check_task(raw) for raw in raws], b"camp", 1000)
    assert submission_of(gathering.flush(), SharedTerms(b"camp", 1000)) == whole


def test_prepared_task_converts_back_to_its_row() -> None:
    raw = {"name": "b", "argv": ["a", "b"], "after": ["a"], "priority": 3, "lane": "l", "cwd": "/"}
    gathering = RowCollector("c")
    gathering.add_row(7, raw)
    gathering.add_row(8, {"name": "p", "payload": "x", "service": "s"})
    first, second = gathering.flush().to_pylist()
    assert prepared_to_row(first) == raw
    assert prepared_to_row(second) == {"name": "p", "payload": "x", "service": "s"}


def test_invalid_row_is_kept_with_its_reason() -> None:
    gathering = RowCollector("c")
    gathering.add_row(1, {"name": "n", "argv": "no list"})
    gathering.add_row(2, {"name": "n", "argv": ["p"], "recipients": ["r"]})
    first, second = gathering.flush().to_pylist()
    assert first["reason"].startswith('"argv" must be a list of words')
    assert msgspec.json.decode(first["row"]) == {"name": "n", "argv": "no list"}
    assert second["reason"] == 'has "recipients" but no "payload"'
    assert gathering.flush().schema == PREPARED_SCHEMA
