"""The heap of timers."""

from taskyard.core.timer_heap import NEVER_NS, TimerHeap


def test_due_timers_are_returned_once_the_earliest_first_and_of_one_time_in_order() -> None:
    timers = TimerHeap()
    assert timers.heap[0][0] == NEVER_NS
    for at_ns, kind in ((7, "late"), (5, "b"), (5, "a"), (1, "first")):
        timers.add(at_ns, kind, at_ns)
    assert timers.heap[0][0] == 1
    assert timers.pop_due(5) == [("first", 1), ("b", 5), ("a", 5)]
    assert (timers.pop_due(6), timers.heap[0][0]) == ([], 7)
    assert (timers.pop_due(7), timers.heap[0][0]) == ([("late", 7)], NEVER_NS)


def test_joined_heaps_are_one_with_the_timers_of_both() -> None:
    one, other = TimerHeap(), TimerHeap()
    for at_ns in (3, 1):
        one.add(at_ns, "one", at_ns)
        other.add(at_ns + 1, "other", at_ns + 1)
    one.join(other)
    one.join(other)
    one.add(2, "later", 2)
    assert other.pop_due(2) == [("one", 1), ("other", 2), ("later", 2)]
    assert one.pop_due(9) == [("one", 3), ("other", 4)]
    assert one.heap is other.heap
