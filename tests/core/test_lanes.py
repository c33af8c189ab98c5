"""Lanes: holds, debounce, random order, runs, listing, moving, expiry, and fairness."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskyard.core.effects import CommandAck, Effect, LaneList, LaneView, Reason, Refused
from taskyard.core.events import (
    ExpireRequested,
    LanesRequested,
    MoveRequested,
    Outcome,
    PauseRequested,
    RetryRequested,
    RulesSet,
    Scope,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    TasksReturned,
    TimePassed,
    WorkerRegistered,
)
from taskyard.core.limits import LIST_LANES_MAX, SECOND_NS
from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.records import Moved, Postponed, Released, ReportedLate, Returned, TaskExpired
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned
from tests.kit.snapshots import reopened

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


def names(count: int, prefix: bytes = b"") -> list[bytes]:
    return [prefix + b"%02d" % number for number in range(count)]


def a_yard(**rules: object) -> Yard:
    """Return a yard with these options for lane x, and a worker without a limit."""
    yard = Yard()
    yard.set_rules(Rule(b"rule", b"*/x", LaneOptions(**rules)))  # type: ignore[arg-type]
    yard.join(b"w")
    return yard


def fill(yard: Yard, *some: bytes, **terms: Any) -> list[Effect]:
    return yard.submit(*some, lanes=[b"x"] * len(some), **terms)


def restart(yard: Yard) -> None:
    """Replace the scheduler by one restored from a snapshot, with the same settings."""
    former = yard.scheduler.ledger
    rules = former.rules
    yard.scheduler, yard.mirror = Scheduler(reopened(former)), reopened(former)
    yard.scheduler.resume(yard.now_ns)
    yard.handle(rules)


# Held lanes.


def release(yard: Yard, **scope: object) -> list[Effect]:
    return yard.handle(RetryRequested(0, b"client", Scope(**scope)))  # type: ignore[arg-type]


def test_held_lane_gives_nothing_until_released_and_then_each_task_once() -> None:
    yard = a_yard(is_held=True)
    fill(yard, b"a", b"b")
    assert yard.take(b"w", 9) == []
    assert release(yard, service=b"default", lane=b"x") == [CommandAck(b"client", 0, 2)]
    assert yard.records == [Released(0, [b"a", b"b"])]
    fill(yard, b"late")
    assert yard.take(b"w", 9) == [b"a"]
    yard.finish(b"w", b"a")
    assert yard.take(b"w", 9) == [b"b"]
    yard.finish(b"w", b"b")
    assert yard.take(b"w", 9) == []
    assert yard.state(b"late") is READY


def test_task_that_is_asked_for_by_name_goes_before_the_others() -> None:
    yard = a_yard(is_held=True, overfeed=9)
    fill(yard, *names(5))
    release(yard, names=(b"03", b"01"))
    assert yard.take(b"w", 9) == [b"03", b"01"]


def test_release_wakes_a_parked_worker() -> None:
    yard = a_yard(is_held=True)
    fill(yard, b"a")
    yard.ask(b"w", parks=True)
    assert assigned(release(yard, service=b"default")) == [b"a"]


def test_failed_and_delayed_tasks_of_a_held_lane_are_tried_when_released() -> None:
    yard = a_yard(is_held=True)
    fill(yard, b"delayed", due_ns=SECOND_NS)
    yard.later(2)
    fill(yard, b"far", due_ns=100 * SECOND_NS)
    assert release(yard, service=b"default", lane=b"x") == [CommandAck(b"client", 0, 2)]
    assert sorted([yard.take(b"w"), yard.finish(b"w", b"delayed") and yard.take(b"w")]) == [
        [b"delayed"],
        [b"far"],
    ]


def test_released_task_that_fails_and_comes_back_is_held_again() -> None:
    yard = a_yard(is_held=True, retry_delays_ns=(SECOND_NS,))
    fill(yard, b"a")
    release(yard, names=(b"a",))
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    yard.later(1)
    assert yard.state(b"a") is READY
    assert yard.take(b"w") == []


def test_released_task_that_was_returned_untried_is_still_released() -> None:
    yard = a_yard(is_held=True)
    fill(yard, b"a", b"b")
    release(yard, names=(b"a",))
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.REFUSED)
    assert yard.take(b"w", 9) == [b"a"]


def test_release_survives_a_restart() -> None:
    yard = a_yard(is_held=True)
    fill(yard, b"a", b"b")
    release(yard, names=(b"a",))
    restart(yard)
    assert yard.take(b"w", 9) == [b"a"]
    assert yard.take(b"w", 9) == []


def test_release_ends_with_the_tasks_that_it_was_for() -> None:
    yard = a_yard(is_held=True)
    fill(yard, b"a", b"b")
    fill(yard, b"delayed", due_ns=SECOND_NS)
    release(yard, names=(b"a", b"b"))
    yard.cancel(b"a", b"b")
    yard.later(1)
    assert yard.state(b"delayed") is READY
    assert yard.take(b"w", 9) == []


def test_lane_that_is_held_no_more_is_served_at_once() -> None:
    yard = a_yard(is_held=True)
    fill(yard, b"a")
    yard.ask(b"w", parks=True)
    assert assigned(yard.rules()) == [b"a"]


# Gathering.


def test_lane_that_gets_work_begins_a_while_after_the_first_of_it() -> None:
    yard = a_yard(debounce_ns=3 * SECOND_NS, overfeed=9)
    yard.ask(b"w", 9, parks=True)
    fill(yard, b"a")
    yard.later(2)
    assert assigned(fill(yard, b"b")) == []
    assert yard.scheduler.wake_at_ns() == 3 * SECOND_NS
    assert assigned(yard.later(1)) == [b"a", b"b"]


def test_lane_that_is_being_served_does_not_debounce() -> None:
    yard = a_yard(debounce_ns=3 * SECOND_NS)
    fill(yard, b"a", b"b")
    yard.later(3)
    assert yard.take(b"w") == [b"a"]
    fill(yard, b"c")
    yard.finish(b"w", b"a")
    assert yard.take(b"w") == [b"b"]


def test_lane_that_ran_empty_debounces_again() -> None:
    yard = a_yard(debounce_ns=3 * SECOND_NS)
    fill(yard, b"a")
    yard.later(2)
    yard.cancel(b"a")
    fill(yard, b"b", b"c")
    yard.later(2)
    assert yard.take(b"w") == []
    yard.later(1)
    assert yard.take(b"w") == [b"b"]


# Random lanes.


def test_random_lane_gives_all_its_tasks_once_in_another_order_than_they_came() -> None:
    yard = a_yard(is_random=True)
    fill(yard, *names(60))
    order: list[bytes] = []
    for _ in range(60):
        order += yard.take(b"w")
        yard.finish(b"w", order[-1])
    assert sorted(order) == names(60)
    assert order != names(60)
    places = [abs(place - int(name)) for place, name in enumerate(order)]
    assert sum(places) / 60 > 10  # of a shuffled row it is 20


def test_random_lane_gives_different_orders_to_batches_too() -> None:
    yard = a_yard(is_random=True, lane_workers_max=0)
    fill(yard, *names(60))
    taken = yard.take(b"w", 20)
    assert len(dict.fromkeys(taken)) == 20
    assert taken != sorted(taken)
    rest = yard.take(b"w", 99)
    assert sorted(taken + rest) == names(60)


def test_higher_priority_and_returned_tasks_go_first_in_a_random_lane_too() -> None:
    yard = a_yard(is_random=True, lane_workers_max=0)
    fill(yard, *names(20))
    fill(yard, b"urgent", priority=5)
    first = yard.take(b"w", 2)
    assert first[0] == b"urgent"
    yard.report(b"w", first[1], Outcome.REFUSED)
    assert yard.take(b"w") == [first[1]]


def test_task_that_comes_back_to_a_random_lane_is_not_found_where_it_was_taken_from() -> None:
    yard = a_yard(is_random=True, lane_workers_max=0)
    fill(yard, *names(90))
    for _ in range(15):
        (name,) = yard.take(b"w")
        yard.report(b"w", name, Outcome.REFUSED)  # it goes first now
        taken = yard.take(b"w", 25)
        assert (taken[0], len(dict.fromkeys(taken))) == (name, 25)
        yard.handle(TasksReturned(0, b"w", taken))


@pytest.mark.slow
@given(steps=st.lists(st.sampled_from(["take", "cancel", "fail", "add", "due"]), max_size=60))
def test_random_lane_keeps_all_its_tasks_whatever_happens_in_its_middle(steps: list[str]) -> None:
    yard = a_yard(is_random=True, lane_workers_max=0, retry_delays_ns=(SECOND_NS,) * 99)
    fill(yard, *names(30))
    random_bits = random.Random(len(steps))
    for number, step in enumerate(steps):
        ready = [one.name for one in yard.scheduler.ledger.tasks.values() if one.state is READY]
        if step == "take":
            for name in yard.take(b"w", 3):
                yard.finish(b"w", name)
        elif step == "fail":
            for name in yard.take(b"w", 3):
                yard.report(b"w", name, Outcome.FAILED)
        elif step == "cancel" and ready:
            yard.cancel(random_bits.choice(ready))
        elif step == "add":
            fill(yard, b"new%d" % number)
        elif step == "due":
            yard.later(1)
    yard.later(1)
    while yard.scheduler.ledger.counts[READY]:
        taken = yard.take(b"w", 5)
        assert taken
        yard.finish(b"w", *taken)
    assert not yard.scheduler.ledger.counts[LEASED]


def test_queue_of_a_random_lane_does_not_grow_by_stale_entries() -> None:
    yard = a_yard(is_random=True)
    fill(yard, *names(50))
    main_queue = yard.scheduler.ledger.services[b"default"].lanes[b"x"].main_queue
    for _ in range(49):
        yard.finish(b"w", *yard.take(b"w"))
        left = yard.scheduler.ledger.counts[READY]
        assert len(main_queue.items) - main_queue.cursor <= left * 4 // 3 + 1


# Runs.


def test_task_that_is_put_back_waits_until_all_that_was_due_has_been_tried() -> None:
    yard = a_yard()
    fill(yard, b"urgent", priority=9)
    fill(yard, b"a", b"b")
    order = []
    for _ in range(4):
        (name,) = yard.take(b"w")
        order.append(name)
        if len(order) == 1:
            yard.report(b"w", name, Outcome.DEFER_BACK)
            assert isinstance(yard.records[0], Returned)
        else:
            yard.finish(b"w", name)
    assert order == [b"urgent", b"a", b"b", b"urgent"]


def test_task_whose_time_comes_in_the_middle_of_a_run_waits_for_the_next() -> None:
    yard = a_yard(retry_delays_ns=(0, 0, 0))
    fill(yard, b"urgent", priority=9)
    fill(yard, b"a", b"b")
    assert yard.take(b"w") == [b"urgent"]
    yard.report(b"w", b"urgent", Outcome.FAILED)
    yard.later(0)
    assert yard.state(b"urgent") is READY
    for name in (b"a", b"b"):
        assert yard.take(b"w") == [name]
        yard.finish(b"w", name)
    assert yard.take(b"w") == [b"urgent"]


def test_deferred_task_is_retried_in_a_lane_that_is_never_empty() -> None:
    yard = a_yard(retry_delays_ns=(0,) * 9)
    fill(yard, b"first", b"second", b"third")
    assert yard.take(b"w") == [b"first"]
    yard.report(b"w", b"first", Outcome.FAILED)
    yard.later(0)
    order = []
    for number in range(8):
        fill(yard, b"new%d" % number)
        order += yard.take(b"w")
        yard.finish(b"w", order[-1])
    assert b"first" in order[:6]


def test_deferred_tasks_survive_a_restart_and_a_cancel() -> None:
    yard = a_yard()
    fill(yard, b"a", b"b", b"c")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.DEFER_BACK)
    restart(yard)
    yard.cancel(b"b")
    assert yard.take(b"w") == [b"c"]
    yard.cancel(b"a")
    assert yard.state(b"a") is CANCELLED


def test_task_that_is_put_back_alone_waits_for_an_interval() -> None:
    yard = a_yard(interval_ns=5 * SECOND_NS)
    fill(yard, b"a")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.DEFER_BACK)
    assert yard.records == [
        Postponed(0, b"w", [b"a"], [1], [5 * SECOND_NS], [b""], own_fault=False)
    ]
    assert (yard[b"a"].failures, yard[b"a"].losses) == (0, 0)
    yard.later(5)
    assert yard.take(b"w") == [b"a"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_tasks_that_are_always_deferred_do_not_keep_the_worker_busy(count: int) -> None:
    yard = a_yard(interval_ns=0)
    fill(yard, *names(count))
    attempts = 0
    for _ in range(20):
        for name in yard.take(b"w"):
            attempts += 1
            yard.report(b"w", name, Outcome.DEFER_BACK)
    assert attempts <= 2 * count
    yard.later(1)
    assert yard.take(b"w")


def test_rest_of_a_lane_deferred_after_a_failure_waits_for_an_interval() -> None:
    yard = a_yard(interval_ns=7 * SECOND_NS)
    fill(yard, b"a", b"b")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.DEFER_ALL)
    assert yard.states(b"a", b"b") == [FAILED, DELAYED]
    assert yard[b"b"].due_ns == 7 * SECOND_NS


@pytest.mark.no_cover
@given(
    is_random=st.booleans(),
    others=st.integers(1, 12),
    delay=st.sampled_from([0, 1]),
    outcome=st.sampled_from([Outcome.FAILED, Outcome.DEFER_BACK, Outcome.RETRY_AT]),
    priority=st.sampled_from([0, 9]),
    arrivals=st.booleans(),
)
def test_poison_task_does_not_hold_up_its_lane(  # noqa: PLR0913 - a case each
    *, is_random: bool, others: int, delay: int, outcome: Outcome, priority: int, arrivals: bool
) -> None:
    yard = a_yard(is_random=is_random, retry_delays_ns=(delay * SECOND_NS,) * 500)
    fill(yard, b"poison", priority=priority)
    fill(yard, *names(others))
    turns = 0
    while any(yard.state(name) is not DONE for name in names(others)):
        turns += 1
        assert turns <= 6 * others + 12
        for name in yard.take(b"w"):
            if name == b"poison":
                yard.report(b"w", name, outcome)
            else:
                yard.finish(b"w", name)
        if arrivals and turns % 2:
            fill(yard, b"new%d" % turns, priority=-1)
        yard.later(0)


# Late tasks.


def test_late_task_is_reported_once() -> None:
    yard = a_yard(report_after_ns=5 * SECOND_NS)
    fill(yard, b"a", b"b")
    yard.finish(b"w", *yard.take(b"w"))
    yard.later(4)
    assert yard.records == []
    yard.later(1)
    assert yard.records == [ReportedLate(5 * SECOND_NS, [b"b"])]
    for _ in range(2):
        restart(yard)
        for seconds in (0, 100):
            yard.later(seconds)
            assert yard.records == []


def test_late_report_is_not_repeated_after_a_recovery() -> None:
    yard = a_yard(report_after_ns=5 * SECOND_NS)
    fill(yard, b"a")
    yard.later(5)
    recovered = Scheduler(yard.mirror)
    recovered.handle(TimePassed(6 * SECOND_NS))
    assert recovered.take_records() == []


def test_lateness_is_not_forgotten_by_a_restart() -> None:
    yard = a_yard(report_after_ns=5 * SECOND_NS)
    fill(yard, b"a")
    yard.take(b"w")
    restart(yard)
    yard.later(6)
    assert yard.records == [ReportedLate(6 * SECOND_NS, [b"a"])]


# Looking.


def lanes(yard: Yard, **asked: object) -> LaneList:
    (reply,) = yard.handle(LanesRequested(0, b"client", 7, **asked))  # type: ignore[arg-type]
    assert isinstance(reply, LaneList)
    assert (reply.client, reply.request) == (b"client", 7)
    return reply


def test_lane_is_shown_with_all_there_is_to_see() -> None:
    yard = a_yard(retry_delays_ns=(10 * SECOND_NS,), lane_workers_max=2)
    yard.clock(100 * SECOND_NS)
    fill(yard, b"out", b"failed", b"delayed", b"ready")
    yard.submit(b"blocked", after=[[b"out"]], lanes=[b"x"])
    yard.take(b"w")
    yard.later(1)
    for outcome, name in ((Outcome.FAILED_FINAL, b"failed"), (Outcome.FAILED, b"delayed")):
        assert yard.take(b"w") == [name]
        yard.report(b"w", name, outcome)
    (view,) = lanes(yard).lanes
    assert view == LaneView(
        service=b"default",
        lane=b"x",
        rule=b"rule",
        tasks=5,
        ready=1,
        blocked=1,
        delayed=1,
        leased=1,
        workers=1,
        limit=2,
        rule_limit=0,
        rate_interval_ns=0,
        weight=1,
        oldest_ns=100 * SECOND_NS,
        attempts=1,
        next_due_ns=111 * SECOND_NS,
        reason=Reason.WORKERS_BUSY,
        sentence="it is ready, but no worker of service default with a free slot requests tasks",
    )


def test_open_lane_is_shown_while_it_has_tasks_and_has_no_limit() -> None:
    yard = Yard()
    yard.submit(b"a")
    (view,) = lanes(yard).lanes
    assert (view.lane, view.rule, view.limit) == (b"", b"", 0)
    yard.cancel(b"a")
    assert lanes(yard).lanes == []


def three_services(yard: Yard) -> None:
    for service in (b"c", b"a", b"b"):
        own = names(5, service)
        yard.submit(*own, lanes=own[::-1], service=service)


def test_pages_of_lanes_go_by_service_and_name_and_miss_nothing() -> None:
    yard = Yard()
    three_services(yard)
    seen: list[tuple[bytes, bytes]] = []
    more = True
    while more:
        page = lanes(yard, count=4, after=seen[-1] if seen else None)
        seen += [(view.service, view.lane) for view in page.lanes]
        more = page.more
    assert seen == sorted(seen)
    assert len(seen) == 15


def test_page_that_ends_with_the_last_lane_has_no_more() -> None:
    yard = Yard()
    three_services(yard)
    assert not lanes(yard, count=15).more
    assert lanes(yard, count=14).more
    last = (b"c", b"c04")
    assert lanes(yard, after=last).lanes == []


def test_lanes_are_asked_for_by_service_and_pattern() -> None:
    yard = Yard()
    three_services(yard)
    assert [view.lane for view in lanes(yard, service=b"b", lane=b"*0[12]").lanes] == [
        b"b01",
        b"b02",
    ]
    assert [view.lane for view in lanes(yard, lane=b"?03").lanes] == [b"a03", b"b03", b"c03"]
    assert lanes(yard, service=b"nobody").lanes == []


def test_page_of_lanes_is_bounded_whatever_is_asked_for() -> None:
    scheduler = Scheduler()
    some = names(LIST_LANES_MAX + 5)
    scheduler.handle(SubmitRequested(0, b"c", Submission(some, lanes=some)))
    for count, expected in ((10**9, LIST_LANES_MAX), (0, 1), (-5, 1)):
        (reply,) = scheduler.handle(LanesRequested(0, b"c", count=count))
        assert isinstance(reply, LaneList)
        assert (len(reply.lanes), reply.more) == (expected, True)


def test_looking_at_a_long_lane_looks_at_few_of_its_tasks() -> None:
    yard = Yard()
    fill(yard, *names(300))
    for name, seen in ((b"99", 5), (b"250", 0)):  # the second is too far behind
        yard[name].attempt = 5
        yard[name].change_extras(losses_excused=5)
        (reply,) = yard.scheduler.handle(LanesRequested(0, b"client"))
        assert isinstance(reply, LaneList)
        assert (reply.lanes[0].ready, reply.lanes[0].attempts) == (300, seen)
        yard[name].attempt = 0
        yard[name].change_extras(losses_excused=0)


# Moving and expiring.


def move(
    yard: Yard, scope: Scope, service: bytes | None = None, lane: bytes | None = None
) -> list[Effect]:
    return yard.handle(MoveRequested(0, b"client", scope, service, lane))


def test_tasks_move_to_another_lane_and_go_to_its_end() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", lanes=[b"x", b"x", b"y"])
    assert move(yard, Scope(service=b"default", lane=b"x"), lane=b"y") == [
        CommandAck(b"client", 0, 2)
    ]
    assert yard.records == [Moved(0, [b"a", b"b"], None, b"y")]
    assert list(yard.scheduler.ledger.services[b"default"].lanes) == [b"y"]
    yard.rules(overfeed=9)
    yard.join(b"w")
    assert yard.take(b"w", 9) == [b"c", b"a", b"b"]


def test_tasks_move_to_another_service_in_whatever_state_they_wait() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"out", b"ready", b"failed", lanes=[b"x", b"y", b"z"])
    yard.submit(b"blocked", after=[[b"ready"]])
    yard.submit(b"delayed", due_ns=10 * SECOND_NS)
    yard.take(b"w", 3)
    yard.report(b"w", b"failed", Outcome.FAILED_FINAL)
    yard.report(b"w", b"ready", Outcome.REFUSED)
    everything = Scope(service=b"default")
    assert move(yard, everything, service=b"other") == [CommandAck(b"client", 0, 4)]
    assert yard[b"out"].terms.service == b"default"
    assert yard[b"delayed"].terms.service == b"other"
    yard.join(b"v", services=(b"other",), slots_total=0)
    assert yard.take(b"v", 9) == [b"ready"]
    yard.finish(b"v", b"ready")
    assert yard.take(b"v", 9) == [b"blocked"]
    yard.later(10)
    assert yard.take(b"v", 9) == [b"delayed"]
    yard.retry(b"failed")
    assert yard.take(b"v", 9) == [b"failed"]


def test_moved_task_wakes_a_worker_of_its_new_service() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"other",))
    yard.ask(b"w", parks=True)
    yard.submit(b"a")
    assert assigned(move(yard, Scope(names=(b"a",)), service=b"other")) == [b"a"]


def test_task_that_is_there_already_or_has_ended_is_not_moved() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", lanes=[b"x", b"x"])
    yard.cancel(b"b")
    assert move(yard, Scope(), lane=b"x") == [CommandAck(b"client", 0, 0)]
    assert yard.records == []


@pytest.mark.parametrize(
    ("service", "lane", "text"),
    [
        (None, None, "no target"),
        (b"", b"x", "is empty"),
        (b"x" * 2000, None, "at most 1024 bytes"),
    ],
)
def test_move_to_nowhere_is_refused(service: bytes | None, lane: bytes | None, text: str) -> None:
    yard = Yard()
    yard.submit(b"a")
    (refused,) = move(yard, Scope(), service, lane)
    assert isinstance(refused, Refused)
    assert text in refused.text
    assert yard.records == []


def test_waiting_tasks_expire_on_request_and_leased_ones_stay() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"out", b"ready", lanes=[b"x", b"x"])
    yard.submit(b"delayed", lanes=[b"x"], due_ns=10 * SECOND_NS)
    yard.submit(b"other", lanes=[b"y"])
    yard.take(b"w")
    yard.watch(b"ready")
    scope = Scope(service=b"default", lane=b"x")
    replies = yard.handle(ExpireRequested(0, b"client", scope))
    assert replies[-1] == CommandAck(b"client", 0, 2)
    assert yard.records == [TaskExpired(0, [b"ready", b"delayed"], b"expired on request")]
    assert len(replies) == 2  # the subscriber is notified
    assert yard.states(b"out", b"ready", b"delayed", b"other") == [LEASED, FAILED, FAILED, READY]
    yard.retry(b"ready")
    assert yard.state(b"ready") is READY


def test_paused_lane_stays_paused_when_all_its_tasks_have_moved() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", lanes=[b"x"])
    yard.handle(PauseRequested(0, b"client", b"default", b"x"))
    move(yard, Scope(names=(b"a",)), lane=b"y")
    assert yard.take(b"w") == [b"a"]
    assert b"x" in yard.scheduler.ledger.services[b"default"].lanes


# Fairness.


def drained_small(
    scheduler: Scheduler, big: int, small: dict[bytes, int], workers: int, batch: int
) -> int:
    """How many tasks of a big lane were done when those of all small lanes were."""
    rest = [b"big%d" % number for number in range(big)]
    scheduler.handle(SubmitRequested(0, b"c", Submission(rest, lanes=[b"big"] * big)))
    for lane, count in small.items():
        own = [b"%s-%d" % (lane, number) for number in range(count)]
        scheduler.handle(SubmitRequested(0, b"c", Submission(own, lanes=[lane] * count)))
    left, done = sum(small.values()), 0
    facts = WorkerFacts(slots_total=batch)
    for worker in range(workers):
        scheduler.handle(WorkerRegistered(0, b"w%d" % worker, facts))
    while left:
        taken = []
        for worker in range(workers):
            effects = scheduler.handle(TasksRequested(0, b"w%d" % worker, batch, parks=False))
            taken.append((b"w%d" % worker, assigned(effects)))
        assert any(some for _, some in taken)
        for worker_name, some in taken:
            of_big = sum(name.startswith(b"big") for name in some)
            done, left = done + of_big, left - (len(some) - of_big)
            scheduler.handle(TasksReported(0, worker_name, some))
    return done


@pytest.mark.no_cover
@settings(max_examples=25)
@given(
    small=st.lists(st.integers(1, 10), min_size=1, max_size=60),
    workers=st.integers(1, 5),
    batch=st.sampled_from([1, 1, 3]),
    rules=st.sampled_from(
        [
            RulesSet(0),
            RulesSet(0, defaults=LaneOptions(is_random=True)),
            RulesSet(0, (Rule(b"big", b"*/big", LaneOptions(overfeed=3)),)),
            RulesSet(0, defaults=LaneOptions(workers_max=2)),
        ]
    ),
)
def test_big_lane_has_barely_begun_when_the_small_ones_are_done(
    small: list[int], workers: int, batch: int, rules: RulesSet
) -> None:
    scheduler = Scheduler()
    scheduler.handle(rules)
    lanes_of = {b"s%d" % number: count for number, count in enumerate(small)}
    done = drained_small(scheduler, 2000, lanes_of, workers, batch)
    # The big lane gets as many turns as a small one, of four tasks at most. A worker may stay with
    # its lane for a hundred tasks.
    assert done <= 4 * (max(small) + 1) + 100 * workers


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [200, pytest.param(1000, marks=pytest.mark.whole)])
def test_lane_of_many_beside_many_of_ten(lanes: int) -> None:
    small = {b"s%d" % number: 10 for number in range(lanes)}
    assert drained_small(Scheduler(), 20 * lanes, small, workers=4, batch=1) < 500
