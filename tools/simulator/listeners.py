"""The broker's sockets in the simulated world, with one dialect each.

They use the adapters of `wire/` and the broker's own router. These are made anew for every process
of the broker: a restart forgets all peers.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from simulator.network import Message
from simulator.plan import SECOND_NS
from taskyard.broker.transport import DialectRouter
from taskyard.core.events import RulesSet
from taskyard.wire.native.server import NativeServer
from taskyard.wire.ping_pong import server as ping_pong
from taskyard.wire.round_robin import server as round_robin
from taskyard.wire.wmp import server as wmp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.plan import Plan
    from taskyard.broker.transport import Connections
    from taskyard.core.events import Event

#: The only service in plain dwork and ping-pong.
DEFAULT: Final = b"default"

#: Messages that one turn receives at most.
RECEIVED_MAX: Final = 50

#: The manager's id, the same for all processes of a broker.
MANAGER: Final = bytes(16)


class Listener(IntEnum):
    """A socket. The dialect of the socket has the same number."""

    NATIVE = 0
    PING_BACKEND = 1
    PING_FRONTEND = 2
    WMP = 3
    ROUND_ROBIN = 4


def open_all(plan: Plan, random_bits: Callable[[], int]) -> DialectRouter:
    """Return the router with all dialects, for one process of the broker."""
    silence_ns = plan.size.silence_ns
    patience = ping_pong.Settings(expire_ns=silence_ns, lease_ns=2 * silence_ns)
    backend, frontend = ping_pong.make_server(Listener.PING_BACKEND, random_bits, patience)
    timeouts = wmp.Settings(lease_timeout_ns=silence_ns)
    manager = wmp.Wmp(Listener.WMP, wmp.manager_name(MANAGER), random_bits, timeouts)
    table = round_robin.Settings(heartbeat_ns=SECOND_NS, expire_ns=silence_ns)
    server = round_robin.RoundRobin(
        Listener.ROUND_ROBIN, random_bits, table, [Listener.ROUND_ROBIN]
    )
    native = NativeServer(random_bits() | 1, random_bits, plain_lease_ns=silence_ns)
    return DialectRouter([native, backend, frontend, manager, server], [*Listener])


def received_together(inbox: Sequence[Message | Event]) -> int:
    """Return how many of the first messages one turn receives. Rules are received alone, so that
    checkers know the rules of each message."""
    return 1 if inbox and isinstance(inbox[0], RulesSet) else RECEIVED_MAX


def events_of(
    router: DialectRouter, connections: Connections, arrived: Sequence[Message | Event], now_ns: int
) -> list[Event]:
    """Decode what a turn has received."""
    events: list[Event] = []
    for one in arrived:
        if isinstance(one, Message):
            if connections.is_renewed(one.route, partial(_connection_of, one)):
                events += router.reconnected(one.route, now_ns)
            events += router.receive(one.route, one.frames, now_ns)
        else:
            events.append(one)
    return events


def _connection_of(message: Message) -> tuple[int, int]:
    return 0, message.connection
