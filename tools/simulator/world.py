"""The world of one run: its time, random numbers, network, broker and checkers.

Joins these parts and records the trace. Knows peers and the broker's host by protocols.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import NODEFAULT, Struct

from simulator.checkers import Checker
from simulator.clock import SimClock, Timeline
from simulator.network import BrokerInbox, Network
from simulator.plan import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from simulator.plan import Plan
    from taskyard.core.events import RulesSet
    from taskyard.core.ledger import Ledger
    from taskyard.journal.chain import Head, Row

_encode_into = msgspec.msgpack.Encoder().encode_into

#: Separates the random numbers of the run from the plan's.
_RNG_SEED_OFFSET: Final = 1 << 40


#: Longer than any peer waits for a reply.
CALM_NS: Final = 10 * SECOND_NS


class HostStore(Protocol):
    """The journal, as the world sees it."""

    full: bool

    @property
    def head(self) -> Head: ...


class Host(BrokerInbox, Protocol):
    """The machine of the broker."""

    restarts: int

    @property
    def store(self) -> HostStore: ...

    @property
    def is_between_turns(self) -> bool:
        """Return whether the ledger has no record that is not in the journal yet."""
        ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def is_running(self) -> bool:
        """Return whether a broker has connections, also if it is stopped."""
        ...

    @property
    def settle_ns(self) -> int:
        """Return how long the brokers need once their faults have ended."""
        ...

    def start(self) -> None: ...

    def crash(self, why: str) -> None: ...

    def set_rules(self, rules: RulesSet) -> None: ...

    def heal(self) -> None: ...

    def compact(self) -> None: ...

    def check_blobs(self) -> None: ...

    def installed(self) -> AbstractContextManager[None]: ...


class World:
    """Everything that peers and the broker's host can reach."""

    def __init__(
        self,
        plan: Plan,
        make_host: Callable[[World], Host],
        *,
        invariants: bool = True,
        say: Callable[[str], None] | None = None,
        on_row: Callable[[Row], None] | None = None,
    ) -> None:
        self.plan = plan
        self._on_row = on_row
        self.faults = plan.faults
        self.rng = Random(plan.seed + _RNG_SEED_OFFSET)
        self.invariants = invariants
        self.timeline = Timeline()
        self.clock = SimClock(self.timeline)
        self.checker = Checker(plan, self.timeline, self.clock)
        self.host = make_host(self)
        self.network = Network(self.timeline, self.rng, self.faults, self.host)
        #: The networks between workers and relays.
        self.relay_networks: list[Network] = []
        #: The networks between native workers and their relays.
        self.native_relay_networks: list[Network] = []
        #: Every name that a task ever had.
        self.names: list[bytes] = []
        #: Tasks that kill their worker.
        self.poisoned: dict[bytes, None] = {}
        self.healed = False
        #: Faults ended long enough ago that no earlier message is on the way: every request is
        #: answered.
        self.revived = False
        #: All tasks are settled, and every worker must get a task once more.
        self.is_last_round = False
        #: When the last round began with a mishap.
        self.mishap_ns = -CALM_NS
        #: Messages may be duplicated, or a duplicate may still be on the way.
        self.may_duplicate = plan.faults.duplicate > 0
        self.events = 0
        self._say = say
        #: All events so far, encoded. A hash at the end is quicker than a hash of each event.
        self._traced = bytearray()

    @property
    def is_calm(self) -> bool:
        """Return whether the last mishap is over, and no peer waits for a message lost in it."""
        return self.timeline.now_ns > self.mishap_ns + CALM_NS

    def networks(self) -> list[Network]:
        """Return the broker's network and the relays' networks."""
        return [self.network, *self.relay_networks, *self.native_relay_networks]

    def trace(self, what: str, thing: object = "", frames: Sequence[bytes] = ()) -> None:
        """Add an event to the digest, and print it if the run is verbose. Frames are not
        printed."""
        self.events += 1
        now_ns = self.timeline.now_ns
        _encode_into((now_ns, what, thing, frames), self._traced, -1)
        if self._say is not None:
            self._say(f"{now_ns / SECOND_NS:.6f} {what} {short_text(thing)}")

    def row_durable(self, row: Row) -> None:
        """Check a row of the journal that no crash can lose any more."""
        self.checker.row_durable(row)
        if self._on_row is not None:
            self._on_row(row)

    def digest(self) -> str:
        return hashlib.sha256(self._traced + self.host.store.head.chain).hexdigest()


def short_text(thing: object) -> str:
    """Format a value shortly, without fields that have their defaults."""
    if isinstance(thing, Struct):
        fields = msgspec.structs.fields(thing)
        shown = {
            field.name: getattr(thing, field.name) for field in fields if _is_shown(thing, field)
        }
        return (
            f"{type(thing).__name__}({', '.join(f'{k}={short_text(v)}' for k, v in shown.items())})"
        )
    if isinstance(thing, bytes):
        return thing.decode(errors="backslashreplace") or "''"
    if isinstance(thing, Enum):
        return thing.name
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(short_text, thing))}]"
    if isinstance(thing, dict):
        pairs = [f"{short_text(key)}: {short_text(value)}" for key, value in thing.items()]
        return f"{{{', '.join(pairs)}}}"
    return str(thing)


def _is_shown(thing: Struct, field: msgspec.structs.FieldInfo) -> bool:
    """Return whether a field is printed: not the time, which starts the line, and no default."""
    value = getattr(thing, field.name)
    if field.name == "now_ns":
        return False
    if field.default_factory is not NODEFAULT:
        return bool(value != field.default_factory())
    return bool(value != field.default)
