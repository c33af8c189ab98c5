"""The lanes of the reference model: runs, deferred tasks, released tasks, debounce.

Slow and simple: it counts the tasks of a lane one at a time. Shares no code with the scheduler's
queues.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from msgspec import Struct, field

from simulator.models import LEASED, READY, TaskModel
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState

#: The position of a task that waits for the next run of its lane.
WAITS: Final = -1

_Key = tuple[bytes, bytes]


class LaneModel(Struct):
    """A lane, by the records so far."""

    #: Tasks that may run although the lane is held. Leased tasks count.
    released: int = 0
    #: Deferred tasks, and how many other tasks come before them at most.
    next_run: dict[bytes, TaskModel] = field(default_factory=dict)
    run_left: int = 0
    #: When the debounce ends, by the wall clock. 0: there is none.
    debounce_until_ns: int = 0


class LaneModels:
    """All lanes, and the rules that match them."""

    def __init__(self, tasks: dict[bytes, TaskModel]) -> None:
        self._tasks = tasks
        self.rule_list: tuple[Rule, ...] = ()
        self.defaults = LaneOptions()
        self.lanes: dict[_Key, LaneModel] = {}
        #: The rules changed in this turn, so the rules of earlier events in it are uncertain.
        self.fresh = True
        self._places = 0
        #: The rule of each lane, found once until the rules change.
        self._rule_by_lane: dict[_Key, Rule] = {}

    def set_rules(self, rule_list: tuple[Rule, ...], defaults: LaneOptions) -> None:
        """Replace the rules. A restarted broker has forgotten its debounces, too."""
        self.rule_list, self.defaults, self.fresh = rule_list, defaults, True
        self._rule_by_lane = {}
        for lane in self.lanes.values():
            lane.debounce_until_ns = 0

    def rule(self, key: _Key) -> Rule:
        """Return the first rule that matches a lane."""
        rule = self._rule_by_lane.get(key)
        if rule is None:
            rule = self._rule_by_lane[key] = self._find_rule(key)
        return rule

    def _find_rule(self, key: _Key) -> Rule:
        path = b"/".join(key).decode("latin-1")
        for rule in self.rule_list:
            if fnmatchcase(path, rule.match.decode("latin-1")):
                return rule
        return Rule(b"", b"*", self.defaults)

    def rules(self, task_model: TaskModel) -> LaneOptions:
        return self.rule(task_model.lane_key).options

    def of(self, key: _Key) -> LaneModel:
        return self.lanes.setdefault(key, LaneModel())

    def count(self, key: _Key, state: TaskState) -> int:
        found = [one for one in self._tasks.values() if one.state is state]
        return len([one for one in found if one.lane_key == key])

    def next_place(self) -> int:
        self._places += 1
        return self._places

    def add_ready(self, task_model: TaskModel, at_ns: int, *, front: bool, deferred: bool) -> None:
        """Place a task that becomes ready in its lane."""
        key = task_model.lane_key
        lane, others = self.of(key), self.count(key, READY)
        if not others and not self.count(key, LEASED):
            debounce_ns = 0 if self.fresh else self.rules(task_model).debounce_ns
            lane.debounce_until_ns = at_ns + debounce_ns if debounce_ns else 0
        attempt_ended = task_model.attempt > 0 and not task_model.losses
        if deferred and task_model.lane and attempt_ended and others > len(lane.next_run):
            lane.run_left = lane.run_left if lane.next_run else others
            lane.next_run[task_model.name] = task_model
            task_model.place = WAITS
        else:
            task_model.place = 0 if front else self.next_place()

    def count_removed(self, task_models: list[TaskModel]) -> None:
        """Note that tasks are no longer ready. This may end a run."""
        for key in dict.fromkeys(task_model.lane_key for task_model in task_models):
            lane = self.of(key)
            some = [task_model for task_model in task_models if task_model.lane_key == key]
            for task_model in some:
                lane.next_run.pop(task_model.name, None)
            lane.run_left -= len(some)
            if lane.next_run and (
                lane.run_left <= 0 or self.count(key, READY) <= len(lane.next_run)
            ):
                waiting, lane.next_run = lane.next_run, {}
                for task_model in waiting.values():
                    task_model.place = self.next_place()

    def attempt_ended(self, task_model: TaskModel) -> None:
        """Note that a task of a lane is no longer leased."""
        lane = self.of(task_model.lane_key)
        lane.released = max(0, lane.released - 1)

    def release(self, task_models: list[TaskModel]) -> None:
        """Release ready tasks of held lanes."""
        for key in dict.fromkeys(task_model.lane_key for task_model in task_models):
            some = [task_model for task_model in task_models if task_model.lane_key == key]
            lane = self.of(key)
            if len(some) < self.count(key, READY):
                for task_model in some:
                    task_model.state = LEASED  # so that `count` leaves it out
                self.count_removed(some)
                for task_model in some:
                    task_model.state, task_model.place = READY, 0
            lane.released += len(some)
            self.cap_released([key])

    def cap_released(self, keys: list[_Key]) -> None:
        """Limit the released tasks of lanes to existing tasks."""
        for key in keys:
            lane = self.of(key)
            there = self.count(key, READY) + self.count(key, LEASED)
            lane.released = min(lane.released, there)

    def snapshot(self) -> dict[_Key, tuple[int, list[bytes]]]:
        """Return the state of lanes that a broker must restore after a restart."""
        return {
            key: (lane.released, [*lane.next_run])
            for key, lane in sorted(self.lanes.items())
            if lane.released or lane.next_run
        }


def goes_before(one: TaskModel, other: TaskModel, *, is_random: bool) -> bool:
    """Return whether a task precedes another: by priority, then returned tasks, then by arrival."""
    if one.terms.priority != other.terms.priority:
        return one.terms.priority > other.terms.priority
    if one.place and other.place:
        return one.place < other.place and not is_random
    return not one.place and bool(other.place)
