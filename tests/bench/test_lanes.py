"""Every case of the lanes' suite fills its lines, and rules reach the measured broker."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import lanes
from bench.broker.campaigns import Campaign, CampaignRun
from bench.cli import main
from bench.core import rated_lanes
from bench.core.rated_lanes import RatedLanes
from bench.processes import BrokerBench
from bench.settings import Settings
from taskyard.client.internal import InternalClient
from taskyard.core.events import RulesSet
from taskyard.core.rules import LaneOptions, Rule


def test_cases_fill_their_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the costs: `test_broker` runs campaigns."""
    noted: list[Campaign] = []

    def measure(campaign: Campaign, _: Settings) -> CampaignRun:
        noted.append(campaign)
        return CampaignRun(campaign.count, campaign.count * 2000 * len(noted), 0, wall_ns=1)

    def measure_rated(case: RatedLanes) -> RatedLanes:
        case.leased, case.cpu_ns = 10, 24_000 if case.rated else 20_000
        return case

    monkeypatch.setattr(lanes, "measure", measure)
    monkeypatch.setattr(rated_lanes, "measure", measure_rated)
    file = tmp_path / "figures.json"
    words = ["lanes", "--quick", "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert noted == [one.campaign for one in lanes.cases(10_000)]
    report = json.loads(file.read_text())
    assert report["suite"] == "lanes --quick"
    shown = [(one["what"], one["unit"], one["best"], one["floor"]) for one in report["lines"]]
    assert shown == [
        ("flat, one open lane", "µs/task", 2, None),
        ("lanes of ten", "µs/task", 4, None),
        ("  over flat", "×", 2, 1.6),
        ("lanes, sections by pattern", "µs/task", 6, None),
        ("  over flat", "×", 3, None),
        ("lanes, limits", "µs/task", 8, None),
        ("  over flat", "×", 4, None),
        ("lanes, limits and rate", "µs/task", 10, None),
        ("  over flat", "×", 5, None),
        ("1,000 lanes, scheduler alone", "µs/task", 2, None),
        ("  5/s in each", "µs/task", 2.4, None),
        ("  over no rate", "×", 1.2, 1.3),
        ("  largest deviation", "%", 0, 1.0),
    ]


def test_rules_reach_the_broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rules = RulesSet(0, (Rule(b"all", b"default/*", LaneOptions(workers_max=7)),))
    with (
        BrokerBench("in memory", rules=rules) as stage,
        InternalClient(broker=stage.endpoint) as client,
    ):
        client.submit(b"x", lane="a")
        (found,) = client.lanes()
        assert (found["rule"], found["rule_limit"]) == ("all", 7)


def test_every_campaign_is_of_the_same_size() -> None:
    found = lanes.cases(1000)
    assert [one.campaign.shape for one in found] == ["flat", *["lanes"] * 4]
    assert {one.campaign.count for one in found} == {1000}
