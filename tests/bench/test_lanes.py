"""Every case of the lanes' suite runs with tiny numbers and fills its lines."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import lanes
from bench.cli import main
from bench.processes import BrokerBench
from taskyard.client.client import Client
from taskyard.core.events import RulesSet
from taskyard.core.rules import LaneOptions, Rule


def test_cases_fill_their_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run three cases: each starts four processes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cases = lanes.cases
    monkeypatch.setattr(lanes, "cases", lambda count: [*cases(count)[:2], cases(count)[-1]])
    file = tmp_path / "figures.json"
    words = ["lanes", "--quick", "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["suite"] == "lanes --quick"
    shown = [(one["what"], one["unit"], one["floor"]) for one in report["lines"]]
    assert shown == [
        ("flat, one open lane", "µs/task", None),
        ("lanes of ten", "µs/task", None),
        ("  over flat", "×", 1.6),
        ("lanes, limits and rate", "µs/task", None),
        ("  over flat", "×", None),
    ]
    assert all(one["best"] > 0 for one in report["lines"])


def test_rules_reach_the_broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rules = RulesSet(0, (Rule(b"all", b"default/*", LaneOptions(workers_max=7)),))
    with BrokerBench("in memory", rules=rules) as stage, Client(broker=stage.endpoint) as client:
        client.submit(b"x", lane="a")
        (found,) = client.lanes()
        assert (found["rule"], found["rule_limit"]) == ("all", 7)


def test_every_campaign_is_of_the_same_size() -> None:
    found = lanes.cases(1000)
    assert [one.campaign.shape for one in found] == ["flat", *["lanes"] * 4]
    assert {one.campaign.count for one in found} == {1000}
