"""The runner of a native worker: feeds tasks to agents, and runs other tasks itself.

The broker's rules name the command for each lane. An agent starts when a task has no hungry agent,
and exits after it was idle for long. An agent that fails is restarted after a growing delay.
Meanwhile its tasks return to the broker, because another host may do better.

`agents.rules` has the rules for a lane, `agents.process` is an agent.
"""

from __future__ import annotations

import logging
import os
import select
import shlex
from collections import Counter, deque
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Final

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS, TASKS_MAX
from taskyard.errors import UserError
from taskyard.settings.values import command_problem
from taskyard.wire.hungry import SESSIONS
from taskyard.worker import runner
from taskyard.worker.agents.process import Agent, start_agent
from taskyard.worker.agents.rules import (
    LANES_CACHE_SIZE,
    AgentRules,
    AgentSettings,
    fill_command,
    has_places,
    lane_of,
)
from taskyard.worker.jobs import (
    AGENT_RESTART_NS,
    AGENT_RESTART_NS_MAX,
    KILL_GRACE_NS,
    Job,
    JobResult,
    cut_reason,
)
from taskyard.worker.processes import find_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.rules import Rule
    from taskyard.net.protocols import Clock
    from taskyard.worker.agents.rules import LaneKey
    from taskyard.worker.output import OutputSpool
    from taskyard.worker.runner import Work

logger = logging.getLogger("taskyard.worker")

#: Variables that agents inherit from the worker.
PASSED_VARIABLES: Final = ("PATH", "HOME", "LANG", "TZ", "USER", "TMPDIR")
PASSED_PREFIX: Final = "LC_"

#: Variables of the worker, which may hold keys and endpoints. Agents never get them.
OWN_PREFIX: Final = "TASKYARD_"


def clean_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the worker's variables that agents inherit."""
    return {
        name: value
        for name, value in own.items()
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIX)
    }


def read_variables(given: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Parse `--env` options, `NAME=VALUE` or `NAME` for the worker's own value.

    Raises `UserError`.
    """
    return dict(_read_variable(one, own) for one in given)


def _read_variable(given: str, own: Mapping[str, str]) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not name or "\0" in given:
        raise UserError(f"--env {given!r}: must be NAME=VALUE or NAME")
    if name.startswith(OWN_PREFIX):
        raise UserError(
            f"--env {name}: {OWN_PREFIX}* variables are the worker's, agents never get them (use "
            "another name)"
        )
    if sign:
        return name, value
    if name not in own:
        raise UserError(f"--env {name}: not set in the worker's environment (use {name}=VALUE)")
    return name, own[name]


class StartBackoff:
    """The delay before the next start of one command for one lane, after failed starts."""

    def __init__(self, command: tuple[str, ...]) -> None:
        #: The command as in the rules.
        self.command = command
        #: The earliest time of the next start.
        self.next_ns = 0
        #: Why the last start failed. b"" as soon as an agent is hungry.
        self.agent_error = b""
        #: Failed starts in a row.
        self._failures = 0

    def failed(self, reason: bytes, now_ns: int, *, is_error: bool) -> None:
        """Count a failed agent, and double the delay. `is_error`: no task is to blame."""
        if now_ns - self.next_ns > AGENT_RESTART_NS_MAX:
            self._failures = 0
        delay_ns = min(AGENT_RESTART_NS << self._failures, AGENT_RESTART_NS_MAX)
        if delay_ns < AGENT_RESTART_NS_MAX:
            self._failures += 1
        self.next_ns = now_ns + delay_ns
        if is_error:
            self.agent_error = cut_reason(reason)
        text = reason.decode(errors="replace")
        logger.warning("%s (next start in %g s)", text, delay_ns / SECOND_NS)


class StartResult(Enum):
    """The result of trying to start a task."""

    STARTED = auto()
    DEFERRED = auto()  #: until an agent or its lane is free
    NO_SLOTS = auto()  #: until slots are free, and so are all tasks behind it


def read_command(command: str) -> tuple[str, ...]:
    """Split `--agent` into words, and check that the program exists. Raises `UserError`."""
    try:
        argv = tuple(shlex.split(command))
    except ValueError as error:
        raise UserError(f"--agent {command!r}: {error}") from None
    if not argv:
        raise UserError("--agent: empty command")
    if problem := command_problem(argv):
        raise UserError(f"--agent {command!r}: {problem}")
    if has_places(argv[:1]):
        return argv  # the program depends on the service
    try:
        path = find_program(fill_command(argv[:1], "", "")[0], os.environ)
    except FileNotFoundError:
        path = ""
    if not os.access(path, os.X_OK):
        raise UserError(f"--agent {command!r}: program {argv[0]!r} not found or not executable")
    return argv


class LaneAssignment:
    """The lanes that agents serve in one turn, and the tasks that wait. Updated as tasks start.

    An agent serves one lane at a time, and keeps it while it has tasks. With overfeed it gets more
    tasks of the lane before it reports. Then it takes another lane, and prefers the lane that it
    served last. A lane's rule limits how many agents serve it, by default to one. Tasks without a
    lane go to any agent that holds nothing.
    """

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


class AgentRunner(runner.ProcessRunner):
    """Runs up to `slots` tasks at once. An agent with several tasks of a lane counts once.

    `program` takes all tasks. Without it the rules name a command for each lane, and tasks without
    one run as in `ProcessRunner`.
    """

    def __init__(  # noqa: PLR0913  # the last arguments are named
        self,
        slots: int,
        clock: Clock,
        program: AgentSettings | None = None,
        *,
        allow: Sequence[str] = (),
        allow_pickle: bool = False,
        env: Mapping[str, str] | None = None,
        gpus: Sequence[str] = (),
        spool: OutputSpool | None = None,
    ) -> None:
        super().__init__(slots, allow, clock, allow_pickle=allow_pickle, gpus=gpus, spool=spool)
        environment = clean_environment(os.environ) | dict(env or {})
        self._agent_context = self._context._replace(env=environment)
        self._rules = AgentRules(program=program)
        #: Called with the output of a running task. Set before the first task.
        self.on_output: Callable[[Job, Content], None] = _ignore_output
        #: Start delays by command, with its placeholders filled in.
        self._backoffs: dict[tuple[str, ...], StartBackoff] = {}
        #: By command, the tasks that need one more agent.
        self._agents_wanted: dict[tuple[str, ...], list[tuple[Job, AgentSettings]]] = {}
        #: Waiting tasks must be examined though no descriptor is ready.
        self._is_dirty = False
        #: An agent was started. Until then none has to be looked for.
        self._has_had_agents = False
        #: A task with a lane was queued. Until then the waiting tasks need no search for lanes.
        self._has_had_lanes = False
        #: When a lane becomes free for another agent.
        self._recheck_ns: int | None = None
        self._is_leaving = False
        #: Malformed lines of agents that have ended.
        self._malformed_of_ended = 0

    # Rules from the broker, and facts for it.

    def set_rules(self, clauses: Sequence[Rule]) -> None:
        """Apply new rules. Agents finish the tasks that they hold."""
        rules = self._rules.updated(clauses)
        if rules is None:
            return
        self._rules = rules
        self._is_dirty = True
        waiting, self._waiting = self._waiting, deque()
        for job, _ in waiting:
            self.start(job)
        for agent in self._agents():
            self._update_agent(agent)

    def _update_agent(self, agent: Agent) -> None:
        if agent.lane is not None:
            settings = self._rules.agents_for(agent.lane)
            if settings is not None and settings.pool == agent.pool:
                agent.update_settings(settings)

    @property
    def overfeed_max(self) -> int:
        """Return the highest number of tasks that a lane may have here beyond the current task."""
        return self._rules.overfeed_max

    def overfeed(self, lane: LaneKey) -> int:
        """Return how many tasks a lane may have here beyond the current task."""
        return self._rules.rules_for(lane).overfeed if lane[1] else 0

    @property
    def agent_error(self) -> bytes:
        """Return why agents can't be started; b"" if no start has failed."""
        if not self._backoffs:
            return b""
        return next((one.agent_error for one in self._backoffs.values() if one.agent_error), b"")

    @property
    def malformed(self) -> int:
        """Return the number of malformed lines of all agents so far."""
        return self._malformed_of_ended + sum(agent.malformed for agent in self._agents())

    # Methods of the runner.

    def start(self, job: Job) -> None:
        self._is_dirty = True
        self._has_had_lanes = self._has_had_lanes or bool(job.lane)
        super().start(job)

    def _work_of(self, job: Job) -> Work | None:
        settings = self._rules.agents_for(lane_of(job))
        if settings is None:
            return super()._work_of(job)
        if problem := SESSIONS[settings.lines].problem_of(job.payload):
            self._refuse(job, problem)
            return None
        return settings

    def running(self) -> list[Job]:
        held = [job for agent in self._agents() for job in agent.jobs()]
        return held + super().running()

    def wake_at_ns(self) -> int | None:
        if not self._waiting:
            return super().wake_at_ns()
        moments = [super().wake_at_ns(), self._recheck_ns]
        moments += [backoff.next_ns for backoff in self._backoffs_due()]
        return min((one for one in moments if one is not None), default=None)

    def stop(self, name: bytes, attempt: int) -> None:
        super().stop(name, attempt)
        for agent in self._agents():
            agent.drop((name, attempt))

    def unstarted(self) -> list[Job]:
        """Return the jobs that have not started, and have idle agents exit: a shutdown begins."""
        self._is_leaving = True
        self._stop_agents(self._agents())
        return super().unstarted()

    def close(self) -> None:
        """Wait for idle agents to finish, and kill busy agents."""
        if not self._is_closed:
            self._stop_agents(self._agents())
            self._wait_for_agents()
        super().close()

    def _agents(self) -> list[Agent]:
        return [process for process in self._processes if isinstance(process, Agent)]

    def _agents_of(self, pool: tuple[str, ...]) -> list[Agent]:
        return [agent for agent in self._agents() if agent.pool == pool]

    # Start of tasks.

    def _has_room(self) -> bool:
        return self._is_dirty

    def _start_waiting(self) -> None:
        if self._waiting or self._is_dirty or self._has_had_agents:
            self._start_eligible()
            self._start_agents()
            self._release_idle()

    def _start_eligible(self) -> None:
        """Start waiting tasks in their order.

        A task that waits for an agent or its lane can be overtaken. A task that waits for slots
        can't.
        """
        self._is_dirty = False
        self._recheck_ns = None
        self._agents_wanted.clear()
        if not self._waiting:
            return
        if not self._rules.commands and not self._has_lanes_waiting():
            super()._start_waiting()  # no task needs an agent or its lane
            return
        lanes = self._lane_assignment()
        kept: deque[tuple[Job, Work]] = deque()
        while self._waiting and not self._cannot_start_more(lanes):
            job, work = self._waiting.popleft()
            result = self._try_start(job, work, lanes)
            if result is not StartResult.STARTED:
                lanes.block_lane(job)
                kept.append((job, work))
            if result is StartResult.NO_SLOTS:
                break
        self._waiting.extendleft(reversed(kept))

    def _has_lanes_waiting(self) -> bool:
        return self._has_had_lanes and any(job.lane for job, _ in self._waiting)

    def _cannot_start_more(self, lanes: LaneAssignment) -> bool:
        """Return whether all remaining tasks would have to wait. There may be hundreds."""
        if lanes.has_hungry() or len(self._agents_wanted) < len(self._rules.commands):
            return False
        if self._rules.has_places:
            return False  # another lane may have an agent of its own
        if any(len(wanted) < self.slots_total for wanted in self._agents_wanted.values()):
            return False
        return all(isinstance(work, AgentSettings) for _, work in self._waiting)

    def _lane_assignment(self) -> LaneAssignment:
        agents, now_ns = self._agents(), self._clock.monotonic_ns()
        times = [agent.serves_until_ns() or 0 for agent in agents]
        self._recheck_ns = min((one for one in times if one > now_ns), default=None)
        alone = [one.job for one in self._processes if one.job is not None]
        return LaneAssignment(agents, alone, tuple(self._waiting), self._rules, now_ns)

    def _try_start(self, job: Job, work: Work, lanes: LaneAssignment) -> StartResult:
        if lanes.is_blocked(job):
            return StartResult.DEFERRED
        if isinstance(work, AgentSettings):
            return self._feed(job, work, lanes)
        if job.lane and not lanes.vacancies(lane_of(job)):
            return StartResult.DEFERRED
        if not self._has_slots(job):
            return StartResult.NO_SLOTS
        if not self._has_gpus(job):
            return StartResult.DEFERRED
        lanes.lane_started(job)
        self._start_work(job, work)
        return StartResult.STARTED

    def _feed(self, job: Job, settings: AgentSettings, lanes: LaneAssignment) -> StartResult:
        agent = lanes.agent_for(job, settings)
        if agent is None:
            wanted = self._agents_wanted.setdefault(settings.pool, [])
            if len(wanted) < self.slots_total:
                wanted += [(job, settings)] * lanes.vacancies(lane_of(job))
            return StartResult.DEFERRED
        if not self._has_slots_for(agent, job):
            return StartResult.NO_SLOTS
        if agent.is_empty():
            lanes.lane_started(job)
        agent.feed([job, *(self._take_equal(job) if agent.shares_lines else ())], settings)
        lanes.note_fed(agent)
        return StartResult.STARTED

    def _take_equal(self, job: Job) -> list[Job]:
        """Return the waiting tasks that share a line with a task. They wait no longer."""

        def shares(other: Job) -> bool:
            is_equal = other.payload == job.payload and lane_of(other) == lane_of(job)
            return is_equal and other.slots <= job.slots

        equal = [other for other, _ in self._waiting if shares(other)]
        if equal:
            self._waiting = deque(one for one in self._waiting if not shares(one[0]))
        return equal

    def _has_slots_for(self, agent: Agent, job: Job) -> bool:
        """Return whether an agent may take a job. It uses the slots of its widest task.

        A task wider than the worker runs alone.
        """
        if self._waiting_calls.resuming:
            return False
        if self._share is not None:
            growth = max(0, job.slots - agent.slots)
            return not growth or self._share.may_start(growth, job.resources)
        others = self.slots_used - agent.slots
        return others == 0 or others + max(agent.slots, job.slots) <= self.slots_total

    def _report(self, done: JobResult) -> None:
        if done.outcome is Outcome.DEFER_ALL and done.job.lane:
            self._return_lane(done.job)
        super()._report(done)

    def _return_lane(self, deferred: Job) -> None:
        """Return the waiting tasks of a deferred lane. They go first, so the broker has them."""
        lane = lane_of(deferred)
        rest = [job for job, _ in self._waiting if lane_of(job) == lane]
        self._waiting = deque(one for one in self._waiting if lane_of(one[0]) != lane)
        for job in rest:
            reason = b"lane deferred"
            super()._report(JobResult(job, Outcome.REFUSED, reason, healthy=True))

    # Start and end of agents.

    def _backoffs_due(self) -> Iterable[StartBackoff]:
        """Return the delays of the commands that need one more agent and may have it."""
        wanted = [jobs[0][1] for jobs in self._agents_wanted.values() if jobs]
        return [
            self._backoff_of(settings)
            for settings in wanted
            if self._needs_agent(settings.pool)
            and (self._has_room_for_agent(settings) or self._replaceable(settings))
        ]

    def _backoff_of(self, agent: Agent | AgentSettings) -> StartBackoff:
        backoff = self._backoffs.get(agent.pool)
        if backoff is None:
            if len(self._backoffs) >= LANES_CACHE_SIZE:  # lanes come and go
                self._backoffs.clear()
            backoff = self._backoffs[agent.pool] = StartBackoff(agent.command)
        return backoff

    def _start_agents(self) -> None:
        for pool, wanted in [*self._agents_wanted.items()]:
            if not wanted:
                continue
            settings = wanted[0][1]
            backoff = self._backoff_of(settings)
            while self._needs_agent(pool) and backoff.next_ns <= self._clock.monotonic_ns():
                if not self._make_room(settings):
                    break
                self._start_agent(settings, backoff)

    def _needs_agent(self, pool: tuple[str, ...]) -> bool:
        """Return whether a task has slots but no agent that is about to ask for it."""
        wanted = self._agents_wanted.get(pool)
        if not wanted:
            return False
        agents = self._agents_of(pool)
        if any(agent.is_ending() and agent.has_failed() for agent in agents):
            return False  # wait for its end: the next one may fail too
        now_ns = self._clock.monotonic_ns()
        staying = [agent for agent in agents if not agent.is_leaving()]
        return (
            len(wanted) > sum(agent.is_about_to_ask(now_ns) for agent in staying)
            and len(staying) < self.slots_total
            and self._has_slots(wanted[0][0])
        )

    def _has_room_for_agent(self, settings: AgentSettings) -> bool:
        """Return whether a command may have one more agent, over all its lanes."""
        agents = [agent for agent in self._agents() if agent.command == settings.command]
        staying = sum(not agent.is_leaving() for agent in agents)
        # Some agents may ignore `finish`.
        return staying < self.slots_total and len(agents) < 2 * self.slots_total

    def _make_room(self, settings: AgentSettings) -> bool:
        """Return whether a command may have one more agent. If it has as many as there are slots,
        end an idle agent: with the lane in its command it can't take another lane."""
        if not self._has_room_for_agent(settings):
            for agent in self._replaceable(settings)[:1]:
                agent.finish()
        return self._has_room_for_agent(settings)

    def _replaceable(self, settings: AgentSettings) -> list[Agent]:
        """Return the idle agents of a command that serve other lanes, the longest idle first."""
        waiting = [work.pool for _, work in self._waiting if isinstance(work, AgentSettings)]
        idle = [
            agent
            for agent in self._agents()
            if agent.command == settings.command and agent.is_empty() and not agent.is_leaving()
        ]
        others = [agent for agent in idle if agent.pool not in waiting]
        return sorted(others, key=lambda agent: agent.last_received_ns)

    def _start_agent(self, settings: AgentSettings, backoff: StartBackoff) -> None:
        self._has_had_agents = True
        try:
            agent = start_agent(self._agent_context, settings, self.on_output)
            self._processes.append(agent)
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or error
            reason = f"can't start agent {settings.argv[0]}: {cause}".encode(errors="replace")
            backoff.failed(reason, self._clock.monotonic_ns(), is_error=True)
            self._refuse_waiting(settings.pool, reason)

    def _check_processes(self) -> None:
        agents = self._agents() if self._has_had_agents else ()
        for agent in agents:
            agent.check_pipes()
        super()._check_processes()
        for agent in agents:
            if agent.has_ended:
                self._on_agent_exit(agent)
            elif agent.is_ready():
                self._clear_errors(agent)

    def _clear_errors(self, agent: Agent) -> None:
        """Forget failed starts of an agent's command, also for other lanes."""
        for backoff in self._backoffs.values():
            if backoff.agent_error and backoff.command == agent.command:
                backoff.agent_error = b""

    def _on_agent_exit(self, agent: Agent) -> None:
        self._malformed_of_ended += agent.malformed
        self._on_returned(agent.unstarted_jobs)
        if agent.has_failed():
            backoff = self._backoff_of(agent)
            now_ns = self._clock.monotonic_ns()
            backoff.failed(agent.exit_reason, now_ns, is_error=not agent.has_eaten)
            if not agent.has_eaten:
                self._refuse_waiting(agent.pool, agent.exit_reason)

    def _refuse_waiting(self, pool: tuple[str, ...], reason: bytes) -> None:
        """Return the tasks that wait for a command, unless another of its agents runs."""
        if not all(agent.is_leaving() for agent in self._agents_of(pool)):
            return
        waiting, self._waiting = self._waiting, deque()
        for job, work in waiting:
            if isinstance(work, AgentSettings) and work.pool == pool:
                self._report(JobResult(job, Outcome.REFUSED, cut_reason(reason)))
            else:
                self._waiting.append((job, work))
        self._agents_wanted.pop(pool, None)

    def _release_idle(self) -> None:
        """Notify agents that no more tasks wait, and end agents of commands without use."""
        agents = self._agents()
        if not agents:
            return
        for agent in agents:
            if agent.is_stuffed() and not self._has_waiting(agent.lane):
                agent.run_out()
        commands = () if self._is_leaving else self._rules.commands
        self._stop_agents([agent for agent in agents if agent.command not in commands])

    def _has_waiting(self, lane: LaneKey | None) -> bool:
        return any(lane_of(job) == lane for job, _ in self._waiting)

    def _stop_agents(self, agents: Sequence[Agent]) -> None:
        for agent in agents:
            if agent.is_empty():
                agent.finish()

    def _wait_for_agents(self) -> None:
        """Wait until idle agents have ended. Each exit extends the grace period."""
        leaving = [agent.process.pidfd for agent in self._agents() if agent.is_empty()]
        pidfds = {pidfd for pidfd in leaving if pidfd is not None}
        while pidfds:
            ended, _, _ = select.select(pidfds, [], [], KILL_GRACE_NS / SECOND_NS)
            if not ended:
                return
            pidfds -= set(ended)


def _ignore_output(_job: Job, _printed: Content) -> None:
    """Ignore output until the worker's loop is set up."""
