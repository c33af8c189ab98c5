"""Ended tasks leave memory when the index has them, and are found again."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core.effects import Accepted, Refused
from taskyard.core.events import CancelRequested, DuplicatePolicy, Scope, SubmitRequested
from taskyard.core.model import Submission
from taskyard.core.states import TaskState
from taskyard.journal import compaction, ended_tasks
from taskyard.journal.ended_tasks import NameFilter
from tests.broker.compaction_kit import Harness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from taskyard.core.model import EndedTask


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with closing(Harness(tmp_path)) as harness:
        yield harness


def all_steps(steps: Iterable[None]) -> int:
    return sum(1 for _ in steps)


def forget(harness: Harness) -> int:
    """Archive and drop ended tasks, as a compaction does. Returns the number of steps."""
    compaction.compact(harness.directory, harness.store)
    head = harness.store.head
    return all_steps(harness.archive.forget(head.sequence, head.record))


def names_in_memory(harness: Harness) -> list[bytes]:
    return [*harness.ledger.tasks]


def test_ended_tasks_are_forgotten_and_others_stay(harness: Harness) -> None:
    harness.do(b"a", b"b")
    harness.submit(b"c")
    harness.submit(b"d")
    harness.turn(CancelRequested(0, b"c", Scope(names=(b"d",))))
    assert harness.archive.ended_count == 3
    forget(harness)
    assert names_in_memory(harness) == [b"c"]
    assert harness.archive.ended_count == 0
    counts = harness.ledger.counts
    assert [counts[state] for state in (TaskState.DONE, TaskState.CANCELLED)] == [2, 1]


def test_archived_tasks_are_found_by_name_and_result(harness: Harness) -> None:
    harness.do(b"a", b"b")
    forget(harness)
    assert harness.results(b"a", b"nobody", b"b") == [b"A", b"B"]
    assert harness.found(b"b", b"a") == [b"b", b"a"]
    assert harness.submit(b"a") == Accepted(b"c", 0, new=0, existing=1)
    assert isinstance(harness.submit(b"b", payloads=[b"another"]), Refused)
    assert harness.ledger.counts[TaskState.DONE] == 2


def test_task_that_ended_again_after_the_compaction_stays(harness: Harness) -> None:
    """Only its older end is in the index."""
    harness.do(b"a")
    compaction.compact(harness.directory, harness.store)
    head = harness.store.head
    harness.turn(
        SubmitRequested(0, b"c", Submission([b"a"], [b"new"]), repeat=DuplicatePolicy.EXTEND)
    )
    harness.turn(CancelRequested(0, b"c", Scope(names=(b"a",))))
    assert harness.ledger.tasks[b"a"].state is TaskState.CANCELLED
    all_steps(harness.archive.forget(head.sequence, head.record))
    assert names_in_memory(harness) == [b"a"]
    assert harness.archive.ended_count == 1
    forget(harness)
    assert names_in_memory(harness) == []


def test_tasks_that_ended_before_the_start_are_archived_too(tmp_path: Path) -> None:
    with closing(Harness(tmp_path)) as harness:
        harness.do(b"a", b"b")
    with closing(Harness(tmp_path)) as harness:
        assert harness.archive.ended_count == 2
        harness.do(b"c")
        forget(harness)
        assert names_in_memory(harness) == []


def test_steps_are_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_tasks, "NAMES_PER_STEP", 10)
    harness.do(*[b"%d" % number for number in range(25)])
    for number in range(25, 45):
        harness.do(b"%d" % number)
    assert forget(harness) == 5
    assert all_steps(harness.archive.fill_filter()) == 5


def test_recalled_tasks_are_forgotten_again(harness: Harness) -> None:
    harness.do(b"a", b"b")
    forget(harness)
    harness.results(b"a", b"b")
    assert harness.archive.recalled_count == 2
    all_steps(harness.archive.forget_recalled())
    assert names_in_memory(harness) == []
    assert harness.archive.recalled_count == 0
    assert harness.results(b"a") == [b"A"]


def test_recalled_task_that_lives_again_stays(harness: Harness) -> None:
    harness.do(b"a")
    forget(harness)
    harness.turn(
        SubmitRequested(0, b"c", Submission([b"a"], [b"new"]), repeat=DuplicatePolicy.EXTEND)
    )
    all_steps(harness.archive.forget_recalled())
    assert harness.ledger.tasks[b"a"].state is TaskState.READY


class Counting:
    """An index that records the names it was asked for."""

    def __init__(self, harness: Harness) -> None:
        self.asked: list[bytes] = []
        self._find = harness.index.find
        harness.index.find = self.find  # type: ignore[method-assign]

    def find(self, names: list[bytes]) -> list[EndedTask]:
        self.asked += names
        return self._find(names)


def test_new_names_are_not_looked_up_once_there_is_a_filter(harness: Harness) -> None:
    harness.do(b"a")
    forget(harness)
    counting = Counting(harness)
    harness.submit(b"new")
    assert counting.asked == [b"new"]
    assert all_steps(harness.archive.fill_filter()) == 1
    harness.submit(*[b"newer %d" % number for number in range(100)])
    assert counting.asked == [b"new"]
    assert harness.results(b"a") == [b"A"]


def test_filter_contains_tasks_archived_after_it_was_built(harness: Harness) -> None:
    all_steps(harness.archive.fill_filter())
    names = [b"%d" % number for number in range(100)]
    harness.do(*names)
    forget(harness)
    assert names_in_memory(harness) == []
    assert harness.found(*names) == names


def test_full_filter_is_rebuilt(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_tasks, "NameFilter", partial(NameFilter, capacity_min=4))
    all_steps(harness.archive.fill_filter())
    names = [b"%d" % number for number in range(9)]
    harness.do(*names)
    forget(harness)
    wanted = harness.archive.needs_filter
    all_steps(harness.archive.fill_filter())
    assert (wanted, harness.archive.needs_filter) == (True, False)
    assert harness.found(*names) == names


@given(st.lists(st.binary(max_size=8)), st.lists(st.binary(max_size=8)))
def test_no_name_that_was_added_is_ever_called_new(added: list[bytes], others: list[bytes]) -> None:
    names = NameFilter(capacity_min=1)  # far too small: most bits are shared
    names.add(added)
    assert set(added) <= set(names.may_contain(added + others))


def test_hundred_thousand_names_are_all_found() -> None:
    added = [b"task-%d" % number for number in range(100_000)]
    names = NameFilter(len(added), capacity_min=1)
    names.add(added)
    # Equal bytes in other objects, as from the wire.
    assert names.may_contain([bytes(bytearray(name)) for name in added]) == added


def test_few_new_names_are_doubted() -> None:
    names = NameFilter(50_000, capacity_min=1)
    names.add(b"task-%d" % number for number in range(50_000))
    doubted = names.may_contain([b"new-%d" % number for number in range(50_000)])
    assert len(doubted) < 50_000 // 10


def test_empty_filter_contains_nothing() -> None:
    assert NameFilter().may_contain([b"", b"a"]) == []


def test_filter_is_full_beyond_its_capacity() -> None:
    names = NameFilter(4, capacity_min=1)
    names.add([b"a", b"b", b"c", b"d"])
    assert (names.capacity, names.is_full) == (4, False)
    names.add([b"e"])
    assert names.is_full
