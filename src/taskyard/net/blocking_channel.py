"""A channel for requests one by one, for a thread of its own that may wait for each reply.

Repeats requests that were lost, as every channel does. Knows nothing about their content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from taskyard.core.limits import SECOND_NS
from taskyard.errors import NoBroker
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.keys import PeerKey
    from taskyard.wire.native.peer import Reply

#: How often a thread that waits for a reply checks whether to stop.
STOP_CHECK_NS: Final = SECOND_NS // 20


class BlockingChannel:
    """A connection to one broker. Use it as a context manager, in one thread."""

    def __init__(
        self,
        endpoint: str,
        key: PeerKey | None = None,
        timeout: float | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Connect. `timeout` limits the time without an answer."""
        self._endpoint = endpoint
        self._timeout_ns = None if timeout is None else round(timeout * SECOND_NS)
        self._should_stop = should_stop
        self._clock = SystemClock()
        self._wire = sockets.connect(endpoint, key, counts=True)
        self._channel = Channel(self._wire, self._clock)
        self._poller = Poller()
        self._poller.add(self._wire)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._poller.remove(self._wire)
        self._wire.close()

    def ask(self, build: Callable[[int], bytes]) -> Reply:
        """Send a request, and wait for its reply. Raises `NoBroker` after the timeout, or when
        this thread should stop."""
        number, channel = self._channel.request(build), self._channel
        while True:
            wake_at_ns = channel.wake_at_ns()
            wait_ns = SECOND_NS if wake_at_ns is None else wake_at_ns - self._clock.monotonic_ns()
            self._poller.wait(wait_ns if self._should_stop is None else min(wait_ns, STOP_CHECK_NS))
            for reply in channel.receive():
                if reply.request == number:
                    return reply
            channel.turn()
            unanswered_ns = channel.unanswered_ns()
            self._wire.check_accepted(unanswered_ns)
            if self._timeout_ns is not None and unanswered_ns > self._timeout_ns:
                seconds = unanswered_ns / SECOND_NS
                raise NoBroker(f"broker at {self._endpoint}: no answer for {seconds:.1f} s")
            if self._should_stop is not None and self._should_stop():
                channel.drop(number)
                raise NoBroker(f"broker at {self._endpoint}: no answer when the request was ended")
