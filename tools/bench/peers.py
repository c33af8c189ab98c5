"""The peers of a measured broker, each a process: `python -m bench.peers PART`.

Minimal loops, so that a runner's cost does not hide the broker's. A part is a generator: it yields
lines for standard output, and continues at a line on standard input. It yields once when it is
ready and once when it is done, so that startup is not measured.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Final, Literal

import msgspec

from bench.workloads import Shape, submissions
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Poller
from taskyard.net.protocols import SystemClock
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Assigned, Reply, ReportColumns

#: Open requests at once: a producer collects the next batch while some are on the way, and a worker
#: has a little more than it works on.
CREATES_MAX: Final = 4
STEALS_MAX: Final = 2

#: How long a worker waits for tasks before it prints its count.
IDLE_NS: Final = SECOND_NS // 50

#: Longer than any phase without requests to a worker.
_LONG_NS: Final = 60 * SECOND_NS

#: It sends no heartbeats, and may wait long for delayed tasks.
_LEASE_TIMEOUT_NS: Final = 60 * _LONG_NS

_STDIN: Final = 0
_PAYLOAD: Final = b"payload-of-000000000"  # 20 bytes
_Q: Final = pb.QueryMsg


class PeerTask(msgspec.Struct):
    """The part of a peer and its options."""

    what: Literal["produce", "flow", "work", "plain", "call", "wait"]
    endpoint: str
    #: Distinguishes peers of the same part.
    number: int = 0
    count: int = 0
    batch: int = 1
    shape: Shape = "flat"
    #: The number of the first task.
    first: int = 0
    #: flow: the unfinished tasks at which no more are submitted.
    unfinished_max: int = 0
    #: work: reports wait for the next tasks, with no other request beside them.
    is_parking: bool = False
    #: produce: open requests at once.
    under_way_max: int = CREATES_MAX


class PeerProgress(msgspec.Struct):
    """The progress of a peer. Times are of the monotonic clock that all processes share."""

    count: int = 0
    start_ns: int = 0
    end_ns: int = 0
    #: call: when the broker had all tasks.
    taken_ns: int = 0
    #: wait: the latency of each task.
    waits_ns: list[int] = []


class BrokerLink:
    """A connection to the broker that also waits for the end of standard input."""

    def __init__(self, endpoint: str) -> None:
        self._wire = sockets.connect(endpoint)
        self._poller = Poller()
        self._poller.add(self._wire)
        #: Polls standard input as well, which only an idle peer can afford.
        self._idle_poller = Poller()
        self._idle_poller.add(self._wire)
        self._idle_poller.add(_STDIN)

    def send(self, body: bytes) -> None:
        if not self._wire.send([b"", body]):
            raise RuntimeError("the queue to the broker is full: too many requests under way")

    def receive(self) -> bytes:
        """Return the next reply."""
        while True:
            # Wait first: an empty receive costs twice as much as a poll.
            self._poller.wait(None)
            if (frames := self._wire.receive()) is not None:
                return frames[-1]

    def receive_or_end(self, idle: Callable[[], None]) -> bytes | None:
        """Return the next reply, or None at the end of standard input. Call `idle` when neither
        comes."""
        while True:
            if not self._poller.wait(IDLE_NS):
                idle()
                if _STDIN in self._idle_poller.wait(None):
                    return None
            if (frames := self._wire.receive()) is not None:
                return frames[-1]

    def close(self) -> None:
        self._wire.close()


def produce(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Submit tasks until all of them are acknowledged."""
    link, numbers = BrokerLink(peer_task.endpoint), count(1)
    events = [*submissions(peer_task.shape, peer_task.count, peer_task.batch, peer_task.first)]
    yield PeerProgress()
    start_ns = time.monotonic_ns()
    for under_way, event in enumerate(events):
        if under_way >= peer_task.under_way_max:
            _expect_ok(link)
        link.send(peer.create(next(numbers), event.submission))
    for _ in range(min(len(events), peer_task.under_way_max)):
        _expect_ok(link)
    yield PeerProgress(peer_task.count, start_ns, time.monotonic_ns())


def _expect_ok(link: BrokerLink) -> None:
    reply = Reply(link.receive())
    if reply.kind != peer.OK:
        raise RuntimeError(f"a submission was refused: {reply.reason}")


def flow(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Submit tasks while few enough are unfinished."""
    producer = _Producer(peer_task)
    yield PeerProgress()
    start_ns = time.monotonic_ns()
    while not producer.is_done:
        producer.turn()
    producer.close()
    yield PeerProgress(producer.taken, start_ns, time.monotonic_ns())


class _Producer:
    """Submits through the product's own channel, which repeats refused requests."""

    def __init__(self, peer_task: PeerTask) -> None:
        self._part = peer_task
        self._poller = Poller()
        self._wire = sockets.connect(peer_task.endpoint)
        self._poller.add(self._wire)
        self._line = Channel(self._wire, SystemClock())
        self._left = submissions(peer_task.shape, peer_task.count, peer_task.batch, peer_task.first)
        self._next = next(self._left, None)
        #: Tasks by the request that submits them.
        self._under_way: dict[int, int] = {}
        self.taken = self._finished = 0
        #: The request for the counts. 0: none is open.
        self._counting = self._counted_ns = 0

    @property
    def is_done(self) -> bool:
        return self._next is None and not self._under_way

    def turn(self) -> None:
        """Submit as many tasks as there is room for, and receive replies."""
        while self._next is not None and self._has_room():
            submission = self._next.submission
            number = self._line.request(partial(peer.create, submission=submission))
            self._under_way[number] = len(submission.names)
            self._next = next(self._left, None)
        if not self._counting and time.monotonic_ns() - self._counted_ns > IDLE_NS:
            self._counting = self._line.request(partial(peer.query, kind=peer.STATS))
            self._counted_ns = time.monotonic_ns()
        self._poller.wait(IDLE_NS)
        for reply in self._line.receive():
            self._on_reply(reply)
        self._line.turn()

    def _has_room(self) -> bool:
        submitted = self.taken + sum(self._under_way.values())
        unfinished = submitted - self._finished + self._part.batch
        return len(self._under_way) < CREATES_MAX and unfinished <= self._part.unfinished_max

    def _on_reply(self, reply: Reply) -> None:
        if reply.request == self._counting:
            self._counting, self._finished = 0, reply.document()["counts"]["done"]
            return
        self.taken += self._under_way.pop(reply.request)
        if reply.kind != peer.OK:
            raise RuntimeError(f"a submission was refused: {reply.reason}")

    def close(self) -> None:
        self._wire.close()


def work(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Run tasks until standard input ends."""
    link = BrokerLink(peer_task.endpoint)
    worker = _Worker(link, peer_task)
    yield PeerProgress()
    worker.ask(_LONG_NS)
    while (body := link.receive_or_end(lambda: print_progress(worker.done))) is not None:
        worker.on_reply(Reply(body))
    yield worker.done


class _Worker:
    """Reports and requests in one message, with a second request open meanwhile. Without tasks
    one request waits. With `is_parking`, each report waits as our workers' reports do."""

    def __init__(self, link: BrokerLink, peer_task: PeerTask) -> None:
        self._link = link
        self._batch = peer_task.batch
        self._requests_max = 1 if peer_task.is_parking else STEALS_MAX
        self._wait_ns = _LONG_NS if peer_task.is_parking else 0
        self._location = b"worker-%d" % peer_task.number
        facts = WorkerFacts(slots_total=0, lease_timeout_ns=_LEASE_TIMEOUT_NS)
        self._worker_message = peer.worker_message(facts)
        self._number = 0
        #: Tasks that each open request reports.
        self._reported: dict[int, int] = {}
        self.done = PeerProgress()

    def ask(self, wait_ns: int = 0) -> None:
        number = self._count(0)
        worker, batch = self._worker_message, self._batch
        self._link.send(peer.steal(number, self._location, worker, batch, wait_ns))

    def on_reply(self, reply: Reply) -> None:
        reported = self._reported.pop(reply.request)
        if reported:
            self.done.count += reported
            self.done.end_ns = time.monotonic_ns()
        if reply.kind == peer.OK:
            self._reported[reply.request] = 0  # its tasks are still to come
        elif reply.kind == peer.TRANSFER:
            self._report(reply.assigned())
            if len(self._reported) < self._requests_max:
                self.ask()
        elif not self._reported:
            self.ask(_LONG_NS)

    def _report(self, assigned: Assigned) -> None:
        number = self._count(len(assigned.names))
        reports = ReportColumns(assigned.names, assigned.attempts)
        worker, batch = self._worker_message, self._batch
        fixed = (number, self._location, reports, worker, batch)
        self._link.send(peer.complete(*fixed, wait_ns=self._wait_ns))

    def _count(self, reported: int) -> int:
        self._number += 1
        self._reported[self._number] = reported
        return self._number


def plain(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Create, steal and complete one task after the other, as a REQ socket does: dwork's own
    bytes after an empty frame, one request at a time."""
    link, location = BrokerLink(peer_task.endpoint), b"peer-%d" % peer_task.number
    steal = _Q(type=_Q.Steal, location=location).SerializeToString()
    yield PeerProgress()
    start_ns = time.monotonic_ns()
    for number in range(peer_task.count):
        name = b"task-%d-%09d" % (peer_task.number, number)
        task = pb.TaskMsg(name=name, origin=location).SerializeToString()
        _plain_request(link, _Q(type=_Q.Create, task=[task]).SerializeToString(), _Q.OK)
        (given,) = _plain_request(link, steal, _Q.Transfer).task
        name = pb.TaskMsg.FromString(given).name
        task = pb.TaskMsg(name=name, origin=location).SerializeToString()
        complete = _Q(type=_Q.Complete, location=location, task=[task])
        _plain_request(link, complete.SerializeToString(), _Q.OK)
    yield PeerProgress(peer_task.count, start_ns, time.monotonic_ns())


def _plain_request(link: BrokerLink, body: bytes, expected: int) -> pb.QueryMsg:
    link.send(body)
    answer = _Q.FromString(link.receive())
    if answer.type != expected:
        raise RuntimeError(f"the broker answered with {_Q.Type.Name(answer.type)}")
    return answer


def call(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Submit one-task calls in a loop, then wait for all results."""
    from taskyard.client.client import Client  # noqa: PLC0415  # most parts do without

    with Client(peer_task.endpoint) as client:
        yield PeerProgress()
        done = PeerProgress(peer_task.count, time.monotonic_ns())
        futures = [client.submit(_PAYLOAD) for _ in range(peer_task.count)]
        while sum(client.status()["counts"].values()) < peer_task.count:
            pass  # each poll takes a turn of the broker
        done.taken_ns = time.monotonic_ns()
        for future in futures:
            future.result()
        done.end_ns = time.monotonic_ns()
        yield done


def wait(peer_task: PeerTask) -> Iterator[PeerProgress]:
    """Submit a task and wait for its result, repeatedly."""
    from taskyard.client.client import Client  # noqa: PLC0415  # as above

    with Client(peer_task.endpoint) as client:
        yield PeerProgress()
        done = PeerProgress(peer_task.count, time.monotonic_ns())
        for _ in range(peer_task.count):
            start_ns = time.monotonic_ns()
            client.submit(_PAYLOAD).result()
            done.waits_ns.append(time.monotonic_ns() - start_ns)
        done.end_ns = time.monotonic_ns()
        yield done


_PARTS: Final = {
    "produce": produce,
    "flow": flow,
    "work": work,
    "plain": plain,
    "call": call,
    "wait": wait,
}


def print_progress(done: PeerProgress) -> None:
    os.write(1, msgspec.json.encode(done) + b"\n")


def main(encoded: str) -> None:
    peer_task = msgspec.json.decode(encoded, type=PeerTask)
    for done in _PARTS[peer_task.what](peer_task):
        print_progress(done)
        os.read(_STDIN, 1)


if __name__ == "__main__":
    main(sys.argv[1])
