"""What a journal tells of lanes: runs, what is put off, what was let go, who gathers tasks.

A part of the story, and as slow and simple: it counts the tasks of a lane one by one whenever it
wants to know how many there are. It shares no code with the scheduler's agenda.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.core.events import LaneOptions, Rule
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from taskyard.sim.story import Tale

READY, LEASED = TaskState.READY, TaskState.LEASED

#: The place of a task that waits for the next run of its lane.
WAITS: Final = -1

_Key = tuple[bytes, bytes]


class LaneTale(Struct):
    """One lane, as told so far."""

    #: Tasks that may be tried though it is held; what is out counts.
    released: int = 0
    #: Tasks that were put off, and how many have their turn before them at most.
    later: dict[bytes, Tale] = field(default_factory=dict)
    run_left: int = 0
    #: When it has gathered tasks for long enough, by the wall clock; 0: it does not gather.
    begins_ns: int = 0


class LaneStory:
    """All lanes, and the clauses that they are run by."""

    def __init__(self, tasks: dict[bytes, Tale]) -> None:
        self._tasks = tasks
        self.clauses: tuple[Rule, ...] = ()
        self.defaults = LaneOptions()
        self.lanes: dict[_Key, LaneTale] = {}
        #: The rules were told in this turn: what came before them in it is not known.
        self.fresh = True
        self._places = 0

    def set_rules(self, clauses: tuple[Rule, ...], defaults: LaneOptions) -> None:
        """Other settings, or another process of the broker, which remembers no gathering."""
        self.clauses, self.defaults, self.fresh = clauses, defaults, True
        for lane in self.lanes.values():
            lane.begins_ns = 0

    def clause(self, key: _Key) -> Rule:
        """The first that fits."""
        path = b"/".join(key).decode("latin-1")
        for clause in self.clauses:
            if fnmatchcase(path, clause.match.decode("latin-1")):
                return clause
        return Rule(b"", b"*", self.defaults)

    def rules(self, tale: Tale) -> LaneOptions:
        return self.clause(tale.lane_key).rules

    def of(self, key: _Key) -> LaneTale:
        return self.lanes.setdefault(key, LaneTale())

    def count(self, key: _Key, state: TaskState) -> int:
        return sum(one.state is state and one.lane_key == key for one in self._tasks.values())

    def next_place(self) -> int:
        self._places += 1
        return self._places

    def came(self, tale: Tale, at_ns: int, *, front: bool, deferred: bool) -> None:
        """A task is about to be ready: where it stands in its lane."""
        key = tale.lane_key
        lane, others = self.of(key), self.count(key, READY)
        if not others and not self.count(key, LEASED):
            debounce_ns = 0 if self.fresh else self.rules(tale).debounce_ns
            lane.begins_ns = at_ns + debounce_ns if debounce_ns else 0
        tried = tale.attempt > 0 and not tale.losses
        if deferred and tale.lane and tried and others > len(lane.later):
            lane.run_left = lane.run_left if lane.later else others
            lane.later[tale.name] = tale
            tale.place = WAITS
        else:
            tale.place = 0 if front else self.next_place()

    def count_removed(self, tales: list[Tale]) -> None:
        """Tasks were ready and are no more: runs may be over."""
        for key in dict.fromkeys(tale.lane_key for tale in tales):
            lane = self.of(key)
            some = [tale for tale in tales if tale.lane_key == key]
            for tale in some:
                lane.later.pop(tale.name, None)
            lane.run_left -= len(some)
            if lane.later and (lane.run_left <= 0 or self.count(key, READY) <= len(lane.later)):
                waiting, lane.later = lane.later, {}
                for tale in waiting.values():
                    tale.place = self.next_place()

    def tried(self, tale: Tale) -> None:
        """A task of a lane is out no more."""
        lane = self.of(tale.lane_key)
        lane.released = max(0, lane.released - 1)

    def let_go(self, tales: list[Tale]) -> None:
        """Ready tasks of held lanes may go."""
        for key in dict.fromkeys(tale.lane_key for tale in tales):
            some = [tale for tale in tales if tale.lane_key == key]
            lane = self.of(key)
            if len(some) < self.count(key, READY):
                for tale in some:
                    tale.state = LEASED  # not among those that are left
                self.count_removed(some)
                for tale in some:
                    tale.state, tale.place = READY, 0
            lane.released += len(some)
            self.cap_released([key])

    def cap_released(self, keys: list[_Key]) -> None:
        """No more may go than there is."""
        for key in keys:
            lane = self.of(key)
            there = self.count(key, READY) + self.count(key, LEASED)
            lane.released = min(lane.released, there)

    def pictured(self) -> dict[_Key, tuple[int, list[bytes]]]:
        """What a broker must know of lanes after a restart."""
        return {
            key: (lane.released, [*lane.later])
            for key, lane in sorted(self.lanes.items())
            if lane.released or lane.later
        }


def goes_before(one: Tale, other: Tale, *, is_random: bool) -> bool:
    """Higher priority first, then what came back, then by arrival unless the lane is random."""
    if one.terms.priority != other.terms.priority:
        return one.terms.priority > other.terms.priority
    if one.place and other.place:
        return one.place < other.place and not is_random
    return not one.place and bool(other.place)
