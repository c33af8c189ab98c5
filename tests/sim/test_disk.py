"""The simulated disk loses only what a real disk may lose."""

from random import Random

import pytest

from simulator.disk import Crashed, SimStore
from simulator.plan import Faults
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal.chain import Row


def disk(seed: int = 0, **faults: float) -> tuple[SimStore, list[Row]]:
    durable: list[Row] = []
    return SimStore(Random(seed), Faults(**faults), durable.append), durable  # type: ignore[arg-type]


def test_committed_row_is_durable_and_comes_back() -> None:
    store, durable = disk()
    store.commit(b"one", 1)
    head = store.commit(b"two", 2)
    store.reopen(power_cut=True)
    assert store.head == head
    assert [row.body for row in store.rows()] == [b"one", b"two"]
    assert list(store.rows()) == durable


def test_crash_before_the_commit_loses_the_row() -> None:
    store, durable = disk(crash_before_commit=1.0)
    with pytest.raises(Crashed):
        store.commit(b"one", 1)
    assert not durable
    assert not list(store.rows())


def test_crash_in_the_commit_keeps_the_row() -> None:
    store, durable = disk(crash_in_commit=1.0)
    with pytest.raises(Crashed):
        store.commit(b"one", 1)
    assert list(store.rows()) == durable != []


def test_failed_commit_ends_all_commits_until_the_restart() -> None:
    store, _ = disk(commit_fails=1.0)
    for _attempt in range(3):
        with pytest.raises(JournalFailed):
            store.commit(b"one", 1)
    store, durable = disk()
    store.close()
    with pytest.raises(JournalFailed):
        store.commit(b"one", 1)
    store.reopen(power_cut=False)
    store.commit(b"one", 1)
    assert len(durable) == 1


def test_trimmed_rows_are_gone_and_the_rest_verifies() -> None:
    store, _ = disk()
    for body in (b"one", b"two", b"three"):
        store.commit(body, 1)
    store.trim(2)
    assert store.anchor.sequence == 2
    assert [row.body for row in store.rows(2)] == [b"three"]
    assert store.row_of(2) is None
    row = store.row_of(3)
    assert row is not None
    assert row.body == b"three"


@pytest.mark.parametrize("seed", range(50))
def test_damage_is_always_noticed(seed: int) -> None:
    store, _ = disk(seed)
    for _row in range(5):
        store.commit(b"body", 1)
    damaged = store.damaged(covered=0)
    assert damaged is not None
    with pytest.raises(JournalDamaged):
        list(damaged.rows())


def test_disk_without_witnessed_rows_is_not_damaged() -> None:
    store, _ = disk()
    assert store.damaged(covered=0) is None


def test_older_witness_after_a_power_cut_is_harmless() -> None:
    store, durable = disk(witness_synced=0.0)
    store.commit(b"one", 1)
    store.reopen(power_cut=True)
    assert list(store.rows()) == durable
