"""The forwarder as a process: a native or WMP worker whose runner is another broker.

Waits for both brokers. A signal stops it as it stops any worker: it takes no more tasks and waits
for those it has. After a second one it returns them to the upper broker. The lower broker runs them
on, and the next forwarder finds them.
"""

from __future__ import annotations

import time
from contextlib import closing
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from taskyard.client.internal import InternalClient
from taskyard.core.model import shown
from taskyard.errors import NoBroker
from taskyard.forward.lower import LowerBroker, upper_label
from taskyard.forward.runner import ForwardRunner
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Host
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.native_process import SocketWorker
from taskyard.worker.output import OutputSpool
from taskyard.worker.wmp import WmpWorker, WmpWorkerLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

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
            client = InternalClient(broker, key=key, connect_timeout=RETRY_SECONDS, report=announce)
        except NoBroker:
            if not is_announced:
                announce(f"waiting for a broker at {broker}")
            is_announced = True
            time.sleep(RETRY_SECONDS)
        else:
            given = label is not None
            return LowerBroker(client, label or upper_label(upper), is_label_given=given)


def serve(  # noqa: PLR0913  # the last ones are named
    endpoint: str,
    settings: WorkerSettings,
    lower: LowerBroker,
    announce: Callable[[str], None],
    *,
    slots: int | None = None,
    key: PeerKey | None = None,
    until_eof: bool = False,
) -> None:
    """Take tasks from the broker at `endpoint` and run them at the lower one, until a signal.

    The slots and resources follow those of the lower broker's workers. `slots` are fixed.
    """
    with closing(lower), Host(until_eof=until_eof) as host:
        spool = OutputSpool(host.clock.monotonic_ns)
        runner = host.add_resource(ForwardRunner(lower, spool))
        wire = host.add_socket(sockets.connect(endpoint, key, counts=True))
        channel = Channel(wire, host.clock)
        loop = NativeWorkerLoop(settings, channel, runner, host.clock, spool=spool)
        loop.on_ended = runner.cancel_ended
        runner.on_capacity = lambda one: loop.set_capacity(slots or one.slots, one.resources)
        worker = SocketWorker(loop, channel, runner, announce)
        worker.wire, worker.host = wire, host
        host.run(worker)


def serve_wmp(  # noqa: PLR0913  # the last ones are named
    managers: Sequence[str],
    settings: WorkerSettings,
    lower: LowerBroker,
    announce: Callable[[str], None],
    *,
    slots: int | None = None,
    keys: Sequence[PeerKey | None] = (),
    until_eof: bool = False,
) -> None:
    """Take tasks from WMP managers and run them at the lower broker, until a signal.

    The slots follow those of the lower broker's workers. `slots` are fixed.
    """
    with closing(lower), Host(until_eof=until_eof) as host:
        runner = host.add_resource(ForwardRunner(lower, None))
        pairs = zip_longest(managers, keys)
        wires = [host.add_socket(sockets.connect(*pair)) for pair in pairs]
        names = [upper_label(one) for one in managers]
        loop = WmpWorkerLoop(settings, wires, runner, host.clock, names=names)
        loop.on_ended = runner.cancel_ended
        if slots is None:
            runner.on_capacity = lambda one: loop.set_slots(one.slots)
        host.run(WmpWorker(loop, wires, runner, shown(settings.name), announce))
