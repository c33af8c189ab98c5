"""What the scheduler knows of workers.

Durable: who they are, what they hold. Volatile: when they were last heard, whether they wait for
work, who was used least recently. A restart forgets the volatile part and gives every lease its
full time again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from taskyard.core.limits import HEARTBEATS_MISSED_MAX
from taskyard.core.states import BUSY, WORKER_TRANSITIONS, WorkerCause, WorkerState
from taskyard.errors import IllegalTransition

if TYPE_CHECKING:
    from taskyard.core.model import Lease, Task
    from taskyard.core.queues import Lane, Reservation


class WorkerFacts(Struct, array_like=True, frozen=True):
    """What a worker says of itself when it joins."""

    services: tuple[bytes, ...] = (b"default",)
    #: Room for this many slots of tasks at once; 0: as many as it asks for.
    slots_total: int = 1
    #: Silence after which it has left; 0: its silence means nothing.
    lease_timeout_ns: int = 0
    #: A worker that comes back as another process says another number.
    incarnation: int = 0
    #: It is told of work and asks for it then, instead of being handed it.
    wants_wake: bool = False
    #: It wants work whenever it has a free slot, without asking each time.
    always_ready: bool = False
    dialect: bytes = b""
    #: The machine and process that it runs in; b"" and 0: its dialect does not say.
    host: bytes = b""
    pid: int = 0
    #: How long it keeps its older leases after a restart of the broker, whatever it sends. Set if
    #: its dialect can't list held tasks. 0: they end as all leases do.
    restart_lease_ns: int = 0
    #: How often it is heard at least; 0: another process gets its name at once.
    heartbeat_ns: int = 0


class Replaced(Struct, array_like=True):
    """A process that lost its name to another, and the tasks that were charged for it."""

    names: list[bytes]
    attempts: list[int]
    #: It was heard again: it was not dead, and nothing is charged any more.
    returned: bool = False


class Worker(Struct, eq=False):
    """A peer that does tasks."""

    name: bytes
    facts: WorkerFacts
    #: Its leases by number, oldest first.
    leases: dict[int, Lease] = field(default_factory=dict)
    #: Slots of the tasks it holds.
    slots_used: int = 0
    #: Slots of tasks that it has answered and not yet freed, oldest first.
    slots_kept: list[int] = field(default_factory=list)

    # Volatile from here on.
    state: WorkerState = BUSY
    #: How many tasks it waits for while it is parked.
    tasks_wanted: int = 0
    #: The request by which it asked for them; 0: none, or answered.
    open_request: int = 0
    last_seen_ns: int = 0
    #: Tasks that it takes beyond its slots, so that the next one is at hand.
    prefetch: int = 0
    #: When its silence is looked at next; 0: it is not watched.
    timeout_check_ns: int = 0
    #: The longest lease time of what it holds, where that is longer than its own silence.
    lease_ns_max: int = 0
    #: Rises with every assignment; the smallest is the least recently used.
    last_used: int = 0
    #: The `last_used` under which it stands in the lists of its services; -1 for in none.
    listed_as: int = -1
    #: The service that it was called for, and when that call runs out.
    woken_for: bytes = b""
    wake_ends_ns: int = 0
    #: The lane that it goes on with, and how many of its tasks it had in a row.
    lane: Lane | None = None
    lane_run: int = 0
    #: The service to look at first, so that its services take turns.
    service_next: int = 0
    #: The task that it is kept free for.
    reservation: Reservation | None = None
    #: Why it can't start its agents; b"": all is well, or it did not say.
    trouble: bytes = b""
    #: How many of `slots_kept` may be left of a former broker process: the fewest since its end.
    slots_kept_before: int = 0
    #: Lines of its agents that are neither report nor comment.
    malformed: int = 0
    #: Another process wants its name and was heard lately: until when that counts. 0: none does.
    contested_until_ns: int = 0

    def turn(self, cause: WorkerCause) -> None:
        """The one mover of a worker's state."""
        try:
            self.state = WORKER_TRANSITIONS[self.state][cause]
        except KeyError:
            text = f"worker {self.name!r} is {self.state.name} and can't be turned by {cause.name}"
            raise IllegalTransition(text) from None

    @property
    def slots_free(self) -> int:
        """Room for further slots, derived from what it holds; a large number where unlimited.
        Below 0 where it holds more than it now takes."""
        if not self.facts.slots_total:
            return SLOTS_UNLIMITED
        return self.facts.slots_total + self.prefetch - self.slots_used - sum(self.slots_kept)

    @property
    def lease_timeout_ns(self) -> int:
        """The silence that it is allowed now; 0: any. Less while its name is contested."""
        allowed_ns = max(self.facts.lease_timeout_ns, self.lease_ns_max)
        if not self.contested_until_ns:
            return allowed_ns
        missed_ns = (HEARTBEATS_MISSED_MAX + 1) * self.facts.heartbeat_ns
        return min(allowed_ns or missed_ns, missed_ns)

    @property
    def timeout_at_ns(self) -> int:
        """When its silence becomes too long; 0 for never."""
        lease_timeout_ns = self.lease_timeout_ns
        return self.last_seen_ns + lease_timeout_ns if lease_timeout_ns else 0

    def held(self) -> list[Task]:
        """The tasks that it holds, in the order in which they were given."""
        return [
            task for lease in self.leases.values() for task in lease.tasks if task.lease is lease
        ]


#: More slots than any worker could fill.
SLOTS_UNLIMITED = 1 << 60
