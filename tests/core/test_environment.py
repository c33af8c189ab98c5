"""The environment of a submission: kept once, passed to workers, never compared or read."""

from typing import Any

from taskyard.core.effects import Assign, Refused
from taskyard.core.events import DuplicatePolicy, MoveRequested, Scope, SubmitRequested
from taskyard.core.limits import ENVIRONMENT_BYTES_MAX
from taskyard.core.model import Refusal, Submission, Terms
from taskyard.core.records import Submitted
from tests.core.kit import Yard
from tests.kit.snapshots import reopened

HERE = b'{"host":"h","cwd":"/here"}'
THERE = b'{"host":"h","cwd":"/there"}'


def taken(yard: Yard, count: int = 1) -> list[bytes]:
    """Return the environments that a worker gets with its tasks."""
    yard.join(b"w", slots_total=0)
    (assigned,) = [one for one in yard.ask(b"w", count) if isinstance(one, Assign)]
    return [terms.environment for terms in assigned.terms]


def submission_of(yard: Yard) -> Submission:
    (record,) = yard.records
    assert isinstance(record, Submitted)
    return record.submission


def test_worker_gets_the_environment_with_every_task() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", environment=HERE)
    yard.submit(b"c")
    assert taken(yard, 3) == [HERE, HERE, b""]


def test_environment_is_stored_once_per_submission() -> None:
    yard = Yard()
    terms = [Terms(), Terms(priority=1), Terms(environment=b"smuggled")]
    submission = Submission([b"a", b"b", b"c"], [b""], terms, [0, 1, 2], environment=HERE)
    yard.handle(SubmitRequested(0, b"client", submission))
    stored = submission_of(yard)
    assert stored.environment == HERE
    assert [one.environment for one in stored.terms] == [b"", b"", b""]
    assert taken(yard, 3) == [HERE] * 3


def test_equal_environments_share_one_object_also_after_a_recovery() -> None:
    yard = Yard()
    for number in range(3):
        environment = bytes(bytearray(HERE))
        yard.submit(b"%d" % number, environment=environment, submitted_ns=number)
        yard.later(1)
    for ledger in (yard.scheduler.ledger, reopened(yard.scheduler.ledger)):
        tasks = ledger.tasks.values()
        assert len({id(task.terms) for task in tasks}) == 3
        assert len({id(task.terms.environment) for task in tasks}) == 1


def test_repeated_submission_from_elsewhere_is_harmless_and_the_first_stays() -> None:
    yard = Yard()
    yard.submit(b"a", environment=HERE)
    yard.submit(b"a", b"b", environment=THERE)
    assert submission_of(yard).names == [b"b"]
    assert taken(yard, 2) == [HERE, THERE]


def test_task_that_runs_again_gets_the_environment_of_its_new_submission() -> None:
    yard = Yard()
    yard.submit(b"a", environment=HERE)
    assert taken(yard) == [HERE]
    yard.finish(b"w", b"a")
    yard.submit(b"a", environment=THERE, repeat=DuplicatePolicy.EXTEND)
    assert taken(yard) == [THERE]


def test_moved_task_keeps_its_environment() -> None:
    yard = Yard()
    yard.submit(b"a", environment=HERE, service=b"other")
    yard.handle(MoveRequested(0, b"client", Scope(names=(b"a",)), b"default", b"lane"))
    assert taken(yard) == [HERE]


def test_long_environment_is_refused() -> None:
    yard = Yard()
    fields: dict[str, Any] = {"environment": bytes(ENVIRONMENT_BYTES_MAX + 1)}
    (refused,) = yard.submit(b"a", **fields)
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.TOO_MANY
    assert refused.text == "environment: at most 262144 bytes (pass fewer variables)"
    assert yard.records == []
