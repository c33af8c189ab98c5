"""Calls that wait for other tasks: their cores are free, and users see why tasks wait."""

from taskyard.core.effects import Reason
from taskyard.core.events import TasksRequested, WorkerHeartbeat, WorkerRegistered
from taskyard.core.model import WorkerFacts
from tests.core.kit import Yard, assigned
from tests.core.test_explain import sentence

CPUS = ((b"cpus", 10_000),)
FACTS = WorkerFacts(slots_total=2, resources=CPUS)


def heartbeat(yard: Yard, *held: bytes, waiting: tuple[bytes, ...] = (), kept: int = 0) -> None:
    names = [(name, 1) for name in held]
    yard.handle(WorkerHeartbeat(0, b"w", names, waiting=waiting, waiting_kept=kept))


def a_yard_with_a_parent() -> Yard:
    """Return a yard whose only core is in use, with one more task that needs it."""
    yard = Yard()
    yard.handle(WorkerRegistered(0, b"w", FACTS))
    yard.submit(b"parent", b"child", resources=CPUS)
    assert yard.take(b"w", 2) == [b"parent"]
    return yard


def test_cores_of_a_waiting_call_are_free() -> None:
    yard = a_yard_with_a_parent()
    assert yard.take(b"w") == []
    heartbeat(yard, b"parent", waiting=(b"parent",))
    assert yard.take(b"w") == [b"child"]
    heartbeat(yard, b"parent", b"child")  # it goes on, and the worker has no cores for it
    assert yard.scheduler.ledger.workers[b"w"].resources_free == {b"cpus": -10_000}


def test_parked_worker_gets_a_task_when_a_call_begins_to_wait() -> None:
    yard = a_yard_with_a_parent()
    yard.handle(TasksRequested(0, b"w", 1, parks=True))
    effects = yard.handle(WorkerHeartbeat(0, b"w", [(b"parent", 1)], waiting=(b"parent",)))
    assert assigned(effects) == [b"child"]


def test_cores_of_a_task_that_has_ended_are_free_once() -> None:
    yard = a_yard_with_a_parent()
    heartbeat(yard, b"parent", waiting=(b"parent",))
    yard.finish(b"w", b"parent")
    worker = yard.scheduler.ledger.workers[b"w"]
    assert (worker.resources_free, worker.waiting_tasks()) == ({b"cpus": 10_000}, [])


def test_waiting_of_other_tasks_means_nothing() -> None:
    yard = a_yard_with_a_parent()
    heartbeat(yard, b"parent", waiting=(b"child", b"unknown"))
    assert yard.scheduler.ledger.workers[b"w"].resources_free == {b"cpus": 0}


def test_task_whose_call_waits_is_explained() -> None:
    yard = a_yard_with_a_parent()
    heartbeat(yard, b"parent", waiting=(b"parent",))
    found = sentence(yard, b"parent", Reason.LEASED)
    assert found.endswith("(attempt 1); its call waits for other tasks, without its slots")


def test_task_in_the_full_lane_of_waiting_calls_is_explained() -> None:
    yard = Yard()
    yard.handle(WorkerRegistered(0, b"w", WorkerFacts(slots_total=1), prefetch=1))
    yard.submit(b"a", b"b", lanes=[b"one", b"one"])
    assert yard.take(b"w", 2) == [b"a"]
    heartbeat(yard, b"a")
    before = sentence(yard, b"b", Reason.LIMIT_LANE)
    heartbeat(yard, b"a", waiting=(b"a",))
    more = "; its running task waits for other tasks, perhaps for this one"
    expected = f"{before}{more} (use another lane for them)"
    assert sentence(yard, b"b", Reason.LIMIT_LANE) == expected


def test_task_behind_calls_that_keep_their_slots_is_explained() -> None:
    yard = Yard()
    yard.handle(WorkerRegistered(0, b"w", WorkerFacts(slots_total=1), prefetch=1))
    yard.submit(b"a", b"b", b"c")
    yard.take(b"w", 2)
    heartbeat(yard, b"a", b"b", waiting=(b"a",), kept=1)
    expected = (
        "it is ready, but the one slot of its worker is in use; 1 call of worker w waits for tasks "
        "and keeps its slot: 1 call waits there without its slot, the most of a worker (start "
        "more workers)"
    )
    assert sentence(yard, b"c", Reason.WORKERS_BUSY) == expected
