"""Queries of clients: tasks, pages, counts, explanations, workers, results, output.

Every question is sent through `Yard`, which compares the ledger with one that only records have
changed: none of these events may change anything that is durable.
"""

from collections.abc import Iterable

import pytest
from msgspec import structs

from taskyard.core import effects, events, task_pages
from taskyard.core.blobs import Blob, Content
from taskyard.core.effects import (
    Assign,
    Explanation,
    ExplanationReply,
    HeartbeatAck,
    HeldTasks,
    NoWork,
    Part,
    Reason,
    Refused,
    ReportAck,
    Settled,
    Stats,
    StatsReply,
    TaskDetails,
    TaskPage,
    TaskView,
    UnknownWorker,
    WorkerList,
    WorkerTasks,
    WorkerView,
)
from taskyard.core.entities import Task
from taskyard.core.events import (
    DiskSpaceChanged,
    DuplicatePolicy,
    Event,
    ExplainRequested,
    HeldTasksRequested,
    ListRequested,
    LookupRequested,
    Outcome,
    PartRequested,
    PauseRequested,
    RequestRejected,
    ResultsRequested,
    RetryRequested,
    Scope,
    StatsRequested,
    TasksProgressed,
    UnknownPolicy,
    WaitEnded,
    WatchEnded,
    WatchRequested,
    WorkerHeartbeat,
    WorkersRequested,
)
from taskyard.core.limits import (
    AFTER_SHOWN_MAX,
    LIST_TASKS_MAX,
    OUTPUT_BYTES_MAX,
    SECOND_NS,
    STATS_ROWS_MAX,
    TASKS_PER_MESSAGE_MAX,
)
from taskyard.core.model import Refusal, Stream, WorkerFacts
from taskyard.core.records import Progressed
from taskyard.core.states import TaskState, WorkerState
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard, assigned

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


@pytest.fixture
def yard() -> Yard:
    """Return a yard with a worker w."""
    yard = Yard()
    yard.clock(1000 * SECOND_NS)
    yard.join(b"w")
    return yard


def view(name: bytes, state: TaskState, attempt: int = 0) -> TaskView:
    """Return the view of a task without a campaign, submitted at the start."""
    counts = (0, attempt, 0, 0, 1, 1000 * SECOND_NS)
    return TaskView(name, state, b"", b"default", b"", *counts)


def look_up(yard: Yard, *names: bytes) -> list[TaskView]:
    (found,) = yard.handle(LookupRequested(0, b"client", list(names), 7))
    assert isinstance(found, TaskDetails)
    assert (found.client, found.request) == (b"client", 7)
    # Payloads and attempts are looked at in test_runs.
    gone = {"attempts": [], "finished_record": 0, "payload": None, "terms": None}
    return [structs.replace(view, **gone) for view in found.views]


def some_of_everything(yard: Yard) -> None:
    """Tasks in every state, in the order of their names."""
    yard.submit(b"a done", b"b failed", b"c leased", campaign=b"c")
    yard.submit(b"d blocked", after=[[b"b failed"]], campaign=b"c")
    yard.submit(b"e cancelled", lanes=[b"l"])
    yard.cancel(b"e cancelled")
    yard.take(b"w", 3)
    yard.finish(b"w", b"c/a done", texts=[b"result"])
    yard.report(b"w", b"c/b failed", Outcome.FAILED, texts=[b"oh"])
    yard.submit(b"f delayed", due_ns=2000 * SECOND_NS)
    yard.submit(b"g ready", service=b"x", lanes=[b"l"])
    yard.handle(TasksProgressed(0, b"w", [b"c/c leased"], texts=[b"so far so good"]))


QUESTIONS: list[Event] = [
    RequestRejected(0, b"client", 1, Refusal.MALFORMED, "what?"),
    LookupRequested(0, b"client", [b"c/a done", b"c/d blocked", b"nobody"]),
    ListRequested(0, b"client", Scope()),
    ListRequested(0, b"client", Scope(states=(FAILED,))),
    ListRequested(0, b"client", Scope(names=(b"c/a done",))),
    StatsRequested(0, b"client"),
    *(ExplainRequested(0, b"client", name) for name in (b"c/a done", b"c/d blocked", b"g ready")),
    WorkersRequested(0, b"client"),
    HeldTasksRequested(0, b"client", b""),
    ResultsRequested(0, b"client", [b"c/a done", b"nobody"]),
    PartRequested(0, b"client", b"c/c leased", stream=Stream.STDOUT),
    PartRequested(0, b"client", b"nobody", blob=b"x"),
    WatchEnded(0, b"client", 1),
    WaitEnded(0, b"w"),
    WaitEnded(0, b"nobody"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: type(one).__name__)
def test_question_decides_nothing_and_changes_nothing(yard: Yard, question: Event) -> None:
    some_of_everything(yard)
    before = ledger_fingerprint(yard.scheduler.ledger)
    first = yard.handle(question)
    assert yard.records == []
    assert ledger_fingerprint(yard.scheduler.ledger) == before
    assert yard.handle(question) == first


def test_request_that_made_no_sense_is_refused_in_its_turn(yard: Yard) -> None:
    assert yard.handle(RequestRejected(0, b"client", 4, Refusal.FORBIDDEN, "not yours")) == [
        Refused(b"client", 4, Refusal.FORBIDDEN, "not yours")
    ]


def test_answer_of_a_dialect_keeps_its_place(yard: Yard) -> None:
    assert yard.handle(events.ReplyDue(0, b"client", 4)) == [effects.ReplyDue(b"client", 4)]


# Lookup.


def test_ready_task_is_looked_up(yard: Yard) -> None:
    yard.submit(b"a", campaign=b"c", service=b"x", lanes=[b"l"], priority=5, slots=2)
    assert look_up(yard, b"c/a") == [
        TaskView(b"c/a", READY, b"c", b"x", b"l", 5, 0, 0, 0, 2, 1000 * SECOND_NS)
    ]


def test_leased_task_is_looked_up_with_its_worker_and_lease_time(yard: Yard) -> None:
    yard.submit(b"a")
    yard.later(3)
    yard.take(b"w")
    expected = view(b"a", LEASED, attempt=1)
    expected.worker, expected.leased_ns = b"w", 1003 * SECOND_NS
    assert look_up(yard, b"a") == [expected]


def test_task_that_lost_a_worker_is_looked_up_with_its_loss(yard: Yard) -> None:
    yard.submit(b"a")
    yard.lose(b"v", b"a")
    (found,) = look_up(yard, b"a")
    assert (found.state, found.attempt, found.losses) == (READY, 1, 1)


def test_delayed_task_is_looked_up_with_its_time_and_its_latest_failure(yard: Yard) -> None:
    yard.submit(b"a", retry_delays_ns=(SECOND_NS,))
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"busy"])
    expected = view(b"a", DELAYED, attempt=1)
    expected.failures, expected.due_ns, expected.reason = 1, 1001 * SECOND_NS, b"busy"
    assert look_up(yard, b"a") == [expected]


def test_task_that_was_delayed_has_no_due_time_any_more(yard: Yard) -> None:
    yard.submit(b"a", due_ns=1001 * SECOND_NS)
    yard.later(2)
    assert look_up(yard, b"a") == [view(b"a", READY)]


def test_ended_tasks_are_looked_up_with_when_they_ended(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c", after=[[], [], [b"b"]])
    yard.take(b"w")
    yard.later(5)
    yard.finish(b"w", b"a")
    yard.cancel(b"b")
    done, cancelled, also = view(b"a", DONE, 1), view(b"b", CANCELLED), view(b"c", CANCELLED)
    for one in (done, cancelled, also):
        one.ended_ns = 1005 * SECOND_NS
    assert look_up(yard, b"a", b"b", b"c") == [done, cancelled, also]


def test_lookup_skips_unknown_names_and_repeats(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    found = look_up(yard, b"b", b"nobody", b"a", b"b")
    assert found == [view(b"b", READY), view(b"a", READY)]
    assert look_up(yard) == look_up(yard, b"nobody") == []


def test_blocked_task_is_looked_up_with_what_holds_it_up(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c", after=[[], [b"a"], [b"a", b"b"]])
    yard.submit(b"d", after=[[b"c", b"unheard of"]], unknown=UnknownPolicy.WAIT)
    first, *others = look_up(yard, b"a", b"b", b"c", b"d")
    assert (first.state, first.waits, first.dependents, first.after) == (READY, 0, 2, [])
    assert [(one.waits, one.dependents, one.after) for one in others] == [
        (1, 1, [b"a"]),
        (2, 1, [b"a", b"b"]),
        (2, 0, [b"unheard of", b"c"]),
    ]


def test_generation_before_does_not_hold_up_the_one_after(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c", after=[[], [b"a"], []])
    yard.cancel(b"b")  # a still refers to it
    yard.submit(b"b", after=[[b"c"]], repeat=DuplicatePolicy.EXTEND)
    (found,) = look_up(yard, b"b")
    assert found.after == [b"c"]


def test_so_many_tasks_that_hold_one_up_and_no_more(yard: Yard) -> None:
    names = [b"%03d" % number for number in range(AFTER_SHOWN_MAX + 5)]
    yard.submit(*names)
    yard.submit(b"joined", b"other", after=[names, names[-1:]])
    joined, other = look_up(yard, b"joined", b"other")
    assert joined.after == names[:AFTER_SHOWN_MAX]
    assert joined.waits == len(names)
    assert other.after == names[-1:]


@pytest.mark.parametrize("kind", [LookupRequested, ResultsRequested])
def test_question_about_too_many_names_is_refused(
    yard: Yard, kind: type[LookupRequested | ResultsRequested]
) -> None:
    names = [b"a"] * (TASKS_PER_MESSAGE_MAX + 1)
    text = "100001 names in one message: the limit is 100000"
    assert yard.handle(kind(0, b"client", names, 3)) == [
        Refused(b"client", 3, Refusal.TOO_MANY, text)
    ]


# Lists.


def page(yard: Yard, scope: Scope | None = None, **fields: int | bytes) -> tuple[list[bytes], int]:
    """Return the names of a page, and where the next begins."""
    event = ListRequested(0, b"client", scope or Scope(), request=9, **fields)  # type: ignore[arg-type]
    (listed,) = yard.handle(event)
    assert isinstance(listed, TaskPage)
    assert (listed.client, listed.request) == (b"client", 9)
    return [one.name for one in listed.views], listed.cursor


def test_tasks_are_listed_in_the_order_of_their_submission(yard: Yard) -> None:
    yard.submit(b"b", b"a")
    yard.submit(b"c")
    assert page(yard) == ([b"b", b"a", b"c"], 0)


def test_list_shows_the_same_as_a_lookup_except_predecessors(yard: Yard) -> None:
    some_of_everything(yard)
    (listed,) = yard.handle(ListRequested(0, b"client", Scope()))
    assert isinstance(listed, TaskPage)
    views = look_up(yard, *(one.name for one in listed.views))
    assert views[3].after == [b"c/b failed"]
    views[3].after = []
    assert listed == TaskPage(b"client", 0, views, 0)


def test_measured_page_has_the_latest_attempts_and_where_to_go_on(yard: Yard) -> None:
    yard.submit(b"a done", b"b failed", b"c leased", b"d ready")
    yard.take(b"w", 3)
    yard.finish(b"w", b"a done")
    yard.report(b"w", b"b failed", Outcome.FAILED, texts=[b"oh"])
    scope = Scope(states=(FAILED, DONE, LEASED))
    (listed,) = yard.handle(ListRequested(0, b"client", scope, measured=True))
    assert isinstance(listed, TaskPage)
    done, failed, leased = listed.views
    assert (done.attempts, done.finished_record) == ([], yard.scheduler.ledger.record - 1)
    assert [(one.number, one.reason) for one in failed.attempts] == [(1, b"oh")]
    assert [(one.number, one.outcome) for one in leased.attempts] == [(1, b"")]
    assert leased.attempts[0].leased_ns == 1000 * SECOND_NS
    assert listed.positions == [1, 2, 3]
    (listed,) = yard.handle(ListRequested(0, b"client", scope, count=2, measured=True, cursor=1))
    assert isinstance(listed, TaskPage)
    assert (listed.positions, listed.cursor) == ([2, 3], 3)


def test_pages_follow_one_another_to_the_end(yard: Yard) -> None:
    names = [b"%d" % number for number in range(7)]
    yard.submit(*names)
    assert page(yard, count=3) == (names[:3], 3)
    assert page(yard, count=3, cursor=3) == (names[3:6], 6)
    assert page(yard, count=3, cursor=6) == (names[6:], 0)
    assert page(yard, count=7) == (names, 0)


@pytest.mark.parametrize("cursor", [2, 3, 1 << 70])
def test_cursor_beyond_the_end_gives_an_empty_page(yard: Yard, cursor: int) -> None:
    yard.submit(b"a", b"b")
    assert page(yard, cursor=cursor) == ([], 0)


def test_page_of_less_than_nothing_is_one_of_one_task_from_the_beginning(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    assert page(yard, cursor=-5, count=-1) == ([b"a"], 1)


def test_page_is_never_longer_than_the_limit(yard: Yard) -> None:
    names = [b"%d" % number for number in range(LIST_TASKS_MAX + 1)]
    yard.submit(*names)
    assert page(yard, count=1 << 70) == (names[:-1], LIST_TASKS_MAX)


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        (Scope(states=(DELAYED, READY)), [b"f delayed", b"g ready"]),
        (Scope(states=()), []),
        (Scope(campaign=b"c", states=(DONE,)), [b"c/a done"]),
        (Scope(campaign=b"c"), [b"c/a done", b"c/b failed", b"c/c leased", b"c/d blocked"]),
        (Scope(service=b"x"), [b"g ready"]),
        (Scope(lane=b"l"), [b"e cancelled", b"g ready"]),
        (Scope(service=b"default", lane=b"l"), [b"e cancelled"]),
        (Scope(names=(b"g ready", b"nobody", b"c/a done")), [b"g ready", b"c/a done"]),
        (Scope(names=(b"g ready", b"c/a done"), states=(DONE,)), [b"c/a done"]),
        (Scope(states=(FAILED,)), [b"c/b failed"]),
        (Scope(states=(FAILED,), campaign=b"other"), []),
    ],
)
def test_only_what_is_in_scope_is_listed(yard: Yard, scope: Scope, names: list[bytes]) -> None:
    some_of_everything(yard)
    assert page(yard, scope) == (names, 0)


def test_only_names_that_contain_the_match_are_listed(yard: Yard) -> None:
    some_of_everything(yard)
    assert page(yard, match=b"ed") == (
        [b"c/b failed", b"c/c leased", b"c/d blocked", b"e cancelled", b"f delayed"],
        0,
    )
    named = Scope(names=(b"g ready", b"f delayed"))
    assert page(yard, named, match=b"lay") == ([b"f delayed"], 0)
    assert page(yard, Scope(states=(LEASED, DONE)), match=b"ed") == ([b"c/c leased"], 0)


def test_pages_of_named_tasks_follow_one_another(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c")
    scope = Scope(names=(b"c", b"a"))
    assert page(yard, scope, count=1) == ([b"c"], 1)
    assert page(yard, scope, count=1, cursor=1) == ([b"a"], 0)


def test_failed_tasks_are_listed_without_those_that_failed_and_are_tried_again(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c", retry_delays_ns=(SECOND_NS,))
    yard.take(b"w", 3)
    yard.report(b"w", b"c", Outcome.FAILED_FINAL)
    yard.report(b"w", b"b", Outcome.FAILED, texts=[b"once"])
    yard.report(b"w", b"a", Outcome.FAILED_FINAL)
    failed = Scope(states=(FAILED,))
    assert page(yard, failed) == ([b"c", b"a"], 0)
    assert page(yard, failed, count=1) == ([b"c"], 1)
    assert page(yard, failed, count=1, cursor=1) == ([b"a"], 0)


def test_page_scans_a_limited_number_of_tasks_and_returns_a_cursor(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_pages, "LIST_SCAN_MAX", 5)
    monkeypatch.setattr(task_pages, "LIST_BATCH", 2)
    yard.submit(*(b"%d" % number for number in range(12)))
    assert page(yard, match=b"7") == ([], 5)
    assert page(yard, match=b"7", cursor=5) == ([b"7"], 10)
    assert page(yard, match=b"7", cursor=10) == ([], 0)
    assert page(yard, match=b"1", count=1, cursor=1) == ([b"1"], 2)
    assert page(yard, match=b"1", count=1, cursor=6) == ([b"10"], 11)
    assert page(yard, match=b"1", count=1, cursor=11) == ([b"11"], 0)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the place at which each pass over the table of tasks begins."""
    noted: list[int] = []

    class NotedCursor(task_pages.TaskCursor):
        def __init__(self, tasks: Iterable[Task], place: int) -> None:
            noted.append(place)
            super().__init__(tasks, place)

    monkeypatch.setattr(task_pages, "TaskCursor", NotedCursor)
    monkeypatch.setattr(task_pages, "LIST_BATCH", 4)
    return noted


def test_listings_at_once_are_one_pass_each(yard: Yard, passes: list[int]) -> None:
    names = [b"%02d" % number for number in range(30)]
    yard.submit(*names)
    for cursor in range(0, 30, 10):
        listed = names[cursor : cursor + 10]
        assert page(yard, count=10, cursor=cursor) == (listed, (cursor + 10) % 30)
        start = cursor and cursor - 4
        assert page(yard, match=b"5", count=1, cursor=start) == (
            [b"%d5" % (cursor // 10)],
            cursor + 6,
        )
    assert passes == [0, 0]


def test_listing_goes_on_after_tasks_were_added(yard: Yard, passes: list[int]) -> None:
    yard.submit(b"a", b"b", b"c", b"d")
    assert page(yard, count=2) == ([b"a", b"b"], 2)
    yard.submit(b"e")
    assert page(yard, count=2, cursor=2) == ([b"c", b"d"], 4)
    assert page(yard, count=2, cursor=4) == ([b"e"], 0)
    assert passes == [0, 2]


def test_listing_goes_on_after_tasks_were_archived(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c", b"d")
    yard.take(b"w", 1)
    yard.report(b"w", b"a", Outcome.DONE)
    ledger, event = yard.scheduler.ledger, ListRequested(0, b"client", Scope(), count=3)
    reading = ledger.cursors.resume(ledger.tasks.values(), 4, 0)
    task_pages.read_page(reading, 4, event)
    ledger.cursors.keep(4, reading)
    ledger.archive([b"a"])
    ledger.tasks[b"e"] = ledger.tasks[b"b"]  # as many tasks as before, at other places
    reading = ledger.cursors.resume(ledger.tasks.values(), 4, 3)
    assert task_pages.read_page(reading, 4, event).tasks == [ledger.tasks[b"e"]]


def test_listing_of_failed_tasks_is_one_pass_until_a_record(yard: Yard, passes: list[int]) -> None:
    names = [b"%d" % number for number in range(8)]
    yard.submit(*names, b"more")
    yard.take(b"w", 8)
    for name in names:
        yard.report(b"w", name, Outcome.FAILED_FINAL)
    failed = Scope(states=(FAILED,))
    assert page(yard, failed, count=3) == (names[:3], 3)
    assert page(yard, failed, count=3, cursor=3) == (names[3:6], 6)
    assert passes == [0]
    yard.handle(RetryRequested(0, b"client", Scope(names=(b"0",))))
    assert page(yard, failed, count=3, cursor=6) == (names[7:], 0)
    assert passes == [0, 6]


def test_few_places_are_kept(yard: Yard, passes: list[int]) -> None:
    yard.submit(*(b"%02d" % number for number in range(30)))
    starts = range(task_pages.CURSORS_MAX + 1)
    for _ in range(2):
        for start in starts:
            page(yard, count=11, cursor=start)
        for start in starts[1:]:
            page(yard, count=1, cursor=start + 11)
    assert passes == [*starts] * 2


# Counts.


def test_everything_is_counted(yard: Yard) -> None:
    some_of_everything(yard)
    yard.handle(DiskSpaceChanged(0, accepting=False))
    yard.handle(PauseRequested(0, b"client"))
    stats = Stats(
        counts=[1, 1, 1, 1, 1, 1, 1],
        stuck=1,
        workers=1,
        records=yard.scheduler.ledger.record,
        accepting=False,
        paused=True,
        campaigns=[(b"c", [1, 0, 0, 1, 1, 1, 0], 0, 0), (b"", [0, 1, 1, 0, 0, 0, 1], 0, 0)],
        services=[(b"default", [1, 1, 0, 1, 1, 1, 1], 1), (b"x", [0, 0, 1, 0, 0, 0, 0], 0)],
        counters=yard.scheduler.context.counters.copied(),
        oldest_ready_ns={b"x": yard[b"g ready"].terms.submitted_ns},
    )
    assert yard.handle(StatsRequested(0, b"client", 5)) == [StatsReply(b"client", 5, stats)]


def test_counts_in_a_reply_do_not_change_afterwards(yard: Yard) -> None:
    yard.submit(b"a")
    (counted,) = yard.handle(StatsRequested(0, b"client"))
    yard.submit(b"b")
    assert isinstance(counted, StatsReply)
    assert counted.stats.counts[READY] == 1
    assert counted.stats.campaigns == [(b"", counted.stats.counts, 0, 0)]
    assert counted.stats.services == [(b"default", counted.stats.counts, 1)]


def test_the_latest_campaigns_and_services_are_counted_and_no_more() -> None:
    yard = Yard()
    ledger = yard.scheduler.ledger
    for number in range(STATS_ROWS_MAX + 1):
        ledger.campaign(b"%d" % number)
        ledger.service(b"%d" % number)
    yard.mirror = ledger
    (counted,) = yard.handle(StatsRequested(0, b"client"))
    assert isinstance(counted, StatsReply)
    campaigns, services = counted.stats.campaigns, counted.stats.services
    assert len(campaigns) == len(services) == STATS_ROWS_MAX
    assert (campaigns[-1][0], services[-1][0]) == (b"1000", b"1000")


# Reasons.


def test_task_is_explained(yard: Yard) -> None:
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    explanation = Explanation(Reason.TASKS, "it waits for 1 task: a (READY)", (b"a",))
    assert yard.handle(ExplainRequested(0, b"client", b"b", 6)) == [
        ExplanationReply(b"client", 6, b"b", explanation)
    ]
    unknown = Explanation(Reason.UNKNOWN, "unknown task x")
    assert yard.handle(ExplainRequested(0, b"client", b"x")) == [
        ExplanationReply(b"client", 0, b"x", unknown)
    ]


# Workers.


def test_workers_are_listed_with_their_tasks_and_last_message(yard: Yard) -> None:
    facts = {
        "slots_total": 8,
        "lease_timeout_ns": 9 * SECOND_NS,
        "incarnation": 3,
        "dialect": b"wmp",
    }
    yard.join(b"v", services=(b"x", b"y"), **facts)
    yard.submit(b"a", b"b", b"c", service=b"x", slots=2)
    yard.take(b"v", 3)
    yard.later(2)
    yard.finish(b"v", b"a", keeps_slots=True)
    yard.ask(b"w", parks=True)
    yard.later(3)
    assert yard.handle(WorkersRequested(0, b"client", 8)) == [
        WorkerList(
            b"client",
            8,
            [
                WorkerView(
                    b"w", WorkerState.PARKED, WorkerFacts(slots_total=0), 0, 0, 3 * SECOND_NS
                ),
                WorkerView(
                    b"v",
                    WorkerState.BUSY,
                    WorkerFacts((b"x", b"y"), 8, 9 * SECOND_NS, 3, dialect=b"wmp"),
                    slots_used=6,
                    held=2,
                    last_seen_ns_ago=3 * SECOND_NS,
                ),
            ],
        )
    ]


def test_empty_yard_has_no_workers() -> None:
    assert Yard().handle(WorkersRequested(0, b"client")) == [WorkerList(b"client", 0, [])]


def test_held_tasks_of_a_dialect_are_listed_with_their_envelopes(yard: Yard) -> None:
    yard.join(b"v:1", slots_total=3, dialect=b"v")
    yard.submit(b"a", b"b", b"c", envelopes=[b"A", b"B", b"C"])
    yard.take(b"v:1", 3)
    yard.finish(b"v:1", b"b", keeps_slots=True)
    ledger = yard.scheduler.ledger
    terms = ledger.tasks[b"a"].terms
    facts = ledger.workers[b"v:1"].facts
    held = WorkerTasks(b"v:1", facts, [b"a", b"c"], [1, 1], [terms, terms], [b"A", b"C"], [1])
    assert yard.handle(HeldTasksRequested(0, b"client", b"v:", 4)) == [
        HeldTasks(b"client", 4, [held])
    ]
    assert yard.handle(HeldTasksRequested(0, b"client", b"x:", 4)) == [HeldTasks(b"client", 4, [])]


# Results.


def test_results_of_known_tasks_are_sent_at_once_without_a_subscription(yard: Yard) -> None:
    some_of_everything(yard)
    done = yard[b"c/a done"].ending
    assert done is not None
    names = [b"c/b failed", b"c/a done", b"c/c leased", b"c/d blocked", b"e cancelled"]
    states = [FAILED, DONE, LEASED, BLOCKED, CANCELLED]
    texts: list[Content | None] = [b"oh", None, b"", b"", b""]
    assert yard.handle(ResultsRequested(0, b"client", [*names, b"nobody"], 2)) == [
        Settled(*(b"client", 2, names, states, texts, [done.record]), printed={b"c/c leased": None})
    ]
    assert yard.scheduler.context.watchers == {}


def test_results_of_no_names_are_empty(yard: Yard) -> None:
    assert yard.handle(ResultsRequested(0, b"client", [b"x"], 2)) == [
        Settled(b"client", 2, [], [], [])
    ]


def test_result_in_memory_is_sent_even_if_it_is_empty(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    yard.watch(b"a", b"b")
    yard.take(b"w", 2)
    notice = yard.finish(b"w", b"a")[0]
    assert notice == Settled(b"watcher", 0, [b"a"], [DONE], [b""])
    notice = yard.finish(b"w", b"b", texts=[b""])[0]
    assert notice == Settled(b"watcher", 0, [b"b"], [DONE], [b""])


def test_watcher_of_a_done_task_gets_the_record_of_its_result(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    yard.take(b"w", 2)
    yard.finish(b"w", b"b", b"a", texts=[b"1", b"2"])
    record = yard.scheduler.ledger.record
    notice = Settled(b"watcher", 0, [b"a", b"b"], [DONE, DONE], [None, None], [record, record])
    assert yard.watch(b"a", b"b") == [notice]


# Output.


def printed(yard: Yard, name: bytes) -> tuple[bool, int]:
    (effect,) = yard.handle(PartRequested(0, b"client", name, 3, Stream.STDOUT))
    assert isinstance(effect, Part)
    assert not effect.data
    return effect.found, effect.record


def report_output(yard: Yard, *texts: bytes, name: bytes = b"a") -> int:
    yard.handle(TasksProgressed(0, b"w", [name] * len(texts), texts=list(texts)))
    return yard.scheduler.ledger.record


def test_output_is_in_the_latest_record_that_has_some(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    assert printed(yard, b"a") == (True, 0)
    assert printed(yard, b"nobody") == (False, 0)
    yard.take(b"w", 2)
    first = report_output(yard, b"one")
    assert printed(yard, b"a") == (True, first)
    second = report_output(yard, b"two")
    assert report_output(yard, b"") > second
    assert printed(yard, b"a") == (True, second)
    assert printed(yard, b"b") == (True, 0)


def test_output_is_kept_when_its_task_has_ended_until_it_is_archived(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    record = report_output(yard, b"one")
    yard.finish(b"w", b"a")
    assert printed(yard, b"a") == (True, record)
    yard.scheduler.ledger.archive([b"a"])
    assert yard.scheduler.ledger.outputs == {}


def test_new_generation_has_printed_nothing(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    report_output(yard, b"one")
    yard.finish(b"w", b"a")
    yard.submit(b"a", repeat=DuplicatePolicy.EXTEND)
    assert printed(yard, b"a") == (True, 0)


def test_output_of_an_attempt_before_is_kept_until_the_next_prints(yard: Yard) -> None:
    yard.submit(b"a", retry_delays_ns=(0,))
    yard.take(b"w")
    record = report_output(yard, b"one")
    yard.report(b"w", b"a", Outcome.FAILED)
    assert printed(yard, b"a") == (True, record)


def test_output_of_a_task_that_the_worker_does_not_hold_is_not_kept(yard: Yard) -> None:
    yard.submit(b"a")
    report_output(yard, b"one")
    assert yard.records == []
    assert printed(yard, b"a") == (True, 0)


def test_fingerprint_of_unfinished_tasks_leaves_out_the_output_of_ended_ones(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    yard.take(b"w", 2)
    kept = report_output(yard, b"one", name=b"b")
    report_output(yard, b"one")
    yard.finish(b"w", b"a")
    assert ledger_fingerprint(yard.scheduler.ledger, ended=False)["outputs"] == {b"b": kept}


# Progress.


def test_progress_without_columns_is_of_whatever_the_worker_holds(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    yard.take(b"w")
    names = [b"b", b"a"]
    event = TasksProgressed(0, b"w", names, texts=[b"mine?", b"mine"], request=4)
    assert yard.handle(event) == [ReportAck(b"w", 4, [b"b"])]
    assert yard.records == [Progressed(1000 * SECOND_NS, b"w", [b"a"], [1], [0], [b"mine"])]
    assert yard.handle(TasksProgressed(0, b"w", [b"a"], percents=[3])) == []
    assert yard.records == [Progressed(1000 * SECOND_NS, b"w", [b"a"], [1], [3], [b""])]


def test_progress_under_an_older_attempt_is_noted_as_missing(yard: Yard) -> None:
    yard.submit(b"a")
    yard.lose(b"v", b"a")
    yard.take(b"w")
    event = TasksProgressed(0, b"w", [b"a", b"a"], [1, 2], request=4)
    assert yard.handle(event) == [ReportAck(b"w", 4, [b"a"])]
    assert yard.records == [Progressed(1000 * SECOND_NS, b"w", [b"a"], [2], [0], [b""])]


def test_progress_keeps_within_its_limits(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    yard.take(b"w", 2)
    texts: list[Content] = [b"head" + b"x" * OUTPUT_BYTES_MAX, b""]
    yard.handle(TasksProgressed(0, b"w", [b"a", b"b"], None, [-1, 1 << 70], texts))
    (record,) = yard.records
    assert isinstance(record, Progressed)
    assert record.percents == [0, 100]
    assert record.texts == [Blob(b"", OUTPUT_BYTES_MAX + 4, b"x" * OUTPUT_BYTES_MAX), b""]


def test_progress_that_the_worker_cut_keeps_its_length(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    yard.take(b"w", 2)
    texts: list[Content] = [Blob(b"", 5000, b"end"), b"whole"]
    yard.handle(TasksProgressed(0, b"w", [b"a", b"b"], texts=texts))
    (record,) = yard.records
    assert isinstance(record, Progressed)
    assert record.texts == texts


def test_progress_of_an_unknown_worker_gets_a_reply(yard: Yard) -> None:
    event = TasksProgressed(0, b"nobody", [b"a"], request=4)
    assert yard.handle(event) == [UnknownWorker(b"nobody"), ReportAck(b"nobody", 4, [b"a"])]


def test_malformed_progress_is_refused_if_a_reply_is_expected(
    yard: Yard,
) -> None:
    (refused,) = yard.handle(TasksProgressed(0, b"w", [b"a"], [1, 2], request=4))
    assert isinstance(refused, Refused)
    assert (refused.client, refused.request) == (b"w", 4)
    assert refused.refusal is Refusal.MALFORMED
    assert yard.handle(TasksProgressed(0, b"w", [b"a"], [1, 2])) == []


# Heartbeats.


def test_heartbeat_is_acknowledged_last_if_requested(yard: Yard) -> None:
    record = yard.scheduler.ledger.record
    replies = yard.handle(WorkerHeartbeat(0, b"w", [(b"a", 1)], request=5))
    assert [type(effect).__name__ for effect in replies] == ["Stop", "HeartbeatAck"]
    version = yard.scheduler.ledger.rule_table.version
    assert replies[-1] == HeartbeatAck(b"w", 5, record, rules_version=version)
    assert yard.handle(WorkerHeartbeat(0, b"w", request=6)) == [
        HeartbeatAck(b"w", 6, record, rules_version=version)
    ]
    assert yard.handle(WorkerHeartbeat(0, b"nobody", request=7)) == [
        UnknownWorker(b"nobody"),
        HeartbeatAck(b"nobody", 7, record, rules_version=version),
    ]
    assert yard.handle(WorkerHeartbeat(0, b"w")) == []


# Ended subscriptions.


def test_ended_subscription_gets_no_notice_and_others_do(yard: Yard) -> None:
    yard.submit(b"a", b"b", campaign=b"c")
    yard.watch(b"a", b"b", request=1)
    yard.watch(b"a", request=2)
    yard.handle(WatchRequested(0, b"other", [b"a"], request=1))
    yard.handle(WatchRequested(0, b"watcher", campaign=b"c", request=1))
    assert yard.handle(WatchEnded(0, b"watcher", 1)) == []
    assert yard.scheduler.context.watchers == {b"a": [(b"watcher", 2), (b"other", 1)]}
    assert yard.scheduler.context.campaign_watchers == {}


def test_parked_worker_whose_wait_ends_gets_no_work(yard: Yard) -> None:
    yard.ask(b"w", parks=True)
    assert yard.handle(WaitEnded(0, b"w")) == [NoWork(b"w", settled=True)]
    assert yard.handle(WaitEnded(0, b"w")) == []
    assert assigned(yard.submit(b"a")) == []
    assert assigned(yard.ask(b"w", parks=True)) == [b"a"]


def test_worker_whose_wait_ends_gets_no_work_unsettled(yard: Yard) -> None:
    yard.submit(b"a", due_ns=2000 * SECOND_NS)
    yard.ask(b"w", parks=True)
    assert yard.handle(WaitEnded(0, b"w")) == [NoWork(b"w", settled=False)]


def test_worker_that_waited_once_can_wait_again(yard: Yard) -> None:
    for _ in range(100):
        yard.ask(b"w", parks=True)
        yard.handle(WaitEnded(0, b"w"))
    assert len(yard.scheduler.ledger.services[b"default"].parked) < 30
    yard.ask(b"w", parks=True)
    assert assigned(yard.submit(b"a", b"b")) == [b"a"]


@pytest.mark.parametrize("facts", [{"wants_wake": True}, {}])
def test_worker_that_is_not_parked_does_not_stop_waiting(
    yard: Yard, facts: dict[str, bool]
) -> None:
    yard.join(b"v", slots_total=1, **facts)
    yard.ask(b"v", parks=True)
    yard.submit(b"a")
    assert yard.handle(WaitEnded(0, b"v")) == []
    assert yard.handle(WaitEnded(0, b"nobody")) == []


def parked_for(yard: Yard, worker: bytes) -> tuple[WorkerState, int]:
    found = yard.scheduler.ledger.workers[worker]
    return found.state, found.tasks_wanted


def test_parked_worker_that_asks_again_replaces_its_request(yard: Yard) -> None:
    yard.ask(b"w", 1, parks=True)
    yard.ask(b"w", 3, parks=True)
    assert parked_for(yard, b"w") == (WorkerState.PARKED, 3)
    replies = yard.submit(b"a", b"b", b"c", b"d")
    assert [effect.names for effect in replies if isinstance(effect, Assign)] == [
        [b"a", b"b", b"c"]
    ]


def test_parked_worker_that_asks_without_waiting_waits_no_longer(yard: Yard) -> None:
    yard.ask(b"w", parks=True)
    assert yard.ask(b"w") == [NoWork(b"w", settled=True)]
    assert assigned(yard.submit(b"a")) == []


@pytest.mark.parametrize("facts", [{"wants_wake": True}, {"always_ready": True}])
def test_worker_that_is_woken_or_always_ready_keeps_waiting(
    yard: Yard, facts: dict[str, bool]
) -> None:
    yard.join(b"v", **facts)
    yard.ask(b"v", parks=True)
    yard.ask(b"v")
    assert parked_for(yard, b"v")[0] is WorkerState.PARKED
