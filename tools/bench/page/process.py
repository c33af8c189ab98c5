"""The page as a process, and a client that asks it for views as a browser does."""

import http.client
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from msgspec import Struct

from bench.processes import Process, memory_bytes

#: Seconds between two questions whether the page has read the journal, and until it must have.
_POLL_S: Final = 0.2
_READY_S_MAX: Final = 900

#: In the answer of a page that has read the journal of a stopped state.
_NO_BROKER: Final = b"the broker does not answer"


class View(Struct):
    """An answer of the page."""

    body: bytes
    #: By the clock, and of the page's process.
    took_ns: int
    cpu_ns: int

    @property
    def elements(self) -> int:
        """Return the number of elements in its HTML."""
        counter = _Counter()
        counter.feed(self.body.decode())
        return counter.count


class _Counter(HTMLParser):
    count = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002  # of HTMLParser
        self.count += 1


class Page:
    """`taskyard web` on a state directory. Ends with its context."""

    def __init__(self, state: Path) -> None:
        words = ("web", "--state", str(state), "--page", "127.0.0.1:0")
        self._process = Process("taskyard", *words, environment={})
        found = urlsplit(self._process.line().decode().split()[1])
        self._address = (str(found.hostname), found.port)
        with self._ask(f"{found.path}?{found.query}") as response:
            self._headers = {"Cookie": _cookie(response)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()

    def _ask(self, path: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        closes = {"Connection": "close"}  # the connection then ends with its response
        connection.request("GET", path, headers=closes | (headers or {}))
        return connection.getresponse()

    def get(self, path: str) -> View:
        """Ask for a view. Raises RuntimeError if the page refuses."""
        cpu_ns, start_ns = self.cpu_ns(), time.perf_counter_ns()
        with self._ask(path, self._headers) as response:
            body = response.read()
        took_ns = time.perf_counter_ns() - start_ns
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{path}: status {response.status}")
        return View(body, took_ns, self.cpu_ns() - cpu_ns)

    def follow(self) -> http.client.HTTPResponse:
        """Open the stream of changes, as every open page does."""
        return self._ask("/live", self._headers)

    def wait_until_ready(self) -> None:
        """Wait until the page has read the journal, with or without a broker."""
        end = time.monotonic() + _READY_S_MAX
        while not self._has_read():
            self._process.check()
            if time.monotonic() > end:
                raise RuntimeError(f"the page is not ready after {_READY_S_MAX} s")
            time.sleep(_POLL_S)

    def _has_read(self) -> bool:
        with self._ask("/readyz") as response:
            return response.status == http.HTTPStatus.OK or _NO_BROKER in response.read()

    def cpu_ns(self) -> int:
        return self._process.cpu_ns()

    def resident_bytes(self) -> int:
        return memory_bytes(self._process.pid, "VmRSS")


def _cookie(response: http.client.HTTPResponse) -> str:
    found = response.headers["Set-Cookie"]
    if found is None:
        raise RuntimeError(f"the page gave no cookie: status {response.status}")
    return str(found).partition(";")[0]
