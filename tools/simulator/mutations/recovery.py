"""Planted bugs of the broker's turn, the journal, and of what a restart restores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import structs

from simulator.clock import SimClock
from simulator.mutations.registry import (
    DECIDERS,
    mutation,
    mutation_for_kinds,
    no_op,
    patched,
    patched_item,
)
from taskyard.broker.requests import Requests
from taskyard.broker.turn import Broker
from taskyard.core import apply, deadlines, events, membership, records, timers
from taskyard.core.context import Context
from taskyard.core.entities import Task, Worker
from taskyard.core.ledger import Ledger
from taskyard.core.scheduler import Scheduler
from taskyard.core.snapshots.columns import Restorer
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import TimerHeap
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import chain, recovery
from taskyard.journal.recovery import encode

# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes


# The turn.


@mutation
def reply_before_commit() -> Iterator[None]:
    """Send replies before their records are durable."""

    def process(self: Any, arrived: Sequence[events.Event]) -> None:
        effects = self._decide(arrived, self.clock.monotonic_ns())
        decided = self.scheduler.take_records()
        with suppress(JournalDamaged):  # a result that is not there yet
            effects = self.completer.complete(effects)
        self._undelivered = self.transport.send(effects)
        if decided:
            self.store.commit(encode(decided), len(decided))

    with patched(Broker, "process", process):
        yield


@mutation
def waiting_submission_forgotten() -> Iterator[None]:
    """Never serve a client again whose submission waits for compaction."""
    sound = Requests.run

    def run(self: Any, *arguments: Any) -> Any:
        effects = sound(self, *arguments)
        self._later = TimerHeap()
        return effects

    with patched(Requests, "run", run):
        yield


@mutation
def failed_commit_ignored() -> Iterator[None]:
    """Send replies although the journal has failed."""

    def process(self: Any, arrived: Sequence[events.Event]) -> None:
        effects = self._decide(arrived, self.clock.monotonic_ns())
        decided = self.scheduler.take_records()
        failure = None
        if decided:
            try:
                self.store.commit(encode(decided), len(decided))
            except JournalFailed as failed:
                failure = failed
        with suppress(JournalDamaged):
            effects = self.completer.complete(effects)
        self._undelivered = self.transport.send(effects)
        if failure is not None:
            raise failure

    with patched(Broker, "process", process):
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

    with patched_item(DECIDERS, events.ClockSet, clock_set):
        yield


@mutation
def full_disk_ignored() -> Iterator[None]:
    """Accept submissions while the disk is nearly full."""
    with patched_item(DECIDERS, events.DiskSpaceChanged, no_op):
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
            task.change_extras(failures=0)
        return ledger

    with patched(Restorer, "finish", finish):
        yield


@mutation
def archived_tasks_forgotten() -> Iterator[None]:
    """Take an archived task for unknown when it is submitted again."""
    with patched(recovery, "recall_for", no_op):
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


# Leases after a restart.


@mutation
def lease_returned_at_restart() -> Iterator[None]:
    """Lease tasks of live workers to other workers after a restart."""
    sound = timers.clock_set

    def clock_set(self: Context, event: events.ClockSet) -> None:
        first = not self.wall_offset_ns
        sound(self, event)
        for worker in [*self.ledger.workers.values()] if first else []:
            membership.return_tasks(self, worker, worker.held(), records.ReturnReason.LEFT)

    with patched_item(DECIDERS, events.ClockSet, clock_set):
        yield


@mutation
def restart_leases_never_end() -> Iterator[None]:
    """Keep leases of before a restart for good if the worker can't list its tasks."""
    with patched(Context, "schedule_deadline", no_op):
        yield


@mutation
def heartbeats_extend_restart_leases() -> Iterator[None]:
    """Extend leases of before a restart by heartbeats of a worker that can't list its tasks."""
    sound = deadlines.of_tasks

    def of_tasks(worker: Worker) -> Iterator[tuple[Task, int]]:
        for task, ends_ns in sound(worker):
            since_ns = ends_ns and ends_ns - deadlines.of_worker(worker)
            yield task, ends_ns and ends_ns + worker.last_seen_ns - since_ns

    with patched(deadlines, "of_tasks", of_tasks):
        yield


@mutation_for_kinds("stealing")
def unlisted_task_kept() -> Iterator[None]:
    """Keep a task whose assignment was lost while its worker requests more and lists none."""

    def of_worker(worker: Worker) -> int:
        return worker.facts.restart_lease_ns

    with patched(deadlines, "of_worker", of_worker):
        yield


@mutation
def slots_leak_after_restart() -> Iterator[None]:
    """Keep a slot whose INCREMENT was lost with the broker."""
    sound = Scheduler.resume

    def resume(self: Scheduler, now_ns: int) -> None:
        sound(self, now_ns)
        for worker in self.ledger.workers.values():
            worker.slots_uncertain = []

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
