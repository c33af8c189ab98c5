"""Fetches: what futures need besides the replies that settle their tasks.

Long results are requested part by part. A failed call's output is requested for its exception. A
few are fetched at once, the others wait. Has no socket and no thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct, field

from taskyard.client.results import SettableFuture, settle_future
from taskyard.core.blobs import Result
from taskyard.core.model import shown
from taskyard.core.output import Stream
from taskyard.errors import BytesDamaged, BytesMissing, BytesTruncated
from taskyard.wire.native import peer, reads

if TYPE_CHECKING:
    from taskyard.client.results import OutputFuture
    from taskyard.core.states import TaskState
    from taskyard.net.channel import Channel
    from taskyard.wire.native.peer import Reply

#: Results fetched at once.
FETCHES_MAX: Final = 4

#: Outputs of failed calls fetched at once. Each fits one message, of 64 KiB at most.
OUTPUTS_MAX: Final = 32


class Fetch(Struct):
    """A result that is being fetched."""

    name: bytes
    state: TaskState
    future: SettableFuture
    pages: reads.StreamPages
    parts: list[bytes] = field(default_factory=list)


class OutputFetch(NamedTuple):
    """The output of a failed call that is being fetched, and the reason of the failure."""

    name: bytes
    result: Result
    future: OutputFuture


class Fetches:
    """Long results and outputs of settled tasks. The thread of the session calls all methods."""

    #: Set by the session before the first turn.
    channel: Channel

    def __init__(self) -> None:
        self.open: dict[int, Fetch | OutputFetch] = {}
        self._waiting: deque[Fetch] = deque()
        self._outputs_waiting: deque[OutputFetch] = deque()
        self._outputs_open = 0

    def start(self, name: bytes, state: TaskState, future: SettableFuture) -> None:
        """Fetch the result of a task, and settle its future then."""
        self._waiting.append(Fetch(name, state, future, reads.StreamPages(shown(name))))
        self._next()

    def start_output(self, name: bytes, result: Result, future: OutputFuture) -> None:
        """Fetch the output of a failed task, and settle its future then."""
        self._outputs_waiting.append(OutputFetch(name, result, future))
        self._next()

    def on_reply(self, reply: Reply) -> None:
        """Request the next part, or settle the future."""
        fetch = self.open.pop(reply.request)
        if isinstance(fetch, OutputFetch):
            self._outputs_open -= 1
            # The failure has its reason without it.
            output = reply.part.data if reply.kind == peer.READ else b""
            settle_future(fetch.future.settle_failed, fetch.result, output)
        elif reply.kind != peer.READ:
            text = reply.reason or f"task {shown(fetch.name)}: its output is gone"
            settle_future(fetch.future.set_exception, BytesMissing(text))
        else:
            self._add(fetch, reply)
        self._next()

    def _add(self, fetch: Fetch, reply: Reply) -> None:
        page = reply.part
        fetch.parts.append(page.data)
        try:
            is_last = fetch.pages.add(page)
        except (BytesDamaged, BytesTruncated) as error:
            settle_future(fetch.future.set_exception, error)
            return
        if is_last:
            settle_future(fetch.future.settle, fetch.state, Result(b"".join(fetch.parts)))
        else:
            self._request(fetch)

    def take_futures(self) -> list[SettableFuture]:
        """Drop all fetches. Return their futures."""
        fetches = [*self.open.values(), *self._waiting, *self._outputs_waiting]
        self.open.clear()
        self._waiting.clear()
        self._outputs_waiting.clear()
        self._outputs_open = 0
        return [fetch.future for fetch in fetches]

    def _next(self) -> None:
        while self._waiting and len(self.open) - self._outputs_open < FETCHES_MAX:
            self._request(self._waiting.popleft())
        while self._outputs_waiting and self._outputs_open < OUTPUTS_MAX:
            self._request_output(self._outputs_waiting.popleft())

    def _request_output(self, fetch: OutputFetch) -> None:
        number = self.channel.request(lambda number: reads.part(number, fetch.name, Stream.STDOUT))
        self.open[number] = fetch
        self._outputs_open += 1

    def _request(self, fetch: Fetch) -> None:
        name, offset = fetch.name, fetch.pages.offset
        number = self.channel.request(lambda number: reads.part(number, name, offset=offset))
        self.open[number] = fetch
