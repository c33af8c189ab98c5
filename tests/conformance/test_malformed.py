"""Malformed messages change nothing, and their sender can continue on the same connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.raw_sockets import unique
from tests.conformance.scenario import (
    await_answer,
    each_client,
    each_worker,
    success,
    sync,
    take_task,
)

if TYPE_CHECKING:
    from tests.conformance.yard import Yard


@each_client()
def test_client_that_sent_garbage_can_continue(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    for _ in range(3):
        client.malform()
    submitted = client.submit(unique())
    worker.done(take_task(worker), b"sense")
    assert await_answer(client, submitted) == success(client, worker, b"sense")
    assert yard.control.unsettled() == []


@each_worker()
def test_worker_that_sent_garbage_can_continue(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    worker.malform()
    submitted = client.submit(unique())
    job = take_task(worker)
    worker.malform()
    if "heartbeat" not in worker.cannot:
        worker.send_heartbeat(job)
    assert yard.control.counts()["leased"] == 1
    worker.done(job, b"sense")
    assert await_answer(client, submitted) == success(client, worker, b"sense")


@each_worker()
def test_malformed_messages_of_one_worker_affect_no_other(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker("dwork-extended")
    noisy = yard.worker(worker_kind)
    submitted = client.submit(unique())
    job = take_task(worker)
    for _ in range(10):
        noisy.malform()
    sync(yard, noisy)
    worker.done(job, b"undisturbed")
    assert await_answer(client, submitted) == success(client, worker, b"undisturbed")
