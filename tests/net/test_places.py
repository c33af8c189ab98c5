"""One broker at several places: which one is used, when it changes, and what is kept."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused, UserError
from taskyard.net import options, sockets, zmq_socket
from taskyard.net.endpoints import Tcp, parse, parse_addresses, peer_endpoint
from taskyard.net.host import Poller
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey, make_secret, read_peer_key
from taskyard.net.options import MESSAGES_WAITING_MAX
from taskyard.net.sockets import connect, connect_by_name, listen
from taskyard.net.zmq_socket import ACCEPT_CHECK_NS, SILENT_CHECKS, FailoverSocket
from taskyard.wire.roles import Role
from tests.net.kit import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from taskyard.net.zmq_socket import CountingSocket, ZmqSocket

#: A slow network passes so many bytes in so many seconds. The message takes 2 s.
SLOW_BYTES, SLOW_SECONDS = 16 << 10, 0.05
LARGE_BYTES = 40 * SLOW_BYTES

#: Replies to all messages, at an endpoint that it prints.
ECHO = """
import sys
from taskyard.net.host import Poller
from taskyard.net.sockets import listen
wire = listen(sys.argv[1])
print(wire.endpoint, flush=True)
poller = Poller()
poller.add(wire)
while True:
    poller.wait(None)
    while (frames := wire.receive()) is not None:
        wire.send(frames)
"""


def free_place() -> str:
    """Return a TCP endpoint where no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def drive(wire: ZmqSocket, is_over: Callable[[], object], seconds: float = PATIENCE_S) -> float:
    """Poll a socket until something holds, as a peer's loop does. Return how long it took."""
    poller = Poller()
    poller.add(wire)
    start = time.monotonic()
    while not is_over():
        assert time.monotonic() - start < seconds
        poller.wait(SECOND_NS // 20)
    poller.remove(wire)
    return time.monotonic() - start


def say(listener: ZmqSocket, peer: ZmqSocket, text: bytes) -> None:
    """Send a message to a listener and back."""
    assert peer.send([text])
    drive(peer, listener.is_readable)
    frames = listener.receive()
    assert frames is not None
    assert frames[1:] == [text]
    assert listener.send(frames)
    drive(peer, peer.is_readable)
    assert peer.receive() == [text]


@contextmanager
def echo(endpoint: str = "tcp://127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", ECHO, endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_plus_separates_places_of_one_broker() -> None:
    given = "tcp://a.example:1+ipc:///run/x+y+tcp://LOCALHOST:2+tcp://A.example:1"
    assert peer_endpoint(given) == "tcp://a.example:1+ipc:///run/x+y+tcp://127.0.0.1:2"
    assert len(parse_addresses("tcp://127.0.0.1:1")) == 1
    with pytest.raises(UserError, match="several addresses, expected one"):
        parse("tcp://127.0.0.1:1+tcp://127.0.0.1:2")
    for wrong in ("tcp://127.0.0.1:1+", "+tcp://127.0.0.1:1", "tcp://127.0.0.1:0+tcp://h:1"):
        with pytest.raises(UserError, match="endpoint"):
            peer_endpoint(wrong)


def test_broker_is_found_where_it_is_and_found_again_where_it_goes() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(listen("tcp://127.0.0.1:0")))
        other = free_place()
        peer = connect(f"{other}+{first.endpoint}+{free_place()}", counts=True)
        stack.enter_context(closing(peer))
        assert not peer.address
        say(first, peer, b"one")
        assert (peer.address, peer.connections()) == (first.endpoint, 1)
        first.close()
        drive(peer, lambda: not peer.is_connected())
        assert peer.send([b"queued"])
        second = stack.enter_context(closing(listen(other)))
        assert drive(peer, second.is_readable) < 1
        assert second.receive()[1:] == [b"queued"]  # type: ignore[index]
        say(second, peer, b"two")
        assert (peer.address, peer.connections()) == (other, 2)


def test_socket_uses_one_of_two_live_places() -> None:
    with ExitStack() as stack:
        one, two = (stack.enter_context(closing(listen("tcp://127.0.0.1:0"))) for _ in range(2))
        peer = stack.enter_context(closing(connect(f"{one.endpoint}+{two.endpoint}")))
        drive(peer, peer.is_connected)
        used, idle = (one, two) if peer.address == one.endpoint else (two, one)
        for number in range(4):
            say(used, peer, b"%d" % number)
        assert idle.receive() is None


def test_absent_places_delay_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(closing(listen("tcp://127.0.0.1:0")))
        # Its queue is full, so that the kernel drops the packets of further connections.
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = f"tcp://127.0.0.1:{full.getsockname()[1]}"
        for _ in range(3):
            raw = stack.enter_context(socket.socket())
            raw.settimeout(0)
            raw.connect_ex(full.getsockname())
        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        names = [place, silent, free_place(), f"ipc://{tmp_path}/none", listener.endpoint]
        peer = stack.enter_context(closing(connect("+".join(names))))
        assert drive(peer, peer.is_connected) < 0.5
        say(listener, peer, b"hello")


def test_name_that_does_not_resolve_is_an_absent_place(ring: Keyring, guest: PeerKey) -> None:
    with closing(listen("tcp://127.0.0.1:0", ring)) as listener:
        endpoint = f"tcp://no-such-host.invalid:6125+{listener.endpoint}"
        with closing(connect(endpoint, guest)) as peer:
            drive(peer, peer.is_connected)
            say(listener, peer, b"hello")


#: Connects to a place whose name server does not answer, and to one that listens.
SLOW_NAME = """
import sys, time
from pathlib import Path
from taskyard.net.keyring import Keyring
from taskyard.net.keys import read_peer_key
from taskyard.net.host import Poller
from taskyard.net.sockets import connect, listen
listener = listen("tcp://127.0.0.1:0", Keyring(Path(sys.argv[1])))
key = read_peer_key(Path(sys.argv[2]))
began = time.monotonic()
peer = connect(f"tcp://head.example:6125+{listener.endpoint}", key)
poller = Poller()
poller.add(peer)
while not peer.is_connected():
    poller.wait(10**9)
print(time.monotonic() - began)
"""


#: The resolver's own maximum.
SLOW_ANSWER_S = 30


@pytest.mark.needs("own name server")
def test_slow_name_server_delays_no_other_place(ring: Keyring, tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text(
        f"nameserver 127.9.9.9\noptions timeout:{SLOW_ANSWER_S}\n"
    )
    mount = f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    words = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    words += [sys.executable, "-c", SLOW_NAME, str(ring.state), str(tmp_path / "guest.key")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.9.9.9", 53))
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    assert float(done.stdout) < SLOW_ANSWER_S


@pytest.fixture
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a silent broker after 1 s."""
    monkeypatch.setattr(zmq_socket, "CHECK_NS", SECOND_NS // 5)
    monkeypatch.setattr(options, "FAILOVER_HEARTBEAT_MS", 200)


def test_stopped_process_is_left_for_another_place() -> None:
    other = free_place()
    with echo() as (process, first), closing(connect(f"{first}+{other}")) as peer:
        drive(peer, peer.is_connected)
        with closing(listen(other)) as second:
            process.send_signal(signal.SIGSTOP)
            passed = drive(peer, lambda: peer.address == other)
            assert passed < (zmq_socket.SILENT_CHECKS + 3) * zmq_socket.CHECK_NS / SECOND_NS
            say(second, peer, b"on")
            process.send_signal(signal.SIGCONT)
            say(second, peer, b"still here")


@pytest.mark.usefixtures("_quick_checks")
def test_silent_broker_without_another_place_is_kept_and_used_when_it_answers() -> None:
    with echo() as (process, first), closing(connect(f"{first}+{free_place()}")) as peer:
        drive(peer, peer.is_connected)
        process.send_signal(signal.SIGSTOP)
        drive(peer, lambda: not peer.is_connected())
        assert peer.address == first
        assert peer.send([b"kept"])
        process.send_signal(signal.SIGCONT)
        drive(peer, peer.is_readable)
        assert peer.receive() == [b"kept"]
        assert peer.connections() == 1


@pytest.mark.usefixtures("_quick_checks")
def test_broker_that_restarts_before_its_loss_is_noticed_is_not_silent() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(listen("tcp://127.0.0.1:0")))
        peer = connect(f"{first.endpoint}+{free_place()}")
        stack.enter_context(closing(peer))
        say(first, peer, b"one")
        assert isinstance(peer, FailoverSocket)
        first.close()
        assert peer.monitors[0].poll(PATIENCE_S * 1000)
        for _ in range(50):  # the next connection has another descriptor
            stack.callback(os.close, os.dup(0))
        second = stack.enter_context(closing(listen(first.endpoint)))
        monitor = second.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert monitor.poll(PATIENCE_S * 1000)
        second.socket.disable_monitor()
        monitor.close()
        ends = time.monotonic() + 2 * (SILENT_CHECKS + 1) * zmq_socket.CHECK_NS / SECOND_NS
        drive(peer, lambda: time.monotonic() > ends)
        assert (peer.is_connected(), peer.connections()) == (True, 2)
        say(second, peer, b"two")


@contextmanager
def slow_network(endpoint: str) -> Iterator[str]:
    """Yield an endpoint that passes few bytes a second to another one and back."""
    place = parse(endpoint)
    assert isinstance(place, Tcp)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(SLOW_BYTES):
                target.sendall(part)
                time.sleep(SLOW_SECONDS * len(part) / SLOW_BYTES)

    def run() -> None:
        with suppress(OSError):
            accepted, _ = listener.accept()
            opened = socket.create_connection(place)
            for pair in ((accepted, opened), (opened, accepted)):
                stack.callback(pair[0].close)
                threading.Thread(target=copy, args=pair, daemon=True).start()

    with ExitStack() as stack:
        stack.callback(listener.close)
        threading.Thread(target=run, daemon=True).start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("is_upload", [True, False])
@pytest.mark.usefixtures("_quick_checks")
def test_large_message_on_a_slow_network_is_no_silence(*, is_upload: bool) -> None:
    """Heartbeats are behind the message. The other place would be used after a false alarm."""
    message, other = bytes(LARGE_BYTES), free_place()
    with ExitStack() as stack:
        listener = stack.enter_context(closing(listen("tcp://127.0.0.1:0")))
        place = stack.enter_context(slow_network(listener.endpoint))
        peer = stack.enter_context(closing(connect(f"{place}+{other}")))
        say(listener, peer, b"hello")
        stack.enter_context(closing(listen(other)))
        assert peer.send([message if is_upload else b"send it"])
        seconds = drive(peer, listener.is_readable)
        frames = listener.receive()
        assert frames is not None
        listener.send([frames[0], b"done" if is_upload else message])
        seconds += drive(peer, peer.is_readable)
        assert seconds > SILENT_CHECKS / 5, "it was not slow"
        assert (peer.address, peer.connections()) == (place, 1)


def test_local_places(tmp_path: Path) -> None:
    one, two = f"ipc://{tmp_path}/one", f"ipc://{tmp_path}/two"
    with closing(listen(two)) as second, closing(connect(f"{one}+{two}")) as peer:
        say(second, peer, b"second")
        with closing(listen(one)) as first:
            second.close()
            drive(peer, lambda: peer.address == one)
            say(first, peer, b"first")


def test_router_addresses_its_broker_by_all_places() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(listen("tcp://127.0.0.1:0", is_named=True)))
        other = free_place()
        peer = stack.enter_context(closing(connect_by_name(f"{first.endpoint}+{other}", "me")))
        address = peer.endpoint.encode()
        for place in (first.endpoint, other):
            listener = first
            if place == other:
                first.close()
                drive(peer, lambda: not peer.is_connected())
                listener = stack.enter_context(closing(listen(other, is_named=True)))
            assert peer.send([address, b"to", b"broker"])
            drive(peer, listener.is_readable)
            assert listener.receive() == [f"{first.endpoint}:me".encode(), b"to", b"broker"]
            assert listener.send([f"{first.endpoint}:me".encode(), b"to", b"peer"])
            drive(peer, peer.is_readable)
            assert peer.receive() == [address, b"to", b"peer"]


@pytest.mark.usefixtures("_quick_checks")
def test_place_without_a_free_descriptor_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_place(), free_place()
    dial, opened = sockets._dial, []  # noqa: SLF001  # to fail like ZeroMQ without descriptors

    def fail_at_times(*given: Any) -> CountingSocket:
        opened.append(given)
        if len(opened) == 2:
            raise zmq.ZMQError(errno.EMFILE)
        return dial(*given)

    monkeypatch.setattr(sockets, "_dial", fail_at_times)
    with closing(listen(second)) as listener, closing(connect(f"{first}+{second}")) as peer:
        drive(peer, peer.is_connected)
        say(listener, peer, b"hello")
        assert len(opened) == 3


def test_queue_of_a_socket_without_a_broker_is_limited() -> None:
    with closing(connect(f"{free_place()}+{free_place()}")) as peer:
        for _ in range(MESSAGES_WAITING_MAX):
            assert peer.send([b"x"])
        assert not peer.send([b"x"])
        assert peer.is_full


def test_closed_socket_is_silent() -> None:
    with closing(listen("tcp://127.0.0.1:0")) as listener:
        peer = connect(f"{listener.endpoint}+{free_place()}")
        drive(peer, peer.is_connected)
        peer.close()
        peer.close()
        assert (peer.receive(), peer.is_connected(), peer.address) == (None, False, "")


# Keys.


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    ring = Keyring(tmp_path / "state")
    ring.create("guest", Role.VIEWER, tmp_path / "guest.key")
    return ring


@pytest.fixture
def guest(ring: Keyring) -> PeerKey:
    return read_peer_key(ring.state.parent / "guest.key")


def test_place_that_refuses_the_key_is_skipped(
    ring: Keyring, guest: PeerKey, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        strange = Keyring(tmp_path / "strange")
        strange.create("other", Role.VIEWER, tmp_path / "other.key")
        first = stack.enter_context(closing(listen("tcp://127.0.0.1:0", strange)))
        second = stack.enter_context(closing(listen("tcp://127.0.0.1:0", ring)))
        peer = connect(f"{first.endpoint}+{second.endpoint}", guest)
        stack.enter_context(closing(peer))
        say(second, peer, b"hello")
        peer.check_accepted(ACCEPT_CHECK_NS + 1)
        assert second.user == guest.secret.public()


def test_key_that_all_places_refuse_is_an_error(ring: Keyring) -> None:
    key = PeerKey("guest", (Role.ADMIN,), make_secret(), ring.secret().public())
    with ExitStack() as stack:
        both = [stack.enter_context(closing(listen("tcp://127.0.0.1:0", ring))) for _ in range(2)]
        peer = connect("+".join(one.endpoint for one in both), key)
        stack.enter_context(closing(peer))
        with pytest.raises(Refused, match=r"tcp://\S+\+tcp://\S+: key 'guest' is unknown"):
            drive(peer, lambda: peer.check_accepted(ACCEPT_CHECK_NS + 1))


def test_key_that_the_only_present_place_refuses_is_an_error_in_the_end(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_socket, "REFUSED_NS", SECOND_NS // 2)
    key = PeerKey("guest", (Role.ADMIN,), make_secret(), ring.secret().public())
    with ExitStack() as stack:
        listener = stack.enter_context(closing(listen("tcp://127.0.0.1:0", ring)))
        peer = connect(f"{free_place()}+{listener.endpoint}", key)
        stack.enter_context(closing(peer))
        with pytest.raises(Refused, match=f"{listener.endpoint}: key 'guest' is unknown"):
            drive(peer, lambda: peer.check_accepted(ACCEPT_CHECK_NS + 1))


def test_place_on_another_machine_needs_a_key() -> None:
    with pytest.raises(UserError, match="a broker on another machine needs a key"):
        connect("ipc:///run/x+tcp://192.0.2.1:6125")
