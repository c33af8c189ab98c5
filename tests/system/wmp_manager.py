"""A manager as a process: a broker on a state directory with its native socket and WMP.

python wmp_manager.py STATE WMP-ENDPOINT
"""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from taskyard.broker.transport import DialectRouter, SocketTransport
from taskyard.broker.turn import Broker
from taskyard.core.scheduler import Scheduler
from taskyard.journal import recovery
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.net import endpoints, sockets
from taskyard.net.host import Poller, Signals
from taskyard.net.protocols import SystemClock
from taskyard.wire.native.server import NativeServer
from taskyard.wire.wmp.server import Wmp, manager_name


def main(state: Path, endpoint: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(StateLock(state))
        signals = stack.enter_context(Signals())
        store = stack.enter_context(closing(SqliteStore(state)))
        ledger = recovery.open_ledger(state, store)
        wires = [
            stack.enter_context(closing(sockets.listen(one)))
            for one in (endpoints.native_endpoint(state), endpoint)
        ]
        native_endpoint = NativeServer(secrets.randbits(63) | 1, lambda: 0)
        dialect = DialectRouter(
            [native_endpoint, Wmp(1, manager_name(store.identity), lambda: 0)], [0, 1]
        )
        poller, clock = Poller(), SystemClock()
        poller.add(signals.fileno())
        port = SocketTransport(dialect, wires, poller, clock)
        broker = Broker(Scheduler(ledger), port, store, clock)
        for name, wire in zip(("native", "wmp"), wires, strict=True):
            print(f"listening {name} {wire.endpoint}", flush=True)  # noqa: T201  # its purpose
        while not (port.signalled and signals.received()):
            broker.turn()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
