"""The native worker's loop with a runner that follows the broker's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.events import Outcome, RulesSet
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState
from taskyard.net.channel import Channel
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.worker.agents.rules import AgentRules
from taskyard.worker.jobs import JobResult
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.settings import WorkerSettings
from tests.worker.fake_runner import FakeRunner
from tests.worker.test_native import WorkerHarness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.worker.agents.rules import LaneKey

OVERFED = Rule(b"all", b"*", LaneOptions(overfeed=2))


class RuledFakeRunner(FakeRunner):
    """Implements `RuleAwareRunner`."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = AgentRules()
        self.agent_error = b""
        self.malformed = 0
        self.rules_received: list[Sequence[Rule]] = []

    @property
    def overfeed_max(self) -> int:
        return self.rules.overfeed_max

    def overfeed(self, lane: LaneKey) -> int:
        return self.rules.rules_for(lane).overfeed if lane[1] else 0

    def set_rules(self, clauses: Sequence[Rule]) -> None:
        self.rules_received.append(clauses)
        self.rules = AgentRules(clauses)

    def give_back(self, outcome: Outcome, *, healthy: bool) -> None:
        self._done.append(JobResult(self.jobs.pop(0), outcome, healthy=healthy))


class RuledWorkerHarness(WorkerHarness):
    """A harness whose broker may have no rules."""

    def __init__(self, *clauses: Rule, slots: int = 2, tells_rules: bool = True) -> None:
        super().__init__(slots)
        self.tells_rules = tells_rules
        self.runner: RuledFakeRunner = RuledFakeRunner()
        self.handle([RulesSet(self.now_ns, clauses)])
        settings = WorkerSettings(b"w", (b"exec",), slots, incarnation=1)
        self.loop = NativeWorkerLoop(settings, Channel(self, self), self.runner, self, self.runner)

    def send(self, frames: Sequence[bytes]) -> bool:
        request = peer.Reply(frames[1])
        if self.tells_rules or request.kind != peer.RULES:
            return super().send(frames)
        refusal = pb.QueryMsg(type=pb.QueryMsg.Error, reason=b"no", request=request.request)
        self._inbox.append([b"", refusal.SerializeToString()])
        return True

    def create_in(self, lane: bytes, *names: bytes) -> None:
        kept, self.sent = self.sent, []
        terms, lanes = [Terms(service=b"exec")], [lane] * len(names)
        submission = Submission(list(names), [b"{}"], terms, lanes=lanes)
        self.ask(peer.create(1, submission), b"client")
        self.sent = kept + [one for one in self.sent if one[0] != b"client"]

    def trouble_known(self) -> bytes:
        return self.scheduler.ledger.workers[b"w"].trouble


def test_worker_requests_no_task_before_it_has_the_rules() -> None:
    harness = RuledWorkerHarness(OVERFED)
    harness.create(b"a")
    harness.turn(1)
    assert peer.RULES in harness.sent_kinds
    assert peer.STEAL not in harness.sent_kinds
    harness.turn()
    assert harness.names() == [b"a"]
    assert harness.runner.rules_received[0][0] == OVERFED


def test_worker_refreshes_its_rules() -> None:
    harness = RuledWorkerHarness()
    harness.turn()
    changed = Rule(b"exec", b"exec/*", LaneOptions(command=b"agent"))
    harness.handle([RulesSet(harness.now_ns, (changed,))])
    harness.pass_time(SECOND_NS)
    harness.turn()  # the reply to a heartbeat has another version
    assert harness.sent_kinds.count(peer.RULES) == 2
    assert harness.runner.rules_received[-1][0] == changed
    for _ in range(20):
        harness.pass_time(SECOND_NS)
        harness.turn()
    assert harness.sent_kinds.count(peer.RULES) == 2


def test_worker_whose_runner_follows_no_rules_requests_none() -> None:
    harness = WorkerHarness()
    harness.handle([RulesSet(harness.now_ns, (OVERFED,))])
    harness.turn()
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert peer.HEARTBEAT in harness.sent_kinds
    assert peer.RULES not in harness.sent_kinds


def test_worker_whose_request_for_rules_is_refused_runs_tasks() -> None:
    harness = RuledWorkerHarness(tells_rules=False)
    harness.create(b"a")
    harness.turn()
    assert harness.names() == [b"a"]
    assert harness.runner.rules_received == []


def test_overfed_lane_is_as_one_task_and_no_more_lanes_are_taken_than_slots() -> None:
    harness = RuledWorkerHarness(OVERFED, slots=2)
    harness.create_in(b"a", b"a1", b"a2", b"a3", b"a4", b"a5")
    harness.create_in(b"b", b"b1")
    harness.create_in(b"c", b"c1", b"c2")
    harness.turn()
    assert harness.names() == [b"a1", b"a2", b"a3", b"b1"]
    harness.runner.finish()  # a1
    harness.turn()
    assert harness.names() == [b"a2", b"a3", b"b1"]
    harness.runner.jobs.sort(key=lambda job: job.name, reverse=True)
    harness.runner.finish()  # b1
    harness.turn()
    assert sorted(harness.names()) == [b"a2", b"a3", b"c1", b"c2"]


def test_overfed_lane_continues_when_its_tasks_are_done() -> None:
    harness = RuledWorkerHarness(OVERFED, slots=1)
    harness.create_in(b"a", b"a1", b"a2", b"a3", b"a4", b"a5")
    harness.create_in(b"b", b"b1")
    harness.turn()
    assert harness.names() == [b"a1", b"a2", b"a3"]
    for _ in range(3):
        harness.runner.finish()
    harness.turn()
    assert harness.names() == [b"a4", b"a5"]


def test_tasks_without_a_lane_count_each_also_where_lanes_are_overfed() -> None:
    harness = RuledWorkerHarness(OVERFED, slots=2)
    harness.create(b"a", b"b", b"c")
    harness.turn()
    assert harness.names() == [b"a", b"b"]


def test_agent_error_is_sent_at_once_repeated_and_cleared() -> None:
    harness = RuledWorkerHarness()
    harness.turn()
    assert harness.trouble_known() == b""
    harness.runner.agent_error = b"no key"
    harness.turn()
    assert harness.trouble_known() == b"no key"
    harness.scheduler.ledger.workers[b"w"].trouble = b""  # the broker was restarted
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert harness.trouble_known() == b"no key"
    harness.runner.agent_error = b""
    harness.turn()
    assert harness.trouble_known() == b""


def test_heartbeat_carries_the_malformed_lines_of_agents() -> None:
    harness = RuledWorkerHarness()
    harness.turn()
    harness.runner.malformed = 3
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert harness.scheduler.ledger.workers[b"w"].malformed == 3


def test_worker_that_returned_a_deferred_lane_requests_tasks_at_once() -> None:
    harness = RuledWorkerHarness(slots=1)
    harness.create(b"a", b"b")
    harness.turn()
    harness.runner.give_back(Outcome.FAILED, healthy=False)
    harness.turn()
    assert harness.names() == [b"b"]
    harness.runner.give_back(Outcome.REFUSED, healthy=True)
    harness.turn()
    assert harness.names() == [b"b"]
    harness.runner.give_back(Outcome.REFUSED, healthy=False)
    harness.turn()
    assert harness.names() == []


def test_tasks_returned_with_a_deferred_lane_are_deferred_too() -> None:
    harness = RuledWorkerHarness(
        Rule(b"all", b"*", LaneOptions(overfeed=2, retry_delays_ns=(60 * SECOND_NS,)))
    )
    harness.create_in(b"a", b"a1", b"a2", b"a3", b"a4")
    harness.turn()
    first, *rest = harness.runner.jobs
    harness.runner.jobs.clear()
    harness.runner._done += [JobResult(job, Outcome.REFUSED, healthy=True) for job in rest]  # noqa: SLF001
    harness.runner._done.append(JobResult(first, Outcome.DEFER_ALL, b"host down"))  # noqa: SLF001
    harness.turn()
    assert harness.names() == []
    tasks = harness.scheduler.ledger.tasks
    due_ns = {tasks[name].due_ns for name in (b"a1", b"a2", b"a3", b"a4")}
    assert len(due_ns) == 1
    assert [harness.state(name) for name in (b"a1", b"a2", b"a4")] == [TaskState.DELAYED] * 3
    assert [tasks[name].failures for name in (b"a1", b"a2", b"a4")] == [1, 0, 0]
