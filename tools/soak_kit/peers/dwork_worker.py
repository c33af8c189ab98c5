"""A plain dwork worker written from its page: dwork_worker.py ENDPOINT LOCATION LEDGER KIND.

A REQ socket and protobuf by hand: no field of Taskyard's own. KIND is `careful`, which after a lost
reply sends Exit for its location before it steals again, as the page asks of plain peers; or
`careless`, which does so only when it starts. A further argument is the timeout of a reply, in
seconds.
"""

import signal
import sys
import time
from contextlib import suppress

import zmq

from soak_kit.peers.effect import work
from soak_kit.peers.protobuf import COMPLETE, EXIT, STEAL, TRANSFER, query, task, tasks_of, type_of

#: Longer than any suspension of the broker: an abandoned request must not be read later.
REPLY_SECONDS_MAX = "6"

#: Seconds between polls of a broker without tasks.
IDLE_SECONDS = 0.25


class LostReply(Exception):
    """The broker did not answer in time."""


class Connection:
    """REQ sockets, one after the other."""

    def __init__(self, endpoint: str, seconds: str) -> None:
        self._context = zmq.Context()
        self._reply_ms_max = 1_000 * int(seconds)
        self._endpoint = endpoint
        self._socket = self._open()

    def _open(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.REQ)
        socket.linger = 0
        socket.connect(self._endpoint)
        return socket

    def reopen(self) -> None:
        """Drop the open request."""
        self._socket.close()
        self._socket = self._open()

    def ask(self, request: bytes) -> bytes:
        """Send a request and return its reply. Raises LostReply."""
        self._socket.send(request)
        if not self._socket.poll(self._reply_ms_max):
            self.reopen()
            raise LostReply
        return self._socket.recv()


def main(
    endpoint: str, location: str, ledger: str, kind: str, seconds: str = REPLY_SECONDS_MAX
) -> None:
    """Work until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    connection = Connection(endpoint, seconds)
    own = location.encode()
    must_exit = True
    try:
        while True:
            try:
                if must_exit:
                    connection.ask(query(EXIT, location=own))
                    must_exit = False
                steal(connection, own, ledger)
            except LostReply:
                must_exit = must_exit or kind == "careful"
    except SystemExit:
        connection.reopen()
        with suppress(LostReply):
            connection.ask(query(EXIT, location=own))
        raise


def steal(connection: Connection, location: bytes, ledger: str) -> None:
    """Steal one task and complete it. Wait a little if there is none."""
    reply = connection.ask(query(STEAL, location=location))
    if type_of(reply) != TRANSFER:
        time.sleep(IDLE_SECONDS)
        return
    for name, origin in tasks_of(reply):
        work(ledger, location.decode(), name)
        connection.ask(query(COMPLETE, task(name, origin), location=location))


if __name__ == "__main__":
    main(*sys.argv[1:6])
