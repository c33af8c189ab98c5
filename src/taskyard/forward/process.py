"""The forwarder as a process: a native worker whose runner is another broker.

Waits for both brokers. A signal stops it as it stops any worker: it takes no more tasks and waits
for those it has. After a second one it returns them to the upper broker. The lower broker runs them
on, and the next forwarder finds them.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from msgspec import structs

from taskyard.client.client import Client
from taskyard.errors import NoBroker
from taskyard.forward.lower import LowerBroker, upper_label
from taskyard.forward.runner import ForwardRunner
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Host
from taskyard.process.machine import usable_cores
from taskyard.settings.values import read_amount, read_memory
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.native_process import SocketWorker
from taskyard.worker.spool import OutputSpool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from taskyard.core.resources import Resources
    from taskyard.net.keys import PeerKey
    from taskyard.worker.settings import WorkerSettings

#: Seconds between two attempts to reach the lower broker.
RETRY_SECONDS: Final = 1.0


def connect_lower(
    broker: str, key: Path | None, label: str | None, upper: str, announce: Callable[[str], None]
) -> LowerBroker:
    """Connect to the lower broker. Waits until it answers."""
    is_announced = False
    while True:
        try:
            client = Client(broker, key=key, connect_timeout=RETRY_SECONDS, report=announce)
        except NoBroker:
            if not is_announced:
                announce(f"waiting for a broker at {broker}")
            is_announced = True
            time.sleep(RETRY_SECONDS)
        else:
            return LowerBroker(client, label or upper_label(upper))


def serve(  # noqa: PLR0913  # the last ones are named
    endpoint: str,
    settings: WorkerSettings,
    lower: LowerBroker,
    announce: Callable[[str], None],
    *,
    key: PeerKey | None = None,
    until_eof: bool = False,
) -> None:
    """Take tasks from the broker at `endpoint` and run them at the lower one, until a signal."""
    with closing(lower), Host(until_eof=until_eof) as host:
        spool = OutputSpool(host.clock.monotonic_ns)
        runner = host.add_resource(ForwardRunner(lower, spool))
        wire = host.add_socket(sockets.connect(endpoint, key, counts=True))
        channel = Channel(wire, host.clock)
        forwards = structs.replace(settings, forwards=True)
        loop = NativeWorkerLoop(forwards, channel, runner, host.clock, spool=spool)
        loop.on_ended = runner.cancel_ended
        worker = SocketWorker(loop, channel, runner, forwards, announce)
        worker.wire = wire
        host.run(worker)


def capacity(lower: LowerBroker) -> tuple[int, Resources]:
    """Return the slots and resources of all workers of the lower broker, as one worker's."""
    slots, amounts = lower.capacity()
    resources = tuple(
        (name.encode(), read_memory(int(amount)) if name == "memory" else read_amount(amount))
        for name, amount in sorted(amounts.items())
        if amount
    )
    return slots or usable_cores(), resources
