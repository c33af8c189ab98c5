"""The slots of a host that works for several brokers."""

from __future__ import annotations

from taskyard.core.limits import SECOND_NS
from taskyard.worker.jobs import Job
from taskyard.worker.prefetch import Prefetch
from taskyard.worker.slot_budget import EXCESS_NS, REQUEST_NS, Share, SlotBudget


class Host:
    """A clock, and a budget of four slots for two brokers."""

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        budget = SlotBudget(4, ((b"license", 10_000),), ("0", "1"), self)
        self.budget = budget
        self.first, self.second = (FakeRunner(budget.add()) for _ in range(2))

    def monotonic_ns(self) -> int:
        return self.now_ns


class FakeRunner:
    """A runner whose jobs never end by themselves."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.share.runner = self
        self.jobs: list[Job] = []

    @property
    def slots_used(self) -> int:
        return sum(job.slots for job in self.jobs)

    def started(self) -> list[Job]:
        return self.jobs

    def start(self, slots: int = 1, license_amount: int = 0) -> bool:
        """Start a job if there is room. Return whether."""
        resources = ((b"license", license_amount),) if license_amount else ()
        self.share.begin()
        is_started = self.share.may_start(slots, resources)
        if is_started:
            job = Job(b"job", len(self.jobs), b"exec", b"", slots=slots, resources=resources)
            self.jobs.append(job)
        return is_started


def test_brokers_share_the_slots_of_the_host() -> None:
    host = Host()
    assert [host.first.start(), host.first.start(), host.second.start(2)] == [True] * 3
    assert not host.first.start()
    assert (host.first.share.slots_available(), host.second.share.slots_available()) == (2, 2)


def test_broker_with_fewer_slots_goes_first() -> None:
    host = Host()
    for _ in range(4):
        host.first.start()
    assert not host.second.start()
    assert not host.budget.has_freed()
    host.first.jobs.pop()
    assert host.budget.has_freed()
    assert not host.first.start()
    assert host.second.start()
    assert not host.budget.has_freed()


def test_slots_are_kept_for_a_request_until_its_reply_or_for_a_moment() -> None:
    host = Host()
    share, other = host.first.share, host.second.share
    share.on_request(3)
    assert (share.slots_available(), other.slots_available()) == (4, 1)
    assert other.wake_at_ns() == host.now_ns + REQUEST_NS
    share.on_reply()
    assert other.slots_available() == 4
    share.on_request(3)
    host.now_ns += REQUEST_NS
    assert (other.slots_available(), other.wake_at_ns()) == (4, None)


def test_tasks_beyond_the_slots_are_returned_after_a_while() -> None:
    host = Host()
    share = host.first.share
    assert not share.must_return(2)
    assert share.wake_at_ns() == host.now_ns + EXCESS_NS
    host.now_ns += EXCESS_NS - 1
    assert not share.must_return(2)
    host.now_ns += 1
    assert share.must_return(2)
    assert not share.must_return(0)


def test_task_waits_for_a_slot_only_beside_quick_tasks_of_another_broker() -> None:
    host = Host()
    host.first.share.prefetch = Prefetch(4, 0)
    assert host.second.share.waiting_max() == 0
    host.first.share.prefetch.count = 2
    assert (host.second.share.waiting_max(), host.first.share.waiting_max()) == (1, 0)


def test_resources_and_gpus_of_the_host_are_shared() -> None:
    host = Host()
    assert host.first.start(license_amount=10_000)
    assert not host.second.start(license_amount=1)
    host.first.jobs.clear()
    assert host.second.start(license_amount=1)
    assert host.first.share.gpus is host.second.share.gpus


def test_task_wider_than_the_host_runs_alone() -> None:
    host = Host()
    host.first.start()
    assert not host.second.start(9)
    host.first.jobs.clear()
    assert host.second.start(9)
