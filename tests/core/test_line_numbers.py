"""Numbers of lines: kept as they came, replaced by the next load, bounded."""

import pytest

from taskyard.core import apply as apply_module
from taskyard.core.effects import CommandAck, Effect, Refused
from taskyard.core.events import DiskSpaceChanged
from taskyard.core.ledger import Ledger
from taskyard.core.line_numbers import NumberRequested, NumbersReply, NumbersRequested
from taskyard.core.model import Refusal
from taskyard.core.records import Numbered
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard
from tests.kit.snapshots import reopened


def number(yard: Yard, campaign: bytes, path: bytes, first: int, *parts: bytes) -> list[Effect]:
    return yard.handle(NumberRequested(0, b"client", campaign, path, first, [*parts], 7))


def find(yard: Yard, *, campaign: bytes = b"", path: bytes = b"", index: int = 0) -> NumbersReply:
    (reply,) = yard.handle(NumbersRequested(0, b"client", campaign, path, index, 8))
    assert isinstance(reply, NumbersReply)
    return reply


def test_parts_are_recorded_in_order_and_returned_one_by_one() -> None:
    yard = Yard()
    assert number(yard, b"c", b"/d/a.txt", 0, b"p0", b"p1") == [CommandAck(b"client", 7, 2)]
    assert yard.records == [Numbered(0, b"c", b"/d/a.txt", 0, [b"p0", b"p1"])]
    assert number(yard, b"c", b"/d/a.txt", 2, b"p2") == [CommandAck(b"client", 7, 1)]
    found = [find(yard, campaign=b"c", index=index).part for index in range(4)]
    assert found == [b"p0", b"p1", b"p2", b""]
    assert find(yard, path=b"a.txt") == NumbersReply(b"client", 8, [b"c"], [b"/d/a.txt"], 3, b"p0")
    assert find(yard, campaign=b"x") == NumbersReply(b"client", 8, [], [], 0, b"")


def test_load_replaces_the_numbers_of_its_campaign_and_is_the_newest() -> None:
    yard = Yard()
    number(yard, b"c", b"/d/a.txt", 0, b"old", b"more")
    number(yard, b"d", b"/e/a.txt", 0, b"other")
    assert find(yard, path=b"a.txt").campaigns == [b"d", b"c"]
    number(yard, b"c", b"/d/a.txt", 0, b"new")
    assert find(yard, path=b"a.txt") == NumbersReply(
        b"client", 8, [b"c", b"d"], [b"/d/a.txt", b"/e/a.txt"], 1, b"new"
    )


def test_path_is_found_by_its_last_whole_names() -> None:
    yard = Yard()
    number(yard, b"c", b"/srv/d/a.txt", 0, b"p")
    for path in (b"a.txt", b"d/a.txt", b"srv/d/a.txt"):
        assert find(yard, path=path).campaigns == [b"c"]
    for path in (b".txt", b"e/a.txt", b"/a.txt"):
        assert find(yard, path=path).campaigns == []


def test_repeated_request_is_acknowledged_and_not_recorded_again() -> None:
    yard = Yard()
    number(yard, b"c", b"/a", 0, b"p0")
    assert number(yard, b"c", b"/a", 0, b"p0") == [CommandAck(b"client", 7, 1)]
    assert yard.records == []
    number(yard, b"c", b"/a", 1, b"p1")
    assert number(yard, b"c", b"/a", 1, b"p1") == [CommandAck(b"client", 7, 1)]
    assert yard.records == []
    number(yard, b"d", b"/b", 0, b"p0")
    number(yard, b"c", b"/a", 0, b"p0", b"p1")
    assert yard.records == [Numbered(0, b"c", b"/a", 0, [b"p0", b"p1"])]  # it is the newest again


def test_parts_of_a_load_that_was_replaced_are_refused() -> None:
    yard = Yard()
    number(yard, b"c", b"/a", 0, b"p0")
    text = "numbers of campaign c: another load has replaced them"
    refused = [Refused(b"client", 7, Refusal.CONFLICT, text)]
    assert number(yard, b"c", b"/b", 1, b"p1") == refused
    assert number(yard, b"c", b"/a", 2, b"p2") == refused
    yard.handle(DiskSpaceChanged(0, accepting=False))
    (full,) = number(yard, b"c", b"/a", 0, b"p0")
    assert isinstance(full, Refused)
    assert (full.refusal, yard.records) == (Refusal.FULL, [])


def test_numbers_of_the_oldest_load_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_module, "NUMBERS_BYTES_MAX", 10)
    monkeypatch.setattr(apply_module, "NUMBERED_FILES_MAX", 2)
    ledger = Ledger()
    for campaign in (b"a", b"b", b"c"):
        apply_module.apply(ledger, Numbered(0, campaign, b"/f", 0, [b"1234"]))
    assert [*ledger.numbered] == [b"b", b"c"]
    apply_module.apply(ledger, Numbered(0, b"b", b"/f", 1, [b"12345"]))
    assert [*ledger.numbered] == [b"b"]
    assert ledger.numbers_bytes == 9


def test_numbers_survive_a_snapshot() -> None:
    yard = Yard()
    number(yard, b"c", b"/a", 0, b"p0", b"p1")
    number(yard, b"d", b"/b", 0, b"q0")
    ledger = yard.scheduler.ledger
    restored = reopened(ledger)
    assert ledger_fingerprint(restored) == ledger_fingerprint(ledger)
    assert restored.numbers_bytes == ledger.numbers_bytes == 6
