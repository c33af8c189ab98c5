"""Text for people: moments, sizes, signals and shortened names."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from taskyard.cli.format import (
    format_date,
    format_moment,
    format_signal,
    format_size,
    format_utc,
    shorten_middle,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Live two hours east of Greenwich."""
    monkeypatch.setenv("TZ", "XYZ-2")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


#: 14:03:20 by the local clock.
NOW = datetime.fromisoformat("2026-11-16T14:03:20+02:00").timestamp()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "now"),
        (-5, "5 s ago"),
        (-12 * 60 - 30, "12 min ago"),
        (3599, "in 59 min"),
        (-3 * 3600 - 300, "3 h 5 min ago"),
        (-13 * 3600, "today 01:03"),
        (-24 * 3600, "yesterday 14:03"),
        (-38 * 3600, "yesterday 00:03"),
        (24 * 3600, "tomorrow 14:03"),
        (-3 * 86_400, "2026-11-13 14:03"),
        (400 * 86_400, "2027-12-21 14:03"),
    ],
)
def test_moment_is_relative_while_it_is_near(seconds: float, text: str) -> None:
    assert format_moment(NOW + seconds, NOW) == text


def test_date_is_local_and_programs_get_utc() -> None:
    assert format_date(NOW) == "2026-11-16 14:03:20"
    assert format_utc(NOW + 0.9) == "2026-11-16T12:03:20Z"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (10 * 1024**2, "10 MiB"),
        (1024**3 - 1, "1.0 GiB"),
        (4.2 * 1024**3, "4.2 GiB"),
        (5000 * 1024**5, "5,000 PiB"),
    ],
)
def test_size_has_two_digits_at_least_and_a_unit(size: float, text: str) -> None:
    assert format_size(size) == text


def test_signal_is_named() -> None:
    assert (format_signal(9), format_signal(250)) == ("SIGKILL", "signal 250")


def test_long_name_is_shortened_in_the_middle() -> None:
    assert shorten_middle("abcdefgh", 8) == "abcdefgh"
    assert shorten_middle("abcdefghi", 8) == "abcd…ghi"
    assert shorten_middle("abc", 0) == "…"
