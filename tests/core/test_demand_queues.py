"""The index by demand: the same choice as a pass over all tasks, at a cost that does not grow."""

from random import Random
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.invariants import InvariantViolated, check_demand_queue
from taskyard.core import assignment, demand_queues, queues, selection
from taskyard.core.demand_queues import Demand, DemandQueue, index_queues
from taskyard.core.entities import Lane, Task
from taskyard.core.events import SubmitRequested
from taskyard.core.limits import DEMANDS_MAX, LEASE_TASKS_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.queues import CURSOR_MAX, Queue
from taskyard.core.resources import Resources, Room
from taskyard.core.selection import Selection
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned
from tests.core.strategies import (
    GPU,
    HALF_GPU,
    MEMORY,
    TWO_GPUS,
    Step,
    held_by,
    steps,
    take_step,
)
from tests.kit.snapshots import encoded

READY, LEASED, CANCELLED = TaskState.READY, TaskState.LEASED, TaskState.CANCELLED

#: Demands of tasks, and rooms of workers.
DEMANDS: list[Demand] = [(1, ()), (2, ()), (1, (GPU,)), (1, (TWO_GPUS,)), (1, (HALF_GPU, MEMORY))]
ROOMS: list[dict[bytes, int]] = [{}, {b"gpus": 10_000}, {b"gpus": 20_000, b"memory": 1 << 30}]

Searched: TypeAlias = "tuple[list[Task], list[Task], list[Demand]]"


def scan(self: Selection, lane: Lane, room: int) -> Searched:
    """Search without the index, as before there was one: pass over the lane in order."""
    looked = room + int(vars(selection)["WIDE_LOOKAHEAD"])  # patched below
    while True:
        seen = self._next(lane, looked)
        chosen, wider = self._first_fit(seen, self._room_left(), room)
        if len(chosen) == room or len(seen) < looked:
            return chosen, wider, [(task.terms.slots, task.terms.resources) for task in seen]
        looked *= 4


# The whole scheduler.

ROUND: list[Resources] = [(), (), (GPU,), (TWO_GPUS,), (HALF_GPU, MEMORY)]


@st.composite
def batches(draw: st.DrawFn) -> Step:
    """Draw a submission of more tasks with different terms than are looked at first."""
    count = draw(st.integers(3, 12))
    first = draw(st.integers(0, 99))
    terms = [
        Terms(
            priority=draw(st.sampled_from([0, 0, 0, 1])),
            slots=draw(st.sampled_from([1, 1, 1, 2])),
            resources=draw(st.sampled_from(ROUND)),
            crashes_max=2,
        )
        for _ in range(3)
    ]
    given = {
        "names": [b"%d" % (first + number) for number in range(count)],
        "terms": terms,
        "terms_at": draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
        "lanes": draw(st.none() | st.lists(st.sampled_from([b"", b"1"]), min_size=count)),
    }
    return "batch", given


def take(yard: Yard, step: Step) -> list[Any]:
    kind, given = step
    if kind != "batch":
        return take_step(yard, step)
    names, lanes = given["names"], given["lanes"]
    lanes = None if lanes is None else lanes[: len(names)]
    submission = Submission(names, names, given["terms"], given["terms_at"], lanes)
    return yard.handle(SubmitRequested(0, b"client", submission))


def state_of(yard: Yard) -> list[Any]:
    """Return the state that a choice may change and the fingerprint does not have."""
    ledger = yard.scheduler.ledger
    lanes = [lane for service in ledger.services.values() for lane in service.lanes.values()]
    bounds = [(lane.name, lane.slots_min, lane.resources_min) for lane in lanes]
    return [bounds, [(one.worker.name, one.task.name) for one in ledger.reservations]]


def stories() -> st.SearchStrategy[list[Step]]:
    ask = st.tuples(
        st.just("ask"),
        st.fixed_dictionaries(
            {
                "worker": st.sampled_from([b"u", b"v", b"w"]),
                "count": st.integers(1, 3),
                "parks": st.booleans(),
            }
        ),
    )
    asks = st.lists(ask, min_size=1, max_size=4)
    part = st.tuples(st.lists(batches(), min_size=1, max_size=2), asks, steps(5), asks)
    return st.lists(part, min_size=1, max_size=3).map(
        lambda parts: [step for part in parts for steps in part for step in steps]
    )


@given(stories(), st.sampled_from([0, 0, 1, 3]), st.sampled_from([1, 2, 256]))
def test_choice_is_the_same_as_by_a_pass_over_the_lane(
    story: list[Step], lookahead: int, demands_max: int
) -> None:
    """With priorities, rules with limits, weights, rates and random order, cancels and retries.

    The other yard also tries every parked worker, as before. Records and snapshots are the same.
    """
    yard, other = Yard(), Yard()
    joined = [(b"u", 1, ()), (b"v", 2, (GPU,)), (b"w", 3, (TWO_GPUS, MEMORY))]
    for worker, slots, resources in joined:
        for one in (yard, other):
            one.join(worker, slots_total=slots, resources=resources)
    with (
        patch.object(selection, "WIDE_LOOKAHEAD", lookahead),
        patch.object(demand_queues, "DEMANDS_MAX", demands_max),
    ):
        for step in story:
            effects = take(yard, step)
            with (
                patch.object(Selection, "_search", scan),
                patch.object(assignment, "_idle_kind", return_value=None),
            ):
                assert take(other, step) == effects
            assert other.records == yard.records
            if demands_max > len(DEMANDS) * 2:
                assert state_of(other) == state_of(yard)
    assert encoded(other.scheduler.ledger) == encoded(yard.scheduler.ledger)


# Parked workers.


def serve_parked(yard: Yard, seed: int) -> list[Any]:
    """Return all effects of workers of three kinds that park, and tasks of all demands."""
    rng, number = Random(seed), 0
    if seed % 2:
        yard.rules(lane_rate_interval_ns=SECOND_NS, lane_workers_max=2)
    effects: list[Any] = []
    for place in range(9):
        resources = [(), (GPU,), (TWO_GPUS, MEMORY)][place % 3]
        facts: dict[str, Any] = {"wants_wake": seed % 3 == 0, "always_ready": seed % 3 == 1}
        facts |= {"services": (b"default",) if place % 4 else (b"x", b"default")}
        yard.join(b"%d" % place, slots_total=1 + place % 2, resources=resources, **facts)
    for _ in range(60):
        worker, demand = b"%d" % rng.randrange(9), rng.choice(DEMANDS)
        kind, held = rng.choice(["submit", "park", "park", "finish", "time"]), held_by(yard, worker)
        if kind == "submit":
            names = [b"t%d" % (number := number + 1) for _ in range(rng.randrange(1, 4))]
            lanes = [rng.choice([b"", b"1"])] * len(names)
            terms: dict[str, Any] = {"slots": demand[0], "resources": demand[1]}
            terms |= {"service": rng.choice([b"default", b"default", b"x"])}
            effects += yard.submit(*names, lanes=lanes, **terms)
        elif kind == "park":
            effects += yard.ask(worker, rng.randrange(1, 3), parks=rng.random() < 0.9)
        elif kind == "finish" and held:
            effects += yard.finish(worker, held[0][0])
        elif kind == "time":
            effects += yard.later(rng.choice([0.001, 1]))
    return effects


@pytest.mark.parametrize("seed", range(16))
def test_parked_workers_alike_are_served_as_if_each_was_tried(seed: int) -> None:
    effects = serve_parked(Yard(), seed)
    with patch.object(assignment, "_idle_kind", return_value=None):
        assert serve_parked(Yard(), seed) == effects


def test_one_of_many_idle_workers_alike_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    yard, tried = Yard(), list[bytes]()
    for place in range(30):
        yard.join(b"%02d" % place, slots_total=1, resources=[(), (GPU,), (MEMORY,)][place % 3])
        yard.ask(b"%02d" % place, parks=True)
    sound = Selection.select

    def select(self: Selection) -> list[Task]:
        tried.append(self.worker.name)
        return sound(self)

    monkeypatch.setattr(Selection, "select", select)
    yard.submit(b"a", b"b", resources=(TWO_GPUS,))
    assert tried == [b"00", b"01", b"02"]
    assert assigned(yard.submit(b"c", resources=(MEMORY,))) == [b"c"]


def test_larger_idle_worker_is_tried_after_a_smaller_one() -> None:
    yard = Yard()
    for worker, slots in ((b"1 small", 1), (b"2 large", 2)):
        yard.join(worker, slots_total=slots)
        yard.ask(worker, parks=True)
    assert assigned(yard.submit(b"wide", slots=2)) == [b"wide"]
    assert [task.name for task in yard.scheduler.ledger.workers[b"2 large"].held()] == [b"wide"]


# One queue.

KINDS = ["add", "add", "front", "fit", "fit", "any", "cancel", "peek", "back", "next"]


def new_task(demand: Demand, number: int = 0) -> Task:
    terms = Terms(slots=demand[0], resources=demand[1])
    return Task(b"%d" % number, b"", terms, None)  # type: ignore[arg-type]


def first_fit(tasks: list[Task], left: Room, count: int) -> list[Task]:
    chosen: list[Task] = []
    for task in tasks:
        if len(chosen) < count and left.fits(task.terms.slots, task.terms.resources):
            left.take(task.terms.slots, task.terms.resources)
            chosen.append(task)
    return chosen


def room_of(number: int) -> Room:
    return Room(number % 4, 3, dict(ROOMS[number % len(ROOMS)]))


class Pair:
    """A queue with an index, and a plain list that has the same done to it."""

    def __init__(self) -> None:
        self.queue = DemandQueue(0)
        self.line: list[Task] = []
        self.out: list[Task] = []

    def add(self, task: Task, *, front: bool) -> None:
        self.line.insert(0 if front else len(self.line), task)
        (self.queue.front if front else self.queue.items).append(task)

    def step(self, kind: str, number: int) -> None:
        queue, line = self.queue, self.line
        if kind in ("add", "front"):
            self.add(new_task(DEMANDS[number % 5], number), front=kind == "front")
        elif kind == "back" and self.out:
            task = self.out.pop(number % len(self.out))
            task.state = READY
            self.add(task, front=bool(number % 2))
        elif kind == "fit":
            chosen = queue.fitting(room_of(number), 2)
            assert chosen == first_fit(line, room_of(number), 2)
            self.take(chosen)
        elif kind == "peek":
            assert queue.peek(number % 4) == line[: number % 4]
        elif kind == "next":
            self.take(queue.peek(1 + number % 3))
        elif line and kind == "any":
            task = line[number % len(line) if number % 2 else -1 - number % min(3, len(line))]
            queue.discard(task)
            self.out += _leave(line, [task], LEASED)
        elif line and kind == "cancel":
            _leave(line, [line[number % len(line)]], CANCELLED)
            queue.mark_stale(1)

    def take(self, tasks: list[Task]) -> None:
        if tasks:
            self.queue.take(tasks)
            self.out += _leave(self.line, tasks, LEASED)

    def check(self) -> None:
        assert self.queue.in_order() == self.line
        check_demand_queue(self.queue, "queue")


def _leave(line: list[Task], tasks: list[Task], state: TaskState) -> list[Task]:
    for task in list(tasks):
        task.state = state
        line.remove(task)
    return tasks


@pytest.mark.parametrize("demands_max", [1, 3, 256])
@pytest.mark.parametrize("seed", range(8))
def test_queue_finds_the_tasks_that_a_pass_over_it_finds(seed: int, demands_max: int) -> None:
    """With consumed entries freed early and much that moves entries."""
    rng, pair = Random(seed), Pair()
    growth = rng.choice([["add"], ["add", "front"], ["add", "any", "back"], ["front", "any"], []])
    with (
        patch.object(demand_queues, "DEMANDS_MAX", demands_max),
        patch.object(queues, "CURSOR_MAX", 2),
        patch.object(demand_queues, "CURSOR_MAX", 2),
        patch.object(queues, "STALE_SHARE_MAX", rng.choice([1, 2, 4])),
    ):
        for _ in range(300):
            pair.step(rng.choice([*KINDS, *growth * 2]), rng.randrange(100))
            pair.check()


def mixed(*demands: Demand) -> DemandQueue:
    return DemandQueue(0, [new_task(demand, number) for number, demand in enumerate(demands)])


def test_request_does_not_read_the_tasks_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = mixed(*[DEMANDS[2]] * 1000, *[DEMANDS[0]] * 9)
    assert queue.fitting(Room(1, 1, {}), 1) == [queue.items[1000]]
    read: list[int] = []
    sound = DemandQueue._is_valid  # noqa: SLF001 - counts its calls

    def is_valid(self: DemandQueue, index: int) -> bool:
        read.append(index)
        return sound(self, index)

    monkeypatch.setattr(DemandQueue, "_is_valid", is_valid)
    for number in range(1000, 1005):
        queue.take(queue.fitting(Room(1, 1, {}), 1))
        assert max(read) - number <= 1
    assert len(read) <= 5 * 4


def test_positions_of_taken_tasks_are_freed() -> None:
    queue = mixed()
    for number in range(20 * CURSOR_MAX):
        queue.items += [new_task(DEMANDS[2], number), new_task(DEMANDS[0], number)]
        assert [queue.fitting(Room(1, 1, {}), 1)] == [queue.items[-1:]]
        queue.take(queue.items[queue.cursor : queue.cursor + 2])
    bucket = queue.buckets[DEMANDS[2]]
    assert len(bucket.items) <= 3 * CURSOR_MAX


def test_many_demands_are_rounded_down_to_few() -> None:
    """Ten thousand amounts of memory, as of tasks that estimate it from their input."""
    queue = mixed(*[(1, ((b"memory", (1 << 30) + (number << 20)),)) for number in range(10_000)])
    small = new_task((1, ((b"memory", 1 << 20),)))
    queue.items.append(small)
    assert queue.fitting(Room(1, 1, {b"memory": 1 << 29}), 1) == [small]
    assert len(queue.buckets) < DEMANDS_MAX
    assert queue.fitting(Room(1, 1, {b"memory": 1 << 31}), 1) == [queue.items[0]]
    check_demand_queue(queue, "queue")


def test_lane_whose_next_tasks_fit_keeps_its_plain_queue() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, resources=(GPU,))
    yard.submit(*[b"%d" % number for number in range(200)], resources=(GPU,))
    yard.submit(b"a")
    assert yard.take(b"w") == [b"0"]
    assert type(yard[b"a"].lane.main_queue) is Queue
    yard.join(b"plain", slots_total=1)
    assert yard.take(b"plain") == [b"a"]
    assert type(yard[b"a"].lane.main_queue) is DemandQueue


def test_priorities_go_first_in_the_index_too() -> None:
    yard = Yard()
    yard.join(b"plain", slots_total=2)
    yard.submit(*[b"%d" % number for number in range(200)], resources=(GPU,))
    yard.submit(b"a")
    yard.submit(*[b"1 %d" % number for number in range(200)], resources=(GPU,), priority=1)
    yard.submit(b"b", b"c", priority=1)
    assert assigned(yard.ask(b"plain", 2)) == [b"b", b"c"]
    yard.finish(b"plain", b"b", b"c")
    assert assigned(yard.ask(b"plain", LEASE_TASKS_MAX)) == [b"a"]
    lane = yard[b"1"].lane
    assert [type(queue) for queue in lane.queues] == [DemandQueue] * 2
    assert list(index_queues(lane)) == lane.queues


def test_planted_stale_position_breaks_an_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: DemandQueue, _level: int) -> None:
        """Keep the positions of entries that moved."""
        self.base = 0

    monkeypatch.setattr(DemandQueue, "_clear_index", keep)
    queue = mixed(*[DEMANDS[2]] * 9, *[DEMANDS[0]] * 9)
    queue.fitting(Room(1, 1, {}), 1)
    for task in queue.items[:9]:
        task.state = CANCELLED
        queue.mark_stale(1)
    with pytest.raises(InvariantViolated):
        check_demand_queue(queue, "queue")
