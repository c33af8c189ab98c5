"""Model clients of every dialect: the requests that they send until they are answered.

    Client                 the native dialect, with every kind of request; loose links
    PlainClient            dwork: Creates that extend existing tasks, and queries; tight links
    PingPongModelClient    ping-pong's frontend: jobs, answered in order; tight links
    RoundRobinModelClient  TRACKEXECs of LMQ's round robin, answered by id; tight links

Jobs of the last two have no names. A job is identified by its payload, and a job that may be lost
is requested again as another job.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from simulator.codecs.dialects import JOB, JobCodec, PingPongClientCodec, RoundRobinClientCodec
from simulator.codecs.native import NativeCodec, streams
from simulator.listeners import Listener
from simulator.models import Violation
from simulator.peers import Peer, RequestReplyPeer
from simulator.plan import SECOND_NS
from taskyard.core import effects, events
from taskyard.core.blobs import text_of
from taskyard.core.effects import Effect
from taskyard.core.model import Refusal, Submission

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.world import World

#: Events that a client may send. Each is answered.
RequestMaker: TypeAlias = (
    events.SubmitRequested
    | events.CancelRequested
    | events.RetryRequested
    | events.PauseRequested
    | events.ResumeRequested
    | events.MoveRequested
    | events.EditRequested
    | events.ExpireRequested
    | events.WatchRequested
    | events.DrainRequested
    | events.LookupRequested
    | events.ListRequested
    | events.StatsRequested
    | events.ExplainRequested
    | events.WorkersRequested
    | events.ResultsRequested
    | events.PartRequested
    | events.RequestRejected
)

#: A client whose job was refused because there are too many retries after this.
FULL_NS: Final = SECOND_NS // 2


class Client(Peer):
    """A client in the native dialect. It repeats unanswered requests unchanged."""

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        #: Requests for later, and their times. The next process sends them too.
        self.pending: list[tuple[int, Callable[[], RequestMaker | None]]] = []
        self._sent: dict[int, RequestMaker] = {}
        self.open: dict[int, RequestMaker] = {}
        self._request = 0
        #: Requests that were refused for now.
        self._full: dict[int, bool] = {}

    def make_codec(self) -> None:
        self.codec = NativeCodec(may_duplicate=self.world.may_duplicate)

    def begin(self) -> None:
        now_ns = self.world.timeline.now_ns
        for request in [*self.open]:
            self._ask(request)
        for when_ns, make in self.pending:
            if when_ns > now_ns:
                self.after(when_ns - now_ns, partial(self.send_new, make))

    def send_new(self, make: Callable[[], RequestMaker | None]) -> None:
        """Send a new request."""
        event = make()
        if event is None:
            return
        self._request += 1
        event.request = self._request
        event.client = self.name
        self._sent[self._request] = self.open[self._request] = event
        self._ask(self._request)

    def _ask(self, request: int) -> None:
        event = self.open.get(request)
        if event is None:
            return
        self.send(event)
        patience_ns = (20 if isinstance(event, events.WatchRequested) else 2) * SECOND_NS
        is_up = self.world.network.is_up
        if not (self.world.healed and is_up and isinstance(event, events.WatchRequested)):
            lose = partial(self._retry_after_timeout, request, healthy=self.healthy and is_up)
            self.after(patience_ns, lose)

    def _retry_after_timeout(self, request: int, *, healthy: bool) -> None:
        if (
            healthy
            and self.world.is_calm
            and request in self.open
            and not self._full.pop(request, False)
        ):
            raise Violation("unanswered", f"{self.name!r}: {self.open[request]}")
        self._ask(request)

    def drop_blocking_requests(self) -> None:
        """Drop requests that would block the end of the run."""
        for request in [*self.open]:
            if isinstance(self.open[request], events.PauseRequested | events.DrainRequested):
                del self.open[request]

    def resend_open(self) -> None:
        """Send all unanswered requests again."""
        for request in [*self.open]:
            self.send(self.open[request])

    def resend_answered(self) -> None:
        """Send an answered request again, which must be harmless."""
        sent = [one for one in self._sent.values() if isinstance(one, events.SubmitRequested)]
        harmless = [one for one in sent if one.repeat is events.DuplicatePolicy.IGNORE]
        if harmless:
            self.send(self.rng.choice(harmless))

    def on(self, effect: Effect) -> None:
        request: int = getattr(effect, "request", 0)
        event = self._sent.get(request)
        self.world.checker.replies.on_client_reply(event, effect)
        if isinstance(effect, effects.Refused) and effect.refusal is Refusal.FULL:
            self._full[request] = True  # is sent again after the timeout
            return
        if isinstance(event, events.WatchRequested) and isinstance(effect, effects.ReplyDue):
            self.send(event)  # the wait timed out before all were settled
            return
        if isinstance(event, events.WatchRequested) and isinstance(effect, effects.Settled):
            left = [name for name in event.names or () if name not in effect.names]
            if event.names is not None and left:
                event.names = left
                if not streams(request):
                    self.send(event)  # the request gets no second answer
                return
        self.open.pop(request, None)


class PlainClient(RequestReplyPeer, Client):
    """A client with the requests of dwork's own clients."""

    def reconnect(self) -> None:
        self.process += 1
        self.connect()
        self.begin()

    def _ask(self, request: int) -> None:
        event = self.open.get(request)
        if event is not None:
            self.send(event)

    def resend_answered(self) -> None:
        """Do nothing: a repeated Create would extend the tasks."""


class JobClient(Client):
    """A client that sends jobs and receives their results."""

    reports_breaks = True

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        self.codec: JobCodec
        self.jobs = 0

    def job(self) -> events.SubmitRequested:
        """Return the payload of a new job."""
        self.jobs += 1
        payload = b"%s%s-%d" % (JOB, self.name, self.jobs)
        return events.SubmitRequested(0, b"", Submission([payload], [payload]))

    def begin(self) -> None:
        """Request lost jobs anew. The former connection may have lost them."""
        self.codec.forget()
        open_, self.open = len(self.open), {}
        for _ in range(open_):
            self.send_new(self.job)
        now_ns = self.world.timeline.now_ns
        for when_ns, make in self.pending:
            if when_ns > now_ns:
                self.after(when_ns - now_ns, partial(self.send_new, make))

    def reconnect(self) -> None:
        self.process += 1
        self.connect()
        self.begin()

    def _ask(self, request: int) -> None:
        """Send a job once. A second time it would be another job."""
        self.send(self.open[request])

    def resend_open(self) -> None:
        """Do nothing: wait for the answers."""

    def resend_answered(self) -> None:
        """Do nothing: it would be another job."""

    def on(self, effect: Effect) -> None:
        request: int = getattr(effect, "request", 0)
        event = self.open.pop(request, None)
        if not isinstance(event, events.SubmitRequested):
            raise Violation("answers", f"{effect} answers no open request")
        if isinstance(effect, effects.Refused) and effect.refusal is Refusal.FULL:
            self.after(FULL_NS, partial(self.send_new, self.job))
            return
        text = effect.text.encode() if isinstance(effect, effects.Refused) else b""
        if isinstance(effect, effects.Settled):
            text = text_of(effect.texts[0] or b"")
        failed = isinstance(effect, effects.Refused)
        self.world.checker.replies.on_job_result(event.submission.names[0], text, failed=failed)


class PingPongModelClient(JobClient):
    """A ping-pong client: a message is a job, and answers come in order."""

    listener = Listener.PING_FRONTEND

    def make_codec(self) -> None:
        self.codec = PingPongClientCodec()


class RoundRobinModelClient(JobClient):
    """An LMQ client: the answer has the id of its job."""

    listener = Listener.ROUND_ROBIN

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        self.connections = 0

    def make_codec(self) -> None:
        self.codec = RoundRobinClientCodec()

    def identity(self) -> bytes:
        self.connections += 1
        return b"tcp://sim:%s-%d" % (self.name, self.connections)


CLIENTS: Final[dict[str, type[Client]]] = {
    "plain": PlainClient,
    "ping": PingPongModelClient,
    "round-robin": RoundRobinModelClient,
}
