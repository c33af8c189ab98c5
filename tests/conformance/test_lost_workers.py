"""Workers that leave, fall silent or report late: no task is lost, none is done twice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.conformance.native_extended import SECOND_NS, SILENCE_NS
from tests.conformance.raw_sockets import Deadline, unique
from tests.conformance.scenario import (
    await_answer,
    each_client,
    each_worker,
    success,
    take_task,
    taken,
)
from tests.kit.processes import until

if TYPE_CHECKING:
    from tests.conformance.skills import Job, Worker
    from tests.conformance.yard import Yard

#: Longer than the lease, and a second in which the task must be reassigned.
LEASE_SECONDS = SILENCE_NS / SECOND_NS


@each_worker("leave")
def test_task_of_an_exiting_worker_is_reassigned(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, leaving = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    take_task(leaving)
    (name,) = taken(yard)
    leaving.leave()
    other = yard.worker("dwork-extended")
    job = take_task(other)
    assert job.payload == submitted.payload
    assert yard.control.show(name)["losses"] == 0  # it was returned before the lease expired
    other.done(job, b"by the other")
    assert await_answer(client, submitted).text == b"by the other"


@each_worker("expiry")
def test_task_of_a_silent_worker_is_reassigned(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, silent = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    held = take_task(silent)
    if worker_kind == "ping-pong":
        silent.send_heartbeat(held)  # the dialect can, so it must
    silent.vanish()
    other = yard.worker("dwork-extended")
    job = take_task(other)
    assert job.payload == submitted.payload
    other.done(job, b"by the other")
    assert await_answer(client, submitted).text == b"by the other"


@each_worker("heartbeat")
def test_worker_that_sends_heartbeats_keeps_its_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    job = take_task(worker)
    deadline = Deadline(LEASE_SECONDS * 1.3)
    while deadline:
        worker.send_heartbeat(job)
        time.sleep(0.2)  # the point of this test is time
    (name,) = taken(yard)
    assert yard.control.show(name)["attempt"] == 1
    worker.done(job, b"late but alive")
    assert await_answer(client, submitted).text == b"late but alive"


@each_worker("lists")
def test_task_missing_from_heartbeats_is_reassigned(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, forgetful = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    take_task(forgetful)
    # The broker counts a task that the worker never got: the assignment was lost.
    deadline = Deadline(LEASE_SECONDS)
    while deadline and yard.control.counts()["leased"]:
        forgetful.send_heartbeat()
    forgetful.leave()
    other = yard.worker("dwork-extended")
    job = take_task(other)
    assert job.payload == submitted.payload
    other.done(job, b"found")
    assert await_answer(client, submitted).text == b"found"


@each_worker("late reports")
def test_late_result_changes_nothing(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, late = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    held = take_task(late)
    (name,) = taken(yard)
    late.leave()
    other = yard.worker("dwork-extended")
    job = take_task(other)
    _report_late(yard, late, held)
    assert yard.control.show(name)["state"] == "leased"
    other.done(job, b"in time")
    assert await_answer(client, submitted).text == b"in time"
    _report_late(yard, late, held)
    assert await_answer(client, submitted).text == b"in time"


def _report_late(yard: Yard, worker: Worker, job: Job) -> None:
    worker.done(job, b"too late")
    if "heartbeat" in worker.cannot:
        yard.control.counts()
    else:
        worker.send_heartbeat()


@each_worker("late reports")
def test_task_is_done_once_though_its_worker_reports_twice(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    done = yard.control.counts()["done"]
    submitted = client.submit(unique())
    job = take_task(worker)
    worker.done(job, b"first")
    _report_late(yard, worker, job)
    assert await_answer(client, submitted) == success(client, worker, b"first")
    assert yard.control.counts()["done"] == done + 1
    # The worker still works.
    submitted = client.submit(unique())
    worker.done(take_task(worker), b"next")
    assert await_answer(client, submitted) == success(client, worker, b"next")


@each_worker("wait", "expiry")
def test_task_is_not_lost_with_a_waiting_worker_that_vanished(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, gone = yard.client(client_kind), yard.worker(worker_kind)
    gone.vanish()
    submitted = client.submit(unique())
    other = yard.worker("dwork-extended")
    job = take_task(other)
    assert job.payload == submitted.payload
    other.done(job, b"done")
    assert await_answer(client, submitted).text == b"done"


@each_worker("restart")
def test_lease_survives_a_broker_restart(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    job = take_task(worker)
    (name,) = taken(yard)
    yard.restart()
    assert yard.control.show(name)["state"] == "leased"
    # A broker that is still starting receives nothing. Repeat it.
    worker.done(job, b"over the restart")
    until(lambda: yard.control.show(name)["state"] == "done", "the report arrives")
    assert yard.control.show(name)["attempt"] == 1
    assert await_answer(client, submitted) == success(client, worker, b"over the restart")


def test_job_of_a_ping_pong_worker_runs_again_after_a_restart(yard: Yard) -> None:
    client, worker = yard.client("dwork-extended"), yard.worker("ping-pong")
    submitted = client.submit(unique())
    old = take_task(worker)
    yard.restart()
    worker.reregister()
    job = take_task(worker)
    assert job.payload == submitted.payload
    worker.done(old, b"of the old socket")
    worker.done(job, b"of the new one")
    assert await_answer(client, submitted).text == b"of the new one"


def test_lease_from_before_a_restart_expires_despite_heartbeats(
    yard: Yard,
) -> None:
    client, worker = yard.client("dwork-extended"), yard.worker("round-robin")
    submitted = client.submit(unique())
    take_task(worker)
    (name,) = taken(yard)
    yard.restart()
    while yard.control.show(name)["attempt"] == 1:
        worker.send_heartbeat()  # it answers, but has lost its message
    job = take_task(worker)
    worker.done(job, b"at last")
    assert await_answer(client, submitted).text == b"at last"
    assert yard.control.show(name)["losses"] == 0


@each_client()
def test_waiting_tasks_survive_a_broker_restart(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client = yard.client(client_kind)
    submitted = [client.submit(unique()) for _ in range(5)]
    names = taken(yard, 5)
    yard.restart()
    assert taken(yard, 5) == names
    worker = yard.worker(worker_kind)
    seen = []
    for _ in submitted:
        job = take_task(worker)
        seen.append(job.payload)
        worker.done(job, b"")
    assert sorted(seen) == sorted(one.payload for one in submitted)


@each_client()
def test_client_that_repeats_a_request_after_a_restart_gets_a_reply(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client = yard.client(client_kind)
    submitted = client.submit(unique())
    taken(yard)
    yard.restart()
    submitted = client.again(submitted)
    until(yard.control.unsettled, "the task is there")
    worker = yard.worker(worker_kind)
    answer = None
    while answer is None:
        job = worker.take(0.05)
        if job is not None:
            worker.done(job, b"after all")
        answer = client.answer(submitted, 0.05)
    assert answer == success(client, worker, b"after all")
