"""Thousands of schedules keep every promise, and the same seed gives the same run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.regressions import REGRESSIONS
from simulator.schedule import run

TOOLS = Path(__file__).parents[2] / "tools"
SCHEDULES = 400
SHARDS = 20


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_breaks_a_promise(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    verdicts = [run(seed) for seed in range(shard, SCHEDULES, SHARDS)]
    record_property("simulated schedules", len(verdicts))
    record_property("simulated events", sum(verdict.events for verdict in verdicts))
    record_property("simulated restarts", sum(verdict.restarts for verdict in verdicts))
    broken = [f"seed {verdict.seed}: {verdict.text}" for verdict in verdicts if not verdict.good]
    assert not broken, broken[0]


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seed_that_ever_failed_holds(seed: int) -> None:
    verdict = run(seed)
    assert verdict.good, verdict.text


def test_schedules_are_not_empty() -> None:
    verdicts = [run(seed) for seed in range(20)]
    assert sum(verdict.restarts for verdict in verdicts) >= 10
    assert sum(verdict.records for verdict in verdicts) >= 20 * 20


def test_seed_gives_the_same_digest_again() -> None:
    assert run(7) == run(7)


def test_digest_does_not_depend_on_printing() -> None:
    lines: list[str] = []
    assert run(7, say=lines.append).digest == run(7).digest
    assert lines[0] == "seed 7"


def test_other_seeds_give_other_digests() -> None:
    assert len({run(seed).digest for seed in range(10)}) == 10


def simulated(seed: int, hash_seed: str, *options: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "simulator", str(seed), *options]
    done = subprocess.run(
        command, cwd=TOOLS, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("seed", [7, 11, 19])
def test_run_does_not_depend_on_the_hash_seed(seed: int) -> None:
    assert simulated(seed, "1") == simulated(seed, "2")


def test_command_ends_with_the_digest() -> None:
    assert simulated(7, "0").splitlines()[-1] == simulated(7, "3", "-q").splitlines()[-1]
    assert simulated(7, "0", "-q").startswith("digest ")
