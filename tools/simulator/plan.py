"""The plan that a seed draws: the size of the world, and its faults.

Swarm testing: each seed switches features and faults on and off, so that rare faults are frequent
in some runs instead of rare in all. Everything is a plain number, printed first in every run.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from taskyard.core.rules import LaneOptions, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.resources import Resources

SECOND_NS: Final = 1_000_000_000
MILLISECOND_NS: Final = 1_000_000

#: Prefixes of the names that the broker makes for tasks without a name.
NAMED_BY_BROKER: Final = (b"ping-pong-", b"round-robin-")

#: The start of a truncated result, and its full length.
TRUNCATED: Final = b"... "
RESULT_BYTES: Final = 5_000_000


class Faults(Struct):
    """Probabilities per message, per commit or per second. All zero: no faults."""

    # The network, per message.
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False
    delay: float = 0.0
    delay_ns_max: int = 1
    latency_ns_max: int = 2 * MILLISECOND_NS
    #: A cut of a peer's link, one way or both, per second.
    partition: float = 0.0
    #: A message to a dead peer is reported as undeliverable, else silently lost.
    undeliverable_reported: float = 0.5
    #: A message to a dead broker waits in the sender's socket, else it is lost.
    queued_while_down: bool = False

    # The disk, per commit.
    crash_before_commit: float = 0.0
    crash_in_commit: float = 0.0
    commit_fails: float = 0.0
    disk_slow: float = 0.0
    disk_slow_ns_max: int = 1
    witness_synced: float = 0.5
    #: A snapshot, per turn. Before it ended tasks may be archived, after it rows may be trimmed.
    snapshot: float = 0.0
    archive: float = 0.0
    trim: float = 0.0
    #: At a restart.
    power_cut: float = 0.0
    damage: float = 0.0

    # Crashes: of the broker per effect and per second, of peers per second.
    crash_between_sends: float = 0.0
    crash_broker: float = 0.0
    crash_worker: float = 0.0
    crash_client: float = 0.0
    hang_worker: float = 0.0
    stop_worker: float = 0.0
    restart_ns_max: int = 3 * SECOND_NS

    # The machine, per second.
    clock_jump: float = 0.0
    clock_jump_ns_max: int = 1
    disk_full: float = 0.0
    rules_change: float = 0.0

    # Outcomes and habits of workers.
    fails: float = 0.0
    ignores_message: float = 0.0  #: a worker continues after a Stop
    unusual_outcome: float = 0.0  #: any outcome but DONE and FAILED
    transfers: float = 0.0
    batches: float = 0.0  #: delays a report, to send several at once
    repeats: float = 0.0  #: reports its last assignment again, whatever its tasks' states
    progress: float = 0.0
    facts_change: float = 0.0  #: per heartbeat: the worker's facts change

    @property
    def longest_delay_ns(self) -> int:
        """Return the longest delay of a message beyond the latency."""
        late_ns = self.delay_ns_max if self.duplicate else 0
        return late_ns + (self.delay_ns_max if self.delay else 0)


class Size(Struct):
    """Numbers of clients, workers and tasks, and times."""

    clients: int
    #: Further clients, by their dialects.
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


class TaskOdds(Struct):
    """Probabilities that a task, or a batch, has a feature."""

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
    resources: float = 0.0


class Plan(Struct):
    """Everything that a seed has drawn."""

    seed: int
    size: Size
    odds: TaskOdds
    faults: Faults
    services: tuple[bytes, ...]
    #: The rules of the lanes at the start.
    clauses: tuple[Rule, ...]
    broker_workers_max: int
    #: Whether some rules, also later rules, have rates for each lane, and weights.
    lane_rates: bool

    def lines(self) -> list[str]:
        """Return the drawn numbers as lines to print."""
        lines = [f"seed {self.seed}"]
        for part in (self.size, self.odds, self.faults):
            drawn = [f"{name} {value}" for name, value in structs.asdict(part).items() if value]
            lines.append(f"{type(part).__name__.lower()}: " + ", ".join(drawn))
        lines.append(f"rules: {self.clauses}, broker {self.broker_workers_max}")
        return lines


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


#: Separates the choices about resources from all other choices.
RESOURCE_SEED_OFFSET: Final = 1 << 41

#: Resources of a worker that has some, and of a task that needs some.
WORKER_RESOURCES: Final[tuple[Resources, ...]] = (
    ((b"gpus", 10_000),),
    ((b"gpus", 20_000), (b"memory", 2 << 30)),
)
TASK_RESOURCES: Final[tuple[Resources, ...]] = (
    ((b"gpus", 5_000),),
    ((b"gpus", 10_000),),
    ((b"gpus", 20_000),),
    ((b"gpus", 10_000), (b"memory", 1 << 30)),
    ((b"memory", 2 << 30),),
)

CLIENT_KINDS: Final = ("plain", "ping", "round-robin")
#: Model workers, and product workers.
FOREIGN_KINDS: Final = ("pull", "plain", "standing", "called", "ping")
SHIPPED_KINDS: Final = ("native", "wmp", "ping-pong", "round-robin")
WORKER_KINDS: Final = (*FOREIGN_KINDS, *SHIPPED_KINDS)

#: Workers whose dialect has a field for resources.
KINDS_WITH_RESOURCES: Final = ("pull", "native")


def draw(seed: int, kinds: Sequence[str] = WORKER_KINDS) -> Plan:
    """Draw the plan of a seed, with workers of these kinds."""
    rng = Random(seed)
    size = _draw_size(rng, kinds)
    # Plain dwork and ping-pong have only the first.
    services = (b"default", *(b"s%d" % number for number in range(1, size.services)))
    limited = chance(rng, 0.5)
    # A generator of its own, so that seeds without rates of lanes draw what they drew before.
    of_lanes = Random(f"rates of lanes {seed}")
    lane_rates = chance(of_lanes, 0.2)
    odds = _draw_wants(rng)
    if lane_rates and chance(of_lanes, 0.5):  # lanes that run empty again and again
        odds.lane, size.lanes, size.batch, size.work_ns_max = 1.0, 1, 1, 20 * MILLISECOND_NS
    # Separate, so that seeds without resources draw as before.
    resource_rng = Random(seed + RESOURCE_SEED_OFFSET)
    odds.resources = resource_rng.choice((0.3, 0.8)) if chance(resource_rng, 0.25) else 0.0
    return Plan(
        seed=seed,
        size=size,
        odds=odds,
        faults=_draw_faults(rng),
        services=services,
        clauses=with_lane_rates(
            of_lanes, draw_rules_of_services(rng, services, limited=limited), wanted=lane_rates
        ),
        broker_workers_max=rng.choice((0, 0, 0, 1, 3)) if limited else 0,
        lane_rates=lane_rates,
    )


def _draw_size(rng: Random, kinds: Sequence[str]) -> Size:
    drawn = rng.sample(kinds, min(len(kinds), rng.choice((1, 1, 2, 3, 5))))
    heartbeat_ns = rng.choice((500, 1000)) * MILLISECOND_NS
    return Size(
        clients=rng.choice((1, 1, 2, 3)),
        other_clients=tuple(kind for kind in CLIENT_KINDS if chance(rng, 0.25)),
        services=rng.choice((1, 1, 2, 3)),
        lanes=rng.choice((1, 2, 4)),
        campaigns=rng.choice((1, 2)),
        tasks=rng.choice((6, 12, 20, 30)),
        batch=rng.choice((1, 3, 6, 10)),
        workers=tuple(rng.choice(drawn) for _ in range(rng.choice((1, 2, 3, 4)))),
        slots=rng.choice((1, 2, 4)),
        faulty_ns=rng.choice((4, 8, 12)) * SECOND_NS,
        heartbeat_ns=heartbeat_ns,
        silence_ns=heartbeat_ns * rng.choice((3, 4)),
        work_ns_max=rng.choice((20, 200, 1000, 5000, 5000)) * MILLISECOND_NS,
    )


def _draw_wants(rng: Random) -> TaskOdds:
    def some(*values: float) -> float:
        return rng.choice(values) if chance(rng, 0.5) else 0.0

    return TaskOdds(
        lane=some(0.3, 0.7, 1.0),
        after=some(0.2, 0.5),
        after_ahead=some(0.5),
        after_unknown=some(0.3),
        cycle=some(0.2),
        due=some(0.1, 0.3),
        expires=some(0.2, 0.5),
        priority=some(0.3, 0.6),
        retries=some(0.5, 1.0),
        has_wide_tasks=some(0.2) if chance(rng, 0.5) else 0.0,
        lease=some(0.3),
        poison=some(0.05, 0.2),
        repeat=some(0.3),
        cancel=some(0.2, 0.5),
        retry=some(0.3),
        pause=some(0.2),
        move=some(0.2),
        watch=some(0.3, 0.6),
        drain=some(0.1) if chance(rng, 0.5) else 0.0,
        ask=some(0.5, 1.0),
    )


#: Patterns of rules that match lanes of several services, or some lanes of one.
PATTERNS: Final = (b"*/l0", b"*/l[12]", b"default/l?", b"s1/*", b"default/")


def draw_rules_of_services(
    rng: Random, services: Sequence[bytes], *, limited: bool
) -> tuple[Rule, ...]:
    """Draw a rule for each service, and sometimes one with another pattern before them."""
    odd = rng.sample(PATTERNS, rng.choice((0, 0, 1, 2)))
    matches = {
        **{b"odd " + match: match for match in odd},
        **{one: one + b"/*" for one in services},
    }
    special = chance(rng, 0.3)
    return tuple(
        Rule(
            name,
            match,
            _draw_special(rng, draw_lane_options(rng, limited=limited), special=special),
        )
        for name, match in matches.items()
    )


def with_lane_rates(rng: Random, rules: tuple[Rule, ...], *, wanted: bool) -> tuple[Rule, ...]:
    """Return the rules, if wanted with rates for each lane, and with weights."""
    if not wanted:
        return rules
    return tuple(
        structs.replace(
            rule,
            options=structs.replace(
                rule.options,
                lane_rate_interval_ns=rng.choice((0, 40, 250, 1500)) * MILLISECOND_NS,
                weight=rng.choice((1, 1, 3, 10)),
            ),
        )
        for rule in rules
    )


def _draw_special(rng: Random, rules: LaneOptions, *, special: bool) -> LaneOptions:
    """Return the rules with options that few lanes have."""
    if not special:
        return rules
    return structs.replace(
        rules,
        is_random=chance(rng, 0.5),
        is_held=chance(rng, 0.3),
        debounce_ns=rng.choice((0, 0, 200, 1500)) * MILLISECOND_NS,
        expiry_ns=rng.choice((0, 0, 6)) * SECOND_NS,
        expiry_hard_ns=rng.choice((0, 0, 0, 8)) * SECOND_NS,
        report_after_ns=rng.choice((0, 2)) * SECOND_NS,
    )


def draw_lane_options(rng: Random, *, limited: bool) -> LaneOptions:
    retries = (SECOND_NS // 5, SECOND_NS)[: rng.choice((0, 1, 2))]
    jitter = rng.choice((0, 0, 20))
    if not limited:
        return LaneOptions(retry_delays_ns=retries, jitter_percent=jitter)
    return LaneOptions(
        workers_max=rng.choice((0, 1, 2)),
        lane_workers_max=rng.choice((1, 1, 2)),
        overfeed=rng.choice((0, 0, 1)),
        rate_interval_ns=rng.choice((0, 0, 40, 250)) * MILLISECOND_NS,
        retry_delays_ns=retries,
        jitter_percent=jitter,
    )


def _draw_faults(rng: Random) -> Faults:
    faults = Faults(
        ignores_message=rng.choice((0.0, 0.5, 1.0)), batches=rng.choice((0.0, 0.5, 0.9))
    )
    for draw_some in (_network_faults, _disk_faults, _crashes, _mishaps):
        if chance(rng, 0.7):
            draw_some(rng, faults)
    return faults


def _random_share(rng: Random, *values: float) -> float:
    return rng.choice(values) if chance(rng, 0.5) else 0.0


def _network_faults(rng: Random, faults: Faults) -> None:
    faults.drop = _random_share(rng, 0.02, 0.1)
    faults.duplicate = _random_share(rng, 0.1, 0.3)
    faults.reorder = chance(rng, 0.5)
    faults.delay = _random_share(rng, 0.05, 0.2)
    faults.delay_ns_max = rng.choice((500, 2000, 4000)) * MILLISECOND_NS
    faults.latency_ns_max = rng.choice((1, 5, 50)) * MILLISECOND_NS
    faults.partition = _random_share(rng, 0.1, 0.4)
    faults.undeliverable_reported = rng.choice((0.0, 0.5, 1.0))
    faults.queued_while_down = chance(rng, 0.5)


def _disk_faults(rng: Random, faults: Faults) -> None:
    faults.crash_before_commit = _random_share(rng, 0.01, 0.03)
    faults.crash_in_commit = _random_share(rng, 0.01, 0.03)
    faults.commit_fails = _random_share(rng, 0.02, 0.05)
    faults.disk_slow = _random_share(rng, 0.05, 0.5)
    faults.disk_slow_ns_max = rng.choice((10, 300)) * MILLISECOND_NS
    faults.witness_synced = rng.choice((0.0, 0.5, 1.0))
    faults.snapshot = _random_share(rng, 0.05, 0.2)
    faults.trim = rng.choice((0.0, 0.5))
    faults.archive = rng.choice((0.0, 0.5, 1.0))
    faults.power_cut = rng.choice((0.0, 0.5))
    faults.damage = rng.choice((0.0, 1.0))
    faults.disk_full = _random_share(rng, 0.2, 0.5)


def _crashes(rng: Random, faults: Faults) -> None:
    faults.crash_between_sends = _random_share(rng, 0.01, 0.03)
    faults.crash_broker = _random_share(rng, 0.1, 0.4)
    faults.crash_worker = _random_share(rng, 0.05, 0.2)
    faults.crash_client = _random_share(rng, 0.1)
    faults.hang_worker = rng.choice((0.0, 0.2, 0.5))
    faults.stop_worker = _random_share(rng, 0.05)
    faults.restart_ns_max = rng.choice((100, 1000, 6000)) * MILLISECOND_NS


def _mishaps(rng: Random, faults: Faults) -> None:
    faults.clock_jump = _random_share(rng, 0.1, 0.3)
    faults.clock_jump_ns_max = rng.choice((1, 10, 3600)) * SECOND_NS
    faults.fails = _random_share(rng, 0.2, 0.5)
    faults.unusual_outcome = _random_share(rng, 0.2, 0.5)
    faults.repeats = _random_share(rng, 0.2)
    faults.transfers = _random_share(rng, 0.1, 0.2)
    faults.progress = _random_share(rng, 0.3)
    faults.facts_change = _random_share(rng, 0.1)
    faults.rules_change = _random_share(rng, 0.1, 0.3)
