"""Scopes by a part of the name, campaigns as predecessors, pauses in the stats, and cursors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core import queries, submission
from taskyard.core.effects import Accepted, CommandAck, Effect, RecordPage, Refused, StatsReply
from taskyard.core.events import (
    CancelRequested,
    FollowOptions,
    Outcome,
    PauseRequested,
    ReplyDue,
    ResumeRequested,
    RetryRequested,
    Scope,
    StatsRequested,
    SubmitRequested,
)
from taskyard.core.model import Refusal, Submission, Terms
from taskyard.core.records import Submitted
from taskyard.core.states import TaskState
from tests.core.kit import Yard

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


@pytest.mark.parametrize("asked", [CancelRequested, RetryRequested])
def test_act_is_on_names_that_contain_the_match(
    asked: Callable[[int, bytes, Scope], CancelRequested | RetryRequested],
) -> None:
    yard = Yard()
    yard.submit(b"fetch-a", b"fetch-b", b"join", campaign=b"c", due_ns=10**18)
    yard.submit(b"fetch-c", due_ns=10**18)
    act = asked(0, b"client", Scope(campaign=b"c", match=b"etch"))
    assert yard.handle(act) == [CommandAck(b"client", 0, 2)]
    assert yard.states(b"c/join", b"fetch-c") == [DELAYED, DELAYED]


def submit_after(yard: Yard, *campaigns: bytes, names: tuple[bytes, ...] = (b"z",)) -> list[Effect]:
    submission = Submission(list(names), terms=[Terms(campaign=b"late")])
    return yard.handle(SubmitRequested(0, b"client", submission, after_campaigns=campaigns))


def test_task_waits_for_all_of_a_campaign_that_has_not_ended() -> None:
    yard = Yard()
    yard.submit(b"done", b"failed", b"ready", b"cancelled", campaign=b"c")
    yard.submit(b"other", campaign=b"d")
    yard.join(b"w")
    yard.take(b"w", 2)
    yard.finish(b"w", b"c/done")
    yard.report(b"w", b"c/failed", Outcome.FAILED_FINAL)
    yard.cancel(b"c/cancelled")
    assert submit_after(yard, b"c") == [Accepted(b"client", 0, 1)]
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.submission.after == [[b"c/failed", b"c/ready"]]
    assert yard.state(b"late/z") is BLOCKED
    yard.retry(b"c/failed")
    assert sorted(yard.take(b"w", 9)) == [b"c/failed", b"c/ready", b"d/other"]
    yard.finish(b"w", b"c/failed", b"c/ready")
    assert yard.state(b"late/z") is READY


def test_ended_campaign_blocks_no_task_and_an_unknown_one_is_refused() -> None:
    yard = Yard()
    yard.submit(b"a", campaign=b"c")
    yard.cancel(b"c/a")
    submit_after(yard, b"c")
    assert yard.state(b"late/z") is READY
    assert submit_after(yard, b"c", b"nobody", names=(b"y",)) == [
        Refused(
            *(b"client", 0, Refusal.UNKNOWN),
            "unknown campaign nobody (submit its tasks first)",
        )
    ]
    assert yard.records == []


def test_task_does_not_wait_for_itself_among_its_campaign() -> None:
    yard = Yard()
    yard.submit(b"a", campaign=b"late")
    submit_after(yard, b"late", names=(b"y", b"z"))
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.submission.after == [[b"late/a"], [b"late/a"]]
    assert submit_after(yard, b"late", names=(b"y", b"z")) == [Accepted(b"client", 0, 0, 2)]
    submit_after(yard, b"late", names=(b"y", b"x"))
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.submission.after == [[b"late/a", b"late/z"]]


def test_too_many_predecessors_are_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "AFTER_MAX", 5)
    yard = Yard()
    yard.submit(b"a", b"b", b"c", campaign=b"c")
    submit_after(yard, b"c")
    (refused,) = submit_after(yard, b"c", names=(b"x", b"y"))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.TOO_MANY
    assert refused.text == (
        "campaign c: 3 unfinished tasks before 2 new ones exceed 5 dependencies (let one task wait "
        "for the campaign, and the others for that task)"
    )
    assert yard.records == []


# Stats and cursors.


def test_stats_list_paused_services_and_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", lanes=[b"", b"l", b"m"])
    yard.submit(b"d", service=b"other")
    yard.handle(PauseRequested(0, b"client", b"default", b"l"))
    yard.handle(PauseRequested(0, b"client", b"other"))

    def pauses() -> list[tuple[bytes, bytes | None]]:
        (counted,) = yard.handle(StatsRequested(0, b"client"))
        assert isinstance(counted, StatsReply)
        return counted.stats.pauses

    assert pauses() == [(b"default", b"l"), (b"other", None)]
    monkeypatch.setattr(queries, "PAUSES_LANES_MAX", 1)
    assert pauses() == [(b"other", None)]
    yard.handle(ResumeRequested(0, b"client", b"other"))
    assert pauses() == []


def test_record_page_starts_at_the_cursor() -> None:
    yard = Yard()
    yard.submit(b"a")
    record, scope = yard.scheduler.ledger.record, Scope(campaign=b"c")
    now = ReplyDue(0, b"client", 3, FollowOptions(None, 7, scope, b"journal"))
    assert yard.handle(now) == [RecordPage(b"client", 3, record, 7, scope, b"journal")]
    then = ReplyDue(0, b"client", 4, FollowOptions(0))
    assert yard.handle(then) == [RecordPage(b"client", 4, 0, 1000, Scope(), b"")]
    assert yard.records == []
