"""The reference model finds each broken rule, and no other."""

import msgspec
import pytest

from simulator import plan
from simulator.models import Violation
from simulator.reference_model import ReferenceModel
from taskyard.core import records as r
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import ReturnReason
from taskyard.core.rules import LaneOptions, Rule

NOW_NS = 1_000_000_000_000


def submitted(*names: bytes, lane: bytes = b"", **terms: object) -> r.Submitted:
    shared = msgspec.structs.replace(Terms(service=b"s0"), **terms)
    return r.Submitted(NOW_NS, Submission([*names], terms=[shared], lanes=[lane] * len(names)))


def after(name: bytes, *befores: bytes) -> r.Submitted:
    record = submitted(name)
    record.submission.after = [[*befores]]
    return record


def joined(
    name: bytes = b"w", slots: int = 0, services: tuple[bytes, ...] = (b"s0",)
) -> r.AnyRecord:
    return r.WorkerJoined(NOW_NS, name, WorkerFacts(services, slots, lease_timeout_ns=1))


def leased(*names: bytes, worker: bytes = b"w", attempt: int = 1) -> r.Leased:
    return r.Leased(NOW_NS, worker, [*names], [attempt] * len(names), 1)


def finished(*names: bytes, worker: bytes = b"w", attempt: int = 1) -> r.Finished:
    return r.Finished(NOW_NS, worker, [*names], [attempt] * len(names))


def returned(name: bytes, reason: ReturnReason, attempt: int = 1) -> r.Returned:
    return r.Returned(NOW_NS, b"w", [name], [attempt], reason)


def expired(name: bytes, attempt: int = 1) -> r.LeaseExpired:
    return r.LeaseExpired(NOW_NS, b"w", [name], [attempt])


def postponed(name: bytes, delay_ns: int, attempt: int = 1) -> r.Postponed:
    return r.Postponed(NOW_NS, b"w", [name], [attempt], [NOW_NS + delay_ns], [b""])


def failed(name: bytes, *, own_fault: bool) -> r.Failed:
    return r.Failed(NOW_NS, b"w", [name], [1], [b""], own_fault)


def told(*records: r.AnyRecord, rules: LaneOptions | None = None) -> ReferenceModel:
    drawn = plan.draw(0)
    drawn.faults.clock_jump = 0.0
    model = ReferenceModel(drawn)
    model.lanes.set_rules((Rule(b"s0", b"s0/*", rules or LaneOptions()),), LaneOptions())
    model.lanes.fresh = False
    model.broker_workers_max = 0
    for record in records:
        model.apply(record, 0)
    return model


a, b = b"a", b"b"
due = submitted(a, due_ns=NOW_NS + 5)
old = submitted(a, expires_ns=NOW_NS - 1)

BROKEN: dict[str, tuple[str, list[r.AnyRecord]]] = {
    "leased before its predecessor": (
        "dependency",
        [submitted(a), after(b, a), joined(), leased(b)],
    ),
    "leased before it is due": ("due", [due, joined(), leased(a)]),
    "came due too early": ("due", [due, r.CameDue(NOW_NS, [a])]),
    "leased when cancelled": (
        "ended",
        [submitted(a), joined(), r.Cancelled(NOW_NS, [a], []), leased(a)],
    ),
    "leased to an unknown worker": ("record", [submitted(a), leased(a)]),
    "leased twice": ("record", [submitted(a), joined(), leased(a), leased(a, attempt=2)]),
    "leased to another service": ("service", [submitted(a), joined(services=(b"s1",)), leased(a)]),
    "leased while all is paused": (
        "paused",
        [submitted(a), joined(), r.Paused(NOW_NS, b"", None), leased(a)],
    ),
    "leased while its service is paused": (
        "paused",
        [submitted(a), joined(), r.Paused(NOW_NS, b"s0", None), leased(a)],
    ),
    "leased while its lane is paused": (
        "paused",
        [submitted(a, lane=b"l"), joined(), r.Paused(NOW_NS, b"s0", b"l"), leased(a)],
    ),
    "the same attempt again": (
        "attempt",
        [submitted(a), joined(), leased(a), returned(a, ReturnReason.LEFT), leased(a)],
    ),
    "completed by another": (
        "fencing",
        [submitted(a), joined(), joined(b"x"), leased(a), finished(a, worker=b"x")],
    ),
    "completed by a former attempt": (
        "fencing",
        [submitted(a), joined(), leased(a), finished(a, attempt=2)],
    ),
    "completed twice": ("record", [submitted(a), joined(), leased(a), finished(a), finished(a)]),
    "made twice": ("twice", [submitted(a), submitted(a)]),
    "a new generation without its attempts": (
        "attempt",
        [submitted(a), joined(), leased(a), finished(a), submitted(a)],
    ),
    "a cycle": ("cycle", [submitted(a), after(b, a), r.Extended(NOW_NS, [a], [[b]])]),
    "an orphan": ("orphan", [submitted(a), after(b, a), r.Cancelled(NOW_NS, [a], [])]),
    "more than its slots": ("slots", [submitted(a, b), joined(slots=1), leased(a, b)]),
    "freed a slot that it did not keep": ("slots", [joined(), r.SlotsFreed(NOW_NS, b"w", 1)]),
    "two at once in a serial lane": ("limit", [submitted(a, b, lane=b"l"), joined(), leased(a, b)]),
    "the second first": ("order", [submitted(a, b), joined(), leased(b)]),
    "the lower priority first": (
        "order",
        [submitted(a), submitted(b, priority=1), joined(), leased(a)],
    ),
    "the returned one last": (
        "order",
        [submitted(a, b), joined(), leased(a), returned(a, ReturnReason.LEFT), leased(b)],
    ),
    "failed too early": (
        "crashes",
        [submitted(a, crashes_max=2), joined(), leased(a), failed(a, own_fault=False)],
    ),
    "tried after its last crash": (
        "crashes",
        [submitted(a, crashes_max=1), joined(), leased(a), expired(a)],
    ),
    "a suspect among others": (
        "suspect",
        [submitted(a, b, crashes_max=2), joined(), leased(a), expired(a), leased(a, b, attempt=2)],
    ),
    "others beside a suspect": (
        "suspect",
        [
            submitted(a, b, crashes_max=2),
            *(joined(), leased(a), expired(a), leased(a, attempt=2), leased(b)),
        ],
    ),
    "tried too often": ("retry", [submitted(a), joined(), leased(a), postponed(a, 5)]),
    "tried again too early": (
        "retry",
        [submitted(a, retry_delays_ns=(7,)), joined(), leased(a), postponed(a, 5)],
    ),
    "too old before its time": ("expiry", [submitted(a), r.TaskExpired(NOW_NS, [a])]),
    "too old untried": ("expiry", [old, r.TaskExpired(NOW_NS, [a])]),
    "leased after its expiry": (
        "expiry",
        [submitted(a, expires_hard_ns=NOW_NS), joined(), leased(a)],
    ),
    "progress of another": (
        "fencing",
        [submitted(a), joined(), r.Progressed(NOW_NS, b"w", [a], [1], [5], [b""])],
    ),
    "left with its tasks": (
        "record",
        [submitted(a), joined(), leased(a), r.WorkerLeft(NOW_NS, b"w", b"")],
    ),
    "never submitted": ("record", [r.CameDue(NOW_NS, [a])]),
    "tried again in the same run": (
        "run",
        [
            *(submitted(a, b, lane=b"l"), joined(), leased(a)),
            *(returned(a, ReturnReason.DEFERRED_BACK), leased(a, attempt=2)),
        ],
    ),
    "late before its time": (
        "lateness",
        [submitted(a, report_ns=NOW_NS + 1), r.ReportedLate(NOW_NS, [a])],
    ),
    "late again": (
        "lateness",
        [submitted(a, report_ns=1), r.ReportedLate(NOW_NS, [a]), r.ReportedLate(NOW_NS, [a])],
    ),
    "moved while it is out": (
        "record",
        [submitted(a), joined(), leased(a), r.Moved(NOW_NS, [a], None, b"l")],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_noticed_at_its_last_record(name: str) -> None:
    checker, records = BROKEN[name]
    model = told(*records[:-1])
    with pytest.raises(Violation) as noticed:
        model.apply(records[-1], 0)
    assert noticed.value.checker == checker


def test_kept_rules_are_not_complained_about() -> None:
    retries = submitted(b"r", retry_delays_ns=(5,))
    model = told(
        *(submitted(a), after(b, a), retries, joined(slots=2), leased(a, b"r"), finished(a)),
        *(postponed(b"r", 5), leased(b), expired(b), leased(b, attempt=2), finished(b, attempt=2)),
        *(r.CameDue(NOW_NS + 5, [b"r"]), leased(b"r", attempt=2), failed_again(b"r")),
        r.WorkerLeft(NOW_NS, b"w", b"left"),
    )
    assert model.settled()
    assert [tale.state.name for tale in model.tasks.values()] == ["DONE", "DONE", "FAILED"]


def failed_again(name: bytes) -> r.Failed:
    return r.Failed(NOW_NS, b"w", [name], [2], [b""], own_fault=True)


def test_rate_is_watched() -> None:
    rules = LaneOptions(rate_interval_ns=1_000_000_000)
    model = told(submitted(a, b), joined(), leased(a), rules=rules)
    with pytest.raises(Violation, match="rate"):
        model.apply(leased(b), 899_999_999)


def test_rate_of_each_lane_is_watched() -> None:
    rules = LaneOptions(lane_rate_interval_ns=1_000_000_000, lane_workers_max=9)
    records = [submitted(a, b, lane=b"l"), submitted(b"c", lane=b"m"), joined(slots=3)]
    model = told(*records, leased(a), leased(b"c"), rules=rules)
    with pytest.raises(Violation, match="lane rate"):
        model.apply(leased(b), 899_999_999)
    told(*records, leased(a), leased(b"c"), rules=rules).apply(leased(b), 900_000_000)


def test_held_lane_is_watched() -> None:
    rules = LaneOptions(is_held=True, lane_workers_max=9)
    records = [submitted(a, b, lane=b"l"), joined()]
    with pytest.raises(Violation, match="held"):
        told(*records, leased(a), rules=rules)
    released = r.Released(NOW_NS, [a])
    model = told(*records, released, leased(a), rules=rules)
    with pytest.raises(Violation, match="held"):
        model.apply(leased(b), 0)
    model = told(*records, released, leased(a), finished(a), rules=rules)
    with pytest.raises(Violation, match="held"):
        model.apply(leased(b), 0)
    again = returned(a, ReturnReason.UNLISTED)
    told(*records, released, leased(a), again, leased(a, attempt=2), rules=rules)


def test_lane_that_gathers_tasks_is_watched() -> None:
    rules = LaneOptions(debounce_ns=5)
    with pytest.raises(Violation, match="debounce"):
        told(submitted(a, lane=b"l"), joined(), leased(a), rules=rules)
    later = leased(a)
    later.at_ns += 5
    told(submitted(a, lane=b"l"), joined(), later, rules=rules)


def test_any_order_is_good_in_a_random_lane_but_for_priority() -> None:
    rules = LaneOptions(is_random=True)
    told(submitted(a, b), joined(), leased(b), rules=rules)
    with pytest.raises(Violation, match="order"):
        told(submitted(a), submitted(b, priority=1), joined(), leased(a), rules=rules)


def test_limit_of_a_clause_is_over_all_its_lanes() -> None:
    records = [submitted(a), submitted(b, service=b"s1"), joined(services=(b"s0", b"s1"))]
    model = told(*records, leased(a))
    model.lanes.set_rules((Rule(b"all", b"s?/*", LaneOptions(workers_max=1)),), LaneOptions())
    model.lanes.fresh = False
    with pytest.raises(Violation, match="limit"):
        model.apply(leased(b), 0)


def test_limits_of_workers_at_once_are_watched() -> None:
    records = [submitted(a, b), joined(), joined(b"x"), leased(a)]
    with pytest.raises(Violation, match="limit"):
        told(*records, leased(b, worker=b"x"), rules=LaneOptions(workers_max=1))
    model = told(*records)
    model.broker_workers_max = 1
    with pytest.raises(Violation, match="limit"):
        model.apply(leased(b, worker=b"x"), 0)


def test_task_behind_a_failure_is_settled_and_one_that_can_run_is_not() -> None:
    records = [submitted(a), after(b, a), joined(), leased(a)]
    assert [tale.name for tale in told(*records).unsettled()] == [a, b]
    assert told(*records, failed(a, own_fault=True)).settled()
