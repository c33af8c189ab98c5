"""Dependencies: links, releases, tasks behind failures, and cycles."""

from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import graph
from taskyard.core.entities import Task
from taskyard.core.events import DuplicatePolicy, Outcome, UnknownPolicy
from taskyard.core.model import Terms
from taskyard.core.states import TaskState
from tests.core.kit import Yard, a_lane

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState
LANE = a_lane(b"")


def task(name: bytes, state: TaskState = BLOCKED) -> Task:
    return Task(name, b"", Terms(), LANE, state)


def names(tasks: list[Task]) -> list[bytes]:
    return [one.name for one in tasks]


def test_dependents_are_none_one_or_many() -> None:
    before, first, second, third = task(b"0"), task(b"1"), task(b"2"), task(b"3")
    assert before.dependents_list() == []
    for count, one in enumerate([first, second, third], start=1):
        graph.link(before, one)
        assert before.dependents_list() == [first, second, third][:count]


def test_last_predecessor_releases_the_task() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", b"join", after=[[], [], [b"a", b"b"]])
    yard.take(b"w", 2)
    yard.finish(b"w", b"a")
    assert yard.state(b"join") is BLOCKED
    yard.finish(b"w", b"b")
    assert yard.state(b"join") is READY


def test_predecessors_done_in_one_report_release_once() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", b"join", after=[[], [], [b"a", b"b"]])
    yard.take(b"w", 2)
    yard.finish(b"w", b"a", b"b")
    assert yard.take(b"w", 5) == [b"join"]


def test_task_that_is_not_blocked_is_not_released() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a")
    yard.submit(b"b", after=[[b"a"]], expires_hard_ns=1)
    yard.take(b"w")
    yard.later(1)
    yard.finish(b"w", b"a")
    assert yard.state(b"b") is FAILED


def test_tasks_released_by_a_completion_go_before_those_that_wait_longer() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", b"c", b"d", after=[[], [], [b"a"], [b"a"]])
    yard.take(b"w")
    yard.finish(b"w", b"a")
    assert yard.take(b"w", 5) == [b"c", b"d", b"b"]


def test_dependents_of_dependents_are_found_once_each() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", b"d", after=[[], [b"a"], [b"a"], [b"b", b"c"]])
    assert names(graph.with_dependents([yard[b"a"]])) == [b"a", b"b", b"c", b"d"]
    assert names(graph.with_dependents([yard[b"b"], yard[b"a"]])) == [b"b", b"a", b"d", b"c"]


def test_cancelled_dependents_are_not_found() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    yard.cancel(b"b")
    assert names(graph.with_dependents([yard[b"a"]])) == [b"a"]


def test_predecessors_are_found_by_one_pass() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", after=[[], [], [b"a", b"b"]])
    tasks = yard.scheduler.ledger.tasks
    assert names(graph.predecessors(tasks, yard[b"c"], 2)) == [b"a", b"b"]
    assert names(graph.predecessors(tasks, yard[b"c"], 1)) == [b"a"]
    assert names(graph.predecessors(tasks, yard[b"a"], 0)) == []


def stuck(yard: Yard) -> list[bytes]:
    return sorted(yard.scheduler.ledger.stuck())


def failed_and_behind() -> Yard:
    """F has failed; c and, behind it, d wait for it; g waits for an awaited name; h for r."""
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"f", b"c", b"d", after=[[], [b"f"], [b"c"]])
    yard.take(b"w")
    yard.report(b"w", b"f", Outcome.FAILED_FINAL)
    yard.submit(b"g", after=[[b"x"]], unknown=UnknownPolicy.WAIT)
    yard.submit(b"r", b"h", after=[[], [b"r"]])
    return yard


def test_tasks_behind_a_failure_are_stuck() -> None:
    assert stuck(failed_and_behind()) == [b"c", b"d"]


def test_task_is_not_stuck_while_something_that_it_waits_for_may_still_come() -> None:
    yard = failed_and_behind()
    yard.submit(b"e", after=[[b"f", b"r"]])
    yard.submit(b"i", after=[[b"f", b"x"]], unknown=UnknownPolicy.WAIT)
    assert stuck(yard) == [b"c", b"d"]
    yard.take(b"w")
    yard.finish(b"w", b"r")
    assert stuck(yard) == [b"c", b"d", b"e"]


def test_cancelled_generation_does_not_hide_that_the_next_one_is_stuck() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"f", b"b", after=[[], [b"f"]])
    yard.cancel(b"b")
    yard.submit(b"b", after=[[b"f"]], repeat=DuplicatePolicy.EXTEND)
    yard.take(b"w")
    yard.report(b"w", b"f", Outcome.FAILED_FINAL)
    assert stuck(yard) == [b"b"]


def test_task_that_waits_for_a_failure_twice_is_stuck() -> None:
    yard = failed_and_behind()
    yard.submit(b"c", after=[[b"f"]], repeat=DuplicatePolicy.EXTEND)
    assert stuck(yard) == [b"c", b"d"]


def test_retry_frees_what_was_stuck() -> None:
    yard = failed_and_behind()
    yard.retry(b"f")
    assert stuck(yard) == []


def cycle(after: dict[bytes, list[bytes]]) -> list[bytes]:
    return graph.cycle({}, {}, after)


def test_cycle_is_named_in_its_order() -> None:
    assert cycle({b"a": [b"b"], b"b": [b"c"], b"c": [b"a"]}) == [b"a", b"c", b"b"]


def test_cycle_is_found_behind_a_way_that_leads_to_it() -> None:
    assert sorted(cycle({b"a": [b"x"], b"b": [b"a", b"c"], b"c": [b"b"]})) == [b"b", b"c"]


def test_long_chain_needs_no_recursion() -> None:
    chain = {b"%d" % number: [b"%d" % (number + 1)] for number in range(20_000)}
    assert cycle(chain) == []
    chain[b"20000"] = [b"0"]
    assert len(cycle(chain)) == 20_001


def is_cyclic(after: dict[bytes, list[bytes]]) -> bool:
    """Find a cycle by removing names without predecessors until none is left or none is free."""
    left = {name: list(befores) for name, befores in after.items()}
    while free := [name for name in left if not [one for one in left[name] if one in left]]:
        for name in free:
            del left[name]
    return bool(left)


LETTERS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])


@given(st.dictionaries(LETTERS, st.lists(LETTERS, max_size=3)))
def test_cycle_is_found_if_and_only_if_there_is_one(after: dict[bytes, list[bytes]]) -> None:
    found = cycle(after)
    assert bool(found) is is_cyclic(after)
    for before, name in zip(found, [*found[1:], *found[:1]], strict=True):
        assert before in after[name]


@given(st.dictionaries(LETTERS, st.lists(LETTERS, max_size=2)), st.permutations(range(6)))
def test_order_in_which_edges_come_does_not_matter(
    after: dict[bytes, list[bytes]], order: list[int]
) -> None:
    """Submitted one by one, those are refused that close a cycle, and no others."""
    yard = Yard()
    taken: dict[bytes, list[bytes]] = {}
    wanted = sorted(after)
    for place in order:
        if place < len(wanted):
            name = wanted[place]
            closes = is_cyclic({**taken, name: after[name]})
            yard.submit(name, after=[after[name]], unknown=UnknownPolicy.WAIT)
            assert (name in yard.scheduler.ledger.tasks) is not closes
            if not closes:
                taken[name] = after[name]
