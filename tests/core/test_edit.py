"""Edits of waiting tasks: priority, limits, retries and expiry."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.core.apply import apply
from taskyard.core.effects import CommandAck, Effect, Refused
from taskyard.core.events import EditRequested, Outcome, Scope
from taskyard.core.ledger import Ledger
from taskyard.core.limits import PRIORITY_MAX, RETRIES_MAX, SECOND_NS
from taskyard.core.model import Refusal, TermsChanges
from taskyard.core.records import Edited
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire.native import peer
from taskyard.wire.native.server import NativeServer
from tests.core.kit import Yard


def edit(yard: Yard, *names: bytes, **changes: Any) -> list[Effect]:
    return yard.handle(EditRequested(0, b"client", Scope(names=names), TermsChanges(**changes)))


def test_edited_priority_moves_ready_tasks_behind_others_of_that_priority() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c")
    yard.submit(b"first", priority=5)
    assert edit(yard, b"c", b"b", priority=5) == [CommandAck(b"client", 0, 2)]
    assert yard.records == [Edited(0, [b"c", b"b"], TermsChanges(priority=5))]
    edit(yard, b"first", priority=-1)
    yard.join(b"w", slots_total=0)
    assert yard.take(b"w", 9) == [b"c", b"b", b"a", b"first"]


def test_edited_priority_counts_when_a_blocked_or_delayed_task_gets_ready() -> None:
    yard = Yard()
    yard.submit(b"a", b"blocked", b"z", after=[[], [b"a"], []])
    yard.submit(b"delayed", due_ns=5 * SECOND_NS)
    assert edit(yard, b"blocked", b"delayed", priority=3) == [CommandAck(b"client", 0, 2)]
    yard.join(b"w", slots_total=0)
    assert yard.take(b"w") == [b"a"]
    yard.finish(b"w", b"a")
    yard.later(5)
    assert yard.take(b"w", 9) == [b"blocked", b"delayed", b"z"]


def test_leased_and_ended_tasks_are_not_changed() -> None:
    yard = Yard()
    yard.submit(b"leased", b"done", b"failed", b"cancelled", b"same")
    yard.join(b"w", slots_total=0)
    yard.take(b"w", 3)
    yard.finish(b"w", b"done")
    yard.report(b"w", b"failed", Outcome.FAILED_FINAL)
    yard.cancel(b"cancelled")
    names = (b"leased", b"done", b"failed", b"cancelled", b"same", b"unknown")
    assert edit(yard, *names, priority=0) == [CommandAck(b"client", 0, 0)]
    assert yard.records == []
    assert edit(yard, *names, priority=4) == [CommandAck(b"client", 0, 1)]
    assert yard.records == [Edited(0, [b"same"], TermsChanges(priority=4))]


def test_tasks_of_one_submission_keep_shared_terms() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c")
    edit(yard, b"a", b"b", time_limit_ns=SECOND_NS)
    assert yard[b"a"].terms is yard[b"b"].terms
    assert yard[b"c"].terms.time_limit_ns == 0


def test_edited_retries_count_from_the_next_failure() -> None:
    yard = Yard()
    yard.submit(b"a", retry_delays_ns=(SECOND_NS,))
    yard.join(b"w")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    edit(yard, b"a", retry_delays_ns=())
    yard.later(1)
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    assert yard[b"a"].state is TaskState.FAILED


@pytest.mark.parametrize(("expires_ns", "is_failed"), [(0, False), (3 * SECOND_NS, True)])
def test_edited_expiry_takes_the_place_of_the_former(expires_ns: int, *, is_failed: bool) -> None:
    yard = Yard()
    yard.submit(b"a", expires_hard_ns=2 * SECOND_NS)
    edit(yard, b"a", expires_hard_ns=expires_ns)
    yard.later(2.5)
    before = yard[b"a"].state
    yard.later(1)
    after = TaskState.FAILED if is_failed else TaskState.READY
    assert (before, yard[b"a"].state) == (TaskState.READY, after)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, Refusal.MALFORMED),
        ({"priority": PRIORITY_MAX + 1}, Refusal.MALFORMED),
        ({"time_limit_ns": -1}, Refusal.MALFORMED),
        ({"retry_delays_ns": (1,) * (RETRIES_MAX + 1)}, Refusal.TOO_MANY),
    ],
)
def test_invalid_changes_are_refused_and_change_nothing(
    changes: dict[str, Any], refusal: Refusal
) -> None:
    yard = Yard()
    yard.submit(b"a")
    (refused,) = edit(yard, b"a", **changes)
    assert isinstance(refused, Refused)
    assert refused.refusal is refusal
    assert yard.records == []


def test_replay_of_an_edit_gives_the_same_ledger() -> None:
    yard = Yard()
    replayed = Ledger()

    def replay() -> None:
        for record in yard.records:
            apply(replayed, record)

    yard.submit(b"a", b"b", b"c", lanes=[b"l", b"l", b""])
    replay()
    yard.submit(b"d", after=[[b"a"]])
    replay()
    edit(yard, b"b", b"c", b"d", priority=2, expires_hard_ns=9 * SECOND_NS)
    replay()
    edit(yard, b"b", priority=0)
    replay()
    assert ledger_fingerprint(replayed) == ledger_fingerprint(yard.scheduler.ledger)


def test_edit_survives_the_wire() -> None:
    changes = TermsChanges(-3, 0, (), 7)
    body = peer.edit(5, Scope(campaign=b"c"), changes)
    (event,) = NativeServer(1, lambda: 0).receive(b"peer", [b"", body], 1)
    assert isinstance(event, EditRequested)
    assert (event.scope, event.changes) == (Scope(campaign=b"c"), changes)
