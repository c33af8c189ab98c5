"""Every case of the broker's suite runs with tiny numbers and fills its lines."""

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.broker import calls as broker_calls
from bench.broker import campaigns as broker_campaigns
from bench.broker import suite as broker_suite
from bench.cli import main
from bench.peers import PeerTask
from bench.processes import BrokerBench


@pytest.fixture(autouse=True)
def short_and_few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use one batch size and one number of peers."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(broker_campaigns, "COUNTS", {100: 20_000})
    monkeypatch.setattr(broker_calls, "PLAIN_PEERS", (2,))


def bench(*arguments: str) -> Result:
    done = CliRunner().invoke(main, ["broker", "--quick", "--repeats", "1", *arguments])
    assert done.exit_code == 0, done.output
    return done


LINES = {
    "batches": ["batch 100, durable", "batch 100, in memory"],
    "shapes": ["flat, whole broker", "chains over flat", "lanes over flat"],
    "plain": ["2 plain peers, durable", "2 plain peers, echo", "dwork's own server, published"],
    "calls": ["one-task calls, durable, acknowledged", "one-task calls, in memory, all settled"],
    "latency": ["submit to result, durable, p50", "submit to result, in memory, p99"],
    "memory": ["queued task, 20-byte payload"],
    "restart": ["kill -9 to listening, 10⁶ unfinished", "a page of 1,000 of 10⁶ tasks"],
}


def test_every_case_is_tried_here() -> None:
    assert list(LINES) == list(broker_suite.CASES)


@pytest.mark.parametrize("case", LINES)
def test_case_runs_and_fills_its_lines(case: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = bench("--only", case, "--json", str(file))
    report = json.loads(file.read_text())
    assert (
        report["suite"] == "broker --quick"
    )  # marked, so that these figures are not taken for real ones
    assert all(one["best"] >= 0 for one in report["lines"])
    shown = [one["what"] for one in report["lines"]]
    assert [what for what in LINES[case] if what not in shown] == []
    assert [what for what in LINES[case] if what not in done.stdout] == []


def test_growth_is_measured_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(broker_campaigns, "COUNT_HUGE", 100_000)
    monkeypatch.setattr(broker_campaigns, "SHAPES", ("flat",))
    file = tmp_path / "figures.json"
    bench("--only", "shapes", "--huge", "--json", str(file))
    assert "10⁷ over 10⁴" in [one["what"] for one in json.loads(file.read_text())["lines"]]


def test_profile_names_the_broker_s_functions() -> None:
    done = bench("--only", "memory", "--profile")
    assert "function calls" in done.stdout
    assert "/taskyard/core/" in done.stdout


def test_unknown_case_is_refused() -> None:
    done = CliRunner().invoke(main, ["broker", "--only", "moon"])
    assert done.exit_code == 2
    assert "'moon' is not one of" in done.output


def test_stage_tells_of_a_peer_that_ended_early() -> None:
    with BrokerBench("in memory") as stage:
        (worker,) = stage.start_peers(PeerTask("work", stage.endpoint))
        worker.send_go()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended early"):
            stage.wait_for([worker], 1)


def test_stage_leaves_no_process_behind() -> None:
    with BrokerBench("in memory") as stage:
        stage.start_peers(PeerTask("work", stage.endpoint))
        processes = [stage.broker, *stage.peers]
    assert [process.has_ended for process in processes] == [True, True]
