"""Peers that know no keys, behind relays to a broker that requires them. Relays are killed."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.conformance.dwork_plain import PlainClient, PlainWorker
from tests.conformance.ping_pong import BackendWorker, FrontendClient
from tests.conformance.round_robin import RegisteredWorker, TrackingClient
from tests.kit.processes import PATIENCE_SECONDS, Running, run_here, until
from tests.system.kit import Broker, count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance import skills

ANY = "tcp://127.0.0.1:0"

#: The endpoints of each dialect.
LISTEN = {"dwork": ANY, "ping-pong": f"{ANY},{ANY}", "round-robin": ANY, "wmp": ANY}

#: A worker's key whose relay may carry workers of any name.
ROLES = (Role.WORKER, Role.PRODUCER, Role.RELAY)


class Yard:
    """A broker that requires keys in every dialect, and relays to it."""

    def __init__(self, directory: Path, dialect: str, stack: ExitStack) -> None:
        self.directory = directory
        self.dialect = dialect
        self.stack = stack
        self.ring = Keyring(directory / ".taskyard")
        self.ring.create("site", ROLES, directory / "site.key")
        listen = f"{dialect}={LISTEN[dialect]}"
        self.broker = stack.enter_context(Broker(directory, "--secure", "--listen", listen))
        self.owner = stack.enter_context(InternalClient(self.broker.endpoint))

    def relay(self, to: str = "", endpoint: str = "", key: str = "site.key") -> tuple[Running, str]:
        """Start a relay. Return it with its endpoint."""
        listen = f"{self.dialect}={endpoint or LISTEN[self.dialect]}"
        words = ["--listen", listen]
        if key.endswith(".key"):
            words += ["--to", f"{self.dialect}={to or self.broker.endpoints[1]}"]
            words += [] if to else ["--key", key]
        else:
            words += ["--invite", key]
        running = Running(self.directory, "relay", "--until-eof", *words)
        self.stack.enter_context(running)
        word, dialect, opened = running.line().split()
        assert (word, dialect) == ("listening", self.dialect)
        return running, opened

    def invite(self) -> str:
        """Return the file of an invitation for a relay."""
        place = ("--for", self.dialect, "--broker", self.broker.endpoints[1])
        code, _, _ = run_here(self.directory, "keys", "invite", "worker,relay", "invited", *place)
        assert code == 0
        return "invited.invite"

    def restart(self, running: Running, endpoint: str, key: str = "site.key") -> Running:
        running.kill()
        return self.relay(endpoint=endpoint, key=key)[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def finish(
    worker: skills.Worker, client: skills.Client, task: skills.SubmittedTask
) -> skills.Answer:
    """Run tasks until this one is answered. Peers repeat what they must after a lost connection."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < ends:
        for _ in range(4):
            if (job := worker.take(0.5)) is not None:
                worker.done(job, job.payload.upper())
            if (answer := client.answer(task, 0.1)) is not None:
                return answer
        worker.reregister()
        task = client.again(task)
    raise AssertionError("no answer")


#: A client, a worker, and which of a dialect's endpoints each uses.
PEERS = {
    "dwork": (PlainClient, PlainWorker),
    "ping-pong": (FrontendClient, BackendWorker),
    "round-robin": (TrackingClient, RegisteredWorker),
}


@pytest.mark.parametrize("dialect", PEERS)
def test_peers_without_keys_work_through_relays_that_are_killed(
    dialect: str, tmp_path: Path, stack: ExitStack
) -> None:
    yard = Yard(tmp_path, dialect, stack)
    relay, endpoint = yard.relay()
    client_kind, worker_kind = PEERS[dialect]
    client = stack.enter_context(closing(client_kind(endpoint.split(",")[-1])))
    worker = stack.enter_context(closing(worker_kind(endpoint.split(",")[0])))
    results = [finish(worker, client, client.submit(b"first")).text]
    held = client.submit(b"held")
    job = worker.take(PATIENCE_SECONDS)
    assert job is not None
    assert job.payload == b"held"
    relay = yard.restart(relay, endpoint)
    worker.nudge()  # the relay has a peer again with its next message
    worker.done(job, b"HELD")
    results += [finish(worker, client, held).text]
    results += [finish(worker, client, client.submit(b"last")).text]
    assert results == ([None] * 3 if dialect == "dwork" else [b"FIRST", b"HELD", b"LAST"])
    assert relay.terminate()[:2] == (0, "")
    assert yard.broker.terminate()[0] == 0
    tally, _ = count(tmp_path)
    # A ping-pong client that lost its connection has sent its job again, as another task.
    assert tally.submitted - tally.done <= (dialect == "ping-pong")
    assert tally.completed_twice == 0


def test_native_peers_work_through_a_chain_of_relays_that_are_killed(
    tmp_path: Path, stack: ExitStack
) -> None:
    yard = Yard(tmp_path, "dwork", stack)
    upper, middle = yard.relay()
    lower, endpoint = yard.relay(middle)
    for name in ("v", "w"):
        words = ("worker", "--broker", endpoint, "--name", name, "--slots", "2", "--until-eof")
        stack.enter_context(Running(tmp_path, *words, "--heartbeat", "100ms"))
    until(lambda: len(yard.owner.workers()) == 2, "both workers are registered")
    with InternalClient(endpoint) as client:
        tasks = [client.submit(["sh", "-c", f"sleep 0.2; echo {n} >> runs"]) for n in range(20)]
        until(lambda: yard.owner.status()["counts"]["done"] >= 4, "some tasks are done")
        lower.kill()
        lower, _ = yard.relay(middle, endpoint)
        until(lambda: yard.owner.status()["counts"]["done"] >= 10, "more tasks are done")
        upper = yard.restart(upper, middle)
        for task in tasks:
            assert task.result(PATIENCE_SECONDS) == ""
    assert lower.terminate()[0] == upper.terminate()[0] == 0
    runs = (tmp_path / "runs").read_text().split()
    assert sorted(map(int, runs)) == [*range(20)]  # leases were kept, and no task ran twice
    assert yard.broker.terminate()[0] == 0
    tally, _ = count(tmp_path)
    assert (tally.submitted, tally.done, tally.completed_twice) == (20, 20, 0)


def test_wmp_workers_work_through_an_invited_relay(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, "wmp", stack)
    invitation = yard.invite()
    relay, endpoint = yard.relay(key=invitation)
    words = ("worker", "--dialect", "wmp", "--broker", endpoint, "--until-eof", "--slots", "2")
    stack.enter_context(Running(tmp_path, *words, "--command", "cat"))
    names = [b"t%d" % number for number in range(20)]
    yard.owner.create(Submission(names, names, [Terms(dialect=b"test")]))
    until(lambda: yard.owner.status()["counts"]["done"] >= 5, "some tasks are done")
    relay = yard.restart(relay, endpoint, invitation)
    until(lambda: yard.owner.status()["counts"]["done"] == 20, "all tasks are done")
    assert [yard.owner.output(name.decode(), "result") for name in names] == names
    assert relay.terminate()[0] == 0


def test_relay_can_not_do_more_than_its_key(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, "dwork", stack)
    yard.ring.create("crew", Role.WORKER, tmp_path / "crew.key")
    relay, endpoint = yard.relay(key="crew.key")
    client = stack.enter_context(closing(PlainClient(endpoint)))
    assert client.submit_all((b"a", ())) is False
    words = ("worker", "--broker", endpoint, "--until-eof", "--name")
    stranger = stack.enter_context(Running(tmp_path, *words, "other"))
    lines = [stranger.error_line(), stranger.error_line()]
    assert "workers must be named crew or crew/…" in lines[1], lines
    stack.enter_context(Running(tmp_path, *words, "crew/1"))
    until(lambda: [one["name"] for one in yard.owner.workers()] == ["crew/1"], "one worker")
    yard.ring.revoke("crew")
    code, _, err = relay.end()  # with the next heartbeat
    assert (code, "relay: key 'crew' was revoked" in err) == (2, True)
    relay, _ = yard.relay(endpoint=endpoint, key="crew.key")
    code, _, err = relay.end()
    assert (code, "key 'crew' is unknown or revoked" in err) == (2, True)
