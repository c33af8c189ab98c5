"""The forwarder: a native or WMP worker whose runner is another broker.

Threads do what blocks: one submits and cancels tasks, one fetches the results of settled
tasks, one follows the capacity of the lower broker. The loop's thread owns the list of jobs and
the output spool. A queue between them is bounded, so that a long output is read from one broker
only as fast as the other takes it.

A job that the worker stops is left to run at the lower broker, where its next attempt finds it.
Only a job whose task has ended at the upper broker is cancelled there.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.calls.payloads import CALL, EXEC
from taskyard.calls.plain_pickles import looks_pickled
from taskyard.client.internal import InternalClient
from taskyard.core.blobs import Blob, blobs_in, text_of
from taskyard.core.events import Outcome
from taskyard.core.model import Stream, shown
from taskyard.errors import (
    BytesMissing,
    ClientClosed,
    NoBroker,
    Refused,
    TaskFailed,
    TaskyardError,
    UserError,
)
from taskyard.forward.lower import LowerBroker, upper_label
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Host, Waker
from taskyard.worker.jobs import Job, JobResult, cut_reason
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.native_process import SocketWorker
from taskyard.worker.output import OutputSpool, ProgramOutput, SpooledOutput
from taskyard.worker.wmp import WmpWorker, WmpWorkerLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future as AnyFuture
    from pathlib import Path
    from typing import Any

    from taskyard.core.blobs import Content
    from taskyard.core.runs import Run
    from taskyard.forward.lower import Capacity
    from taskyard.net.keys import PeerKey
    from taskyard.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

#: Parts of outputs between the threads.
PARTS_MAX: Final = 4

#: Jobs submitted in one message.
JOBS_PER_MESSAGE_MAX: Final = 1000

#: Loops that are logged, each once.
LOOPS_LOGGED_MAX: Final = 100

#: How often the capacity of the lower broker is requested.
CAPACITY_SECONDS: Final = 5.0


class OutputPart(Struct):
    """A part of a job's output."""

    job: Job
    stream: Stream
    data: bytes
    #: Bytes that the lower broker did not keep.
    lost: int = 0


class Settled(Struct):
    """The end of a job at the lower broker. The output was passed on before."""

    job: Job
    outcome: Outcome
    #: The result or the reason. None: it is the output.
    text: Content | None
    run: Run | None = None


class ForwardRunner:
    """Runs jobs at a lower broker."""

    #: Called with the capacity of the lower broker when it has changed.
    on_capacity: Callable[[Capacity], None] | None = None

    def __init__(self, lower: LowerBroker, spool: OutputSpool | None) -> None:
        """`spool` takes the output of programs. Without it, the end goes with their results."""
        self._lower = lower
        self._spool = spool
        #: Jobs without a result, with their output so far.
        self._jobs: dict[tuple[bytes, int], tuple[Job, ProgramOutput | SpooledOutput]] = {}
        self._capacity: queue.SimpleQueue[Capacity] = queue.SimpleQueue()
        self._waker = Waker()
        #: Jobs to start, or to cancel. None: the end.
        self._calls: queue.SimpleQueue[tuple[bool, Job] | None] = queue.SimpleQueue()
        self._settled: queue.SimpleQueue[tuple[Job, AnyFuture[Any]] | None] = queue.SimpleQueue()
        #: From the threads to the loop.
        self._arrived: queue.Queue[OutputPart | Settled] = queue.Queue(PARTS_MAX)
        #: A part that the spool had no room for.
        self._kept: OutputPart | Settled | None = None
        #: The loops that were logged.
        self._loops: set[str] = set()
        self._is_closed = False
        self._closed = threading.Event()
        targets = {"submit": self._submit, "fetch": self._fetch, "capacity": self._follow_capacity}
        self._threads = [
            threading.Thread(target=target, name=f"forward-{name}", daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    # The loop's thread.

    def start(self, job: Job) -> None:
        spool = self._spool
        self._jobs[job.key] = (job, ProgramOutput() if spool is None else SpooledOutput(spool, job))
        self._calls.put((True, job))

    def stop(self, name: bytes, attempt: int) -> None:
        """Forget a job. The task at the lower broker goes on."""
        self._jobs.pop((name, attempt), None)

    def cancel_ended(self, keys: Sequence[tuple[bytes, int]]) -> None:
        """Cancel the tasks of jobs that have ended at the upper broker.

        A task that another attempt has taken over goes on.
        """
        for key in keys:
            if key not in self._jobs:
                continue
            job = self._jobs[key][0]
            attempts = [
                one for one in self.running() if (one.name, one.manager) == (job.name, job.manager)
            ]
            if len(attempts) == 1:
                self._calls.put((False, job))

    def run_so_far(self, _name: bytes, _attempt: int) -> None:
        """Return nothing: the lower broker measures."""

    def running(self) -> list[Job]:
        return [job for job, _ in self._jobs.values()]

    def unstarted(self) -> list[Job]:
        """Return no jobs: all are at the lower broker."""
        return []

    def waiting_calls(self) -> tuple[Sequence[Job], int]:
        return (), 0

    def withdraw(self, _count: int) -> list[Job]:
        """Return no jobs: all are at the lower broker."""
        return []

    def filenos(self) -> list[int]:
        return [self._waker.fileno()]

    def wake_at_ns(self) -> None:
        """Return no time: the threads wake the loop."""

    def turn(self) -> list[JobResult]:
        """Take output and results from the threads. Return the results."""
        self._waker.clear()
        self._use_capacity()
        spool, done = self._spool, list[JobResult]()
        while (arrived := self._next()) is not None:
            if spool is not None and spool.is_full() and isinstance(arrived, OutputPart):
                self._kept = arrived
                spool.pause(self._waker.wake)
                break
            if arrived.job.key not in self._jobs:
                continue  # stopped
            if isinstance(arrived, OutputPart):
                self._add(arrived)
            else:
                done.append(self._result(arrived))
        return done

    def _use_capacity(self) -> None:
        with suppress(queue.Empty):
            while True:
                capacity = self._capacity.get_nowait()
                if self.on_capacity is not None:
                    self.on_capacity(capacity)

    def _next(self) -> OutputPart | Settled | None:
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        with suppress(queue.Empty):
            return self._arrived.get_nowait()
        return None

    def _add(self, part: OutputPart) -> None:
        output = self._jobs[part.job.key][1]
        if part.lost:
            output.add_lost(part.stream, part.lost)
        add = output.add_stdout if part.stream is Stream.STDOUT else output.add_stderr
        if part.data:
            add(part.data)

    def _result(self, settled: Settled) -> JobResult:
        job, output = self._jobs.pop(settled.job.key)
        if settled.outcome is not Outcome.DONE:
            done = output.failed(job, settled.outcome, cut_reason(text_of(settled.text or b"")))
        else:
            done = output.done(job)
            if settled.text is not None:
                done.content = settled.text
        done.run = settled.run
        return done

    def close(self) -> None:
        """End the threads. The tasks at the lower broker go on."""
        if self._is_closed:
            return
        self._is_closed = True
        self._closed.set()
        self._calls.put(None)
        self._settled.put(None)
        self._lower.close()
        for thread in self._threads:
            while thread.is_alive():
                self._drain()
                thread.join(0.05)
        self._waker.close()

    def _drain(self) -> None:
        """Make room for a thread that waits to pass something on."""
        with suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()

    # The threads.

    def _submit(self) -> None:
        """Submit and cancel tasks until the end."""
        with suppress(ClientClosed):
            while calls := self._take_calls():
                self._submit_jobs([job for is_start, job in calls if is_start])
                for is_start, job in calls:
                    if not is_start:
                        self._lower.cancel(job)

    def _take_calls(self) -> list[tuple[bool, Job]]:
        """Wait for a call, and return all that are there. Empty: the runner is closed."""
        calls: list[tuple[bool, Job]] = []
        with suppress(queue.Empty):
            while len(calls) < JOBS_PER_MESSAGE_MAX:
                call = self._calls.get(block=not calls)
                if call is None:
                    return []
                calls.append(call)
        return calls

    def _submit_jobs(self, jobs: list[Job]) -> None:
        """Submit jobs together. If any is refused, submit each by itself."""
        jobs = [job for job in jobs if not self._is_loop(job) and not self._needs_inputs(job)]
        if not jobs:
            return
        try:
            futures = self._lower.submit(jobs)
        except UserError as refused:
            if len(jobs) > 1:
                for job in jobs:
                    self._submit_jobs([job])
                return
            reason = f"refused by {self._lower.endpoint}: {refused}"
            self._pass_on(Settled(jobs[0], Outcome.FAILED, reason.encode(errors="replace")))
            return
        except ClientClosed:
            raise
        except TaskyardError as error:  # such as a broker that shuts down: try again later
            text = f"can't submit to {self._lower.endpoint}: {error}".encode(errors="replace")
            for job in jobs:
                self._pass_on(Settled(job, Outcome.REFUSED, text))
            return
        for job, future in zip(jobs, futures, strict=True):
            future.add_done_callback(partial(self._on_settled, job))

    def _needs_inputs(self, job: Job) -> bool:
        """Return whether a job needs results of other tasks or large values. Fail its task if so.

        The lower broker does not have them.
        """
        if not job.inputs and not blobs_in(job.payload):
            return False
        what = f"result of {job.inputs[0].name}" if job.inputs else "large arguments"
        text = f"{what}: not available at {self._lower.endpoint}, where it was forwarded"
        self._pass_on(Settled(job, Outcome.FAILED_FINAL, text.encode(errors="replace")))
        return True

    def _is_loop(self, job: Job) -> bool:
        """Return whether a job was at one of the brokers before. Return its task if so.

        Other workers of the upper broker can run it.
        """
        text = self._lower.loop_text(job)
        if not text:
            return False
        if text not in self._loops and len(self._loops) < LOOPS_LOGGED_MAX:
            self._loops.add(text)
            logger.warning("%s (returned to the other workers of its broker)", text)
        self._pass_on(Settled(job, Outcome.REFUSED, text.encode(errors="replace")))
        return True

    def _on_settled(self, job: Job, future: AnyFuture[Any]) -> None:
        self._settled.put((job, future))

    def _fetch(self) -> None:
        """Fetch the results of settled tasks until the end."""
        with suppress(ClientClosed):
            while (one := self._settled.get()) is not None:
                job, future = one
                try:
                    self._fetch_result(job, future)
                except ClientClosed:
                    raise
                except TaskyardError as error:
                    text = f"result at {self._lower.endpoint}: {error}"
                    self._pass_on(Settled(job, Outcome.REFUSED, text.encode(errors="replace")))

    def _fetch_result(self, job: Job, future: AnyFuture[Any]) -> None:
        outcome, reason = _outcome(future, self._lower.endpoint)
        text: Content | None = reason
        streams = [*Stream]
        kept = self._lower.result(job) if outcome is Outcome.DONE else None
        if kept is not None and kept.blob is None:  # stdout may be there, too, with stderr
            text = kept.content
            streams = [Stream.STDERR] if job.service == EXEC or kept.has_stderr else []
            is_other = job.service not in (EXEC, CALL) or looks_pickled(kept.text)
            if is_other and blobs_in(kept.text):
                outcome, where = Outcome.FAILED_FINAL, self._lower.endpoint
                text = f"large result: not forwarded, available at {where}".encode(errors="replace")
        try:
            for stream in streams:
                self._fetch_output(job, stream)
        except BytesMissing:
            if kept is not None:  # head and tail are left
                blob = kept.blob
                text = kept.content if blob is None else Blob(b"", blob.length, blob.ends)
        self._pass_on(Settled(job, outcome, text, self._lower.run(job)))

    def _fetch_output(self, job: Job, stream: Stream) -> None:
        """Pass on a stream of a task. Raises `BytesMissing`."""
        for data, lost in self._lower.output(job, stream.name.lower()):
            self._pass_on(OutputPart(job, stream, data, lost))

    def _follow_capacity(self) -> None:
        """Request the capacity of the lower broker until the end. Pass on changes."""
        known: Capacity | None = None
        with suppress(ClientClosed):
            while not self._closed.wait(CAPACITY_SECONDS):
                with suppress(NoBroker, Refused):  # reported by the client
                    capacity = self._lower.capacity()
                    if capacity is not None and capacity != known:
                        known = capacity
                        self._capacity.put(capacity)
                        self._waker.wake()

    def _pass_on(self, arrived: OutputPart | Settled) -> None:
        """Pass something to the loop, and wait while it has no room."""
        while not self._is_closed:
            with suppress(queue.Full):
                self._arrived.put(arrived, timeout=0.1)
                self._waker.wake()
                return
        raise ClientClosed("the forwarder stops")


def _outcome(future: AnyFuture[Any], endpoint: str) -> tuple[Outcome, bytes | None]:
    """Return the outcome of a settled task, and the reason if it failed."""
    try:
        future.result()
    except CancelledError:
        return Outcome.FAILED, f"cancelled at {endpoint}".encode()
    except TaskFailed as failed:
        return Outcome.FAILED, failed.reason.encode(errors="surrogateescape")
    except ClientClosed:
        raise
    except Exception:  # noqa: BLE001, S110  # its value can't be decoded here, and need not be
        pass
    return Outcome.DONE, None


#: Seconds between two attempts to reach the lower broker.
RETRY_SECONDS: Final = 1.0


def connect_lower(
    broker: str, key: Path | None, label: str | None, upper: str, announce: Callable[[str], None]
) -> LowerBroker:
    """Connect to the lower broker. Waits until it answers."""
    is_announced = False
    while True:
        try:
            client = InternalClient(broker, key=key, connect_timeout=RETRY_SECONDS, report=announce)
        except NoBroker:
            if not is_announced:
                announce(f"waiting for a broker at {broker}")
            is_announced = True
            time.sleep(RETRY_SECONDS)
        else:
            given = label is not None
            return LowerBroker(client, label or upper_label(upper), is_label_given=given)


def serve(  # noqa: PLR0913  # the last arguments are named
    endpoint: str,
    settings: WorkerSettings,
    lower: LowerBroker,
    announce: Callable[[str], None],
    *,
    slots: int | None = None,
    key: PeerKey | None = None,
    until_eof: bool = False,
) -> None:
    """Take tasks from the broker at `endpoint` and run them at the lower broker, until a
    signal.

    Follows the slots and resources of the lower broker's workers. `slots` are fixed.
    """
    with closing(lower), Host(until_eof=until_eof) as host:
        spool = OutputSpool(host.clock.monotonic_ns)
        runner = host.add_resource(ForwardRunner(lower, spool))
        wire = host.add_socket(sockets.connect(endpoint, key, counts=True))
        channel = Channel(wire, host.clock)
        loop = NativeWorkerLoop(settings, channel, runner, host.clock, spool=spool)
        loop.on_ended = runner.cancel_ended
        runner.on_capacity = lambda one: loop.set_capacity(slots or one.slots, one.resources)
        worker = SocketWorker(loop, channel, runner, announce)
        worker.wire, worker.host = wire, host
        host.run(worker)


def serve_wmp(  # noqa: PLR0913  # the last arguments are named
    managers: Sequence[str],
    settings: WorkerSettings,
    lower: LowerBroker,
    announce: Callable[[str], None],
    *,
    slots: int | None = None,
    keys: Sequence[PeerKey | None] = (),
    until_eof: bool = False,
) -> None:
    """Take tasks from WMP managers and run them at the lower broker, until a signal.

    Follows the slots of the lower broker's workers. `slots` are fixed.
    """
    with closing(lower), Host(until_eof=until_eof) as host:
        runner = host.add_resource(ForwardRunner(lower, None))
        pairs = zip_longest(managers, keys)
        wires = [host.add_socket(sockets.connect(*pair)) for pair in pairs]
        names = [upper_label(one) for one in managers]
        loop = WmpWorkerLoop(settings, wires, runner, host.clock, names=names)
        loop.on_ended = runner.cancel_ended
        if slots is None:
            runner.on_capacity = lambda one: loop.set_slots(one.slots)
        host.run(WmpWorker(loop, wires, runner, shown(settings.name), announce))
