"""The native worker's loop, with a broker without sockets and a fake runner."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.core import deadlines
from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome, Scope
from taskyard.core.limits import BLOB_BYTES_MIN, SECOND_NS, STREAM_END_BYTES
from taskyard.core.model import Stream, Submission, Terms
from taskyard.core.records import Progressed
from taskyard.core.states import TaskState
from taskyard.errors import Refused, UserError
from taskyard.net.channel import OVERDUE_NS, Channel
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native.server import NativeServer
from taskyard.worker.held_tasks import REPORT_BYTES_MAX
from taskyard.worker.jobs import NO_ROOM_RETRY_NS, JobResult
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.native_process import WorkerMonitor, run_quick_tasks
from taskyard.worker.output import NO_ROOM_PAUSE_NS, SPOOL_START_NS, OutputSpool
from taskyard.worker.requests import REFUSED_RETRY_NS, REPORT_DELAY_NS, STEAL_WAIT_NS
from taskyard.worker.settings import WorkerSettings, worker_settings
from tests.wire.kit import BROKER, WALL_NS, Counter
from tests.worker.fake_runner import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Sequence


class WorkerHarness(Counter):
    """One worker, one broker, and the channel between them. Implements `Transport` and `Clock`."""

    flushes = True

    def __init__(self, slots: int = 2) -> None:
        super().__init__()
        self.cut_off = False
        self.refusing = False
        #: The broker does not reply.
        self.is_deaf = False
        self._inbox: list[list[bytes]] = []
        #: The kinds of the worker's requests.
        self.sent_kinds: list[int] = []
        self.runner = FakeRunner()
        settings = WorkerSettings(b"w", (b"exec",), slots, incarnation=1)
        self.loop = NativeWorkerLoop(settings, Channel(self, self), self.runner, self)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns + WALL_NS - SECOND_NS

    def send(self, frames: Sequence[bytes]) -> bool:
        if self.cut_off:
            return False
        request = peer.Reply(frames[1])
        self.sent_kinds.append(request.kind)
        if self.is_deaf:
            return True
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
    harness = WorkerHarness()
    harness.create(b"a", payload=b"")
    harness.turn()
    assert [job.payload for job in harness.runner.jobs] == [b"a"]


def test_worker_takes_as_many_tasks_as_it_has_slots() -> None:
    harness = WorkerHarness(slots=2)
    harness.create(b"a", b"b", b"c")
    harness.turn()
    assert harness.names() == [b"a", b"b"]


def test_waiting_worker_gets_the_next_task() -> None:
    harness = WorkerHarness()
    harness.turn()
    harness.create(b"a")
    harness.turn()
    assert harness.names() == [b"a"]


def test_report_and_next_steal_share_a_message() -> None:
    harness = WorkerHarness(slots=1)
    harness.create(b"a", b"b")
    harness.turn()
    harness.sent_kinds.clear()
    harness.runner.finish()
    harness.turn(1)
    assert harness.sent_kinds == [peer.COMPLETE]
    harness.turn()
    assert harness.names() == [b"b"]
    assert harness.state(b"a") is TaskState.DONE


def test_worker_sends_one_message_per_task() -> None:
    harness = WorkerHarness(slots=1)
    harness.turn()
    harness.sent_kinds.clear()
    for name in (b"a", b"b", b"c"):
        harness.create(name)
        harness.turn()
        harness.runner.finish()
        harness.turn()
        assert harness.state(name) is TaskState.DONE
        assert harness.loop.held == 0
    assert harness.sent_kinds == [peer.COMPLETE] * 3


def test_worker_with_quick_tasks_sends_one_message_per_task() -> None:
    harness = WorkerHarness(slots=1)
    harness.turn()
    for number in range(40):
        harness.create(b"%d" % number)
        harness.turn()
        harness.sent_kinds.clear()
        harness.runner.finish()
        harness.turn()
        assert harness.sent_kinds == [peer.COMPLETE]
    assert harness.scheduler.ledger.workers[b"w"].prefetch > 0


def test_tasks_that_finish_while_a_report_is_under_way_share_the_next_report() -> None:
    harness = WorkerHarness(slots=3)
    harness.create(b"a", b"b", b"c")
    harness.turn()
    harness.sent_kinds.clear()
    harness.is_deaf = True
    for _ in range(3):
        harness.runner.finish()
        harness.turn()
    assert harness.sent_kinds == [peer.COMPLETE]
    harness.is_deaf = False
    harness.pass_time(OVERDUE_NS + SECOND_NS)
    harness.turn()
    assert harness.sent_kinds.count(peer.COMPLETE) == 3  # the first again, and one for both others
    assert harness.scheduler.ledger.counts[TaskState.DONE] == 3


def test_acknowledged_report_that_is_sent_again_is_a_steal() -> None:
    harness = WorkerHarness(slots=1)
    harness.create(b"a")
    harness.turn()
    harness.runner.finish()
    harness.turn()
    harness.sent_kinds.clear()
    harness.dialect = NativeServer(BROKER + 1, lambda: 0)  # the broker has restarted
    harness.pass_time(SECOND_NS)
    harness.turn(4)
    assert peer.STEAL in harness.sent_kinds
    assert peer.COMPLETE not in harness.sent_kinds
    harness.create(b"b")
    harness.turn()
    assert harness.names() == [b"b"]


def test_report_that_was_not_acknowledged_is_sent_again() -> None:
    harness = WorkerHarness(slots=1)
    harness.create(b"a")
    harness.turn()
    harness.is_deaf = True
    harness.runner.finish()
    harness.turn()
    harness.is_deaf = False
    harness.sent_kinds.clear()
    for _ in range(OVERDUE_NS // SECOND_NS + 1):
        harness.pass_time(SECOND_NS)
        harness.turn()
    assert harness.state(b"a") is TaskState.DONE
    assert harness.sent_kinds.count(peer.COMPLETE) == 1
    assert harness.loop.held == 0


def test_failure_is_reported_with_its_reason() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    harness.runner.finish(Outcome.FAILED, b"exit status 3")
    harness.turn()
    assert harness.state(b"a") is TaskState.FAILED
    assert harness.scheduler.ledger.reasons[b"a"] == b"exit status 3"


def test_heartbeats_keep_the_lease_of_a_long_task() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    for _ in range(60):
        harness.pass_time(SECOND_NS)
        harness.turn()
    assert harness.state(b"a") is TaskState.LEASED
    assert harness.scheduler.ledger.tasks[b"a"].attempt == 1


def test_cancelled_task_is_stopped_by_the_next_heartbeat() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    cancel = peer.command(9, peer.CANCEL, Scope(names=(b"a",)))
    harness.handle([*harness.dialect.receive(b"client", [b"", cancel], harness.now_ns)])
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert harness.runner.stopped == [(b"a", 1)]
    assert harness.loop.held == 0


def test_report_without_a_broker_is_sent_when_one_is_back() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    harness.cut_off = True
    harness.runner.finish()
    harness.turn()
    assert harness.loop.held == 1
    harness.cut_off = False
    harness.turn()
    assert harness.state(b"a") is TaskState.DONE
    assert harness.loop.held == 0


def test_shutdown_returns_unstarted_tasks_and_finishes_the_rest() -> None:
    harness = WorkerHarness(slots=2)
    harness.create(b"a", b"b", b"c")
    harness.turn()
    harness.runner.begun = 1
    harness.loop.shut_down()
    harness.turn()
    assert (harness.state(b"a"), harness.state(b"b")) == (TaskState.LEASED, TaskState.READY)
    assert harness.scheduler.ledger.tasks[b"b"].losses == 0
    gone_before = harness.loop.has_exited
    harness.runner.finish()
    harness.turn(5)
    assert (gone_before, harness.loop.has_exited) == (False, True)
    assert harness.state(b"a") is TaskState.DONE
    assert b"w" not in harness.scheduler.ledger.workers


def test_task_assigned_during_shutdown_is_returned() -> None:
    harness = WorkerHarness(slots=1)
    harness.turn()
    harness.loop.shut_down()
    harness.create(b"a")
    harness.turn(6)
    assert harness.runner.jobs == []
    assert harness.state(b"a") is TaskState.READY
    assert harness.loop.has_exited


def test_older_request_that_is_unanswered_is_not_sent_after_the_exit() -> None:
    harness = WorkerHarness()
    harness.cut_off = True
    harness.turn()  # a heartbeat and a Steal, not yet sent
    harness.loop.shut_down()
    harness.turn()
    harness.cut_off = False
    harness.turn()
    assert harness.sent_kinds == [peer.EXIT]
    assert harness.loop.has_exited
    assert b"w" not in harness.scheduler.ledger.workers


def test_abandoned_tasks_are_stopped_and_returned() -> None:
    harness = WorkerHarness(slots=1)
    harness.create(b"a")
    harness.turn()
    harness.runner.begun = 1
    harness.loop.shut_down()
    harness.loop.stop_running(harness.runner.jobs)
    harness.turn(5)
    assert harness.runner.stopped == [(b"a", 1)]
    assert harness.state(b"a") is TaskState.READY
    assert harness.loop.has_exited
    (attempt,) = harness.scheduler.ledger.failed_attempts[b"a"]
    assert attempt.outcome == b"returned"
    assert attempt.started_ns  # it had run


def test_dismissed_worker_exits() -> None:
    harness = WorkerHarness()
    harness.turn()
    drain = peer.drain(9, b"w")
    kept = harness.sent
    harness.handle([*harness.dialect.receive(b"client", [b"", drain], harness.now_ns)])
    harness.sent = kept + harness.sent
    harness.turn(5)
    assert harness.loop.has_exited


def test_worker_backs_off_after_it_refused_a_task() -> None:
    harness = WorkerHarness(slots=1)
    harness.create(b"a")
    harness.turn()
    harness.runner.finish(Outcome.REFUSED, b"no process to be had")
    harness.turn(5)
    assert harness.runner.jobs == []
    assert harness.state(b"a") is TaskState.READY
    harness.pass_time(REFUSED_RETRY_NS)
    harness.turn()
    assert harness.names() == [b"a"]


def refused_harness(settings: WorkerSettings) -> WorkerHarness:
    harness = WorkerHarness()
    harness.loop = NativeWorkerLoop(settings, Channel(harness, harness), harness.runner, harness)
    harness.sent_kinds.clear()
    return harness


REFUSED = {
    "name": WorkerSettings(b"w" * 1025, (b"exec",), 1, incarnation=1),
    "service": WorkerSettings(b"w", (b"s" * 1025,), 1, incarnation=1),
    "no service": WorkerSettings(b"w", (b"",), 1, incarnation=1),
}


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_refused_worker_logs_the_reason_and_backs_off(
    settings: WorkerSettings,
) -> None:
    harness = refused_harness(settings)
    harness.turn(100)
    assert 1 <= harness.sent_kinds.count(peer.STEAL) <= 2
    assert harness.loop.refusal.startswith("the broker ")
    asked = harness.sent_kinds.count(peer.STEAL)
    harness.pass_time(REFUSED_RETRY_NS)
    harness.turn(100)
    assert harness.sent_kinds.count(peer.STEAL) == asked + 1


def test_refused_report_sets_the_refusal() -> None:
    harness = WorkerHarness(slots=1)
    harness.create(b"a")
    harness.turn()
    harness.refusing = True
    harness.runner.finish()
    harness.turn()
    assert harness.loop.refusal == ("the broker refuses its report on 1 task (to run again): no")
    assert harness.loop.held == 0
    harness.refusing = False
    harness.pass_time(REFUSED_RETRY_NS)
    harness.turn()
    assert harness.names() == [b"a"]
    assert harness.loop.refusal == ""


def test_refused_heartbeat_sets_the_refusal() -> None:
    harness = WorkerHarness(slots=1)
    harness.turn()
    harness.refusing = True
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert harness.loop.refusal == "the broker refuses it: no"


def test_steal_waits_while_heartbeats_name_it() -> None:
    harness = WorkerHarness()
    harness.turn()
    for _ in range(3):
        harness.sent_kinds.clear()
        for _ in range(STEAL_WAIT_NS // SECOND_NS + 1):
            harness.pass_time(SECOND_NS)
            harness.turn()
        assert harness.sent_kinds.count(peer.STEAL) == 0
    assert harness.loop.refusal == ""
    harness.create(b"a")
    harness.turn()
    assert harness.names() == [b"a"]


def test_lost_steal_is_sent_again_after_the_next_heartbeat() -> None:
    harness = WorkerHarness()
    for _ in range(2):
        harness.turn()
        harness.pass_time(SECOND_NS)
    harness.turn()
    harness.handle([*harness.dialect.disconnected(b"worker")])  # the worker does not notice
    harness.sent_kinds.clear()
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert harness.sent_kinds == [peer.HEARTBEAT, peer.STEAL]
    harness.create(b"a")
    harness.turn()
    assert harness.names() == [b"a"]


def _ignore_line(_line: str) -> None:
    """Ignore an announcement."""


def test_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    harness = refused_harness(REFUSED["name"])
    monitor = WorkerMonitor(harness.loop, Channel(harness, harness), harness.runner, _ignore_line)
    for _ in range(3):
        harness.turn()
        monitor.after_turn("here")
        harness.pass_time(REFUSED_RETRY_NS)
    (record,) = caplog.records
    assert "the broker refuses it: " in record.getMessage()


@pytest.mark.parametrize("name", ["", "w" * 1025, "ä" * 513])
def test_name_or_service_that_a_broker_would_refuse_is_an_error(name: str) -> None:
    with pytest.raises(UserError, match=r"worker name .* must have 1 to 1024 bytes"):
        worker_settings(1, ["exec"], name)
    with pytest.raises(UserError, match=r"worker service .* must have 1 to 1024 bytes"):
        worker_settings(1, ["exec", name])


#: A hundred tasks a second.
QUICK_NS = SECOND_NS // 100


def quick_harness(slots: int = 1, finished: int = 4) -> WorkerHarness:
    """Return a worker that has finished quick tasks one by one, and has many more to request."""
    harness = WorkerHarness(slots)
    harness.create(*[b"t%d" % number for number in range(300)])
    harness.turn()
    for _ in range(finished):
        harness.runner.finish()
        harness.pass_time(QUICK_NS)
        harness.turn(2)
    harness.runner.begun = slots
    return harness


def test_quick_tasks_are_prefetched_before_the_next_heartbeat() -> None:
    assert len(quick_harness(finished=3).runner.jobs) == 1
    assert len(quick_harness(finished=4).runner.jobs) == 1 + 8


def test_long_tasks_that_end_together_are_not_prefetched() -> None:
    harness = WorkerHarness(slots=16)
    harness.create(*[b"t%d" % number for number in range(300)])
    harness.turn()
    for _ in range(16):
        harness.runner.finish()
    harness.turn()
    assert len(harness.runner.jobs) == 16


def test_prefetched_tasks_return_to_the_broker_when_tasks_become_slow() -> None:
    harness = quick_harness()
    waiting = harness.names()[1:]
    for _ in range(3):
        harness.pass_time(SECOND_NS)
        harness.turn()
    assert harness.scheduler.ledger.workers[b"w"].prefetch == 0
    assert (len(harness.runner.jobs), harness.loop.held) == (1, 1)
    assert {harness.state(name) for name in waiting} == {TaskState.READY}


def test_report_waits_for_more_tasks_while_enough_are_queued() -> None:
    harness = quick_harness()
    harness.sent_kinds.clear()
    for _ in range(2):
        harness.runner.finish()
        harness.turn()
    assert harness.sent_kinds == []
    assert harness.loop.wake_at_ns() == harness.now_ns + REPORT_DELAY_NS
    harness.pass_time(REPORT_DELAY_NS)
    harness.turn()
    assert harness.sent_kinds == [peer.COMPLETE]
    assert harness.scheduler.ledger.counts[TaskState.DONE] == 4 + 2
    assert len(harness.runner.jobs) == 1 + 8


def test_quick_tasks_run_without_messages_until_few_are_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = quick_harness()
    harness.sent_kinds.clear()
    harness.runner.finish()
    harness.loop.run_tasks()
    turn = harness.runner.turn

    def finish_one() -> list[JobResult]:
        harness.runner.finish()
        return turn()

    monkeypatch.setattr(harness.runner, "turn", finish_one)
    poll = select.poll()
    with Path(os.devnull).open("rb") as always_ready:
        poll.register(always_ready, select.POLLIN)
        run_quick_tasks(harness.loop, poll)
    assert (len(harness.runner.jobs), harness.sent_kinds) == (1 + 8 // 3, [])
    harness.loop.send()
    assert harness.sent_kinds == [peer.COMPLETE]


def test_reports_are_gathered_while_enough_tasks_are_queued_unless_the_worker_stops() -> None:
    harness = quick_harness()
    assert not harness.loop.is_gathering()
    harness.runner.finish()
    harness.loop.run_tasks()
    assert harness.loop.is_gathering()
    harness.loop.shut_down()
    assert not harness.loop.is_gathering()


def test_report_does_not_wait_when_few_tasks_are_queued() -> None:
    harness = quick_harness()
    harness.sent_kinds.clear()
    for _ in range(6):
        harness.runner.finish()
    harness.turn()
    assert harness.sent_kinds == [peer.COMPLETE]


def test_reports_at_the_end_are_gathered_while_the_slots_are_busy() -> None:
    harness = WorkerHarness(slots=1)
    harness.create(*[b"t%d" % number for number in range(20)])
    harness.turn()
    for _ in range(4):
        harness.runner.finish()
        harness.pass_time(QUICK_NS)
        harness.turn(2)
    harness.runner.begun = 1
    while len(harness.runner.jobs) > 3:
        harness.runner.finish()
        harness.turn()
    harness.pass_time(REPORT_DELAY_NS)
    harness.turn()  # now a `Steal` waits at the broker
    harness.sent_kinds.clear()
    harness.runner.finish()
    harness.turn()
    assert (len(harness.runner.jobs), harness.sent_kinds) == (2, [])
    harness.runner.finish()
    harness.turn(1)
    assert (len(harness.runner.jobs), harness.sent_kinds) == (1, [peer.COMPLETE])


def test_idle_time_before_quick_tasks_is_not_part_of_their_rate() -> None:
    harness = WorkerHarness(slots=1)
    harness.turn()
    harness.pass_time(SECOND_NS // 2)
    harness.create(*[b"t%d" % number for number in range(300)])
    harness.turn()
    for _ in range(4):
        harness.runner.finish()
        harness.pass_time(QUICK_NS)
        harness.turn(2)
    assert len(harness.runner.jobs) == 1 + 8


def test_shutdown_sends_reports_at_once() -> None:
    harness = quick_harness()
    harness.runner.finish()
    harness.turn()
    harness.sent_kinds.clear()
    harness.runner.begun = len(harness.runner.jobs)  # agents may have begun more than the slots
    harness.loop.shut_down()
    harness.turn(1)
    assert harness.sent_kinds == [peer.COMPLETE]


def test_large_results_leave_in_several_reports() -> None:
    harness = WorkerHarness(slots=3)
    harness.create(b"a", b"b", b"c")
    harness.turn()
    for _ in range(3):
        harness.runner.finish(text=bytes(REPORT_BYTES_MAX // 2 + 1))
    harness.sent_kinds.clear()
    harness.turn(6)
    assert harness.sent_kinds.count(peer.COMPLETE) == 3
    assert harness.scheduler.ledger.counts[TaskState.DONE] == 3


def test_without_room_for_output_programs_are_stopped_and_due_again_and_others_wait() -> None:
    harness = WorkerHarness(slots=3)
    spool = OutputSpool(harness.monotonic_ns)
    channel, settings = Channel(harness, harness), harness.loop.settings
    harness.loop = NativeWorkerLoop(settings, channel, harness.runner, harness, spool=spool)
    harness.create(b"long", b"ended", b"quiet")
    harness.turn()
    long, ended, quiet = harness.runner.jobs
    content = bytes(2 * BLOB_BYTES_MIN)
    streams = {job: spool.stream(job, Stream.STDOUT) for job in (long, ended)}
    for stream in streams.values():
        stream.add(content)
    done = JobResult(ended, Outcome.DONE)
    done.streams = streams[ended], spool.stream(ended, Stream.STDERR)
    harness.runner.jobs.remove(ended)
    harness.runner.report(done)
    harness.pass_time(SPOOL_START_NS)
    kept = harness.send
    refuse(harness, "full", pb.QueryMsg.Append)
    harness.turn()
    assert harness.runner.stopped == [long.key]
    assert harness.runner.jobs == [quiet]
    states = [harness.state(job.name) for job in (long, ended, quiet)]
    assert states == [TaskState.DELAYED, TaskState.LEASED, TaskState.LEASED]
    task = harness.scheduler.ledger.tasks[b"long"]
    assert (task.due_ns, task.failures) == (harness.wall_ns() + NO_ROOM_RETRY_NS, 0)
    assert harness.scheduler.ledger.reasons[b"long"] == b"why"
    (output,) = [one for one in harness.scheduler.take_records() if isinstance(one, Progressed)]
    assert output.texts == [Blob(b"", len(content), bytes(2 * STREAM_END_BYTES))]
    harness.send = kept  # type: ignore[method-assign]
    harness.sent_kinds.clear()
    harness.turn()
    assert pb.QueryMsg.Append not in harness.sent_kinds
    harness.pass_time(NO_ROOM_PAUSE_NS)
    harness.turn()
    assert harness.state(b"ended") is TaskState.DONE


# Its name.


def refuse(harness: WorkerHarness, code: str, kind: int | None = None) -> None:
    """Have the broker refuse every request of the worker, or those of a kind."""
    take = harness.send

    def send(frames: Sequence[bytes]) -> bool:
        request = peer.Reply(frames[1])
        if kind not in (None, request.kind):
            return take(frames)
        refusal = pb.QueryMsg(type=pb.QueryMsg.Error, reason=b"why", request=request.request)
        refusal.code = code.encode()
        harness._inbox.append([b"", refusal.SerializeToString()])  # noqa: SLF001
        return True

    harness.send = send  # type: ignore[method-assign]


def test_worker_whose_name_is_held_stops_tasks_and_waits() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    assert harness.names() == [b"a"]
    sound = harness.send
    refuse(harness, peer.NAME_HELD)
    harness.now_ns += SECOND_NS
    harness.turn()
    assert (harness.runner.stopped, harness.loop.held) == ([(b"a", 1)], 0)
    assert (harness.loop.waits_for_name, harness.loop.name_lost) == (True, "")
    assert harness.loop.refusal == "the broker refuses it: why"
    harness.send = sound  # type: ignore[method-assign]
    harness.now_ns += 2 * SECOND_NS
    harness.turn()
    assert (harness.loop.waits_for_name, harness.loop.refusal) == (False, "")


def test_worker_that_lost_its_name_has_the_reason() -> None:
    harness = WorkerHarness()
    harness.turn()
    refuse(harness, peer.NAME_LOST)
    harness.now_ns += SECOND_NS
    harness.turn()
    assert harness.loop.name_lost == "why"


def test_worker_whose_key_is_refused_stops_tasks_and_ends() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    refuse(harness, peer.FORBIDDEN)
    harness.now_ns += SECOND_NS
    harness.turn()
    assert (harness.runner.stopped, harness.loop.held) == ([(b"a", 1)], 0)
    monitor = WorkerMonitor(harness.loop, Channel(harness, harness), harness.runner, _ignore_line)
    with pytest.raises(Refused, match=r"worker \S+: why") as refused:
        monitor.after_turn("here")
    assert refused.value.code == "forbidden"


def test_worker_that_waits_for_its_name_can_exit() -> None:
    harness = WorkerHarness()
    refuse(harness, peer.NAME_HELD)
    harness.turn()
    harness.loop.shut_down()
    harness.turn()
    assert harness.loop.has_exited


def test_worker_does_not_spin_while_disconnect_is_unanswered() -> None:
    harness = WorkerHarness()
    harness.turn()
    harness.cut_off = True
    harness.loop.shut_down()
    for _ in range(200):
        harness.loop.turn()
        assert harness.loop.wake_at_ns() > harness.now_ns
        harness.now_ns = harness.loop.wake_at_ns()
    assert not harness.loop.has_exited


def heartbeats_in(harness: WorkerHarness, seconds: int) -> tuple[int, int]:
    """Return how many heartbeats and pings a worker sends in this time."""
    harness.sent_kinds.clear()
    for _ in range(4 * seconds):
        harness.pass_time(SECOND_NS // 4)
        harness.turn(2)
    return harness.sent_kinds.count(peer.HEARTBEAT), harness.sent_kinds.count(peer.OK)


def test_worker_uses_the_interval_of_the_last_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = WorkerHarness()
    harness.turn()
    assert heartbeats_in(harness, 20) == (20, 0)
    interval_ns = 5 * SECOND_NS
    monkeypatch.setattr(deadlines, "heartbeat_interval_ns", lambda *_: interval_ns)
    assert heartbeats_in(harness, 1) == (1, 0)
    assert heartbeats_in(harness, 20) == (4, 0)
    assert harness.scheduler.ledger.workers[b"w"].heartbeat_used_ns == interval_ns
    interval_ns = SECOND_NS
    assert heartbeats_in(harness, 5) == (1, 0)
    assert heartbeats_in(harness, 20) == (20, 0)


def test_interval_with_tasks_is_at_most_a_third_of_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    monkeypatch.setattr(deadlines, "heartbeat_interval_ns", lambda *_: 60 * SECOND_NS)
    assert heartbeats_in(harness, 1) == (1, 0)
    assert harness.loop.wake_at_ns() <= harness.now_ns + 5 * SECOND_NS
    assert heartbeats_in(harness, 60) == (12, 0)


def crowded_harness(monkeypatch: pytest.MonkeyPatch) -> WorkerHarness:
    """Return an idle worker among so many that its interval is as long as its lease."""
    harness = WorkerHarness()
    harness.turn()
    monkeypatch.setattr(deadlines, "heartbeat_interval_ns", lambda *_: 5 * SECOND_NS)
    monkeypatch.setattr(deadlines, "idle_heartbeat_ns", lambda *_: 15 * SECOND_NS)
    assert heartbeats_in(harness, 1) == (1, 0)
    assert heartbeats_in(harness, 60) == (4, 0)
    return harness


def test_idle_worker_with_a_long_interval_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = crowded_harness(monkeypatch)
    worker = harness.scheduler.ledger.workers[b"w"]
    assert worker.lease_timeout_ns == 45 * SECOND_NS
    assert heartbeats_in(harness, 300) == (20, 0)
    assert harness.scheduler.ledger.workers[b"w"] is worker


def test_first_task_shortens_the_interval_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = crowded_harness(monkeypatch)
    assert heartbeats_in(harness, 13) == (0, 0)
    harness.create(b"a")
    harness.turn()
    assert harness.sent_kinds == [peer.STEAL, peer.HEARTBEAT]
    assert heartbeats_in(harness, 60) == (12, 0)
    assert harness.scheduler.ledger.workers[b"w"].heartbeat_ns == 5 * SECOND_NS
    harness.runner.finish()
    harness.turn()
    assert harness.state(b"a") is TaskState.DONE
    assert heartbeats_in(harness, 5) == (1, 0)
    assert heartbeats_in(harness, 60) == (4, 0)


@pytest.mark.parametrize("seconds", [0, 15, 30])  # until the next check of its timeout
def test_task_of_a_worker_that_died_idle_is_lost_a_lease_after_its_assignment(
    seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = crowded_harness(monkeypatch)
    heartbeats_in(harness, seconds)
    harness.pass_time(13 * SECOND_NS)
    harness.create(b"a")
    assert harness.state(b"a") is TaskState.LEASED
    harness.pass_time(15 * SECOND_NS - 1)
    assert harness.state(b"a") is TaskState.LEASED
    harness.pass_time(1)
    assert harness.state(b"a") is not TaskState.LEASED
    assert not harness.scheduler.ledger.workers


def test_shorter_interval_shortens_the_timeout_of_an_idle_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = crowded_harness(monkeypatch)
    monkeypatch.setattr(deadlines, "idle_heartbeat_ns", lambda *_: SECOND_NS)
    assert heartbeats_in(harness, 20) != (0, 0)
    harness.pass_time(15 * SECOND_NS)
    assert not harness.scheduler.ledger.workers


def test_worker_with_a_fixed_interval_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = WorkerHarness()
    settings = WorkerSettings(b"w", (b"exec",), 2, incarnation=1, heartbeat_ns=2 * SECOND_NS)
    harness.loop = NativeWorkerLoop(settings, Channel(harness, harness), harness.runner, harness)
    monkeypatch.setattr(deadlines, "heartbeat_interval_ns", lambda *_: 5 * SECOND_NS)
    harness.turn()
    assert heartbeats_in(harness, 20) == (10, 0)
    assert harness.scheduler.ledger.workers[b"w"].heartbeat_ns == 2 * SECOND_NS


def test_late_reply_makes_the_worker_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "heartbeat_interval_ns", lambda *_: 5 * SECOND_NS)
    harness = WorkerHarness()
    harness.turn()
    harness.is_deaf = True
    assert heartbeats_in(harness, 5) == (1, 0)
    assert heartbeats_in(harness, 1) == (0, 1)


def test_prefetch_is_adjusted_between_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "heartbeat_interval_ns", lambda *_: 5 * SECOND_NS)
    harness = WorkerHarness(slots=1)
    harness.create(*[b"%d" % number for number in range(100)])
    harness.turn()
    for _ in range(40):
        harness.runner.finish()
        harness.pass_time(SECOND_NS // 100)
        harness.turn()
    assert harness.loop.held > 2
    for _ in range(3):  # a slow task
        harness.pass_time(SECOND_NS)
        harness.turn()
    assert harness.loop.held == 1
