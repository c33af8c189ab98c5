"""`bench peers` runs the same job through Taskyard and other systems."""

import os
import sys
from pathlib import Path

import pytest

from bench.rivals import servers, suite
from bench.rivals.servers import RIVALS, Rival
from bench.settings import Settings
from tests.kit.requirements import need

#: Servers that every run tries. Each takes two seconds of CPU. The others are tried with --whole.
TRIED = ("Redis lists", "beanstalkd -b")


def test_installed_systems_run_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    native, *_ = suite.systems(None)
    pool = next(one for one in suite.systems(None) if one.name == "ProcessPoolExecutor")
    monkeypatch.setattr(suite, "systems", lambda _python, _dhub: [native, pool])
    monkeypatch.setattr(suite, "COUNTS", {100: 20_000})
    monkeypatch.setattr(suite, "CREWS", ((2, 1),))
    said: list[str] = []
    lines = suite.run(Settings(said.append, repeats=1, quick=True))
    figures = {line.what: line.best for line in lines}
    assert list(figures) == [
        "Taskyard (durable: yes), batch 100",
        "  of it the server",
        "  a queued task",
        "Taskyard, one task, p50",
        "Taskyard, one task, p99",
        "Taskyard, 2 workers and 1 producers, one task at a time",
        "ProcessPoolExecutor (durable: no), batch 100",
        "  over Taskyard",
        "ProcessPoolExecutor, one task, p50",
        "ProcessPoolExecutor, one task, p99",
        "one message of an echo, 100 under way",
        "an echo's round trip, p50",
        "a commit on a warm log, p50",
        "Taskyard, one task over sockets and disk",
    ]
    assert all(figure > 0 for figure in figures.values())
    ours, pools = (figures[what] for what in list(figures) if what.endswith("batch 100"))
    assert figures["  over Taskyard"] == pytest.approx(pools / ours)
    assert "Dask: not installed (--install makes a temporary environment with it)" in said


def test_missing_server_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lines = suite.missing(sys.executable)
    assert "gearmand: not installed (apt-get install gearman-job-server)" in lines
    assert len([line for line in lines if line.startswith("redis-server:")]) == 1


def test_only_keeps_ours_for_the_ratios() -> None:
    available = suite.systems(sys.executable)
    names = [one.name for one in suite._chosen(available, ("process", "dask"))]  # noqa: SLF001
    assert names == [
        "Taskyard",
        "Taskyard in memory",
        "Taskyard by dwork's protocol",
        "ProcessPoolExecutor",
        "Dask",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rival",
    [
        pytest.param(rival, id=rival.name, marks=[] if rival.name in TRIED else [pytest.mark.whole])
        for rival in RIVALS
    ],
)
def test_installed_server_finishes_all_tasks(rival: Rival) -> None:
    need("PostgreSQL" if rival.link == "postgres" else rival.program)
    system = suite._rival(rival)  # noqa: SLF001
    cost = system.cost(25, 10)
    assert cost.server_us is not None
    assert 0 < cost.server_us < cost.all_us
    if system.latency is not None:
        assert len(system.latency(3)) == 3


@pytest.mark.whole
def test_server_of_dwork_is_found_on_its_own_port(tmp_path: Path) -> None:
    dhub = tmp_path / "dhub"
    broker = f"{sys.executable} -m taskyard.cli broker --memory --listen dwork=tcp://127.0.0.1:0"
    dhub.write_text(f"#!/bin/sh\nexec {broker} --state {tmp_path}/state\n")
    dhub.chmod(0o755)
    cost = suite._rival(servers.dwork_rival(dhub)).cost(25, 10)  # noqa: SLF001
    assert cost.server_us is not None
    assert 0 < cost.server_us < cost.all_us


def test_cpu_time_includes_that_of_children() -> None:
    assert servers.tree_cpu_ns(os.getpid()) > 0
    assert servers.tree_cpu_ns(2**22 + 1) == 0
