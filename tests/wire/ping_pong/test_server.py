"""Ping-pong at the broker, frame by frame."""

from __future__ import annotations

import pytest

from taskyard.core.effects import Accepted, Assign
from taskyard.core.events import (
    CancelRequested,
    DrainRequested,
    ReplyDue,
    RequestRejected,
    Scope,
    WorkerHeartbeat,
)
from taskyard.core.limits import CRASHES_MAX, PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import QueueOrder, Refusal, Submission, Terms, WorkerFacts
from taskyard.core.records import Leased, LeaseExpired, StaleReport, WorkerLeft
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire.ping_pong import server as ping_pong_backend
from taskyard.wire.ping_pong.server import make_server
from tests.wire.ping_pong.kit import BACKEND, FRONTEND, W1, W2, W3, Harness

READY, PING, PONG, EXIT, DISCONNECT = b"READY", b"PING", b"PONG", b"EXIT", b"DISCONNECT"
ERROR, FULL = b"ERROR", b"FULL"

LEASED, DONE = TaskState.LEASED, TaskState.DONE


def at_work(job: bytes = b"job", identity: bytes = W1) -> Harness:
    """Return a broker whose worker has just got a client's job."""
    harness = Harness()
    assert harness.worker(identity, READY) == [[PONG]]
    assert harness.client(b"c", job) == []
    assert harness.to_worker(identity) == [[job]]
    return harness


def ping(harness: Harness, seconds: int, *identities: bytes) -> None:
    """Let time pass while these peers ping."""
    for _ in range(seconds):
        harness.later(1)
        for identity in identities:
            assert harness.worker(identity, PING) == [[PONG]]


# New connections of workers that chose their id.


CHOSEN = b"own-id"


def reconnected(harness: Harness) -> Harness:
    harness.handle(harness.board.reconnected(BACKEND + CHOSEN, harness.now_ns))
    return harness


def test_job_lost_with_its_connection_goes_to_the_next_worker_after_the_lease_time() -> None:
    harness = reconnected(at_work(identity=CHOSEN))
    ping(harness, 30, CHOSEN)
    reconnected(harness)
    ping(harness, 29, CHOSEN)
    harness.worker(W2, READY)
    assert harness.to_worker(W2) == []
    harness.later(1)
    assert harness.to_worker(W2) == [[b"job"]]
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)


def test_worker_whose_job_may_be_lost_gets_no_reply_until_it_sends_ready() -> None:
    harness = reconnected(at_work(identity=CHOSEN))
    ping(harness, 59, CHOSEN)
    harness.later(1)
    assert harness.worker(CHOSEN, PING) == []
    assert harness.worker(CHOSEN, READY) == [[PONG], [b"job"]]


def test_result_on_a_new_connection_counts_until_the_lease_time() -> None:
    harness = reconnected(at_work(identity=CHOSEN))
    ping(harness, 59, CHOSEN)
    assert harness.worker(CHOSEN, b"result") == []
    assert harness.to_client(b"c") == [[b"result"]]
    ping(harness, 100, CHOSEN)


def test_late_result_of_a_worker_that_reconnected_is_stale_and_it_gets_the_next_job() -> None:
    harness = reconnected(at_work(identity=CHOSEN))
    ping(harness, 59, CHOSEN)
    harness.later(1)
    assert harness.worker(CHOSEN, b"result") == [[PONG], [b"job"]]
    assert harness.backend.stale == 1


def test_restarted_process_under_the_id_of_a_worker_is_charged() -> None:
    harness = reconnected(at_work(identity=CHOSEN))
    harness.worker(CHOSEN, READY)
    harness.later(60)
    (task,) = harness.scheduler.ledger.tasks.values()
    assert task.losses == 1


@pytest.mark.parametrize("is_noticed", [True, False])
@pytest.mark.parametrize("crosses", [True, False])
def test_restarted_process_gets_no_reply_after_the_lease_time_until_it_sends_ready(
    *, crosses: bool, is_noticed: bool
) -> None:
    harness = at_work(identity=CHOSEN)
    if crosses:
        harness.worker(CHOSEN, READY)
    if is_noticed:
        reconnected(harness)
    assert harness.worker(CHOSEN, READY) == [[PONG]]
    ping(harness, 59, CHOSEN)
    harness.later(1)
    assert harness.worker(CHOSEN, PING) == []
    reconnected(harness)
    assert harness.worker(CHOSEN, READY) == [[PONG], [b"job"]]
    ping(harness, 100, CHOSEN)
    harness.worker(CHOSEN, b"result")
    assert harness.to_client(b"c") == [[b"result"]]


def test_restarted_process_gets_a_job_by_ready_after_that_of_the_former_was_cancelled() -> None:
    harness = reconnected(at_work(identity=CHOSEN))
    harness.worker(CHOSEN, READY)
    harness.handle([CancelRequested(0, b"x", Scope())])
    harness.client(b"d", b"other")
    assert harness.worker(CHOSEN, PING) == []
    assert harness.worker(CHOSEN, READY) == [[PONG], [b"other"]]


def test_late_result_of_a_worker_whose_ready_crossed_its_job_is_not_that_of_the_next() -> None:
    harness = at_work(identity=CHOSEN)
    harness.worker(CHOSEN, READY)
    harness.later(60)
    harness.client(b"d", b"other")
    harness.worker(W2, READY)
    assert harness.worker(CHOSEN, PING) == []
    assert harness.worker(CHOSEN, b"late") == [[PONG], [b"other"]]
    assert harness.to_client(b"d") == []
    harness.worker(CHOSEN, b"result")
    assert harness.to_client(b"d") == [[b"result"]]


# Words.


@pytest.mark.parametrize("word", [b"ping", b"ping, 1", b"PING, 1", b"ping,12", b"PING"])
def test_ping_in_any_spelling_is_not_a_result(word: bytes) -> None:
    harness = at_work()
    assert harness.worker(W1, word) == [[PONG]]
    assert [*harness.states().values()] == [LEASED]
    assert harness.worker(W1, b"result") == []
    assert harness.to_client(b"c") == [[b"result"]]
    assert harness.worker(W2, word) == [[PONG]]
    assert len(harness.backend.peers) == 2


def test_ping_in_small_letters_has_its_number_in_a_separate_frame() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    assert harness.worker(W1, b"ping", b"7") == [[PONG, b"1"]]


@pytest.mark.parametrize("word", [b"ping pong", b"ping, ", b"ping, x", b"Ping", b"pinging"])
def test_result_that_begins_like_a_ping_is_a_result(word: bytes) -> None:
    harness = at_work()
    assert harness.worker(W1, word) == []
    assert harness.to_client(b"c") == [[word]]


def test_ready_gets_a_pong_and_a_job_brings_its_result_to_the_client() -> None:
    harness = Harness()
    assert harness.worker(W1, READY) == [[PONG]]
    assert harness.client(b"c", b"job") == []
    assert harness.to_worker(W1) == [[b"job"]]
    assert harness.worker(W1, b"result") == []
    assert harness.to_client(b"c") == [[b"result"]]
    assert harness.sent == []


def test_pong_is_sent_before_a_waiting_job() -> None:
    harness = Harness()
    harness.client(b"c", b"job")
    assert harness.worker(W1, READY) == [[PONG], [b"job"]]


def test_next_job_is_sent_at_once_after_a_result() -> None:
    harness = at_work(b"1")
    harness.client(b"d", b"2")
    assert harness.worker(W1, b"one") == [[b"2"]]


def test_ping_gets_a_pong_and_makes_no_record() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    harness.records()
    assert harness.worker(W1, PING) == [[PONG]]
    assert harness.records() == []


def test_counted_ping_gets_the_broker_s_count_of_that_worker_s_pings() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    assert harness.worker(W1, PING, b"17") == [[PONG, b"1"]]
    assert harness.worker(W1, PING) == [[PONG]]
    assert harness.worker(W1, PING, b"3") == [[PONG, b"3"]]
    assert harness.worker(W2, PING, b"3") == [[PONG, b"1"]]


def test_disconnect_returns_the_job_without_a_charge() -> None:
    harness = at_work()
    harness.worker(W2, READY)
    assert harness.worker(W1, DISCONNECT) == []
    assert harness.to_worker(W2) == [[b"job"]]
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)
    assert len(harness.workers()) == 1


def test_disconnect_of_an_unknown_peer_is_ignored() -> None:
    harness = Harness()
    assert harness.worker(W1, DISCONNECT) == []
    assert harness.backend.malformed == 0


def test_result_without_a_job_is_stale_and_gets_a_pong() -> None:
    harness = Harness()
    assert harness.worker(W1, b"result") == [[PONG]]
    harness.worker(W1, READY)
    before = ledger_fingerprint(harness.scheduler.ledger)
    assert harness.worker(W1, b"result") == [[PONG]]
    assert ledger_fingerprint(harness.scheduler.ledger) == before
    assert harness.backend.stale == 2


def test_failure_with_its_reason_is_an_error_to_the_client() -> None:
    harness = at_work()
    assert harness.worker(W1, ERROR, b"no such file") == []
    assert harness.to_client(b"c") == [[ERROR, b"no such file"]]
    assert [*harness.states().values()] == [TaskState.FAILED]


def test_failed_job_is_retried_by_the_schedule_of_its_task() -> None:
    harness = Harness()
    terms = Terms(retry_delays_ns=(10 * SECOND_NS,))
    harness.create(Submission([b"t"], [b"p"], [terms]))
    assert harness.worker(W1, READY) == [[PONG], [b"p"]]
    assert harness.worker(W1, ERROR, b"no") == []
    ping(harness, 9, W1)
    harness.later(1)
    assert harness.to_worker(W1) == [[b"p"]]


def test_error_of_two_frames_is_a_result() -> None:
    harness = at_work()
    assert harness.worker(W1, ERROR) == []
    assert harness.to_client(b"c") == [[ERROR]]
    assert [*harness.states().values()] == [DONE]


def test_too_long_a_result_fails_its_job() -> None:
    harness = at_work()
    assert harness.worker(W1, b"x" * (PAYLOAD_BYTES_MAX + 1)) == []
    ((word, reason),) = harness.to_client(b"c")
    assert (word, b"%d" % PAYLOAD_BYTES_MAX in reason) == (ERROR, True)


def test_drained_worker_gets_exit_after_its_result_and_to_every_message() -> None:
    harness = at_work()
    (name,) = harness.workers()
    harness.handle([DrainRequested(0, b"x", name)])
    assert harness.to_worker(W1) == []
    assert harness.worker(W1, PING) == [[PONG]]
    assert harness.worker(W1, b"result") == [[EXIT]]
    assert harness.workers() == []
    assert [harness.worker(W1, word) for word in (PING, READY, b"result")] == [[[EXIT]]] * 3
    assert harness.workers() == []


def test_broker_that_shuts_down_sends_exit_and_waits_for_running_jobs() -> None:
    harness = at_work()
    harness.backend.leaving = True
    harness.handle([DrainRequested(0, b"x")])
    assert harness.worker(W2, READY) == [[EXIT]]
    assert harness.worker(W3, PING) == [[EXIT]]
    assert harness.worker(W1, PING) == [[PONG]]
    assert harness.worker(W1, b"result") == [[EXIT]]
    assert harness.to_client(b"c") == [[b"result"]]


# Events and effects, as lists.


def test_rejected_jobs_have_codes() -> None:
    _, frontend = make_server(1, lambda: 7)
    rejected = [
        *frontend.receive(b"c", [b"no delimiter", b"job"], 5),
        *frontend.receive(b"c", [b"", EXIT], 5),
        *frontend.receive(b"c", [b"", bytes(PAYLOAD_BYTES_MAX + 1)], 5),
    ]
    frontend.leaving = True
    rejected += frontend.receive(b"c", [b"", b"job"], 5)
    assert [type(event) for event in rejected] == [RequestRejected] * 4
    assert [event.refusal for event in rejected] == [  # type: ignore[attr-defined]
        Refusal.MALFORMED,
        Refusal.MALFORMED,
        Refusal.TOO_MANY,
        Refusal.SHUTTING_DOWN,
    ]


def test_words_become_events_and_a_result_has_its_task_and_attempt() -> None:
    backend, frontend = make_server(1, lambda: 7)
    route = BACKEND + W1
    answer, joined = backend.receive(route, [b"", READY], 5)
    assert answer == ReplyDue(0, route, 65)
    assert joined.worker == b"ping-pong:01-0000000001"  # type: ignore[attr-defined]
    facts: WorkerFacts = joined.facts  # type: ignore[attr-defined]
    assert facts == WorkerFacts(
        services=(b"default",),
        slots_total=1,
        lease_timeout_ns=63 * SECOND_NS,
        incarnation=(7 << 30) + 1,
        always_ready=True,
        dialect=b"ping-pong",
        restart_lease_ns=3 * SECOND_NS,
        reserved_payloads=(b"PONG", b"EXIT"),
        queue_order=QueueOrder.FIFO,
    )
    assert backend.receive(route, [b"", PING], 6) == [
        WorkerHeartbeat(0, b"ping-pong:01-0000000001", request=129)
    ]
    assign = Assign(joined.worker, [b"t"], [4], [b"p"], [Terms()], [b""], 0)  # type: ignore[attr-defined]
    assert backend.reply(assign) == [(route, [b"", b"p"])]
    (report,) = backend.receive(route, [b"", b"result"], 7)
    assert (report.names, report.attempts, report.texts) == (  # type: ignore[attr-defined]
        [b"t"], [4], [b"result"],
    )  # fmt: skip
    (asked,) = frontend.receive(FRONTEND + b"c", [b"", b"job"], 8)
    assert asked.submission.payloads == [b"job"]  # type: ignore[attr-defined]
    assert asked.watch  # type: ignore[attr-defined]
    assert frontend.reply(Accepted(FRONTEND + b"c", asked.request, 1)) == []  # type: ignore[attr-defined]


def test_worker_s_name_is_printable_and_unique() -> None:
    names = [
        ping_pong_backend.name_of(BACKEND + identity)
        for identity in (b"alice", b"\0\x1f", b"001f", b"-001f", b"al ice", b"\xff", b"", b"a\n")
    ]
    assert names[:3] == [b"ping-pong:01/alice", b"ping-pong:01-001f", b"ping-pong:01/001f"]
    assert len({*names}) == len(names)


# Timeouts.


def test_waiting_worker_expires_after_three_seconds_of_silence() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    harness.later(2.9)
    assert len(harness.workers()) == 1
    harness.later(0.1)
    assert harness.workers() == []
    assert harness.to_worker(W1) == []


def test_every_message_renews_a_worker() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    for word in (PING, READY, b"stale", PING):
        harness.later(2)
        assert harness.worker(W1, word) == [[PONG]]
    assert len(harness.workers()) == 1


def test_worker_that_expired_while_it_waited_is_registered_again_by_a_ping() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    harness.later(5)
    harness.client(b"c", b"job")
    assert harness.worker(W1, PING) == [[PONG], [b"job"]]


def test_worker_that_works_without_pings_has_the_lease_time() -> None:
    harness = at_work()
    harness.later(59)
    assert [*harness.states().values()] == [LEASED]
    assert harness.worker(W1, b"result") == []
    assert harness.to_client(b"c") == [[b"result"]]


def test_worker_that_is_silent_for_the_lease_time_loses_its_job_to_another() -> None:
    harness = at_work()
    harness.later(59)
    harness.worker(W2, READY)
    harness.records()
    harness.later(1)
    assert harness.to_worker(W2) == [[b"job"]]
    assert harness.to_worker(W1) == []
    expired, left, leased = harness.records()
    assert isinstance(expired, LeaseExpired)
    assert isinstance(left, WorkerLeft)
    assert isinstance(leased, Leased)
    assert (left.reason, leased.attempts) == (b"silent", [2])


def test_worker_that_pings_at_work_expires_after_three_seconds_of_silence() -> None:
    harness = at_work()
    harness.worker(W2, READY)
    ping(harness, 100, W1, W2)
    assert [*harness.states().values()] == [LEASED]
    harness.later(2)
    assert harness.worker(W2, PING) == [[PONG]]
    harness.later(1)
    assert harness.to_worker(W2) == [[b"job"]]


def test_ping_that_crossed_the_job_does_not_count_as_a_ping_at_work() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    harness.later(2)  # the job is assigned long after the worker's last message
    harness.client(b"c", b"job")
    harness.to_worker(W1)
    harness.later(0.1)
    assert harness.worker(W1, PING) == [[PONG]]
    harness.later(50)
    assert harness.worker(W1, b"result") == []
    assert harness.to_client(b"c") == [[b"result"]]


def test_task_with_a_longer_lease_extends_the_timeout() -> None:
    harness = Harness()
    harness.create(Submission([b"t"], [b"p"], [Terms(lease_ns=500 * SECOND_NS)]))
    assert harness.worker(W1, READY) == [[PONG], [b"p"]]
    harness.later(1)
    assert harness.worker(W1, PING) == [[PONG]]
    harness.later(499)
    assert harness.states() == {b"t": LEASED}
    harness.later(1)
    assert harness.states() == {b"t": TaskState.READY}


def test_late_result_changes_nothing_is_recorded_and_frees_its_worker() -> None:
    harness = at_work()
    harness.later(60)
    harness.worker(W2, READY)
    assert harness.to_worker(W2) == []
    harness.records()
    harness.client(b"d", b"other")
    assert harness.worker(W1, b"late") == [[PONG], [b"other"]]
    assert [type(record) for record in harness.records()].count(StaleReport) == 1
    assert harness.worker(W2, b"in time") == []
    assert harness.to_client(b"c") == [[b"in time"]]


def test_worker_that_may_still_run_an_expired_job_gets_no_other_by_its_pings() -> None:
    harness = at_work()
    ping(harness, 2, W1)
    harness.later(10)  # the network was down
    harness.client(b"d", b"other")
    ping(harness, 100, W1)
    assert harness.worker(W1, READY) == [[PONG], [b"job"]]


def test_job_that_kills_its_workers_fails() -> None:
    harness = Harness()
    harness.client(b"c", b"poison")
    for number in range(CRASHES_MAX):
        identity = b"\0\0\0\0%c" % number
        assert harness.worker(identity, READY) == [[PONG], [b"poison"]]
        harness.later(60)
    assert harness.to_client(b"c") == [[ERROR, b"lost %d workers" % CRASHES_MAX]]


# Order of workers.


def test_job_is_given_to_the_worker_that_has_waited_longest() -> None:
    harness = Harness()
    for identity in (W3, W1, W2):
        harness.worker(identity, READY)
    harness.client(b"c", b"1")
    assert harness.to_worker(W3) == [[b"1"]]
    harness.worker(W3, b"one")
    for number, identity in enumerate((W1, W2, W3)):
        harness.client(b"c", b"%d" % number)
        assert harness.to_worker(identity) == [[b"%d" % number]]


def test_worker_that_just_finished_is_last_in_line() -> None:
    harness = at_work(b"long")
    harness.worker(W2, READY)
    harness.client(b"d", b"short")
    assert harness.to_worker(W2) == [[b"short"]]
    harness.worker(W2, b"done")
    harness.worker(W1, b"done")
    harness.client(b"c", b"next")
    assert harness.to_worker(W2) == [[b"next"]]


def test_ping_of_a_busy_worker_does_not_make_it_ready() -> None:
    harness = at_work()
    harness.client(b"d", b"other")
    ping(harness, 100, W1)


@pytest.mark.parametrize("identity", [W1, b"named"])
def test_ready_of_a_busy_worker_does_not_make_it_ready(identity: bytes) -> None:
    harness = at_work(identity=identity)
    harness.client(b"d", b"other")
    assert harness.worker(identity, READY) == [[PONG]]
    assert harness.worker(identity, b"result") == [[b"other"]]
    assert harness.to_client(b"c") == [[b"result"]]


def test_ready_of_a_busy_connection_that_pings_costs_it_nothing() -> None:
    harness = at_work()
    assert harness.worker(W1, READY) == [[PONG]]
    ping(harness, 100, W1)
    harness.worker(W1, b"result")
    assert harness.to_client(b"c") == [[b"result"]]


def test_named_worker_that_sends_ready_with_a_job_has_the_lease_time_whatever_it_pings() -> None:
    harness = at_work(identity=b"named")
    harness.worker(b"named", READY)  # a new process under the same name, without the job
    ping(harness, 59, b"named")
    harness.worker(W2, READY)
    harness.later(1)
    assert harness.to_worker(W2) == [[b"job"]]


# Probation.


def test_worker_that_sent_only_ping_gets_no_job_before_ready() -> None:
    harness = Harness()
    harness.client(b"c", b"job")
    ping(harness, 3, W1)
    assert harness.workers() == []
    assert harness.worker(W1, READY) == [[PONG], [b"job"]]


@pytest.mark.parametrize("period", [1, 4])
def test_worker_on_probation_gets_pongs_until_it_should_have_reconnected(period: int) -> None:
    harness = Harness()
    harness.client(b"c", b"job")
    assert harness.worker(W1, PING) == [[PONG]]
    received = []
    for _ in range(90):
        harness.later(period)
        received += harness.worker(W1, PING)
    assert received == [[PONG]] * (2 if period == 1 else 0)
    assert harness.worker(W1, PING, b"1") == []
    assert harness.worker(W1, b"result") == []
    assert harness.workers() == []
    assert harness.worker(W1, READY) == [[PONG], [b"job"]]
    assert harness.worker(W1, PING) == [[PONG]]


def test_result_of_a_worker_on_probation_changes_nothing() -> None:
    harness = Harness()
    harness.client(b"c", b"job")
    harness.worker(W1, PING)
    assert harness.worker(W1, b"result of another connection") == [[PONG]]
    harness.later(60)
    assert harness.worker(W1, b"result of another connection") == []
    assert [*harness.states().values()] == [TaskState.READY]
