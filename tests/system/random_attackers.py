"""Random attacks: `python random_attackers.py SEED COUNT BROKER-KEY ENDPOINT…`.

Sends HTTP, old and broken greetings, half handshakes, wrong keys, noise and broken messages to
every endpoint. Some connections stay open, some are reset. Prints `ready` after COUNT attacks, goes
on until its stdin ends, and prints how many there were of each kind.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import zmq

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.system import socket_attackers as plain

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
CURVE = SIGNATURE + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\x04\xc8\x05HELLO\x01\x00"
HELLO_REST_BYTES = 192
INITIATE = b"\x06" + (300).to_bytes(8, "big") + b"\x08INITIATE"
MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20)
MESSAGE = b"\x00\x05hello"

#: Connections that stay open, and sockets with a wrong key.
HELD_MAX = 100

#: The largest pause of a reply that an attack waits for.
WAIT_SECONDS = 0.2

RESET = struct.pack("ii", 1, 0)


def http(rnd: random.Random) -> bytes:
    return b"POST / HTTP/1.1\r\nContent-Length: 9999\r\n\r\n" + rnd.randbytes(rnd.randrange(2_000))


def greeting(rnd: random.Random) -> bytes:
    """Return a greeting of any version and mechanism, with noise behind it."""
    mechanism = rnd.choice(MECHANISMS).ljust(20, b"\0")
    return SIGNATURE + rnd.randbytes(2) + mechanism + bytes(32) + rnd.randbytes(50)


def half_curve(rnd: random.Random) -> bytes:
    words = CURVE + HELLO + bytes(HELLO_REST_BYTES)
    return words[: rnd.randrange(1, len(words))]


def mutated(rnd: random.Random) -> bytes:
    """Return a valid conversation with some bytes changed."""
    words = bytearray(plain.GREETING + plain.READY + 3 * MESSAGE)
    for _ in range(rnd.randrange(1, 5)):
        words[rnd.randrange(len(words))] = rnd.randrange(256)
    return bytes(words)


#: Attacks that send bytes and wait for nothing.
WORDS: dict[str, Callable[[random.Random], bytes]] = {
    "http": http,
    "ZMTP 1": lambda _: b"\x01\x00\x07\x00chosen",
    "ZMTP 2": lambda _: SIGNATURE + b"\x01\x05\x00\x00\x00\x06chosen",
    "greeting": greeting,
    "half of CURVE": half_curve,
    "broken HELLO": lambda rnd: CURVE + HELLO + rnd.randbytes(HELLO_REST_BYTES),
    "INITIATE first": lambda rnd: CURVE + INITIATE + rnd.randbytes(291),
    "noise": lambda rnd: rnd.randbytes(rnd.randrange(1, 5_000)),
    "signed noise": lambda rnd: SIGNATURE + rnd.randbytes(rnd.randrange(1, 5_000)),
    "early message": lambda _: plain.GREETING + plain.READY + 20 * MESSAGE,
    "mutated": mutated,
    "silent": lambda _: b"",
}


def frames(rnd: random.Random) -> bytes:
    """Return frames with any flags, which are commands, parts of messages or errors."""
    parts = [rnd.randbytes(rnd.randrange(60)) for _ in range(50)]
    flags = (0, 1, 1, 2, 4, 5, 8, 255)
    return b"".join(bytes([rnd.choice(flags), len(part)]) + part for part in parts)


#: Attacks that follow a handshake without a key.
AFTERWARDS: dict[str, Callable[[random.Random], bytes]] = {
    "frames": frames,
    "endless": lambda rnd: plain.CHUNK * rnd.randrange(1, 50),
    "announced": lambda _: plain.LARGE_HEADER,
}

WRONG_KEY = "wrong key"
KINDS = (*WORDS, *AFTERWARDS, WRONG_KEY)


class Attacker:
    """Attacks endpoints one after the other."""

    def __init__(self, seed: int, broker: bytes, endpoints: list[str]) -> None:
        self.counts: Counter[str] = Counter()
        self._rnd = random.Random(seed)
        self._broker = broker
        self._endpoints = endpoints
        self._held: deque[socket.socket] = deque()
        self._context = zmq.Context()
        self._wrong: deque[zmq.Socket[bytes]] = deque()

    def attack(self) -> None:
        kind, endpoint = self._rnd.choice(KINDS), self._rnd.choice(self._endpoints)
        self.counts[kind] += 1
        if kind == WRONG_KEY:
            self._connect_with_wrong_key(endpoint)
            return
        with contextlib.suppress(OSError):  # refused or cut
            raw = plain.opened(endpoint) if kind in WORDS else plain.established(endpoint)
            self._held.append(raw)
            raw.settimeout(WAIT_SECONDS)
            words = {**WORDS, **AFTERWARDS}[kind](self._rnd)
            # One byte at a time, or all at once.
            size = 1 if len(words) < len(CURVE) * 4 and self._rnd.random() < 1 / 4 else len(words)
            for start in range(0, len(words), max(1, size)):
                raw.sendall(words[start : start + size])
        self._drop_some()

    def _drop_some(self) -> None:
        while self._held and (len(self._held) > HELD_MAX or self._rnd.random() < 1 / 2):
            raw = self._held.popleft()
            if raw.family == socket.AF_INET and self._rnd.random() < 1 / 2:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            raw.close()

    def _connect_with_wrong_key(self, endpoint: str) -> None:
        wire = self._context.socket(zmq.DEALER)
        wire.setsockopt(zmq.LINGER, 0)
        wire.curve_publickey, wire.curve_secretkey = zmq.curve_keypair()
        wire.curve_serverkey = self._broker
        wire.connect(endpoint)
        self._wrong.append(wire)
        while len(self._wrong) > HELD_MAX:
            self._wrong.popleft().close()


def main(seed: str, count: str, broker: str, *endpoints: str) -> None:
    attacker = Attacker(int(seed), broker.encode(), [*endpoints])
    began, is_reported = time.monotonic(), False
    while not plain.stdin_ended(0):
        attacker.attack()
        is_late = time.monotonic() - began > 10 * plain.ROUND_SECONDS_MAX
        if not is_reported and (attacker.counts.total() >= int(count) or is_late):
            is_reported = True
            plain.report_ready()
    sys.stdout.write(json.dumps(attacker.counts) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
