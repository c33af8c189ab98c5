"""Submissions: accepted or refused as a whole, repeated, extended."""

from typing import Any
from zlib import crc32

import pytest

from taskyard.core import limits, model, shape, submission
from taskyard.core.effects import Accepted, Refused
from taskyard.core.events import (
    DiskSpaceChanged,
    DuplicatePolicy,
    SubmitRequested,
    UnknownPolicy,
)
from taskyard.core.model import Refusal, Submission, Terms
from taskyard.core.records import Extended, Submitted
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard, with_tasks_in_most_states
from tests.kit.snapshots import reopened

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


def refusal(effects: list[Any]) -> Refusal:
    """Why a submission was refused, which must be the one answer."""
    (refused,) = effects
    assert isinstance(refused, Refused)
    return refused.refusal


def send(yard: Yard, one: Submission, **fields: Any) -> list[Any]:
    return yard.handle(SubmitRequested(0, b"client", one, **fields))


def extend(yard: Yard, *names: bytes, after: list[list[bytes]] | None = None, **fields: Any) -> Any:
    """Submit like a plain dwork peer."""
    unknown = fields.pop("unknown", UnknownPolicy.DONE)
    return yard.submit(
        *names, after=after, repeat=DuplicatePolicy.EXTEND, unknown=unknown, **fields
    )


@pytest.fixture
def yard() -> Yard:
    """Return a yard with a task in every state, named after it, and a worker that holds one."""
    yard = with_tasks_in_most_states()
    yard.submit(b"delayed", due_ns=10**9)
    yard.submit(b"a/outside")
    return yard


# Accepted submissions.


def test_submission_is_one_record_and_one_answer() -> None:
    yard = Yard()
    assert yard.submit(b"a", b"b", request=7) == [Accepted(b"client", 7, new=2, existing=0)]
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.submission.names == [b"a", b"b"]
    assert yard.states(b"a", b"b") == [READY, READY]


def test_task_begins_blocked_delayed_or_ready() -> None:
    yard = Yard()
    one = Submission(
        [b"a", b"b", b"c", b"d"],
        terms=[Terms(), Terms(due_ns=5)],
        terms_at=[0, 1, 1, 0],
        after=[[], [], [b"a"], [b"a", b"b", b"a"]],
    )
    assert send(yard, one) == [Accepted(b"client", 0, new=4)]
    assert yard.states(b"a", b"b", b"c", b"d") == [READY, DELAYED, BLOCKED, BLOCKED]
    assert [yard[name].waits for name in one.names] == [0, 0, 1, 2]


def test_time_that_has_come_is_no_delay() -> None:
    yard = Yard()
    yard.clock(100)
    yard.submit(b"a", due_ns=100)
    yard.submit(b"b", due_ns=101)
    assert yard.states(b"a", b"b") == [READY, DELAYED]


def test_batch_may_name_its_tasks_in_any_order() -> None:
    yard = Yard()
    yard.submit(b"c", b"a", b"b", after=[[b"b"], [], [b"a"]])
    assert yard.states(b"a", b"b", b"c") == [READY, BLOCKED, BLOCKED]
    yard.join(b"w")
    order = []
    for _ in range(3):
        order += yard.take(b"w")
        yard.finish(b"w", order[-1])
    assert order == [b"a", b"b", b"c"]


def test_tasks_of_one_submission_may_be_of_different_services_and_lanes() -> None:
    yard = Yard()
    terms = [Terms(service=b"x"), Terms(service=b"y", campaign=b"c")]
    names = [b"a", b"b", b"c"]
    send(yard, Submission(names, terms=terms, terms_at=[0, 1, 1], lanes=[b"1", b"1", b""]))
    places = [
        (yard[name].lane.service.name, yard[name].lane.name) for name in (b"a", b"c/b", b"c/c")
    ]
    assert places == [(b"x", b"1"), (b"y", b"1"), (b"y", b"")]
    assert yard.scheduler.ledger.campaigns[b"c"].counts[READY] == 2


def test_one_payload_may_be_shared_by_all() -> None:
    yard = Yard()
    send(yard, Submission([b"a", b"b"], payloads=[b"same"]))
    send(yard, Submission([b"c", b"d"], payloads=[b"same"], after=[[], [b"a"]]))
    assert [yard[name].payload for name in (b"a", b"b", b"c", b"d")] == [b"same"] * 4


def test_shared_payload_stays_shared_where_some_of_its_tasks_are_known() -> None:
    yard = Yard()
    payload = b"shared" * 100
    send(yard, Submission([b"a", b"b"], payloads=[payload]))
    again = bytes(bytearray(payload))
    send(yard, Submission([b"a", b"c", b"d"], payloads=[again]))
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.submission.payloads == [payload]
    assert yard[b"a"].payload is yard[b"b"].payload
    assert yard[b"c"].payload is yard[b"d"].payload


def test_shared_payload_is_looked_at_once_to_know_its_tasks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yard = Yard()
    payload = b"shared" * 100
    names = [b"task-%d" % number for number in range(10)]
    yard.join(b"w", slots_total=5)
    send(yard, Submission(names, payloads=[payload]))
    looks: list[bytes] = []

    def counting_crc32(one: bytes) -> int:
        looks.append(one)
        return crc32(one)

    monkeypatch.setattr(model, "crc32", counting_crc32)
    for name in yard.take(b"w", 5):
        yard.finish(b"w", name)
    assert len(looks) == 2  # by the scheduler, and by the ledger that is recovered beside it
    existing = yard.submit(*names, payloads=[bytes(bytearray(payload))])
    assert existing == [Accepted(b"client", 0, new=0, existing=10)]
    assert len(looks) == 3
    assert refusal(yard.submit(*names, payloads=[b"other" * 100])) is Refusal.CONFLICT
    assert refusal(yard.submit(*names[5:], payloads=[b"other" * 100])) is Refusal.CONFLICT


def test_submitted_tasks_know_when_that_was() -> None:
    yard = Yard()
    yard.clock(77)
    yard.submit(b"a")
    assert yard[b"a"].terms.submitted_ns == 77


def test_envelopes_are_kept_until_the_task_ends() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", envelopes=[b"to x", b"to y"])
    assert yard.scheduler.ledger.envelopes == {b"a": b"to x", b"b": b"to y"}
    yard.cancel(b"a")
    assert yard.scheduler.ledger.envelopes == {b"b": b"to y"}


# Refused submissions. They leave the fingerprint of the ledger unchanged.

MALFORMED: list[tuple[Refusal, Submission]] = [
    (Refusal.EMPTY, Submission([])),
    (Refusal.BAD_NAME, Submission([b"new", b""])),
    (Refusal.BAD_NAME, Submission([b"new", b"x" * 1025])),
    (Refusal.BAD_NAME, Submission([b"new"], terms=[Terms(service=b"")])),
    (Refusal.BAD_NAME, Submission([b"new"], terms=[Terms(service=b"x" * 1025)])),
    (Refusal.BAD_NAME, Submission([b"new"], terms=[Terms(campaign=b"x" * 1025)])),
    (Refusal.BAD_NAME, Submission([b"new"], terms=[Terms(origin=b"x" * 1025)])),
    (Refusal.BAD_NAME, Submission([b"new"], lanes=[b"x" * 1025])),
    (Refusal.BAD_NAME, Submission([b"new"], after=[[b""]])),
    (Refusal.BAD_NAME, Submission([b"new"], after=[[b"x" * 1025]])),
    (Refusal.DUPLICATE, Submission([b"new", b"other", b"new"])),
    (Refusal.MALFORMED, Submission([b"new", b"other", b"more"], payloads=[b"1", b"2"])),
    (Refusal.MALFORMED, Submission([b"new"], payloads=[])),
    (Refusal.MALFORMED, Submission([b"new"], lanes=[])),
    (Refusal.MALFORMED, Submission([b"new"], after=[[], []])),
    (Refusal.MALFORMED, Submission([b"new"], envelopes=[b"1", b"2"])),
    (Refusal.MALFORMED, Submission([b"new"], terms_at=[0, 0])),
    (Refusal.MALFORMED, Submission([b"new"], terms_at=[1])),
    (Refusal.MALFORMED, Submission([b"new"], terms_at=[-1])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(slots=0)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(crashes_max=0)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(due_ns=-1)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(expires_ns=-1)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(expires_hard_ns=-1)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(lease_ns=-1)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(time_limit_ns=-1)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(retry_delays_ns=(1, -1))])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(priority=1001)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(priority=-1001)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(due_ns=1 << 63)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(slots=1 << 63)])),
    (Refusal.MALFORMED, Submission([b"new"], terms=[Terms(retry_delays_ns=(1 << 63,))])),
    (Refusal.UNKNOWN, Submission([b"new"], after=[[b"nobody"]])),
    (Refusal.CANCELLED, Submission([b"new"], after=[[b"cancelled"]])),
    (Refusal.CONFLICT, Submission([b"new", b"ready"], payloads=[b"new", b"another"])),
    (Refusal.CONFLICT, Submission([b"done"], payloads=[b"another"])),
    (Refusal.CONFLICT, Submission([b"cancelled"], payloads=[b"another"])),
    (
        Refusal.CONFLICT,
        Submission([b"outside"], payloads=[b"a/outside"], terms=[Terms(campaign=b"a")]),
    ),
    (Refusal.BAD_NAME, Submission([b"new"], terms=[Terms(campaign=b"a/b")])),
    (Refusal.BAD_NAME, Submission([b"x" * 1022], terms=[Terms(campaign=b"ab")])),
    (Refusal.BAD_NAME, Submission([b"new"], terms=[Terms(campaign=b"c")], after=[[b""]])),
    (Refusal.CYCLE, Submission([b"new"], after=[[b"new"]])),
    (Refusal.CYCLE, Submission([b"new", b"other"], after=[[b"other"], [b"new"]])),
]


@pytest.mark.parametrize(("expected", "one"), MALFORMED)
def test_what_is_refused_changes_nothing(yard: Yard, expected: Refusal, one: Submission) -> None:
    before = ledger_fingerprint(yard.scheduler.ledger)
    assert refusal(send(yard, one)) is expected
    assert yard.records == []
    assert ledger_fingerprint(yard.scheduler.ledger) == before


def test_every_refusal_is_tested_here() -> None:
    elsewhere = [Refusal.TOO_MANY, Refusal.BUSY, Refusal.FULL, Refusal.RETRY_LATER]
    elsewhere += [Refusal.NAME_HELD, Refusal.NAME_LOST]  # of workers, not of submissions
    elsewhere += [Refusal.OVERLOADED]  # of queries
    elsewhere += [Refusal.BYTES_UNKNOWN]  # of the broker, which has the blobs
    elsewhere += [Refusal.NO_STANDBY]  # of a failover
    elsewhere += [Refusal.FORBIDDEN, Refusal.SHUTTING_DOWN]  # of dialects
    tested = [expected for expected, _ in MALFORMED] + elsewhere
    assert [one for one in Refusal if one not in tested] == []


def test_too_many_tasks_in_one_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "TASKS_PER_MESSAGE_MAX", 2)
    yard = Yard()
    assert yard.submit(b"a", b"b", b"c", request=4) == [
        Refused(b"client", 4, Refusal.TOO_MANY, "3 tasks in one submission: the limit is 2")
    ]
    assert yard.submit(b"a", b"b") == [Accepted(b"client", 0, new=2)]


def test_payload_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "PAYLOAD_BYTES_MAX", 3)
    yard = Yard()
    assert refusal(send(yard, Submission([b"a", b"b"], [b"123", b"1234"]))) is Refusal.TOO_MANY
    assert yard.scheduler.ledger.tasks == {}


def test_task_that_would_wait_for_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "AFTER_MAX", 1)
    yard = Yard()
    assert refusal(yard.submit(b"a", after=[[b"b", b"c"]])) is Refusal.TOO_MANY


def test_full_broker_refuses_submissions_until_some_tasks_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "TASKS_MAX", 2)
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b")
    assert refusal(yard.submit(b"c")) is Refusal.FULL
    yard.take(b"w")
    yard.finish(b"w", b"a")
    yard.cancel(b"b")
    assert yard.submit(b"c", b"d") == [Accepted(b"client", 0, new=2)]


def test_full_disk_refuses_submissions_and_workers_keep_completing() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a")
    yard.handle(DiskSpaceChanged(0, accepting=False))
    assert refusal(yard.submit(b"b")) is Refusal.FULL
    assert yard.take(b"w") == [b"a"]
    yard.finish(b"w", b"a")
    assert yard.state(b"a") is DONE
    yard.handle(DiskSpaceChanged(0, accepting=True))
    assert yard.submit(b"b") == [Accepted(b"client", 0, new=1)]


def test_refusal_names_the_task_and_the_problem(yard: Yard) -> None:
    def text(*names: bytes, **fields: Any) -> str:
        (refused,) = yard.submit(*names, **fields)
        assert isinstance(refused, Refused)
        return refused.text

    assert text(b"new", after=[[b"nobody"]]) == (
        "unknown predecessor nobody (submit it first, or in the same batch)"
    )
    refusal = text(b"new", after=[[b"cancelled"]])
    assert refusal == "predecessor cancelled: cancelled (submit it again, or leave it out)"
    assert text(b"ready", payloads=[b"other"]) == (
        "task ready is known with another payload (choose another name)"
    )
    assert text(b"outside", campaign=b"a") == (
        "task a/outside: the name is that of a task outside any campaign (give one of them another "
        "name)"
    )
    assert text(b"new", campaign=b"a/b") == "campaign a/b: a campaign's name must not contain /"
    assert text(b"leased", after=[[b"ready"]], repeat=DuplicatePolicy.EXTEND) == (
        "task leased: leased, so it can't get more predecessors"
    )
    assert text(b"x", b"y", after=[[b"y"], [b"x"]]) == (
        "the tasks would wait for each other: x before y before x"
    )


# The same again.


@pytest.mark.parametrize(
    "name", [b"blocked", b"delayed", b"ready", b"leased", b"done", b"failed", b"cancelled"]
)
def test_repeated_submission_is_harmless_in_every_state(yard: Yard, name: bytes) -> None:
    before = ledger_fingerprint(yard.scheduler.ledger)
    assert yard.submit(name) == [Accepted(b"client", 0, new=0, existing=1)]
    assert yard.records == []
    assert ledger_fingerprint(yard.scheduler.ledger) == before


def test_known_tasks_are_skipped_and_new_ones_accepted(yard: Yard) -> None:
    effects = yard.submit(b"ready", b"new", b"done", b"more", after=[[], [b"done"], [], [b"new"]])
    assert effects == [Accepted(b"client", 0, new=2, existing=2)]
    assert yard.states(b"new", b"more", b"done") == [READY, BLOCKED, DONE]
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.submission.names == [b"new", b"more"]
    assert record.after_done == [[b"done"], []]


def test_long_payload_of_an_ended_task_is_recognized() -> None:
    yard = Yard()
    yard.join(b"w")
    long, other = b"x" * 1000, b"x" * 999 + b"y"
    yard.submit(b"a", payloads=[long])
    yard.take(b"w")
    yard.finish(b"w", b"a")
    assert len(yard[b"a"].payload) < 100
    assert yard.submit(b"a", payloads=[long]) == [Accepted(b"client", 0, new=0, existing=1)]
    assert refusal(yard.submit(b"a", payloads=[other])) is Refusal.CONFLICT


# Unknown predecessors.


def test_unknown_predecessor_is_skipped_on_request() -> None:
    yard = Yard()
    yard.submit(b"a", after=[[b"x"]], unknown=UnknownPolicy.DONE)
    assert yard.state(b"a") is READY
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.after_done is None
    assert record.submission.after is None


def test_unknown_predecessor_is_waited_for_on_request() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", after=[[b"x"], [b"x", b"y"]], unknown=UnknownPolicy.WAIT)
    assert list(yard.scheduler.ledger.awaited.tasks) == [b"x", b"y"]
    yard.submit(b"x")
    assert list(yard.scheduler.ledger.awaited.tasks) == [b"y"]
    assert yard.states(b"a", b"b", b"x") == [BLOCKED, BLOCKED, READY]
    yard.take(b"w")
    yard.finish(b"w", b"x")
    assert yard.states(b"a", b"b") == [READY, BLOCKED]


def test_awaited_task_may_come_in_a_batch_with_others_that_wait_for_it() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"c", after=[[b"a"]], unknown=UnknownPolicy.WAIT)
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    yard.take(b"w")
    yard.finish(b"w", b"a")
    assert yard.states(b"b", b"c") == [READY, READY]


def test_awaited_name_of_cancelled_tasks_releases_none() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", after=[[b"x"]], unknown=UnknownPolicy.WAIT)
    yard.cancel(b"a")
    yard.submit(b"x")
    yard.take(b"w")
    yard.finish(b"w", b"x")
    assert yard.states(b"a", b"x") == [CANCELLED, DONE]


def test_done_predecessors_block_no_task(yard: Yard) -> None:
    yard.submit(b"new", b"more", after=[[b"done"], [b"done", b"failed"]])
    assert yard.states(b"new", b"more") == [READY, BLOCKED]
    (record,) = yard.records
    assert isinstance(record, Submitted)
    assert record.after_done == [[b"done"], [b"done"]]
    assert record.submission.after == [[], [b"failed"]]


# Cycles.


@pytest.mark.parametrize("length", [1, 2, 50])
def test_cycle_in_a_batch_is_refused(length: int) -> None:
    yard = Yard()
    names = [b"%d" % number for number in range(length)]
    after = [[names[number - 1]] for number in range(length)]
    assert refusal(yard.submit(*names, after=after)) is Refusal.CYCLE
    assert yard.scheduler.ledger.tasks == {}


@pytest.mark.parametrize("length", [1, 2, 50])
def test_cycle_through_awaited_names_is_refused(length: int) -> None:
    yard = Yard()
    for number in range(length - 1):
        yard.submit(b"%d" % number, after=[[b"%d" % (number + 1)]], unknown=UnknownPolicy.WAIT)
    last = b"%d" % (length - 1)
    refused = yard.submit(last, after=[[b"0"]], unknown=UnknownPolicy.WAIT)
    assert refusal(refused) is Refusal.CYCLE
    assert yard.submit(last) == [Accepted(b"client", 0, new=1)]


@pytest.mark.parametrize("length", [1, 2, 50])
def test_cycle_through_extension_is_refused(length: int) -> None:
    yard = Yard()
    names = [b"%d" % number for number in range(length)]
    yard.submit(*names, after=[[], *[[name] for name in names[:-1]]])
    before = ledger_fingerprint(yard.scheduler.ledger)
    assert refusal(extend(yard, names[0], after=[[names[-1]]])) is Refusal.CYCLE
    assert ledger_fingerprint(yard.scheduler.ledger) == before


def test_cycle_through_new_and_known_tasks_of_one_message_is_refused() -> None:
    yard = Yard()
    yard.submit(b"a")
    assert refusal(extend(yard, b"a", b"b", after=[[b"b"], [b"a"]])) is Refusal.CYCLE
    assert list(yard.scheduler.ledger.tasks) == [b"a"]


def test_diamond_is_no_cycle() -> None:
    yard = Yard()
    after = [[], [b"a"], [b"a"], [b"b", b"c"]]
    yard.submit(b"a", b"b", b"c", b"d", after=after)
    assert extend(yard, b"d", after=[[b"a"]]) == [Accepted(b"client", 0, new=0, existing=1)]
    assert yard[b"d"].waits == 3


def test_edge_to_a_cancelled_generation_closes_no_cycle() -> None:
    yard = Yard()
    yard.submit(b"a")
    yard.submit(b"b", after=[[b"a"]])
    yard.cancel(b"b")
    extend(yard, b"b")
    assert extend(yard, b"a", after=[[b"b"]]) == [Accepted(b"client", 0, new=0, existing=1)]
    assert yard.states(b"a", b"b") == [BLOCKED, READY]


def test_awaited_by_a_cancelled_generation_closes_no_cycle() -> None:
    yard = Yard()
    yard.submit(b"b", after=[[b"x"]], unknown=UnknownPolicy.WAIT)
    yard.cancel(b"b")
    extend(yard, b"b")
    yard.submit(b"x", after=[[b"b"]])
    assert yard.states(b"b", b"x") == [READY, BLOCKED]


# Extension, as dwork's Create has it.


@pytest.mark.parametrize("name", [b"blocked", b"delayed", b"ready"])
def test_extension_blocks_what_waits(yard: Yard, name: bytes) -> None:
    waits = yard[name].waits
    effects = extend(yard, name, after=[[b"leased", b"done"]])
    assert effects == [Accepted(b"client", 0, new=0, existing=1)]
    assert yard.records == [Extended(0, [name], [[b"leased"]])]
    assert yard.state(name) is BLOCKED
    assert yard[name].waits == waits + 1


def test_extension_of_a_leased_task_is_refused_as_a_whole(yard: Yard) -> None:
    before = ledger_fingerprint(yard.scheduler.ledger)
    effects = extend(yard, b"new", b"ready", b"leased", after=[[], [b"failed"], [b"ready"]])
    assert refusal(effects) is Refusal.BUSY
    assert ledger_fingerprint(yard.scheduler.ledger) == before


def test_extension_of_a_failed_task_waits_until_it_is_retried(yard: Yard) -> None:
    extend(yard, b"failed", after=[[b"ready"]])
    assert yard.state(b"failed") is FAILED
    yard.retry(b"failed")
    assert yard.state(b"failed") is BLOCKED
    yard.take(b"w")
    yard.finish(b"w", b"ready")
    assert yard.state(b"failed") is READY


def test_extension_without_predecessors_changes_nothing(yard: Yard) -> None:
    before = ledger_fingerprint(yard.scheduler.ledger)
    assert extend(yard, b"ready", b"delayed") == [Accepted(b"client", 0, new=0, existing=2)]
    assert extend(yard, b"ready", after=[[b"done"]]) == [Accepted(b"client", 0, new=0, existing=1)]
    assert yard.records == []
    assert ledger_fingerprint(yard.scheduler.ledger) == before


def test_extended_task_never_enters_the_queue_twice() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b")
    extend(yard, b"b", after=[[b"a"]])
    extend(yard, b"b", after=[[b"a"]])
    assert yard.take(b"w", 5) == [b"a"]
    yard.finish(b"w", b"a")
    assert yard.take(b"w", 5) == [b"b"]


def test_delayed_task_that_was_extended_keeps_its_time() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b")
    yard.submit(b"late", due_ns=10 * limits.SECOND_NS)
    extend(yard, b"late", after=[[b"a"]])
    yard.take(b"w", 2)
    yard.finish(b"w", b"a")
    assert yard.state(b"late") is DELAYED
    yard.later(10)
    assert yard.state(b"late") is READY


@pytest.mark.parametrize("name", [b"done", b"cancelled"])
def test_ended_name_may_be_submitted_again(yard: Yard, name: bytes) -> None:
    attempt = yard[name].attempt
    effects = extend(yard, name, payloads=[b"another"])
    assert effects == [Accepted(b"client", 0, new=1, existing=0)]
    assert yard.state(name) is READY
    assert yard[name].payload == b"another"
    assert (yard[name].attempt, yard[name].losses) == (attempt, 0)


def test_attempts_go_on_rising_through_the_generations() -> None:
    yard = Yard()
    yard.join(b"w")
    for generation in range(1, 4):
        extend(yard, b"a")
        yard.take(b"w")
        assert yard[b"a"].attempt == generation
        yard.finish(b"w", b"a", attempts=[generation - 1])
        assert yard.state(b"a") is LEASED
        yard.finish(b"w", b"a", attempts=[generation])
        assert yard.state(b"a") is DONE


def test_restarted_tasks_are_counted_beside_their_generations() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", campaign=b"c")
    for names in ([b"c/a", b"c/b"], [b"c/a"]):
        yard.take(b"w", 2)
        yard.finish(b"w", *names)
        yard.submit(b"a", campaign=b"c", repeat=DuplicatePolicy.EXTEND)
    campaign = reopened(yard.scheduler.ledger).campaigns[b"c"]
    assert (campaign.counts[DONE], campaign.counts[READY], campaign.restarted) == (3, 1, 2)


def test_new_generation_waits_for_the_new_generation_of_its_predecessor() -> None:
    yard = Yard()
    yard.join(b"w")
    for _ in range(2):
        extend(yard, b"b", b"a", after=[[b"a"], []])
        assert yard.states(b"a", b"b") == [READY, BLOCKED]
        yard.take(b"w")
        yard.finish(b"w", b"a")
        yard.take(b"w")
        yard.finish(b"w", b"b")
        assert yard.states(b"a", b"b") == [DONE, DONE]


def test_extension_accepts_new_and_known_tasks_together(yard: Yard) -> None:
    effects = extend(yard, b"new", b"ready", b"done", after=[[b"done"], [b"new"], []])
    assert effects == [Accepted(b"client", 0, new=2, existing=1)]
    assert yard.states(b"new", b"ready", b"done") == [BLOCKED, BLOCKED, READY]
    assert [type(record) for record in yard.records] == [Submitted, Extended]


def test_extension_keeps_what_was_done_already_for_the_history(yard: Yard) -> None:
    extend(yard, b"ready", b"new", b"more", after=[[b"failed"], [b"done"], [b"failed"]])
    submitted, _ = yard.records
    assert isinstance(submitted, Submitted)
    assert submitted.submission.names == [b"new", b"more"]
    assert submitted.after_done == [[b"done"], []]
    assert submitted.submission.after == [[], [b"failed"]]
