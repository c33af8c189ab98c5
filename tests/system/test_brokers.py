"""Two brokers, a client of both and a worker for both, while one of them is killed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest

from taskyard.client.aio import AsyncClient
from taskyard.client.client import Client
from taskyard.client.futures import Future, as_completed
from taskyard.client.requests import full_name
from taskyard.errors import NoBroker, OtherBroker
from tests.kit.processes import Broker, Running, marks, run_here, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.client.async_futures import AsyncFuture


class Brokers:
    """Two brokers in directories of their own."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self.running = [self._start(name) for name in ("first", "second")]
        self.endpoints = [one.endpoint for one in self.running]

    def _start(self, name: str) -> Broker:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        return self._stack.enter_context(Broker(directory))

    def kill(self, number: int) -> None:
        self.running[number].kill()

    def restart(self, number: int) -> None:
        self.running[number] = self._start(("first", "second")[number])

    def start_worker(self) -> None:
        """Start a worker of two slots for both, and await both."""
        words = ("worker", "--until-eof", "--slots", "2", "--name", "w", "--broker")
        worker = Running(self.directory, *words, ",".join(self.endpoints))
        self._stack.enter_context(worker)
        assert {worker.error_line().rpartition(" ")[2] for _ in range(2)} == {*self.endpoints}

    def call(self, verb: str, *words: str) -> tuple[int, str, str]:
        given = [part for one in self.endpoints for part in ("--broker", one)]
        return run_here(self.directory, verb, *given, *words)

    def campaigns(self, client: Client) -> list[str]:
        """Return the name of a new campaign for each broker."""
        names: dict[str, str] = {}
        for number in range(100):
            names.setdefault(client.for_campaign(f"c{number}").broker, f"c{number}")
            if len(names) == len(self.endpoints):
                break
        return [names[endpoint] for endpoint in self.endpoints]


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with ExitStack() as stack:
        yield Brokers(tmp_path, stack)


def test_worker_and_client_of_two_brokers_survive_the_end_of_one(brokers: Brokers) -> None:
    brokers.start_worker()
    with Client(brokers.endpoints, report=lambda _line: None) as client:
        here, there = brokers.campaigns(client)
        cwd = str(brokers.directory)
        marking = "echo {0} >> marks; until [ -e gate ]; do sleep 0.02; done; echo {0}"
        futures = [
            client.submit(["sh", "-c", marking.format(name)], name="x", campaign=name, cwd=cwd)
            for name in (here, there)
        ]
        more = [
            client.submit(["sh", "-c", f"echo {name}"], name="y", campaign=name, after=["x"])
            for name in (here, there)
        ]
        until(lambda: sorted(marks(brokers.directory)) == sorted([here, there]), "both run")
        assert {worker["slots_used"] for worker in client.workers()} == {1}
        with pytest.raises(OtherBroker) as refused:
            client.submit(["true"], campaign=here, after=[f"{there}/x"])
        assert (refused.value.code, refused.value.names) == ("other-broker", (f"{there}/x",))
        brokers.kill(1)
        (brokers.directory / "gate").touch()
        assert futures[0].result() == f"{here}\n"
        _check_without_second(brokers, here, there)
        brokers.restart(1)
        results = [future.result() for future in (*futures, *more)]
        assert results == [f"{name}\n" for name in (here, there, here, there)]
        assert client.status()["counts"]["done"] == 4
    assert sorted(marks(brokers.directory)) == sorted([here, there])


def _check_without_second(brokers: Brokers, here: str, there: str) -> None:
    """Commands answer as far as they can, and create nothing that may exist twice."""
    code, out, err = brokers.call("list", "--json")
    listed = {task["campaign"] for task in msgspec.json.decode(out)["tasks"]}
    assert (code, listed) == (0, {here})
    assert f"broker at {brokers.endpoints[1]}: no answer, left out" in err
    code, _, err = brokers.call("submit", "--campaign", "new", "--", "true")
    assert (code, "may have it" in err) == (3, True)
    code, _, err = brokers.call("wait", f"{there}/x")
    assert (code, "does not answer" in err) == (3, True)


def test_async_client_places_tasks_in_their_order(brokers: Brokers) -> None:
    with Client(brokers.endpoints) as client:
        here, there = brokers.campaigns(client)

    async def submit() -> None:
        async with AsyncClient(brokers.endpoints) as client:
            for name in (here, there):
                client.submit(["true"], name="x", campaign=name)
                client.submit(["true"], name="y", campaign=name, after=["x"])
            refused = client.submit(["true"], campaign=here, after=[f"{there}/x"])
            alone = client.submit(["true"], name="alone", after=[f"{there}/x"])
            assert (await client.show(alone.full_name))["broker"] == brokers.endpoints[1]
            with pytest.raises(OtherBroker):
                await refused
            views = [view async for view in client.tasks()]
            assert sorted(full_name(view) for view in views) == sorted(
                [f"{here}/x", f"{here}/y", f"{there}/x", f"{there}/y", "alone"]
            )
            assert await client.cancel([f"{here}/x", f"{there}/x"]) == 5
            settled = await asyncio.wait_for(_all(client, here), 30)
            assert [one.cancelled() for one in settled] == [True, True]

    asyncio.run(submit())


async def _all(client: AsyncClient, campaign: str) -> list[AsyncFuture]:
    """Return the futures of a campaign when they are settled."""
    futures = await client.futures_of(campaign)
    return [one async for one in as_completed(futures)]


def test_commands_go_over_all_brokers(brokers: Brokers) -> None:
    with Client(brokers.endpoints) as client:
        here, there = brokers.campaigns(client)
        assert client.broker == ",".join(brokers.endpoints)
        spread = client.map(lambda item: ["echo", item], [str(number) for number in range(20)])
        assert {type(one) for one in spread} == {Future}
        assert all(broker["counts"]["ready"] for broker in client.status()["brokers"])
    for name in (here, there):
        assert brokers.call("submit", "--campaign", name, "--name", "x", "--", "true")[0] == 0
    with Client(brokers.endpoints[::-1]) as client:
        assert client.for_campaign(here).broker == brokers.endpoints[0]
        assert sum(client.counts(here).values()) == 1
    code, out, _ = brokers.call("list", "--match", "x")
    header, *rows = out.splitlines()
    assert (code, header.split()[:3]) == (0, ["NAME", "BROKER", "STATE"])
    assert {tuple(row.split()[:2]) for row in rows} == {
        (f"{here}/x", brokers.endpoints[0]),
        (f"{there}/x", brokers.endpoints[1]),
    }
    assert brokers.call("show", f"{there}/x")[0] == 0
    words = ("--json", "--campaign", here, "--after", f"{there}/x", "--", "true")
    code, _, err = brokers.call("submit", *words)
    assert (code, msgspec.json.decode(err)["error"]["code"]) == (2, "other-broker")
    assert brokers.call("cancel", f"{here}/x", f"{there}/x")[1] == "cancelled 2 tasks\n"
    status = msgspec.json.decode(brokers.call("status", "--json")[1])
    assert status["counts"]["cancelled"] == 2
    assert [one["broker"] for one in status["brokers"]] == brokers.endpoints
    brokers.kill(0)
    brokers.kill(1)
    with pytest.raises(NoBroker, match="none of them answers"):
        Client(brokers.endpoints, timeout=0.2, report=lambda _line: None)
