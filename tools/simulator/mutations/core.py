"""Planted bugs of the core, the journal and the broker's turn.

Each replaces one function of the real code by a broken one, and its docstring says what that does.
The checkers must catch it without `core.invariants`, except those of `mutation_for_invariants`. A
simulator that misses these would miss the next real bug, too.
"""
# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from msgspec import structs

from simulator.clock import SimClock
from simulator.mutations.registry import mutation, patched, patched_item
from taskyard.broker import results as result_loader
from taskyard.broker.turn import Broker
from taskyard.core import (
    apply,
    assignment,
    effects,
    events,
    graph,
    membership,
    queues,
    records,
    reservations,
    results,
    runs,
    scheduler,
    selection,
    submission,
    subscriptions,
    timers,
    worker_names,
)
from taskyard.core.context import Context
from taskyard.core.entities import Lane, Lease, Task, Worker
from taskyard.core.ledger import Ledger
from taskyard.core.model import Result
from taskyard.core.scheduler import Scheduler
from taskyard.core.snapshots.restorer import Restorer
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import chain, recovery
from taskyard.journal.recovery import encode

_DECIDERS: Final[dict[type, Any]] = scheduler._DECIDERS  # noqa: SLF001 - a bug is planted inside


def apply_table_of(record: type) -> dict[type, Any]:
    """Return the table of `apply` that holds a record."""
    tables: tuple[dict[type, Any], ...] = (apply._APPLY, apply._APPLY_TO_TASKS)  # noqa: SLF001
    return next(table for table in tables if record in table)


def _no_op(*_arguments: Any, **_named: Any) -> None:
    """Do nothing."""


# Reports and fencing.


@mutation
def settled_lease_accepted() -> Iterator[None]:
    """Accept a report on a whole lease although parts of it are settled or reassigned."""

    def whole_lease(first: Task | None, event: events.TasksReported) -> Lease | None:
        lease = None if first is None else first.lease
        if lease is None or lease.worker.name != event.worker or lease.names != event.names:
            return None
        return lease

    with patched(results, "_whole_lease", whole_lease):
        yield


@mutation
def runs_not_clamped() -> Iterator[None]:
    """Store the times of a run by the worker's clock, even outside the lease."""
    sound = runs.clamped_to_lease

    def clamped_to_lease(measured: Any, indexes: Any, leased_ns: Any, settled_ns: int) -> Any:
        found = sound(measured, indexes, leased_ns, settled_ns)
        if found is not None:
            found.started_ns = [measured.started_ns[index] for index in indexes]
        return found

    with patched(runs, "clamped_to_lease", clamped_to_lease):
        yield


@mutation
def runs_of_other_tasks() -> Iterator[None]:
    """Take runs from the start of a report when only some of its tasks are the worker's."""
    sound = runs.clamped_to_lease

    def clamped_to_lease(measured: Any, indexes: Any, *times: Any) -> Any:
        return sound(measured, range(len(indexes)), *times)

    with patched(runs, "clamped_to_lease", clamped_to_lease):
        yield


@mutation
def no_fencing() -> Iterator[None]:
    """Accept a report on a leased task from any worker."""

    def sort(self: Context, event: events.TasksReported) -> Any:
        places = {name: index for index, name in enumerate(event.names)}
        found = {name: self.ledger.tasks.get(name) for name in places}
        tasks = [task for task in found.values() if task is not None and task.lease is not None]
        kept = [places[task.name] for task in tasks]
        return tasks, kept, [place for place in range(len(event.names)) if place not in kept]

    with patched(results, "_split_held", sort):
        yield


@mutation
def attempt_ignored() -> Iterator[None]:
    """Accept a report on a former attempt if its worker holds the task again."""
    sound = results._split_held  # noqa: SLF001

    def sort(self: Context, event: events.TasksReported) -> Any:
        return sound(self, structs.replace(event, attempts=None))

    with patched(results, "_split_held", sort):
        yield


@mutation
def completion_not_recorded() -> Iterator[None]:
    """Acknowledge a completion without recording it."""
    with patched(results, "_finish", _no_op):
        yield


@mutation
def retry_never_ends() -> Iterator[None]:
    """Restart the retry schedule when it is used up."""
    sound = results.retry_delay_ns

    def retry_delay_ns(task: Task, random_bits: int) -> int | None:
        delay_ns = sound(task, random_bits)
        return 100_000_000 if delay_ns is None else delay_ns

    with patched(results, "retry_delay_ns", retry_delay_ns):
        yield


@mutation
def failed_at_once() -> Iterator[None]:
    """Ignore the retry schedule."""
    with patched(results, "retry_delay_ns", lambda _task, _luck: None):
        yield


@mutation
def returned_task_lost() -> Iterator[None]:
    """Leave a returned task out of every queue."""
    sound = Ledger.requeue

    def requeue(self: Ledger, tasks: list[Task], cause: Any, **how: bool) -> None:
        sound(self, tasks, cause, **how)
        self.dequeue([task for task in tasks if task.state is TaskState.READY])

    with patched(Ledger, "requeue", requeue):
        yield


@mutation
def returned_to_the_back() -> Iterator[None]:
    """Queue a task that was returned without its fault behind all others."""
    sound = Ledger.requeue

    def requeue(self: Ledger, tasks: list[Task], cause: Any, **how: bool) -> None:
        sound(self, tasks, cause, **{**how, "front": False})

    with patched(Ledger, "requeue", requeue):
        yield


@mutation
def truncation_not_recorded() -> Iterator[None]:
    """Record a truncated result as a whole one."""
    sound = results.tasks_reported

    def tasks_reported(self: Context, event: events.TasksReported) -> None:
        event.result_bytes_total = None
        sound(self, event)

    with patched_item(_DECIDERS, events.TasksReported, tasks_reported):
        yield


@mutation
def truncation_lost_in_the_journal() -> Iterator[None]:
    """Send a truncated result that is read from the journal as a whole one."""
    sound = recovery.results_in

    def results_in(record: records.AnyRecord, number: int, names: list[bytes]) -> list[Result]:
        return [Result(one.text) for one in sound(record, number, names)]

    with patched(result_loader, "results_in", results_in):
        yield


# The turn.


@mutation
def reply_before_commit() -> Iterator[None]:
    """Send replies before their records are durable."""

    def turn(self: Any) -> None:
        arrived = self.transport.receive(self._wait_ns())
        effects = self._decide([*self._undelivered, *arrived], has_read=bool(arrived))
        decided = self.scheduler.take_records()
        with suppress(JournalDamaged):  # a result that is not there yet
            self._results.fill(effects)
        self._undelivered = self.transport.send(effects)
        if decided:
            self.store.commit(encode(decided), len(decided))

    with patched(Broker, "turn", turn):
        yield


@mutation
def failed_commit_ignored() -> Iterator[None]:
    """Send replies although the journal has failed."""

    def turn(self: Any) -> None:
        arrived = self.transport.receive(self._wait_ns())
        effects = self._decide([*self._undelivered, *arrived], has_read=bool(arrived))
        decided = self.scheduler.take_records()
        failure = None
        if decided:
            try:
                self.store.commit(encode(decided), len(decided))
            except JournalFailed as failed:
                failure = failed
        with suppress(JournalDamaged):
            self._results.fill(effects)
        self._undelivered = self.transport.send(effects)
        if failure is not None:
            raise failure

    with patched(Broker, "turn", turn):
        yield


@mutation
def wall_clock_for_leases() -> Iterator[None]:
    """Measure lease times by the wall clock."""
    with patched(SimClock, "monotonic_ns", SimClock.wall_ns):
        yield


@mutation
def clock_never_set() -> Iterator[None]:
    """Miss a jump of the wall clock."""
    sound = timers.clock_set

    def clock_set(self: Context, event: events.ClockSet) -> None:
        if not self.wall_offset_ns:
            sound(self, event)

    with patched_item(_DECIDERS, events.ClockSet, clock_set):
        yield


@mutation
def full_disk_ignored() -> Iterator[None]:
    """Accept submissions while the disk is nearly full."""
    with patched_item(_DECIDERS, events.DiskSpaceChanged, _no_op):
        yield


# Dependencies.


@mutation
def dependency_dropped() -> Iterator[None]:
    """Forget the predecessors in a submission."""
    with patched(submission, "_resolve", lambda *_: submission.Dependencies()):
        yield


@mutation
def released_by_the_first() -> Iterator[None]:
    """Start a task when the first of its predecessors is done."""
    sound = graph.released_by

    def released_by(tasks: Iterable[Task]) -> list[Task]:
        done = [*tasks]
        for task in done:
            for dependent in task.dependents_list():
                dependent.waits = 1
        return sound(done)

    with patched(graph, "released_by", released_by):
        yield


@mutation
def dependents_not_cancelled() -> Iterator[None]:
    """Leave the dependents of a cancelled task as they are."""
    with patched(graph, "with_causes", lambda tasks: ([*tasks], [])):
        yield


@mutation
def cycle_accepted() -> Iterator[None]:
    """Accept tasks that wait for each other."""
    with patched(graph, "cycle", lambda *_: []):
        yield


@mutation
def repeated_submission_doubles() -> Iterator[None]:
    """Make the tasks of a repeated submission again."""
    sound = submission.decide

    def decide(ledger: Ledger, event: events.SubmitRequested, at_ns: int) -> Any:
        taken = sound(ledger, event, at_ns)
        if taken.existing:
            taken.records = [records.Submitted(at_ns, event.submission)]
        return taken

    with patched(submission, "decide", decide):
        yield


@mutation
def generation_forgets_attempts() -> Iterator[None]:
    """Start at attempt 1 when a name is submitted again."""
    sound = submission.decide

    def decide(ledger: Ledger, event: events.SubmitRequested, at_ns: int) -> Any:
        taken = sound(ledger, event, at_ns)
        for record in taken.records:
            if isinstance(record, records.Submitted):
                record.attempts = None
        return taken

    with patched(submission, "decide", decide):
        yield


# Time.


@mutation
def due_time_ignored() -> Iterator[None]:
    """Let delayed tasks come due at once."""
    sound = queues.DueHeap.pop_due

    def pop_due(self: queues.DueHeap[Task], wall_ns: int, count_max: int) -> list[Task]:
        return sound(self, 2 * wall_ns, count_max)

    with patched(queues.DueHeap, "pop_due", pop_due):
        yield


@mutation
def expiry_ignored() -> Iterator[None]:
    """Never expire a task."""
    with patched(timers, "_is_expired", lambda _task, _at_ns: False):
        yield


@mutation
def lease_never_expires() -> Iterator[None]:
    """Never expire a lease."""

    def fall_silent(self: Context) -> None:
        self.timeouts.clear()

    with patched(timers, "_expire_workers", fall_silent):
        yield


@mutation
def expired_too_early() -> Iterator[None]:
    """Expire leases after half of the lease time."""
    sound = Worker.timeout_at_ns

    def timeout_at_ns(self: Worker) -> int:
        at_ns: int = sound.fget(self)  # type: ignore[attr-defined]
        return at_ns and self.last_seen_ns + (at_ns - self.last_seen_ns) // 2

    with patched(Worker, "timeout_at_ns", property(timeout_at_ns)):
        yield


@mutation
def heartbeat_ignored() -> Iterator[None]:
    """Renew leases by reports and requests, but not by heartbeats."""
    sound = membership.worker_heartbeat

    def worker_heartbeat(self: Context, event: events.WorkerHeartbeat) -> None:
        worker = self.ledger.workers.get(event.worker)
        last_seen_ns = worker.last_seen_ns if worker is not None else 0
        sound(self, event)
        if worker is not None:
            worker.last_seen_ns = last_seen_ns

    with patched_item(_DECIDERS, events.WorkerHeartbeat, worker_heartbeat):
        yield


@mutation
def unlisted_lease_never_returned() -> Iterator[None]:
    """Keep a lease that the worker does not list."""
    with patched(membership, "HEARTBEATS_UNLISTED_MAX", 1 << 40):
        yield


@mutation
def unlisted_at_once() -> Iterator[None]:
    """Return a lease at the first heartbeat, listed or not."""
    sound = membership.worker_heartbeat

    def worker_heartbeat(self: Context, event: events.WorkerHeartbeat) -> None:
        if event.held is not None:
            event.held, event.heartbeat_ns = [], 0
        sound(self, event)

    with patched_item(_DECIDERS, events.WorkerHeartbeat, worker_heartbeat):
        yield


@mutation
def parked_worker_forgotten() -> Iterator[None]:
    """Assign nothing to parked workers when tasks arrive."""
    with patched(assignment, "relist", _no_op):
        yield


@mutation
def freed_slot_not_noticed() -> Iterator[None]:
    """Assign nothing to a worker with a freed slot until it requests tasks."""
    with patched(membership, "on_slot_free", _no_op):
        yield


@mutation
def watcher_never_notified() -> Iterator[None]:
    """Never notify watchers of settled tasks."""
    with patched(subscriptions, "notify_settled", _no_op):
        yield


@mutation
def notified_too_early() -> Iterator[None]:
    """Notify watchers that tasks are done, whatever their state."""

    def watch_requested(self: Context, event: events.WatchRequested) -> None:
        names = event.names or []
        states = [TaskState.DONE] * len(names)
        self.send(effects.Settled(event.client, event.request, names, states, [b""] * len(names)))

    with patched_item(_DECIDERS, events.WatchRequested, watch_requested):
        yield


# Crashes.


@mutation
def crash_not_charged() -> Iterator[None]:
    """Retry a task for ever that kills its workers."""

    def lose(self: Context, worker: Worker, reason: Any) -> None:
        held = worker.held()
        names, attempts = [task.name for task in held], [task.attempt for task in held]
        if reason is not None:
            membership.return_tasks(self, worker, held, reason)
        elif held:
            self.emit(records.LeaseExpired(self.at_ns, worker.name, names, attempts), held)

    with patched(membership, "_lose_worker", lose):
        yield


@mutation
def loss_forgotten() -> Iterator[None]:
    """Forget that a task was lost with its worker."""
    with patched(Task, "losses", property(lambda _task: 0)):
        yield


@mutation
def suspect_not_isolated() -> Iterator[None]:
    """Assign other tasks to a worker that runs a last attempt."""
    with (
        patched(selection, "holds_last_attempt", lambda _worker: False),
        patched(reservations, "holds_last_attempt", lambda _worker: False),
    ):
        yield


@mutation
def incarnation_ignored() -> Iterator[None]:
    """Take a new process of a worker for the former one."""
    sound = membership.worker_registered

    def worker_registered(self: Context, event: events.WorkerRegistered) -> None:
        existing = self.ledger.workers.get(event.worker)
        if existing is None:
            sound(self, event)
        else:
            existing.last_seen_ns = self.now_ns

    with patched_item(_DECIDERS, events.WorkerRegistered, worker_registered):
        yield


@mutation
def name_taken_over_at_once() -> Iterator[None]:
    """Give the name of a live process to another, and charge its tasks with a loss."""
    with patched(worker_names, "refuses_newcomer", lambda *_: False):
        yield


@mutation
def newcomer_treated_as_holder() -> Iterator[None]:
    """Accept messages of a process that contests a name as those of its holder."""
    with patched(worker_names, "refuse_non_holder", lambda *_: False):
        yield


@mutation
def replaced_process_not_refunded() -> Iterator[None]:
    """Take a process that lost its name for a newcomer."""
    with patched(worker_names, "_is_replaced", lambda *_: False):
        yield


@mutation
def replaced_processes_not_restored() -> Iterator[None]:
    """Forget after a restart from a snapshot which processes lost their names."""
    sound = Restorer.finish

    def finish(self: Restorer) -> Ledger:
        ledger = sound(self)
        ledger.replaced = {}
        return ledger

    with patched(Restorer, "finish", finish):
        yield


@mutation
def exited_worker_keeps_tasks() -> Iterator[None]:
    """Keep the leases of a worker that has sent Exit."""

    def worker_exited(self: Context, event: events.WorkerExited) -> None:
        self.send(effects.ReportAck(event.worker, event.request, []))

    with patched_item(_DECIDERS, events.WorkerExited, worker_exited):
        yield


@mutation
def stopping_worker_gets_tasks() -> Iterator[None]:
    """Assign tasks to a worker that is stopping."""

    def drain_requested(self: Context, event: events.DrainRequested) -> None:
        self.send(effects.CommandAck(event.client, event.request, 1))

    with patched_item(_DECIDERS, events.DrainRequested, drain_requested):
        yield


# Limits and order.


@mutation
def slot_freed_twice() -> Iterator[None]:
    """Free the slots of a lease twice."""
    sound = Ledger.release

    def release(self: Ledger, tasks: list[Task], *more: Any) -> None:
        for task in tasks:
            if task.lease is not None:
                task.lease.worker.slots_used -= task.terms.slots
        sound(self, tasks, *more)

    with patched(Ledger, "release", release):
        yield


@mutation
def unreleased_slots_reused() -> Iterator[None]:
    """Reuse slots that a worker has not freed."""

    def slots_free(self: Worker) -> int:
        return self.facts.slots_total - self.slots_used if self.facts.slots_total else 1 << 60

    with patched(Worker, "slots_free", property(slots_free)):
        yield


def _with_rules(**changed: int) -> AbstractContextManager[None]:
    """Read the settings of services without these fields."""
    sound = timers.rules_set

    def rules_set(self: Context, event: events.RulesSet) -> None:
        rules = tuple(
            structs.replace(one, options=structs.replace(one.options, **changed))
            for one in event.rules
        )
        sound(self, structs.replace(event, rules=rules))

    return patched_item(_DECIDERS, events.RulesSet, rules_set)


@mutation
def lane_limit_ignored() -> Iterator[None]:
    """Serve a serial lane by any number of workers."""
    with _with_rules(lane_workers_max=1000):
        yield


@mutation
def service_limit_ignored() -> Iterator[None]:
    """Let any number of workers serve a service."""
    with _with_rules(workers_max=0):
        yield


@mutation
def broker_limit_ignored() -> Iterator[None]:
    """Let any number of workers serve lanes."""
    sound = timers.rules_set

    def rules_set(self: Context, event: events.RulesSet) -> None:
        sound(self, structs.replace(event, workers_max=0))

    with patched_item(_DECIDERS, events.RulesSet, rules_set):
        yield


@mutation
def rate_ignored() -> Iterator[None]:
    """Ignore the rate of a service."""
    with _with_rules(rate_interval_ns=0):
        yield


@mutation
def pause_ignored() -> Iterator[None]:
    """Lease paused tasks."""
    with patched_item(apply_table_of(records.Paused), records.Paused, _no_op):
        yield


@mutation
def priority_inverted() -> Iterator[None]:
    """Lease the lowest priority first."""
    sound = Lane.queue

    def queue(self: Lane, priority: int) -> queues.Queue[Task]:
        return sound(self, -priority)

    with patched(Lane, "queue", queue):
        yield


@mutation
def last_in_first_out() -> Iterator[None]:
    """Lease the newest task of a lane first."""

    def peek(self: queues.Queue[Task], count: int) -> list[Task]:
        line = [*self.front[::-1], *self.items[self.cursor :]]
        return [task for task in reversed(line) if task.state is TaskState.READY][:count]

    with patched(queues.Queue, "peek", peek):
        yield


@mutation
def lease_returned_at_restart() -> Iterator[None]:
    """Lease tasks of live workers to others after a restart."""
    sound = timers.clock_set

    def clock_set(self: Context, event: events.ClockSet) -> None:
        first = not self.wall_offset_ns
        sound(self, event)
        for worker in [*self.ledger.workers.values()] if first else []:
            membership.return_tasks(self, worker, worker.held(), records.ReturnReason.LEFT)

    with patched_item(_DECIDERS, events.ClockSet, clock_set):
        yield


# Recovery.


@mutation
def attempt_not_restored() -> Iterator[None]:
    """Forget the attempts of tasks in recovery."""
    sound = recovery.recover

    def recover(*arguments: Any) -> Ledger:
        ledger = sound(*arguments)
        for task in ledger.tasks.values():
            if task.state is TaskState.READY:
                task.attempt = 0
        return ledger

    with patched(recovery, "recover", recover):
        yield


@mutation
def snapshot_forgets_delays() -> Iterator[None]:
    """Never wake tasks that were delayed when a snapshot was taken."""
    sound = Restorer.finish

    def finish(self: Restorer) -> Ledger:
        ledger = sound(self)
        ledger.due_heap.due.clear()
        return ledger

    with patched(Restorer, "finish", finish):
        yield


@mutation
def snapshot_forgets_failures() -> Iterator[None]:
    """Give tasks from a snapshot all their attempts again."""
    sound = Restorer.finish

    def finish(self: Restorer) -> Ledger:
        ledger = sound(self)
        for task in ledger.tasks.values():
            task.failures = 0
        return ledger

    with patched(Restorer, "finish", finish):
        yield


@mutation
def archived_tasks_forgotten() -> Iterator[None]:
    """Take an archived task for unknown when it is submitted again."""
    with patched(recovery, "recall_for", _no_op):
        yield


@mutation
def archived_attempts_forgotten() -> Iterator[None]:
    """Start at attempt 1 with a task from the archive."""
    sound = Ledger.recall

    def recall(self: Ledger, one: Any) -> None:
        sound(self, structs.replace(one, attempt=0))

    with patched(Ledger, "recall", recall):
        yield


@mutation
def last_row_skipped() -> Iterator[None]:
    """Stop recovery one row early."""
    sound = chain.verify

    def verify(*arguments: Any) -> Iterator[chain.Row]:
        return iter([*sound(*arguments)][:-1])

    with patched(chain, "verify", verify):
        yield


@mutation
def witness_ignored() -> Iterator[None]:
    """Accept a journal that lost its end."""
    sound = chain.verify

    def verify(rows: Any, start: chain.Head, _witness: Any = None) -> Iterator[chain.Row]:
        return sound(rows, start)

    with patched(chain, "verify", verify):
        yield


@mutation
def chain_ignored() -> Iterator[None]:
    """Accept a row with a flipped byte."""
    with patched(chain, "follows", lambda _row, _head: True):
        yield


@mutation
def lease_time_not_restored() -> Iterator[None]:
    """Restore leases with their old times."""

    def resume(self: Scheduler, now_ns: int) -> None:
        self.context.now_ns = now_ns
        for worker in self.ledger.workers.values():
            self.context.schedule_timeout(worker)

    with patched(Scheduler, "resume", resume):
        yield


# Leaked slots after a restart.


@mutation
def restart_leases_never_end() -> Iterator[None]:
    """Keep leases of before a restart for good if the worker can't list its tasks."""
    with patched(Context, "schedule_restart_deadline", _no_op):
        yield


@mutation
def heartbeats_extend_restart_leases() -> Iterator[None]:
    """Extend leases of before a restart by heartbeats of a worker that can't list its tasks."""
    sound = Context.restart_deadline_ns

    def restart_deadline_ns(self: Context, worker: Worker) -> int:
        deadline_ns = sound(self, worker)
        return deadline_ns and deadline_ns + worker.last_seen_ns - self.resumed_ns

    with patched(Context, "restart_deadline_ns", restart_deadline_ns):
        yield


@mutation
def slots_leak_after_restart() -> Iterator[None]:
    """Keep a slot whose INCREMENT was lost with the broker."""
    sound = Scheduler.resume

    def resume(self: Scheduler, now_ns: int) -> None:
        sound(self, now_ns)
        for worker in self.ledger.workers.values():
            worker.slots_kept_before = 0

    with patched(Scheduler, "resume", resume):
        yield


@mutation
def restart_is_charged() -> Iterator[None]:
    """Charge a loss to tasks that a restart took from their workers."""
    with (
        patched(records, "RETURNS_CHARGED", tuple(records.ReturnReason)[5:]),
        patched(apply, "RETURNS_CHARGED", tuple(records.ReturnReason)[5:]),
    ):
        yield
