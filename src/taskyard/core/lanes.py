"""Answering what clients ask of lanes: which there are, what they wait for, who rules them.

A page looks once at what is out and what is put off, and at no more than the next few tasks of each
lane, so that a lane of a million holds nobody up. Nothing here changes or keeps anything.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING

from msgspec import Struct

from taskyard.core.effects import LaneList, LaneView, RuleList
from taskyard.core.explain import explain_lane
from taskyard.core.limits import LANE_SCAN_MAX, LIST_LANES_MAX, TASKS_MAX
from taskyard.core.rules import compile_glob
from taskyard.core.states import BLOCKED, DELAYED, FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from taskyard.core import events
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Task
    from taskyard.core.queues import Lane, Service
    from taskyard.core.scheduler import Scheduler


class LaneScan(Struct, gc=False):
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

    def add(self, task: Task) -> None:
        submitted_ns = task.terms.submitted_ns
        if not self.oldest_ns or submitted_ns < self.oldest_ns:
            self.oldest_ns = submitted_ns
        self.attempts = max(self.attempts, task.attempt)


def lanes_requested(scheduler: Scheduler, event: events.LanesRequested) -> None:
    count = min(max(event.count, 1), LIST_LANES_MAX)
    found = _lane_page(scheduler.ledger, event, count + 1)
    scans = [LaneScan(lane) for lane in found[:count]]
    scan_lanes(scheduler.ledger, scans)
    views = [_lane_view(scheduler, scan) for scan in scans]
    scheduler.send(LaneList(event.client, event.request, views, len(found) > count))


def _lane_page(ledger: Ledger, event: events.LanesRequested, count: int) -> list[Lane]:
    """The next lanes that are asked for, in the order of their services' names and their own."""
    found: list[Lane] = []
    names = sorted(ledger.services) if event.service is None else [event.service]
    after_service, after_lane = event.after or (b"", None)
    for name in names:
        service = ledger.services.get(name)
        if service is None or name < after_service:
            continue
        past = after_lane if name == after_service else None
        found += _lanes_of_service(service, event.lane, past, count - len(found))
        if len(found) == count:
            break
    return found


def _lanes_of_service(
    service: Service, pattern: bytes | None, past: bytes | None, count: int
) -> list[Lane]:
    """The next lanes of a service that have tasks or are paused."""
    names: Iterable[bytes] = service.lanes
    if past is not None:
        names = [name for name in names if name > past]
    if pattern is not None:
        fits = compile_glob(pattern)
        names = [name for name in names if fits(name)]
    lanes = service.lanes
    shown = (name for name in names if lanes[name].tasks or lanes[name].paused)
    return [lanes[name] for name in nsmallest(count, shown)]


def scan_lanes(ledger: Ledger, scans: list[LaneScan]) -> None:
    """See what can be seen of these lanes. What is put off is one list for all lanes, which is
    gone through once."""
    wanted = {scan.lane: scan for scan in scans}
    for scan in scans:
        for task in scan.lane.peek(LANE_SCAN_MAX):
            scan.add(task)
        for task in scan.lane.suspects:
            scan.add(task)
    for task in _leased_tasks(ledger):
        if task.lane in wanted:
            wanted[task.lane].add(task)
    if ledger.counts[DELAYED]:
        _scan_delayed(ledger, wanted)
    if not ledger.counts[BLOCKED]:
        for scan in scans:
            scan.failed = scan.rest
    elif ledger.counts[FAILED]:
        _scan_failed(ledger, wanted)


def _leased_tasks(ledger: Ledger) -> Iterator[Task]:
    for worker in ledger.workers.values():
        yield from worker.held()


def _scan_delayed(ledger: Ledger, wanted: dict[Lane, LaneScan]) -> None:
    for due_ns, _, entry in ledger.agenda.due:
        for task in [task for task in entry if task.lane in wanted]:
            if task.state is DELAYED and task.due_ns == due_ns:
                scan = wanted[task.lane]
                scan.add(task)
                scan.delayed += 1
                if not scan.next_due_ns or due_ns < scan.next_due_ns:
                    scan.next_due_ns = due_ns


def _scan_failed(ledger: Ledger, wanted: dict[Lane, LaneScan]) -> None:
    """Tell failed tasks from blocked ones, of which there is no list."""
    tasks = map(ledger.tasks.__getitem__, ledger.reasons)  # every failed task has a reason
    for task in [task for task in tasks if task.lane in wanted]:
        wanted[task.lane].failed += task.state is FAILED


def _lane_view(scheduler: Scheduler, scan: LaneScan) -> LaneView:
    lane = scan.lane
    active_rule = lane.lane_group.active_rule
    blocked = scan.rest - scan.failed
    waits = {BLOCKED: blocked, DELAYED: scan.delayed, FAILED: scan.failed}
    explanation = explain_lane(scheduler, lane, waits, scan.next_due_ns)
    limited = lane.name and active_rule.lane_tasks_max < TASKS_MAX
    return LaneView(
        service=lane.service.name,
        lane=lane.name,
        rule=active_rule.rule.name,
        rule_limit=active_rule.rules.workers_max,
        tasks=lane.tasks,
        ready=lane.ready,
        blocked=blocked,
        delayed=scan.delayed,
        leased=lane.leased,
        workers=lane.workers,
        limit=active_rule.lane_tasks_max if limited else 0,
        oldest_ns=scan.oldest_ns,
        attempts=scan.attempts,
        next_due_ns=scan.next_due_ns,
        reason=explanation.reason,
        sentence=explanation.sentence,
    )


def rules_requested(scheduler: Scheduler, event: events.RulesRequested) -> None:
    regimes = scheduler.ledger.regimes
    wanted = {
        id(active_rule): None
        for name in event.services
        for active_rule, _ in regimes.for_service(name)
    }
    clauses = [active_rule.rule for active_rule in regimes if id(active_rule) in wanted]
    rest = [*regimes][-1].rule
    told = [*clauses, rest] if rest not in clauses else clauses
    scheduler.send(RuleList(event.client, event.request, regimes.version, tuple(told)))
