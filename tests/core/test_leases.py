"""Leases: timeouts, incarnations, fencing, heartbeats and charges."""

from typing import Any

import pytest

from taskyard.core.blobs import Content
from taskyard.core.effects import (
    Assign,
    HeartbeatAck,
    LeasesEnded,
    ReportAck,
    Shutdown,
    Stop,
    UnknownWorker,
)
from taskyard.core.events import (
    DrainRequested,
    Outcome,
    SlotFreed,
    TasksProgressed,
    TimePassed,
    WorkerHeartbeat,
    WorkerLost,
    WorkerReconnected,
)
from taskyard.core.limits import CRASHES_MAX, SECOND_NS
from taskyard.core.model import Terms, WorkerFacts
from taskyard.core.records import (
    Failed,
    Finished,
    Leased,
    LeaseExpired,
    Progressed,
    Returned,
    ReturnReason,
    SlotsFreed,
    StaleReport,
    WorkerJoined,
    WorkerLeft,
)
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import PLAIN, Yard, assigned, missing
from tests.kit.snapshots import reopened

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState
TEN_NS = 10 * SECOND_NS


def one_lease(**facts: int) -> Yard:
    """Return a yard whose worker w has a timeout of ten seconds and holds a."""
    yard = Yard()
    yard.submit(b"a")
    yard.join(b"w", **{"lease_timeout_ns": TEN_NS, "slots_total": 5, **facts})
    yard.take(b"w")
    return yard


# Giving.


def test_lease_is_recorded_and_then_assigned() -> None:
    yard = Yard()
    yard.clock(5)
    yard.submit(b"a", b"b", lanes=[b"", b"x"])
    yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=5)
    effects = yard.ask(b"w", 5)
    terms = Terms(submitted_ns=5)
    names, lanes = [b"a", b"b"], [b"", b"x"]
    assert effects == [Assign(b"w", names, [1, 1], names, [terms, terms], lanes, TEN_NS, at_ns=5)]
    assert yard.records == [Leased(5, b"w", [b"a", b"b"], [1, 1], TEN_NS)]


def test_lease_time_is_the_longest_that_a_task_asks_for_or_the_workers_own() -> None:
    yard = Yard()
    yard.submit(b"a", lease_ns=2 * TEN_NS)
    yard.submit(b"b", lease_ns=3 * TEN_NS)
    yard.submit(b"c", lease_ns=1)
    yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=9)
    yard.ask(b"w", 2)
    assert yard.records == [Leased(0, b"w", [b"a", b"b"], [1, 1], 3 * TEN_NS)]
    yard.ask(b"w", 2)
    assert yard.records == [Leased(0, b"w", [b"c"], [1], TEN_NS)]


def test_unknown_worker_gets_unknown_worker_and_no_task() -> None:
    yard = Yard()
    yard.submit(b"a")
    assert yard.ask(b"nobody") == [UnknownWorker(b"nobody")]
    assert yard.records == []


def test_joining_again_with_the_same_facts_is_no_news() -> None:
    yard = Yard()
    yard.join(b"w")
    assert yard.records == [WorkerJoined(0, b"w", PLAIN)]
    yard.join(b"w")
    assert yard.records == []
    yard.join(b"w", slots_total=3)
    assert yard.records == [WorkerJoined(0, b"w", WorkerFacts(slots_total=3))]


# Silence.


def test_silent_worker_loses_its_tasks_and_is_gone() -> None:
    yard = one_lease()
    assert yard.scheduler.wake_at_ns() == TEN_NS
    yard.later(9.999)
    assert yard.records == []
    yard.later(0.001)
    assert yard.records == [
        LeaseExpired(TEN_NS, b"w", [b"a"], [1]),
        WorkerLeft(TEN_NS, b"w", b"silent"),
    ]
    assert yard.state(b"a") is READY
    assert yard.ask(b"w") == [UnknownWorker(b"w")]


def test_expired_task_goes_to_a_worker_that_waits() -> None:
    yard = one_lease()
    yard.join(b"v")
    yard.ask(b"v", parks=True)
    assert assigned(yard.later(10)) == [b"a"]
    assert yard[b"a"].attempt == 2


@pytest.mark.parametrize("sign", ["ask", "report", "heartbeat", "progress", "appearance"])
def test_any_message_renews_the_leases(sign: str) -> None:
    yard = one_lease()
    for _ in range(3):
        yard.later(9)
        if sign == "ask":
            yard.ask(b"w")
        elif sign == "report":
            yard.finish(b"w", b"unknown")
        elif sign == "heartbeat":
            yard.handle(WorkerHeartbeat(0, b"w"))
        elif sign == "progress":
            yard.handle(TasksProgressed(0, b"w", [b"a"], [1], [50], [b"half"]))
        else:
            yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=5)
    assert yard.state(b"a") is LEASED
    yard.later(10)
    assert yard.state(b"a") is READY


def test_worker_without_tasks_times_out_too() -> None:
    yard = Yard()
    yard.join(b"w", lease_timeout_ns=TEN_NS)
    yard.later(10)
    assert yard.records == [WorkerLeft(TEN_NS, b"w", b"silent")]


def test_plain_worker_never_expires() -> None:
    yard = Yard()
    yard.submit(b"a")
    yard.submit(b"b", lease_ns=1)
    yard.join(b"w")
    yard.take(b"w", 2)
    assert yard.scheduler.wake_at_ns() == NEVER_NS
    yard.later(10**6)
    assert yard.states(b"a", b"b") == [LEASED, LEASED]


def test_long_lease_extends_the_timeout_of_its_worker() -> None:
    yard = Yard()
    yard.submit(b"a", lease_ns=10 * TEN_NS)
    yard.join(b"w", lease_timeout_ns=TEN_NS)
    yard.take(b"w")
    yard.later(99)
    assert yard.state(b"a") is LEASED
    yard.later(1)
    assert yard.state(b"a") is READY


def test_timeout_is_extended_only_while_the_long_lease_is_held() -> None:
    yard = Yard()
    yard.join(b"w", lease_timeout_ns=TEN_NS)
    yard.later(9)
    yard.submit(b"long", lease_ns=10 * TEN_NS)
    yard.take(b"w")
    yard.later(2)
    yard.finish(b"w", b"long")
    yard.submit(b"short")
    yard.take(b"w")
    wake_at_ns = yard.scheduler.wake_at_ns()
    assert wake_at_ns <= 21 * SECOND_NS
    yard.later(10)
    assert yard.state(b"short") is READY


def test_worker_that_is_never_empty_keeps_only_the_patience_of_what_it_holds() -> None:
    yard = Yard()
    yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=9)
    yard.submit(b"long", lease_ns=10 * TEN_NS)
    yard.take(b"w")
    yard.submit(b"short")
    yard.take(b"w")
    yard.finish(b"w", b"long")
    yard.later(10)
    assert yard.state(b"short") is READY


@pytest.mark.no_cover
def test_timeout_heap_does_not_grow_with_the_work_done() -> None:
    yard = Yard()
    yard.join(b"w", lease_timeout_ns=1000 * SECOND_NS)
    for number in range(100):
        yard.submit(b"%d" % number, lease_ns=2000 * SECOND_NS)
        yard.take(b"w")
        yard.finish(b"w", b"%d" % number)
        yard.join(b"w", lease_timeout_ns=1000 * SECOND_NS)
    assert len(yard.scheduler.context.timers.heap) < 50


def test_clock_jumps_end_no_lease() -> None:
    yard = one_lease()
    for wall_ns in (10**18, 0, 5 * 10**18, -(10**9)):
        yard.clock(wall_ns)
        assert yard.state(b"a") is LEASED
        assert yard.scheduler.wake_at_ns() == TEN_NS
    yard.later(10)
    assert yard.state(b"a") is READY


def test_clock_jump_expires_no_worker() -> None:
    yard = one_lease()
    yard.now_ns += 2 * TEN_NS  # the machine was stopped, and its clock is set
    yard.clock(10**18)
    assert yard.state(b"a") is LEASED
    yard.heartbeat(b"w", (b"a", 1))
    yard.later(0)
    assert yard.state(b"a") is LEASED


# After a restart of the broker.


def test_recovered_lease_has_its_full_time() -> None:
    yard = one_lease()
    yard.later(9)
    again = Scheduler(yard.mirror)
    again.resume(now_ns=10**15)
    assert again.wake_at_ns() == 10**15 + TEN_NS
    again.handle(TimePassed(10**15 + TEN_NS - 1))
    assert again.ledger.tasks[b"a"].state is LEASED
    again.handle(TimePassed(10**15 + TEN_NS))
    assert again.ledger.tasks[b"a"].state is READY


def test_worker_reports_to_a_restarted_broker_as_if_nothing_had_happened() -> None:
    yard = one_lease()
    again = Scheduler(reopened(yard.mirror))
    again.resume(now_ns=10**15)
    yard.scheduler, yard.now_ns = again, 10**15
    assert yard.finish(b"w", b"a", attempts=[1]) == [ReportAck(b"w", 0, [])]
    assert yard.state(b"a") is DONE


def send_heartbeats(yard: Yard, seconds: int) -> None:
    """Let the worker send a heartbeat without a list of tasks each second."""
    for _ in range(seconds):
        yard.later(1)
        yard.handle(WorkerHeartbeat(0, b"w"))


def resumed(yard: Yard, now_ns: int = 0) -> None:
    """Restart the broker of a yard."""
    yard.scheduler = Scheduler(reopened(yard.mirror))
    yard.scheduler.resume(now_ns)
    yard.now_ns = now_ns


def unlisting_lease(**facts: Any) -> Yard:
    """Return a restarted yard with a lease of a worker that can't list its tasks."""
    yard = Yard()
    yard.join(b"w", slots_total=1, restart_lease_ns=TEN_NS, **facts)
    yard.submit(b"a")
    yard.take(b"w")
    resumed(yard)
    return yard


@pytest.mark.parametrize("lease_timeout_ns", [0, TEN_NS // 2])
def test_recovered_lease_of_a_worker_that_lists_nothing_ends_despite_heartbeats(
    lease_timeout_ns: int,
) -> None:
    yard = unlisting_lease(lease_timeout_ns=lease_timeout_ns)
    send_heartbeats(yard, 9)
    assert yard.state(b"a") is LEASED
    assert yard.scheduler.wake_at_ns() == TEN_NS
    assert yard.later(1) == [LeasesEnded(b"w", [b"a"], [1], 0)]
    assert yard.records == [
        Returned(TEN_NS, b"w", [b"a"], [1], ReturnReason.BROKER_RESTARTED),
    ]
    assert (yard[b"a"].losses, yard.scheduler.ledger.workers[b"w"].slots_free) == (0, 1)
    yard.later(100)


def test_lease_given_since_the_restart_has_no_deadline() -> None:
    yard = unlisting_lease()
    yard.finish(b"w", b"a")
    yard.submit(b"b")
    yard.take(b"w")
    yard.later(100)
    assert yard.state(b"b") is LEASED
    assert yard.records == []


def test_recovered_lease_goes_back_once_and_the_worker_gets_it_again_when_it_wants_work() -> None:
    yard = unlisting_lease(always_ready=True)
    yard.later(1)
    yard.handle(WorkerHeartbeat(0, b"w"))
    assert assigned(yard.later(9)) == [b"a"]
    assert yard[b"a"].attempt == 2
    yard.later(100)
    assert yard.state(b"a") is LEASED


def test_worker_without_messages_since_the_restart_gets_nothing_at_its_deadline() -> None:
    yard = unlisting_lease(always_ready=True)
    assert assigned(yard.later(10)) == []
    assert yard.state(b"a") is READY


def test_restart_deadline_follows_the_latest_facts() -> None:
    for lease_ns, seconds in ((TEN_NS // 2, 5), (2 * TEN_NS, 20)):
        yard = unlisting_lease()
        yard.join(b"w", slots_total=1, restart_lease_ns=lease_ns)
        yard.later(seconds - 1)
        assert yard.state(b"a") is LEASED
        yard.later(1)
        assert yard.state(b"a") is READY


def test_slots_that_were_kept_before_a_restart_are_free_at_the_deadline() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2, restart_lease_ns=TEN_NS, always_ready=True)
    yard.submit(b"a", b"b")
    yard.finish(b"w", b"a", keeps_slots=True)
    yard.finish(b"w", b"b", keeps_slots=True)
    resumed(yard)
    yard.handle(SlotFreed(0, b"w"))
    assert yard.later(10) == [LeasesEnded(b"w", [], [], 1)]
    assert yard.records == [SlotsFreed(TEN_NS, b"w", 1)]
    assert yard.scheduler.ledger.workers[b"w"].slots_free == 2


# New connections.


def reconnected_lease(**facts: Any) -> Yard:
    """Return a yard with a lease of a worker that has reconnected and can't list its tasks."""
    yard = Yard()
    yard.join(b"w", slots_total=2, lease_timeout_ns=TEN_NS, restart_lease_ns=TEN_NS, **facts)
    yard.submit(b"a")
    yard.take(b"w")
    yard.handle(WorkerReconnected(0, b"w"))
    return yard


def test_lease_of_a_worker_that_reconnected_ends_despite_heartbeats_and_more_connections() -> None:
    yard = reconnected_lease()
    for _ in range(9):
        yard.later(1)
        yard.handle(WorkerHeartbeat(0, b"w"))
        yard.handle(WorkerReconnected(0, b"w"))
    assert yard.state(b"a") is LEASED
    assert yard.later(1) == [LeasesEnded(b"w", [b"a"], [1], 0)]
    assert yard.records == [Returned(TEN_NS, b"w", [b"a"], [1], ReturnReason.UNLISTED)]
    assert (yard[b"a"].losses, yard.scheduler.ledger.workers[b"w"].slots_free) == (0, 2)
    assert missing(yard.finish(b"w", b"a", attempts=[1])) == [b"a"]


def test_result_of_a_worker_that_reconnected_counts_until_the_deadline() -> None:
    yard = reconnected_lease()
    yard.later(9)
    assert missing(yard.finish(b"w", b"a", attempts=[1])) == []
    assert yard.state(b"a") is DONE
    assert yard.later(100) == []


def test_each_lease_has_the_deadline_of_the_first_connection_after_it() -> None:
    yard = reconnected_lease()
    yard.later(4)
    yard.submit(b"b")
    yard.take(b"w")
    yard.handle(WorkerReconnected(0, b"w"))
    yard.later(6)
    assert (yard.state(b"a"), yard.state(b"b")) == (READY, LEASED)
    yard.handle(WorkerHeartbeat(0, b"w"))
    yard.later(4)
    assert yard.state(b"b") is READY


def test_lease_granted_on_the_new_connection_has_no_deadline() -> None:
    yard = reconnected_lease()
    yard.submit(b"b")
    yard.take(b"w")
    send_heartbeats(yard, 12)
    assert (yard.state(b"a"), yard.state(b"b")) == (READY, LEASED)


def test_worker_that_lists_a_task_after_it_reconnected_keeps_it() -> None:
    yard = reconnected_lease(heartbeat_ns=SECOND_NS)
    yard.later(1)
    yard.heartbeat(b"w", (b"a", 1), heartbeat_ns=SECOND_NS)
    send_heartbeats(yard, 12)
    assert yard.state(b"a") is LEASED


def test_task_with_a_longer_lease_gives_a_worker_that_reconnected_that_time() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, lease_timeout_ns=TEN_NS, restart_lease_ns=TEN_NS)
    yard.submit(b"a", lease_ns=3 * TEN_NS)
    yard.take(b"w")
    yard.handle(WorkerReconnected(0, b"w"))
    yard.later(29)
    yard.handle(WorkerHeartbeat(0, b"w"))
    assert yard.state(b"a") is LEASED
    yard.later(1)
    assert yard.state(b"a") is READY


def test_another_process_does_not_reconnect_for_the_holder_of_a_name() -> None:
    yard = reconnected_lease(incarnation=1)
    yard.submit(b"b")
    yard.take(b"w")
    yard.handle(WorkerReconnected(0, b"w", incarnation=2))
    yard.handle(WorkerReconnected(0, b"nobody"))
    send_heartbeats(yard, 12)
    assert yard.state(b"b") is LEASED


def test_slots_kept_at_a_new_connection_are_freed_by_as_many_as_stay_kept() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=4, restart_lease_ns=TEN_NS, always_ready=True)
    yard.submit(b"a", b"b", b"c")
    yard.finish(b"w", b"a", keeps_slots=True)
    yard.handle(WorkerReconnected(0, b"w"))
    yard.later(5)
    yard.finish(b"w", b"b", keeps_slots=True)
    yard.finish(b"w", b"c", keeps_slots=True)
    yard.handle(WorkerReconnected(0, b"w"))
    yard.handle(SlotFreed(0, b"w"))
    assert yard.later(5) == [LeasesEnded(b"w", [], [], 1)]
    assert yard.later(5) == [LeasesEnded(b"w", [], [], 1)]
    assert yard.scheduler.ledger.workers[b"w"].slots_free == 4


def test_recovered_long_lease_extends_the_timeout_of_its_worker() -> None:
    yard = Yard()
    yard.submit(b"a", lease_ns=10 * TEN_NS)
    yard.join(b"w", lease_timeout_ns=TEN_NS)
    yard.take(b"w")
    again = Scheduler(reopened(yard.mirror))
    again.resume(now_ns=0)
    again.handle(TimePassed(99 * SECOND_NS))
    assert again.ledger.tasks[b"a"].state is LEASED
    again.handle(TimePassed(100 * SECOND_NS))
    assert again.ledger.tasks[b"a"].state is READY


def test_recovered_lease_that_the_worker_does_not_list_is_given_two_heartbeats() -> None:
    yard = one_lease()
    again = Scheduler(reopened(yard.mirror))
    again.resume(now_ns=10**15)
    yard.scheduler, yard.now_ns = again, 10**15
    yard.later(1.9)
    yard.heartbeat(b"w", heartbeat_ns=SECOND_NS)
    assert yard.state(b"a") is LEASED
    yard.later(0.1)
    yard.heartbeat(b"w", heartbeat_ns=SECOND_NS)
    assert yard.state(b"a") is READY


# Incarnations.


def test_another_incarnation_loses_what_the_former_one_held() -> None:
    yard = one_lease()
    facts = WorkerFacts(lease_timeout_ns=TEN_NS, slots_total=5, incarnation=2)
    yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=5, incarnation=2)
    assert yard.records == [
        Returned(0, b"w", [b"a"], [1], ReturnReason.RESTARTED),
        WorkerLeft(0, b"w", b"restarted"),
        WorkerJoined(0, b"w", facts),
    ]
    assert (yard.state(b"a"), yard[b"a"].losses) == (READY, 1)


def test_same_incarnation_that_appears_again_keeps_what_it_holds() -> None:
    yard = one_lease(incarnation=7)
    yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=1, incarnation=7)
    assert yard.state(b"a") is LEASED


# Fencing.


def test_report_of_a_worker_that_lost_its_lease_is_stale() -> None:
    yard = one_lease()
    yard.later(10)
    assert yard.finish(b"w", b"a", attempts=[1], request=3) == [ReportAck(b"w", 3, [b"a"])]
    assert yard.records == [StaleReport(TEN_NS, b"w", [b"a"], [1])]
    assert yard.state(b"a") is READY


def test_old_attempt_of_the_same_worker_is_stale() -> None:
    yard = one_lease()
    yard.report(b"w", b"a", Outcome.REFUSED)
    yard.take(b"w")
    assert missing(yard.finish(b"w", b"a", attempts=[1])) == [b"a"]
    assert yard.state(b"a") is LEASED
    assert missing(yard.finish(b"w", b"a", attempts=[2])) == []
    assert yard.state(b"a") is DONE


def test_report_on_a_task_of_another_worker_is_stale() -> None:
    yard = one_lease()
    yard.join(b"v")
    assert missing(yard.finish(b"v", b"a")) == [b"a"]
    assert yard.records == [StaleReport(0, b"v", [b"a"], [0])]


def test_late_result_of_a_task_that_another_worker_has_done_changes_nothing() -> None:
    yard = one_lease()
    yard.later(10)
    yard.join(b"v")
    yard.take(b"v")
    yard.finish(b"v", b"a", texts=[b"right"])
    yard.join(b"w", lease_timeout_ns=TEN_NS)
    before = ledger_fingerprint(yard.scheduler.ledger)
    assert missing(yard.finish(b"w", b"a", attempts=[1], texts=[b"late"])) == [b"a"]
    after = ledger_fingerprint(yard.scheduler.ledger)
    assert {**after, "record": before["record"]} == before


def test_late_result_is_taken_neither_before_nor_after_the_broker_forgets_the_worker() -> None:
    yard = Yard()
    assert yard.finish(b"nobody", b"a", b"b", attempts=[1, 2]) == [
        ReportAck(b"nobody", 0, [b"a", b"b"])
    ]
    assert yard.records == [StaleReport(0, b"nobody", [b"a", b"b"], [1, 2])]


def test_progress_of_what_a_worker_holds_is_recorded_and_all_else_is_dropped() -> None:
    yard = one_lease()
    texts: list[Content] = [b"half", b"old", b"unknown"]
    columns = ([b"a", b"a", b"x"], [1, 0, 1], [50, 60, 70], texts)
    assert yard.handle(TasksProgressed(0, b"w", *columns)) == []
    assert yard.records == [Progressed(0, b"w", [b"a"], [1], [50], [b"half"])]
    assert yard.handle(TasksProgressed(0, b"w", [b"x"], [1], [1], [b""])) == []
    assert yard.records == []
    assert yard.handle(TasksProgressed(0, b"v", *columns)) == [UnknownWorker(b"v")]
    assert yard.handle(TasksProgressed(0, b"w", [b"a"], [1], [], [b""])) == []
    assert yard.records == []


# Heartbeats.


def test_lease_that_a_heartbeat_does_not_list_is_returned() -> None:
    yard = one_lease()
    yard.later(2)
    assert yard.heartbeat(b"w", heartbeat_ns=SECOND_NS) == []
    assert yard.records == [Returned(2 * SECOND_NS, b"w", [b"a"], [1], ReturnReason.UNLISTED)]
    assert (yard.state(b"a"), yard[b"a"].losses) == (READY, 0)


def test_young_lease_that_a_heartbeat_does_not_list_may_be_on_its_way() -> None:
    yard = one_lease()
    yard.later(1.9)
    yard.heartbeat(b"w", heartbeat_ns=SECOND_NS)
    assert yard.state(b"a") is LEASED


def test_heartbeat_that_lists_an_old_attempt_does_not_list_the_lease() -> None:
    yard = one_lease()
    yard.report(b"w", b"a", Outcome.REFUSED)
    yard.take(b"w")
    yard.later(5)
    effects = yard.heartbeat(b"w", (b"a", 1), heartbeat_ns=SECOND_NS)
    assert effects == [Stop(b"w", [b"a"], [1], [False])]
    assert yard.state(b"a") is READY


def test_heartbeat_that_lists_the_lease_keeps_it() -> None:
    yard = one_lease()
    yard.later(5)
    assert yard.heartbeat(b"w", (b"a", 1), heartbeat_ns=SECOND_NS) == []
    assert yard.state(b"a") is LEASED


def test_heartbeat_without_a_list_only_renews_the_leases() -> None:
    yard = one_lease()
    yard.later(5)
    assert yard.handle(WorkerHeartbeat(0, b"w", None, SECOND_NS)) == []
    assert yard.state(b"a") is LEASED


def test_zombie_is_sent_stop_for_tasks_it_no_longer_holds() -> None:
    yard = one_lease()
    yard.later(10)
    assert yard.heartbeat(b"w", (b"a", 1), (b"x", 4)) == [
        UnknownWorker(b"w"),
        Stop(b"w", [b"a", b"x"], [1, 4], [False, True]),
    ]
    yard.join(b"w", lease_timeout_ns=TEN_NS)
    assert yard.heartbeat(b"w", (b"a", 1)) == [Stop(b"w", [b"a"], [1], [False])]
    assert yard.handle(WorkerHeartbeat(0, b"nobody")) == [UnknownWorker(b"nobody")]


def test_drained_worker_whose_last_lease_is_not_listed_may_go() -> None:
    yard = one_lease()
    yard.handle(DrainRequested(0, b"c", b"w"))
    yard.later(5)
    assert yard.heartbeat(b"w", heartbeat_ns=SECOND_NS) == [Shutdown(b"w")]


# Charges.


def test_task_that_kills_its_workers_fails_after_its_crash_attempts() -> None:
    yard = Yard()
    yard.submit(b"a", crashes_max=3)
    for number in range(3):
        assert (yard.state(b"a"), yard[b"a"].losses) == (READY, number)
        yard.join(b"w%d" % number, lease_timeout_ns=TEN_NS)
        yard.take(b"w%d" % number)
        yard.later(10)
    at_ns = 3 * TEN_NS
    assert yard.records == [
        Failed(at_ns, b"w2", [b"a"], [3], [b"lost 3 workers"], own_fault=False),
        WorkerLeft(at_ns, b"w2", b"silent"),
    ]
    assert yard.state(b"a") is FAILED
    assert yard.scheduler.ledger.reasons == {b"a": b"lost 3 workers"}
    assert yard[b"a"].losses == 3


def test_task_has_the_default_crash_attempts_unless_its_terms_set_them() -> None:
    yard = Yard()
    yard.submit(b"a")
    for number in range(CRASHES_MAX):
        assert yard.state(b"a") is READY, number
        yard.lose(b"w", b"a")
    assert yard.state(b"a") is FAILED


def test_neighbours_of_a_killer_are_charged_once_and_go_on() -> None:
    yard = Yard()
    yard.submit(b"killer", b"a", b"b", crashes_max=2)
    yard.lose(b"v", b"killer", b"a", b"b")
    yard.join(b"w")
    for name in (b"killer", b"a", b"b"):
        assert yard.take(b"w", 9) == [name]
        if name == b"killer":
            yard.handle(WorkerLost(0, b"w"))
            yard.join(b"w")
        else:
            yard.finish(b"w", name)
    assert yard.states(b"killer", b"a", b"b") == [FAILED, DONE, DONE]


def test_some_of_a_lost_workers_tasks_fail_and_the_others_come_back() -> None:
    yard = Yard()
    yard.submit(b"a", crashes_max=1)
    yard.submit(b"b")
    yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=5)
    yard.take(b"w", 2)
    yard.later(10)
    assert yard.records == [
        Failed(TEN_NS, b"w", [b"a"], [1], [b"lost its worker"], own_fault=False),
        LeaseExpired(TEN_NS, b"w", [b"b"], [1]),
        WorkerLeft(TEN_NS, b"w", b"silent"),
    ]


@pytest.mark.parametrize("way", ["leave", "refuse", "back", "retry at"])
def test_no_loss_is_charged_for_a_task_returned_by(way: str) -> None:
    yard = Yard()
    yard.submit(b"a", crashes_max=2)
    for attempt in range(1, 6):
        yard.join(b"w")
        assert yard.take(b"w") == [b"a"]
        if way == "leave":
            yard.leave(b"w")
        elif way == "refuse":
            yard.report(b"w", b"a", Outcome.REFUSED)
        elif way == "back":
            yard.report(b"w", b"a", Outcome.DEFER_BACK)
            yard.later(1)
        else:
            yard.report(b"w", b"a", Outcome.RETRY_AT)
            yard.later(0)
        task = yard[b"a"]
        assert (task.attempt, task.losses, task.failures) == (attempt, 0, 0)


def test_loss_is_charged_when_the_task_is_leased_and_survives_a_restart() -> None:
    yard = Yard()
    yard.submit(b"a", crashes_max=1)
    yard.join(b"w", lease_timeout_ns=TEN_NS)
    yard.take(b"w")
    again = Scheduler(yard.mirror)
    again.resume(now_ns=0)
    again.handle(WorkerHeartbeat(0, b"w", [(b"a", 1)]))
    again.handle(TimePassed(TEN_NS))
    assert again.ledger.tasks[b"a"].state is FAILED


# Leaving.


def test_worker_that_leaves_gives_everything_back() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c")
    yard.join(b"w")
    yard.take(b"w", 2)
    assert yard.leave(b"w") == [ReportAck(b"w", 0, [])]
    assert yard.records == [
        Returned(0, b"w", [b"a", b"b"], [1, 1], ReturnReason.LEFT),
        WorkerLeft(0, b"w", b"left"),
    ]
    assert yard.leave(b"w") == [UnknownWorker(b"w")]
    yard.join(b"v")
    assert yard.take(b"v", 9) == [b"a", b"b", b"c"]


def test_lease_ends_task_by_task() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", lanes=[b"x", b"", b""])
    yard.join(b"w", slots_total=3)
    yard.take(b"w", 3)
    worker = yard.scheduler.ledger.workers[b"w"]
    for name, held in ((b"b", [b"a", b"c"]), (b"a", [b"c"]), (b"c", [])):
        yard.finish(b"w", name)
        assert [task.name for task in worker.held()] == held
        assert worker.slots_free == 3 - len(held)
    assert worker.leases == {}
    assert [yard[name].lane.holder for name in (b"a", b"b", b"c")] == [None] * 3


def test_tasks_of_several_leases_and_lanes_may_be_settled_together() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", b"d", lanes=[b"x", b"", b"y", b""])
    yard.join(b"w", slots_total=9)
    yard.take(b"w", 2)
    yard.take(b"w", 2)
    yard.finish(b"w", b"a", b"b", b"c", b"d")
    (record,) = yard.records
    assert isinstance(record, Finished)
    assert yard.states(b"a", b"b", b"c", b"d") == [DONE] * 4


def test_tasks_of_one_lease_of_which_one_was_leased_anew_may_be_settled_together() -> None:
    yard = Yard()
    yard.submit(b"a", b"b")
    yard.join(b"w")
    assert yard.take(b"w", 2) == [b"a", b"b"]
    yard.report(b"w", b"b", Outcome.REFUSED)
    assert yard.take(b"w") == [b"b"]
    yard.finish(b"w", b"a", b"b")
    assert yard.states(b"a", b"b") == [DONE, DONE]
    assert yard.scheduler.ledger.workers[b"w"].leases == {}


# Records that a worker has acknowledged.


def test_assignment_that_was_not_sent_yet_is_not_taken_for_lost_however_old() -> None:
    yard = Yard()
    yard.join(b"w", lease_timeout_ns=100 * TEN_NS, slots_total=5)
    yard.submit(b"a")
    (ack,) = yard.handle(WorkerHeartbeat(0, b"w", [], TEN_NS, request=1, seen=0))
    assert isinstance(ack, HeartbeatAck)
    yard.take(b"w")  # its answer is still on its way when the worker speaks again
    yard.later(500)
    yard.handle(WorkerHeartbeat(0, b"w", [], TEN_NS, request=2, seen=ack.record))
    assert yard.state(b"a") is LEASED


def test_unlisted_assignment_that_was_sent_before_what_the_worker_has_seen_is_lost() -> None:
    yard = Yard()
    yard.join(b"w", lease_timeout_ns=100 * TEN_NS, slots_total=5)
    yard.submit(b"a", b"b")
    yard.take(b"w", 2)
    (ack,) = yard.handle(WorkerHeartbeat(0, b"w", [], TEN_NS, request=1, seen=0))
    assert isinstance(ack, HeartbeatAck)
    yard.handle(WorkerHeartbeat(0, b"w", [(b"b", 1)], TEN_NS, request=2, seen=ack.record))
    assert yard.states(b"a", b"b") == [READY, LEASED]
