"""The slots of a host that works for several brokers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskyard.core.limits import SECOND_NS
from taskyard.worker.jobs import Job
from taskyard.worker.slots import (
    EXCESS_NS,
    REQUEST_NS,
    Prefetch,
    Share,
    SlotBudget,
    WaitingCalls,
)


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


class CallModel:
    """Calls on a worker of a few slots, as the runner drives them."""

    def __init__(self, slots: int, calls_max: int) -> None:
        self.slots = slots
        self.calls: WaitingCalls[int] = WaitingCalls(calls_max)
        self.queued: list[int] = []
        self.running: set[int] = set()
        #: Calls in the order in which they got slots, new or again.
        self.served: list[int] = []
        self.widths: dict[int, int] = {}

    def used(self) -> int:
        return sum(self.widths[call] for call in (*self.running, *self.calls.keeping))

    def has_room(self, call: int) -> bool:
        used = self.used()
        return not used or used + self.widths[call] <= self.slots

    def turn(self) -> None:
        self.calls.admit()
        while (call := self.calls.next_resumed(self.has_room)) is not None:
            self.served.append(call)
            self.running.add(call)
        while self.queued and not self.calls.resuming and self.has_room(self.queued[0]):
            self.served.append(self.queued[0])
            self.running.add(self.queued.pop(0))

    def check(self) -> None:
        assert self.used() <= self.slots or len(self.running) + len(self.calls.keeping) == 1
        groups = [self.running, self.calls.waiting, self.calls.keeping, self.calls.resuming]
        assert sum(map(len, groups)) == len(set().union(*groups)), "a call is in one group"
        if self.calls.resuming:
            assert not self.has_room(self.calls.resuming[0]), "a call could go on"
        elif self.queued:
            assert not self.has_room(self.queued[0]), "a task could start"


@given(
    slots=st.integers(1, 3),
    calls_max=st.integers(0, 3),
    steps=st.lists(st.tuples(st.sampled_from("swred"), st.integers(0, 9)), max_size=60),
)
def test_waiting_calls_never_use_more_slots_and_none_starves(
    slots: int, calls_max: int, steps: list[tuple[str, int]]
) -> None:
    model = CallModel(slots, calls_max)
    for step, number in steps:
        running, waiting = sorted(model.running), [*model.calls.waiting, *model.calls.keeping]
        if step == "s":
            call = len(model.widths)
            model.widths[call] = 1 + number % 3
            model.queued.append(call)
        elif step == "w" and running:
            model.running.remove(call := running[number % len(running)])
            model.calls.wait(call)
        elif step == "r" and waiting:
            call = waiting[number % len(waiting)]
            asked = [*model.calls.resuming]
            if model.calls.resume(call):
                model.running.add(call)
            else:
                assert [*model.calls.resuming] == [*asked, call]
        elif step == "e" and running:
            model.running.remove(running[number % len(running)])
        elif step == "d" and waiting:
            model.calls.drop(waiting[number % len(waiting)])
        model.turn()
        model.check()
    # When all that runs ends, each call that asks has its turn, in the order of asking.
    expected = [*model.calls.resuming, *model.queued]
    model.served.clear()
    while model.running or model.calls.keeping:
        model.running.clear()
        for call in [*model.calls.keeping]:
            model.calls.drop(call)
        model.turn()
        model.check()
    assert model.served == expected
