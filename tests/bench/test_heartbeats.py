"""The suite of connected workers: real workers of a small crowd, and its lines."""

import json
import resource
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import heartbeats
from bench.cli import main
from bench.heartbeats import Case, CrowdRun
from bench.settings import Settings


@pytest.mark.parametrize(
    "case", [Case(5), pytest.param(Case(4, relays=2, is_busy=True), marks=pytest.mark.whole)]
)
def test_workers_are_measured(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_WARM_S", 0.01)
    monkeypatch.setattr(heartbeats, "_REQUEST_S", 0.01)
    monkeypatch.setattr(heartbeats, "QUICK_S", 0.1)
    monkeypatch.setattr(heartbeats, "_WORKERS_PER_PROCESS", 3)
    (run,) = heartbeats.measure(Settings(lambda _: None, 1, quick=True), case)
    assert run.core_percent > 0
    assert (run.relays_core_percent > 0) == (case.relays > 0)
    assert 0 < run.percentile(50) <= run.percentile(99)


def test_cases_fill_their_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(_: Settings, case: Case) -> list[CrowdRun]:
        return [CrowdRun(case.workers / 500 / (case.relays or 1), 30_000, [1.0, 2.0], 9, 50_000)]

    monkeypatch.setattr(heartbeats, "measure", measure)
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(main, ["heartbeats", "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = {line["what"]: line for line in json.loads(file.read_text())["lines"]}
    assert len(lines) == 3 * (4 + 6)
    assert lines["10,000 workers, CPU"]["verdict"] == "floor"
    assert lines["10,000 workers, 10 relays, CPU"]["verdict"] == "goal"
    assert lines["10,000 workers, memory"]["verdict"] == "goal"
    assert lines["1,000 workers, CPU"]["floor"] is None
    assert lines["1,000 workers, 10 relays, CPU of all relays"]["best"] == 9


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--workers", "many"], "not a list of numbers"),
        (["--workers", "0"], "below 1"),
        (["--relays", "0,-1"], "below 0"),
        (["--workers", "9000"], "10,500 open files needed, 10,000 allowed"),
    ],
)
def test_bad_numbers_are_refused(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10_000, 10_000))
    done = CliRunner().invoke(main, ["heartbeats", *words])
    assert done.exit_code != 0
    assert text in done.output
