"""Ping-pong at the broker: its workers, and its clients. No sockets, no clock.

A result does not name its job. So a worker gets one job at a time, and none while it may still run
another: after it timed out, after its job was cancelled, and before its first READY. A worker is a
connection. A client gets its replies in the order of its requests, because messages have no ids.

Everything passes through the scheduler, even refused jobs, so that a reply leaves after the commits
that it depends on.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import QueueOrder, Refusal, WorkerFacts
from taskyard.core.timer_heap import AT_ONCE_NS, NEVER_NS, TimerHeap
from taskyard.wire import dialect, roles
from taskyard.wire.dialect import (
    PING_PONG,
    ClientTasks,
    chose_its_id,
    is_probe,
    request_numbers,
    text_and_problem,
)
from taskyard.wire.ping_pong.frames import (
    DIALECT,
    DISCONNECT,
    ERROR,
    EXIT,
    FRAMES,
    FRAMES_MAX,
    FULL,
    PING,
    PONG,
    READY,
    RESERVED_JOBS,
    Settings,
    is_count,
    is_ping,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dialect import Reply


#: Connections that are kept. Beyond that, new peers get no reply and retry.
PEERS_MAX: Final = 20_000

#: Silence after which a connection that is not a worker is forgotten: its end is not reported.
FORGET_NS: Final = 600 * SECOND_NS

#: A ping this soon after a job may have crossed it on the way, so it does not show that the worker
#: pings while it works.
CROSSING_NS: Final = SECOND_NS // 5


class PeerState(Enum):
    """The state of a worker at the broker."""

    PROBATION = "has not sent READY: it may run a job of another connection"
    WAITING = "waits for a job"
    WORKING = "has a job"
    OWING = "runs a job that it lost; it gets another after its result"
    AWAY = "timed out while it waited"
    DISMISSED = "was sent EXIT"


PROBATION, WAITING, WORKING, OWING, AWAY, DISMISSED = PeerState

#: Workers in these states are registered in the core.
REGISTERED: Final = (WAITING, WORKING)


class Peer(dialect.Peer, eq=False):
    """A connection of a worker, by its route."""

    #: PROBATION: since when. Without a reply for WORKER_EXPIRE_SECONDS, it reconnects.
    since_ns: int = 0
    standing: PeerState = PROBATION
    #: How often it has pinged.
    pings: int = 0
    #: WORKING and OWING: the task and its attempt.
    task: bytes = b""
    attempt: int = 0
    #: WORKING: when the job was assigned, NEVER_NS in that turn. The timeouts without pings and
    #: with.
    given_ns: int = 0
    lease_ns: int = 0
    pinging_lease_ns: int = 0
    #: WORKING: it pings, so the shorter timeout applies.
    is_pinging: bool = False
    #: WORKING and OWING: it sent READY, so it may be another process with the same id. No
    #: message renews its lease.
    is_doubted: bool = False
    #: WORKING and OWING: it has reconnected under its own id, so its job or the result may be lost.
    #: No message renews its lease either.
    has_reconnected: bool = False

    @property
    def is_registered(self) -> bool:
        return self.standing in REGISTERED

    @property
    def is_renewed(self) -> bool:
        """Whether a message renews its lease."""
        return not (self.is_doubted or self.has_reconnected)

    @property
    def is_charged(self) -> bool:
        """Whether its loss is charged to its job, which a new connection may have lost."""
        return self.is_doubted or not self.has_reconnected


class Backend(dialect.PeerTable[Peer]):
    """All workers of this dialect, on any number of sockets.

    The timeout of a worker is checked here and not in the core, because it depends on whether the
    worker pings while it works. Nothing is journalled for a ping.
    """

    def __init__(self, dialect: int, random_bits: Callable[[], int], settings: Settings) -> None:
        super().__init__(dialect)
        self.prefix = settings.prefix
        self._random_bits = random_bits
        self._settings = settings
        #: A worker gets a new incarnation with each registration, also across restarts.
        self._incarnation = (random_bits() % (1 << 32)) << 30
        #: Malformed messages, for the log and the statistics.
        self.malformed = 0
        #: Messages that a peer's roles do not allow, for the log.
        self.forbidden = 0
        #: Results without a job.
        self.stale = 0
        #: The broker is shutting down: workers are sent EXIT.
        self.leaving = False

    # Messages of workers.

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None = None,
    ) -> list[events.Event]:
        """Decode a message into events. Never raises. A worker whose key does not allow a message
        gets no reply: there is no word for that."""
        result = self.begin(now_ns)
        if not is_message(frames):
            self.malformed += not is_probe(frames)
            return result
        if peer is not None and roles.refusal(peer, roles.PING_PONG, _request_of(frames[1])):
            self.forbidden += 1
            return result
        return result + self._receive_from(route, frames)

    def _receive_from(self, route: bytes, frames: Sequence[bytes]) -> list[events.Event]:
        word, peer = frames[1], self.peers.get(route)
        if len(frames) == FRAMES and word == DISCONNECT:
            return self._leave(peer)
        if peer is None:
            peer = self._register_peer(route, word)
        if peer is None:
            return self._reply_unknown(route, word)
        result = self._receive(peer, frames)
        if peer.route in self.peers:
            self.watch(peer)
        return result

    def _receive(self, peer: Peer, frames: Sequence[bytes]) -> list[events.Event]:
        if peer.is_renewed:
            peer.last_seen_ns = self.now_ns
        word = frames[1]
        if peer.standing is DISMISSED or (self.leaving and not peer.is_registered):
            return self._shut_down(peer)
        if is_ping(word):
            return self._pinged(peer, is_counted=len(frames) == FRAMES_MAX)
        if word == READY:
            return self._is_ready(peer)
        if len(frames) == FRAMES_MAX:
            return self._reported(peer, Outcome.FAILED, frames[2])
        if len(word) > PAYLOAD_BYTES_MAX:
            text = b"result of %d bytes: limit is %d" % (len(word), PAYLOAD_BYTES_MAX)
            return self._reported(peer, Outcome.FAILED_FINAL, text)
        return self._reported(peer, Outcome.DONE, word)

    def _register_peer(self, route: bytes, word: bytes) -> Peer | None:
        """Keep a connection that wants work, if there is room."""
        if not (word == READY or is_ping(word)) or not self.has_room(PEERS_MAX):
            return None
        name = name_of(route, self._settings.secret, self.prefix)
        return self.add(Peer(route, name, route, self.now_ns, since_ns=self.now_ns))

    def may_forget(self, peer: Peer) -> bool:
        silent_ns = self.now_ns - peer.last_seen_ns
        return peer.standing is PROBATION and silent_ns >= self._settings.expire_ns

    def _reply_unknown(self, route: bytes, word: bytes) -> list[events.Event]:
        """Reply to a result of a worker without a job. Ignore newcomers: there is no room."""
        if word == READY or is_ping(word):
            self.malformed += 1
            return []
        self.stale += 1
        return [self.send(route, [b"", PONG])]

    def _pinged(self, peer: Peer, *, is_counted: bool) -> list[events.Event]:
        peer.pings += 1
        if self._is_ignored(peer):
            return []
        count = [b"%d" % peer.pings] if is_counted else []
        pong = self._pong(peer, *count)
        if peer.standing is AWAY:
            return [pong, *self._register_worker(peer)]
        if peer.standing is WORKING and self.now_ns - peer.given_ns > CROSSING_NS:
            peer.is_pinging = True
        return [pong]

    def _is_ignored(self, peer: Peer) -> bool:
        """Return whether a peer has been on probation for too long to get a reply, or owes a job
        that it may not have. Without a reply it connects anew and sends READY. An earlier READY
        is not enough, because it may have crossed the job that the peer still runs."""
        if peer.standing is OWING:
            return not peer.is_renewed
        since_ns = self.now_ns - peer.since_ns
        return peer.standing is PROBATION and since_ns >= self._settings.expire_ns

    def _is_ready(self, peer: Peer) -> list[events.Event]:
        if peer.standing is WORKING and chose_its_id(peer.route):
            peer.is_doubted = True
        pong = self._pong(peer)
        is_busy = peer.is_registered or self._is_crossing(peer)
        return [pong] if is_busy else [pong, *self._register_worker(peer)]

    def _is_crossing(self, peer: Peer) -> bool:
        """Return whether a READY may have been sent before the job that its worker owes. The result
        would be read as that of the next job."""
        if peer.standing is not OWING or chose_its_id(peer.route):
            return False
        return self.now_ns - peer.given_ns < peer.lease_ns

    def _reported(self, peer: Peer, outcome: Outcome, text: bytes) -> list[events.Event]:
        """Report the job that a worker has or owes. After that it may get another job."""
        if peer.standing not in (WORKING, OWING):
            self.stale += 1
            return [] if self._is_ignored(peer) else [self._pong(peer)]
        was_owing = peer.standing is OWING
        report = events.TasksReported(
            0,
            peer.name,
            [peer.task],
            attempts=[peer.attempt],
            texts=[text],
            request=self.number(peer.route, [b"", PONG]),
        )
        if outcome is not Outcome.DONE:
            report.outcomes, report.random_bits = [outcome], self._random_bits()
        peer.standing, peer.is_doubted, peer.has_reconnected = WAITING, False, False
        peer.last_seen_ns = self.now_ns
        return [report, *self._register_worker(peer)] if was_owing else [report]

    def _leave(self, peer: Peer | None) -> list[events.Event]:
        if peer is None:
            return []
        self.forget(peer)
        return [events.WorkerExited(0, peer.name)] if peer.is_registered else []

    def _shut_down(self, peer: Peer) -> list[events.Event]:
        peer.standing = DISMISSED
        return [self.send(peer.route, [b"", EXIT])]

    def _pong(self, peer: Peer, *count: bytes) -> events.Event:
        """Return a PONG, and a heartbeat to the core if it is from a registered worker."""
        frames = [b"", PONG, *count]
        if peer.is_registered and peer.is_renewed:
            return events.WorkerHeartbeat(0, peer.name, request=self.number(peer.route, frames))
        return self.send(peer.route, frames)

    def _register_worker(self, peer: Peer) -> list[events.Event]:
        """Register a worker, so that it gets jobs. The core's timeout is a little longer than ours.
        It applies after a restart."""
        self._incarnation += 1
        peer.standing, peer.is_doubted, peer.has_reconnected = WAITING, False, False
        peer.last_seen_ns = self.now_ns
        facts = WorkerFacts(
            services=self._settings.services,
            slots_total=1,
            lease_timeout_ns=self._settings.lease_ns + self._settings.expire_ns,
            incarnation=self._incarnation,
            always_ready=True,
            dialect=DIALECT,
            restart_lease_ns=self._settings.expire_ns,
            reserved_payloads=RESERVED_JOBS,
            queue_order=QueueOrder.FIFO,
        )
        return [events.WorkerRegistered(0, peer.name, facts)]

    # Effects.

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """Encode the message of an effect, if it has any."""
        if isinstance(effect, effects.Assign):
            return self._assign(effect)
        if isinstance(effect, effects.HeartbeatAck | effects.ReplyDue):
            return self.take_reply(effect.request)
        if isinstance(effect, effects.ReportAck):
            return self._on_report_ack(effect)
        peer = self.named.get(getattr(effect, "worker", b""))
        if peer is None or not peer.is_registered:
            return []
        if isinstance(effect, effects.Shutdown):
            peer.standing = DISMISSED
            self.cause(events.WorkerExited(0, peer.name))
            return [(peer.route, [b"", EXIT])]
        if isinstance(effect, effects.Stop) and peer.standing is WORKING:
            self._let_finish(peer)
        if isinstance(effect, effects.UnknownWorker):
            peer.standing = OWING if peer.standing is WORKING else AWAY
        return []

    def _assign(self, effect: effects.Assign) -> list[Reply]:
        peer = self.named.get(effect.worker)
        if peer is None or peer.standing is not WAITING:
            # It left or is busy. The scheduler has an event of that, or gets it now.
            self.cause(events.WorkerLost(0, effect.worker, b"not waiting", charged=False))
            return []
        peer.standing = WORKING
        peer.task, peer.attempt = effect.names[0], effect.attempts[0]
        asked_ns = effect.terms[0].lease_ns
        peer.lease_ns = max(self._settings.lease_ns, asked_ns)
        peer.pinging_lease_ns = max(self._settings.expire_ns, asked_ns)
        peer.is_pinging = False
        peer.given_ns = NEVER_NS
        self.timers.add(AT_ONCE_NS, self._note_given, peer)
        return [(peer.route, [b"", _job_of(effect)])]

    def _on_report_ack(self, effect: effects.ReportAck) -> list[Reply]:
        """Reply to a result only if it was too late."""
        if effect.missing:
            self.stale += 1
            return self.take_reply(effect.request)
        self._replies.pop(effect.request, None)
        return []

    def _let_finish(self, peer: Peer) -> None:
        """Remove a worker until it has finished its cancelled job, which it can't be sent."""
        peer.standing = OWING
        self.cause(events.WorkerLost(0, peer.name, b"at a cancelled task", charged=False))

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Remove the worker of a route that can't be reached."""
        peer = self.peers.get(route)
        is_charged = peer is not None and peer.is_charged
        return self._lose(peer, b"unreachable", is_charged=is_charged)

    def cut(self, route: bytes) -> list[events.Event]:
        """Remove the worker of a route whose key was revoked, or that another key uses now."""
        return self._lose(self.peers.get(route), b"its key is no longer valid", is_charged=False)

    def reconnected(self, route: bytes, now_ns: int) -> list[events.Event]:
        """Give the job of a worker that kept its id a deadline. The job may be lost, or its result,
        and then pings would renew it for good."""
        result = self.begin(now_ns)
        peer = self.peers.get(route)
        if peer is not None and peer.standing is WORKING and peer.is_renewed:
            peer.has_reconnected, peer.last_seen_ns = True, now_ns
            self.watch(peer)
        return result

    def _lose(self, peer: Peer | None, reason: bytes, *, is_charged: bool) -> list[events.Event]:
        if peer is None:
            return []
        self.forget(peer)
        if not peer.is_registered:
            return []
        return [events.WorkerLost(0, peer.name, reason, charged=is_charged)]

    # Time.

    def _note_given(self, now_ns: int, peer: Peer) -> list[events.Event]:
        """Note the time of an assignment, which effects do not have."""
        peer.given_ns = now_ns
        return []

    def due_ns(self, peer: Peer) -> int:
        if peer.standing is WAITING:
            return peer.last_seen_ns + self._settings.expire_ns
        if peer.standing is WORKING:
            is_prompt = peer.is_pinging and peer.is_renewed
            return peer.last_seen_ns + (peer.pinging_lease_ns if is_prompt else peer.lease_ns)
        return peer.last_seen_ns + FORGET_NS

    def on_due(self, peer: Peer) -> list[events.Event]:
        if peer.standing is WORKING:
            peer.standing = OWING
            if peer.is_charged:
                return [events.WorkerLost(0, peer.name)]
            return [events.WorkerLost(0, peer.name, b"no result on its connection", charged=False)]
        if peer.standing is WAITING:
            peer.standing = AWAY
            # A job that is assigned in this very turn is not charged.
            return [events.WorkerLost(0, peer.name, charged=False)]
        self.forget(peer)
        return []


#: Words of a ping with its number in a separate frame.
_COUNTED: Final = (PING, PING.lower())


def is_message(frames: Sequence[bytes]) -> bool:
    """Return whether frames are an empty frame and a word, with a ping's number or a reason."""
    if not FRAMES <= len(frames) <= FRAMES_MAX or frames[0]:
        return False
    if len(frames) == FRAMES:
        return True
    return frames[1] == ERROR or (frames[1] in _COUNTED and is_count(frames[2]))


def _request_of(word: bytes) -> str:
    """Return the request of a message in the table of roles."""
    if word in (READY, DISCONNECT):
        return word.decode()
    return PING.decode() if is_ping(word) else roles.RESULT


def _job_of(effect: effects.Assign) -> bytes:
    """Return the job of a task. Without a payload it is the name, unless a client sent it so."""
    payload = effect.payloads[0]
    is_own = effect.terms[0].dialect == DIALECT
    return payload if payload or is_own else effect.names[0]


def name_of(route: bytes, secret: bytes = b"", prefix: bytes = PING_PONG) -> bytes:
    """Return the name of a worker: the socket's number and the connection's id, as text if it is
    printable, else as digits that do not reveal it."""
    socket, identity = route[:1].hex().encode(), route[1:]
    is_text = identity.isascii() and identity.decode("latin-1").isprintable()
    if identity and is_text:
        return prefix + socket + b"/" + identity
    digits = blake2b(identity, digest_size=8, key=secret).hexdigest() if secret else identity.hex()
    return prefix + socket + b"-" + digits.encode()


_DEFAULT_SETTINGS: Final = Settings()

__all__ = ["Backend", "Frontend", "Settings", "make_server"]

#: Open jobs of one client, so that one client can't fill the queue of all.
WAITING_MAX: Final = 1000
#: Refusals to one client that wait for the replies before them. A client beyond that does not read.
REFUSALS_MAX: Final = 1_000


class PendingJob(Struct, eq=False):
    """A request without a reply."""

    route: bytes
    #: The request number. 0: it is sent with the reply before it.
    number: int = 0
    #: The reply, while those before it are missing.
    answer: list[bytes] | None = None


class Frontend:
    """All clients of this dialect, on any number of sockets."""

    #: It has no workers.
    prefix = b""

    def __init__(self, dialect: int, random_bits: Callable[[], int], settings: Settings) -> None:
        #: Not used: no request has a deadline.
        self.timers = TimerHeap()
        self._numbers = request_numbers(dialect)
        self._queue_max = settings.queue_max
        self._tasks = ClientTasks(DIALECT, settings.tasks, random_bits)
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
        waiting = len(self._clients.get(route, ()))
        if waiting >= WAITING_MAX + REFUSALS_MAX:
            self.malformed += 1
            return []
        refusal = None if peer is None else roles.refusal(peer, roles.PING_PONG, roles.JOB)
        if refusal is not None:
            self.forbidden += 1
        elif waiting >= WAITING_MAX or len(self._requests) >= self._queue_max:
            refusal = (Refusal.FULL, "the queue is full")
        else:
            refusal = self._refusal(frames)
        number = self._note(PendingJob(route))
        if refusal is not None:
            return [events.RequestRejected(0, route, number, *refusal)]
        return [self._tasks.submit(route, number, frames[1])]

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

    def _note(self, job_request: PendingJob) -> int:
        job_request.number = number = next(self._numbers)
        self._requests[number] = job_request
        self._clients.setdefault(job_request.route, deque()).append(job_request)
        return number

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """Encode the reply to the request of an effect, and later replies that waited for it."""
        if isinstance(effect, effects.Settled):
            return self._answer(effect.request, _outcome(effect))
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
            replies.append((first.route, first.answer or []))
        if not queue:
            del self._clients[job_request.route]
        return replies

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Drop the requests of a client that can't be reached. The jobs are done nevertheless."""
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
    text, problem = text_and_problem(effect)
    return [b"", text] if problem is None else [b"", ERROR, problem]


def make_server(
    dialect: int, random_bits: Callable[[], int], settings: Settings = _DEFAULT_SETTINGS
) -> tuple[Backend, Frontend]:
    """Return both dialects, numbered `dialect` and the next number."""
    return Backend(dialect, random_bits, settings), Frontend(dialect + 1, random_bits, settings)
