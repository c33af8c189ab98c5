"""Assignment: least recently used worker first, within its slots, in the order of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.raw_sockets import Deadline, unique
from tests.conformance.round_robin import RegisteredWorker
from tests.conformance.scenario import await_answer, each_worker, sync, take_task, taken
from tests.conformance.yard import PATIENCE_SECONDS

if TYPE_CHECKING:
    from tests.conformance.skills import Job, Worker
    from tests.conformance.yard import Yard


@each_worker("wait")
def test_worker_that_has_waited_longest_gets_the_next_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client = yard.client(client_kind)
    workers = [yard.worker(worker_kind) for _ in range(3)]
    if worker_kind == "round-robin":
        workers.reverse()  # registering moves a worker to the top of the table
    order = []
    for _ in range(2):
        for worker in workers:
            submitted = client.submit(unique())
            job = take_task(worker)
            order.append(job.payload == submitted.payload)
            worker.done(job, b"")
            assert await_answer(client, submitted).is_done
            # Ready again before the next task is submitted.
            assert worker.take(0) is None
            sync(yard, worker)
    assert order == [True] * 6


@each_worker("slots")
def test_worker_gets_tasks_for_all_its_slots(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind, slots=2)
    submitted = [client.submit(unique()) for _ in range(3)]
    jobs = [take_task(worker), take_task(worker)]
    counts = yard.control.counts()
    assert (counts["leased"], counts["ready"]) == (2, 1)
    assert {job.payload for job in jobs} == {one.payload for one in submitted[:2]}
    worker.done(jobs[1], b"")
    jobs[1] = take_task(worker)
    assert jobs[1].payload == submitted[2].payload
    for job in jobs:
        worker.done(job, b"")
    assert all(await_answer(client, one).is_done for one in submitted)


@each_worker("limit")
def test_full_worker_gets_no_task(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, full = yard.client(client_kind), yard.worker(worker_kind)
    first = client.submit(unique())
    held = take_task(full)
    second = client.submit(unique())
    if "heartbeat" not in full.cannot:
        full.send_heartbeat(held)  # a heartbeat is no request for a task
    assert yard.control.counts()["ready"] == 1
    other = yard.worker(worker_kind)
    job = take_task(other)
    assert job.payload == second.payload
    for worker, one in ((other, job), (full, held)):
        worker.done(one, b"")
    assert await_answer(client, first).is_done
    assert await_answer(client, second).is_done


@each_worker()
def test_worker_continues_with_the_next_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = [client.submit(unique()) for _ in range(20)]
    for _ in submitted:
        worker.done(take_task(worker), b"")
    assert all(await_answer(client, one).is_done for one in submitted)


@each_worker(client=("terms",))
def test_higher_priority_is_assigned_first(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client = yard.client(client_kind)
    names = {}
    for priority in (0, 5, -3, 9):
        name = unique(f"priority{priority}".replace("-", "_"))
        names[priority] = name
        client.submit(name, name=name, terms={"priority": priority})
    worker = yard.worker(worker_kind)
    for priority in (9, 5, 0, -3):
        job = take_task(worker)
        assert job.payload == names[priority]
        worker.done(job, b"")


@each_worker(client=("terms",))
def test_lane_is_served_by_one_worker_at_a_time(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client = yard.client(client_kind)
    workers = [yard.worker(worker_kind) for _ in range(2)]
    names = [unique(f"lane{number}") for number in range(4)]
    submitted = [client.submit(name, name=name, lane=b"the lane") for name in names]
    for name in names:
        assert yard.control.counts()["leased"] <= 1
        worker, job = _whoever_is_given(workers)
        assert job.payload == name
        assert yard.control.counts()["leased"] == 1
        worker.done(job, b"")
    assert all(await_answer(client, one).is_done for one in submitted)


def _whoever_is_given(workers: list[Worker]) -> tuple[Worker, Job]:
    deadline = Deadline(PATIENCE_SECONDS)
    while deadline:
        for worker in workers:
            job = worker.take(0.02)
            if job is not None:
                return worker, job
    raise AssertionError("no worker gets the next task")


@each_worker("leave")
def test_worker_that_came_back_gets_tasks_again(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    worker.leave()
    submitted = client.submit(unique())
    taken(yard)
    assert yard.control.counts()["ready"] == 1
    back = yard.worker(worker_kind)
    back.done(take_task(back), b"")
    assert await_answer(client, submitted).is_done


def test_round_robin_slot_is_taken_until_its_increment(yard: Yard) -> None:
    client, worker = yard.client("dwork-extended"), yard.worker("round-robin")
    assert isinstance(worker, RegisteredWorker)
    first, second = client.submit(unique()), client.submit(unique())
    worker.respond(take_task(worker), b"answered")
    assert await_answer(client, first).text == b"answered"
    worker.send_heartbeat()
    assert yard.control.counts()["ready"] == 1
    worker.increment()
    job = take_task(worker)
    assert job.payload == second.payload
    worker.done(job, b"")
