"""Events to attempts, tasks, workers, critical path and guarantees: stories told by hand."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.pipeline.datasets import ATTEMPTS, CRITICAL_PATH, TASKS, WORKERS
from taskyard.pipeline.placement import tasks
from taskyard.pipeline.transforms.guarantees import Guarantees
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.steps import attempts
from taskyard.pipeline.transforms.tasks import critical_path
from taskyard.pipeline.transforms.workers import workers
from tests.pipeline.scenarios import SECOND_NS, START_NS, Story, at, guarantees, measured

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


Rows = list[tuple[Any, ...]]

#: Every story of this file, by the name of its campaign; told when the first test wants one.
STORIES: dict[str, Callable[[Story], None]] = {}


def story(tell: Callable[[Story], None]) -> Callable[[Story], None]:
    STORIES[tell.__name__] = tell
    return tell


class Book:
    """What became of all stories, computed at once and looked at one by one."""

    def __init__(self, spark: SparkSession) -> None:
        numbers = count(1)
        self.whole = Story()
        for name, tell in STORIES.items():
            one = Story(name, numbers)
            tell(one)
            self.whole.events += one.events
            self.whole.edges += one.edges
        events, edges = self.whole.frames(spark)
        made = ATTEMPTS.check(attempts(events)).persist()
        known = TASKS.check(tasks(events, edges)).persist()
        self._tables = {
            "attempts": made.collect(),
            "tasks": known.collect(),
            "links": links(known, edges).collect(),
            "workers": WORKERS.check(workers(events, made)).collect(),
            "paths": CRITICAL_PATH.check(critical_path(known)).collect(),
        }

    def attempts(self, campaign: str, *columns: str) -> Rows:
        return self.rows("attempts", campaign, "task", "attempt", *columns)

    def tasks(self, campaign: str, *columns: str) -> Rows:
        return self.rows("tasks", campaign, "task", "generation", *columns)

    def workers(self, worker: str, *columns: str) -> Rows:
        found = [row for row in self._tables["workers"] if row["worker"] == worker]
        return sorted(tuple(row[name] for name in columns) for row in found)

    def rows(self, table: str, campaign: str, *columns: str) -> Rows:
        found = [row for row in self._tables[table] if row["campaign"] == campaign]
        return sorted(tuple(row[name] for name in columns) for row in found)


@pytest.fixture(scope="module")
def book(spark: SparkSession) -> Book:
    return Book(spark)


@story
def plain(told: Story) -> None:
    told.submit(0, "a")
    told.run("a", leased=2, finished=5.5)


def test_attempt_has_all_its_times(book: Book) -> None:
    (found,) = book.rows("attempts", "plain", *ATTEMPTS.names)
    assert dict(zip(ATTEMPTS.names, found, strict=True)) == {
        "campaign": "plain", "task": "a", "name": "a", "generation": 1, "attempt": 1,
        "service": "exec", "lane": "", "priority": 0, "worker": "w", "dialect": "native",
        "submitted": at(0), "ready": at(0), "leased": at(2), "settled": at(5.5), "leased_record": 2,
        "outcome": "finished", "reason": None, "own_fault": None, "wait_ns": 2 * SECOND_NS,
        "run_ns": 3_500_000_000, "result_bytes": 7, "leased_ns": START_NS + 2 * SECOND_NS,
        "started": None, "ended": None,
        "queued_ns": None, "exit_status": None, "signal": None, "host": None, "cpu_ns": None,
        "memory_max_bytes": None,
    }  # fmt: skip


@story
def held_ahead(told: Story) -> None:
    told.join(0, "holder", slots=1)
    for task in ("a", "b"):
        told.submit(0, task)
        told.lease(1, task, "holder")
    told.tell(5, "finished", "a", worker="holder", **measured(1.5, 2, cpu_ns=7, exit_status=0))
    told.tell(5, "failed", "b", worker="holder", own_fault=True, **measured(3.5, 1, signal=9))


def test_run_time_is_measured_and_queue_time_is_separate(
    book: Book,
) -> None:
    times = ("started", "ended", "queued_ns", "run_ns")
    assert book.attempts("held_ahead", *times) == [
        ("a", 1, at(1.5), at(3.5), SECOND_NS // 2, 2 * SECOND_NS),
        ("b", 1, at(3.5), at(4.5), SECOND_NS * 5 // 2, SECOND_NS),
    ]
    used = ("exit_status", "signal", "host", "cpu_ns")
    assert book.attempts("held_ahead", *used) == [
        ("a", 1, 0, None, "h", 7),
        ("b", 1, None, 9, "h", None),
    ]
    assert book.tasks("held_ahead", "queued_ns", "run_ns", "path_ns") == [
        ("a", 1, SECOND_NS // 2, 2 * SECOND_NS, 2 * SECOND_NS),
        ("b", 1, SECOND_NS * 5 // 2, SECOND_NS, SECOND_NS),
    ]
    assert book.workers("holder", "busy_ns", "run_ns") == [(3 * SECOND_NS, 3 * SECOND_NS)]
    parts = ("wait_ns", "queued_ns", "retry_ns", "run_ns")
    assert book.rows("paths", "held_ahead", "task", *parts) == [
        ("a", SECOND_NS, 2 * SECOND_NS, 0, 2 * SECOND_NS)
    ]


@story
def retried(told: Story) -> None:
    told.submit(0, "a")
    told.lease(1, "a")
    told.tell(2, "postponed", "a", worker="w", reason="exit 1", own_fault=True)
    told.tell(5, "due", "a")
    told.ready(5, "a", "due")
    told.lease(6, "a")
    told.fail(9, "a", "exit 2")


def test_each_retry_is_an_attempt(book: Book) -> None:
    found = book.attempts("retried", "outcome", "reason", "own_fault", "wait_ns", "run_ns")
    assert found == [
        ("a", 1, "postponed", "exit 1", True, 1 * SECOND_NS, 1 * SECOND_NS),
        ("a", 2, "failed", "exit 2", True, 1 * SECOND_NS, 3 * SECOND_NS),
    ]
    assert book.tasks("retried", "state", "attempts", "failures", "reason") == [
        ("a", 1, "FAILED", 2, 2, "exit 2")
    ]
    assert book.tasks("retried", "wait_ns", "run_ns", "run_last_ns") == [
        ("a", 1, 2 * SECOND_NS, 4 * SECOND_NS, 3 * SECOND_NS)
    ]


@story
def lost_worker(told: Story) -> None:
    told.submit(0, "a")
    told.lease(1, "a", "lost")
    told.tell(11, "expired", "a", worker="lost")
    told.ready(11, "a", "expired")
    told.lease(12, "a", "other")
    told.tell(13, "stale", "a", worker="lost", attempt=1, campaign=None)
    told.tell(13, "progressed", "a", worker="other", percent=50)
    told.finish(14, "a", "other")


def test_attempt_ends_with_its_worker_and_ignores_stale_reports(book: Book) -> None:
    assert book.attempts("lost_worker", "worker", "outcome", "run_ns") == [
        ("a", 1, "lost", "expired", None),
        ("a", 2, "other", "finished", 2 * SECOND_NS),
    ]
    assert book.tasks("lost_worker", "losses", "failures", "worker") == [("a", 1, 1, 0, "other")]


@story
def still_out(told: Story) -> None:
    told.submit(0, "a")
    told.lease(1, "a")


def test_open_lease_has_no_end(book: Book) -> None:
    columns = ("settled", "outcome", "run_ns")
    assert book.attempts("still_out", *columns) == [("a", 1, None, None, None)]
    assert book.tasks("still_out", "state", "ended", "run_ns") == [("a", 1, "LEASED", None, 0)]


@story
def called_off(told: Story) -> None:
    told.submit(0, "a")
    told.submit(0, "b", "a")
    told.lease(1, "a")
    told.tell(4, "cancelled", "a")
    told.tell(4, "cancelled", "b")


def test_task_is_cancelled_during_and_before_its_lease(book: Book) -> None:
    assert book.attempts("called_off", "outcome", "run_ns") == [("a", 1, "cancelled", None)]
    assert book.tasks("called_off", "state", "attempts", "ended") == [
        ("a", 1, "CANCELLED", 1, at(4)),
        ("b", 1, "CANCELLED", 0, at(4)),
    ]


@story
def given_back(told: Story) -> None:
    told.submit(0, "a")
    told.lease(1, "a")
    told.tell(2, "returned", "a", worker="w", reason="refused")
    told.ready(2, "a", "returned")
    told.tell(3, "postponed", "a", own_fault=False)
    told.tell(4, "aged", "a", reason="too old")


def test_settled_attempt_is_not_settled_again(book: Book) -> None:
    """A task that waits is postponed, cancelled or grows old under the number of its last lease."""
    assert book.attempts("given_back", "outcome", "run_ns") == [("a", 1, "returned", None)]
    assert book.tasks("given_back", "state", "reason", "losses") == [
        ("a", 1, "FAILED", "too old", 0)
    ]


@story
def generations(told: Story) -> None:
    told.submit(0, "a")
    told.run("a", 1, 2)
    told.submit(10, "b", "a")
    told.ready(10, "b", "submitted")
    told.submit(20, "a")
    told.submit(21, "c", "a")
    told.run("a", 23, 30)
    told.ready(30, "c")


def test_each_generation_of_a_name_is_a_task(book: Book) -> None:
    assert book.attempts("generations", "generation", "submitted") == [
        ("a", 1, 1, at(0)),
        ("a", 2, 2, at(20)),
    ]
    assert book.tasks("generations", "state", "ended", "run_ns", "level") == [
        ("a", 1, "DONE", at(2), 1 * SECOND_NS, 0),
        ("a", 2, "DONE", at(30), 7 * SECOND_NS, 0),
        ("b", 1, "READY", None, 0, 1),
        ("c", 1, "READY", None, 0, 1),
    ]
    assert book.rows("links", "generations", "task", "after", "after_generation") == [
        ("b", "a", 1),
        ("c", "a", 2),
    ]


@story
def first_campaign(told: Story) -> None:
    told.submit(0, "x")
    told.submit(0, "y", "x")
    told.run("x", 1, 2)
    told.ready(2, "y")
    told.run("y", 3, 4)
    told.campaign = "next_campaign"
    told.submit(10, "y", "x")
    told.ready(10, "y", "submitted")


def test_name_may_be_reused_in_another_campaign(book: Book) -> None:
    assert book.tasks("first_campaign", "waits_for", "level") == [("x", 1, 0, 0), ("y", 1, 1, 1)]
    assert book.tasks("next_campaign", "waits_for", "level") == [("y", 1, 1, 1)]
    for campaign in ("first_campaign", "next_campaign"):
        assert book.rows("links", campaign, "task", "after_campaign") == [("y", "first_campaign")]


@story
def delayed(told: Story) -> None:
    told.submit(0, "a", due=60)
    told.submit(0, "b", due=30)
    told.tell(30, "due", "b")
    told.ready(30, "b", "due")
    told.run("b", 32, 33)


def test_delayed_task_waits_for_its_due_time_then_for_a_worker(book: Book) -> None:
    assert book.tasks("delayed", "state", "due", "ready", "blocked_ns", "wait_ns") == [
        ("a", 1, "DELAYED", at(60), None, None, 0),
        ("b", 1, "DONE", at(30), at(30), 30 * SECOND_NS, 2 * SECOND_NS),
    ]


@story
def failing(told: Story) -> None:
    told.submit(0, "bad")
    told.submit(0, "slow")
    told.submit(0, "behind", "bad")
    told.submit(0, "far", "behind")
    told.submit(0, "hopes", "bad", "slow")
    told.lease(1, "bad")
    told.fail(2, "bad", "no")


def test_blocked_by_a_failure_differs_from_blocked_for_now(book: Book) -> None:
    assert book.tasks("failing", "state", "is_behind_failure", "level") == [
        ("bad", 1, "FAILED", False, 0),
        ("behind", 1, "BLOCKED", True, 1),
        ("far", 1, "BLOCKED", True, 2),
        ("hopes", 1, "BLOCKED", False, 1),
        ("slow", 1, "READY", False, 0),
    ]


@story
def diamond(told: Story) -> None:
    """`a`, then `b` and a long `c`, then `d`, which waits long for a worker and is tried twice."""
    told.submit(0, "a")
    told.submit(0, "b", "a")
    told.submit(0, "c", "a")
    told.submit(0, "d", "b", "c")
    told.run("a", 1, 3)
    told.ready(3, "b")
    told.ready(3, "c")
    told.lease(3, "b")
    told.lease(4, "c")
    told.finish(5, "b")
    told.finish(14, "c")
    told.ready(14, "d")
    told.lease(24, "d")
    told.tell(26, "expired", "d", worker="w")
    told.ready(26, "d", "expired")
    told.run("d", 27, 32)


def test_level_and_path_follow_the_longest_chain(book: Book) -> None:
    assert book.tasks("diamond", "waits_for", "level", "path_ns") == [
        ("a", 1, 0, 0, 2 * SECOND_NS),
        ("b", 1, 1, 1, 4 * SECOND_NS),
        ("c", 1, 1, 1, 12 * SECOND_NS),
        ("d", 1, 2, 2, 17 * SECOND_NS),
    ]


def test_critical_path_splits_the_time(book: Book) -> None:
    spans = ("total_ns", "held_ns", "wait_ns", "retry_ns", "run_ns", "gain_ns")
    found = book.rows("paths", "diamond", "position", "task", "after", *spans)
    assert [(*row[:3], *(value / SECOND_NS for value in row[3:])) for row in found] == [
        (1, "a", None, 3, 0, 1, 0, 2, 1),
        (2, "c", "a", 11, 0, 1, 0, 10, 1),
        (3, "d", "c", 18, 0, 11, 2, 5, 13),
    ]
    assert book.rows("paths", "diamond", "task", "started", "ended")[0] == ("a", at(0), at(3))


def test_campaign_without_ended_tasks_has_no_critical_path(book: Book) -> None:
    assert book.rows("paths", "still_out", "task") == []


@story
def stays(told: Story) -> None:
    told.join(0, "visitor", slots=2)
    told.submit(0, "a")
    told.submit(0, "b")
    told.lease(1, "a", "visitor")
    told.lease(2, "b", "visitor")
    told.finish(3, "a", "visitor")
    told.fail(5, "b", "no")
    told.join(6, "visitor", slots=4)
    told.tell(10, "worker_left", worker="visitor", reason="goodbye")
    told.join(20, "visitor", incarnation=2)
    told.join(25, "visitor", incarnation=3)
    told.submit(25, "c")
    told.run("c", 26, 30, "visitor")


def test_stay_ends_when_the_worker_leaves_or_its_process_changes(book: Book) -> None:
    times = book.workers("visitor", "stay", "incarnation", "slots", "joined", "left", "attempts")
    assert times == [
        (1, 1, 4, at(0), at(10), 2),
        (2, 2, 1, at(20), None, 0),
        (3, 3, 1, at(25), None, 1),
    ]
    work = book.workers("visitor", "stay", "finished", "failed", "busy_ns", "run_ns", "stay_ns")
    assert work == [
        (1, 1, 1, 4 * SECOND_NS, 5 * SECOND_NS, 10 * SECOND_NS),
        (2, 0, 0, 0, 0, 0),
        (3, 1, 0, 4 * SECOND_NS, 4 * SECOND_NS, 5 * SECOND_NS),
    ]
    assert book.workers("visitor", "stay", "utilisation") == [(1, 5 / 40), (2, None), (3, 4 / 5)]


def test_guarantees_hold_in_correct_histories(spark: SparkSession) -> None:
    """A second generation that runs is no reason to wait for what the first one did."""
    told = Story()
    diamond(told)
    told.submit(40, "e", "a")
    told.ready(40, "e", "submitted")
    told.submit(41, "a")
    told.lease(42, "a")
    told.run("e", 43, 44)
    found = guarantees(*told.frames(spark))
    assert found == Guarantees(
        submitted=6, done=5, failed=0, cancelled=0, blocked_behind_failure=0, unfinished=1, lost=0,
        completed_twice=0, dependencies_broken=0, unknown=0, stale_refused=0,
    )  # fmt: skip
    assert found.is_clean


def test_every_broken_guarantee_is_found(spark: SparkSession) -> None:
    told = Story()
    told.join(0, "w")
    told.submit(0, "twice")
    told.run("twice", 1, 2)
    told.finish(3, "twice")
    told.submit(3, "early", "late")
    told.submit(3, "late")
    told.run("early", 4, 5)
    told.run("late", 6, 7)
    told.submit(8, "forgotten", "late")
    told.submit(8, "replaced")
    told.submit(9, "replaced")
    told.submit(9, "orphan")
    told.lease(10, "orphan")
    told.tell(11, "worker_left", worker="w")
    told.lease(12, "stranger")
    told.tell(13, "stale", "twice", attempt=1, campaign=None)
    found = guarantees(*told.frames(spark))
    assert found == Guarantees(
        submitted=7, done=3, failed=0, cancelled=0, blocked_behind_failure=0, unfinished=1, lost=3,
        completed_twice=1, dependencies_broken=1, unknown=1, stale_refused=1,
    )  # fmt: skip
    assert not found.is_clean


def test_empty_history_has_no_tasks(spark: SparkSession) -> None:
    assert guarantees(*Story().frames(spark)).submitted == 0
