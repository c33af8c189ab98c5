"""The loop of a worker whose hands follow the broker's rules, at a broker without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.events import LaneOptions, Outcome, Rule, RulesSet
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.states import TaskState
from taskyard.net.channel import Channel
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.worker.agents.rules import AgentRules
from taskyard.worker.jobs import JobResult
from taskyard.worker.native import RULES_REFRESH_NS, NativeWorkerLoop
from taskyard.worker.settings import WorkerSettings
from tests.worker.fake_runner import FakeRunner
from tests.worker.test_native import Shop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.worker.agents.rules import LaneKey

OVERFED = Rule(b"all", b"*", LaneOptions(overfeed=2))


class RuledFakeRunner(FakeRunner):
    """Keeps `Host`."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = AgentRules()
        self.agent_error = b""
        self.malformed = 0
        self.told: list[Sequence[Rule]] = []

    @property
    def overfeed_max(self) -> int:
        return self.rules.overfeed_max

    def overfeed(self, lane: LaneKey) -> int:
        return self.rules.rules_for(lane).overfeed if lane[1] else 0

    def set_rules(self, clauses: Sequence[Rule]) -> None:
        self.told.append(clauses)
        self.rules = AgentRules(clauses)

    def give_back(self, outcome: Outcome, *, healthy: bool) -> None:
        self._done.append(JobResult(self.jobs.pop(0), outcome, healthy=healthy))


class RuledShop(Shop):
    """Its broker may be one that tells no rules."""

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


def test_worker_takes_no_task_before_it_knows_the_rules() -> None:
    shop = RuledShop(OVERFED)
    shop.create(b"a")
    shop.turn(1)
    assert peer.RULES in shop.said
    assert peer.STEAL not in shop.said
    shop.turn()
    assert shop.names() == [b"a"]
    assert shop.runner.told[0][0] == OVERFED


def test_worker_refreshes_its_rules() -> None:
    shop = RuledShop()
    shop.turn()
    changed = Rule(b"exec", b"exec/*", LaneOptions(command=b"agent"))
    shop.handle([RulesSet(shop.now_ns, (changed,))])
    assert shop.loop.wake_at_ns() <= shop.now_ns + RULES_REFRESH_NS
    for _ in range(RULES_REFRESH_NS // SECOND_NS):
        shop.pass_time(SECOND_NS)
        shop.turn()
    assert shop.said.count(peer.RULES) == 2
    assert shop.runner.told[-1][0] == changed


def test_worker_runs_tasks_of_a_broker_without_rules() -> None:
    shop = RuledShop(tells_rules=False)
    shop.create(b"a")
    shop.turn()
    assert shop.names() == [b"a"]
    assert shop.runner.told == []


def test_overfed_lane_is_as_one_task_and_no_more_lanes_are_taken_than_slots() -> None:
    shop = RuledShop(OVERFED, slots=2)
    shop.create_in(b"a", b"a1", b"a2", b"a3", b"a4", b"a5")
    shop.create_in(b"b", b"b1")
    shop.create_in(b"c", b"c1", b"c2")
    shop.turn()
    assert shop.names() == [b"a1", b"a2", b"a3", b"b1"]
    shop.runner.finish()  # a1
    shop.turn()
    assert shop.names() == [b"a2", b"a3", b"b1"]
    shop.runner.jobs.sort(key=lambda job: job.name, reverse=True)
    shop.runner.finish()  # b1
    shop.turn()
    assert sorted(shop.names()) == [b"a2", b"a3", b"c1", b"c2"]


def test_overfed_lane_continues_when_its_tasks_are_done() -> None:
    shop = RuledShop(OVERFED, slots=1)
    shop.create_in(b"a", b"a1", b"a2", b"a3", b"a4", b"a5")
    shop.create_in(b"b", b"b1")
    shop.turn()
    assert shop.names() == [b"a1", b"a2", b"a3"]
    for _ in range(3):
        shop.runner.finish()
    shop.turn()
    assert shop.names() == [b"a4", b"a5"]


def test_tasks_without_a_lane_count_each_also_where_lanes_are_overfed() -> None:
    shop = RuledShop(OVERFED, slots=2)
    shop.create(b"a", b"b", b"c")
    shop.turn()
    assert shop.names() == [b"a", b"b"]


def test_agent_error_is_sent_at_once_repeated_and_cleared() -> None:
    shop = RuledShop()
    shop.turn()
    assert shop.trouble_known() == b""
    shop.runner.agent_error = b"no key"
    shop.turn()
    assert shop.trouble_known() == b"no key"
    shop.scheduler.ledger.workers[b"w"].trouble = b""  # the broker was restarted
    shop.pass_time(SECOND_NS)
    shop.turn()
    assert shop.trouble_known() == b"no key"
    shop.runner.agent_error = b""
    shop.turn()
    assert shop.trouble_known() == b""


def test_heartbeat_carries_the_malformed_lines_of_agents() -> None:
    shop = RuledShop()
    shop.turn()
    shop.runner.malformed = 3
    shop.pass_time(SECOND_NS)
    shop.turn()
    assert shop.scheduler.ledger.workers[b"w"].malformed == 3


def test_worker_that_returned_a_deferred_lane_requests_tasks_at_once() -> None:
    shop = RuledShop(slots=1)
    shop.create(b"a", b"b")
    shop.turn()
    shop.runner.give_back(Outcome.FAILED, healthy=False)
    shop.turn()
    assert shop.names() == [b"b"]
    shop.runner.give_back(Outcome.REFUSED, healthy=True)
    shop.turn()
    assert shop.names() == [b"b"]
    shop.runner.give_back(Outcome.REFUSED, healthy=False)
    shop.turn()
    assert shop.names() == []


def test_tasks_returned_with_a_deferred_lane_are_deferred_too() -> None:
    shop = RuledShop(Rule(b"all", b"*", LaneOptions(overfeed=2, retry_delays_ns=(60 * SECOND_NS,))))
    shop.create_in(b"a", b"a1", b"a2", b"a3", b"a4")
    shop.turn()
    first, *rest = shop.runner.jobs
    shop.runner.jobs.clear()
    shop.runner._done += [JobResult(job, Outcome.REFUSED, healthy=True) for job in rest]  # noqa: SLF001
    shop.runner._done.append(JobResult(first, Outcome.DEFER_ALL, b"host down"))  # noqa: SLF001
    shop.turn()
    assert shop.names() == []
    tasks = shop.scheduler.ledger.tasks
    due_ns = {tasks[name].due_ns for name in (b"a1", b"a2", b"a3", b"a4")}
    assert len(due_ns) == 1
    assert [shop.state(name) for name in (b"a1", b"a2", b"a4")] == [TaskState.DELAYED] * 3
    assert [tasks[name].failures for name in (b"a1", b"a2", b"a4")] == [1, 0, 0]
