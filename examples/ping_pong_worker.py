"""A ping-pong worker that turns each job into capitals: python ping_pong_worker.py ENDPOINT."""
# ruff: noqa: INP001  # it stands alone

import sys

import zmq

word = b""
worker = zmq.Context().socket(zmq.DEALER)
worker.connect(sys.argv[1])
worker.send_multipart([b"", b"READY"])
while word != b"EXIT":
    if not worker.poll(1000):
        worker.send_multipart([b"", b"PING"])
    elif (word := worker.recv_multipart()[1]) not in (b"PONG", b"EXIT"):
        worker.send_multipart([b"", word.upper()])
