"""A real broker that listens to round-robin, in a thread of the test."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.net import endpoints, sockets
from taskyard.wire.round_robin.server import RoundRobin, Settings
from tests.wire.broker_thread import BrokerThread, random_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.net.zmq_socket import ZmqSocket

#: Short, so that tests need not wait.
QUICK = Settings(heartbeat_ns=SECOND_NS // 5, expire_ns=SECOND_NS)


class Host(BrokerThread):
    """The broker's endpoint and its state."""

    def __init__(self, wires: list[ZmqSocket], settings: Settings, ledger: Ledger) -> None:
        self.native_endpoint, self.endpoint = (wire.endpoint for wire in wires)
        self.dialect = RoundRobin(1, random_bits, settings, socket_numbers=[1])
        super().__init__(wires, [self.dialect], ledger)


@contextmanager
def a_host(
    directory: Path,
    endpoint: str = "tcp://127.0.0.1:0",
    settings: Settings = QUICK,
    ledger: Ledger | None = None,
) -> Iterator[Host]:
    """Run a broker that keeps only its ledger when the `with` block ends."""
    with ExitStack() as stack:
        native = stack.enter_context(closing(sockets.listen(endpoints.native_endpoint(directory))))
        wire = stack.enter_context(closing(sockets.listen(endpoint, is_named=True)))
        yield stack.enter_context(
            Host([native, wire], settings, Ledger() if ledger is None else ledger)
        )
