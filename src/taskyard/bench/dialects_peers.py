"""Peers of every dialect, each a process of its own: `python -m … PART`.

Bare loops on the wire, written from the dialects' pages, so that a dialect's cost is its own and
not that of a comfortable client. A part is a generator, as in `peers`: it yields when it is ready
and when it is done, and goes on when standard input says so. A client is ready when a first task
has gone all the way, so that starting up is never measured; a worker works until standard input
ends.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from taskyard.bench.peers import Done, tell
from taskyard.net import sockets
from taskyard.net.poller import Poller
from taskyard.net.sockets import ZmqSocket
from taskyard.wire import dwork_pb2 as pb

#: Tasks that a client has asked for at once: the worker never waits for the next one.
WINDOW: Final = 10

_PAYLOAD: Final = b"payload-of-000000000"  # 20 bytes
_STDIN: Final = 0
_Q: Final = pb.QueryMsg

#: A plain peer that finds nothing asks again after this.
_PAUSE_S: Final = 0.0005

_LMQ: Final = b"LMQv100"
_WMP: Final = b"WMP01"


class Part(msgspec.Struct):
    """What a peer is to do: the work or the asking of a dialect."""

    what: str
    endpoint: str
    count: int = 0


class Talk:
    """A wire, and whoever waits at it."""

    def __init__(self, wire: ZmqSocket) -> None:
        self._wire = wire
        self._poller = Poller()
        self._poller.add(wire)
        self._idle_poller = Poller()
        self._idle_poller.add(wire)
        self._idle_poller.add(_STDIN)

    def say(self, *frames: bytes) -> None:
        if not self._wire.send(frames):
            raise RuntimeError("the queue to the broker is full")

    def hear(self) -> list[bytes]:
        while True:
            self._poller.wait(None)
            if (frames := self._wire.receive()) is not None:
                return frames

    def hear_or_end(self) -> list[bytes] | None:
        """None: it is time to end."""
        while (frames := self._wire.receive()) is None:
            if _STDIN in self._idle_poller.wait(None):
                return None
        return frames


def _talk(part: Part) -> Talk:
    return Talk(sockets.connect(part.endpoint))


def _named(part: Part) -> Talk:
    return Talk(sockets.connect_by_name(part.endpoint, f"{os.getpid()}"))


# Clients.


def _in_flight(part: Part, ask: Callable[[int], None], hear: Callable[[], None]) -> Iterator[Done]:
    """Ask for tasks, some at once, and hear of each; the first one alone."""
    ask(0)
    hear()
    yield Done()
    start_ns = time.monotonic_ns()
    for number in range(part.count):
        if number >= WINDOW:
            hear()
        ask(1 + number)
    for _ in range(min(part.count, WINDOW)):
        hear()
    yield Done(part.count, start_ns, time.monotonic_ns())


def ask_plainly(part: Part) -> Iterator[Done]:
    """Plain dwork tells of no result: the last task is looked up until it is done."""
    talk = _talk(part)

    def create(number: int) -> None:
        task = pb.TaskMsg(name=b"task-%09d" % number, origin=b"client").SerializeToString()
        talk.say(b"", _Q(type=_Q.Create, task=[task]).SerializeToString())

    def await_last(number: int) -> None:
        look = _Q(type=_Q.Lookup, name=b"task-%09d" % number).SerializeToString()
        while True:
            talk.say(b"", look)
            told = pb.TaskMsg.FromString(_Q.FromString(talk.hear()[1]).task[0])
            if pb.TaskMsg.LogMsg.FromString(told.log[-1]).state == pb.TaskMsg.Done:
                return
            time.sleep(_PAUSE_S)

    create(0)
    talk.hear()
    await_last(0)
    yield Done()
    start_ns = time.monotonic_ns()
    for number in range(part.count):
        create(1 + number)
        talk.hear()
    await_last(part.count)
    yield Done(part.count, start_ns, time.monotonic_ns())


def ask_natively(part: Part) -> Iterator[Done]:
    """One task a message, and the broker tells when it is done."""
    talk = _talk(part)

    def create(number: int) -> None:
        name = b"task-%09d" % number
        task = pb.TaskMsg(name=name, origin=b"client", payload=_PAYLOAD).SerializeToString()
        query = _Q(type=_Q.Create, task=[task], request=1 + number, stream=True)
        talk.say(b"", query.SerializeToString())

    def hear() -> None:
        while True:
            answer = _Q.FromString(talk.hear()[1])
            if answer.type == _Q.Watch and answer.n == 0:
                return

    return _in_flight(part, create, hear)


def ask_round_robin(part: Part) -> Iterator[Done]:
    talk, server = _named(part), part.endpoint.encode()

    def execute(number: int) -> None:
        talk.say(server, b"", _LMQ, b"\x04", b"%d" % number, b"do", _PAYLOAD, b"")

    def hear() -> None:
        talk.hear()

    return _in_flight(part, execute, hear)


def ask_ping_pong(part: Part) -> Iterator[Done]:
    talk = _talk(part)

    def ask(_number: int) -> None:
        talk.say(b"", _PAYLOAD)

    def hear() -> None:
        talk.hear()

    return _in_flight(part, ask, hear)


# Workers.


def work_plainly(part: Part) -> Iterator[Done]:
    talk, location = _talk(part), b"worker"
    steal = _Q(type=_Q.Steal, location=location).SerializeToString()
    yield Done()
    talk.say(b"", steal)
    while (frames := talk.hear_or_end()) is not None:
        answer = _Q.FromString(frames[1])
        if answer.type == _Q.Transfer:
            name = pb.TaskMsg.FromString(answer.task[0]).name
            task = pb.TaskMsg(name=name, origin=location).SerializeToString()
            complete = _Q(type=_Q.Complete, location=location, task=[task])
            talk.say(b"", complete.SerializeToString())
            talk.hear()
        else:
            time.sleep(_PAUSE_S)
        talk.say(b"", steal)
    yield Done()


def work_natively(part: Part) -> Iterator[Done]:
    """One task at a time; reports and asks in one message, and waits where there is nothing."""
    talk, location = _talk(part), b"worker"
    who = pb.WorkerMsg(slots=1)
    fields = {"location": location, "worker": who, "n": 1, "request": 1}
    steal = _Q(type=_Q.Steal, wait_ms=60_000, **fields).SerializeToString()  # type: ignore[arg-type]
    yield Done()
    talk.say(b"", steal)
    while (frames := talk.hear_or_end()) is not None:
        answer = _Q.FromString(frames[1])
        if answer.type != _Q.Transfer:
            talk.say(b"", steal)
            continue
        given = answer.batch
        batch = pb.Batch(name=given.name, attempt=given.attempt, text=given.payload)
        complete = _Q(type=_Q.Complete, batch=batch, **fields)  # type: ignore[arg-type]
        talk.say(b"", complete.SerializeToString())
    yield Done()


def work_round_robin(part: Part) -> Iterator[Done]:
    """One slot. Tells how long it took from each INCREMENT to the next message."""
    talk, server = _named(part), part.endpoint.encode()
    talk.say(server, b"", _LMQ, b"\x04", b"me", b"\x08", b"1", b"")
    talk.hear()
    yield Done()
    done = Done()
    freed_ns = 0
    while (frames := talk.hear_or_end()) is not None:
        _, _, _, command, number, *rest = frames
        if command == b"\x01":
            talk.say(server, b"", _LMQ, b"\x02", number, b"")
            continue
        if freed_ns:
            done.waits_ns.append(time.monotonic_ns() - freed_ns)
        address = [rest[-1]] if rest[-1] else []
        talk.say(server, *address, b"", _LMQ, b"\x06", number, _PAYLOAD, b"")
        freed_ns = time.monotonic_ns()
        talk.say(server, b"", _LMQ, b"\x03", b"me", b"\x07", b"")
    yield done


def work_ping_pong(part: Part) -> Iterator[Done]:
    talk = _talk(part)
    talk.say(b"", b"READY")
    talk.hear()
    yield Done()
    while (frames := talk.hear_or_end()) is not None:
        if frames[1] != b"PONG":
            talk.say(b"", frames[1])
    yield Done()


def work_wmp(part: Part) -> Iterator[Done]:
    """One slot: READY, WAKE, GIVE, TAKE and DONE for each task."""
    talk = _talk(part)
    ready = (b"", _WMP, b"\x01", b'{"worker":"w"}')
    talk.say(*ready)
    yield Done()
    while (frames := talk.hear_or_end()) is not None:
        command = frames[2]
        if command == b"\x02":
            talk.say(b"", _WMP, b"\x03", b'{"worker":"w","request":1}')
        elif command == b"\x04":
            taken = msgspec.json.decode(frames[3])
            told = {"worker": "w", "status": "ok", "manager": taken["manager"]}
            told |= {"task": taken["task"], "attempt": taken["attempt"]}
            talk.say(b"", _WMP, b"\x06", msgspec.json.encode(told), frames[4])
            talk.say(*ready)
        elif command == b"\x09":
            talk.say(b"", _WMP, b"\x0a", b'{"worker":"w"}')
    yield Done()


_PARTS: Final[dict[str, Callable[[Part], Iterator[Done]]]] = {
    "ask dwork-plain": ask_plainly,
    "ask dwork-extended": ask_natively,
    "ask round-robin": ask_round_robin,
    "ask ping-pong": ask_ping_pong,
    "work dwork-plain": work_plainly,
    "work dwork-extended": work_natively,
    "work round-robin": work_round_robin,
    "work ping-pong": work_ping_pong,
    "work wmp": work_wmp,
}


def main(arguments: Sequence[str]) -> None:
    part = msgspec.json.decode(arguments[0], type=Part)
    for done in _PARTS[part.what](part):
        tell(done)
        os.read(_STDIN, 1)


if __name__ == "__main__":
    main(sys.argv[1:])
