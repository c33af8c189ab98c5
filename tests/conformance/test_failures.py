"""Failed, returned and cancelled tasks, dismissed workers, and progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.raw_sockets import unique
from tests.conformance.scenario import (
    await_answer,
    each_client,
    each_worker,
    pairs,
    success,
    sync,
    take_task,
    taken,
)
from tests.conformance.skills import Answer
from tests.conformance.yard import PATIENCE_SECONDS, WORKERS
from tests.kit.processes import until

if TYPE_CHECKING:
    from tests.conformance.yard import Yard

MILLISECOND_NS = 1_000_000

#: Two more attempts, soon.
SCHEDULE = {"retry": {"delay_ns": [50 * MILLISECOND_NS, 60 * MILLISECOND_NS]}}


@each_worker("failures", client=("retries", "failures"))
def test_failing_task_is_retried_by_its_schedule_and_then_fails(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique(), terms=SCHEDULE)
    (name,) = taken(yard)
    for attempt in (1, 2, 3):
        job = take_task(worker)
        assert job.payload == submitted.payload
        assert yard.control.show(name)["attempt"] == attempt
        worker.fail(job, b"bad input")
    assert await_answer(client, submitted) == Answer(is_done=False, text=b"bad input")
    shown = yard.control.show(name)
    assert (shown["state"], shown["failures"]) == ("failed", 3)


@pairs(client=("failures",), worker=("failures",))
def test_client_is_notified_of_a_failure(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique(), terms={"retry": {}})
    worker.fail(take_task(worker), b"bad input")
    answer = await_answer(client, submitted)
    assert not answer.is_done
    assert b"bad input" in (answer.text or b"")


@each_worker("final failures", client=("retries",))
def test_task_that_failed_for_good_is_not_tried_again(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique(), terms=SCHEDULE)
    (name,) = taken(yard)
    worker.fail_final(take_task(worker), b"never")
    assert await_answer(client, submitted) == Answer(is_done=False, text=b"never")
    assert yard.control.show(name)["attempt"] == 1


@each_worker("return")
def test_returned_task_costs_no_attempt(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique(), terms={"retry": {}})
    (name,) = taken(yard)
    worker.return_task(take_task(worker))
    job = take_task(worker)  # no other worker runs
    assert job.payload in (submitted.payload, name.encode())
    shown = yard.control.show(name)
    assert (shown["attempt"], shown["failures"], shown["losses"]) == (2, 0, 0)
    worker.done(job, b"after all")
    assert await_answer(client, submitted) == success(client, worker, b"after all")


@each_worker("cancel")
def test_worker_gets_a_stop_for_a_cancelled_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    client.submit(unique())
    job = take_task(worker)
    (name,) = taken(yard)
    yard.control.cancel(name)
    worker.send_heartbeat(job)
    assert worker.stopped(PATIENCE_SECONDS)


@each_worker("late reports")
def test_result_of_a_cancelled_task_is_ignored_and_its_worker_continues(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    job = take_task(worker)
    (name,) = taken(yard)
    yard.control.cancel(name)
    worker.done(job, b"unwanted")
    sync(yard, worker)
    assert yard.control.show(name)["state"] == "cancelled"
    assert not await_answer(client, submitted).is_done
    submitted = client.submit(unique())
    worker.done(take_task(worker), b"next")
    assert await_answer(client, submitted) == success(client, worker, b"next")


@each_client("failures")
def test_client_is_notified_of_a_cancelled_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    assert worker_kind
    client = yard.client(client_kind)
    submitted = client.submit(unique())
    (name,) = taken(yard)
    yard.control.cancel(name)
    assert not await_answer(client, submitted).is_done


@each_worker("progress")
def test_progress_is_visible(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    job = take_task(worker)
    (name,) = taken(yard)
    worker.progress(job, 40, b"well under way")
    until(lambda: b"well under way" in yard.control.output(name), "its progress is visible")
    worker.done(job, b"")
    assert await_answer(client, submitted).is_done


@each_worker("dismissal")
def test_drained_worker_is_dismissed(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique())
    job = take_task(worker)
    (listed,) = yard.control.workers()
    yard.control.drain(listed["name"])
    worker.done(job, b"finished first")
    assert await_answer(client, submitted) == success(client, worker, b"finished first")
    waiting = client.submit(unique())
    assert worker.dismissed(PATIENCE_SECONDS)
    other = yard.worker("dwork-extended")
    other.done(take_task(other), b"by another")
    assert await_answer(client, waiting).text == b"by another"


def test_stopping_broker_sends_exit_in_every_dialect(own_yard: Yard) -> None:
    kinds = [kind for kind, worker in WORKERS.items() if "dismissal" not in worker.cannot]
    # Hungry first: it starts a process, in which time the leases of others would expire.
    workers = {kind: own_yard.worker(kind) for kind in sorted(kinds, key="hungry".__ne__)}
    assert workers["dwork-plain"].take(0) is None  # it registers with its first Steal
    own_yard.control.drain()
    dismissed = {kind: worker.dismissed(PATIENCE_SECONDS) for kind, worker in workers.items()}
    assert dismissed == dict.fromkeys(kinds, True)
    for worker in workers.values():
        worker.leave()
    assert own_yard.broker.end()[0] == 0
