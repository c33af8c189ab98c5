"""A ping-pong worker written from its page: ping_pong_worker.py ENDPOINT NAME LEDGER.

It runs jobs in its main thread and sends no PING meanwhile, as the smallest workers do. NAME is
for the ledger alone: a ping-pong worker has none.
"""

import signal
import sys

import zmq

from soak_kit.peers.effect import work

#: Periods of one second without a message of the broker, after which the socket is opened anew.
TIMEOUTS_MAX = 3


def main(endpoint: str, name: str, ledger: str) -> None:
    """Work until EXIT or SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    context = zmq.Context()
    while True:
        socket = context.socket(zmq.DEALER)
        socket.linger = 500
        socket.connect(endpoint)
        socket.send_multipart([b"", b"READY"])
        try:
            if not serve(socket, name, ledger):
                return
        except SystemExit:
            socket.send_multipart([b"", b"DISCONNECT"])
            raise
        finally:
            socket.close()


def serve(socket: zmq.Socket[bytes], name: str, ledger: str) -> bool:
    """Run jobs. Return True if the broker fell silent, False if it sent EXIT."""
    silent = 0
    while silent < TIMEOUTS_MAX:
        if not socket.poll(1000):
            silent += 1
            socket.send_multipart([b"", b"PING"])
            continue
        silent = 0
        word = socket.recv_multipart()[1]
        if word == b"EXIT":
            return False
        if word != b"PONG":
            work(ledger, name, word)
            socket.send_multipart([b"", word])
    return True


if __name__ == "__main__":
    main(*sys.argv[1:4])
