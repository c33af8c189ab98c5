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
from taskyard.core.model import Result
from taskyard.core.runs import Run
from taskyard.process.child import STATUS_UNKNOWN, status_text
from taskyard.wire.hungry.frames import (
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
from taskyard.worker.agents.pipes import LineLogger, StdinPipe
from taskyard.worker.agents.rules import AgentSettings, LaneKey
from taskyard.worker.jobs import Job, JobResult, Tail, cut_reason, last_line
from taskyard.worker.limits import (
    AGENT_CLOSED_NS_MAX,
    AGENT_FINISH_NS_MAX,
    AGENT_IDLE_NOTICE_NS,
    AGENT_MALFORMED_LINES_MAX,
    CHILD_START_NS_MAX,
    OUTPUT_TAIL_BYTES,
    PROGRESS_BYTES_MAX,
    RESULT_BYTES_MAX,
)
from taskyard.worker.processes import (
    Pipe,
    Process,
    RunnerContext,
    Streams,
    SupervisedProcess,
    start,
)


class AgentContext(Struct, frozen=True):
    """What an agent is given by its pool."""

    runner_context: RunnerContext
    #: For the times that an agent names.
    wall_ns: Callable[[], int]
    #: Takes the end of what a task has printed so far.
    on_output: Callable[[Job, Result], None]


class AgentPipes(Struct, frozen=True):
    """The three pipes."""

    stdin: StdinPipe
    stdout: Pipe
    stderr: Pipe


class Agent(SupervisedProcess):
    """One running program, and the tasks that it holds."""

    def __init__(
        self,
        process: Process,
        lines: AgentPipes,
        agent_context: AgentContext,
        settings: AgentSettings,
    ) -> None:
        super().__init__(process, agent_context.runner_context)
        self._pipes = lines
        self._agent_context = agent_context
        self._settings = settings
        self._session = AgentSession(settings.overfeed)
        #: The lane that it serves, or served last.
        self.lane: LaneKey | None = None
        self._jobs: dict[Key, Job] = {}
        #: When it was given each of them, by the monotonic clock.
        self._fed_ns: dict[Key, int] = {}
        #: Those of its tasks that nobody wants any more.
        self._unwanted: dict[Key, None] = {}
        self._printed = Tail(OUTPUT_TAIL_BYTES)
        source = f"agent {process.pid}"
        self._stderr_log = LineLogger(source, agent_context.runner_context.now_ns)
        #: What it is about, and what was logged of that last.
        self._state_log = LineLogger(source, agent_context.runner_context.now_ns)
        self._state_logged = b""
        self._malformed_in_row = 0
        #: Lines in all that are neither report nor comment.
        self.malformed = 0
        now_ns = agent_context.runner_context.now_ns()
        #: When it was fed, or said something.
        self._last_received_ns = now_ns
        #: When the oldest of its tasks became that: its time began then at the latest.
        self._oldest_since_ns = now_ns
        #: What to do when `due_ns` has come.
        self._on_timeout: Callable[[], None] = self._on_start_timeout
        #: It has reported on a task; or it got one, at least.
        self._is_useful = False
        self.has_eaten = False
        #: If it comes to nothing, that is its own fault.
        self._is_at_fault = True
        #: The task that took longer than it may.
        self._overdue: Key | None = None
        #: What it was to be given, and has not got a byte of. Known when it has ended.
        self.unstarted_jobs: list[Job] = []
        #: How it ended.
        self.exit_reason = b""
        self._schedule_timeout()

    @property
    def argv(self) -> tuple[str, ...]:
        return self._settings.argv

    def can_eat(self) -> bool:
        return not self.is_ending() and self._pipes.stdin.is_open() and self._session.can_eat()

    def is_larva(self) -> bool:
        return self._session.state is LARVA and not self.is_ending()

    def is_ready(self) -> bool:
        """It has asked for a task, and will take more."""
        return self._session.state not in (LARVA, LEAVING) and not self.is_ending()

    def is_about_to_ask(self, now_ns: int) -> bool:
        return self.is_larva() or (self.serves_until_ns() or 0) > now_ns

    def is_leaving(self) -> bool:
        """It will take no more, whoever wants that."""
        return self.is_ending() or self._session.state is LEAVING

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
        return self._last_received_ns + AGENT_IDLE_NOTICE_NS

    def has_failed(self) -> bool:
        """It ended without having been of any use; the next one may fare likewise."""
        return self._is_at_fault and not self._is_useful

    def jobs(self) -> list[Job]:
        """Those that somebody waits for."""
        return [job for key, job in self._jobs.items() if key not in self._unwanted]

    def update_settings(self, settings: AgentSettings) -> None:
        """Be run by these from now on; they are of the same command."""
        self._settings = settings
        self._session.overfeed = settings.overfeed
        self._schedule_timeout()

    def feed(self, job: Job, settings: AgentSettings) -> None:
        """Give it a task; only if it `can_eat`."""
        self.lane = (job.service, job.lane)
        self.update_settings(settings)
        self._last_received_ns = self._context.now_ns()
        if not self._jobs:
            self._oldest_since_ns = self._last_received_ns
            self._printed.clear()  # what it said before is nobody's
        self._jobs[job.key] = job
        self._fed_ns[job.key] = self._last_received_ns
        self._pipes.stdin.send(self._session.feed(job.key, job.lane, job.payload), job.key)
        self._schedule_timeout()

    def is_stuffed(self) -> bool:
        """It holds tasks, and more were to come."""
        return bool(self._jobs) and self._session.state is STUFFING

    def run_out(self) -> None:
        """There is nothing more for it now; only if it holds tasks. One that holds none is told so
        if that lasts."""
        self._session.run_out()
        self._log_state()

    def finish(self) -> None:
        """Let it finish and exit; only if it holds nothing."""
        if not self.is_leaving():
            self._is_at_fault = False
            self._last_received_ns = self._context.now_ns()
            self._pipes.stdin.send(self._session.dismiss())
            self._pipes.stdin.end()
            self._schedule_timeout()

    def drop(self, key: Key) -> None:
        """Nobody wants this task any more. The language has no word for that: if it holds nothing
        else it is ended, else the report is not passed on."""
        if key in self._jobs:
            self._unwanted[key] = None
            self._end_if_unwanted()

    def _end_if_unwanted(self) -> None:
        if self._unwanted and len(self._unwanted) == len(self._jobs):
            self._is_at_fault = False
            self.end(b"cancelled")

    def end(self, reason: bytes) -> None:
        if not self.has_ended:  # its number may be somebody else's by now
            super().end(reason)

    # What it says.

    def receive(self, chunk: bytes) -> None:
        """From its stdout."""
        if self.is_ending():
            return
        for message in self._session.receive(chunk):
            self._on_message(message)
            if self.is_ending():
                return
        if self._session.is_overfull:
            self.end(b"the agent wrote a line of more than %d bytes" % LINE_BYTES_MAX)
        self._schedule_timeout()

    def on_stderr(self, chunk: bytes) -> None:
        """From its stderr."""
        self._printed.add(chunk)
        self._stderr_log.add(chunk)

    def _on_message(self, message: AgentMessage) -> None:
        self._last_received_ns = self._context.now_ns()
        if isinstance(message, Report):
            self._settle(message)
        elif isinstance(message, Comment):
            self._on_comment(message.text)
        elif isinstance(message, MalformedLine):
            self._on_malformed(message.reason)

    def _on_comment(self, text: bytes) -> None:
        self._stderr_log.log(text, logging.INFO)
        self._add_output(text)

    def _add_output(self, text: bytes) -> None:
        """Show a line in the output of the task that it is at work on."""
        if text and self._jobs:
            self._printed.add(text + b"\n")
            oldest = next(iter(self._jobs.values()))
            printed = self._printed.value()[-PROGRESS_BYTES_MAX:]
            bytes_total = self._printed.bytes_total
            is_cut = bytes_total > len(printed)
            self._agent_context.on_output(oldest, Result(printed, bytes_total if is_cut else 0))

    def _on_malformed(self, reason: str) -> None:
        self._malformed_in_row += 1
        self.malformed += 1
        self._stderr_log.log(reason.encode())
        self._add_output(b"malformed line: " + cut_reason(reason.encode()))
        if self._malformed_in_row > AGENT_MALFORMED_LINES_MAX:
            self.end(b"the agent does not speak the language: " + cut_reason(reason.encode()))

    def _settle(self, report: Report) -> None:
        self._is_useful = self.has_eaten = True
        self._malformed_in_row = 0
        job, run = self._jobs.pop(report.key), self._measured(report.key)
        self._oldest_since_ns = self._last_received_ns
        self._pipes.stderr.drain()  # what it wrote there before its report
        if report.key in self._unwanted:
            del self._unwanted[report.key]
        else:
            self._context.report(structs.replace(self._done(job, report), run=run))
        self._printed.clear()
        self._end_if_unwanted()

    def _measured(self, key: Key, status: int | None = None) -> Run:
        """Measure a task that is over. An agent does its tasks one after the other."""
        return self._run_record(status, max(self._fed_ns.pop(key), self._oldest_since_ns))

    def _done(self, job: Job, report: Report) -> JobResult:
        is_done = report.outcome is Outcome.DONE
        self._printed.add(report.text if is_done else report.detail)
        output, output_bytes_total = self._printed.with_size()
        if is_done:
            detail = report.detail
            done = JobResult(job, report.outcome, detail[-RESULT_BYTES_MAX:], output)
            done.result_bytes_total = len(detail) if len(detail) > RESULT_BYTES_MAX else 0
        else:
            text = report.text or last_line(report.detail) or b"the agent gave no reason"
            retry_ns = report.retry_ns + (
                self._agent_context.wall_ns() if report.is_from_now else 0
            )
            done = JobResult(job, report.outcome, cut_reason(text), output, retry_ns)
        done.output_bytes_total = output_bytes_total
        return done

    def _log_state(self) -> None:
        """Log what it is about, when that has changed."""
        state = self._session.state
        what = state.name.encode()
        if state in (STUFFING, FINISHING) and self.lane is not None:
            what += b" in " + b"/".join(self.lane)
        if what != self._state_logged:
            self._state_logged = what
            self._state_log.log(what, logging.INFO)

    # What is due.

    def on_due(self) -> None:
        if self.is_ending():
            super().on_due()
        else:
            self._on_timeout()

    def _schedule_timeout(self) -> None:
        """What it takes up, and what is to be done next if it does nothing."""
        self.slots = max((job.slots for job in self._jobs.values()), default=0)
        self._log_state()
        if not self.is_ending():
            self.due_ns, self._on_timeout = min(self._timeouts(), key=lambda moment: moment[0])

    def _timeouts(self) -> Sequence[tuple[int, Callable[[], None]]]:
        quiet_ns, settings = self._last_received_ns, self._settings
        if self._session.state is LEAVING:
            return [(quiet_ns + AGENT_FINISH_NS_MAX, self._on_finish_timeout)]
        closed = (
            [(quiet_ns + AGENT_CLOSED_NS_MAX, self._on_pipes_closed)]
            if self._pipes_closed()
            else []
        )
        if self._session.state is LARVA:
            return [*closed, (quiet_ns + CHILD_START_NS_MAX, self._on_start_timeout)]
        if not self._jobs:
            idle = (quiet_ns + settings.idle_ns_max, self.finish)
            if self._session.state is IDLE or not self.can_eat():
                return [*closed, idle]
            return [*closed, idle, (quiet_ns + AGENT_IDLE_NOTICE_NS, self._send_no_work)]
        hunger = (quiet_ns + settings.hunger_ns_max, self._on_silent)
        limit_ns = next(iter(self._jobs.values())).time_limit_ns
        if not limit_ns:
            return [*closed, hunger]
        return [*closed, hunger, (self._oldest_since_ns + limit_ns, self._on_time_limit)]

    def _pipes_closed(self) -> bool:
        """Nothing can come of it any more; most likely it is about to end."""
        if not self._pipes.stdout.is_open():
            return True
        stdin = self._pipes.stdin
        return not stdin.is_open() and len(stdin.unsent_keys()) == len(self._jobs)

    def check_pipes(self) -> None:
        """They may have been closed since."""
        if self._pipes_closed() and not self.is_ending():
            self._schedule_timeout()

    def _send_no_work(self) -> None:
        self._pipes.stdin.send(self._session.run_out())
        self._schedule_timeout()

    def _on_start_timeout(self) -> None:
        seconds = CHILD_START_NS_MAX // SECOND_NS
        self.end(b"the agent did not say #hungry within %d s of its start" % seconds)

    def _on_pipes_closed(self) -> None:
        self.end(b"the agent closed its stdin or stdout")

    def _on_silent(self) -> None:
        seconds = self._settings.hunger_ns_max / SECOND_NS
        self.end(b"the agent said nothing for %g s" % seconds)

    def _on_time_limit(self) -> None:
        self._is_at_fault = False
        self._overdue, job = next(iter(self._jobs.items()))
        limit_ns = job.time_limit_ns
        self.end(b"time limit of %g s exceeded" % (limit_ns / SECOND_NS))

    def _on_finish_timeout(self) -> None:
        self.end(b"the agent was told to finish, and did not")

    # Its end.

    def _on_ended(self, status: int) -> None:
        # It may have died after its report. Of one that was ended nothing is believed.
        self._pipes.stdout.drain()
        self._pipes.stderr.drain()
        self._pipes.stdout.close()
        self._pipes.stderr.close()
        unsent_keys = self._pipes.stdin.unsent_keys()
        self._pipes.stdin.close()
        self._stderr_log.end()
        self._state_log.end()
        self.exit_reason = self._ending or self._exit_text(status)
        for job in self.jobs():
            if job.key in unsent_keys:
                self.unstarted_jobs.append(job)
            else:
                self.has_eaten = True
                outcome = Outcome.FAILED if job.key == self._overdue else Outcome.CRASHED
                reason = cut_reason(self.exit_reason)
                output, bytes_total = self._printed.with_size()
                done = JobResult(job, outcome, reason, output, output_bytes_total=bytes_total)
                done.run = self._measured(job.key, None if status == STATUS_UNKNOWN else status)
                self._context.report(done)
        self._jobs.clear()

    def _exit_text(self, status: int) -> bytes:
        text = b"the agent died: " + status_text(status).encode()
        line = last_line(self._printed.value())
        return text + b": " + line if line else text


def start_agent(agent_context: AgentContext, settings: AgentSettings) -> Agent:
    """Raises OSError or ValueError if it can't be started."""
    runner_context = agent_context.runner_context
    # The pipes are read in a turn of the pool, when the agent has long been there.
    stdout = Pipe(runner_context.selector, lambda chunk: agent.receive(chunk))  # noqa: PLW0108  # but not yet
    with stdout.writing_end() as stdout_writing:
        stderr = Pipe(runner_context.selector, lambda chunk: agent.on_stderr(chunk))  # noqa: PLW0108  # likewise
        with stderr.writing_end() as stderr_writing:
            stdin = StdinPipe(runner_context.selector)
            with stdin.reading_end() as stdin_reading:
                streams = Streams(stdin_reading, stdout_writing, stderr_writing)
                process = start(settings.argv, streams, runner_context.env)
    agent = Agent(process, AgentPipes(stdin, stdout, stderr), agent_context, settings)
    return agent
