"""What makes no sense changes nothing, and whoever said it can go on on the same connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.raw_sockets import unique
from tests.conformance.scenario import each_client, each_worker, given, hear_all, success, told

if TYPE_CHECKING:
    from tests.conformance.yard import Yard


@each_client()
def test_client_that_made_no_sense_can_go_on(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    for _ in range(3):
        client.malform()
    asked = client.submit(unique())
    worker.done(given(worker), b"sense")
    assert told(client, asked) == success(client, worker, b"sense")
    assert yard.ruler.unsettled() == []


@each_worker()
def test_worker_that_made_no_sense_can_go_on(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    worker.malform()
    asked = client.submit(unique())
    job = given(worker)
    worker.malform()
    if "heartbeat" not in worker.cannot:
        worker.show_life(job)
    assert yard.ruler.counts()["leased"] == 1
    worker.done(job, b"sense")
    assert told(client, asked) == success(client, worker, b"sense")


@each_worker()
def test_noise_of_one_worker_leaves_the_others_alone(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker("dwork-extended")
    noisy = yard.worker(worker_kind)
    asked = client.submit(unique())
    job = given(worker)
    for _ in range(10):
        noisy.malform()
    hear_all(yard, noisy)
    worker.done(job, b"undisturbed")
    assert told(client, asked) == success(client, worker, b"undisturbed")
