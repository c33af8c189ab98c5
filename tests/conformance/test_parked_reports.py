"""Reports that wait for the next task: acknowledged at once, and no task is lost with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tests.conformance.raw_sockets import unique
from tests.conformance.scenario import NATIVE, await_answer, take_task, taken

if TYPE_CHECKING:
    from tests.conformance.native_extended import ExtendedWorker
    from tests.conformance.yard import Yard


def extended_worker(yard: Yard) -> ExtendedWorker:
    return cast("ExtendedWorker", yard.worker(NATIVE))


def test_report_is_acknowledged_before_its_request_gets_a_task(yard: Yard) -> None:
    client, worker = yard.client(NATIVE), extended_worker(yard)
    first = client.submit(unique())
    assert worker.report_and_wait(take_task(worker), b"one") == b""
    assert await_answer(client, first).text == b"one"
    second = client.submit(unique())
    job = take_task(worker)  # the reply to the report
    assert job.payload == second.payload
    worker.report_and_wait(job, b"two")
    assert await_answer(client, second).text == b"two"


def test_acknowledged_report_survives_a_killed_broker_and_waits_when_repeated(yard: Yard) -> None:
    client, worker = yard.client(NATIVE), extended_worker(yard)
    first = client.submit(unique())
    (name,) = taken(yard)
    job = take_task(worker)
    worker.report_and_wait(job, b"durable")
    yard.restart()
    assert yard.control.show(name)["state"] == "done"
    assert worker.report_and_wait(job, b"again") == b"not held: " + name.encode()
    assert await_answer(client, first).text == b"durable"
    second = client.submit(unique())
    job = take_task(worker)
    assert job.payload == second.payload
    worker.done(job, b"after the restart")
    assert await_answer(client, second).text == b"after the restart"


def test_task_is_not_lost_with_a_worker_that_vanished_while_its_report_waited(yard: Yard) -> None:
    client, gone = yard.client(NATIVE), extended_worker(yard)
    client.submit(unique())
    gone.report_and_wait(take_task(gone), b"last")
    gone.vanish()
    second = client.submit(unique())
    other = yard.worker(NATIVE)
    job = take_task(other)
    assert job.payload == second.payload
    other.done(job, b"done")
    assert await_answer(client, second).text == b"done"


def test_worker_whose_report_waits_is_dismissed(yard: Yard) -> None:
    client, worker = yard.client(NATIVE), extended_worker(yard)
    client.submit(unique())
    worker.report_and_wait(take_task(worker), b"last")
    yard.control.drain(worker.name.decode())
    assert worker.take_soon(5) is None
    assert worker.is_dismissed
