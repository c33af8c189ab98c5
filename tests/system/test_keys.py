"""Keys and roles between real processes: access, permissions, and revoked keys."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from taskyard.client.internal import InternalClient
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.errors import NoBroker, Refused, TaskyardError
from taskyard.journal.row_file import TABLES
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Poller
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey, make_secret, read_peer_key
from taskyard.net.protocols import SystemClock
from taskyard.web.events import expanded
from taskyard.web.follower import EventFeed
from taskyard.wire.native import peer, task_contents
from taskyard.wire.roles import Role
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, run, run_here, until
from tests.kit.requirements import problem
from tests.system import remote_broker

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A running broker answers much sooner.
NOBODY_SECONDS = 1.0

ROOT = Path(__file__).parents[2]


class Yard:
    """A broker that requires keys, and a key of each role."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.ring = Keyring(directory / ".taskyard")
        for role in Role:
            roles = {role, Role.WORKER} if role is Role.RELAY else {role}
            self.ring.create(role.value, roles, self.file(role))
        options = ("--secure", "--listen", "dwork=tcp://127.0.0.1:0")
        self.broker = stack.enter_context(Broker(directory, *options))
        self._stack = stack

    @property
    def endpoint(self) -> str:
        return self.broker.endpoints[1]

    def file(self, role: Role) -> Path:
        return self.directory / f"{role}.key"

    def client(self, role: Role, **more: Any) -> InternalClient:
        """Return a client with that role's key."""
        client = InternalClient(self.endpoint, key=self.file(role), **more)
        self._stack.callback(client.close, 0)
        return client

    def owner(self) -> InternalClient:
        """Return a client of the native socket, which requires no key."""
        return self._stack.enter_context(InternalClient(self.broker.endpoint))

    def worker(self, *options: str) -> Running:
        words = ("worker", "--broker", self.endpoint, "--key", str(self.file(Role.WORKER)))
        running = Running(self.directory, *words, "--until-eof", *options)
        return self._stack.enter_context(running)


@contextmanager
def yard_in(directory: Path) -> Iterator[Yard]:
    with ExitStack() as stack:
        yield Yard(directory, stack)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as yard:
        yield yard


class Peer:
    """A channel with a key, for requests that our clients and workers never send."""

    def __init__(self, endpoint: str, key: PeerKey | None) -> None:
        self._wire = sockets.connect(endpoint, key)
        self.line = Channel(self._wire, SystemClock())
        self._poller = Poller()
        self._poller.add(self._wire)

    def answer(self) -> peer.Reply:
        while not (receive := self.line.receive()):
            assert self._poller.wait(20 * SECOND_NS)
        return receive[0]

    def close(self) -> None:
        self._wire.close()


def tasks_of(client: InternalClient) -> int:
    counts: dict[str, int] = client.status()["counts"]
    return sum(counts.values())


@contextmanager
def foreign_peer(yard: Yard, role: Role, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    """Return a REQ socket of plain pyzmq with a key and a routing id."""
    key = read_peer_key(yard.file(role))
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.curve_secretkey = key.secret.reveal()
        socket.curve_publickey = key.secret.public().encode()
        socket.curve_serverkey = key.broker.encode()
        socket.connect(yard.endpoint)
        yield socket


def replied(socket: zmq.Socket[bytes], request: str) -> str:
    """Return the reply to a plain request, both in hex."""
    socket.send(bytes.fromhex(request))
    return socket.recv().hex()


@contextmanager
def returned_peer(yard: Yard, role: Role, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    """Return a `foreign_peer` with the routing id of one that has left.

    On a busy machine it may connect before the broker has noticed that the other one left. ZeroMQ
    never serves a second connection under an id in use. So a peer without a reply connects again.
    """
    ends = time.monotonic() + PATIENCE_SECONDS
    while True:
        with foreign_peer(yard, role, identity) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 3_000)
            with suppress(zmq.Again):
                assert replied(socket, "0806").startswith("08061a")
                socket.setsockopt(zmq.RCVTIMEO, 20_000)
                yield socket
                return
        assert time.monotonic() < ends, "no reply under a routing id that is free"


def test_peer_with_its_own_routing_id_gets_replies(yard: Yard) -> None:
    with foreign_peer(yard, Role.ADMIN, b"chosen") as first:
        assert replied(first, "080012080a01411203636c69") == "0806"
        with foreign_peer(yard, Role.ADMIN, b"another") as second:
            assert replied(second, "080132027731").startswith("0803121")
        assert replied(first, "080212080a01411203636c6932027731") == "0806"
    with returned_peer(yard, Role.ADMIN, b"chosen"):
        pass


def test_routing_id_under_another_key_is_answered_and_logged(yard: Yard) -> None:
    with foreign_peer(yard, Role.ADMIN, b"chosen") as first:
        assert replied(first, "0806").startswith("08061a")
    with returned_peer(yard, Role.VIEWER, b"chosen") as second:
        assert replied(second, "080012080a01411203636c69") == "0808"
    assert (
        "routing id 'chosen' is used by key viewer now, it was admin's"
        in yard.broker.terminate()[2]
    )


def test_task_passes_from_a_producer_key_to_a_worker_key_and_back(yard: Yard) -> None:
    yard.worker("--slots", "1")
    future = yard.client(Role.PRODUCER).submit(["echo", "hello"], name="a")
    assert future.result(PATIENCE_SECONDS) == "hello\n"
    viewer = yard.client(Role.VIEWER)
    assert viewer.result("a") == "hello\n"
    (worker,) = viewer.workers()
    assert worker["name"].startswith("worker/")


def test_each_role_may_do_its_own_requests_and_gets_errors_for_others(yard: Yard) -> None:
    viewer, producer = yard.client(Role.VIEWER), yard.client(Role.PRODUCER)
    producer.submit(["true"], name="a", service="nobody's")
    assert producer.show("a")["state"] == "ready"  # acknowledged
    assert viewer.show("a")["state"] == "ready"
    with pytest.raises(Refused, match=r"key 'viewer': a viewer may not cancel tasks \(this needs"):
        viewer.cancel(["a"])
    with pytest.raises(Refused, match=r"may not submit tasks \(this needs a producer's key\)"):
        viewer.submit(["true"], name="b").result(PATIENCE_SECONDS)
    with pytest.raises(Refused, match=r"key 'producer': a producer may not drain workers"):
        producer.drain()
    assert [task["name"] for task in viewer.tasks()] == ["a"]
    assert viewer.show("a")["state"] == "ready"
    yard.owner().pause("nobody's")  # by the local socket, without a key
    assert producer.edit(["a"], priority=1) == 1
    assert producer.cancel(["a"]) == 1
    assert yard.client(Role.ADMIN).drain() == 0
    assert yard.broker.end()[0] == 0
    assert _reasons(yard.directory / ".taskyard") == {
        b"submitted": b"by key producer",
        b"edited": b"by key producer",
        b"cancelled": b"by key producer",
        b"paused": None,
    }


def _reasons(state: Path) -> dict[bytes, bytes | None]:
    """Return the reasons of all commands in the history of a state directory, by kind."""
    found: dict[bytes, bytes | None] = {}
    for batch in EventFeed(state).read():
        if not batch.events.rows:
            continue
        kinds, reasons = (
            expanded(batch.events.columns[TABLES["events"].index(name)], batch.events.rows)
            for name in ("kind", "reason")
        )
        found |= dict(zip(kinds, reasons, strict=True))
    return {kind: why for kind, why in found.items() if kind != b"ready"}


def test_worker_key_can_not_submit_or_query(yard: Yard) -> None:
    client = yard.client(Role.WORKER)
    with pytest.raises(Refused, match=r"key 'worker': a worker may not see the status"):
        client.status()
    words = ("submit", "--broker", yard.endpoint, "--key", "worker.key", "--", "true")
    code, out, err = run(yard.directory, *words)
    assert (code, out) == (2, "")
    assert "key 'worker': a worker may not submit tasks (this needs a producer's key)" in err
    assert tasks_of(yard.owner()) == 0


def test_worker_can_not_work_under_another_name(yard: Yard) -> None:
    code, _, err = yard.worker("--name", "another").end()
    assert code == 2
    assert "key worker: only for workers named worker or worker/…, not 'another'" in err
    owner = yard.owner()
    owner.submit(["true"], name="a")
    with closing(Peer(yard.endpoint, read_peer_key(yard.file(Role.WORKER)))) as liar:
        facts = peer.worker_message(WorkerFacts((b"exec",), slots_total=1))
        liar.line.request(lambda number: peer.steal(number, b"another", facts, 1))
        reply = liar.answer()
    assert reply.kind == peer.ERROR
    assert "not 'another'" in reply.reason
    assert owner.workers() == []
    assert owner.show("a")["state"] == "ready"


@pytest.mark.parametrize("role", [Role.VIEWER, Role.PRODUCER, Role.WORKER, Role.ADMIN])
def test_key_does_not_give_away_where_the_state_is(yard: Yard, role: Role) -> None:
    with closing(Peer(yard.endpoint, read_peer_key(yard.file(role)))) as away:
        away.line.request(task_contents.store_terms)
        document = away.answer().document()
    assert document["directory"] == ""
    assert str(yard.directory) not in str(document)
    with closing(Peer(yard.broker.endpoint, None)) as near:
        near.line.request(task_contents.store_terms)
        assert near.answer().document()["directory"] == str(yard.directory / ".taskyard" / "blobs")


def test_peers_without_a_key_are_refused(yard: Yard) -> None:
    with pytest.raises(Refused, match=r"requires a key \(give --key FILE or --invite FILE"):
        InternalClient(yard.endpoint)
    host, _, port = yard.endpoint.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as page:
        page.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n\x01\x00x")
        with suppress(ConnectionResetError):
            while page.recv(4096):
                pass
    assert tasks_of(yard.client(Role.VIEWER)) == 0


def test_unknown_key_is_refused(yard: Yard) -> None:
    known = read_peer_key(yard.file(Role.ADMIN))
    unknown = PeerKey("admin", (Role.ADMIN,), make_secret(), known.broker)
    with closing(Peer(yard.endpoint, unknown)) as stranger:
        stranger.line.request(lambda number: peer.query(number, peer.STATS))
        with pytest.raises(Refused, match=r"key 'admin' is unknown or revoked"):
            until(lambda: stranger._wire.check_accepted(SECOND_NS))  # noqa: SLF001
    assert yard.owner().status()["workers"] == 0


def test_key_that_was_revoked_before_is_refused_by_name_and_exit_code(yard: Yard) -> None:
    yard.ring.revoke("viewer")
    with pytest.raises(Refused, match=r"key 'viewer' is unknown or revoked"):
        yard.client(Role.VIEWER)
    words = ("status", "--broker", yard.endpoint, "--key", "viewer.key")
    assert run(yard.directory, *words)[0] == 2
    yard.ring.revoke("worker")
    assert yard.worker().end()[0] == 2


def test_key_that_is_revoked_while_connected_is_refused_with_the_next_message(yard: Yard) -> None:
    viewer, producer = yard.client(Role.VIEWER), yard.client(Role.PRODUCER)
    assert tasks_of(viewer) == 0
    code, out, _ = run_here(yard.directory, "keys", "revoke", "viewer")
    assert (code, out.startswith("revoked the key of viewer ")) == (0, True)
    with pytest.raises(Refused, match=r"key 'viewer' was revoked"):
        viewer.status()
    assert tasks_of(producer) == 0


def test_new_key_of_the_same_name_does_not_open_the_old_connection(yard: Yard) -> None:
    old = yard.client(Role.ADMIN)
    yard.ring.revoke("admin")
    yard.ring.create("admin", Role.ADMIN, yard.directory / "new.key")
    with InternalClient(yard.endpoint, key=yard.directory / "new.key") as create:
        assert tasks_of(create) == 0
    with pytest.raises(Refused, match=r"key 'admin' was revoked"):
        old.status()


def test_key_that_is_revoked_while_its_worker_waits_gets_no_task(yard: Yard) -> None:
    owner = yard.owner()
    yard.worker("--slots", "1", "--heartbeat", "20s", "--lease", "60s")
    until(lambda: [one["parked"] for one in owner.workers()] == [True], "a parked worker")
    yard.ring.revoke("worker")
    owner.submit(["true"], name="a")
    assert owner.show("a")["state"] == "ready"
    yard.ring.create("worker", Role.WORKER, yard.directory / "new.key")
    words = ("worker", "--broker", yard.endpoint, "--key", "new.key", "--until-eof")
    with Running(yard.directory, *words):
        assert owner.wait_names(["a"], 30)


def test_worker_whose_key_is_revoked_exits_with_the_reason(yard: Yard) -> None:
    worker = yard.worker("--slots", "1", "--heartbeat", "50ms")
    assert " works for the broker at " in worker.error_line()
    yard.ring.revoke("worker")
    code, _, error = worker.end()
    assert (code, "key 'worker' was revoked" in error) == (2, True), error


def test_peer_refuses_a_broker_with_another_key(yard: Yard, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with yard_in(other) as another, pytest.raises(NoBroker, match=r"is admin a key of this broker"):
        InternalClient(another.endpoint, key=yard.file(Role.ADMIN), timeout=NOBODY_SECONDS)


def test_key_directory_open_to_others_disables_keys(yard: Yard) -> None:
    viewer, owner = yard.client(Role.VIEWER), yard.owner()
    yard.ring.directory.chmod(0o755)
    with pytest.raises(Refused, match=r"this key is no longer known to the broker"):
        viewer.status()
    with pytest.raises(NoBroker):
        yard.client(Role.ADMIN, timeout=NOBODY_SECONDS)
    assert tasks_of(owner) == 0
    yard.ring.directory.chmod(0o700)
    assert tasks_of(viewer) == 0


def test_keys_survive_a_restart(yard: Yard) -> None:
    yard.broker.kill()
    port = yard.endpoint.rpartition(":")[2]
    options = ("--secure", "--listen", f"dwork=tcp://127.0.0.1:{port}")
    with Broker(yard.directory, *options):
        assert tasks_of(yard.client(Role.VIEWER)) == 0


def test_client_whose_key_is_revoked_during_an_outage_fails(
    yard: Yard,
) -> None:
    viewer = yard.client(Role.VIEWER)
    viewer.status()
    yard.broker.kill()
    yard.ring.revoke("viewer")
    port = yard.endpoint.rpartition(":")[2]
    options = ("--secure", "--listen", f"dwork=tcp://127.0.0.1:{port}")
    with Broker(yard.directory, *options), pytest.raises(TaskyardError, match=r"key 'viewer'"):
        viewer.status()


def test_workers_of_other_dialects_exit_when_their_key_is_revoked(tmp_path: Path) -> None:
    ring, file = Keyring(tmp_path / ".taskyard"), tmp_path / "worker.key"
    ring.create("worker", Role.WORKER, file)
    loopback = "tcp://127.0.0.1:0"
    listen = ("--listen", f"wmp={loopback}", "--listen", f"ping-pong={loopback},{loopback}")
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path, "--secure", *listen))
        workers = {}
        for dialect, places in zip(("wmp", "ping-pong"), broker.endpoints[1:], strict=True):
            endpoint = places.split(",")[0]
            words = ("worker", "--dialect", dialect, "--broker", endpoint, "--key", str(file))
            workers[dialect] = stack.enter_context(
                Running(tmp_path, *words, "--slots", "1", "--until-eof")
            )
        owner = stack.enter_context(InternalClient(broker.endpoint))
        until(lambda: owner.status()["workers"] == len(workers))
        ring.revoke("worker")
        code, _, error = workers["wmp"].end()
        assert (code, "taskyard: key 'worker' was revoked" in error) == (2, True), error
        code, _, error = workers["ping-pong"].end()
        assert (code, "key 'worker' is unknown or revoked" in error) == (2, True), error


def test_peers_of_every_dialect_reach_a_remote_broker_with_an_invitation(tmp_path: Path) -> None:
    """Nothing listens to the world: without a network of its own the broker is on loopback, with
    --secure."""
    is_alone = not problem("own network")
    address = remote_broker.ADDRESS if is_alone else remote_broker.LOCAL
    program = (sys.executable, "-m", "tests.system.remote_broker", str(tmp_path), address)
    words = [*(("unshare", "--map-root-user", "--net") if is_alone else ()), *program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, cwd=ROOT)
    steps = ["refused", *["done"] * 4, "refused"]
    assert (done.returncode, done.stdout.split()) == (0, steps), done.stderr
