"""The pool of agents: child programs that are fed tasks by the line, as many as there are slots.

It has the runner's face, so that the worker's loop is the same. Agents are started when there is a
task that no hungry one can take, are kept for the next task, and are let go when there is none for
long. An agent that comes to nothing delays the start of the next one, and what waits for it is
given back: another host may do better.

Any agent gets any task that the broker gives; `_eater` is where one would look at lanes.
"""

import logging
import os
import select
import shlex
from collections.abc import Callable, Mapping
from typing import Protocol

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.wire.pickled import Pickled
from taskyard.wire.work import Call, Command
from taskyard.worker import running
from taskyard.worker.agents_process import Agent, AgentSettings, World, start_agent
from taskyard.worker.jobs import Done, Job
from taskyard.worker.limits import AGENT_RESTART_NS, AGENT_RESTART_NS_MAX, KILL_GRACE_NS
from taskyard.worker.output import cut_reason
from taskyard.worker.processes import find_program

__all__ = ["AgentRunner", "AgentSettings", "read_command"]

logger = logging.getLogger("taskyard.worker")


class Clock(running.Clock, Protocol):
    """Both clocks: an agent may name a time."""

    def wall_ns(self) -> int: ...


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
    """Up to `slots` agents at once."""

    def __init__(self, slots: int, settings: AgentSettings, clock: Clock) -> None:
        super().__init__(slots, (), clock)
        self._world = World(
            self._shared._replace(env=_environment(os.environ)),
            settings,
            clock.wall_ns,
            self._pass_on,
        )
        self._command = Command(list(settings.argv))
        #: Takes what a task has printed so far.
        self.tell: Callable[[Job, bytes], None] = _tell_nobody
        self._is_leaving = False
        #: No agent is started before; and the agents of late that came to nothing.
        self._starts_ns = 0
        self._failures = 0

    def _pass_on(self, job: Job, printed: bytes) -> None:
        self.tell(job, printed)

    def start(self, job: Job) -> None:
        self._waiting.append((job, self._command))

    def running(self) -> list[Job]:
        held = [job for agent in self._agents() for job in agent.jobs()]
        return held + [job for job, _ in self._waiting]

    def wake_at_ns(self) -> int | None:
        wake_ns = super().wake_at_ns()
        if not self._lacks_an_agent():
            return wake_ns
        return self._starts_ns if wake_ns is None else min(wake_ns, self._starts_ns)

    def turn(self) -> list[Done]:
        done = super().turn()
        while self._lacks_an_agent() and self._starts_ns <= self._clock.monotonic_ns():
            self._start_agent()
        if not self._waiting:
            for agent in self._agents():
                agent.run_out()
        if self._is_leaving:
            self._dismiss_empty()
        return done

    def stop(self, name: bytes, attempt: int) -> None:
        super().stop(name, attempt)
        for agent in self._agents():
            agent.drop((name, attempt))

    def unstarted(self) -> list[Job]:
        """The worker leaves: there will be no other task."""
        self._is_leaving = True
        self._dismiss_empty()
        return super().unstarted()

    def close(self) -> None:
        """Those that hold nothing may finish; the others are killed."""
        if not self._is_closed:
            self._dismiss_empty()
            self._await_the_dismissed()
        super().close()

    def _agents(self) -> list[Agent]:
        return [process for process in self._processes if isinstance(process, Agent)]

    # Who gets a task: the runner asks for room, and begins.

    def _has_room(self) -> bool:
        return self._eater(self._waiting[0][0]) is not None

    def _eater(self, job: Job) -> Agent | None:
        """Who takes the task; None if it has to wait.

        The first that were started go first: so the last ones have nothing to do, and can be let
        go. Those that hold nothing go before those that would take one more."""
        hungry = [agent for agent in self._agents() if agent.can_eat() and self._fits(agent, job)]
        return min(hungry, key=lambda agent: not agent.is_empty(), default=None)

    def _fits(self, agent: Agent, job: Job) -> bool:
        """An agent takes up as much as the widest of its tasks. A task that is wider than the
        worker is done alone."""
        others = self.slots_used - agent.slots
        return others == 0 or others + max(agent.slots, job.slots) <= self.slots_total

    def _begin(self, job: Job, work: Command | Call | Pickled) -> None:  # noqa: ARG002  # one for all
        agent = self._eater(job)
        if agent is not None:  # as the runner was told
            agent.feed(job)

    # When there is one more agent, and one fewer.

    def _lacks_an_agent(self) -> bool:
        """There is a task for which there is room, and more tasks than agents about to ask."""
        agents = self._agents()
        if any(agent.is_ending() and agent.has_failed() for agent in agents):
            return False  # first see it dead: the next one would fare likewise
        staying = [agent for agent in agents if not agent.is_leaving()]
        larvae = [agent for agent in staying if agent.is_larva()]
        return (
            len(self._waiting) > len(larvae)
            and len(staying) < self.slots_total
            and len(agents) < 2 * self.slots_total  # those that leave, and will not
            and (
                not self.slots_used
                or self.slots_used + self._waiting[0][0].slots <= self.slots_total
            )
        )

    def _start_agent(self) -> None:
        try:
            self._processes.append(start_agent(self._world))
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or error
            reason = f"can't start the agent {self._command.argv[0]}: {what}"
            self._delay(reason)
            self._refuse_waiting(reason.encode(errors="replace"))

    def _see_to_processes(self) -> None:
        agents = self._agents()
        for agent in agents:
            agent.look_at_pipes()
        super()._see_to_processes()
        for agent in agents:
            if agent.has_ended:
                self._bury(agent)

    def _bury(self, agent: Agent) -> None:
        self._waiting.extendleft((job, self._command) for job in reversed(agent.regained))
        if agent.has_failed():
            self._delay(agent.epitaph.decode(errors="replace"))
            if not agent.has_eaten:
                self._refuse_waiting(agent.epitaph)

    def _delay(self, reason: str) -> None:
        """An agent came to nothing: wait before the next one, longer each time."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._starts_ns > AGENT_RESTART_NS_MAX:
            self._failures = 0
        delay_ns = min(AGENT_RESTART_NS << self._failures, AGENT_RESTART_NS_MAX)
        if delay_ns < AGENT_RESTART_NS_MAX:
            self._failures += 1
        self._starts_ns = now_ns + delay_ns
        logger.warning("%s; the next one is started in %g s", reason, delay_ns / SECOND_NS)

    def _refuse_waiting(self, reason: bytes) -> None:
        """Give back what waits, unless there is somebody who may do it."""
        if all(agent.is_leaving() for agent in self._agents()):
            while self._waiting:
                job, _ = self._waiting.popleft()
                self._report(Done(job, Outcome.REFUSED, cut_reason(reason)))

    def _dismiss_empty(self) -> None:
        for agent in self._agents():
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


def _tell_nobody(_job: Job, _printed: bytes) -> None:
    pass


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """The worker's, without what it was told about brokers and keys: an agent serves many tasks,
    and none of that is about them."""
    return {name: value for name, value in own.items() if not name.startswith("TASKYARD_")}
