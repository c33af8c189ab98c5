"""Queues, lanes, rotation and heaps: order and stale entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import lane_queues
from taskyard.core.entities import Task
from taskyard.core.events import PauseRequested, ResumeRequested
from taskyard.core.model import Terms
from taskyard.core.queues import CURSOR_MAX, DueHeap, Queue
from taskyard.core.states import TaskState
from tests.core.kit import Yard, a_lane

LANE = a_lane()


def task(number: int, priority: int = 0) -> Task:
    return Task(b"%d" % number, b"", Terms(priority=priority), LANE)


def tasks(count: int) -> list[Task]:
    return [task(number) for number in range(count)]


def numbers(some: list[Task]) -> list[int]:
    return [int(one.name) for one in some]


# A queue.


def test_queue_is_first_in_first_out() -> None:
    queue = Queue(0, items=tasks(4))
    assert numbers(queue.peek(2)) == [0, 1]
    queue.take(queue.peek(2))
    assert numbers(queue.peek(9)) == [2, 3]


def test_front_goes_first_and_its_newest_before_all() -> None:
    queue = Queue(0, items=tasks(2))
    queue.front += [task(7), task(8)]
    assert numbers(queue.peek(9)) == [8, 7, 0, 1]
    assert numbers(queue.peek(1)) == [8]
    assert numbers(queue.peek(3)) == [8, 7, 0]
    assert numbers(queue.in_order()) == [8, 7, 0, 1]


def test_tasks_are_taken_wherever_they_are() -> None:
    queue = Queue(0, items=(items := tasks(5)), front=(front := [task(7), task(8), task(9)]))
    queue.take([front[1], items[3], front[2], items[0]])
    assert numbers(queue.in_order()) == [7, 1, 2, 4]


def test_task_that_is_back_in_front_is_removed_though_a_void_entry_of_it_is_first() -> None:
    queue = Queue(0, items=(items := tasks(9)))
    back = items[4]
    queue.discard(back)  # drawn from the middle, its entry stays and is void
    queue.take(items[:4])
    queue.front += [back, task(10)]
    queue.discard(back)
    assert numbers(queue.in_order()) == [10, 5, 6, 7, 8]
    queue.discard(items[5])
    assert numbers(queue.in_order()) == [10, 6, 7, 8]


Steps = list[tuple[str, int]]


def follow(steps: Steps) -> None:
    """Do the same to a queue and to a plain list, and compare them after each step."""
    known = tasks(12)
    queue, inside = Queue(0, items=list(known)), list(known)
    for step, number in steps:
        outside = [one for one in known if one not in inside]
        if step == "draw" and inside:
            for one in queue.sample(1 + number % 3, number):
                queue.discard(one)
                inside.remove(one)
        elif step == "peek" and inside:
            some = queue.peek(1 + number % 3)
            queue.take(some)
            inside = [one for one in inside if one not in some]
        elif step == "move" and inside:
            queue.discard(inside.pop(number % len(inside)))
        elif step in ("back", "front") and outside:
            one = outside[number % len(outside)]
            (queue.front if step == "front" else queue.items).append(one)
            inside.append(one)
        assert sorted(numbers(queue.in_order())) == sorted(numbers(inside))
        assert queue.stale_count == len(queue.front) + len(queue.items) - queue.cursor - len(inside)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["draw", "peek", "back", "front", "move"]),
            st.integers(0, 99),
        )
    )
)
def test_queue_holds_what_was_put_into_it_and_not_taken_out(steps: Steps) -> None:
    follow(steps)


def test_planted_void_entry_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that was there: the first entry of a task was taken for its live one."""
    sound = Queue.discard

    def discard(queue: Queue[Task], task: Task) -> None:
        if queue.cursor < len(queue.items) and queue.items[queue.cursor] is task:
            queue.cursor += 1
        else:
            sound(queue, task)

    monkeypatch.setattr(Queue, "discard", discard)
    with pytest.raises(AssertionError):
        test_task_that_is_back_in_front_is_removed_though_a_void_entry_of_it_is_first()


def test_queue_gives_back_the_room_of_what_has_passed() -> None:
    items = tasks(5 * CURSOR_MAX)
    queue = Queue(0, items=list(items))
    for place, one in enumerate(items, start=1):
        queue.take([one])
        left = len(items) - place
        assert numbers(queue.in_order()) == list(range(place, len(items)))
        assert len(queue.items) - left <= max(left, CURSOR_MAX) + 2
    for one in items:
        queue.items.append(one)
        queue.discard(one)
        assert len(queue.items) <= CURSOR_MAX + 3


def test_cancelled_entries_are_passed_over() -> None:
    items, front = tasks(4), [task(7), task(8)]
    queue = Queue(0, items=list(items), front=list(front))
    for one in (items[0], items[2], front[0]):
        one.state = TaskState.CANCELLED
        queue.stale_count += 1
    assert numbers(queue.in_order()) == [8, 1, 3]
    assert numbers(queue.peek(2)) == [8, 1]
    queue.take([front[1], items[1]])
    assert numbers(queue.peek(9)) == [3]
    assert queue.stale_count == 0


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "front", "next", "any", "cancel"]), st.integers(0, 99)),
    max_size=60,
)


@given(OPERATIONS)
def test_queue_behaves_as_two_plain_lists(operations: list[tuple[str, int]]) -> None:
    queue, front, back, number = Queue[Task](0), list[Task](), list[Task](), 0
    for operation, random_bits in operations:
        line = front + back
        if operation == "add":
            number += 1
            back.append(task(number))
            queue.items.append(back[-1])
        elif operation == "front":
            number += 1
            front.insert(0, task(number))
            queue.front.append(front[0])
        elif line:
            some = (
                line[: random_bits % len(line) + 1]
                if operation == "next"
                else [line[random_bits % len(line)]]
            )
            if operation == "cancel":
                some[0].state = TaskState.CANCELLED
                queue.mark_stale(1)
            else:
                assert operation == "any" or numbers(queue.peek(len(some))) == numbers(some)
                queue.take(some)
            front = [one for one in front if one not in some]
            back = [one for one in back if one not in some]
        assert numbers(queue.in_order()) == numbers(front + back)
    assert numbers(queue.peek(999)) == numbers(front + back)


# A lane.


def test_lane_orders_by_priority_and_then_as_its_queues_do() -> None:
    lane = a_lane()
    given = [task(1), task(2, priority=5), task(3, priority=-1), task(4, priority=5)]
    for one in given:
        lane_queues.add(lane, one, front=False)
    lane_queues.add(lane, task(9), front=True)
    assert [queue.priority for queue in lane.queues] == [5, 0, -1]
    assert numbers(lane.peek(9)) == [2, 4, 9, 1, 3]
    assert numbers(lane.peek(3)) == [2, 4, 9]
    assert lane.ready == 5
    lane_queues.remove(lane, given[3])
    assert numbers(lane.in_order()) == [2, 9, 1, 3]


def test_task_that_lost_a_worker_is_set_apart() -> None:
    lane = a_lane()
    lost, worse = task(1), task(2, priority=9)
    lost.attempt = worse.attempt = 1
    lane_queues.add(lane, task(0), front=False)
    assert lane.suspects == []
    for one in (lost, worse):
        lane_queues.add(lane, one, front=False)
    assert lane.suspects == [lost, worse]
    assert numbers(lane.peek(9)) == [0]
    assert numbers(lane.in_order()) == [1, 2, 0]
    lane_queues.remove(lane, worse)
    assert lane.suspects == [lost]
    lane_queues.discard_lazily(lane, lost)
    assert (lane.suspects, lane.ready) == ([], 1)


def lanes(yard: Yard) -> list[bytes]:
    return list(yard.scheduler.ledger.services[b"default"].lanes)


def test_lane_without_tasks_is_deleted_and_the_open_lane_stays() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", lanes=[b"x", b""])
    assert lanes(yard) == [b"x", b""]
    yard.take(b"w", 2)
    yard.finish(b"w", b"a", b"b")
    assert lanes(yard) == [b""]
    yard.submit(b"c", lanes=[b"x"])
    assert yard.take(b"w") == [b"c"]


def test_lane_with_failed_or_paused_work_is_kept() -> None:
    yard = Yard()
    yard.handle(PauseRequested(0, b"c", b"default", b"x"))
    assert lanes(yard) == [b"x"]
    yard.submit(b"a", lanes=[b"x"])
    yard.cancel(b"a")
    assert lanes(yard) == [b"x"]
    yard.handle(ResumeRequested(0, b"c", b"default", b"x"))
    assert lanes(yard) == []


def test_deleted_lane_that_was_in_rotation_gives_nothing() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", b"c", lanes=[b"x", b"x", b"y"])
    yard.cancel(b"a", b"b")
    assert yard.take(b"w", 9) == [b"c"]
    rotation = yard.scheduler.ledger.services[b"default"].in_rotation()
    assert b"x" not in [lane.name for lane in rotation]


def test_cancelled_tasks_in_a_queue_are_never_leased() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(*[b"%d" % number for number in range(10)])
    yard.cancel(b"0", b"1", b"5", b"9")
    assert yard.take(b"w", 3) == [b"2", b"3", b"4"]
    assert yard.take(b"w", 9) == [b"6", b"7", b"8"]


# The due heap.


def test_due_heap_pops_by_time_then_arrival() -> None:
    heap, some = DueHeap[Task](), tasks(4)
    for one, due_ns in zip(some, [30, 10, 20, 10], strict=True):
        one.state = TaskState.DELAYED
        one.change_extras(due_ns=due_ns)
        heap.push_due(due_ns, [one])
    assert heap.due[0][0] == 10
    assert numbers(heap.pop_due(9, 99)) == []
    assert numbers(heap.pop_due(20, 99)) == [1, 3, 2]
    assert heap.due[0][0] == 30


def test_due_heap_pops_no_more_than_requested() -> None:
    heap, some = DueHeap[Task](), tasks(3)
    for one in some:
        one.state = TaskState.DELAYED
        heap.push_due(0, [one])
        heap.push_expiry(0, [one.name])
    assert numbers(heap.pop_due(0, 2)) == [0, 1]
    assert numbers(heap.pop_due(0, 2)) == [2]
    assert heap.pop_expired(0, 2) == [b"0", b"1"]
    assert heap.pop_expired(0, 2) == [b"2"]
    assert (heap.due, heap.expiry) == ([], [])


def test_due_heap_skips_stale_entries() -> None:
    heap, some = DueHeap[Task](), tasks(3)
    for one in some:
        one.state = TaskState.DELAYED
        one.change_extras(due_ns=10)
        heap.push_due(10, [one])
    heap.push_due(10, [some[0]])  # put off twice to the same time
    some[1].change_extras(due_ns=20)  # put off to another time
    some[2].state = TaskState.CANCELLED
    assert numbers(heap.pop_due(10, 99)) == [0]
