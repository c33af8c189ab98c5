"""The fold of whole histories: against the ledger, in parts, in shares, and without Spark."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from taskyard.core.states import TaskState
from taskyard.pipeline.fold.buckets import add_up
from taskyard.pipeline.fold.schemas import ATTEMPTS, BUCKETS, TASKS_WITHOUT_GRAPH
from taskyard.pipeline.fold.share import fold_share, share_numbers
from tests.pipeline.event_log import EventLog, at
from tests.pipeline.fold.histories import (
    BROKER,
    SECOND_NS,
    fold_in_parts,
    history,
    placed,
    table_rows,
)

#: The shares of four that the first names have.
FIRST_SHARES = [2, 1, 2, 1, 1, 0, 1, 0]

#: Schedules with losses, retries, cancellations, expired tasks and edges.
SEEDS = (2, 3, 4, 5, 6, 7, 11, 13, 18, 21)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_equal_the_ledger(seed: int, share: float) -> None:
    """The newest generation of each name has the ledger's state and its number of attempts."""
    found = history(seed, share)
    folded = fold_share(found.events, BROKER)
    tasks, _ = placed(folded.tasks, folded.tasks_open, found.edges)
    newest = {row["task"]: row for row in sorted(tasks, key=lambda row: row["generation"])}
    leases = Counter()  # type: Counter[str]
    for row in tasks:
        leases[row["task"]] += row["attempts"]
    ledger = {
        task.name.decode(errors="backslashreplace"): task for task in found.ledger.tasks.values()
    }
    assert {name: row["state"] for name, row in newest.items()} == {
        name: TaskState(task.state).name for name, task in ledger.items()
    }
    assert dict(leases) == {name: task.attempt for name, task in ledger.items()}
    assert not folded.unplaced


@pytest.mark.parametrize("seed", SEEDS)
def test_open_attempts_are_the_leases_of_the_ledger(seed: int) -> None:
    found = history(seed, 0.5)
    folded = fold_share(found.events, BROKER)
    leased = [task for task in found.ledger.tasks.values() if task.state is TaskState.LEASED]
    rows = folded.attempts_open.select(["task", "attempt"]).to_pylist()
    assert sorted((row["task"], row["attempt"]) for row in rows) == sorted(
        (task.name.decode(errors="backslashreplace"), task.attempt) for task in leased
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_folds_of_parts_equal_one_fold(seed: int) -> None:
    """Parts may end anywhere between two records. Rows that were folded before are skipped."""
    events = history(seed).events
    records = events["record"].to_numpy()
    ends = [row for row in range(1, len(records)) if records[row] != records[row - 1]]
    rng = Random(seed)
    whole = fold_in_parts(events)
    for parts in (2, 7):
        cuts = sorted(rng.sample(ends, min(parts - 1, len(ends))))
        found = fold_in_parts(events, cuts)
        for name in ("attempts", "tasks", "workers", "buckets"):
            assert getattr(found, name) == getattr(whole, name), (name, cuts)


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_shares_of_a_history_add_up_to_it(seed: int) -> None:
    events = history(seed).events
    whole = fold_share(events, BROKER)
    share_of = pa.array(share_numbers(events["task"], 3))
    shares = [fold_share(events.filter(pc.equal(share_of, share)), BROKER) for share in range(3)]
    for name, schema in (
        ("attempts", ATTEMPTS),
        ("attempts_open", ATTEMPTS),
        ("tasks", TASKS_WITHOUT_GRAPH),
        ("tasks_open", TASKS_WITHOUT_GRAPH),
    ):
        parts = [getattr(share, name) for share in shares]
        assert table_rows(parts, schema) == table_rows([getattr(whole, name)], schema)
    added = add_up(share.buckets for share in shares)
    assert table_rows([added], BUCKETS) == table_rows([add_up([whole.buckets])], BUCKETS)


def test_share_of_a_name_is_fixed_and_shares_are_even() -> None:
    names = [*(f"c/task-{number}" for number in range(1000)), "", None, "ü", "8 bytes.", "n" * 99]
    found = share_numbers(pa.chunked_array([names[:10], names[10:]], pa.string()), 4).tolist()
    assert min(Counter(found).values()) > 200
    assert found[:8] == FIRST_SHARES, "executors divide files of one run by it"
    parts = [share_numbers(pa.chunked_array([[name]], pa.string()), 4).tolist() for name in names]
    assert [share for (share,) in parts] == found


def generations_log() -> EventLog:
    """Return a log of a name that is done, fails when submitted again, and is then replaced."""
    log = EventLog()
    log.submit(0, "a")
    log.run("a", 1, 2)
    log.submit(10, "a")
    log.lease(11, "a")
    log.fail(12, "a", "no")
    log.submit(20, "a")
    return log


def test_failed_generation_is_replaced_by_the_next() -> None:
    events, _ = generations_log().tables()
    columns = ["generation", "state"]
    first = fold_share(events.slice(0, 4), BROKER)
    assert first.tasks.select(columns).to_pylist() == [{"generation": 1, "state": "DONE"}]
    assert first.carried.record == 3
    assert not len(first.carried.steps)
    names = pa.table({"campaign": ["c"], "task": ["a"], "generations": [1]})
    again = type(first.carried)(first.carried.steps, names, first.carried.record)
    second = fold_share(events.slice(4, 4), BROKER, again)
    assert not len(second.tasks), "a retry could continue it"
    assert second.tasks_open.select(columns).to_pylist() == [{"generation": 2, "state": "FAILED"}]
    third = fold_share(events.slice(8), BROKER, second.carried)
    assert third.tasks.select(columns).to_pylist() == [{"generation": 2, "state": "FAILED"}]
    assert third.tasks_open.select(columns).to_pylist() == [{"generation": 3, "state": "READY"}]
    assert not len(third.attempts), "appended before"


def test_retry_continues_a_carried_generation() -> None:
    log = EventLog()
    log.submit(0, "a")
    log.lease(1, "a")
    log.fail(2, "a", "no")
    first = fold_share(log.tables()[0], BROKER)
    log.add(5, "retried", "a")
    log.ready(5, "a", "retried")
    log.run("a", 6, 9)
    second = fold_share(log.tables()[0], BROKER, first.carried)
    (task,) = second.tasks.to_pylist()
    assert (task["state"], task["attempts"], task["failures"]) == ("DONE", 2, 1)
    assert (task["wait_ns"], task["run_ns"]) == (2 * SECOND_NS, 4 * SECOND_NS)
    assert second.attempts["attempt"].to_pylist() == [2]
    assert not len(second.tasks_open)


def test_clock_set_back_gives_no_negative_times() -> None:
    log = EventLog()
    log.submit(10, "a")
    log.lease(5, "a")
    log.finish(1, "a")
    (attempt,) = fold_share(log.tables()[0], BROKER).attempts.to_pylist()
    assert (attempt["wait_ns"], attempt["run_ns"]) == (0, 0)
    assert attempt["settled"].replace(tzinfo=None) == at(1)


def test_steps_of_an_unknown_name_are_counted_and_make_no_task() -> None:
    log = EventLog()
    log.lease(1, "a")
    log.add(2, "stale", "a", attempt=1, campaign=None)
    found = fold_share(log.tables()[0], BROKER)
    assert found.unplaced == 1
    assert not len(found.tasks_open)
    assert found.attempts_open["generation"].to_pylist() == [0]


def test_empty_share_gives_empty_tables() -> None:
    events, edges = EventLog().tables()
    found = fold_share(events, BROKER)
    for table in (found.attempts, found.tasks_open, found.buckets, found.carried.steps):
        assert not len(table)
    assert placed(found.tasks, found.tasks_open, edges) == ([], [])


def test_fold_needs_no_spark() -> None:
    modules = "share, stays, metrics, places"
    code = (
        "import sys; sys.modules['pyspark'] = sys.modules['pandas'] = None; "
        f"from taskyard.pipeline.fold import {modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_critical_path_does_not_depend_on_the_order_of_rows() -> None:
    """Of tasks that ended together, the one that was submitted first counts, then by name."""
    log = EventLog()
    log.submit(0, "late")
    for name in ("b", "a"):
        log.submit(1, name)
        log.lease(2, name)
    log.lease(2, "late")
    for name in ("b", "a", "late"):
        log.finish(3, name)
    events, edges = log.tables()
    tasks = fold_share(events, BROKER).tasks
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        _, path = placed(tasks.take(order), tasks.slice(0, 0), edges)
        assert [row["task"] for row in path] == ["late"]
    rest = tasks.filter(pc.not_equal(tasks["task"], "late"))
    _, path = placed(rest, tasks.slice(0, 0), edges)
    assert [row["task"] for row in path] == ["b"]
