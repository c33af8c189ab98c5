"""A round-robin worker written from its page: lmq_worker.py ENDPOINT NAME LEDGER KIND.

KIND is `original`, which registers once, as the published worker does; `beating`, which also sends
PING, as LMQ does in the background; or `careful`, which sends `ongoing`, and registers again when
the server does not know it and on each new connection.
Messages are run one after the other, so a slot is room in a queue.
"""

import os
import signal
import sys
import time

import zmq

from soak_kit.peers.effect import work
from soak_kit.peers.lmq import (
    DEREGISTER,
    EXEC,
    INCREMENT,
    ONGOING,
    PING,
    REGISTER,
    RESPONSE,
    TRACKEXEC,
    Message,
    Portal,
)

SLOTS = b"4"

#: Seconds between a careful worker's checks that it is still in the table, and between PINGs.
ONGOING_SECONDS = 5.0


def main(endpoint: str, name: str, ledger: str, kind: str) -> None:
    """Work until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    portal = Portal(zmq.Context(), endpoint, f"{name}-{os.getpid()}")
    portal.send(TRACKEXEC, REGISTER, SLOTS)
    asked, ongoing_at, connections = b"", time.monotonic() + ONGOING_SECONDS, 0
    try:
        while True:
            message = portal.receive(1000)
            if message is not None and message.command in (EXEC, TRACKEXEC):
                run(portal, message, name, ledger)
            if message is not None and message.id == asked and message.arguments:
                portal.send(TRACKEXEC, REGISTER, SLOTS)  # the answer was an error
            made = portal.connections()
            if kind == "careful" and made and connections:  # messages may be lost with the last one
                portal.send(EXEC, DEREGISTER, by=b"WORKER")
                portal.send(TRACKEXEC, REGISTER, SLOTS)
            connections += made
            if kind != "original" and time.monotonic() > ongoing_at:
                ongoing_at = time.monotonic() + ONGOING_SECONDS
                asked = portal.send(TRACKEXEC, ONGOING) if kind == "careful" else portal.send(PING)
    finally:
        portal.send(EXEC, DEREGISTER, by=b"WORKER")
        portal.close()


def run(portal: Portal, message: Message, name: str, ledger: str) -> None:
    """Run one message: the last argument is the text, and the result."""
    text = message.arguments[-1]
    work(ledger, name, text)
    if message.command == TRACKEXEC:
        portal.send(RESPONSE, text, by=message.id, to=message.addresses[::-1])
    portal.send(EXEC, INCREMENT)


if __name__ == "__main__":
    main(*sys.argv[1:5])
