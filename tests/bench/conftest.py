"""The path of `tools` for the processes that benchmarks start."""

import os
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(autouse=True)
def _path_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TOOLS), prepend=os.pathsep)
