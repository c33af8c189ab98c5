"""Workers that leave, fall silent or come too late: no task is lost and none is done twice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.conformance.native_extended import SECOND_NS, SILENCE_NS
from tests.conformance.raw_sockets import Until, unique
from tests.conformance.scenario import each_client, each_worker, given, success, taken, told
from tests.kit.processes import until

if TYPE_CHECKING:
    from tests.conformance.skills import Job, Worker
    from tests.conformance.yard import Yard

#: Silence that is too long, and a second in which others must have been given the task.
LEASE_SECONDS = SILENCE_NS / SECOND_NS


@each_worker("leave")
def test_task_of_an_exiting_worker_is_reassigned(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, leaving = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    given(leaving)
    (name,) = taken(yard)
    leaving.leave()
    other = yard.worker("dwork-extended")
    job = given(other)
    assert job.payload == asked.payload
    assert yard.ruler.show(name)["losses"] == 0  # it was given back, not waited for
    other.done(job, b"by the other")
    assert told(client, asked).text == b"by the other"


@each_worker("silence")
def test_task_of_a_silent_worker_is_reassigned_in_time(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, silent = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    held = given(silent)
    if worker_kind == "ping-pong":
        silent.show_life(held)  # it can, so it must
    silent.vanish()
    began = time.monotonic()
    other = yard.worker("dwork-extended")
    job = given(other)
    assert job.payload == asked.payload
    assert time.monotonic() - began < LEASE_SECONDS + 1
    other.done(job, b"by the other")
    assert told(client, asked).text == b"by the other"


@each_worker("heartbeat")
def test_worker_that_shows_life_keeps_its_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    job = given(worker)
    ends = Until(LEASE_SECONDS * 1.3)
    while ends:
        worker.show_life(job)
        time.sleep(0.2)  # that time passes is the point
    (name,) = taken(yard)
    assert yard.ruler.show(name)["attempt"] == 1
    worker.done(job, b"late but alive")
    assert told(client, asked).text == b"late but alive"


@each_worker("lists")
def test_task_missing_from_heartbeats_is_reassigned(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, forgetful = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    given(forgetful)
    # Full hands to the broker, empty ones to itself: the assignment was lost on its way.
    ends = Until(LEASE_SECONDS)
    while ends and yard.ruler.counts()["leased"]:
        forgetful.show_life()
    forgetful.leave()
    other = yard.worker("dwork-extended")
    job = given(other)
    assert job.payload == asked.payload
    other.done(job, b"found")
    assert told(client, asked).text == b"found"


@each_worker("late reports")
def test_late_result_changes_nothing(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, late = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    held = given(late)
    (name,) = taken(yard)
    late.leave()
    other = yard.worker("dwork-extended")
    job = given(other)
    _report_late(yard, late, held)
    assert yard.ruler.show(name)["state"] == "leased"
    other.done(job, b"in time")
    assert told(client, asked).text == b"in time"
    _report_late(yard, late, held)
    assert told(client, asked).text == b"in time"


def _report_late(yard: Yard, worker: Worker, job: Job) -> None:
    worker.done(job, b"too late")
    if "heartbeat" in worker.cannot:
        yard.ruler.counts()
    else:
        worker.show_life()


@each_worker("late reports")
def test_task_is_done_once_though_its_worker_reports_twice(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    done = yard.ruler.counts()["done"]
    asked = client.submit(unique())
    job = given(worker)
    worker.done(job, b"first")
    _report_late(yard, worker, job)
    assert told(client, asked) == success(client, worker, b"first")
    assert yard.ruler.counts()["done"] == done + 1
    # And the worker is of use as before.
    asked = client.submit(unique())
    worker.done(given(worker), b"next")
    assert told(client, asked) == success(client, worker, b"next")


@each_worker("wait", "silence")
def test_task_is_not_lost_with_a_waiting_worker_that_vanished(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, gone = yard.client(client_kind), yard.worker(worker_kind)
    gone.vanish()
    asked = client.submit(unique())
    other = yard.worker("dwork-extended")
    job = given(other)
    assert job.payload == asked.payload
    other.done(job, b"done")
    assert told(client, asked).text == b"done"


@each_worker("restart")
def test_lease_outlives_a_restart_of_the_broker(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    job = given(worker)
    (name,) = taken(yard)
    yard.restart()
    assert yard.ruler.show(name)["state"] == "leased"
    # A broker that is not there yet hears nothing: said again until it counts.
    worker.done(job, b"over the restart")
    until(lambda: yard.ruler.show(name)["state"] == "done", "the report is heard")
    assert yard.ruler.show(name)["attempt"] == 1
    assert told(client, asked) == success(client, worker, b"over the restart")


def test_job_of_a_ping_pong_worker_runs_again_after_a_restart(yard: Yard) -> None:
    client, worker = yard.client("dwork-extended"), yard.worker("ping-pong")
    asked = client.submit(unique())
    old = given(worker)
    yard.restart()
    worker.remind()
    job = given(worker)
    assert job.payload == asked.payload
    worker.done(old, b"of the old socket")
    worker.done(job, b"of the new one")
    assert told(client, asked).text == b"of the new one"


def test_lease_of_before_a_restart_ends_though_its_round_robin_worker_shows_life(
    yard: Yard,
) -> None:
    client, worker = yard.client("dwork-extended"), yard.worker("round-robin")
    asked = client.submit(unique())
    given(worker)
    (name,) = taken(yard)
    yard.restart()
    while yard.ruler.show(name)["attempt"] == 1:
        worker.show_life()  # it answers, and has forgotten its message
    job = given(worker)
    worker.done(job, b"at last")
    assert told(client, asked).text == b"at last"
    assert yard.ruler.show(name)["losses"] == 0


@each_client()
def test_waiting_tasks_survive_a_broker_restart(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client = yard.client(client_kind)
    asked = [client.submit(unique()) for _ in range(5)]
    names = taken(yard, 5)
    yard.restart()
    assert taken(yard, 5) == names
    worker = yard.worker(worker_kind)
    seen = []
    for _ in asked:
        job = given(worker)
        seen.append(job.payload)
        worker.done(job, b"")
    assert sorted(seen) == sorted(one.payload for one in asked)


@each_client()
def test_client_that_repeats_a_request_after_a_restart_gets_a_reply(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client = yard.client(client_kind)
    asked = client.submit(unique())
    taken(yard)
    yard.restart()
    asked = client.again(asked)
    until(yard.ruler.unsettled, "the task is there")
    worker = yard.worker(worker_kind)
    answer = None
    while answer is None:
        job = worker.take(0.05)
        if job is not None:
            worker.done(job, b"after all")
        answer = client.answer(asked, 0.05)
    assert answer == success(client, worker, b"after all")
