"""Schedules keep every promise, and the same seed gives the same run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.regressions import REGRESSIONS
from simulator.schedule import run

TOOLS = Path(__file__).parents[2] / "tools"
#: `./yard check --long` runs a million. Those that ever failed are run here too.
SCHEDULES = 120
SHARDS = 6


#: Print one schedule, and the digests of two more. A start takes longer than a run.
PRINT_SOME = """
from simulator.__main__ import main
for arguments in (["7"], ["11", "-q"], ["19", "-q"]):
    main(arguments)
"""


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_breaks_a_promise(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    verdicts = [run(seed) for seed in range(shard, SCHEDULES, SHARDS)]
    restarts = sum(verdict.restarts for verdict in verdicts)
    record_property("simulated schedules", len(verdicts))
    record_property("simulated events", sum(verdict.events for verdict in verdicts))
    record_property("simulated restarts", restarts)
    broken = [f"seed {verdict.seed}: {verdict.text}" for verdict in verdicts if not verdict.good]
    assert not broken, broken[0]
    # The schedules are not empty, and no two of them are the same.
    assert restarts >= len(verdicts) / 2
    assert sum(verdict.records for verdict in verdicts) >= 20 * len(verdicts)
    assert len({verdict.digest for verdict in verdicts}) == len(verdicts)


@pytest.mark.parametrize("seed", [seed for seed in REGRESSIONS if seed >= SCHEDULES])
def test_seed_that_ever_failed_holds(seed: int) -> None:
    verdict = run(seed)
    assert verdict.good, verdict.text


def test_seed_gives_the_same_run_again() -> None:
    lines: list[str] = []
    verdict = run(7)
    assert run(7) == verdict
    assert run(7, say=lines.append) == verdict
    assert lines[0] == "seed 7"


def output(hash_seed: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=TOOLS, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_run_does_not_depend_on_the_hash_seed() -> None:
    printed = output("1", "-c", PRINT_SOME)
    assert printed == output("2", "-c", PRINT_SOME)
    assert f"digest {run(7).digest}" in printed.splitlines()
    assert printed.count("digest ") == 3


def test_quiet_command_prints_the_digest_alone() -> None:
    assert output("3", "-m", "simulator", "7", "-q") == f"digest {run(7).digest}\n"
