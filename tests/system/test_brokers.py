"""Two brokers and a worker for both, while one of them is killed."""

from __future__ import annotations

import shlex
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from taskyard.client.futures import Future
from taskyard.client.internal import InternalClient
from taskyard.errors import SeveralBrokers
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, marks, run_here, until
from tests.worker.agents_harness import shell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


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

    def clients(self) -> list[InternalClient]:
        """Connect to each broker."""
        return [self._stack.enter_context(_client(one)) for one in self.endpoints]


def _client(endpoint: str) -> InternalClient:
    return InternalClient(endpoint, report=lambda _line: None)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with ExitStack() as stack:
        yield Brokers(tmp_path, stack)


def test_worker_of_two_brokers_survives_the_end_of_one(brokers: Brokers) -> None:
    brokers.start_worker()
    clients, cwd = brokers.clients(), str(brokers.directory)
    names = ["here", "there"]
    marking = "echo {0} >> marks; until [ -e gate ]; do sleep 0.02; done; echo {0}"
    futures = [
        client.submit(["sh", "-c", marking.format(name)], name="x", cwd=cwd)
        for client, name in zip(clients, names, strict=True)
    ]
    more = [
        client.submit(["sh", "-c", f"echo {name}"], name="y", after=["x"])
        for client, name in zip(clients, names, strict=True)
    ]
    until(lambda: sorted(marks(brokers.directory)) == names, "both run")
    assert [worker["slots_used"] for one in clients for worker in one.workers()] == [1, 1]
    brokers.kill(1)
    (brokers.directory / "gate").touch()
    assert futures[0].result() == "here\n"
    brokers.restart(1)
    assert [future.result() for future in (*futures, *more)] == ["here\n", "there\n"] * 2
    assert [one.status()["counts"]["done"] for one in clients] == [2, 2]
    assert sorted(marks(brokers.directory)) == names


def test_client_takes_one_broker(brokers: Brokers) -> None:
    both = ",".join(brokers.endpoints)
    with pytest.raises(SeveralBrokers, match="this takes one broker"):
        InternalClient(both)
    given = [part for one in brokers.endpoints for part in ("--broker", one)]
    code, _, err = run_here(brokers.directory, "status", "--json", *given)
    assert (code, msgspec.json.decode(err)["error"]["code"]) == (2, "several-brokers")


def repeat(data: bytes, count: int) -> bytes:
    return data * count


def test_functions_of_both_brokers_are_called_in_one_worker(brokers: Brokers) -> None:
    brokers.start_worker("--allow-pickle")
    big = b"x" * (1 << 20)
    futures = [client.submit(repeat, big, 2) for client in brokers.clients()]
    assert [future.result(PATIENCE_SECONDS) for future in futures] == [big * 2] * 2


def test_brokers_share_the_gpus_of_a_worker(brokers: Brokers) -> None:
    brokers.start_worker("--gpus", "3,5")
    script = "echo $CUDA_VISIBLE_DEVICES >> marks; until [ -e gate ]; do sleep 0.02; done"
    options: dict[str, Any] = {"gpus": 1, "cpus": 0, "cwd": str(brokers.directory)}
    clients = brokers.clients()

    def submit(name: str) -> list[Future]:
        return [client.submit(["sh", "-c", script], name=name, **options) for client in clients]

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
    futures = [
        client.submit(client.broker.encode(), name="x", service="s") for client in brokers.clients()
    ]
    assert [future.result(60).decode() for future in futures] == brokers.endpoints


QUICK = ("--heartbeat", "200ms", "--lease", "1s")


def test_worker_whose_name_one_broker_gives_away_works_for_the_other(brokers: Brokers) -> None:
    worker = brokers.start_worker(*QUICK)
    words = ("worker", "--until-eof", "--slots", "1", "--name", "w", *QUICK)
    clients = brokers.clients()
    with Running(brokers.directory, *words, "--broker", brokers.endpoints[1]) as successor:
        worker.send(signal.SIGSTOP)
        while not (line := successor.error_line()).endswith("holds its name now"):
            assert line
        worker.send(signal.SIGCONT)
        while not (line := worker.error_line()).endswith("works for the other brokers only"):
            assert line
        assert f"broker at {brokers.endpoints[1]}: " in line
        for client in clients:
            client.submit(["true"], name="x").result(60)
        assert [one["slots"] for client in clients for one in client.workers()] == [2, 1]


def test_worker_whose_name_is_taken_at_one_broker_works_for_the_other(brokers: Brokers) -> None:
    words = ("worker", "--until-eof", "--slots", "1", "--name", "w", *QUICK)
    with (
        Running(brokers.directory, *words, "--broker", brokers.endpoints[1]) as holder,
        ExitStack() as stack,
    ):
        assert " works for the broker at " in holder.error_line()
        both = ",".join(brokers.endpoints)
        worker = stack.enter_context(Running(brokers.directory, *words, "--broker", both))
        while "is held by another process" not in (line := worker.error_line()):
            assert line
        assert f"worker w at {brokers.endpoints[1]}: " in line
        for client in brokers.clients():
            client.submit(["true"], name="x").result(60)
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
        words = ("keys", "invite", roles, name, "--for", dialect, "--broker")
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
        clients = [
            stack.enter_context(InternalClient(one.endpoints["dwork"], key=key))
            for one, key in zip(both, native, strict=True)
        ]
        code, _, err = run_here(tmp_path, "status", "--json", *repeated("--invite", native))
        assert (code, msgspec.json.decode(err)["error"]["code"]) == (2, "several-brokers")
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
                sent = [client.broker.encode() for client in clients]
                futures = [
                    client.submit(one, service=f"s{number}")
                    for client, one in zip(clients, sent, strict=True)
                ]
                assert [one.result(60) for one in futures] == sent
