"""The session: the thread that owns a client's connection to the broker.

Callers on any thread leave tasks, requests and watches. The thread sends them, and routes each
reply by its number to the buffer, the pending requests or the watches. A request is sent once all
tasks that were submitted before it are acknowledged, so a caller finds the task that it just
submitted. Does not import futures or clients.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import Future as AnyFuture
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from taskyard.campaign.batches import task_bytes
from taskyard.client import discovery
from taskyard.client.results import SettableFuture, settle_future
from taskyard.client.task_buffer import TaskBuffer
from taskyard.client.waits import Outage, PendingRequest, PendingRequests, Stalls
from taskyard.client.watches import Fetches, Watches
from taskyard.core.limits import SECOND_NS
from taskyard.errors import ClientClosed, NoBroker, Refused, TaskyardError, UserError
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Poller, Waker
from taskyard.net.protocols import SystemClock
from taskyard.process.value_access import CallValues, ValueAccess

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from taskyard.client.exchanges import Exchange, Query
    from taskyard.client.task_buffer import PendingTask
    from taskyard.client.waits import ReplyTimeouts
    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import Clock, PeerTransport
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.native.peer import Reply

_T = TypeVar("_T")

#: How long an abandoned thread may take to end: a callback may be running.
ABANDON_SECONDS: Final = 1.0


class Session:
    """A connection and its thread, from `start` to `stop`. Callers may use any thread.

    The simulator calls `use`, `turn` and `close` instead of starting the thread.
    """

    def __init__(  # noqa: PLR0913  # all but two are named
        self,
        endpoint: str,
        limits: ReplyTimeouts,
        *,
        blocking: bool = True,
        key: PeerKey | None = None,
        on_turn: Callable[[], None] | None = None,
        report: Callable[[str], object] | None = None,
        clock: Clock | None = None,
        environment: bytes = b"",
    ) -> None:
        """With `blocking`, `submit` blocks while the buffer is full.

        `environment` is sent with all commands that are submitted.

        The thread calls `on_turn` after each turn. It calls `report` with a line when the broker
        stops answering and when it answers again (default: log a warning).
        """
        self.endpoint = endpoint
        self._key = key
        #: Done when the thread has ended.
        self.ended: AnyFuture[None] = AnyFuture()
        self.ended.set_running_or_notify_cancel()  # a caller that waits for it can't cancel it
        self._limits = limits
        self._value_access: ValueAccess | None = None
        #: Stores and loads the large parts of calls.
        self.call_values = CallValues(self.value_access)
        self.outage = Outage(endpoint, limits.next_ns, report)
        self.is_blocking = blocking
        self._on_turn = on_turn
        self._clock = clock or SystemClock()
        #: Held to hand something over, and to end: nothing is accepted after the end.
        self._lock = threading.Lock()
        self._fetches = Fetches()
        self._watches = Watches(self._fetches)
        self._buffer = TaskBuffer(self._watches, self._clock, self._wake_from_upload)
        self.environment = environment
        self._requests = PendingRequests()
        self.stalls = Stalls(self._watches, self._requests, self.outage, self.run_later)
        self._waker = Waker()
        #: The waker was used since the last turn.
        self._awake = False
        self._stopping = False
        self._abandoned = False
        #: Why the thread ended. None while it runs.
        self._end: TaskyardError | None = None
        self._thread = threading.Thread(target=self._run, name="taskyard-client", daemon=True)

    def start(self) -> None:
        self._thread.start()
        _started.add(self)

    def end_in_child(self) -> None:
        """Refuse all calls in a forked child, which has no thread to send them."""
        self._lock = threading.Lock()  # another thread may have held it
        self.ended = AnyFuture()
        self.ended.set_result(None)
        if self._end is None:
            self._end = ClientClosed(
                "client: made before this process was forked (make another client in this process)"
            )

    def value_access(self) -> ValueAccess:
        """Return the access to the large arguments and results at the broker."""
        if self._value_access is None:
            limit_ns = self._limits.next_ns
            timeout = None if limit_ns is None else limit_ns / SECOND_NS
            self._value_access = ValueAccess(self.endpoint, self._key, timeout)
        return self._value_access

    def skip_long_results(self) -> None:
        """Settle futures with head and tail of long results. Call it before there are futures."""
        self._watches.fetches_long = False

    # For callers.

    def submit(self, task: PendingTask) -> None:
        """Queue a task. Block while the buffer is full. Raises `InvalidTask` if it is too large."""
        task.message_bytes = task_bytes(task.name, task.payload, task.lane or b"", task.after)
        buffer = self._buffer
        with self._lock:
            if self._stopping or self._end is not None:
                self._check_open()
            buffer.tasks.append(task)
            buffer.submitted_count += 1
            if not self._awake:
                self._wake()
        if len(buffer.tasks) > buffer.tasks_max:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        if self.is_blocking and not self.is_own_thread():
            self._buffer.wait_for_room(self._thread.is_alive)

    @property
    def environment(self) -> bytes:
        """The directory and variables for the commands of this session. b"": none."""
        return self._buffer.environment

    @environment.setter
    def environment(self, environment: bytes) -> None:
        self._buffer.environment = environment

    def request(self, query: Query, reply_future: AnyFuture[Reply]) -> None:
        """Queue a request. `reply_future` gets the reply."""
        if self.is_own_thread():
            raise UserError(
                "callback: must not wait for the client, because its thread receives the answers "
                "(use another thread)"
            )
        self._queue(query, reply_future)

    def _queue(self, query: Query, reply_future: AnyFuture[Reply]) -> None:
        build = query.build
        if query.has_environment:
            build = partial(build, environment=self.environment)
        with self._lock:
            self._check_open()
            after = self._buffer.submitted_count
            request = PendingRequest(build, query.wait_ns, query.awaited, reply_future, after)
            self._requests.waiting.append(request)
            self._wake()

    def run_later(self, exchange: Exchange[_T]) -> AnyFuture[_T]:
        """Run an exchange without blocking. The future gets its value, or its error."""
        value: AnyFuture[_T] = AnyFuture()

        def proceed(answered: AnyFuture[Reply] | None = None) -> None:
            try:
                query = next(exchange) if answered is None else exchange.send(answered.result())
                answer: AnyFuture[Reply] = AnyFuture()
                answer.add_done_callback(proceed)
                self._queue(query, answer)
            except StopIteration as end:
                value.set_result(end.value)
            except Exception as error:  # noqa: BLE001  # raised to the caller of `result`
                value.set_exception(error)

        proceed()
        return value

    def cancel_request(self, reply_future: AnyFuture[Reply]) -> None:
        """Drop a request, so that it is not sent again."""
        reply_future.cancel()
        with self._lock:
            self._requests.cancelled.append(reply_future)
            self._wake()

    def watch(self, futures: dict[bytes, SettableFuture]) -> None:
        """Watch tasks that were submitted earlier, by this client or another."""
        with self._lock:
            self._check_open()
            self._watches.requested.append(futures)
            self._wake()

    def join(self) -> None:
        """Wait for the thread, which has ended or does so at once."""
        if self.ended.done():
            self._thread.join()

    def stop_accepting(self) -> None:
        """Refuse new calls, and end when all tasks are acknowledged."""
        with self._lock:
            self._stopping = True
            self._wake()

    def abandon(self) -> None:
        """End at once."""
        with self._lock:
            self._stopping = self._abandoned = True
            self._wake()

    def _wake_from_upload(self) -> None:
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        """Wake the thread, once until its next turn. The caller holds the lock."""
        if not self._awake and self._end is None:
            self._awake = True
            self._waker.wake()

    def _check_open(self) -> None:
        if self._stopping:
            raise ClientClosed("the client is closed")
        if self._end is not None:
            raise self._end

    def is_own_thread(self) -> bool:
        """Return whether the caller is a future's callback."""
        return threading.current_thread() is self._thread

    # The thread.

    def _run(self) -> None:
        try:
            wire = sockets.connect(self.endpoint, self._key, counts=True)
        except Exception as error:  # noqa: BLE001  # raised to the callers
            if not isinstance(error, TaskyardError):
                error = NoBroker(f"broker at {self.endpoint}: can't connect: {error}")
            self._finish(error)
            return
        try:
            with closing(wire):
                self._loop(wire)
        except Refused as refused:
            self._finish(refused)
            return
        except BaseException as error:  # callers must not wait for ever
            text = f"internal error: {error!r}. Please report it with its traceback."
            self._finish(ClientClosed(text))
            raise
        text = "the client was closed before this was settled; another client can ask by name"
        self._finish(ClientClosed(text))

    def _loop(self, wire: ZmqSocket) -> None:
        self.use(wire)
        self.outage.address = lambda: wire.address
        poller = Poller()
        poller.add(wire)
        poller.add(self._waker.fileno())
        channel, monotonic_ns = self._channel, self._clock.monotonic_ns
        # `_stopping` is read first: everything handed over before it was set is seen.
        while not self._stopping or (
            not self._abandoned and (self._buffer or self._requests.waiting)
        ):
            wake_at_ns = channel.wake_at_ns()
            ready = poller.wait(None if wake_at_ns is None else wake_at_ns - monotonic_ns())
            if not self.turn(is_readable=wire in ready):
                wire.check_accepted(channel.unanswered_ns())
            if monotonic_ns() >= self.stalls.next_ns:
                self.stalls.check(monotonic_ns())
            if self._on_turn is not None:
                self._on_turn()

    def _finish(self, error: TaskyardError) -> None:
        """Refuse new calls, and fail everything that waits with this error."""
        with self._lock:
            self._end = error
            self._waker.close()
        self._fail_all(error)
        if self._on_turn is not None:
            self._on_turn()
        self.ended.set_result(None)

    def close(self) -> None:
        """End a session whose thread was never started."""
        self._finish(ClientClosed("the client is closed"))

    # A turn.

    def use(self, wire: PeerTransport) -> None:
        """Send and receive over this wire."""
        channel = self._channel = Channel(wire, self._clock)
        self._buffer.channel = self._requests.channel = self._watches.channel = channel
        self._fetches.channel = self._buffer.existing_tasks.channel = channel

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due even if nothing arrives."""
        return self._channel.wake_at_ns()

    def turn(self, *, is_readable: bool = True) -> bool:
        """Receive, route and send everything that can be without waiting.

        Return whether the broker has replied.
        """
        if self._awake:
            self._waker.clear()  # before callers may use it again
            self._awake = False
        replies = self._channel.receive() if is_readable else []
        for reply in replies:
            self._route(reply)
        requests, watches, buffer = self._requests, self._watches, self._buffer
        if requests.cancelled:
            requests.drop_cancelled()
        if watches.requested:
            watches.start_requested()
        buffer.send()
        if requests.waiting:
            requests.send(buffer.acknowledged())
        if watches.polled:
            watches.poll()
        self._channel.turn()
        if not replies or self.outage.is_noted:
            self._check_timeout()
        return bool(replies)

    def _route(self, reply: Reply) -> None:
        """Pass a reply to the part that sent its request. Ignore replies to dropped requests."""
        number = reply.request
        if number == self._buffer.rules_request:
            self._buffer.on_rules(reply)
        elif number in self._buffer.open:
            self._buffer.on_reply(reply)
        elif number in self._watches.open:
            self._watches.on_reply(reply)
        elif number in self._fetches.open:
            self._fetches.on_reply(reply)
        elif number in self._buffer.existing_tasks.open:
            self._buffer.existing_tasks.on_reply(reply)
        elif number in self._requests.open:
            self._requests.on_reply(reply)

    def _check_timeout(self) -> None:
        """Report a broker that does not answer, and fail all requests at the limit."""
        unanswered_ns = self._channel.unanswered_ns() if self._channel.open_count else 0
        self.outage.update(unanswered_ns, self._clock.wall_ns(), self._channel.postponed)
        limit_ns = self._limits.next_ns if self._channel.was_connected else self._limits.first_ns
        if limit_ns is not None and unanswered_ns > limit_ns:
            self._channel.drop_all()
            since = self.outage.since
            self.outage.reset()
            self._fail_all(self._timeout_error(limit_ns / SECOND_NS, since))

    def _timeout_error(self, seconds: float, since: datetime | None) -> NoBroker:
        if not self._channel.was_connected:
            return NoBroker(
                f"broker at {self.endpoint}: no answer within {seconds:g} s "
                f"({discovery.connection_hint(self.endpoint, self._key)})"
            )
        when = "" if since is None else f" (since {since:%Y-%m-%d %H:%M:%S})"
        return NoBroker(
            f"broker at {self.endpoint}: no answer for {seconds:g} s{when}, but acknowledged tasks "
            "are kept"
        )

    def _fail_all(self, error: TaskyardError) -> None:
        with self._lock:
            futures: list[AnyFuture[Reply] | SettableFuture] = [
                *self._requests.take_futures(),
                *self._watches.take_futures(),
                *self._fetches.take_futures(),
                *self._buffer.take_futures(),
                *self._buffer.existing_tasks.take_futures(),
            ]
        for future in futures:
            if not future.done():
                settle_future(future.set_exception, error)


#: The sessions of this process that have a thread.
_started: weakref.WeakSet[Session] = weakref.WeakSet()


def _on_fork() -> None:
    for session in [*_started]:
        session.end_in_child()
    _started.clear()


os.register_at_fork(after_in_child=_on_fork)
