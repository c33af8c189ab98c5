"""A round-robin worker at the broker and the messages that it holds. No sockets, no clock.

`workers.py` has the table of all workers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.wire.dialect import ROUND_ROBIN
from taskyard.wire.round_robin import frames as lmq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.model import Terms
    from taskyard.wire.round_robin.frames import Message

#: Subtracted from the slots of an unreachable worker, which gets no tasks until it sends a message.
_UNREACHABLE: Final = 1 << 40

#: The prefix of worker names whose identity is not printable.
_HEX: Final = b"0x"


class Lease(Struct, eq=False):
    """A message that a worker holds."""

    name: bytes
    attempt: int
    #: The beginning of its RESPONSE: the route and the id. None: EXEC has no RESPONSE.
    key: tuple[tuple[bytes, ...], bytes] | None
    slots: int
    #: The worker's timeout while it holds the message, if longer than usual.
    lease_ns: int
    #: The lease has ended in the scheduler, but the worker still has the message.
    is_void: bool = False
    #: Since when it, its RESPONSE or its INCREMENT may be lost: a former process of the server
    #: assigned it, or the worker has reconnected. None: neither.
    uncertain_ns: int | None = None
    #: A recalled EXEC: the beginning of its RESPONSE if that process sent it as TRACKEXEC.
    tracked_key: tuple[tuple[bytes, ...], bytes] | None = None


class Peer(Struct, eq=False):
    """A worker, registered or not."""

    identity: bytes
    #: Its name in the core.
    name: bytes
    last_seen_ns: int
    #: The name of the key that it uses. Empty: none. None: unknown since a restart.
    owner: str | None = ""
    #: The route of its last message. Empty: none since this process began.
    route: bytes = b""
    slots: int = 0
    is_registered: bool = False
    #: It is drained and gets no more tasks. The dialect has no message for that.
    is_dismissed: bool = False
    #: It has deregistered, and holds nothing when it registers again.
    has_left: bool = False
    #: The request of a WorkerExited that the scheduler has not handled yet. 0: none.
    exit_request: int = 0
    #: It can't be reached.
    is_cut: bool = False
    #: It has not registered since this process began.
    is_recalled: bool = False
    #: It held messages when the server restarted or it reconnected, and an INCREMENT may be for any
    #: of them. So it is sent no EXEC, which an INCREMENT settles, until it registers with none of
    #: them left.
    is_unsure: bool = False
    #: Messages that it holds, oldest first.
    leases: dict[bytes, Lease] = field(default_factory=dict)
    #: Messages with a RESPONSE but no INCREMENT, oldest first.
    answered: deque[Lease] = field(default_factory=deque)
    #: INCREMENTs that arrived before their RESPONSE.
    freed_early: int = 0
    #: The tasks in the last messages to it.
    just_given: list[Lease] = field(default_factory=list)
    #: Messages that were taken from it because they could not be sent or it timed out. It may
    #: have them nevertheless.
    returned: dict[bytes, Lease] = field(default_factory=dict)
    pinged_ns: int = 0
    #: When its last heartbeat went to the scheduler. None: not since this process began.
    reported_ns: int | None = None
    #: When its timeout is checked next, which may be early, never late. 0: never.
    timeout_check_ns: int = 0

    def ahead(self) -> int:
        """Return the number to add to its slots in the scheduler."""
        if self.is_cut:
            return -_UNREACHABLE
        return -sum(lease.slots for lease in self.all() if lease.is_void)

    def all(self) -> list[Lease]:
        """Return all leases that take a slot."""
        return [*self.leases.values(), *self.answered]

    def oldest_untracked(self) -> Lease | None:
        """Return the EXEC that an INCREMENT settles, or None if there is none or it is ambiguous.

        The message of an uncertain lease may be lost, or its RESPONSE.
        """
        oldest = next((lease for lease in self.leases.values() if lease.key is None), None)
        if oldest is not None and oldest.uncertain_ns is not None and len(self.leases) > 1:
            return None
        return oldest

    def find(self, key: tuple[tuple[bytes, ...], bytes]) -> Lease | None:
        """Return the oldest lease that a RESPONSE may belong to."""
        for leases in (self.leases, self.returned):
            for lease in leases.values():
                if key in (lease.key, lease.tracked_key):
                    return lease
        return None


def envelope_of(terms: Terms, envelope: bytes) -> lmq.Envelope | None:
    """Return the envelope of a task's message. None: it is of another dialect."""
    return lmq.open_envelope(envelope) if terms.dialect == lmq.DIALECT else None


def lease_of(name: bytes, attempt: int, terms: Terms, kept: lmq.Envelope | None) -> Lease:
    key: tuple[tuple[bytes, ...], bytes] | None = ((), lmq.foreign_id(name, attempt))
    if kept is not None:
        key = (kept.way_back, kept.id) if kept.command == lmq.TRACKEXEC else None
    return Lease(name, attempt, key, terms.slots, terms.lease_ns)


def tracked_message(name: bytes, attempt: int, arguments: Sequence[bytes]) -> Message:
    """Return a message whose RESPONSE is sent to us and identifies its task."""
    return lmq.Message(lmq.TRACKEXEC, lmq.foreign_id(name, attempt), arguments)


def name_of(identity: bytes, prefix: bytes = ROUND_ROBIN) -> bytes:
    """Return a worker's name in the core: its identity if printable, else in hexadecimal."""
    is_text = identity.isascii() and identity.decode("latin-1").isprintable()
    if is_text and not identity.startswith(_HEX):
        return prefix + identity
    return prefix + _HEX + identity.hex().encode()


def identity_of(name: bytes, prefix: bytes = ROUND_ROBIN) -> bytes | None:
    """Return the identity of a worker's name. None: the name is invalid."""
    identity = name.removeprefix(prefix)
    if not identity.startswith(_HEX):
        return identity
    try:
        return bytes.fromhex(identity[len(_HEX) :].decode("latin-1"))
    except ValueError:
        return None
