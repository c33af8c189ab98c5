"""Named resources: which worker has them free, what is kept for whom, and what comes back."""

import pytest

from taskyard.core.effects import Refused
from taskyard.core.events import Outcome, WorkerLost, WorkerRegistered
from taskyard.core.limits import SECOND_NS, WIDE_LOOKAHEAD
from taskyard.core.model import Terms, WorkerFacts
from taskyard.core.resources import Resources, common_minimum, format_amount, format_bytes
from tests.core.kit import Yard, assigned

#: One and two of a resource, in ten-thousandths.
ONE, TWO, HALF = 10_000, 20_000, 5_000

GPU: Resources = ((b"gpus", ONE),)


def with_gpus(*, count: int = 1, slots: int = 4) -> Yard:
    """Return a yard with a worker `w` that has GPUs and a timeout."""
    yard = Yard()
    resources = ((b"gpus", count * ONE), (b"memory", 8 << 30))
    yard.join(b"w", slots_total=slots, lease_timeout_ns=60 * SECOND_NS, resources=resources)
    return yard


def reserved(yard: Yard) -> list[tuple[bytes, bytes]]:
    return [(one.worker.name, one.task.name) for one in yard.scheduler.ledger.reservations]


def test_task_goes_only_to_a_worker_that_has_its_resources() -> None:
    yard = with_gpus()
    yard.join(b"plain")
    yard.submit(b"a", b"b", resources=GPU)
    assert yard.take(b"plain", 9) == []
    assert yard.take(b"w", 9) == [b"a"]
    assert yard.take(b"w", 9) == []
    yard.finish(b"w", b"a")
    assert yard.take(b"w", 9) == [b"b"]


def test_fractions_share_a_resource_exactly() -> None:
    yard = with_gpus(slots=20)
    yard.submit(*[b"%02d" % number for number in range(12)], resources=((b"gpus", ONE // 10),))
    assert len(yard.take(b"w", 20)) == 10


def test_prefetched_tasks_take_resources_too() -> None:
    yard = Yard()
    facts = WorkerFacts(slots_total=1, resources=((b"gpus", TWO),))
    yard.handle(WorkerRegistered(0, b"w", facts, prefetch=7))
    yard.submit(b"a", b"b", b"c", resources=GPU)
    assert yard.take(b"w", 8) == [b"a", b"b"]


def test_task_without_room_keeps_no_other_back() -> None:
    yard = with_gpus()
    yard.submit(*[b"%03d" % number for number in range(2 * WIDE_LOOKAHEAD)], resources=GPU)
    yard.submit(b"a", b"b", b"c", b"d")
    assert yard.take(b"w", 9) == [b"000", b"a", b"b", b"c"]


def test_lane_of_tasks_with_resources_is_scanned_once_for_workers_without() -> None:
    yard = with_gpus()
    yard.join(b"plain")
    yard.submit(*[b"%03d" % number for number in range(9 * WIDE_LOOKAHEAD)], resources=GPU)
    yard.submit(b"a", resources=((b"gpus", HALF),))
    assert yard.take(b"plain") == []
    assert yard[b"a"].lane.resources_min == ((b"gpus", HALF),)
    yard.submit(b"b")
    assert yard[b"b"].lane.resources_min == ()
    assert yard.take(b"plain") == [b"b"]


def test_large_task_is_not_starved_by_small_ones() -> None:
    yard = with_gpus(count=2)
    yard.submit(b"1", b"2", resources=GPU)
    yard.submit(b"large", resources=((b"gpus", TWO),))
    yard.submit(b"3", b"4", resources=GPU)
    assert yard.take(b"w", 2) == [b"1", b"2"]
    assert yard.take(b"w", 2) == []
    assert reserved(yard) == [(b"w", b"large")]
    yard.finish(b"w", b"1")
    assert yard.take(b"w", 2) == []
    yard.finish(b"w", b"2")
    assert yard.take(b"w", 2) == [b"large"]


def test_worker_kept_for_a_resource_takes_tasks_that_do_without_it() -> None:
    yard = with_gpus(slots=3)
    yard.submit(b"1", b"2", resources=GPU)
    yard.submit(b"memory", resources=((b"memory", 8 << 30),))
    yard.submit(b"a", b"b", b"c")
    assert yard.take(b"w") == [b"1"]
    assert yard.take(b"w") == [b"memory"]
    assert reserved(yard) == [(b"w", b"2")]
    assert yard.take(b"w") == [b"a"]
    yard.finish(b"w", b"1")
    assert yard.take(b"w") == [b"2"]


def test_worker_kept_for_a_task_gives_none_of_its_resources_to_others() -> None:
    """The task lacks a GPU and has its memory free. Else the two could be missing in turns."""
    yard = with_gpus()
    yard.submit(b"1", resources=GPU)
    assert yard.take(b"w") == [b"1"]
    yard.submit(b"both", resources=((b"gpus", ONE), (b"memory", 6 << 30)))
    assert yard.take(b"w") == []
    yard.submit(b"too much", resources=((b"memory", 3 << 30),))
    yard.submit(b"beside", resources=((b"memory", 2 << 30),))
    assert yard.take(b"w", 9) == [b"beside"]
    yard.finish(b"w", b"1")
    assert yard.take(b"w") == [b"both"]


def test_worker_that_comes_closest_is_reserved() -> None:
    yard = Yard()
    for worker, gpus in ((b"far", 4), (b"near", 8)):
        facts = {"slots_total": 9, "lease_timeout_ns": 60 * SECOND_NS}
        yard.join(worker, resources=((b"gpus", gpus * ONE),), **facts)
        yard.submit(b"on " + worker, resources=((b"gpus", 3 * ONE + gpus * HALF - TWO),))
        assert yard.take(worker) == [b"on " + worker]
    yard.submit(b"large", resources=((b"gpus", 4 * ONE),))
    assert yard.take(b"far") == []
    assert reserved(yard) == [(b"near", b"large")]


@pytest.mark.parametrize("how", ["finished", "failed", "returned", "lost", "cancelled"])
def test_resources_come_back_however_a_lease_ends(how: str) -> None:
    yard = with_gpus()
    yard.submit(b"a", b"b", resources=GPU)
    yard.take(b"w")
    if how == "lost":
        yard.handle(WorkerLost(0, b"w"))
        yard.join(b"w", slots_total=4, resources=GPU)
    elif how == "cancelled":
        yard.cancel(b"a")
    else:
        outcomes = {
            "finished": Outcome.DONE,
            "failed": Outcome.FAILED_FINAL,
            "returned": Outcome.REFUSED,
        }
        yard.report(b"w", b"a", outcomes[how])
    assert len(yard.take(b"w", 9)) == 1


def test_freed_resource_goes_at_once_to_a_parked_worker() -> None:
    yard = with_gpus()
    yard.submit(b"a", b"b", resources=GPU)
    assert assigned(yard.ask(b"w", 9, parks=True)) == [b"a"]
    assert assigned(yard.ask(b"w", 3, parks=True)) == []
    assert assigned(yard.finish(b"w", b"a")) == [b"b"]


def test_worker_whose_resources_shrink_gets_nothing_until_they_suffice() -> None:
    yard = with_gpus(count=2)
    yard.submit(b"a", b"b", b"c", resources=GPU)
    yard.take(b"w", 2)
    yard.join(b"w", slots_total=4, resources=GPU)
    yard.finish(b"w", b"a")
    assert yard.take(b"w") == []
    yard.finish(b"w", b"b")
    assert yard.take(b"w") == [b"c"]


@pytest.mark.parametrize(
    "resources",
    [
        ((b"gpus", 0),),
        ((b"gpus", -1),),
        ((b"", 1),),
        ((b"gpus", 1 << 63),),
        ((b"gpus", 1), (b"cpus", 1)),
        ((b"gpus", 1), (b"gpus", 1)),
        tuple((b"%02d" % number, 1) for number in range(33)),
    ],
)
def test_invalid_resources_are_refused(resources: Resources) -> None:
    yard = Yard()
    effects = yard.submit(b"a", resources=resources)
    assert isinstance(effects[0], Refused)
    assert not yard.scheduler.ledger.tasks
    yard.join(b"w", resources=resources)
    assert not yard.scheduler.ledger.workers


def test_terms_without_resources_are_not_wide() -> None:
    assert not Terms().is_wide
    assert Terms(slots=2).is_wide
    assert Terms(resources=GPU).is_wide


def test_common_minimum_is_a_lower_bound_of_both() -> None:
    first = ((b"cpus", 2), (b"gpus", 3), (b"memory", 5))
    assert common_minimum(first, ((b"gpus", 4), (b"memory", 1))) == ((b"gpus", 3), (b"memory", 1))
    assert common_minimum(first, ()) == ()


def test_amounts_are_written_in_the_unit_of_their_resource() -> None:
    assert [format_amount(b"gpus", amount) for amount in (ONE, HALF, 1)] == ["1", "0.5", "0.0001"]
    assert format_amount(b"memory", 4 << 30) == "4 GiB"
    assert format_bytes(4_509_715_661) == "4.2 GiB"
    assert [*map(format_bytes, (1023, 1536, 512 << 20))] == ["1023 bytes", "1.5 KiB", "512 MiB"]
