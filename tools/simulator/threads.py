"""Threads of simulated processes: product code that blocks, on virtual time.

Each is a thread of Python, but only one thread runs at a time, and only while the timeline waits
for it. So a run depends on its seed alone. A process can be paused, as SIGSTOP does, and killed at
any call that blocks. Owns the means of product code to wait: sleep, events, threads.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from simulator.clock import SimClock, Timeline

#: Rates of clocks are in parts of a million.
MILLION: Final = 1_000_000

#: Threads of a process that continues run within this.
RESUMED_NS_MAX: Final = 5_000_000

_SECOND_NS: Final = 1_000_000_000


def _locked() -> threading.Lock:
    """Return a lock that another thread releases: the quickest way to wait for it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Killed(BaseException):
    """The process of this thread was killed. Not an `Exception`: no program handles it."""


class ProcessClock:
    """The clocks of a machine that booted at its own time, and whose seconds are not exact.

    The wall clock is set by a server, so all machines have the same.
    """

    def __init__(self, timeline: Timeline, wall: SimClock, epoch_ns: int, rate_ppm: int) -> None:
        self._timeline = timeline
        self._wall = wall
        self._epoch_ns = epoch_ns
        self._rate_ppm = rate_ppm

    def monotonic_ns(self) -> int:
        """Return the time of the broker's turns, which no other machine compares with its own."""
        return self._epoch_ns + self._timeline.now_ns

    def boottime_ns(self) -> int:
        """Return the time of leases, by the clock of this machine."""
        now_ns = self._timeline.now_ns
        return self._epoch_ns + now_ns + now_ns * self._rate_ppm // MILLION

    def wall_ns(self) -> int:
        return self._wall.wall_ns()

    def true_ns(self, span_ns: int) -> int:
        """Return how long a time of this machine takes."""
        return span_ns * MILLION // (MILLION + self._rate_ppm) + 1


class Threads:
    """All threads of a world. Runs one thread at a time."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.current: SimThread | None = None
        self._is_back = _locked()

    def running(self) -> SimThread:
        """Return the thread that runs now."""
        if self.current is None:
            raise RuntimeError("no simulated thread runs")
        return self.current

    def resume(self, thread: SimThread) -> None:
        """Let a thread run until it blocks or ends. Called by actions of the timeline alone."""
        self.current = thread
        thread.may_run.release()
        self._is_back.acquire()
        self.current = None
        if thread.error is not None:
            error, thread.error = thread.error, None
            raise error

    def leave(self) -> None:
        """Return to the timeline for good."""
        self._is_back.release()

    def block(self) -> None:
        """Return to the timeline until the current thread is resumed."""
        thread = self.running()
        self._is_back.release()
        thread.may_run.acquire()
        thread.process.check_alive()


class SimThread:
    """A thread of a simulated process."""

    def __init__(self, process: ThreadedProcess, run: Callable[[], object]) -> None:
        self.process = process
        self.may_run = _locked()
        self.error: BaseException | None = None
        self._threads = process.threads
        self._run = run
        self.has_ended = False
        #: Only the last wait counts.
        self._wait = 0
        self._is_woken = False
        self._ended = Event(self._threads)
        self._real = threading.Thread(target=self._main, daemon=True)

    def start(self) -> None:
        self.process.members.append(self)
        self._real.start()
        self._wait += 1
        self._threads.timeline.after(0, partial(self._due, self._wait))

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended."""
        if not self.has_ended:
            self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self.has_ended

    def wait_ns(self, span_ns: int | None) -> bool:
        """Block for a time. Return whether `wake` ended that. Called in this thread."""
        timeline = self._threads.timeline
        self.process.check_alive()
        self._is_woken = False
        if span_ns is not None:
            if not self.process.is_paused and timeline.skip_to(timeline.now_ns + span_ns):
                return False
            timeline.after(span_ns, partial(self._due, self._wait + 1))
        self._wait += 1
        self._threads.block()
        return self._is_woken

    def wake(self) -> None:
        """End the wait of this thread, if it has not ended yet."""
        if not self._is_woken:
            self._is_woken = True
            self._wait += 1
            self._threads.timeline.after(0, partial(self._due, self._wait))

    def unwind(self) -> None:
        """End the thread of a killed process."""
        if not self.has_ended:
            self._threads.resume(self)

    def _due(self, wait: int) -> None:
        if wait != self._wait or self.has_ended or self.process.is_dead:
            return
        if self.process.is_paused:
            self.process.due.append(partial(self._due, wait))
        else:
            self._threads.resume(self)

    def _main(self) -> None:
        self.may_run.acquire()
        try:
            self.process.check_alive()
            self._run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  # raised in the thread of the timeline
            self.error = None if self.process.is_dead else error
        finally:
            self.has_ended = True
            self._ended.set()
            self._threads.leave()


class Event:
    """An event of the threads of one process. Stands for `threading.Event`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event, for so many seconds of the machine."""
        if timeout is None:
            return self.wait_ns(None)
        clock = self._threads.running().process.clock
        return self.wait_ns(clock.true_ns(int(timeout * _SECOND_NS)))

    def wait_ns(self, span_ns: int | None) -> bool:
        thread = self._threads.running()
        thread.process.check_alive()
        if not self._is_set:
            self._waiting.append(thread)
            thread.wait_ns(span_ns)
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self._is_set


class ThreadedProcess:
    """A process with threads, which can be paused and killed as a whole."""

    def __init__(self, threads: Threads, clock: ProcessClock) -> None:
        self.threads = threads
        self.clock = clock
        self.is_dead = False
        self.is_paused = False
        self.members: list[SimThread] = []
        #: What became due during a pause.
        self.due: list[Callable[[], None]] = []
        #: What its statements belong to.
        self.turn: object = None

    def check_alive(self) -> None:
        """Raise in a thread of this process if it was killed."""
        if self.is_dead:
            raise Killed

    def pause(self) -> None:
        self.is_paused = True

    def resume(self, rng: Random) -> None:
        """Continue after a pause, with everything that became due meanwhile, in any order."""
        self.is_paused = False
        due, self.due = self.due, []
        rng.shuffle(due)
        for action in due:
            self.threads.timeline.after(rng.randrange(RESUMED_NS_MAX), action)

    def kill(self) -> None:
        """End all threads. None of them runs another statement, also not while it unwinds."""
        self.is_dead = True
        current = self.threads.current
        if current is None:
            self._unwind()
            return
        self.threads.timeline.after(0, self._unwind)
        if current.process is self:
            raise Killed

    def _unwind(self) -> None:
        for thread in self.members:
            thread.unwind()

    def sleep(self, seconds: float) -> None:
        """Block the current thread for so many seconds of the machine."""
        self.check_alive()
        self.threads.running().wait_ns(self.clock.true_ns(int(seconds * _SECOND_NS)))


class ThreadingModule:
    """Stands for `threading` in the process that runs now."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def Event(self) -> Event:  # noqa: N802  # as in `threading`
        return Event(self._threads)

    def Thread(  # noqa: N802  # as in `threading`
        self,
        *,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        **_named: Any,  # noqa: ANN401
    ) -> SimThread:
        return SimThread(self._threads.running().process, partial(target, *args))


class TimeModule:
    """Stands for `time` in the process that runs now."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def clock_gettime_ns(self, _clock: int) -> int:
        return self._process.clock.boottime_ns()

    def time_ns(self) -> int:
        return self._process.clock.wall_ns()

    def monotonic(self) -> float:
        return self._process.clock.boottime_ns() / _SECOND_NS

    def sleep(self, seconds: float) -> None:
        self._process.sleep(seconds)

    @property
    def _process(self) -> ThreadedProcess:
        return self._threads.running().process
