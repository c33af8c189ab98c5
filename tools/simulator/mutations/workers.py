"""Planted bugs of the core's times and workers: due times, leases, heartbeats, lost workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulator.mutations.registry import (
    DECIDERS,
    mutation,
    mutation_for_kinds,
    no_op,
    patched,
    patched_item,
)
from taskyard.core import (
    assignment,
    effects,
    events,
    holds,
    membership,
    queues,
    records,
    selection,
    subscriptions,
    timers,
    worker_names,
)
from taskyard.core.context import Context, TimerKind
from taskyard.core.entities import Task, Worker
from taskyard.core.ledger import Ledger
from taskyard.core.snapshots.columns import Restorer
from taskyard.core.states import TaskState

# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes


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
    with patched(assignment, "_is_expired", lambda _task, _at_ns: False):
        yield


@mutation
def lease_never_expires() -> Iterator[None]:
    """Never expire a lease."""
    with patched_item(timers._ON_TIMER, TimerKind.HEARTBEATS, no_op):  # noqa: SLF001  # as DECIDERS
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

    with patched_item(DECIDERS, events.WorkerHeartbeat, worker_heartbeat):
        yield


@mutation_for_kinds("native")
def requested_interval_ignored() -> Iterator[None]:
    """Judge a worker by the interval of its last heartbeat, not by the reply's longer interval."""
    used = property(lambda self: self.heartbeat_used_ns or self.facts.heartbeat_ns)
    with patched(Worker, "heartbeat_ns", used):
        yield


@mutation_for_kinds("native", "wmp")
def unconfirmed_interval_used() -> Iterator[None]:
    """Judge a worker by the interval in the last reply, which it may not have received."""
    requested = property(lambda self: self.heartbeat_requested_ns or self.facts.heartbeat_ns)
    with patched(Worker, "heartbeat_ns", requested):
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

    with patched_item(DECIDERS, events.WorkerHeartbeat, worker_heartbeat):
        yield


@mutation
def parked_worker_forgotten() -> Iterator[None]:
    """Assign nothing to parked workers when tasks arrive."""
    with patched(assignment, "relist", no_op):
        yield


@mutation
def freed_slot_not_noticed() -> Iterator[None]:
    """Assign nothing to a worker with a freed slot until it requests tasks."""
    with patched(membership, "on_slot_free", no_op):
        yield


@mutation
def watcher_never_notified() -> Iterator[None]:
    """Never notify watchers of settled tasks."""
    with patched(subscriptions, "notify_settled", no_op):
        yield


@mutation
def notified_too_early() -> Iterator[None]:
    """Notify watchers that tasks are done, whatever their state."""

    def watch_requested(self: Context, event: events.WatchRequested) -> None:
        names = event.names or []
        states = [TaskState.DONE] * len(names)
        self.send(effects.Settled(event.client, event.request, names, states, [b""] * len(names)))

    with patched_item(DECIDERS, events.WatchRequested, watch_requested):
        yield


# Crashes.


@mutation
def crash_not_charged() -> Iterator[None]:
    """Retry a task for ever that kills its workers."""

    def lose(self: Context, worker: Worker, reason: Any) -> list[Task]:
        held = worker.held()
        names, attempts = [task.name for task in held], [task.attempt for task in held]
        if reason is not None:
            membership.return_tasks(self, worker, held, reason)
        elif held:
            self.emit(records.LeaseExpired(self.at_ns, worker.name, names, attempts), held)
        return held

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
        patched(holds, "holds_last_attempt", lambda _worker: False),
    ):
        yield


@mutation
def incarnation_ignored() -> Iterator[None]:
    """Take a new process of a worker for the former process."""
    sound = membership.worker_registered

    def worker_registered(self: Context, event: events.WorkerRegistered) -> None:
        existing = self.ledger.workers.get(event.worker)
        if existing is None:
            sound(self, event)
        else:
            existing.last_seen_ns = self.now_ns

    with patched_item(DECIDERS, events.WorkerRegistered, worker_registered):
        yield


@mutation
def name_taken_over_at_once() -> Iterator[None]:
    """Give the name of a live process to another, and charge its tasks with a loss."""
    with patched(worker_names, "refuses_newcomer", lambda *_: False):
        yield


@mutation
def newcomer_treated_as_holder() -> Iterator[None]:
    """Accept messages of a process that contests a name as the holder's messages."""
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

    with patched_item(DECIDERS, events.WorkerExited, worker_exited):
        yield


@mutation
def stopping_worker_gets_tasks() -> Iterator[None]:
    """Assign tasks to a worker that is stopping."""

    def drain_requested(self: Context, event: events.DrainRequested) -> None:
        self.send(effects.CommandAck(event.client, event.request, 1))

    with patched_item(DECIDERS, events.DrainRequested, drain_requested):
        yield
