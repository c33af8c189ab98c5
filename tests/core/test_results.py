"""Reports: every outcome, retry schedules, mixed reports, returned tasks, kept slots."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import shape
from taskyard.core.blobs import Blob, Content
from taskyard.core.effects import Effect, Refused, ReportAck, Settled, UnknownWorker
from taskyard.core.events import (
    Outcome,
    RulesSet,
    SlotFreed,
    TasksReported,
    TasksReturned,
    UnknownPolicy,
    WatchRequested,
)
from taskyard.core.limits import CRASH_DELAY_NS, CRASHES_MAX, REASON_BYTES_MAX, SECOND_NS
from taskyard.core.model import Refusal
from taskyard.core.records import (
    Failed,
    Finished,
    Postponed,
    Returned,
    ReturnReason,
    SlotsFreed,
    StaleReport,
)
from taskyard.core.results import DEFER_NS_MIN, retry_delay_ns
from taskyard.core.rules import LaneOptions
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard, assigned, missing
from tests.kit.snapshots import reopened

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


def holding(*names: bytes, **fields: Any) -> Yard:
    """Worker w holds these tasks."""
    yard = Yard()
    yard.submit(*names, **fields)
    yard.join(b"w")
    yard.take(b"w", len(names))
    return yard


# Outcomes.


def test_done_is_recorded_with_its_result() -> None:
    yard = holding(b"a", b"b")
    assert yard.finish(b"w", b"a", b"b", texts=[b"1", b"2"], request=9) == [ReportAck(b"w", 9, [])]
    assert yard.records == [Finished(0, b"w", [b"a", b"b"], [1, 1], [b"1", b"2"])]
    assert yard.states(b"a", b"b") == [DONE, DONE]


def test_truncated_results_are_recorded_with_their_lengths_and_counted() -> None:
    yard = holding(b"a", b"b", campaign=b"c")
    yard.handle(WatchRequested(0, b"client", [b"c/a", b"c/b"], request=3))
    texts: list[Content | None] = [b"1", Blob(b"", 9, b"2")]
    effects = yard.finish(b"w", b"c/a", b"c/b", texts=texts)
    assert yard.records == [Finished(0, b"w", [b"c/a", b"c/b"], [1, 1], texts)]  # type: ignore[arg-type]
    assert Settled(b"client", 3, [b"c/a", b"c/b"], [DONE, DONE], texts) in effects
    assert yard.scheduler.ledger.campaigns[b"c"].truncated == 1
    assert reopened(yard.scheduler.ledger).campaigns[b"c"].truncated == 1


def test_done_without_results_keeps_none() -> None:
    yard = holding(b"a")
    yard.report(b"w", b"a", Outcome.DONE)
    assert yard.records == [Finished(0, b"w", [b"a"], [1], None)]


def test_failure_without_a_schedule_is_final() -> None:
    yard = holding(b"a")
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"oh"])
    assert yard.records == [Failed(0, b"w", [b"a"], [1], [b"oh"])]
    assert yard.state(b"a") is FAILED
    assert yard.scheduler.ledger.reasons == {b"a": b"oh"}


def test_failure_for_good_does_not_try_again() -> None:
    yard = holding(b"a", retry_delays_ns=(1, 1, 1))
    yard.report(b"w", b"a", Outcome.FAILED_FINAL, texts=[b"no such file"])
    assert yard.records == [Failed(0, b"w", [b"a"], [1], [b"no such file"])]


def test_failure_follows_the_schedule_and_then_is_final() -> None:
    yard = holding(b"a", retry_delays_ns=(SECOND_NS, 5 * SECOND_NS))
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"first"])
    assert yard.records == [Postponed(0, b"w", [b"a"], [1], [SECOND_NS], [b"first"])]
    yard.later(1)
    assert yard.take(b"w") == [b"a"]
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"second"])
    assert (yard.state(b"a"), yard[b"a"].due_ns) == (DELAYED, 6 * SECOND_NS)
    yard.later(4.9)
    assert yard.state(b"a") is DELAYED
    yard.later(0.1)
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"third"])
    assert (yard.state(b"a"), yard[b"a"].failures) == (FAILED, 3)
    assert yard.scheduler.ledger.reasons == {b"a": b"third"}


def test_task_that_its_program_died_with_is_tried_as_often_as_one_that_loses_workers() -> None:
    yard = holding(b"a")
    for crash in range(1, CRASHES_MAX):
        yard.report(b"w", b"a", Outcome.CRASHED, texts=[b"died"])
        due_ns = yard.scheduler.context.at_ns + CRASH_DELAY_NS
        assert yard.records[-1] == Postponed(
            due_ns - SECOND_NS, b"w", [b"a"], [crash], [due_ns], [b"died"]
        )
        yard.later(1)
        assert yard.take(b"w") == [b"a"]
    yard.report(b"w", b"a", Outcome.CRASHED, texts=[b"died"])
    assert (yard.state(b"a"), yard[b"a"].failures) == (FAILED, CRASHES_MAX)


@pytest.mark.parametrize("retries", [0, 1, 3, CRASHES_MAX, CRASHES_MAX + 1])
def test_task_whose_agent_dies_has_the_attempts_of_its_schedule_or_the_default(
    retries: int,
) -> None:
    yard = holding(b"a", retry_delays_ns=(SECOND_NS,) * retries)
    attempts = retries + 1 if retries else CRASHES_MAX
    for _ in range(attempts - 1):
        yard.report(b"w", b"a", Outcome.CRASHED)
        yard.later(1)
        assert yard.take(b"w") == [b"a"]
    yard.report(b"w", b"a", Outcome.CRASHED)
    assert (yard.state(b"a"), yard[b"a"].attempt) == (FAILED, attempts)


def test_crash_follows_a_given_schedule() -> None:
    yard = holding(b"a", retry_delays_ns=(7 * SECOND_NS,))
    yard.report(b"w", b"a", Outcome.CRASHED)
    assert yard[b"a"].due_ns == 7 * SECOND_NS
    yard.later(7)
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.CRASHED)
    assert yard.state(b"a") is FAILED


def test_schedule_of_the_task_overrides_that_of_its_service() -> None:
    yard = Yard()
    yard.rules(retry_delays_ns=(7,))
    yard.join(b"w")
    yard.submit(b"service")
    yard.submit(b"own", retry_delays_ns=(9,))
    yard.submit(b"never", retry_delays_ns=())
    yard.take(b"w", 3)
    for name in (b"service", b"own", b"never"):
        yard.report(b"w", name, Outcome.FAILED)
    assert [yard[name].due_ns for name in (b"service", b"own")] == [7, 9]
    assert yard.state(b"never") is FAILED


@given(
    delay_ns=st.integers(0, 10**15),
    percent=st.integers(0, 100),
    random_bits=st.integers(0, 2**32 - 1),
)
def test_jitter_only_adds_and_no_more_than_its_percentage(
    delay_ns: int, percent: int, random_bits: int
) -> None:
    yard = Yard()
    yard.handle(
        RulesSet(0, defaults=LaneOptions(retry_delays_ns=(delay_ns,), jitter_percent=percent))
    )
    yard.submit(b"a")
    given_ns = retry_delay_ns(yard[b"a"], random_bits)
    assert given_ns is not None
    assert delay_ns <= given_ns <= delay_ns + delay_ns * percent // 100


def test_tasks_of_one_report_get_different_jitter() -> None:
    yard = Yard()
    yard.rules(retry_delays_ns=(SECOND_NS,), jitter_percent=100)
    yard.join(b"w")
    names = [b"%d" % number for number in range(10)]
    yard.submit(*names)
    yard.take(b"w", 10)
    yard.handle(TasksReported(0, b"w", names, outcomes=[Outcome.FAILED] * 10, random_bits=123))
    assert len({yard[name].due_ns for name in names}) == 10


def test_worker_may_set_the_retry_time_without_a_charge() -> None:
    yard = holding(b"a", b"b")
    outcomes = [Outcome.RETRY_AT, Outcome.RETRY_AT]
    yard.handle(TasksReported(0, b"w", [b"a", b"b"], outcomes=outcomes, retry_at_ns=[70, 80]))
    empty = [b"", b""]
    record = Postponed(0, b"w", [b"a", b"b"], [1, 1], [70, 80], empty, own_fault=False)
    assert yard.records == [record]
    assert [yard[name].failures for name in (b"a", b"b")] == [0, 0]
    assert yard.states(b"a", b"b") == [DELAYED, DELAYED]


def test_retry_without_a_time_is_at_once() -> None:
    yard = holding(b"a")
    yard.report(b"w", b"a", Outcome.RETRY_AT)
    yard.later(0)
    assert yard.take(b"w") == [b"a"]


def test_deferral_of_a_lane_puts_off_all_of_it_and_charges_only_what_was_tried() -> None:
    yard = Yard()
    yard.rules(retry_delays_ns=(SECOND_NS,))
    yard.join(b"w")
    yard.submit(b"a", b"b", b"c", b"other", lanes=[b"x", b"x", b"x", b"y"])
    yard.submit(b"urgent", priority=1, lanes=[b"x"])
    assert yard.take(b"w") == [b"urgent"]
    yard.report(b"w", b"urgent", Outcome.DEFER_ALL, texts=[b"host is down"])
    rest, empty = [b"a", b"b", b"c"], [b"", b"", b""]
    assert yard.records == [
        Postponed(0, b"w", [b"urgent"], [1], [SECOND_NS], [b"host is down"]),
        Postponed(0, b"", rest, [0, 0, 0], [SECOND_NS] * 3, empty, own_fault=False),
    ]
    assert [yard[name].failures for name in (b"urgent", *rest)] == [1, 0, 0, 0]
    assert yard.take(b"w", 9) == [b"other"]
    yard.later(1)
    assert yard.states(b"urgent", *rest) == [READY] * 4


def test_deferral_of_a_lane_without_a_schedule_puts_the_rest_off_for_a_while() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", lanes=[b"x", b"x"])
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.DEFER_ALL)
    assert yard.states(b"a", b"b") == [FAILED, DELAYED]
    assert yard[b"b"].due_ns == DEFER_NS_MIN


def test_deferral_in_the_open_lane_is_about_the_task_alone() -> None:
    yard = Yard()
    yard.rules(retry_delays_ns=(SECOND_NS,))
    yard.join(b"w")
    yard.submit(b"a", b"b")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.DEFER_ALL)
    assert yard.states(b"a", b"b") == [DELAYED, READY]


def test_deferral_of_a_lane_that_has_nothing_else() -> None:
    yard = Yard()
    yard.rules(retry_delays_ns=(SECOND_NS,))
    yard.join(b"w")
    yard.submit(b"a", lanes=[b"x"])
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.DEFER_ALL)
    assert len(yard.records) == 1


def test_task_deferred_back_goes_to_the_end_and_a_refused_one_to_the_front() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", b"c", b"d")
    yard.take(b"w", 2)
    outcomes = [Outcome.DEFER_BACK, Outcome.REFUSED]
    yard.handle(TasksReported(0, b"w", [b"a", b"b"], outcomes=outcomes))
    assert yard.records == [
        Returned(0, b"w", [b"a"], [1], ReturnReason.DEFERRED_BACK),
        Returned(0, b"w", [b"b"], [1], ReturnReason.REFUSED),
    ]
    assert yard.take(b"w", 9) == [b"b", b"c", b"d", b"a"]


def test_long_reasons_are_kept_by_their_tail() -> None:
    long = b"x" * REASON_BYTES_MAX + b"the end"
    yard = holding(b"a", b"b", retry_delays_ns=(1,))
    yard.report(b"w", b"a", Outcome.FAILED, texts=[long])
    yard.report(b"w", b"b", Outcome.FAILED_FINAL, texts=[long])
    for reason in yard.scheduler.ledger.reasons.values():
        assert len(reason) == REASON_BYTES_MAX
        assert reason.startswith(b"[...] x")
        assert reason.endswith(b"the end")


def test_report_of_different_outcomes_is_decided_kind_by_kind() -> None:
    names = [b"failed", b"done", b"stale", b"bad", b"more"]
    yard = holding(b"failed", b"done", b"bad", b"more", retry_delays_ns=(5,))
    outcomes = [
        Outcome.FAILED,
        Outcome.DONE,
        Outcome.DONE,
        Outcome.FAILED_FINAL,
        Outcome.DONE,
    ]
    texts: list[Content] = [b"oh", b"1", b"2", b"no", b"3"]
    effects = yard.handle(TasksReported(0, b"w", names, outcomes=outcomes, texts=texts))
    assert effects == [ReportAck(b"w", 0, [b"stale"])]
    assert yard.records == [
        StaleReport(0, b"w", [b"stale"], [0]),
        Finished(0, b"w", [b"done", b"more"], [1, 1], [b"1", b"3"]),
        Postponed(0, b"w", [b"failed"], [1], [5], [b"oh"]),
        Failed(0, b"w", [b"bad"], [1], [b"no"]),
    ]


def test_report_that_is_partly_stale_keeps_each_result_with_its_task() -> None:
    yard = holding(b"a", b"b")
    yard.finish(b"w", b"x", b"b", b"a", texts=[b"?", b"of b", b"of a"])
    assert yard.records[1] == Finished(0, b"w", [b"b", b"a"], [1, 1], [b"of b", b"of a"])


@pytest.mark.parametrize(
    "columns",
    [
        {"attempts": [1]},
        {"outcomes": [Outcome.DONE]},
        {"outcomes": [Outcome.FAILED] * 3},
        {"texts": [b"", b"", b""]},
        {"retry_at_ns": []},
    ],
)
def test_report_with_columns_of_different_length_is_refused_as_a_whole(
    columns: dict[str, Any],
) -> None:
    yard = holding(b"a", b"b")
    text = "report: columns must have one length, at most 100000"
    refused = Refused(b"w", 3, Refusal.MALFORMED, text)
    assert yard.finish(b"w", b"a", b"b", request=3, **columns) == [refused]
    assert yard.records == []


def test_report_on_too_many_tasks_is_refused_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yard = holding(b"a", b"b")
    monkeypatch.setattr(shape, "TASKS_PER_MESSAGE_MAX", 1)
    (refused,) = yard.finish(b"w", b"a", b"b")
    assert isinstance(refused, Refused)
    assert yard.states(b"a", b"b") == [LEASED, LEASED]


# The same name twice.


def test_duplicate_name_in_a_report_counts_once() -> None:
    yard = holding(b"a")
    effects = yard.finish(b"w", b"a", b"a", texts=[b"first", b"second"])
    assert missing(effects) == [b"a"]
    assert Finished(0, b"w", [b"a"], [1], [b"first"]) in yard.records


def test_report_of_an_old_and_the_present_attempt_counts_the_present_one() -> None:
    yard = holding(b"a")
    yard.report(b"w", b"a", Outcome.REFUSED)
    yard.take(b"w")
    effects = yard.finish(b"w", b"a", b"a", attempts=[1, 2], texts=[b"old", b"new"])
    assert missing(effects) == [b"a"]
    assert yard.records == [
        StaleReport(0, b"w", [b"a"], [1]),
        Finished(0, b"w", [b"a"], [2], [b"new"]),
    ]


# Tasks given back.


def give_back(yard: Yard, *names: bytes, **fields: Any) -> list[Effect]:
    return yard.handle(TasksReturned(0, b"w", list(names), **fields))


def test_returned_task_goes_to_the_end_as_if_just_created() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b")
    yard.take(b"w")
    assert give_back(yard, b"a", request=2) == [ReportAck(b"w", 2, [])]
    assert yard.records == [Returned(0, b"w", [b"a"], [1], ReturnReason.TRANSFERRED)]
    assert yard.take(b"w", 9) == [b"b", b"a"]


def test_task_may_be_returned_with_new_predecessors() -> None:
    yard = holding(b"a", b"b")
    yard.submit(b"z")
    give_back(yard, b"a", b"b", after=[[b"z", b"unknown"], []])
    assert yard.states(b"a", b"b") == [BLOCKED, READY]
    yard.take(b"w")
    yard.finish(b"w", b"z")
    assert yard.state(b"a") is READY


def test_task_returned_with_done_predecessors_is_ready() -> None:
    yard = holding(b"done", b"a")
    yard.finish(b"w", b"done")
    give_back(yard, b"a", after=[[b"done"]])
    assert yard.state(b"a") is READY


def test_no_task_is_returned_unless_the_worker_holds_all_of_them() -> None:
    yard = holding(b"a")
    before = ledger_fingerprint(yard.scheduler.ledger)
    assert give_back(yard, b"a", b"x") == [ReportAck(b"w", 0, [b"x"])]
    assert ledger_fingerprint(yard.scheduler.ledger) == before


@pytest.mark.parametrize(
    ("refusal", "names", "fields"),
    [
        (Refusal.DUPLICATE, [b"a", b"a"], {}),
        (Refusal.MALFORMED, [b"a"], {"after": []}),
        (Refusal.CYCLE, [b"a"], {"after": [[b"a"]]}),
        (Refusal.CYCLE, [b"a"], {"after": [[b"behind"]]}),
        (Refusal.CYCLE, [b"a", b"b"], {"after": [[b"b"], [b"a"]]}),
        (Refusal.UNKNOWN, [b"a"], {"after": [[b"x"]], "unknown": UnknownPolicy.REFUSE}),
        (Refusal.CANCELLED, [b"a"], {"after": [[b"gone"]]}),
    ],
)
def test_no_task_is_returned_with_invalid_predecessors(
    refusal: Refusal, names: list[bytes], fields: dict[str, object]
) -> None:
    yard = holding(b"a", b"b")
    yard.submit(b"gone", b"behind", after=[[], [b"a"]])
    yard.cancel(b"gone")
    before = ledger_fingerprint(yard.scheduler.ledger)
    (refused,) = give_back(yard, *names, request=4, **fields)
    assert isinstance(refused, Refused)
    assert (refused.client, refused.request, refused.refusal) == (b"w", 4, refusal)
    assert ledger_fingerprint(yard.scheduler.ledger) == before


def test_unknown_worker_returns_nothing() -> None:
    assert Yard().handle(TasksReturned(0, b"v", [b"a"])) == [UnknownWorker(b"v")]


# Slots that stay taken after the answer.


def test_answered_task_may_keep_its_slot_until_the_worker_frees_it() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, always_ready=True)
    yard.submit(b"a", b"b")
    assert assigned(yard.finish(b"w", b"a", keeps_slots=True)) == []
    assert yard.state(b"a") is DONE
    assert assigned(yard.handle(SlotFreed(0, b"w"))) == [b"b"]
    assert yard.records[0] == SlotsFreed(0, b"w", 1)


def test_freeing_what_is_not_kept_is_nothing() -> None:
    yard = Yard()
    yard.join(b"w")
    assert yard.handle(SlotFreed(0, b"w")) == []
    assert yard.records == []
    assert yard.handle(SlotFreed(0, b"nobody")) == [UnknownWorker(b"nobody")]


def test_wide_task_frees_all_its_slots_at_once() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=4)
    yard.submit(b"wide", slots=3)
    yard.submit(b"slim")
    yard.take(b"w", 2)
    worker = yard.scheduler.ledger.workers[b"w"]
    yard.finish(b"w", b"wide", keeps_slots=True)
    yard.finish(b"w", b"slim", keeps_slots=True)
    assert worker.slots_free == 0
    yard.handle(SlotFreed(0, b"w"))
    assert worker.slots_free == 3
    yard.handle(SlotFreed(0, b"w"))
    assert worker.slots_free == 4


def test_kept_slots_survive_a_restart() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2)
    yard.submit(b"a")
    yard.take(b"w")
    yard.finish(b"w", b"a", keeps_slots=True)
    assert reopened(yard.mirror).workers[b"w"].slots_free == 1


@pytest.mark.parametrize("worker", [b"w", b"nobody"])
def test_report_on_nothing_is_noted_and_changes_nothing(worker: bytes) -> None:
    yard = Yard()
    yard.join(b"w")
    assert yard.handle(TasksReported(0, worker, [])) == [ReportAck(worker, 0, [])]
    assert yard.handle(TasksReported(0, worker, [], attempts=[])) == [ReportAck(worker, 0, [])]
    assert yard.records == []
