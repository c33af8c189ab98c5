"""The worker's loop, against a broker without sockets and hands that do as they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core.events import Outcome, Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.states import TaskState
from taskyard.errors import UserError
from taskyard.net.channel import Channel
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.worker.native import (
    REFUSED_RETRY_NS,
    REPORT_BYTES_MAX,
    STEAL_WAIT_NS,
    NativeWorkerLoop,
)
from taskyard.worker.native_process import WorkerMonitor
from taskyard.worker.settings import WorkerSettings, worker_settings
from tests.wire.kit import Counter
from tests.worker.fake_runner import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Sequence


class Shop(Counter):
    """One worker at a broker, and the line between them. Keeps `Transport` and `Clock`."""

    def __init__(self, slots: int = 2) -> None:
        super().__init__()
        self.cut_off = False
        self.refusing = False
        self._inbox: list[list[bytes]] = []
        #: What the worker has sent, by kind.
        self.said: list[int] = []
        self.runner = FakeRunner()
        settings = WorkerSettings(b"w", (b"exec",), slots, incarnation=1)
        self.loop = NativeWorkerLoop(settings, Channel(self, self), self.runner, self)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def send(self, frames: Sequence[bytes]) -> bool:
        if self.cut_off:
            return False
        request = peer.Reply(frames[1])
        self.said.append(request.kind)
        if self.refusing and request.kind in (peer.COMPLETE, peer.HEARTBEAT):
            refusal = pb.QueryMsg(type=pb.QueryMsg.Error, reason=b"no", request=request.request)
            self._inbox.append([b"", refusal.SerializeToString()])
            return True
        events = self.dialect.receive(b"worker", list(frames), self.now_ns)
        self.handle([*events])
        return True

    def connections(self) -> int:
        return 1

    def receive(self) -> list[bytes] | None:
        self._inbox += [[b"", body] for route, body in self.sent if route == b"worker"]
        self.sent = []
        return self._inbox.pop(0) if self._inbox else None

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            self.loop.turn()

    def create(self, *names: bytes, payload: bytes = b"{}") -> None:
        kept = self.sent
        submission = Submission(list(names), [payload], [Terms(service=b"exec")])
        self.handle(
            [*self.dialect.receive(b"client", [b"", peer.create(1, submission)], self.now_ns)]
        )
        self.sent = kept + [one for one in self.sent if one not in kept]

    def state(self, name: bytes) -> TaskState:
        return self.scheduler.ledger.tasks[name].state

    def names(self) -> list[bytes]:
        return [job.name for job in self.runner.jobs]


def test_task_without_a_payload_is_run_with_its_name() -> None:
    shop = Shop()
    shop.create(b"a", payload=b"")
    shop.turn()
    assert [job.payload for job in shop.runner.jobs] == [b"a"]


def test_worker_takes_as_many_tasks_as_it_has_slots() -> None:
    shop = Shop(slots=2)
    shop.create(b"a", b"b", b"c")
    shop.turn()
    assert shop.names() == [b"a", b"b"]


def test_waiting_worker_gets_the_next_task() -> None:
    shop = Shop()
    shop.turn()
    shop.create(b"a")
    shop.turn()
    assert shop.names() == [b"a"]


def test_report_and_next_steal_share_a_message() -> None:
    shop = Shop(slots=1)
    shop.create(b"a", b"b")
    shop.turn()
    shop.said.clear()
    shop.runner.finish()
    shop.turn(1)
    assert shop.said == [peer.COMPLETE]
    shop.turn()
    assert shop.names() == [b"b"]
    assert shop.state(b"a") is TaskState.DONE


def test_failure_is_reported_with_its_reason() -> None:
    shop = Shop()
    shop.create(b"a")
    shop.turn()
    shop.runner.finish(Outcome.FAILED, b"exit status 3")
    shop.turn()
    assert shop.state(b"a") is TaskState.FAILED
    assert shop.scheduler.ledger.reasons[b"a"] == b"exit status 3"


def test_heartbeats_keep_the_lease_of_a_long_task() -> None:
    shop = Shop()
    shop.create(b"a")
    shop.turn()
    for _ in range(60):
        shop.pass_time(SECOND_NS)
        shop.turn()
    assert shop.state(b"a") is TaskState.LEASED
    assert shop.scheduler.ledger.tasks[b"a"].attempt == 1


def test_cancelled_task_is_stopped_by_the_next_heartbeat() -> None:
    shop = Shop()
    shop.create(b"a")
    shop.turn()
    cancel = peer.command(9, peer.CANCEL, Scope(names=(b"a",)))
    shop.handle([*shop.dialect.receive(b"client", [b"", cancel], shop.now_ns)])
    shop.pass_time(SECOND_NS)
    shop.turn()
    assert shop.runner.stopped == [(b"a", 1)]
    assert shop.loop.held == 0


def test_report_without_a_broker_is_sent_when_one_is_back() -> None:
    shop = Shop()
    shop.create(b"a")
    shop.turn()
    shop.cut_off = True
    shop.runner.finish()
    shop.turn()
    assert shop.loop.held == 1
    shop.cut_off = False
    shop.turn()
    assert shop.state(b"a") is TaskState.DONE
    assert shop.loop.held == 0


def test_shutdown_returns_unstarted_tasks_and_finishes_the_rest() -> None:
    shop = Shop(slots=2)
    shop.create(b"a", b"b", b"c")
    shop.turn()
    shop.runner.begun = 1
    shop.loop.shut_down()
    shop.turn()
    assert (shop.state(b"a"), shop.state(b"b")) == (TaskState.LEASED, TaskState.READY)
    assert shop.scheduler.ledger.tasks[b"b"].losses == 0
    gone_before = shop.loop.has_exited
    shop.runner.finish()
    shop.turn(5)
    assert (gone_before, shop.loop.has_exited) == (False, True)
    assert shop.state(b"a") is TaskState.DONE
    assert b"w" not in shop.scheduler.ledger.workers


def test_task_assigned_during_shutdown_is_returned() -> None:
    shop = Shop(slots=1)
    shop.turn()
    shop.loop.shut_down()
    shop.create(b"a")
    shop.turn(6)
    assert shop.runner.jobs == []
    assert shop.state(b"a") is TaskState.READY
    assert shop.loop.has_exited


def test_abandoned_tasks_are_stopped_and_returned() -> None:
    shop = Shop(slots=1)
    shop.create(b"a")
    shop.turn()
    shop.runner.begun = 1
    shop.loop.shut_down()
    shop.loop.stop_running(shop.runner.jobs)
    shop.turn(5)
    assert shop.runner.stopped == [(b"a", 1)]
    assert shop.state(b"a") is TaskState.READY
    assert shop.loop.has_exited
    (attempt,) = shop.scheduler.ledger.failed_attempts[b"a"]
    assert attempt.outcome == b"returned"
    assert attempt.started_ns  # it had run


def test_dismissed_worker_exits() -> None:
    shop = Shop()
    shop.turn()
    drain = peer.drain(9, b"w")
    kept = shop.sent
    shop.handle([*shop.dialect.receive(b"client", [b"", drain], shop.now_ns)])
    shop.sent = kept + shop.sent
    shop.turn(5)
    assert shop.loop.has_exited


def test_worker_backs_off_after_it_refused_a_task() -> None:
    shop = Shop(slots=1)
    shop.create(b"a")
    shop.turn()
    shop.runner.finish(Outcome.REFUSED, b"no process to be had")
    shop.turn(5)
    assert shop.runner.jobs == []
    assert shop.state(b"a") is TaskState.READY
    shop.pass_time(REFUSED_RETRY_NS)
    shop.turn()
    assert shop.names() == [b"a"]


def refused_shop(settings: WorkerSettings) -> Shop:
    shop = Shop()
    shop.loop = NativeWorkerLoop(settings, Channel(shop, shop), shop.runner, shop)
    shop.said.clear()
    return shop


REFUSED = {
    "name": WorkerSettings(b"w" * 1025, (b"exec",), 1, incarnation=1),
    "service": WorkerSettings(b"w", (b"s" * 1025,), 1, incarnation=1),
    "no service": WorkerSettings(b"w", (b"",), 1, incarnation=1),
}


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_refused_worker_logs_the_reason_and_backs_off(
    settings: WorkerSettings,
) -> None:
    shop = refused_shop(settings)
    shop.turn(100)
    assert 1 <= shop.said.count(peer.STEAL) <= 2
    assert shop.loop.refusal.startswith("the broker ")
    asked = shop.said.count(peer.STEAL)
    shop.pass_time(REFUSED_RETRY_NS)
    shop.turn(100)
    assert shop.said.count(peer.STEAL) == asked + 1


def test_refused_report_sets_the_refusal() -> None:
    shop = Shop(slots=1)
    shop.create(b"a")
    shop.turn()
    shop.refusing = True
    shop.runner.finish()
    shop.turn()
    assert shop.loop.refusal == ("the broker refuses its report on 1 task(s), which run again: no")
    assert shop.loop.held == 0
    shop.refusing = False
    shop.pass_time(REFUSED_RETRY_NS)
    shop.turn()
    assert shop.names() == [b"a"]
    assert shop.loop.refusal == ""


def test_refused_heartbeat_sets_the_refusal() -> None:
    shop = Shop(slots=1)
    shop.turn()
    shop.refusing = True
    shop.pass_time(SECOND_NS)
    shop.turn()
    assert shop.loop.refusal == "the broker refuses it: no"


def test_worker_without_tasks_sends_the_next_steal_at_once() -> None:
    shop = Shop()
    shop.turn()
    for _ in range(3):
        shop.said.clear()
        for _ in range(STEAL_WAIT_NS // SECOND_NS + 1):
            shop.pass_time(SECOND_NS)
            shop.turn()
        assert shop.said.count(peer.STEAL) == 1
    assert shop.loop.refusal == ""


def _ignore_line(_line: str) -> None:
    """Ignore an announcement."""


def test_trouble_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    shop = refused_shop(REFUSED["name"])
    monitor = WorkerMonitor(
        shop.loop, Channel(shop, shop), shop.runner, REFUSED["name"], _ignore_line
    )
    for _ in range(3):
        shop.turn()
        monitor.after_turn("here")
        shop.pass_time(REFUSED_RETRY_NS)
    (record,) = caplog.records
    assert "the broker refuses it: " in record.getMessage()


@pytest.mark.parametrize("name", ["", "w" * 1025, "ä" * 513])
def test_name_or_service_that_a_broker_would_refuse_is_an_error(name: str) -> None:
    with pytest.raises(UserError, match=r"worker name .* must have 1 to 1024 bytes"):
        worker_settings(1, ["exec"], name)
    with pytest.raises(UserError, match=r"worker service .* must have 1 to 1024 bytes"):
        worker_settings(1, ["exec", name])


def test_quick_tasks_are_prefetched_and_slow_ones_not() -> None:
    shop = Shop(slots=1)
    shop.create(*[b"t%d" % number for number in range(300)])
    shop.turn()
    for _ in range(100):
        shop.runner.finish()
        shop.turn(2)
    shop.pass_time(SECOND_NS)
    shop.turn()
    assert len(shop.runner.jobs) == 1 + 8
    for _ in range(2):
        shop.pass_time(SECOND_NS)
        shop.turn()
    assert shop.scheduler.ledger.workers[b"w"].prefetch == 0


def test_large_results_leave_in_several_reports() -> None:
    shop = Shop(slots=3)
    shop.create(b"a", b"b", b"c")
    shop.turn()
    for _ in range(3):
        shop.runner.finish(text=bytes(REPORT_BYTES_MAX // 2 + 1))
    shop.said.clear()
    shop.turn(6)
    assert shop.said.count(peer.COMPLETE) == 3
    assert shop.scheduler.ledger.counts[TaskState.DONE] == 3


# Its name.


def refuse(shop: Shop, code: str) -> None:
    """Have the broker refuse all that the worker sends."""

    def send(frames: Sequence[bytes]) -> bool:
        request = peer.Reply(frames[1])
        refusal = pb.QueryMsg(type=pb.QueryMsg.Error, reason=b"why", request=request.request)
        refusal.code = code.encode()
        shop._inbox.append([b"", refusal.SerializeToString()])  # noqa: SLF001
        return True

    shop.send = send  # type: ignore[method-assign]


def test_worker_whose_name_is_held_stops_tasks_and_waits() -> None:
    shop = Shop()
    shop.create(b"a")
    shop.turn()
    assert shop.names() == [b"a"]
    sound = shop.send
    refuse(shop, peer.NAME_HELD)
    shop.now_ns += SECOND_NS
    shop.turn()
    assert (shop.runner.stopped, shop.loop.held) == ([(b"a", 1)], 0)
    assert (shop.loop.waits_for_name, shop.loop.name_lost) == (True, "")
    assert shop.loop.refusal == "the broker refuses it: why"
    shop.send = sound  # type: ignore[method-assign]
    shop.now_ns += 2 * SECOND_NS
    shop.turn()
    assert (shop.loop.waits_for_name, shop.loop.refusal) == (False, "")


def test_worker_that_lost_its_name_has_the_reason() -> None:
    shop = Shop()
    shop.turn()
    refuse(shop, peer.NAME_LOST)
    shop.now_ns += SECOND_NS
    shop.turn()
    assert shop.loop.name_lost == "why"


def test_worker_that_waits_for_its_name_can_leave() -> None:
    shop = Shop()
    refuse(shop, peer.NAME_HELD)
    shop.turn()
    shop.loop.shut_down()
    shop.turn()
    assert shop.loop.has_exited


def test_worker_does_not_spin_while_disconnect_is_unanswered() -> None:
    shop = Shop()
    shop.turn()
    shop.cut_off = True
    shop.loop.shut_down()
    for _ in range(200):
        shop.loop.turn()
        assert shop.loop.wake_at_ns() > shop.now_ns
        shop.now_ns = shop.loop.wake_at_ns()
    assert not shop.loop.has_exited
