"""Ping-pong at the broker, frame by frame."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.core import events, old_snapshots
from taskyard.core.effects import Accepted, Assign
from taskyard.core.events import CancelRequested, DrainRequested, ReplyDue, Scope, WorkerHeartbeat
from taskyard.core.limits import CRASHES_MAX, PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.records import Finished, Leased, LeaseExpired, Returned, StaleReport, WorkerLeft
from taskyard.core.states import TaskState
from taskyard.core.workers import WorkerFacts
from taskyard.wire.ping_pong import backend as ping_pong_backend
from taskyard.wire.ping_pong import server as ping_pong_server
from taskyard.wire.ping_pong.backend import FORGET_NS
from taskyard.wire.ping_pong.frames import COUNT_DIGITS_MAX, Settings
from taskyard.wire.ping_pong.server import make_server
from tests.wire.ping_pong.kit import BACKEND, FRONTEND, W1, W2, W3, Hall

if TYPE_CHECKING:
    from collections.abc import Iterator

READY, PING, PONG, EXIT, DISCONNECT = b"READY", b"PING", b"PONG", b"EXIT", b"DISCONNECT"
ERROR, FULL = b"ERROR", b"FULL"

LEASED, DONE = TaskState.LEASED, TaskState.DONE


def at_work(job: bytes = b"job", identity: bytes = W1) -> Hall:
    """Return a broker whose worker has just got a client's job."""
    hall = Hall()
    assert hall.worker(identity, READY) == [[PONG]]
    assert hall.client(b"c", job) == []
    assert hall.to_worker(identity) == [[job]]
    return hall


def ping(hall: Hall, seconds: int, *identities: bytes) -> None:
    """Let time pass while these peers ping."""
    for _ in range(seconds):
        hall.later(1)
        for identity in identities:
            assert hall.worker(identity, PING) == [[PONG]]


# Words.


@pytest.mark.parametrize("word", [b"ping", b"ping, 1", b"PING, 1", b"ping,12", b"PING"])
def test_ping_in_any_spelling_is_not_a_result(word: bytes) -> None:
    hall = at_work()
    assert hall.worker(W1, word) == [[PONG]]
    assert [*hall.states().values()] == [LEASED]
    assert hall.worker(W1, b"result") == []
    assert hall.to_client(b"c") == [[b"result"]]
    assert hall.worker(W2, word) == [[PONG]]
    assert hall.backend.peer_count == 2


def test_ping_in_small_letters_has_its_number_in_a_separate_frame() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    assert hall.worker(W1, b"ping", b"7") == [[PONG, b"1"]]


@pytest.mark.parametrize("word", [b"ping pong", b"ping, ", b"ping, x", b"Ping", b"pinging"])
def test_result_that_begins_like_a_ping_is_a_result(word: bytes) -> None:
    hall = at_work()
    assert hall.worker(W1, word) == []
    assert hall.to_client(b"c") == [[word]]


def test_ready_gets_a_pong_and_a_job_brings_its_result_to_the_client() -> None:
    hall = Hall()
    assert hall.worker(W1, READY) == [[PONG]]
    assert hall.client(b"c", b"job") == []
    assert hall.to_worker(W1) == [[b"job"]]
    assert hall.worker(W1, b"result") == []
    assert hall.to_client(b"c") == [[b"result"]]
    assert hall.sent == []


def test_pong_is_sent_before_a_waiting_job() -> None:
    hall = Hall()
    hall.client(b"c", b"job")
    assert hall.worker(W1, READY) == [[PONG], [b"job"]]


def test_next_job_is_sent_at_once_after_a_result() -> None:
    hall = at_work(b"1")
    hall.client(b"d", b"2")
    assert hall.worker(W1, b"one") == [[b"2"]]


def test_ping_gets_a_pong_and_makes_no_record() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    hall.records()
    assert hall.worker(W1, PING) == [[PONG]]
    assert hall.records() == []


def test_counted_ping_gets_the_broker_s_count_of_that_worker_s_pings() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    assert hall.worker(W1, PING, b"17") == [[PONG, b"1"]]
    assert hall.worker(W1, PING) == [[PONG]]
    assert hall.worker(W1, PING, b"3") == [[PONG, b"3"]]
    assert hall.worker(W2, PING, b"3") == [[PONG, b"1"]]


def test_disconnect_returns_the_job_without_a_charge() -> None:
    hall = at_work()
    hall.worker(W2, READY)
    assert hall.worker(W1, DISCONNECT) == []
    assert hall.to_worker(W2) == [[b"job"]]
    (task,) = hall.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)
    assert len(hall.workers()) == 1


def test_disconnect_of_an_unknown_peer_is_ignored() -> None:
    hall = Hall()
    assert hall.worker(W1, DISCONNECT) == []
    assert hall.backend.malformed == 0


def test_result_without_a_job_is_stale_and_gets_a_pong() -> None:
    hall = Hall()
    assert hall.worker(W1, b"result") == [[PONG]]
    hall.worker(W1, READY)
    before = old_snapshots.fingerprint(hall.scheduler.ledger)
    assert hall.worker(W1, b"result") == [[PONG]]
    assert old_snapshots.fingerprint(hall.scheduler.ledger) == before
    assert hall.backend.stale == 2


def test_failure_with_its_reason_is_an_error_to_the_client() -> None:
    hall = at_work()
    assert hall.worker(W1, ERROR, b"no such file") == []
    assert hall.to_client(b"c") == [[ERROR, b"no such file"]]
    assert [*hall.states().values()] == [TaskState.FAILED]


def test_failed_job_is_retried_by_the_schedule_of_its_task() -> None:
    hall = Hall()
    terms = Terms(retry_delays_ns=(10 * SECOND_NS,))
    hall.create(Submission([b"t"], [b"p"], [terms]))
    assert hall.worker(W1, READY) == [[PONG], [b"p"]]
    assert hall.worker(W1, ERROR, b"no") == []
    ping(hall, 9, W1)
    hall.later(1)
    assert hall.to_worker(W1) == [[b"p"]]


def test_error_of_two_frames_is_a_result() -> None:
    hall = at_work()
    assert hall.worker(W1, ERROR) == []
    assert hall.to_client(b"c") == [[ERROR]]
    assert [*hall.states().values()] == [DONE]


def test_too_long_a_result_fails_its_job() -> None:
    hall = at_work()
    assert hall.worker(W1, b"x" * (PAYLOAD_BYTES_MAX + 1)) == []
    ((word, reason),) = hall.to_client(b"c")
    assert (word, b"%d" % PAYLOAD_BYTES_MAX in reason) == (ERROR, True)


def test_drained_worker_gets_exit_after_its_result_and_to_every_message() -> None:
    hall = at_work()
    (name,) = hall.workers()
    hall.handle([DrainRequested(0, b"x", name)])
    assert hall.to_worker(W1) == []
    assert hall.worker(W1, PING) == [[PONG]]
    assert hall.worker(W1, b"result") == [[EXIT]]
    assert hall.workers() == []
    assert [hall.worker(W1, word) for word in (PING, READY, b"result")] == [[[EXIT]]] * 3
    assert hall.workers() == []


def test_broker_that_shuts_down_sends_exit_and_waits_for_running_jobs() -> None:
    hall = at_work()
    hall.backend.leaving = True
    hall.handle([DrainRequested(0, b"x")])
    assert hall.worker(W2, READY) == [[EXIT]]
    assert hall.worker(W3, PING) == [[EXIT]]
    assert hall.worker(W1, PING) == [[PONG]]
    assert hall.worker(W1, b"result") == [[EXIT]]
    assert hall.to_client(b"c") == [[b"result"]]


# Events and effects, as lists.


def test_words_become_events_and_a_result_has_its_task_and_attempt() -> None:
    backend, frontend = make_server(1, lambda: 7)
    route = BACKEND + W1
    answer, joined = backend.receive(route, [b"", READY], 5)
    assert answer == ReplyDue(0, route, 17)
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
    )
    assert backend.receive(route, [b"", PING], 6) == [
        WorkerHeartbeat(0, b"ping-pong:01-0000000001", request=33)
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
    hall = Hall()
    hall.worker(W1, READY)
    hall.later(2.9)
    assert len(hall.workers()) == 1
    hall.later(0.1)
    assert hall.workers() == []
    assert hall.to_worker(W1) == []


def test_every_message_renews_a_worker() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    for word in (PING, READY, b"stale", PING):
        hall.later(2)
        assert hall.worker(W1, word) == [[PONG]]
    assert len(hall.workers()) == 1


def test_worker_that_expired_while_it_waited_is_registered_again_by_a_ping() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    hall.later(5)
    hall.client(b"c", b"job")
    assert hall.worker(W1, PING) == [[PONG], [b"job"]]


def test_worker_that_works_without_pings_has_the_lease_time() -> None:
    hall = at_work()
    hall.later(59)
    assert [*hall.states().values()] == [LEASED]
    assert hall.worker(W1, b"result") == []
    assert hall.to_client(b"c") == [[b"result"]]


def test_worker_that_is_silent_for_the_lease_time_loses_its_job_to_another() -> None:
    hall = at_work()
    hall.later(59)
    hall.worker(W2, READY)
    hall.records()
    hall.later(1)
    assert hall.to_worker(W2) == [[b"job"]]
    assert hall.to_worker(W1) == []
    expired, left, leased = hall.records()
    assert isinstance(expired, LeaseExpired)
    assert isinstance(left, WorkerLeft)
    assert isinstance(leased, Leased)
    assert (left.reason, leased.attempts) == (b"silent", [2])


def test_worker_that_pings_at_work_expires_after_three_seconds_of_silence() -> None:
    hall = at_work()
    hall.worker(W2, READY)
    ping(hall, 100, W1, W2)
    assert [*hall.states().values()] == [LEASED]
    hall.later(2)
    assert hall.worker(W2, PING) == [[PONG]]
    hall.later(1)
    assert hall.to_worker(W2) == [[b"job"]]


def test_ping_that_crossed_the_job_does_not_count_as_a_ping_at_work() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    hall.later(2)  # the job is assigned long after the worker's last message
    hall.client(b"c", b"job")
    hall.to_worker(W1)
    hall.later(0.1)
    assert hall.worker(W1, PING) == [[PONG]]
    hall.later(50)
    assert hall.worker(W1, b"result") == []
    assert hall.to_client(b"c") == [[b"result"]]


def test_task_with_a_longer_lease_extends_the_timeout() -> None:
    hall = Hall()
    hall.create(Submission([b"t"], [b"p"], [Terms(lease_ns=500 * SECOND_NS)]))
    assert hall.worker(W1, READY) == [[PONG], [b"p"]]
    hall.later(1)
    assert hall.worker(W1, PING) == [[PONG]]
    hall.later(499)
    assert hall.states() == {b"t": LEASED}
    hall.later(1)
    assert hall.states() == {b"t": TaskState.READY}


def test_late_result_changes_nothing_is_recorded_and_frees_its_worker() -> None:
    hall = at_work()
    hall.later(60)
    hall.worker(W2, READY)
    assert hall.to_worker(W2) == []
    hall.records()
    hall.client(b"d", b"other")
    assert hall.worker(W1, b"late") == [[PONG], [b"other"]]
    assert [type(record) for record in hall.records()].count(StaleReport) == 1
    assert hall.worker(W2, b"in time") == []
    assert hall.to_client(b"c") == [[b"in time"]]


def test_worker_that_may_still_run_an_expired_job_gets_no_other_by_its_pings() -> None:
    hall = at_work()
    ping(hall, 2, W1)
    hall.later(10)  # the network was down
    hall.client(b"d", b"other")
    ping(hall, 100, W1)
    assert hall.worker(W1, READY) == [[PONG], [b"job"]]


def test_job_that_kills_its_workers_fails() -> None:
    hall = Hall()
    hall.client(b"c", b"poison")
    for number in range(CRASHES_MAX):
        identity = b"\0\0\0\0%c" % number
        assert hall.worker(identity, READY) == [[PONG], [b"poison"]]
        hall.later(60)
    assert hall.to_client(b"c") == [[ERROR, b"lost %d workers" % CRASHES_MAX]]


# Order of workers.


def test_job_is_given_to_the_worker_that_has_waited_longest() -> None:
    hall = Hall()
    for identity in (W3, W1, W2):
        hall.worker(identity, READY)
    hall.client(b"c", b"1")
    assert hall.to_worker(W3) == [[b"1"]]
    hall.worker(W3, b"one")
    for number, identity in enumerate((W1, W2, W3)):
        hall.client(b"c", b"%d" % number)
        assert hall.to_worker(identity) == [[b"%d" % number]]


def test_worker_that_just_finished_is_last_in_line() -> None:
    hall = at_work(b"long")
    hall.worker(W2, READY)
    hall.client(b"d", b"short")
    assert hall.to_worker(W2) == [[b"short"]]
    hall.worker(W2, b"done")
    hall.worker(W1, b"done")
    hall.client(b"c", b"next")
    assert hall.to_worker(W2) == [[b"next"]]


def test_ping_of_a_busy_worker_does_not_make_it_ready() -> None:
    hall = at_work()
    hall.client(b"d", b"other")
    ping(hall, 100, W1)


@pytest.mark.parametrize("identity", [W1, b"named"])
def test_ready_of_a_busy_worker_does_not_make_it_ready(identity: bytes) -> None:
    hall = at_work(identity=identity)
    hall.client(b"d", b"other")
    assert hall.worker(identity, READY) == [[PONG]]
    assert hall.worker(identity, b"result") == [[b"other"]]
    assert hall.to_client(b"c") == [[b"result"]]


def test_ready_of_a_busy_connection_that_pings_costs_it_nothing() -> None:
    hall = at_work()
    assert hall.worker(W1, READY) == [[PONG]]
    ping(hall, 100, W1)
    hall.worker(W1, b"result")
    assert hall.to_client(b"c") == [[b"result"]]


def test_named_worker_that_sends_ready_with_a_job_has_the_lease_time_whatever_it_pings() -> None:
    hall = at_work(identity=b"named")
    hall.worker(b"named", READY)  # a new process under the same name, without the job
    ping(hall, 59, b"named")
    hall.worker(W2, READY)
    hall.later(1)
    assert hall.to_worker(W2) == [[b"job"]]


# Probation.


def test_worker_that_sent_only_ping_gets_no_job_before_ready() -> None:
    hall = Hall()
    hall.client(b"c", b"job")
    ping(hall, 3, W1)
    assert hall.workers() == []
    assert hall.worker(W1, READY) == [[PONG], [b"job"]]


@pytest.mark.parametrize("period", [1, 4])
def test_worker_on_probation_gets_pongs_until_it_should_have_reconnected(period: int) -> None:
    hall = Hall()
    hall.client(b"c", b"job")
    assert hall.worker(W1, PING) == [[PONG]]
    received = []
    for _ in range(90):
        hall.later(period)
        received += hall.worker(W1, PING)
    assert received == [[PONG]] * (2 if period == 1 else 0)
    assert hall.worker(W1, PING, b"1") == []
    assert hall.worker(W1, b"result") == []
    assert hall.workers() == []
    assert hall.worker(W1, READY) == [[PONG], [b"job"]]
    assert hall.worker(W1, PING) == [[PONG]]


def test_result_of_a_worker_on_probation_changes_nothing() -> None:
    hall = Hall()
    hall.client(b"c", b"job")
    hall.worker(W1, PING)
    assert hall.worker(W1, b"result of another connection") == [[PONG]]
    hall.later(60)
    assert hall.worker(W1, b"result of another connection") == []
    assert [*hall.states().values()] == [TaskState.READY]


# Unreachable routes and restarts.


@pytest.mark.parametrize("is_received", [False, True])
def test_job_from_before_a_restart_goes_to_another_after_the_expiry_and_is_not_charged(
    *, is_received: bool
) -> None:
    hall = at_work()
    hall.restart()
    hall.worker(W2, READY)
    for _ in range(2):
        hall.later(1)
        hall.worker(W2, PING)
        if is_received:
            hall.worker(W3, PING)  # the same worker, by another connection
    assert [*hall.states().values()] == [LEASED]
    hall.later(1)
    assert hall.to_worker(W2) == [[b"job"]]
    (task,) = hall.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)


def test_ready_of_a_named_worker_after_a_restart_does_not_charge_its_job() -> None:
    hall = at_work(identity=b"named")
    hall.restart()
    assert hall.worker(b"named", READY) == [[PONG], [b"job"]]
    (task,) = hall.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)


def test_job_after_a_restart_has_its_full_lease_time() -> None:
    hall = Hall()
    hall.restart()
    hall.worker(W1, READY)
    hall.client(b"c", b"job")
    hall.later(59)
    assert [*hall.states().values()] == [LEASED]


def test_undelivered_job_goes_to_another_worker_without_a_charge() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    hall.worker(W2, READY)
    hall.dead = [BACKEND + W1]
    hall.client(b"c", b"job")
    assert hall.to_worker(W2) == [[b"job"]]
    (task,) = hall.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)


def test_worker_found_dead_by_its_pong_is_charged_to_its_job() -> None:
    hall = at_work()
    hall.dead = [BACKEND + W1]
    hall.worker(W1, PING)
    (task,) = hall.scheduler.ledger.tasks.values()
    assert (task.state, task.losses) == (TaskState.READY, 1)
    assert hall.workers() == []


def test_named_worker_of_a_former_broker_is_new_and_its_job_runs_again() -> None:
    hall = at_work(identity=b"named")
    hall.open(random_bits=8)
    assert hall.worker(b"named", b"result") == [[PONG]]
    assert hall.worker(b"named", READY) == [[PONG], [b"job"]]


def test_same_name_on_two_sockets_is_two_workers() -> None:
    hall = Hall()
    hall.worker(b"named", READY)
    hall.handle(hall.backend.receive(b"\5named", [b"", READY], hall.now_ns))
    assert hall.workers() == [b"ping-pong:01/named", b"ping-pong:05/named"]


# Cancelled jobs.


def test_worker_of_a_cancelled_job_gets_no_other_before_its_result() -> None:
    hall = at_work()
    hall.client(b"d", b"other")
    (name,) = (task.name for task in hall.scheduler.ledger.tasks.values() if task.lease)
    hall.handle([CancelRequested(0, b"x", Scope(names=(name,)))])
    assert hall.to_client(b"c") == [[ERROR, b"it was cancelled"]]
    ping(hall, 100, W1)
    assert hall.worker(W1, b"result of the cancelled one") == [[PONG], [b"other"]]
    hall.worker(W1, b"result")
    assert hall.to_client(b"d") == [[b"result"]]


def test_ready_that_crossed_a_cancelled_job_gets_no_other() -> None:
    hall = at_work()
    hall.client(b"d", b"other")
    (name,) = (task.name for task in hall.scheduler.ledger.tasks.values() if task.lease)
    hall.handle([CancelRequested(0, b"x", Scope(names=(name,)))])
    assert hall.worker(W1, READY) == [[PONG]]
    assert hall.worker(W1, b"result of the cancelled one") == [[PONG], [b"other"]]
    assert hall.to_client(b"d") == []


def test_ready_during_a_cancelled_job_counts_after_the_lease_time() -> None:
    hall = at_work()
    hall.handle([CancelRequested(0, b"x", Scope())])
    hall.client(b"d", b"other")
    hall.later(59)
    assert hall.worker(W1, READY) == [[PONG]]
    hall.later(1)
    assert hall.worker(W1, READY) == [[PONG], [b"other"]]


def test_worker_of_a_cancelled_job_is_not_registered_even_without_waiting_jobs() -> None:
    hall = at_work()
    hall.handle([CancelRequested(0, b"x", Scope())])
    assert hall.workers() == []
    assert hall.worker(W1, b"result") == [[PONG]]
    assert len(hall.workers()) == 1


def test_job_cancelled_in_the_turn_of_its_result_leaves_its_worker_free() -> None:
    hall = at_work()
    hall.client(b"d", b"other")
    (name,) = (task.name for task in hall.scheduler.ledger.tasks.values() if task.lease)
    result = hall.board.receive(BACKEND + W1, [b"", b"result"], hall.now_ns)
    hall.handle([CancelRequested(0, b"x", Scope(names=(name,))), *result])
    assert sorted(hall.to_worker(W1)) == [[PONG], [b"other"]]


# Reserved words.


@pytest.mark.parametrize("word", [PONG, EXIT])
def test_client_s_job_that_is_a_reserved_word_is_refused(word: bytes) -> None:
    hall = Hall()
    ((error, reason),) = hall.client(b"c", word)
    assert (error, word in reason) == (ERROR, True)
    assert hall.states() == {}


@pytest.mark.parametrize("word", [b"PING", b"READY", b"ERROR", b"FULL", b"pong", b"EXIT ", b""])
def test_any_other_job_is_accepted_and_sent_unchanged(word: bytes) -> None:
    hall = Hall()
    assert hall.client(b"c", word) == []
    assert hall.worker(W1, READY) == [[PONG], [word]]


def test_task_with_a_reserved_payload_is_left_to_others_and_blocks_no_task() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    many = [b"e%d" % number for number in range(500)]
    hall.create(Submission([b"PONG", *many], [b"", *[b"EXIT"] * 500], [Terms()]))
    assert hall.to_worker(W1) == []
    hall.create(Submission([b"good"], [b""], [Terms()]))
    assert hall.to_worker(W1) == [[b"good"]]
    states = hall.states()
    assert states.pop(b"good") is LEASED
    assert {*states.values()} == {TaskState.READY}


def test_task_without_a_payload_is_sent_by_its_name_and_its_result_kept() -> None:
    hall = Hall()
    hall.at(b"\0cli", b"", bytes.fromhex("080012080a01411203636c69"))
    assert hall.worker(W1, READY) == [[PONG], [b"A"]]
    hall.records()
    assert hall.worker(W1, b"result") == []
    (finished,) = hall.records()
    assert isinstance(finished, Finished)
    assert (finished.names, finished.results) == ([b"A"], [b"result"])


def test_truncated_result_of_another_worker_is_an_error_to_the_client() -> None:
    hall = Hall()
    hall.client(b"c", b"job")
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    hall.handle([events.TasksReported(0, b"w", [name], texts=[b"end"], result_bytes_total=[9])])
    reason = b"result truncated: only the last 3 of 9 bytes are kept"
    assert hall.to_client(b"c") == [[ERROR, reason]]


def test_task_of_another_service_is_not_for_these_workers() -> None:
    hall = Hall()
    hall.create(Submission([b"t"], [b'{"argv": ["rm"]}'], [Terms(service=b"exec")]))
    assert hall.worker(W1, READY) == [[PONG]]


def test_services_of_an_endpoint_can_be_set() -> None:
    hall = Hall(Settings(services=(b"images", b"sounds")))
    hall.worker(W1, READY)
    hall.create(Submission([b"t"], [b"p"], [Terms(service=b"sounds")]))
    assert hall.to_worker(W1) == [[b"p"]]
    hall.client(b"c", b"job")
    assert [task.terms.service for task in hall.scheduler.ledger.tasks.values()] == [
        b"sounds", b"images",
    ]  # fmt: skip


# Clients.


def test_client_gets_its_replies_in_the_order_of_its_requests() -> None:
    hall = Hall()
    for job in (b"1", b"2", PONG, b"3"):
        assert hall.client(b"c", job) == []
    for identity in (W1, W2, W3):
        hall.worker(identity, READY)
    hall.worker(W3, b"three")
    hall.worker(W2, b"two")
    assert hall.to_client(b"c") == []
    hall.worker(W1, b"one")
    first, second, (error, _), last = hall.to_client(b"c")
    assert [first, second, error, last] == [[b"one"], [b"two"], ERROR, [b"three"]]


def test_clients_do_not_wait_for_each_other() -> None:
    hall = Hall()
    hall.client(b"c", b"1")
    hall.client(b"d", b"2")
    hall.worker(W1, READY)
    hall.worker(W2, READY)
    hall.worker(W2, b"two")
    assert hall.to_client(b"d") == [[b"two"]]


def test_client_with_too_many_open_jobs_is_refused_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ping_pong_server, "WAITING_MAX", 2)
    hall = Hall()
    for number in range(5):
        assert hall.client(b"c", b"%d" % number) == []
    assert len(hall.states()) == 2
    assert hall.client(b"d", b"other") == []
    hall.worker(W1, READY)
    hall.worker(W1, b"zero")
    assert hall.to_client(b"c") == [[b"zero"]]
    hall.worker(W1, b"one")
    assert hall.to_client(b"c") == [[b"one"], [FULL], [FULL], [FULL]]
    assert hall.client(b"c", b"again") == []


def test_queue_of_all_clients_has_a_limit() -> None:
    hall = Hall(Settings(queue_max=2))
    assert hall.client(b"c", b"1") == []
    assert hall.client(b"d", b"2") == []
    assert hall.client(b"e", b"3") == [[FULL]]
    assert hall.client(b"e", b"3") == [[FULL]]
    hall.worker(W1, READY)
    hall.worker(W1, b"one")
    assert hall.client(b"e", b"3") == []


def test_client_gets_full_when_the_broker_accepts_no_more() -> None:
    hall = Hall()
    hall.scheduler.accepting = False
    assert hall.client(b"c", b"job") == [[FULL]]


def test_too_long_a_job_is_refused() -> None:
    hall = Hall()
    ((error, _),) = hall.client(b"c", b"x" * (PAYLOAD_BYTES_MAX + 1))
    assert error == ERROR


def test_disconnected_client_is_forgotten_and_its_job_done_nevertheless() -> None:
    hall = at_work()
    hall.client(b"c", b"second")
    hall.dead = [FRONTEND + b"c"]
    assert hall.worker(W1, b"result") == [[b"second"]]
    hall.worker(W1, b"result")
    assert [*hall.states().values()] == [DONE, DONE]
    assert hall.sent == []
    assert hall.frontend.waiting == 0
    assert not hall.scheduler.watchers


def test_names_of_jobs_are_unique_to_the_process() -> None:
    names = []
    for random_bits in (1, 2):
        frontend = make_server(1, lambda random_bits=random_bits: random_bits)[1]  # type: ignore[misc]
        for _ in range(2):
            (asked,) = frontend.receive(FRONTEND, [b"", b"job"], 0)
            names += asked.submission.names  # type: ignore[attr-defined]
    assert len({*names}) == 4


# Malformed messages.

#: Messages that are invalid at either side.
NASTY: list[list[bytes]] = [
    [],
    [b""],
    [READY],
    [PING, b"1"],
    [b"x", READY],
    [b"", b"", READY],
    [b"", READY, b""],
    [b"", READY, b"1"],
    [b"", PING, b""],
    [b"", PING, b"-1"],
    [b"", PING, "\u0663".encode()],
    [b"", PING, b"1" * 21],
    [b"", PING, b"1", b"2"],
    [b"", DISCONNECT, b"now"],
    [b"", b"result", b"more"],
    [b"", ERROR, b"a", b"b"],
    [b""] * 10_000,
    [b"", b"[" * 100_000, b"[" * 100_000],
]


@pytest.mark.parametrize("frames", NASTY, ids=range(len(NASTY)))
def test_nasty_messages_are_counted_and_change_nothing(frames: list[bytes]) -> None:
    hall = at_work()
    before = old_snapshots.fingerprint(hall.scheduler.ledger)
    assert hall.at(BACKEND + W1, *frames) == []
    assert hall.backend.malformed == 1
    ((error, _),) = hall.at(FRONTEND + b"x", *frames)
    assert (error, hall.frontend.malformed) == (ERROR, 1)
    assert old_snapshots.fingerprint(hall.scheduler.ledger) == before
    hall.worker(W1, b"result")
    assert hall.to_client(b"c") == [[b"result"]]


def noise(count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield frames of words, parts of words and bytes, in invalid numbers."""
    random_bits = random.Random(seed)
    words = [READY, PING, PONG, EXIT, DISCONNECT, ERROR, FULL, b"", b"1", b"\0", b"ready"]
    made = 0
    while made < count:
        frames = [
            random_bits.choice(
                [random_bits.choice(words), random_bits.randbytes(random_bits.randrange(8))]
            )
            for _ in range(random_bits.randrange(6))
        ]
        if not ping_pong_backend.is_message(frames) and len(frames) != 2:
            made += 1
            yield frames


@pytest.mark.parametrize("seed", range(5))
def test_malformed_messages_change_nothing_at_either_side(seed: int) -> None:
    hall = at_work()
    hall.records()
    before = old_snapshots.fingerprint(hall.scheduler.ledger)
    random_bits = random.Random(seed)
    for frames in noise(1_000, seed):
        identity = random_bits.choice([W1, W2, b"x" * 256, b""])
        assert hall.at(BACKEND + identity, *frames) == []
        assert [one[0] for one in hall.at(FRONTEND + identity, *frames)] == [ERROR]
    assert (hall.backend.malformed, hall.frontend.malformed) == (1_000, 1_000)
    assert hall.records() == []
    assert old_snapshots.fingerprint(hall.scheduler.ledger) == before
    assert hall.worker(W1, b"result") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_any_dialogue_leaves_every_task_done_once_or_waiting(seed: int) -> None:
    random_bits = random.Random(seed)
    hall = Hall()
    words = [READY, PING, DISCONNECT, b"result", b"result", ERROR]
    for number in range(400):
        identity = random_bits.choice([W1, W2, W3, b"named"])
        word = random_bits.choice(words)
        hall.worker(identity, *([word, b"why"] if word is ERROR else [word]))
        if random_bits.random() < 0.2:
            hall.client(b"c", b"%d" % number)
        if random_bits.random() < 0.3:
            hall.later(random_bits.choice([0.01, 1, 3, 61]))
        if random_bits.random() < 0.05:
            hall.handle(hall.board.disconnected(BACKEND + identity))
    finished = [name for one in hall.records() if isinstance(one, Finished) for name in one.names]
    assert len(finished) > 20
    assert len({*finished}) == len(finished)


def test_kept_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ping_pong_backend, "PEERS_MAX", 2)
    hall = Hall()
    assert hall.worker(W1, READY) == [[PONG]]
    assert hall.worker(W2, PING) == [[PONG]]
    assert hall.worker(W3, READY) == []
    hall.later(3)  # a silent one on probation makes room
    assert hall.worker(W3, READY) == [[PONG]]


def test_connection_that_is_silent_for_long_is_forgotten() -> None:
    hall = at_work()
    hall.worker(W2, READY)
    hall.worker(W3, PING)
    hall.later(60)
    hall.later(FORGET_NS / SECOND_NS)
    assert hall.backend.peer_count == 0
    assert hall.backend.wake_at_ns() is None


def test_record_of_a_lost_route_is_a_return_without_a_charge() -> None:
    hall = Hall()
    hall.worker(W1, READY)
    hall.dead = [BACKEND + W1]
    hall.records()
    hall.client(b"c", b"job")
    kinds = [type(one) for one in hall.records()]
    assert kinds[1:] == [Leased, Returned, WorkerLeft]


def test_docs_have_the_figures_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "dialects" / "ping-pong.md").read_text()
    settings = Settings()
    for figure in (
        f"| WORKER_EXPIRE_SECONDS | {settings.expire_ns // SECOND_NS} s |",
        f"| lease time | {settings.lease_ns // SECOND_NS} s |",
        f"At most {ping_pong_server.WAITING_MAX:,} jobs of one client and {settings.queue_max:,}",
        f"within {ping_pong_backend.CROSSING_NS / SECOND_NS} s of the job",
        f"any bytes, at most {PAYLOAD_BYTES_MAX >> 20} MiB",
        f"decimal number of at most {COUNT_DIGITS_MAX} digits",
    ):
        assert figure in " ".join(page.split())
    assert CRASHES_MAX == 5  # "five workers"


def test_name_of_a_worker_does_not_reveal_its_id_with_a_secret() -> None:
    route = BACKEND + b"\0\1\2\3\4"
    assert ping_pong_backend.name_of(route).endswith(b"-0001020304")
    hidden = ping_pong_backend.name_of(route, b"secret")
    assert b"01020304" not in hidden
    assert hidden != ping_pong_backend.name_of(route, b"other")
