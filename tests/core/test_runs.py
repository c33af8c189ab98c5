"""Measurements of attempts: fitted into their leases, kept in every record, and shown."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import runs
from taskyard.core.effects import Refused, TaskDetails, TaskView
from taskyard.core.events import LookupRequested, Outcome, TasksReported, WorkerLost
from taskyard.core.limits import ATTEMPT_REASON_BYTES_MAX, ATTEMPTS_SHOWN_MAX, SECOND_NS
from taskyard.core.model import Refusal
from taskyard.core.records import Failed, Finished, Postponed, Returned, StaleReport
from taskyard.core.runs import Attempt, Run, RunColumns
from tests.core.kit import Yard

#: The wall clock when the tests begin.
BEGIN_NS = 1_000 * SECOND_NS


def holding(*names: bytes, **fields: Any) -> Yard:
    """Worker w holds these tasks, by leases of `BEGIN_NS`."""
    yard = Yard()
    yard.clock(BEGIN_NS)
    yard.submit(*names, **fields)
    yard.join(b"w")
    yard.take(b"w", len(names))
    return yard


def seconds(*numbers: float) -> list[int]:
    return [round(number * SECOND_NS) for number in numbers]


times = st.integers(1, 1 << 62)


@given(st.integers(0, 1 << 62), times, times, times)
def test_run_lies_within_its_lease_whatever_the_clocks_read(
    started_ns: int, run_ns: int, leased_ns: int, settled_ns: int
) -> None:
    given_runs = RunColumns(b"h", [started_ns], [run_ns])
    found = runs.clamped_to_lease(given_runs, [0], [leased_ns], settled_ns)
    if found is None:
        assert not started_ns
        return
    assert found.started_ns[0] >= leased_ns
    assert 0 <= found.run_ns[0] <= run_ns
    if settled_ns >= leased_ns:
        assert found.started_ns[0] + found.run_ns[0] <= settled_ns


def test_run_that_fits_is_kept_as_it_was_measured() -> None:
    measured = RunColumns(b"h", [0, 12], [0, 5], [None, -9], [0, 4], [0, 3])
    assert runs.clamped_to_lease(measured, [1], [10], 20) == RunColumns(
        b"h", [12], [5], [-9], [4], [3]
    )
    assert runs.clamped_to_lease(measured, [0], [10], 20) is None


def test_columns_leave_out_what_no_worker_measured() -> None:
    assert runs.run_columns([None, None], b"h") is None
    assert runs.run_columns([Run(7, 1), None], b"h") == RunColumns(b"h", [7, 0], [1, 0])
    whole = Run(7, 1, 0, 5, 6, b"note")
    columns = RunColumns(b"h", [7], [1], [0], [5], [6], [b"note"])
    assert runs.run_columns([whole], b"h") == columns
    assert columns.at(0) == whole


@pytest.mark.parametrize(
    ("outcome", "record"),
    [
        (Outcome.DONE, Finished),
        (Outcome.FAILED, Postponed),
        (Outcome.FAILED_FINAL, Failed),
        (Outcome.RETRY_AT, Postponed),
        (Outcome.DEFER_BACK, Postponed),
        (Outcome.REFUSED, Returned),
        (Outcome.CRASHED, Postponed),
    ],
)
def test_record_that_ends_an_attempt_has_its_measurements(outcome: Outcome, record: type) -> None:
    yard = holding(b"a", retry_delays_ns=(SECOND_NS,))
    yard.later(10)
    measured = RunColumns(b"h", [BEGIN_NS + 4 * SECOND_NS], seconds(5), [1], [2], [3])
    yard.report(b"w", b"a", outcome, runs=measured)
    (found,) = yard.records
    assert type(found) is record
    assert isinstance(found, Finished | Failed | Postponed | Returned)
    assert found.runs == measured


def test_each_task_of_a_mixed_report_keeps_its_own_run() -> None:
    yard = holding(b"a", b"b", b"c")
    yard.later(10)
    starts = [BEGIN_NS + at for at in seconds(1, 2, 3)]
    outcomes = [Outcome.DONE, Outcome.FAILED, Outcome.DONE]
    measured = RunColumns(b"h", starts, seconds(4, 5, 6), [0, 1, None], notes=[b"x", b"y", b""])
    yard.handle(TasksReported(0, b"w", [b"a", b"b", b"c"], outcomes=outcomes, runs=measured))
    finished, failed = yard.records
    assert isinstance(finished, Finished)
    assert isinstance(failed, Failed)
    both = [starts[0], starts[2]]
    assert finished.runs == RunColumns(b"h", both, seconds(4, 6), [0, None], notes=[b"x", b""])
    assert failed.runs == RunColumns(b"h", [starts[1]], seconds(5), [1], notes=[b"y"])


def test_stale_part_of_a_report_has_no_measurements() -> None:
    yard = holding(b"a")
    yard.later(1)
    measured = RunColumns(b"h", [1, BEGIN_NS], seconds(1, 1))
    yard.handle(TasksReported(0, b"w", [b"stranger", b"a"], runs=measured))
    stale, finished = yard.records
    assert isinstance(stale, StaleReport)
    assert finished == Finished(
        BEGIN_NS + SECOND_NS, b"w", [b"a"], [1], runs=RunColumns(b"h", [BEGIN_NS], seconds(1))
    )


def test_columns_of_another_length_are_refused() -> None:
    yard = holding(b"a")
    (refused,) = yard.handle(TasksReported(0, b"w", [b"a"], runs=RunColumns(b"h", [1, 2], [1, 2])))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.MALFORMED


def _view(yard: Yard, name: bytes) -> TaskView:
    (found,) = yard.handle(LookupRequested(0, b"client", [name]))
    assert isinstance(found, TaskDetails)
    return found.views[0]


def looked_up(yard: Yard, name: bytes) -> list[Attempt]:
    return _view(yard, name).attempts


def test_task_is_shown_with_its_attempts() -> None:
    yard = holding(b"a", retry_delays_ns=(SECOND_NS,))
    yard.later(10)
    measured = RunColumns(b"h", [BEGIN_NS + SECOND_NS], seconds(5), [7], [8], [9])
    yard.report(b"w", b"a", Outcome.FAILED, runs=measured)
    yard.later(2)
    yard.take(b"w")
    settled_ns = BEGIN_NS + 10 * SECOND_NS
    run = (b"h", BEGIN_NS + SECOND_NS, 5 * SECOND_NS, 7, 8, 9)
    first = Attempt(1, b"w", b"postponed", settled_ns, *run, leased_ns=BEGIN_NS)
    again_ns = BEGIN_NS + 12 * SECOND_NS
    assert looked_up(yard, b"a") == [first, Attempt(2, b"w", leased_ns=again_ns)]


def test_attempt_has_the_reason_of_its_end_and_the_host_of_its_worker() -> None:
    yard = Yard()
    yard.clock(BEGIN_NS)
    yard.join(b"w", host=b"h")
    yard.submit(b"a", retry_delays_ns=(SECOND_NS,))
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"x" * ATTEMPT_REASON_BYTES_MAX + b"!"])
    yard.later(2)
    yard.take(b"w")
    yard.handle(WorkerLost(0, b"w"))
    failed, lost = looked_up(yard, b"a")
    assert failed.reason == b"x" * (ATTEMPT_REASON_BYTES_MAX - 1) + b"!"
    lost_ns = BEGIN_NS + 2 * SECOND_NS
    assert lost == Attempt(
        *(2, b"w", b"expired", lost_ns, b"h"), leased_ns=lost_ns, reason=b"the worker was lost"
    )


def test_payload_is_shown_while_it_is_kept() -> None:
    yard = holding(b"long", b"short", payloads=[b"x" * 100, b"y"])
    long, short = (_view(yard, name) for name in (b"long", b"short"))
    assert (long.payload, short.payload) == (b"x" * 100, b"y")
    yard.finish(b"w", b"long", b"short")
    long, short = (_view(yard, name) for name in (b"long", b"short"))
    assert (long.payload, short.payload) == (None, b"y")
    assert long.finished_record == yard.scheduler.ledger.record


def test_only_the_latest_attempts_are_remembered() -> None:
    yard = holding(b"a")
    for _ in range(ATTEMPTS_SHOWN_MAX + 5):
        yard.report(b"w", b"a", Outcome.REFUSED)
        yard.take(b"w")
    numbers = [attempt.number for attempt in looked_up(yard, b"a")]
    assert numbers == [*range(6, ATTEMPTS_SHOWN_MAX + 7)]
