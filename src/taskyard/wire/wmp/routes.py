"""State of a WMP manager about its peers: routes to workers, senders, and replies that are due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from taskyard.core.model import WorkerFacts
    from taskyard.wire.wmp import frames as wmp


class Peer(Struct):
    """The route to a worker, and its facts."""

    route: bytes
    path: tuple[bytes, ...]
    last_seen_ns: int
    #: The facts of its last READY. None: there was none, or it is void.
    facts: WorkerFacts | None = None
    #: The incarnation of the process. None: unknown.
    incarnation: int | None = None
    #: The incarnation that sent the newest list of tasks, and the number of that list.
    newest_list: tuple[int | None, int] = (None, 0)
    #: The routes and paths of its messages, the earliest first. A new one is a new connection.
    routes: dict[tuple[bytes, tuple[bytes, ...]], None] = field(default_factory=dict)


class Sender(Struct):
    """The sender of a message, its route, and the time."""

    route: bytes
    path: tuple[bytes, ...]
    worker: bytes
    now_ns: int
    #: The incarnation of the process. None: not in the message.
    incarnation: int | None = None


class PendingReply(Struct):
    """A message of a worker that gets its reply in this turn, or a PING of ours."""

    route: bytes
    path: tuple[bytes, ...]
    worker: bytes
    #: GIVE: the lock's id. None: not a GIVE.
    lock: wmp.LockId | None = None
    #: Set if it comes from another process than the known one of this id, with its facts.
    newcomer: Sender | None = None
    facts: WorkerFacts | None = None
    #: A PING, which gets a PONG.
    is_ping: bool = False
    #: GIVE: the worker forwards its tasks.
    forwards: bool = False
