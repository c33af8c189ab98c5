"""Numbers and times of the page read as those of the commands."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from taskyard.cli.format import format_count, format_date
from taskyard.core.limits import SECOND_NS
from taskyard.web import view as page_format

if TYPE_CHECKING:
    from collections.abc import Iterator

import pytest

AT_SECONDS = 1_800_000_000


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a zone that is not UTC."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        yield
    time.tzset()


def test_moment_is_that_of_a_terminal_with_its_zone() -> None:
    shown = page_format.moment(AT_SECONDS * SECOND_NS)
    assert shown == (
        '<time datetime="2027-01-15T13:30:00.000+05:30" title="2027-01-15T13:30:00.000+05:30">'
        "2027-01-15 13:30:00</time>"
    )
    assert format_date(AT_SECONDS) in shown
    assert page_format.moment(0) == ""


def test_count_of_one_is_singular() -> None:
    for number in (0, 1, 2000):
        assert page_format.counted(number, "worker") == format_count(number, "worker")
