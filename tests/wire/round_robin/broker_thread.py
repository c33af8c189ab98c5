"""A real broker that listens to round-robin, in a thread of the test."""

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
from taskyard.wire.round_robin.server import Settings, make_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.net.sockets import ZmqSocket

#: Short, so that tests need not wait.
QUICK = Settings(heartbeat_ns=SECOND_NS // 5, expire_ns=SECOND_NS)


class Host:
    """The broker's endpoint and its state."""

    def __init__(self, wires: list[ZmqSocket], settings: Settings, ledger: Ledger) -> None:
        self.native_endpoint, self.endpoint = (wire.endpoint for wire in wires)
        random_bits = lambda: random.getrandbits(32)  # noqa: E731  # as the broker has it
        self.dialect = make_server(1, random_bits, settings, socket_numbers=[1])
        board = DialectRouter([NativeServer(1, random_bits), self.dialect], [0, 1])
        self.waker = Waker()
        poller = Poller()
        poller.add(self.waker.fileno())
        clock = SystemClock()
        port = SocketTransport(board, wires, poller, clock)
        self.broker = Broker(Scheduler(ledger), port, MemoryStore(), clock)
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


@contextmanager
def a_host(
    directory: Path,
    endpoint: str = "tcp://127.0.0.1:0",
    settings: Settings = QUICK,
    ledger: Ledger | None = None,
) -> Iterator[Host]:
    """Run a broker that keeps only its ledger when the `with` block ends."""
    with ExitStack() as stack:
        native_endpoint = stack.enter_context(
            closing(sockets.listen(endpoints.native_endpoint(directory)))
        )
        wire = stack.enter_context(closing(sockets.listen(endpoint, is_named=True)))
        host = Host([native_endpoint, wire], settings, Ledger() if ledger is None else ledger)
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
