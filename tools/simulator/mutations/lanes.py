"""Planted bugs of lanes and their rules.

The checkers must catch each of them, as in `core`.
"""
# ruff: noqa: ANN401, SLF001 - a broken function takes whatever the sound one takes, and is inside

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from simulator.mutations.registry import mutation, mutation_for_invariants, patched, patched_item
from taskyard.core import (
    apply,
    holds,
    lane_queues,
    queues,
    records,
    rules,
    scheduler,
    selection,
    timers,
)
from taskyard.core.context import Context
from taskyard.core.demand_queues import DemandQueue
from taskyard.core.entities import Lane, Service, Task
from taskyard.core.events import RulesSet
from taskyard.core.ledger import Ledger
from taskyard.core.model import Submission
from taskyard.core.resources import Room
from taskyard.core.snapshots.columns import Restorer
from taskyard.core.states import READY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

_DECIDERS: Final[dict[type, Any]] = scheduler._DECIDERS


def _no_op(*_arguments: Any, **_named: Any) -> None:
    """Do nothing."""


def _with_rules(**changed: Any) -> AbstractContextManager[None]:
    """Read the settings without these fields."""
    sound = timers.rules_set

    def rules_set(self: Context, event: RulesSet) -> None:
        rules = tuple(
            structs.replace(one, options=structs.replace(one.options, **changed))
            for one in event.rules
        )
        sound(self, structs.replace(event, rules=rules))

    return patched_item(_DECIDERS, RulesSet, rules_set)


@mutation
def hold_ignored() -> Iterator[None]:
    """Serve a held lane like any other."""
    with _with_rules(is_held=False):
        yield


@mutation
def debounce_ignored() -> Iterator[None]:
    """Start a lane with its first task."""
    with _with_rules(debounce_ns=0):
        yield


@mutation
def last_rule_wins() -> Iterator[None]:
    """Match rules from the end of the file."""
    sound = timers.rules_set

    def rules_set(self: Context, event: RulesSet) -> None:
        sound(self, structs.replace(event, rules=event.rules[::-1]))

    with patched_item(_DECIDERS, RulesSet, rules_set):
        yield


@mutation
def release_is_permanent() -> Iterator[None]:
    """Keep a held lane released for good."""
    with patched(Lane, "released", property(lambda lane: 1000 if lane.extras is not None else 0)):
        yield


@mutation
def release_not_restored() -> Iterator[None]:
    """Forget released lanes after a restart."""
    sound = Restorer.finish

    def finish(self: Restorer) -> Ledger:
        ledger = sound(self)
        for service in ledger.services.values():
            for lane in service.lanes.values():
                if lane.extras is not None:
                    lane.extras.released = 0
        return ledger

    with patched(Restorer, "finish", finish):
        yield


@mutation
def deferred_task_queued_at_once() -> Iterator[None]:
    """Queue a deferred task at once."""
    sound = lane_queues.add

    def add(lane: Lane, task: Task, *, front: bool, **_named: bool) -> None:
        sound(lane, task, front=front)

    with patched(lane_queues, "add", add):
        yield


@mutation_for_invariants
def deferred_forever() -> Iterator[None]:
    """Leave deferred tasks out although the run is over."""
    with patched(lane_queues, "count_removed", _no_op):
        yield


@mutation
def fifo_order_ignored() -> Iterator[None]:
    """Treat all lanes as random."""
    with _with_rules(is_random=True):
        yield


@mutation
def random_before_priority() -> Iterator[None]:
    """Lease the lowest priority first in random lanes."""

    def draw(self: Lane, count: int, random_bits: int) -> list[Task]:
        drawn = [queue.sample(count, random_bits) for queue in reversed(self.queues)]
        return [task for some in drawn for task in some][:count]

    with patched(Lane, "sample", draw):
        yield


@mutation
def removed_tasks_sampled() -> Iterator[None]:
    """Sample tasks that were removed from the middle of a queue."""

    def valid(_self: queues.Queue[Task], entries: list[Task], _gone: Any) -> list[Task]:
        return [task for task in entries if task.state is READY]

    with patched(queues.Queue, "_valid", valid):
        yield


@mutation
def reload_forgets_lanes() -> Iterator[None]:
    """Forget waiting lanes when the settings are read again."""
    sound = Service.apply_rules

    def run_by(self: Service, choices: Any) -> None:
        sound(self, choices)
        for lane in self.lanes.values():
            lane.in_rotation = False
        for lane_group in self.lane_groups:
            lane_group.rotation.clear()

    with patched(Service, "apply_rules", run_by):
        yield


@mutation
def reload_forgets_lane_workers() -> Iterator[None]:
    """Count no present worker against the limits when the settings are read again."""
    with patched(Ledger, "_count_pairs", _no_op):
        yield


@mutation
def late_not_reported() -> Iterator[None]:
    """Never report late tasks."""
    sound = queues.DueHeap.pop_late

    def pop_late(*arguments: Any) -> list[bytes]:
        return sound(*arguments)[:0]

    with patched(queues.DueHeap, "pop_late", pop_late):
        yield


@mutation
def late_reported_again() -> Iterator[None]:
    """Report late tasks again after a restart."""
    with patched_item(apply._APPLY, records.ReportedLate, _no_op):
        yield


@mutation
def move_forgotten() -> Iterator[None]:
    """Leave a moved task in its lane."""
    with patched_item(apply._APPLY_TO_TASKS, records.Moved, _no_op):
        yield


@mutation
def edit_forgotten() -> Iterator[None]:
    """Keep the terms of an edited task."""
    with patched_item(apply._APPLY_TO_TASKS, records.Edited, _no_op):
        yield


@mutation
def edited_priority_ignored() -> Iterator[None]:
    """Leave an edited task in the queue of its former priority."""

    def change_terms(_ledger: Any, task: Any, terms: Any) -> None:
        task.terms = terms

    with patched(Ledger, "change_terms", change_terms):
        yield


@mutation
def expiry_of_rule_ignored() -> Iterator[None]:
    """Ignore the expiries of a rule."""

    def with_expiry(_regimes: Any, submission: Submission, _at_ns: int) -> Submission:
        return submission

    with patched(rules, "with_expiry", with_expiry):
        yield


@mutation_for_invariants
def suspect_blocks_its_lane() -> Iterator[None]:
    """Block a busy worker at a lane with a suspect, and at all lanes after it."""
    sound = selection.Selection._take

    def take(self: selection.Selection, lane: Lane) -> None:
        if lane.suspects and (self.worker.leases or self.tasks):
            self.closed = True
        else:
            sound(self, lane)

    with patched(selection.Selection, "_take", take):
        yield


@mutation_for_invariants
def wide_task_blocks_its_lane() -> Iterator[None]:
    """Block a worker at a task that needs more slots than it has free."""

    def first_match(
        _self: selection.Selection, tasks: list[Task], left: Room, count: int
    ) -> tuple[list[Task], list[Task]]:
        chosen: list[Task] = []
        for task in tasks[:count]:
            if not left.fits(task.terms.slots, task.terms.resources):
                break
            left.take(task.terms.slots, task.terms.resources)
            chosen.append(task)
        return chosen, []

    with patched(selection.Selection, "_first_fit", first_match):
        yield


@mutation
def stale_entry_in_the_index() -> Iterator[None]:
    """Keep the entry of a task that was found by its demand and leased from the middle."""
    sound = DemandQueue._replace_entry

    def replace_entry(self: DemandQueue, task: Task) -> bool:
        entries = list(self.items)
        found = sound(self, task)
        self.items[:] = entries
        return found

    with patched(DemandQueue, "_replace_entry", replace_entry):
        yield


@mutation
def index_of_moved_entries() -> Iterator[None]:
    """Choose tasks by the positions that they had before their queue was compacted."""
    sound = DemandQueue._compact

    def compact(self: DemandQueue) -> None:
        index = self.buckets, self.items_end
        sound(self)
        self.buckets, self.items_end = index

    with patched(DemandQueue, "_compact", compact):
        yield


@mutation_for_invariants
def reservation_not_released() -> Iterator[None]:
    """Keep a worker reserved for a task that another has taken."""
    with patched(holds, "review_reservations", _no_op):
        yield


@mutation
def lane_rate_ignored() -> Iterator[None]:
    """Ignore the rate of a lane."""
    with _with_rules(lane_rate_interval_ns=0):
        yield


@mutation
def deleted_lane_forgets_its_rate() -> Iterator[None]:
    """Start the rate of a lane anew when the lane was empty."""
    sound = Service.drop_if_empty

    def drop_if_empty(self: Service, lane: Lane) -> None:
        sound(self, lane)
        if lane.name not in self.lanes:
            lane.lane_group.lane_rates.pop(lane.name, None)

    with patched(Service, "drop_if_empty", drop_if_empty):
        yield


@mutation_for_invariants
def lane_rate_opens_unnoticed() -> Iterator[None]:
    """Miss the time at which the rate of a lane allows the next task."""
    with patched(timers, "reopen_lane_rates", _no_op):
        yield


@mutation_for_invariants
def rate_opens_unnoticed() -> Iterator[None]:
    """Miss the time at which a rate allows the next task."""
    with patched(timers, "reopen_rates", _no_op):
        yield


@mutation
def isolation_ignored() -> Iterator[None]:
    """Let any number of suspects share a worker."""
    with patched(selection, "isolation_room", lambda _isolation, slots: slots):
        yield
