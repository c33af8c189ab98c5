"""Watches: which futures are settled by which of the broker's replies.

Owns the choice between a stream and polling. An accepted batch is watched by a stream: the broker
sends results as tasks are settled. A broker allows a peer a limited number of streams. Beyond that,
tasks are polled together until there are enough of them for a stream. Has no socket and no thread.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from taskyard.client.results import SettableFuture, settle_future
from taskyard.core.blobs import Blob, Result
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Stream, shown
from taskyard.core.states import TaskState
from taskyard.errors import BytesDamaged, BytesMissing, BytesTruncated
from taskyard.wire.native import peer, task_contents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.net.channel import Channel
    from taskyard.wire.native.peer import Reply

#: Results and outputs fetched at once.
FETCHES_MAX: Final = 8


class Fetch(Struct):
    """A result, or the output of a failed call, that is being fetched."""

    name: bytes
    state: TaskState
    future: Any
    #: Of a failed call: the reason of its failure. The output fits one message, of 64 KiB at most.
    failure: Result | None
    pages: task_contents.StreamPages
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
        """Fetch the result of a task, or the output of a failed task. Settle its future then."""
        self._waiting.append(
            Fetch(name, state, future, failure, task_contents.StreamPages(shown(name)))
        )
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
        build = partial(task_contents.part, name=fetch.name, stream=stream, offset=offset)
        self.open[self.channel.request(build)] = fetch


#: A stream sends a message at least this often.
STREAM_NS: Final = 20 * SECOND_NS

#: Streams that are opened for any number of tasks. A broker allows far more.
STREAMS_MAX: Final = 200

#: Polled tasks that are worth one more stream. Doubles with every `POLLED_STREAMS_PER_STEP` streams
#: beyond `STREAMS_MAX`, so that few tasks are polled and the broker's limit is never reached.
POLLED_STREAM_TASKS_MIN: Final = 500
POLLED_STREAMS_PER_STEP: Final = 50

#: Tasks per stream of polled tasks: their names, however long, fit one message.
POLLED_STREAM_TASKS_MAX: Final = 20_000

#: How long a poll waits at the broker for a result, and how many tasks it names: their results come
#: in one message.
POLL_NS: Final = SECOND_NS // 2
POLL_TASKS_MAX: Final = 1_000


class Watches:
    """The futures of accepted tasks, by request number.

    Callers append to `requested` under the session's lock. The thread of the session calls all
    methods.
    """

    #: Set by the session before the first turn.
    channel: Channel

    def __init__(self, fetches: Fetches) -> None:
        """Prepare watches. `fetches` gets the results that are too long for a reply."""
        self.fetches = fetches
        #: Fetch long results. Otherwise futures get head and tail.
        self.fetches_long = True
        #: Futures of tasks that were accepted earlier, perhaps from other clients.
        self.requested: deque[dict[bytes, SettableFuture]] = deque()
        #: Futures by the names of their tasks, for each stream and poll.
        self.open: dict[int, dict[bytes, SettableFuture]] = {}
        #: How many tasks a stream names when it is requested again, after a reconnect.
        self._named_count: dict[int, int] = {}
        #: Batches in flight that become streams when they are accepted.
        self._reserved: dict[int, None] = {}
        #: The numbers in `open` that are polls.
        self._polls: dict[int, None] = {}
        #: Tasks for the next poll.
        self.polled: dict[bytes, SettableFuture] = {}

    def may_stream(self) -> bool:
        """Return whether a batch of any size may open a stream."""
        return self._stream_count() < STREAMS_MAX

    def _stream_count(self) -> int:
        return len(self.open) - len(self._polls) + len(self._reserved)

    def reserve(self, number: int) -> None:
        """Count a batch in flight as a stream."""
        self._reserved[number] = None

    def release(self, number: int) -> None:
        """Forget a refused batch."""
        self._reserved.pop(number, None)

    def on_accepted(self, number: int, futures: dict[bytes, SettableFuture]) -> None:
        """Watch the tasks of an accepted batch, by its own stream if one is reserved."""
        if number in self._reserved:
            del self._reserved[number]
            self.open[number] = futures
            self._shrink(number)
        elif futures:
            self._add(futures)

    def start_requested(self) -> None:
        """Watch the tasks that callers requested."""
        while self.requested:
            if futures := self.requested.popleft():
                self._add(futures)

    def poll(self) -> None:
        """Send the next poll, or turn the polled tasks into a stream if they are many."""
        if self._polls:
            return
        polled, self.polled = self.polled, {}
        steps = max(0, self._stream_count() - STREAMS_MAX) // POLLED_STREAMS_PER_STEP
        stream = self.may_stream() or len(polled) >= POLLED_STREAM_TASKS_MIN << steps
        request, size = (
            (self._open_stream, POLLED_STREAM_TASKS_MAX)
            if stream
            else (self._open_poll, POLL_TASKS_MAX)
        )
        items = list(polled.items())
        for first in range(0, len(items), size):
            request(dict(items[first : first + size]))

    def on_reply(self, reply: Reply) -> None:
        """Settle the futures of the tasks in a reply."""
        number = reply.request
        futures = self.open[number]
        for name, state, result in zip(reply.names, reply.states, reply.results, strict=True):
            future = futures.pop(name, None)
            if future is None:
                continue
            if isinstance(result.content, Blob) and result.content.digest and self.fetches_long:
                self.fetches.start(name, state, future)
            elif state is TaskState.FAILED and getattr(future, "wants_output", False):
                self.fetches.start(name, state, future, result)
            else:
                settle_future(future.settle, state, result)
        if not futures or number in self._polls or reply.kind == peer.ERROR:
            del self.open[number]
            self._named_count.pop(number, None)
            self._polls.pop(number, None)
            self.channel.drop(number)
            if futures:
                self._add(futures)
        elif 2 * len(futures) <= self._named_count[number]:
            self._shrink(number)

    def oldest(self) -> bytes | None:
        """Return the name of the task that is watched for the longest time, if there is one."""
        return next(iter(next(iter(self.open.values()), self.polled)), None)

    def names(self, count_max: int) -> Iterator[bytes]:
        """Yield the names of watched tasks, about the oldest first."""
        return islice(chain(*self.open.values(), self.polled), count_max)

    def count(self) -> int:
        """Return how many tasks are watched."""
        return sum(map(len, self.open.values())) + len(self.polled)

    def take_futures(self) -> list[SettableFuture]:
        """Drop all watches. Return their futures."""
        watched = (*self.open.values(), *self.requested, self.polled)
        futures = [future for each in watched for future in each.values()]
        for numbers in (self.open, self._named_count, self._reserved, self._polls):
            numbers.clear()
        self.polled.clear()
        self.requested.clear()
        return futures

    def _add(self, futures: dict[bytes, SettableFuture]) -> None:
        # A task with two futures needs two watches.
        if self.may_stream() or not self.polled.keys().isdisjoint(futures):
            self._open_stream(futures)
        else:
            self.polled.update(futures)

    def _open_stream(self, futures: dict[bytes, SettableFuture]) -> None:
        names = list(futures)
        number = self.channel.request(
            lambda number: peer.watch(number, names, stream=True), STREAM_NS, stream=True
        )
        self.open[number] = futures
        self._named_count[number] = len(names)

    def _open_poll(self, futures: dict[bytes, SettableFuture]) -> None:
        names = list(futures)
        number = self.channel.request(
            lambda number: peer.watch(number, names, wait_ns=POLL_NS), POLL_NS
        )
        self.open[number] = futures
        self._polls[number] = None

    def _shrink(self, number: int) -> None:
        """Name only the unsettled tasks, without payloads, when the stream is requested again."""
        futures = self.open[number]
        self._named_count[number] = len(futures)
        self.channel.replace(number, peer.watch(number, list(futures), stream=True))
