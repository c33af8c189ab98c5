"""Planted bugs of the core: reports, dependencies, limits and order.

Each replaces one function of the real code by a broken function, and its docstring says what that
does. The checkers must catch it without `core.invariants`, except bugs of
`mutation_for_invariants`. A simulator that misses these would miss the next real bug, too.
"""
# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from msgspec import structs

from simulator.mutations.registry import (
    DECIDERS,
    apply_table_of,
    mutation,
    mutation_for_invariants,
    no_op,
    patched,
    patched_item,
)
from taskyard.broker import results as result_loader
from taskyard.core import (
    events,
    graph,
    ledger,
    queues,
    records,
    results,
    runs,
    selection,
    submission,
    timers,
)
from taskyard.core.blobs import Content, texts_of
from taskyard.core.context import Context
from taskyard.core.entities import Lane, Lease, Task, Worker
from taskyard.core.ledger import Ledger
from taskyard.core.states import TaskState
from taskyard.journal import recovery

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
    with patched(results, "_finish", no_op):
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
    """Queue a task that was returned without its fault behind all other tasks."""
    sound = Ledger.requeue

    def requeue(self: Ledger, tasks: list[Task], cause: Any, **how: bool) -> None:
        sound(self, tasks, cause, **{**how, "front": False})

    with patched(Ledger, "requeue", requeue):
        yield


@mutation
def truncation_not_recorded() -> Iterator[None]:
    """Record a truncated result as whole."""
    sound = results.tasks_reported

    def tasks_reported(self: Context, event: events.TasksReported) -> None:
        event.texts = None if event.texts is None else [*texts_of(event.texts)]
        sound(self, event)

    with patched_item(DECIDERS, events.TasksReported, tasks_reported):
        yield


@mutation
def truncation_lost_in_the_journal() -> Iterator[None]:
    """Send a truncated result that is read from the journal as whole."""
    sound = recovery.results_in

    def results_in(record: records.AnyRecord, number: int, names: list[bytes]) -> list[Content]:
        return [*texts_of(sound(record, number, names))]

    with patched(result_loader, "results_in", results_in):
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
def resources_not_counted() -> Iterator[None]:
    """Lease the resources of a worker again while a task has them."""

    def count_wide(_worker: Worker, tasks: list[Task], _sign: int) -> int:
        return sum(task.terms.slots for task in tasks)

    with patched(ledger, "_count_wide", count_wide):
        yield


@mutation_for_invariants
def resources_lost_with_a_lease() -> Iterator[None]:
    """Forget to return the resources of a lease that is lost on its way to the worker."""
    table = apply_table_of(records.Returned)
    sound = table[records.Returned]

    def returned(durable: Ledger, record: records.Returned, tasks: list[Task]) -> None:
        worker = durable.workers[record.worker]
        used = dict(worker.resources_used)
        sound(durable, record, tasks)
        if record.reason is records.ReturnReason.UNLISTED:
            worker.resources_used = used

    with patched_item(table, records.Returned, returned):
        yield


@mutation_for_invariants
def resources_kept_from_all() -> Iterator[None]:
    """Give nothing to a worker that is kept for a task which lacks a resource."""
    with patched(selection.Selection, "_keep_for", no_op):
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

    return patched_item(DECIDERS, events.RulesSet, rules_set)


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

    with patched_item(DECIDERS, events.RulesSet, rules_set):
        yield


@mutation
def rate_ignored() -> Iterator[None]:
    """Ignore the rate of a service."""
    with _with_rules(rate_interval_ns=0):
        yield


@mutation
def pause_ignored() -> Iterator[None]:
    """Lease paused tasks."""
    with patched_item(apply_table_of(records.Paused), records.Paused, no_op):
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
