"""Worker names: which process holds one, and how others of that name are refused."""

from taskyard.core.effects import Effect, HeartbeatAck, Refused
from taskyard.core.events import (
    Outcome,
    TasksProgressed,
    TasksReported,
    TasksRequested,
    TasksReturned,
    WorkerExited,
    WorkerHeartbeat,
    WorkerRegistered,
)
from taskyard.core.limits import CRASHES_MAX, REPLACED_MAX, REPLACED_TASKS_MAX, SECOND_NS
from taskyard.core.model import Refusal, WorkerFacts
from taskyard.core.records import (
    Failed,
    LeaseExpired,
    Refunded,
    Returned,
    ReturnReason,
    StaleReport,
    WorkerJoined,
    WorkerLeft,
    WorkerReplaced,
)
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard, assigned
from tests.kit.snapshots import reopened

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState

#: The last of two missed heartbeats is certain to be missed when the third is due.
MISSED_SECONDS = 3


def facts(incarnation: int) -> WorkerFacts:
    lease_timeout_ns = 15 * SECOND_NS
    return WorkerFacts(
        slots_total=4,
        lease_timeout_ns=lease_timeout_ns,
        incarnation=incarnation,
        heartbeat_ns=SECOND_NS,
    )


def beat(yard: Yard, incarnation: int, request: int = 0, replaces: int = 0) -> list[Effect]:
    """Register a process and send a heartbeat, as native workers do every second."""
    introduced = yard.handle(WorkerRegistered(0, b"w", facts(incarnation), replaces=replaces))
    records = yard.records
    heartbeat = WorkerHeartbeat(0, b"w", request=request, incarnation=incarnation)
    effects = [*introduced, *yard.handle(heartbeat)]
    yard.records = [*records, *yard.records]
    return effects


def holding(*names: bytes) -> Yard:
    """Return a yard where incarnation 1 of worker w holds these tasks."""
    yard = Yard()
    yard.submit(*names)
    beat(yard, 1)
    assert assigned(yard.handle(TasksRequested(0, b"w", 4, incarnation=1))) == [*names]
    return yard


def replaced(*names: bytes) -> Yard:
    """Incarnation 1 held these tasks, fell silent, and incarnation 2 has its name."""
    yard = holding(*names)
    for _ in range(MISSED_SECONDS):
        yard.later(1)
        beat(yard, 2)
    assert yard.scheduler.ledger.workers[b"w"].facts.incarnation == 2
    return yard


def refusals(effects: list[Effect]) -> list[Refusal]:
    return [effect.refusal for effect in effects if isinstance(effect, Refused)]


# A newcomer waits.


def test_newcomer_is_refused_while_the_holder_is_alive() -> None:
    yard = holding(b"a")
    for _ in range(60):
        yard.later(1)
        beat(yard, 1)
        text = (
            "worker name 'w' is held by another process (incarnation 1): wait until it exits, or "
            "choose another --name"
        )
        assert beat(yard, 2, request=7) == [Refused(b"w", 7, Refusal.NAME_HELD, text)]
        assert yard.records == []
    assert (yard.state(b"a"), yard[b"a"].losses) == (LEASED, 0)


def test_newcomer_can_neither_take_nor_settle_nor_return_nor_leave_for_the_holder() -> None:
    yard = holding(b"a")
    yard.submit(b"b")
    assert refusals(yard.handle(TasksRequested(0, b"w", incarnation=2))) == [Refusal.NAME_HELD]
    returned = TasksReturned(0, b"w", [b"a"], incarnation=2)
    assert refusals(yard.handle(returned)) == [Refusal.NAME_HELD]
    progressed = TasksProgressed(0, b"w", [b"a"], [1], incarnation=2)
    assert refusals(yard.handle(progressed)) == [Refusal.NAME_HELD]
    assert refusals(yard.handle(WorkerExited(0, b"w", incarnation=2))) == [Refusal.NAME_HELD]
    assert yard.records == []
    reported = TasksReported(0, b"w", [b"a"], [1], incarnation=2)
    assert refusals(yard.handle(reported)) == [Refusal.NAME_HELD]
    assert yard.records == [StaleReport(0, b"w", [b"a"], [1])]
    assert yard.states(b"a", b"b") == [LEASED, READY]


def test_messages_of_a_newcomer_do_not_count_as_heartbeats_of_the_holder() -> None:
    yard = holding(b"a")
    yard.later(1)
    beat(yard, 2)
    yard.handle(TasksRequested(0, b"w", incarnation=2))
    assert yard.scheduler.ledger.workers[b"w"].last_seen_ns == 0


def test_waiting_newcomer_is_logged_once() -> None:
    yard = holding(b"a")
    for _ in range(5):
        yard.later(1)
        beat(yard, 1)
        beat(yard, 2)
    assert yard.scheduler.take_warnings() == [
        (
            "worker name 'w' is contested: another process waits while the holder (incarnation 1) "
            "is alive (give each worker its own --name)"
        )
    ]
    assert yard.scheduler.take_warnings() == []


def test_newcomer_gets_the_name_when_the_holder_leaves() -> None:
    yard = holding(b"a")
    beat(yard, 2)
    yard.handle(WorkerExited(0, b"w", incarnation=1))
    beat(yard, 2)
    assert yard.records == [WorkerJoined(0, b"w", facts(2))]
    assert yard[b"a"].losses == 0


def test_holder_that_promises_no_heartbeat_is_replaced_at_once() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=0)
    beat(yard, 2)
    assert yard.records == [WorkerLeft(0, b"w", b"restarted"), WorkerJoined(0, b"w", facts(2))]


def test_process_without_an_incarnation_does_not_get_a_held_name() -> None:
    yard = holding(b"a")
    yard.join(b"w", slots_total=0)
    assert yard.records == []
    assert refusals(yard.handle(TasksRequested(0, b"w", incarnation=0))) == [Refusal.NAME_HELD]


# It takes over.


def test_newcomer_takes_over_when_two_heartbeats_are_missed() -> None:
    yard = holding(b"a")
    yard.later(1)
    beat(yard, 2)
    yard.later(1.999)
    assert yard.records == []
    yard.later(0.001)
    now_ns = MISSED_SECONDS * SECOND_NS
    assert yard.records == [
        LeaseExpired(now_ns, b"w", [b"a"], [1]),
        WorkerLeft(now_ns, b"w", b"replaced"),
        WorkerReplaced(now_ns, b"w", 1, [b"a"], [1]),
    ]
    ledger = yard.scheduler.ledger
    version = ledger.rule_table.version
    assert beat(yard, 2, request=5) == [HeartbeatAck(b"w", 5, ledger.record, rules_version=version)]
    assert (yard.state(b"a"), yard[b"a"].losses) == (READY, 1)
    assert assigned(yard.handle(TasksRequested(0, b"w", incarnation=2))) == [b"a"]


def test_heartbeat_that_waits_in_the_same_turn_saves_the_name() -> None:
    yard = holding(b"a")
    yard.later(1)
    beat(yard, 2)
    yard.now_ns += 60 * SECOND_NS  # the broker was stopped, and finds both in its queue
    beat(yard, 2)
    beat(yard, 1)
    yard.later(0)
    assert yard.state(b"a") is LEASED


def test_newcomer_that_has_left_shortens_no_timeout() -> None:
    yard = holding(b"a")
    beat(yard, 2)
    yard.later(1)
    beat(yard, 1)
    yard.later(10)
    assert yard.state(b"a") is LEASED
    yard.later(5)
    assert yard.records == [
        LeaseExpired(16 * SECOND_NS, b"w", [b"a"], [1]),
        WorkerLeft(16 * SECOND_NS, b"w", b"silent"),
    ]


def test_holder_counts_as_just_seen_after_a_restart() -> None:
    yard = holding(b"a")
    scheduler = Scheduler(reopened(yard.scheduler.ledger))
    scheduler.resume(100 * SECOND_NS)
    yard.scheduler, yard.now_ns = scheduler, 100 * SECOND_NS
    assert refusals(beat(yard, 2)) == [Refusal.NAME_HELD]
    yard.later(2.9)
    assert yard.state(b"a") is LEASED
    yard.later(0.1)
    assert yard.state(b"a") is READY


def test_newcomer_takes_over_at_once_when_its_supervisor_reports_the_death() -> None:
    yard = holding(b"a")
    beat(yard, 3, replaces=1)
    assert yard.records == [
        Returned(0, b"w", [b"a"], [1], ReturnReason.RESTARTED),
        WorkerLeft(0, b"w", b"restarted"),
        WorkerJoined(0, b"w", facts(3)),
    ]
    assert yard[b"a"].losses == 1


def test_supervisor_reports_only_the_deaths_of_its_own_processes() -> None:
    yard = holding(b"a")
    assert refusals(beat(yard, 9, replaces=5)) == [Refusal.NAME_HELD]


def test_task_that_kills_its_supervised_workers_runs_out_of_attempts() -> None:
    yard = Yard()
    yard.submit(b"a")
    for incarnation in range(1, CRASHES_MAX + 2):
        beat(yard, incarnation, replaces=1)
        if incarnation <= CRASHES_MAX:
            assert assigned(yard.handle(TasksRequested(0, b"w", incarnation=incarnation))) == [b"a"]
    assert isinstance(yard.records[0], Failed)
    assert yard.scheduler.ledger.reasons[b"a"] == b"lost 5 workers"


# The replaced process returns.


def test_replaced_process_that_returns_is_refunded_and_refused() -> None:
    yard = replaced(b"a", b"b")
    assert [yard[name].losses for name in (b"a", b"b")] == [1, 1]
    yard.handle(TasksRequested(0, b"w", incarnation=2))  # a suspect may be all that it gets
    yard.scheduler.take_warnings()
    effects = beat(yard, 1, request=4)
    text = (
        "worker name 'w' was taken over by another process while this one was silent (give each "
        "worker its own --name)"
    )
    assert [one for one in effects if isinstance(one, Refused)] == [
        Refused(b"w", 4, Refusal.NAME_LOST, text)
    ]
    now_ns = MISSED_SECONDS * SECOND_NS
    assert Refunded(now_ns, b"w", 1, [b"a", b"b"], [1, 1]) in yard.records
    assert [yard[name].losses for name in (b"a", b"b")] == [0, 0]
    assert yard.scheduler.take_warnings() == [
        (
            "worker name 'w': the replaced process (incarnation 1) came back and is refused for "
            "good, 2 lost tasks refunded"
        )
    ]


def test_replaced_process_is_refunded_once_and_refused_every_time() -> None:
    yard = replaced(b"a")
    beat(yard, 1)
    for _ in range(3):
        assert refusals(beat(yard, 1)) == [Refusal.NAME_LOST]
        assert yard.records == []
    assert yard[b"a"].losses == 0


def test_replaced_process_is_refused_even_if_the_name_is_free() -> None:
    yard = replaced(b"a")
    yard.handle(WorkerExited(0, b"w", incarnation=2))
    assert refusals(beat(yard, 1)) == [Refusal.NAME_LOST]
    assert b"w" not in yard.scheduler.ledger.workers


def test_report_of_a_replaced_process_is_stale_and_refused() -> None:
    yard = replaced(b"a")
    effects = yard.handle(TasksReported(0, b"w", [b"a"], [1], incarnation=1, request=3))
    assert refusals(effects) == [Refusal.NAME_LOST]
    assert yard.records[-1] == StaleReport(MISSED_SECONDS * SECOND_NS, b"w", [b"a"], [1])
    assert yard.state(b"a") is READY


def test_settled_task_is_not_refunded() -> None:
    yard = replaced(b"a")
    yard.handle(TasksRequested(0, b"w", incarnation=2))
    yard.handle(TasksReported(0, b"w", [b"a"], [2], incarnation=2))
    beat(yard, 1)
    assert yard.records == [Refunded(MISSED_SECONDS * SECOND_NS, b"w", 1, [], [])]
    assert yard.state(b"a") is DONE


def test_task_that_was_retried_meanwhile_is_not_refunded() -> None:
    yard = holding(b"a")
    yard.submit(b"a2", crashes_max=1)
    assert assigned(yard.handle(TasksRequested(0, b"w", incarnation=1))) == [b"a2"]
    beat(yard, 2)
    yard.later(MISSED_SECONDS)
    assert yard.state(b"a2") is FAILED
    yard.retry(b"a2")
    beat(yard, 1)
    assert [yard[name].losses for name in (b"a", b"a2")] == [0, 0]


def test_refunded_task_does_not_end_the_run_of_its_lane_early() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"rule", b"*/x", LaneOptions(lane_workers_max=2, retry_delays_ns=(0,))))
    yard.submit(b"lost", lanes=[b"x"])
    beat(yard, 1)
    assert assigned(yard.handle(TasksRequested(0, b"w", incarnation=1))) == [b"lost"]
    yard.submit(b"urgent", lanes=[b"x"], priority=9)
    yard.submit(b"a", lanes=[b"x"])
    yard.join(b"v")
    assert yard.take(b"v") == [b"urgent"]
    beat(yard, 2)
    yard.later(MISSED_SECONDS)
    yard.report(b"v", b"urgent", Outcome.FAILED)
    yard.later(0)
    beat(yard, 1)
    assert [yard.state(name) for name in (b"lost", b"urgent", b"a")] == [READY] * 3
    order = []
    for _ in range(3):
        order += yard.take(b"v")
        yard.finish(b"v", order[-1])
    assert order == [b"lost", b"a", b"urgent"]


def test_replaced_process_is_refused_after_recovery_from_the_journal() -> None:
    yard = replaced(b"a")
    yard.scheduler = Scheduler(yard.mirror)  # made of encoded records alone
    yard.scheduler.resume(yard.now_ns)
    event = WorkerHeartbeat(yard.now_ns, b"w", incarnation=1)
    assert refusals(yard.scheduler.handle(event)) == [Refusal.NAME_LOST]
    assert yard[b"a"].losses == 0


def test_replaced_process_is_refused_after_recovery_from_a_snapshot() -> None:
    yard = replaced(b"a")
    ledger = reopened(yard.scheduler.ledger)
    assert ledger_fingerprint(ledger) == ledger_fingerprint(yard.scheduler.ledger)
    yard.scheduler = Scheduler(ledger)
    yard.scheduler.resume(yard.now_ns)
    assert refusals(beat(yard, 1)) == [Refusal.NAME_LOST]
    assert yard[b"a"].losses == 0


def test_replaced_processes_are_forgotten_oldest_first_beyond_a_limit() -> None:
    yard = Yard()
    for number in range(1, REPLACED_MAX + 3):
        yard.scheduler.context.emit(WorkerReplaced(0, b"w", number, [], []))
    kept = yard.scheduler.ledger.replaced
    assert (len(kept), next(iter(kept))) == (REPLACED_MAX, (b"w", 3))
    names = [b"%d" % number for number in range(REPLACED_TASKS_MAX)]
    yard.scheduler.context.emit(WorkerReplaced(0, b"w", 5000, names, [1] * len(names)))
    yard.scheduler.context.emit(WorkerReplaced(0, b"w", 5001, names[:1], [1]))
    assert [*kept] == [(b"w", 5001)]
