"""Functions that submit tasks, for `test_nested`. Workers import a copy of this file."""

import os
from typing import Any

import taskyard


def facts() -> dict[str, Any]:
    task = taskyard.current()
    return {
        "name": task.full_name,
        "attempt": task.attempt,
        "broker": task.broker,
        "submitted": task.client.show(task.full_name)["state"],
        "key": os.environ.get("TASKYARD_KEY"),
    }


def fib(number: int) -> int:
    if number < 2:
        return number
    submit = taskyard.current().client.submit
    return sum([one.result() for one in [submit("nested:fib", args=[number - n]) for n in (1, 2)]])


def fib_pickled(number: int) -> int:
    if number < 2:
        return number
    with taskyard.current().executor() as executor:
        return sum(executor.map(fib_pickled, [number - 1, number - 2]))


def depth(number: int) -> int:
    if not number:
        return 0
    client = taskyard.current().client
    (done,) = taskyard.as_completed([client.submit("nested:depth", args=[number - 1])])
    return 1 + int(done.result())


def depth_with_cores(number: int) -> int:
    if not number:
        return 0
    call = "nested:depth_with_cores"
    return 1 + int(taskyard.current().client.submit(call, args=[number - 1], cpus=1).result())


def wait_for_later(name: str) -> str:
    """Wait for a task of a service that may have no worker yet."""
    client = taskyard.current().client
    result = client.submit(b"late", name=name, service="later").result()
    return f"{result.decode()} {taskyard.current().attempt}"


def wait_in_lane(name: str, lane: str) -> None:
    taskyard.current().client.submit("nested:fib", args=[1], name=name, lane=lane).result()


def wait_for_campaign(campaign: str) -> None:
    client = taskyard.current().client
    client.submit("nested:fib", args=[1], campaign=campaign)
    client.campaign(campaign).wait()


def submit_more() -> str:
    future = taskyard.current().client.submit(["true"])
    return type(future.exception()).__name__ + ": " + str(future.exception())
