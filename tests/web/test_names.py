"""Search and order of names agree with a plain loop, also while names are added."""

from __future__ import annotations

import random

import pytest

from taskyard.web import names as names_module
from taskyard.web.names import TaskNames, stem


def random_names(choose: random.Random, count: int) -> list[bytes]:
    return [
        b"/".join(bytes(choose.choices(b"ab01\0\xff-", k=choose.randrange(1, 6))) for _ in "xy")
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("hits_max", [0, 1000])
def test_search_and_order_agree_with_a_loop(
    seed: int, hits_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "_HITS_MAX", hits_max)
    choose = random.Random(seed)
    known = TaskNames()
    parts = [b"a", b"01", b"b/", b"\0", b"zz", *random_names(choose, 3)]
    for count in (0, 40, 1, 0, 100, 2):
        added = random_names(choose, count)
        rows = known.rows_of([*added, None])
        assert [known[row] for row in rows[:-1].tolist()] == added
        assert rows[-1] == -1
        for part in parts:
            assert known.search(part).tolist() == [part in name for name in known.names]
        assert [known[row] for row in known.order().tolist()] == sorted(known.names)
        assert known.row_of(b"never seen") is None
        assert all(known.row_of(name) == row for row, name in enumerate(known.names))


def test_names_that_differ_in_numbers_share_a_stem() -> None:
    known = TaskNames()
    known.rows_of([b"m/fetch-1", b"m/fetch-22", b"m/parse-1", b"n/fetch-1", b"m/fetch-"])
    first, second, *others = known.stems.tolist()
    assert first == second
    assert len({first, *others}) == 4
    assert stem("fetch-22-b7") == "fetch-#-b#"


def test_too_many_stems_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "STEMS_MAX", 3)
    known = TaskNames()
    known.rows_of([bytes([97 + number]) for number in range(8)])
    known.rows_of([b"a", b"z"])
    found = known.stems.tolist()
    assert sorted(found) == [0, 0, 0, 0, 0, 0, 1, 2, 3]
