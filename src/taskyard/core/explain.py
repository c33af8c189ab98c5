"""Explains in a sentence why a task or a lane waits. Reads the context and changes nothing."""

from __future__ import annotations

from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Final, cast

from taskyard.core import graph, holds, lane_queues, resources
from taskyard.core.apply import RETURN_TEXTS
from taskyard.core.durations import duration_text, rough_duration_ns
from taskyard.core.effects import Explanation, Reason
from taskyard.core.holds import HoldReason
from taskyard.core.limits import EXCLUSIVE, SECOND_NS
from taskyard.core.model import counted, isolation_room, shown
from taskyard.core.states import FAILED, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from taskyard.core.context import Context
    from taskyard.core.entities import Lane, Lease, Task, Worker
    from taskyard.core.model import WorkerFacts
    from taskyard.core.runs import Attempt

#: A sentence names this many tasks and counts all further tasks.
NAMED_MAX: Final = 5

#: A worker is mentioned after this fraction (1 in N) of its lease timeout without a message.
HEARTBEAT_LATE_SHARE: Final = 3

#: A worker with a long interval is mentioned after this many.
HEARTBEATS_LATE: Final = 2


#: The reasons of a lane, in the order in which they are tried.
LANE_REASONS: Final = (
    Reason.PAUSED,
    Reason.HELD,
    Reason.DEBOUNCED,
    Reason.NO_WORKER,
    Reason.TROUBLE,
    Reason.NO_HEARTBEAT,
    Reason.LIMIT_BROKER,
    Reason.LIMIT_SERVICE,
    Reason.LIMIT_LANE,
    Reason.RATE,
    Reason.LANE_RATE,
    Reason.WORKERS_BUSY,
    Reason.SERVED,
    Reason.TIME,
    Reason.TASKS,
    Reason.FAILED,
    Reason.IDLE,
)


def explain(context: Context, name: bytes) -> Explanation:
    """Explain why a task is in its state."""
    task = context.ledger.tasks.get(name)
    if task is None:
        return Explanation(Reason.UNKNOWN, f"unknown task {shown(name)}")
    return _BY_STATE[task.state](context, task)


def _done(_context: Context, task: Task) -> Explanation:
    return done(task.attempt)


def done(attempt: int, note: bytes = b"") -> Explanation:
    """Explain a task that is done, with its worker's note, which only the journal has."""
    remark = f": {shown(note)}" if note else ""
    return Explanation(Reason.DONE, f"it is done (attempt {attempt}){remark}")


def _cancelled(_context: Context, _task: Task) -> Explanation:
    return cancelled(None)


def cancelled(cause: bytes | None) -> Explanation:
    """Explain a cancelled task by its cause, which only the journal has.

    The cause is the cancelled predecessor, b"" if the task itself was requested, None if unknown.
    """
    if cause is None:
        sentence = "it was cancelled, on request or with a task that it waited for"
        return Explanation(Reason.CANCELLED, f"{sentence} (its record has no cause)")
    if not cause:
        return Explanation(Reason.CANCELLED, "it was cancelled on request")
    sentence = f"it waited for {shown(cause)}, which was cancelled on request"
    return Explanation(Reason.CANCELLED, sentence, (cause,))


def _failed(context: Context, task: Task) -> Explanation:
    reason = shown(context.ledger.reasons.get(task.name, b"")) or "no reason given"
    waiting = len(graph.with_dependents([task])) - 1
    wait = "waits" if waiting == 1 else "wait"
    behind = f"; {counted(waiting, 'task')} {wait} for it" if waiting else ""
    sentence = f"it failed after {counted(task.attempt, 'attempt')}: {reason}{behind}"
    return Explanation(Reason.FAILED, sentence)


def _leased(context: Context, task: Task) -> Explanation:
    lease = cast("Lease", task.lease)
    held = rough_duration_ns(context.at_ns - lease.at_ns)
    worker = shown(lease.worker.name)
    sentence = f"worker {worker} has had it for {held} (attempt {task.attempt})"
    progress = str(lease.progress_of(task.name))
    if progress:
        sentence += f"; its progress: {progress}"
    if task.name in lease.worker.waiting:
        sentence += "; its call waits for other tasks, without its slots"
    if lease.worker.facts.forwards:
        sentence += "; it waits or runs at the broker that this worker forwards to"
    if returned := _returned_attempts(context, task):
        sentence += f"; {_returned_text(returned)}"
    late = _late_heartbeat_text(context, lease.worker)
    if late:
        return Explanation(Reason.NO_HEARTBEAT, f"{sentence}, and {late}")
    return Explanation(Reason.LEASED, sentence + _malformed(lease.worker.malformed))


def _malformed(lines: int) -> str:
    """Return a clause about malformed lines of a worker's agents, or "" if there are none."""
    return f"; its agents wrote {counted(lines, 'malformed line')} (see its log)" if lines else ""


def _returned_attempts(context: Context, task: Task) -> list[Attempt]:
    """Return the latest attempts, newest first, that workers returned with reasons of their own."""
    attempts = context.ledger.failed_attempts.get(task.name, [])
    return [*takewhile(_is_returned, reversed(attempts))]


def _is_returned(attempt: Attempt) -> bool:
    is_own = bool(attempt.reason) and attempt.reason not in RETURN_TEXTS.values()
    return attempt.outcome == b"returned" and is_own


def _returned_text(returned: list[Attempt]) -> str:
    """Return a clause about attempts that workers returned, newest first."""
    attempts = "attempt was" if len(returned) == 1 else f"{len(returned)} attempts were"
    newest = returned[0]
    return f"its last {attempts} returned by worker {shown(newest.worker)}: {shown(newest.reason)}"


def _late_heartbeat_text(context: Context, worker: Worker) -> str:
    """Return a clause about a worker whose heartbeat is late, or "" if it is not."""
    lease_timeout_ns = worker.lease_timeout_ns
    since_ns = context.now_ns - worker.last_seen_ns
    if not lease_timeout_ns or since_ns * HEARTBEAT_LATE_SHARE <= lease_timeout_ns:
        return ""
    if since_ns <= HEARTBEATS_LATE * worker.heartbeat_requested_ns:
        return ""
    since, left = rough_duration_ns(since_ns), rough_duration_ns(lease_timeout_ns - since_ns)
    return f"has sent no heartbeat for {since}; its leases expire in {left}"


def _delayed(context: Context, task: Task) -> Explanation:
    left_ns = task.due_ns - context.at_ns
    sentence = f"it is due in {rough_duration_ns(left_ns)}" if left_ns > 0 else "it is due"
    if not context.accepting:
        sentence += " when the broker's disk has room again"
    last = context.ledger.reasons.get(task.name)
    if last and task.failures:
        sentence += f", after {counted(task.failures, 'failure')}, the last: {shown(last)}"
    elif last:
        sentence += f": {shown(last)}"
    return Explanation(Reason.TIME, sentence)


def _blocked(context: Context, task: Task) -> Explanation:
    ledger = context.ledger
    unknown = [name for name, waiting in ledger.awaited.tasks.items() if task in waiting]
    before = graph.predecessors(ledger.tasks, task, task.waits - len(unknown))
    after = tuple(other.name for other in before) + tuple(unknown)
    if task.name in ledger.stuck():
        return Explanation(Reason.FAILURE, _failures_text(context, task, before), after)
    known = (_describe(context, other) for other in _running_first(before))
    named = _first_few(
        chain(known, (f"{shown(name)} (not submitted)" for name in unknown)), len(after)
    )
    return Explanation(Reason.TASKS, f"it waits for {counted(len(after), 'task')}: {named}", after)


def _running_first(tasks: list[Task]) -> list[Task]:
    """Return the running tasks in the order of their start, then all other tasks."""
    running = [task for task in tasks if task.lease is not None]
    running.sort(key=lambda task: cast("Lease", task.lease).at_ns)
    return running + [task for task in tasks if task.lease is None]


def _failures_text(context: Context, task: Task, before: list[Task]) -> str:
    """Describe the failures that hold a task back, and the tasks in between."""
    ledger = context.ledger
    tried = (ledger.tasks[name] for name in ledger.reasons)
    failed = (one for one in tried if one.state is FAILED)
    found = graph.failures_before(task, chain(failed, ledger.stuck().values()))
    failures = _first_few((_failure(context, one) for one in found), len(found))
    sentence = f"it is behind {'a failure' if len(found) == 1 else f'{len(found)} failures'}"
    blocked = [one for one in before if one.state is not FAILED]
    if not blocked:
        return f"{sentence}: {failures}"
    waits = _first_few((_describe(context, one) for one in blocked), len(blocked))
    return f"{sentence}: {failures}; it waits for {waits}"


def _failure(context: Context, task: Task) -> str:
    reason = shown(context.ledger.reasons[task.name])
    return f"{shown(task.name)} failed{f' ({reason})' if reason else ''}"


def _describe(context: Context, task: Task) -> str:
    if task.state is FAILED:
        reason = shown(context.ledger.reasons.get(task.name, b""))
        return f"{shown(task.name)} (FAILED{': ' if reason else ''}{reason})"
    if task.lease is not None:
        held = rough_duration_ns(context.at_ns - task.lease.at_ns)
        return f"{shown(task.name)} (LEASED for {held})"
    return f"{shown(task.name)} ({task.state.name})"


def _first_few(words: Iterable[str], total: int) -> str:
    """Return the first few words and how many more there are."""
    named = list(islice(words, NAMED_MAX))
    more = f" and {total - len(named)} more" if total > len(named) else ""
    return ", ".join(named) + more


def _ready(context: Context, task: Task) -> Explanation:
    hold = lane_hold_reason(context, task.lane)
    service = shown(task.terms.service)
    if hold is not None:
        why = _hold_text(context, task.lane, hold)
        sentence = f"it is ready, but {why} (service {service}){_waiting_text(context, task.lane)}"
        return Explanation(_BY_HOLD[hold], sentence)
    if _too_wide(context, task):
        sentence = f"it is ready, but takes {task.terms.slots} slots, and no worker has that many"
        return Explanation(Reason.NO_ROOM, sentence)
    missing = _missing_resources(context, task) if task.terms.resources else None
    kept_back = missing or _reserved(context, task) or _isolated(context, task)
    if kept_back is not None:
        return kept_back
    full, returned = _no_room_text(context, task), _returned_attempts(context, task)
    if len(returned) > 1 and not full:
        return Explanation(Reason.RETURNED, f"it is ready, but {_returned_text(returned)}")
    full = full or _unused_slot_text(context, task)
    sentence = f"it is ready, but {full}{_weight_text(task.lane)}{_kept_text(context, task)}"
    if returned:
        sentence += f"; {_returned_text(returned)}"
    return Explanation(Reason.WORKERS_BUSY, sentence)


def _missing_resources(context: Context, task: Task) -> Explanation | None:
    """Explain a task whose named resources no worker has, or none has free."""
    needed, workers = task.terms.resources, _workers(context, task)
    able = [worker for worker in workers if holds.is_large_enough(worker.facts, task.terms)]
    if not able:
        why = f"it is ready, but {_too_large_text(task, [worker.facts for worker in workers])}"
        return Explanation(Reason.NO_RESOURCES, why)
    lacks = [resources.lacking(needed, worker.resources_free) for worker in able]
    if not all(lacks):
        return None
    names = [name for name, _ in chain.from_iterable(lacks)]
    lacking = [(name, amount) for name, amount in needed if name in names]
    free = sorted(able, key=lambda worker: [-worker.resources_free[name] for name, _ in lacking])
    others = [worker for worker in workers if worker not in able]
    words = (_free_text(worker, lacking) for worker in chain(free, others))
    sentence = f"it is ready, but waits for {resources.format_resources(lacking)}: "
    sentence += _first_few(words, len(workers))
    kept = holds.reservation_of(context.ledger, task)
    if kept is not None:
        sentence += f"; worker {shown(kept.worker.name)} is reserved for it"
    return Explanation(Reason.RESOURCES_BUSY, sentence)


def _free_text(worker: Worker, lacking: list[tuple[bytes, int]]) -> str:
    """Return how much of some resources a worker has free."""
    total, free = dict(worker.facts.resources), worker.resources_free
    words = []
    for name, _ in lacking:
        noun = f" {shown(name)}" if len(lacking) > 1 else ""
        if name not in total:
            words.append(f"no{noun}" if noun else "none")
        else:
            left = resources.format_amount(name, max(0, free[name]))
            words.append(f"{left} of {resources.format_amount(name, total[name])}{noun} free")
    return f"worker {shown(worker.name)} has {' and '.join(words)}"


def _too_large_text(task: Task, facts: list[WorkerFacts]) -> str:
    """Return why no worker could ever run a task with resources."""
    service = shown(task.terms.service)
    if not any(one.resources for one in facts):
        workers = counted(len(facts), "worker")
        has = "has" if len(facts) == 1 else "have"
        needed = resources.format_resources(task.terms.resources)
        return f"needs {needed}, and the {workers} of service {service} {has} no named resources"
    for name, amount in task.terms.resources:
        largest = max(dict(one.resources).get(name, 0) for one in facts)
        if largest < amount:
            most = f"the largest has {resources.format_amount(name, largest)}"
            needed = resources.format_resource(name, amount)
            return f"no worker has {needed} ({most if largest else 'none has any'})"
    needed = resources.format_resources(task.terms.resources)
    return f"no worker has {counted(task.terms.slots, 'slot')} and {needed} together"


def _reserved(context: Context, task: Task) -> Explanation | None:
    """Explain a task that a worker is reserved for."""
    reservation = holds.reservation_of(context.ledger, task)
    if reservation is None:
        return None
    worker = reservation.worker
    name, slots = shown(worker.name), task.terms.slots
    if reservation.exclusive:
        held = counted(len(worker.held()), "task")
        sentence = f"worker {name} is reserved for it and still holds {held}"
        return Explanation(Reason.EXCLUSIVE, f"{_last_attempt(task)}: {sentence}")
    free = max(0, worker.slots_free)
    sentence = f"it is ready and takes {slots} slots: worker {name} is reserved for it"
    return Explanation(Reason.RESERVED, f"{sentence} and has {counted(free, 'free slot')}")


def _last_attempt(task: Task) -> str:
    lost = counted(task.losses, "worker")
    return f"it is ready, but it lost {lost}, so its last attempt must run alone in a worker"


def _isolated(context: Context, task: Task) -> Explanation | None:
    """Explain a task that lost workers and is isolated."""
    isolation, workers = task.isolation, _workers(context, task)
    if isolation == EXCLUSIVE:
        return Explanation(Reason.EXCLUSIVE, f"{_last_attempt(task)}: none is idle")
    free = [worker for worker in workers if worker.slots_free >= task.terms.slots]
    rooms = [isolation_room(isolation, worker.facts.slots_total) for worker in free]
    held = [holds.held_by_isolation(worker)[isolation] for worker in free]
    if not isolation or not free or any(map(int.__lt__, held, rooms)):
        return None
    lost, most = counted(task.losses, "worker"), counted(max(rooms), "task")
    sentence = f"at most {most} with such losses may share a worker, and none has room"
    return Explanation(Reason.ISOLATED, f"it is ready, but it lost {lost}: {sentence}")


def _unused_slot_text(context: Context, task: Task) -> str:
    """Return why a ready task can't use a free slot."""
    workers, slots = _workers(context, task), task.terms.slots
    free = [worker for worker in workers if worker.slots_free >= slots]
    kept = [worker for worker in free if worker.reservation is not None]
    exclusive = [worker for worker in free if holds.holds_last_attempt(worker)]
    if free and len(kept) + len(exclusive) == len(free):
        worker = free[0]
        why = "runs a last attempt alone" if worker in exclusive else "is reserved for another task"
        return f"worker {shown(worker.name)}, which has a free slot, {why}"
    service = shown(task.terms.service)
    return f"no worker of service {service} with a free slot requests tasks"


def _hold_text(context: Context, lane: Lane, hold: HoldReason) -> str:
    """Return why a lane gives no task, with the command to use if one is needed."""
    if hold is HoldReason.HELD:
        return f"{hold.value}: {release_command(lane)}"
    if hold is HoldReason.TROUBLE:
        troubled = _workers_of_service(context, lane.service.name)
        return f"{hold.value}: {shown(troubled[0].trouble)}"
    if hold is HoldReason.DEBOUNCED:
        left = duration_text(max(0, lane.debounce_until_ns - context.now_ns) / SECOND_NS)
        return f"{hold.value}: {left} left"
    if hold is HoldReason.LANE_RATE:
        rate = lane_queues.rate_text(lane.options.lane_rate_interval_ns)
        left = duration_text(lane_queues.lane_rate_wait_ns(lane, context.now_ns) / SECOND_NS)
        return f"{hold.value}: {rate}, next in {left}"
    return str(hold.value)


def _waiting_text(context: Context, lane: Lane) -> str:
    """Return a clause about tasks of a full lane that wait for others, or "" if not all do."""
    workers = context.ledger.workers.values()
    waiting = sum(task.lane is lane for worker in workers for task in worker.waiting_tasks())
    if not waiting or waiting < lane.leased:
        return ""
    calls = "its running task waits" if waiting == 1 else f"its {waiting} running tasks wait"
    return f"; {calls} for other tasks, perhaps for this one (use another lane for them)"


def _kept_text(context: Context, task: Task) -> str:
    """Return a clause about calls that wait and keep their slots, or "" if there are none."""
    kept = [worker for worker in _workers(context, task) if worker.waiting_kept]
    if not kept:
        return ""
    worker = max(kept, key=lambda one: one.waiting_kept)
    kept_count, count = worker.waiting_kept, len(worker.waiting)
    keeps = "waits for tasks and keeps its slot" if kept_count == 1 else "wait and keep their slots"
    others = "waits there without its slot" if count == 1 else "wait there without theirs"
    return (
        f"; {counted(kept_count, 'call')} of worker {shown(worker.name)} {keeps}: "
        f"{counted(count, 'call')} {others}, the most of a worker (start more workers)"
    )


def _weight_text(lane: Lane) -> str:
    """Return a clause about a lane's weight, or "" if all waiting lanes have the same."""
    waiting = [
        one.active_rule.options.weight
        for one in lane.service.lane_groups
        if one.lanes_full or any(other.ready for other in one.rotation)
    ]
    own = lane.options.weight
    others = sorted(dict.fromkeys(weight for weight in waiting if weight != own))
    if not others:
        return ""
    return f" (weight {own}, beside waiting lanes of weight {', '.join(map(str, others))})"


def release_command(lane: Lane) -> str:
    """Return the command that releases a held lane once."""
    where = f"--service {shown(lane.service.name)}"
    return f"taskyard retry {where}{f' --lane {shown(lane.name)}' if lane.name else ''}"


def _workers_of_service(context: Context, name: bytes) -> list[Worker]:
    workers = context.ledger.workers.values()
    return [worker for worker in workers if name in worker.facts.services]


def _workers(context: Context, task: Task) -> list[Worker]:
    """Return the workers of a task's service."""
    return _workers_of_service(context, task.terms.service)


def _too_wide(context: Context, task: Task) -> bool:
    slots = [worker.facts.slots_total for worker in _workers(context, task)]
    return 0 not in slots and all(task.terms.slots > total for total in slots)


def _no_room_text(context: Context, task: Task) -> str:
    """Return a clause that no worker has room for a task, or "" if one has."""
    workers, slots = _workers(context, task), task.terms.slots
    free = max((worker.slots_free for worker in workers), default=slots)
    if free >= slots:
        return ""
    if free > 0:
        return f"takes {slots} slots, and no worker has more than {free} free"
    total = sum(worker.facts.slots_total for worker in workers)
    if total == 1:
        return "the one slot of its worker is in use"
    return f"all {total} slots of its {counted(len(workers), 'worker')} are in use"


def lane_hold_reason(context: Context, lane: Lane) -> HoldReason | None:
    """Return the first reason why a lane with ready tasks gives none."""
    ledger = context.ledger
    hold = holds.pause_reason(ledger, lane) or holds.hold_reason(lane, context.now_ns)
    if hold is None and not lane.service.workers:
        return HoldReason.NO_WORKER
    if hold is None and _has_no_agent(context, lane):
        return HoldReason.TROUBLE
    return hold or holds.limit_reason(ledger, lane, context.now_ns)


def _has_no_agent(context: Context, lane: Lane) -> bool:
    """Return whether no worker serves a lane and none of its service can start an agent."""
    if lane.leased:
        return False
    return all(worker.trouble for worker in _workers_of_service(context, lane.service.name))


def explain_lane(
    context: Context, lane: Lane, waits: Mapping[TaskState, int], next_due_ns: int
) -> Explanation:
    """Explain why a lane waits. `waits` has the counts of blocked, delayed and failed tasks."""
    hold = holds.pause_reason(context.ledger, lane)
    if hold is not None:
        return Explanation(_BY_HOLD[hold], LANE_SENTENCES[hold])
    late = _late_holder_text(context, lane)
    if lane.ready:
        hold = lane_hold_reason(context, lane)
        if hold not in (None, HoldReason.LIMIT_LANE) or not late:
            return _lane_ready(context, lane, hold)
    if late:
        return Explanation(Reason.NO_HEARTBEAT, late)
    if lane.leased:
        workers = "1 worker holds" if lane.workers == 1 else f"{lane.workers} workers hold"
        lines = sum(worker.malformed for worker in _holders(lane))
        sentence = f"{workers} {lane.leased} of its tasks{_malformed(lines)}"
        return Explanation(Reason.SERVED, sentence)
    return _lane_waits(context, waits, next_due_ns)


def _lane_ready(context: Context, lane: Lane, hold: HoldReason | None) -> Explanation:
    """Explain a lane that has ready tasks. Without a hold, use the sentence of its next one."""
    if hold is not None:
        return Explanation(_BY_HOLD[hold], _lane_sentence(context, lane, hold))
    return Explanation(Reason.WORKERS_BUSY, _ready(context, lane.peek(1)[0]).sentence)


def _lane_waits(context: Context, waits: Mapping[TaskState, int], next_due_ns: int) -> Explanation:
    """Explain a lane that has neither ready nor leased tasks."""
    if waits[TaskState.DELAYED]:
        left = rough_duration_ns(next_due_ns - context.at_ns)
        return Explanation(Reason.TIME, f"the next of its tasks is due in {left}")
    if waits[TaskState.BLOCKED]:
        return Explanation(Reason.TASKS, "its tasks wait for other tasks")
    if waits[TaskState.FAILED]:
        sentence = f"{waits[TaskState.FAILED]} of its tasks failed, and no other waits"
        return Explanation(Reason.FAILED, sentence)
    return Explanation(Reason.IDLE, "it has no tasks")


def _lane_sentence(context: Context, lane: Lane, hold: HoldReason) -> str:
    more = _hold_text(context, lane, hold).removeprefix(hold.value)
    return LANE_SENTENCES[hold] + more


def _late_holder_text(context: Context, lane: Lane) -> str:
    """Return a clause about a late heartbeat of a worker that serves a lane, or ""."""
    for worker in _holders(lane):
        late = _late_heartbeat_text(context, worker)
        if late:
            return f"worker {shown(worker.name)}, which serves it, {late}"
    return ""


def _holders(lane: Lane) -> list[Worker]:
    """Return the workers that serve a lane."""
    holders = [] if lane.holder is None else [lane.holder]
    return [*holders, *(lane.leased_by_worker or ())]


#: Sentences about a lane, where `HoldReason` has those about a task in it.
LANE_SENTENCES: Final = {
    HoldReason.PAUSED_BROKER: "everything is paused",
    HoldReason.PAUSED_SERVICE: "its service is paused",
    HoldReason.PAUSED_LANE: "it is paused",
    HoldReason.HELD: "it is held until it is released",
    HoldReason.DEBOUNCED: "it collects more tasks before it starts (debounce)",
    HoldReason.LIMIT_BROKER: "the broker's limit on workers is reached",
    HoldReason.LIMIT_SERVICE: "its service's limit on workers is reached",
    HoldReason.LIMIT_LANE: "its limit on leased tasks is reached",
    HoldReason.RATE: "its service's rate limit is reached",
    HoldReason.LANE_RATE: "its rate limit is reached",
    HoldReason.NO_WORKER: "no worker of its service is connected",
    HoldReason.TROUBLE: "no worker of its service can start its agent",
}

_BY_STATE = {
    TaskState.BLOCKED: _blocked,
    TaskState.DELAYED: _delayed,
    TaskState.READY: _ready,
    TaskState.LEASED: _leased,
    TaskState.DONE: _done,
    TaskState.FAILED: _failed,
    TaskState.CANCELLED: _cancelled,
}

_BY_HOLD = {
    HoldReason.PAUSED_BROKER: Reason.PAUSED,
    HoldReason.PAUSED_SERVICE: Reason.PAUSED,
    HoldReason.PAUSED_LANE: Reason.PAUSED,
    HoldReason.HELD: Reason.HELD,
    HoldReason.DEBOUNCED: Reason.DEBOUNCED,
    HoldReason.TROUBLE: Reason.TROUBLE,
    HoldReason.LIMIT_BROKER: Reason.LIMIT_BROKER,
    HoldReason.LIMIT_SERVICE: Reason.LIMIT_SERVICE,
    HoldReason.LIMIT_LANE: Reason.LIMIT_LANE,
    HoldReason.RATE: Reason.RATE,
    HoldReason.LANE_RATE: Reason.LANE_RATE,
    HoldReason.NO_WORKER: Reason.NO_WORKER,
}
