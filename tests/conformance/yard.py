"""A broker that listens in every dialect, a control client, and the peers of a scenario.

Owns the processes and closes the peers. `DRIVERS` is the table of dialects: each of them is in
every scenario.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from taskyard.net.keyring import Keyring
from taskyard.net.keys import read_peer_key
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.roles import Role
from tests.conformance import dwork_plain, hungry, native_extended, ping_pong, round_robin, wmp
from tests.conformance.raw_sockets import KEYS, CurveKey
from tests.kit import processes

if TYPE_CHECKING:
    from tests.conformance.skills import Client, Peer, Worker

Q = pb.QueryMsg

CLIENTS: Final[dict[str, type[Client]]] = {
    one.kind: one
    for one in (
        dwork_plain.PlainClient,
        native_extended.ExtendedClient,
        round_robin.TrackingClient,
        ping_pong.FrontendClient,
    )
}
WORKERS: Final[dict[str, type[Worker]]] = {
    one.kind: one
    for one in (
        dwork_plain.PlainWorker,
        native_extended.ExtendedWorker,
        round_robin.RegisteredWorker,
        ping_pong.BackendWorker,
        wmp.WmpWorker,
        hungry.HungryWorker,
    )
}

#: The broker's dialects, each with its number of endpoints.
DOORS: Final = {"dwork": 1, "round-robin": 1, "ping-pong": 2, "wmp": 1}

#: Settings with short leases of workers without a lease of their own, so that tests are quick.
SHORT_LEASES: Final = """
[listen.ping-pong]
expire = "1.5s"
timeout = "3s"

[listen.round-robin]
expire = "1.5s"

[listen.wmp]
expire = "1.5s"
"""

#: Nothing takes longer, but the machine may be busy.
PATIENCE_SECONDS: Final = 60.0


class BrokerControl:
    """Queries and commands the broker through its native socket."""

    def __init__(self, endpoint: str) -> None:
        self.requests = native_extended.RequestSocket(endpoint)

    def document(self, kind: int, **fields: Any) -> Any:
        return json.loads(self.requests.must(kind, type=kind, **fields).document)

    def counts(self) -> dict[str, int]:
        """Return the number of tasks in each state."""
        counts: dict[str, int] = self.document(Q.Stats)["counts"]
        return counts

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.document(Q.Workers)
        return workers

    def tasks(self, *standing: pb.Standing) -> list[dict[str, Any]]:
        """Return the tasks in these states, as documents."""
        scope = pb.ScopeMsg(standing=standing)
        tasks: list[dict[str, Any]] = self.document(Q.List, scope=scope, n=1000)
        return tasks

    def unsettled(self) -> list[dict[str, Any]]:
        return self.tasks(pb.Blocked, pb.Delayed, pb.ReadyToGo, pb.Leased)

    def show(self, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.document(Q.Show, name=name.encode())
        return shown

    def output(self, name: str) -> bytes:
        """Return the output or progress of a task."""
        answer = self.requests.must(
            Q.Read, Q.NotFound, type=Q.Read, name=name.encode(), stream_number=1
        )
        return bytes(answer.data)

    def cancel_all(self) -> None:
        scope = pb.ScopeMsg(standing=[pb.Blocked, pb.Delayed, pb.ReadyToGo, pb.Leased])
        self.requests.must(Q.OK, type=Q.Cancel, scope=scope)

    def cancel(self, name: str) -> None:
        batch = pb.Batch(name=[name.encode()])
        self.requests.must(Q.OK, type=Q.Cancel, batch=batch)

    def drain(self, worker: str | None = None) -> None:
        """Drain a worker, or all workers and the broker."""
        fields = {"everything": True} if worker is None else {"location": worker.encode()}
        self.requests.must(Q.OK, type=Q.Drain, **fields)


def make_key(directory: Path) -> CurveKey:
    """Create a key for peers of all kinds and names."""
    file = directory / "peers.key"
    roles = (Role.PRODUCER, Role.WORKER, Role.RELAY)
    Keyring(directory / ".taskyard").create("peers", roles, file)
    key = read_peer_key(file)
    public = key.secret.public().encode()
    return CurveKey(str(file), key.secret.reveal(), public, key.broker.encode())


class Yard:
    """A broker and its peers. Close it, or use it in a `with`."""

    def __init__(self, directory: Path, *, secure: bool = False) -> None:
        """Start a broker. If it is `secure`, its peers use a key."""
        self._directory = directory
        self._key = make_key(directory) if secure else None
        (directory / "taskyard.toml").write_text(SHORT_LEASES)
        self._places = {
            name: ",".join(["tcp://127.0.0.1:0"] * sides) for name, sides in DOORS.items()
        }
        self._peers: list[Peer] = []
        self._start()

    def _start(self) -> None:
        options = [f"{name}={places}" for name, places in self._places.items()]
        words = [word for option in options for word in ("--listen", option)]
        words += [] if self._key is None else ["--secure"]
        self.broker = processes.Broker(self._directory, *words, stderr=None)
        # The same endpoints after a restart.
        self._places = dict(zip(self._places, self.broker.endpoints[1:], strict=True))
        self.control = BrokerControl(self.broker.endpoint)
        for place in self._all_places():
            if self._key is not None:
                KEYS[place] = self._key

    def _all_places(self) -> list[str]:
        return [one for places in self._places.values() for one in places.split(",")]

    def restart(self) -> None:
        """Kill the broker, and restart it at the same endpoints."""
        self.broker.kill()
        self.control.requests.bare.close()
        with self.broker:
            self._start()

    def client(self, kind: str) -> Client:
        place = {"ping-pong": self._places["ping-pong"].split(",")[-1]}.get(kind)
        client = CLIENTS[kind](place or self._place(kind))  # type: ignore[call-arg]
        self._peers.append(client)
        return client

    def worker(self, kind: str, slots: int = 1) -> Worker:
        worker = WORKERS[kind](self._place(kind), slots)  # type: ignore[call-arg]
        self._peers.append(worker)
        return worker

    def _place(self, kind: str) -> str:
        if kind == "hungry" or kind.startswith("dwork"):
            return self._places["dwork"]
        return self._places[kind].split(",")[0]

    def sweep(self) -> None:
        """Dismiss all workers, and check that nothing is left for the next scenario."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self.control.cancel_all()
        processes.until(lambda: not self.control.workers(), "all workers have left")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self.control.requests.bare.close()
        for place in self._all_places():
            KEYS.pop(place, None)
        with self.broker:
            pass
