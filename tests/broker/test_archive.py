"""Ended tasks leave memory when the index has them, and are found again."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from taskyard.broker import archive
from taskyard.broker.archive import NameFilter
from taskyard.core.effects import Accepted, Refused
from taskyard.core.events import CancelRequested, DuplicatePolicy, Scope, SubmitRequested
from taskyard.core.model import Submission
from taskyard.core.states import TaskState
from taskyard.journal import compaction
from tests.broker.compaction_kit import Desk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from taskyard.core.model import EndedTask


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with closing(Desk(tmp_path)) as desk:
        yield desk


def all_steps(steps: Iterable[None]) -> int:
    return sum(1 for _ in steps)


def forget(desk: Desk) -> int:
    """What a compaction does to memory. Returns in how many steps."""
    compaction.compact(desk.directory, desk.store)
    head = desk.store.head
    return all_steps(desk.archive.forget(head.sequence, head.record))


def names_in_memory(desk: Desk) -> list[bytes]:
    return [*desk.ledger.tasks]


def test_ended_tasks_are_forgotten_and_others_stay(desk: Desk) -> None:
    desk.do(b"a", b"b")
    desk.submit(b"c")
    desk.submit(b"d")
    desk.turn(CancelRequested(0, b"c", Scope(names=(b"d",))))
    assert desk.archive.ended_count == 3
    forget(desk)
    assert names_in_memory(desk) == [b"c"]
    assert desk.archive.ended_count == 0
    counts = desk.ledger.counts
    assert [counts[state] for state in (TaskState.DONE, TaskState.CANCELLED)] == [2, 1]


def test_forgotten_tasks_are_known_by_name_and_result(desk: Desk) -> None:
    desk.do(b"a", b"b")
    forget(desk)
    assert desk.results(b"a", b"nobody", b"b") == [b"A", b"B"]
    assert desk.found(b"b", b"a") == [b"b", b"a"]
    assert desk.submit(b"a") == Accepted(b"c", 0, new=0, existing=1)
    assert isinstance(desk.submit(b"b", payloads=[b"another"]), Refused)
    assert desk.ledger.counts[TaskState.DONE] == 2


def test_task_that_ended_again_after_the_compaction_stays(desk: Desk) -> None:
    """The index has its older end alone."""
    desk.do(b"a")
    compaction.compact(desk.directory, desk.store)
    head = desk.store.head
    desk.turn(SubmitRequested(0, b"c", Submission([b"a"], [b"new"]), repeat=DuplicatePolicy.EXTEND))
    desk.turn(CancelRequested(0, b"c", Scope(names=(b"a",))))
    assert desk.ledger.tasks[b"a"].state is TaskState.CANCELLED
    all_steps(desk.archive.forget(head.sequence, head.record))
    assert names_in_memory(desk) == [b"a"]
    assert desk.archive.ended_count == 1
    forget(desk)
    assert names_in_memory(desk) == []


def test_what_ended_before_the_start_is_forgotten_too(tmp_path: Path) -> None:
    with closing(Desk(tmp_path)) as desk:
        desk.do(b"a", b"b")
    with closing(Desk(tmp_path)) as desk:
        assert desk.archive.ended_count == 2
        desk.do(b"c")
        forget(desk)
        assert names_in_memory(desk) == []


def test_steps_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "NAMES_PER_STEP", 10)
    desk.do(*[b"%d" % number for number in range(25)])
    for number in range(25, 45):
        desk.do(b"%d" % number)
    assert forget(desk) == 5
    assert all_steps(desk.archive.fill_filter()) == 5


def test_recalled_tasks_are_forgotten_again(desk: Desk) -> None:
    desk.do(b"a", b"b")
    forget(desk)
    desk.results(b"a", b"b")
    assert desk.archive.recalled_count == 2
    all_steps(desk.archive.forget_recalled())
    assert names_in_memory(desk) == []
    assert desk.archive.recalled_count == 0
    assert desk.results(b"a") == [b"A"]


def test_recalled_task_that_lives_again_stays(desk: Desk) -> None:
    desk.do(b"a")
    forget(desk)
    desk.turn(SubmitRequested(0, b"c", Submission([b"a"], [b"new"]), repeat=DuplicatePolicy.EXTEND))
    all_steps(desk.archive.forget_recalled())
    assert desk.ledger.tasks[b"a"].state is TaskState.READY


class Counting:
    """An index that says what it was asked."""

    def __init__(self, desk: Desk) -> None:
        self.asked: list[bytes] = []
        self._find = desk.index.find
        desk.index.find = self.find  # type: ignore[method-assign]

    def find(self, names: list[bytes]) -> list[EndedTask]:
        self.asked += names
        return self._find(names)


def test_new_names_are_not_looked_up_once_there_is_a_filter(desk: Desk) -> None:
    desk.do(b"a")
    forget(desk)
    counting = Counting(desk)
    desk.submit(b"new")
    assert counting.asked == [b"new"]
    assert all_steps(desk.archive.fill_filter()) == 1
    desk.submit(*[b"newer %d" % number for number in range(100)])
    assert counting.asked == [b"new"]
    assert desk.results(b"a") == [b"A"]


def test_filter_knows_what_is_forgotten_after_it_was_made(desk: Desk) -> None:
    all_steps(desk.archive.fill_filter())
    names = [b"%d" % number for number in range(100)]
    desk.do(*names)
    forget(desk)
    assert names_in_memory(desk) == []
    assert desk.found(*names) == names


def test_filter_that_has_become_too_small_is_wanted_anew(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "NameFilter", partial(NameFilter, capacity_min=4))
    all_steps(desk.archive.fill_filter())
    names = [b"%d" % number for number in range(9)]
    desk.do(*names)
    forget(desk)
    wanted = desk.archive.needs_filter
    all_steps(desk.archive.fill_filter())
    assert (wanted, desk.archive.needs_filter) == (True, False)
    assert desk.found(*names) == names
