"""Limits of connections: slow peers, silent readers, and too many of them, at real sockets."""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from taskyard.web import server
from taskyard.web.server import PageServer
from tests.kit.processes import PATIENCE_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message, Receive, Scope, Send

#: What a file sends at once, and how often: more than a kernel keeps.
PART = bytes(64 * 1024)
PARTS = 1000

HALF = b"GET / HTTP/1.1\r\nHost: page\r\nX-Half: "
#: A header without its body.
FORM = b"POST %b HTTP/1.1\r\nHost: page\r\nContent-Length: 1000\r\n\r\n"


def request(path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: page\r\n\r\n".encode()


class Peer(socket.socket):
    """A connection from an address of loopback, with a small buffer."""

    def __init__(self, port: int, sent: bytes, address: str) -> None:
        super().__init__()
        self.settimeout(PATIENCE_SECONDS)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.bind((address, 0))
        self.connect(("127.0.0.1", port))
        self.sendall(sent)

    def status(self) -> int:
        """Return the status of the next answer, or 0 if the connection is closed."""
        with suppress(ConnectionError):
            head = self.recv(12)
            return int(head[9:]) if head else 0
        return 0

    def is_open(self) -> bool:
        """Return whether the server has not closed it. Drop what it has sent."""
        with suppress(ConnectionError):
            return not select.select([self], [], [], 0)[0] or self.recv(1 << 16) != b""
        return False

    def wait_for_end(self) -> None:
        until(lambda: not self.is_open(), "the server closes the connection")

    def drip(self) -> None:
        """Send byte after byte until the server closes the connection."""

        def is_closed() -> bool:
            with suppress(ConnectionError):
                self.send(b"x")
            return not self.is_open()

        until(is_closed, "the server closes the connection")


class App:
    """Answers paths as views do."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path != "/open":
            scope["role"] = "viewer"
        while path == "/form" and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path in ("/stream", "/open"):
            await send(_body(b"x", more=True))
            while (await receive())["type"] != "http.disconnect":
                pass
        for _ in range(PARTS if path == "/parts" else 0):
            await send(_body(PART, more=True))
        await send(_body(b"ok"))


class Page(threading.Thread):
    """The server of the page in a thread."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack
        self._bound = socket.create_server(("127.0.0.1", 0))
        self.server = PageServer(App(), asyncio.Event())

    def run(self) -> None:
        self.server.run([self._bound])

    def connect(self, sent: bytes = b"", address: str = "127.0.0.1") -> Peer:
        """Connect, and wait until the server knows the connection."""
        known = set(self.server.server_state.connections)
        port = self._bound.getsockname()[1]
        peer = self._stack.enter_context(Peer(port, sent, address))
        until(lambda: self.server.server_state.connections - known, "the connection is accepted")
        return peer

    def stream(self, address: str = "127.0.0.1", path: str = "/stream") -> Peer:
        """Connect, and wait until its answer has begun."""
        peer = self.connect(request(path), address)
        assert peer.status() == 200
        return peer


def _body(content: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


@pytest.fixture
def page(caplog: pytest.LogCaptureFixture) -> Iterator[Page]:
    """Serve, and fail if an error was logged."""
    with ExitStack() as stack:
        found = Page(stack)
        found.start()
        stack.callback(found.join)
        stack.callback(setattr, found.server, "should_exit", True)  # noqa: FBT003
        until(lambda: found.server.started, "the page is served")
        yield found
    records = caplog.get_records("call")
    assert [one for one in records if one.levelno >= logging.ERROR] == []


def set_seconds(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Set some limits of time. All others are too long for a test."""
    for name in ("HEADER", "REQUEST", "PART", "ANSWER"):
        value = seconds.get(name.lower(), 10.0 * PATIENCE_SECONDS)
        monkeypatch.setattr(server, f"{name}_SECONDS_MAX", value)


# Slow requests.


@pytest.mark.parametrize("sent", [b"", HALF, request() + HALF], ids=["silent", "first", "next"])
def test_header_that_drips_is_given_up(
    page: Page, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    set_seconds(monkeypatch, header=0.05)
    page.connect(sent).drip()


@pytest.mark.parametrize("path", [b"/form", b"/", b"/stream"], ids=["read", "answered", "stream"])
def test_body_that_drips_is_given_up(
    page: Page, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    set_seconds(monkeypatch, header=0.05, request=0.1)
    page.connect(FORM % path).drip()


def test_body_after_another_request_is_given_up(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seconds(monkeypatch, header=0.05, request=0.1)
    page.connect(request() + FORM % b"/form").drip()


def test_whole_request_may_take_its_time_to_be_answered(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seconds(monkeypatch, header=0.05, request=0.1)
    stream, silent = page.stream(), page.connect(FORM % b"/form")
    silent.drip()
    assert stream.is_open()


# Slow readers.


@pytest.mark.parametrize("part_bytes", [len(PART), len(PART) * PARTS], ids=["file", "view"])
def test_reader_that_stops_is_dropped(
    page: Page, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    set_seconds(monkeypatch, part=0.1)
    monkeypatch.setattr(f"{__name__}.PART", bytes(part_bytes))
    page.connect(request("/parts"))
    until(lambda: not page.server.server_state.connections, "the reader is dropped")


def test_little_is_kept_for_a_reader_that_stops(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seconds(monkeypatch)
    page.connect(request("/parts"))
    (found,) = page.server.server_state.connections
    assert isinstance(found, server.LimitedConnection)
    until(lambda: found.flow.write_paused, "the kernel takes no more")
    assert found.transport.get_write_buffer_size() <= len(PART) + 100


def test_stream_ends_although_it_is_not_read(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    set_seconds(monkeypatch, answer=0.1)
    page.stream().wait_for_end()


# Too many connections.


@pytest.fixture
def small(page: Page, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Serve 8 connections, 4 of an address."""
    set_seconds(monkeypatch)
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 8)
    return page


def test_oldest_without_a_whole_request_is_closed_for_the_newest(small: Page) -> None:
    stream, *halves = small.stream(), *(small.connect(HALF) for _ in range(3))
    assert small.connect(request()).status() == 200
    halves[0].wait_for_end()
    assert [one.is_open() for one in (stream, *halves[1:])] == [True, True, True]


def test_oldest_stream_is_closed_if_there_are_only_streams(small: Page) -> None:
    first, *streams = [small.stream() for _ in range(4)]
    assert small.connect(request()).status() == 200
    first.wait_for_end()
    assert all(one.is_open() for one in streams)


def test_connection_whose_request_is_on_its_way_stays_beside_streams(small: Page) -> None:
    streams = [small.stream() for _ in range(4)]
    late = small.connect()
    small.stream()
    late.sendall(request())
    assert late.status() == 200
    for one in streams[:2]:
        one.wait_for_end()
    assert all(one.is_open() for one in streams[2:])


def test_request_without_a_role_goes_before_streams(small: Page) -> None:
    stream, *probes = small.stream(), *(small.stream(path="/open") for _ in range(3))
    small.stream(path="/open")
    probes[0].wait_for_end()
    assert [one.is_open() for one in (stream, *probes[1:])] == [True, True, True]


def test_connection_counts_from_its_last_answer(small: Page) -> None:
    kept, half = small.connect(request()), small.connect(HALF)
    kept.sendall(request())
    until(lambda: small.server.server_state.total_requests == 2, "both are answered")
    for _ in range(3):
        small.connect(HALF)
    half.wait_for_end()
    assert kept.is_open()


def test_address_takes_no_room_from_others(small: Page) -> None:
    other = small.connect(HALF, "127.0.0.2")
    halves = [small.connect(HALF) for _ in range(5)]
    halves[0].wait_for_end()
    assert all(one.is_open() for one in (other, *halves[1:]))


def test_oldest_of_all_is_closed_if_there_are_too_many(small: Page) -> None:
    halves = [small.connect(HALF, f"127.0.0.{number // 3 + 1}") for number in range(9)]
    halves[0].wait_for_end()
    assert all(one.is_open() for one in halves[1:])


def test_connections_leave_descriptors_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((400, 200), (1 << 20, 512), (resource.RLIM_INFINITY, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert server.connections_max() == most


# Malformed requests.


def test_malformed_rest_of_an_answered_request_closes_quietly(page: Page) -> None:
    peer = page.connect(b"POST / HTTP/1.1\r\nHost: page\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert peer.status() == 200
    peer.sendall(b"no size\r\n")
    peer.wait_for_end()


def test_malformed_request_is_refused(page: Page) -> None:
    peer = page.connect()
    peer.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
    assert peer.status() == 400


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["whole", "half"])
@pytest.mark.parametrize("before", [b"", request()], ids=["first", "next"])
def test_long_header_is_refused(page: Page, before: bytes, end: bytes) -> None:
    peer, found = page.connect(), b""
    peer.sendall(before + HALF + b"a" * server.HEADER_BYTES_MAX + end)
    with suppress(ConnectionError):  # the end is reset if the server has not read everything
        while part := peer.recv(1 << 16):
            found += part
    assert found.count(b" 200 ") == bool(before)
    assert b"The header is longer than 16 KiB.\n" in found
    assert page.server.server_state.total_requests == bool(before)


def test_long_body_is_no_long_header(page: Page) -> None:
    length = 3 * server.HEADER_BYTES_MAX
    head = b"POST /form HTTP/1.1\r\nHost: page\r\nContent-Length: %d\r\n\r\n" % length
    assert page.connect(head + b"a" * length).status() == 200


@pytest.mark.parametrize("path", ["/", "/form", "/stream"])
def test_malformed_body_in_the_same_read_is_refused(page: Page, path: str) -> None:
    """The app of the request, which begins after that, is not in the way of the refusal."""
    head = f"POST {path} HTTP/1.1\r\nHost: page\r\nTransfer-Encoding: chunked\r\n\r\n"
    peer = page.connect()
    peer.sendall(f"{head}no size\r\n".encode())
    assert peer.status() == 400
    peer.wait_for_end()
    until(lambda: not page.server.server_state.tasks, "its app ends")


def test_peer_that_sends_on_is_dropped(page: Page) -> None:
    peer = page.stream()
    (found,) = page.server.server_state.connections
    assert isinstance(found, server.LimitedConnection)
    sent = bytes(server.NEXT_BYTES_MAX + 1)
    found.loop.call_soon_threadsafe(found.data_received, sent)
    peer.wait_for_end()
