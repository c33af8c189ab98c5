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
from enum import Enum, auto
from typing import TYPE_CHECKING

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.worker import running
from taskyard.worker.agents_lanes import Lanes, lane_of
from taskyard.worker.agents_process import Agent, World, start_agent
from taskyard.worker.agents_rules import AgentSettings, Rulebook
from taskyard.worker.agents_starts import Starts
from taskyard.worker.environment import clean_environment
from taskyard.worker.jobs import Done, Job
from taskyard.worker.limits import KILL_GRACE_NS
from taskyard.worker.output import cut_reason
from taskyard.worker.processes import find_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from taskyard.core.events import Rule
    from taskyard.core.tasks import Result
    from taskyard.worker.agents_rules import Lane
    from taskyard.worker.running import Work

__all__ = ["AgentRunner", "AgentSettings", "read_command"]

logger = logging.getLogger("taskyard.worker")


class Verdict(Enum):
    """What came of an attempt to begin with a task."""

    BEGUN = auto()
    WAITS = auto()  #: for an agent, or for its lane
    NO_ROOM = auto()  #: it waits for slots, and nobody goes before it


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


class AgentRunner(running.Runner):
    """Up to `slots` tasks at once, or lanes where tasks are fed to agents. `program` is fed all of
    them; without it the rules say which program, and what has none is done by the runner itself."""

    def __init__(  # noqa: PLR0913  # the last ones are named
        self,
        slots: int,
        clock: running.Clock,
        program: AgentSettings | None = None,
        *,
        allow: Sequence[str] = (),
        allow_pickle: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(slots, allow, clock, allow_pickle=allow_pickle)
        environment = clean_environment(os.environ) | dict(env or {})
        shared = self._shared._replace(env=environment)
        self._world = World(shared, clock.wall_ns, self._pass_on)
        self._rules = Rulebook(program=program)
        #: Takes what a task has printed so far.
        self.tell: Callable[[Job, Result], None] = _tell_nobody
        #: How starting the programs went, by their command.
        self._starts: dict[tuple[str, ...], Starts] = {}
        #: By command, the tasks for which there should be one more agent.
        self._lacking: dict[tuple[str, ...], list[tuple[Job, AgentSettings]]] = {}
        #: There is something to look at that no descriptor tells.
        self._is_stirred = False
        #: When a lane may be another agent's than the one's that served it last.
        self._look_again_ns: int | None = None
        self._is_leaving = False
        #: Malformed lines of agents that have ended.
        self._malformed_before = 0

    def _pass_on(self, job: Job, printed: Result) -> None:
        self.tell(job, printed)

    # What the broker says, and is told.

    def follow(self, clauses: Sequence[Rule]) -> None:
        """Do as the broker's rules say from now on. What agents hold, they finish."""
        rules = self._rules.replaced(clauses)
        if rules is None:
            return
        self._rules = rules
        self._is_stirred = True
        waiting, self._waiting = self._waiting, deque()
        for job, _ in waiting:
            self.start(job)
        for agent in self._agents():
            self._rule_anew(agent)

    def _rule_anew(self, agent: Agent) -> None:
        if agent.lane is not None:
            settings = self._rules.agents_for(agent.lane)
            if settings is not None and settings.argv == agent.argv:
                agent.adopt(settings)

    @property
    def overfeed_max(self) -> int:
        """Tasks that a lane may have here beyond the one in hand."""
        return self._rules.overfeed_max

    def overfeed(self, lane: Lane) -> int:
        """The same of one lane."""
        return self._rules.rules_for(lane).overfeed if lane[1] else 0

    @property
    def trouble(self) -> bytes:
        """Why agents can't be started; b"": they can, as far as is known."""
        return next((one.trouble for one in self._starts.values() if one.trouble), b"")

    @property
    def malformed(self) -> int:
        """Lines of all agents so far that are neither report nor comment."""
        return self._malformed_before + sum(agent.malformed for agent in self._agents())

    # The runner's face.

    def start(self, job: Job) -> None:
        self._is_stirred = True
        super().start(job)

    def _work_of(self, job: Job) -> Work | None:
        return self._rules.agents_for(lane_of(job)) or super()._work_of(job)

    def running(self) -> list[Job]:
        held = [job for agent in self._agents() for job in agent.jobs()]
        return held + super().running()

    def wake_at_ns(self) -> int | None:
        moments = [super().wake_at_ns()]
        if self._waiting:
            moments += [starts.next_ns for starts in self._starts_due()]
            moments.append(self._look_again_ns)
        return min((one for one in moments if one is not None), default=None)

    def stop(self, name: bytes, attempt: int) -> None:
        super().stop(name, attempt)
        for agent in self._agents():
            agent.drop((name, attempt))

    def unstarted(self) -> list[Job]:
        """The worker leaves: there will be no other task."""
        self._is_leaving = True
        self._dismiss(self._agents())
        return super().unstarted()

    def close(self) -> None:
        """Those that hold nothing may finish; the others are killed."""
        if not self._is_closed:
            self._dismiss(self._agents())
            self._await_the_dismissed()
        super().close()

    def _agents(self) -> list[Agent]:
        return [process for process in self._processes if isinstance(process, Agent)]

    def _agents_of(self, argv: tuple[str, ...]) -> list[Agent]:
        return [agent for agent in self._agents() if agent.argv == argv]

    # Who gets a task.

    def _has_room(self) -> bool:
        return self._is_stirred

    def _begin_waiting(self) -> None:
        self._begin_all_that_can()
        self._start_agents()
        self._let_go()

    def _begin_all_that_can(self) -> None:
        """In the order in which it came. Who waits for an agent or for its lane is overtaken, who
        waits for slots is not."""
        self._is_stirred = False
        self._look_again_ns = None
        self._lacking.clear()
        if not self._waiting:
            return
        lanes = self._look_at_lanes()
        kept: deque[tuple[Job, Work]] = deque()
        while self._waiting and not self._is_in_vain(lanes):
            job, work = self._waiting.popleft()
            verdict = self._begin_if_it_can(job, work, lanes)
            if verdict is not Verdict.BEGUN:
                lanes.pass_over(job)
                kept.append((job, work))
            if verdict is Verdict.NO_ROOM:
                break
        self._waiting.extendleft(reversed(kept))

    def _is_in_vain(self, lanes: Lanes) -> bool:
        """Nobody is hungry, and it is known what else is needed: the rest would all have to wait.
        There may be hundreds, in each turn."""
        if lanes.is_anybody_hungry() or len(self._lacking) < len(self._rules.commands):
            return False
        if any(len(wanted) < self.slots_total for wanted in self._lacking.values()):
            return False
        return all(isinstance(work, AgentSettings) for _, work in self._waiting)

    def _look_at_lanes(self) -> Lanes:
        agents, now_ns = self._agents(), self._clock.monotonic_ns()
        times = [agent.serves_until_ns() or 0 for agent in agents]
        self._look_again_ns = min((one for one in times if one > now_ns), default=None)
        alone = [one.job for one in self._processes if one.job is not None]
        return Lanes(agents, alone, tuple(self._waiting), self._rules, now_ns)

    def _begin_if_it_can(self, job: Job, work: Work, lanes: Lanes) -> Verdict:
        if lanes.has_passed(job):
            return Verdict.WAITS
        if isinstance(work, AgentSettings):
            return self._feed(job, work, lanes)
        if job.lane and not lanes.vacancies(lane_of(job)):
            return Verdict.WAITS
        if not self._has_slots(job):
            return Verdict.NO_ROOM
        lanes.begin(job)
        self._begin(job, work)
        return Verdict.BEGUN

    def _feed(self, job: Job, settings: AgentSettings, lanes: Lanes) -> Verdict:
        agent = lanes.eater(job, settings)
        if agent is None:
            wanted = self._lacking.setdefault(settings.argv, [])
            if len(wanted) < self.slots_total:
                wanted += [(job, settings)] * lanes.vacancies(lane_of(job))
            return Verdict.WAITS
        if not self._fits(agent, job):
            return Verdict.NO_ROOM
        if agent.is_empty():
            lanes.begin(job)
        agent.feed(job, settings)
        lanes.note_fed(agent)
        return Verdict.BEGUN

    def _fits(self, agent: Agent, job: Job) -> bool:
        """An agent takes up as much as the widest of its tasks. A task that is wider than the
        worker is done alone."""
        others = self.slots_used - agent.slots
        return others == 0 or others + max(agent.slots, job.slots) <= self.slots_total

    def _report(self, done: Done) -> None:
        if done.outcome is Outcome.DEFER_ALL and done.job.lane:
            self._give_back_lane(done.job)
        super()._report(done)

    def _give_back_lane(self, deferred: Job) -> None:
        """The rest of its lane is put off with it. Told before, so that the broker has it then."""
        lane = lane_of(deferred)
        rest = [job for job, _ in self._waiting if lane_of(job) == lane]
        self._waiting = deque(one for one in self._waiting if lane_of(one[0]) != lane)
        for job in rest:
            reason = b"its lane is put off"
            super()._report(Done(job, Outcome.REFUSED, reason, is_well=True))

    # When there is one more agent, and one fewer.

    def _starts_due(self) -> Iterable[Starts]:
        """Commands of which there should be one more agent."""
        return [self._starts_of(argv) for argv in self._lacking if self._lacks_an_agent(argv)]

    def _starts_of(self, argv: tuple[str, ...]) -> Starts:
        return self._starts.setdefault(argv, Starts())

    def _start_agents(self) -> None:
        for argv, wanted in [*self._lacking.items()]:
            starts = self._starts_of(argv)
            while self._lacks_an_agent(argv) and starts.next_ns <= self._clock.monotonic_ns():
                self._start_agent(wanted[0][1], starts)

    def _lacks_an_agent(self, argv: tuple[str, ...]) -> bool:
        """There is a task for which there is room, and more tasks than agents about to ask."""
        wanted = self._lacking.get(argv)
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

    def _start_agent(self, settings: AgentSettings, starts: Starts) -> None:
        try:
            self._processes.append(start_agent(self._world, settings))
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or error
            reason = f"can't start the agent {settings.argv[0]}: {what}".encode(errors="replace")
            starts.failed(reason, self._clock.monotonic_ns(), is_trouble=True)
            self._refuse_waiting(settings.argv, reason)

    def _see_to_processes(self) -> None:
        agents = self._agents()
        for agent in agents:
            agent.look_at_pipes()
        super()._see_to_processes()
        for agent in agents:
            if agent.has_ended:
                self._bury(agent)
            elif agent.is_up():
                self._starts_of(agent.argv).trouble = b""

    def _bury(self, agent: Agent) -> None:
        self._malformed_before += agent.malformed
        for job in reversed(agent.regained):
            work = self._work_of(job)
            if work is not None:
                self._waiting.appendleft((job, work))
        if agent.has_failed():
            starts = self._starts_of(agent.argv)
            now_ns = self._clock.monotonic_ns()
            starts.failed(agent.epitaph, now_ns, is_trouble=not agent.has_eaten)
            if not agent.has_eaten:
                self._refuse_waiting(agent.argv, agent.epitaph)

    def _refuse_waiting(self, argv: tuple[str, ...], reason: bytes) -> None:
        """Give back what waits for a program, unless there is somebody who may do it."""
        if not all(agent.is_leaving() for agent in self._agents_of(argv)):
            return
        waiting, self._waiting = self._waiting, deque()
        for job, work in waiting:
            if isinstance(work, AgentSettings) and work.argv == argv:
                self._report(Done(job, Outcome.REFUSED, cut_reason(reason)))
            else:
                self._waiting.append((job, work))
        self._lacking.pop(argv, None)

    def _let_go(self) -> None:
        """Tell those that there is nothing more for them now, and dismiss whom nobody needs."""
        agents = self._agents()
        if not agents:
            return
        for agent in agents:
            if agent.is_stuffed() and not self._has_waiting(agent.lane):
                agent.run_out()
        commands = () if self._is_leaving else self._rules.commands
        self._dismiss([agent for agent in agents if agent.argv not in commands])

    def _has_waiting(self, lane: Lane | None) -> bool:
        return any(lane_of(job) == lane for job, _ in self._waiting)

    def _dismiss(self, agents: Sequence[Agent]) -> None:
        for agent in agents:
            if agent.is_empty():
                agent.dismiss()

    def _await_the_dismissed(self) -> None:
        """Each time somebody has ended, the others have the grace period again."""
        leaving = [agent.process.pidfd for agent in self._agents() if agent.is_empty()]
        pidfds = {pidfd for pidfd in leaving if pidfd is not None}
        while pidfds:
            ended, _, _ = select.select(pidfds, [], [], KILL_GRACE_NS / SECOND_NS)
            if not ended:
                return
            pidfds -= set(ended)


def _tell_nobody(_job: Job, _printed: Result) -> None:
    pass
