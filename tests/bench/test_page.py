"""The benchmark of the page runs with small numbers, and asks for every view."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cli import main
from bench.page import state, suite


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(state, "TASKS", 200_000)  # a hundredth of it with --quick
    monkeypatch.setattr(suite, "_REQUESTS", 1)
    file = tmp_path / "page.json"
    words = ["page", "--quick", "--state", str(tmp_path / "state"), "--json", str(file)]
    done = CliRunner().invoke(main, [*words, "--only", "views", "--only", "stopped"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "state").exists()
    return {line["what"]: line for line in json.loads(file.read_text())["lines"]}


def test_every_view_is_measured(lines: dict[str, dict[str, Any]]) -> None:
    for name in suite.VIEWS:
        assert lines[name]["best"] > 0
        assert lines[name]["floor"] == 200
        assert lines[f"{name}: first"]["best"] > 0
    assert lines["stopped: first overview"]["best"] > 0
    (elements,) = (line for name, line in lines.items() if name.startswith("elements"))
    assert 100 < elements["best"] < 5000
