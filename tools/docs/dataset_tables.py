"""Print the tables of docs/pipeline.md: `python -m docs.dataset_tables`.

Has every dataset, column by column. A test compares them with the page.
"""

import sys

from taskyard.pipeline.datasets.dataset import Dataset

from taskyard.pipeline.datasets import DATASETS


def dataset_tables() -> dict[str, str]:
    """Return a heading and a table for each dataset, by its name."""
    return {dataset.name: _table(dataset) for dataset in DATASETS.values()}


def _table(dataset: Dataset) -> str:
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


if __name__ == "__main__":
    sys.stdout.write("\n".join(dataset_tables().values()))
