"""Workers as one process: `python -m … FIRST COUNT ENDPOINT…`.

Each worker is the product's loop with its own socket. It waits for tasks, and a task that it gets
never ends. The workers connect to the endpoints in turn. Prints a line when all of them
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
from taskyard.net.zmq_socket import ZmqSocket
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.settings import WorkerSettings

#: Workers that connect at once. A listener's backlog is limited.
TOGETHER: Final = 200

#: Descriptors that one wait returns.
_EVENTS_MAX: Final = 1024

_STDIN: Final = 0


class EndlessRunner:
    """Implements `RuleAwareRunner` with tasks that take no CPU time and never end."""

    agent_error = b""
    malformed = overfeed_max = 0

    def __init__(self) -> None:
        self._jobs: dict[tuple[bytes, int], Job] = {}

    def start(self, job: Job) -> None:
        self._jobs[job.key] = job

    def stop(self, name: bytes, attempt: int) -> None:
        self._jobs.pop((name, attempt), None)

    def run_so_far(self, _name: bytes, _attempt: int) -> Run | None:
        return None

    def turn(self) -> list[JobResult]:
        return []

    def running(self) -> list[Job]:
        return [*self._jobs.values()]

    def unstarted(self) -> list[Job]:
        return []

    def waiting_calls(self) -> tuple[Sequence[Job], int]:
        return (), 0

    def withdraw(self, _count: int) -> list[Job]:
        return []

    def wake_at_ns(self) -> int | None:
        return None

    def overfeed(self, _lane: tuple[bytes, bytes]) -> int:
        return 0

    def set_rules(self, clauses: Sequence[Rule]) -> None:
        """Do nothing: no task depends on them."""


class Crowd:
    """Workers with default settings, in one thread."""

    def __init__(self, endpoints: Sequence[str], stack: ExitStack) -> None:
        raise_file_limit()
        self._endpoints, self._stack = endpoints, stack
        self._clock = SystemClock()
        self._epoll = stack.enter_context(closing(select.epoll()))
        self._epoll.register(_STDIN, select.EPOLLIN)
        self._members: dict[int, tuple[ZmqSocket, NativeWorkerLoop, Channel]] = {}
        #: (when, descriptor): the next turn of a worker. An entry may be early, never late.
        self._timers: list[tuple[int, int]] = []

    def add(self, number: int) -> None:
        """Connect one more worker."""
        endpoint = self._endpoints[number % len(self._endpoints)]
        wire = self._stack.enter_context(closing(sockets.connect(endpoint)))
        clock, channel = self._clock, Channel(wire, self._clock)
        runner = EndlessRunner()
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


def main(first: int, count: int, endpoints: Sequence[str]) -> None:
    with ExitStack() as stack:
        crowd = Crowd(endpoints, stack)
        for number in range(count):
            crowd.add(first + number)
            if (number + 1) % TOGETHER == 0 or number + 1 == count:
                while crowd.registered() <= number:
                    if crowd.turn():
                        return
        print("ready", flush=True)
        while not crowd.turn():
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
