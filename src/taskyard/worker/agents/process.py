"""An agent: a child program that reads tasks and writes reports, line by line.

Owns the process, its pipes and the tasks that it holds. Ends an agent that is silent for too long
with a task, that exceeds a time limit, or that violates the protocol. Output after that is ignored.
`agents.runner` decides which task it gets, and when to start another agent.
"""

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from selectors import EVENT_WRITE, BaseSelector
from typing import Final

from msgspec import Struct, structs

from taskyard.core.blobs import Blob, Content, text_of
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run
from taskyard.process.child import STATUS_UNKNOWN, status_text
from taskyard.process.state_files import is_running
from taskyard.wire import hungry
from taskyard.wire.hungry import (
    FINISHING,
    IDLE,
    LARVA,
    LEAVING,
    LINE_BYTES_MAX,
    STUFFING,
    AgentMessage,
    Comment,
    Key,
    MalformedLine,
    PassedOver,
    Report,
)
from taskyard.worker.agents.rules import AgentSettings, LaneKey
from taskyard.worker.jobs import (
    AGENT_CLOSED_NS_MAX,
    AGENT_FINISH_NS_MAX,
    AGENT_IDLE_NOTICE_NS,
    AGENT_LOG_LINES_MAX,
    AGENT_MALFORMED_LINES_MAX,
    CHILD_START_NS_MAX,
    LAST_LINE_BYTES_MAX,
    OUTPUT_TAIL_BYTES,
    PROGRESS_BYTES_MAX,
    RESULT_BYTES_MAX,
    Job,
    JobResult,
    Tail,
    cut_reason,
    last_line,
)
from taskyard.worker.output import SpooledOutput
from taskyard.worker.processes import (
    Pipe,
    Process,
    RunnerContext,
    Streams,
    SupervisedProcess,
    start,
)

logger = logging.getLogger("taskyard.worker")


class StdinPipe:
    """A pipe to a process. Never blocks, and buffers bytes that the process has not read."""

    def __init__(self, selector: BaseSelector) -> None:
        self._selector = selector
        self._reading, writing = os.pipe()
        #: None when either side has closed it.
        self._writing: int | None = writing
        os.set_blocking(writing, False)
        #: Lines that are not fully written. Views, so nothing is copied.
        self._unsent: deque[tuple[tuple[Key, ...], memoryview]] = deque()
        #: Part of the first line is written.
        self._is_begun = False
        self._is_polled = False
        self._is_ending = False

    @contextmanager
    def reading_end(self) -> Iterator[int]:
        """Lend the reading end to a process that is being started. Close the pipe if that fails."""
        try:
            yield self._reading
        except BaseException:
            self.close()
            raise
        finally:
            os.close(self._reading)

    def is_open(self) -> bool:
        return self._writing is not None and not self._is_ending

    def send(self, line: bytes, *keys: Key) -> None:
        """Write a line. `keys` are the tasks that the line contains."""
        if line:
            self._unsent.append((keys, memoryview(line)))
            self._write()

    def end(self) -> None:
        """Close the pipe when everything is written."""
        self._is_ending = True
        self._write()

    def close(self) -> None:
        if self._writing is not None:
            self._poll(wanted=False)
            os.close(self._writing)
            self._writing = None

    def unsent_keys(self) -> list[Key]:
        """Return the tasks of which no byte was written."""
        unsent = list(self._unsent)[1 if self._is_begun else 0 :]
        return [key for keys, _ in unsent for key in keys]

    def _write(self) -> None:
        if self._writing is None:
            return
        try:
            while self._unsent:
                keys, line = self._unsent[0]
                written = os.write(self._writing, line)
                self._is_begun = written < len(line)
                if self._is_begun:
                    self._unsent[0] = (keys, line[written:])
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it closed its stdin, or it died and its pidfd is ready
            self.close()
            return
        if self._is_ending and not self._unsent:
            self.close()
        else:
            self._poll(wanted=bool(self._unsent))

    def _poll(self, *, wanted: bool) -> None:
        if self._writing is None or wanted == self._is_polled:
            return
        self._is_polled = wanted
        if wanted:
            self._selector.register(self._writing, EVENT_WRITE, lambda _events: self._write())
        else:
            self._selector.unregister(self._writing)


class LineLogger:
    """Logs the lines of a process. Cuts long lines, and limits the lines per second."""

    def __init__(self, source: str, now_ns: Callable[[], int]) -> None:
        self._source = source
        self._now_ns = now_ns
        self._pending = b""
        self._second = 0
        self._lines = 0
        self._suppressed = 0

    def add(self, chunk: bytes) -> None:
        """Add bytes, of several lines or of a part of a line."""
        *lines, rest = (self._pending + chunk).split(b"\n")
        self._pending = rest[: LAST_LINE_BYTES_MAX + 1]
        for line in lines:
            self.log(line)

    def log(self, line: bytes, level: int = logging.WARNING) -> None:
        text = last_line(line[:LAST_LINE_BYTES_MAX]).decode()
        if text and len(line) > LAST_LINE_BYTES_MAX:
            text += " [...]"
        if not text or not logger.isEnabledFor(level):
            return
        second = self._now_ns() // SECOND_NS
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > AGENT_LOG_LINES_MAX:
            self._suppressed += 1
            return
        self._log_suppressed()
        logger.log(level, "%s: %s", self._source, text)

    def end(self) -> None:
        """Log the last line, which may have no line end."""
        self.log(self._pending)
        self._pending = b""
        self._log_suppressed()

    def _log_suppressed(self) -> None:
        if self._suppressed:
            logger.warning("%s: %d more lines not logged", self._source, self._suppressed)
            self._suppressed = 0


#: Why an agent is ended.
_NOT_HUNGRY: Final = b"the agent sent no #hungry within %d s of its start" % (
    CHILD_START_NS_MAX // SECOND_NS
)
_PIPE_CLOSED: Final = b"the agent closed its stdin or stdout"
_NOT_FINISHED: Final = b"the agent did not finish in time"


class AgentPipes(Struct, frozen=True):
    """Stdin, stdout and stderr of an agent."""

    stdin: StdinPipe
    stdout: Pipe
    stderr: Pipe


class Agent(SupervisedProcess):
    """A running program and the tasks that it holds."""

    def __init__(
        self,
        process: Process,
        lines: AgentPipes,
        runner_context: RunnerContext,
        settings: AgentSettings,
        on_output: Callable[[Job, Content], None],
    ) -> None:
        """`on_output` is called with the end of a running task's output."""
        super().__init__(process, runner_context)
        self._pipes = lines
        self._on_output = on_output
        self._settings = settings
        self._session = hungry.SESSIONS[settings.lines](settings.overfeed)
        #: The current or last lane.
        self.lane: LaneKey | None = None
        self._jobs: dict[Key, Job] = {}
        #: The time at which each task was fed, by the monotonic clock.
        self._fed_ns: dict[Key, int] = {}
        #: Tasks that were cancelled.
        self._unwanted: dict[Key, None] = {}
        self._printed = Tail(OUTPUT_TAIL_BYTES)
        source = f"agent {process.pid}"
        self._stderr_log = LineLogger(source, runner_context.now_ns)
        #: The state in the log, and its last value.
        self._state_log = LineLogger(source, runner_context.now_ns)
        self._state_logged = b""
        self._malformed_in_row = 0
        #: Lines that are neither report nor comment.
        self.malformed = 0
        now_ns = runner_context.now_ns()
        #: The last time that it was fed or sent a line.
        self.last_received_ns = now_ns
        #: Since when its oldest task is the oldest. The time limit begins then.
        self._oldest_since_ns = now_ns
        #: Called at `due_ns`.
        self._on_timeout: Callable[[], None] = partial(self.end, _NOT_HUNGRY)
        #: Whether it has reported on any task, and whether it has received any.
        self._is_useful = False
        self.has_eaten = False
        #: Whether an exit without a report counts as a failure.
        self._is_at_fault = True
        #: The task that exceeded its time limit.
        self._overdue: Key | None = None
        #: Tasks of which it has read no byte. Set when it has ended.
        self.unstarted_jobs: list[Job] = []
        #: Why it ended.
        self.exit_reason = b""
        self._schedule_timeout()

    @property
    def pool(self) -> tuple[str, ...]:
        """The command and lines. Agents of one pool can take each other's tasks."""
        return self._settings.pool

    @property
    def command(self) -> tuple[str, ...]:
        """The command as in the rules, with placeholders if it has some."""
        return self._settings.command

    @property
    def shares_lines(self) -> bool:
        """Tasks of a lane with equal payloads are sent as one line."""
        return self._session.shares_lines

    def can_eat(self) -> bool:
        return not self.is_ending() and self._pipes.stdin.is_open() and self._session.can_eat()

    def is_larva(self) -> bool:
        return self._session.state is LARVA and not self.is_ending()

    def is_ready(self) -> bool:
        """Return whether it has been hungry, and takes more tasks."""
        return self._session.state not in (LARVA, LEAVING) and not self.is_ending()

    def is_about_to_ask(self, now_ns: int) -> bool:
        return self.is_larva() or (self.serves_until_ns() or 0) > now_ns

    def is_leaving(self) -> bool:
        """Return whether it takes no more tasks."""
        return self.is_ending() or self._session.state is LEAVING

    def is_empty(self) -> bool:
        return not self._jobs

    def serves_until_ns(self) -> int | None:
        """Return until when its lane is reserved for it; 0: not reserved, None: until it reports.

        After a report an agent mostly asks for the next task at once, and should get it.
        """
        if self._jobs:
            return None
        if self.lane is None or self.can_eat() or self.is_leaving():
            return 0
        return self.last_received_ns + AGENT_IDLE_NOTICE_NS

    def has_failed(self) -> bool:
        """Return whether it ended without any report, through its own fault."""
        return self._is_at_fault and not self._is_useful

    def jobs(self) -> list[Job]:
        """Return its tasks that were not cancelled."""
        return [job for key, job in self._jobs.items() if key not in self._unwanted]

    def update_settings(self, settings: AgentSettings) -> None:
        """Apply new settings for the same command."""
        self._settings = settings
        self._session.overfeed = settings.overfeed
        self._schedule_timeout()

    def feed(self, jobs: Sequence[Job], settings: AgentSettings) -> None:
        """Send it tasks as one line. Call only if it `can_eat`."""
        first = jobs[0]
        self.lane = (first.service, first.lane)
        self.update_settings(settings)
        self.last_received_ns = self._context.now_ns()
        if not self._jobs:
            self._oldest_since_ns = self.last_received_ns
            self._printed.clear()  # earlier output belongs to no task
        keys = [job.key for job in jobs]
        self._jobs |= zip(keys, jobs, strict=True)
        self._fed_ns |= dict.fromkeys(keys, self.last_received_ns)
        line = self._session.feed(keys[0], first.lane, first.payload, *keys[1:])
        self._pipes.stdin.send(line, *keys)
        self._schedule_timeout()

    def is_stuffed(self) -> bool:
        """Return whether it holds tasks, and may get more of its lane."""
        return bool(self._jobs) and self._session.state is STUFFING

    def run_out(self) -> None:
        """Record that its lane has no more tasks. Call only if it holds tasks.

        An agent without tasks gets a notice later.
        """
        self._session.run_out()
        self._log_state()

    def finish(self) -> None:
        """Have it finish and exit. Call only if it holds no task."""
        if not self.is_leaving():
            self._is_at_fault = False
            self.last_received_ns = self._context.now_ns()
            self._pipes.stdin.send(self._session.dismiss())
            self._pipes.stdin.end()
            self._schedule_timeout()

    def drop(self, key: Key) -> None:
        """Drop a cancelled task. The protocol has no message for that.

        An agent that holds nothing else is ended. Otherwise its report is ignored.
        """
        if key in self._jobs:
            self._unwanted[key] = None
            self._end_if_unwanted()

    def _end_if_unwanted(self) -> None:
        if self._unwanted and len(self._unwanted) == len(self._jobs):
            self._is_at_fault = False
            self.end(b"cancelled")

    # Lines from the agent.

    def receive(self, chunk: bytes) -> None:
        """Handle bytes from its stdout."""
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
        """Handle bytes from its stderr."""
        self._printed.add(chunk)
        self._stderr_log.add(chunk)

    def _on_message(self, message: AgentMessage) -> None:
        self.last_received_ns = self._context.now_ns()
        if isinstance(message, Report):
            self._settle(message)
        elif isinstance(message, PassedOver):
            for key in message.keys:
                payload = self._jobs[key].payload
                self._settle(_report_of(key, payload, self._settings.interval_ns))
        elif isinstance(message, Comment):
            self._on_comment(message.text)
        elif isinstance(message, MalformedLine):
            self._on_malformed(message.reason)

    def _on_comment(self, text: bytes) -> None:
        self._stderr_log.log(text, logging.INFO)
        self._add_output(text)

    def _add_output(self, text: bytes) -> None:
        """Append a line to the output of its oldest task."""
        if text and self._jobs:
            self._printed.add(text + b"\n")
            oldest = next(iter(self._jobs.values()))
            printed = self._printed.value()[-PROGRESS_BYTES_MAX:]
            bytes_total = self._printed.bytes_total
            is_cut = bytes_total > len(printed)
            content = Blob(b"", bytes_total, printed) if is_cut else printed
            self._on_output(oldest, content)

    def _on_malformed(self, reason: str) -> None:
        self._malformed_in_row += 1
        self.malformed += 1
        self._stderr_log.log(reason.encode())
        self._add_output(b"malformed line: " + cut_reason(reason.encode()))
        if self._malformed_in_row > AGENT_MALFORMED_LINES_MAX:
            self.end(b"too many malformed lines from the agent: " + cut_reason(reason.encode()))

    def _settle(self, report: Report) -> None:
        self._is_useful = self.has_eaten = True
        self._malformed_in_row = 0
        job, run = self._jobs.pop(report.key), self._measured(report.key)
        self._oldest_since_ns = self.last_received_ns
        self._pipes.stderr.drain()  # everything written before the report
        if report.key in self._unwanted:
            del self._unwanted[report.key]
        else:
            self._context.report(structs.replace(self._done(job, report), run=run))
        self._printed.clear()
        self._end_if_unwanted()

    def _measured(self, key: Key, status: int | None = None) -> Run:
        """Return the run time of a finished task. An agent runs its tasks in turn."""
        return self.run_record(status, max(self._fed_ns.pop(key), self._oldest_since_ns))

    def _done(self, job: Job, report: Report) -> JobResult:
        is_done = report.outcome is Outcome.DONE
        self._printed.add(report.text if is_done else report.detail)
        output = self._printed.content()
        if is_done:
            detail, spool = report.detail, self._context.spool
            if len(detail) > RESULT_BYTES_MAX and spool is not None:
                streams = SpooledOutput(spool, job)
                streams.add_stdout(detail)
                streams.add_stderr(text_of(output))
                return streams.done(job)
            end = detail[-RESULT_BYTES_MAX:]
            result = end if end == detail else Blob(b"", len(detail), end)
            return JobResult(job, report.outcome, result, output)
        text = report.text or last_line(report.detail) or b"the agent gave no reason"
        retry_ns = report.retry_ns + (self._context.wall_ns() if report.is_from_now else 0)
        return JobResult(job, report.outcome, cut_reason(text), output, retry_ns)

    def _log_state(self) -> None:
        """Log its state if it has changed."""
        state = self._session.state
        text = state.name.encode()
        if state in (STUFFING, FINISHING) and self.lane is not None:
            text += b" in " + b"/".join(self.lane)
        if text != self._state_logged:
            self._state_logged = text
            self._state_log.log(text, logging.INFO)

    # Timeouts.

    def on_due(self) -> None:
        if self.is_ending():
            super().on_due()
        else:
            self._on_timeout()

    def _schedule_timeout(self) -> None:
        """Update its slots, and choose the next timeout."""
        self.slots = max((job.slots for job in self._jobs.values()), default=0)
        self._log_state()
        if not self.is_ending():
            self.due_ns, self._on_timeout = min(self._timeouts(), key=lambda moment: moment[0])

    def _timeouts(self) -> Sequence[tuple[int, Callable[[], None]]]:
        quiet_ns, settings = self.last_received_ns, self._settings
        if self._session.state is LEAVING:
            return [(quiet_ns + AGENT_FINISH_NS_MAX, partial(self.end, _NOT_FINISHED))]
        closed = (
            [(quiet_ns + AGENT_CLOSED_NS_MAX, partial(self.end, _PIPE_CLOSED))]
            if self._pipes_closed()
            else []
        )
        if self._session.state is LARVA:
            return [*closed, (quiet_ns + CHILD_START_NS_MAX, partial(self.end, _NOT_HUNGRY))]
        if not self._jobs:
            idle = (quiet_ns + settings.idle_ns_max, self.finish)
            if self._session.state is IDLE or not self.can_eat():
                return [*closed, idle]
            return [*closed, idle, (quiet_ns + AGENT_IDLE_NOTICE_NS, self._send_no_work)]
        silent = b"the agent sent nothing for %g s" % (settings.hunger_ns_max / SECOND_NS)
        hunger = (quiet_ns + settings.hunger_ns_max, partial(self.end, silent))
        limit_ns = next(iter(self._jobs.values())).time_limit_ns
        if not limit_ns:
            return [*closed, hunger]
        return [*closed, hunger, (self._oldest_since_ns + limit_ns, self._on_time_limit)]

    def _pipes_closed(self) -> bool:
        """Return whether no report can come any more. Most likely it is about to exit."""
        if not self._pipes.stdout.is_open():
            return True
        stdin = self._pipes.stdin
        return not stdin.is_open() and len(stdin.unsent_keys()) == len(self._jobs)

    def check_pipes(self) -> None:
        """Reschedule if a pipe was closed."""
        if self._pipes_closed() and not self.is_ending():
            self._schedule_timeout()

    def _send_no_work(self) -> None:
        self._pipes.stdin.send(self._session.run_out())
        self._schedule_timeout()

    def _on_time_limit(self) -> None:
        self._is_at_fault = False
        self._overdue, job = next(iter(self._jobs.items()))
        limit_ns = job.time_limit_ns
        self.end(b"time limit of %g s exceeded" % (limit_ns / SECOND_NS))

    # End of the process.

    def _on_ended(self, status: int) -> None:
        # It may have reported before it died. Output of an ended agent is ignored.
        self._pipes.stdout.drain()
        self._pipes.stderr.drain()
        self._pipes.stdout.close()
        self._pipes.stderr.close()
        unsent_keys = self._pipes.stdin.unsent_keys()
        self._pipes.stdin.close()
        self._stderr_log.end()
        self._state_log.end()
        self.exit_reason = self.ending or self._exit_text(status)
        for job in self.jobs():
            if job.key in unsent_keys:
                self.unstarted_jobs.append(job)
            else:
                self.has_eaten = True
                outcome = Outcome.FAILED if job.key == self._overdue else Outcome.CRASHED
                reason = cut_reason(self.exit_reason)
                done = JobResult(job, outcome, reason, self._printed.content())
                done.run = self._measured(job.key, None if status == STATUS_UNKNOWN else status)
                self._context.report(done)
        self._jobs.clear()

    def _exit_text(self, status: int) -> bytes:
        text = b"the agent died: " + status_text(status).encode()
        line = last_line(self._printed.value())
        return text + b": " + line if line else text


def start_agent(
    runner_context: RunnerContext,
    settings: AgentSettings,
    on_output: Callable[[Job, Content], None],
) -> Agent:
    """Start an agent. Raises `OSError` or `ValueError` if that fails."""
    # The pipes are read in a later turn, when `agent` is set.
    stdout = Pipe(runner_context.selector, lambda chunk: agent.receive(chunk))  # noqa: PLW0108  # set below
    with stdout as stdout_writing:
        stderr = Pipe(runner_context.selector, lambda chunk: agent.on_stderr(chunk))  # noqa: PLW0108  # set below
        with stderr as stderr_writing:
            stdin = StdinPipe(runner_context.selector)
            with stdin.reading_end() as stdin_reading:
                streams = Streams(stdin_reading, stdout_writing, stderr_writing)
                process = start(settings.argv, streams, runner_context.env, runner_context.paths)
    pipes = AgentPipes(stdin, stdout, stderr)
    agent = Agent(process, pipes, runner_context, settings, on_output)
    return agent


# The marks of recipients in ZMailer's control files, for tasks that an agent passed over. The agent
# marks each recipient in the file, and locks it while it delivers. So a recipient is found there
# that was delivered for another task of its line, or whose report was lost. The lock of an agent
# that was killed is removed, as the original scheduler does.


def _report_of(key: Key, payload: bytes, interval_ns: int) -> Report:
    """Return the report that a recipient's mark stands for: by default, to try it again later."""
    path = hungry.path_of(payload)
    text = b"the agent reported nothing"
    try:
        mark = _mark_of(path, int(key[0].rpartition(b"/")[2]))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "not a transport control file"
        text = b"%s: %s" % (path, problem.encode())
    else:
        if mark == hungry.DELIVERED:
            return Report(key, Outcome.DONE, text=b"marked as delivered")
        if mark == hungry.REFUSED:
            return Report(key, Outcome.FAILED_FINAL, text=b"marked as failed")
    retry_ns = max(interval_ns, SECOND_NS)
    return Report(key, Outcome.RETRY_AT, text=text, retry_ns=retry_ns, is_from_now=True)


def _mark_of(path: bytes, offset: int) -> bytes:
    """Return the mark of a recipient, and remove the lock of a process that has ended.

    Raises `OSError` or `ValueError`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        line = os.pread(descriptor, 2 + hungry.LOCK_BYTES, offset)
        mark, process = line[1:2], line[2:]
        if line[:1] != hungry.RECIPIENT or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError
        if mark == hungry.LOCKED and not is_running(int(process)):
            os.pwrite(descriptor, hungry.WAITING * (1 + hungry.LOCK_BYTES), offset + 1)
        return mark
    finally:
        os.close(descriptor)
