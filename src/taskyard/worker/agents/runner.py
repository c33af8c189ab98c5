"""The host: feeds tasks by the line to child programs, its agents, and does all others itself.

It has the runner's face, so that the worker's loop is the same, and follows the broker's rules:
those say which tasks are fed to which program. Agents are started when there is a task that no
hungry one can take, are kept for the next task, and are let go when there is none for long. A
program that comes to nothing is started less and less often; what waits for it is given back, for
another host may do better, and the broker is told why.

Who gets a task is decided in `agents_lanes`, one agent is in `agents_process`.
"""

from __future__ import annotations

import logging
import os
import select
import shlex
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.worker import runner
from taskyard.worker.agents.lanes import LaneAssignment, lane_of
from taskyard.worker.agents.process import Agent, AgentContext, start_agent
from taskyard.worker.agents.rules import AgentRules, AgentSettings
from taskyard.worker.jobs import Job, JobResult, cut_reason
from taskyard.worker.limits import AGENT_RESTART_NS, AGENT_RESTART_NS_MAX, KILL_GRACE_NS
from taskyard.worker.processes import find_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from taskyard.core.model import Result
    from taskyard.core.rules import Rule
    from taskyard.net.protocols import Clock
    from taskyard.worker.agents.rules import LaneKey
    from taskyard.worker.runner import Work

#: What every program needs.
PASSED_VARIABLES: Final = ("PATH", "HOME", "LANG", "TZ", "USER", "TMPDIR")
PASSED_PREFIX: Final = "LC_"

#: What is the worker's own.
OWN_PREFIX: Final = "TASKYARD_"


def clean_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Of the worker's variables those that every program needs."""
    return {
        name: value
        for name, value in own.items()
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIX)
    }


def read_variables(given: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Those of `NAME=VALUE`, and those of `NAME`, which the worker has. Raises UserError."""
    return dict(_read_variable(one, own) for one in given)


def _read_variable(given: str, own: Mapping[str, str]) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not name or "\0" in given:
        raise UserError(f"--env {given!r} is no variable: give NAME=VALUE, or NAME alone")
    if name.startswith(OWN_PREFIX):
        raise UserError(
            f"--env {name}: variables that begin with {OWN_PREFIX} are the worker's own, and not "
            "for agents; give it another name"
        )
    if sign:
        return name, value
    if name not in own:
        raise UserError(f"--env {name}: there is no such variable here; give {name}=VALUE")
    return name, own[name]


logger = logging.getLogger("taskyard.worker")


class StartBackoff:
    """Of one command."""

    def __init__(self) -> None:
        #: No agent is started before.
        self.next_ns = 0
        #: Why none can be started; b"" as soon as one asks for a task.
        self.agent_error = b""
        #: The agents of late that came to nothing.
        self._failures = 0

    def failed(self, reason: bytes, now_ns: int, *, is_error: bool) -> None:
        """An agent came to nothing: wait before the next one, longer each time. It is trouble if
        not even a task was to blame."""
        if now_ns - self.next_ns > AGENT_RESTART_NS_MAX:
            self._failures = 0
        delay_ns = min(AGENT_RESTART_NS << self._failures, AGENT_RESTART_NS_MAX)
        if delay_ns < AGENT_RESTART_NS_MAX:
            self._failures += 1
        self.next_ns = now_ns + delay_ns
        if is_error:
            self.agent_error = cut_reason(reason)
        text = reason.decode(errors="replace")
        logger.warning("%s; the next one is started in %g s", text, delay_ns / SECOND_NS)


__all__ = ["AgentRunner", "AgentSettings", "read_command"]

logger = logging.getLogger("taskyard.worker")


class StartResult(Enum):
    """What came of an attempt to begin with a task."""

    STARTED = auto()
    DEFERRED = auto()  #: for an agent, or for its lane
    NO_SLOTS = auto()  #: it waits for slots, and nobody goes before it


def read_command(command: str) -> tuple[str, ...]:
    """The words of a command, whose program is there. Raises UserError."""
    try:
        argv = tuple(shlex.split(command))
    except ValueError as error:
        raise UserError(f"--agent {command!r} is no command: {error}; mend its quotes") from None
    if not argv:
        raise UserError("--agent is empty: give a program, and its arguments after it")
    try:
        path = find_program(argv[0], os.environ)
    except FileNotFoundError:
        path = ""
    if not os.access(path, os.X_OK):
        raise UserError(
            f"--agent {command!r}: there is no program {argv[0]!r} that can be run here; give its "
            "path, and see that it is executable"
        )
    return argv


class AgentRunner(runner.ProcessRunner):
    """Up to `slots` tasks at once, or lanes where tasks are fed to agents. `program` is fed all of
    them; without it the rules say which program, and what has none is done by the runner itself."""

    def __init__(  # noqa: PLR0913  # the last ones are named
        self,
        slots: int,
        clock: Clock,
        program: AgentSettings | None = None,
        *,
        allow: Sequence[str] = (),
        allow_pickle: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(slots, allow, clock, allow_pickle=allow_pickle)
        environment = clean_environment(os.environ) | dict(env or {})
        runner_context = self._context._replace(env=environment)
        self._agent_context = AgentContext(runner_context, clock.wall_ns, self._forward_output)
        self._rules = AgentRules(program=program)
        #: Takes what a task has printed so far.
        self.on_output: Callable[[Job, Result], None] = _ignore_output
        #: How starting the programs went, by their command.
        self._backoffs: dict[tuple[str, ...], StartBackoff] = {}
        #: By command, the tasks for which there should be one more agent.
        self._agents_wanted: dict[tuple[str, ...], list[tuple[Job, AgentSettings]]] = {}
        #: There is something to look at that no descriptor tells.
        self._is_dirty = False
        #: When a lane may be another agent's than the one's that served it last.
        self._recheck_ns: int | None = None
        self._is_leaving = False
        #: Malformed lines of agents that have ended.
        self._malformed_of_ended = 0

    def _forward_output(self, job: Job, printed: Result) -> None:
        self.on_output(job, printed)

    # What the broker says, and is told.

    def set_rules(self, clauses: Sequence[Rule]) -> None:
        """Do as the broker's rules say from now on. What agents hold, they finish."""
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
            if settings is not None and settings.argv == agent.argv:
                agent.update_settings(settings)

    @property
    def overfeed_max(self) -> int:
        """Tasks that a lane may have here beyond the one in hand."""
        return self._rules.overfeed_max

    def overfeed(self, lane: LaneKey) -> int:
        """The same of one lane."""
        return self._rules.rules_for(lane).overfeed if lane[1] else 0

    @property
    def agent_error(self) -> bytes:
        """Why agents can't be started; b"": they can, as far as is known."""
        return next((one.agent_error for one in self._backoffs.values() if one.agent_error), b"")

    @property
    def malformed(self) -> int:
        """Lines of all agents so far that are neither report nor comment."""
        return self._malformed_of_ended + sum(agent.malformed for agent in self._agents())

    # The runner's face.

    def start(self, job: Job) -> None:
        self._is_dirty = True
        super().start(job)

    def _work_of(self, job: Job) -> Work | None:
        return self._rules.agents_for(lane_of(job)) or super()._work_of(job)

    def running(self) -> list[Job]:
        held = [job for agent in self._agents() for job in agent.jobs()]
        return held + super().running()

    def wake_at_ns(self) -> int | None:
        moments = [super().wake_at_ns()]
        if self._waiting:
            moments += [backoff.next_ns for backoff in self._backoffs_due()]
            moments.append(self._recheck_ns)
        return min((one for one in moments if one is not None), default=None)

    def stop(self, name: bytes, attempt: int) -> None:
        super().stop(name, attempt)
        for agent in self._agents():
            agent.drop((name, attempt))

    def unstarted(self) -> list[Job]:
        """The worker leaves: there will be no other task."""
        self._is_leaving = True
        self._stop_agents(self._agents())
        return super().unstarted()

    def close(self) -> None:
        """Those that hold nothing may finish; the others are killed."""
        if not self._is_closed:
            self._stop_agents(self._agents())
            self._wait_for_agents()
        super().close()

    def _agents(self) -> list[Agent]:
        return [process for process in self._processes if isinstance(process, Agent)]

    def _agents_of(self, argv: tuple[str, ...]) -> list[Agent]:
        return [agent for agent in self._agents() if agent.argv == argv]

    # Who gets a task.

    def _has_room(self) -> bool:
        return self._is_dirty

    def _start_waiting(self) -> None:
        self._start_eligible()
        self._start_agents()
        self._release_idle()

    def _start_eligible(self) -> None:
        """In the order in which it came. Who waits for an agent or for its lane is overtaken, who
        waits for slots is not."""
        self._is_dirty = False
        self._recheck_ns = None
        self._agents_wanted.clear()
        if not self._waiting:
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

    def _cannot_start_more(self, lanes: LaneAssignment) -> bool:
        """Nobody is hungry, and it is known what else is needed: the rest would all have to wait.
        There may be hundreds, in each turn."""
        if lanes.has_hungry() or len(self._agents_wanted) < len(self._rules.commands):
            return False
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
        lanes.lane_started(job)
        self._start_work(job, work)
        return StartResult.STARTED

    def _feed(self, job: Job, settings: AgentSettings, lanes: LaneAssignment) -> StartResult:
        agent = lanes.agent_for(job, settings)
        if agent is None:
            wanted = self._agents_wanted.setdefault(settings.argv, [])
            if len(wanted) < self.slots_total:
                wanted += [(job, settings)] * lanes.vacancies(lane_of(job))
            return StartResult.DEFERRED
        if not self._has_slots_for(agent, job):
            return StartResult.NO_SLOTS
        if agent.is_empty():
            lanes.lane_started(job)
        agent.feed(job, settings)
        lanes.note_fed(agent)
        return StartResult.STARTED

    def _has_slots_for(self, agent: Agent, job: Job) -> bool:
        """An agent takes up as much as the widest of its tasks. A task that is wider than the
        worker is done alone."""
        others = self.slots_used - agent.slots
        return others == 0 or others + max(agent.slots, job.slots) <= self.slots_total

    def _report(self, done: JobResult) -> None:
        if done.outcome is Outcome.DEFER_ALL and done.job.lane:
            self._return_lane(done.job)
        super()._report(done)

    def _return_lane(self, deferred: Job) -> None:
        """The rest of its lane is put off with it. Told before, so that the broker has it then."""
        lane = lane_of(deferred)
        rest = [job for job, _ in self._waiting if lane_of(job) == lane]
        self._waiting = deque(one for one in self._waiting if lane_of(one[0]) != lane)
        for job in rest:
            reason = b"its lane is put off"
            super()._report(JobResult(job, Outcome.REFUSED, reason, healthy=True))

    # When there is one more agent, and one fewer.

    def _backoffs_due(self) -> Iterable[StartBackoff]:
        """Commands of which there should be one more agent."""
        return [self._backoff_of(argv) for argv in self._agents_wanted if self._needs_agent(argv)]

    def _backoff_of(self, argv: tuple[str, ...]) -> StartBackoff:
        return self._backoffs.setdefault(argv, StartBackoff())

    def _start_agents(self) -> None:
        for argv, wanted in [*self._agents_wanted.items()]:
            backoff = self._backoff_of(argv)
            while self._needs_agent(argv) and backoff.next_ns <= self._clock.monotonic_ns():
                self._start_agent(wanted[0][1], backoff)

    def _needs_agent(self, argv: tuple[str, ...]) -> bool:
        """There is a task for which there is room, and more tasks than agents about to ask."""
        wanted = self._agents_wanted.get(argv)
        if not wanted:
            return False
        agents = self._agents_of(argv)
        if any(agent.is_ending() and agent.has_failed() for agent in agents):
            return False  # first see it dead: the next one would fare likewise
        now_ns = self._clock.monotonic_ns()
        staying = [agent for agent in agents if not agent.is_leaving()]
        return (
            len(wanted) > sum(agent.is_about_to_ask(now_ns) for agent in staying)
            and len(staying) < self.slots_total
            and len(agents) < 2 * self.slots_total  # those that leave, and will not
            and self._has_slots(wanted[0][0])
        )

    def _start_agent(self, settings: AgentSettings, backoff: StartBackoff) -> None:
        try:
            self._processes.append(start_agent(self._agent_context, settings))
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or error
            reason = f"can't start the agent {settings.argv[0]}: {what}".encode(errors="replace")
            backoff.failed(reason, self._clock.monotonic_ns(), is_error=True)
            self._refuse_waiting(settings.argv, reason)

    def _check_processes(self) -> None:
        agents = self._agents()
        for agent in agents:
            agent.check_pipes()
        super()._check_processes()
        for agent in agents:
            if agent.has_ended:
                self._on_agent_exit(agent)
            elif agent.is_ready():
                self._backoff_of(agent.argv).agent_error = b""

    def _on_agent_exit(self, agent: Agent) -> None:
        self._malformed_of_ended += agent.malformed
        for job in reversed(agent.unstarted_jobs):
            work = self._work_of(job)
            if work is not None:
                self._waiting.appendleft((job, work))
        if agent.has_failed():
            backoff = self._backoff_of(agent.argv)
            now_ns = self._clock.monotonic_ns()
            backoff.failed(agent.exit_reason, now_ns, is_error=not agent.has_eaten)
            if not agent.has_eaten:
                self._refuse_waiting(agent.argv, agent.exit_reason)

    def _refuse_waiting(self, argv: tuple[str, ...], reason: bytes) -> None:
        """Give back what waits for a program, unless there is somebody who may do it."""
        if not all(agent.is_leaving() for agent in self._agents_of(argv)):
            return
        waiting, self._waiting = self._waiting, deque()
        for job, work in waiting:
            if isinstance(work, AgentSettings) and work.argv == argv:
                self._report(JobResult(job, Outcome.REFUSED, cut_reason(reason)))
            else:
                self._waiting.append((job, work))
        self._agents_wanted.pop(argv, None)

    def _release_idle(self) -> None:
        """Tell those that there is nothing more for them now, and dismiss whom nobody needs."""
        agents = self._agents()
        if not agents:
            return
        for agent in agents:
            if agent.is_stuffed() and not self._has_waiting(agent.lane):
                agent.run_out()
        commands = () if self._is_leaving else self._rules.commands
        self._stop_agents([agent for agent in agents if agent.argv not in commands])

    def _has_waiting(self, lane: LaneKey | None) -> bool:
        return any(lane_of(job) == lane for job, _ in self._waiting)

    def _stop_agents(self, agents: Sequence[Agent]) -> None:
        for agent in agents:
            if agent.is_empty():
                agent.finish()

    def _wait_for_agents(self) -> None:
        """Each time somebody has ended, the others have the grace period again."""
        leaving = [agent.process.pidfd for agent in self._agents() if agent.is_empty()]
        pidfds = {pidfd for pidfd in leaving if pidfd is not None}
        while pidfds:
            ended, _, _ = select.select(pidfds, [], [], KILL_GRACE_NS / SECOND_NS)
            if not ended:
                return
            pidfds -= set(ended)


def _ignore_output(_job: Job, _printed: Result) -> None:
    pass
