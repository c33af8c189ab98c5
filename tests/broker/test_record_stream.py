"""Who follows is told every record once, in order, after its commit, and bounded each time.

The broker under test is the real one, over a port that is a list and a journal in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.broker import record_stream
from taskyard.broker.record_stream import RecordStreams
from taskyard.broker.turn import Broker
from taskyard.core.effects import Effect, RecordPage
from taskyard.core.events import (
    CancelRequested,
    Event,
    FollowOptions,
    Outcome,
    PauseRequested,
    ReplyDue,
    Scope,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerRegistered,
)
from taskyard.core.model import Submission, Terms
from taskyard.core.records import AnyRecord, Finished, Leased, Paused, Submitted, WorkerLeft
from taskyard.core.scheduler import Scheduler
from taskyard.core.workers import WorkerFacts
from taskyard.errors import JournalFailed
from taskyard.journal import recovery
from taskyard.journal.recovery import encode, records_of
from taskyard.journal.store import MemoryStore, Row

if TYPE_CHECKING:
    from collections.abc import Sequence


class CountingStore(MemoryStore):
    """Says which records it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def row_of(self, record: int) -> Row | None:
        self.read.append(record)
        return super().row_of(record)


class Desk:
    """A port, a clock, and a broker behind them."""

    def __init__(self) -> None:
        self.store = CountingStore()
        self.arrived: Sequence[Event] = ()
        self.sent: list[RecordPage] = []
        self.waits: list[int | None] = []
        self._requests = 0
        self.start()

    def start(self) -> None:
        """From what the journal has."""
        ledger = recovery.recover(self.store)
        self.broker = Broker(Scheduler(ledger), self, self.store, self)

    def monotonic_ns(self) -> int:
        return 0

    wall_ns = monotonic_ns

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        self.waits.append(wait_ns)
        return self.arrived

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        self.sent = [effect for effect in effects if isinstance(effect, RecordPage)]
        return ()

    def turn(self, *events: Event) -> list[RecordPage]:
        """What followers are told in a turn with these events."""
        self.arrived = events
        self.broker.turn()
        return self.sent

    def submit(
        self, *names: bytes, campaign: bytes = b"", service: bytes = b"s"
    ) -> SubmitRequested:
        terms = Terms(campaign=campaign, service=service)
        return SubmitRequested(0, b"client", Submission([*names], [b"payload"], [terms]))

    def follow(
        self,
        cursor: int | None,
        count: int = 1000,
        scope: Scope | None = None,
        journal: bytes = b"",
    ) -> ReplyDue:
        self._requests += 1
        follows = FollowOptions(cursor, count, scope or Scope(), journal)
        return ReplyDue(0, b"follower", self._requests, follows)

    def read_all(
        self, count: int = 1000, scope: Scope | None = None
    ) -> list[tuple[int, AnyRecord]]:
        """Everything from the beginning, request by request."""
        told: list[tuple[int, AnyRecord]] = []
        cursor = 0
        while cursor < self.store.head.record:
            answers = self.turn(self.follow(cursor, count, scope))
            while not answers:
                answers = self.turn()
            (answer,) = answers
            assert answer.cursor > cursor
            told += answer.records
            cursor = answer.cursor
        return told

    def journal(self) -> list[tuple[int, AnyRecord]]:
        records = [
            one for row in self.store.rows() for one in records_of(row, row.record_first - 1)
        ]
        return [*enumerate(records, start=1)]


@pytest.fixture
def desk() -> Desk:
    """A worker w, and tasks of two campaigns."""
    desk = Desk()
    desk.turn(WorkerRegistered(0, b"w", WorkerFacts(services=(b"s",), slots_total=0)))
    desk.turn(desk.submit(b"a1", b"a2", campaign=b"a"), desk.submit(b"b1", campaign=b"b"))
    return desk


def numbers(answer: RecordPage) -> list[int]:
    return [number for number, _ in answer.records]


def test_who_follows_from_now_on_is_told_when_something_is_decided(desk: Desk) -> None:
    head = desk.store.head.record
    assert desk.turn(desk.follow(None)) == []
    assert desk.turn() == []
    (answer,) = desk.turn(TasksRequested(0, b"w", 3))
    assert (answer.cursor, answer.journal) == (head + 1, desk.store.identity)
    assert answer.records == [
        (head + 1, Leased(0, b"w", [b"a/a1", b"a/a2", b"b/b1"], [1, 1, 1], 0))
    ]
    assert desk.turn(desk.submit(b"c")) == []


def test_nothing_is_told_before_its_commit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.turn(desk.follow(None))

    def fail(_body: bytes, _records: int) -> None:
        raise JournalFailed("the disk is gone")

    monkeypatch.setattr(desk.store, "commit", fail)
    desk.sent = []
    with pytest.raises(JournalFailed):
        desk.turn(desk.submit(b"c"))
    assert desk.sent == []


def test_what_is_decided_between_two_answers_is_in_the_second_without_a_look_at_the_journal(
    desk: Desk,
) -> None:
    desk.turn(desk.follow(None))
    (answer,) = desk.turn(desk.submit(b"c"))
    desk.turn(desk.submit(b"d"))
    desk.turn(desk.submit(b"e"), desk.submit(b"f"))
    (second,) = desk.turn(desk.follow(answer.cursor))
    assert numbers(second) == [answer.cursor + 1, answer.cursor + 2, answer.cursor + 3]
    assert second.cursor == desk.store.head.record
    assert desk.store.read == []


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_everything_is_told_once_and_in_order_from_the_beginning(desk: Desk, count: int) -> None:
    desk.turn(TasksRequested(0, b"w", 2), desk.submit(b"c"))
    desk.turn(TasksReported(0, b"w", [b"a/a1"], texts=[b"result"]))
    assert desk.read_all(count) == desk.journal()


def test_restart_neither_loses_nor_doubles_a_record(desk: Desk) -> None:
    desk.turn(desk.follow(None))
    (answer,) = desk.turn(desk.submit(b"c"))
    desk.turn(desk.submit(b"d"))
    desk.start()
    desk.turn(desk.submit(b"e"))
    (second,) = desk.turn(desk.follow(answer.cursor, journal=answer.journal))
    assert numbers(second) == [answer.cursor + 1, answer.cursor + 2]


def test_who_has_waited_long_enough_is_told_that_there_is_nothing(desk: Desk) -> None:
    asked = desk.follow(None)
    desk.turn(asked)
    (answer,) = desk.turn(ReplyDue(0, b"follower", asked.request))
    assert (answer.records, answer.cursor, answer.text) == ([], desk.store.head.record, "")
    assert desk.turn(desk.submit(b"c")) == []


def test_who_does_not_wait_is_told_in_the_same_turn(desk: Desk) -> None:
    asked = desk.follow(None)
    (answer,) = desk.turn(asked, ReplyDue(0, b"follower", asked.request))
    assert (answer.records, answer.cursor) == ([], desk.store.head.record)


def test_scope_cuts_records_to_its_tasks(desk: Desk) -> None:
    desk.turn(TasksRequested(0, b"w", 3))
    texts = [b"1", b"2", b"3"]
    desk.turn(TasksReported(0, b"w", [b"a/a1", b"b/b1", b"a/a2"], texts=texts))
    desk.turn(
        CancelRequested(0, b"client", Scope(names=(b"b/b1",))), PauseRequested(0, b"client", b"s")
    )
    told = [record for _, record in desk.read_all(scope=Scope(campaign=b"a"))]
    assert [type(one) for one in told] == [Submitted, Leased, Finished, Paused]
    assert told[1:3] == [
        Leased(0, b"w", [b"a/a1", b"a/a2"], [1, 1], 0),
        Finished(0, b"w", [b"a/a1", b"a/a2"], [1, 1], [b"1", b"3"]),
    ]
    matched = [record for _, record in desk.read_all(scope=Scope(match=b"1", service=b"s"))]
    assert matched[2:4] == [
        Leased(0, b"w", [b"a/a1", b"b/b1"], [1, 1], 0),
        Finished(0, b"w", [b"a/a1", b"b/b1"], [1, 1], [b"1", b"2"]),
    ]
    assert desk.read_all(scope=Scope(service=b"other")) == []
    assert [type(one) for _, one in desk.read_all(scope=Scope(lane=b""))][-1] is Paused


def test_submission_is_cut_to_the_tasks_of_the_scope(desk: Desk) -> None:
    terms = [Terms(campaign=b"a", service=b"s"), Terms(campaign=b"b", service=b"s")]
    columns = ([b"p"], terms, [0, 1, 0], [b"", b"l", b"l"], [[], [b"a/a1"], [b"x"]])
    desk.turn(SubmitRequested(0, b"client", Submission([b"x", b"y", b"z"], *columns)))
    told = desk.read_all(scope=Scope(campaign=b"a", lane=b"l"))
    (record,) = [one for _, one in told if isinstance(one, Submitted)]
    submission = record.submission
    assert (submission.names, submission.lanes) == ([b"a/z"], [b"l"])
    assert submission.after == [[b"a/x"]]
    assert submission.terms_of(0).campaign == b"a"


def test_cursor_moves_on_over_what_is_not_wanted(desk: Desk) -> None:
    (answer,) = desk.turn(desk.follow(0, scope=Scope(campaign=b"nobody")))
    assert (answer.records, answer.cursor) == ([], desk.store.head.record)


def test_who_follows_what_is_trimmed_is_told_where_it_can_go_on(desk: Desk) -> None:
    desk.store.trim(desk.store.head.sequence)
    first = desk.store.head.record
    desk.turn(desk.submit(b"c"))
    (answer,) = desk.turn(desk.follow(1))
    assert answer.text == (
        f"records 2 to {first} are no longer in the journal, only in the history: "
        f"continue from record {first}"
    )
    assert (answer.records, answer.cursor) == ([], first)
    (answer,) = desk.turn(desk.follow(answer.cursor))
    assert numbers(answer) == [first + 1]


@pytest.mark.parametrize(("cursor", "journal"), [(99, b""), (1, b"another")])
def test_cursor_of_another_journal_is_told_so(desk: Desk, cursor: int, journal: bytes) -> None:
    (answer,) = desk.turn(desk.follow(cursor, journal=journal))
    assert "to another journal" in answer.text
    assert answer.journal == desk.store.identity


def test_answer_is_bounded_by_the_tasks_in_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_stream, "NAMES_MAX", 2)
    whole = desk.journal()
    (answer,) = desk.turn(desk.follow(0))
    assert (len(whole), answer.records, answer.cursor) == (3, whole[:2], 2)
    (answer,) = desk.turn(desk.follow(answer.cursor))
    assert answer.records == whole[2:]
    desk.turn(desk.submit(*(b"%d" % number for number in range(9))))
    (answer,) = desk.turn(desk.follow(answer.cursor))
    assert answer.records


def test_answer_is_bounded_by_the_reasons_in_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.turn(TasksRequested(0, b"w", 2))
    head = desk.store.head.record
    for name in (b"a/a1", b"a/a2"):
        desk.turn(TasksReported(0, b"w", [name], None, [Outcome.FAILED_FINAL], [b"oh dear"]))
    monkeypatch.setattr(record_stream, "REASON_BYTES_MAX", 10)
    (answer,) = desk.turn(desk.follow(head))
    assert numbers(answer) == [head + 1]


def test_turn_is_bounded_and_the_rest_follows_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_stream, "TURN_RECORDS_MAX", 2)
    asked = [desk.follow(0) for _ in range(3)]
    told = desk.turn(*asked)
    assert [(one.request, len(one.records)) for one in told] == [(asked[0].request, 2)]
    told = desk.turn()
    assert desk.waits[-1] == 0
    assert [one.request for one in told] == [asked[1].request]
    assert [one.request for one in desk.turn()] == [asked[2].request]
    desk.turn()
    assert desk.waits[-1] != 0


def test_bytes_that_a_turn_reads_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        desk.turn(desk.submit(b"c%d" % number))
    monkeypatch.setattr(record_stream, "TURN_BYTES_MAX", 1)
    (answer,) = desk.turn(desk.follow(0))
    assert len(desk.store.read) == 1
    assert answer.records == desk.journal()[: len(answer.records)]
    assert desk.read_all() == desk.journal()


def test_crowd_that_waits_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_stream, "WAITING_MAX", 2)
    asked = [desk.follow(None) for _ in range(3)]
    (answer,) = desk.turn(*asked)
    assert (answer.request, answer.records) == (asked[0].request, [])
    told = desk.turn(desk.submit(b"c"))
    assert [one.request for one in told] == [asked[1].request, asked[2].request]


def test_nothing_is_kept_when_nobody_follows_any_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_stream, "ROWS_FOLLOWED", 3)
    monkeypatch.setattr(record_stream, "ROWS_KEPT", 2)
    kept = RecordStreams(desk.store, desk.broker.scheduler.ledger, None)

    def rows_kept(*effects: Effect) -> int:
        records: list[AnyRecord] = [WorkerLeft(0, b"w", b"")]
        desk.store.commit(encode(records), 1)
        kept.fill([*effects], records)
        return kept.rows_kept

    assert rows_kept() == 0
    head = desk.store.head.record
    asked = RecordPage(b"follower", 1, head + 1, 1000, Scope(), b"")
    assert [rows_kept(asked), *(rows_kept() for _ in range(5))] == [1, 2, 2, 0, 0, 0]


def test_rows_at_hand_are_bounded_by_their_bytes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_stream, "BYTES_KEPT", 250)
    kept = RecordStreams(desk.store, desk.broker.scheduler.ledger, None)

    def rows_kept(record: AnyRecord, *effects: Effect) -> int:
        desk.store.commit(encode([record]), 1)
        kept.fill([*effects], [record])
        return kept.rows_kept

    text = bytes(99)
    submitted = Submitted(0, Submission([b"a"], [text]))
    finished = Finished(0, b"w", [b"a"], [1], [text])
    waits = Submitted(0, Submission([b"a"], after=[[bytes(50), bytes(49)]]))
    asked = RecordPage(b"follower", 1, desk.store.head.record + 1, 1000, Scope(), b"")
    assert rows_kept(submitted, asked) == 1
    assert [rows_kept(one) for one in (finished, waits, submitted)] == [2, 2, 2]
    assert rows_kept(WorkerLeft(0, b"w", b"")) == 3


def test_row_that_is_too_large_to_be_kept_is_told_and_let_go(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_stream, "BYTES_KEPT", 5)
    head = desk.store.head.record
    desk.turn(desk.follow(None), desk.follow(None))
    told = desk.turn(desk.submit(b"c"))
    assert [numbers(one) for one in told] == [[head + 1]] * 2
    assert desk.store.read == []
    (again,) = desk.turn(desk.follow(head))
    assert (numbers(again), desk.store.read) == ([head + 1], [head + 1])


def test_follower_that_does_not_read_is_answered_when_it_does(desk: Desk) -> None:
    deaf = [b"follower"]
    desk.broker.is_reading = lambda client: client not in deaf
    desk.turn(desk.submit(b"a"))
    desk.store.read.clear()
    assert desk.turn(desk.follow(0)) == []
    assert desk.turn() == []
    assert not desk.store.read
    assert desk.waits[-1] != 0
    deaf.clear()
    (answer,) = desk.turn()
    assert answer.records
