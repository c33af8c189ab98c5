"""Which agent gets a task, by its lane. Looks and chooses; feeds nobody.

An agent serves one lane at a time. It is given more of that lane before it reports, if the lane is
overfed, and goes on with it for as long as there is something; then it takes the next lane, and the
one that it served last rather than another. A lane is served by as many agents as its rules allow
workers, mostly one. Tasks without a lane are for any agent that has nothing else in hand.
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
    """Who serves which lane in one turn, and what waits. Told of what is begun meanwhile."""

    def __init__(
        self,
        agents: Sequence[Agent],
        others: Sequence[Job],
        waiting: Sequence[tuple[Job, object]],
        rules: AgentRules,
        now_ns: int,
    ) -> None:
        """`others` are the tasks that are done without agents."""
        self._waiting = waiting
        self._rules = rules
        #: How many serve each lane, and what they hold of it.
        self._served: Counter[LaneKey] = Counter(lane_of(job) for job in others if job.lane)
        self._held = Counter(self._served)
        #: Those that can eat, by their command, in the order in which they were started.
        self._hungry: dict[tuple[str, ...], list[Agent]] = {}
        for agent in agents:
            self._add_agent(agent, now_ns)
        #: Lanes of which a task was passed over: those behind it wait, too.
        self._blocked: dict[LaneKey, None] = {}

    def _add_agent(self, agent: Agent, now_ns: int) -> None:
        if agent.can_eat():
            self._hungry.setdefault(agent.argv, []).append(agent)
        until_ns = agent.serves_until_ns()
        if agent.lane is not None and agent.lane[1] and (until_ns is None or until_ns > now_ns):
            self._served[agent.lane] += 1
            self._held[agent.lane] += len(agent.jobs())

    def is_blocked(self, job: Job) -> bool:
        """A task before it in its lane has to wait."""
        return bool(job.lane) and lane_of(job) in self._blocked

    def block_lane(self, job: Job) -> None:
        if job.lane:
            self._blocked[lane_of(job)] = None

    def lane_started(self, job: Job) -> None:
        """Somebody serves its lane from now on who did not before."""
        if job.lane:
            self._served[lane_of(job)] += 1

    def has_hungry(self) -> bool:
        return any(self._hungry.values())

    def note_fed(self, agent: Agent) -> None:
        self._reserved.pop(agent, None)
        if not agent.can_eat():
            self._hungry[agent.argv].remove(agent)

    def vacancies(self, lane: LaneKey) -> int:
        """How many more may serve it. The broker counts workers, and we are one; but it hands out
        no more tasks than so many agents may hold."""
        if not lane[1]:
            return 1
        rules = self._rules.rules_for(lane)
        limit = rules.lane_workers_max or TASKS_MAX
        needed = max(1, (self._held[lane] + self._waiting_by_lane[lane]) // (1 + rules.overfeed))
        return max(0, min(limit, needed) - self._served[lane])

    def agent_for(self, job: Job, settings: AgentSettings) -> Agent | None:
        """Who takes the task; None if it has to wait. Among those who could, the first that were
        started go first: so the last ones have nothing to do, and can be let go."""
        hungry = self._hungry.get(settings.argv)
        if not hungry:
            return None
        lane = lane_of(job)
        at_it = [agent for agent in hungry if agent.lane == lane and not agent.is_empty()]
        if job.lane and at_it:
            return at_it[0]
        idle = [agent for agent in hungry if agent.is_empty()]
        kept = [agent for agent in idle if self._reserved.get(agent) == lane]
        free = [agent for agent in idle if agent not in self._reserved]
        found = next(iter([*kept, *free, *at_it]), None)
        return found if found is None or self.vacancies(lane) else None

    @cached_property
    def _waiting_by_lane(self) -> Counter[LaneKey]:
        """How many tasks of each lane waited when the turn began."""
        return Counter(lane_of(job) for job, _ in self._waiting if job.lane)

    @cached_property
    def _reserved(self) -> dict[Agent, LaneKey]:
        """Idle agents that go on with the lane that they served last: nobody else gets them."""
        reserved: dict[Agent, LaneKey] = {}
        counts: Counter[LaneKey] = Counter()
        for argv, hungry in self._hungry.items():
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
                is_its = settings is not None and settings.argv == argv
                if is_its and counts[lane] < min(self._waiting_by_lane[lane], self.vacancies(lane)):
                    counts[lane] += 1
                    reserved[agent] = lane
        return reserved


def lane_of(job: Job) -> LaneKey:
    return (job.service, job.lane)
