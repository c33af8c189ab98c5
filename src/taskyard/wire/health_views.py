"""The broker's health as JSON: its own times and sizes, and the counters of its scheduler.

Owns the names of these fields, which scripts rely on, like `views`. All counters begin at 0 when
the broker starts. The owner of the broker fills in what the scheduler does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct, field

from taskyard.core.counters import OUTCOMES, TASK_BOUNDS_NS, TURN_BOUNDS_NS
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.wire.documents import Document, filled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core import counters


class Histogram(Document):
    """Durations in seconds, counted in buckets."""

    #: A count for each bound, which it includes, and one for all that is longer.
    counts: list[int]
    #: All durations together.
    sum: float
    #: Estimates within their buckets, and the longest duration.
    p50: float
    p99: float
    longest: float


class ServiceHealth(Document):
    """The attempts of a service."""

    #: `(other)` stands for services beyond the first 200.
    name: str
    #: Ended attempts by outcome: `finished`, `failed`, `postponed`, `returned`, `expired` or
    #: `cancelled`.
    attempts: dict[str, int]
    #: How long they ran: as the worker measured it, or else from the lease to the report.
    run: Histogram
    #: How long tasks were ready until they were leased, unless they were before the broker started.
    wait: Histogram


class RelayHealth(Document):
    """A relay that has sent messages. Relays of other dialects can't be told from their peers."""

    #: `native` or `wmp`.
    dialect: str
    #: 1: connected to this broker itself. 2: to such a relay, and so on.
    depth: int
    #: Of the native dialect: clients, workers and relays behind it. Of WMP: workers.
    peers: int
    #: Of its connection: a host and port, or a process. Empty: it is behind another relay.
    address: str
    #: The name of its key. Empty: it needs none, or is behind another relay.
    key: str
    #: Seconds since its first message.
    connected_ago: float
    #: Seconds since its last message.
    last_seen_ago: float


class OutboxHealth(Document):
    """Tasks in the outbox of a broker on PostgreSQL, as of the last second."""

    #: Not submitted yet.
    new: int
    #: Refused, until they are retried or dropped.
    refused: int


class StandbyHealth(Document):
    """A standby of this broker."""

    host: str
    #: Where it will listen.
    endpoints: list[str]
    #: Rows that it had not applied at its last report.
    rows_behind: int
    #: How old its state is at most, in seconds: since it had all rows, as far as this broker knows.
    seconds_behind: float
    #: Seconds since its last report.
    last_seen_ago: float


class LeaderHealth(Document):
    """The term of a broker whose journal is in PostgreSQL."""

    epoch: int
    host: str
    #: Listeners beside the native socket.
    endpoints: list[str]
    #: Seconds that a standby waits before it takes over from this broker.
    lease: float
    #: Standbys that reported since this broker started.
    standbys: list[StandbyHealth]


class Health(Document):
    """The broker's own health. Counters begin at 0 when it starts."""

    started: float
    #: Upper bounds in seconds of the buckets of `turns` and `syncs`, and of `run` and `wait`.
    turn_bounds: list[float]
    task_bounds: list[float]
    #: Turns, from their messages to their replies, and the commits in them.
    turns: Histogram
    syncs: Histogram
    #: On the disk. Rows that a snapshot covers do not count.
    journal_bytes: int
    journal_rows: int
    history_bytes: int
    #: Large arguments and results, as of the last count.
    blob_bytes: int
    #: null: the journal is in memory.
    disk_free_bytes: int | None
    #: Open connections. null: not counted on this system.
    connections: int | None
    #: Malformed messages, by dialect.
    malformed: dict[str, int]
    submitted: int
    #: Failed attempts after which the task is tried again.
    retries: int
    #: Attempts that ended because their worker was lost.
    lease_expiries: int
    #: Reports of attempts that were over.
    stale_results: int
    services: list[ServiceHealth]
    #: The relays with the latest messages, at most 100 of a dialect.
    relays: list[RelayHealth]
    #: null: the broker has none, because its journal is not in PostgreSQL.
    outbox: OutboxHealth | None
    #: null: the journal is not in PostgreSQL.
    leader: LeaderHealth | None


class BrokerMeasures(Struct):
    """The part of a broker's health that its scheduler does not count."""

    turns: counters.Histogram
    syncs: counters.Histogram
    journal_bytes: int = 0
    journal_rows: int = 0
    history_bytes: int = 0
    disk_free_bytes: int | None = None
    connections: int | None = None
    malformed: dict[str, int] = field(default_factory=dict)
    relays: list[RelayHealth] = field(default_factory=list)
    blob_bytes: int = 0
    outbox: OutboxHealth | None = None
    leader: LeaderHealth | None = None


def health(counted: counters.Counters, measures: BrokerMeasures) -> Health:
    """Return a broker's health from both of its parts."""
    return filled(
        Health,
        measures,
        started=counted.started_ns / SECOND_NS,
        turn_bounds=[bound_ns / SECOND_NS for bound_ns in TURN_BOUNDS_NS],
        task_bounds=[bound_ns / SECOND_NS for bound_ns in TASK_BOUNDS_NS],
        turns=_histogram(measures.turns),
        syncs=_histogram(measures.syncs),
        submitted=counted.submitted,
        retries=counted.retries,
        lease_expiries=counted.lease_expiries,
        stale_results=counted.stale_results,
        services=[
            ServiceHealth(
                name=shown(name),
                attempts=dict(zip(OUTCOMES, one.attempts, strict=True)),
                run=_histogram(one.run),
                wait=_histogram(one.wait),
            )
            for name, one in counted.services.items()
        ],
        disk_free_bytes=measures.disk_free_bytes,
        connections=measures.connections,
    )


def _histogram(value: counters.Histogram) -> Histogram:
    return Histogram(
        counts=value.counts,
        sum=value.sum_ns / SECOND_NS,
        p50=value.quantile_ns(0.5) / SECOND_NS,
        p99=value.quantile_ns(0.99) / SECOND_NS,
        longest=value.longest_ns / SECOND_NS,
    )


class SeenRelay(Struct, eq=False):
    """A relay, with the times of its first and its last message."""

    #: 1: connected to the broker itself. 2: to such a relay, and so on.
    depth: int
    since_ns: int
    last_seen_ns: int
    #: Of its connection. Empty: unknown, as for any relay behind another relay.
    address: str = ""
    #: The name of its key. Empty: it has none, or is behind another relay.
    key: str = ""

    def health(self, dialect: str, peers: int, now_ns: int) -> RelayHealth:
        """Return the relay for the status, with the number of peers behind it."""
        return RelayHealth(
            dialect=dialect,
            depth=self.depth,
            peers=peers,
            address=self.address,
            key=self.key,
            connected_ago=max(now_ns - self.since_ns, 0) / SECOND_NS,
            last_seen_ago=max(now_ns - self.last_seen_ns, 0) / SECOND_NS,
        )


@runtime_checkable
class RelayedDialect(Protocol):
    """A dialect that recognizes relays."""

    #: Relays whose first message was just received, for their address.
    newcomers: list[SeenRelay]

    def relays(self, now_ns: int) -> Iterable[RelayHealth]:
        """Return the relays for the status, at most some, with the latest messages."""
