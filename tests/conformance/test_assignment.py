"""Who is given what: the least recently used first, no more than fits, in the order that is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.raw_sockets import Until, unique
from tests.conformance.round_robin import RegisteredWorker
from tests.conformance.scenario import each_worker, given, hear_all, taken, told
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
        workers.reverse()  # who registers comes to the top of the table
    order = []
    for _ in range(2):
        for worker in workers:
            asked = client.submit(unique())
            job = given(worker)
            order.append(job.payload == asked.payload)
            worker.done(job, b"")
            assert told(client, asked).is_done
            # Ready again before the next task is there.
            assert worker.take(0) is None
            hear_all(yard, worker)
    assert order == [True] * 6


@each_worker("slots")
def test_worker_gets_tasks_for_all_its_slots(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind, slots=2)
    asked = [client.submit(unique()) for _ in range(3)]
    jobs = [given(worker), given(worker)]
    counts = yard.ruler.counts()
    assert (counts["leased"], counts["ready"]) == (2, 1)
    assert {job.payload for job in jobs} == {one.payload for one in asked[:2]}
    worker.done(jobs[1], b"")
    jobs[1] = given(worker)
    assert jobs[1].payload == asked[2].payload
    for job in jobs:
        worker.done(job, b"")
    assert all(told(client, one).is_done for one in asked)


@each_worker("limit")
def test_full_worker_is_passed_over(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, full = yard.client(client_kind), yard.worker(worker_kind)
    first = client.submit(unique())
    held = given(full)
    second = client.submit(unique())
    if "heartbeat" not in full.cannot:
        full.show_life(held)  # life is no hunger
    assert yard.ruler.counts()["ready"] == 1
    other = yard.worker(worker_kind)
    job = given(other)
    assert job.payload == second.payload
    for worker, one in ((other, job), (full, held)):
        worker.done(one, b"")
    assert told(client, first).is_done
    assert told(client, second).is_done


@each_worker()
def test_worker_continues_with_the_next_task(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    asked = [client.submit(unique()) for _ in range(20)]
    for _ in asked:
        worker.done(given(worker), b"")
    assert all(told(client, one).is_done for one in asked)


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
        job = given(worker)
        assert job.payload == names[priority]
        worker.done(job, b"")


@each_worker(client=("terms",))
def test_lane_is_served_by_one_worker_at_a_time(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client = yard.client(client_kind)
    workers = [yard.worker(worker_kind) for _ in range(2)]
    names = [unique(f"lane{number}") for number in range(4)]
    asked = [client.submit(name, name=name, lane=b"the lane") for name in names]
    for name in names:
        assert yard.ruler.counts()["leased"] <= 1
        worker, job = _whoever_is_given(workers)
        assert job.payload == name
        assert yard.ruler.counts()["leased"] == 1
        worker.done(job, b"")
    assert all(told(client, one).is_done for one in asked)


def _whoever_is_given(workers: list[Worker]) -> tuple[Worker, Job]:
    ends = Until(PATIENCE_SECONDS)
    while ends:
        for worker in workers:
            job = worker.take(0.02)
            if job is not None:
                return worker, job
    raise AssertionError("nobody is given the next task")


@each_worker("leave")
def test_worker_that_came_back_gets_tasks_again(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    worker.leave()
    asked = client.submit(unique())
    taken(yard)
    assert yard.ruler.counts()["ready"] == 1
    back = yard.worker(worker_kind)
    back.done(given(back), b"")
    assert told(client, asked).is_done


def test_round_robin_slot_is_taken_until_its_increment(yard: Yard) -> None:
    client, worker = yard.client("dwork-extended"), yard.worker("round-robin")
    assert isinstance(worker, RegisteredWorker)
    first, second = client.submit(unique()), client.submit(unique())
    worker.respond(given(worker), b"answered")
    assert told(client, first).text == b"answered"
    worker.show_life()
    assert yard.ruler.counts()["ready"] == 1
    worker.increment()
    job = given(worker)
    assert job.payload == second.payload
    worker.done(job, b"")
