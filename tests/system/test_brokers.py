"""Two brokers, a client of both and a worker for both, while one of them is killed."""

from __future__ import annotations

import asyncio
import shlex
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from taskyard.cli import connection
from taskyard.client import members, routes
from taskyard.client.aio import AsyncClient
from taskyard.client.client import Client
from taskyard.client.futures import Future, as_completed
from taskyard.client.requests import full_name, scope_of
from taskyard.errors import NoBroker, OtherBroker, SeveralBrokers, UserError
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.client import function_calls as calls
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, marks, run_here, until
from tests.worker.agents_harness import shell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
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

    def start_worker(self, *options: str) -> Running:
        """Start a worker of two slots for both, and await both."""
        words = ("worker", "--until-eof", "--slots", "2", "--name", "w", *options, "--broker")
        worker = Running(self.directory, *words, ",".join(self.endpoints))
        self._stack.enter_context(worker)
        assert {worker.error_line().rpartition(" ")[2] for _ in range(2)} == {*self.endpoints}
        return worker

    def call(self, verb: str, *words: str) -> tuple[int, str, str]:
        given = [part for one in self.endpoints for part in ("--broker", one)]
        return run_here(self.directory, verb, *given, *words)

    def campaigns(self, client: Client) -> list[str]:
        """Return the name of a new campaign for each broker."""
        return _one_for_each(client, self.endpoints)


def _one_for_each(client: Client, endpoints: Sequence[str]) -> list[str]:
    """Return the name of a campaign for each broker."""
    names: dict[str, str] = {}
    for number in range(100):
        names.setdefault(client.for_campaign(f"c{number}").broker, f"c{number}")
        if len(names) == len(endpoints):
            break
    return [names[endpoint] for endpoint in endpoints]


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
    file = brokers.directory / "waits.jsonl"
    file.write_text(f'{{"name": "z", "argv": ["true"], "after": ["{there}/x"]}}\n')
    code, _, err = brokers.call("load", str(file), "--campaign", here)
    assert (code, f"broker at {brokers.endpoints[1]} does not answer" in err) == (3, True), err


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


def test_functions_are_called_at_all_brokers(brokers: Brokers) -> None:
    brokers.start_worker("--allow-pickle")
    with Client(brokers.endpoints) as client:
        assert (
            client.submit(calls.greet, "Ann", kwargs={"lane": "x"}).result(PATIENCE_SECONDS)
            == "hello Ann x"
        )
        # Its own parameter is an argument, although this client generates the task's name.
        assert client.submit(calls.keywords, a=1).result(PATIENCE_SECONDS) == {"a": 1}
        with pytest.raises(UserError, match="'name': both an option"):
            client.submit(calls.greet, name="Ann")
        spread = client.map(calls.power, range(20), exponent=1)
        assert client.gather(spread) == [*range(20)]
        assert all(broker["counts"]["done"] for broker in client.status()["brokers"])
        once = client.map(calls.power, range(3), key="content")
        again = client.submit(calls.power, 2, key="content")
        assert client.gather([once, again]) == [[0, 1, 4], 4]
        assert again.full_name == once[2].full_name

    async def scenario() -> None:
        async with AsyncClient(brokers.endpoints) as client:
            assert await client.submit(calls.power, 2, key="content", campaign="c0") == 4
            assert await client.gather(await client.map(calls.power, range(3))) == [0, 1, 4]

    asyncio.run(scenario())


async def _all(client: AsyncClient, campaign: str) -> list[AsyncFuture]:
    """Return the futures of a campaign when they are settled."""
    futures = await client.futures_of(campaign)
    return [one async for one in as_completed(futures)]


def test_commands_go_over_all_brokers(brokers: Brokers) -> None:
    with Client(brokers.endpoints) as client:
        here, there = brokers.campaigns(client)
        assert client.broker == ",".join(brokers.endpoints)
        spread = client.map("operator:neg", range(20))
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


def test_broker_that_refuses_connections_is_left_out_at_once(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers.kill(1)
    # Longer than the test may take.
    monkeypatch.setattr(connection, "FIRST_ANSWER_SECONDS", 1000.0)
    code, out, err = brokers.call("submit", "--json", "--", "true")
    assert (code, err.count("left out")) == (0, 1)
    name = msgspec.json.decode(out)["name"]
    code, out, err = brokers.call("list")
    assert (code, out.count(name), err.count("\n")) == (0, 1, 1)
    assert f"broker at {brokers.endpoints[1]}: no answer, left out" in err
    assert brokers.call("cancel", name)[:2] == (0, "cancelled 1 task\n")
    assert brokers.call("wait", name)[0] == 5
    code, _, err = brokers.call("wait")
    assert (code, "(the request is for all brokers)" in err) == (3, True)
    code, _, err = brokers.call("submit", "--name", "new", "--", "true")
    assert (code, "may have it" in err) == (3, True)

    async def count() -> int:
        async with AsyncClient(brokers.endpoints, connect_timeout=1000.0) as client:
            return sum((await client.status())["counts"].values())

    assert asyncio.run(count()) == 1


def test_broker_that_hangs_is_left_out_until_it_answers(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections are accepted, by the kernel. A client that it has answered waits as well."""
    monkeypatch.setattr(connection, "FIRST_ANSWER_SECONDS", 1000.0)  # longer than the test may take
    monkeypatch.setattr(members, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(routes, "RETRY_SECONDS", 0.5)
    lines: list[str] = []
    left_out = f"broker at {brokers.endpoints[1]}: no answer, left out"
    with Client(brokers.endpoints, report=lines.append) as client:
        brokers.running[1].send(signal.SIGSTOP)
        for _ in range(2):  # the second one does not wait
            assert [one["broker"] for one in client.status()["brokers"]] == brokers.endpoints[:1]
        assert lines.count(left_out) == 1
        name = client.submit(["true"]).full_name  # at the other one
        assert client.show(name)["broker"] == brokers.endpoints[0]
        code, out, err = brokers.call("submit", "--", "true")
        assert (code, len(out.split()), err.count(left_out)) == (0, 1, 1)

        async def count() -> int:
            async with AsyncClient(brokers.endpoints, connect_timeout=1000.0) as other:
                return len((await other.status())["brokers"])

        assert asyncio.run(count()) == 1
        brokers.running[1].send(signal.SIGCONT)
        until(lambda: len(client.status()["brokers"]) == 2, "it is asked again")


def test_records_of_a_campaign_are_followed_at_its_broker(brokers: Brokers) -> None:
    with Client(brokers.endpoints) as client:
        here, there = brokers.campaigns(client)
        for name in (here, there):
            client.submit(["true"], name="x", campaign=name)
        client.for_campaign(here).show(f"{here}/x")  # submitted
        scope = scope_of(campaign=there)
        (record,) = next(client.follow(0, scope)).records
        assert (record["names"], record["broker"]) == ([f"{there}/x"], brokers.endpoints[1])
        with pytest.raises(SeveralBrokers, match="each broker has its own numbers"):
            next(client.follow(0))
    code, _, err = brokers.call("watch", "--json", "--since", "0")
    assert (code, msgspec.json.decode(err)["error"]["code"]) == (2, "several-brokers")

    async def follow() -> None:
        async with AsyncClient(brokers.endpoints) as client:
            campaign = client.campaign(there)
            assert (await campaign.status())["ready"] == 1
            assert [view["name"] async for view in campaign.tasks()] == ["x"]
            async for batch in client.follow(0, scope):
                assert [one["broker"] for one in batch.records] == [brokers.endpoints[1]]
                break
            async for _ in client.follow():  # of both, from now on
                break
            assert await campaign.cancel() == 1
            with pytest.raises(SeveralBrokers):
                await anext(client.follow(0))

    asyncio.run(asyncio.wait_for(follow(), 60))


def test_brokers_share_the_gpus_of_a_worker(brokers: Brokers) -> None:
    brokers.start_worker("--gpus", "3,5")
    with Client(brokers.endpoints) as client:
        script = "echo $CUDA_VISIBLE_DEVICES >> marks; until [ -e gate ]; do sleep 0.02; done"
        options: dict[str, Any] = {"gpus": 1, "cpus": 0, "cwd": str(brokers.directory)}
        campaigns = brokers.campaigns(client)

        def submit(name: str) -> list[Future]:
            command = ["sh", "-c", script]
            return [client.submit(command, name=name, campaign=one, **options) for one in campaigns]

        futures = submit("x")
        until(lambda: len(marks(brokers.directory)) == 2, "a task of each broker runs")
        futures += submit("y")
        (brokers.directory / "gate").touch()
        for future in futures:
            future.result(60)
    found = marks(brokers.directory)
    assert (sorted(found[:2]), {*found[2:]} <= {"3", "5"}, len(found)) == (["3", "5"], True, 4)


def test_agents_of_both_brokers_run_in_one_worker(brokers: Brokers) -> None:
    agent = shlex.join(shell('report "$payload" ok'))
    brokers.start_worker("--service", "s", "--agent", agent)
    with Client(brokers.endpoints) as client:
        names = brokers.campaigns(client)
        futures = [
            client.submit(one.encode(), name="x", campaign=one, service="s") for one in names
        ]
        assert [future.result(60).decode() for future in futures] == names


QUICK = ("--heartbeat", "200ms", "--lease", "1s")


def test_worker_whose_name_one_broker_gives_away_works_for_the_other(brokers: Brokers) -> None:
    worker = brokers.start_worker(*QUICK)
    words = ("worker", "--until-eof", "--slots", "1", "--name", "w", *QUICK)
    with (
        Running(brokers.directory, *words, "--broker", brokers.endpoints[1]) as successor,
        Client(brokers.endpoints) as client,
    ):
        worker.send(signal.SIGSTOP)
        while not (line := successor.error_line()).endswith("holds its name now"):
            assert line
        worker.send(signal.SIGCONT)
        while not (line := worker.error_line()).endswith("works for the others only"):
            assert line
        assert f"broker at {brokers.endpoints[1]}: " in line
        for campaign in brokers.campaigns(client):
            client.submit(["true"], name="x", campaign=campaign).result(60)
        slots = {one["broker"]: one["slots"] for one in client.workers()}
        assert slots == dict(zip(brokers.endpoints, (2, 1), strict=True))


def test_worker_whose_name_is_taken_at_one_broker_works_for_the_other(brokers: Brokers) -> None:
    words = ("worker", "--until-eof", "--slots", "1", "--name", "w", *QUICK)
    with (
        Running(brokers.directory, *words, "--broker", brokers.endpoints[1]) as holder,
        Client(brokers.endpoints) as client,
        ExitStack() as stack,
    ):
        assert " works for the broker at " in holder.error_line()
        both = ",".join(brokers.endpoints)
        worker = stack.enter_context(Running(brokers.directory, *words, "--broker", both))
        while "is held by another process" not in (line := worker.error_line()):
            assert line
        assert f"worker w at {brokers.endpoints[1]}: " in line
        for campaign in brokers.campaigns(client):
            client.submit(["true"], name="x", campaign=campaign).result(60)
        holder.terminate()
        while not (line := worker.error_line()).endswith("holds its name now"):
            assert line


class SecureBroker:
    """A broker that requires keys, and invitations to it."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        directory.mkdir()
        self._directory = directory
        Keyring(directory / ".taskyard").create("owner", Role.ADMIN, directory / "owner.key")
        listen = ("--listen", "dwork=tcp://127.0.0.1:0", "--listen", "wmp=tcp://127.0.0.1:0")
        found = stack.enter_context(Broker(directory, "--secure", *listen)).endpoints[1:]
        self.endpoints = dict(zip(("dwork", "wmp"), found, strict=True))

    def invite(self, dialect: str, name: str, roles: str = "worker,producer") -> str:
        """Return the file of a new invitation."""
        words = ("keys", "invite", roles, name, "--dialect", dialect, "--broker")
        code, _, err = run_here(self._directory, *words, self.endpoints[dialect])
        assert code == 0, err
        return str(self._directory / f"{name}.invite")


def repeated(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def test_invitations_and_keys_of_several_brokers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = [SecureBroker(tmp_path / name, stack) for name in ("first", "second")]
        native = [one.invite("dwork", "native") for one in both]
        wmp = [one.invite("wmp", "wmp") for one in both]
        above = [one.invite("wmp", "above", "relay,worker") for one in both]
        brokers = [one.endpoints["dwork"] for one in both]
        client = stack.enter_context(Client(brokers, key=native))
        code, out, err = run_here(tmp_path, "status", "--json", *repeated("--invite", native))
        assert (code, err) == (0, "")
        assert [one["broker"] for one in msgspec.json.decode(out)["brokers"]] == brokers
        mixed = repeated("--invite", [native[0], wmp[1]])
        for refused in (["rr", "client", *repeated("--invite", wmp)], ["worker", *mixed]):
            assert run_here(tmp_path, *refused)[0] == 2
        upstreams = repeated("--to", [one.endpoints["wmp"] for one in both])
        relay_words = ("relay", "--until-eof", "--listen", "tcp://127.0.0.1:0", *upstreams)
        relay = stack.enter_context(Running(tmp_path, *relay_words, *repeated("--key", above)))
        behind = ["--dialect", "wmp", "--broker", relay.line().rpartition(" ")[2]]
        for number, options in enumerate(
            (repeated("--invite", native), repeated("--invite", wmp), behind)
        ):
            words = ("worker", "--until-eof", "--slots", "2", "--service", f"s{number}")
            with Running(tmp_path, *words, "--command", "cat", *options, stderr=None):
                futures = [
                    client.for_campaign(campaign).submit(
                        campaign.encode(), campaign=campaign, service=f"s{number}"
                    )
                    for campaign in _one_for_each(client, brokers)
                ]
                assert [one.result(60) for one in futures] == [
                    one.campaign.encode() for one in futures
                ]
