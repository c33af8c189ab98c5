"""A real broker that listens to ping-pong, in a thread of the test."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from taskyard.broker.transport import DialectRouter, SocketTransport
from taskyard.broker.turn import Broker
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.scheduler import Scheduler
from taskyard.journal.store import MemoryStore
from taskyard.net import endpoints, sockets
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import Waker
from taskyard.wire.native.server import NativeServer
from taskyard.wire.ping_pong.frames import Settings
from taskyard.wire.ping_pong.server import make_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.net.sockets import ZmqSocket

#: Short, so that tests need not wait.
QUICK = Settings(expire_ns=3 * SECOND_NS // 2, lease_ns=4 * SECOND_NS)


class Host:
    """The broker's endpoints and its state."""

    def __init__(self, wires: list[ZmqSocket], settings: Settings) -> None:
        self.native, self.backend, self.frontend = (wire.endpoint for wire in wires)
        random_bits = lambda: random.getrandbits(32)  # noqa: E731  # as the broker has it
        self.dialects = make_server(1, random_bits, settings)
        board = DialectRouter([NativeServer(1, random_bits), *self.dialects], [0, 1, 2])
        self.waker = Waker()
        poller = Poller()
        poller.add(self.waker.fileno())
        clock = SystemClock()
        port = SocketTransport(board, wires, poller, clock)
        self.broker = Broker(Scheduler(Ledger()), port, MemoryStore(), clock)
        self.is_stopping = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.is_stopping:
                self.broker.turn()
        except BaseException as error:  # noqa: BLE001  # raised at the end of the test
            self.error = error

    def workers(self) -> int:
        return len(self.broker.scheduler.ledger.workers)

    def is_out(self) -> bool:
        """Return whether some task is leased."""
        tasks = [*self.broker.scheduler.ledger.tasks.values()]
        return any(task.lease is not None for task in tasks)


@contextmanager
def a_host(
    directory: Path,
    backend: str = "tcp://127.0.0.1:0",
    frontend: str = "tcp://127.0.0.1:0",
    settings: Settings = QUICK,
) -> Iterator[Host]:
    """Run a broker that loses its state when the `with` block ends."""
    with ExitStack() as stack:
        places = (endpoints.native_endpoint(directory), backend, frontend)
        wires = [stack.enter_context(closing(sockets.listen(place))) for place in places]
        host = Host(wires, settings)
        stack.callback(host.waker.close)
        thread = threading.Thread(target=host.run)
        thread.start()
        try:
            yield host
        finally:
            host.is_stopping = True
            host.waker.wake()
            thread.join()
        if host.error is not None:
            raise host.error
