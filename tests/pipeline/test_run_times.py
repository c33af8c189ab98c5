"""Run times of a real campaign: none exceeds the elapsed time, and all add up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.pipeline.datasets import ATTEMPTS
from taskyard.pipeline.jobs import report
from taskyard.pipeline.report import summary
from taskyard.pipeline.report.headline import lower_bound_ns
from taskyard.pipeline.sources import history
from tests.kit.processes import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from taskyard.pipeline.report.summary import ReportSummary

SLOTS = 4
NAP_SECONDS = 0.05

#: Enough short tasks for the worker to start prefetching.
NAPS = 120

Rows = list[dict[str, Any]]


def tasks() -> Rows:
    """Return short tasks, a chain, a parallel lane, and failures."""
    nap = ["sleep", str(NAP_SECONDS)]
    naps: Rows = [{"name": f"nap-{n}", "argv": nap} for n in range(NAPS)]
    chain: Rows = [
        {"name": f"link-{n}", "argv": nap, "after": [f"link-{n - 1}"] if n else []}
        for n in range(8)
    ]
    lane: Rows = [{"name": f"lane-{n}", "argv": nap, "lane": "wide"} for n in range(16)]
    ends: Rows = [
        {"name": "killed", "argv": ["sh", "-c", "kill -KILL $$"]},
        {"name": "fails", "argv": ["sh", "-c", "exit 3"], "retries": [0.1]},
    ]
    return [*naps, *chain, *lane, *ends]


@pytest.fixture(scope="module")
def measured_run(
    small_spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ReportSummary, Rows]:
    """Return the summary and the attempts of a campaign of real programs."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "c.jsonl").write_text("\n".join(map(json.dumps, tasks())))
    rules = "[service.wide]\nmatch = 'exec/*'\nlane_workers_max = 4\n"
    (directory / "taskyard.toml").write_text(rules)
    code, *_ = run(directory, "run", "c.jsonl", "--workers", "1", "-j", str(SLOTS))
    assert code == 1  # two tasks fail
    scratch = directory / "scratch"
    chosen = report.find_campaign([history.find(directory / ".taskyard", scratch)], "c")
    datasets = report.datasets(small_spark, chosen, scratch)
    rows = datasets.rows(ATTEMPTS)
    assert rows is not None
    return report.summarize(datasets), rows.to_pylist()


def test_campaign_takes_at_least_its_lower_bound(
    measured_run: tuple[ReportSummary, Rows],
) -> None:
    facts, _ = measured_run
    assert 8 * NAP_SECONDS * SECOND_NS <= facts.number("floor_ns") <= facts.makespan_ns
    assert lower_bound_ns(facts) <= facts.makespan_ns
    for lane in facts.lanes.to_pylist():
        assert lane["alone_ns"] <= facts.makespan_ns


def test_slot_use_is_at_most_1(measured_run: tuple[ReportSummary, Rows]) -> None:
    facts, rows = measured_run
    run_ns = sum(row["run_ns"] for row in rows)
    count = NAPS + 8 + 16
    assert count * NAP_SECONDS * SECOND_NS <= run_ns <= SLOTS * facts.makespan_ns
    assert 0 < summary.busy_share(facts) <= 1
    assert max(facts.over_time.running) <= SLOTS
    (stay,) = facts.workers.to_pylist()
    assert stay["busy_ns"] <= stay["stay_ns"]
    assert stay["utilisation"] <= 1


def test_times_of_an_attempt_are_in_order(measured_run: tuple[ReportSummary, Rows]) -> None:
    _, rows = measured_run
    for row in rows:
        times = [row[name] for name in ("ready", "leased", "started", "ended", "settled")]
        assert times == sorted(times)
        assert row["queued_ns"] >= 0
    assert any(row["queued_ns"] > SECOND_NS // 1000 for row in rows)  # it was prefetched


def test_attempts_have_exit_status_and_resource_use(
    measured_run: tuple[ReportSummary, Rows],
) -> None:
    _, rows = measured_run
    ends = {row["name"]: (row["exit_status"], row["signal"]) for row in rows}
    assert (ends["killed"], ends["fails"], ends["nap-0"]) == ((None, 9), (3, None), (0, None))
    assert all(row["cpu_ns"] > 0 and row["host"] for row in rows)
