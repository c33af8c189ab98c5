"""The parts of the broker process: reloaded settings, and the log of rejections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from taskyard.broker import server
from taskyard.broker.server import BrokerSettings, SettingsReloader, serve
from taskyard.errors import LeaderLost
from taskyard.settings.loader import load
from tests.settings.kit import written

if TYPE_CHECKING:
    from pathlib import Path

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


def test_broker_that_loses_its_lease_follows_if_it_is_one_of_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(*_: object) -> bool:
        raise LeaderLost("the lease of epoch 3 has ended")

    monkeypatch.setattr(server, "_serve", lose)
    alone = BrokerSettings(tmp_path, store="postgresql://")
    with pytest.raises(LeaderLost):
        serve(alone, print)
    assert not caplog.messages
    assert serve(structs.replace(alone, standby=True), print)
    assert caplog.messages == ["the lease of epoch 3 has ended: following from now on"]
