"""Answering what clients ask of lanes: which there are, what they wait for, who rules them.

A page looks once at what is out and what is put off, and at no more than the next few tasks of each
lane, so that a lane of a million holds nobody up. Nothing here changes or keeps anything.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING

from msgspec import Struct

from taskyard.core.effects import LanesTold, LaneView, RulesTold
from taskyard.core.explain import explain_lane
from taskyard.core.limits import LANE_LOOK_MAX, LIST_LANES_MAX, TASKS_MAX
from taskyard.core.regimes import glob
from taskyard.core.states import BLOCKED, DELAYED, FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from taskyard.core import events
    from taskyard.core.agenda import Lane, Service
    from taskyard.core.ledger import Ledger
    from taskyard.core.scheduler import Scheduler
    from taskyard.core.tasks import Task


class Sight(Struct, gc=False):
    """What was seen of a lane's tasks."""

    lane: Lane
    delayed: int = 0
    failed: int = 0
    oldest_ns: int = 0
    attempts: int = 0
    next_due_ns: int = 0

    @property
    def rest(self) -> int:
        """Its tasks that are blocked or have failed."""
        lane = self.lane
        return lane.tasks - lane.ready - lane.leased - self.delayed

    def see(self, task: Task) -> None:
        submitted_ns = task.terms.submitted_ns
        if not self.oldest_ns or submitted_ns < self.oldest_ns:
            self.oldest_ns = submitted_ns
        self.attempts = max(self.attempts, task.attempt)


def lanes_asked(scheduler: Scheduler, event: events.LanesAsked) -> None:
    count = min(max(event.count, 1), LIST_LANES_MAX)
    found = _page(scheduler.ledger, event, count + 1)
    sights = [Sight(lane) for lane in found[:count]]
    look(scheduler.ledger, sights)
    views = [_view(scheduler, sight) for sight in sights]
    scheduler.tell(LanesTold(event.client, event.request, views, len(found) > count))


def _page(ledger: Ledger, event: events.LanesAsked, count: int) -> list[Lane]:
    """The next lanes that are asked for, in the order of their services' names and their own."""
    found: list[Lane] = []
    names = sorted(ledger.services) if event.service is None else [event.service]
    after_service, after_lane = event.after or (b"", None)
    for name in names:
        service = ledger.services.get(name)
        if service is None or name < after_service:
            continue
        past = after_lane if name == after_service else None
        found += _of_service(service, event.lane, past, count - len(found))
        if len(found) == count:
            break
    return found


def _of_service(
    service: Service, pattern: bytes | None, past: bytes | None, count: int
) -> list[Lane]:
    """The next lanes of a service that have tasks or are paused."""
    names: Iterable[bytes] = service.lanes
    if past is not None:
        names = [name for name in names if name > past]
    if pattern is not None:
        fits = glob(pattern)
        names = [name for name in names if fits(name)]
    lanes = service.lanes
    shown = (name for name in names if lanes[name].tasks or lanes[name].paused)
    return [lanes[name] for name in nsmallest(count, shown)]


def look(ledger: Ledger, sights: list[Sight]) -> None:
    """See what can be seen of these lanes. What is put off is one list for all lanes, which is
    gone through once."""
    wanted = {sight.lane: sight for sight in sights}
    for sight in sights:
        for task in sight.lane.peek(LANE_LOOK_MAX):
            sight.see(task)
        for task in sight.lane.suspects:
            sight.see(task)
    for task in _out(ledger):
        if task.lane in wanted:
            wanted[task.lane].see(task)
    if ledger.counts[DELAYED]:
        _look_at_delayed(ledger, wanted)
    if not ledger.counts[BLOCKED]:
        for sight in sights:
            sight.failed = sight.rest
    elif ledger.counts[FAILED]:
        _look_at_failed(ledger, wanted)


def _out(ledger: Ledger) -> Iterator[Task]:
    for worker in ledger.workers.values():
        yield from worker.held()


def _look_at_delayed(ledger: Ledger, wanted: dict[Lane, Sight]) -> None:
    for due_ns, _, entry in ledger.agenda.due:
        for task in [task for task in entry if task.lane in wanted]:
            if task.state is DELAYED and task.due_ns == due_ns:
                sight = wanted[task.lane]
                sight.see(task)
                sight.delayed += 1
                if not sight.next_due_ns or due_ns < sight.next_due_ns:
                    sight.next_due_ns = due_ns


def _look_at_failed(ledger: Ledger, wanted: dict[Lane, Sight]) -> None:
    """Tell failed tasks from blocked ones, of which there is no list."""
    tasks = map(ledger.tasks.__getitem__, ledger.reasons)  # every failed task has a reason
    for task in [task for task in tasks if task.lane in wanted]:
        wanted[task.lane].failed += task.state is FAILED


def _view(scheduler: Scheduler, sight: Sight) -> LaneView:
    lane = sight.lane
    regime = lane.branch.regime
    blocked = sight.rest - sight.failed
    waits = {BLOCKED: blocked, DELAYED: sight.delayed, FAILED: sight.failed}
    explanation = explain_lane(scheduler, lane, waits, sight.next_due_ns)
    limited = lane.name and regime.lane_room < TASKS_MAX
    return LaneView(
        service=lane.service.name,
        lane=lane.name,
        clause=regime.clause.name,
        clause_limit=regime.rules.workers_max,
        tasks=lane.tasks,
        ready=lane.ready,
        blocked=blocked,
        delayed=sight.delayed,
        leased=lane.leased,
        workers=lane.workers,
        limit=regime.lane_room if limited else 0,
        oldest_ns=sight.oldest_ns,
        attempts=sight.attempts,
        next_due_ns=sight.next_due_ns,
        reason=explanation.reason,
        sentence=explanation.sentence,
    )


def rules_asked(scheduler: Scheduler, event: events.RulesAsked) -> None:
    regimes = scheduler.ledger.regimes
    wanted = {id(regime): None for name in event.services for regime, _ in regimes.of_service(name)}
    clauses = [regime.clause for regime in regimes if id(regime) in wanted]
    rest = [*regimes][-1].clause
    told = [*clauses, rest] if rest not in clauses else clauses
    scheduler.tell(RulesTold(event.client, event.request, regimes.version, tuple(told)))
