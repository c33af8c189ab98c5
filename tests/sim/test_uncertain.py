"""Assignments that may be lost in the simulated world, and those that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from msgspec import structs

from simulator import plan, worker
from simulator.broker_host import BrokerHost
from simulator.plan import SECOND_NS, Faults
from simulator.scenario import Scenario
from simulator.workers import AlwaysReadyWorker
from simulator.world import World
from taskyard.core import events
from taskyard.core.model import Submission, Terms
from taskyard.core.records import (
    RETURNS_CHARGED,
    Leased,
    LeaseExpired,
    Returned,
    ReturnReason,
)
from taskyard.core.states import TaskState
from taskyard.journal.recovery import decode

if TYPE_CHECKING:
    from simulator.models import TaskModel
    from taskyard.core.records import AnyRecord
    from taskyard.journal.chain import Row


#: Draws no client or worker besides the given ones.
SEED: Final = 1


class QuietWorld:
    """A world without faults, with one worker and the records of its broker."""

    def __init__(self, kind: str) -> None:
        drawn = plan.draw(SEED)
        size = structs.replace(
            drawn.size, workers=(kind,), tasks=0, clients=1, other_clients=(), slots=2
        )
        odds = type(drawn.odds)(*[0.0] * len(drawn.odds.__struct_fields__))
        drawn = structs.replace(drawn, size=size, odds=odds, faults=Faults(), clauses=())
        self.records: list[AnyRecord] = []
        self.world = World(drawn, BrokerHost, on_row=self._keep)
        self.scenario = Scenario(self.world)
        self.scenario.begin()
        self.run_for(2)
        (self.worker,) = self.scenario.workers

    def _keep(self, row: Row) -> None:
        self.records += decode(row.body)

    def run_for(self, seconds: float) -> None:
        self.world.timeline.run_until(self.world.timeline.now_ns + int(seconds * SECOND_NS))
        self.world.checker.check_timeouts()

    def submit(self, *names: bytes) -> None:
        def request() -> events.SubmitRequested:
            return events.SubmitRequested(0, b"", Submission([*names], terms=[Terms()]))

        self.scenario.clients[0].send_new(request)

    def task(self, name: bytes) -> TaskModel:
        return self.world.checker.model.tasks[name]


@pytest.mark.parametrize("kind", ["ping", "standing"])
def test_task_of_five_lease_times_that_messages_renew_is_run_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_LONG_TASKS", 1)
    quiet = QuietWorld(kind)
    quiet.worker.runs_long_tasks = quiet.worker.is_pinging = True  # type: ignore[union-attr]
    quiet.submit(b"long")
    for _ in range(4 * 5):
        quiet.run_for(quiet.world.plan.size.silence_ns / SECOND_NS / 4 + 0.05)
    quiet.run_for(1)
    assert quiet.task(b"long").state is TaskState.DONE
    leased = [one for one in quiet.records if isinstance(one, Leased)]
    assert [one.names for one in leased] == [[b"long"]]


def test_task_whose_reply_is_lost_returns_although_its_worker_requests_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = QuietWorld("stealing")
    with monkeypatch.context() as patch:
        patch.setattr(type(quiet.worker), "on_assign", lambda self, _assign: self.connect())
        quiet.submit(b"lost")
        quiet.run_for(1)
    quiet.run_for(2 * quiet.world.plan.size.silence_ns / SECOND_NS)
    assert quiet.task(b"lost").state is TaskState.DONE
    (returned,) = [one for one in quiet.records if isinstance(one, Returned)]
    assert (returned.names, returned.reason) == ([b"lost"], ReturnReason.UNLISTED)
    assert quiet.task(b"lost").losses == 0


def test_poison_task_is_charged_to_a_worker_that_dies_between_a_report_and_its_next_list() -> None:
    quiet = QuietWorld("pull")
    quiet.submit(b"before")
    quiet.run_for(quiet.world.plan.size.work_ns_max / SECOND_NS + 1)
    assert quiet.task(b"before").state is TaskState.DONE
    quiet.world.poisoned[b"poison"] = None
    quiet.worker.send_heartbeat = lambda: None  # type: ignore[method-assign, union-attr]
    quiet.submit(b"poison")
    quiet.run_for(quiet.world.plan.size.work_ns_max / SECOND_NS + 1)
    lost = [one for one in quiet.records if isinstance(one, LeaseExpired | Returned)]
    assert lost
    charged = [isinstance(one, LeaseExpired) or one.reason in RETURNS_CHARGED for one in lost]
    assert all(charged)
    assert quiet.task(b"poison").losses == len(lost)


@pytest.mark.parametrize("is_early", [True, False])
def test_only_messages_of_before_the_broker_knew_of_a_connection_may_be_lost(
    is_early: bool,  # noqa: FBT001  # a case
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = QuietWorld("standing")
    standing = quiet.worker
    assert isinstance(standing, AlwaysReadyWorker)
    standing.stays = True
    monkeypatch.setattr(standing, "report", lambda _names: None)  # its task takes long
    if is_early:
        monkeypatch.setattr(standing, "send_heartbeat", lambda: None)
    standing.reconnect_silently()
    quiet.run_for(0.1)
    quiet.submit(b"task")
    quiet.run_for(0.1)
    assert (standing.taken, standing.taken_before_restart) == (
        ([], [b"task"]) if is_early else ([b"task"], [])
    )
