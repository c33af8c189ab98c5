"""The benchmark of the page runs with small numbers, and asks for every view."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cli import main
from bench.page import state, suite, throughput, top


def measured(tmp_path: Path, *words: str) -> dict[str, dict[str, Any]]:
    file = tmp_path / "page.json"
    every = ["page", "--quick", "--repeats", "1", "--json", str(file), *words]
    done = CliRunner().invoke(main, every)
    assert done.exit_code == 0, done.output
    return {line["what"]: line for line in json.loads(file.read_text())["lines"]}


def test_every_view_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "TASKS", 200_000)  # a hundredth of it with --quick
    monkeypatch.setattr(suite, "_REQUESTS", 1)
    kept = tmp_path / "state"
    lines = measured(tmp_path, "--state", str(kept), "--only", "views", "--only", "stopped")
    assert kept.exists()
    for name in suite.VIEWS:
        assert lines[name]["best"] > 0
        assert lines[name]["floor"] == 200
        assert lines[f"{name}: first"]["best"] > 0
    assert lines["stopped: first overview"]["best"] > 0
    (elements,) = (line for name, line in lines.items() if name.startswith("elements"))
    assert 100 < elements["best"] < 5000


def test_every_screen_of_top_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "TASKS", 200_000)  # a hundredth of it with --quick
    monkeypatch.setattr(top, "REFRESHES", 1)
    monkeypatch.setattr(top, "SCREENS", {name: top.SCREENS[name] for name in ("lanes", "a task")})
    lines = measured(tmp_path, "--only", "top")
    for name in ("lanes", "a task"):
        assert lines[f"top, {name}"]["floor"] == 200
        assert lines[f"top, {name}: first"]["best"] > 0
        assert lines[f"top, {name}: CPU of the broker"]["best"] > 0


@pytest.mark.whole  # a browser beside a broker under load
def test_throughput_is_measured_with_and_without_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "TASKS", 300_000)
    lines = measured(tmp_path, "--only", "throughput")
    assert lines["with pages over alone, best"]["floor"] == 0.95
    assert all(line["best"] > 0 for line in lines.values())
