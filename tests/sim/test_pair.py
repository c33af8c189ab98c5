"""Two brokers over one simulated PostgreSQL keep every promise, and stale statements are seen."""
# ruff: noqa: SLF001 - the statements of the product

from collections.abc import Callable
from random import Random

import pytest

from simulator.clock import SimClock, Timeline
from simulator.models import Violation
from simulator.regressions import PAIR_REGRESSIONS
from simulator.schedule import run
from simulator.tables import parse
from simulator.threads import Event, ProcessClock, SimThread, ThreadedProcess, Threads
from taskyard.postgresql import blobs, exports, leader, store

#: `./yard check --long` runs 20,000.
SCHEDULES = 24
SHARDS = 4


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_of_a_pair_breaks_a_promise(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    verdicts = [run(seed, pair=True) for seed in range(shard, SCHEDULES, SHARDS)]
    restarts = sum(verdict.restarts for verdict in verdicts)
    record_property("simulated schedules of a pair", len(verdicts))
    record_property("simulated takeovers and restarts of a pair", restarts)
    broken = [f"seed {verdict.seed}: {verdict.text}" for verdict in verdicts if not verdict.good]
    assert not broken, broken[0]
    assert restarts >= len(verdicts) / 2


@pytest.mark.parametrize("seed", PAIR_REGRESSIONS)
def test_seed_of_a_pair_that_ever_failed_holds(seed: int) -> None:
    verdict = run(seed, pair=True)
    assert verdict.good, verdict.text


def test_seed_of_a_pair_gives_the_same_run_again() -> None:
    lines: list[str] = []
    verdict = run(5, pair=True)
    assert run(5, pair=True, say=lines.append) == verdict
    assert any("term begins 2" in line for line in lines)


def test_every_fenced_statement_is_parsed_with_its_conditions() -> None:
    held = [("epoch", "epoch"), ("holder", "holder")]
    fenced = {
        store._INSERT: "append",
        store._TRIM: "trim",
        exports._COVER: "cover",
        leader._RENEW: "renew",
        leader._RELEASE: "release",
        blobs._APPEND: "append_blobs",
        blobs._SEAL: "seal_blob",
        blobs._TOUCH: "touch_blob",
        blobs._REMOVE: "remove_blobs",
    }
    for text, kind in fenced.items():
        statement = parse(text)
        assert (statement.kind, statement.conditions) == (kind, held)
    taken = parse(leader._TAKE)
    assert taken.conditions == [("epoch", 2), ("holder", 3), ("renewal", 4)]
    assert taken.is_new_term


def test_unknown_statement_is_refused() -> None:
    with pytest.raises(Violation, match="unknown statement"):
        parse("SELECT now()")


def machine() -> tuple[Timeline, ThreadedProcess]:
    timeline = Timeline()
    clock = ProcessClock(timeline, SimClock(timeline), 0, 250)
    return timeline, ThreadedProcess(Threads(timeline), clock)


def test_killed_thread_runs_nothing_more() -> None:
    timeline, process = machine()
    steps: list[str] = []

    def sleep_twice() -> None:
        try:
            process.sleep(1)
            steps.append("woke")
            process.sleep(1)
            steps.append("woke again")
        finally:
            steps.append("unwound")

    SimThread(process, sleep_twice).start()
    timeline.run_until(1_500_000_000)
    process.kill()
    timeline.run_until(5_000_000_000)
    assert steps == ["woke", "unwound"]


def test_paused_thread_continues_later() -> None:
    timeline, process = machine()
    woke_ns: list[int] = []
    event = Event(process.threads)

    def wait() -> None:
        assert event.wait(10)
        woke_ns.append(timeline.now_ns)

    SimThread(process, wait).start()
    timeline.run_until(1_000)
    process.pause()
    event.set()
    timeline.run_until(2_000_000_000)
    assert woke_ns == []
    process.resume(Random(0))
    timeline.run_until(3_000_000_000)
    assert 2_000_000_000 <= woke_ns[0] < 2_010_000_000


def test_clock_of_a_machine_counts_its_own_seconds() -> None:
    timeline, process = machine()
    timeline.run_until(1_000_000_000_000)
    assert process.clock.boottime_ns() == 1_000_250_000_000
    assert process.clock.true_ns(1_000_250_000_000) == 1_000_000_000_001
