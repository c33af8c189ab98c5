"""The product's clients, as simulated processes.

    native       `client.session`, the loop of every Python client
    round-robin  `worker.round_robin`, the loop of `taskyard rr client`

A native client that crashes is started again and submits the same tasks once more, like a script
that is run again. Every task that it submitted must be settled for it.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from simulator.codecs.dialects import DO, JOB
from simulator.listeners import Listener
from simulator.models import BLOCKED, Violation
from simulator.plan import SECOND_NS
from simulator.processes import SimProcess
from simulator.sockets import ENDPOINT, Socket
from taskyard.client import session, task_buffer, waits
from taskyard.core import effects, events, identity
from taskyard.core.events import UnknownPolicy
from taskyard.core.model import Submission, Terms
from taskyard.errors import BytesDamaged, BytesMissing, Refused
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.round_robin import peer as round_robin_client
from taskyard.worker.round_robin import RoundRobinLoop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from simulator.world import World
    from taskyard.core.blobs import Result
    from taskyard.core.events import Event
    from taskyard.core.states import TaskState

_Q: Final = pb.QueryMsg

#: It waits for a broker without limit.
_LIMITS: Final = waits.ReplyTimeouts(3600 * SECOND_NS, None)


class SettableFuture:
    """The future of one task. Implements `client.results.SettableFuture`."""

    def __init__(self, client: NativeProductClient, name: bytes) -> None:
        self._client = client
        self._name = name
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def settle(self, state: TaskState, result: Result) -> None:
        settled = effects.Settled(b"", 0, [self._name], [state], [result.content])
        with self._noted():
            self._client.world.checker.replies.on_client_reply(None, settled)
        self._end()

    def set_result(self, result: object, /) -> None:
        del result
        self._end()

    def set_exception(self, exception: BaseException, /) -> None:
        self._client.world.trace("is refused", str(exception))
        if isinstance(exception, BytesMissing | BytesDamaged):
            with self._noted():
                self._client.world.checker.blobs.on_lost_result(self._name, str(exception))
        self._end()
        if isinstance(exception, Refused):
            self._client.on_refused(self._name, exception)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note a violation. The session survives whatever a future raises."""
        try:
            yield
        except Violation as violation:
            self._client.violation = violation

    def _end(self) -> None:
        self._is_done = True
        self._client.open.pop(self._name, None)


class NativeProductClient(SimProcess):
    """A Python client, without its thread."""

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        #: Tasks to submit, and their times.
        self.pending: list[tuple[int, task_buffer.PendingTask]] = []
        #: Submitted tasks that are not settled for it.
        self.open: dict[bytes, task_buffer.PendingTask] = {}
        #: What a future found.
        self.violation: Violation | None = None

    def plan(self, when_ns: int, campaign: bytes, name: bytes, service: bytes) -> None:
        """Submit a task at a time, or as soon as the process runs then."""
        terms = Terms(campaign=campaign, service=service)
        payload = DO + identity.spelling(campaign, name)
        future = SettableFuture(self, name)  # each process has another one
        task = task_buffer.PendingTask(name, payload, terms, b"", (), UnknownPolicy.REFUSE, future)
        self.pending.append((when_ns, task))

    def build(self) -> None:
        self._session = session.Session(ENDPOINT, _LIMITS, report=_ignore, clock=self.clock)
        self._socket = Socket(
            self.world.network, self, Listener.NATIVE, decode_sent=self._decode_sent
        )
        self._session.use(self._socket)
        self.open = {}
        now_ns = self.world.timeline.now_ns
        for when_ns, task in self.pending:
            submit = partial(self._submit, self.process, task)
            self.world.timeline.at(max(when_ns, now_ns), submit)

    def _submit(self, process: int, task: task_buffer.PendingTask) -> None:
        if process != self.process or not self.alive:
            return
        full_name = full_name_of(task)
        if full_name not in self.world.names:
            self.world.names.append(full_name)
        self.open[full_name] = task
        self._session.submit(replace(task, future=SettableFuture(self, full_name)))
        self.wake()

    def turn(self) -> None:
        self._session.turn()
        if self.violation is not None:
            raise self.violation

    def wake_at_ns(self) -> int | None:
        return self._session.wake_at_ns()

    def close(self) -> None:
        self._socket.close()
        self._session.close()

    def _decode_sent(self, _route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
        query = _Q.FromString(frames[1])
        if query.type != _Q.Create:
            return ()
        names = query.batch.name[:]
        sent_tasks = [task for _, task in self.pending if task.name in names]
        asked = Submission(
            [*map(full_name_of, sent_tasks)],
            [one.payload for one in sent_tasks],
            [one.terms for one in sent_tasks],
            terms_at=[*range(len(sent_tasks))],
        )
        if any(one.after for one in sent_tasks):
            asked.after = [
                [identity.spelling(one.terms.campaign, before) for before in one.after]
                for one in sent_tasks
            ]
        sent = events.SubmitRequested(0, b"", asked, query.request)
        self.world.trace("peer sends", sent, frames)
        return (sent,)

    def unsettled(self) -> list[bytes]:
        """Return the tasks without settlement so far that wait for nothing else."""
        tasks = self.world.checker.model.tasks
        return [name for name in self.open if name not in tasks or tasks[name].state is not BLOCKED]

    def on_refused(self, name: bytes, error: Refused) -> None:
        """Handle the refusal of a task."""


class RoundRobinProductClient(SimProcess):
    """The prompt of round-robin's client, with jobs that have names."""

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        self.pending: list[int] = []
        self._jobs = 0
        #: Jobs by the ids of their messages.
        self._asked: dict[bytes, bytes] = {}

    def build(self) -> None:
        self._asked = {}
        identity = b"%s:%s-%d" % (ENDPOINT.encode(), self.name, self.process)
        self._socket = Socket(
            *(self.world.network, self, Listener.ROUND_ROBIN),
            name=identity,
            decode_sent=self._decode_sent,
            on_received=self._on_received,
        )
        self._client = round_robin_client.Client(ENDPOINT)
        self._loop = RoundRobinLoop(self._client, self._socket, self.clock, _ignore_level)
        for when_ns in self.pending:
            if when_ns >= self.world.timeline.now_ns:
                self.world.timeline.at(when_ns, partial(self._ask, self.process))

    def _ask(self, process: int) -> None:
        if process != self.process or not self.alive:
            return
        if self._client.is_busy:
            self.world.timeline.after(SECOND_NS // 2, partial(self._ask, process))
            return
        self._jobs += 1
        job = b"%s%s-%d" % (JOB, self.name, self._jobs)
        batch = round_robin_client.MessageBatch("job", (b"work", job), 1)
        self._loop.run_actions(self._client.start(batch, self._loop.now_ns()))
        self.wake()

    def _decode_sent(self, _route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
        _, _, command, number, *arguments = frames
        if command != b"\x04":
            return ()
        job = self._asked[number] = arguments[1]
        sent = events.SubmitRequested(0, b"", Submission([job], [job]))
        self.world.trace("peer sends", sent, frames)
        return (sent,)

    def _on_received(self, frames: Sequence[bytes]) -> None:
        _, _, command, number, *rest = frames
        job = self._asked.pop(number, None) if command == b"\x06" else None
        if job is not None:
            failed = rest[0].startswith(b"ERROR ")
            self.world.checker.replies.on_job_result(job, rest[0], failed=failed)

    def turn(self) -> None:
        self._loop.turn()

    def wake_at_ns(self) -> int | None:
        return self._loop.wake_at_ns()

    def close(self) -> None:
        self._socket.close()


def full_name_of(task: task_buffer.PendingTask) -> bytes:
    """Return the name of a task with its campaign."""
    return identity.spelling(task.terms.campaign, task.name)


def _ignore(_text: str) -> None:
    """Print nothing."""


def _ignore_level(_level: int, _text: str) -> None:
    """Print nothing."""
