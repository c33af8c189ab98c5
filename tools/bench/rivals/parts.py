"""The clients of another server, each a process: `python -m bench.rivals.parts PART`.

A part yields once when it is ready and once when it is done, as in `bench.peers`.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from bench.peers import BrokerLink, PeerProgress, print_progress
from bench.rivals.links import CALLS, LINKS, TAKES
from taskyard.wire import dwork_pb2 as pb

_STDIN: Final = 0

#: Messages under way to the echo.
ECHO_MAX: Final = 100


class Part(msgspec.Struct):
    """The work of a client, and the number of its tasks."""

    what: Literal["produce", "work", "take", "check", "call", "serve", "echo"]
    #: The key of the connection's class, and its address.
    link: str
    address: int | str
    count: int
    batch: int = 1
    #: Distinguishes the tasks of several producers.
    number: int = 0


def produce(part: Part) -> Iterator[PeerProgress]:
    """Submit tasks with payloads of 20 bytes."""
    link = LINKS[part.link](part.address, works=False)
    first = part.number * part.count
    payloads = [b"payload-of-%09d" % number for number in range(first, first + part.count)]
    batches = [payloads[at : at + part.batch] for at in range(0, part.count, part.batch)]
    yield PeerProgress()
    for batch in batches:
        link.submit(batch)
    yield PeerProgress(part.count)


def work(part: Part) -> Iterator[PeerProgress]:
    """Take and finish a number of tasks."""
    link = LINKS[part.link](part.address, works=True)
    yield PeerProgress()
    left, taken = part.count, list[bytes]()
    while left:
        taken = link.exchange(taken, min(part.batch, left))
        left -= len(taken)
    link.exchange(taken, 0)
    yield PeerProgress(part.count)


def take(part: Part) -> Iterator[PeerProgress]:
    """Finish a number of tasks one at a time as they arrive."""
    link = TAKES[part.link](part.address, works=True)
    yield PeerProgress()
    taken = b""
    for _ in range(part.count):
        taken = link.take(taken)
    link.exchange([taken], 0)
    yield PeerProgress(part.count)


def check(part: Part) -> Iterator[PeerProgress]:
    """Take a task if there is one left."""
    link = LINKS[part.link](part.address, works=True)
    yield PeerProgress(len(link.exchange([], 1)))


def call(part: Part) -> Iterator[PeerProgress]:
    """Submit a task and wait for its result, repeatedly."""
    link = CALLS[part.link](part.address, works=False)
    yield PeerProgress()
    done = PeerProgress(part.count)
    for number in range(part.count):
        start_ns = time.monotonic_ns()
        link.call(b"payload-of-%09d" % number)
        done.waits_ns.append(time.monotonic_ns() - start_ns)
    yield done


def serve(part: Part) -> Iterator[PeerProgress]:
    """Run a number of tasks one at a time as they arrive."""
    link = CALLS[part.link](part.address, works=True)
    yield PeerProgress()
    for _ in range(part.count):
        link.serve()
    yield PeerProgress(part.count)


def echo(part: Part) -> Iterator[PeerProgress]:
    """Send messages to the echo, of which 100 are under way."""
    link = BrokerLink(str(part.address))
    task = pb.TaskMsg(name=b"task-0-000000000", origin=b"peer-0").SerializeToString()
    message = pb.QueryMsg(type=pb.QueryMsg.Create, task=[task]).SerializeToString()
    yield PeerProgress()
    for number in range(part.count + ECHO_MAX):
        if number >= ECHO_MAX:
            link.receive()
        if number < part.count:
            link.send(message)
    yield PeerProgress(part.count)


_PARTS: Final = {
    "produce": produce,
    "work": work,
    "take": take,
    "check": check,
    "call": call,
    "serve": serve,
    "echo": echo,
}


def main(encoded: str) -> None:
    part = msgspec.json.decode(encoded, type=Part)
    for done in _PARTS[part.what](part):
        print_progress(done)
        os.read(_STDIN, 1)


if __name__ == "__main__":
    main(sys.argv[1])
