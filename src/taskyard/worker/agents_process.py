"""One agent: a child program that is fed tasks by the line, and reports on them by the line.

Owns its process, its pipes, and the tasks that it holds. It is ended if it is silent for too long
with a task, if a task of it exceeds its time limit, or if it writes what no agent writes; what it
says from then on does not count. Which task it gets, and when there is another agent, is the
pool's business.
"""

import logging
from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run
from taskyard.core.tasks import Result
from taskyard.wire.hungry import (
    FINISHING,
    IDLE,
    LARVA,
    LEAVING,
    LINE_BYTES_MAX,
    STUFFING,
    AgentMessage,
    AgentSession,
    Comment,
    Key,
    MalformedLine,
    Report,
)
from taskyard.worker.agents_input import Feed, Murmur
from taskyard.worker.agents_rules import AgentSettings, Lane
from taskyard.worker.jobs import Done, Job
from taskyard.worker.limits import (
    AGENT_CLOSED_NS_MAX,
    AGENT_FINISH_NS_MAX,
    AGENT_GARBAGE_LINES_MAX,
    AGENT_IDLE_TOLD_NS,
    CHILD_START_NS_MAX,
    OUTPUT_TAIL_BYTES,
    PROGRESS_BYTES_MAX,
    RESULT_BYTES_MAX,
)
from taskyard.worker.output import Tail, cut_reason, last_line
from taskyard.worker.processes import STATUS_UNKNOWN, Process, Streams, start, status_text
from taskyard.worker.supervising import Pipe, Shared, Supervised


class World(Struct, frozen=True):
    """What an agent is given by its pool."""

    shared: Shared
    #: For the times that an agent names.
    wall_ns: Callable[[], int]
    #: Takes the end of what a task has printed so far.
    tell: Callable[[Job, Result], None]


class Lines(Struct, frozen=True):
    """The three pipes."""

    stdin: Feed
    stdout: Pipe
    stderr: Pipe


class Agent(Supervised):
    """One running program, and the tasks that it holds."""

    def __init__(
        self, process: Process, lines: Lines, world: World, settings: AgentSettings
    ) -> None:
        super().__init__(process, world.shared)
        self._lines = lines
        self._world = world
        self._settings = settings
        self._conversation = AgentSession(settings.overfeed)
        #: The lane that it serves, or served last.
        self.lane: Lane | None = None
        self._jobs: dict[Key, Job] = {}
        #: When it was given each of them, by the monotonic clock.
        self._fed_ns: dict[Key, int] = {}
        #: Those of its tasks that nobody wants any more.
        self._unwanted: dict[Key, None] = {}
        self._printed = Tail(OUTPUT_TAIL_BYTES)
        who = f"agent {process.pid}"
        self._murmur = Murmur(who, world.shared.now_ns)
        #: What it is about, and what was logged of that last.
        self._diary = Murmur(who, world.shared.now_ns)
        self._logged = b""
        self._garbage_lines = 0
        #: Lines in all that are neither report nor comment.
        self.malformed = 0
        now_ns = world.shared.now_ns()
        #: When it was fed, or said something.
        self._heard_ns = now_ns
        #: When the oldest of its tasks became that: its time began then at the latest.
        self._since_ns = now_ns
        #: What to do when `due_ns` has come.
        self._when_due: Callable[[], None] = self._give_up_larva
        #: It has reported on a task; or it got one, at least.
        self._is_useful = False
        self.has_eaten = False
        #: If it comes to nothing, that is its own fault.
        self._is_blamed = True
        #: The task that took longer than it may.
        self._overdue: Key | None = None
        #: What it was to be given, and has not got a byte of. Known when it has ended.
        self.regained: list[Job] = []
        #: How it ended.
        self.epitaph = b""
        self._plan()

    @property
    def argv(self) -> tuple[str, ...]:
        return self._settings.argv

    def can_eat(self) -> bool:
        return not self.is_ending() and self._lines.stdin.is_open() and self._conversation.can_eat()

    def is_larva(self) -> bool:
        return self._conversation.state is LARVA and not self.is_ending()

    def is_up(self) -> bool:
        """It has asked for a task, and will take more."""
        return self._conversation.state not in (LARVA, LEAVING) and not self.is_ending()

    def is_about_to_ask(self, now_ns: int) -> bool:
        return self.is_larva() or (self.serves_until_ns() or 0) > now_ns

    def is_leaving(self) -> bool:
        """It will take no more, whoever wants that."""
        return self.is_ending() or self._conversation.state is LEAVING

    def is_empty(self) -> bool:
        return not self._jobs

    def serves_until_ns(self) -> int | None:
        """When its lane may be another agent's, as far as one can tell; 0: it may be now. None:
        when it has reported on what it holds. After that it mostly asks for the next one at once,
        and should get it."""
        if self._jobs:
            return None
        if self.lane is None or self.can_eat() or self.is_leaving():
            return 0
        return self._heard_ns + AGENT_IDLE_TOLD_NS

    def has_failed(self) -> bool:
        """It ended without having been of any use; the next one may fare likewise."""
        return self._is_blamed and not self._is_useful

    def jobs(self) -> list[Job]:
        """Those that somebody waits for."""
        return [job for key, job in self._jobs.items() if key not in self._unwanted]

    def adopt(self, settings: AgentSettings) -> None:
        """Be run by these from now on; they are of the same command."""
        self._settings = settings
        self._conversation.overfeed = settings.overfeed
        self._plan()

    def feed(self, job: Job, settings: AgentSettings) -> None:
        """Give it a task; only if it `can_eat`."""
        self.lane = (job.service, job.lane)
        self.adopt(settings)
        self._heard_ns = self._shared.now_ns()
        if not self._jobs:
            self._since_ns = self._heard_ns
            self._printed.clear()  # what it said before is nobody's
        self._jobs[job.key] = job
        self._fed_ns[job.key] = self._heard_ns
        self._lines.stdin.send(self._conversation.feed(job.key, job.lane, job.payload), job.key)
        self._plan()

    def is_stuffed(self) -> bool:
        """It holds tasks, and more were to come."""
        return bool(self._jobs) and self._conversation.state is STUFFING

    def run_out(self) -> None:
        """There is nothing more for it now; only if it holds tasks. One that holds none is told so
        if that lasts."""
        self._conversation.run_out()
        self._write_diary()

    def dismiss(self) -> None:
        """Let it finish and exit; only if it holds nothing."""
        if not self.is_leaving():
            self._is_blamed = False
            self._heard_ns = self._shared.now_ns()
            self._lines.stdin.send(self._conversation.dismiss())
            self._lines.stdin.end()
            self._plan()

    def drop(self, key: Key) -> None:
        """Nobody wants this task any more. The language has no word for that: if it holds nothing
        else it is ended, else the report is not passed on."""
        if key in self._jobs:
            self._unwanted[key] = None
            self._end_if_in_vain()

    def _end_if_in_vain(self) -> None:
        if self._unwanted and len(self._unwanted) == len(self._jobs):
            self._is_blamed = False
            self.end(b"cancelled")

    def end(self, reason: bytes) -> None:
        if not self.has_ended:  # its number may be somebody else's by now
            super().end(reason)

    # What it says.

    def receive(self, chunk: bytes) -> None:
        """From its stdout."""
        if self.is_ending():
            return
        for heard in self._conversation.receive(chunk):
            self._take_in(heard)
            if self.is_ending():
                return
        if self._conversation.is_overfull:
            self.end(b"the agent wrote a line of more than %d bytes" % LINE_BYTES_MAX)
        self._plan()

    def hear_aside(self, chunk: bytes) -> None:
        """From its stderr."""
        self._printed.add(chunk)
        self._murmur.add(chunk)

    def _take_in(self, heard: AgentMessage) -> None:
        self._heard_ns = self._shared.now_ns()
        if isinstance(heard, Report):
            self._settle(heard)
        elif isinstance(heard, Comment):
            self._remark(heard.text)
        elif isinstance(heard, MalformedLine):
            self._complain(heard.reason)

    def _remark(self, text: bytes) -> None:
        self._murmur.say(text, logging.INFO)
        self._show(text)

    def _show(self, text: bytes) -> None:
        """Show a line in the output of the task that it is at work on."""
        if text and self._jobs:
            self._printed.add(text + b"\n")
            oldest = next(iter(self._jobs.values()))
            printed = self._printed.value()[-PROGRESS_BYTES_MAX:]
            bytes_total = self._printed.bytes_total
            is_cut = bytes_total > len(printed)
            self._world.tell(oldest, Result(printed, bytes_total if is_cut else 0))

    def _complain(self, reason: str) -> None:
        self._garbage_lines += 1
        self.malformed += 1
        self._murmur.say(reason.encode())
        self._show(b"malformed line: " + cut_reason(reason.encode()))
        if self._garbage_lines > AGENT_GARBAGE_LINES_MAX:
            self.end(b"the agent does not speak the language: " + cut_reason(reason.encode()))

    def _settle(self, report: Report) -> None:
        self._is_useful = self.has_eaten = True
        self._garbage_lines = 0
        job, run = self._jobs.pop(report.key), self._measured(report.key)
        self._since_ns = self._heard_ns
        self._lines.stderr.drain()  # what it wrote there before its report
        if report.key in self._unwanted:
            del self._unwanted[report.key]
        else:
            self._shared.report(structs.replace(self._done(job, report), run=run))
        self._printed.clear()
        self._end_if_in_vain()

    def _measured(self, key: Key, status: int | None = None) -> Run:
        """Measure a task that is over. An agent does its tasks one after the other."""
        return self._ran(status, max(self._fed_ns.pop(key), self._since_ns))

    def _done(self, job: Job, report: Report) -> Done:
        is_done = report.outcome is Outcome.DONE
        self._printed.add(report.text if is_done else report.detail)
        output, output_bytes_total = self._printed.kept()
        if is_done:
            detail = report.detail
            done = Done(job, report.outcome, detail[-RESULT_BYTES_MAX:], output)
            done.result_bytes_total = len(detail) if len(detail) > RESULT_BYTES_MAX else 0
        else:
            text = report.text or last_line(report.detail) or b"the agent gave no reason"
            retry_ns = report.retry_ns + (self._world.wall_ns() if report.is_from_now else 0)
            done = Done(job, report.outcome, cut_reason(text), output, retry_ns)
        done.output_bytes_total = output_bytes_total
        return done

    def _write_diary(self) -> None:
        """Log what it is about, when that has changed."""
        state = self._conversation.state
        what = state.name.encode()
        if state in (STUFFING, FINISHING) and self.lane is not None:
            what += b" in " + b"/".join(self.lane)
        if what != self._logged:
            self._logged = what
            self._diary.say(what, logging.INFO)

    # What is due.

    def enforce(self) -> None:
        if self.is_ending():
            super().enforce()
        else:
            self._when_due()

    def _plan(self) -> None:
        """What it takes up, and what is to be done next if it does nothing."""
        self.slots = max((job.slots for job in self._jobs.values()), default=0)
        self._write_diary()
        if not self.is_ending():
            self.due_ns, self._when_due = min(self._moments(), key=lambda moment: moment[0])

    def _moments(self) -> Sequence[tuple[int, Callable[[], None]]]:
        quiet_ns, settings = self._heard_ns, self._settings
        if self._conversation.state is LEAVING:
            return [(quiet_ns + AGENT_FINISH_NS_MAX, self._lose_patience)]
        closed = [(quiet_ns + AGENT_CLOSED_NS_MAX, self._give_up_mute)] if self._is_mute() else []
        if self._conversation.state is LARVA:
            return [*closed, (quiet_ns + CHILD_START_NS_MAX, self._give_up_larva)]
        if not self._jobs:
            idle = (quiet_ns + settings.idle_ns_max, self.dismiss)
            if self._conversation.state is IDLE or not self.can_eat():
                return [*closed, idle]
            return [*closed, idle, (quiet_ns + AGENT_IDLE_TOLD_NS, self._tell_idle)]
        hunger = (quiet_ns + settings.hunger_ns_max, self._give_up_silent)
        limit_ns = next(iter(self._jobs.values())).time_limit_ns
        if not limit_ns:
            return [*closed, hunger]
        return [*closed, hunger, (self._since_ns + limit_ns, self._give_up_slow)]

    def _is_mute(self) -> bool:
        """Nothing can come of it any more; most likely it is about to end."""
        if not self._lines.stdout.is_open():
            return True
        stdin = self._lines.stdin
        return not stdin.is_open() and len(stdin.untouched()) == len(self._jobs)

    def look_at_pipes(self) -> None:
        """They may have been closed since."""
        if self._is_mute() and not self.is_ending():
            self._plan()

    def _tell_idle(self) -> None:
        self._lines.stdin.send(self._conversation.run_out())
        self._plan()

    def _give_up_larva(self) -> None:
        seconds = CHILD_START_NS_MAX // SECOND_NS
        self.end(b"the agent did not say #hungry within %d s of its start" % seconds)

    def _give_up_mute(self) -> None:
        self.end(b"the agent closed its stdin or stdout")

    def _give_up_silent(self) -> None:
        seconds = self._settings.hunger_ns_max / SECOND_NS
        self.end(b"the agent said nothing for %g s" % seconds)

    def _give_up_slow(self) -> None:
        self._is_blamed = False
        self._overdue, job = next(iter(self._jobs.items()))
        limit_ns = job.time_limit_ns
        self.end(b"time limit of %g s exceeded" % (limit_ns / SECOND_NS))

    def _lose_patience(self) -> None:
        self.end(b"the agent was told to finish, and did not")

    # Its end.

    def _conclude(self, status: int) -> None:
        # It may have died after its report. Of one that was ended nothing is believed.
        self._lines.stdout.drain()
        self._lines.stderr.drain()
        self._lines.stdout.close()
        self._lines.stderr.close()
        untouched = self._lines.stdin.untouched()
        self._lines.stdin.close()
        self._murmur.end()
        self._diary.end()
        self.epitaph = self._ending or self._how_it_died(status)
        for job in self.jobs():
            if job.key in untouched:
                self.regained.append(job)
            else:
                self.has_eaten = True
                outcome = Outcome.FAILED if job.key == self._overdue else Outcome.CRASHED
                reason = cut_reason(self.epitaph)
                output, bytes_total = self._printed.kept()
                done = Done(job, outcome, reason, output, output_bytes_total=bytes_total)
                done.run = self._measured(job.key, None if status == STATUS_UNKNOWN else status)
                self._shared.report(done)
        self._jobs.clear()

    def _how_it_died(self, status: int) -> bytes:
        text = b"the agent died: " + status_text(status).encode()
        line = last_line(self._printed.value())
        return text + b": " + line if line else text


def start_agent(world: World, settings: AgentSettings) -> Agent:
    """Raises OSError or ValueError if it can't be started."""
    shared = world.shared
    # The pipes are read in a turn of the pool, when the agent has long been there.
    stdout = Pipe(shared.selector, lambda chunk: agent.receive(chunk))  # noqa: PLW0108  # but not yet
    with stdout.given() as stdout_writing:
        stderr = Pipe(shared.selector, lambda chunk: agent.hear_aside(chunk))  # noqa: PLW0108  # likewise
        with stderr.given() as stderr_writing:
            stdin = Feed(shared.selector)
            with stdin.given() as stdin_reading:
                streams = Streams(stdin_reading, stdout_writing, stderr_writing)
                process = start(settings.argv, streams, shared.env)
    agent = Agent(process, Lines(stdin, stdout, stderr), world, settings)
    return agent
