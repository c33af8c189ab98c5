"""Tasks that lost workers and tasks of many slots: neither is starved, and neither starves others.

A poison task kills the worker that holds it. The small world below hands work to workers that die
by it and come back, until nothing is left to do.
"""

from collections.abc import Callable

import pytest

from simulator import invariants
from taskyard.core.effects import Assign, Effect
from taskyard.core.events import (
    DrainRequested,
    Event,
    Outcome,
    PauseRequested,
    ResumeRequested,
    RulesSet,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerLost,
    WorkerRegistered,
    WorkerUnreachable,
)
from taskyard.core.limits import CRASHES_MAX, EXCLUSIVE, SECOND_NS
from taskyard.core.model import Submission, WorkerFacts, isolation_room
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned

READY, LEASED, DONE, FAILED = TaskState.READY, TaskState.LEASED, TaskState.DONE, TaskState.FAILED


class World:
    """Workers that run each task for a second, and die of a poisoned one after half a second."""

    def __init__(self, tasks: int, poison: int, workers: int, slots: int) -> None:
        self.scheduler = Scheduler()
        self.names = [b"t%d" % number for number in range(tasks)]
        step = tasks // poison if poison else 1
        self.poison = set(self.names[step // 2 :: step][:poison])
        self.slots = slots
        self.rounds = 0
        self.held: dict[bytes, list[bytes]] = {}
        self.handle(SubmitRequested(0, b"c", Submission(self.names)))
        for number in range(workers):
            self.join(b"w%d" % number)

    def handle(self, event: Event) -> list[Effect]:
        event.now_ns = self.rounds * SECOND_NS
        effects = self.scheduler.handle(event)
        self.scheduler.take_records()
        for effect in effects:
            if isinstance(effect, Assign):
                self.held[effect.worker] += effect.names
        return effects

    def join(self, worker: bytes) -> None:
        self.held[worker] = []
        facts = WorkerFacts(
            slots_total=self.slots, lease_timeout_ns=60 * SECOND_NS, always_ready=True
        )
        self.handle(WorkerRegistered(0, worker, facts))
        self.handle(TasksRequested(0, worker, self.slots, parks=True))

    def lose(self, worker: bytes) -> None:
        self.handle(WorkerLost(0, worker))
        self.join(worker)

    def run(self) -> int:
        """Run until nothing is left, and return the seconds that took."""
        while any(self.held.values()):
            self.rounds += 1
            invariants.check(self.scheduler)
            for worker in list(self.held):
                names = self.held[worker]
                if any(name in self.poison for name in names):
                    self.lose(worker)
                elif names:
                    self.held[worker] = []
                    self.handle(TasksReported(0, worker, list(names)))
            assert self.rounds < 10_000
        return self.rounds

    def names_in(self, state: TaskState) -> set[bytes]:
        tasks = self.scheduler.ledger.tasks
        return {name for name in self.names if tasks[name].state is state}


@pytest.mark.parametrize(("workers", "slots"), [(1, 64), (4, 16)])
def test_poison_among_64_fails_alone(workers: int, slots: int) -> None:
    world = World(64, 1, workers, slots)
    seconds = world.run()
    assert world.names_in(FAILED) == world.poison
    assert len(world.names_in(DONE)) == 63
    assert seconds <= 40


@pytest.mark.parametrize(("workers", "slots"), [(1, 64), (4, 16)])
def test_innocent_loss_costs_no_parallelism(workers: int, slots: int) -> None:
    world = World(64, 0, workers, slots)
    for number in range(workers):
        world.handle(WorkerLost(0, b"w%d" % number))
        world.held[b"w%d" % number] = []
    for number in range(workers):
        world.join(b"w%d" % number)
    assert len(world.names_in(LEASED)) == 64


@pytest.mark.slow
def test_20_poison_tasks_among_2000_fail_and_no_innocent_one() -> None:
    world = World(2000, 20, workers=4, slots=16)
    seconds = world.run()
    assert world.names_in(FAILED) == world.poison
    assert len(world.names_in(DONE)) == 1980
    assert seconds <= 100  # 32 without poison, 127 without isolation


@pytest.mark.parametrize(
    ("slots", "rooms"),
    [
        (1, [1, 1, 1, 1]),
        (2, [2, 2, 2, 1]),
        (8, [8, 4, 2, 1]),
        (9, [9, 5, 3, 1]),
        (64, [64, 16, 4, 1]),
        (1_000_000, [1_000_000, 10_000, 100, 1]),
    ],
)
def test_isolation_grows_by_the_cube_root_of_the_slots(slots: int, rooms: list[int]) -> None:
    assert [isolation_room(step, slots) for step in range(1, EXCLUSIVE + 1)] == rooms
    second, third = rooms[1:3]
    assert (second - 1) ** 3 < slots**2 <= second**3
    assert (third - 1) ** 3 < slots <= third**3


@pytest.mark.parametrize(
    ("crashes_max", "steps"),
    [(5, [1, 2, 3, 4]), (3, [3, 4]), (2, [4]), (7, [1, 1, 1, 2, 3, 4])],
)
def test_last_attempt_is_alone_whatever_the_budget(crashes_max: int, steps: list[int]) -> None:
    yard = Yard()
    yard.submit(b"a", crashes_max=crashes_max)
    found = []
    for _ in range(crashes_max - 1):
        yard.lose(b"v", b"a")
        found.append(yard[b"a"].isolation)
    assert found == steps
    yard.lose(b"v", b"a")
    assert yard.state(b"a") is FAILED


def test_suspects_share_a_worker_as_far_as_their_isolation_allows() -> None:
    yard = Yard()
    names = [b"%d" % number for number in range(8)]
    yard.submit(*names)
    for room in (8, 8, 4, 2, 1):
        yard.join(b"w", slots_total=8)
        assert len(yard.take(b"w", 99)) == room
        yard.leave(b"w")
        for name in names:
            yard.join(b"v" + name)
            assert len(yard.take(b"v" + name)) == 1
        for name in names:
            yard.handle(WorkerLost(0, b"v" + name))
    assert yard.states(*names) == [FAILED] * 8


def test_tasks_of_each_isolation_are_counted_by_themselves() -> None:
    yard = Yard()
    twice, thrice = [b"a", b"b", b"c", b"d", b"e"], [b"x", b"y", b"z"]
    yard.submit(*thrice)
    yard.lose(b"v", *thrice, times=3)
    yard.handle(PauseRequested(0, b"c"))
    yard.submit(*twice, service=b"other")
    yard.submit(b"new")
    yard.handle(ResumeRequested(0, b"c"))
    for _ in range(2):
        yard.join(b"u", services=(b"other",), slots_total=9)
        yard.take(b"u", 9)
        yard.handle(WorkerLost(0, b"u"))
    yard.join(b"w", services=(b"default", b"other"), slots_total=8)
    assert sorted(yard.take(b"w", 99)) == sorted([*twice[:4], *thrice[:2], b"new"])


def test_worker_without_a_slot_limit_counts_as_having_what_it_asks_for() -> None:
    yard = Yard()
    yard.submit(*[b"%d" % number for number in range(8)])
    yard.lose(b"v", *[b"%d" % number for number in range(8)], times=2)
    yard.join(b"w")
    assert len(yard.take(b"w", 8)) == 4
    assert yard.take(b"w", 8) == []


def test_suspect_that_is_held_back_is_passed_over_in_a_serial_lane() -> None:
    yard = Yard()
    yard.submit(b"bad", b"good", lanes=[b"x", b"x"])
    yard.lose(b"v", b"bad", times=CRASHES_MAX - 1)
    yard.join(b"w", slots_total=4, services=(b"other", b"default"))
    yard.submit(b"other", service=b"other")
    yard.scheduler.ledger.workers[b"w"].service_next = 0
    yard.handle(PauseRequested(0, b"c", b"default"))
    assert yard.take(b"w") == [b"other"]
    yard.handle(ResumeRequested(0, b"c", b"default"))
    assert yard.take(b"w", 4) == [b"good"]
    assert yard.state(b"bad") is READY


def test_idle_worker_takes_a_last_attempt_at_once_and_nothing_beside_it() -> None:
    yard = Yard()
    yard.submit(b"bad")
    yard.lose(b"v", b"bad", times=CRASHES_MAX - 1)
    yard.submit(b"a", b"b", priority=5)
    yard.join(b"w", slots_total=5)
    assert yard.take(b"w", 5) == [b"bad"]
    assert yard.take(b"w", 5) == []
    yard.finish(b"w", b"bad")
    assert yard.take(b"w", 5) == [b"a", b"b"]


@pytest.fixture
def drained() -> Yard:
    """Two busy workers of two slots, w emptied for the last attempt of bad; plenty else to do."""
    yard = Yard()
    yard.submit(b"bad")
    yard.lose(b"v", b"bad", times=CRASHES_MAX - 2)
    yard.submit(*[b"%d" % number for number in range(20)])
    for worker in (b"u", b"w", b"t"):
        yard.join(worker, slots_total=2, lease_timeout_ns=60 * SECOND_NS)
        yard.take(worker)
    yard.handle(WorkerLost(0, b"u"))
    assert yard.take(b"t") == [b"2"]
    (reservation,) = yard.scheduler.ledger.reservations
    assert (reservation.worker.name, reservation.task.name) == (b"w", b"bad")
    return yard


def test_drained_worker_gets_nothing_until_it_is_idle_and_then_its_task(drained: Yard) -> None:
    assert drained.take(b"w") == []
    assert drained.ask(b"w", 2, parks=True) == []
    assert assigned(drained.finish(b"w", b"0")) == [b"bad"]
    assert drained.scheduler.ledger.reservations == []


def test_other_workers_go_on_while_one_is_drained(drained: Yard) -> None:
    for _ in range(5):
        held = drained.scheduler.ledger.workers[b"t"].held()
        drained.finish(b"t", held[0].name)
        assert drained.take(b"t") != []
    assert drained.state(b"bad") is READY


def test_idle_worker_takes_a_last_attempt_that_another_is_drained_for(drained: Yard) -> None:
    drained.join(b"new", slots_total=1)
    assert drained.take(b"new") == [b"bad"]
    assert drained.scheduler.ledger.reservations == []
    assert drained.take(b"w") != []


@pytest.mark.parametrize(
    "end",
    [
        lambda yard: yard.leave(b"w"),
        lambda yard: yard.handle(WorkerUnreachable(0, b"w")),
        lambda yard: yard.handle(DrainRequested(0, b"c", b"w")),
        lambda yard: yard.cancel(b"bad"),
        lambda yard: yard.handle(PauseRequested(0, b"c", b"default")),
        lambda yard: yard.join(b"w", services=(b"other",)),
    ],
    ids=["leave", "cut", "drain", "cancel", "pause", "other services"],
)
def test_worker_is_not_drained_in_vain(drained: Yard, end: Callable[[Yard], object]) -> None:
    end(drained)
    names = [one.worker.name for one in drained.scheduler.ledger.reservations]
    assert b"w" not in names


def test_only_worker_is_never_drained() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"bad")
    yard.lose(b"v", b"bad", times=CRASHES_MAX - 2)
    yard.submit(*[b"%d" % number for number in range(9)])
    yard.join(b"u", slots_total=1)
    assert yard.take(b"u") == [b"bad"]
    yard.take(b"w")
    yard.handle(WorkerLost(0, b"u"))
    for _ in range(4):
        assert len(yard.take(b"w")) == 1
        yard.finish(b"w", yard.scheduler.ledger.workers[b"w"].held()[0].name)
    assert yard.state(b"bad") is READY
    assert yard.scheduler.ledger.reservations == []


def test_one_worker_of_a_service_is_drained_at_a_time() -> None:
    yard = Yard()
    yard.submit(b"bad", b"worse")
    yard.lose(b"v", b"bad", b"worse", times=CRASHES_MAX - 1)
    yard.handle(PauseRequested(0, b"c", b"default"))
    yard.submit(*[b"%d" % number for number in range(4)], service=b"x")
    for worker in (b"1", b"2", b"3", b"4"):
        yard.join(worker, slots_total=2, lease_timeout_ns=SECOND_NS, services=(b"x", b"default"))
        yard.take(worker)
    yard.handle(ResumeRequested(0, b"c", b"default"))
    for worker in (b"1", b"2", b"3", b"4"):
        assert yard.take(worker) == []
    assert len(yard.scheduler.ledger.reservations) == 1


# Tasks of many slots.


def test_wide_task_reserves_a_worker_and_small_ones_do_not_starve_it() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=4, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(*[b"%d" % number for number in range(20)])
    assert len(yard.take(b"w", 4)) == 4
    yard.submit(b"wide", slots=4, priority=1)
    for number in range(3):
        yard.finish(b"w", b"%d" % number)
        assert yard.take(b"w", 4) == ([b"4"] if not number else [])
    yard.finish(b"w", b"3", b"4")
    assert yard.take(b"w", 4) == [b"wide"]


def test_small_tasks_go_past_a_wide_one_to_other_workers() -> None:
    yard = Yard()
    for worker in (b"u", b"w"):
        yard.join(worker, slots_total=2, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a", b"b")
    assert (yard.take(b"u"), yard.take(b"w")) == ([b"a"], [b"b"])
    yard.submit(b"wide", slots=2)
    yard.submit(b"c", b"d")
    assert (yard.take(b"u"), yard.take(b"w")) == ([b"c"], [b"d"])
    assert yard.scheduler.ledger.reservations[0].worker.name == b"u"
    yard.submit(b"e")
    yard.finish(b"u", b"a")
    assert yard.take(b"u") == []
    yard.finish(b"w", b"b", b"d")
    assert yard.take(b"w") == [b"wide"]  # whichever has room first
    assert yard.take(b"u") == [b"e"]


def test_reserved_task_is_leased_once_to_a_worker_that_stands_by() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=4, lease_timeout_ns=60 * SECOND_NS, always_ready=True)
    assert assigned(yard.submit(b"a", b"b", b"c")) == [b"a", b"b", b"c"]
    yard.submit(b"wide", slots=2)
    yard.submit(b"small")
    assert [one.task.name for one in yard.scheduler.ledger.reservations] == [b"wide"]
    assert assigned(yard.cancel(b"a", b"b", b"c")) == [b"wide", b"small"]
    assert yard.scheduler.ledger.reservations == []


def test_wide_task_of_a_serial_lane_keeps_its_place() -> None:
    yard = Yard()
    for worker in (b"u", b"w"):
        yard.join(worker, slots_total=2, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a", b"b")
    assert (yard.take(b"u"), yard.take(b"w")) == ([b"a"], [b"b"])
    yard.submit(b"wide", slots=2, lanes=[b"x"])
    yard.submit(b"next", lanes=[b"x"])
    assert yard.take(b"u") == []
    yard.finish(b"w", b"b")
    assert yard.take(b"w") == [b"wide"]
    assert yard.take(b"u") == []  # of a serial lane one task is out
    yard.finish(b"w", b"wide")
    assert yard.take(b"u") == [b"next"]


def test_prefetch_takes_no_place_that_a_serial_lane_keeps_for_a_wide_task() -> None:
    """A worker with more free slots by prefetch than the task takes can still not hold it."""
    yard = Yard()
    yard.join(b"u", slots_total=2, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a")
    assert yard.take(b"u") == [b"a"]
    yard.submit(b"wide", slots=2, lanes=[b"x"])
    yard.submit(b"next", lanes=[b"x"])
    assert yard.ask(b"u", 2, parks=True) == []
    facts = WorkerFacts(slots_total=1, lease_timeout_ns=60 * SECOND_NS)
    yard.handle(WorkerRegistered(0, b"w", facts, prefetch=64))
    assert yard.ask(b"w", 65, parks=True) == []
    assert assigned(yard.finish(b"u", b"a")) == [b"wide"]
    assert assigned(yard.finish(b"u", b"wide")) == [b"next"]


@pytest.mark.parametrize(
    "rules",
    [LaneOptions(workers_max=1), LaneOptions(rate_interval_ns=3600 * SECOND_NS)],
    ids=["limit", "rate"],
)
def test_worker_is_not_reserved_for_a_task_that_a_limit_holds_back(rules: LaneOptions) -> None:
    yard = Yard()
    yard.handle(RulesSet(0, (Rule(b"x", b"x/*", rules),)))
    yard.join(b"a", slots_total=4, lease_timeout_ns=60 * SECOND_NS, services=(b"x", b"default"))
    yard.submit(b"long")
    assert yard.take(b"a") == [b"long"]
    yard.ask(b"a", 4, parks=True)
    yard.submit(b"wide", slots=4, service=b"x")
    assert [one.task.name for one in yard.scheduler.ledger.reservations] == [b"wide"]
    yard.join(b"b", slots_total=1, lease_timeout_ns=60 * SECOND_NS, services=(b"x",))
    yard.submit(b"small", service=b"x", priority=1)
    assert yard.take(b"b") == [b"small"]
    assert yard.scheduler.ledger.reservations == []
    assert assigned(yard.submit(b"other")) == [b"other"]


def test_worker_of_a_full_lane_is_not_reserved_while_the_rate_is_used_up() -> None:
    """The lane's limit refuses other workers only, the rate refuses all."""
    yard = Yard()
    rules = LaneOptions(lane_workers_max=1, overfeed=1, rate_interval_ns=SECOND_NS)
    yard.handle(RulesSet(0, (Rule(b"x", b"x/*", rules),)))
    yard.join(b"a", slots_total=2, lease_timeout_ns=60 * SECOND_NS, services=(b"x",))
    yard.join(b"b", slots_total=1, lease_timeout_ns=60 * SECOND_NS, services=(b"x",))
    yard.submit(b"first", service=b"x", lanes=[b"l"])
    assert yard.take(b"a") == [b"first"]
    yard.later(2)
    yard.submit(b"wide", slots=2, service=b"x", lanes=[b"l"])
    yard.ask(b"a", 2, parks=True)
    assert [one.task.name for one in yard.scheduler.ledger.reservations] == [b"wide"]
    yard.submit(b"small", service=b"x", priority=1)
    assert yard.take(b"b") == [b"small"]
    assert yard.scheduler.ledger.reservations == []


def test_task_that_no_worker_can_hold_reserves_none_and_hides_none_that_can() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=4, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a")
    yard.take(b"w")
    yard.submit(b"huge", slots=99)
    yard.submit(b"wide", slots=4)
    assert yard.take(b"w") == []
    assert [one.task.name for one in yard.scheduler.ledger.reservations] == [b"wide"]
    yard.finish(b"w", b"a")
    assert yard.take(b"w") == [b"wide"]


def test_deferred_task_goes_before_wide_ones_that_wait_for_another_worker() -> None:
    yard = Yard()
    yard.rules(lane_workers_max=3)
    yard.join(b"w", slots_total=1)
    yard.join(b"big", slots_total=3, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a", lanes=[b"x"])
    yard.submit(b"long")
    assert (yard.take(b"w"), yard.take(b"big")) == ([b"a"], [b"long"])
    yard.submit(b"wide", b"wider", lanes=[b"x", b"x"], slots=3)
    yard.report(b"w", b"a", Outcome.DEFER_BACK)
    assert yard.take(b"w") == [b"a"]
    yard.finish(b"big", b"long")
    assert yard.take(b"big") == [b"wide"]


def test_deferred_task_does_not_take_the_place_that_a_serial_lane_keeps_for_a_wide_one() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    yard.join(b"big", slots_total=2, lease_timeout_ns=60 * SECOND_NS)
    yard.submit(b"a", lanes=[b"x"])
    yard.submit(b"long")
    assert (yard.take(b"w"), yard.take(b"big")) == ([b"a"], [b"long"])
    yard.submit(b"wide", lanes=[b"x"], slots=2)
    yard.submit(b"small", lanes=[b"x"])
    yard.report(b"w", b"a", Outcome.DEFER_BACK)
    assert yard.take(b"w") == []
    yard.finish(b"big", b"long")
    assert yard.take(b"big") == [b"wide"]


def test_deferred_task_does_not_wait_for_one_that_no_worker_can_hold() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    yard.submit(b"a", lanes=[b"x"])
    yard.take(b"w")
    yard.submit(b"b", lanes=[b"x"])
    yard.submit(b"huge", slots=9, lanes=[b"x"])
    yard.report(b"w", b"a", Outcome.DEFER_BACK)  # to be tried after the tasks that are ready now
    assert yard.take(b"w") == [b"b"]
    yard.finish(b"w", b"b")
    assert yard.take(b"w") == [b"a"]
    yard.report(b"w", b"a", Outcome.DEFER_BACK)
    assert yard.take(b"w") == []  # nothing else is there for this worker: it waits for a while
    yard.later(60)
    assert yard.take(b"w") == [b"a"]


def test_prefetch_makes_no_room_for_a_wide_task() -> None:
    yard = Yard()
    facts = WorkerFacts(slots_total=1, lease_timeout_ns=10**10)
    yard.handle(WorkerRegistered(0, b"small", facts, prefetch=3))
    yard.submit(b"wide", slots=2)
    yard.take(b"small", 3)
    assert yard.states(b"wide") == [READY]
    yard.join(b"large", slots_total=2)
    yard.take(b"large", 2)
    assert yard.states(b"wide") == [LEASED]
