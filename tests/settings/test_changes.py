"""The differences between two versions of the settings, as a broker logs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.settings.loader import diff
from tests.settings.kit import loaded, written

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.settings.loader import Changes

BEFORE = """
[broker]
workers_max = 3
[defaults]
retries = 2
[service.a]
workers_max = 20
[service.b]
hold = true
"""


def changed(directory: Path, old: str, new: str) -> Changes:
    assert old in BEFORE
    before = loaded(written(directory, BEFORE))
    return diff(before, loaded(written(directory, BEFORE.replace(old, new))))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("workers_max = 20", "workers_max = 5", "service.a.workers_max 20 → 5"),
        ("workers_max = 20", "", "service.a.workers_max 20 → 0"),
        ("workers_max = 20", "workers_max = 20\nrate = '1/s'", "service.a.rate no limit → 1/s"),
        ("hold = true", "hold = true\nretries = 0", "service.b.retries 1, 1 → never"),
        ("retries = 2", "retries = [1, 5]", "defaults.retries 1, 1 → 1, 5"),
        ("workers_max = 3", "", "broker.workers_max 3 → 0"),
        ("[service.b]\nhold = true", "", "[service.b] removed"),
        ("[service.a]", "[service.c]\n[service.a]", "[service.c] added"),
        (
            "[service.a]\nworkers_max = 20\n[service.b]\nhold = true",
            "[service.b]\nhold = true\n[service.a]\nworkers_max = 20",
            "order of the services",
        ),
    ],
)
def test_applied_changes_show_old_and_new_value(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    found = changed(tmp_path, old, new)
    assert (found.applied, found.needs_restart) == ((message,), ())
    assert found.sentence() == f"applied {message}"


def test_changes_that_need_a_restart_are_named(tmp_path: Path) -> None:
    more = '[worker]\nslots = 3\n[listen]\ndwork = "tcp://127.0.0.1:1"\n[service.a]'
    found = changed(tmp_path, "[service.a]", more)
    assert (found.applied, found.needs_restart) == ((), ("listen.dwork", "worker.slots"))
    assert found.sentence() == ("restart needed for listen.dwork, worker.slots")


def test_where_the_broker_is_for_clients_does_not_concern_it(tmp_path: Path) -> None:
    more = '[broker]\nurl = "tcp://127.0.0.1:1"\nkey = "me.key"'
    assert changed(tmp_path, "[broker]", more).sentence() == "no changes"
