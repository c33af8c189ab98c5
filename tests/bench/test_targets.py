"""Verdicts on figures, and the run of several that counts."""

import pytest

from bench.table import TableLine, table_line
from bench.targets import Target

COST = Target(10.0, 6.5)
RATE = Target(25_000, 60_000, at_least=True)


@pytest.mark.parametrize(
    ("bound", "figure", "verdict"),
    [
        (COST, 6.5, "goal"),
        (COST, 6.6, "floor"),
        (COST, 10.0, "floor"),
        (COST, 12.5, "missed, 1.25 × floor"),
        (RATE, 60_000, "goal"),
        (RATE, 59_999, "floor"),
        (RATE, 25_000, "floor"),
        (RATE, 20_000, "missed, 0.80 × floor"),
    ],
)
def test_verdict_names_the_target_that_is_reached(
    bound: Target, figure: float, verdict: str
) -> None:
    assert bound.verdict(figure) == verdict


def test_smallest_cost_counts() -> None:
    assert table_line("a", "µs", [8.0, 7.0, 9.0], COST) == TableLine(
        "a", "µs", 7.0, 9.0, 10.0, 6.5, "floor"
    )


def test_largest_rate_counts() -> None:
    judged = TableLine("a", "tasks/s", 30_000, 10_000, 25_000, 60_000, "floor")
    assert table_line("a", "tasks/s", [10_000, 30_000, 20_000], RATE) == judged


def test_largest_figure_counts_without_a_target_if_higher_is_better() -> None:
    assert table_line("a", "tasks/s", [1.0, 2.0], higher_is_better=True) == TableLine(
        "a", "tasks/s", 2.0, 1.0
    )
