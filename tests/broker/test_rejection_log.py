"""Rejections are logged as a count, at most every 10 s."""

import logging

import pytest

from taskyard.broker.server import WARNING_NS, RejectionLog


class Rejections:
    """A count that rises, and a clock."""

    def __init__(self) -> None:
        self.count = 0
        self.now_ns = 1
        self.log = RejectionLog(lambda: self.count, self)

    def monotonic_ns(self) -> int:
        return self.now_ns

    wall_ns = monotonic_ns

    def add(self, count: int, after_ns: int = 0) -> None:
        self.count += count
        self.now_ns += after_ns
        self.log.log_if_due()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the beginnings of the warnings, and clear them."""
    texts = [record.getMessage().split(";")[0] for record in caplog.records]
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    caplog.clear()
    return texts


def test_nothing_is_logged_without_rejections(caplog: pytest.LogCaptureFixture) -> None:
    Rejections().add(0, WARNING_NS)
    assert warnings(caplog) == []


def test_first_rejection_is_logged_at_once_and_more_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejections = Rejections()
    rejections.add(1)
    assert warnings(caplog) == ["1 malformed message(s) refused, 1 since the start"]
    for _ in range(5):
        rejections.add(2)
    rejections.add(1, WARNING_NS - 1)
    assert warnings(caplog) == []
    rejections.add(1, 1)
    assert warnings(caplog) == ["12 malformed message(s) refused, 13 since the start"]
    rejections.add(0, WARNING_NS)
    assert warnings(caplog) == []
