"""Validation of a campaign's graph: every kind of error is found and named."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from taskyard.pipeline.arrow_rows import RowCollector
from taskyard.pipeline.jobs.load import plan
from taskyard.pipeline.validate import COLUMNS, ValidationResult, validate


def _judged(
    tasks: list[tuple[str, list[str]]], seconds: list[float] | None = None, **how: Any
) -> ValidationResult:
    gathering = RowCollector("c")
    for line, (name, after) in enumerate(tasks, start=1):
        took = None if seconds is None else seconds[line - 1]
        gathering.add_row(line, {"name": name, "payload": "x", "after": after}, took)
    table = pa.Table.from_batches([gathering.flush()]).select(list(COLUMNS))
    return validate(table, lambda place: ("f", place), **how)


def test_levels_order_and_sizes() -> None:
    found = _judged([("d", ["b", "c"]), ("b", ["a"]), ("a", []), ("c", ["a"])])
    assert found.rows.tolist() == [2, 1, 3, 0]
    assert found.levels.tolist() == [0, 1, 1, 2]
    assert (found.tasks, found.edges, found.roots) == (4, 4, 1)
    assert (found.sizes, found.width, found.widest) == ([1, 2, 1], 2, 2)
    assert found.services == {"default": 4}
    assert found.rejected == {}


def test_duplicate_name_is_rejected() -> None:
    found = _judged([("a", []), ("b", []), ("a", ["b"])])
    assert found.rejected == {3: "duplicate name 'a', first on line 1"}
    assert found.duplicates == 1
    assert found.rows.tolist() == [0, 1]


@pytest.mark.parametrize("length", [2, 50])
def test_cycle_is_found_and_named(length: int) -> None:
    ring = [(f"r{n}", [f"r{(n + 1) % length}"]) for n in range(length)]
    found = _judged([("free", []), *ring, ("behind", ["r0"])])
    assert [sorted(cycle) for cycle in found.cycles] == [sorted(name for name, _ in ring)]
    assert found.rejected[2].startswith("is in a cycle: 'r0' after 'r1'")
    assert found.rejected[length + 2] == "waits for 'r0', which was rejected (line 2)"
    assert len(found.rejected) == length + 1
    assert found.rows.tolist() == [0]


def test_task_that_waits_for_itself_is_rejected_with_its_dependents() -> None:
    found = _judged([("a", ["a"]), ("b", ["a"]), ("c", ["b"])])
    assert found.rejected == {
        2: "waits for 'a', which was rejected (line 1)",
        3: "waits for 'b', which was rejected (line 2)",
    }
    assert found.unknown == {}


def test_unknown_names_are_counted_and_rejected_on_request() -> None:
    tasks = [("a", ["x"]), ("b", ["x", "y"]), ("c", ["a"]), ("d", [])]
    found = _judged(tasks)
    assert found.unknown == {"x": 2, "y": 1}
    assert found.rejected == {}
    sure = _judged(tasks, existing=["x"], reject_unknown=True)
    assert sure.rejected == {2: "waits for 'y', which neither the file nor the broker has"}
    assert sure.rows.tolist() == [0, 3, 2]


def test_critical_path_is_by_time_if_known() -> None:
    tasks = [("a", []), ("b", ["a"]), ("c", ["b"]), ("long", []), ("end", ["c", "long"])]
    by_number = _judged(tasks).critical_path
    assert (by_number.names, by_number.seconds) == (["a", "b", "c", "end"], None)
    by_time = _judged(tasks, [1.0, 1.0, 1.0, 10.0, 2.0]).critical_path
    assert (by_time.names, by_time.seconds) == (["long", "end"], 12.0)


def test_empty_campaign_is_valid() -> None:
    found = _judged([])
    assert (found.tasks, found.width, found.widest, found.critical_path.names) == (0, 0, 0, [])


def test_small_levels_share_a_portion_and_large_ones_are_spread() -> None:
    waves = plan([1, 2, 3, 40, 4, 4, 1], wave=5, portion=10)
    assert waves == [[0, 3], [3, 6], [6, 16, 26, 36, 46], [46, 50], [50, 55]]


def test_levels_that_follow_each_other_are_never_spread() -> None:
    assert plan([4, 8, 30], wave=9, portion=10) == [[0, 4], [4, 12], [12, 22, 32, 42]]
    assert plan([], wave=9) == []
