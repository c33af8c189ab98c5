"""Datasets: the check of a frame, and the tables in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.errors import UserError
from taskyard.pipeline.datasets import DATASETS, EDGES, Dataset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parent.parent.parent / "docs" / "pipeline.md"


def test_extra_columns_are_dropped(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        [("b", "x", 1, 2, "a")],
        "after string, more string, record long, sequence long, task string",
    )
    assert [tuple(row) for row in EDGES.check(frame).collect()] == [(2, 1, "a", "b")]


def test_all_missing_and_mistyped_columns_are_named(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("1", "a")], "sequence string, task string")
    with pytest.raises(UserError) as error:
        EDGES.check(frame)
    assert str(error.value) == (
        "not a table of edges: no column record, after; sequence is string instead of bigint "
        "(was it written by another version?)"
    )


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_names_each_column_once_with_a_meaning(name: str) -> None:
    columns = DATASETS[name].columns
    assert len({column.name for column in columns}) == len(columns)
    assert all(column.meaning for column in columns)


def dataset_table(dataset: Dataset) -> str:
    """Return the heading and the table of a dataset, as `docs/pipeline.md` has them."""
    lines = [
        f"### `{dataset.name}`: {dataset.row_meaning}",
        "",
        "| column | type | meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{column.name}` | {column.kind.simpleString()} | {column.meaning} |"
        for column in dataset.columns
    ]
    return "\n".join(lines) + "\n"


def test_page_has_every_column_of_every_dataset() -> None:
    page = PAGE.read_text()
    for dataset in DATASETS.values():
        table = dataset_table(dataset)
        assert table in page, f"docs/pipeline.md must have this table:\n{table}"
