"""Idle workers as one process: `python -m … ENDPOINT FIRST COUNT`.

Each worker is the product's loop with its own socket, and parks. Prints a line when all of them
have registered, and runs until its stdin ends. Sockets don't count their connections: that takes
two more descriptors for each, and only matters after a reconnect.
"""

import heapq
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Final

from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import Rule
from taskyard.core.runs import Run
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.context import raise_file_limit
from taskyard.net.protocols import SystemClock
from taskyard.net.sockets import ZmqSocket
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.settings import WorkerSettings

#: Workers that connect at once. A listener's backlog is limited.
TOGETHER: Final = 200

#: Descriptors that one wait returns.
_EVENTS_MAX: Final = 1024

_STDIN: Final = 0


class IdleRunner:
    """Implements `RuleAwareRunner` for a worker that gets no tasks."""

    agent_error = b""
    malformed = overfeed_max = 0

    def start(self, job: Job) -> None:
        raise RuntimeError(f"unexpected task {job.name!r}")

    def stop(self, name: bytes, attempt: int) -> None:
        """Do nothing: there are no tasks."""

    def run_so_far(self, _name: bytes, _attempt: int) -> Run | None:
        return None

    def turn(self) -> list[JobResult]:
        return []

    def running(self) -> list[Job]:
        return []

    def unstarted(self) -> list[Job]:
        return []

    def withdraw(self, _count: int) -> list[Job]:
        return []

    def wake_at_ns(self) -> int | None:
        return None

    def overfeed(self, _lane: tuple[bytes, bytes]) -> int:
        return 0

    def set_rules(self, clauses: Sequence[Rule]) -> None:
        """Do nothing: there are no tasks."""


class Crowd:
    """Idle workers with default settings, in one thread."""

    def __init__(self, endpoint: str, stack: ExitStack) -> None:
        raise_file_limit()
        self._endpoint, self._stack = endpoint, stack
        self._clock = SystemClock()
        self._epoll = stack.enter_context(closing(select.epoll()))
        self._epoll.register(_STDIN, select.EPOLLIN)
        self._members: dict[int, tuple[ZmqSocket, NativeWorkerLoop, Channel]] = {}
        #: (when, descriptor): the next turn of a worker. An entry may be early, never late.
        self._timers: list[tuple[int, int]] = []

    def add(self, number: int) -> None:
        """Connect one more worker."""
        wire = self._stack.enter_context(closing(sockets.connect(self._endpoint)))
        clock, channel = self._clock, Channel(wire, self._clock)
        runner = IdleRunner()
        settings = WorkerSettings(
            *(b"crowd-%d" % number, (b"exec", b"call"), 1),
            incarnation=number + 1,
            host=b"crowd.example",
            pid=number + 1,
        )
        loop = NativeWorkerLoop(settings, channel, runner, clock, runner)
        descriptor = wire.fileno()
        self._members[descriptor] = wire, loop, channel
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        heapq.heappush(self._timers, (clock.monotonic_ns(), descriptor))

    def turn(self) -> bool:
        """Turn every worker with input or a due timer. Return whether stdin has ended."""
        now_ns = self._clock.monotonic_ns()
        wait_ns = min(max(0, self._timers[0][0] - now_ns), SECOND_NS // 10)
        ready = {one for one, _ in self._epoll.poll(wait_ns / SECOND_NS, _EVENTS_MAX)}
        has_ended = _STDIN in ready
        ready.discard(_STDIN)
        now_ns = self._clock.monotonic_ns()
        for descriptor in ready:
            self._turn_one(descriptor)
        while self._timers[0][0] <= now_ns:
            _, descriptor = heapq.heappop(self._timers)
            wake_at_ns = self._turn_one(descriptor)
            heapq.heappush(self._timers, (max(wake_at_ns, now_ns + 1), descriptor))
        return has_ended

    def _turn_one(self, descriptor: int) -> int:
        """Turn a worker until it has no input. Return when its next turn is due."""
        wire, loop, _ = self._members[descriptor]
        loop.turn()
        while wire.is_readable():  # its descriptor is edge-triggered
            loop.turn()
        return loop.wake_at_ns()

    def registered(self) -> int:
        """Return how many workers have had a reply."""
        return sum(channel.was_connected for _, _, channel in self._members.values())


def main(endpoint: str, first: int, count: int) -> None:
    with ExitStack() as stack:
        crowd = Crowd(endpoint, stack)
        for number in range(count):
            crowd.add(first + number)
            if (number + 1) % TOGETHER == 0 or number + 1 == count:
                while crowd.registered() <= number:
                    crowd.turn()
        print("ready", flush=True)
        while not crowd.turn():
            pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
