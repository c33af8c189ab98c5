"""A broker that is killed with a thousand open requests: the next one answers all."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from taskyard.client.internal import InternalClient
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.context import raise_file_limit
from taskyard.net.host import Poller
from taskyard.net.protocols import SystemClock
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.settings import WorkerSettings
from tests.kit.processes import until
from tests.system.kit import Broker, count
from tests.system.peers import InstantRunner

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.net.zmq_socket import ZmqSocket

WORKERS = 1_000


class Crowd:
    """Many workers with one slot each, in one thread."""

    def __init__(self, endpoint: str, stack: ExitStack) -> None:
        raise_file_limit()
        self._clock, self._poller = SystemClock(), Poller()
        self._loops: dict[ZmqSocket, NativeWorkerLoop] = {}
        for number in range(WORKERS):
            wire = stack.enter_context(closing(sockets.connect(endpoint)))
            self._poller.add(wire)
            who = WorkerSettings(b"w-%d" % number, (b"load",), 1, incarnation=1)
            self._loops[wire] = NativeWorkerLoop(
                who, Channel(wire, self._clock), InstantRunner(), self._clock
            )

    def turn(self) -> None:
        """Turn every worker with input or a due timer."""
        heard = self._poller.wait(SECOND_NS // 50)
        now_ns = self._clock.monotonic_ns()
        for wire, loop in self._loops.items():
            if wire in heard or loop.wake_at_ns() <= now_ns:
                loop.turn()


def test_broker_killed_while_a_thousand_requests_wait(tmp_path: Path) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path))
        client = stack.enter_context(InternalClient(broker.endpoint))
        crowd = Crowd(broker.endpoint, stack)

        def parked() -> bool:
            crowd.turn()
            waiting = [one for one in client.workers() if one["parked"]]
            return len(waiting) == WORKERS

        until(parked, "all workers wait")
        broker.kill()
        broker = stack.enter_context(Broker(tmp_path))
        names = [b"task-%d" % number for number in range(2 * WORKERS)]
        client.create(Submission(names, terms=[Terms(service=b"load")]))

        def done() -> bool:
            crowd.turn()
            return bool(client.status()["counts"]["done"] == len(names))

        until(done, "all tasks done")
        assert broker.terminate()[0] == 0
    tally, _ = count(tmp_path)
    assert (tally.done, tally.completed_twice, tally.unfinished) == (2 * WORKERS, 0, 0)
