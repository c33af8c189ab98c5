"""A ping-pong worker that turns each job into capitals: python ping_pong_worker.py ENDPOINT."""
# ruff: noqa: INP001  # it stands alone

import sys

import zmq

context, word, timeouts = zmq.Context(), b"", 3
while word != b"EXIT":
    if timeouts == 3:  # noqa: PLR2004  # the broker is gone, or does not know us any more
        worker = context.socket(zmq.DEALER)
        worker.linger = timeouts = 0
        worker.connect(sys.argv[1])
        worker.send_multipart([b"", b"READY"])
    timeouts = 0 if worker.poll(1000) else timeouts + 1
    if (word := b"PING" if timeouts else worker.recv_multipart()[1]) not in (b"PONG", b"EXIT"):
        worker.send_multipart([b"", word.upper()])
