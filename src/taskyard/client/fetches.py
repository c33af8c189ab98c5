"""Fetches: long results that are requested part by part before their futures are settled.

A few are fetched at once, the others wait. Has no socket and no thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.client.results import SettableFuture, check_complete, is_last, settle_future
from taskyard.core.model import Result, shown
from taskyard.core.output import Stream
from taskyard.errors import OutputRemoved, OutputTruncated
from taskyard.wire.native import peer, streams

if TYPE_CHECKING:
    from taskyard.core.states import TaskState
    from taskyard.net.channel import Channel
    from taskyard.wire.native.peer import Reply

#: Results fetched at once.
FETCHES_MAX: Final = 4


class Fetch(Struct):
    """A result that is being fetched."""

    name: bytes
    state: TaskState
    future: SettableFuture
    parts: list[bytes] = field(default_factory=list)
    bytes_fetched: int = 0
    attempt: int | None = None


class Fetches:
    """Long results of settled tasks. The thread of the session calls all methods."""

    #: Set by the session before the first turn.
    channel: Channel

    def __init__(self) -> None:
        self.open: dict[int, Fetch] = {}
        self._waiting: deque[Fetch] = deque()

    def start(self, name: bytes, state: TaskState, future: SettableFuture) -> None:
        """Fetch the result of a task, and settle its future then."""
        self._waiting.append(Fetch(name, state, future))
        self._next()

    def on_reply(self, reply: Reply) -> None:
        """Request the next part, or settle the future."""
        fetch = self.open.pop(reply.request)
        if reply.kind != peer.OUTPUT:
            text = reply.reason or f"task {shown(fetch.name)}: its output is gone"
            settle_future(fetch.future.set_exception, OutputRemoved(text))
        else:
            self._add(fetch, reply)
        self._next()

    def _add(self, fetch: Fetch, reply: Reply) -> None:
        page = reply.page
        fetch.parts.append(page.data)
        fetch.bytes_fetched += len(page.data)
        fetch.attempt = page.attempt
        if not is_last(page, fetch.bytes_fetched):
            self._request(fetch)
            return
        try:
            check_complete(shown(fetch.name), page, fetch.bytes_fetched)
        except OutputTruncated as error:
            settle_future(fetch.future.set_exception, error)
        else:
            settle_future(fetch.future.settle, fetch.state, Result(b"".join(fetch.parts)))

    def take_futures(self) -> list[SettableFuture]:
        """Drop all fetches. Return their futures."""
        fetches = [*self.open.values(), *self._waiting]
        self.open.clear()
        self._waiting.clear()
        return [fetch.future for fetch in fetches]

    def _next(self) -> None:
        while self._waiting and len(self.open) < FETCHES_MAX:
            self._request(self._waiting.popleft())

    def _request(self, fetch: Fetch) -> None:
        name, offset, attempt = fetch.name, fetch.bytes_fetched, fetch.attempt
        number = self.channel.request(
            lambda number: streams.output(number, name, Stream.STDOUT, offset, attempt=attempt)
        )
        self.open[number] = fetch
