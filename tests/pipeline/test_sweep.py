"""The sweep: simulation, grid, workloads from histories and files, and conclusions."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from taskyard.core.events import RulesSet
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from taskyard.errors import UserError
from taskyard.pipeline.sweep import conclusions, simulation
from taskyard.pipeline.sweep.from_file import workload_of_file
from taskyard.pipeline.sweep.from_history import COLUMNS, workload_of
from taskyard.pipeline.sweep.grid import Forecast, Point, grid, read_numbers
from taskyard.pipeline.sweep.per_worker import WorkerSimulation, uniform_workers
from taskyard.pipeline.sweep.simulation import PooledSimulation
from taskyard.pipeline.sweep.workload import (
    Setback,
    Stay,
    TaskKind,
    Workload,
    campaign_bounds,
    decode_workload,
    encode_workload,
    settings_rules,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MILLI_NS = SECOND_NS // 1000


def flat(count: int, seed: int = 1) -> Workload:
    rng = random.Random(seed)
    run_ns = [int(rng.expovariate(1) * SECOND_NS) + 1 for _ in range(count)]
    return Workload([b"t%d" % number for number in range(count)], run_ns, gap_ns=MILLI_NS)


def chains(count: int, length: int) -> Workload:
    workload = flat(count)
    workload.after = [[n - 1] if n % length else [] for n in range(count)]
    return workload


def tangle(count: int) -> Workload:
    workload, rng = flat(count), random.Random(2)
    workload.after = [
        sorted({rng.randrange(max(0, n - 60), n) for _ in range(rng.randrange(3))}) if n else []
        for n in range(count)
    ]
    return workload


def lanes(count: int, number: int) -> Workload:
    workload = flat(count)
    workload.lanes = [b"lane-%d" % (n % number) for n in range(count)]
    return workload


def one_by_one(workload: Workload, point: Point) -> WorkerSimulation:
    run = WorkerSimulation(workload, point, uniform_workers(workload, point))
    run.run()
    return run


def forecast(workload: Workload, workers: int, *policy: str, slots: int = 1) -> Forecast:
    return simulation.simulate(workload, campaign_bounds(workload), Point(workers, slots, policy))


# The simulation.


@pytest.mark.parametrize("workers", [1, 3, 12, 60, 400])
@pytest.mark.parametrize(
    "make",
    [lambda: flat(600), lambda: chains(600, 20), lambda: tangle(600), lambda: lanes(600, 90)],
)
def test_pool_takes_as_long_as_single_workers(make: Callable[[], Workload], workers: int) -> None:
    workload, point = make(), Point(workers, 1)
    quick = simulation.simulate(workload, campaign_bounds(workload), point)
    assert quick.makespan_ns == pytest.approx(one_by_one(workload, point).makespan_ns, rel=0.03)
    assert (quick.done, quick.unfinished) == (600, 0)


def test_no_task_starts_before_its_dependencies_end() -> None:
    workload = tangle(300)
    run = PooledSimulation(workload, Point(8, 1), prefetch=16, window_ns=SECOND_NS)
    run.run()
    for number, after in enumerate(workload.after or []):
        for before in after:
            ended_ns = run.begun_ns[before] + workload.run_ns[before] + workload.gap_ns
            assert run.begun_ns[number] >= ended_ns


@pytest.mark.parametrize("prefetch", [0, 32])
def test_at_most_as_many_tasks_run_as_slots(prefetch: int) -> None:
    workload = tangle(300)
    run = PooledSimulation(workload, Point(3, 2), prefetch, window_ns=SECOND_NS // 2)
    run.run()
    assert most_at_once(run, workload, range(300)) == 6


def test_lane_runs_one_task_at_a_time() -> None:
    workload = lanes(200, 4)
    run = PooledSimulation(workload, Point(50, 1), prefetch=0, window_ns=SECOND_NS)
    run.run()
    for lane in range(4):
        assert most_at_once(run, workload, range(lane, 200, 4)) == 1


def most_at_once(run: PooledSimulation, workload: Workload, numbers: range) -> int:
    changes = []
    for number in numbers:
        begun_ns = run.begun_ns[number]
        ended_ns = begun_ns + workload.run_ns[number] + workload.gap_ns
        changes += [(begun_ns, 1), (ended_ns, -1)]
    level = most = 0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


def test_more_workers_never_beat_the_bounds() -> None:
    workload = tangle(400)
    shape = campaign_bounds(workload)
    for workers in (1, 4, 1000):
        made = forecast(workload, workers)
        assert made.makespan_ns >= shape.bound_ns(workers, 1)
        assert made.makespan_ns <= shape.work_ns / workers + shape.chain_ns
        assert 0 < made.utilisation <= 1


def test_single_worker_takes_the_sum_of_run_times() -> None:
    workload = Workload([b"a", b"b"], [SECOND_NS, 2 * SECOND_NS])
    made = forecast(workload, 1)
    assert made.makespan_ns == made.busy_ns == 3 * SECOND_NS
    assert made.utilisation == 1
    assert (made.wait_ns_mean, made.wait_ns_max) == (SECOND_NS // 2, SECOND_NS)


def test_failed_attempt_is_retried_after_its_delay() -> None:
    workload = Workload([b"a"], [SECOND_NS], setbacks={0: [Setback(3 * SECOND_NS, 5 * SECOND_NS)]})
    for made in (forecast(workload, 1), forecast(workload, 1, "overfeed=1")):
        assert made.makespan_ns == 9 * SECOND_NS
        assert (made.done, made.failed) == (1, 0)


def test_dependents_of_a_failure_never_run() -> None:
    workload = Workload([b"a", b"b"], [SECOND_NS, SECOND_NS], after=[[], [0]], failing=[0])
    for made in (forecast(workload, 4), forecast(workload, 4, "workers_max=9")):
        assert (made.done, made.failed, made.unfinished) == (0, 1, 1)
        assert made.makespan_ns == SECOND_NS


def test_task_starts_neither_before_submission_nor_before_it_is_due() -> None:
    kinds = [TaskKind(), TaskKind(due_ns=5 * SECOND_NS)]
    workload = Workload([b"a", b"b"], [SECOND_NS] * 2, kinds, [1, 0])
    workload.arrivals_ns = [0, 9 * SECOND_NS]
    for policy in ((), ("overfeed=1",)):
        made = forecast(workload, 4, *policy)
        assert made.makespan_ns == 10 * SECOND_NS
        assert made.wait_ns_max == 0


def test_wide_tasks_leave_slots_unused() -> None:
    workload = Workload([b"a", b"b"], [SECOND_NS] * 2, [TaskKind(slots=2)])
    assert forecast(workload, 1, slots=3).makespan_ns == 2 * SECOND_NS
    assert forecast(workload, 1, slots=4).makespan_ns == SECOND_NS
    assert forecast(workload, 5, slots=1).unfinished == 2


def test_rules_are_the_schedulers_own() -> None:
    workload = Workload([b"%d" % n for n in range(12)], [SECOND_NS] * 12, lanes=[b"x"] * 12)
    assert forecast(workload, 8).makespan_ns == 12 * SECOND_NS
    assert forecast(workload, 8, "lane_workers_max=3").makespan_ns == 4 * SECOND_NS
    assert forecast(workload, 2, "overfeed=5", slots=6).makespan_ns == 12 * SECOND_NS
    workload.lanes = [b"lane-%d" % n for n in range(12)]
    assert forecast(workload, 8, "workers_max=2").makespan_ns == 6 * SECOND_NS
    assert forecast(workload, 8, "broker_workers_max=4").makespan_ns == 3 * SECOND_NS


def test_rates_are_the_schedulers_own() -> None:
    workload = Workload([b"%d" % n for n in range(12)], [1] * 12)
    assert forecast(workload, 8, "rate=2/s").makespan_ns == pytest.approx(5.5 * SECOND_NS, rel=0.01)
    workload.lanes = [b"x"] * 6 + [b"y"] * 6
    slow = forecast(workload, 8, "lane_rate=2/s").makespan_ns
    assert slow == pytest.approx(2.5 * SECOND_NS, rel=0.01)


def test_rules_of_the_settings_apply_and_a_policy_changes_all_of_them() -> None:
    options = LaneOptions(workers_max=1, expiry_ns=1, is_held=True)
    rules = settings_rules(RulesSet(0, rules=(Rule(b"disk", b"default/x", options),)))
    lanes = [b"x"] * 4 + [b"y"] * 4
    workload = Workload([b"%d" % n for n in range(8)], [SECOND_NS] * 8, lanes=lanes, rules=rules)
    policy = "lane_workers_max=4"
    assert forecast(workload, 8).makespan_ns == 4 * SECOND_NS
    assert forecast(workload, 8, policy, "workers_max=0").makespan_ns == SECOND_NS
    assert forecast(workload, 8, policy).makespan_ns == 4 * SECOND_NS  # x has one worker
    text = conclusions.sentences(workload, campaign_bounds(workload), [])[-1]
    assert text == "The limits and rates of the settings apply: disk."
    assert decode_workload(encode_workload(workload)) == workload


def test_settings_without_limits_change_nothing() -> None:
    retried = LaneOptions(retry_delays_ns=(1,), command=b"agent")
    assert settings_rules(RulesSet(0, rules=(Rule(b"s", b"s/*", retried),))) is None
    assert settings_rules(RulesSet(0, workers_max=3)) is not None
    assert settings_rules(RulesSet(0, defaults=LaneOptions(overfeed=1))) is not None


def test_messages_of_one_time_are_submitted_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskyard.pipeline.sweep.workload.TASKS_PER_MESSAGE_MAX", 2)
    run = one_by_one(Workload([b"%d" % n for n in range(6)], [SECOND_NS] * 6), Point(1, 1))
    assert run.begun_ns == [number * SECOND_NS for number in range(6)]


def test_replay_has_the_workers_of_the_measured_run() -> None:
    workload = Workload([b"%d" % n for n in range(4)], [2 * SECOND_NS] * 4)
    services = workload.services
    workload.stays = [
        Stay(b"early", services, 1, joined_ns=SECOND_NS),
        Stay(b"lost", services, 1, joined_ns=0, left_ns=3 * SECOND_NS, is_lost=True),
    ]
    made = simulation.replay(workload)
    assert made.done == 4
    assert made.makespan_ns == 7 * SECOND_NS  # one of four tasks was started twice


def test_pool_is_only_used_if_single_workers_do_not_matter() -> None:
    plain, shape = flat(40), campaign_bounds(flat(40))
    assert simulation.can_pool(plain, shape, Point(2, 1))
    assert not simulation.can_pool(plain, shape, Point(2, 1, ("workers_max=1",)))
    assert not simulation.can_pool(plain, shape, Point(2, 1, ("overfeed=1",)))
    wide = Workload([b"a"], [1], [TaskKind(slots=2)])
    assert not simulation.can_pool(wide, campaign_bounds(wide), Point(2, 1))
    assert not simulation.can_pool(plain, shape, Point(2, 1, ("rate=1/s",)))
    assert not simulation.can_pool(plain, shape, Point(2, 1, ("lane_rate=1/s",)))
    laned = lanes(40, 2)
    assert not simulation.can_pool(laned, campaign_bounds(laned), Point(2, 1))
    assert simulation.prefetch_of(campaign_bounds(chains(40, 20)), Point(8, 1)) == 0


def test_workload_survives_encoding() -> None:
    workload = tangle(50)
    workload.setbacks[3] = [Setback(1, 2)]
    workload.stays = [Stay(b"w", (b"exec",), 2, 5)]
    assert decode_workload(encode_workload(workload)) == workload


# The grid.


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,2,4,…,64", [1, 2, 4, 8, 16, 32, 64]),
        ("1,2,...,8", [1, 2, 4, 8]),
        ("1,2,3,…,6", [1, 2, 3, 4, 5, 6]),
        ("10,20,…,50", [10, 20, 30, 40, 50]),
        ("2,4,8,…,20", [2, 4, 8, 16, 20]),
        ("7", [7]),
        ("1, 4 ,1", [1, 4]),
    ],
)
def test_omission_continues_by_factor_or_step(text: str, numbers: list[int]) -> None:
    assert read_numbers(text, "--workers") == numbers


@pytest.mark.parametrize(
    "text", ["", "0", "1,x", "1,…,8", "1,2,…", "4,2,…,9", "1e3", "-1", "9" * 9]
)
def test_invalid_numbers_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--workers"):
        read_numbers(text, "--workers")


def test_policies_give_every_combination() -> None:
    points = grid([1, 2], [1], ["overfeed=0,3", "order=age"])
    assert [point.policy for point in points] == [
        *[("overfeed=0", "order=age")] * 2,
        *[("overfeed=3", "order=age")] * 2,
    ]
    assert points[-1].rules()[0].overfeed == 3


@pytest.mark.parametrize(
    "pair",
    ["speed=3", "overfeed", "overfeed=x", "order=best", "overfeed=", "rate=3", "lane_rate=0/s"],
)
def test_invalid_policy_is_refused(pair: str) -> None:
    with pytest.raises(UserError, match="--policy"):
        grid([1], [1], [pair])


def test_too_large_grid_is_refused() -> None:
    with pytest.raises(UserError, match="points, the limit is"):
        grid(range(1, 1000), range(1, 1000), [])


# Workloads.

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def history(
    tasks: list[dict[str, Any]], attempts: list[dict[str, Any]], **more: list[dict[str, Any]]
) -> Workload:
    """Return a workload from hand-written rows. Times are in seconds."""
    usual = {"generation": 1, "service": "exec", "lane": "", "slots": 1, "state": "DONE"}
    usual |= {"submitted": 0, "submitted_record": 1, "is_behind_failure": False, "ended": 9}
    rows = {
        "tasks": [usual | task for task in tasks],
        "attempts": [
            {"generation": 1, "attempt": 1, "lane": "", "worker": "w", "outcome": "finished"}
            | {"leased_record": place + 2, "ready": 0}
            | attempt
            for place, attempt in enumerate(attempts)
        ],
        "edges": more.get("edges", []),
        "workers": more.get("workers", [{"worker": "w", "slots": 1, "joined": 0}]),
    }
    return workload_of(**{name: _table(name, rows[name]) for name in rows})


def _table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    columns = {}
    for column in COLUMNS[name]:
        values = [row.get(column) for row in rows]
        kind = _KINDS.get(column, pa.string())
        if kind == _TIME:
            values = [None if one is None else BEGIN + timedelta(seconds=one) for one in values]
        columns[column] = pa.array(values, kind)
    return pa.table(columns)


_TIME = pa.timestamp("us", tz="UTC")
_TIMES = ("submitted", "leased", "ended", "due", "ready", "settled", "joined", "left", "started")
_NUMBERS = (
    *("generation", "priority", "slots", "submitted_record", "attempt", "leased_record"),
    "run_ns",
)
_KINDS = (
    dict.fromkeys(_TIMES, _TIME)
    | dict.fromkeys((*_NUMBERS, "record"), pa.int64())
    | {"is_behind_failure": pa.bool_(), "services": pa.list_(pa.string())}
)


def test_prefetched_task_does_not_run_yet() -> None:
    made = history(
        [{"task": "a"}, {"task": "b"}],
        [{"task": "a", "leased": 1, "settled": 3}, {"task": "b", "leased": 1, "settled": 7}],
    )
    assert made.run_ns == [2 * SECOND_NS, 4 * SECOND_NS]
    assert made.gap_ns == 0


def test_measured_run_is_kept_and_time_before_its_start_is_the_gap() -> None:
    times = [("a", 1, 2, 5, 8), ("b", 1, 6, 7, 8)]
    made = history(
        [{"task": name} for name, *_ in times],
        [
            {"task": name, "leased": leased, "settled": settled, "ready": 0}
            | {"started": started, "run_ns": (ended - started) * SECOND_NS}
            for name, leased, started, ended, settled in times
        ],
    )
    assert made.run_ns == [3 * SECOND_NS, SECOND_NS]
    assert made.gap_ns == SECOND_NS


def test_wait_for_a_rate_is_no_part_of_the_gap() -> None:
    times = [("a", 0, 1, 2, 3), ("b", 7, 8, 9, 10)]
    made = history(
        [{"task": name} for name, *_ in times],
        [
            {"task": name, "leased": leased, "settled": settled, "ready": 0}
            | {"started": started, "run_ns": (ended - started) * SECOND_NS}
            for name, leased, started, ended, settled in times
        ],
    )
    assert made.gap_ns == 2 * SECOND_NS  # 1 s to report, 1 s to start


def test_gap_is_the_time_from_a_free_slot_to_the_next_lease() -> None:
    names = ["a", "b", "c"]
    made = history(
        [{"task": name} for name in names],
        [
            {"task": name, "leased": place * 3, "settled": place * 3 + 2}
            for place, name in enumerate(names)
        ],
    )
    assert made.gap_ns == SECOND_NS
    assert forecast(made, 1).makespan_ns == 9 * SECOND_NS


def test_failed_attempts_become_setbacks_and_lost_ones_are_left_out() -> None:
    made = history(
        [{"task": "a"}],
        [
            {"task": "a", "leased": 0, "settled": 1, "outcome": "postponed"},
            {"task": "a", "leased": 2, "settled": 4, "outcome": "expired", "attempt": 2},
            {"task": "a", "leased": 5, "settled": 9, "attempt": 3, "ready": 4},
        ],
    )
    assert made.setbacks == {0: [Setback(SECOND_NS, 3 * SECOND_NS)]}
    assert made.run_ns == [4 * SECOND_NS]


def test_resubmitted_name_is_another_task_and_keeps_its_edges() -> None:
    made = history(
        [
            {"task": "a"},
            {"task": "b", "submitted_record": 2},
            {"task": "a", "generation": 2, "submitted_record": 10},
            {"task": "b", "generation": 2, "submitted_record": 11},
        ],
        [],
        edges=[
            {"record": 2, "task": "b", "after": "a"},
            {"record": 11, "task": "b", "after": "a"},
            {"record": 11, "task": "b", "after": "other's"},
        ],
    )
    assert made.after == [[], [0], [], [2]]
    assert len(set(made.names)) == 4


def test_cancelled_tasks_are_left_out_and_unrun_ones_estimated() -> None:
    made = history(
        [{"task": "a"}, {"task": "b", "state": "READY"}, {"task": "c", "state": "CANCELLED"}],
        [{"task": "a", "leased": 0, "settled": 3}],
    )
    assert made.names == [b"a", b"b"]
    assert made.run_ns == [3 * SECOND_NS] * 2
    assert made.estimated_count == 1


def test_workers_of_the_run_are_kept_with_joins_and_exits() -> None:
    made = history(
        [{"task": "a", "submitted": 1, "ended": 20}],
        [{"task": "a", "leased": 1, "settled": 20}],
        workers=[
            {"worker": "w", "slots": 2, "joined": 0, "services": ["exec"]},
            {"worker": "x", "slots": 1, "joined": 3, "left": 5, "reason": "silent"},
            {"worker": "late", "slots": 1, "joined": 30},
        ],
    )
    assert made.stays == [
        Stay(b"w", (b"exec",), 2, 0),
        Stay(b"x", (), 1, 2 * SECOND_NS, 4 * SECOND_NS, is_lost=True),
    ]
    assert made.makespan_ns == 19 * SECOND_NS


def test_run_times_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "campaign.jsonl"
    tasks: list[dict[str, object]] = [
        {"name": "a", "argv": ["sleep", "1.5"]},
        {"name": "b", "argv": ["true"], "time_limit": "2s", "after": ["a"], "lane": "x"},
        {"name": "c", "argv": ["true"]},
    ]
    path.write_text("\n".join(json.dumps(task) for task in tasks))
    with pytest.raises(UserError, match="task 'c' has no run time"):
        workload_of_file(str(path), None)
    made = workload_of_file(str(path), 4 * SECOND_NS)
    assert made.run_ns == [SECOND_NS * 3 // 2, 4 * SECOND_NS, 4 * SECOND_NS]
    assert made.after == [[], [0], []]
    assert made.lanes == [b"", b"x", b""]
    path.write_text('{"name": "a"}')
    with pytest.raises(UserError, match=r"campaign\.jsonl:1: has no work"):
        workload_of_file(str(path), None)


def test_run_times_are_read_from_wfcommons(tmp_path: Path) -> None:
    specified: list[dict[str, object]] = [
        {"name": n, "id": n, "parents": [], "children": []} for n in ("a", "b")
    ]
    executed = [{"id": "a", "runtimeInSeconds": 2.5}, {"id": "b", "runtimeInSeconds": 1}]
    path = tmp_path / "workflow.json"
    workflow = {"specification": {"tasks": specified}, "execution": {"tasks": executed}}
    path.write_text(json.dumps({"schemaVersion": "1.5", "workflow": workflow}))
    assert workload_of_file(str(path), None).run_ns == [SECOND_NS * 5 // 2, SECOND_NS]


# Conclusions.


def sentences_of(workload: Workload, workers: list[int], *policy: str) -> list[str]:
    results = [(Point(count, 1, policy), forecast(workload, count, *policy)) for count in workers]
    return conclusions.sentences(workload, campaign_bounds(workload), results)


def test_sentence_names_makespans_and_the_limit_beyond_them() -> None:
    workload = Workload(
        [b"%d" % n for n in range(80)], [60 * SECOND_NS] * 80, after=[[]] * 78 + [[77], [78]]
    )
    (text,) = sentences_of(workload, [1, 8, 16, 80, 200])
    assert text == (
        "1 worker finishes in 1 h 20 min, 8 in 12 min, 80 in 3 min. Beyond 80, the critical path "
        "of 3 min is the limit."
    )


def test_sentence_names_the_lane_that_is_the_limit() -> None:
    workload = Workload([b"%d" % n for n in range(20)], [SECOND_NS] * 20, lanes=[b"disk"] * 20)
    (text,) = sentences_of(workload, [1, 2, 4])
    assert text.endswith("Beyond 1, the lane disk with 20 s of work is the limit.")


def test_sentence_states_that_more_workers_would_help() -> None:
    (text,) = sentences_of(flat(500), [1, 2, 4])
    assert text.endswith("More would still help: 99 % of the slot time is in use.")


def test_fine_steps_hide_no_gain() -> None:
    (text,) = sentences_of(flat(500), [1, 20, 21])
    assert "More would still help" in text


def test_error_against_the_measured_run_is_stated() -> None:
    workload = Workload([b"a"], [10 * SECOND_NS], makespan_ns=11 * SECOND_NS)
    text = conclusions.check_text(workload, forecast(workload, 1))
    assert text.endswith("takes 10 s, the run took 11 s (-9.1%).")


def test_campaign_that_the_scheduler_refuses_raises() -> None:
    with pytest.raises(UserError, match="the scheduler refuses the campaign"):
        forecast(Workload([b"a" * 2000], [1]), 1)


def test_makespan_falls_with_workers() -> None:
    spans = [forecast(flat(300), workers).makespan_ns for workers in (1, 2, 4, 8, 16)]
    assert all(more > fewer for more, fewer in pairwise(spans))
