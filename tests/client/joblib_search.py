"""A grid search that is killed and started again: `joblib_search.py STATE LOG`.

Each fit writes a line to LOG when it begins and when it ends. The fits of a number wait until the
file LOG.NUMBER exists.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import joblib
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import GridSearchCV

import taskyard.joblib  # noqa: F401  # registers the backend

NUMBERS = 6
FOLDS = 2


class Slow(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # without types
    """Predicts its number. Counts its fits in a file."""

    def __init__(self, number: int = 0, log: str = "") -> None:
        self.number = number
        self.log = log

    def fit(self, rows: Any, labels: Any) -> Self:
        self.classes_ = np.unique(labels)
        self._write("begin", int(rows[0, 0]))
        while not os.path.exists(f"{self.log}.{self.number}"):  # noqa: PTH110  # as it is quick
            time.sleep(0.02)
        self._write("end", int(rows[0, 0]))
        return self

    def _write(self, what: str, fold: int) -> None:
        with Path(self.log).open("a") as log:
            log.write(f"{what} {self.number} {fold}\n")

    def predict(self, rows: Any) -> Any:
        return np.full(len(rows), self.number % 2)


def search(log: str, numbers: Sequence[int]) -> Any:
    """Fit all candidates, and return their scores."""
    rows = np.arange(40).reshape(20, 2)
    labels = np.array([0, 1] * 10)
    grid = {"number": [*numbers]}
    found = GridSearchCV(Slow(log=log), grid, cv=FOLDS, refit=False, pre_dispatch="all")
    return found.fit(rows, labels).cv_results_["mean_test_score"]


def main(state: str, log: str) -> None:
    with joblib.parallel_config("taskyard", state=state, campaign="search"):
        print(*search(log, range(NUMBERS)))  # noqa: T201  # for the test


if __name__ == "__main__":
    main(*sys.argv[1:])
