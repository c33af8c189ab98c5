"""Ping-pong's clients at the broker: a job in, its result out. No sockets, no clock.

Messages carry no ids, so a client is answered in the order in which it asked: an answer waits for
those before it. Whoever wants its answers as they come opens a socket for each.

Everything passes through the scheduler, also what is refused, so that an answer leaves after the
commits that it rests on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.effects import Refusal
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.model import Submission, Terms, truncated_result_reason
from taskyard.core.states import CANCELLED, DONE
from taskyard.wire.dialect import request_numbers
from taskyard.wire.ping_pong.backend import Backend
from taskyard.wire.ping_pong.frames import DIALECT, ERROR, FRAMES, FULL, RESERVED_JOBS, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dialect import Reply

_DEFAULT_SETTINGS: Final = Settings()

__all__ = ["Backend", "Frontend", "Settings", "make_server"]

#: Jobs of one client that may wait at once: one client must not fill the queue of all.
WAITING_MAX: Final = 1000


#: Refusals in a row that one client is told: they all leave in one turn.
REFUSALS_MAX: Final = 1_000


class PendingJob(Struct, eq=False):
    """A request that is not answered yet."""

    route: bytes
    #: 0: nothing but the answers before it will tell it.
    number: int = 0
    #: The answer, while those before it are missing.
    answer: list[bytes] | None = None
    #: It is refused because too much waits; so were so many in a row.
    is_full: bool = False
    times: int = 1


class Frontend:
    """All clients of this dialect, on however many sockets."""

    #: It has no workers.
    prefix = b""

    def __init__(self, dialect: int, random_bits: Callable[[], int], settings: Settings) -> None:
        self._numbers = request_numbers(dialect)
        self._queue_max = settings.queue_max
        self._terms = Terms(service=settings.services[0], dialect=DIALECT)
        #: Tells the tasks of this process from those of any other.
        self._token = b"%08x%08x" % (random_bits() % (1 << 32), random_bits() % (1 << 32))
        #: What each client has asked, in order; no client is here without.
        self._clients: dict[bytes, deque[PendingJob]] = {}
        self._requests: dict[int, PendingJob] = {}
        #: Messages that made no sense, for the log and the statistics.
        self.malformed = 0
        #: No more jobs are taken: the broker is about to leave.
        self.leaving = False

    @property
    def waiting(self) -> int:
        """How many jobs of clients that are there are not answered."""
        return len(self._requests)

    def receive(
        self, route: bytes, frames: Sequence[bytes], now_ns: int, peer: object | None = None
    ) -> list[events.Event]:
        """What a message says. Whatever it is, this returns."""
        del now_ns, peer
        if self._is_full(route):
            return self._refuse_full(route)
        text = self._refusal(frames)
        number = self._note(PendingJob(route))
        if text:
            return [events.RequestRejected(0, route, number, text)]
        name = b"ping-pong-%s-%d" % (self._token, number)
        submission = Submission([name], [frames[1]], [self._terms])
        return [events.SubmitRequested(0, route, submission, number, watch=True)]

    def _refusal(self, frames: Sequence[bytes]) -> str:
        """Why this is no job; empty: it is one."""
        if len(frames) != FRAMES or frames[0]:
            self.malformed += 1
            return "a message is an empty frame and a job"
        job = frames[1]
        if self.leaving:
            return "the broker is leaving and takes no more jobs; ask again when it is back"
        if job in RESERVED_JOBS:
            return f"{job.decode()} can't be a job: a worker would take it for the broker's word"
        if len(job) > PAYLOAD_BYTES_MAX:
            return f"a job has {PAYLOAD_BYTES_MAX} bytes at most: send the name of a file"
        return ""

    def _is_full(self, route: bytes) -> bool:
        waiting = len(self._clients.get(route, ()))
        return waiting >= WAITING_MAX or len(self._requests) >= self._queue_max

    def _refuse_full(self, route: bytes) -> list[events.Event]:
        """In its turn, too. Those in a row are counted, or refusals would fill the memory."""
        queue = self._clients.get(route)
        if queue and queue[-1].is_full:
            if queue[-1].times < REFUSALS_MAX:
                queue[-1].times += 1
            else:
                self.malformed += 1  # it does not listen: what it sends on is not answered
            return []
        asked = PendingJob(route, is_full=True)
        if queue:
            asked.answer = [b"", FULL]  # it follows the one before
            queue.append(asked)
            return []
        return [events.ReplyDue(0, route, self._note(asked))]

    def _note(self, asked: PendingJob) -> int:
        asked.number = number = next(self._numbers)
        self._requests[number] = asked
        self._clients.setdefault(asked.route, deque()).append(asked)
        return number

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """The replies that an effect makes: to the request, and to those that waited for it."""
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
        asked = self._requests.pop(number, None)
        if asked is None:
            return []  # the client is gone
        asked.answer = frames
        queue, replies = self._clients[asked.route], []
        while queue and queue[0].answer is not None:
            first = queue.popleft()
            replies += [(first.route, first.answer or [])] * first.times
        if not queue:
            del self._clients[asked.route]
        return replies

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Nothing reaches that route any more. Its jobs are done all the same."""
        for asked in self._clients.pop(route, ()):
            self._requests.pop(asked.number, None)
        return [events.ClientDisconnected(0, route)]

    def wake_at_ns(self) -> int | None:
        """Nothing here waits for a time."""
        return None

    def time_passed(self, now_ns: int) -> list[events.Event]:
        del now_ns
        return []


def _outcome(told: effects.Settled) -> list[bytes]:
    """How a job ended."""
    state, text = told.states[0], told.texts[0] or b""
    if told.truncated and told.names[0] in told.truncated:
        return [b"", ERROR, truncated_result_reason(text, told.truncated[told.names[0]])]
    if state is DONE:
        return [b"", text]
    return [b"", ERROR, text or (b"it was cancelled" if state is CANCELLED else b"it failed")]


def make_server(
    dialect: int, random_bits: Callable[[], int], settings: Settings = _DEFAULT_SETTINGS
) -> tuple[Backend, Frontend]:
    """Both, by this number and the next one."""
    return Backend(dialect, random_bits, settings), Frontend(dialect + 1, random_bits, settings)
