"""Ping-pong at the broker, and its clients: a job in, its result out. No sockets, no clock.

Messages carry no ids, so a client gets its replies in the order of its requests: a reply waits for
those before it. A client that wants replies as they arrive opens several sockets. `backend.py` has
the workers.

Everything passes through the scheduler, even refused jobs, so that a reply leaves after the commits
that it depends on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.model import Refusal, Submission
from taskyard.core.states import CANCELLED, DONE
from taskyard.core.timer_heap import TimerHeap
from taskyard.wire import roles
from taskyard.wire.dialect import is_probe, request_numbers, text_and_problem
from taskyard.wire.ping_pong.backend import Backend
from taskyard.wire.ping_pong.frames import DIALECT, ERROR, FRAMES, FULL, RESERVED_JOBS, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dialect import Reply

_DEFAULT_SETTINGS: Final = Settings()

__all__ = ["Backend", "Frontend", "Settings", "make_server"]

#: Open jobs of one client, so that one client can't fill the queue of all.
WAITING_MAX: Final = 1000
#: Refusals in a row that are sent to one client, all in one turn.
REFUSALS_MAX: Final = 1_000


class PendingJob(Struct, eq=False):
    """A request without a reply."""

    route: bytes
    #: The request number. 0: it is sent with the reply before it.
    number: int = 0
    #: The reply, while those before it are missing.
    answer: list[bytes] | None = None
    #: Refused because the queue is full, and the number of such requests in a row.
    is_full: bool = False
    times: int = 1


class Frontend:
    """All clients of this dialect, on any number of sockets."""

    #: It has no workers.
    prefix = b""

    def __init__(self, dialect: int, random_bits: Callable[[], int], settings: Settings) -> None:
        #: Not used: no request has a deadline.
        self.timers = TimerHeap()
        self._numbers = request_numbers(dialect)
        self._queue_max = settings.queue_max
        self._terms = settings.tasks.terms(DIALECT)
        self._lanes = settings.tasks.lanes(1)
        #: Distinguishes the tasks of this process from those of others.
        self._token = b"%08x%08x" % (random_bits() % (1 << 32), random_bits() % (1 << 32))
        #: The open requests of each client, in order. Clients without are not listed.
        self._clients: dict[bytes, deque[PendingJob]] = {}
        self._requests: dict[int, PendingJob] = {}
        #: Malformed messages, for the log and the statistics.
        self.malformed = 0
        #: Jobs that a peer's roles do not allow, for the log.
        self.forbidden = 0
        #: The broker is shutting down and accepts no more jobs.
        self.leaving = False

    @property
    def waiting(self) -> int:
        """Return the number of open jobs of connected clients."""
        return len(self._requests)

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None = None,
    ) -> list[events.Event]:
        """Decode a message into events. Never raises."""
        del now_ns
        if is_probe(frames):
            return []
        if self._is_full(route):
            return self._refuse_full(route)
        refusal = None if peer is None else roles.refusal(peer, roles.PING_PONG, roles.JOB)
        if refusal is not None:
            self.forbidden += 1
        else:
            refusal = self._refusal(frames)
        number = self._note(PendingJob(route))
        if refusal is not None:
            return [events.RequestRejected(0, route, number, *refusal)]
        name = b"ping-pong-%s-%d" % (self._token, number)
        submission = Submission([name], [frames[1]], [self._terms], lanes=self._lanes)
        return [events.SubmitRequested(0, route, submission, number, watch=True)]

    def _refusal(self, frames: Sequence[bytes]) -> tuple[Refusal, str] | None:
        """Return why a message is not a valid job. None: it is."""
        if len(frames) != FRAMES or frames[0]:
            self.malformed += 1
            return Refusal.MALFORMED, "a message must be an empty frame and a job"
        job = frames[1]
        if self.leaving:
            return Refusal.SHUTTING_DOWN, "the broker is shutting down"
        if job in RESERVED_JOBS:
            text = f"job {job.decode()}: reserved, because a worker would read it as a command"
            return Refusal.MALFORMED, text
        if len(job) > PAYLOAD_BYTES_MAX:
            text = f"job of {len(job)} bytes: limit is {PAYLOAD_BYTES_MAX}"
            return Refusal.TOO_MANY, text
        return None

    def _is_full(self, route: bytes) -> bool:
        waiting = len(self._clients.get(route, ()))
        return waiting >= WAITING_MAX or len(self._requests) >= self._queue_max

    def _refuse_full(self, route: bytes) -> list[events.Event]:
        """Refuse a job in its turn. Refusals in a row are counted, so that they take no memory."""
        queue = self._clients.get(route)
        if queue and queue[-1].is_full:
            if queue[-1].times < REFUSALS_MAX:
                queue[-1].times += 1
            else:
                self.malformed += 1  # it does not read replies, so it gets no more
            return []
        job_request = PendingJob(route, is_full=True)
        if queue:
            job_request.answer = [b"", FULL]  # sent with the reply before it
            queue.append(job_request)
            return []
        return [events.ReplyDue(0, route, self._note(job_request))]

    def _note(self, job_request: PendingJob) -> int:
        job_request.number = number = next(self._numbers)
        self._requests[number] = job_request
        self._clients.setdefault(job_request.route, deque()).append(job_request)
        return number

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """Encode the replies to an effect: that of its request, and those that waited for it."""
        if isinstance(effect, effects.Settled):
            return self._answer(effect.request, _outcome(effect))
        if isinstance(effect, effects.ReplyDue):
            return self._answer(effect.request, [b"", FULL])
        if isinstance(effect, effects.Refused):
            is_full = effect.refusal is Refusal.FULL
            refused = [b"", FULL] if is_full else [b"", ERROR, effect.text.encode()]
            return self._answer(effect.request, refused)
        return []

    def _answer(self, number: int, frames: list[bytes]) -> list[Reply]:
        job_request = self._requests.pop(number, None)
        if job_request is None:
            return []  # the client is gone
        job_request.answer = frames
        queue, replies = self._clients[job_request.route], []
        while queue and queue[0].answer is not None:
            first = queue.popleft()
            replies += [(first.route, first.answer or [])] * first.times
        if not queue:
            del self._clients[job_request.route]
        return replies

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Drop the requests of a client that can't be reached. Its jobs are done nevertheless."""
        for job_request in self._clients.pop(route, ()):
            self._requests.pop(job_request.number, None)
        return [events.ClientDisconnected(0, route)]

    cut = disconnected

    def reconnected(self, route: bytes, now_ns: int) -> list[events.Event]:
        """Do nothing: a client whose reply was lost sends its job again."""
        del route, now_ns
        return []


def _outcome(effect: effects.Settled) -> list[bytes]:
    """Encode the outcome of a job."""
    state, (text, problem) = effect.states[0], text_and_problem(effect)
    if problem is not None:
        return [b"", ERROR, problem]
    if state is DONE:
        return [b"", text]
    return [b"", ERROR, text or (b"it was cancelled" if state is CANCELLED else b"it failed")]


def make_server(
    dialect: int, random_bits: Callable[[], int], settings: Settings = _DEFAULT_SETTINGS
) -> tuple[Backend, Frontend]:
    """Return both dialects, numbered `dialect` and the next number."""
    return Backend(dialect, random_bits, settings), Frontend(dialect + 1, random_bits, settings)
