"""The steady flow runs with small numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import steady
from bench.cli import main


def lines(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    file = tmp_path / "steady.json"
    done = CliRunner().invoke(main, ["steady", *arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    return {line["what"]: line for line in report["lines"]}


def test_flow_is_compacted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "POLL_S", 0.02)
    told = lines(tmp_path, "--tasks", "4000")
    assert told["compactions seen"]["best"] >= 1
    assert 0 < told["unfinished tasks, the most seen"]["best"] <= 200
    assert told["memory at the end over that at a tenth"]["floor"] == 1.3
    assert all(line["best"] >= 0 for line in told.values())


@pytest.mark.whole  # the same parts as the test above
def test_queue_is_compacted_once_and_measured(tmp_path: Path) -> None:
    told = lines(tmp_path, "--tasks", "1000", "--queued")
    assert told["compaction over broker"]["goal"] == 0.2
    assert all(line["best"] > 0 for line in told.values())
