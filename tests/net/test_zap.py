"""Access control: every ZAP request gets a reply, a refusal unless a rule allows."""

import os
import resource
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from taskyard.net import context as zap
from taskyard.net.options import LISTENING_DOMAIN
from taskyard.net.sockets import connect
from tests.net.kit import PYTHON, arrived

HERE = b"localhost:%d:0:4242" % os.getuid()


def question(
    address: bytes, domain: bytes = LISTENING_DOMAIN, mechanism: bytes = b"NULL"
) -> list[bytes]:
    return [b"1.0", b"7", domain, address, b"", mechanism]


@pytest.mark.parametrize("address", [b"127.0.0.1", b"127.8.9.10", b"::1", HERE, b"localhost:0:0:1"])
def test_peer_of_this_machine_and_user_is_admitted(address: bytes) -> None:
    assert zap.zap_reply(question(address)) == [b"1.0", b"7", b"200", b"", b"", b""]


@pytest.mark.parametrize("address", [b"10.0.0.1", b"fe80::1", b"localhost:%d:0:1" % (2**31)])
def test_remote_peer_is_refused(address: bytes) -> None:
    assert zap.zap_reply(question(address))[2:4] == [b"400", b"not from here"]


@pytest.mark.parametrize(
    ("domain", "mechanism"),
    [
        (b"", b"NULL"),
        (b"other", b"NULL"),
        (LISTENING_DOMAIN, b"PLAIN"),
        (LISTENING_DOMAIN, b"CURVE"),
    ],
)
def test_unknown_domain_or_mechanism_is_refused(domain: bytes, mechanism: bytes) -> None:
    reply = zap.zap_reply(question(b"127.0.0.1", domain, mechanism))
    assert reply[2:4] == [b"400", b"unknown domain or mechanism"]


@pytest.mark.parametrize(
    "request_frames",
    [
        [],
        [b"1.0"],
        question(b"127.0.0.1")[:5],
        [b"2.0", *question(b"127.0.0.1")[1:]],
        question(b""),
        question(b"\xff"),
        question(b"localhost"),
    ],
)
def test_malformed_request_is_refused(request_frames: list[bytes]) -> None:
    assert zap.zap_reply(request_frames)[2:4] == [b"500", b"malformed request"]


@given(st.lists(st.binary(max_size=20), max_size=9))
def test_only_a_rule_admits_a_peer(frames: list[bytes]) -> None:
    reply = zap.zap_reply(frames)
    assert len(reply) == 6
    assert reply[2] != b"200"


def test_peer_must_retry_when_descriptors_run_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    for limit, status in ((lowest_free * 4, b"200"), (lowest_free + 1, b"300")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert zap.zap_reply(question(b"127.0.0.1"))[2] == status


def test_peer_must_retry_when_no_descriptor_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError

    monkeypatch.setattr(os, "open", refuse)
    assert zap.zap_reply(question(b"127.0.0.1"))[2:4] == [b"300", b"no descriptor left"]


#: A listener with few descriptors that echoes, and prints how many files it can still open.
CROWDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from taskyard.net.host import Poller
from taskyard.net.sockets import listen
wire = listen(sys.argv[1])
poller = Poller()
poller.add(wire)
poller.add(0)
print("up", flush=True)
while 0 not in poller.wait(None):
    while (frames := wire.receive()) is not None:
        files = [open("/dev/null") for _ in range(10)]
        wire.send(frames)
"""


@pytest.mark.slow
def test_more_peers_than_descriptors_do_not_end_the_listener(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/broker.sock"
    with (
        subprocess.Popen(
            [PYTHON, "-c", CROWDED, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as broker,
        ExitStack() as stack,
    ):
        assert broker.stdout is not None
        assert broker.stdout.readline() == b"up\n"
        served = [stack.enter_context(closing(connect(endpoint))) for _ in range(100)]
        for peer in served:
            peer.send([b"hello"])
        for peer in served:
            assert arrived(peer) == [b"hello"]
        crowd = [stack.enter_context(closing(connect(endpoint))) for _ in range(45)]
        for peer in (*served, *crowd):
            peer.send([b"still there"])
        for peer in served:
            assert arrived(peer) == [b"still there"]
        assert broker.poll() is None
        broker.communicate(b"\n")
        assert broker.returncode == 0


def test_handler_ends_with_its_context() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap.start_zap(context)
    context.term()  # waits until the handler's socket is closed
    assert context.closed
