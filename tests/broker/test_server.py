"""The parts of the broker process: reloaded settings, and the log of rejections."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from taskyard.broker.server import WARNING_NS, RejectionLog, SettingsReloader
from taskyard.settings.loader import load
from tests.settings.kit import written

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from taskyard.core.events import RulesSet


def reloading(directory: Path, text: str) -> SettingsReloader:
    file = written(directory, text)
    return SettingsReloader(load(file, environment={}), lambda: load(file, environment={}))


def limits(rules: RulesSet | None) -> list[int]:
    assert rules is not None
    return [rule.options.workers_max for rule in rules.rules]


def test_rules_are_those_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    file = reloading(tmp_path, "[service.a]\nworkers_max = 1\n")
    assert limits(file.rules) == [1]
    written(tmp_path, "[service.a]\nworkers_max = 2\n[service.b]\n")
    assert limits(file.reload()) == [2, 0]
    assert limits(file.rules) == [2, 0]


def test_changes_since_the_last_reload_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = reloading(tmp_path, "[service.a]\nworkers_max = 1\n")
    written(tmp_path, "[service.a]\nworkers_max = 2\n")
    file.reload()
    file.reload()
    assert caplog.messages == [
        "settings reloaded: applied service.a.workers_max 1 → 2",
        "settings reloaded: no changes",
    ]


def test_invalid_file_is_logged_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = reloading(tmp_path, "[service.a]\nworkers_max = 1\n")
    written(tmp_path, "[service.a]\nworkers_max = -1\n")
    assert file.reload() is None
    assert limits(file.rules) == [1]
    (message,) = caplog.messages
    assert message.startswith("settings not reloaded: ")
    assert "taskyard.toml:2: service.a.workers_max must be" in message


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
