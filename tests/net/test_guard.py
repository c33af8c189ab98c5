"""The guard cuts strangers and senders of unfinished messages, and no other peers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.net import accepted, guard, memory
from taskyard.net import context as zap
from taskyard.net.accepted import (
    FOR_CONNECTIONS,
    FOR_FRAMES,
    FOR_MEMORY,
    RESUME_NS,
    Arrivals,
    Connection,
    Cutter,
    Gate,
    inode_of,
)
from taskyard.net.guard import Guard
from taskyard.net.memory import (
    LOOK_MS,
    MIB,
    REST_MS_MAX,
    TROUBLE_MS,
    ConnectionLimits,
    Level,
    Memory,
    Pressure,
    backlog_bytes,
    backlog_of,
    stranger_to_cut,
    strangers_of,
    suspects_of,
    wait_ms_after,
)
from taskyard.net.sockets import listen
from taskyard.net.zmq_socket import ZmqSocket
from tests.net.kit import PATIENCE_S, arrived, peers, raw_connection, read_to_end
from tests.system import socket_attackers as attackers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.needs("Linux")

ENDLESS = Memory(1 << 62, 1 << 40)

#: A user without privileges.
NOBODY = 65_534
GATE_OF_NOBODY = """
import os, socket, sys
from taskyard.net.accepted import Gate
os.setuid(int(sys.argv[1]))
with socket.create_server(("127.0.0.1", 0)) as server:
    Gate(server.fileno()).close()
"""


def until(happened: Callable[[], bool]) -> None:
    """Wait until another thread has done something."""
    ends = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.005)


@contextmanager
def guarded(endpoint: str, limits: ConnectionLimits) -> Iterator[tuple[ZmqSocket, Guard]]:
    with ExitStack() as stack:
        watching = Guard(limits)
        wire = stack.enter_context(closing(listen(endpoint, guard=watching)))
        stack.enter_context(closing(watching))
        watching.start()
        yield wire, watching


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/broker.sock"


def few_strangers(number: int) -> ConnectionLimits:
    """Return limits of memory that allow this many strangers."""
    part = memory.CONNECTIONS_SHARE * memory.CONNECTION_BYTES
    return ConnectionLimits(1 << 20, Memory(1 << 62, 2 * number * part))


def test_strangers_are_cut_when_there_are_too_many_and_peers_are_not(endpoint: str) -> None:
    with guarded(endpoint, few_strangers(10)) as (wire, watching), peers(wire) as (peer, route):
        with ExitStack() as stack:
            raws = [stack.enter_context(raw_connection(wire.endpoint)) for _ in range(30)]
            until(lambda: watching.cut[FOR_CONNECTIONS] >= 20)
            # The oldest first.
            assert read_to_end(raws[0])[:1] in (b"", b"\xff")
        assert watching.cut == {FOR_CONNECTIONS: 20}
        assert wire.send([route, b"still there"])
        assert arrived(peer) == [b"still there"]


def test_silent_strangers_are_cut_before_those_with_a_greeting() -> None:
    limits = few_strangers(10)
    with guarded("tcp://127.0.0.1:0", limits) as (wire, watching), ExitStack() as stack:
        greeted = stack.enter_context(attackers.established(wire.endpoint))
        for _ in range(20):
            stack.enter_context(raw_connection(wire.endpoint))
        until(lambda: watching.cut[FOR_CONNECTIONS] >= 11)
        greeted.sendall(b"\x00\x05hello")
        assert arrived(wire)[1:] == [b"hello"]


def test_strangers_with_a_key_and_local_ones_are_cut_last(monkeypatch: pytest.MonkeyPatch) -> None:
    received = {1: 64, 2: 63, 3: 64, 4: 64}
    monkeypatch.setattr(accepted, "received_bytes", received.__getitem__)
    local, tcp = Arrivals(0, is_local=True), Arrivals(0, is_local=False, has_keys=True)
    owner, admitted = Connection(9, 1, local, 0), Connection(1, 1, tcp, 0)
    silent, greeted, later = (Connection(at, 1, tcp, 10) for at in (2, 3, 4))
    order = []
    strangers = [owner, admitted, greeted, silent, later]
    while (found := stranger_to_cut(strangers, admitted_ns=5)) is not None:
        order.append(found)
        strangers.remove(found)
    assert order == [silent, greeted, later, admitted, owner]


def test_descriptors_are_kept_free_and_peers_wait_at_the_gate(endpoint: str) -> None:
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a number is wanted, no paths
    limits = ConnectionLimits(2 * used + 100, ENDLESS)
    with guarded(endpoint, limits) as (wire, watching), ExitStack() as stack:
        # Our own ends are descriptors of this process, too, so most of them are in use.
        for _ in range(limits.descriptors // 3):
            stack.enter_context(attackers.silent(wire.endpoint))
        until(lambda: watching.cut[FOR_CONNECTIONS] > 0)
        with peers(wire):
            pass


def test_local_peers_are_admitted_when_those_over_tcp_are_too_many() -> None:
    limits = few_strangers(40)
    with guarded("tcp://127.0.0.1:0", limits) as (wire, _), ExitStack() as stack:
        allowed = limits.connections - limits.connections // memory.LOCAL_SHARE
        for _ in range(allowed):
            stack.enter_context(peers(wire))
        stack.enter_context(raw_connection(wire.endpoint))
        question = [b"1.0", b"7", b"taskyard.listening", b"", b"", b"NULL"]
        question[3] = b"127.0.0.1"
        until(lambda: zap.zap_reply(question)[2:4] == [b"300", b"too many connections"])
        question[3] = f"localhost:{os.getuid()}:0:1".encode()
        assert zap.zap_reply(question)[2] == b"200"
        question[3] = b"127.0.0.1"
    assert zap.zap_reply(question)[2] == b"200"


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True], ids=["stranger", "known"])
def test_sender_of_endless_frames_is_cut_and_its_memory_freed(
    endpoint: str, *, is_known: bool
) -> None:
    limits = ConnectionLimits(1 << 20, Memory(1 << 62, 256 * MIB))
    with guarded(endpoint, limits) as (wire, watching), peers(wire) as (peer, route):
        with attackers.established(wire.endpoint) as raw:
            if is_known:
                raw.sendall(b"\x00\x05hello")
                assert arrived(wire)[1:] == [b"hello"]
                assert wire.receive() is None
            with pytest.raises((ConnectionError, TimeoutError)):
                raw.sendall(attackers.CHUNK * 10_000)
        until(lambda: watching.cut[FOR_MEMORY] >= 1)  # counted after the connection is cut
        assert wire.send([route, b"still there"])
        assert arrived(peer) == [b"still there"]


@pytest.mark.slow
def test_message_of_far_too_many_frames_is_dropped_and_its_sender_cut(endpoint: str) -> None:
    with (
        guarded(endpoint, ConnectionLimits(1 << 20, ENDLESS)) as (wire, watching),
        attackers.established(wire.endpoint) as raw,
    ):
        raw.sendall(attackers.EMPTY_WITH_MORE * 100_000 + b"\x00\x00")
        until(lambda: wire.receive() is None and wire.dropped == 1)
        until(lambda: watching.cut[FOR_FRAMES] == 1)
        read_to_end(raw)


def test_guard_that_was_never_started_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as above
    for _ in range(2):
        watching = Guard()
        wire = listen(f"ipc://{tmp_path}/broker.sock", guard=watching)
        watching.close()
        wire.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 8)  # noqa: PTH208 - as above


def test_internal_error_is_logged_and_the_guard_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: int) -> int:
        raise RuntimeError("planted")

    with guarded("tcp://127.0.0.1:0", few_strangers(10)) as (wire, watching), ExitStack() as stack:
        with monkeypatch.context() as planted:
            planted.setattr(guard, "_descriptors_used", fail)
            until(lambda: "internal error in the connection guard" in caplog.text)
        for _ in range(20):
            stack.enter_context(raw_connection(wire.endpoint))
        until(lambda: watching.cut[FOR_CONNECTIONS] == 10)


def test_check_that_was_suspended_is_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def suspended(_: int) -> int:
        times.append(time.monotonic())
        time.sleep(0.1)  # as on a busy machine: time passes, but no CPU time
        times.append(time.monotonic())
        return 0

    monkeypatch.setattr(guard, "_descriptors_used", suspended)
    with (
        guarded("tcp://127.0.0.1:0", few_strangers(10)) as (wire, _),
        raw_connection(wire.endpoint),  # while a peer has not spoken, all is checked
    ):
        until(lambda: len(times) >= 10)
    rests = [later - earlier for earlier, later in zip(times[1::2], times[2::2], strict=False)]
    assert min(rests) < 1


def test_rest_after_a_check_is_limited() -> None:
    second = 10**9
    assert wait_ms_after(0, is_error=False) == LOOK_MS
    assert wait_ms_after(0, is_error=True) == TROUBLE_MS
    assert wait_ms_after(second // 250, is_error=True) == 80
    assert wait_ms_after(second, is_error=True) == REST_MS_MAX


def test_missing_guard_is_logged_on_other_systems(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with guarded("tcp://127.0.0.1:0", few_strangers(1)) as (wire, _), peers(wire):
        pass
    assert caplog.messages == ["connections are not protected against floods on this system"]


def test_peers_wait_at_a_shut_gate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        place = server.getsockname()
        gate = Gate(server.fileno())
        gate.shut()
        with closing(gate), socket.create_connection(place, timeout=PATIENCE_S):
            assert gate.has_waiting()
            with pytest.raises(BlockingIOError):
                server.accept()
            gate.pulse(1)
            gate.pulse(10**6)
            with pytest.raises(BlockingIOError):
                server.accept()
            gate.open()
            server.accept()[0].close()
            assert not gate.has_waiting()


@pytest.mark.needs("root")
def test_gate_needs_no_privileges() -> None:
    """In a process of its own: a fork of this one could wait for a lock of another thread."""
    subprocess.run([sys.executable, "-c", GATE_OF_NOBODY, str(NOBODY)], check=True)


def test_connection_that_is_gone_has_received_nothing() -> None:
    assert accepted.received_bytes(1 << 20) == 0
    assert accepted.waiting_bytes(1 << 20) == 0
    assert accepted.inode_of(1 << 20) == 0


def test_cutter_leaves_the_next_connection_with_that_descriptor_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(accepted.Cutter()) as cutter:
        another = Connection(ours.fileno(), 1, Arrivals(0, is_local=True), 0)
        assert cutter.cut(another, is_named=True) == ""
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
        gone = Connection(1 << 20, 1, Arrivals(0, is_local=True), 0)
        assert cutter.cut(gone, is_named=True) == ""


@pytest.mark.parametrize(
    ("grown_mib", "level"),
    [
        (0, Level.CALM),
        (16, Level.CALM),
        (17, Level.ALERT),
        (65, Level.TROUBLE),
        (129, Level.SEVERE),
    ],
)
def test_level_follows_resident_memory(grown_mib: int, level: Level) -> None:
    judge = Pressure(Memory(1 << 62, 512 * MIB), Memory(0, 100 * MIB))
    assert judge.level(Memory(400 * MIB, (100 + grown_mib) * MIB)) is level


@pytest.mark.parametrize(
    ("space_mib", "level"),
    [(200, Level.CALM), (312, Level.ALERT), (368, Level.TROUBLE), (440, Level.SEVERE)],
)
def test_level_follows_the_address_space_that_is_left(space_mib: int, level: Level) -> None:
    judge = Pressure(Memory(512 * MIB, 512 * MIB), Memory(200 * MIB, 0))
    assert judge.level(Memory(space_mib * MIB, 0)) is level


def test_returned_memory_lowers_the_normal_level() -> None:
    judge = Pressure(Memory(1 << 62, 512 * MIB), Memory(300 * MIB, 100 * MIB))
    judge.follow_down(Memory(350 * MIB, 50 * MIB))
    assert judge.calm == Memory(300 * MIB, 50 * MIB)


def receive(arrivals: Arrivals, descriptor: int) -> None:
    """Count a message, as a listener does."""
    arrivals.messages[descriptor] = arrivals.messages.get(descriptor, 0) + 1
    arrivals.total += 1


def connection(*, unfinished: int, since_ns: int = 0, spoke: bool = True) -> Connection:
    arrivals = Arrivals(0, is_local=False)
    if spoke:
        receive(arrivals, 5)
    return Connection(5, 1, arrivals, 0, unfinished=unfinished, unfinished_ns=since_ns)


def test_largest_unfinished_messages_are_to_blame() -> None:
    large, small = connection(unfinished=4 * MIB), connection(unfinished=MIB // 8)
    idle, young = connection(unfinished=0), connection(unfinished=4 * MIB, since_ns=11)
    stranger = connection(unfinished=MIB, since_ns=11, spoke=False)
    every = [large, small, idle, young, stranger]
    assert suspects_of(every, Memory(0, 100 * MIB), ripe_ns=10) == [large, stranger]


def test_messages_too_small_to_explain_the_growth_are_not_to_blame() -> None:
    assert suspects_of([connection(unfinished=MIB)], Memory(0, 100 * MIB), ripe_ns=10) == []


def test_announced_frames_are_to_blame_for_address_space() -> None:
    announced = connection(unfinished=9)
    assert suspects_of([announced], Memory(60 * MIB, 0), ripe_ns=10) == [announced]
    assert suspects_of([announced], Memory(100 * MIB, 0), ripe_ns=10) == []


def test_strangers_are_those_without_a_message() -> None:
    known, stranger = connection(unfinished=0), connection(unfinished=0, spoke=False)
    assert strangers_of([known, stranger], ripe_ns=10) == [stranger]
    assert strangers_of([known, stranger], ripe_ns=-1) == []


def test_bytes_are_unfinished_only_after_the_listener_was_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = [100]
    monkeypatch.setattr(accepted, "received_bytes", lambda _: received[0])
    one = connection(unfinished=0, spoke=False)
    one.sample(1, is_caught_up=False, connections=1)
    one.sample(2, is_caught_up=False, connections=1)
    assert one.unfinished == 0
    one.sample(3, is_caught_up=True, connections=1)
    assert (one.unfinished, one.unfinished_ns) == (100, 2)
    # A message has arrived. Bytes received before belong to it.
    receive(one.arrivals, 5)
    received[0] = 300
    one.sample(4, is_caught_up=True, connections=1)
    assert one.unfinished == 0
    # Other connections had two turns each, so this one had its turn.
    for _ in range(3):
        receive(one.arrivals, 6)
    received[0] = 500
    one.sample(5, is_caught_up=False, connections=1)
    assert one.unfinished == 0
    for _ in range(3):
        receive(one.arrivals, 6)
    one.sample(6, is_caught_up=False, connections=1)
    assert one.unfinished == 200


def backlogged(waiting: int, *, is_drained: bool = False) -> Connection:
    found = connection(unfinished=0)
    found.waiting, found.is_drained = waiting, is_drained
    return found


def test_peers_with_most_messages_waiting_are_held() -> None:
    large, small = backlogged(60 * MIB), backlogged(MIB)
    assert backlog_of([large, small], 64 * MIB) == []
    assert backlog_of([large, small], 32 * MIB) == [large]


def test_unfinished_message_is_no_reason_to_hold_a_peer() -> None:
    assert backlog_of([backlogged(60 * MIB, is_drained=True)], MIB) == []


def test_held_peer_sends_nothing_until_it_is_released() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        peer = stack.enter_context(socket.create_connection(server.getsockname()))
        ours = stack.enter_context(server.accept()[0])
        cutter = stack.enter_context(closing(Cutter()))
        number = ours.fileno()
        found = Connection(number, inode_of(number), Arrivals(0, is_local=False), 0)
        host, port = peer.getsockname()
        assert cutter.hold(found) == f"{host}:{port}"
        peer.sendall(b"hello")
        assert accepted.received_bytes(number) == 0
        cutter.release(found)
        ours.settimeout(PATIENCE_S)
        assert ours.recv(5) == b"hello"


def test_cutter_holds_no_other_connection_with_that_descriptor() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        peer = stack.enter_context(socket.create_connection(server.getsockname()))
        ours = stack.enter_context(server.accept()[0])
        cutter = stack.enter_context(closing(Cutter()))
        another = Connection(ours.fileno(), 1, Arrivals(0, is_local=False), 0)
        assert cutter.hold(another) == ""
        cutter.release(another)
        peer.sendall(b"hello")
        ours.settimeout(PATIENCE_S)
        assert ours.recv(5) == b"hello"


def test_messages_that_wait_are_no_reason_to_cut() -> None:
    judge = Pressure(Memory(1 << 62, 512 * MIB), Memory(0, 100 * MIB))
    now = Memory(400 * MIB, 230 * MIB)
    assert judge.level(now) is Level.SEVERE
    judge.backlog = backlog_bytes([backlogged(110 * MIB), backlogged(50 * MIB, is_drained=True)])
    assert judge.level(now) is Level.ALERT
    assert judge.excess(now) == Memory(0, 20 * MIB)


def test_message_is_not_overdue_because_its_sender_was_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = [100]
    monkeypatch.setattr(accepted, "received_bytes", lambda _: received[0])
    one = connection(unfinished=100)
    one.held_ns = 1_000
    assert not one.is_overdue(5_000)
    one.note_released(3_000)
    resumes_ns = 3_000 + 2_000 + RESUME_NS
    assert not one.is_overdue(resumes_ns - 1)
    assert one.is_overdue(resumes_ns)
    received[0] = 200
    one.sample(4_000, is_caught_up=True, connections=1)  # counts a first message
    received[0] = 300
    one.sample(5_000, is_caught_up=True, connections=1)
    one.sample(6_000, is_caught_up=True, connections=1)
    assert one.unfinished == 100
    assert [one.is_overdue(at_ns) for at_ns in (4_999, 5_000)] == [False, True]


def send_often(raw: socket.socket, message: bytes, count: int) -> None:
    for _ in range(count):
        raw.sendall(message)


def test_flood_of_whole_messages_is_held_and_arrives_in_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # All messages together are too few for a cut, whatever else this process does.
    limits = ConnectionLimits(1 << 20, Memory(1 << 62, 1 << 30))
    count, body = 12, bytes(8 * MIB)
    assert count * len(body) < Pressure(limits.memory, Memory(0, 0)).budget
    message = b"\x02" + len(body).to_bytes(8, "big") + body
    memory.give_back()
    with guarded("tcp://127.0.0.1:0", limits) as (wire, watching), ExitStack() as stack:
        raw = stack.enter_context(attackers.established(wire.endpoint))
        raw.settimeout(None)
        # A plain socket, because ZeroMQ would queue the messages in this process.
        flood = threading.Thread(target=send_often, args=(raw, message, count))
        flood.start()
        stack.callback(flood.join)
        until(lambda: "held back" in caplog.text)
        received = [len(arrived(wire)[-1]) for _ in range(count)]
        assert received == [len(body)] * count
        assert watching.cut == {}
