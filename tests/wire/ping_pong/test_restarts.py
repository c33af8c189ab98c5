"""Ping-pong at the broker: unreachable routes, restarts, cancelled jobs and reserved words."""

from __future__ import annotations

import pytest

from taskyard.core import events
from taskyard.core.blobs import Blob
from taskyard.core.events import CancelRequested, Scope
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import Finished
from taskyard.core.states import TaskState
from taskyard.wire.dialect import TaskDefaults
from taskyard.wire.ping_pong.frames import Settings
from tests.wire.ping_pong.kit import BACKEND, W1, W2, W3, Harness
from tests.wire.ping_pong.test_server import ERROR, EXIT, LEASED, PING, PONG, READY, at_work, ping

# Unreachable routes and restarts.


@pytest.mark.parametrize("is_received", [False, True])
def test_job_from_before_a_restart_goes_to_another_after_the_expiry_and_is_not_charged(
    *, is_received: bool
) -> None:
    harness = at_work()
    harness.restart()
    harness.worker(W2, READY)
    for _ in range(2):
        harness.later(1)
        harness.worker(W2, PING)
        if is_received:
            harness.worker(W3, PING)  # the same worker, by another connection
    assert [*harness.states().values()] == [LEASED]
    harness.later(1)
    assert harness.to_worker(W2) == [[b"job"]]
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)


def test_ready_of_a_named_worker_after_a_restart_does_not_charge_its_job() -> None:
    harness = at_work(identity=b"named")
    harness.restart()
    assert harness.worker(b"named", READY) == [[PONG], [b"job"]]
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)


def test_job_after_a_restart_has_its_full_lease_time() -> None:
    harness = Harness()
    harness.restart()
    harness.worker(W1, READY)
    harness.client(b"c", b"job")
    harness.later(59)
    assert [*harness.states().values()] == [LEASED]


def test_undelivered_job_goes_to_another_worker_without_a_charge() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    harness.worker(W2, READY)
    harness.dead = [BACKEND + W1]
    harness.client(b"c", b"job")
    assert harness.to_worker(W2) == [[b"job"]]
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.attempt, task.losses) == (2, 0)


def test_worker_found_dead_by_its_pong_is_charged_to_its_job() -> None:
    harness = at_work()
    harness.dead = [BACKEND + W1]
    harness.worker(W1, PING)
    (task,) = harness.scheduler.ledger.tasks.values()
    assert (task.state, task.losses) == (TaskState.READY, 1)
    assert harness.workers() == []


def test_named_worker_of_a_former_broker_is_new_and_its_job_runs_again() -> None:
    harness = at_work(identity=b"named")
    harness.open(random_bits=8)
    assert harness.worker(b"named", b"result") == [[PONG]]
    assert harness.worker(b"named", READY) == [[PONG], [b"job"]]


def test_same_name_on_two_sockets_is_two_workers() -> None:
    harness = Harness()
    harness.worker(b"named", READY)
    harness.handle(harness.backend.receive(b"\5named", [b"", READY], harness.now_ns))
    assert harness.workers() == [b"ping-pong:01/named", b"ping-pong:05/named"]


# Cancelled jobs.


def test_worker_of_a_cancelled_job_gets_no_other_before_its_result() -> None:
    harness = at_work()
    harness.client(b"d", b"other")
    (name,) = (task.name for task in harness.scheduler.ledger.tasks.values() if task.lease)
    harness.handle([CancelRequested(0, b"x", Scope(names=(name,)))])
    assert harness.to_client(b"c") == [[ERROR, b"it was cancelled"]]
    ping(harness, 100, W1)
    assert harness.worker(W1, b"result of the cancelled one") == [[PONG], [b"other"]]
    harness.worker(W1, b"result")
    assert harness.to_client(b"d") == [[b"result"]]


def test_ready_that_crossed_a_cancelled_job_gets_no_other() -> None:
    harness = at_work()
    harness.client(b"d", b"other")
    (name,) = (task.name for task in harness.scheduler.ledger.tasks.values() if task.lease)
    harness.handle([CancelRequested(0, b"x", Scope(names=(name,)))])
    assert harness.worker(W1, READY) == [[PONG]]
    assert harness.worker(W1, b"result of the cancelled one") == [[PONG], [b"other"]]
    assert harness.to_client(b"d") == []


def test_ready_during_a_cancelled_job_counts_after_the_lease_time() -> None:
    harness = at_work()
    harness.handle([CancelRequested(0, b"x", Scope())])
    harness.client(b"d", b"other")
    harness.later(59)
    assert harness.worker(W1, READY) == [[PONG]]
    harness.later(1)
    assert harness.worker(W1, READY) == [[PONG], [b"other"]]


def test_worker_of_a_cancelled_job_is_not_registered_even_without_waiting_jobs() -> None:
    harness = at_work()
    harness.handle([CancelRequested(0, b"x", Scope())])
    assert harness.workers() == []
    assert harness.worker(W1, b"result") == [[PONG]]
    assert len(harness.workers()) == 1


def test_job_cancelled_in_the_turn_of_its_result_leaves_its_worker_free() -> None:
    harness = at_work()
    harness.client(b"d", b"other")
    (name,) = (task.name for task in harness.scheduler.ledger.tasks.values() if task.lease)
    result = harness.board.receive(BACKEND + W1, [b"", b"result"], harness.now_ns)
    harness.handle([CancelRequested(0, b"x", Scope(names=(name,))), *result])
    assert sorted(harness.to_worker(W1)) == [[PONG], [b"other"]]


# Reserved words.


@pytest.mark.parametrize("word", [PONG, EXIT])
def test_client_s_job_that_is_a_reserved_word_is_refused(word: bytes) -> None:
    harness = Harness()
    ((error, reason),) = harness.client(b"c", word)
    assert (error, word in reason) == (ERROR, True)
    assert harness.states() == {}


@pytest.mark.parametrize("word", [b"PING", b"READY", b"ERROR", b"FULL", b"pong", b"EXIT ", b""])
def test_any_other_job_is_accepted_and_sent_unchanged(word: bytes) -> None:
    harness = Harness()
    assert harness.client(b"c", word) == []
    assert harness.worker(W1, READY) == [[PONG], [word]]


def test_task_with_a_reserved_payload_is_left_to_others_and_blocks_no_task() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    many = [b"e%d" % number for number in range(500)]
    harness.create(Submission([b"PONG", *many], [b"", *[b"EXIT"] * 500], [Terms()]))
    assert harness.to_worker(W1) == []
    harness.create(Submission([b"good"], [b""], [Terms()]))
    assert harness.to_worker(W1) == [[b"good"]]
    states = harness.states()
    assert states.pop(b"good") is LEASED
    assert {*states.values()} == {TaskState.READY}


def test_task_without_a_payload_is_sent_by_its_name_and_its_result_kept() -> None:
    harness = Harness()
    harness.at(b"\0cli", b"", bytes.fromhex("080012080a01411203636c69"))
    assert harness.worker(W1, READY) == [[PONG], [b"A"]]
    harness.records()
    assert harness.worker(W1, b"result") == []
    (finished,) = harness.records()
    assert isinstance(finished, Finished)
    assert (finished.names, finished.results) == ([b"A"], [b"result"])


def test_truncated_result_of_another_worker_is_an_error_to_the_client() -> None:
    harness = Harness()
    harness.client(b"c", b"job")
    (name,) = harness.scheduler.ledger.tasks
    harness.handle(
        [events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")]
    )
    harness.handle([events.TasksReported(0, b"w", [name], texts=[Blob(b"", 9, b"end")])])
    reason = b"result truncated: only the last 3 of 9 bytes are kept"
    assert harness.to_client(b"c") == [[ERROR, reason]]


def test_task_of_another_service_is_not_for_these_workers() -> None:
    harness = Harness()
    harness.create(Submission([b"t"], [b'{"argv": ["rm"]}'], [Terms(service=b"exec")]))
    assert harness.worker(W1, READY) == [[PONG]]


def test_services_of_an_endpoint_can_be_set() -> None:
    harness = Harness(Settings(services=(b"images", b"sounds"), tasks=TaskDefaults(b"images")))
    harness.worker(W1, READY)
    harness.create(Submission([b"t"], [b"p"], [Terms(service=b"sounds")]))
    assert harness.to_worker(W1) == [[b"p"]]
    harness.client(b"c", b"job")
    assert [task.terms.service for task in harness.scheduler.ledger.tasks.values()] == [
        b"sounds", b"images",
    ]  # fmt: skip
