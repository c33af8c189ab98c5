"""A schedule from its seed to its verdict: faults, recovery, and the end of all tasks."""

from __future__ import annotations

import logging
import traceback
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from simulator import plan
from simulator.broker_host import BrokerHost
from simulator.checkers.demands import compared_choices
from simulator.clients import PingPongModelClient
from simulator.models import Violation
from simulator.mutations.registry import (
    BLOB_MUTATIONS,
    INVARIANT_MUTATIONS,
    PAIR_MUTATIONS,
    WORKER_KINDS_OF,
    patched,
)
from simulator.outputs import has_blobs, limits_of, stress
from simulator.pair_host import PairHost
from simulator.plan import MILLISECOND_NS, SECOND_NS
from simulator.scenario import Scenario
from simulator.world import World
from taskyard.broker import blob_retention
from taskyard.core import deadlines
from taskyard.core.events import SubmitRequested, WatchRequested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from simulator.clients import RequestMaker
    from simulator.mutations import Mutation
    from taskyard.journal.chain import Row

#: Beyond the longest delay after the faults: all messages arrive within this.
SETTLE_NS: Final = SECOND_NS // 2

#: Every task must be settled within this, whatever the plan.
DRAIN_NS_MAX: Final = 400 * SECOND_NS


#: Without faults every worker gets a task within this, and the time for which its dialect lets it
#: be silent.
SERVED_NS_MAX: Final = 15 * SECOND_NS

#: Unused blobs are gone within this, and three times their grace.
SWEPT_NS: Final = 2 * SECOND_NS

_SILENT: Final = logging.NullHandler()


class ScheduleResult(Struct):
    """The verdict on a schedule."""

    seed: int
    digest: str
    events: int
    records: int
    restarts: int
    virtual_ns: int
    #: The checker of the broken promise, and the details. Empty if all were kept.
    checker: str = ""
    text: str = ""

    @property
    def good(self) -> bool:
        return not self.checker


@contextmanager
def _short_intervals() -> Iterator[None]:
    """Let few workers get different heartbeat intervals, as thousands of them would, and look for
    unused blobs without long pauses: a database may take seconds for its part."""
    with (
        patched(blob_retention, "SCAN_PAUSES", 1),
        patched(deadlines, "HEARTBEAT_NS_MIN", SECOND_NS // 4),
        patched(deadlines, "HEARTBEAT_RATE_MAX", 5),
    ):
        yield


def run(  # noqa: PLR0913  # all but one are named
    seed: int,
    *,
    invariants: bool = True,
    say: Callable[[str], None] | None = None,
    kinds: Sequence[str] = plan.WORKER_KINDS,
    on_row: Callable[[Row], None] | None = None,
    pair: bool = False,
) -> ScheduleResult:
    """Run the schedule of a seed, with workers of these kinds, and with two brokers if `pair`.

    `on_row` gets each row of the journal when it is durable.
    """
    drawn = plan.draw(seed, kinds)
    if has_blobs(seed):
        stress(drawn)
    if say is not None:
        for line in drawn.lines():
            say(line)
    # The loops log warnings. Without a handler Python would print them.
    logging.getLogger("taskyard").addHandler(_SILENT)
    make_host = PairHost if pair else BrokerHost
    world = World(drawn, make_host, invariants=invariants, say=say, on_row=on_row)
    checker, text = "", ""
    try:
        with compared_choices(), _short_intervals(), limits_of(seed), world.host.installed():
            _run_faulty_phase(world)
    except Violation as violation:
        checker, text = violation.checker, str(violation)
    except Exception as error:  # noqa: BLE001 - whatever the broker raises is a finding
        checker, text = type(error).__name__, traceback.format_exc()
    return ScheduleResult(
        seed=seed,
        digest=world.digest(),
        events=world.events,
        records=world.checker.model.records,
        restarts=world.host.restarts,
        virtual_ns=world.timeline.now_ns,
        checker=checker,
        text=text,
    )


def find_killing_seed(mutation: Mutation, seeds: Iterable[int]) -> ScheduleResult | None:
    """Return the first of these schedules that catches a planted bug: by the checkers, or by the
    invariants if it breaks no promise in the journal.

    Bugs of product loops are hunted with these alone, all other bugs with model workers, so that
    each shows often. A schedule that is bad without the bug as well catches nothing.
    """
    run_one = partial(
        run,
        invariants=mutation in INVARIANT_MUTATIONS,
        kinds=WORKER_KINDS_OF.get(mutation, plan.FOREIGN_KINDS),
        pair=mutation in PAIR_MUTATIONS,
    )
    for seed in seeds:
        if mutation in BLOB_MUTATIONS and not has_blobs(seed):
            continue
        with mutation():
            result = run_one(seed)
        if not result.good and run_one(seed).good:
            return result
    return None


def find_shorter(mutation: Mutation, found: ScheduleResult, seeds: Iterable[int]) -> ScheduleResult:
    """Return the shortest of these schedules in which the same checker catches a planted bug.

    Without any, return the schedule that was found before.
    """
    for seed in seeds:
        result = find_killing_seed(mutation, [seed])
        if result is not None and result.checker == found.checker and result.events < found.events:
            found = result
    return found


def _run_faulty_phase(world: World) -> None:
    scenario = Scenario(world)
    try:
        _play(world, scenario)
    finally:
        scenario.close()


def _play(world: World, scenario: Scenario) -> None:
    timeline = world.timeline
    scenario.begin()
    timeline.run_until(world.plan.size.faulty_ns)
    delay_ns = world.faults.longest_delay_ns
    scenario.heal()
    timeline.run_until(timeline.now_ns + delay_ns + SETTLE_NS + world.host.settle_ns)
    scenario.revive()
    revived_ns = timeline.now_ns
    ends_ns = timeline.now_ns + DRAIN_NS_MAX
    while not _drained(world, scenario):
        timeline.run_until(timeline.now_ns + SECOND_NS // 2)
        world.checker.check_timeouts()
        world.checker.check_due()
        if any(task_model.name in world.poisoned for task_model in world.checker.model.unsettled()):
            revived_ns = timeline.now_ns  # it kills one worker after the other while others wait
        world.checker.check_ready(revived_ns)
        if timeline.now_ns > ends_ns:
            raise _stuck(world, scenario)
    _check_all_served(world, scenario)
    while not world.host.is_between_turns:
        timeline.run_until(timeline.now_ns + MILLISECOND_NS)
    world.checker.check_end(world.host.ledger, world.poisoned)
    if has_blobs(world.plan.seed):
        _check_blobs(world)


def _check_blobs(world: World) -> None:
    """Require that blobs are gone which nothing names, soon after they may be."""
    drawn = world.checker.blobs.plan
    if drawn is not None:
        world.host.compact()
        world.timeline.run_until(world.timeline.now_ns + 3 * drawn.grace_ns + SWEPT_NS)
        world.host.check_blobs()


def _check_all_served(world: World, scenario: Scenario) -> None:
    """Require that every product worker gets a task once more within a bounded time."""
    timeline = world.timeline
    if not scenario.unserved():
        return
    scenario.begin_last_round()
    timeline.run_until(timeline.now_ns + SECOND_NS)
    scenario.begin_work()
    while scenario.unserved():
        if overdue := scenario.unserved(SERVED_NS_MAX):
            raise Violation("unserved", f"{overdue} get no task")
        timeline.run_until(timeline.now_ns + SECOND_NS // 2)
    ends_ns = timeline.now_ns + DRAIN_NS_MAX
    while not _drained(world, scenario):
        timeline.run_until(timeline.now_ns + SECOND_NS // 2)
        world.checker.check_timeouts()
        if timeline.now_ns > ends_ns:
            raise _stuck(world, scenario)


def _drained(world: World, scenario: Scenario) -> bool:
    if not scenario.probed or scenario.unsettled() or _open_requests(world, scenario):
        return False
    return world.checker.model.settled()


def _open_requests(world: World, scenario: Scenario) -> list[RequestMaker]:
    """Return the requests that must still get a reply."""
    found: list[RequestMaker] = []
    for client in scenario.clients:
        for event in client.open.values():
            if _waits_for(world, event):
                found.append(event)
            elif isinstance(client, PingPongModelClient):
                break  # replies come in order, so the later ones wait for this one
    return found


def _waits_for(world: World, event: RequestMaker) -> bool:
    """Return whether a reply must still come. There is none about tasks that were never
    submitted."""
    if isinstance(event, SubmitRequested):
        return not any(map(world.checker.submissions.awaits_unknown, event.submission.names))
    if not isinstance(event, WatchRequested):
        return True
    model = world.checker.model
    if event.names is not None:
        tales = [model.tasks[name] for name in event.names if name in model.tasks]
        return any(not model.awaits_unknown(task_model) for task_model in tales)
    tales = [
        task_model
        for task_model in model.tasks.values()
        if task_model.terms.campaign == event.campaign
    ]
    return bool(tales) and not any(model.awaits_unknown(task_model) for task_model in tales)


def _stuck(world: World, scenario: Scenario) -> Violation:
    lines = [
        f"{task_model.name!r} {task_model.lines}" for task_model in world.checker.model.unsettled()
    ]
    lines += [f"waits for {event}" for event in _open_requests(world, scenario)]
    lines += [f"{name!r} is not settled for its client" for name in scenario.unsettled()]
    return Violation("stuck", "after healing\n  " + "\n  ".join(lines))
