"""Attacks on the page of a process with few descriptors: its probes are answered meanwhile."""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
from collections import deque
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("Linux"),
]

DESCRIPTORS = 400
#: More than the process has descriptors.
HALF_SENT = 900

HALF = b"GET / HTTP/1.1\r\nHost: page\r\nX-Half: "

#: Kubernetes and Docker wait for 5 s.
PROBE_SECONDS = 4.0

#: Half-sent requests stay, so that time alone helps no probe. The last part is a planted bug.
PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from taskyard.cli import main
from taskyard.web import server
server.HEADER_SECONDS_MAX = 1e6
%s
main()
"""
NO_ROOM_IS_MADE = "server._make_room = lambda newest: None"


def patience() -> float:
    """Return how long a probe may wait, scaled by the load of the machine."""
    return PROBE_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Page(Running):
    """A page of a broker in the same directory."""

    def __init__(self, directory: Path, planted: str = "") -> None:
        program = (sys.executable, "-c", PROGRAM % planted)
        super().__init__(directory, "web", "--page", "127.0.0.1:0", program=program)
        self.address = urlsplit(self.line().removeprefix("page "))
        until(lambda: self.get("/readyz", PATIENCE_SECONDS)[0] == 200, "the page is ready")

    def get(self, path: str, seconds: float, cookie: str = "") -> tuple[int, str]:
        """Return the status and the cookie of an answer."""
        connection = HTTPConnection(self.address.netloc, timeout=seconds)
        try:
            connection.request("GET", path, headers={"Cookie": cookie})
            reply = connection.getresponse()
            return reply.status, (reply.headers["set-cookie"] or "").partition(";")[0]
        finally:
            connection.close()

    def probes(self, seconds: float) -> list[int]:
        """Return the statuses of both probes. Raises TimeoutError."""
        return [self.get(path, seconds)[0] for path in ("/healthz", "/readyz")]

    def connect(self, stack: ExitStack, sent: bytes) -> socket.socket:
        """Connect and send. The end of the stack resets the connection."""
        peer = stack.enter_context(socket.socket())
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.settimeout(PATIENCE_SECONDS)
        peer.connect((self.address.hostname, self.address.port))
        peer.sendall(sent)
        return peer

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Let this process have as many peers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("state")
    with Broker(found, stderr=None):
        yield found


@pytest.fixture
def page(directory: Path) -> Iterator[Page]:
    """Serve a page. It keeps no descriptor of a peer, and logs no traceback."""
    with Page(directory) as found:
        before = found.descriptors()
        yield found
        until(lambda: found.descriptors() <= before + 1, "connections are closed")
        assert "Traceback" not in found.terminate()[2]


def test_probe_is_answered_beside_half_sent_requests(page: Page) -> None:
    with ExitStack() as stack:
        for _ in range(HALF_SENT):
            page.connect(stack, HALF)
        assert page.probes(patience()) == [200, 200]
        assert page.descriptors() < DESCRIPTORS * 3 // 4


def test_planted_bug_a_probe_behind_a_full_queue(directory: Path) -> None:
    """The test above fails without the limits, and refused connections are lines of the log."""
    with Page(directory, NO_ROOM_IS_MADE) as page, ExitStack() as stack:
        for _ in range(HALF_SENT):
            page.connect(stack, HALF)
        with pytest.raises(TimeoutError):
            page.probes(PROBE_SECONDS)
        stack.close()
        until(lambda: page.get("/healthz", PATIENCE_SECONDS)[0] == 200, "all have left")
        logged = page.terminate()[2]
        assert 'connection refused reason="Too many open files"' in logged
        assert "socket.accept()" not in logged


def test_probe_is_answered_beside_unread_streams(page: Page) -> None:
    _, cookie = page.get(f"/?{page.address.query}", PATIENCE_SECONDS)
    head = f"Host: {page.address.netloc}\r\nCookie: {cookie}\r\n\r\n"
    with ExitStack() as stack:
        for number in range(300):
            path = ("/live", "/")[number % 2]
            page.connect(stack, f"GET {path} HTTP/1.1\r\n{head}".encode())
        assert page.probes(patience()) == [200, 200]


def test_form_that_ends_early_is_no_error_of_the_page(page: Page) -> None:
    _, cookie = page.get(f"/?{page.address.query}", PATIENCE_SECONDS)
    host = page.address.netloc
    head = f"Host: {host}\r\nOrigin: http://{host}\r\nCookie: {cookie}\r\n"
    sent = f"POST /tasks/actions HTTP/1.1\r\n{head}Content-Length: 100\r\n\r\naction="
    with ExitStack() as stack:
        page.connect(stack, sent.encode())
        assert page.probes(patience()) == [200, 200]


@pytest.mark.parametrize("number", [2_000, pytest.param(20_000, marks=pytest.mark.whole)])
def test_probe_is_answered_beside_connections_that_come_and_go(page: Page, number: int) -> None:
    stacks: deque[ExitStack] = deque()
    for count in range(number):
        stacks.append(ExitStack())
        page.connect(stacks[-1], HALF)
        if len(stacks) > HALF_SENT:
            stacks.popleft().close()
        if count % 1000 == 999:
            assert page.probes(patience()) == [200, 200]
    while stacks:
        stacks.pop().close()
