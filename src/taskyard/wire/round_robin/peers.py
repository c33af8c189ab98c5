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

#: Taken off the slots of a worker that nothing reaches: it gets nothing until it is heard.
_UNREACHABLE: Final = 1 << 40

#: How worker names begin whose identity is no text.
_HEX: Final = b"0x"


class Lease(Struct, eq=False):
    """A message that a worker has."""

    name: bytes
    attempt: int
    #: What its RESPONSE begins with: where it goes, and its id. None: EXEC, which has none.
    key: tuple[tuple[bytes, ...], bytes] | None
    slots: int
    #: Silence that its worker is allowed while it has it, if longer than usual.
    lease_ns: int
    #: The scheduler has taken it away, or never got its result: it is the worker's alone.
    is_void: bool = False
    #: A former process of the server gave it.
    is_recalled: bool = False
    #: A recalled EXEC: what its RESPONSE begins with if that process sent it as TRACKEXEC.
    tracked_key: tuple[tuple[bytes, ...], bytes] | None = None


class Peer(Struct, eq=False):
    """A worker, registered or gone."""

    identity: bytes
    #: Its name in the core.
    name: bytes
    last_seen_ns: int
    #: By which socket it was heard last; empty: not since this process began.
    route: bytes = b""
    slots: int = 0
    is_registered: bool = False
    #: It was told to go, which this dialect has no word for: it gets no more.
    is_dismissed: bool = False
    #: It has said that it goes, and has nothing left when it registers again.
    has_left: bool = False
    #: The request of a WorkerExited that the scheduler has not handled yet; 0: none.
    exit_request: int = 0
    #: Nothing reaches it.
    is_cut: bool = False
    #: It has not registered since this process began.
    is_recalled: bool = False
    #: It had something when the server restarted: an INCREMENT may be for any of that. So it is
    #: sent nothing that an INCREMENT settles, until it registers with none of that left.
    is_unsure: bool = False
    #: What it has, oldest first.
    leases: dict[bytes, Lease] = field(default_factory=dict)
    #: What it has answered, and not said INCREMENT for, oldest first.
    answered: deque[Lease] = field(default_factory=deque)
    #: INCREMENTs that came before their RESPONSE.
    freed_early: int = 0
    #: The last that was sent to it.
    just_given: list[Lease] = field(default_factory=list)
    #: What was taken from it because it could not be sent, or was lost with its silence. It may
    #: have that all the same.
    returned: dict[bytes, Lease] = field(default_factory=dict)
    pinged_ns: int = 0
    #: When the scheduler was told of its life; None: not since this process began.
    told_ns: int | None = None
    #: When its silence is looked at next; 0: never.
    timeout_check_ns: int = 0

    def ahead(self) -> int:
        """What the scheduler has to add to its slots."""
        if self.is_cut:
            return -_UNREACHABLE
        return -sum(lease.slots for lease in self.all() if lease.is_void)

    def all(self) -> list[Lease]:
        """Return everything that takes a slot."""
        return [*self.leases.values(), *self.answered]

    def oldest_untracked(self) -> Lease | None:
        """Return the EXEC that an INCREMENT settles; None: there is none, or it may be of another.

        A restart may have lost the assignment of any recalled lease, or its RESPONSE.
        """
        oldest = next((lease for lease in self.leases.values() if lease.key is None), None)
        if oldest is not None and oldest.is_recalled and len(self.leases) > 1:
            return None
        return oldest

    def find(self, key: tuple[tuple[bytes, ...], bytes]) -> Lease | None:
        """The oldest message that a RESPONSE may be about."""
        for leases in (self.leases, self.returned):
            for lease in leases.values():
                if key in (lease.key, lease.tracked_key):
                    return lease
        return None


def envelope_of(terms: Terms, envelope: bytes) -> lmq.Envelope | None:
    """What a task keeps of its message; None: it came in by another dialect."""
    return lmq.open_envelope(envelope) if terms.dialect == lmq.DIALECT else None


def lease_of(name: bytes, attempt: int, terms: Terms, kept: lmq.Envelope | None) -> Lease:
    key: tuple[tuple[bytes, ...], bytes] | None = ((), lmq.foreign_id(name, attempt))
    if kept is not None:
        key = (kept.way_back, kept.id) if kept.command == lmq.TRACKEXEC else None
    return Lease(name, attempt, key, terms.slots, terms.lease_ns)


def tracked_message(name: bytes, attempt: int, arguments: Sequence[bytes]) -> Message:
    """Return a message whose RESPONSE comes to us, and tells its task."""
    return lmq.Message(lmq.TRACKEXEC, lmq.foreign_id(name, attempt), arguments)


def name_of(identity: bytes) -> bytes:
    """A worker's name in the core: its identity if one can type it, else as digits."""
    is_text = identity.isascii() and identity.decode("latin-1").isprintable()
    if is_text and not identity.startswith(_HEX):
        return ROUND_ROBIN + identity
    return ROUND_ROBIN + _HEX + identity.hex().encode()


def identity_of(name: bytes) -> bytes | None:
    """The identity behind a name; None: there is none."""
    identity = name.removeprefix(ROUND_ROBIN)
    if not identity.startswith(_HEX):
        return identity
    try:
        return bytes.fromhex(identity[len(_HEX) :].decode("latin-1"))
    except ValueError:
        return None
