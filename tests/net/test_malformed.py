"""Bytes that are not ZMTP 3 never become a message at any endpoint, and harm no other peer."""

import random
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from taskyard.net import options
from taskyard.net.sockets import listen
from taskyard.net.zmq_socket import ZmqSocket
from tests.net.kit import arrived, peers, raw_connection, read_exactly, read_to_end

#: Bytes that a web page could make a browser send, padded to fit ZMTP 1.0. The first byte, P, is
#: the length of the first frame: 80 bytes follow, which are read as the sender's identity.
HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Padding: "
PADDED_HEAD = HEAD.ljust(77, b"x") + b"\r\n\r\n"
CHOSEN_FRAME = b"\x07\x00chosen"

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
ZMTP_3_GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


def ready(kind: bytes) -> bytes:
    """Return the command that ends a handshake of ZMTP 3."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\x04" + bytes([len(body)]) + body


READY = ready(b"DEALER")
#: A ROUTER sends its routing id, too, and has none.
READY_BACK = ready(b"ROUTER") + b"\x08Identity" + bytes(4)

NOISE = random.Random(6125)

JUNK = {
    "plain POST": b"POST / HTTP/1.1\r\nContent-Length: 8\r\n\r\n" + CHOSEN_FRAME,
    "padded POST": PADDED_HEAD + CHOSEN_FRAME,
    "GET": b"GET / HTTP/1.1\r\n\r\n" + bytes(200),
    "ZMTP 1.0": b"\x01\x00" + CHOSEN_FRAME,
    "ZMTP 2.0": SIGNATURE + b"\x01\x05\x00\x00" + b"\x00\x06chosen",
    "half a greeting": SIGNATURE[:5],
    "a greeting and no more": ZMTP_3_GREETING,
    "nothing at all": b"",
    "a message before READY": ZMTP_3_GREETING + b"\x00\x06chosen",
    "another mechanism": ZMTP_3_GREETING.replace(b"NULL\0", b"PLAIN") + READY + b"\x00\x06chosen",
    "a socket of another kind": ZMTP_3_GREETING + ready(b"PUB") + b"\x00\x06chosen",
    "a frame over the limit": ZMTP_3_GREETING + READY + b"\x02" + (1 << 40).to_bytes(8, "big"),
    **{f"noise {number}": NOISE.randbytes(300) for number in range(10)},
    **{f"signed noise {number}": SIGNATURE + NOISE.randbytes(300) for number in range(10)},
}


def say(raw: socket.socket, words: bytes) -> None:
    """Send bytes in turn with the other side, as ZMTP 3 requires, as far as they are valid."""
    for part, answer_bytes in ((ZMTP_3_GREETING, len(ZMTP_3_GREETING)), (READY, len(READY_BACK))):
        if words.startswith(part) and words != part:
            raw.sendall(part)
            read_exactly(raw, answer_bytes)
            words = words.removeprefix(part)
    raw.sendall(words)


@pytest.fixture(params=["tcp", pytest.param("tcp6", marks=pytest.mark.needs("IPv6")), "ipc"])
def listener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ZmqSocket]:
    # The timeout of a handshake, shortened from three seconds.
    monkeypatch.setitem(options.LISTEN_OPTIONS, zmq.SocketOption.HANDSHAKE_IVL, 300)
    endpoints = {
        "tcp": "tcp://127.0.0.1:0",
        "tcp6": "tcp://[::1]:0",
        "ipc": f"ipc://{tmp_path}/broker.sock",
    }
    with closing(listen(endpoints[request.param])) as wire:
        yield wire


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_malformed_peer_is_disconnected_and_a_valid_one_served(
    listener: ZmqSocket, junk: bytes
) -> None:
    with raw_connection(listener.endpoint) as raw:
        say(raw, junk)
        assert b"chosen" not in read_to_end(raw)
    assert listener.receive() is None
    with peers(listener) as (peer, route):
        assert listener.send([route, b"welcome"])
        assert arrived(peer) == [b"welcome"]
    assert listener.receive() is None


def test_many_malformed_peers_do_not_block_a_valid_one(listener: ZmqSocket) -> None:
    raws = [raw_connection(listener.endpoint) for _ in JUNK]
    for raw, junk in zip(raws, JUNK.values(), strict=True):
        say(raw, junk)
    with peers(listener):
        assert listener.receive() is None
    for raw in raws:
        read_to_end(raw)
        raw.close()
    assert listener.receive() is None


def test_message_of_a_valid_raw_peer_is_received(listener: ZmqSocket) -> None:
    """Shows that the bytes above are refused because they are malformed."""
    with raw_connection(listener.endpoint) as raw:
        say(raw, ZMTP_3_GREETING + READY + b"\x00\x06chosen")
        assert arrived(listener)[1:] == [b"chosen"]


@pytest.mark.parametrize("name", ["padded POST", "ZMTP 1.0", "ZMTP 2.0"])
def test_plain_router_receives_them_as_messages(name: str) -> None:
    """Shows the result of the tests above without ZAP."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with raw_connection(f"tcp://127.0.0.1:{port}") as raw:
            raw.sendall(JUNK[name])
            assert router.recv_multipart()[1:] == [b"chosen"]


def test_padded_head_has_the_length_of_its_first_byte() -> None:
    assert len(PADDED_HEAD) == 81 == PADDED_HEAD[0] + 1
