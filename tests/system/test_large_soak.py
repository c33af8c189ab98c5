"""Large values, nested calls and long output in small. `./yard check --long` runs 60 kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from large_soak import soak

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 3


@pytest.mark.slow
def test_killed_brokers_lose_and_change_no_byte(tmp_path: Path) -> None:
    report = soak(tmp_path, KILLS, seed=1)
    assert report.problems == []
    assert report.kills == KILLS
    assert report.blobs > KILLS
