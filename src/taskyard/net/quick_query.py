"""One question to a broker of this machine and its answer, for whoever has no time: a shell that
completes a word.

Beside `sockets.py`, which imports all that a listener needs and starts a thread that answers ZAP:
together that takes longer than what is asked here. Only ipc, where nobody needs a key.
"""

from __future__ import annotations

from contextlib import closing

import zmq

from taskyard.net.options import CONNECT_OPTIONS, CONTEXT, set_options


def query_once(endpoint: str, body: bytes, wait_ms: int) -> bytes | None:
    """The last frame of the answer; None if there was none in time."""
    with zmq.Context() as context:
        for option, value in CONTEXT.items():
            context.set(option, value)
        with closing(context.socket(zmq.DEALER)) as socket:
            set_options(socket, CONNECT_OPTIONS, is_ipv6=False)
            socket.connect(endpoint)
            socket.send_multipart([b"", body], zmq.NOBLOCK)
            answer = socket.recv_multipart()[-1] if socket.poll(wait_ms) else None
            socket.setsockopt(zmq.LINGER, 0)
            return answer
