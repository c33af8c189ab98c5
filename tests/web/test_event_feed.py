"""The feed reads every event once and in order, however the journal is compacted meanwhile."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from simulator.schedule import run
from taskyard.core.ledger import Ledger
from taskyard.journal import compaction, recovery
from taskyard.journal.row_file import Block
from taskyard.journal.sqlite import SqliteStore
from taskyard.web.events import expanded
from taskyard.web.follower import EventFeed
from taskyard.web.view import View

if TYPE_CHECKING:
    from taskyard.journal.chain import Row

SEEDS = range(1, 13)

#: The columns of an event that are not facts of its task.
_OWN_COLUMNS = 8


def rows_of(seed: int) -> list[Row]:
    rows: list[Row] = []
    run(seed, invariants=False, on_row=rows.append)
    return rows


def event_rows(block: Block) -> list[tuple[Any, ...]]:
    if not block.rows:
        return []
    columns = [map(_hashable, expanded(runs, block.rows)) for runs in block.columns]
    rows = list(zip(*columns, strict=True))
    # A stale report has the facts of its task only until that is archived.
    return [row[:_OWN_COLUMNS] if b"stale" in row[:_OWN_COLUMNS] else row for row in rows]


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Reader:
    """A feed with all that it has read."""

    def __init__(self, state: Path) -> None:
        self.feed = EventFeed(state)
        self.view = View()
        self.events: list[tuple[Any, ...]] = []
        self.edges: list[tuple[Any, ...]] = []

    def read(self) -> None:
        for batch in self.feed.read():
            self.events += event_rows(batch.events)
            self.edges += event_rows(batch.edges)
            self.view.update(batch)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_event_is_read_once_whatever_is_trimmed(seed: int, tmp_path: Path) -> None:
    rows = rows_of(seed)
    choose = random.Random(seed)
    ledger = Ledger()
    with (
        closing(SqliteStore(tmp_path / "whole")) as plain,
        closing(SqliteStore(tmp_path / "trimmed")) as store,
    ):
        often, seldom = Reader(tmp_path / "trimmed"), Reader(tmp_path / "trimmed")
        for row in rows:
            records = recovery.decode(row.body)
            for one in (plain, store):
                one.commit(row.body, len(records))
            recovery.apply_row(ledger, row)
            if choose.random() < 0.2:
                often.read()
            if choose.random() < 0.02:
                seldom.read()
            if choose.random() < 0.02:
                compaction.compact(tmp_path / "trimmed", store)
        whole = Reader(tmp_path / "whole")
        for reader in (whole, often, seldom):
            reader.read()
    assert whole.events
    for reader in (often, seldom):
        assert reader.feed.sequence == rows[-1].sequence
        assert not reader.feed.rows_missing
        assert reader.events == whole.events
        assert sorted(reader.edges) == sorted(whole.edges)
        assert_equal_tables(reader.view, whole.view)
    for name, task in ledger.tasks.items():
        number = whole.view.tasks.row_of(name)
        assert number is not None
        assert whole.view.tasks.state[number] == task.state, name


def assert_equal_tables(one: View, other: View) -> None:
    count = other.tasks.count
    # A stale report of an archived task may name it before a row that has its facts.
    place_of = {name: place for place, name in enumerate(one.tasks.names.names)}
    assert sorted(place_of) == sorted(other.tasks.names.names)
    places = [place_of[name] for name in other.tasks.names.names]
    assert (one.tasks.state[places] == other.tasks.state[:count]).all()
    for name, numbers in other.tasks.numbers.items():
        assert (one.tasks.numbers[name][places] == numbers[:count]).all(), name
    for name, codes in other.tasks.codes.items():
        names, other_names = one.catalog[name].names, other.catalog[name].names
        mine = [names[code] for code in one.tasks.codes[name][places]]
        assert mine == [other_names[code] for code in codes[:count]], name
    ran, other_ran = (
        [view.tasks.names.names[place] for place in view.tasks.attempts.column("task")]
        for view in (one, other)
    )
    assert ran == other_ran
    for name in ("leased_ns", "ended_ns", "run_ns"):
        assert (one.tasks.attempts.column(name) == other.tasks.attempts.column(name)).all(), name
    assert np.array_equal(one.series._moved, other.series._moved)  # noqa: SLF001
    assert np.array_equal(one.series._change, other.series._change)  # noqa: SLF001
