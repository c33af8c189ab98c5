"""The model of ZeroMQ does what libzmq does: each script runs on both.

The real listener is a process of its own that is killed by a signal. Scripts wait for
events, never for time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from random import Random
from typing import TYPE_CHECKING, Protocol

import pytest

from simulator.clock import Timeline
from simulator.network import Message, Network
from simulator.plan import SECOND_NS, Faults
from simulator.sockets import Socket
from taskyard.net import sockets as real
from taskyard.net.options import MESSAGES_WAITING_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 60

#: Prints arriving messages. A line on stdin is a route and a text to send, and its reply is whether
#: it was accepted. A line without a route pauses it. Then it prints a line when a message arrives.
LISTENER = """
import json, sys
from taskyard.net import sockets
from taskyard.net.host import Poller
wire = sockets.listen(sys.argv[1], is_named=True)
poller = Poller()
poller.add(wire)
poller.add(sys.stdin.fileno())
print(json.dumps(["listens", wire.endpoint]), flush=True)
is_deaf = False
while True:
    ready = poller.wait(None)
    if is_deaf:
        print(json.dumps(["ready"]), flush=True)
        sys.stdin.read()
    while (frames := wire.receive()) is not None:
        print(json.dumps(["got", frames[0].hex(), frames[-1].decode()]), flush=True)
    if sys.stdin.fileno() in ready:
        line = sys.stdin.readline()
        if not line:
            break
        route, text = json.loads(line)
        if not route:
            is_deaf = True
            print(json.dumps(["deaf"]), flush=True)
            continue
        taken = wire.send([bytes.fromhex(route), b"", text.encode()])
        print(json.dumps(["sent", taken]), flush=True)
"""


class Peer(Protocol):
    def send(self, text: str) -> bool: ...

    def receive(self) -> str: ...

    def close(self) -> None: ...


class Bench(Protocol):
    """A listener that can be killed, and peers."""

    def start(self) -> None: ...

    def deafen(self) -> None: ...

    def kill_when_reached(self) -> None: ...

    def kill(self) -> None: ...

    def peer(self, *, is_named: bool) -> Peer: ...

    def got(self, count: int) -> list[tuple[str, str]]: ...

    def got_soon(self) -> list[tuple[str, str]]: ...

    def answer(self, route: str, text: str) -> bool: ...


class RealPeer:
    def __init__(self, endpoint: str, *, is_named: bool) -> None:
        self._is_named = is_named
        token = f"{os.getpid()}-{id(self)}"
        self._wire = real.connect_by_name(endpoint, token) if is_named else real.connect(endpoint)
        self._server = endpoint.encode()

    def send(self, text: str) -> bool:
        top = [self._server] if self._is_named else []
        return self._wire.send([*top, b"", text.encode()])

    def receive(self) -> str:
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            frames = self._wire.receive()
            if frames is not None:
                return frames[-1].decode()
            self._wire.socket.poll(100)
        raise TimeoutError

    def close(self) -> None:
        self._wire.close()


class RealBench:
    """libzmq, over loopback."""

    def __init__(self) -> None:
        self.endpoint = "tcp://127.0.0.1:0"
        self._child: subprocess.Popen[str] | None = None
        self._peers: list[RealPeer] = []
        self._lines: list[list[str]] = []
        self._rest = b""

    def start(self) -> None:
        command = [sys.executable, "-c", LISTENER, self.endpoint]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self._next("listens")[1]

    def _next(self, word: str) -> list[str]:
        """Return the next line of a kind, and keep others."""
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            for line in self._lines:
                if line[0] == word:
                    self._lines.remove(line)
                    return line
            self._read()
        raise TimeoutError(word)

    def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        if not select.select([descriptor], [], [], 1)[0]:
            return
        chunk = os.read(descriptor, 65536)
        assert chunk, "the listener ended"
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._lines += [json.loads(line) for line in lines]

    def deafen(self) -> None:
        self._write("", "")
        self._next("deaf")

    def kill_when_reached(self) -> None:
        self._next("ready")
        self.kill()

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()
        self._child, self._rest = None, b""

    def peer(self, *, is_named: bool) -> RealPeer:
        self._peers.append(RealPeer(self.endpoint, is_named=is_named))
        return self._peers[-1]

    def got(self, count: int) -> list[tuple[str, str]]:
        return [(one[1], one[2]) for one in (self._next("got") for _ in range(count))]

    def got_soon(self) -> list[tuple[str, str]]:
        """Return the messages that arrive within a second."""
        self._read()
        return self.got(1) if self._lines else []

    def answer(self, route: str, text: str) -> bool:
        self._write(route, text)
        return bool(self._next("sent")[1])

    def _write(self, route: str, text: str) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([route, text]) + "\n")
        self._child.stdin.flush()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        if self._child is not None:
            self.kill()


class SimPeer:
    hung = False

    def __init__(self, bench: SimBench, *, is_named: bool) -> None:
        name = b"tcp://sim:1:peer-%d" % len(bench.network.links) if is_named else b""
        self._bench, self._is_named = bench, is_named
        self._socket = Socket(bench.network, self, 3, name=name)

    def wake(self) -> None:
        """Do nothing: nothing waits."""

    def send(self, text: str) -> bool:
        top = [b"tcp://sim:1"] if self._is_named else []
        return self._socket.send([*top, b"", text.encode()])

    def receive(self) -> str:
        self._bench.pass_time()
        frames = self._socket.receive()
        assert frames is not None
        return frames[-1].decode()

    def close(self) -> None:
        self._socket.close()


class SimBench:
    """The model."""

    def __init__(self) -> None:
        self.up = False
        self.timeline = Timeline()
        self._arrived: list[Message] = []
        self._is_deaf = False
        faults = Faults(undeliverable_reported=1.0)
        self.network = Network(self.timeline, Random(1), faults, self)

    def on_message(self, parcel: Message) -> None:
        if not self._is_deaf:
            self._arrived.append(parcel)

    def pass_time(self) -> None:
        self.timeline.run_until(self.timeline.now_ns + 5 * SECOND_NS)

    def start(self) -> None:
        self.up, self._is_deaf, self._arrived = True, False, []
        self.pass_time()

    def deafen(self) -> None:
        self._is_deaf = True

    def kill_when_reached(self) -> None:
        self.pass_time()
        self.kill()

    def kill(self) -> None:
        self.up = False
        self.network.broker_went_down()
        self.pass_time()

    def peer(self, *, is_named: bool) -> SimPeer:
        return SimPeer(self, is_named=is_named)

    def got(self, count: int) -> list[tuple[str, str]]:
        self.pass_time()
        taken, self._arrived = self._arrived[:count], self._arrived[count:]
        return [(one.route[1:].hex(), one.frames[-1].decode()) for one in taken]

    def got_soon(self) -> list[tuple[str, str]]:
        return self.got(1)

    def answer(self, route: str, text: str) -> bool:
        now_ns = self.timeline.now_ns
        return self.network.to_peer(b"\x03" + bytes.fromhex(route), [b"", text.encode()], now_ns)

    def close(self) -> None:
        """Do nothing: nothing is open."""


@pytest.fixture(params=[RealBench, SimBench], ids=["libzmq", "model"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = request.param()
    yield made
    made.close()


NAMED = pytest.mark.parametrize("is_named", [False, True], ids=["dealer", "router"])


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ends


@NAMED
def test_message_waits_for_the_first_connection(bench: Bench, *, is_named: bool) -> None:
    bench.start()
    bench.kill()
    peer = bench.peer(is_named=is_named)
    assert peer.send("early")
    assert peer.send("second")
    bench.start()
    assert [text for _, text in bench.got(2)] == ["early", "second"]


@NAMED
def test_answer_finds_its_way_back(bench: Bench, *, is_named: bool) -> None:
    bench.start()
    peer = bench.peer(is_named=is_named)
    peer.send("ask")
    ((route, _),) = bench.got(1)
    assert bench.answer(route, "told")
    assert peer.receive() == "told"


@NAMED
def test_only_a_named_socket_keeps_its_route_when_the_listener_was_killed(
    bench: Bench, *, is_named: bool
) -> None:
    bench.start()
    peer = bench.peer(is_named=is_named)
    peer.send("before")
    ((route, _),) = bench.got(1)
    bench.kill()
    bench.start()
    assert (_first_of(bench, peer)[0] == route) is is_named


def _first_of(bench: Bench, peer: Peer) -> tuple[str, str]:
    """Send until a message arrives: those sent before a peer notices the death are lost."""
    for number in range(1000):
        peer.send(f"new {number}")
        arrived = bench.got_soon()
        if arrived:
            return arrived[0]
    raise AssertionError


@NAMED
def test_messages_on_the_wire_are_lost_with_the_listener(bench: Bench, *, is_named: bool) -> None:
    bench.start()
    peer = bench.peer(is_named=is_named)
    peer.send("first")
    bench.got(1)
    bench.deafen()
    assert peer.send("lost")
    bench.kill_when_reached()
    bench.start()
    assert _first_of(bench, peer)[1].startswith("new")


def test_socket_without_a_listener_keeps_as_many_messages_as_its_limit(bench: Bench) -> None:
    bench.start()
    bench.kill()
    peer = bench.peer(is_named=False)
    taken = sum(peer.send(str(number)) for number in range(MESSAGES_WAITING_MAX + 10))
    assert taken == MESSAGES_WAITING_MAX
    bench.start()
    assert [text for _, text in bench.got(3)] == ["0", "1", "2"]


def test_listener_refuses_a_route_that_leads_nowhere(bench: Bench) -> None:
    bench.start()
    assert not bench.answer("00ffffffff", "hello")
    peer = bench.peer(is_named=False)
    peer.send("here")
    ((route, _),) = bench.got(1)
    assert bench.answer(route, "hello")
    peer.close()
    until(lambda: not bench.answer(route, "hello"))


def test_restarted_listener_does_not_know_the_routes_of_the_killed_one(bench: Bench) -> None:
    bench.start()
    peer = bench.peer(is_named=False)
    peer.send("here")
    ((route, _),) = bench.got(1)
    bench.kill()
    bench.start()
    assert not bench.answer(route, "hello")


def test_hung_process_connects_again_only_when_it_goes_on() -> None:
    bench = SimBench()
    bench.start()
    peer = bench.peer(is_named=False)
    peer.hung = True
    bench.kill()
    bench.start()
    peer.send("later")
    assert bench.got(1) == []
    peer.hung = False
    assert [text for _, text in bench.got(1)] == ["later"]
