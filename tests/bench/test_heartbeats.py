"""The suite of idle workers: real workers of a small crowd, and its lines."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import heartbeats
from bench.cli import main
from bench.heartbeats import CrowdRun
from bench.settings import Settings


def test_idle_workers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_WARM_S", 0.01)
    monkeypatch.setattr(heartbeats, "_REQUEST_S", 0.01)
    monkeypatch.setattr(heartbeats, "QUICK_S", 0.1)
    monkeypatch.setattr(heartbeats, "_WORKERS_PER_PROCESS", 3)
    (run,) = heartbeats.measure(Settings(lambda _: None, 1, quick=True), 5)
    assert run.core_percent > 0
    assert 0 < run.percentile(50) <= run.percentile(99)


def test_cases_fill_their_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(_: Settings, count: int) -> list[CrowdRun]:
        return [CrowdRun(count / 500, 30_000, [1.0, 2.0])]

    monkeypatch.setattr(heartbeats, "measure", measure)
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(main, ["heartbeats", "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = {line["what"]: line for line in json.loads(file.read_text())["lines"]}
    assert len(lines) == 12
    assert lines["10,000 workers, CPU"]["verdict"] == "floor"
    assert lines["10,000 workers, memory"]["verdict"] == "goal"
    assert lines["1,000 workers, CPU"]["floor"] is None
