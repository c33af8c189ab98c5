"""Clients of every dialect: what they want, and how they ask for it until they are answered.

    Client            our native dialect, with every wish there is; loose
    PlainClient       dwork: Creates, which extend what is known, and looks; tight
    PingPongModelClient        ping-pong's frontend: jobs, answered in the order of their asking;
    tight RoundRobinModelClient  TRACKEXECs of LMQ's round robin, answered by their ids; tight

Jobs of the last two have no names: a job is known by its payload, and one that may be lost is asked
for again as another.
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
from taskyard.core.effects import Effect, Refusal
from taskyard.core.model import Submission

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.world import World

#: What a client may say; each is answered.
RequestMaker: TypeAlias = (
    events.SubmitRequested
    | events.CancelRequested
    | events.RetryRequested
    | events.PauseRequested
    | events.ResumeRequested
    | events.MoveRequested
    | events.ExpireRequested
    | events.WatchRequested
    | events.DrainRequested
    | events.LookupRequested
    | events.ListRequested
    | events.StatsRequested
    | events.ExplainRequested
    | events.WorkersRequested
    | events.ResultsRequested
    | events.OutputRequested
    | events.RequestRejected
)

#: A client whose job was refused because there are too many asks again after this.
FULL_NS: Final = SECOND_NS // 2


class Client(Peer):
    """Speaks our native dialect: submits and wishes. A wish that is not answered is repeated, word
    for word."""

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        #: What it will say, and when; said again from there by its next process.
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
        """Say something new."""
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
        if not (self.world.healed and isinstance(event, events.WatchRequested)):
            lose = partial(self._retry_after_timeout, request, healthy=self.healthy)
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
        """It no longer wants what would hold things up."""
        for request in [*self.open]:
            if isinstance(self.open[request], events.PauseRequested | events.DrainRequested):
                del self.open[request]

    def resend_open(self) -> None:
        """Everything that is not answered, once more."""
        for request in [*self.open]:
            self.send(self.open[request])

    def resend_answered(self) -> None:
        """Say something again that was answered before. It must be harmless."""
        said = [one for one in self._sent.values() if isinstance(one, events.SubmitRequested)]
        harmless = [one for one in said if one.repeat is events.DuplicatePolicy.IGNORE]
        if harmless:
            self.send(self.rng.choice(harmless))

    def on(self, effect: Effect) -> None:
        request: int = getattr(effect, "request", 0)
        event = self._sent.get(request)
        self.world.checker.on_client_reply(event, effect)
        if isinstance(effect, effects.Refused) and effect.refusal is Refusal.FULL:
            self._full[request] = True  # asks again when its patience ends
            return
        if isinstance(event, events.WatchRequested) and isinstance(effect, effects.ReplyDue):
            self.send(event)  # its time was up, and not all is settled
            return
        if isinstance(event, events.WatchRequested) and isinstance(effect, effects.Settled):
            left = [name for name in event.names or () if name not in effect.names]
            if event.names is not None and left:
                event.names = left
                if not streams(request):
                    self.send(event)  # that was the only answer
                return
        self.open.pop(request, None)


class PlainClient(RequestReplyPeer, Client):
    """Says what dwork's own clients can say."""

    def reconnect(self) -> None:
        self.process += 1
        self.connect()
        self.begin()

    def _ask(self, request: int) -> None:
        event = self.open.get(request)
        if event is not None:
            self.send(event)

    def resend_answered(self) -> None:
        """It would not be harmless."""


class JobClient(Client):
    """Sends jobs and wants their results."""

    reports_breaks = True

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        self.codec: JobCodec
        self.jobs = 0

    def job(self) -> events.SubmitRequested:
        """A job that nobody has asked for before."""
        self.jobs += 1
        payload = b"%s%s-%d" % (JOB, self.name, self.jobs)
        return events.SubmitRequested(0, b"", Submission([payload], [payload]))

    def begin(self) -> None:
        """What a former connection asked for may be lost, so it is asked for anew."""
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
        """Once: asked again it would be another job."""
        self.send(self.open[request])

    def resend_open(self) -> None:
        """It waits."""

    def resend_answered(self) -> None:
        """It would be another job."""

    def on(self, effect: Effect) -> None:
        request: int = getattr(effect, "request", 0)
        event = self.open.pop(request, None)
        if not isinstance(event, events.SubmitRequested):
            raise Violation("answers", f"{effect} answers what was never asked, or was answered")
        if isinstance(effect, effects.Refused) and effect.refusal is Refusal.FULL:
            self.after(FULL_NS, partial(self.send_new, self.job))
            return
        text = effect.text.encode() if isinstance(effect, effects.Refused) else b""
        if isinstance(effect, effects.Settled):
            text = effect.texts[0] or b""
        failed = isinstance(effect, effects.Refused)
        self.world.checker.on_job_result(event.submission.names[0], text, failed=failed)


class PingPongModelClient(JobClient):
    """Ping-pong: a message is a job, the answers come in order."""

    listener = Listener.PING_FRONTEND

    def make_codec(self) -> None:
        self.codec = PingPongClientCodec()


class RoundRobinModelClient(JobClient):
    """LMQ: a job has an id, and its answer the same."""

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
