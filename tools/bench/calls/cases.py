"""The messages whose calls are counted, each sent alone to a broker that waits.

A peer sends a message, and the next one only after its reply. So a turn has one message, the turns
of a run have the same order each time, and their calls are the same on any machine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from bench.processes import Process
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, WorkerFacts
from taskyard.net import endpoints, sockets
from taskyard.net.host import Poller
from taskyard.net.zmq_socket import ZmqSocket
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply, ReportColumns

#: How often each message is sent. The first messages make caches and are not counted.
REPEATS: Final = 40

#: The label of a step of housekeeping.
HOUSEKEEPING: Final = "housekeeping"

#: How long an idle broker with one worker is watched.
IDLE_S: Final = 12

_PAYLOAD: Final = b"payload-of-000000000"  # 20 bytes
_WAIT_NS: Final = 60 * SECOND_NS
_REPLY_NS: Final = 20 * SECOND_NS
_LMQ: Final = b"LMQv100"
_WMP: Final = b"WMP01"
_Q: Final = pb.QueryMsg


class Link:
    """A peer's socket. Every wait for a message has an end."""

    def __init__(self, wire: ZmqSocket) -> None:
        self._wire = wire
        self._poller = Poller()
        self._poller.add(wire)

    def send(self, *frames: bytes) -> None:
        if not self._wire.send(frames):
            raise RuntimeError("the queue to the broker is full")

    def receive(self) -> list[bytes]:
        while True:
            if not self._poller.wait(_REPLY_NS):
                raise RuntimeError("the broker did not answer")
            if (frames := self._wire.receive()) is not None:
                return frames

    def ask(self, *frames: bytes) -> list[bytes]:
        self.send(*frames)
        return self.receive()

    def close(self) -> None:
        self._wire.close()


def connected(endpoint: str) -> "closing[Link]":
    return closing(Link(sockets.connect(endpoint)))


def plain(endpoint: str) -> None:
    """Create, steal and complete one task after the other, with dwork's own bytes."""
    steal = _Q(type=_Q.Steal, location=b"worker").SerializeToString()
    with connected(endpoint) as link:
        for number in range(REPEATS):
            one = pb.TaskMsg(name=b"task-%06d" % number, origin=b"peer").SerializeToString()
            link.ask(b"", _Q(type=_Q.Create, task=[one]).SerializeToString())
            link.ask(b"", steal)
            complete = _Q(type=_Q.Complete, location=b"worker", task=[one])
            link.ask(b"", complete.SerializeToString())


def native(endpoint: str) -> None:
    """Submit one task after the other to a worker that waits, and that waits again."""
    facts = peer.worker_message(WorkerFacts(slots_total=1, lease_timeout_ns=_WAIT_NS))
    with connected(endpoint) as client, connected(endpoint) as worker:
        worker.send(b"", peer.steal(1, b"worker", facts, 1, _WAIT_NS))
        for number in range(REPEATS):
            worker_number = 2 + number
            given = _created(client, worker, b"task-%06d" % number, number)
            reports = ReportColumns(given.names, given.attempts, texts=[b""])
            fixed = (worker_number, b"worker", reports, facts, 1)
            worker.ask(b"", peer.complete(*fixed, wait_ns=_WAIT_NS))
            client.receive()  # the notice
        beat = partial(peer.heartbeat, held=[], heartbeat_ns=SECOND_NS)
        seen = None
        for number in range(REPEATS):
            body = beat(1000 + number, b"worker", facts, seen=seen, waiting=1 + REPEATS)
            seen = Reply(worker.ask(b"", body)[-1]).seen


def _created(client: Link, worker: Link, name: bytes, number: int) -> peer.Assigned:
    """Submit a task as our clients do. Return what the worker gets."""
    submission = Submission([name], [_PAYLOAD])
    client.ask(b"", peer.create(1 + number, submission, stream=True))
    return Reply(worker.receive()[-1]).assigned()


def steal(endpoint: str) -> None:
    """Request tasks that wait, one after the other, and report each alone."""
    facts = peer.worker_message(WorkerFacts(slots_total=9, lease_timeout_ns=_WAIT_NS))
    with connected(endpoint) as client, connected(endpoint) as worker:
        for number in range(REPEATS):
            submission = Submission([b"task-%06d" % number], [_PAYLOAD])
            client.ask(b"", peer.create(1 + number, submission))
            asked = worker.ask(b"", peer.steal(1 + number, b"worker", facts, 1))
            given = Reply(asked[-1]).assigned()
            reports = ReportColumns(given.names, given.attempts, texts=[b""])
            worker.ask(b"", peer.complete(1000 + number, b"worker", reports))


def ping_pong(workers: str, clients: str) -> None:
    with connected(clients) as client, connected(workers) as worker:
        worker.ask(b"", b"READY")
        for _ in range(REPEATS):
            client.send(b"", _PAYLOAD)
            while (frames := worker.receive())[1] == b"PONG":
                pass
            worker.send(b"", frames[1])
            client.receive()


def round_robin(endpoint: str) -> None:
    server = endpoint.encode()
    named = (sockets.connect_by_name(endpoint, f"calls-{one}") for one in ("client", "worker"))
    with closing(Link(next(named))) as client, closing(Link(next(named))) as worker:
        worker.ask(server, b"", _LMQ, b"\x04", b"me", b"\x08", b"1", b"")
        for number in range(REPEATS):
            client.send(server, b"", _LMQ, b"\x04", b"%d" % number, b"do", _PAYLOAD, b"")
            while (frames := worker.receive())[3] == b"\x01":
                worker.send(server, b"", _LMQ, b"\x02", frames[4], b"")
            task, address = frames[4], [frames[-1]] if frames[-1] else []
            worker.send(server, *address, b"", _LMQ, b"\x06", task, _PAYLOAD, b"")
            client.receive()
            worker.send(server, b"", _LMQ, b"\x03", b"me", b"\x07", b"")


def wmp(endpoint: str, native_endpoint: str) -> None:
    ready = (b"", _WMP, b"\x01", b'{"worker":"w"}')
    with connected(native_endpoint) as client, connected(endpoint) as worker:
        worker.send(*ready)
        for number in range(REPEATS):
            submission = Submission([b"task-%06d" % number], [_PAYLOAD])
            client.ask(b"", peer.create(1 + number, submission, stream=True))
            taken = _taken(worker)
            report = {"worker": "w", "status": "ok", "manager": taken["manager"]}
            report |= {"task": taken["task"], "attempt": taken["attempt"]}
            worker.send(b"", _WMP, b"\x06", msgspec.json.encode(report), b"")
            worker.send(*ready)
            client.receive()


def _taken(worker: Link) -> dict[str, str]:
    """Answer the broker until it gives a task."""
    while True:
        frames = worker.receive()
        if frames[2] == b"\x02":
            worker.send(b"", _WMP, b"\x03", b'{"worker":"w","request":1}')
        elif frames[2] == b"\x04":
            found: dict[str, str] = msgspec.json.decode(frames[3])
            return found
        elif frames[2] == b"\x09":
            worker.send(b"", _WMP, b"\x0a", b'{"worker":"w"}')


def idle(endpoint: str) -> None:
    """Let a worker wait that sends its heartbeats as ours do."""
    facts = WorkerFacts(slots_total=1, lease_timeout_ns=15 * SECOND_NS, heartbeat_ns=5 * SECOND_NS)
    message = peer.worker_message(facts)
    with connected(endpoint) as worker:
        worker.send(b"", peer.steal(1, b"worker", message, 1, _WAIT_NS))
        beat = partial(peer.heartbeat, held=[], heartbeat_ns=5 * SECOND_NS, waiting=1)
        worker.ask(b"", beat(2, b"worker", message))
        for number in range(3, 6):
            time.sleep(IDLE_S / 3)
            worker.ask(b"", beat(number, b"worker", message))


#: The runs: what is sent to a broker with these listeners. The native endpoint is always there.
RUNS: Final[dict[str, tuple[Callable[..., None], tuple[str, ...]]]] = {
    "plain": (plain, ()),
    "native": (native, ()),
    "steal": (steal, ()),
    "ping-pong": (ping_pong, ("ping-pong=tcp://127.0.0.1:0,tcp://127.0.0.1:0",)),
    "round-robin": (round_robin, ("round-robin=tcp://127.0.0.1:0",)),
    "wmp": (wmp, ("wmp=tcp://127.0.0.1:0",)),
    "idle": (idle, ()),
}


def places_of(run: str, broker: Process, state: Path) -> Iterator[str]:
    """Yield the endpoints for a run: the listener's, or the native endpoint."""
    native_endpoint, listen = endpoints.native_endpoint(state), RUNS[run][1]
    for _ in listen:
        yield from broker.line().decode().split()[2].split(",")
    if run == "wmp" or not listen:
        yield native_endpoint
