"""The queue of requests: by cost, by client, in portions, and only for clients that read."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import invariants
from taskyard.broker import requests
from taskyard.broker.requests import Budget, Requests
from taskyard.core import effects, events
from taskyard.core.effects import CommandAck, Refused, TaskPage
from taskyard.core.events import Scope
from taskyard.core.model import Refusal, Submission, Terms, TermsChanges
from taskyard.core.records import Cancelled
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import BLOCKED, CANCELLED, FAILED, READY
from taskyard.journal.state_check import ledger_fingerprint

if TYPE_CHECKING:
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.core.records import AnyRecord

NOW_NS = 10**9

#: Small enough for tests: a portion is ten tasks.
SMALL = Budget(looked=40, changed=10, watched=10, cancelled=20)


class Turns:
    """A scheduler with a queue of requests, without a broker."""

    def __init__(self, budget: Budget = SMALL) -> None:
        self.scheduler = Scheduler()
        self.ledger = self.scheduler.ledger
        self.deaf: list[bytes] = []
        self.requests = Requests(self.ledger, lambda client: client not in self.deaf)
        self.requests.budget = budget
        self.now_ns = NOW_NS
        self.handled: list[Event] = []
        self.handle(events.ClockSet(NOW_NS, 10**18))

    def handle(self, event: Event) -> list[Effect]:
        event.now_ns = self.now_ns
        self.handled.append(event)
        replies = self.scheduler.handle(event)
        invariants.check(self.scheduler)
        return replies

    def turn(self, *arrived: Event) -> list[Effect]:
        """Return the replies of one turn."""
        now, replies = self.requests.admit([*arrived], self.now_ns)
        for event in now:
            replies += self.handle(event)
        return replies + self.requests.run(self.handle, self.now_ns)

    def until_idle(self, *arrived: Event) -> tuple[list[Effect], int]:
        """Run turns until all is answered. Returns the replies and the number of turns."""
        replies, turns = self.turn(*arrived), 1
        while self.requests.ready_at_ns() == 0:
            replies += self.turn()
            turns += 1
        return replies, turns

    def submit(self, count: int, shape: str = "flat") -> list[bytes]:
        """Submit tasks to campaign c. Return their full names."""
        names = [b"task-%03d" % number for number in range(count)]
        after: list[list[bytes]] | None = None
        if shape == "chain":
            after = [[], *([name] for name in names[:-1])]
        elif shape == "fan":
            after = [[], *([names[0]] for _ in names[1:])]
        terms = [Terms(campaign=b"c", service=b"s")]
        self.handle(events.SubmitRequested(0, b"p", Submission(names, [b""], terms, after=after)))
        return [b"c/" + name for name in names]


def list_tasks(client: bytes, request: int = 1, count: int = 10_000) -> events.ListRequested:
    return events.ListRequested(0, client, Scope(), count=count, request=request)


def dear(ledger_tasks: int = 200) -> Turns:
    """Return turns in which a listing of everything uses the whole budget."""
    turns = Turns(Budget(turn=2_000, cheap=500, turn_cheap=2_000))
    turns.submit(ledger_tasks)
    return turns


def test_cheap_request_is_answered_in_its_turn_beside_costly_ones() -> None:
    turns = dear()
    many = [list_tasks(b"greedy", number) for number in range(1, 6)]
    replies = turns.turn(*many, events.StatsRequested(0, b"other", 9))
    assert [type(one) for one in replies] == [effects.StatsReply, TaskPage]
    assert len(turns.requests) == 4


def test_budget_bounds_what_a_turn_handles_and_nothing_is_lost() -> None:
    turns = dear()
    replies, count = turns.until_idle(*(list_tasks(b"greedy", number) for number in range(1, 6)))
    assert [one.request for one in replies if isinstance(one, TaskPage)] == [1, 2, 3, 4, 5]
    assert count == 5
    assert not turns.requests


def test_clients_have_their_turns_one_after_the_other() -> None:
    turns = dear()
    greedy = [list_tasks(b"greedy", number) for number in range(1, 4)]
    replies = turns.turn(*greedy, list_tasks(b"modest", 9))
    replies += turns.turn()
    assert {one.request for one in replies if isinstance(one, TaskPage)} == {1, 9}


def test_late_client_is_served_before_a_crowd_and_the_crowd_is_served() -> None:
    turns = dear()
    turns.turn(*(list_tasks(b"%d" % number, number) for number in range(1, 101)))
    replies = turns.turn(list_tasks(b"late", 1000)) + turns.turn() + turns.turn()
    assert 1000 in {one.request for one in replies if isinstance(one, TaskPage)}
    replies, _ = turns.until_idle()
    assert len(replies) == 100 - 3


def test_client_that_does_not_read_is_not_computed_for_until_it_does() -> None:
    turns = dear()
    turns.deaf = [b"deaf"]
    replies, _ = turns.until_idle(
        list_tasks(b"deaf", 1), list_tasks(b"deaf", 2), list_tasks(b"other", 3)
    )
    assert [one.request for one in replies if isinstance(one, TaskPage)] == [3]
    assert len(turns.requests) == 2
    turns.deaf = []
    replies, _ = turns.until_idle()
    assert [one.request for one in replies if isinstance(one, TaskPage)] == [1, 2]


def test_cheap_requests_of_one_that_does_not_read_wait_too() -> None:
    turns = dear()
    turns.deaf = [b"deaf"]
    assert turns.turn(list_tasks(b"deaf", 1, count=1)) == []
    # The request that every peer sends as a heartbeat costs nothing.
    brief = events.StatsRequested(0, b"deaf", 2, is_brief=True)
    assert [type(one) for one in turns.turn(brief)] == [effects.StatsReply]


def test_too_many_requests_of_one_client_are_refused_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "WAITING_MAX", 3)
    turns = dear()
    turns.deaf = [b"deaf"]
    replies = turns.turn(*(list_tasks(b"deaf", number) for number in range(1, 6)))
    refused = [one for one in replies if isinstance(one, Refused)]
    assert [(one.request, one.refusal) for one in refused] == [
        (4, Refusal.OVERLOADED),
        (5, Refusal.OVERLOADED),
    ]
    assert [type(one) for one in turns.turn(list_tasks(b"other", 9))] == [TaskPage]


def test_names_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "WAITING_NAMES_MAX", 300)
    turns = dear()
    turns.deaf = [b"deaf"]
    names = [b"c/task-%03d" % number for number in range(200)]
    asked = [events.ResultsRequested(0, b"deaf", names, number) for number in (1, 2)]
    (refused,) = turns.turn(*asked)
    assert isinstance(refused, Refused)
    assert refused.request == 2


def test_queries_of_a_client_that_is_gone_are_refused() -> None:
    turns = dear()
    turns.deaf = [b"gone"]
    turns.turn(list_tasks(b"gone", 1), events.WatchRequested(0, b"gone", [b"x"] * 400, request=2))
    assert len(turns.requests) == 2
    replies = turns.turn(events.ClientDisconnected(0, b"gone"))
    # A dialect forgets a request when it is answered.
    assert [one.request for one in replies if isinstance(one, Refused)] == [1, 2]
    assert not turns.requests
    turns.deaf = []
    assert turns.until_idle() == ([], 1)
    assert not turns.scheduler.context.watched


# Commands.

CANCEL = events.CancelRequested(0, b"c", Scope(campaign=b"c"), 7)
COMMANDS: dict[str, Event] = {
    "cancel": CANCEL,
    "retry": events.RetryRequested(0, b"c", Scope(campaign=b"c"), 7),
    "move": events.MoveRequested(0, b"c", Scope(campaign=b"c"), None, b"lane", 7),
    "expire": events.ExpireRequested(0, b"c", Scope(campaign=b"c"), 7),
    "edit": events.EditRequested(0, b"c", Scope(campaign=b"c"), TermsChanges(priority=3), 7),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("shape", ["flat", "chain", "fan"])
def test_command_in_portions_has_the_same_effect(name: str, shape: str) -> None:
    parts, whole = Turns(), Turns(Budget())
    for turns in (parts, whole):
        turns.submit(100, shape)
        if name == "retry":
            turns.handle(events.ExpireRequested(0, b"c", Scope(campaign=b"c")))
    for turns, expected in ((parts, 4), (whole, 1)):
        handled = len(turns.handled)
        replies, count = turns.until_idle(_copy(COMMANDS[name]))
        answers = [one for one in replies if isinstance(one, CommandAck)]
        assert answers == [CommandAck(b"c", 7, 100)]
        assert count == expected
        sizes = [len(one.chosen) for one in turns.handled[handled:] if _chosen(one)]  # type: ignore[attr-defined]
        assert not sizes or sizes == [10] * 10
        records = turns.scheduler.take_records()[-len(sizes) :]
        assert not sizes or [_names_of(record) for record in records] == [10] * 10
    states = [[task.state for task in turns.ledger.tasks.values()] for turns in (parts, whole)]
    assert states[0] == states[1]
    assert parts.ledger.counts == whole.ledger.counts


def _names_of(record: AnyRecord) -> int:
    return len(getattr(record, "names", ()))


def _chosen(event: Event) -> bool:
    return getattr(event, "chosen", None) is not None


def _copy(event: Event) -> Event:
    return type(event)(*(getattr(event, field) for field in event.__struct_fields__))


def test_others_are_served_between_two_portions() -> None:
    turns = Turns(Budget(turn=20_000, looked=40, changed=10, cancelled=20))
    turns.submit(100)
    turns.turn(_copy(CANCEL))
    assert turns.ledger.counts[CANCELLED] == 10
    replies = turns.turn(events.StatsRequested(0, b"other", 9))
    assert [type(one) for one in replies] == [effects.StatsReply]
    assert turns.ledger.counts[CANCELLED] == 20


@pytest.mark.parametrize("shape", ["chain", "fan"])
def test_task_that_many_wait_for_is_cancelled_after_them(shape: str) -> None:
    turns = Turns()
    names = turns.submit(100, shape)
    one = events.CancelRequested(0, b"c", Scope(names=(names[0],)), 7)
    replies, count = turns.until_idle(one)
    assert [one for one in replies if isinstance(one, CommandAck)] == [CommandAck(b"c", 7, 100)]
    assert turns.ledger.counts[CANCELLED] == 100
    assert count > 3


def test_few_are_cancelled_at_once_with_their_cause() -> None:
    turns = Turns()
    names = turns.submit(15, "chain")
    turns.until_idle(events.CancelRequested(0, b"c", Scope(names=(names[0],)), 7))
    (record,) = [one for one in turns.scheduler.take_records() if isinstance(one, Cancelled)]
    assert record.names == names
    assert record.causes == [0] * 14


def test_command_acts_on_the_tasks_that_there_are_when_it_begins() -> None:
    turns = Turns()
    turns.submit(100)
    turns.turn(_copy(CANCEL))
    late = Submission([b"late"], [b""], [Terms(campaign=b"c", service=b"s")])
    turns.turn(events.SubmitRequested(0, b"p", late))
    turns.until_idle()
    assert turns.ledger.tasks[b"c/late"].state is READY
    assert turns.ledger.counts[CANCELLED] == 100


def test_two_commands_are_done_one_after_the_other() -> None:
    turns = Turns()
    turns.submit(100)
    expire = events.ExpireRequested(0, b"d", Scope(campaign=b"c"), 8)
    replies, _ = turns.until_idle(expire, events.RetryRequested(0, b"e", Scope(campaign=b"c"), 9))
    answers = {one.request: one.count for one in replies if isinstance(one, CommandAck)}
    assert sorted(answers) == [8, 9]
    assert turns.ledger.counts[FAILED] + turns.ledger.counts[READY] == 100
    clients = [one.client for one in turns.handled if _chosen(one)]  # type: ignore[attr-defined]
    assert len([*groupby(clients)]) == 2


def test_command_that_is_asked_for_again_while_it_runs_is_done_once() -> None:
    turns = Turns(Budget(turn=20_000, looked=40, changed=10, cancelled=20))
    turns.submit(100)
    turns.turn(_copy(CANCEL))
    again = events.CancelRequested(0, b"c", Scope(campaign=b"c"), 8)
    replies, _ = turns.until_idle(again)
    assert replies == [CommandAck(b"c", 7, 100), CommandAck(b"c", 8, 100)]
    assert sum(map(_chosen, turns.handled)) == 10


def test_command_of_a_client_that_is_gone_is_done_all_the_same() -> None:
    turns = Turns()
    turns.submit(100)
    turns.turn(_copy(CANCEL))
    turns.turn(events.ClientDisconnected(0, b"c"), list_tasks(b"c", 5))
    turns.until_idle()
    assert turns.ledger.counts[CANCELLED] == 100


def test_move_that_is_refused_is_refused_once_and_changes_nothing() -> None:
    turns = Turns()
    turns.submit(100)
    before = ledger_fingerprint(turns.ledger)
    wrong = events.MoveRequested(0, b"c", Scope(campaign=b"c"), b"", None, 7)
    replies, _ = turns.until_idle(wrong)
    assert [type(one) for one in replies] == [Refused]
    assert ledger_fingerprint(turns.ledger) == before
    assert not turns.requests


def test_command_that_fits_nothing_is_answered() -> None:
    turns = Turns()
    turns.submit(100)
    replies, _ = turns.until_idle(events.CancelRequested(0, b"c", Scope(campaign=b"other"), 7))
    assert replies == [CommandAck(b"c", 7, 0)]


# Watches.


def test_watch_of_many_names_starts_in_portions_and_ends_whole() -> None:
    turns = Turns(Budget(cheap=5, watched=10))
    names = turns.submit(35)
    turns.handle(events.CancelRequested(0, b"c", Scope(names=tuple(names[:20]))))
    replies, _ = turns.until_idle(events.WatchRequested(0, b"w", names, request=3))
    replies += turns.handle(events.CancelRequested(0, b"c", Scope(campaign=b"c")))
    settled = [name for one in replies if isinstance(one, effects.Settled) for name in one.names]
    assert sorted(settled) == names
    assert not turns.scheduler.context.watched


def test_watch_that_ends_while_it_waits_is_looked_at_first() -> None:
    turns = Turns(Budget(turn=1, cheap=0))
    names = turns.submit(3)
    turns.handle(events.CancelRequested(0, b"c", Scope(campaign=b"c")))
    arrived = (
        events.WatchRequested(0, b"w", [*names, b"not settled"], request=3),
        events.WatchEnded(0, b"w", 3),
        events.ReplyDue(0, b"w", 3),
    )
    replies, _ = turns.until_idle(*arrived)
    kinds = [type(one) for one in replies]
    assert kinds == [effects.Settled, effects.ReplyDue]
    assert not turns.scheduler.context.watched


# Any mixture.

CLIENTS = st.sampled_from([b"a", b"b", b"c"])
KINDS = st.sampled_from([events.CancelRequested, events.RetryRequested, events.ExpireRequested])
ASKED = st.one_of(
    st.builds(lambda client: list_tasks(client, 0), CLIENTS),
    st.builds(lambda client: events.StatsRequested(0, client), CLIENTS),
    st.builds(lambda client: events.ExplainRequested(0, client, b"c/task-050"), CLIENTS),
    st.builds(lambda client: events.WatchRequested(0, client, campaign=b"c"), CLIENTS),
    st.builds(lambda client, kind: kind(0, client, Scope(campaign=b"c")), CLIENTS, KINDS),
)


@pytest.mark.slow
@given(st.lists(st.lists(ASKED, max_size=6), max_size=6), st.sampled_from(["flat", "chain"]))
def test_every_request_is_answered_once_and_turns_are_the_same_again(
    arrivals: list[list[Event]], shape: str
) -> None:
    runs = []
    for _ in range(2):
        turns = Turns(Budget(turn=1_000, cheap=100, looked=40, changed=10, cancelled=20))
        turns.submit(60, shape)
        replies: list[Effect] = []
        number = 0
        for some in arrivals:
            copies = [_copy(one) for one in some]
            for one in copies:
                number += 1
                one.request = number  # type: ignore[attr-defined]
            replies += turns.turn(*copies)
        replies += turns.until_idle()[0]
        assert not turns.requests
        runs.append([(type(one), getattr(one, "request", None)) for one in replies])
    assert runs[0] == runs[1]
    answered = sorted(request for _, request in runs[0] if request)
    assert len(answered) == len({*answered})
    expected = sum(len(some) for some in arrivals)
    waiting = sum(isinstance(one, events.WatchRequested) for some in arrivals for one in some)
    assert expected - waiting <= len(answered) <= expected


def test_waiting_task_is_explained_by_its_dependency() -> None:
    turns = Turns()
    names = turns.submit(5, "chain")
    assert turns.ledger.tasks[names[1]].state is BLOCKED
    replies = turns.turn(events.ExplainRequested(0, b"x", names[1], 4))
    assert isinstance(replies[0], effects.ExplanationReply)
    assert replies[0].explanation.after == (names[0],)
