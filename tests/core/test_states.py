"""The two state machines: every state and every cause, legal and illegal."""

from pathlib import Path

import pytest

from taskyard.core.apply import apply
from taskyard.core.entities import Task, Worker
from taskyard.core.ledger import Ledger
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import Submitted
from taskyard.core.states import (
    TASK_STATES_ENDED,
    TASK_STATES_INITIAL,
    TASK_STATES_RUNNABLE,
    TASK_TARGETS,
    TASK_TRANSITIONS,
    WORKER_TRANSITIONS,
    Cause,
    TaskState,
    WorkerCause,
    WorkerState,
)
from taskyard.errors import IllegalTransition
from tests.core.kit import Yard
from tests.kit.cases import each_case

TASK_PAIRS = [(state, cause) for state in TaskState for cause in Cause]
TASK_LEGAL = [(state, cause) for state, cause in TASK_PAIRS if cause in TASK_TRANSITIONS[state]]
TASK_ILLEGAL = [pair for pair in TASK_PAIRS if pair not in TASK_LEGAL]

WORKER_PAIRS = [(state, turn) for state in WorkerState for turn in WorkerCause]
WORKER_LEGAL = [(state, turn) for state, turn in WORKER_PAIRS if turn in WORKER_TRANSITIONS[state]]
WORKER_ILLEGAL = [pair for pair in WORKER_PAIRS if pair not in WORKER_LEGAL]


def ledger_with_task_in(state: TaskState) -> tuple[Ledger, Task]:
    """Return a ledger with one task, put into a state by hand, with matching counts."""
    ledger = Ledger()
    apply(ledger, Submitted(0, Submission([b"a"], terms=[Terms(campaign=b"c")])))
    task = ledger.tasks[b"a"]
    task.state = state
    for counts in counts_of(ledger):
        counts[TaskState.READY] -= 1
        counts[state] += 1
    return ledger, task


def counts_of(ledger: Ledger) -> list[list[int]]:
    return [ledger.counts, ledger.campaigns[b"c"].counts, ledger.services[b"default"].counts]


@each_case(("state", "cause"), TASK_LEGAL)
def test_task_moves_by_the_table_and_is_counted(state: TaskState, cause: Cause) -> None:
    ledger, task = ledger_with_task_in(state)
    ledger.move([task], cause)
    target = TASK_TRANSITIONS[state][cause]
    assert task.state is target
    expected = [int(one is target) for one in TaskState]
    assert counts_of(ledger) == [expected, expected, expected]


@each_case(("state", "cause"), TASK_ILLEGAL)
def test_task_is_not_moved_where_the_table_forbids(state: TaskState, cause: Cause) -> None:
    ledger, task = ledger_with_task_in(state)
    with pytest.raises(IllegalTransition) as raised:
        ledger.move([task], cause)
    assert f"task b'a': no transition from {state.name} by {cause.name}" in str(raised.value)
    assert task.state is state
    expected = [int(one is state) for one in TaskState]
    assert counts_of(ledger) == [expected, expected, expected]


def test_illegal_transition_describes_the_task() -> None:
    yard = Yard()
    yard.rules(retry_delays_ns=(0,))
    yard.submit(b"a")
    yard.lose(b"v", b"a")
    yard.join(b"w")
    yard.take(b"w")
    with pytest.raises(IllegalTransition) as raised:
        yard.scheduler.ledger.move([yard[b"a"]], Cause.RELEASED)
    assert str(raised.value) == (
        "task b'a': no transition from LEASED by RELEASED "
        "(attempt 2, 0 failures, 1 lost worker, waits for 0 tasks, held by b'w')"
    )


def test_release_of_an_unleased_task_is_illegal() -> None:
    ledger, task = ledger_with_task_in(TaskState.READY)
    with pytest.raises(IllegalTransition, match="task b'a': no transition from READY"):
        ledger.release([task])


def test_tasks_of_many_kinds_move_together_and_each_is_counted_where_it_belongs() -> None:
    ledger = Ledger()
    terms = [Terms(campaign=b"c", service=b"x"), Terms(campaign=b"d", service=b"y")]
    names = [b"0", b"1", b"2", b"3", b"4"]
    apply(ledger, Submitted(0, Submission(names, terms=terms, terms_at=[0, 0, 1, 0, 1])))
    ledger.move([ledger.tasks[name] for name in names], Cause.CANCELLED)
    ended = [ledger.campaigns[name].counts[TaskState.CANCELLED] for name in (b"c", b"d")]
    assert ended == [3, 2]
    assert [ledger.services[name].counts[TaskState.READY] for name in (b"x", b"y")] == [0, 0]
    assert ledger.counts[TaskState.CANCELLED] == 5


def test_nothing_moves_when_nothing_is_named() -> None:
    ledger, _ = ledger_with_task_in(TaskState.DONE)
    ledger.move([], Cause.LEASED)
    assert ledger.counts[TaskState.DONE] == 1


def test_table_by_cause_equals_the_table_by_state() -> None:
    for state, cause in TASK_PAIRS:
        assert TASK_TARGETS[cause][state] is TASK_TRANSITIONS[state].get(cause)


def test_every_state_of_a_task_can_be_reached_from_the_initial_ones() -> None:
    reached = list(TASK_STATES_INITIAL)
    for state in reached:  # grows while it is walked
        reached += [one for one in TASK_TRANSITIONS[state].values() if one not in reached]
    assert sorted(reached) == sorted(TaskState)


def test_no_transition_leaves_an_ended_state() -> None:
    assert [TASK_TRANSITIONS[state] for state in TASK_STATES_ENDED] == [{}, {}]


def test_every_runnable_task_can_still_be_done_without_help() -> None:
    helpers = (Cause.CAME_DUE, Cause.LEASED, Cause.COMPLETED)
    for state in TASK_STATES_RUNNABLE:
        while state is not TaskState.DONE:
            steps = [TASK_TRANSITIONS[state][c] for c in helpers if c in TASK_TRANSITIONS[state]]
            assert steps, state
            state = steps[-1]  # noqa: PLW2901 - the walk goes on from there


def test_every_worker_can_be_cut_off_and_drained_at_any_time() -> None:
    for turns in WORKER_TRANSITIONS.values():
        assert WorkerCause.UNREACHABLE in turns
        assert WorkerCause.DRAINED in turns


@each_case(("state", "turn"), WORKER_LEGAL)
def test_worker_turns_by_the_table(state: WorkerState, turn: WorkerCause) -> None:
    worker = Worker(b"w", WorkerFacts(), state=state)
    worker.turn(turn)
    assert worker.state is WORKER_TRANSITIONS[state][turn]


@each_case(("state", "turn"), WORKER_ILLEGAL)
def test_worker_is_not_turned_where_the_table_forbids(
    state: WorkerState, turn: WorkerCause
) -> None:
    worker = Worker(b"w", WorkerFacts(), state=state)
    with pytest.raises(IllegalTransition) as raised:
        worker.turn(turn)
    assert str(raised.value) == f"worker b'w': no transition from {state.name} by {turn.name}"
    assert worker.state is state


def test_diagram_in_the_documentation_is_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    block = text.split("<!-- transitions -->\n```\n")[1].split("```")[0]
    table = [
        f"{state.name:<10} ─ {cause.name} ─▶ {target.name}"
        for state, moves in TASK_TRANSITIONS.items()
        for cause, target in moves.items()
    ]
    assert block.splitlines() == table
