"""Programs that attack a listener: `python socket_attackers.py KIND ENDPOINT COUNT`.

They speak ZMTP 3 over plain sockets, because libzmq would not send such messages. Each prints
`ready` when its first round is sent, reconnects whenever it is cut off, and ends with its stdin.
Imports nothing of Taskyard, and nothing that is slow to start.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY_BODY = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
READY = b"\x04" + bytes([len(_READY_BODY)]) + _READY_BODY

#: An empty frame with more to come: two bytes on the wire, 64 in libzmq's queue.
EMPTY_WITH_MORE = b"\x01\x00"
CHUNK = EMPTY_WITH_MORE * 16_384

#: A status request in plain dwork. It makes its sender a known peer.
WHOLE_MESSAGE = b"\x01\x00" + b"\x00\x02\x08\x06"

#: The header of a frame of 32 MiB, the largest that a listener takes: libzmq allocates it at once.
LARGE_HEADER = b"\x02" + (32 << 20).to_bytes(8, "big")

#: The beginning of a frame of 64 KiB.
SLOW_MESSAGE = b"\x02" + (64 << 10).to_bytes(8, "big") + bytes(1 << 10)

#: A whole malformed message of 30 MB, and the size of one write.
LARGE_MESSAGE = b"\x01\x00\x02" + (30_000_001).to_bytes(8, "big") + b"\x0a" + b"x" * 30_000_000
PIECE_BYTES = 1 << 20

#: One round of reconnects. Attackers that wait do as much harm, and use less CPU.
ROUND_SECONDS = 0.02

#: After this an attacker counts its first round as sent.
ROUND_SECONDS_MAX = 5.0


def opened(endpoint: str) -> socket.socket:
    """Return a connection before its greeting."""
    kind, _, place = endpoint.partition("://")
    if kind == "ipc":
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(5)
        raw.connect(place)
        return raw
    host, _, port = place.rpartition(":")
    raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    raw.settimeout(5)
    raw.connect((host, int(port)))
    return raw


def established(endpoint: str) -> socket.socket:
    """Return a connection after its handshake."""
    raw = opened(endpoint)
    try:
        raw.sendall(GREETING)
        received = 0
        while received < len(GREETING):
            received += len(_some(raw))
        raw.sendall(READY)
        if received == len(GREETING):
            _some(raw)
    except BaseException:
        raw.close()
        raise
    return raw


def _some(raw: socket.socket) -> bytes:
    found = raw.recv(4_096)
    if not found:
        raise ConnectionResetError
    return found


def silent(endpoint: str) -> socket.socket:
    """Return a connection that sends nothing."""
    return opened(endpoint)


def half_greeting(endpoint: str) -> socket.socket:
    """Return a connection that sent part of a greeting."""
    raw = opened(endpoint)
    raw.sendall(GREETING[:11])
    return raw


def unfinished(endpoint: str) -> socket.socket:
    """Return a connection with 200 kB of a message that never ends."""
    raw = established(endpoint)
    raw.sendall(CHUNK * 6)
    return raw


def announced(endpoint: str) -> socket.socket:
    """Return a connection that announced a large frame and sends none of it."""
    raw = established(endpoint)
    raw.sendall(LARGE_HEADER)
    return raw


def begun(endpoint: str) -> socket.socket:
    """Return a connection that sent the first kilobyte of a message of 64 KiB, like a slow peer."""
    raw = established(endpoint)
    raw.sendall(SLOW_MESSAGE)
    return raw


def known(endpoint: str) -> socket.socket:
    """Return a connection that has sent one whole message."""
    raw = established(endpoint)
    raw.sendall(WHOLE_MESSAGE)
    _some(raw)
    return raw


#: Attacks that hold connections, by how a connection is made.
HOLDERS: dict[str, Callable[[str], socket.socket]] = {
    "silent": silent,
    "half-greeting": half_greeting,
    "established": established,
    "unfinished": unfinished,
    "announced": announced,
    "begun": begun,
}

#: Attacks that stream endless frames, by how a connection is made.
STREAMERS: dict[str, Callable[[str], socket.socket]] = {
    "endless": established,
    "endless-known": known,
}


def report_ready() -> None:
    """Report to the test that the first round is sent."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def stdin_ended(wait_seconds: float) -> bool:
    """Wait up to `seconds` for the end of stdin. Return whether it came."""
    return bool(select.select([sys.stdin], [], [], wait_seconds)[0])


def hold(make: Callable[[str], socket.socket], endpoint: str, count: int) -> None:
    """Keep connections open. Reopen cut ones in the next round."""
    held: dict[int, socket.socket] = {}
    poll = select.poll()
    began, reported = time.monotonic(), False
    for _ in _rounds():
        _forget_cut(poll, held)
        while len(held) < count and not stdin_ended(0):
            try:
                raw = make(endpoint)
            except OSError:
                break  # refused, cut or out of descriptors
            raw.settimeout(0)
            held[raw.fileno()] = raw
            poll.register(raw, select.POLLIN)
            if time.monotonic() - began > ROUND_SECONDS_MAX:
                break
        full = len(held) >= count or time.monotonic() - began > ROUND_SECONDS_MAX
        if full and not reported:
            reported = True
            report_ready()


def _forget_cut(poll: select.poll, held: dict[int, socket.socket]) -> None:
    for number, _ in poll.poll(0):
        with contextlib.suppress(BlockingIOError):
            try:
                if held[number].recv(65_536):
                    continue  # a greeting or an answer: still connected
            except ConnectionError:
                pass
            poll.unregister(number)
            held.pop(number).close()


def _rounds() -> Iterator[None]:
    yield
    while not stdin_ended(ROUND_SECONDS):
        yield


def stream(make: Callable[[str], socket.socket], endpoint: str, count: int) -> None:
    """Send endless frames over each connection until it is cut."""
    streams: list[socket.socket] = []
    began, reported, sent = time.monotonic(), False, 0
    while not stdin_ended(0):
        while len(streams) < count:
            try:
                raw = make(endpoint)
            except OSError:
                break
            raw.settimeout(0)
            streams.append(raw)
        if not streams and stdin_ended(ROUND_SECONDS):
            return
        for raw in select.select([], streams, [], ROUND_SECONDS)[1]:
            try:
                sent += raw.send(CHUNK)
            except BlockingIOError:
                pass
            except OSError:
                raw.close()
                streams.remove(raw)
        # 8 MB of these frames would be 256 MiB in libzmq.
        if not reported and (sent > 8 << 20 or time.monotonic() - began > ROUND_SECONDS_MAX):
            reported = True
            report_ready()


def flood(endpoint: str, count: int) -> None:
    """Send large whole messages over each connection, and read no reply."""
    message = memoryview(LARGE_MESSAGE)
    sent: dict[socket.socket, int] = {}
    began, reported = time.monotonic(), False
    while not stdin_ended(0):
        while len(sent) < count:
            try:
                raw = established(endpoint)
            except OSError:
                break
            raw.settimeout(0)
            sent[raw] = 0
        if not sent and stdin_ended(ROUND_SECONDS):
            return
        for raw in select.select([], sent, [], ROUND_SECONDS)[1]:
            start = sent[raw] % len(message)
            try:
                sent[raw] += raw.send(message[start : start + PIECE_BYTES])
            except BlockingIOError:
                pass
            except OSError:
                raw.close()
                del sent[raw]
        # As much as the broker's memory, or as much as it accepts.
        is_much = sum(sent.values()) > 512 << 20
        if not reported and (is_much or time.monotonic() - began > ROUND_SECONDS_MAX):
            reported = True
            report_ready()


def main(kind: str, endpoint: str, count: str) -> None:
    """Attack until stdin ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if kind == "whole":
        flood(endpoint, int(count))
    elif kind in HOLDERS:
        hold(HOLDERS[kind], endpoint, int(count))
    else:
        stream(STREAMERS[kind], endpoint, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
