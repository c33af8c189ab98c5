"""What a seed draws before anything happens: how big the world is, and what goes wrong in it.

Swarm testing: each seed switches features and faults on and off, so that rare ones meet often in
some runs instead of seldom in all. Everything is a plain number, printed first in every run.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from taskyard.core.events import LaneOptions, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND_NS: Final = 1_000_000_000
MILLISECOND_NS: Final = 1_000_000

#: How the broker names tasks of clients who give no names.
NAMED_BY_BROKER: Final = (b"ping-pong-", b"round-robin-")

#: What a truncated result begins with, and the length that it had.
TRUNCATED: Final = b"... "
RESULT_BYTES: Final = 5_000_000


class Faults(Struct):
    """Probabilities a message, a commit or a second. All zero: a perfect world."""

    # The network, a message.
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False
    delay: float = 0.0
    delay_ns_max: int = 1
    latency_ns_max: int = 2 * MILLISECOND_NS
    #: A peer's link is cut, one way or both, for a while: a second of the run.
    partition: float = 0.0
    #: What is sent to a dead peer is reported as undeliverable, else silently lost.
    undeliverable_told: float = 0.5
    #: What is sent to a dead broker waits in the sender's socket, else it is lost.
    queued_while_down: bool = False

    # The disk, a commit.
    crash_before_commit: float = 0.0
    crash_in_commit: float = 0.0
    commit_fails: float = 0.0
    disk_slow: float = 0.0
    disk_slow_ns_max: int = 1
    witness_synced: float = 0.5
    #: A turn: a snapshot is taken, before it ended tasks are archived, after it rows are trimmed.
    snapshot: float = 0.0
    archive: float = 0.0
    trim: float = 0.0
    #: At a restart.
    power_cut: float = 0.0
    damage: float = 0.0

    # Crashes: of the broker a sent effect and a second, of peers a second.
    crash_between_sends: float = 0.0
    crash_broker: float = 0.0
    crash_worker: float = 0.0
    crash_client: float = 0.0
    hang_worker: float = 0.0
    stop_worker: float = 0.0
    restart_ns_max: int = 3 * SECOND_NS

    # The machine, a second.
    clock_jump: float = 0.0
    clock_jump_ns_max: int = 1
    disk_full: float = 0.0
    rules_change: float = 0.0

    # What workers make of a task.
    fails: float = 0.0
    deaf: float = 0.0  #: a worker goes on with what it was told to stop
    strange: float = 0.0  #: any outcome but DONE and FAILED
    transfers: float = 0.0
    batches: float = 0.0  #: keeps a report back, to tell several at once
    repeats: float = 0.0  #: reports all that it was last assigned, whatever became of it
    progress: float = 0.0
    facts_change: float = 0.0  #: a heartbeat: it says something else of itself

    @property
    def longest_delay_ns(self) -> int:
        """How long a message can be under way, beyond the usual."""
        late_ns = self.delay_ns_max if self.duplicate else 0
        return late_ns + (self.delay_ns_max if self.delay else 0)


class Size(Struct):
    """How much there is of everything."""

    clients: int
    #: Others, by their dialects.
    other_clients: tuple[str, ...]
    services: int
    lanes: int
    campaigns: int
    tasks: int
    batch: int
    workers: tuple[str, ...]
    slots: int
    faulty_ns: int
    heartbeat_ns: int
    silence_ns: int
    work_ns_max: int


class Wants(Struct):
    """How likely a task, or a batch, has some feature."""

    lane: float
    after: float
    after_ahead: float
    after_unknown: float
    cycle: float
    due: float
    expires: float
    priority: float
    retries: float
    has_wide_tasks: float
    lease: float
    poison: float
    repeat: float
    cancel: float
    retry: float
    pause: float
    move: float
    watch: float
    drain: float
    ask: float


class Plan(Struct):
    """All that a seed has drawn."""

    seed: int
    size: Size
    wants: Wants
    faults: Faults
    services: tuple[bytes, ...]
    #: How lanes are run at first.
    clauses: tuple[Rule, ...]
    broker_workers_max: int

    def lines(self) -> list[str]:
        """The drawn numbers, for people."""
        lines = [f"seed {self.seed}"]
        for part in (self.size, self.wants, self.faults):
            drawn = [f"{name} {value}" for name, value in structs.asdict(part).items() if value]
            lines.append(f"{type(part).__name__.lower()}: " + ", ".join(drawn))
        lines.append(f"rules: {self.clauses}, broker {self.broker_workers_max}")
        return lines


def chance(luck: Random, probability: float) -> bool:
    return luck.random() < probability


CLIENT_KINDS: Final = ("plain", "ping", "round-robin")
#: Workers that a stranger may write, and those that we ship.
FOREIGN_KINDS: Final = ("pull", "plain", "standing", "called", "ping")
SHIPPED_KINDS: Final = ("native", "wmp", "ping-pong", "round-robin")
WORKER_KINDS: Final = (*FOREIGN_KINDS, *SHIPPED_KINDS)


def draw(seed: int, kinds: Sequence[str] = WORKER_KINDS) -> Plan:
    """The plan of a seed, with workers of these kinds."""
    luck = Random(seed)
    size = _draw_size(luck, kinds)
    # Plain dwork and ping-pong know no other than the first.
    services = (b"default", *(b"s%d" % number for number in range(1, size.services)))
    limited = chance(luck, 0.5)
    return Plan(
        seed=seed,
        size=size,
        wants=_draw_wants(luck),
        faults=_draw_faults(luck),
        services=services,
        clauses=draw_clauses(luck, services, limited=limited),
        broker_workers_max=luck.choice((0, 0, 0, 1, 3)) if limited else 0,
    )


def _draw_size(luck: Random, kinds: Sequence[str]) -> Size:
    drawn = luck.sample(kinds, min(len(kinds), luck.choice((1, 1, 2, 3, 5))))
    heartbeat_ns = luck.choice((500, 1000)) * MILLISECOND_NS
    return Size(
        clients=luck.choice((1, 1, 2, 3)),
        other_clients=tuple(kind for kind in CLIENT_KINDS if chance(luck, 0.25)),
        services=luck.choice((1, 1, 2, 3)),
        lanes=luck.choice((1, 2, 4)),
        campaigns=luck.choice((1, 2)),
        tasks=luck.choice((6, 12, 20, 30)),
        batch=luck.choice((1, 3, 6, 10)),
        workers=tuple(luck.choice(drawn) for _ in range(luck.choice((1, 2, 3, 4)))),
        slots=luck.choice((1, 2, 4)),
        faulty_ns=luck.choice((4, 8, 12)) * SECOND_NS,
        heartbeat_ns=heartbeat_ns,
        silence_ns=heartbeat_ns * luck.choice((3, 4)),
        work_ns_max=luck.choice((20, 200, 1000, 5000, 5000)) * MILLISECOND_NS,
    )


def _draw_wants(luck: Random) -> Wants:
    def some(*values: float) -> float:
        return luck.choice(values) if chance(luck, 0.5) else 0.0

    return Wants(
        lane=some(0.3, 0.7, 1.0),
        after=some(0.2, 0.5),
        after_ahead=some(0.5),
        after_unknown=some(0.3),
        cycle=some(0.2),
        due=some(0.1, 0.3),
        expires=some(0.2, 0.5),
        priority=some(0.3, 0.6),
        retries=some(0.5, 1.0),
        has_wide_tasks=some(0.2) if chance(luck, 0.5) else 0.0,
        lease=some(0.3),
        poison=some(0.05, 0.2),
        repeat=some(0.3),
        cancel=some(0.2, 0.5),
        retry=some(0.3),
        pause=some(0.2),
        move=some(0.2),
        watch=some(0.3, 0.6),
        drain=some(0.1) if chance(luck, 0.5) else 0.0,
        ask=some(0.5, 1.0),
    )


#: Clauses that are no service's own: they fit lanes of several, or some of one.
PATTERNS: Final = (b"*/l0", b"*/l[12]", b"default/l?", b"s1/*", b"default/")


def draw_clauses(luck: Random, services: Sequence[bytes], *, limited: bool) -> tuple[Rule, ...]:
    """One for each service, and before them now and then one by another pattern."""
    odd = luck.sample(PATTERNS, luck.choice((0, 0, 1, 2)))
    matches = {
        **{b"odd " + match: match for match in odd},
        **{one: one + b"/*" for one in services},
    }
    special = chance(luck, 0.3)
    return tuple(
        Rule(name, match, _draw_special(luck, draw_rules(luck, limited=limited), special=special))
        for name, match in matches.items()
    )


def _draw_special(luck: Random, rules: LaneOptions, *, special: bool) -> LaneOptions:
    """The rules, with what few lanes have."""
    if not special:
        return rules
    return structs.replace(
        rules,
        is_random=chance(luck, 0.5),
        is_held=chance(luck, 0.3),
        debounce_ns=luck.choice((0, 0, 200, 1500)) * MILLISECOND_NS,
        expiry_ns=luck.choice((0, 0, 6)) * SECOND_NS,
        expiry_hard_ns=luck.choice((0, 0, 0, 8)) * SECOND_NS,
        report_after_ns=luck.choice((0, 2)) * SECOND_NS,
    )


def draw_rules(luck: Random, *, limited: bool) -> LaneOptions:
    retries = (SECOND_NS // 5, SECOND_NS)[: luck.choice((0, 1, 2))]
    jitter = luck.choice((0, 0, 20))
    if not limited:
        return LaneOptions(retry_delays_ns=retries, jitter_percent=jitter)
    return LaneOptions(
        workers_max=luck.choice((0, 1, 2)),
        lane_workers_max=luck.choice((1, 1, 2)),
        overfeed=luck.choice((0, 0, 1)),
        rate_interval_ns=luck.choice((0, 0, 40, 250)) * MILLISECOND_NS,
        retry_delays_ns=retries,
        jitter_percent=jitter,
    )


def _draw_faults(luck: Random) -> Faults:
    faults = Faults(deaf=luck.choice((0.0, 0.5, 1.0)), batches=luck.choice((0.0, 0.5, 0.9)))
    for draw_some in (_network_faults, _disk_faults, _crashes, _mishaps):
        if chance(luck, 0.7):
            draw_some(luck, faults)
    return faults


def _some(luck: Random, *values: float) -> float:
    return luck.choice(values) if chance(luck, 0.5) else 0.0


def _network_faults(luck: Random, faults: Faults) -> None:
    faults.drop = _some(luck, 0.02, 0.1)
    faults.duplicate = _some(luck, 0.1, 0.3)
    faults.reorder = chance(luck, 0.5)
    faults.delay = _some(luck, 0.05, 0.2)
    faults.delay_ns_max = luck.choice((500, 2000, 4000)) * MILLISECOND_NS
    faults.latency_ns_max = luck.choice((1, 5, 50)) * MILLISECOND_NS
    faults.partition = _some(luck, 0.1, 0.4)
    faults.undeliverable_told = luck.choice((0.0, 0.5, 1.0))
    faults.queued_while_down = chance(luck, 0.5)


def _disk_faults(luck: Random, faults: Faults) -> None:
    faults.crash_before_commit = _some(luck, 0.01, 0.03)
    faults.crash_in_commit = _some(luck, 0.01, 0.03)
    faults.commit_fails = _some(luck, 0.02, 0.05)
    faults.disk_slow = _some(luck, 0.05, 0.5)
    faults.disk_slow_ns_max = luck.choice((10, 300)) * MILLISECOND_NS
    faults.witness_synced = luck.choice((0.0, 0.5, 1.0))
    faults.snapshot = _some(luck, 0.05, 0.2)
    faults.trim = luck.choice((0.0, 0.5))
    faults.archive = luck.choice((0.0, 0.5, 1.0))
    faults.power_cut = luck.choice((0.0, 0.5))
    faults.damage = luck.choice((0.0, 1.0))
    faults.disk_full = _some(luck, 0.2, 0.5)


def _crashes(luck: Random, faults: Faults) -> None:
    faults.crash_between_sends = _some(luck, 0.01, 0.03)
    faults.crash_broker = _some(luck, 0.1, 0.4)
    faults.crash_worker = _some(luck, 0.05, 0.2)
    faults.crash_client = _some(luck, 0.1)
    faults.hang_worker = luck.choice((0.0, 0.2, 0.5))
    faults.stop_worker = _some(luck, 0.05)
    faults.restart_ns_max = luck.choice((100, 1000, 6000)) * MILLISECOND_NS


def _mishaps(luck: Random, faults: Faults) -> None:
    faults.clock_jump = _some(luck, 0.1, 0.3)
    faults.clock_jump_ns_max = luck.choice((1, 10, 3600)) * SECOND_NS
    faults.fails = _some(luck, 0.2, 0.5)
    faults.strange = _some(luck, 0.2, 0.5)
    faults.repeats = _some(luck, 0.2)
    faults.transfers = _some(luck, 0.1, 0.2)
    faults.progress = _some(luck, 0.3)
    faults.facts_change = _some(luck, 0.1)
    faults.rules_change = _some(luck, 0.1, 0.3)
