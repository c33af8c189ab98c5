"""Peers of every dialect, each a process: `python -m … PART`.

Minimal loops written from the dialects' pages, so that only the dialect's cost is measured. A part
is a generator, as in `peers`: it yields when it is ready and when it is done, and continues at a
line on standard input. A client is ready when a first task has completed, so that startup is not
measured. A worker works until standard input ends.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from bench.peers import PeerProgress, print_progress
from taskyard.net import sockets
from taskyard.net.host import Poller
from taskyard.net.zmq_socket import ZmqSocket
from taskyard.wire import dwork_pb2 as pb

#: Open tasks of a client, so that the worker never waits for the next task.
WINDOW: Final = 10

_PAYLOAD: Final = b"payload-of-000000000"  # 20 bytes
_STDIN: Final = 0
_Q: Final = pb.QueryMsg

#: A plain peer polls again after this.
_PAUSE_S: Final = 0.0005

_LMQ: Final = b"LMQv100"
_WMP: Final = b"WMP01"


class PeerTask(msgspec.Struct):
    """The part of a peer: worker or client of a dialect."""

    what: str
    endpoint: str
    count: int = 0


class PeerSocket:
    """A socket, with standard input to wait for."""

    def __init__(self, wire: ZmqSocket) -> None:
        self._wire = wire
        self._poller = Poller()
        self._poller.add(wire)
        self._idle_poller = Poller()
        self._idle_poller.add(wire)
        self._idle_poller.add(_STDIN)

    def send(self, *frames: bytes) -> None:
        if not self._wire.send(frames):
            raise RuntimeError("the queue to the broker is full")

    def receive(self) -> list[bytes]:
        while True:
            self._poller.wait(None)
            if (frames := self._wire.receive()) is not None:
                return frames

    def receive_or_end(self) -> list[bytes] | None:
        """Return the next message, or None if standard input has ended."""
        while (frames := self._wire.receive()) is None:
            if _STDIN in self._idle_poller.wait(None):
                return None
        return frames


def _open_socket(peer_task: PeerTask) -> PeerSocket:
    return PeerSocket(sockets.connect(peer_task.endpoint))


def _named(peer_task: PeerTask) -> PeerSocket:
    return PeerSocket(sockets.connect_by_name(peer_task.endpoint, f"{os.getpid()}"))


# Clients.


def _in_flight(
    peer_task: PeerTask, ask: Callable[[int], None], receive: Callable[[], None]
) -> Iterator[PeerProgress]:
    """Submit tasks, several at once, and receive each result. The first goes alone."""
    ask(0)
    receive()
    yield PeerProgress()
    start_ns = time.monotonic_ns()
    for number in range(peer_task.count):
        if number >= WINDOW:
            receive()
        ask(1 + number)
    for _ in range(min(peer_task.count, WINDOW)):
        receive()
    yield PeerProgress(peer_task.count, start_ns, time.monotonic_ns())


def submit_plain(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Submit by plain dwork, which sends no results: look the last task up until it is done."""
    peer_socket = _open_socket(peer_task)

    def create(number: int) -> None:
        task = pb.TaskMsg(name=b"task-%09d" % number, origin=b"client").SerializeToString()
        peer_socket.send(b"", _Q(type=_Q.Create, task=[task]).SerializeToString())

    def await_last(number: int) -> None:
        look = _Q(type=_Q.Lookup, name=b"task-%09d" % number).SerializeToString()
        while True:
            peer_socket.send(b"", look)
            task = pb.TaskMsg.FromString(_Q.FromString(peer_socket.receive()[1]).task[0])
            if pb.TaskMsg.LogMsg.FromString(task.log[-1]).state == pb.TaskMsg.Done:
                return
            time.sleep(_PAUSE_S)

    create(0)
    peer_socket.receive()
    await_last(0)
    yield PeerProgress()
    start_ns = time.monotonic_ns()
    for number in range(peer_task.count):
        create(1 + number)
        peer_socket.receive()
    await_last(peer_task.count)
    yield PeerProgress(peer_task.count, start_ns, time.monotonic_ns())


def submit_native(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Submit one task per message, and receive the broker's notification."""
    peer_socket = _open_socket(peer_task)

    def create(number: int) -> None:
        name = b"task-%09d" % number
        task = pb.TaskMsg(name=name, origin=b"client", payload=_PAYLOAD).SerializeToString()
        query = _Q(type=_Q.Create, task=[task], request=1 + number, stream=True)
        peer_socket.send(b"", query.SerializeToString())

    def receive() -> None:
        while True:
            answer = _Q.FromString(peer_socket.receive()[1])
            if answer.type == _Q.Watch and answer.n == 0:
                return

    return _in_flight(peer_task, create, receive)


def submit_round_robin(peer_task: PeerTask) -> Iterator[PeerProgress]:
    peer_socket, server = _named(peer_task), peer_task.endpoint.encode()

    def execute(number: int) -> None:
        peer_socket.send(server, b"", _LMQ, b"\x04", b"%d" % number, b"do", _PAYLOAD, b"")

    def receive() -> None:
        peer_socket.receive()

    return _in_flight(peer_task, execute, receive)


def submit_ping_pong(peer_task: PeerTask) -> Iterator[PeerProgress]:
    peer_socket = _open_socket(peer_task)

    def ask(_number: int) -> None:
        peer_socket.send(b"", _PAYLOAD)

    def receive() -> None:
        peer_socket.receive()

    return _in_flight(peer_task, ask, receive)


# Workers.


def work_plain(peer_task: PeerTask) -> Iterator[PeerProgress]:
    peer_socket, location = _open_socket(peer_task), b"worker"
    steal = _Q(type=_Q.Steal, location=location).SerializeToString()
    yield PeerProgress()
    peer_socket.send(b"", steal)
    while (frames := peer_socket.receive_or_end()) is not None:
        answer = _Q.FromString(frames[1])
        if answer.type == _Q.Transfer:
            name = pb.TaskMsg.FromString(answer.task[0]).name
            task = pb.TaskMsg(name=name, origin=location).SerializeToString()
            complete = _Q(type=_Q.Complete, location=location, task=[task])
            peer_socket.send(b"", complete.SerializeToString())
            peer_socket.receive()
        else:
            time.sleep(_PAUSE_S)
        peer_socket.send(b"", steal)
    yield PeerProgress()


def work_native(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Run one task at a time. Report and request in one message, and park without tasks."""
    peer_socket, location = _open_socket(peer_task), b"worker"
    who = pb.WorkerMsg(slots=1)
    fields = {"location": location, "worker": who, "n": 1, "request": 1}
    steal = _Q(type=_Q.Steal, wait_ms=60_000, **fields).SerializeToString()  # type: ignore[arg-type]
    yield PeerProgress()
    peer_socket.send(b"", steal)
    while (frames := peer_socket.receive_or_end()) is not None:
        answer = _Q.FromString(frames[1])
        if answer.type != _Q.Transfer:
            peer_socket.send(b"", steal)
            continue
        given = answer.batch
        batch = pb.Batch(name=given.name, attempt=given.attempt, text=given.payload)
        complete = _Q(type=_Q.Complete, batch=batch, **fields)  # type: ignore[arg-type]
        peer_socket.send(b"", complete.SerializeToString())
    yield PeerProgress()


def work_round_robin(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Run one slot. Print the times from each INCREMENT to the next message."""
    peer_socket, server = _named(peer_task), peer_task.endpoint.encode()
    peer_socket.send(server, b"", _LMQ, b"\x04", b"me", b"\x08", b"1", b"")
    peer_socket.receive()
    yield PeerProgress()
    done = PeerProgress()
    freed_ns = 0
    while (frames := peer_socket.receive_or_end()) is not None:
        _, _, _, command, number, *rest = frames
        if command == b"\x01":
            peer_socket.send(server, b"", _LMQ, b"\x02", number, b"")
            continue
        if freed_ns:
            done.waits_ns.append(time.monotonic_ns() - freed_ns)
        address = [rest[-1]] if rest[-1] else []
        peer_socket.send(server, *address, b"", _LMQ, b"\x06", number, _PAYLOAD, b"")
        freed_ns = time.monotonic_ns()
        peer_socket.send(server, b"", _LMQ, b"\x03", b"me", b"\x07", b"")
    yield done


def work_ping_pong(peer_task: PeerTask) -> Iterator[PeerProgress]:
    peer_socket = _open_socket(peer_task)
    peer_socket.send(b"", b"READY")
    peer_socket.receive()
    yield PeerProgress()
    while (frames := peer_socket.receive_or_end()) is not None:
        if frames[1] != b"PONG":
            peer_socket.send(b"", frames[1])
    yield PeerProgress()


def work_wmp(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Run one slot: READY, WAKE, GIVE, TAKE and DONE for each task."""
    peer_socket = _open_socket(peer_task)
    ready = (b"", _WMP, b"\x01", b'{"worker":"w"}')
    peer_socket.send(*ready)
    yield PeerProgress()
    while (frames := peer_socket.receive_or_end()) is not None:
        command = frames[2]
        if command == b"\x02":
            peer_socket.send(b"", _WMP, b"\x03", b'{"worker":"w","request":1}')
        elif command == b"\x04":
            taken = msgspec.json.decode(frames[3])
            report = {"worker": "w", "status": "ok", "manager": taken["manager"]}
            report |= {"task": taken["task"], "attempt": taken["attempt"]}
            peer_socket.send(b"", _WMP, b"\x06", msgspec.json.encode(report), frames[4])
            peer_socket.send(*ready)
        elif command == b"\x09":
            peer_socket.send(b"", _WMP, b"\x0a", b'{"worker":"w"}')
    yield PeerProgress()


_PARTS: Final[dict[str, Callable[[PeerTask], Iterator[PeerProgress]]]] = {
    "ask dwork-plain": submit_plain,
    "ask dwork-extended": submit_native,
    "ask round-robin": submit_round_robin,
    "ask ping-pong": submit_ping_pong,
    "work dwork-plain": work_plain,
    "work dwork-extended": work_native,
    "work round-robin": work_round_robin,
    "work ping-pong": work_ping_pong,
    "work wmp": work_wmp,
}


def main(arguments: Sequence[str]) -> None:
    peer_task = msgspec.json.decode(arguments[0], type=PeerTask)
    for done in _PARTS[peer_task.what](peer_task):
        print_progress(done)
        os.read(_STDIN, 1)


if __name__ == "__main__":
    main(sys.argv[1:])
