"""Simulated processes that run the product's loops.

Owns the turns of a process: when a message arrives or its loop's timer ends, and never while it is
stopped. A loop gets simulated sockets, a runner that only pretends to work, and a clock. It is the
product's own code, so its bugs are findings.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from zlib import crc32

from simulator.clock import WALL_START_NS
from simulator.decoders import BY, decode
from simulator.measurements import measured
from simulator.models import Violation
from simulator.outputs import CALLS, has_stdout, printed_by
from simulator.plan import MILLISECOND_NS, NAMED_BY_BROKER, RESULT_BYTES, SECOND_NS, TRUNCATED
from taskyard.core import effects, events
from taskyard.core.blobs import Blob, Content
from taskyard.core.events import Outcome
from taskyard.core.model import Stream
from taskyard.core.runs import Run
from taskyard.worker.agents.rules import AgentRules
from taskyard.worker.jobs import Job, JobResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.clock import Timeline
    from simulator.world import World
    from taskyard.core.events import Event
    from taskyard.core.resources import Resources
    from taskyard.core.rules import Rule
    from taskyard.worker.output import OutputSpool, SpooledStream

#: Turns at once, without a message, that a loop may request. More are a busy loop.
TURNS_AT_ONCE_MAX: Final = 20

#: The resolution of the real poller.
TICK_NS: Final = MILLISECOND_NS


class ProcessClock:
    """The clocks of a peer's machine, which booted at another time than the broker's."""

    def __init__(self, timeline: Timeline, epoch_ns: int) -> None:
        self._timeline = timeline
        self._epoch_ns = epoch_ns

    def monotonic_ns(self) -> int:
        return self._timeline.now_ns + self._epoch_ns

    def wall_ns(self) -> int:
        return self._timeline.now_ns + WALL_START_NS


class SimProcess:
    """A process that runs one loop. Programs override `build`, `turn` and `wake_at_ns`."""

    def __init__(self, world: World, name: bytes) -> None:
        self.world = world
        self.name = name
        self.rng = world.rng
        self.clock = ProcessClock(world.timeline, world.rng.randrange(1 << 40))
        self.alive = self.hung = False
        #: Rises with each process.
        self.process = 0
        #: Only the turn that was scheduled last counts.
        self._planned = 0
        self._planned_ns: int | None = None
        self._turns_at_once = 0
        self._has_arrived = False

    # Starts and ends.

    def start(self) -> None:
        """Start a new process."""
        if self.alive:
            return
        self.alive, self.hung = True, False
        self.process += 1
        self._turns_at_once = 0
        self.world.trace("starts", self.name)
        self.build()
        self.wake()

    def end(self) -> None:
        """End the process. Messages on the way may still arrive."""
        self.alive = self.hung = False
        self._planned += 1
        self._planned_ns = None
        self.close()

    def die(self) -> None:
        """Crash, and come back as another process."""
        if self.alive:
            self.world.trace("crashes", self.name)
            self.end()
        self.start_later()

    def start_later(self) -> None:
        delay_ns = 1 + self.rng.randrange(self.world.faults.restart_ns_max)
        self.world.timeline.after(delay_ns, self.start)

    def hang(self, for_ns: int) -> None:
        """Stop the process, as SIGSTOP does, and continue later."""
        if self.alive and not self.hung:
            self.world.trace("is stopped", self.name)
            self.hung = True
            self.world.timeline.after(for_ns, partial(self._resume, self.process))

    def _resume(self, process: int) -> None:
        if process == self.process and self.hung:
            self.world.trace("continues", self.name)
            self.hung = False
            self.wake()

    def wake(self) -> None:
        """Turn as soon as possible, because a message arrived."""
        self._has_arrived = True
        if self.alive and not self.hung:
            self._plan(self.world.timeline.now_ns)

    # Turns.

    def _plan(self, at_ns: int) -> None:
        if self._planned_ns is not None and self._planned_ns <= at_ns:
            return
        self._planned += 1
        self._planned_ns = at_ns
        self.world.timeline.at(at_ns, partial(self._turn, self._planned))

    def _turn(self, number: int) -> None:
        if number != self._planned or not self.alive:
            return
        self._planned_ns = None
        if self.hung:
            return
        self.turn()
        if number != self._planned:
            return  # it has ended
        wake_at_ns = self.wake_at_ns()
        if wake_at_ns is not None:
            wait_ns = max(0, wake_at_ns - self.clock.monotonic_ns())
            self._check_busy_loop(wait_ns)
            # A real poller rounds up, and takes a while even with no wait.
            self._plan(self.world.timeline.now_ns + max(-(-wait_ns // TICK_NS), 1) * TICK_NS)
        self._has_arrived = False

    def _check_busy_loop(self, wait_ns: int) -> None:
        self._turns_at_once = 0 if wait_ns or self._has_arrived else self._turns_at_once + 1
        if self._turns_at_once > TURNS_AT_ONCE_MAX:
            raise Violation("busy loop", f"{self.name!r} turns in a busy loop")

    # Overridden by each program.

    def build(self) -> None:
        """Make the loop, its sockets and its runner, as a new process does."""
        raise NotImplementedError

    def turn(self) -> None:
        raise NotImplementedError

    def wake_at_ns(self) -> int | None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the sockets."""
        raise NotImplementedError


class CallRunner(Protocol):
    """Reads the arguments of calls, and stores their results."""

    def start(self, job: Job) -> None:
        """Read the arguments of a job, if it is a call."""
        ...

    def is_over(self, job: Job) -> bool:
        """Return whether a job has read and stored everything."""
        ...

    def end(self, done: JobResult) -> None:
        """Set the result of a job, if it is a call."""
        ...

    def drop(self, key: tuple[bytes, int]) -> None:
        """Forget a job."""
        ...


class SimRunner:
    """A runner that pretends to work. Implements the runner protocols of all loops."""

    agent_error = b""
    malformed = 0

    def __init__(  # noqa: PLR0913  # all but three are named
        self,
        program: ProductWorker,
        slots: int,
        outcomes: Sequence[Outcome],
        *,
        sends_attempts: bool = True,
        spool: OutputSpool | None = None,
        calls: CallRunner | None = None,
    ) -> None:
        self._program = program
        self._world = program.world
        self._slots = slots
        #: Possible outcomes beside DONE and FAILED.
        self._outcomes = outcomes
        self._sends_attempts = sends_attempts
        #: Jobs that wait for a slot, and end times of running jobs, by their keys.
        self._waiting: dict[tuple[bytes, int], Job] = {}
        self._running: dict[tuple[bytes, int], tuple[Job, int]] = {}
        #: Attempts that this process ever started.
        self._seen: dict[tuple[bytes, int], None] = {}
        self._rules = AgentRules()
        #: Takes what jobs print. None: they print nothing.
        self._spool = spool
        self._streams: dict[tuple[bytes, int], tuple[SpooledStream, SpooledStream]] = {}
        #: Reads and stores what calls need. None: there are no calls.
        self._calls = calls
        #: Called with the output of a task.
        self.on_output: Callable[[Job, Content], None] | None = None

    def start(self, job: Job) -> None:
        if job.key in self._seen:
            raise Violation("runner", f"{self._program.name!r} begins {job.key} a second time")
        self._seen[job.key] = None
        self._program.served_ns = self._world.timeline.now_ns
        if self._sends_attempts:
            names, attempts = [job.name], [job.attempt]
            worker = self._program.core_name()
            self._world.checker.replies.on_assigned(
                effects.Assign(worker, names, attempts, [], [], [], 0)
            )
        self._waiting[job.key] = job
        self._fill()

    def _fill(self) -> None:
        now_ns = self._program.clock.monotonic_ns()
        while self._waiting and len(self._running) < self._slots:
            key = next(iter(self._waiting))
            job = self._waiting.pop(key)
            self._running[key] = job, now_ns + self._work_ns()
            if self._spool is not None:
                out, err = (self._spool.stream(job, stream) for stream in Stream)
                self._streams[key] = out, err
                self._print(job, 0, 1)
            if self._calls is not None:
                self._calls.start(job)
            is_printed = self._spool is not None and has_stdout(job.name)  # of agents alone
            if self.on_output is None or is_printed:
                continue
            if self._chance(self._world.faults.progress):
                self.on_output(job, b"half of " + job.name)

    def _print(self, job: Job, first: int, last: int) -> None:
        """Print the halves of a job's output from the first to the last."""
        for stream in self._streams[job.key]:
            printed = printed_by(self._world.plan.seed, *job.key, stream.stream)
            half = len(printed) // 2
            data = printed[first * half : len(printed) if last > 1 else half]
            if data:
                stream.add(data)

    def _work_ns(self) -> int:
        world = self._world
        most_ns = 20 * MILLISECOND_NS if world.healed else world.plan.size.work_ns_max
        if world.is_last_round:
            most_ns = SECOND_NS // 4
        return world.rng.randrange(most_ns) + 1

    def stop(self, name: bytes, attempt: int) -> None:
        self._waiting.pop((name, attempt), None)
        self._running.pop((name, attempt), None)
        self._streams.pop((name, attempt), None)
        if self._calls is not None:
            self._calls.drop((name, attempt))

    def run_so_far(self, name: bytes, attempt: int) -> Run | None:
        del name, attempt
        return None

    def turn(self) -> list[JobResult]:
        now_ns = self._program.clock.monotonic_ns()
        done: list[JobResult] = []
        for key, (job, ends_ns) in [*self._running.items()]:
            if ends_ns > now_ns or not self._is_over(job):
                continue
            del self._running[key]
            task = self._program.task_of(job)
            if task in self._world.poisoned:
                self._world.trace("dies of", task)
                self._program.die()
                return []
            done.append(self._done(job, task))
        self._fill()
        return done

    def _is_over(self, job: Job) -> bool:
        return self._calls is None or self._calls.is_over(job)

    def _done(self, job: Job, task: bytes) -> JobResult:
        done = JobResult(job, self._outcome(), task + BY + self._program.name)
        text = done.text
        if self._spool is not None:
            self._add_streams(done)
        if self._calls is not None:
            self._calls.end(done)
        outcome = done.outcome
        if outcome is Outcome.RETRY_AT:
            done.retry_at_ns = self._world.clock.wall_ns() + self._world.rng.randrange(SECOND_NS)
        if outcome is Outcome.REFUSED:
            done.healthy = self._chance(0.5)
        if self._sends_attempts:
            runs = measured([job.name], [job.attempt], self._world.clock.wall_ns())
            done.run = None if runs is None else runs.at(0)
        is_call = job.service == CALLS
        # The client of a job would get an error.
        is_cut = crc32(task) % 4 == 0 and not task.startswith(NAMED_BY_BROKER) and not is_call
        if outcome is Outcome.DONE and is_cut and self._program.truncates_results:
            done.content = Blob(b"", RESULT_BYTES, TRUNCATED + text)
        return done

    def _add_streams(self, done: JobResult) -> None:
        """Add what a job has printed. The result of some is their stdout."""
        self._print(done.job, 1, 2)
        streams = self._streams.pop(done.job.key)
        is_result = done.outcome is Outcome.DONE and has_stdout(done.job.name)
        if is_result or any(one.bytes_total for one in streams):
            done.streams = streams
        if is_result:
            done.content = b""

    def _outcome(self) -> Outcome:
        faults = self._world.faults
        if self._chance(faults.fails):
            return Outcome.FAILED
        if self._outcomes and self._chance(faults.unusual_outcome):
            return self._world.rng.choice(self._outcomes)
        return Outcome.DONE

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._world.rng.random() < probability

    def unstarted(self) -> list[Job]:
        taken, self._waiting = [*self._waiting.values()], {}
        return taken

    def waiting_calls(self) -> tuple[Sequence[Job], int]:
        return (), 0

    def withdraw(self, count: int) -> list[Job]:
        keys = [*self._waiting][-count:]
        return [self._waiting.pop(key) for key in keys]

    def running(self) -> list[Job]:
        return [job for job, _ in self._running.values()]

    def wake_at_ns(self) -> int | None:
        now_ns = self._program.clock.monotonic_ns()
        running = self._running.values()
        ends = (ends_ns for job, ends_ns in running if ends_ns > now_ns or self._is_over(job))
        return min(ends, default=None)

    # The broker's rules.

    @property
    def overfeed_max(self) -> int:
        return self._rules.overfeed_max

    def overfeed(self, lane: tuple[bytes, bytes]) -> int:
        return self._rules.rules_for(lane).overfeed

    def set_rules(self, clauses: Sequence[Rule]) -> None:
        self._rules = self._rules.updated(clauses) or self._rules


class ProductWorker(SimProcess):
    """The base of product workers."""

    kind = ""
    #: It sends its incarnation.
    sends_incarnation = False
    #: Distinguishes workers of one name.
    twin = 0
    #: A supervisor restarts it, and reports the end of the former process.
    is_supervised = True
    #: Some results are too long and truncated.
    truncates_results = False
    #: Named resources, if its dialect has a field for them.
    resources: Resources = ()

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name)
        self.services = services
        self.slots = max(1, slots)
        #: It was dismissed and does not come back.
        self.retired = False
        #: It was stopped by its owner, who restarts it when it has ended.
        self._comes_back = False
        #: When it last got a task.
        self.served_ns = 0

    def core_name(self) -> bytes:
        """Return its name in the core."""
        return self.name

    @property
    def silent_ns_max(self) -> int:
        """Return for how long it may send nothing from now on, beside short intervals."""
        return 0

    def note_interval(self, incarnation: int, heartbeat_ns: int) -> None:
        """Note the interval of its heartbeats for the checker."""
        self.world.checker.intervals_ns[self.core_name(), incarnation] = heartbeat_ns

    def task_of(self, job: Job) -> bytes:
        """Return the task of a job."""
        return job.name

    def shut_down(self) -> None:
        """Shut down, as after a signal."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop, as after a signal of an owner who restarts it."""
        if self.alive and not self.hung:
            self._comes_back = True
            self.shut_down()
            self.wake()

    def over(self) -> None:
        """End the process after its loop."""
        self.world.trace("is gone", self.name)
        self.end()
        if self._comes_back:
            self._comes_back = False
            self.start_later()
        else:
            self.retired = True

    def on_free(self) -> None:
        """Turn once, as every revived worker does."""
        self.wake()

    def decode_sent(self, route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
        """Decode an outgoing message, and note the reports in it."""
        sent = decode(route, frames)
        checker = self.world.checker
        for one in sent:
            if isinstance(one, events.TasksReported):
                checker.replies.on_reporting(
                    one.worker, one.names, one.attempts, one.outcomes or []
                )
        if sent:
            self.world.trace("peer sends", sent[-1], frames)
        return sent
