"""The name filter may report a new name as known, but never a known one as new."""

from hypothesis import given
from hypothesis import strategies as st

from taskyard.broker.archive import NameFilter


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
