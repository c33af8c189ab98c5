"""The runner: starts, watches and ends the processes that run the worker's tasks.

A single thread, driven by the worker's loop: poll `filenos()` until `wake_at_ns()`, then call
`turn()`. Only `close` blocks, until the processes that it has killed have ended. Programs (`exec`)
get a process each. Functions (`call`, `pickle`) are called in Python processes that are kept. Jobs
beyond the free slots wait in their order.

Knows no brokers, sockets or messages.
"""

import contextlib
import os
import select
import selectors
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Final, TypeAlias

from msgspec import structs

from taskyard.calls.inputs import available, place_inputs
from taskyard.calls.payloads import CALL, EXEC, Call, Command, decode_payload
from taskyard.calls.pickled import PICKLE, Pickled
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.resources import CPUS, GPUS
from taskyard.core.runs import Run
from taskyard.errors import PeerError, UserError
from taskyard.net.protocols import Clock
from taskyard.process.child import can_fork
from taskyard.worker.agents.rules import AgentSettings
from taskyard.worker.allow_list import ANY_PICKLE, PICKLE_REFUSAL, is_module_allowed, refusal
from taskyard.worker.call_process import CallOptions, CallProcess, is_small, start_child
from taskyard.worker.jobs import Job, JobResult, cut_reason
from taskyard.worker.output import OutputSpool
from taskyard.worker.processes import MemoryGuard, ProgramPaths, RunnerContext, SupervisedProcess
from taskyard.worker.programs import (
    CommandFiles,
    Program,
    command_environment,
    not_started,
    start_program,
)
from taskyard.worker.slots import DevicePool, Share, WaitingCalls

#: How long idle Python children may take to exit with their worker. Less than its supervisor waits.
EXIT_NS_MAX: Final = 2 * SECOND_NS

#: Calls that wait for other tasks without their slots, at most. Each is a Python process of some
#: 30 MB. Tasks that submit tasks run depth first, so this is about the depth of a recursion.
CALLS_WAITING_MAX: Final = 100

#: Python processes beyond the slots, which replaced processes of waiting calls, end after this idle
#: time.
CHILD_IDLE_NS_MAX: Final = 10 * SECOND_NS

#: Polling interval for the end of a process on kernels without pidfds.
REAP_INTERVAL_NS: Final = SECOND_NS // 100

#: The work of a job. Only an agent runner has `AgentSettings`.
Work: TypeAlias = Command | Call | Pickled | AgentSettings

#: stdin, stdout and stderr.
_STANDARD_DESCRIPTORS: Final = 3

_MILLISECOND_NS: Final = SECOND_NS // 1000


#: Environments of commands that are kept prepared. Tasks of few submissions run at once.
_ENVIRONMENTS_KEPT: Final = 64

#: Modules of calls for which it is known whether they are allowed.
_MODULES_KNOWN: Final = 64

_NO_CALLS: Final[Sequence[Job]] = ()

#: Services whose payloads describe the work.
_SELF_DESCRIBING: Final = (EXEC, CALL, PICKLE)


class ProcessRunner:
    """Runs up to `slots` jobs at once, with the GPUs of `gpus` by id.

    Functions come from the modules in `allow` and below them. With `allow_pickle`, pickled
    functions are called too. A `command` takes the tasks of other services. It starts anew for each
    task, by its argv and never through a shell. It reads the payload from stdin, and its stdout is
    the result.
    """

    def __init__(  # noqa: PLR0913  # most are named
        self,
        slots: int,
        allow: Sequence[str],
        clock: Clock,
        *,
        command: Sequence[str] | None = None,
        allow_pickle: bool = False,
        gpus: Sequence[str] = (),
        spool: OutputSpool | None = None,
    ) -> None:
        """`spool` takes the output of programs. Without a spool, results have its end."""
        self.slots_total = slots
        #: Cores of tasks at once, in the unit of resources. 0: no limit.
        self.cores_total = 0
        self._gpus = DevicePool(gpus)
        self._memory_guard = MemoryGuard()
        self._allow = list(allow)
        self._is_allowed = lru_cache(_MODULES_KNOWN)(partial(is_module_allowed, allow=tuple(allow)))
        self._command = command
        self._allow_pickle = allow_pickle
        self._clock = clock
        self._waiting: deque[tuple[Job, Work]] = deque()
        #: Programs, and Python children, idle or not.
        self._processes: list[SupervisedProcess] = []
        self._done: list[JobResult] = []
        _restore_sigchld()
        self._dev_null = _open_null()
        self._selector = selectors.DefaultSelector()
        self._context = RunnerContext(
            self._selector,
            self._report,
            clock.monotonic_ns,
            dict(os.environ),
            self._dev_null,
            clock.wall_ns,
            ProgramPaths(clock.monotonic_ns),
            spool,
        )
        #: The part of a host that several runners share. None: this runner has all of it.
        self._share: Share | None = None
        self._waiting_calls: WaitingCalls[CallProcess] = WaitingCalls(CALLS_WAITING_MAX)
        self._environment_of = lru_cache(_ENVIRONMENTS_KEPT)(
            partial(command_environment, host=socket.gethostname(), env=self._context.env)
        )
        self._files = CommandFiles()
        self.call_options = CallOptions()
        self._is_closed = False

    def set_task_env(self, variables: Mapping[str, str]) -> None:
        """Add variables to the environment of every task. Call it before anything is started."""
        env = {**self._context.env, **variables}
        self._context = self._context._replace(env=env, task_env=dict(variables))

    def fork_children(self) -> None:
        """Fork a Python child for each slot, so that first calls need not wait for its start.

        Does nothing if this process has threads.
        """
        if can_fork():
            for _ in range(self.slots_total):
                self._start_child(forked=True)

    @property
    def slots_used(self) -> int:
        """Return the slots of running jobs, also while these are being ended."""
        return sum(process.slots for process in self._processes)

    def use_share(self, share: Share) -> None:
        """Share the slots, resources and GPUs of the host with other runners."""
        self._share = share
        self._gpus = share.gpus
        share.runner = self

    def started(self) -> list[Job]:
        """Return the jobs that are neither finished nor waiting. Calls that wait have no cores."""
        waiting = {job.key for job, _ in self._waiting}
        jobs = [job for job in self.running() if job.key not in waiting]
        calls = [*self._waiting_calls.waiting, *self._waiting_calls.resuming]
        without = {one.job.key for one in calls if one.job is not None}
        return [_with_resources(job, cores=False) if job.key in without else job for job in jobs]

    def waiting_calls(self) -> tuple[Sequence[Job], int]:
        """Return the calls that wait for other tasks, and have given their slots back.

        Also return the number of calls that keep theirs, because too many wait.
        """
        calls = self._waiting_calls
        if not calls.waiting:
            return _NO_CALLS, len(calls.keeping)
        waiting = [one.job for one in calls.waiting if one.job is not None]
        return waiting or _NO_CALLS, len(calls.keeping)

    def start(self, job: Job) -> None:
        """Queue a job. It starts at the next turn with enough free slots.

        Never raises: a job that can't be run is reported by that turn.
        """
        work = self._work_of(job)
        if job.inputs and self._allow_pickle:
            trusted = [structs.replace(one, allow_pickle=True) for one in job.inputs]
            job = structs.replace(job, inputs=tuple(trusted))
        if work is not None:
            self._queue(job, work)

    def _queue(self, job: Job, work: Work, *, is_first: bool = False) -> None:
        """Queue a job behind jobs of its priority, or before them, and behind a higher priority."""
        place, below = len(self._waiting), job.priority + is_first
        while place and self._waiting[place - 1][0].priority < below:
            place -= 1
        self._waiting.insert(place, (job, work))

    def _work_of(self, job: Job) -> Work | None:
        """Decode the job's work. Report the job and return None if it is not allowed."""
        if self._command and job.service not in _SELF_DESCRIBING:
            return Command(list(self._command), stdin=job.payload)
        try:
            work = decode_payload(job.payload, job.service)
        except PeerError as error:
            self._refuse(job, str(error))
            return None
        reason = self._refusal(work, job.service) or _input_problem(job, work)
        if reason is not None:
            self._refuse(job, reason)
            return None
        return work

    def _refusal(self, work: Command | Call | Pickled, service: bytes) -> str | None:
        """Return why the work is not allowed; None if it is."""
        if isinstance(work, Pickled):
            # The child process loads plain pickles only, unless all are allowed.
            return None if self._allow_pickle or service == CALL else PICKLE_REFUSAL
        module = work.call.partition(":")[0] if isinstance(work, Call) else None
        if module is None or self._is_allowed(module):
            return None
        return refusal(module)

    def running(self) -> list[Job]:
        """Return all jobs that are neither finished nor stopped, running or waiting."""
        assigned = [process.job for process in self._processes if process.is_wanted]
        ahead = [job for child in self._call_processes() for job in child.ahead]
        waiting = [job for job, _ in self._waiting]
        return [job for job in assigned if job is not None] + ahead + waiting

    def _call_processes(self) -> list[CallProcess]:
        return [one for one in self._processes if isinstance(one, CallProcess)]

    def filenos(self) -> Sequence[int]:
        """Return the descriptors to poll for reading. They never change."""
        return [self._selector.fileno()]

    def wake_at_ns(self) -> int | None:
        """Return when a turn is due without input, by the monotonic clock. May be in the past."""
        if self._done or (self._waiting and self._has_room()):
            return self._clock.monotonic_ns()
        moments = []
        for process in self._processes:
            moments += [process.due_ns, process.watch_at_ns]
            if process.memory_limit_bytes:
                moments.append(self._memory_guard.due_ns)
            if process.process.pidfd is None:
                moments.append(self._clock.monotonic_ns() + REAP_INTERVAL_NS)
        if len(self._processes) > self.slots_total:
            moments += [one.idle_since_ns + CHILD_IDLE_NS_MAX for one in self._surplus_children()]
        return min([one for one in moments if one is not None], default=None)

    def turn(self) -> list[JobResult]:
        """Read output, reap processes, enforce time limits, start waiting jobs. Return results."""
        for key, events in self._selector.select(0):
            key.data(events)
        self._check_processes()
        if self._share is not None:
            self._share.begin()
        calls = self._waiting_calls
        if calls.keeping or calls.resuming:
            self._resume_calls()
        self._start_waiting()
        if self._waiting and self._share is None:
            self._call_ahead()
        done, self._done = self._done, []
        return done

    def stop(self, name: bytes, attempt: int) -> None:
        """Stop a job by SIGTERM and then SIGKILL, and report nothing.

        The slots are in use until the processes have ended. An unknown job is ignored.
        """
        self._take_back()
        for waiting in self._waiting:
            if waiting[0].key == (name, attempt):
                self._waiting.remove(waiting)
                return
        for process in self._processes:
            if process.is_running((name, attempt)):
                process.cancel()
                self._files.drop((name, attempt))

    def run_so_far(self, name: bytes, attempt: int) -> Run | None:
        """Return the run of a job until now; None if it has not started."""
        running = [process for process in self._processes if process.is_running((name, attempt))]
        return running[0].run_record() if running else None

    def new_output(self) -> list[tuple[Job, bytes]]:
        """Return running programs that have printed since the last call, with the end of it."""
        programs = [one for one in self._processes if isinstance(one, Program) and one.is_wanted]
        printed = [(one.job, one.new_output()) for one in programs]
        return [(job, output) for job, output in printed if job is not None and output]

    def unstarted(self) -> list[Job]:
        """Remove and return the jobs that have not started. They are not reported."""
        self._take_back()
        jobs = [job for job, _ in self._waiting]
        self._waiting.clear()
        return jobs

    def withdraw(self, count: int) -> list[Job]:
        """Remove and return the last jobs that have not started, at most `count`."""
        jobs: list[Job] = []
        while self._waiting and len(jobs) < count:
            jobs.append(self._waiting.pop()[0])
        return jobs[::-1]

    def close(self) -> None:
        """Kill everything, and wait for its end. Nothing is reported."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.clear()
        self._let_children_exit()
        for process in self._processes:
            process.process.signal(signal.SIGKILL)
        for process in self._processes:
            process.kill()
        self._processes.clear()
        self._selector.close()
        os.close(self._dev_null)

    def _let_children_exit(self) -> None:
        """Let idle Python children exit, and wait a little. They may have queues to send."""
        poll, left = select.poll(), 0
        for child in self._call_processes():
            if child.let_exit() and child.process.pidfd is not None:
                poll.register(child.process.pidfd, select.POLLIN)
                left += 1
        until_ns = self._clock.monotonic_ns() + EXIT_NS_MAX
        while left and (rest_ns := until_ns - self._clock.monotonic_ns()) > 0:
            for pidfd, _ in poll.poll(rest_ns / _MILLISECOND_NS):
                poll.unregister(pidfd)
                left -= 1

    def _check_processes(self) -> None:
        now_ns = self._clock.monotonic_ns()
        have_ended = has_limit = False
        for process in self._processes:
            if process.process.pidfd is None:
                process.poll()
            if process.due_ns is not None and process.due_ns <= now_ns:
                process.on_due()
            if process.watch_at_ns is not None and process.watch_at_ns <= now_ns:
                process.watch()
            if process.has_ended:
                have_ended = True
                self._gpus.give_back(process.gpus)
            is_over = process.has_ended or process.ending is not None
            if is_over and isinstance(process, CallProcess):
                self._waiting_calls.drop(process)
            has_limit = has_limit or process.memory_limit_bytes > 0
        if have_ended:
            self._processes = [process for process in self._processes if not process.has_ended]
        if has_limit and self._memory_guard.due_ns <= now_ns:
            self._memory_guard.check(self._processes, now_ns)
        if len(self._processes) > self.slots_total:
            self._end_surplus(now_ns)

    def _surplus_children(self) -> list[CallProcess]:
        """Return idle children beyond the slots, the longest idle first."""
        idle = [one for one in self._call_processes() if one.is_free()]
        count = len(idle) - self.slots_total
        return sorted(idle, key=lambda one: one.idle_since_ns)[:count] if count > 0 else []

    def _end_surplus(self, now_ns: int) -> None:
        """End children that replaced processes of waiting calls, when they are idle for long."""
        for child in self._surplus_children():
            if child.idle_since_ns + CHILD_IDLE_NS_MAX <= now_ns:
                child.end(b"it was idle")

    def _has_room(self) -> bool:
        """Return whether a waiting job can start."""
        return self._next_index() is not None

    def _next_index(self) -> int | None:
        """Return the index of the next job that can start. Jobs without GPUs are overtaken."""
        for index, (job, _) in enumerate(self._waiting):
            if not self._has_slots(job):
                return None
            if self._has_gpus(job):
                return index
        return None

    def _has_gpus(self, job: Job) -> bool:
        """Return whether the GPUs of a job are free, also of processes that are being ended."""
        return self._gpus.has(job.amount(GPUS))

    def _has_slots(self, job: Job) -> bool:
        """Return whether a job can start. Calls that have waited go on first."""
        return not self._waiting_calls.resuming and self._has_free_slots(job)

    def _has_free_slots(self, job: Job) -> bool:
        """Return whether a job has room. A job wider than the worker runs alone."""
        if self._share is not None:
            return self._share.may_start(job.slots, job.resources)
        slots_used = self.slots_used
        if slots_used == 0:
            return True
        return slots_used + job.slots <= self.slots_total and self._has_cores(job)

    def _has_cores(self, job: Job) -> bool:
        """Return whether the cores of a job are free.

        The broker counts them, but gives away the cores of calls that wait and may go on any time.
        """
        needed = job.amount(CPUS) if self.cores_total else 0
        used = sum(one.amount(CPUS) for one in self.started()) if needed else 0
        return not needed or used + needed <= self.cores_total

    def _resume_calls(self) -> None:
        """Free the slots of calls that wait, and let calls go on that have waited."""
        for child in self._waiting_calls.admit():
            child.give_slots_back()
        while (resumed := self._waiting_calls.next_resumed(self._may_resume)) is not None:
            resumed.resume()

    def _may_resume(self, child: CallProcess) -> bool:
        return child.job is None or self._has_free_slots(_with_resources(child.job, cores=True))

    def _on_resume(self, child: CallProcess) -> None:
        if self._waiting_calls.resume(child):
            child.resume()

    def _start_waiting(self) -> None:
        while (index := self._next_index()) is not None:
            job, work = self._waiting[index]
            del self._waiting[index]
            self._start_work(job, work)

    def _call_ahead(self) -> None:
        """Send small calls to processes whose calls are short, one to each in turn."""
        children = [(one, one.ahead_max()) for one in self._call_processes()]
        while children := [(one, most) for one, most in children if len(one.ahead) < most]:
            for child, _ in children:
                if not self._waiting or not _may_be_ahead(*self._waiting[0]):
                    return
                count = len(child.ahead)
                child.call_ahead(self._waiting.popleft()[0])
                if len(child.ahead) == count:  # it is full
                    return

    def _take_back(self) -> None:
        """Take back the calls that were sent ahead and have not begun."""
        for child in self._call_processes():
            if child.ahead:
                child.watch()

    def _on_returned(self, jobs: Sequence[Job]) -> None:
        """Queue jobs again that were sent to a process, and that it has not begun."""
        for job in reversed(jobs):
            work = self._work_of(job)
            if work is not None:
                self._queue(job, work, is_first=True)

    def _start_work(self, job: Job, work: Work) -> None:
        if isinstance(work, Command):
            self._start_program(job, work)
        else:
            self._start_call(job)

    def _start_program(self, job: Job, command: Command) -> None:
        try:
            environment = self._environment_of(job.environment)
        except PeerError as error:
            self._refuse(job, str(error))
            return
        try:
            with available(job.inputs):
                command = environment.apply_to(place_inputs(command))
        except UserError as error:
            self._refuse(job, str(error))
            return
        result = self._files.start(job, command, environment.note)
        if result is not None:
            self._report(result)
            return
        gpus = self._gpus.take(job.amount(GPUS))
        try:
            program = start_program(job, command, self._context, environment.env, gpus)
        except (OSError, ValueError) as error:
            self._gpus.give_back(gpus)
            self._report(not_started(job, command, error))
        else:
            program.gpus = gpus
            self._processes.append(program)

    def _start_call(self, job: Job) -> None:
        amount = job.amount(GPUS)
        try:
            child = self._idle_child(fresh=bool(amount))
        except OSError as error:
            self._report(JobResult(job, Outcome.REFUSED, f"can't start Python: {error}".encode()))
        else:
            child.call(job, self._gpus.take(amount))

    def _idle_child(self, *, fresh: bool) -> CallProcess:
        """Return a child without a job. A process can't change its GPUs, so it gets them fresh."""
        for process in () if fresh else self._processes:
            if isinstance(process, CallProcess) and process.is_free():
                return process
        return self._start_child()

    def _start_child(self, *, forked: bool = False) -> CallProcess:
        allow = [*self._allow, ANY_PICKLE] if self._allow_pickle else self._allow
        child = start_child(allow, self._context, self.call_options, forked=forked)
        child.on_returned = self._on_returned
        child.on_wait, child.on_resume = self._waiting_calls.wait, self._on_resume
        self._processes.append(child)
        return child

    def _refuse(self, job: Job, reason: str) -> None:
        reason_bytes = cut_reason(reason.encode(errors="replace"))
        self._report(JobResult(job, Outcome.FAILED_FINAL, reason_bytes))

    def _report(self, done: JobResult) -> None:
        if done.run is None and done.outcome is not Outcome.REFUSED:
            done.run = Run(self._clock.wall_ns(), 0)  # it ended before it could start
        self._done.append(self._files.finish(done))


def _with_resources(job: Job, *, cores: bool) -> Job:
    """Return a job with its cores, or with its other resources."""
    resources = tuple(one for one in job.resources if (one[0] == CPUS) is cores)
    return structs.replace(job, resources=resources)


def _input_problem(job: Job, work: Work) -> str | None:
    """Return why a task can't run if its inputs were not fetched."""
    if isinstance(work, AgentSettings):
        return None
    names = work.header.results if isinstance(work, Pickled) else work.results
    if not names or job.inputs:
        return None
    return f"result of {names[0]}: a worker of this dialect can't fetch it (use a native worker)"


def _may_be_ahead(job: Job, work: Work) -> bool:
    return isinstance(work, Call | Pickled) and not job.lane and is_small(job)


def _open_null() -> int:
    """Open /dev/null, also in place of closed standard files.

    Otherwise a pipe or socket could get the number of stdout, and receive prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STANDARD_DESCRIPTORS:
        pass
    return descriptor


def _restore_sigchld() -> None:
    """Restore SIGCHLD. A parent may have passed on SIG_IGN, and exit statuses would be lost."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
