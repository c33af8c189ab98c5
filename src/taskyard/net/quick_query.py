"""One request to a local broker, for shell completion, which must be fast.

Separate from `sockets.py`, whose imports and ZAP thread take longer than the request itself. Only
for ipc endpoints, which need no key.
"""

from __future__ import annotations

from contextlib import closing

import zmq

from taskyard.net.options import CONNECT_OPTIONS, CONTEXT, set_options


def query_once(endpoint: str, body: bytes, wait_ms: int) -> bytes | None:
    """Send a request and return the last frame of the reply. Return None after `wait_ms`."""
    with zmq.Context() as context:
        for option, value in CONTEXT.items():
            context.set(option, value)
        with closing(context.socket(zmq.DEALER)) as socket:
            set_options(socket, CONNECT_OPTIONS, is_ipv6=False)
            socket.connect(endpoint)
            socket.send_multipart([b"", body], zmq.NOBLOCK)
            reply = socket.recv_multipart()[-1] if socket.poll(wait_ms) else None
            socket.setsockopt(zmq.LINGER, 0)
            return reply
