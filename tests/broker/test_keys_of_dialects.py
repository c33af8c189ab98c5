"""Keys, roles and revocation in every dialect, over CURVE sockets and the broker's own parts."""

from __future__ import annotations

import queue
import threading
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec
import pytest
import zmq

from taskyard.broker.auth import Authenticator
from taskyard.broker.listeners import Listeners
from taskyard.broker.transport import SocketTransport
from taskyard.broker.turn import Broker
from taskyard.core.events import ReplyDue, RequestRejected
from taskyard.core.scheduler import Scheduler
from taskyard.journal.store import MemoryStore
from taskyard.net.host import Poller, Waker
from taskyard.net.keyring import Keyring
from taskyard.net.keys import read_peer_key
from taskyard.net.protocols import SystemClock
from taskyard.settings.keys import ListenSection
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire import roles
from taskyard.wire.roles import PERMISSIONS, Role
from tests.kit.processes import until
from tests.net.kit import PATIENCE_MS, PATIENCE_S, raw_connection, read_to_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from taskyard.core.events import Event
    from taskyard.core.ledger import Ledger

Q = pb.QueryMsg
LMQ: Final = b"LMQv100"

#: The keys: name and roles. The letter stands for the key in the table below.
KEYS: Final = {
    "v": (Role.VIEWER,),
    "p": (Role.PRODUCER,),
    "w": (Role.WORKER,),
    "r": (Role.WORKER, Role.RELAY),
    "b": (Role.PRODUCER, Role.WORKER),
    "a": (Role.ADMIN,),
}

#: Listeners in the order of their sockets. Ping-pong has two.
BACKEND, FRONTEND = "backend", "frontend"
SOCKETS: Final = ("dwork", "round-robin", BACKEND, FRONTEND, "wmp")


def lmq(command: int, number: bytes, *arguments: bytes, top: Sequence[bytes] = ()) -> list[bytes]:
    return [*top, b"", LMQ, bytes([command]), number, *arguments, b""]


def wmp(command: int, worker: str, payload: bytes | None = None, **more: Any) -> list[bytes]:
    headers = msgspec.json.encode({"worker": worker, **more})
    body = [b"", b"WMP01", bytes([command]), headers]
    return body if payload is None else [*body, payload]


def dwork(kind: str, **fields: Any) -> list[bytes]:
    return [b"", Q(type=kind, request=7, **fields).SerializeToString()]


class Case(NamedTuple):
    """A request, and the keys that may send it. `{}` in a worker's name is the key's name."""

    socket: str
    dialect: str
    request: roles.Request
    keys: str
    frames: Sequence[bytes]


def cases(name: str = "KEY/1") -> list[Case]:
    """Return the table: a request of each kind, from a worker of this name."""
    rr, worker = "round-robin", name.encode()
    return [
        Case("dwork", "dwork", Q.OK, "vpwrba", dwork("OK")),
        Case("dwork", "dwork", Q.List, "vp-ba", dwork("List")),
        Case("dwork", "dwork", Q.Create, "pba", dwork("Create", batch=pb.Batch(name=[b"t"]))),
        Case("dwork", "dwork", Q.Heartbeat, "wrba", dwork("Heartbeat", location=worker)),
        Case("dwork", "dwork", Q.Pause, "a", dwork("Pause")),
        Case(rr, rr, "PING", "vpwrba", lmq(1, b"i")),
        Case(rr, rr, "PONG", "vpwrba", lmq(2, b"i")),
        Case(rr, rr, "REGISTER", "wrba", lmq(4, b"i", b"\x08", b"1")),
        Case(rr, rr, "INCREMENT", "wrba", lmq(4, b"i", b"\x07")),
        Case(rr, rr, "ONGOING", "wrba", lmq(4, b"i", b"ongoing")),
        Case(rr, rr, "DEREGISTER", "wrba", lmq(4, b"i", b"\x09")),
        Case(rr, rr, "RESPONSE", "wrba", lmq(6, b"i", b"r")),
        Case(rr, rr, roles.SUBMIT, "pba", lmq(4, b"i", b"echo", b"x")),
        Case(rr, rr, roles.SUBMIT, "pba", lmq(3, b"i", b"echo", b"x")),
        Case(rr, rr, roles.FORWARD, "pba", lmq(3, b"i", b"echo", top=[b"other"])),
        Case(rr, rr, roles.FORWARD, "pba", lmq(1, b"i", top=[b"other"])),
        Case(rr, rr, roles.FORWARD_REPLY, "pwrba", lmq(6, b"i", b"r", top=[b"other"])),
        Case(rr, rr, roles.FORWARD_REPLY, "pwrba", lmq(5, b"i", b"a", top=[b"other"])),
        Case(BACKEND, "ping-pong", "PING", "wrba", [b"", b"PING"]),
        Case(BACKEND, "ping-pong", "READY", "wrba", [b"", b"READY"]),
        Case(BACKEND, "ping-pong", roles.RESULT, "wrba", [b"", b"a result"]),
        Case(BACKEND, "ping-pong", roles.RESULT, "wrba", [b"", b"ERROR", b"why"]),
        Case(BACKEND, "ping-pong", "DISCONNECT", "wrba", [b"", b"DISCONNECT"]),
        Case(FRONTEND, "ping-pong", roles.JOB, "pba", [b"", b"a job"]),
        Case("wmp", "wmp", "READY", "wrba", wmp(1, name)),
        Case("wmp", "wmp", "GIVE", "wrba", wmp(3, name, request="1")),
        Case("wmp", "wmp", "DONE", "wrba", wmp(6, name, b"", task="t", attempt=1, status="ok")),
        Case("wmp", "wmp", "STATUS", "wrba", wmp(7, name, task="t", attempt=1)),
        Case("wmp", "wmp", "PING", "wrba", wmp(9, name)),
        Case("wmp", "wmp", "PONG", "wrba", wmp(10, name)),
        Case("wmp", "wmp", "BYE", "wrba", wmp(11, name)),
    ]


class Checked(NamedTuple):
    """The outcome of a message at a dialect."""

    is_forbidden: bool
    is_malformed: bool
    events: Sequence[Event]


class RecordingAuthenticator(Authenticator):
    """The real one, which records each message of a peer."""

    def __init__(self, keyring: Keyring, listeners: Listeners) -> None:
        super().__init__(keyring, listeners.dialect())
        self._listeners = listeners
        self.checked: queue.SimpleQueue[Checked] = queue.SimpleQueue()

    def receive(self, *message: Any) -> Sequence[Event]:
        counts = self._listeners.forbidden(), self._listeners.malformed()
        events = super().receive(*message)
        found = self._listeners.forbidden(), self._listeners.malformed()
        self.checked.put(Checked(found[0] > counts[0], found[1] > counts[1], events))
        return events


class Yard:
    """A broker in a thread, with every dialect on a TCP socket, and a key of each kind.

    If `named`, the listeners have tables in the settings, with names and a service of their own.
    """

    def __init__(self, directory: Path, *, secure: bool = True, named: bool = False) -> None:
        self.ring = Keyring(directory / "state")
        self._files = {name: directory / f"{name}.key" for name in KEYS}
        for name, allowed in KEYS.items():
            self.ring.create(name, allowed, self._files[name])
        self._listeners = Listeners(b"identity")
        keyring = Keyring(self.ring.state)
        for name, count in (("dwork", 1), ("round-robin", 1), ("ping-pong", 2), ("wmp", 1)):
            places = ["tcp://127.0.0.1:0"] * count
            section = ListenSection(dialect=name, service="lab") if named else None
            self._listeners.open(
                f"lab-{name}" if named else name, places, keyring, secure=secure, section=section
            )
        # A second one of round-robin, without keys.
        self._listeners.open("round-robin", ["tcp://127.0.0.1:0"])
        wires = self._listeners.sockets
        self.endpoints = dict(
            zip((*SOCKETS, "plain"), (one.endpoint for one in wires), strict=True)
        )
        self.auth = RecordingAuthenticator(keyring, self._listeners)
        self._waker, poller, clock = Waker(), Poller(), SystemClock()
        poller.add(self._waker.fileno())
        transport = SocketTransport(self._listeners.dialect(), wires, poller, clock, self.auth)
        self._broker = Broker(Scheduler(), transport, MemoryStore(), clock)
        self._context = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []
        self._is_stopping = False
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._waker.wake()
        self._thread.join()
        for peer in self._peers:
            peer.close()
        self._context.term()
        self._waker.close()
        self._listeners.close()
        assert self._errors == []

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._broker.turn()
        except BaseException as error:  # noqa: BLE001  # raised at the end of the test
            self._errors.append(error)

    @property
    def ledger(self) -> Ledger:
        return self._broker.scheduler.ledger

    def workers(self) -> list[bytes]:
        return [*self.ledger.workers]

    def peer(self, socket: str, key: str = "", identity: bytes = b"") -> zmq.Socket[bytes]:
        """Return a plain pyzmq socket, with a key and a routing id if given."""
        peer = self._context.socket(zmq.DEALER)
        self._peers.append(peer)
        peer.linger, peer.rcvtimeo = 0, PATIENCE_MS
        if identity:
            peer.identity = identity
        if key:
            found = read_peer_key(self._files[key])
            peer.curve_secretkey = found.secret.reveal()
            peer.curve_publickey = found.secret.public().encode()
            peer.curve_serverkey = found.broker.encode()
        peer.connect(self.endpoints[socket])
        return peer

    def wake(self) -> bool:
        """Make the broker take a turn."""
        self._waker.wake()
        return True

    def checked(self) -> Checked:
        """Return the outcome of the next message of a peer with a key."""
        return self.auth.checked.get(timeout=PATIENCE_S)

    def is_silent(self) -> bool:
        """Return whether no message of a peer with a key arrives for a while."""
        with suppress(queue.Empty):
            self.auth.checked.get(timeout=0.3)
            return False
        return True


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with Yard(tmp_path) as yard:
        yield yard


def test_each_key_may_send_the_requests_of_its_roles_in_every_dialect(yard: Yard) -> None:
    """One test for the whole table, because each needs a broker with six keys."""
    check_roles(yard, KEYS)


def test_roles_hold_on_listeners_with_tables_of_their_own(tmp_path: Path) -> None:
    with Yard(tmp_path, named=True) as yard:
        check_roles(yard, "vw")
        worker = yard.peer("wmp", "w")
        worker.send_multipart(wmp(1, "w/2"))
        yard.checked()
        until(lambda: b"wmp@lab-wmp:w/2" in yard.workers())
        facts = yard.ledger.workers[b"wmp@lab-wmp:w/2"].facts
        assert facts is not None
        assert facts.services == (b"lab",)
        yard.ring.revoke("w")
        worker.send_multipart(wmp(9, "w/2"))
        assert yard.checked().is_forbidden


def check_roles(yard: Yard, names: Iterable[str]) -> None:
    """Send every request of the table with each key."""
    wrong = []
    for name in names:
        sockets = {one: yard.peer(one, name) for one in SOCKETS}
        for case in cases(f"{name}/1"):
            sockets[case.socket].send_multipart(case.frames)
            found = yard.checked()
            assert not found.is_malformed, case
            if found.is_forbidden is (name in case.keys):
                wrong.append((name, case, found))
            if found.is_forbidden:  # nothing but a reply
                kinds = {type(event) for event in found.events}
                assert kinds <= {RequestRejected, ReplyDue}, case
    assert wrong == []


def test_table_has_every_request_of_every_dialect() -> None:
    listed = {(case.dialect, case.request) for case in cases()}
    for dialect in ("round-robin", "ping-pong", "wmp"):
        expected = {(dialect, request) for request in PERMISSIONS[dialect]}
        assert {one for one in listed if one[0] == dialect} == expected


def test_worker_s_key_is_bound_to_its_name_unless_it_is_a_relay_s(yard: Yard) -> None:
    named = [
        case
        for case in cases("somewhere/1")
        if PERMISSIONS[case.dialect][case.request].is_by_worker
    ]
    assert {case.dialect for case in named} == {"dwork", "wmp"}
    for name, is_bound in (("w", True), ("b", True), ("r", False), ("a", False)):
        sockets = {one: yard.peer(one, name) for one in ("dwork", "wmp")}
        for case in named:
            sockets[case.socket].send_multipart(case.frames)
            assert yard.checked().is_forbidden is is_bound, (name, case)


def test_refusal_is_sent_in_the_dialect_s_own_error(yard: Yard) -> None:
    router = yard.peer("round-robin", "v")
    router.send_multipart(lmq(4, b"i", b"echo", b"x"))
    text = b"ERROR key 'v': a viewer may not submit tasks (this needs a producer's key)"
    assert router.recv_multipart() == lmq(6, b"i", text)
    client = yard.peer(FRONTEND, "v")
    client.send_multipart([b"", b"job"])
    assert client.recv_multipart() == [b"", b"ERROR", text.removeprefix(b"ERROR ")]
    worker = yard.peer("wmp", "v")
    worker.send_multipart(wmp(1, "v"))
    delimiter, version, command, headers = worker.recv_multipart()
    bye = msgspec.json.decode(headers)
    assert (delimiter, version, command, bye["code"]) == (b"", b"WMP01", b"\x0b", "forbidden")
    assert bye["reason"].startswith("key 'v': a viewer may not take tasks")
    assert yard.workers() == []


def test_revoked_key_is_cut_off_in_every_dialect(yard: Yard) -> None:
    """Its requests are refused, its waiting clients get nothing, and others are served."""
    rr, backend = yard.peer("round-robin", "b", b"peer"), yard.peer(BACKEND, "b")
    client, manager = yard.peer(FRONTEND, "b"), yard.peer("wmp", "b")
    rr.send_multipart(lmq(4, b"i", b"\x08", b"1"))
    assert rr.recv_multipart() == lmq(6, b"i")
    backend.send_multipart([b"", b"READY"])
    assert backend.recv_multipart() == [b"", b"PONG"]
    manager.send_multipart(wmp(1, "b/1"))
    manager.send_multipart(wmp(9, "b/1"))
    assert manager.recv_multipart()[2] == b"\x0a"
    assert len(yard.workers()) == 3
    for _ in range(4):
        assert not yard.checked().is_forbidden
    yard.ring.revoke("b")
    until(lambda: yard.wake() and not yard.auth.may_send(b"\x01peer"))
    until(lambda: [one.split(b":")[0] for one in yard.workers()] == [b"round-robin", b"wmp"])
    for peer, frames in (
        *((rr, lmq(4, b"i", b"\x07")), (backend, [b"", b"PING"])),
        *((client, [b"", b"job"]), (manager, wmp(1, "b/1"))),
    ):
        peer.send_multipart(frames)
        assert yard.checked().is_forbidden, frames
    assert rr.recv_multipart() == lmq(6, b"i", b"ERROR key 'b' was revoked")
    assert client.recv_multipart() == [b"", b"ERROR", b"key 'b' was revoked"]
    assert msgspec.json.decode(manager.recv_multipart()[3])["reason"] == "key 'b' was revoked"
    submitter = yard.peer(FRONTEND, "p")
    submitter.send_multipart([b"", b"job"])
    yard.checked()
    assert not backend.poll(200)  # no job for the revoked worker
    assert not rr.poll(0)


#: A request that gets a reply, by socket.
ANSWERED: Final = {
    "dwork": dwork("OK"),
    "round-robin": lmq(1, b"i"),
    BACKEND: [b"", b"PING"],
    FRONTEND: [b"", b"PONG"],  # refused with a reason
    "wmp": wmp(9, "b/1"),
}


def test_peer_keeps_its_own_routing_id_against_others_in_every_dialect(yard: Yard) -> None:
    """Peers with an id of their own are served over CURVE, and only the first one of each id."""
    first = {name: yard.peer(name, "b", b"mine") for name in SOCKETS}
    for name, peer in first.items():
        peer.send_multipart(ANSWERED[name])
        assert peer.recv_multipart(), name
        yard.checked()
    # Only now: of two that connect together, either may be the first.
    second = {name: yard.peer(name, "a", b"mine") for name in SOCKETS}
    for name, peer in second.items():
        peer.send_multipart(ANSWERED[name])
    assert yard.is_silent()
    for name, peer in first.items():
        peer.send_multipart(ANSWERED[name])
        assert peer.recv_multipart(), name
        yard.checked()
    assert [name for name, peer in second.items() if peer.poll(0)] == []


def test_second_peer_under_a_routing_id_in_use_is_not_served(yard: Yard) -> None:
    register, pinged = lmq(4, b"i", b"\x08", b"1"), lmq(1, b"i")
    first, second = yard.peer("round-robin", "w", b"same"), None
    first.send_multipart(register)
    assert first.recv_multipart() == lmq(6, b"i")
    yard.checked()
    second = yard.peer("round-robin", "b", b"same")
    second.send_multipart(register)
    assert yard.is_silent()
    first.send_multipart(pinged)
    assert first.recv_multipart() == lmq(2, b"i")
    yard.checked()
    assert not second.poll(0)
    # The address stays the first key's until its worker times out.
    first.close()
    third = None
    while third is None or yard.is_silent():  # until ZeroMQ has noticed that the first has left
        third = yard.peer("round-robin", "b", b"same")
        third.send_multipart(register)
    refused = b"ERROR this address is used by a worker with another key"
    assert third.recv_multipart() == lmq(6, b"i", refused)
    assert len(yard.workers()) == 1


def test_address_of_a_worker_belongs_to_its_key_on_all_listeners(yard: Yard) -> None:
    register = lmq(4, b"i", b"\x08", b"1")
    refused = lmq(6, b"i", b"ERROR this address is used by a worker with another key")
    local = yard.peer("plain", identity=b"local")
    local.send_multipart(register)
    assert local.recv_multipart() == lmq(6, b"i")
    thief = yard.peer("round-robin", "w", b"local")
    for frames in (register, lmq(4, b"i", b"\x07")):
        thief.send_multipart(frames)
        assert yard.checked().is_forbidden
        assert thief.recv_multipart() == refused
    thief.send_multipart([b"not", b"lmq"])  # nor do malformed messages take its route
    assert yard.checked().is_forbidden
    client = yard.peer("round-robin", "p")
    client.send_multipart(lmq(4, b"t", b"echo", b"x"))
    assert local.recv_multipart()[3:5] == [b"t", b"echo"]


#: A page of a browser can send this. After a padded header it is a frame of its choice.
POST: Final = (
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Pad: ".ljust(79, b"x") + b"\r\n\r\n\x00\x00\x08\x06"
)


@pytest.mark.parametrize("secure", [True, False])
def test_post_of_a_browser_changes_nothing_at_any_listener(tmp_path: Path, *, secure: bool) -> None:
    with Yard(tmp_path, secure=secure) as yard, ExitStack() as stack:
        before = yard.ledger.record
        for endpoint in yard.endpoints.values():
            raw = stack.enter_context(closing(raw_connection(endpoint)))
            raw.sendall(POST)
            read_to_end(raw)
        peer = yard.peer("round-robin", "v" if secure else "")
        peer.send_multipart(lmq(1, b"i"))
        assert peer.recv_multipart() == lmq(2, b"i")
        assert (yard.ledger.record, yard.workers()) == (before, [])


def test_result_for_one_key_does_not_reach_another_under_its_address(yard: Yard) -> None:
    """A waiting client leaves, and a peer with another key gets its routing id."""
    client = yard.peer("round-robin", "p", b"client")
    client.send_multipart(lmq(4, b"t", b"echo", b"x"))
    yard.checked()
    client.close()
    other = None
    while other is None or yard.is_silent():  # until ZeroMQ has noticed that the client has left
        other = yard.peer("round-robin", "b", b"client")
        other.send_multipart(lmq(1, b"i"))
    assert other.recv_multipart() == lmq(2, b"i")
    worker = yard.peer("round-robin", "w", b"worker")
    worker.send_multipart(lmq(4, b"r", b"\x08", b"1"))
    assert worker.recv_multipart() == lmq(6, b"r")
    yard.checked()
    task = worker.recv_multipart()
    assert task[task.index(LMQ) + 1 :][:2] == [b"\x04", b"t"]
    worker.send_multipart(lmq(6, b"t", b"secret", top=[b"client"]))
    assert not yard.checked().is_forbidden
    other.send_multipart(lmq(1, b"j"))
    assert other.recv_multipart() == lmq(2, b"j")  # and no RESPONSE before it
