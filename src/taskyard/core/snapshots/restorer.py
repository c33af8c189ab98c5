"""Rebuilds a ledger with all its indexes from the columns of a snapshot.

`Restorer` restores all tasks. `cold_ledger` uses the other functions to restore a part of them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

from msgspec import msgpack

from taskyard.core.entities import Lease, Task, Worker
from taskyard.core.graph import link
from taskyard.core.lane_queues import add_suspect, lane_counts
from taskyard.core.ledger import Ledger
from taskyard.core.model import restored_extras
from taskyard.core.states import DELAYED, READY, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.entities import Lane
    from taskyard.core.model import Terms
    from taskyard.core.snapshots.columns import Edges, Rest, TaskColumns

#: Payloads of this length are shared with the chunks before.
_INTERNED_BYTES: Final = 1024

_STATES: Final = tuple(TaskState)
_encode = msgpack.Encoder().encode


class Restorer:
    """Rebuilds a ledger from `Rest`, chunks and edges, in this order."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._apart = dict.fromkeys(rest.apart())
        self._terms: dict[bytes, Terms] = {}
        self._payloads: dict[Content, Content] = {}
        #: All tasks by index.
        self.tasks: list[Task] = []
        self.ledger = restore_frame(rest)

    def add(self, columns: TaskColumns) -> None:
        """Add the tasks of the next chunk."""
        terms = [self._interned(one) for one in columns.terms]
        payloads = columns.each_payload()
        if max(map(len, payloads)) >= _INTERNED_BYTES:
            payloads = [self._shared_payload(one) for one in payloads]
        counts, terms_at, _, states = zip(*columns.runs, strict=True)
        lanes = lanes_of_runs(self.ledger, columns, terms)
        alike: Sequence[Iterable[Any]] = (
            map(terms.__getitem__, terms_at),
            lanes,
            map(_STATES.__getitem__, states),
        )
        is_mixed = len(counts) == len(columns.names)
        if not is_mixed:
            alike = [chain.from_iterable(map(repeat, each, counts)) for each in alike]
        waits = () if columns.waits is None else (columns.waits,)
        made = list(map(Task, columns.names, payloads, *alike, *waits))
        if is_mixed and not self._apart:
            _queue_each(made)
        else:
            self._queue_runs(zip(counts, lanes, states, strict=True), made)
        self.tasks += made
        self.ledger.tasks.update(zip(columns.names, made, strict=True))
        for number in {**columns.attempts, **columns.due_ns}:
            set_details(columns, number, made[number])
        self._plan(columns, terms, made)

    def _interned(self, terms: Terms) -> Terms:
        if terms.environment:
            if terms.environment == self.ledger.environment:
                terms.environment = self.ledger.environment
            self.ledger.environment = terms.environment
        return self._terms.setdefault(_encode(terms), terms)

    def _shared_payload(self, payload: Content) -> Content:
        if len(payload) < _INTERNED_BYTES:
            return payload
        return self._payloads.setdefault(payload, payload)

    def _queue_runs(self, runs: Iterable[tuple[int, Lane, int]], made: list[Task]) -> None:
        """Count tasks in their lanes and queue READY tasks, except tasks listed in `Rest`."""
        begin, first, apart = 0, len(self.tasks), self._apart
        for count, lane, state in runs:
            lane.tasks += count
            if state == READY:
                tasks = made[begin : begin + count]
                queue, priority = lane.main_queue, tasks[0].terms.priority
                if queue.priority != priority:
                    queue = lane.queue(priority)
                if apart:
                    numbered = enumerate(tasks, first + begin)
                    tasks = [task for index, task in numbered if index not in apart]
                queue.items += tasks
                lane.ready += len(tasks)
            begin += count

    def _plan(self, columns: TaskColumns, terms: list[Terms], tasks: list[Task]) -> None:
        """Schedule due times, expiries and late reports."""
        ledger = self.ledger
        if DELAYED in (run[3] for run in columns.runs):
            ledger.schedule_due([task for task in tasks if task.state is DELAYED])
        if any(one.expires_ns or one.expires_hard_ns for one in terms):
            ledger.schedule_expiry(tasks)
        if not any(one.report_ns for one in terms):
            return
        together: dict[int, list[bytes]] = defaultdict(list)
        for task in tasks:
            if task.terms.report_ns and task.name not in ledger.reported:
                together[task.terms.report_ns].append(task.name)
        for late_ns, names in together.items():
            ledger.due_heap.push_late(late_ns, names)

    def link(self, edges: Edges) -> None:
        """Add edges between tasks."""
        tasks = self.tasks
        for before, after in edges:
            link(tasks[before], tasks[after])

    def finish(self) -> Ledger:
        """Add lanes and workers that refer to tasks, and return the ledger."""
        rest, tasks, ledger = self._rest, self.tasks, self.ledger
        _restore_moved(rest, tasks)
        restore_lanes(ledger, rest, tasks.__getitem__)
        restore_workers(ledger, rest, tasks.__getitem__)
        for name, indexes in rest.dependents_of_unknown.items():
            ledger.awaited.restore(name, [tasks[index] for index in indexes])
        for service in ledger.services.values():
            for lane in list(service.lanes.values()):
                if lane.ready:
                    lane.lane_group.add_to_rotation(lane)
                service.drop_if_empty(lane)
        return ledger


def restore_frame(rest: Rest) -> Ledger:
    """Return a ledger with everything that does not refer to tasks."""
    ledger = Ledger()
    ledger.record, ledger.paused, ledger.counts = rest.record, rest.paused, rest.counts
    for one in rest.campaigns:
        campaign = ledger.campaign(one.name)
        campaign.counts, campaign.truncated = one.counts, one.truncated
        campaign.restarted = one.restarted
    for service_rest in rest.services:
        service = ledger.service(service_rest.name)
        service.paused, service.has_wide_tasks, service.counts = (
            service_rest.paused,
            service_rest.has_wide_tasks,
            service_rest.counts,
        )
        ledger.has_wide_tasks = ledger.has_wide_tasks or service_rest.has_wide_tasks
    ledger.reported = dict.fromkeys(rest.reported)
    ledger.reasons, ledger.envelopes = rest.reasons, rest.envelopes
    ledger.outputs, ledger.failed_attempts = rest.outputs, rest.failed_attempts
    ledger.replaced = {(name, number): one for name, number, one in rest.replaced}
    ledger.numbered = {one.campaign: one for one in rest.numbered}
    ledger.numbers_bytes = sum(one.size for one in rest.numbered)
    return ledger


def _queue_each(made: list[Task]) -> None:
    """Count tasks in their lanes and queue READY tasks, each by itself."""
    for task in made:
        lane = task.lane
        lane.tasks += 1
        if task.state is READY:
            queue, priority = lane.main_queue, task.terms.priority
            if queue.priority != priority:
                queue = lane.queue(priority)
            queue.items.append(task)
            lane.ready += 1


def lanes_of_runs(ledger: Ledger, columns: TaskColumns, terms: list[Terms]) -> list[Lane]:
    """Return the lane of each run of a chunk."""
    names = columns.lanes
    services = [ledger.service(one.service) for one in terms]
    if all(one is services[0] for one in services):
        service, known = services[0], services[0].lanes
        lanes = [known.get(name) or service.lane(name) for name in names]
        return [lanes[run[2]] for run in columns.runs]
    return [services[terms_at].lane(names[lane_at]) for _, terms_at, lane_at, _ in columns.runs]


def set_details(columns: TaskColumns, number: int, task: Task) -> None:
    """Set the optional fields of a task from its chunk."""
    task.attempt, failures, losses_excused = columns.attempts.get(number, (0, 0, 0))
    task.extras = restored_extras(failures, losses_excused, columns.due_ns.get(number, 0))


def _restore_moved(rest: Rest, tasks: list[Task]) -> None:
    """Queue moved tasks behind their indexes."""
    if not rest.moved:
        return
    apart = dict.fromkeys(rest.apart())
    lanes = {id(tasks[index].lane): None for index, _ in rest.moved}
    behind: dict[int, list[Task]] = defaultdict(list)
    for index, other in rest.moved:
        behind[other].append(tasks[index])
        tasks[index].lane.ready += 1
    lines: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for index, task in enumerate(chain((None,), tasks), -1):
        some = behind.get(index, [])
        if task is not None and _queues_by_index(task, lanes) and index not in apart:
            some = [task, *some]
        for one in some:
            lines[id(one.lane), one.terms.priority].append(one)
    for (_, priority), line in lines.items():
        line[0].lane.queue(priority).items[:] = line


def _queues_by_index(task: Task, lanes: dict[int, None]) -> bool:
    return task.state is READY and id(task.lane) in lanes


def restore_lanes(ledger: Ledger, rest: Rest, task_at: Callable[[int], Task]) -> None:
    """Restore the state of lanes beyond their tasks in order."""
    for one in rest.lanes:
        lane = ledger.service(one.service).lane(one.name)
        lane.paused = one.paused
        for priority, indexes in one.front.items():
            lane.queue(priority).front += map(task_at, indexes)
            lane.ready += len(indexes)
        for index in one.suspects:
            add_suspect(lane, task_at(index), front=False)
        if one.next_run or one.released:
            extras = lane.ensure_extras()
            extras.next_run = {id(task): task for task in map(task_at, one.next_run)}
            extras.run_left, extras.released = one.run_left, one.released
        lane.ready += len(one.suspects) + len(one.next_run)


def restore_workers(ledger: Ledger, rest: Rest, task_at: Callable[[int], Task]) -> None:
    """Add workers and their leases."""
    workers = [Worker(one.name, one.facts, slots_kept=one.slots_kept) for one in rest.workers]
    for worker in workers:
        ledger.add_worker(worker)
    for one in rest.leases:
        out = [task_at(index) for index in one.tasks]
        given = (workers[one.worker], one.number, one.at_ns, one.lease_ns)
        names, attempts = [task.name for task in out], [task.attempt for task in out]
        lease = Lease(*given, len(out), out, names, attempts, lane_counts(out))
        for task in out:
            task.lease_or_ending = lease
        ledger.add_lease(lease, out)
