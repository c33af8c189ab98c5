"""Programs of a development version and of this one refuse each other, over real sockets."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import pytest
import zmq

from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import raw_messages
from tests.kit.processes import Broker, Running, run
from tests.wire.native import development_messages as messages

if TYPE_CHECKING:
    from pathlib import Path

Q = pb.QueryMsg
TCP = ("--listen", "dwork=tcp://127.0.0.1:0")
PATIENCE_MS = 60_000


def replies_to(endpoint: str, *bodies: bytes) -> list[bytes]:
    """Send requests by one connection. Return the replies."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger, peer.rcvtimeo = 0, PATIENCE_MS
        peer.connect(endpoint)
        replies = []
        for body in bodies:
            peer.send_multipart([b"", body])
            replies.append(peer.recv_multipart()[1])
        return replies


class DevelopmentBroker:
    """Replies to each message as a broker of a development version does."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._stopping, self._ended = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._stopping.bind("inproc://stop")
        self._ended.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.send(b"")
        self._thread.join()
        self._context.destroy(0)

    def _run(self) -> None:
        while True:
            ready, _, _ = zmq.select([self._socket, self._stopping], [], [])
            if self._stopping in ready:
                return
            route = self._socket.recv_multipart()[0]
            self._socket.send_multipart([route, b"", self._reply])


@pytest.mark.slow
def test_peers_of_a_development_version_get_an_error_and_one_line_in_the_log(
    tmp_path: Path,
) -> None:
    with Broker(tmp_path, *TCP) as broker:
        endpoint = broker.endpoints[1]
        refused = [messages.STEAL, messages.STATS, messages.RELAYED_STEAL, messages.HEARTBEAT]
        plain = Q(type=Q.OK).SerializeToString()
        found = [pb.DevelopmentMsg.FromString(one) for one in replies_to(endpoint, *refused)]
        assert [(one.type, one.request, one.code) for one in found] == [
            (Q.Error, 2, b"forbidden"),
            (Q.Error, 1, b"wire-format"),
            (Q.Error, 0, b"forbidden"),
            (Q.Error, 3, b"forbidden"),
        ]
        assert {one.reason.decode() for one in found} == {raw_messages.PEER_TEXT}
        (reply,) = replies_to(endpoint, plain)
        assert Q.FromString(reply).type == Q.OK
        code, _, err = broker.terminate()
    assert code == 0
    assert [line.partition(" refused: ")[2] for line in err.splitlines() if "peer at" in line] == [
        raw_messages.PEER_TEXT
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (("status", "--json"), messages.NOT_FOUND),
        (("submit", "--json", "--", "true"), messages.NOT_FOUND),
        (("worker", "--name", "w"), messages.HEARTBEAT_REPLY),
    ],
)
def test_program_ends_at_a_broker_of_a_development_version(
    tmp_path: Path, words: tuple[str, ...], reply: bytes
) -> None:
    with DevelopmentBroker(reply) as broker:
        command, *more = words
        code, out, err = run(tmp_path, command, "--broker", broker.endpoint, *more)
    assert (code, out) == (2, "")
    if "--json" not in words:
        assert err == f"taskyard: {raw_messages.BROKER_TEXT}\n"
        return
    error = json.loads(err.splitlines()[-1])["error"]
    assert (error["code"], error["text"]) == ("wire-format", raw_messages.BROKER_TEXT)


@pytest.mark.slow
def test_relay_ends_at_a_broker_of_a_development_version(tmp_path: Path) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(DevelopmentBroker(messages.RELAY_ERROR))
        words = ("relay", *TCP, "--to", f"dwork={broker.endpoint}")
        relay = stack.enter_context(Running(tmp_path, *words))
        ((_, endpoint),) = relay.read_endpoints(1)
        context = stack.enter_context(zmq.Context())
        peer = stack.enter_context(context.socket(zmq.DEALER))
        peer.linger = 0
        peer.connect(endpoint)
        peer.send_multipart([b"", Q(type=Q.OK).SerializeToString()])
        assert relay.end() == (2, "", f"taskyard: {raw_messages.BROKER_TEXT}\n")
