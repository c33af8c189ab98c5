"""The audit: counts by outcome, and violations of the guarantees."""

from taskyard.core.model import Submission
from taskyard.core.records import (
    Cancelled,
    Extended,
    Failed,
    Finished,
    Leased,
    Retried,
    Returned,
    ReturnReason,
    StaleReport,
    Submitted,
    TaskExpired,
    WorkerLeft,
)
from taskyard.demo.campaign import AuditCounts, Auditor


def tally(*records: object) -> AuditCounts:
    counting = Auditor()
    counting.add(records)  # type: ignore[arg-type]
    return counting.tally()


def submitted(*names: bytes, after: list[list[bytes]] | None = None) -> Submitted:
    return Submitted(0, Submission(list(names), after=after))


def leased(*names: bytes) -> Leased:
    return Leased(0, b"w", list(names), [1] * len(names), 0)


def finished(*names: bytes) -> Finished:
    return Finished(0, b"w", list(names), [1] * len(names))


def test_every_task_comes_to_one_end() -> None:
    counts = tally(
        submitted(b"a", b"b", b"c", b"d", b"e"),
        leased(b"a", b"b"),
        finished(b"a"),
        Failed(0, b"w", [b"b"], [1], [b"why"]),
        Cancelled(0, [b"c"], []),
        TaskExpired(0, [b"d"]),
        WorkerLeft(0, b"w", b"left"),
        StaleReport(0, b"w", [b"a"], [1]),
    )
    expected = AuditCounts(
        submitted=5, done=1, failed=2, cancelled=1, unfinished=1, leases=2, stale=1
    )
    assert counts == expected
    assert counts.is_clean


def test_retried_task_is_unfinished_again() -> None:
    counts = tally(submitted(b"a"), Failed(0, b"w", [b"a"], [1], [b""]), Retried(0, [b"a"]))
    assert (counts.failed, counts.unfinished) == (0, 1)


def test_second_completion_is_noticed_but_not_of_a_new_generation() -> None:
    twice = tally(submitted(b"a"), finished(b"a"), finished(b"a"))
    assert (twice.completed_twice, twice.is_clean) == (1, False)
    anew = tally(submitted(b"a"), finished(b"a"), submitted(b"a"), finished(b"a"))
    assert (anew.submitted, anew.done, anew.completed_twice) == (2, 2, 0)


def test_lease_before_its_predecessor_is_done_is_noticed() -> None:
    chain = submitted(b"a", b"b", after=[[], [b"a"]])
    assert tally(chain, leased(b"b")).dependencies_broken == 1
    assert tally(chain, leased(b"a"), finished(b"a"), leased(b"b")).is_clean


def test_predecessors_that_were_given_later_count_too() -> None:
    extended = Extended(0, [b"b"], [[b"a"]])
    assert tally(submitted(b"a", b"b"), extended, leased(b"b")).dependencies_broken == 1
    returned = Returned(0, b"w", [b"b"], [1], ReturnReason.TRANSFERRED, [[b"a"]])
    early = tally(submitted(b"a", b"b"), leased(b"b"), returned, leased(b"b"))
    assert early.dependencies_broken == 1


def test_resubmitted_dependency_still_counts_as_done() -> None:
    chain = submitted(b"a", b"b", after=[[], [b"a"]])
    counts = tally(chain, leased(b"a"), finished(b"a"), submitted(b"a"), leased(b"b"))
    assert counts.is_clean


def test_unsubmitted_task_is_counted_as_unknown() -> None:
    assert tally(finished(b"ghost")).unknown == 1
    assert tally(Returned(0, b"w", [b"ghost"], [1], ReturnReason.LEFT)).unknown == 0
