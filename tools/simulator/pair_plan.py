"""The faults of two brokers and their database, drawn from the seed.

Like `plan`, but with random numbers of its own: plans of a seed stay the same with one broker.
"""

from __future__ import annotations

from random import Random
from typing import Final

from msgspec import Struct

from simulator.plan import MILLISECOND_NS, SECOND_NS, chance
from simulator.postgres import StoreFaults

#: Separates the choices about brokers and database from all other choices.
_PAIR_SEED_OFFSET: Final = 1 << 43


class PairFaults(Struct):
    """Probabilities per second or turn. All zero: no faults."""

    store: StoreFaults
    lease_ns: int
    #: Rows that are compacted. 0: no compaction.
    compact_rows: int = 0
    #: Brokers are standbys before they lead. Otherwise they start cold.
    is_warm: bool = True
    #: A broker stops and continues: per second, and per turn before a statement, before its lease
    #: is checked, or while its replies leave.
    pause: float = 0.0
    pause_in_turn: float = 0.0
    pause_ns_max: int = 1
    #: The leader is stopped with SIGTERM, per second.
    stop: float = 0.0
    #: The server is replaced by its standby, per second.
    failover: float = 0.0
    outage_ns_max: int = 1
    #: All connections of one broker are cut, per second.
    cut: float = 0.0


def draw_faults(seed: int) -> PairFaults:
    """Draw the faults of brokers and database. Each kind is absent in some schedules."""
    rng = Random(seed + _PAIR_SEED_OFFSET)

    def some(*values: float) -> float:
        return rng.choice(values) if chance(rng, 0.5) else 0.0

    lease_ns = rng.choice((1, 1, 2)) * SECOND_NS
    of_store = StoreFaults(
        delay=some(0.02, 0.1),
        delay_ns_max=rng.choice((20, 300, 1500, 4000)) * MILLISECOND_NS,
        renewal_delay=some(0.3, 0.7),
        renewal_delay_ns_max=rng.choice((lease_ns // 2, 2 * lease_ns)),
        compaction_delay=some(0.3),
        late_ns_max=4 * lease_ns,
        cut_before=some(0.01, 0.03),
        cut_after=some(0.01, 0.05),
        cut_late=some(0.01, 0.03),
        unconfirmed=rng.choice((0.0, 0.5, 1.0)),
        warning=some(0.02, 0.1),
    )
    drawn = PairFaults(
        store=of_store,
        lease_ns=lease_ns,
        compact_rows=rng.choice((2, 10)) if chance(rng, 0.4) else 0,
        is_warm=chance(rng, 0.8),
        pause=some(0.2, 0.8),
        pause_in_turn=some(0.01, 0.05),
        pause_ns_max=rng.choice((lease_ns, 5 * lease_ns)),
        stop=some(0.2, 0.8),
        failover=some(0.1, 0.3),
        outage_ns_max=rng.choice((200, 1500)) * MILLISECOND_NS,
        cut=some(0.1, 0.3),
    )
    if drawn.compact_rows and chance(rng, 0.7):
        # Few compactions end while connections are lost all the time. Brokers follow each other.
        drawn.compact_rows, drawn.stop, of_store.compaction_delay = 2, 0.5, 0.3
        of_store.cut_before = of_store.cut_after = of_store.cut_late = 0.0
        drawn.failover = drawn.cut = 0.0
        if chance(rng, 0.4):
            # A late trim comes after later trims only in a long term with quick compactions.
            drawn.stop, of_store.delay, of_store.compaction_delay = 0.2, 0.0, 0.0
            of_store.trim_late = 0.5
    return drawn
