"""Programs that overload a broker by requests: large messages, and unread replies.

python request_attackers.py HOST PORT ATTACK

They speak ZMTP over plain sockets, so that no library reads in the background. A program prints
`sent` when everything is sent, keeps its connections, and ends with its stdin. If the broker stops
reading, the rest is sent in the background.
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import TYPE_CHECKING

from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

Q = pb.QueryMsg
MEGABYTE = 1 << 20

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


def connected(host: str, port: int) -> socket.socket:
    """Return a DEALER after its handshake. It reads nothing more."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, port))
    raw.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
    got = b""
    while len(got) < len(GREETING) + 2 or len(got) < len(GREETING) + 2 + got[65]:
        got += raw.recv(1 if len(got) > len(GREETING) + 1 else len(GREETING) + 2 - len(got))
    return raw


def message(body: bytes) -> bytes:
    """Return a ZMTP message of a delimiter and a body."""
    return b"\x01\x00\x02" + len(body).to_bytes(8, "big") + body


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def delimited(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def columns(kind: pb.QueryMsg.Type, body: bytes) -> bytes:
    query = Q(type=kind, location=b"w", request=7)
    return query.SerializeToString() + delimited(19, b"\x0a\x01a" + body)


# One message that is costly to parse.


def packed(size: int) -> bytes:
    parts = [delimited(number, b"\x01" * (size // 3)) for number in (8, 16, 17)]
    return columns(Q.Complete, b"".join(parts))


def unpacked(size: int) -> bytes:
    return columns(Q.Complete, b"\x40\x01" * (size // 2))


def names_to_wait_for(size: int) -> bytes:
    return columns(Q.Create, b"\x32\x01a" * (size // 3) + b"\x3a\x00")


def names_to_watch(size: int) -> bytes:
    return columns(Q.Watch, b"\x0a\x01a" * (size // 3))


def empty_tasks(size: int) -> bytes:
    return b"\x08\x00" + b"\x12\x00" * (size // 2)


MESSAGES: dict[str, Callable[[int], bytes]] = {
    "packed": packed,
    "unpacked": unpacked,
    "names-to-wait-for": names_to_wait_for,
    "names-to-watch": names_to_watch,
    "empty-tasks": empty_tasks,
}


def list_tasks(number: int) -> bytes:
    return Q(type=Q.List, n=10_000, request=number + 1).SerializeToString()


def explanation(number: int) -> bytes:
    return Q(type=Q.Explain, name=b"task-0000001", request=number + 1).SerializeToString()


#: Requests with unread replies: the request, the number of peers, the requests per peer.
UNREAD: dict[str, tuple[Callable[[int], bytes], int, int]] = {
    "listings": (list_tasks, 1, 3_000),
    "listings-of-many": (list_tasks, 1_000, 4),
    "explanations": (explanation, 1, 1_000),
}


def attack(host: str, port: int, kind: str) -> list[socket.socket]:
    """Connect and send. Return the sockets to keep open."""
    if kind in UNREAD:
        ask, peers, times = UNREAD[kind]
        body = b"".join(message(ask(number)) for number in range(times))
        found = [connected(host, port) for _ in range(peers)]
    else:
        kind, _, count = kind.partition("*")
        body = message(MESSAGES[kind](30 * MEGABYTE))
        found = [connected(host, port) for _ in range(int(count or 1))]
    threads = [threading.Thread(target=one.sendall, args=(body,), daemon=True) for one in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found


if __name__ == "__main__":
    kept = attack(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.write("sent\n")
    sys.stdout.flush()
    sys.stdin.read()
    for one in kept:
        one.close()
