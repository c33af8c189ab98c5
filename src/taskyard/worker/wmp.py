"""A worker that speaks WMP: sockets, signals and the runner around the machine of `wire.wmp_peer`.

It works for any number of managers, each by a wire of its own or behind a relay. What a task of
`exec` or `call` is to do is in its payload, as everywhere; tasks of other services are of that form
too, or they are fed to one program: payload on stdin, result on stdout.

SIGTERM and SIGINT let it leave: it takes no more tasks, gives back what it has not begun, finishes
what runs, and says goodbye. A second one ends what runs and gives that back too. It leaves by
itself when all managers have sent it home.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final, Protocol

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.tasks import shown
from taskyard.errors import NameLost
from taskyard.net import sockets
from taskyard.net.clock import SystemClock
from taskyard.net.leash import ParentPipe
from taskyard.net.poller import Poller
from taskyard.net.signals import Signals
from taskyard.wire import wmp_peer
from taskyard.worker.feeding import hire
from taskyard.worker.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.net.sockets import ZmqSocket
    from taskyard.worker.jobs import Done
    from taskyard.worker.loop import Settings
    from taskyard.worker.running import Runner

logger = logging.getLogger("taskyard.worker")

#: What the protocol calls the ends of a task. It has no word for a failure that is for good.
STATUSES: Final = {
    Outcome.DONE: "ok",
    Outcome.FAILED: "error",
    Outcome.FAILED_FINAL: "error",
    Outcome.REFUSED: "refused",
}

#: Messages taken from one wire before the next one has its turn.
MESSAGES_AT_ONCE: Final = 64

#: A wire on which nobody was heard for so long is missed aloud: managers are asked every second,
#: but less often when they do not answer.
MISSED_NS: Final = 10 * SECOND_NS

#: How long a goodbye may take to leave: nobody answers it.
GOODBYE_MS: Final = 500


class Transport(Protocol):
    """What carries the frames."""

    def receive(self) -> list[bytes] | None: ...

    def send(self, frames: Sequence[bytes]) -> bool: ...


class Clock(Protocol):
    def monotonic_ns(self) -> int: ...


class Hands(Protocol):
    """Who does the work: the runner."""

    def start(self, job: Job) -> None: ...

    def stop(self, name: bytes, attempt: int) -> None: ...

    def turn(self) -> list[Done]: ...

    def unstarted(self) -> list[Job]: ...

    def wake_at_ns(self) -> int | None: ...


class Loop:
    """One worker; its wires, hands and clock are given to it."""

    def __init__(
        self, settings: Settings, wires: Sequence[Transport], hands: Hands, clock: Clock
    ) -> None:
        self._wires = list(wires)
        self._hands = hands
        self._clock = clock
        now_ns = clock.monotonic_ns()
        me = wmp_peer.Settings(
            worker=settings.name,
            services=settings.services,
            slots=settings.slots,
            incarnation=settings.incarnation,
            heartbeat_ns=settings.heartbeat_ns,
            replaces=settings.replaces,
        )
        self.worker = wmp_peer.Worker(me, len(self._wires), now_ns)
        #: When something was heard on each wire; None: never yet.
        self.heard_ns: list[int | None] = [None] * len(self._wires)

    @property
    def gone(self) -> bool:
        return self.worker.gone

    def turn(self) -> bool:
        """Once around: never waits. Whether there may be more to take in."""
        left = False
        for number in range(len(self._wires)):
            left = self._take_in(number) or left
        for done in self._hands.turn():
            self._report(done)
        now_ns = self._clock.monotonic_ns()
        if self.worker.is_dismissed and not self.worker.leaving:
            self.leave()
        self._carry_out(self.worker.time_passed(now_ns))
        return left

    def wake_at_ns(self) -> int | None:
        """When the next turn is due though nothing arrives."""
        times = [self.worker.wake_at_ns(), self._hands.wake_at_ns()]
        return min((time for time in times if time is not None), default=None)

    def leave(self) -> None:
        """Take no more tasks, give back what is not begun, and go when the rest is done."""
        self._carry_out(self.worker.leave(self._clock.monotonic_ns()))
        self._give_back(self._hands.unstarted())

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End what runs, and give it back."""
        for job in jobs:
            self._hands.stop(*job.key)
        self._give_back(jobs)

    def _take_in(self, number: int) -> bool:
        for _ in range(MESSAGES_AT_ONCE):
            frames = self._wires[number].receive()
            if frames is None:
                return False
            now_ns = self._clock.monotonic_ns()
            self.heard_ns[number] = now_ns
            self._carry_out(self.worker.take(number, frames, now_ns))
        return True

    def _report(self, done: Done) -> None:
        if done.output:
            printed = done.output.decode(errors="replace")
            self._carry_out(self.worker.progressed(done.job.key, text=printed))
        self._finish(done.job, STATUSES[done.outcome], done.text, done.result_bytes_total)

    def _give_back(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._finish(job, "refused", b"the worker leaves")

    def _finish(self, job: Job, status: str, text: bytes, bytes_total: int = 0) -> None:
        now_ns = self._clock.monotonic_ns()
        self._carry_out(self.worker.done(job.key, status, text, now_ns, bytes_total))

    def _carry_out(self, orders: Iterable[wmp_peer.Action]) -> None:
        for order in orders:
            if isinstance(order, wmp_peer.Send):
                self._wires[order.wire].send(order.frames)  # what is lost is said again
            elif isinstance(order, wmp_peer.Stop):
                self._hands.stop(order.name, order.attempt)
            else:
                self._hands.start(
                    Job(
                        *(order.name, order.attempt, order.service, order.payload),
                        time_limit_ns=order.time_limit_ns,
                        slots=order.slots,
                    )
                )


def serve(  # noqa: PLR0913  # the last ones are named
    endpoints: Sequence[str],
    settings: Settings,
    allow: Sequence[str],
    say: Callable[[str], None],
    *,
    command: Sequence[str] | None = None,
    allow_pickle: bool = False,
    until_eof: bool = False,
) -> None:
    """Work for managers until told to stop, or sent home by all of them. `say` is told what a user
    should know. `command` is fed the tasks that don't say what to do.

    Raises `NameLost` if a manager has given its name to another process.
    """
    with ExitStack() as stack:
        clock, poller = SystemClock(), Poller()
        signals = stack.enter_context(Signals())
        runner = hire(settings.slots, clock, command, allow, allow_pickle=allow_pickle)
        stack.enter_context(closing(runner))
        wires = [stack.enter_context(closing(sockets.connect(one))) for one in endpoints]
        for wire in wires:
            poller.add(wire)
        for descriptor in (signals.fileno(), *runner.filenos()):
            poller.add(descriptor)
        leash = ParentPipe() if until_eof else None
        if leash is not None:
            poller.add(leash.fileno())
        loop = Loop(settings, wires, runner, clock)
        post = Post(loop, wires, runner, shown(settings.name), say)
        left = False
        while not loop.gone:
            ready = poller.wait(0 if left else post.wait_ns(clock.monotonic_ns()))
            if leash is not None and leash.fileno() in ready and leash.is_closed():
                return
            if signals.fileno() in ready:
                for _ in signals.received():
                    post.leave()
            left = loop.turn()
            if loop.worker.name_lost:
                raise NameLost(loop.worker.name_lost)
            post.watch_managers(clock.monotonic_ns())
            post.watch_name()
        post.say_goodbye()


class Post:
    """What a worker says to its user of the managers, and of its own leaving."""

    def __init__(
        self,
        loop: Loop,
        wires: Sequence[ZmqSocket],
        runner: Runner,
        name: str,
        say: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._wires = wires
        self._runner = runner
        self._name = name
        self._say = say
        #: What was said last of each: somebody is there, nobody is; None: nothing yet.
        self._are_there: list[bool | None] = [None] * len(wires)
        self._since_ns = SystemClock.monotonic_ns()
        self._waits_for_name = False

    def wait_ns(self, now_ns: int) -> int | None:
        wake_at_ns = self._loop.wake_at_ns()
        return None if wake_at_ns is None else max(0, wake_at_ns - now_ns)

    def watch_managers(self, now_ns: int) -> None:
        """Say once of each wire that nobody is there, and once that somebody is."""
        for number, heard_ns in enumerate(self._loop.heard_ns):
            silent = now_ns - (heard_ns or self._since_ns) > MISSED_NS
            is_there = heard_ns is not None and not silent
            if is_there is self._are_there[number] or (not is_there and not silent):
                continue
            self._are_there[number] = is_there
            endpoint = self._wires[number].endpoint
            if is_there:
                self._say(f"worker {self._name} works for the manager at {endpoint}")
            else:
                self._say(f"no manager answers at {endpoint}; worker {self._name} waits for one")

    def watch_name(self) -> None:
        """Log once that another process has this worker's name, and once that it has it."""
        held_by_other = self._loop.worker.name_held
        if held_by_other and not self._waits_for_name:
            logger.warning("worker %s: the manager refuses it: %s", self._name, held_by_other)
        elif self._waits_for_name and not held_by_other:
            logger.warning("worker %s: it holds its name now", self._name)
        self._waits_for_name = bool(held_by_other)

    def leave(self) -> None:
        """Go when what runs is done; asked again, give that back too."""
        if not self._loop.worker.leaving:
            self._loop.leave()
            running = len(self._runner.running())
            if running:
                self._say(
                    f"worker {self._name} leaves when {running} task(s) are done; once more ends "
                    "what runs"
                )
        elif self._runner.running():
            self._say(f"worker {self._name} ends what runs and gives it back")
            self._loop.abandon(self._runner.running())

    def say_goodbye(self) -> None:
        """Let what was sent last leave: else a manager would find out by our silence."""
        for wire in self._wires:
            wire.socket.linger = GOODBYE_MS
