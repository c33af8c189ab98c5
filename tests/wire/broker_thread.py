"""A real broker in a thread of the test. Each dialect's kit says where it listens."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Self

from taskyard.broker.transport import DialectRouter, SocketTransport
from taskyard.broker.turn import Broker
from taskyard.core.scheduler import Scheduler
from taskyard.journal.store import MemoryStore
from taskyard.net.host import Poller, Waker
from taskyard.net.protocols import SystemClock
from taskyard.wire.native.server import NativeServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.ledger import Ledger
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.dialect import Dialect


def random_bits() -> int:
    return random.getrandbits(32)


class BrokerThread:
    """A broker with the native dialect on the first socket, and one dialect on each other."""

    def __init__(
        self, wires: Sequence[ZmqSocket], dialects: Sequence[Dialect], ledger: Ledger
    ) -> None:
        router = DialectRouter([NativeServer(1, random_bits), *dialects], [*range(len(wires))])
        self._waker = Waker()
        poller = Poller()
        poller.add(self._waker.fileno())
        clock = SystemClock()
        transport = SocketTransport(router, wires, poller, clock)
        self.broker = Broker(Scheduler(ledger), transport, MemoryStore(), clock)
        self._is_stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_stopping = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self.broker.turn()
        except BaseException as error:  # noqa: BLE001  # raised at the end of the test
            self._error = error

    def workers(self) -> int:
        return len(self.broker.scheduler.ledger.workers)
