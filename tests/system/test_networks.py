"""Three networks with relays between them, in small. `./yard check --long` runs ten minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from network_soak import soak

if TYPE_CHECKING:
    from pathlib import Path

#: How long links are cut and processes are killed.
FAULT_SECONDS = 6.0


@pytest.mark.needs("ip", "network namespaces")
def test_cut_links_and_killed_processes_lose_and_double_nothing(tmp_path: Path) -> None:
    report = soak(tmp_path, FAULT_SECONDS, seed=1, log=print)
    assert report.problems == []
    assert report.faults["links cut"] > 1
    assert "no worker of its service is connected" in report.whys[0]
