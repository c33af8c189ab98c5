"""Missing results are loaded from the journal or the index, after the commit and before sending.

The broker under test is the real one, over a list as transport, and a store that counts its reads.
"""

from pathlib import Path

import pytest

from taskyard.broker import results as broker_results
from taskyard.broker import rows
from taskyard.broker.completer import KINDS, Completer
from taskyard.broker.turn import Broker
from taskyard.core import model as output_streams
from taskyard.core.blobs import Blob, Content
from taskyard.core.effects import (
    Effect,
    ExplanationReply,
    Part,
    ReportAck,
    Settled,
    TaskDetails,
    TaskPage,
    TaskView,
)
from taskyard.core.events import (
    CancelRequested,
    ClockSet,
    DuplicatePolicy,
    Event,
    ExplainRequested,
    ListRequested,
    LookupRequested,
    PartRequested,
    ResultsRequested,
    Scope,
    SubmitRequested,
    TasksProgressed,
    TasksReported,
    TasksRequested,
    WatchRequested,
    WorkerRegistered,
)
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.records import AnyRecord, Finished, Submitted
from taskyard.core.runs import RunColumns
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged
from taskyard.journal import compaction, recovery
from taskyard.journal.archive import Archive
from taskyard.journal.recovery import encode
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import BEGIN_NS, WritingYard
from tests.kit.broker import TurnHarness

DONE = TaskState.DONE


class Harness(TurnHarness):
    """A broker on a list of events. Replies with results and output are in `sent`."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.index = Archive(directory)
        self.broker = Broker(Scheduler(), self, self.store, self, self.index)

    @property
    def sent(self) -> list[Effect]:
        kinds = Settled | Part | ExplanationReply
        return [effect for effect in self.effects if isinstance(effect, kinds)]

    def turn(self, *events: Event) -> list[Effect]:
        """Run a turn with these events and return the replies with results and output."""
        self.run_turn(events)
        return self.sent

    def lease(self, *names: bytes) -> None:
        joined = WorkerRegistered(0, b"w", WorkerFacts(slots_total=0))
        submitted = SubmitRequested(0, b"client", Submission(list(names)))
        self.turn(joined, submitted, TasksRequested(0, b"w", len(names)))

    def restart(self) -> None:
        """Compact the journal: ended tasks are neither in memory nor in a row."""
        compaction.compact(self.directory, self.store)
        ledger = recovery.open_ledger(self.directory, self.store)
        self.broker = Broker(Scheduler(ledger), self, self.store, self, self.index)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Return a broker whose worker w holds a, b and c."""
    harness = Harness(tmp_path)
    harness.lease(b"a", b"b", b"c")
    return harness


def finish(*names: bytes) -> TasksReported:
    return TasksReported(0, b"w", list(names), texts=[b"of " + name for name in names])


def results(*names: bytes, request: int = 0) -> ResultsRequested:
    return ResultsRequested(0, b"client", list(names), request)


def stdout(name: bytes, request: int = 0) -> PartRequested:
    return PartRequested(0, b"client", name, request, output_streams.Stream.STDOUT)


def printed(effect: Effect) -> bytes:
    assert isinstance(effect, Part)
    return effect.data


def replies(*names: bytes, request: int = 0) -> Settled:
    texts: list[Content | None] = [b"of " + name for name in names]
    return Settled(b"client", request, list(names), [DONE] * len(names), texts)


def test_result_is_put_in_from_its_row(harness: Harness) -> None:
    harness.turn(finish(b"a", b"b"))
    harness.turn(finish(b"c"))
    assert harness.turn(results(b"c", b"a")) == [replies(b"c", b"a")]
    assert harness.turn(results(b"b")) == [replies(b"b")]


def test_watch_of_a_finished_task_gets_its_result(harness: Harness) -> None:
    harness.turn(finish(b"a"))
    assert harness.turn(WatchRequested(0, b"client", [b"a"])) == [replies(b"a")]


def test_result_of_a_task_that_was_done_in_the_same_turn_is_put_in(harness: Harness) -> None:
    assert harness.turn(finish(b"a"), results(b"a")) == [replies(b"a")]


def test_truncated_result_is_loaded_with_its_length_also_from_the_index(harness: Harness) -> None:
    cut = Blob(b"", 9, b"end")
    harness.turn(TasksReported(0, b"w", [b"a", b"b"], texts=[cut, b"whole"]))
    expected = Settled(b"client", 0, [b"a", b"b"], [DONE] * 2, [cut, b"whole"])
    assert harness.turn(results(b"a", b"b")) == [expected]
    harness.restart()
    assert harness.turn(results(b"a", b"b")) == [expected]


def test_explanation_has_the_note_of_the_worker(harness: Harness) -> None:
    runs = RunColumns(b"h", [1, 1], [1, 1], notes=[b"", b"up to date: b exists"])
    harness.turn(ClockSet(0, BEGIN_NS), TasksReported(0, b"w", [b"a", b"b"], runs=runs))
    replies = harness.turn(*(ExplainRequested(0, b"client", name) for name in (b"a", b"b")))
    assert [one.explanation.sentence for one in replies if isinstance(one, ExplanationReply)] == [
        "it is done (attempt 1)",
        "it is done (attempt 1): up to date: b exists",
    ]


def test_result_without_text_is_empty(harness: Harness) -> None:
    harness.turn(TasksReported(0, b"w", [b"a", b"b"]))
    assert harness.turn(results(b"b")) == [Settled(b"client", 0, [b"b"], [DONE], [b""])]


def test_result_of_the_generation_that_was_asked_for_is_put_in(harness: Harness) -> None:
    harness.turn(finish(b"a"))
    anew = SubmitRequested(0, b"client", Submission([b"a"]), repeat=DuplicatePolicy.EXTEND)
    assert harness.turn(results(b"a"), anew) == [replies(b"a")]


def test_unfinished_tasks_owe_nothing(harness: Harness) -> None:
    harness.turn(finish(b"a"))
    (effect,) = harness.turn(results(b"b", b"a"))
    states = [TaskState.LEASED, DONE]
    assert effect == Settled(b"client", 0, [b"b", b"a"], states, [b"", b"of a"])


def test_result_comes_from_the_index_when_its_row_is_trimmed(harness: Harness) -> None:
    harness.turn(finish(b"a", b"b"))
    harness.restart()
    harness.turn(finish(b"c"))
    assert harness.turn(results(b"a", b"c")) == [replies(b"a", b"c")]


def test_result_comes_from_the_index_though_its_task_is_in_memory(harness: Harness) -> None:
    harness.turn(finish(b"a"))
    compaction.compact(harness.directory, harness.store)
    assert b"a" in harness.broker.scheduler.ledger.tasks
    assert harness.turn(results(b"a")) == [replies(b"a")]


def test_each_row_is_read_once_in_a_turn_and_not_again_in_the_next(harness: Harness) -> None:
    harness.turn(finish(b"a", b"b"), finish(b"c"))
    questions = [results(b"c", b"a", request=1), results(b"b", request=2)]
    for _ in range(2):
        assert harness.turn(*questions) == [
            replies(b"c", b"a", request=1),
            replies(b"b", request=2),
        ]
        assert len(harness.store.read) == 1


def test_only_a_few_rows_are_kept(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"a", b"b", b"c"):
        harness.turn(finish(name))
    newest = len(harness.store.row_of(harness.store.head.record).body)  # type: ignore[union-attr]
    monkeypatch.setattr(rows, "BYTES_KEPT", 2 * newest)
    harness.store.read = []
    assert harness.turn(results(b"a", b"b", b"c")) == [replies(b"a", b"b", b"c")]
    harness.turn(results(b"c"))
    assert len(harness.store.read) == 3
    harness.turn(results(b"a"))
    assert len(harness.store.read) == 4


def test_answers_that_go_back_and_forth_read_each_row_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BYTES_KEPT", 10)
    harness.turn(finish(b"a", b"c"))
    harness.turn(finish(b"b"))
    assert harness.turn(results(b"a", b"b", b"c")) == [replies(b"a", b"b", b"c")]
    assert len(harness.store.read) == 2


def test_row_that_is_too_large_is_not_kept(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BYTES_KEPT", 10)
    harness.turn(finish(b"a", b"b"), finish(b"c"))
    for count in (1, 2):
        assert harness.turn(results(b"c", b"a")) == [replies(b"c", b"a")]
        assert len(harness.store.read) == count


def test_turn_in_which_nothing_is_owed_reads_nothing(harness: Harness) -> None:
    harness.turn(WatchRequested(0, b"client", [b"a"]), finish(b"a"))
    assert harness.sent == [replies(b"a")]
    assert harness.store.read == []


# Large replies.


def commit(*records: AnyRecord) -> MemoryStore:
    store = MemoryStore()
    store.commit(encode(list(records)), len(records))
    return store


SUBMITTED = Submitted(0, Submission([b"a"]))


class Stream:
    """Stands in for a dialect that sends the loaded results and keeps the rest in the effect."""

    def __init__(self, store: MemoryStore, *effects: Settled) -> None:
        self.answers = Completer(store, Ledger())
        self.asked: list[Effect] = list(effects)

    def turn(self) -> list[tuple[int, list[bytes]]]:
        """Run a turn and return the requests with the names that were sent."""
        effects, self.asked = self.asked, []
        effects = self.answers.complete(effects)
        received: list[tuple[int, list[bytes]]] = []
        for effect in effects:
            assert isinstance(effect, Settled)
            there = [place for place, text in enumerate(effect.texts) if text is not None]
            received.append((effect.request, [effect.names[place] for place in there]))
            for place in reversed(there):
                del effect.names[place], effect.states[place], effect.texts[place]
        return received


def letters(*names: bytes, request: int = 0) -> Settled:
    """Request results, each in its own record."""
    records = [b"abcdef".index(name) + 2 for name in names]
    return Settled(b"client", request, [*names], [DONE] * len(names), [None] * len(names), records)


@pytest.fixture
def ended() -> MemoryStore:
    """Finish tasks a to f, each with a result of ten bytes in its own row."""
    store = commit(SUBMITTED)
    for letter in b"abcdef":
        done = Finished(0, b"w", [bytes([letter])], [1], [bytes([letter]) * 10])
        store.commit(encode([done]), 1)
    return store


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_results, "REPLY_BYTES_MAX", 25)
    monkeypatch.setattr(rows, "READ_COST", 0)
    monkeypatch.setattr(rows, "READ_BYTE_COST", 0)
    monkeypatch.setattr(rows, "TURN_COST_MAX", 40 * rows.REPLY_BYTE_COST)


@pytest.mark.usefixtures("narrow")
def test_large_answer_is_put_in_part_by_part(ended: MemoryStore) -> None:
    stream = Stream(ended, letters(b"a", b"c", b"b", b"e", b"d"))
    assert stream.turn() == [(0, [b"a", b"b"])]
    assert stream.answers.has_pending()
    assert stream.turn() == [(0, [b"c", b"d"])]
    assert stream.turn() == [(0, [b"e"])]
    assert not stream.answers.has_pending()
    assert stream.turn() == []


@pytest.mark.usefixtures("narrow")
def test_result_that_is_larger_than_an_answer_is_put_in_alone(
    ended: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_results, "REPLY_BYTES_MAX", 3)
    stream = Stream(ended, letters(b"a", b"b"))
    assert [stream.turn(), stream.turn()] == [[(0, [b"a"])], [(0, [b"b"])]]


@pytest.mark.usefixtures("narrow")
def test_answers_of_a_turn_share_its_room_and_those_not_reached_come_first_in_the_next(
    ended: MemoryStore,
) -> None:
    every = (b"a", b"b", b"c", b"d")
    stream = Stream(ended, *(letters(*every, request=number) for number in (1, 2, 3)))
    assert stream.turn() == [(1, [b"a", b"b"]), (2, [b"a", b"b"])]
    assert stream.turn() == [(3, [b"a", b"b"]), (1, [b"c", b"d"])]
    assert stream.turn() == [(2, [b"c", b"d"]), (3, [b"c", b"d"])]
    assert stream.turn() == []


def test_rows_that_a_turn_reads_are_bounded(
    ended: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "READ_BYTE_COST", 0)
    monkeypatch.setattr(rows, "REPLY_BYTE_COST", 0)
    monkeypatch.setattr(rows, "TURN_COST_MAX", 2 * rows.READ_COST)
    stream = Stream(ended, letters(b"a", b"b", b"c", request=1), letters(b"d", request=2))
    assert stream.turn() == [(1, [b"a", b"b"])]
    assert stream.answers.has_pending()
    assert stream.turn() == [(2, [b"d"]), (1, [b"c"])]
    assert not stream.answers.has_pending()


def test_bytes_of_the_rows_that_a_turn_reads_are_bounded(
    ended: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "TURN_COST_MAX", 1)
    stream = Stream(ended, letters(b"a", b"b"), letters(b"c", request=1))
    assert [stream.turn() for _ in range(3)] == [[(0, [b"a"])], [(1, [b"c"])], [(0, [b"b"])]]


def test_results_that_a_turn_reads_from_the_index_are_bounded(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.turn(finish(b"a", b"b", b"c"))
    harness.restart()
    monkeypatch.setattr(rows, "READ_BYTE_COST", 0)
    monkeypatch.setattr(rows, "REPLY_BYTE_COST", 0)
    monkeypatch.setattr(rows, "TURN_COST_MAX", 2 * rows.READ_COST)
    (effect,) = harness.turn(results(b"a", b"b", b"c"))
    assert isinstance(effect, Settled)
    assert effect.texts == [b"of a", b"of b", None]
    (effect,) = harness.turn()
    assert effect == replies(b"a", b"b", b"c")


@pytest.mark.usefixtures("narrow")
def test_unwanted_rest_is_not_read(ended: MemoryStore) -> None:
    stream = Stream(ended)
    replies = letters(b"a", b"b", b"c", b"d")
    stream.answers.complete([replies])
    replies.records = []
    assert not stream.answers.has_pending()
    assert stream.turn() == []


@pytest.mark.usefixtures("narrow")
def test_broker_does_not_wait_while_results_are_owed(harness: Harness) -> None:
    harness.turn(*(TasksReported(0, b"w", [name], texts=[bytes(20)]) for name in (b"a", b"b")))
    harness.turn(results(b"a"))
    assert harness.waits == [None] * len(harness.waits)
    harness.turn(results(b"a", b"b"))
    harness.turn()
    assert harness.waits[-1] == 0


# Output.


def listed(harness: Harness, cursor: int = 0) -> TaskPage:
    harness.turn(ListRequested(0, b"client", Scope(), cursor=cursor, measured=True))
    (page,) = [effect for effect in harness.effects if isinstance(effect, TaskPage)]
    return page


def test_listed_tasks_get_their_latest_attempts(harness: Harness) -> None:
    harness.turn(TasksReported(0, b"w", [b"b"]))
    outcomes = [[one.outcome for one in view.attempts] for view in listed(harness).views]
    assert outcomes == [[b""], [b"finished"], [b""]]


def test_page_with_attempts_ends_where_the_budget_of_a_turn_ends(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BYTES_KEPT", 0)
    monkeypatch.setattr(rows, "TURN_COST_MAX", 1)
    for name in (b"a", b"b", b"c"):
        harness.turn(TasksReported(0, b"w", [name]))
    names, cursor = [], 0
    while True:
        page = listed(harness, cursor)
        assert all(len(view.attempts) == 1 for view in page.views)
        names += [view.name for view in page.views]
        cursor = page.cursor
        if not cursor:
            break
        assert len(page.views) == 1
    assert names == [b"a", b"b", b"c"]


def test_output_is_put_in(harness: Harness) -> None:
    harness.turn(TasksProgressed(0, b"w", [b"a", b"b"], texts=[b"1", b"2"]))
    (effect,) = harness.turn(stdout(b"b", 3))
    assert printed(effect) == b"2"


def test_output_of_the_same_turn_is_put_in(harness: Harness) -> None:
    progressed = TasksProgressed(0, b"w", [b"a"], texts=[b"1"])
    (effect,) = harness.turn(progressed, stdout(b"a"))
    assert printed(effect) == b"1"


def test_output_whose_row_is_trimmed_is_in_the_index(harness: Harness) -> None:
    harness.turn(TasksProgressed(0, b"w", [b"a"], texts=[b"1"]))
    harness.restart()
    (effect,) = harness.turn(stdout(b"a"))
    assert printed(effect) == b"1"


# Damage.


def owing(name: bytes, record: int) -> Settled:
    return Settled(b"client", 0, [name], [DONE], [None], [record])


def test_record_that_does_not_end_the_task_is_damage(tmp_path: Path) -> None:
    store = commit(SUBMITTED, Finished(0, b"w", [b"a"], [1]))
    for owed in (owing(b"a", 1), owing(b"b", 2)):
        with pytest.raises(JournalDamaged, match="has no result of"):
            Completer(store, Ledger(), Archive(tmp_path)).complete([owed])


def test_result_that_is_nowhere_is_damage(tmp_path: Path) -> None:
    store = commit(SUBMITTED)
    for index in (None, Archive(tmp_path)):
        with pytest.raises(JournalDamaged, match="record 9, which ended b'a'"):
            Completer(store, Ledger(), index).complete([owing(b"a", 9)])


def test_other_effects_are_left_alone(harness: Harness) -> None:
    effects: list[Effect] = [ReportAck(b"w", 1, []), TaskDetails(b"client", 1, [])]
    completer = Completer(harness.store, Ledger())
    assert KINDS.isdisjoint(map(type, effects[:1]))
    assert completer.complete(effects) == [ReportAck(b"w", 1, []), TaskDetails(b"client", 1, [])]
    harness.turn(LookupRequested(0, b"client", [b"a"]))
    assert harness.store.read == []


def cancel(*names: bytes) -> CancelRequested:
    return CancelRequested(0, b"client", Scope(names=names))


def why(harness: Harness, name: bytes) -> str:
    """Return the explanation of a task."""
    (effect,) = harness.turn(ExplainRequested(0, b"client", name))
    assert isinstance(effect, ExplanationReply)
    return effect.explanation.sentence


@pytest.fixture
def cancelled(harness: Harness) -> Harness:
    """Cancel `a`, with `behind` and its dependents."""
    waiting = Submission([b"behind", b"far"], after=[[b"a"], [b"behind"]])
    harness.turn(SubmitRequested(0, b"client", waiting))
    harness.turn(cancel(b"a"))
    return harness


def check_causes(harness: Harness) -> None:
    assert why(harness, b"a") == "it was cancelled on request"
    assert why(harness, b"behind") == "it waited for a, which was cancelled on request"
    assert why(harness, b"far") == "it waited for a, which was cancelled on request"


def test_cause_of_a_cancelled_task_comes_from_its_row(cancelled: Harness) -> None:
    check_causes(cancelled)


def test_cause_of_a_cancelled_task_survives_a_compaction_and_a_restart(cancelled: Harness) -> None:
    cancelled.restart()
    assert b"far" not in cancelled.broker.scheduler.ledger.tasks
    check_causes(cancelled)
    assert cancelled.index.streams(b"far") == (b"a", b"")


def test_cause_of_a_cancelled_task_is_not_its_output(cancelled: Harness) -> None:
    compaction.compact(cancelled.directory, cancelled.store)
    (part,) = cancelled.turn(stdout(b"far"))
    assert printed(part) == b""


# Details of a task.


def shown(yard: WritingYard, name: bytes) -> TaskView:
    found = yard.handle(LookupRequested(0, b"client", [name]))
    (effect,) = Completer(yard.store, Ledger()).complete(found)
    assert isinstance(effect, TaskDetails)
    return effect.views[0]


def test_done_task_is_shown_with_the_payload_and_the_attempt_that_lie_in_its_rows() -> None:
    yard = WritingYard(MemoryStore())
    for number in range(40):
        yard.later(1)
        names = [b"%d-%d" % (number, place) for place in range(2)]
        yard.submit(*names, payloads=[name * 50 for name in names])
    yard.join(b"w")
    yard.take(b"w", 80)
    yard.later(5)
    measured = RunColumns(b"host", [BEGIN_NS + 42 * SECOND_NS] * 2, [SECOND_NS] * 2, [0, 0])
    yard.finish(b"w", b"17-1", b"0-0", runs=measured)
    for name in (b"17-1", b"0-0"):
        view = shown(yard, name)
        assert view.payload == name * 50
        (attempt,) = view.attempts
        assert (attempt.outcome, attempt.host, attempt.run_ns) == (b"finished", b"host", SECOND_NS)
    assert shown(yard, b"39-1").payload == b"39-1" * 50


def test_task_whose_rows_are_trimmed_is_shown_without_them(tmp_path: Path) -> None:
    yard = WritingYard(MemoryStore())
    yard.submit(b"a", payloads=[b"x" * 100])
    yard.join(b"w")
    yard.take(b"w")
    yard.finish(b"w", b"a")
    compaction.compact(tmp_path, yard.store)
    view = shown(yard, b"a")
    assert (view.payload, view.attempts) == (None, [])


def test_results_are_read_for_a_client_when_it_reads(harness: Harness) -> None:
    harness.turn(finish(b"a", b"b"))
    deaf = [b"client"]
    ledger = harness.broker.scheduler.ledger
    answers = Completer(harness.store, ledger, harness.index, lambda client: client not in deaf)
    (owed,) = harness.broker.scheduler.handle(results(b"a", b"b"))
    assert answers.complete([owed]) == []
    assert (harness.store.read, answers.has_pending()) == ([], False)
    deaf.clear()
    assert answers.has_pending()
    assert answers.complete([]) == [replies(b"a", b"b")]


def test_request_of_a_client_that_does_not_read_is_answered_when_it_does(harness: Harness) -> None:
    harness.turn(finish(b"a"))
    deaf = [b"client"]
    harness.deaf = deaf
    assert harness.turn(results(b"a")) == []
    assert harness.turn() == []
    deaf.clear()
    assert harness.turn() == [replies(b"a")]
    assert harness.waits[-1] == 0
