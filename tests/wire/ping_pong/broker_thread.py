"""A real broker that listens to ping-pong, in a thread of the test."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.net import endpoints, sockets
from taskyard.wire.ping_pong.frames import Settings
from taskyard.wire.ping_pong.server import make_server
from tests.wire.broker_thread import BrokerThread, random_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.net.zmq_socket import ZmqSocket

#: Short, so that tests need not wait.
QUICK = Settings(expire_ns=3 * SECOND_NS // 2, lease_ns=4 * SECOND_NS)


class Host(BrokerThread):
    """The broker's endpoints and its state."""

    def __init__(self, wires: list[ZmqSocket], settings: Settings) -> None:
        self.native, self.backend, self.frontend = (wire.endpoint for wire in wires)
        self.dialects = make_server(1, random_bits, settings)
        super().__init__(wires, self.dialects, Ledger())

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
        yield stack.enter_context(Host(wires, settings))
