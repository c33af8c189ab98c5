"""The broker's rules as agents need them, and which agent gets a task, by the task's lane.

The first rule that matches a task's service and lane names the command of its agents. An agent
serves one lane at a time, and keeps it while it has tasks. With overfeed it gets more tasks of the
lane before it reports. A lane's rule limits how many agents serve it, by default to one. Tasks
without a lane go to any agent that holds nothing. Decides only: the runner feeds the agent.
"""

from __future__ import annotations

import shlex
from collections import Counter
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, structs

from taskyard.core.limits import SECOND_NS, TASKS_MAX
from taskyard.core.rules import LaneOptions, compile_glob
from taskyard.settings.values import LANE, PLACE, SERVICE, places
from taskyard.wire.hungry import HUNGRY_LINES
from taskyard.worker.limits import AGENT_HUNGER_NS_MAX, AGENT_IDLE_NS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.rules import Rule
    from taskyard.worker.agents.process import Agent
    from taskyard.worker.jobs import Job


LaneKey: TypeAlias = tuple[bytes, bytes]

_LITERALS: Final = {"{{": "{", "}}": "}"}

#: Lanes in the cache. They come and go, and a new lookup is cheap.
LANES_CACHE_SIZE: Final = 10_000


class AgentSettings(Struct, frozen=True):
    """An agent's command and limits."""

    argv: tuple[str, ...]
    #: The command before its placeholders were filled in. Empty: it has none.
    template: tuple[str, ...] = ()
    #: Tasks that an agent may hold beyond the current task.
    overfeed: int = 0
    #: An idle agent exits after this time.
    idle_ns_max: int = AGENT_IDLE_NS_MAX
    #: An agent that holds a task and sends nothing is ended after this time.
    hunger_ns_max: int = AGENT_HUNGER_NS_MAX
    #: The delay of a task that an agent passed over.
    interval_ns: int = SECOND_NS
    #: The name of its lines. Empty: the rule names them.
    lines: str = HUNGRY_LINES

    @property
    def pool(self) -> tuple[str, ...]:
        """The lines and words. If these are equal, agents can take each other's tasks."""
        return (self.lines, *self.argv)

    @property
    def command(self) -> tuple[str, ...]:
        """The command as in the rules."""
        return self.template or self.argv

    def for_lane(self, lane: LaneKey) -> AgentSettings:
        """Return the settings with the placeholders of the command filled in."""
        service, name = (part.decode(errors="surrogateescape") for part in lane)
        argv = fill_command(self.argv, service, name)
        return self if argv is self.argv else structs.replace(self, argv=argv, template=self.argv)


class AgentRules:
    """The rules of the broker. `program` replaces every command that they name."""

    def __init__(self, clauses: Sequence[Rule] = (), program: AgentSettings | None = None) -> None:
        self._clauses = tuple(clauses)
        self._globs = [(compile_glob(clause.match), clause.options) for clause in self._clauses]
        self._program = program
        self._cached = lru_cache(LANES_CACHE_SIZE)(self._compute)
        rules = [clause.options for clause in self._clauses]
        #: The highest overfeed of any rule.
        self.overfeed_max = max((one.overfeed for one in rules), default=0)
        #: The commands in use. Agents of other commands can exit.
        self.commands = tuple(
            dict.fromkeys(split_command(one.command) for one in rules if one.command)
        )
        if program is not None:
            self.commands = (program.argv,)
        #: Some agents serve one lane or one service only.
        self.has_places = any(map(has_places, self.commands))

    def updated(self, clauses: Sequence[Rule]) -> AgentRules | None:
        """Return new rules, or None if nothing has changed."""
        return None if tuple(clauses) == self._clauses else AgentRules(clauses, self._program)

    def agents_for(self, lane: LaneKey) -> AgentSettings | None:
        """Return the settings of the agents that serve a lane; None: no agent does."""
        return self._cached(lane)[1]

    def rules_for(self, lane: LaneKey) -> LaneOptions:
        return self._cached(lane)[0]

    def _compute(self, lane: LaneKey) -> tuple[LaneOptions, AgentSettings | None]:
        name = b"/".join(lane)
        rules = next((rules for fits, rules in self._globs if fits(name)), LaneOptions())
        return rules, self._settings(rules, lane)

    def _settings(self, rules: LaneOptions, lane: LaneKey) -> AgentSettings | None:
        """Return the settings of a rule's agents for a lane; None: it has none."""
        if self._program is None and not rules.command:
            return None
        settings = self._program or AgentSettings(split_command(rules.command), lines="")
        return structs.replace(
            settings.for_lane(lane),
            overfeed=rules.overfeed or settings.overfeed,
            idle_ns_max=rules.idle_ns_max or settings.idle_ns_max,
            hunger_ns_max=rules.hunger_ns_max or settings.hunger_ns_max,
            interval_ns=rules.interval_ns,
            lines=settings.lines or rules.lines.decode() or HUNGRY_LINES,
        )


def has_places(words: Sequence[str]) -> bool:
    """Return whether a command differs from lane to lane, or from service to service."""
    return any(place not in _LITERALS for word in words for place in places(word))


def fill_command(words: tuple[str, ...], service: str, lane: str) -> tuple[str, ...]:
    """Return a command for one lane. Other braces stay as they are."""
    if not any(map(places, words)):
        return words
    values = {**_LITERALS, LANE: lane, SERVICE: service}
    return tuple(PLACE.sub(lambda found: values[found[0]], word) for word in words)


def split_command(command: bytes) -> tuple[str, ...]:
    """Split a command into words. A malformed one stays one word, and fails to start."""
    text = command.decode(errors="surrogateescape")
    try:
        return tuple(shlex.split(text)) or (text,)
    except ValueError:
        return (text,)


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
        """`others`: the running tasks that no agent has."""
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

        The rule's limit counts workers, including this worker. But the broker assigns no
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

        Agents that were started first go first, so that the newest become idle and can exit.
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
