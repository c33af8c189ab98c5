"""Every case of the broker's suite runs with tiny numbers and fills its lines.

A process takes a quarter of a second to start. Tables of many campaigns are therefore made of
costs that are given, and two campaigns are really run.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from bench import lanes
from bench.broker import calls as broker_calls
from bench.broker import campaigns as broker_campaigns
from bench.broker import growth
from bench.broker import suite as broker_suite
from bench.broker.campaigns import Campaign, CampaignRun
from bench.broker.growth import GrowthRun
from bench.cli import main
from bench.peers import PeerTask
from bench.processes import BrokerBench
from bench.settings import Settings

LINES = {
    "batches": ["batch 100, durable", "batch 100, in memory"],
    "shapes": ["flat, whole broker", "chains over flat", "lanes over flat"],
    "plain": ["1 plain peer, in memory", "1 plain peer, echo", "dwork's own server, published"],
    "calls": ["one-task calls, durable, acknowledged", "one-task calls, durable, all settled"],
    "latency": ["submit to result, durable, p50", "submit to result, durable, p99"],
    "executor": ["Executor, first result", "Executor over ProcessPoolExecutor"],
    "memory": ["queued task, 20-byte payload"],
    "restart": ["kill -9 to listening, 10⁶ unfinished", "a page of 1,000 of 10⁶ tasks"],
}


@pytest.fixture(autouse=True)
def short_and_few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use one batch size, few tasks, and one peer."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(broker_campaigns, "COUNTS", {100: 20_000})
    monkeypatch.setattr(broker_calls, "PLAIN_PEERS", (1,))
    monkeypatch.setattr(broker_calls, "CALLS_COUNT", 20_000)
    monkeypatch.setattr(broker_calls, "CALLS_WORKERS", 1)
    monkeypatch.setattr(broker_suite, "COUNT", 200_000)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Campaign]:
    """Run no campaign, but note each. The first costs 1 µs per task, the second 2 µs, and so on."""
    noted: list[Campaign] = []

    def measure(campaign: Campaign, _: Settings) -> CampaignRun:
        noted.append(campaign)
        count, cpu_ns = campaign.count, campaign.count * 1000 * len(noted)
        return CampaignRun(count, cpu_ns, cpu_ns // 4, wall_ns=count * 10_000)

    monkeypatch.setattr(broker_campaigns, "measure", measure)
    return noted


def bench(
    tmp_path: Path, *arguments: str, suite: str = "broker --quick"
) -> tuple[str, list[dict[str, Any]]]:
    """Run the suite quickly. Return its output and the lines of its document."""
    file = tmp_path / "figures.json"
    words = ["broker", "--quick", "--repeats", "1", "--json", str(file), *arguments]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    # Marked, so that these figures are not taken for real ones.
    assert report["suite"] == suite
    return done.stdout, report["lines"]


def figures(lines: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    return [(one["what"].strip(), one["unit"], one["best"]) for one in lines]


def test_every_case_is_tried_here() -> None:
    assert list(LINES) == list(broker_suite.CASES)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        *(("plain", ["in memory"]), ("calls", ["durable"]), ("latency", ["durable"])),
        *(("executor", []), ("restart", [])),
    ],
)
def test_case_runs_and_fills_its_lines(
    case: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(broker_calls, "KINDS", kinds)
    shown_text, lines = bench(tmp_path, "--only", case)
    assert all(one["best"] > 0 for one in lines)
    shown = [one["what"] for one in lines]
    assert [what for what in LINES[case] if what not in shown] == []
    assert [what for what in LINES[case] if what not in shown_text] == []


def test_memory_is_measured_and_the_profile_names_the_broker_s_functions(tmp_path: Path) -> None:
    shown, lines = bench(tmp_path, "--only", "memory", "--profile")
    assert [one["what"] for one in lines] == LINES["memory"]
    assert lines[0]["best"] >= 0
    assert LINES["memory"][0] in shown
    assert "function calls" in shown
    assert "/taskyard/core/" in shown


def test_every_kind_of_broker_has_its_lines() -> None:
    assert broker_calls.KINDS == ("durable", "in memory")


@pytest.mark.parametrize(
    "campaign",
    [
        Campaign(200, shape="chains"),
        replace(lanes.cases(200)[-1].campaign, kind="in memory", concurrent=True),
    ],
    ids=["backlog", "concurrent"],
)
def test_campaign_is_run_and_its_cost_measured(campaign: Campaign) -> None:
    run = broker_campaigns.measure(campaign, Settings(print))
    assert run.count == 200
    assert 0 < run.broker_ns < run.cpu_ns
    assert run.wall_ns > 0


def test_batches_are_run_after_and_beside_their_producer(
    measured: list[Campaign], tmp_path: Path
) -> None:
    shown, lines = bench(tmp_path, "--only", "batches")
    assert measured == [
        Campaign(200, 100, kind, concurrent=concurrent)
        for kind in ("durable", "in memory")
        for concurrent in (False, True)
    ]
    assert figures(lines) == [
        ("batch 100, durable", "µs/task", 1.5),
        ("backlog first", "µs/task", 1),
        ("both at once", "µs/task", 2),
        ("of it the broker", "µs/task", 0.375),
        ("both at once", "tasks/s", 100_000),
        ("batch 100, in memory", "µs/task", 3.5),
        ("backlog first", "µs/task", 3),
        ("both at once", "µs/task", 4),
        ("of it the broker", "µs/task", 0.875),
        ("both at once", "tasks/s", 100_000),
    ]
    assert [what for what in LINES["batches"] if what not in shown] == []


def test_shapes_are_compared_with_flat_tasks(measured: list[Campaign], tmp_path: Path) -> None:
    shown, lines = bench(tmp_path, "--only", "shapes")
    assert measured == [
        Campaign(10_000),
        Campaign(10_000, shape="chains"),
        Campaign(10_000, shape="lanes"),
    ]
    assert figures(lines) == [
        ("flat, whole broker", "µs/task", 1),
        ("chains, whole broker", "µs/task", 2),
        ("chains over flat", "×", 2),
        ("lanes, whole broker", "µs/task", 3),
        ("lanes over flat", "×", 3),
    ]
    assert [what for what in LINES["shapes"] if what not in shown] == []


def test_growth_is_measured_at_one_size() -> None:
    run = growth.measure(2_000, Settings(print))
    figures = msgspec.structs.asdict(run)
    assert [name for name, figure in figures.items() if figure <= 0] == []
    assert run.broker_bytes > run.compaction_bytes / 2


def test_growth_compares_both_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each figure of the larger size costs twice as much, except memory."""
    counts: list[int] = []

    def measure(count: int, _: Settings) -> GrowthRun:
        counts.append(count)
        cost = 1 if count < 100_000 else 2
        made = GrowthRun(*[cost] * len(GrowthRun.__struct_fields__))
        made.task_bytes, made.compaction_bytes, made.broker_bytes = 250, 1 << 20, 10 << 20
        return made

    monkeypatch.setattr(growth, "measure", measure)
    lines = bench(tmp_path, "--huge", suite="broker --huge --quick")[1]
    assert counts == [10_000, 100_000]
    assert figures(lines)[:3] == [
        ("submit, 10⁶ queued", "µs/task", 1),
        ("submit, 10⁷ queued", "µs/task", 2),
        ("10⁷ over 10⁶", "×", 2),
    ]
    ratios = [(one["best"], one["verdict"]) for one in lines if "over 10⁶" in one["what"]]
    assert ratios.count((2, "missed, 1.33 × floor")) == len(growth.FIGURES) - 1
    assert ratios.count((1, "goal")) == 1
    assert figures(lines)[-1] == ("10⁷: over that of the broker", "×", 0.1)


def test_growth_takes_no_cases() -> None:
    done = CliRunner().invoke(main, ["broker", "--huge", "--only", "plain"])
    assert done.exit_code == 2
    assert "--huge, --only and --store exclude each other" in done.output


def test_unknown_case_is_refused() -> None:
    done = CliRunner().invoke(main, ["broker", "--only", "moon"])
    assert done.exit_code == 2
    assert "'moon' is not one of" in done.output


def test_stage_reports_a_peer_that_ended_early_and_leaves_no_process_behind() -> None:
    with BrokerBench("in memory") as stage:
        killed, _ = stage.start_peers(*[PeerTask("work", stage.endpoint, one) for one in (0, 1)])
        killed.send_go()
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended early"):
            stage.wait_for([killed], 1)
        processes = [stage.broker, *stage.peers]
    assert [process.has_ended for process in processes] == [True, True, True]
