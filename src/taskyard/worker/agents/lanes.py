"""Which agent gets a task, by the task's lane. Decides only: the runner feeds the agent.

An agent serves one lane at a time, and stays with it while it has tasks. With overfeed it gets more
tasks of the lane before it reports. Then it takes another lane, and prefers the one that it served
last. A lane's rule limits how many agents serve it, by default to one. Tasks without a lane go to
any agent that holds nothing.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from taskyard.core.limits import TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.worker.agents.process import Agent
    from taskyard.worker.agents.rules import AgentRules, AgentSettings, LaneKey
    from taskyard.worker.jobs import Job


class LaneAssignment:
    """The lanes that agents serve in one turn, and the tasks that wait. Updated as tasks start."""

    def __init__(
        self,
        agents: Sequence[Agent],
        others: Sequence[Job],
        waiting: Sequence[tuple[Job, object]],
        rules: AgentRules,
        now_ns: int,
    ) -> None:
        """`others` are the running tasks that no agent has."""
        self._waiting = waiting
        self._rules = rules
        #: Agents and tasks per lane.
        self._served: Counter[LaneKey] = Counter(lane_of(job) for job in others if job.lane)
        self._held = Counter(self._served)
        #: Agents that can eat, by command, in the order of their start.
        self._hungry: dict[tuple[str, ...], list[Agent]] = {}
        for agent in agents:
            self._add_agent(agent, now_ns)
        #: Lanes with a task that could not start. The tasks behind it wait too.
        self._blocked: dict[LaneKey, None] = {}

    def _add_agent(self, agent: Agent, now_ns: int) -> None:
        if agent.can_eat():
            self._hungry.setdefault(agent.pool, []).append(agent)
        until_ns = agent.serves_until_ns()
        if agent.lane is not None and agent.lane[1] and (until_ns is None or until_ns > now_ns):
            self._served[agent.lane] += 1
            self._held[agent.lane] += len(agent.jobs())

    def is_blocked(self, job: Job) -> bool:
        """Return whether an earlier task of its lane has to wait."""
        return bool(job.lane) and lane_of(job) in self._blocked

    def block_lane(self, job: Job) -> None:
        if job.lane:
            self._blocked[lane_of(job)] = None

    def lane_started(self, job: Job) -> None:
        """Count one more agent or task that serves the job's lane."""
        if job.lane:
            self._served[lane_of(job)] += 1

    def has_hungry(self) -> bool:
        return any(self._hungry.values())

    def note_fed(self, agent: Agent) -> None:
        self._reserved.pop(agent, None)
        if not agent.can_eat():
            self._hungry[agent.pool].remove(agent)

    def vacancies(self, lane: LaneKey) -> int:
        """Return how many more agents may serve a lane.

        The rule's limit counts workers, and this worker is one of them. But the broker assigns no
        more tasks than that many agents may hold.
        """
        if not lane[1]:
            return 1
        rules = self._rules.rules_for(lane)
        limit = rules.lane_workers_max or TASKS_MAX
        needed = max(1, (self._held[lane] + self._waiting_by_lane[lane]) // (1 + rules.overfeed))
        return max(0, min(limit, needed) - self._served[lane])

    def agent_for(self, job: Job, settings: AgentSettings) -> Agent | None:
        """Return the agent that takes the task; None if it has to wait.

        Agents that were started first go first, so that the last ones become idle and can exit.
        """
        hungry = self._hungry.get(settings.pool)
        if not hungry:
            return None
        lane = lane_of(job)
        serving = [agent for agent in hungry if agent.lane == lane and not agent.is_empty()]
        if job.lane and serving:
            return serving[0]
        idle = [agent for agent in hungry if agent.is_empty()]
        kept = [agent for agent in idle if self._reserved.get(agent) == lane]
        free = [agent for agent in idle if agent not in self._reserved]
        found = next(iter([*kept, *free, *serving]), None)
        return found if found is None or self.vacancies(lane) else None

    @cached_property
    def _waiting_by_lane(self) -> Counter[LaneKey]:
        """Return the number of tasks per lane that waited when the turn began."""
        return Counter(lane_of(job) for job, _ in self._waiting if job.lane)

    @cached_property
    def _reserved(self) -> dict[Agent, LaneKey]:
        """Return the idle agents that continue with their last lane. No other lane gets them."""
        reserved: dict[Agent, LaneKey] = {}
        counts: Counter[LaneKey] = Counter()
        for pool, hungry in self._hungry.items():
            for agent in hungry:
                lane = agent.lane
                if (
                    lane is None
                    or not lane[1]
                    or not self._waiting_by_lane[lane]
                    or not agent.is_empty()
                ):
                    continue
                settings = self._rules.agents_for(lane)
                is_own_command = settings is not None and settings.pool == pool
                if is_own_command and counts[lane] < min(
                    self._waiting_by_lane[lane], self.vacancies(lane)
                ):
                    counts[lane] += 1
                    reserved[agent] = lane
        return reserved


def lane_of(job: Job) -> LaneKey:
    return (job.service, job.lane)
