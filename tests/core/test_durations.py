"""Durations as text, measured and rough."""

import pytest

from taskyard.core.durations import duration_text, rough_duration, rough_duration_ns


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.97, "10 s"),
        (59.6, "1 min"),
        (65, "1 min 5 s"),
        (3599.6, "1 h"),
        (4320, "1 h 12 min"),
        (90_000, "1 d 1 h"),
        (86_400_000, "1,000 d"),
    ],
)
def test_measured_duration_is_rounded(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9, "0 s"),
        (59.9, "59 s"),
        (90, "1 min 30 s"),
        (599, "9 min 59 s"),
        (601, "10 min"),
        (3599.9, "59 min"),
        (7_320, "2 h 2 min"),
        (4e6, "46 d 7 h"),
    ],
)
def test_rough_duration_is_rounded_down(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


def test_rough_duration_is_never_negative() -> None:
    assert rough_duration_ns(-5) == "0 s"
