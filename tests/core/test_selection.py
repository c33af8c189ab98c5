"""Choice of tasks and workers: priorities, rotation, limits in order, slots, use."""

from typing import Any

import pytest

from taskyard.core import holds, selection
from taskyard.core.effects import Accepted, CommandAck, Effect, NoWork, Wake
from taskyard.core.events import (
    DrainRequested,
    Outcome,
    PauseRequested,
    ResumeRequested,
    RulesSet,
    WorkerRegistered,
    WorkerUnreachable,
)
from taskyard.core.holds import HoldReason
from taskyard.core.limits import (
    LANE_RUN_TASKS_MAX,
    RATE_BURST_NS_MAX,
    SECOND_NS,
    WIDE_LOOKAHEAD,
)
from taskyard.core.model import WorkerFacts
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState, WorkerState
from tests.core.kit import Yard, assigned

READY, LEASED = TaskState.READY, TaskState.LEASED


def hold(yard: Yard, name: bytes) -> HoldReason | None:
    return holds.limit_reason(yard.scheduler.ledger, yard[name].lane, yard.now_ns)


def drain(yard: Yard, worker: bytes) -> list[bytes]:
    """Return the tasks that one worker finishes, one by one, until there are none."""
    order: list[bytes] = []
    while names := yard.take(worker):
        order += names
        yard.finish(worker, *names)
    return order


# Tasks and lanes.


def test_higher_priority_goes_first_and_then_first_come_first_served() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b")
    yard.submit(b"urgent", priority=9)
    yard.submit(b"idle", priority=-1)
    yard.submit(b"c")
    assert drain(yard, b"w") == [b"urgent", b"a", b"b", b"c", b"idle"]


def test_lanes_take_turns_so_that_none_starves_another() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    for lane in (b"x", b"y", b"z"):
        yard.submit(*[lane + b"%d" % n for n in range(2)], lanes=[lane, lane])
    for worker in (b"1", b"2", b"3"):
        yard.join(worker)
    assert [yard.take(worker) for worker in (b"1", b"2", b"3")] == [[b"x0"], [b"y0"], [b"z0"]]


def test_worker_stays_with_its_lane_and_takes_the_next_when_it_is_empty() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"x0", b"y0", b"x1", b"y1", lanes=[b"x", b"y", b"x", b"y"])
    assert drain(yard, b"w") == [b"x0", b"x1", b"y0", b"y1"]


@pytest.mark.no_cover
def test_worker_lets_other_lanes_have_their_turn_after_a_long_run() -> None:
    yard = Yard()
    yard.join(b"w")
    count = LANE_RUN_TASKS_MAX + 3
    yard.submit(*[b"x%d" % n for n in range(count)], lanes=[b"x"] * count)
    yard.submit(b"y", lanes=[b"y"])
    order = drain(yard, b"w")
    assert order.index(b"y") == LANE_RUN_TASKS_MAX
    assert len(order) == count + 1


def test_worker_does_not_go_on_with_a_lane_that_is_not_for_it_any_more() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"x0", b"x1", b"y", lanes=[b"x", b"x", b"y"])
    yard.take(b"w")
    yard.finish(b"w", b"x0")
    yard.handle(PauseRequested(0, b"c", b"default", b"x"))
    assert yard.take(b"w") == [b"y"]
    yard.finish(b"w", b"y")
    yard.submit(b"other", service=b"other")
    yard.handle(ResumeRequested(0, b"c", b"default", b"x"))
    yard.join(b"w", services=(b"other",))
    assert yard.take(b"w") == [b"other"]


def test_serial_lane_leases_one_task_even_to_a_worker_with_many_slots() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=9)
    yard.submit(b"x0", b"x1", b"y0", b"open", lanes=[b"x", b"x", b"y", b""])
    assert yard.take(b"w", 9) == [b"x0", b"y0", b"open"]
    assert yard.take(b"w", 9) == []
    yard.finish(b"w", b"x0")
    assert yard.take(b"w", 9) == [b"x1"]


def test_overfeed_hands_over_more_of_a_lane_to_the_same_worker() -> None:
    yard = Yard()
    yard.rules(overfeed=2)
    yard.join(b"w")
    yard.join(b"v")
    yard.submit(*[b"%d" % n for n in range(9)], lanes=[b"x"] * 9)
    assert yard.take(b"w", 9) == [b"0", b"1", b"2"]
    assert yard.take(b"w", 9) == []
    yard.finish(b"w", b"0")
    assert yard.take(b"v", 9) == []
    assert yard.take(b"w", 9) == [b"3"]


def test_worker_with_a_slot_less_fills_the_others_from_overfed_lanes() -> None:
    yard = Yard()
    yard.rules(overfeed=2)
    facts = WorkerFacts(slots_total=3, always_ready=True)
    yard.handle(WorkerRegistered(0, b"w", facts, -1))
    assert assigned(yard.submit(b"a", b"b", b"c", lanes=[b"1", b"2", b"3"])) == [b"a", b"b"]


def test_lane_may_be_served_by_more_workers_if_its_rule_allows() -> None:
    yard = Yard()
    yard.rules(lane_workers_max=2)
    yard.submit(b"0", b"1", b"2", lanes=[b"x"] * 3)
    for worker in (b"u", b"v", b"w"):
        yard.join(worker)
    assert [yard.take(worker) for worker in (b"u", b"v", b"w")] == [[b"0"], [b"1"], []]


def test_open_lane_is_served_by_any_number_of_workers() -> None:
    yard = Yard()
    yard.submit(b"0", b"1", b"2")
    for worker in (b"u", b"v", b"w"):
        yard.join(worker)
        assert len(yard.take(worker)) == 1


def test_services_of_a_worker_take_turns() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"x", b"y"), slots_total=1)
    yard.submit(b"x0", b"x1", service=b"x")
    yard.submit(b"y0", b"y1", service=b"y")
    assert drain(yard, b"w") == [b"x0", b"y0", b"x1", b"y1"]


def test_worker_gets_only_tasks_of_its_services() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"x", b"unheard-of"), slots_total=9)
    yard.submit(b"a")
    yard.submit(b"b", service=b"x")
    assert yard.take(b"w", 9) == [b"b"]


def test_one_request_is_filled_from_several_lanes_and_services() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"x", b"y"), slots_total=9)
    yard.submit(b"x0", b"x1", b"x2", service=b"x", lanes=[b"1", b"2", b""])
    yard.submit(b"y0", service=b"y")
    assert yard.take(b"w", 9) == [b"x0", b"x1", b"x2", b"y0"]


# Limits, in their order.


def test_first_limit_that_refuses_is_the_reason() -> None:
    yard = Yard()
    rules = LaneOptions(workers_max=1, rate_interval_ns=10 * SECOND_NS)
    yard.handle(RulesSet(0, defaults=rules, workers_max=1))
    yard.submit(b"a", b"b", lanes=[b"x", b"x"])
    yard.join(b"v")
    yard.take(b"v")
    assert hold(yard, b"b") is HoldReason.LIMIT_BROKER
    yard.handle(RulesSet(0, defaults=rules))
    assert hold(yard, b"b") is HoldReason.LIMIT_SERVICE
    yard.handle(RulesSet(0, defaults=LaneOptions(rate_interval_ns=10 * SECOND_NS)))
    assert hold(yard, b"b") is HoldReason.LIMIT_LANE
    yard.handle(
        RulesSet(0, defaults=LaneOptions(rate_interval_ns=10 * SECOND_NS, lane_workers_max=2))
    )
    assert hold(yard, b"b") is HoldReason.RATE
    yard.later(10)
    assert hold(yard, b"b") is None


def test_overfed_lane_refuses_other_workers_though_it_is_not_full() -> None:
    yard = Yard()
    yard.rules(overfeed=3)
    yard.submit(b"a", b"b", lanes=[b"x", b"x"])
    yard.join(b"v")
    yard.take(b"v")
    assert hold(yard, b"b") is HoldReason.LIMIT_LANE


def test_lane_that_one_worker_has_filled_refuses_others() -> None:
    yard = Yard()
    yard.rules(lane_workers_max=2)
    yard.submit(b"a", b"b", b"c", lanes=[b"x"] * 3)
    yard.join(b"v")
    assert yard.take(b"v", 2) == [b"a", b"b"]
    assert hold(yard, b"c") is HoldReason.LIMIT_LANE
    yard.join(b"w")
    assert yard.take(b"w") == []


@pytest.mark.parametrize("limit", ["broker", "service"])
def test_limit_of_workers_at_once_holds_and_lets_go(limit: str) -> None:
    yard = Yard()
    yard.rules(workers_max=1) if limit == "broker" else yard.handle(
        RulesSet(0, defaults=LaneOptions(workers_max=1))
    )
    yard.submit(b"x", b"y", lanes=[b"x", b"y"])
    yard.join(b"v")
    yard.join(b"w")
    assert yard.take(b"v", 2) == [b"x"]
    assert assigned(yard.ask(b"w", parks=True)) == []
    assert assigned(yard.finish(b"v", b"x")) == [b"y"]


@pytest.mark.parametrize("workers_max", [1, 2])
def test_limit_that_is_set_later_counts_workers_that_serve_already(workers_max: int) -> None:
    yard = Yard()
    yard.submit(b"x", b"y", lanes=[b"x", b"y"])
    for worker in (b"v", b"w"):
        yard.join(worker)
    yard.take(b"v")
    yard.rules(workers_max=workers_max)
    assert len(yard.take(b"w")) == workers_max - 1


def test_broker_limit_lets_go_in_every_service() -> None:
    yard = Yard()
    yard.rules(workers_max=1)
    for service in (b"x", b"y"):
        yard.submit(service, service=service)
        yard.join(b"w" + service, services=(service,))
    yard.take(b"wx")
    assert assigned(yard.ask(b"wy", parks=True)) == []
    assert assigned(yard.finish(b"wx", b"x")) == [b"y"]


def test_limit_of_one_service_does_not_count_what_another_begins() -> None:
    yard = Yard()
    yard.handle(RulesSet(0, (Rule(b"y", b"y/*", LaneOptions(workers_max=1)),)))
    yard.submit(b"x", service=b"x")
    yard.submit(b"y", service=b"y")
    yard.join(b"w", services=(b"x", b"y"), slots_total=2)
    assert yard.take(b"w", 2) == [b"x", b"y"]


def test_worker_within_the_limit_may_take_more_of_the_lane_that_it_serves() -> None:
    yard = Yard()
    yard.rules(workers_max=1)
    yard.submit(b"a", b"b", b"c")
    yard.join(b"w")
    assert yard.take(b"w") == [b"a"]
    assert yard.take(b"w") == [b"b"]


def test_rate_is_kept_on_average_and_unused_rate_is_saved_for_a_moment() -> None:
    yard = Yard()
    yard.later(100)
    yard.rules(rate_interval_ns=SECOND_NS // 100)
    yard.join(b"w")
    yard.submit(*[b"%d" % n for n in range(100)])
    assert len(yard.take(b"w", 99)) == 11
    assert yard.take(b"w", 99) == []
    yard.later(0.05)
    assert len(yard.take(b"w", 99)) == 5


def test_rate_that_opens_is_noticed_with_whatever_event_comes_first() -> None:
    yard = Yard()
    yard.rules(rate_interval_ns=SECOND_NS)
    yard.join(b"w", slots_total=9, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a", b"b")
    assert yard.take(b"w") == [b"a"]
    yard.ask(b"w", parks=True)
    yard.now_ns += 2 * SECOND_NS
    assert assigned(yard.heartbeat(b"w", (b"a", 1))) == [b"b"]


@pytest.mark.parametrize("limit", ["broker", "section"])
def test_rate_that_opens_behind_another_limit_is_used_when_that_lets_go(limit: str) -> None:
    yard = Yard()
    limits = {"broker": (1, 0), "section": (0, 1)}[limit]
    rules = LaneOptions(workers_max=limits[1], rate_interval_ns=3 * SECOND_NS)
    yard.handle(RulesSet(0, defaults=rules, workers_max=limits[0]))
    for worker in (b"v", b"w"):
        yard.join(worker)
        yard.ask(worker, parks=True)
    assert assigned(yard.submit(b"a", b"b", b"c")) == [b"a"]
    assert yard.later(4) == []  # the rate has room, the limit has none
    assert assigned(yard.finish(b"v", b"a")) == [b"b"]
    yard.later(1)
    yard.ask(b"v", parks=True)
    assert assigned(yard.finish(b"w", b"b")) == []  # the limit has room, the rate has none
    assert yard.scheduler.wake_at_ns() == 7 * SECOND_NS - RATE_BURST_NS_MAX
    assert assigned(yard.later(2)) == [b"c"]


def test_rate_of_one_service_is_not_spent_by_another() -> None:
    yard = Yard()
    yard.handle(RulesSet(0, (Rule(b"x", b"x/*", LaneOptions(rate_interval_ns=SECOND_NS)),)))
    yard.submit(b"x0", b"x1", service=b"x")
    yard.submit(b"y0", b"y1", service=b"y")
    yard.join(b"w", services=(b"y", b"x"), slots_total=9)
    assert yard.take(b"w", 9) == [b"y0", b"y1", b"x0"]
    assert yard.take(b"w", 9) == []


def test_faster_rate_takes_effect_at_once() -> None:
    yard = Yard()
    yard.rules(rate_interval_ns=3600 * SECOND_NS)
    yard.submit(b"a", b"b")
    yard.join(b"w")
    assert yard.take(b"w", 9) == [b"a"]
    yard.rules(rate_interval_ns=SECOND_NS)
    yard.later(1)
    assert yard.take(b"w", 9) == [b"b"]


def test_paused_work_is_not_leased_and_resumed_work_goes_to_parked_workers() -> None:
    scopes: list[dict[str, Any]] = [
        {},
        {"service": b"default"},
        {"service": b"default", "lane": b"x"},
    ]
    for scope in scopes:
        yard = Yard()
        yard.join(b"w")
        yard.submit(b"a", lanes=[b"x"])
        yard.handle(PauseRequested(0, b"c", **scope))
        assert assigned(yard.ask(b"w", parks=True)) == []
        assert assigned(yard.submit(b"b", lanes=[b"x"])) == []
        effects = yard.handle(ResumeRequested(0, b"c", **scope))
        assert assigned(effects) == [b"a"]
        assert effects[0] == CommandAck(b"c", 0, 1)


# Slots.


def test_worker_gets_no_more_than_it_has_slots_for() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2)
    yard.submit(b"a", b"b", b"c")
    assert yard.take(b"w", 9) == [b"a", b"b"]
    assert yard.take(b"w", 9) == []
    yard.finish(b"w", b"a")
    assert yard.take(b"w", 9) == [b"c"]


def test_one_request_gets_no_more_than_a_message_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (selection, selection):
        monkeypatch.setattr(module, "LEASE_TASKS_MAX", 2)
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", b"c")
    assert yard.take(b"w", 10**9) == [b"a", b"b"]
    assert yard.take(b"w", 10**9) == [b"c"]


def test_task_that_fits_is_assigned_though_its_lane_waits_with_a_wide_one() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, always_ready=True)
    assert assigned(yard.submit(b"a", b"b", lanes=[b"1", b"2"], slots=2)) == []
    assert assigned(yard.submit(b"c", b"d", lanes=[b"1", b"2"])) == [b"c"]


def test_wide_task_takes_more_room() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=4)
    yard.submit(b"a", b"b", slots=2)
    yard.submit(b"c")
    assert yard.take(b"w", 9) == [b"a", b"b"]
    yard.finish(b"w", b"a")
    assert yard.take(b"w", 9) == [b"c"]


def test_task_behind_one_that_is_too_wide_is_found_however_far_it_is() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    yard.submit(*[b"%d" % n for n in range(9 * WIDE_LOOKAHEAD)], slots=2)
    yard.submit(b"a")
    assert yard.take(b"w") == [b"a"]
    yard.finish(b"w", b"a")
    assert yard.take(b"w") == []
    yard.submit(b"b")
    assert yard.take(b"w") == [b"b"]


def test_task_wider_than_the_worker_is_left_to_others() -> None:
    yard = Yard()
    yard.join(b"small", slots_total=2)
    yard.join(b"large", slots_total=8, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"wide", slots=5)
    yard.submit(b"a", b"b", b"c")
    assert yard.take(b"small", 9) == [b"a", b"b"]
    assert yard.take(b"large", 9) == [b"wide", b"c"]


@pytest.mark.parametrize("services", [(b"wide", b"slim"), (b"slim", b"wide")])
def test_room_is_counted_over_all_services(services: tuple[bytes, bytes]) -> None:
    yard = Yard()
    yard.submit(b"a", service=b"wide", slots=3)
    yard.submit(b"b", b"c", b"d", service=b"slim")
    yard.join(b"w", services=services, slots_total=4)
    yard.take(b"w", 9)
    worker = yard.scheduler.ledger.workers[b"w"]
    assert worker.slots_used <= 4


def test_worker_that_lowers_its_slots_gets_nothing_until_it_has_room() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2)
    yard.submit(b"a", b"b", b"c")
    yard.take(b"w", 2)
    yard.join(b"w", slots_total=1)
    assert yard.take(b"w") == []
    yard.finish(b"w", b"a")
    assert yard.take(b"w") == []
    yard.finish(b"w", b"b")
    assert yard.take(b"w") == [b"c"]


# Workers.


def test_least_recently_used_worker_is_first() -> None:
    yard = Yard()
    for worker in (b"1", b"2", b"3"):
        yard.join(worker, slots_total=2, always_ready=True)
    order = []
    for number in range(5):
        effects = yard.submit(b"%d" % number)
        order += [effect.worker for effect in effects if not isinstance(effect, Accepted)]  # type: ignore[attr-defined]
    assert order == [b"1", b"2", b"3", b"1", b"2"]


def test_full_worker_is_passed_over_and_gets_work_when_a_slot_is_free() -> None:
    yard = Yard()
    yard.join(b"1", slots_total=1, always_ready=True)
    yard.join(b"2", slots_total=2, always_ready=True)
    for number in range(5):
        yard.submit(b"%d" % number)
    assert yard.states(b"0", b"1", b"2", b"3", b"4") == [LEASED, LEASED, LEASED, READY, READY]
    assert assigned(yard.finish(b"1", b"0")) == [b"3"]
    assert assigned(yard.finish(b"2", b"1", b"2")) == [b"4"]


def test_parked_worker_gets_as_much_as_it_asked_for_and_then_asks_again() -> None:
    yard = Yard()
    yard.join(b"w")
    assert yard.ask(b"w", 2, parks=True) == []
    assert assigned(yard.submit(b"a", b"b", b"c")) == [b"a", b"b"]
    assert assigned(yard.submit(b"d")) == []


def test_worker_that_left_is_handed_nothing() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.ask(b"w", parks=True)
    yard.leave(b"w")
    assert yard.submit(b"a") == [Accepted(b"client", 0, new=1)]


def test_worker_that_came_back_as_another_process_has_to_ask_again() -> None:
    yard = Yard()
    yard.join(b"w", incarnation=1)
    yard.ask(b"w", parks=True)
    yard.join(b"w", incarnation=2)
    assert yard.submit(b"a") == [Accepted(b"client", 0, new=1)]


def test_worker_that_was_cut_off_is_no_longer_parked() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.ask(b"w", parks=True)
    assert yard.handle(WorkerUnreachable(0, b"w")) == []
    assert yard.submit(b"a") == [Accepted(b"client", 0, new=1)]
    assert assigned(yard.ask(b"w", parks=True)) == [b"a"]


def test_message_that_did_not_reach_a_former_process_leaves_its_successor_parked() -> None:
    yard = Yard()
    yard.join(b"w", incarnation=1)
    yard.join(b"w", incarnation=2)
    yard.ask(b"w", parks=True)
    assert yard.handle(WorkerUnreachable(0, b"w", incarnation=1)) == []
    assert assigned(yard.submit(b"a")) == [b"a"]


def test_unreachable_unknown_worker_changes_nothing() -> None:
    assert Yard().handle(WorkerUnreachable(0, b"nobody")) == []


def test_parked_worker_that_changes_its_services_waits_for_the_new_ones() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"x",))
    yard.ask(b"w", parks=True)
    yard.join(b"w", services=(b"y",))
    assert assigned(yard.submit(b"x", service=b"x")) == []
    assert assigned(yard.submit(b"y", service=b"y")) == [b"y"]


def test_service_that_a_worker_names_twice_counts_once() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"x", b"x"), slots_total=0)
    yard.submit(b"a", service=b"x")
    assert yard.take(b"w", 9) == [b"a"]


@pytest.mark.slow
def test_lists_of_waiting_workers_do_not_grow_with_the_work_done() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"busy", b"idle"), slots_total=1, always_ready=True)
    for number in range(150):
        yard.submit(b"%d" % number, service=b"busy")
        yard.finish(b"w", b"%d" % number)
    assert len(yard.scheduler.ledger.services[b"idle"].parked) < 100


@pytest.mark.parametrize("always_ready", [True, False])
def test_every_way_to_free_a_slot_brings_the_next_task(*, always_ready: bool) -> None:
    def full() -> Yard:
        yard = Yard()
        yard.join(b"w", slots_total=1, always_ready=always_ready)
        yard.submit(b"a", b"b")
        if not always_ready:
            yard.ask(b"w")
            yard.ask(b"w", parks=True)
        return yard

    def freed(effects: list[Effect]) -> list[bytes]:
        return assigned(effects)

    assert freed(full().finish(b"w", b"a")) == [b"b"]
    assert freed(full().report(b"w", b"a", Outcome.FAILED)) == [b"b"]
    assert freed(full().cancel(b"a")) == [b"b"]
    yard = full()
    yard.later(10)
    assert freed(yard.heartbeat(b"w", heartbeat_ns=SECOND_NS)) == [b"a"]
    yard = full()
    assert freed(yard.join(b"w", slots_total=2, always_ready=always_ready)) == [b"b"]


# Workers that are called.


def test_woken_worker_requests_its_tasks() -> None:
    yard = Yard()
    yard.join(b"w", wants_wake=True)
    assert yard.ask(b"w", parks=True) == []
    effects = yard.submit(b"a")
    assert effects == [Accepted(b"client", 0, new=1), Wake(b"w", b"default")]
    assert yard.scheduler.ledger.workers[b"w"].state is WorkerState.WOKEN
    assert yard.take(b"w") == [b"a"]


def test_waiting_worker_that_wants_more_is_woken_at_once() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2, wants_wake=True)
    yard.ask(b"w", 0, parks=True)
    assert yard.submit(b"a") == [Accepted(b"client", 0, 1, 0)]
    assert yard.ask(b"w", 2, parks=True) == [Wake(b"w", b"default")]


def test_no_more_workers_are_woken_than_there_are_ready_tasks() -> None:
    yard = Yard()
    for worker in (b"1", b"2", b"3"):
        yard.join(worker, wants_wake=True)
        yard.ask(worker, parks=True)
    assert yard.submit(b"a", b"b")[1:] == [Wake(b"1", b"default"), Wake(b"2", b"default")]
    assert yard.submit(b"c")[1:] == [Wake(b"3", b"default")]


def test_woken_worker_that_does_not_ask_is_passed_over() -> None:
    yard = Yard()
    for worker in (b"1", b"2"):
        yard.join(worker, wants_wake=True)
        yard.ask(worker, parks=True)
    assert yard.submit(b"a")[1:] == [Wake(b"1", b"default")]
    assert yard.later(0.5) == []
    assert yard.later(0.5) == [Wake(b"2", b"default")]
    assert yard.take(b"2") == [b"a"]


def test_woken_worker_that_asks_in_time_is_not_passed_over() -> None:
    yard = Yard()
    yard.join(b"w", wants_wake=True)
    yard.ask(b"w", parks=True)
    yard.submit(b"a")
    yard.later(0.5)
    yard.take(b"w")
    yard.ask(b"w", parks=True)
    assert yard.later(0.6) == []
    yard.submit(b"b")
    yard.leave(b"w")
    assert yard.later(5) == []


def test_later_wake_has_its_full_time_after_an_earlier_one_ends() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=0, wants_wake=True)
    yard.ask(b"w", parks=True)
    yard.submit(b"a")
    yard.take(b"w")
    yard.later(0.5)
    yard.ask(b"w", parks=True)
    yard.submit(b"b")
    assert yard.later(0.5) == []
    assert yard.scheduler.ledger.workers[b"w"].state is WorkerState.WOKEN
    assert yard.later(0.5) == [Wake(b"w", b"default")]


def test_worker_that_is_woken_twice_within_a_second_counts_once() -> None:
    yard = Yard()
    for worker in (b"1", b"2"):
        yard.join(worker, slots_total=0, wants_wake=True)
        yard.ask(worker, parks=True)
    yard.submit(b"a", b"b")
    for worker in (b"1", b"2"):
        yard.take(worker)
    yard.later(0.1)
    for worker in (b"1", b"2"):
        yard.ask(worker, parks=True)
    assert yard.submit(b"c")[1:] == [Wake(b"1", b"default")]
    assert yard.submit(b"d")[1:] == [Wake(b"2", b"default")]


def test_worker_is_not_woken_for_work_that_a_limit_refuses() -> None:
    yard = Yard()
    yard.handle(RulesSet(0, defaults=LaneOptions(workers_max=1)))
    yard.submit(b"a", b"b")
    yard.join(b"w")
    yard.take(b"w")
    yard.join(b"c", wants_wake=True)
    assert [yard.ask(b"c", parks=True) for _ in range(3)] == [[], [], []]
    assert yard.finish(b"w", b"a")[1:] == [Wake(b"c", b"default")]


def test_woken_worker_that_can_not_take_the_task_does_not_keep_it_from_others() -> None:
    yard = Yard()
    yard.join(b"1", slots_total=1, wants_wake=True)
    yard.join(b"2", slots_total=2)
    for worker in (b"1", b"2"):
        yard.ask(worker, parks=True)
    assert assigned(yard.submit(b"wide", slots=2)) == [b"wide"]


def test_worker_that_gets_no_work_keeps_waiting() -> None:
    yard = Yard()
    yard.join(b"w", wants_wake=True)
    yard.ask(b"w", parks=True)
    assert yard.ask(b"w") == [NoWork(b"w", settled=True)]
    assert yard.submit(b"a")[1:] == [Wake(b"w", b"default")]


def test_drained_worker_is_not_woken_and_gets_nothing() -> None:
    yard = Yard()
    yard.join(b"w", wants_wake=True)
    yard.ask(b"w", parks=True)
    yard.handle(DrainRequested(0, b"c", b"w"))
    assert yard.submit(b"a") == [Accepted(b"client", 0, new=1)]


def test_lane_counts_tasks_by_worker_while_several_serve_it() -> None:
    yard = Yard()
    yard.rules(lane_workers_max=3)
    yard.submit(*(b"t%d" % number for number in range(4)), lanes=[b"x"] * 4)
    for worker in (b"u", b"v", b"w"):
        yard.join(worker)
    lane = yard[b"t0"].lane
    yard.take(b"u")
    assert (lane.workers, lane.leased_by_worker) == (1, None)
    yard.take(b"v")
    yard.take(b"w")
    assert lane.workers == 3
    yard.finish(b"v", b"t1")
    assert lane.workers == 2
    yard.finish(b"u", b"t0")
    assert (lane.holder, lane.leased_by_worker) == (yard.scheduler.ledger.workers[b"w"], None)
    yard.finish(b"w", b"t2")
    assert (lane.workers, lane.leased, lane.ready) == (0, 0, 1)
