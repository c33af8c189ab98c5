"""Planted bugs: each replaces one function of the real code by a broken one, and must be caught.
Those of the core, the journal and the broker's turn are here, those of lanes and of the dialects
beside it.

A simulator that does not catch these would not catch the next real one either. They are found by
the checkers alone, without `core.invariants`, but for those of `mutation_for_invariants`. Each is
a context manager with one sentence that says what is broken.
"""
# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from msgspec import structs

from taskyard.broker import results as result_loader
from taskyard.broker.turn import Broker
from taskyard.core import (
    apply,
    effects,
    events,
    graph,
    holders,
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
)
from taskyard.core.context import Context
from taskyard.core.entities import Lane, Lease, Task, Worker
from taskyard.core.ledger import Ledger
from taskyard.core.model import Result
from taskyard.core.scheduler import Scheduler
from taskyard.core.snapshot import Restorer
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import chain, recovery
from taskyard.journal.encoding import encode
from taskyard.sim.clock import SimClock
from taskyard.sim.mutations.registry import mutation, patched, patched_item

_DECIDERS: Final[dict[type, Any]] = scheduler._DECIDERS  # noqa: SLF001 - a bug is planted inside


def apply_table_of(record: type) -> dict[type, Any]:
    """The table of `apply` that holds this record."""
    tables: tuple[dict[type, Any], ...] = (apply._APPLY, apply._APPLY_TO_TASKS)  # noqa: SLF001
    return next(table for table in tables if record in table)


def _no_op(*_arguments: Any, **_named: Any) -> None:
    """Do nothing."""


# Reports and fencing.


@mutation
def settled_lease_accepted() -> Iterator[None]:
    """A report on a whole lease counts, though some of it was settled or given to another."""

    def whole_lease(first: Task | None, event: events.TasksReported) -> Lease | None:
        lease = None if first is None else first.lease
        if lease is None or lease.worker.name != event.worker or lease.names != event.names:
            return None
        return lease

    with patched(results, "_whole_lease", whole_lease):
        yield


@mutation
def runs_not_clamped() -> Iterator[None]:
    """A worker's wall clock says when a run was, whatever the lease."""
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
    """Of a report of which only a part is the worker's, runs are taken from its beginning."""
    sound = runs.clamped_to_lease

    def clamped_to_lease(measured: Any, indexes: Any, *times: Any) -> Any:
        return sound(measured, range(len(indexes)), *times)

    with patched(runs, "clamped_to_lease", clamped_to_lease):
        yield


@mutation
def no_fencing() -> Iterator[None]:
    """Whoever reports on a leased task is believed."""

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
    """A report on a former attempt counts if its worker holds the task again."""
    sound = results._split_held  # noqa: SLF001

    def sort(self: Context, event: events.TasksReported) -> Any:
        return sound(self, structs.replace(event, attempts=None))

    with patched(results, "_split_held", sort):
        yield


@mutation
def completion_not_recorded() -> Iterator[None]:
    """A completion is noted and never recorded."""
    with patched(results, "_finish", _no_op):
        yield


@mutation
def retry_never_ends() -> Iterator[None]:
    """The retry schedule starts over when it is used up."""
    sound = results.retry_delay_ns

    def retry_delay_ns(task: Task, random_bits: int) -> int | None:
        delay_ns = sound(task, random_bits)
        return 100_000_000 if delay_ns is None else delay_ns

    with patched(results, "retry_delay_ns", retry_delay_ns):
        yield


@mutation
def failed_at_once() -> Iterator[None]:
    """The retry schedule is not looked at."""
    with patched(results, "retry_delay_ns", lambda _task, _luck: None):
        yield


@mutation
def returned_task_lost() -> Iterator[None]:
    """A task that is given back gets into no queue."""
    sound = Ledger.requeue

    def requeue(self: Ledger, tasks: list[Task], cause: Any, **how: bool) -> None:
        sound(self, tasks, cause, **how)
        self.dequeue([task for task in tasks if task.state is TaskState.READY])

    with patched(Ledger, "requeue", requeue):
        yield


@mutation
def returned_to_the_back() -> Iterator[None]:
    """A task that nobody is to blame for queues behind all the others again."""
    sound = Ledger.requeue

    def requeue(self: Ledger, tasks: list[Task], cause: Any, **how: bool) -> None:
        sound(self, tasks, cause, **{**how, "front": False})

    with patched(Ledger, "requeue", requeue):
        yield


@mutation
def truncation_not_recorded() -> Iterator[None]:
    """A truncated result is recorded as if it were whole."""
    sound = results.tasks_reported

    def tasks_reported(self: Context, event: events.TasksReported) -> None:
        event.result_bytes_total = None
        sound(self, event)

    with patched_item(_DECIDERS, events.TasksReported, tasks_reported):
        yield


@mutation
def truncation_lost_in_the_journal() -> Iterator[None]:
    """A truncated result that is read from the journal again is told as if it were whole."""
    sound = recovery.results_in

    def results_in(record: records.AnyRecord, number: int, names: list[bytes]) -> list[Result]:
        return [Result(one.text) for one in sound(record, number, names)]

    with patched(result_loader, "results_in", results_in):
        yield


# The turn.


@mutation
def reply_before_commit() -> Iterator[None]:
    """Answers leave before what they say is durable."""

    def turn(self: Any) -> None:
        arrived = self.port.receive(self._wait_ns())
        answers = self._decide([*self._undelivered, *arrived])
        decided = self.scheduler.take_records()
        with suppress(JournalDamaged):  # a result that is not there yet
            self._answers.complete(answers)
        self._undelivered = self.port.send(answers)
        if decided:
            self.store.commit(encode(decided), len(decided))

    with patched(Broker, "turn", turn):
        yield


@mutation
def failed_commit_ignored() -> Iterator[None]:
    """The broker answers although its journal has failed."""

    def turn(self: Any) -> None:
        arrived = self.port.receive(self._wait_ns())
        answers = self._decide([*self._undelivered, *arrived])
        decided = self.scheduler.take_records()
        failure = None
        if decided:
            try:
                self.store.commit(encode(decided), len(decided))
            except JournalFailed as failed:
                failure = failed
        with suppress(JournalDamaged):
            self._answers.complete(answers)
        self._undelivered = self.port.send(answers)
        if failure is not None:
            raise failure

    with patched(Broker, "turn", turn):
        yield


@mutation
def wall_clock_for_leases() -> Iterator[None]:
    """Silence is measured by the wall clock."""
    with patched(SimClock, "monotonic_ns", SimClock.wall_ns):
        yield


@mutation
def clock_never_set() -> Iterator[None]:
    """A jump of the wall clock is not noticed."""
    sound = timers.clock_set

    def clock_set(self: Context, event: events.ClockSet) -> None:
        if not self.wall_offset_ns:
            sound(self, event)

    with patched_item(_DECIDERS, events.ClockSet, clock_set):
        yield


@mutation
def full_disk_ignored() -> Iterator[None]:
    """Submissions are taken while the disk's reserve is touched."""
    with patched_item(_DECIDERS, events.DiskSpaceChanged, _no_op):
        yield


# Dependencies.


@mutation
def dependency_dropped() -> Iterator[None]:
    """What a submission is to wait for is forgotten."""
    with patched(submission, "_resolve", lambda *_: submission.Dependencies()):
        yield


@mutation
def released_by_the_first() -> Iterator[None]:
    """A task that waits for several starts when the first of them is done."""
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
    """The dependents of a cancelled task are not cancelled."""
    with patched(graph, "with_causes", lambda tasks: ([*tasks], [])):
        yield


@mutation
def cycle_accepted() -> Iterator[None]:
    """Tasks may wait for each other."""
    with patched(graph, "cycle", lambda *_: []):
        yield


@mutation
def repeated_submission_doubles() -> Iterator[None]:
    """A submission that is repeated after a lost answer makes its tasks again."""
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
    """A name that is submitted anew begins with attempt 1 again."""
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
    """What waits for a time comes due at once."""
    sound = queues.DueHeap.pop_due

    def pop_due(self: queues.DueHeap[Task], wall_ns: int, count_max: int) -> list[Task]:
        return sound(self, 2 * wall_ns, count_max)

    with patched(queues.DueHeap, "pop_due", pop_due):
        yield


@mutation
def expiry_ignored() -> Iterator[None]:
    """No task ever grows too old."""
    with patched(timers, "_is_expired", lambda _task, _at_ns: False):
        yield


@mutation
def lease_never_expires() -> Iterator[None]:
    """Silence is not noticed."""

    def fall_silent(self: Context) -> None:
        self.timeouts.clear()

    with patched(timers, "_expire_workers", fall_silent):
        yield


@mutation
def expired_too_early() -> Iterator[None]:
    """A worker is given up after half of the time that it may be silent."""
    sound = Worker.timeout_at_ns

    def timeout_at_ns(self: Worker) -> int:
        at_ns: int = sound.fget(self)  # type: ignore[attr-defined]
        return at_ns and self.last_seen_ns + (at_ns - self.last_seen_ns) // 2

    with patched(Worker, "timeout_at_ns", property(timeout_at_ns)):
        yield


@mutation
def heartbeat_ignored() -> Iterator[None]:
    """Only reports and questions show that a worker lives, its heartbeats do not."""
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
    """An assignment that was lost on its way is never missed."""
    with patched(membership, "HEARTBEATS_UNLISTED_MAX", 1 << 40):
        yield


@mutation
def unlisted_at_once() -> Iterator[None]:
    """A lease is taken back by the first heartbeat, whether it lists it or not."""
    sound = membership.worker_heartbeat

    def worker_heartbeat(self: Context, event: events.WorkerHeartbeat) -> None:
        if event.held is not None:
            event.held, event.heartbeat_ns = [], 0
        sound(self, event)

    with patched_item(_DECIDERS, events.WorkerHeartbeat, worker_heartbeat):
        yield


@mutation
def parked_worker_forgotten() -> Iterator[None]:
    """A worker that waits for work is not thought of when some comes."""
    with patched(selection, "relist", _no_op):
        yield


@mutation
def freed_slot_not_noticed() -> Iterator[None]:
    """A worker that has room again gets nothing until it asks."""
    with patched(membership, "on_slot_free", _no_op):
        yield


@mutation
def watcher_never_notified() -> Iterator[None]:
    """Nobody is told that a task is settled."""
    with patched(subscriptions, "notify_settled", _no_op):
        yield


@mutation
def notified_too_early() -> Iterator[None]:
    """Who watches tasks is told that they are done, whatever they are."""

    def watch_requested(self: Context, event: events.WatchRequested) -> None:
        names = event.names or []
        states = [TaskState.DONE] * len(names)
        self.send(effects.Settled(event.client, event.request, names, states, [b""] * len(names)))

    with patched_item(_DECIDERS, events.WatchRequested, watch_requested):
        yield


# Crashes.


@mutation
def crash_not_charged() -> Iterator[None]:
    """A task that kills its workers is tried again for ever."""

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
    """Nobody remembers that a task was lost with its worker."""
    with patched(Task, "losses", property(lambda _task: 0)):
        yield


@mutation
def suspect_not_isolated() -> Iterator[None]:
    """A worker that runs a last attempt gets other tasks beside it."""
    with (
        patched(selection, "holds_last_attempt", lambda _worker: False),
        patched(reservations, "holds_last_attempt", lambda _worker: False),
    ):
        yield


@mutation
def incarnation_ignored() -> Iterator[None]:
    """A worker that comes back as another process is taken for the former one."""
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
    """A second process gets the name of a live one, and what that held is charged as lost."""
    with patched(holders, "refuses_newcomer", lambda *_: False):
        yield


@mutation
def newcomer_treated_as_holder() -> Iterator[None]:
    """A process that waits for a name can speak for the one that holds it."""
    with patched(holders, "refuse_non_holder", lambda *_: False):
        yield


@mutation
def replaced_process_not_refunded() -> Iterator[None]:
    """A process that lost its name and is heard again is taken for a newcomer."""
    with patched(holders, "_is_replaced", lambda *_: False):
        yield


@mutation
def replaced_processes_not_restored() -> Iterator[None]:
    """A restart from a snapshot forgets which processes lost their names."""
    sound = Restorer.finish

    def finish(self: Restorer) -> Ledger:
        ledger = sound(self)
        ledger.replaced = {}
        return ledger

    with patched(Restorer, "finish", finish):
        yield


@mutation
def exited_worker_keeps_tasks() -> Iterator[None]:
    """A worker says goodbye, and nobody takes back what it held."""

    def worker_exited(self: Context, event: events.WorkerExited) -> None:
        self.send(effects.ReportAck(event.worker, event.request, []))

    with patched_item(_DECIDERS, events.WorkerExited, worker_exited):
        yield


@mutation
def stopping_worker_gets_tasks() -> Iterator[None]:
    """A worker that is to go away is given tasks."""

    def drain_requested(self: Context, event: events.DrainRequested) -> None:
        self.send(effects.CommandAck(event.client, event.request, 1))

    with patched_item(_DECIDERS, events.DrainRequested, drain_requested):
        yield


# Limits and order.


@mutation
def slot_freed_twice() -> Iterator[None]:
    """A lease that ends frees its slots two times."""
    sound = Ledger.release

    def release(self: Ledger, tasks: list[Task]) -> None:
        for task in tasks:
            if task.lease is not None:
                task.lease.worker.slots_used -= task.terms.slots
        sound(self, tasks)

    with patched(Ledger, "release", release):
        yield


@mutation
def unreleased_slots_reused() -> Iterator[None]:
    """Slots that a worker has not freed are given away."""

    def slots_free(self: Worker) -> int:
        return self.facts.slots_total - self.slots_used if self.facts.slots_total else 1 << 60

    with patched(Worker, "slots_free", property(slots_free)):
        yield


def _with_rules(**changed: int) -> AbstractContextManager[None]:
    """The settings of services are read, but for these."""
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
    """A serial lane is served as if it were open."""
    with _with_rules(lane_workers_max=1000):
        yield


@mutation
def service_limit_ignored() -> Iterator[None]:
    """Any number of workers may serve a service."""
    with _with_rules(workers_max=0):
        yield


@mutation
def broker_limit_ignored() -> Iterator[None]:
    """Any number of workers may serve lanes."""
    sound = timers.rules_set

    def rules_set(self: Context, event: events.RulesSet) -> None:
        sound(self, structs.replace(event, workers_max=0))

    with patched_item(_DECIDERS, events.RulesSet, rules_set):
        yield


@mutation
def rate_ignored() -> Iterator[None]:
    """A service's rate does not hold it back."""
    with _with_rules(rate_interval_ns=0):
        yield


@mutation
def pause_ignored() -> Iterator[None]:
    """What is paused is leased."""
    with patched_item(apply_table_of(records.Paused), records.Paused, _no_op):
        yield


@mutation
def priority_inverted() -> Iterator[None]:
    """The lowest priority goes first."""
    sound = Lane.queue

    def queue(self: Lane, priority: int) -> queues.Queue[Task]:
        return sound(self, -priority)

    with patched(Lane, "queue", queue):
        yield


@mutation
def last_in_first_out() -> Iterator[None]:
    """The newest task of a lane goes first."""

    def peek(self: queues.Queue[Task], count: int) -> list[Task]:
        line = [*self.front[::-1], *self.items[self.cursor :]]
        return [task for task in reversed(line) if task.state is TaskState.READY][:count]

    with patched(queues.Queue, "peek", peek):
        yield


@mutation
def lease_returned_at_restart() -> Iterator[None]:
    """After a restart what live workers hold is leased again to others."""
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
    """Recovery forgets how often tasks were tried."""
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
    """What waited for a time when a snapshot was taken waits for ever."""
    sound = Restorer.finish

    def finish(self: Restorer) -> Ledger:
        ledger = sound(self)
        ledger.due_heap.due.clear()
        return ledger

    with patched(Restorer, "finish", finish):
        yield


@mutation
def snapshot_forgets_failures() -> Iterator[None]:
    """A task from a snapshot has all its attempts again."""
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
    """A task that ended and was archived is not known when somebody submits it again."""
    with patched(recovery, "recall_for", _no_op):
        yield


@mutation
def archived_attempts_forgotten() -> Iterator[None]:
    """A task that comes back from the archive is numbered from the beginning again."""
    sound = Ledger.recall

    def recall(self: Ledger, one: Any) -> None:
        sound(self, structs.replace(one, attempt=0))

    with patched(Ledger, "recall", recall):
        yield


@mutation
def last_row_skipped() -> Iterator[None]:
    """Recovery stops one row early."""
    sound = chain.verify

    def verify(*arguments: Any) -> Iterator[chain.Row]:
        return iter([*sound(*arguments)][:-1])

    with patched(chain, "verify", verify):
        yield


@mutation
def witness_ignored() -> Iterator[None]:
    """A journal that lost its end is believed."""
    sound = chain.verify

    def verify(rows: Any, start: chain.Head, _witness: Any = None) -> Iterator[chain.Row]:
        return sound(rows, start)

    with patched(chain, "verify", verify):
        yield


@mutation
def chain_ignored() -> Iterator[None]:
    """A flipped byte in a row is believed."""
    with patched(chain, "follows", lambda _row, _head: True):
        yield


@mutation
def lease_time_not_restored() -> Iterator[None]:
    """After a restart leases are as old as they were."""

    def resume(self: Scheduler, now_ns: int) -> None:
        self.context.now_ns = now_ns
        for worker in self.ledger.workers.values():
            self.context.schedule_timeout(worker)

    with patched(Scheduler, "resume", resume):
        yield


# Leaked slots after a restart.


@mutation
def restart_leases_never_end() -> Iterator[None]:
    """A worker that can't list its tasks keeps those of before a restart for good."""
    with patched(Context, "schedule_restart_deadline", _no_op):
        yield


@mutation
def heartbeats_extend_restart_leases() -> Iterator[None]:
    """A worker that can't list its tasks keeps those of before a restart while it is heard."""
    sound = Context.restart_deadline_ns

    def restart_deadline_ns(self: Context, worker: Worker) -> int:
        deadline_ns = sound(self, worker)
        return deadline_ns and deadline_ns + worker.last_seen_ns - self.resumed_ns

    with patched(Context, "restart_deadline_ns", restart_deadline_ns):
        yield


@mutation
def slots_leak_after_restart() -> Iterator[None]:
    """A slot whose INCREMENT was lost with the broker stays taken."""
    sound = Scheduler.resume

    def resume(self: Scheduler, now_ns: int) -> None:
        sound(self, now_ns)
        for worker in self.ledger.workers.values():
            worker.slots_kept_before = 0

    with patched(Scheduler, "resume", resume):
        yield


@mutation
def restart_is_charged() -> Iterator[None]:
    """A task that a restart took from its worker counts as one that lost it."""
    with (
        patched(records, "RETURNS_CHARGED", tuple(records.ReturnReason)[5:]),
        patched(apply, "RETURNS_CHARGED", tuple(records.ReturnReason)[5:]),
    ):
        yield
