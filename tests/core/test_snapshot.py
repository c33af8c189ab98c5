"""Snapshots: a restored ledger equals the original and behaves alike."""

import pytest
from hypothesis import given

from simulator import invariants
from taskyard.core.effects import Accepted
from taskyard.core.events import (
    Outcome,
    PauseRequested,
    ResumeRequested,
    TasksProgressed,
    UnknownPolicy,
)
from taskyard.core.ledger import Ledger, to_ended_task
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import EndedTask, digest
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard
from tests.core.strategies import Step, steps, take_step
from tests.kit.snapshots import encoded, reopened

DONE, CANCELLED = TaskState.DONE, TaskState.CANCELLED


def rich() -> Yard:
    """Return a yard with a bit of everything."""
    yard = Yard()
    yard.rules(overfeed=1)
    yard.join(b"w", services=(b"default", b"x"), slots_total=9, lease_timeout_ns=60 * SECOND_NS)
    yard.join(b"v")
    yard.submit(b"killer", lanes=[b"s"])
    yard.lose(b"u", b"killer")
    yard.handle(PauseRequested(0, b"client", b"default", b"s"))
    yard.submit(b"a", b"b", b"c", lanes=[b"1", b"1", b"2"], campaign=b"c1", priority=3)
    after = [[b"a"], [b"a", b"b"], [b"d", b"e"]]
    yard.submit(b"d", b"e", b"f", after=after, envelopes=[b"!"] * 3)
    yard.submit(b"g", after=[[b"awaited", b"a"]], unknown=UnknownPolicy.WAIT)
    yard.submit(b"h", b"i", service=b"x", slots=2, due_ns=5 * SECOND_NS)
    yard.submit(b"j", service=b"x", expires_hard_ns=90 * SECOND_NS)
    yard.submit(*[b"k%d" % number for number in range(5)], service=b"x")
    yard.take(b"w", 4)
    held = [task.name for task in yard.scheduler.ledger.workers[b"w"].held()]
    yard.finish(b"w", held[0], texts=[b"result"], keeps_slots=True)
    yard.report(b"w", held[1], Outcome.FAILED, texts=[b"oh"])
    yard.report(b"w", held[2], Outcome.REFUSED)
    yard.cancel(b"k4")
    yard.handle(PauseRequested(0, b"client", b"x"))
    yard.handle(PauseRequested(0, b"client", b"default", b"2"))
    yard.handle(PauseRequested(0, b"client", b"default", b"empty"))
    yard.later(1)
    return yard


def test_restored_ledger_has_the_same_fingerprint_and_keeps_its_invariants() -> None:
    ledger = rich().scheduler.ledger
    restored = reopened(ledger)
    assert ledger_fingerprint(restored) == ledger_fingerprint(ledger)
    invariants.check_ledger(restored)


def test_restored_ledger_keeps_outputs() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a")
    yard.take(b"w")
    yard.handle(TasksProgressed(0, b"w", [b"a"], texts=[b"one"]))
    record = yard.scheduler.ledger.record
    assert reopened(yard.scheduler.ledger).outputs == {b"a": record}


def test_empty_ledger_can_be_restored() -> None:
    restored = reopened(Ledger())
    assert ledger_fingerprint(restored) == ledger_fingerprint(Ledger())


def test_fingerprint_shows_differences() -> None:
    yard, other = Yard(), Yard()
    yard.submit(b"a", b"b")
    other.submit(b"b", b"a")
    assert ledger_fingerprint(yard.mirror) != ledger_fingerprint(other.mirror)


def test_restored_ledger_behaves_alike() -> None:
    yard = rich()
    restored = Scheduler(reopened(yard.scheduler.ledger))
    restored.resume(yard.now_ns)
    restored.handle(yard.scheduler.ledger.rules)
    live = yard.scheduler
    live.resume(yard.now_ns)
    outcomes = []
    for scheduler in (live, restored):
        twin = Yard()
        twin.scheduler, twin.now_ns = scheduler, yard.now_ns
        twin.mirror = reopened(scheduler.ledger)
        twin.handle(PauseRequested(0, b"client", b"x", b"never"))
        for lane in (None, b"never"):
            twin.handle(resume(b"x", lane))
        twin.submit(b"awaited")
        order: list[bytes] = []
        for seconds in (0, 10, 80, 1):
            twin.later(seconds)
            while names := twin.take(b"v"):
                order += names
                twin.finish(b"v", *names)
        states = {name: task.state for name, task in scheduler.ledger.tasks.items()}
        outcomes.append((sorted(order), states))
    assert outcomes[0] == outcomes[1]


def resume(service: bytes, lane: bytes | None) -> ResumeRequested:
    return ResumeRequested(0, b"client", service, lane)


@pytest.mark.slow
@given(steps(50, at_least=10))
def test_any_ledger_can_be_restored(scenario: list[Step]) -> None:
    yard = Yard()
    for step in scenario:
        take_step(yard, step)
    restored = reopened(yard.mirror)
    assert ledger_fingerprint(restored) == ledger_fingerprint(yard.scheduler.ledger)
    invariants.check_ledger(restored)
    assert ledger_fingerprint(reopened(restored)) == ledger_fingerprint(restored)


def test_lane_with_nothing_but_a_suspect_can_be_restored_and_served() -> None:
    yard = Yard()
    yard.submit(b"bad", lanes=[b"x"])
    yard.lose(b"v", b"bad", times=4)
    yard.scheduler = Scheduler(reopened(yard.scheduler.ledger))
    yard.submit(b"a", b"b", service=b"x")
    yard.join(b"w", services=(b"x", b"default"), slots_total=9)
    assert yard.take(b"w", 9) == [b"bad"]
    assert yard.take(b"w", 9) == []
    yard.finish(b"w", b"bad")
    assert yard.take(b"w", 9) == [b"a", b"b"]


def test_payload_that_tasks_share_is_there_once() -> None:
    yard = Yard()
    payload = b"shared" * 100
    yard.submit(b"own", payloads=[b"own"])
    yard.submit(b"a", b"b", b"c", payloads=[payload])
    assert encoded(yard.scheduler.ledger).count(payload) == 1
    restored = reopened(yard.scheduler.ledger)
    own, *shared = [task.payload for task in restored.tasks.values()]
    assert (own, shared) == (b"own", [payload] * 3)
    assert all(one is shared[0] for one in shared)


# Ended tasks that are moved to an index outside memory.


def ended(yard: Yard, name: bytes) -> EndedTask:
    ending = yard[name].ending
    assert ending is not None
    return to_ended_task(yard[name], ending)


def test_archived_task_is_forgotten_and_stays_counted() -> None:
    yard = Yard()
    yard.submit(b"a", b"b")
    yard.cancel(b"a")
    for ledger in (yard.scheduler.ledger, yard.mirror):
        ledger.archive([b"a", b"b", b"unknown"])
    assert list(yard.scheduler.ledger.tasks) == [b"b"]
    assert yard.scheduler.ledger.counts[CANCELLED] == 1
    yard.later(0)


def test_recalled_task_is_known_reopened() -> None:
    yard = Yard()
    yard.join(b"w")
    payload = b"long" * 100
    yard.submit(b"a", payloads=[payload], campaign=b"c", service=b"default")
    yard.take(b"w")
    yard.finish(b"w", b"c/a")
    one = ended(yard, b"c/a")
    assert one.digest == digest(payload)
    for ledger in (yard.scheduler.ledger, yard.mirror):
        ledger.archive([b"c/a"])
        ledger.recall(one)
        ledger.recall(one)
    accepted = yard.submit(b"a", payloads=[payload], campaign=b"c")
    assert accepted == [Accepted(b"client", 0, new=0, existing=1)]
    yard.submit(b"b", after=[[b"c/a"]])
    assert yard.state(b"b") is TaskState.READY
    assert yard.state(b"c/a") is DONE
