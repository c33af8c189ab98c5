"""Datasets: what a table's rows are, column by column, and whether a DataFrame is one.

Owns names, types and meanings of columns; `docs/pipeline.md` has tables made of them. Knows nothing
of where rows come from or how they are computed.
"""

from taskyard.pipeline.datasets.dataset import Column, Dataset
from taskyard.pipeline.datasets.derived import (
    ATTEMPTS,
    CRITICAL_PATH,
    METRICS,
    PLACED_TASKS,
    TASKS,
    TASKS_WITHOUT_GRAPH,
    WORKERS,
)
from taskyard.pipeline.datasets.raw import EDGES, EVENTS, REJECTS

#: Every dataset by its name, in the order in which they are made.
DATASETS = {
    dataset.name: dataset
    for dataset in (
        EVENTS,
        EDGES,
        ATTEMPTS,
        TASKS,
        WORKERS,
        METRICS,
        CRITICAL_PATH,
        REJECTS,
    )
}

__all__ = [
    "ATTEMPTS",
    "CRITICAL_PATH",
    "DATASETS",
    "EDGES",
    "EVENTS",
    "METRICS",
    "PLACED_TASKS",
    "REJECTS",
    "TASKS",
    "TASKS_WITHOUT_GRAPH",
    "WORKERS",
    "Column",
    "Dataset",
]
