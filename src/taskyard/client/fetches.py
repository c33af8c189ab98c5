"""Fetches: what futures need besides the replies that settle their tasks.

Long results are requested part by part. A failed call's output is requested for its exception. A
few are fetched at once, the others wait. Has no socket and no thread.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from taskyard.client.results import SettableFuture, settle_future
from taskyard.core.blobs import Result
from taskyard.core.model import shown
from taskyard.core.output import Stream
from taskyard.errors import BytesDamaged, BytesMissing, BytesTruncated
from taskyard.wire.native import peer, reads

if TYPE_CHECKING:
    from taskyard.core.states import TaskState
    from taskyard.net.channel import Channel
    from taskyard.wire.native.peer import Reply

#: Results and outputs fetched at once.
FETCHES_MAX: Final = 8


class Fetch(Struct):
    """A result, or the output of a failed call, that is being fetched."""

    name: bytes
    state: TaskState
    future: Any
    #: Of a failed call: the reason of its failure. Its output fits one message, of 64 KiB at most.
    failure: Result | None
    pages: reads.StreamPages
    parts: list[bytes] = field(default_factory=list)


class Fetches:
    """Long results and outputs of settled tasks. The thread of the session calls all methods."""

    #: Set by the session before the first turn.
    channel: Channel

    def __init__(self) -> None:
        self.open: dict[int, Fetch] = {}
        self._waiting: deque[Fetch] = deque()

    def start(
        self,
        name: bytes,
        state: TaskState,
        future: SettableFuture,
        failure: Result | None = None,
    ) -> None:
        """Fetch the result of a task, or the output of a failed one. Settle its future then."""
        self._waiting.append(Fetch(name, state, future, failure, reads.StreamPages(shown(name))))
        self._next()

    def on_reply(self, reply: Reply) -> None:
        """Request the next part, or settle the future."""
        fetch = self.open.pop(reply.request)
        if fetch.failure is not None:
            # The failure has its reason without it.
            output = reply.part.data if reply.kind == peer.READ else b""
            settle_future(fetch.future.settle_failed, fetch.failure, output)
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
        fetches = [*self.open.values(), *self._waiting]
        self.open.clear()
        self._waiting.clear()
        return [fetch.future for fetch in fetches]

    def _next(self) -> None:
        while self._waiting and len(self.open) < FETCHES_MAX:
            self._request(self._waiting.popleft())

    def _request(self, fetch: Fetch) -> None:
        stream = None if fetch.failure is None else Stream.STDOUT
        offset = fetch.pages.offset
        build = partial(reads.part, name=fetch.name, stream=stream, offset=offset)
        self.open[self.channel.request(build)] = fetch
