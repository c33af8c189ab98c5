"""Replies to queries of clients: tasks, counts, explanations, workers, lanes, results, output.

Queries pass through the scheduler like commands, so that replies keep the order of requests and are
sent after the commits that they depend on. Replies are complete copies. Nothing here changes state.
Results and output are only in the journal: a reply names the record, and the broker inserts them.
"""

from __future__ import annotations

from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import identity, membership, subscriptions
from taskyard.core.blobs import results_needed, text_of
from taskyard.core.effects import (
    ExplanationReply,
    HeldTasks,
    LaneList,
    LaneView,
    Part,
    Reason,
    RecordPage,
    Refused,
    ReplyDue,
    RuleList,
    Settled,
    Stats,
    StatsReply,
    TaskDetails,
    TaskPage,
    TaskView,
    WorkerList,
    WorkerTasks,
    WorkerView,
)
from taskyard.core.explain import explain, explain_lane
from taskyard.core.limits import (
    AFTER_SHOWN_MAX,
    LANE_SCAN_MAX,
    LIST_BATCH,
    LIST_LANES_MAX,
    LIST_TASKS_MAX,
    NUMBER_MAX,
    STATS_ROWS_MAX,
    TASKS_MAX,
    TASKS_PER_MESSAGE_MAX,
)
from taskyard.core.model import DIGEST_BYTES, Refusal, TaskProgress, shown
from taskyard.core.rules import compile_glob
from taskyard.core.runs import Attempt
from taskyard.core.states import BLOCKED, DELAYED, DONE, FAILED, READY
from taskyard.core.task_pages import TaskCursors, read_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Lane, Lease, Service, Task, Worker
    from taskyard.core.ledger import Ledger

#: Lanes of one service that are searched for paused lanes, in about 50 µs.
PAUSES_LANES_MAX: Final = 2000

#: Lanes that are searched for the oldest ready task, in about 1 ms, and tasks at the end of each
#: queue: a few may be taken or cancelled already.
OLDEST_LANES_MAX: Final = 500
OLDEST_TASKS: Final = 4


def request_rejected(context: Context, event: events.RequestRejected) -> None:
    context.send(Refused(event.client, event.request, event.refusal, event.text))


def reply_due(context: Context, event: events.ReplyDue) -> None:
    follow_options = event.follow_options
    if follow_options is None:
        context.send(ReplyDue(event.client, event.request))
        return
    cursor = context.ledger.record if follow_options.cursor is None else follow_options.cursor
    page = (cursor, follow_options.count, follow_options.scope, follow_options.journal)
    context.send(RecordPage(event.client, event.request, *page))


def lookup_requested(context: Context, event: events.LookupRequested) -> None:
    ledger = context.ledger
    if _too_many(context, event):
        return
    tasks = _existing(ledger, event.names)
    blocked = [task for task in tasks if task.state is BLOCKED] if event.shows_after else []
    after = _blockers(ledger, blocked)
    views = [_task_view(ledger, task) for task in tasks]
    for view, task in zip(views, tasks, strict=True):
        view.after = after.get(view.name, [])
        view.attempts = _attempts(ledger, task)
        view.terms = task.terms
        # An ended task keeps only a digest, which is the payload itself if that is short.
        if task.ending is None or len(task.payload) < DIGEST_BYTES:
            view.payload = task.payload
        view.finished_record = _finished_record(task)
    context.send(TaskDetails(event.client, event.request, views))


def _finished_record(task: Task) -> int:
    """Return the record with a task's last attempt, or 0 if memory has it."""
    return task.ending.record if task.state is DONE and task.ending is not None else 0


def _attempts(ledger: Ledger, task: Task) -> list[Attempt]:
    """Return the unsuccessful attempts, and the current attempt."""
    attempts = [*ledger.failed_attempts.get(task.name, ())]
    if task.lease is not None:
        attempts.append(_current_attempt(task, task.lease))
    return attempts


def _current_attempt(task: Task, lease: Lease) -> Attempt:
    """Return the attempt of a leased task, which its worker has not reported yet."""
    worker = lease.worker
    attempt = Attempt(task.attempt, worker.name, host=worker.facts.host)
    attempt.leased_ns = lease.at_ns
    return attempt


def _too_many(context: Context, event: events.LookupRequested | events.ResultsRequested) -> bool:
    if len(event.names) <= TASKS_PER_MESSAGE_MAX:
        return False
    text = f"{len(event.names)} names in one message: the limit is {TASKS_PER_MESSAGE_MAX}"
    context.send(Refused(event.client, event.request, Refusal.TOO_MANY, text))
    return True


def _existing(ledger: Ledger, names: Iterable[bytes]) -> list[Task]:
    """Return the tasks of these names, once each, in order. Skip unknown names."""
    found = map(ledger.tasks.get, dict.fromkeys(names))
    return [task for task in found if task is not None]


def _everywhere(ledger: Ledger, names: Iterable[bytes]) -> list[Task]:
    """Return the tasks of these names in any campaign, at most a page."""
    keys = (key for name in dict.fromkeys(names) for key in identity.everywhere(ledger, name))
    found = map(ledger.tasks.get, keys)
    return [*islice((task for task in found if task is not None), LIST_TASKS_MAX)]


def _blockers(ledger: Ledger, blocked: list[Task]) -> dict[bytes, list[bytes]]:
    """Return some predecessors of each of these tasks. Links to predecessors are not kept, so this
    is a pass over all tasks until enough are found."""
    after: dict[bytes, list[bytes]] = {task.name: [] for task in blocked}
    wanted = {id(task): min(task.waits, AFTER_SHOWN_MAX) for task in blocked}
    for name, waiting in ledger.awaited.tasks.items():
        _add_blocker(after, wanted, name, waiting)
    rest = iter(ledger.tasks.values())
    for _ in range(0, len(ledger.tasks), LIST_BATCH):
        if not wanted:
            break
        step = [other for other in islice(rest, LIST_BATCH) if other.dependents is not None]
        for other in step:
            linked = other.dependents
            if type(linked) is list or id(linked) in wanted:
                _add_blocker(after, wanted, other.name, other.dependents_list())
    return after


def _add_blocker(
    after: dict[bytes, list[bytes]], wanted: dict[int, int], name: bytes, waiting: list[Task]
) -> None:
    """Add a predecessor to the tasks that wait for it. Tasks with enough leave `wanted`."""
    for task in waiting:
        if id(task) in wanted:
            after[task.name].append(name)
            if len(after[task.name]) == wanted[id(task)]:
                del wanted[id(task)]


def _task_view(ledger: Ledger, task: Task) -> TaskView:
    terms, lease, ending = task.terms, task.lease, task.ending
    live = ending is None
    progress = TaskProgress() if lease is None else lease.progress_of(task.name)
    return TaskView(
        name=task.name,
        state=task.state,
        campaign=terms.campaign,
        service=terms.service,
        lane=task.lane.name,
        priority=terms.priority,
        attempt=task.attempt,
        failures=task.failures,
        losses=task.losses if live else 0,  # an ended task does not keep them
        slots=terms.slots,
        submitted_ns=terms.submitted_ns,
        origin=terms.origin,
        due_ns=task.due_ns if task.state is DELAYED else 0,
        worker=b"" if lease is None else lease.worker.name,
        leased_ns=0 if lease is None else lease.at_ns,
        ended_ns=0 if ending is None else ending.at_ns,
        waits=task.waits if live else 0,
        dependents=len(task.dependents_list()),
        reason=ledger.reasons.get(task.name, b""),
        resources=terms.resources,
        percent=progress.percent,
        progress=progress.text,
    )


def list_requested(context: Context, event: events.ListRequested) -> None:
    ledger, scope = context.ledger, event.scope
    cursor = min(max(event.cursor, 0), len(ledger.tasks))
    tasks: Iterable[Task] = ledger.tasks.values()
    cursors, total = ledger.cursors, len(ledger.tasks)
    version = total
    if scope.names is not None:
        find = _everywhere if scope.any_campaign else _existing
        named = find(ledger, scope.names)
        cursors, tasks, total = TaskCursors(), named, len(named)
    elif scope.states == (FAILED,):
        failed = map(ledger.tasks.__getitem__, ledger.reasons)  # every failed task has a reason
        cursors, tasks, total = ledger.failed_cursors, failed, len(ledger.reasons)
        version = ledger.record
    reading = cursors.resume(tasks, version, cursor)
    found = read_page(reading, total, event)
    cursor = reading.position if reading.position < total else 0
    if cursor:
        cursors.keep(version, reading)
    views = [_task_view(ledger, task) for task in found.tasks]
    page = TaskPage(event.client, event.request, views, cursor)
    if event.measured:
        page.positions = found.positions
        for view, task in zip(views, found.tasks, strict=True):
            view.attempts = _attempts(ledger, task)[-1:]
            view.finished_record = _finished_record(task)
    context.send(page)


def stats_requested(context: Context, event: events.StatsRequested) -> None:
    ledger = context.ledger
    if event.is_brief:
        sizes = ([*ledger.counts], 0, len(ledger.workers), ledger.record)
        brief = Stats(*sizes, context.accepts_tasks, ledger.paused, [], [])
        context.send(StatsReply(event.client, event.request, brief))
        return
    campaigns = [*ledger.campaigns.values()][-STATS_ROWS_MAX:]
    services = [*ledger.services.values()][-STATS_ROWS_MAX:]
    stats = Stats(
        counts=[*ledger.counts],
        stuck=len(ledger.stuck()),
        workers=len(ledger.workers),
        records=ledger.record,
        accepting=context.accepts_tasks,
        paused=ledger.paused,
        campaigns=[(one.name, [*one.counts], one.truncated, one.restarted) for one in campaigns],
        services=[(one.name, [*one.counts], one.workers) for one in services],
        pauses=_pauses(services),
        refused=context.refused,
        refused_last=context.refused_last,
        lag_percent=context.lag_percent,
        counters=context.counters.copied(),
        oldest_ready_ns=_oldest_ready_ns(services),
    )
    context.send(StatsReply(event.client, event.request, stats))


def _oldest_ready_ns(services: list[Service]) -> dict[bytes, int]:
    """Return since when the oldest ready task of each service is ready.

    Reads the ends of the queues, where the oldest tasks are. Skips lanes beyond a limit.
    """
    found: dict[bytes, int] = {}
    lanes = (lane for service in services for lane in service.lanes.values() if lane.ready)
    for lane in islice(lanes, OLDEST_LANES_MAX):
        name = lane.service.name
        for queue in lane.queues:
            first = queue.cursor
            ends = (*queue.front[:OLDEST_TASKS], *queue.items[first : first + OLDEST_TASKS])
            for task in ends:
                ready_ns = task.extras.ready_ns or task.terms.submitted_ns
                if task.state is READY and ready_ns < found.get(name, NUMBER_MAX):
                    found[name] = ready_ns
    return found


def _pauses(services: list[Service]) -> list[tuple[bytes, bytes | None]]:
    """Return the paused services and lanes."""
    pauses: list[tuple[bytes, bytes | None]] = []
    for service in services:
        if service.paused:
            pauses.append((service.name, None))
        if len(service.lanes) <= PAUSES_LANES_MAX:
            paused = [lane.name for lane in service.lanes.values() if lane.paused]
            pauses += [(service.name, name) for name in paused]
    return pauses


def explain_requested(context: Context, event: events.ExplainRequested) -> None:
    task = context.ledger.tasks.get(event.name)
    reply = ExplanationReply(event.client, event.request, event.name, explain(context, event.name))
    if task is not None:
        reply.campaign = task.terms.campaign
        if reply.explanation.reason is Reason.NO_WORKER:
            reply.service = task.terms.service
        if task.ending is not None:
            reply.record = task.ending.record
    context.send(reply)


def workers_requested(context: Context, event: events.WorkersRequested) -> None:
    workers = context.ledger.workers.values()
    views = [_worker_view(worker, context.now_ns) for worker in workers]
    context.send(WorkerList(event.client, event.request, views))


def _worker_view(worker: Worker, now_ns: int) -> WorkerView:
    waiting = worker.waiting_tasks()
    slots_waiting = sum(task.terms.slots for task in waiting)
    return WorkerView(
        name=worker.name,
        state=worker.state,
        facts=worker.facts,
        slots_used=worker.slots_used + sum(worker.slots_kept) - slots_waiting,
        waiting=len(waiting),
        held=sum(lease.tasks_left for lease in worker.leases.values()),
        last_seen_ns_ago=now_ns - worker.last_seen_ns,
        trouble=worker.trouble,
        malformed=worker.malformed,
        resources_free=tuple(worker.resources_free.items()),
    )


def held_tasks_requested(context: Context, event: events.HeldTasksRequested) -> None:
    ledger = context.ledger
    holdings = []
    for worker in ledger.workers.values():
        if worker.name.startswith(event.prefix):
            held = worker.held()
            names = [task.name for task in held]
            attempts, terms = [task.attempt for task in held], [task.terms for task in held]
            envelopes = [ledger.envelopes.get(name, b"") for name in names]
            columns = (names, attempts, terms, envelopes)
            holdings.append(WorkerTasks(worker.name, worker.facts, *columns, [*worker.slots_kept]))
    context.send(HeldTasks(event.client, event.request, holdings))


def results_requested(context: Context, event: events.ResultsRequested) -> None:
    if _too_many(context, event):
        return
    if event.held:
        _send_inputs(context, event)
        return
    reply = Settled(event.client, event.request, [], [], [])
    for task in _existing(context.ledger, event.names):
        subscriptions.add_settled(reply, context.ledger, task)
    context.send(reply)


def _send_inputs(context: Context, event: events.ResultsRequested) -> None:
    """Send the results that a held task needs to its worker, with their services."""
    keys = _readable_keys(context, event, event.names)
    if keys is None:
        return
    known = context.ledger.tasks
    tasks = [known[key] for key in dict.fromkeys(keys.values()) if key in known]
    reply = Settled(event.client, event.request, [], [], [])
    reply.services = {task.name: task.terms.service for task in tasks}
    reply.aliases = {key: name for name, key in keys.items() if key != name} or None
    for task in tasks:
        subscriptions.add_settled(reply, context.ledger, task)
    context.send(reply)


def part_requested(context: Context, event: events.PartRequested) -> None:
    ledger, name = context.ledger, event.name
    if event.held:
        needed = () if event.blob else (name,)
        keys = _readable_keys(context, event, needed)
        if keys is None:
            return
        name = keys.get(name, event.held)
    task = ledger.tasks.get(name)
    name = name if task is None else task.name
    part = Part(event.client, event.request, name, task is not None, event.stream, event.blob)
    part.held, part.offset, part.count = event.held, event.offset, event.count
    if event.stream is not None and task is not None:
        part.record = ledger.outputs.get(name, 0)
        part.campaign = task.terms.campaign
        part.attempt = task.attempt if event.attempt is None else event.attempt
        if part.attempt == task.attempt:
            part.live = task.lease is not None
            if task.state is DONE and task.ending is not None:
                part.finished_record = task.ending.record
    elif not event.blob and task is not None:
        part.attempt = task.attempt
        if task.state is DONE and task.ending is not None:
            part.finished_record = task.ending.record
        else:
            part.problem = f"task {shown(name)} has no result, it is {task.state.name}"
    context.send(part)


class LaneScan(Struct, gc=False):
    """Counts and times collected from a lane's tasks."""

    lane: Lane
    delayed: int = 0
    failed: int = 0
    oldest_ns: int = 0
    attempts: int = 0
    next_due_ns: int = 0

    @property
    def rest(self) -> int:
        """How many of its tasks are blocked or failed."""
        lane = self.lane
        return lane.tasks - lane.ready - lane.leased - self.delayed

    def add(self, task: Task) -> None:
        submitted_ns = task.terms.submitted_ns
        if not self.oldest_ns or submitted_ns < self.oldest_ns:
            self.oldest_ns = submitted_ns
        self.attempts = max(self.attempts, task.attempt)


def lanes_requested(context: Context, event: events.LanesRequested) -> None:
    count = min(max(event.count, 1), LIST_LANES_MAX)
    found = _lane_page(context.ledger, event, count + 1)
    scans = [LaneScan(lane) for lane in found[:count]]
    scan_lanes(context.ledger, scans)
    views = [_lane_view(context, scan) for scan in scans]
    context.send(LaneList(event.client, event.request, views, len(found) > count))


def _lane_page(ledger: Ledger, event: events.LanesRequested, count: int) -> list[Lane]:
    """Return the next lanes of a listing, sorted by service and name."""
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
    """Return the next lanes of a service that have tasks or are paused."""
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
    """Fill the scans of these lanes.

    Reads the leased and delayed tasks once for all lanes, and the next few tasks of each lane, so
    that a lane of a million tasks delays no other reply.
    """
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
    for due_ns, _, entry in ledger.due_heap.due:
        for task in [task for task in entry if task.lane in wanted]:
            if task.state is DELAYED and task.due_ns == due_ns:
                scan = wanted[task.lane]
                scan.add(task)
                scan.delayed += 1
                if not scan.next_due_ns or due_ns < scan.next_due_ns:
                    scan.next_due_ns = due_ns


def _scan_failed(ledger: Ledger, wanted: dict[Lane, LaneScan]) -> None:
    """Count failed tasks. The other unfinished tasks are blocked, and have no list."""
    tasks = map(ledger.tasks.__getitem__, ledger.reasons)  # every failed task has a reason
    for task in [task for task in tasks if task.lane in wanted]:
        wanted[task.lane].failed += task.state is FAILED


def _lane_view(context: Context, scan: LaneScan) -> LaneView:
    lane = scan.lane
    active_rule = lane.lane_group.active_rule
    blocked = scan.rest - scan.failed
    waits = {BLOCKED: blocked, DELAYED: scan.delayed, FAILED: scan.failed}
    explanation = explain_lane(context, lane, waits, scan.next_due_ns)
    limited = lane.name and active_rule.lane_tasks_max < TASKS_MAX
    return LaneView(
        service=lane.service.name,
        lane=lane.name,
        rule=active_rule.rule.name,
        rule_limit=active_rule.options.workers_max,
        tasks=lane.tasks,
        ready=lane.ready,
        blocked=blocked,
        delayed=scan.delayed,
        leased=lane.leased,
        workers=lane.workers,
        limit=active_rule.lane_tasks_max if limited else 0,
        rate_interval_ns=active_rule.options.lane_rate_interval_ns,
        weight=active_rule.options.weight,
        oldest_ns=scan.oldest_ns,
        attempts=scan.attempts,
        next_due_ns=scan.next_due_ns,
        reason=explanation.reason,
        sentence=explanation.sentence,
    )


def rules_requested(context: Context, event: events.RulesRequested) -> None:
    table = context.ledger.rule_table
    wanted = {
        id(active_rule): None
        for name in event.services
        for active_rule, _ in table.for_service(name)
    }
    rules = [active_rule.rule for active_rule in table if id(active_rule) in wanted]
    defaults = [*table][-1].rule
    if defaults not in rules:
        rules.append(defaults)
    context.send(RuleList(event.client, event.request, table.version, tuple(rules)))


def _readable_keys(
    context: Context,
    event: events.ResultsRequested | events.PartRequested,
    names: Sequence[bytes],
) -> dict[bytes, bytes] | None:
    """Return the keys of the tasks of these names. Refuse the event and return None if the worker
    may not read them."""
    task = context.ledger.tasks.get(event.held)
    problem = ""
    if task is None or not membership.holds(event.worker, task, None):
        problem = f"worker {shown(event.worker)} does not hold task {shown(event.held)}"
    else:
        allowed = dict.fromkeys(name.encode() for name in results_needed(text_of(task.payload)))
        refused = [name for name in names if name not in allowed]
        if refused:
            problem = f"task {shown(event.held)}: needs no result of {shown(refused[0])}"
    if task is None or problem:
        context.send(Refused(event.client, event.request, Refusal.UNKNOWN, problem))
        return None
    try:
        found = identity.predecessors(context.ledger, task, names)
    except identity.OtherTask as other:
        context.send(Refused(event.client, event.request, Refusal.CONFLICT, str(other)))
        return None
    return dict(zip(names, found, strict=True))
