"""Tasks that fail, are given back or cancelled; workers that are sent home; how far they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.raw_sockets import unique
from tests.conformance.scenario import (
    each_client,
    each_worker,
    given,
    hear_all,
    pairs,
    success,
    taken,
    told,
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
    asked = client.submit(unique(), terms=SCHEDULE)
    (name,) = taken(yard)
    for attempt in (1, 2, 3):
        job = given(worker)
        assert job.payload == asked.payload
        assert yard.ruler.show(name)["attempt"] == attempt
        worker.fail(job, b"no luck")
    assert told(client, asked) == Answer(is_done=False, text=b"no luck")
    shown = yard.ruler.show(name)
    assert (shown["state"], shown["failures"]) == ("failed", 3)


@pairs(client=("failures",), worker=("failures",))
def test_client_is_notified_of_a_failure(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique(), terms={"retry": {}})
    worker.fail(given(worker), b"no luck")
    answer = told(client, asked)
    assert not answer.is_done
    assert b"no luck" in (answer.text or b"")


@each_worker("failures for good", client=("retries",))
def test_task_that_failed_for_good_is_not_tried_again(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique(), terms=SCHEDULE)
    (name,) = taken(yard)
    worker.fail_for_good(given(worker), b"never")
    assert told(client, asked) == Answer(is_done=False, text=b"never")
    assert yard.ruler.show(name)["attempt"] == 1


@each_worker("give back")
def test_returned_task_costs_no_attempt(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique(), terms={"retry": {}})
    (name,) = taken(yard)
    worker.give_back(given(worker))
    job = given(worker)  # nobody else is there
    assert job.payload in (asked.payload, name.encode())
    shown = yard.ruler.show(name)
    assert (shown["attempt"], shown["failures"], shown["losses"]) == (2, 0, 0)
    worker.done(job, b"after all")
    assert told(client, asked) == success(client, worker, b"after all")


@each_worker("cancel")
def test_worker_gets_a_stop_for_a_cancelled_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    client.submit(unique())
    job = given(worker)
    (name,) = taken(yard)
    yard.ruler.cancel(name)
    worker.show_life(job)
    assert worker.stopped(PATIENCE_SECONDS)


@each_worker("late reports")
def test_result_of_a_cancelled_task_is_ignored_and_its_worker_continues(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    job = given(worker)
    (name,) = taken(yard)
    yard.ruler.cancel(name)
    worker.done(job, b"for nobody")
    hear_all(yard, worker)
    assert yard.ruler.show(name)["state"] == "cancelled"
    assert not told(client, asked).is_done
    asked = client.submit(unique())
    worker.done(given(worker), b"next")
    assert told(client, asked) == success(client, worker, b"next")


@each_client("failures")
def test_client_is_notified_of_a_cancelled_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    assert worker_kind
    client = yard.client(client_kind)
    asked = client.submit(unique())
    (name,) = taken(yard)
    yard.ruler.cancel(name)
    assert not told(client, asked).is_done


@each_worker("progress")
def test_progress_is_seen(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    job = given(worker)
    (name,) = taken(yard)
    worker.progress(job, 40, b"well under way")
    until(lambda: b"well under way" in yard.ruler.output(name), "what it says is seen")
    worker.done(job, b"")
    assert told(client, asked).is_done


@each_worker("goodbye")
def test_drained_worker_is_dismissed(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = client.submit(unique())
    job = given(worker)
    (listed,) = yard.ruler.workers()
    yard.ruler.drain(listed["name"])
    worker.done(job, b"finished first")
    assert told(client, asked) == success(client, worker, b"finished first")
    waiting = client.submit(unique())
    assert worker.sent_home(PATIENCE_SECONDS)
    other = yard.worker("dwork-extended")
    other.done(given(other), b"by another")
    assert told(client, waiting).text == b"by another"


def test_stopping_broker_sends_exit_in_every_dialect(own_yard: Yard) -> None:
    kinds = [kind for kind, worker in WORKERS.items() if "goodbye" not in worker.cannot]
    workers = [own_yard.worker(kind) for kind in kinds]
    assert workers[0].take(0) is None  # a plain worker is known when it has asked
    own_yard.ruler.drain()
    assert {worker.kind: worker.sent_home(PATIENCE_SECONDS) for worker in workers} == dict.fromkeys(
        kinds, True
    )
    for worker in workers:
        worker.leave()
    assert own_yard.broker.end()[0] == 0
