"""`bench commands` runs the systems that are installed and leaves out the others."""

import sys

import pytest

from bench import commands
from bench.settings import Settings


@pytest.mark.slow
def test_installed_systems_run_and_others_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "WORKERS", 1)
    said: list[str] = []
    lines = commands.run(Settings(said.append, repeats=1, quick=True), sys.executable)
    figures = {line.what: line.best for line in lines}
    names = ("xargs", "Taskyard map", "Taskyard run")
    assert {f"{name}: 10 x true" for name in names} <= figures.keys()
    assert figures["Taskyard map: of 10 after SIGKILL"] == 10
    parts = [figure for what, figure in figures.items() if what.startswith("of map: ")]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(figures["Taskyard map: CPU"])
    judged = [line for line in lines if line.what.startswith("Taskyard run o")]
    assert [line.what for line in judged] == [
        "Taskyard run over xargs, 20 x true minus one: wall",
        "Taskyard run over xargs, 20 x true minus one: CPU",
        "Taskyard run of one command: CPU",
    ]
    assert all(line.verdict for line in judged)
    assert any("has no module distributed, left out" in text for text in said)


def test_program_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    lost = commands.System("Lost", "no-such-program", lambda _place, _count: None)
    monkeypatch.setattr(commands, "SYSTEMS", (lost,))
    assert commands.run(Settings(said.append, repeats=1, quick=True), sys.executable) == []
    assert said == ["Lost: no-such-program is not installed, left out"]
