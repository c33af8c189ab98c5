"""A follower gets every record once, in order, after its commit, in bounded pages.

The broker under test is the real one, over a list as transport and a journal in memory.
"""

from __future__ import annotations

import pytest

from taskyard.broker import rows
from taskyard.broker.completer import Completer
from taskyard.broker.turn import Broker
from taskyard.core.blobs import Content
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
    TasksReturned,
    WorkerRegistered,
)
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import (
    AnyRecord,
    Finished,
    Leased,
    Paused,
    Returned,
    Submitted,
    WorkerLeft,
)
from taskyard.core.scheduler import Scheduler
from taskyard.errors import JournalFailed
from taskyard.journal import recovery
from taskyard.journal.recovery import encode, records_of
from tests.kit.broker import TurnHarness


class Harness(TurnHarness):
    """A broker on a list of events. Followers get the pages in `sent`."""

    def __init__(self) -> None:
        super().__init__()
        self._requests = 0
        self.start()

    def start(self) -> None:
        """Start a broker on the rows of the journal."""
        ledger = recovery.recover(self.store)
        self.broker = Broker(Scheduler(ledger), self, self.store, self)

    @property
    def sent(self) -> list[RecordPage]:
        return [effect for effect in self.effects if isinstance(effect, RecordPage)]

    def turn(self, *events: Event) -> list[RecordPage]:
        """Run a turn with these events and return the pages that followers get."""
        self.run_turn(events)
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
        """Follow everything from the beginning, request by request."""
        replies: list[tuple[int, AnyRecord]] = []
        cursor = 0
        while cursor < self.store.head.record:
            answers = self.turn(self.follow(cursor, count, scope))
            while not answers:
                answers = self.turn()
            (answer,) = answers
            assert answer.cursor > cursor
            replies += answer.records
            cursor = answer.cursor
        return replies

    def journal(self) -> list[tuple[int, AnyRecord]]:
        records = [
            one for row in self.store.rows() for one in records_of(row, row.record_first - 1)
        ]
        return [*enumerate(records, start=1)]


@pytest.fixture
def harness() -> Harness:
    """Return a broker with a worker w, and tasks of two campaigns."""
    harness = Harness()
    harness.turn(WorkerRegistered(0, b"w", WorkerFacts(services=(b"s",), slots_total=0)))
    harness.turn(harness.submit(b"a1", b"a2", campaign=b"a"), harness.submit(b"b1", campaign=b"b"))
    return harness


def numbers(answer: RecordPage) -> list[int]:
    return [number for number, _ in answer.records]


def test_follower_at_the_head_gets_the_next_record(harness: Harness) -> None:
    head = harness.store.head.record
    assert harness.turn(harness.follow(None)) == []
    assert harness.turn() == []
    (answer,) = harness.turn(TasksRequested(0, b"w", 3))
    assert (answer.cursor, answer.journal) == (head + 1, harness.store.identity)
    assert answer.records == [
        (head + 1, Leased(0, b"w", [b"a/a1", b"a/a2", b"b/b1"], [1, 1, 1], 0))
    ]
    assert harness.turn(harness.submit(b"c")) == []


def test_no_record_is_sent_before_its_commit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.turn(harness.follow(None))

    def fail(_body: bytes, _records: int) -> None:
        raise JournalFailed("the disk is gone")

    monkeypatch.setattr(harness.store, "commit", fail)
    with pytest.raises(JournalFailed):
        harness.turn(harness.submit(b"c"))
    assert harness.sent == []


def test_records_between_two_requests_come_from_the_cache(
    harness: Harness,
) -> None:
    harness.turn(harness.follow(None))
    (answer,) = harness.turn(harness.submit(b"c"))
    harness.turn(harness.submit(b"d"))
    harness.turn(harness.submit(b"e"), harness.submit(b"f"))
    (second,) = harness.turn(harness.follow(answer.cursor))
    assert numbers(second) == [answer.cursor + 1, answer.cursor + 2, answer.cursor + 3]
    assert second.cursor == harness.store.head.record
    assert harness.store.read == []


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_every_record_is_sent_once_and_in_order(harness: Harness, count: int) -> None:
    harness.turn(TasksRequested(0, b"w", 2), harness.submit(b"c"))
    harness.turn(TasksReported(0, b"w", [b"a/a1"], texts=[b"result"]))
    assert harness.read_all(count) == harness.journal()


def test_restart_neither_loses_nor_doubles_a_record(harness: Harness) -> None:
    harness.turn(harness.follow(None))
    (answer,) = harness.turn(harness.submit(b"c"))
    harness.turn(harness.submit(b"d"))
    harness.start()
    harness.turn(harness.submit(b"e"))
    (second,) = harness.turn(harness.follow(answer.cursor, journal=answer.journal))
    assert numbers(second) == [answer.cursor + 1, answer.cursor + 2]


def test_timed_out_follower_gets_an_empty_page(harness: Harness) -> None:
    asked = harness.follow(None)
    harness.turn(asked)
    (answer,) = harness.turn(ReplyDue(0, b"follower", asked.request))
    assert (answer.records, answer.cursor, answer.text) == ([], harness.store.head.record, "")
    assert harness.turn(harness.submit(b"c")) == []


def test_follower_without_a_timeout_gets_its_page_in_the_same_turn(harness: Harness) -> None:
    asked = harness.follow(None)
    (answer,) = harness.turn(asked, ReplyDue(0, b"follower", asked.request))
    assert (answer.records, answer.cursor) == ([], harness.store.head.record)


def test_scope_cuts_records_to_its_tasks(harness: Harness) -> None:
    harness.turn(TasksRequested(0, b"w", 3))
    texts: list[Content] = [b"1", b"2", b"3"]
    harness.turn(TasksReported(0, b"w", [b"a/a1", b"b/b1", b"a/a2"], texts=texts))
    harness.turn(
        CancelRequested(0, b"client", Scope(names=(b"b/b1",))), PauseRequested(0, b"client", b"s")
    )
    replies = [record for _, record in harness.read_all(scope=Scope(campaign=b"a"))]
    assert [type(one) for one in replies] == [Submitted, Leased, Finished, Paused]
    assert replies[1:3] == [
        Leased(0, b"w", [b"a/a1", b"a/a2"], [1, 1], 0),
        Finished(0, b"w", [b"a/a1", b"a/a2"], [1, 1], [b"1", b"3"]),
    ]
    matched = [record for _, record in harness.read_all(scope=Scope(match=b"1", service=b"s"))]
    assert matched[2:4] == [
        Leased(0, b"w", [b"a/a1", b"b/b1"], [1, 1], 0),
        Finished(0, b"w", [b"a/a1", b"b/b1"], [1, 1], [b"1", b"2"]),
    ]
    assert harness.read_all(scope=Scope(service=b"other")) == []
    assert [type(one) for _, one in harness.read_all(scope=Scope(lane=b""))][-1] is Paused


def test_submission_is_cut_to_the_tasks_of_the_scope(harness: Harness) -> None:
    terms = [Terms(campaign=b"a", service=b"s"), Terms(campaign=b"b", service=b"s")]
    columns = ([b"p"], terms, [0, 1, 0], [b"", b"l", b"l"], [[], [b"a/a1"], [b"x"]])
    harness.turn(SubmitRequested(0, b"client", Submission([b"x", b"y", b"z"], *columns)))
    replies = harness.read_all(scope=Scope(campaign=b"a", lane=b"l"))
    (record,) = [one for _, one in replies if isinstance(one, Submitted)]
    submission = record.submission
    assert (submission.names, submission.lanes) == ([b"a/z"], [b"l"])
    assert submission.after == [[b"a/x"]]
    assert submission.terms_of(0).campaign == b"a"


def test_cursor_moves_past_records_outside_the_scope(harness: Harness) -> None:
    (answer,) = harness.turn(harness.follow(0, scope=Scope(campaign=b"nobody")))
    assert (answer.records, answer.cursor) == ([], harness.store.head.record)


def test_follower_of_trimmed_records_gets_the_next_cursor(harness: Harness) -> None:
    harness.store.trim(harness.store.head.sequence)
    first = harness.store.head.record
    harness.turn(harness.submit(b"c"))
    (answer,) = harness.turn(harness.follow(1))
    assert answer.text == (
        f"records 2 to {first} are no longer in the journal, only in the history: "
        f"continue from record {first}"
    )
    assert (answer.records, answer.cursor) == ([], first)
    (answer,) = harness.turn(harness.follow(answer.cursor))
    assert numbers(answer) == [first + 1]


@pytest.mark.parametrize(("cursor", "journal"), [(99, b""), (1, b"another")])
def test_cursor_of_another_journal_is_refused(
    harness: Harness, cursor: int, journal: bytes
) -> None:
    (answer,) = harness.turn(harness.follow(cursor, journal=journal))
    assert "to another journal" in answer.text
    assert answer.journal == harness.store.identity


def test_answer_is_bounded_by_the_tasks_in_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "NAMES_MAX", 2)
    whole = harness.journal()
    (answer,) = harness.turn(harness.follow(0))
    assert (len(whole), answer.records, answer.cursor) == (3, whole[:2], 2)
    (answer,) = harness.turn(harness.follow(answer.cursor))
    assert answer.records == whole[2:]
    harness.turn(harness.submit(*(b"%d" % number for number in range(9))))
    (answer,) = harness.turn(harness.follow(answer.cursor))
    assert answer.records


def test_answer_is_bounded_by_the_reasons_in_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.turn(TasksRequested(0, b"w", 2))
    head = harness.store.head.record
    for name in (b"a/a1", b"a/a2"):
        harness.turn(TasksReported(0, b"w", [name], None, [Outcome.FAILED_FINAL], [b"oh dear"]))
    monkeypatch.setattr(rows, "REASON_BYTES_MAX", 10)
    (answer,) = harness.turn(harness.follow(head))
    assert numbers(answer) == [head + 1]


def test_returned_tasks_without_reasons_are_sent(harness: Harness) -> None:
    harness.turn(TasksRequested(0, b"w", 2))
    head = harness.store.head.record
    harness.turn(TasksReturned(0, b"w", [b"a/a1"]))
    (answer,) = harness.turn(harness.follow(head))
    ((_, record),) = answer.records
    assert isinstance(record, Returned)
    assert record.reasons is None


def test_turn_is_bounded_and_the_rest_follows_at_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "READ_COST", 0)
    monkeypatch.setattr(rows, "READ_BYTE_COST", 0)
    monkeypatch.setattr(rows, "NAME_COST", 0)
    monkeypatch.setattr(rows, "TURN_COST_MAX", 2 * rows.RECORD_COST)
    asked = [harness.follow(0) for _ in range(3)]
    replies = harness.turn(*asked)
    assert [(one.request, len(one.records)) for one in replies] == [(asked[0].request, 2)]
    replies = harness.turn()
    assert harness.waits[-1] == 0
    assert [one.request for one in replies] == [asked[1].request]
    assert [one.request for one in harness.turn()] == [asked[2].request]
    harness.turn()
    assert harness.waits[-1] != 0


def test_bytes_that_a_turn_reads_are_bounded(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        harness.turn(harness.submit(b"c%d" % number))
    monkeypatch.setattr(rows, "TURN_COST_MAX", 1)
    (answer,) = harness.turn(harness.follow(0))
    assert len(harness.store.read) == 1
    assert answer.records == harness.journal()[: len(answer.records)]
    assert harness.read_all() == harness.journal()


def test_crowd_that_waits_is_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "WAITING_MAX", 2)
    asked = [harness.follow(None) for _ in range(3)]
    (answer,) = harness.turn(*asked)
    assert (answer.request, answer.records) == (asked[0].request, [])
    replies = harness.turn(harness.submit(b"c"))
    assert [one.request for one in replies] == [asked[1].request, asked[2].request]


def test_cache_is_dropped_without_followers(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS_FOLLOWED", 3)
    monkeypatch.setattr(rows, "ROWS_KEPT", 2)
    completer = Completer(harness.store, harness.broker.scheduler.ledger)

    def rows_kept(*effects: Effect) -> int:
        records: list[AnyRecord] = [WorkerLeft(0, b"w", b"")]
        harness.store.commit(encode(records), 1)
        completer.complete(effects, records, 1)
        return len(completer._rows)  # noqa: SLF001  # not visible elsewhere

    assert rows_kept() == 0
    head = harness.store.head.record
    asked = RecordPage(b"follower", 1, head + 1, 1000, Scope(), b"")
    assert [rows_kept(asked), *(rows_kept() for _ in range(5))] == [0, 1, 2, 2, 0, 0]


def test_cached_rows_are_bounded_by_their_bytes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BYTES_KEPT", 350)
    completer = Completer(harness.store, harness.broker.scheduler.ledger)

    def rows_kept(record: AnyRecord, *effects: Effect) -> int:
        body = encode([record])
        harness.store.commit(body, 1)
        completer.complete(effects, [record], len(body))
        return len(completer._rows)  # noqa: SLF001  # not visible elsewhere

    text = bytes(99)
    submitted = Submitted(0, Submission([b"a"], [text]))
    finished = Finished(0, b"w", [b"a"], [1], [text])
    waits = Submitted(0, Submission([b"a"], after=[[bytes(50), bytes(49)]]))
    asked = RecordPage(b"follower", 1, harness.store.head.record + 1, 1000, Scope(), b"")
    assert rows_kept(submitted, asked) == 0
    assert [rows_kept(one) for one in (submitted, finished, waits, submitted)] == [1, 2, 2, 2]
    assert rows_kept(WorkerLeft(0, b"w", b"")) == 3


def test_row_that_is_too_large_for_the_cache_is_sent_and_dropped(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BYTES_KEPT", 5)
    head = harness.store.head.record
    harness.turn(harness.follow(None), harness.follow(None))
    replies = harness.turn(harness.submit(b"c"))
    assert [numbers(one) for one in replies] == [[head + 1]] * 2
    assert harness.store.read == []
    (again,) = harness.turn(harness.follow(head))
    assert (numbers(again), harness.store.read) == ([head + 1], [head + 1])


def test_follower_that_does_not_read_is_answered_when_it_does(harness: Harness) -> None:
    deaf = [b"follower"]
    harness.deaf = deaf
    harness.turn(harness.submit(b"a"))
    harness.store.read.clear()
    assert harness.turn(harness.follow(0)) == []
    assert harness.turn() == []
    assert not harness.store.read
    assert harness.waits[-1] != 0
    deaf.clear()
    (answer,) = harness.turn()
    assert answer.records
