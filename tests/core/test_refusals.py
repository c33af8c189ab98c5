"""Refused submissions name every task at fault, and `check_only` changes nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import shape, submission
from taskyard.core.effects import Accepted, Effect, Refused
from taskyard.core.events import (
    DiskSpaceChanged,
    DuplicatePolicy,
    SubmitRequested,
    UnknownPolicy,
)
from taskyard.core.model import Refusal, RefusedTask, Submission, Terms
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard, with_tasks_in_most_states


def yard_with_a_task_in_every_state() -> Yard:
    """Return a yard with a task in every state, named after it, and one named like a campaign's."""
    yard = with_tasks_in_most_states()
    yard.submit(b"c/outside")
    return yard


def send(yard: Yard, one: Submission, **fields: Any) -> list[Effect]:
    return yard.handle(SubmitRequested(0, b"client", one, 7, **fields))


def at_fault(effects: list[Effect]) -> list[tuple[int, Refusal]]:
    """Return the tasks at fault of the only reply, by index."""
    (refused,) = effects
    assert isinstance(refused, Refused)
    return [(task.index, task.refusal) for task in refused.tasks]


# The tasks at fault.


def test_refusal_lists_every_task_at_fault_with_its_code_and_sentence() -> None:
    yard = yard_with_a_task_in_every_state()
    batch = Submission(
        [b"a", b"ready", b"orphan", b"a", b"late", b"x", b"y", b"behind", b"done"],
        payloads=[b"1", b"other", b"1", b"1", b"1", b"1", b"1", b"1", b"done"],
        after=[[], [], [b"nobody"], [], [b"cancelled"], [b"y"], [b"x"], [b"late"], []],
    )
    twice = "duplicate name in one submission"
    conflict = "task ready is known with another payload (choose another name)"
    unknown = "unknown predecessor nobody (submit it first, or in the same batch)"
    cancelled = "predecessor cancelled: cancelled (submit it again, or leave it out)"
    behind = "task behind waits for late, which was refused"
    assert send(yard, batch) == [
        Refused(
            *(b"client", 7, Refusal.DUPLICATE, twice),
            [
                RefusedTask(3, b"a", Refusal.DUPLICATE, twice),
                RefusedTask(1, b"ready", Refusal.CONFLICT, conflict),
                RefusedTask(2, b"orphan", Refusal.UNKNOWN, unknown),
                RefusedTask(4, b"late", Refusal.CANCELLED, cancelled),
                RefusedTask(5, b"x", Refusal.CYCLE, "task x would wait for itself"),
                RefusedTask(6, b"y", Refusal.CYCLE, "task y would wait for itself"),
                RefusedTask(7, b"behind", Refusal.CANCELLED, behind),
            ],
        )
    ]
    assert send(yard, batch.part([0, 8])) == [Accepted(b"client", 7, new=1, existing=1)]


def test_names_sizes_and_terms_are_refused_by_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "PAYLOAD_BYTES_MAX", 3)
    monkeypatch.setattr(shape, "AFTER_MAX", 1)
    terms = [Terms(), Terms(priority=1001), Terms(slots=0), Terms(retry_delays_ns=(1,) * 1001)]
    long = b"x" * 1025
    batch = Submission(
        [b"a", b"", long, b"large", b"lane", b"after", b"high", b"none", b"often", b"b"],
        payloads=[b"1", b"1", b"1", b"1234", b"1", b"1", b"1", b"1", b"1", b"123"],
        terms=terms,
        terms_at=[0, 0, 0, 0, 0, 0, 1, 2, 3, 0],
        lanes=[b"", b"", b"", b"", long, b"", b"", b"", b"", b""],
        after=[[], [], [], [], [], [b"x", b"y"], [], [], [], []],
    )
    yard = Yard()
    effects = send(yard, batch)
    assert at_fault(effects) == [
        (1, Refusal.BAD_NAME),
        (2, Refusal.BAD_NAME),
        (3, Refusal.TOO_MANY),
        (4, Refusal.BAD_NAME),
        (5, Refusal.TOO_MANY),
        (6, Refusal.MALFORMED),
        (7, Refusal.MALFORMED),
        (8, Refusal.TOO_MANY),
    ]
    (refused,) = effects
    assert isinstance(refused, Refused)
    assert refused.tasks[1].name == b"x" * 1024
    assert refused.tasks[5].text == "a priority must be from -1000 to 1000, not 1001"
    assert send(yard, batch.part([0, 9])) == [Refused(b"client", 7, *MORE_TERMS)]


MORE_TERMS = (Refusal.MALFORMED, "submission: more terms than tasks")


def test_shared_payload_that_is_too_large_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "PAYLOAD_BYTES_MAX", 3)
    effects = send(Yard(), Submission([b"a", b"b"], [b"1234"]))
    assert at_fault(effects) == [(0, Refusal.TOO_MANY), (1, Refusal.TOO_MANY)]


def test_names_of_tasks_at_fault_are_full_names() -> None:
    yard = yard_with_a_task_in_every_state()
    terms = [Terms(campaign=b"c"), Terms(campaign=b"c/d"), Terms(campaign=b"e" * 10)]
    batch = Submission(
        [b"outside", b"new", b"x", b"y" * 1020, b"waits"],
        terms=terms,
        terms_at=[0, 0, 1, 2, 0],
        after=[[], [], [], [], [b"outside"]],
    )
    (refused,) = send(yard, batch)
    assert isinstance(refused, Refused)
    assert [(task.name, task.refusal) for task in refused.tasks] == [
        (b"c/d/x", Refusal.BAD_NAME),
        ((b"e" * 10 + b"/" + b"y" * 1020)[:1024], Refusal.BAD_NAME),
        (b"c/outside", Refusal.CONFLICT),
        (b"c/waits", Refusal.CONFLICT),
    ]


def test_predecessor_that_is_another_task_is_the_fault_of_its_dependent() -> None:
    yard = yard_with_a_task_in_every_state()
    terms = [Terms(campaign=b"c")]
    batch = Submission([b"a", b"b", b"d"], terms=terms, after=[[], [b"outside"], [b"b"]])
    conflict = (
        "predecessor c/outside: the name is that of a task outside any campaign (give one of them "
        "another name)"
    )
    behind = "task c/d waits for c/b, which was refused"
    assert send(yard, batch) == [
        Refused(
            *(b"client", 7, Refusal.CONFLICT, conflict),
            [
                RefusedTask(1, b"c/b", Refusal.CONFLICT, conflict),
                RefusedTask(2, b"c/d", Refusal.CONFLICT, behind),
            ],
        )
    ]


def test_dependents_of_a_refused_task_wait_where_unknown_tasks_are_awaited() -> None:
    batch = Submission([b"ready", b"b", b"c"], [b"other"], after=[[], [b"ready"], [b"no"]])
    yard = yard_with_a_task_in_every_state()
    expected = [(0, Refusal.CONFLICT), (2, Refusal.UNKNOWN)]  # b waits for the known one
    assert at_fault(send(yard, batch)) == expected
    awaited = send(yard, batch, unknown=UnknownPolicy.WAIT)
    assert at_fault(awaited) == [(0, Refusal.CONFLICT)]


def test_task_at_fault_does_not_make_its_name_valid_for_others() -> None:
    batch = Submission([b"a", b"", b"b"], after=[[], [], [b""]])
    effects = send(Yard(), batch, unknown=UnknownPolicy.WAIT)
    assert at_fault(effects) == [(1, Refusal.BAD_NAME), (2, Refusal.BAD_NAME)]


def test_whole_chain_behind_a_refused_task_is_refused_at_once() -> None:
    names = [b"%d" % number for number in range(1000)]
    after = [[b"nobody"], *([name] for name in names[:-1])]
    effects = send(Yard(), Submission(names, after=after))
    assert at_fault(effects) == [(index, Refusal.UNKNOWN) for index in range(1000)]


def test_number_of_named_tasks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "REFUSED_TASKS_MAX", 3)
    effects = send(Yard(), Submission([b"a", *[b""] * 9]))
    assert at_fault(effects) == [(index, Refusal.BAD_NAME) for index in (1, 2, 3)]


def test_busy_task_is_named() -> None:
    yard = yard_with_a_task_in_every_state()
    batch = Submission([b"new", b"leased"], after=[[], [b"ready"]])
    extend = {"unknown": UnknownPolicy.DONE, "repeat": DuplicatePolicy.EXTEND}
    assert at_fault(send(yard, batch, **extend)) == [(1, Refusal.BUSY)]


@pytest.mark.parametrize(
    "batch",
    [
        Submission([]),
        Submission([b"a", b""], payloads=[]),
        Submission([b"a", b""], lanes=[b""]),
        Submission([b"a", b""], terms_at=[0, 1]),
        Submission([b"a", b""], terms=[]),
    ],
)
def test_refusal_of_the_columns_names_no_task(batch: Submission) -> None:
    assert at_fault(send(Yard(), batch)) == []


def test_refusal_for_lack_of_room_names_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "TASKS_MAX", 1)
    assert at_fault(send(Yard(), Submission([b"a", b"b"]))) == []


# Any batch.

NAMES = [b"done", b"failed", b"leased", b"cancelled", b"ready", b"blocked", b"c/outside"]
NEW = [b"outside", b"n1", b"n2", b"n3", b"", b"c/n1"]
_names = st.sampled_from(NAMES + NEW)


@st.composite
def batches(draw: st.DrawFn) -> SubmitRequested:
    names = draw(st.lists(_names, min_size=1, max_size=6))
    size = len(names)
    payloads = [draw(st.sampled_from([name, name, b"other"])) for name in names]
    terms = [Terms(), Terms(campaign=b"c"), Terms(campaign=b"c/d"), Terms(slots=0)]
    terms += [Terms()] * max(0, len(names) - len(terms))
    afters = st.lists(_names, max_size=2)
    used = st.sampled_from([0, 0, 0, 1, 1, 2, 3])
    batch = Submission(
        names,
        payloads,
        terms[: len(names)],
        [place % len(names) for place in draw(st.lists(used, min_size=size, max_size=size))],
        after=draw(st.none() | st.lists(afters, min_size=size, max_size=size)),
    )
    return SubmitRequested(
        *(0, b"client", batch, 7, draw(st.sampled_from(UnknownPolicy))),
        repeat=draw(st.sampled_from(DuplicatePolicy)),
        after_campaigns=draw(st.sampled_from([(), (), (b"c",), (b"none",)])),
        partial=draw(st.booleans()),
    )


def replies(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, Accepted | Refused)]


@pytest.mark.no_cover
@given(batches())
def test_check_only_foretells_the_reply_and_changes_nothing(event: SubmitRequested) -> None:
    yard = yard_with_a_task_in_every_state()
    before = ledger_fingerprint(yard.scheduler.ledger)
    refused_before = yard.scheduler.context.refused
    event.partial, event.check_only = False, True
    foretold = yard.handle(event)
    assert yard.records == []
    assert ledger_fingerprint(yard.scheduler.ledger) == before
    assert yard.scheduler.context.refused == refused_before
    event.check_only = False
    assert replies(yard.handle(event)) == foretold


@pytest.mark.no_cover
@given(batches())
def test_batch_without_the_tasks_at_fault_has_no_others(event: SubmitRequested) -> None:
    yard = yard_with_a_task_in_every_state()
    event.partial = False
    (reply,) = replies(yard.handle(event))
    if isinstance(reply, Accepted):
        return
    assert isinstance(reply, Refused)
    by_index = {task.index: task for task in reply.tasks}
    assert len(by_index) == len(reply.tasks)
    left = [index for index in range(len(event.submission.names)) if index not in by_index]
    if not by_index or not left:
        return
    rest = event.submission.part(left)
    used = [rest.terms_of(index) for index in range(len(left))]
    event.submission = Submission(rest.names, rest.payloads, used, [*range(len(left))])
    event.submission.after = rest.after
    (second,) = replies(yard.handle(event))
    assert isinstance(second, Accepted) or (isinstance(second, Refused) and not second.tasks)


def test_check_only_is_refused_like_a_submission() -> None:
    yard = Yard()
    yard.handle(DiskSpaceChanged(0, accepting=False))
    checked = send(yard, Submission([b"a"]), check_only=True)
    assert checked == send(yard, Submission([b"a"]))
    assert isinstance(checked[0], Refused)


def test_check_only_does_not_watch() -> None:
    yard = Yard()
    yard.join(b"w")
    assert send(yard, Submission([b"a"]), check_only=True, watch=True) == [
        Accepted(b"client", 7, new=1)
    ]
    yard.submit(b"a")
    yard.take(b"w")
    assert [type(effect).__name__ for effect in yard.finish(b"w", b"a")] == ["ReportAck"]
    assert yard.state(b"a") is TaskState.DONE
