"""Malformed messages on a broker's sockets: it replies where it can, and continues."""

from __future__ import annotations

import random
import socket
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from taskyard.wire import dwork_pb2 as pb
from tests.system.kit import Broker
from tests.wire.native.test_malformed import spoilt

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGES = 5_000

#: Messages that are sent before the replies are read. A broker drops replies to a peer that reads
#: none for too long.
PORTION = 200

#: The number of a request that no other message has.
NUMBER = 1 << 40

#: A web page can make a browser send this. ZMTP 1.0 would read "P" as a length of 80.
POST = (
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Pad: ".ljust(79, b"x") + b"\r\n\r\n\x00\x00\x08\x06"
)


def frames_of_noise() -> Iterator[list[bytes]]:
    luck = random.Random(11)
    for body in spoilt(MESSAGES, seed=99):
        shape = luck.randrange(10)
        if shape == 0:
            yield [body]  # no delimiter
        elif shape == 1:
            yield [b"", body, body]
        elif shape == 2:
            yield [b""] * luck.randrange(1, 100)
        else:
            yield [b"", body]
    yield [b""] * 10_000
    yield [b"", b"\x08\x00" + b"\x12\x00" * 2_000_000]
    yield [b"", b""]


def send_all(noise: zmq.Socket[bytes], messages: Iterator[list[bytes]]) -> int:
    """Send messages, and return their number after the broker has handled them all."""
    status = pb.QueryMsg(type=pb.QueryMsg.OK, request=NUMBER).SerializeToString()
    number = status[2:]  # without the type, as in the reply
    count = 0
    while portion := [*islice(messages, PORTION)]:
        count += len(portion)
        for frames in portion:
            noise.send_multipart(frames)
        # Replies come in order: the last one shows that all messages were handled.
        noise.send_multipart([b"", status])
        reply = b""
        while number not in reply:
            assert noise.poll(30_000)
            reply = noise.recv_multipart()[-1]
    return count


def memory_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def test_malformed_messages_cost_the_sender_and_not_the_broker(tmp_path: Path) -> None:
    options = ("--listen", "dwork=tcp://127.0.0.1:0")
    with Broker(tmp_path, *options) as broker, InternalClient(broker.endpoint) as client:
        before = memory_bytes(broker.pid)
        for endpoint in broker.endpoints:
            with zmq.Context() as context, context.socket(zmq.DEALER) as noise:
                noise.linger = 0
                noise.connect(endpoint)
                assert send_all(noise, frames_of_noise()) > MESSAGES
        host, port = urlsplit(broker.endpoints[1]).netloc.split(":")
        for _ in range(20):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(POST)
        # A separate service: some malformed messages register a worker of the default one.
        quiet = [Terms(service=b"quiet")]
        assert client.create(Submission([b"after the noise"], terms=quiet)) == 1
        assert client.show("after the noise")["state"] == "ready"
        assert memory_bytes(broker.pid) - before < 300 * 1024 * 1024
        assert broker.terminate()[0] == 0
