"""The five published designs, each as tests of the one scheduler.

Each test follows a statement of one design, in its order. `docs/scheduling.md` has the table that
maps their words to events and effects.
"""

from typing import Any

from taskyard.core.effects import (
    Accepted,
    Assign,
    CommandAck,
    NoWork,
    ReportAck,
    Settled,
    Shutdown,
    Stop,
    UnknownWorker,
    Wake,
)
from taskyard.core.events import (
    CancelRequested,
    DrainRequested,
    DuplicatePolicy,
    Outcome,
    RulesSet,
    Scope,
    SlotFreed,
    TasksReturned,
    UnknownPolicy,
    WatchRequested,
    WorkerExited,
    WorkerHeartbeat,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import QueueOrder
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned

PLAIN: dict[str, Any] = {"unknown": UnknownPolicy.DONE, "repeat": DuplicatePolicy.EXTEND}


# 000: a round-robin message broker with a table of workers and their slots.


def test_round_robin_gives_each_message_to_the_worker_used_least_recently() -> None:
    yard = Yard()
    for worker in (b"w1", b"w2", b"w3"):
        yard.join(worker, slots_total=2, always_ready=True)

    def send(name: bytes) -> list[bytes]:
        return [one.worker for one in yard.submit(name) if isinstance(one, Assign)]

    assert [send(b"m%d" % number) for number in range(6)] == [[b"w1"], [b"w2"], [b"w3"]] * 2


def test_round_robin_newcomer_stands_at_the_top_of_the_table() -> None:
    yard = Yard()
    for worker in (b"a", b"c", b"b"):
        yard.join(worker, slots_total=2, always_ready=True, queue_order=QueueOrder.LIFO)

    def send(name: bytes) -> list[bytes]:
        return [one.worker for one in yard.submit(name) if isinstance(one, Assign)]

    assert [send(b"m%d" % number) for number in range(4)] == [[b"b"], [b"c"], [b"a"], [b"b"]]
    yard.join(b"d", slots_total=2, always_ready=True, queue_order=QueueOrder.LIFO)
    assert send(b"new") == [b"d"]
    yard.join(
        b"a", slots_total=3, always_ready=True, queue_order=QueueOrder.LIFO
    )  # it stays where it is
    assert send(b"next") == [b"c"]


def test_round_robin_queues_when_all_slots_are_taken_and_drains_at_once_when_one_frees() -> None:
    yard = Yard()
    for worker in (b"w1", b"w2", b"w3"):
        yard.join(worker, slots_total=1, always_ready=True)
    yard.submit(b"m1", b"m2", b"m3")
    assert yard.submit(b"backlog-1", b"backlog-2") == [Accepted(b"client", 0, 2)]
    assert yard.submit(b"new") == [Accepted(b"client", 0, 1)]

    # A slot stays taken after the response, until the worker sends INCREMENT.
    answered = yard.finish(b"w2", b"m2", keeps_slots=True)
    assert assigned(answered) == []
    freed = yard.handle(SlotFreed(0, b"w2"))
    assert assigned(freed) == [b"backlog-1"]
    assert assigned(yard.finish(b"w1", b"m1")) == [b"backlog-2"]
    assert assigned(yard.finish(b"w3", b"m3")) == [b"new"]


def test_round_robin_second_register_sets_the_slots_and_hands_a_full_worker_nothing() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, always_ready=True)
    yard.submit(b"m1", b"m2", b"m3")
    assert assigned(yard.join(b"w", slots_total=1, always_ready=True)) == []
    assert assigned(yard.join(b"w", slots_total=2, always_ready=True)) == [b"m2"]


def test_round_robin_deregistered_worker_is_no_longer_in_the_table() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, always_ready=True)
    assert yard.handle(WorkerExited(0, b"w")) == [ReportAck(b"w", 0, [])]
    assert yard.handle(WorkerExited(0, b"w")) == [UnknownWorker(b"w")]
    assert yard.submit(b"m") == [Accepted(b"client", 0, 1)]


def test_round_robin_response_goes_back_to_the_client_that_asked() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, always_ready=True)
    yard.submit(b"m")
    yard.handle(WatchRequested(0, b"client", [b"m"], request=7))
    answered = yard.finish(b"w", b"m", texts=[b"pong"])
    assert Settled(b"client", 7, [b"m"], [TaskState.DONE], [b"pong"]) in answered


# 001: a ping-pong heartbeat dialogue.


def test_ping_pong_silent_worker_expires_and_its_job_goes_to_another() -> None:
    yard = Yard()
    for worker in (b"deaf", b"alive"):
        yard.join(worker, slots_total=1, lease_timeout_ns=3 * SECOND_NS)
    yard.submit(b"job")
    assert yard.take(b"deaf") == [b"job"]
    yard.ask(b"alive", parks=True)
    yard.later(2)
    yard.handle(WorkerHeartbeat(0, b"alive"))
    (assign,) = yard.later(1)  # no EXIT is sent to the one that expired
    assert isinstance(assign, Assign)
    assert (assign.worker, assign.names) == (b"alive", [b"job"])
    assert b"deaf" not in yard.scheduler.ledger.workers


def test_ping_pong_any_message_renews_the_worker() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, lease_timeout_ns=3 * SECOND_NS)
    yard.submit(b"job")
    yard.take(b"w")
    for _ in range(5):
        assert yard.later(2) == []
        assert yard.handle(WorkerHeartbeat(0, b"w")) == []
    assert yard.state(b"job") is TaskState.LEASED


def test_ping_pong_ping_of_a_busy_worker_does_not_make_it_ready() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, lease_timeout_ns=3 * SECOND_NS)
    yard.submit(b"job-1", b"job-2")
    yard.take(b"w")
    assert yard.handle(WorkerHeartbeat(0, b"w")) == []
    assert yard.take(b"w") == []


def test_ping_pong_late_result_of_an_expired_worker_changes_nothing() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, lease_timeout_ns=3 * SECOND_NS)
    yard.submit(b"job")
    yard.take(b"w")
    yard.later(3)
    assert yard.finish(b"w", b"job", attempts=[1]) == [ReportAck(b"w", 0, [b"job"])]
    assert yard.state(b"job") is TaskState.READY


def test_ping_pong_worker_is_sent_exit() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    assert yard.handle(DrainRequested(0, b"c", b"w")) == [Shutdown(b"w"), CommandAck(b"c", 0, 1)]


# 002: ZMailer's scheduler, with its threads, rings, agenda and idle transport agents.


def test_zmailer_one_worker_finishes_the_first_lane_and_takes_the_second() -> None:
    yard = Yard()
    yard.submit(
        b"a1", b"b1", b"a2", b"b2", b"a3", lanes=[b"a", b"b", b"a", b"b", b"a"], service=b"smtp"
    )
    yard.join(b"agent", services=(b"smtp",), slots_total=1)
    order = []
    for _ in range(5):
        (name,) = yard.take(b"agent")
        order.append(name)
        yard.finish(b"agent", name)
    assert order == [b"a1", b"a2", b"a3", b"b1", b"b2"]


def test_zmailer_only_one_agent_is_on_a_thread() -> None:
    yard = Yard()
    yard.submit(b"a1", b"a2", b"b1", lanes=[b"a", b"a", b"b"], service=b"smtp")
    for worker in (b"x", b"y", b"z"):
        yard.join(worker, services=(b"smtp",), slots_total=10)
    assert yard.take(b"x", 1) == [b"a1"]
    assert yard.take(b"y", 10) == [b"b1"]
    assert yard.take(b"z", 10) == []


def test_zmailer_limits_of_agents_in_a_ring_and_in_all() -> None:
    yard = Yard()
    rules = LaneOptions(workers_max=2)
    rule_pair = Rule(b"smtp", b"smtp/*", rules), Rule(b"uucp", b"uucp/*", rules)
    yard.handle(RulesSet(0, rule_pair, workers_max=3))
    for service in (b"smtp", b"uucp"):
        names = [service + b"-%d" % number for number in range(3)]
        yard.submit(*names, lanes=names, service=service)
    for number in range(3):
        yard.join(b"s%d" % number, services=(b"smtp",), slots_total=1)
        yard.join(b"u%d" % number, services=(b"uucp",), slots_total=1)
    assert [len(yard.take(b"s%d" % number)) for number in range(3)] == [1, 1, 0]
    assert [len(yard.take(b"u%d" % number)) for number in range(3)] == [1, 0, 0]


def test_zmailer_future_lane_does_not_delay_other_lanes() -> None:
    yard = Yard()
    yard.submit(b"later", lanes=[b"a"], due_ns=60 * SECOND_NS)
    yard.submit(b"now", lanes=[b"b"])
    yard.join(b"agent")
    assert yard.take(b"agent", 10) == [b"now"]
    yard.later(60)
    assert yard.take(b"agent", 10) == [b"later"]


def test_zmailer_rescheduled_vertex_waits_for_the_next_run_of_its_thread() -> None:
    yard = Yard()
    yard.submit(b"a1", b"a2", lanes=[b"a", b"a"], retry_delays_ns=(10 * SECOND_NS,))
    yard.join(b"agent", slots_total=1)
    yard.take(b"agent")
    yard.report(b"agent", b"a1", Outcome.FAILED)
    assert yard.take(b"agent") == [b"a2"]
    yard.finish(b"agent", b"a2")
    assert yard.take(b"agent") == []
    yard.later(10)
    assert yard.take(b"agent") == [b"a1"]


def test_zmailer_agent_that_ran_out_of_work_waits_in_the_idle_pool_of_its_ring() -> None:
    yard = Yard()
    yard.join(b"old", services=(b"smtp",), slots_total=1)
    yard.join(b"other", services=(b"uucp",), slots_total=1)
    yard.ask(b"other", parks=True)
    yard.ask(b"old", parks=True)
    sent = yard.submit(b"mail", lanes=[b"host"], service=b"smtp")
    assert [getattr(one, "worker", None) for one in sent] == [None, b"old"]


def test_zmailer_empty_thread_is_deleted() -> None:
    yard = Yard()
    yard.submit(b"a1", lanes=[b"a"])
    yard.join(b"agent")
    yard.take(b"agent")
    assert b"a" in yard.scheduler.ledger.services[b"default"].lanes
    yard.finish(b"agent", b"a1")
    assert b"a" not in yard.scheduler.ledger.services[b"default"].lanes


def test_zmailer_agent_that_finds_a_host_down_defers_the_whole_thread() -> None:
    yard = Yard()
    yard.submit(b"a1", b"a2", b"b1", lanes=[b"a", b"a", b"b"], retry_delays_ns=(9 * SECOND_NS,))
    yard.join(b"agent", slots_total=1)
    yard.take(b"agent")
    yard.report(b"agent", b"a1", Outcome.DEFER_ALL, texts=[b"connection refused"])
    assert yard.states(b"a1", b"a2", b"b1") == [
        TaskState.DELAYED,
        TaskState.DELAYED,
        TaskState.READY,
    ]
    assert (yard[b"a1"].failures, yard[b"a2"].failures) == (1, 0)


# 003: dwork's task graph.


def test_dwork_create_steal_complete_by_the_graph() -> None:
    yard = Yard()
    yard.submit(b"A", b"B", b"C", after=[[], [b"A"], [b"A", b"B"]], **PLAIN)
    yard.join(b"w1")
    assert yard.take(b"w1", 3) == [b"A"]
    assert yard.ask(b"w1") == [NoWork(b"w1", settled=False)]
    assert yard.finish(b"w1", b"A") == [ReportAck(b"w1", 0, [])]
    assert yard.take(b"w1", 3) == [b"B"]
    yard.finish(b"w1", b"B")
    assert yard.take(b"w1", 3) == [b"C"]
    yard.finish(b"w1", b"C")
    assert yard.ask(b"w1") == [NoWork(b"w1", settled=True)]


def test_dwork_complete_names_the_tasks_that_the_location_does_not_hold() -> None:
    yard = Yard()
    yard.submit(b"A", b"B", **PLAIN)
    yard.join(b"w1")
    yard.join(b"w2")
    yard.take(b"w1")
    yard.take(b"w2")
    assert yard.finish(b"w1", b"A", b"B", b"Z") == [ReportAck(b"w1", 0, [b"B", b"Z"])]
    assert yard.states(b"A", b"B") == [TaskState.DONE, TaskState.LEASED]


def test_dwork_transfer_gives_a_task_back_with_new_dependencies() -> None:
    yard = Yard()
    yard.submit(b"A", b"Z", **PLAIN)
    yard.join(b"w1")
    yard.take(b"w1")
    assert yard.handle(TasksReturned(0, b"w1", [b"A"], [[b"Z"]])) == [ReportAck(b"w1", 0, [])]
    assert yard.state(b"A") is TaskState.BLOCKED
    yard.take(b"w1")
    yard.finish(b"w1", b"Z")
    assert yard.take(b"w1") == [b"A"]
    assert yard.handle(TasksReturned(0, b"w1", [b"Z"])) == [ReportAck(b"w1", 0, [b"Z"])]


def test_dwork_exit_moves_all_tasks_of_a_location_back_to_ready_newest_first() -> None:
    yard = Yard()
    yard.submit(b"A", b"B", b"C", **PLAIN)
    yard.join(b"w1")
    yard.take(b"w1")
    yard.take(b"w1")
    yard.handle(WorkerExited(0, b"w1"))
    yard.join(b"w2")
    assert yard.take(b"w2", 3) == [b"A", b"B", b"C"]
    assert yard.handle(WorkerExited(0, b"w1")) == [UnknownWorker(b"w1")]


def test_dwork_create_again_adds_dependencies_and_never_queues_twice() -> None:
    yard = Yard()
    yard.submit(b"A", **PLAIN)
    yard.submit(b"B", **PLAIN)
    yard.submit(b"A", after=[[b"B"]], **PLAIN)
    yard.join(b"w")
    assert yard.take(b"w", 9) == [b"B"]
    yard.finish(b"w", b"B")
    assert yard.take(b"w", 9) == [b"A"]


# 004: the worker-manager protocol.


def wants_wake(yard: Yard, *workers: bytes) -> None:
    """Register workers that have sent READY."""
    for worker in workers:
        yard.join(worker, slots_total=1, wants_wake=True)
        yard.ask(worker, parks=True)


def test_wmp_ready_wake_give_take_done() -> None:
    yard = Yard()
    wants_wake(yard, b"w")
    assert yard.submit(b"job") == [Accepted(b"client", 0, 1), Wake(b"w", b"default")]
    assert assigned(yard.ask(b"w")) == [b"job"]
    assert yard.finish(b"w", b"job", texts=[b"result"]) == [ReportAck(b"w", 0, [])]


def test_wmp_no_job_left_is_answered_with_no() -> None:
    yard = Yard()
    wants_wake(yard, b"w1")
    yard.submit(b"job")
    yard.join(b"fast")
    assert yard.take(b"fast") == [b"job"]
    assert yard.ask(b"w1") == [NoWork(b"w1", settled=False)]


def test_wmp_wakes_as_many_as_there_are_jobs_and_no_herd() -> None:
    yard = Yard()
    wants_wake(yard, b"w1", b"w2", b"w3")
    effects = yard.submit(b"job-1", b"job-2")
    assert [one for one in effects if isinstance(one, Wake)] == [
        Wake(b"w1", b"default"),
        Wake(b"w2", b"default"),
    ]


def test_wmp_worker_that_does_not_give_in_time_is_passed_over() -> None:
    yard = Yard()
    wants_wake(yard, b"w1", b"w2")
    yard.submit(b"job")
    assert yard.later(1) == [Wake(b"w2", b"default")]


def test_wmp_ready_is_a_level_not_a_count() -> None:
    yard = Yard()
    wants_wake(yard, b"w")
    for _ in range(3):
        assert yard.ask(b"w", parks=True) == []
    effects = yard.submit(b"job-1", b"job-2", b"job-3")
    assert [one for one in effects if isinstance(one, Wake)] == [Wake(b"w", b"default")]


def test_wmp_refused_job_goes_back_without_costing_an_attempt() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    yard.submit(b"job")
    yard.take(b"w")
    yard.report(b"w", b"job", Outcome.REFUSED)
    assert yard.state(b"job") is TaskState.READY
    assert (yard[b"job"].attempt, yard[b"job"].losses, yard[b"job"].failures) == (1, 0, 0)


def test_wmp_cancelled_job_is_stopped_at_its_worker() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    yard.submit(b"job")
    yard.take(b"w")
    effects = yard.handle(CancelRequested(0, b"manager", Scope(names=(b"job",))))
    assert effects == [Stop(b"w", [b"job"], [1], [True]), CommandAck(b"manager", 0, 1)]


def test_wmp_ready_of_a_worker_is_answered_with_wake_never_with_a_job() -> None:
    yard = Yard()
    yard.submit(b"job")
    yard.join(b"w", slots_total=1, wants_wake=True)
    assert yard.ask(b"w", parks=True) == [Wake(b"w", b"default")]


def test_wmp_ready_stands_until_the_slots_are_full() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2, wants_wake=True)
    yard.ask(b"w", parks=True)
    assert yard.submit(b"1", b"2", b"3")[1:] == [Wake(b"w", b"default")]
    effects = yard.ask(b"w")
    assert assigned(effects) == [b"1"]
    assert effects[1:] == [Wake(b"w", b"default")]
    effects = yard.ask(b"w")
    assert assigned(effects) == [b"2"]
    assert effects[1:] == []
    assert yard.finish(b"w", b"1") == [ReportAck(b"w", 0, [])]
    assert yard.ask(b"w", parks=True) == [Wake(b"w", b"default")]


def test_wmp_worker_that_asks_without_ready_is_not_woken_after_its_task() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=3, wants_wake=True)
    yard.ask(b"w", parks=True)
    yard.submit(*(b"%d" % number for number in range(9)))
    for _ in range(3):
        yard.ask(b"w")
    yard.finish(b"w", b"0", b"1")
    effects = yard.ask(b"w")
    assert assigned(effects) == [b"3"]
    assert effects[1:] == []
