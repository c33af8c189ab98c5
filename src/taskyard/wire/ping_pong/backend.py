"""Ping-pong's workers at the broker: who is ready, who is at a job, who is gone. No sockets, no
clock.

A result says nothing of its job, so a worker is given one job at a time, and none while its hands
may still be at another: after it was taken for gone, after its job was cancelled, and when it was
never heard to say READY. That is what most of this file is about; the rest is words.

A worker is a connection. Its silence is watched here and not in the core, because how much of it is
allowed depends on whether it pings while it works; the core is told who is lost. Nothing is
journalled for a ping. Everything passes through the scheduler, so that an answer leaves after the
commits that it rests on.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import QueueOrder, WorkerFacts
from taskyard.wire.dialect import PING_PONG, request_numbers
from taskyard.wire.ping_pong.frames import (
    DIALECT,
    DISCONNECT,
    ERROR,
    EXIT,
    FRAMES,
    FRAMES_MAX,
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

#: Connections that are remembered; with so many, who comes new is not answered and tries again.
PEERS_MAX: Final = 20_000

#: A connection that has no place among the workers is forgotten after this silence: nobody tells
#: when it is closed.
FORGET_NS: Final = 600 * SECOND_NS

#: A ping that comes so soon after a job was sent may have crossed it on the way: it does not show
#: that the worker pings while it works.
CROSSING_NS: Final = SECOND_NS // 5


class PeerState(Enum):
    """What a worker is to the broker."""

    PROBATION = "heard, but never to say READY: it may be at a job of another connection"
    WAITING = "wants a job"
    WORKING = "has a job"
    OWING = "at a job that is no longer its own; it gets another when it has answered"
    AWAY = "was silent for too long while it waited"
    DISMISSED = "was told to exit"


PROBATION, WAITING, WORKING, OWING, AWAY, DISMISSED = PeerState

#: The core knows these as workers.
REGISTERED: Final = (WAITING, WORKING)


class Peer(Struct, eq=False):
    """One connection of a worker."""

    route: bytes
    #: Its name in the core.
    name: bytes
    last_seen_ns: int
    #: PROBATION: since when. Unanswered after WORKER_EXPIRE_SECONDS, it connects anew.
    since_ns: int
    standing: PeerState = PROBATION
    #: How often it has pinged.
    pings: int = 0
    #: WORKING and OWING: the task and its attempt.
    task: bytes = b""
    attempt: int = 0
    #: WORKING: when it was given; the silence it may keep without pings, and with.
    given_ns: int = 0
    lease_ns: int = 0
    pinging_lease_ns: int = 0
    #: WORKING: it pings meanwhile, so silence means more.
    is_pinging: bool = False
    #: WORKING: it says READY, so it may be another process under the same id; what it says does not
    #: prolong its lease.
    is_doubted: bool = False
    #: The last that it was told is its job.
    is_last_sent: bool = False
    #: When its silence is looked at next; 0: never.
    timeout_check_ns: int = 0

    @property
    def is_registered(self) -> bool:
        return self.standing in REGISTERED


class Backend:
    """All workers of this dialect, on however many sockets."""

    prefix = PING_PONG

    def __init__(self, dialect: int, random_bits: Callable[[], int], settings: Settings) -> None:
        self._numbers = request_numbers(dialect)
        self._random_bits = random_bits
        self._settings = settings
        self._peers: dict[bytes, Peer] = {}
        #: The same by their names.
        self._named: dict[bytes, Peer] = {}
        #: What each request is answered, if it is.
        self._answers: dict[int, Reply] = {}
        #: Enlisted anew a worker is another one, also to what a former broker wrote down.
        self._incarnation = (random_bits() % (1 << 32)) << 30
        #: (when, route): silences to look at. An entry may be early, never late.
        self._timeouts: list[tuple[int, bytes]] = []
        #: What effects have brought about; told to the scheduler before anything else is.
        self._overdue: list[events.Event] = []
        #: Who was given a job since the clock was last seen.
        self._just_given: list[Peer] = []
        self._now_ns = 0
        #: Messages that made no sense, for the log and the statistics.
        self.malformed = 0
        #: Results of nobody's job.
        self.stale = 0
        #: The broker ends for good: who comes for work is sent home.
        self.leaving = False

    @property
    def peer_count(self) -> int:
        """How many connections it knows of."""
        return len(self._peers)

    # What workers say.

    def receive(
        self, route: bytes, frames: Sequence[bytes], now_ns: int, peer: object | None = None
    ) -> list[events.Event]:
        """What a message says. Whatever it is, this returns."""
        del peer
        told = self._begin(now_ns)
        if not is_message(frames):
            self.malformed += 1
            return told
        word, peer = frames[1], self._peers.get(route)
        if len(frames) == FRAMES and word == DISCONNECT:
            return told + self._leave(peer)
        if peer is None:
            peer = self._register_peer(route, word)
        if peer is None:
            return told + self._reply_unknown(route, word)
        told += self._receive(peer, frames)
        if peer.route in self._peers:
            self._watch(peer)
        return told

    def _receive(self, peer: Peer, frames: Sequence[bytes]) -> list[events.Event]:
        peer.is_last_sent = False
        if not peer.is_doubted:
            peer.last_seen_ns = self._now_ns
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
            text = b"its result has %d bytes, and can have %d" % (len(word), PAYLOAD_BYTES_MAX)
            return self._reported(peer, Outcome.FAILED_FINAL, text)
        return self._reported(peer, Outcome.DONE, word)

    def _register_peer(self, route: bytes, word: bytes) -> Peer | None:
        """Remember who is there, if it wants work and there is room."""
        if not (word == READY or is_ping(word)) or not self._has_room():
            return None
        name = name_of(route, self._settings.secret)
        peer = Peer(route, name, last_seen_ns=self._now_ns, since_ns=self._now_ns)
        self._peers[route] = self._named[peer.name] = peer
        return peer

    def _has_room(self) -> bool:
        """Return whether one more connection can be remembered; forget a silent one if need be."""
        if len(self._peers) < PEERS_MAX:
            return True
        silent_ns = self._now_ns - self._settings.expire_ns
        for peer in self._peers.values():
            if peer.standing is PROBATION and peer.last_seen_ns <= silent_ns:
                self._forget(peer)
                return True
        return False

    def _reply_unknown(self, route: bytes, word: bytes) -> list[events.Event]:
        """A result of whoever has no job; and there is no room for newcomers."""
        if word == READY or is_ping(word):
            self.malformed += 1
            return []
        self.stale += 1
        return [events.ReplyDue(0, route, self._number((route, [b"", PONG])))]

    def _pinged(self, peer: Peer, *, is_counted: bool) -> list[events.Event]:
        peer.pings += 1
        if self._is_ignored(peer):
            return []
        count = [b"%d" % peer.pings] if is_counted else []
        pong = self._pong(peer, *count)
        if peer.standing is AWAY:
            return [pong, *self._register_worker(peer)]
        if peer.standing is WORKING and self._now_ns - peer.given_ns > CROSSING_NS:
            peer.is_pinging = True
        return [pong]

    def _is_ignored(self, peer: Peer) -> bool:
        """Return whether a peer has been on probation for too long to be answered."""
        since_ns = self._now_ns - peer.since_ns
        return peer.standing is PROBATION and since_ns >= self._settings.expire_ns

    def _is_ready(self, peer: Peer) -> list[events.Event]:
        if peer.standing is WORKING and _chose_its_id(peer.route):
            peer.is_doubted = True
        pong = self._pong(peer)
        is_busy = peer.is_registered or self._is_crossing(peer)
        return [pong] if is_busy else [pong, *self._register_worker(peer)]

    def _is_crossing(self, peer: Peer) -> bool:
        """Return whether a READY may have left before the job that its worker owes: the result
        would be taken for that of the next job."""
        if peer.standing is not OWING or _chose_its_id(peer.route):
            return False
        return self._now_ns - peer.given_ns < peer.lease_ns

    def _reported(self, peer: Peer, outcome: Outcome, text: bytes) -> list[events.Event]:
        """On the job that it has, or had. What it still owed is over: it may have another one."""
        if peer.standing not in (WORKING, OWING):
            self.stale += 1
            return [] if self._is_ignored(peer) else [self._pong(peer)]
        was_owing = peer.standing is OWING
        report = events.TasksReported(
            *(0, peer.name, [peer.task], [peer.attempt], None, [text]),
            request=self._number((peer.route, [b"", PONG])),
        )
        if outcome is not Outcome.DONE:
            report.outcomes, report.random_bits = [outcome], self._random_bits()
        peer.standing, peer.is_doubted = WAITING, False
        peer.last_seen_ns = self._now_ns
        return [report, *self._register_worker(peer)] if was_owing else [report]

    def _leave(self, peer: Peer | None) -> list[events.Event]:
        if peer is None:
            return []
        self._forget(peer)
        return [events.WorkerExited(0, peer.name)] if peer.is_registered else []

    def _shut_down(self, peer: Peer) -> list[events.Event]:
        peer.standing = DISMISSED
        return [events.ReplyDue(0, peer.route, self._number((peer.route, [b"", EXIT])))]

    def _pong(self, peer: Peer, *count: bytes) -> events.Event:
        """An answer, and a sign of life to the core if it is one."""
        number = self._number((peer.route, [b"", PONG, *count]))
        if peer.is_registered and not peer.is_doubted:
            return events.WorkerHeartbeat(0, peer.name, request=number)
        return events.ReplyDue(0, peer.route, number)

    def _number(self, answer: Reply) -> int:
        number = next(self._numbers)
        self._answers[number] = answer
        return number

    def _register_worker(self, peer: Peer) -> list[events.Event]:
        """Let it have jobs. The core minds its silence, too, and a little later than we do: nobody
        else does after a restart."""
        self._incarnation += 1
        peer.standing, peer.is_doubted = WAITING, False
        peer.last_seen_ns = self._now_ns
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

    def _forget(self, peer: Peer) -> None:
        self._peers.pop(peer.route, None)
        self._named.pop(peer.name, None)

    # What workers are told.

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """The replies that an effect makes: one at most."""
        if isinstance(effect, effects.Assign):
            return self._assign(effect)
        if isinstance(effect, effects.HeartbeatAck | effects.ReplyDue):
            return self._answer(effect.request)
        if isinstance(effect, effects.ReportAck):
            return self._on_report_ack(effect)
        peer = self._named.get(getattr(effect, "worker", b""))
        if peer is None or not peer.is_registered:
            return []
        if isinstance(effect, effects.Shutdown):
            peer.standing = DISMISSED
            self._overdue.append(events.WorkerExited(0, peer.name))
            return [(peer.route, [b"", EXIT])]
        if isinstance(effect, effects.Stop) and peer.standing is WORKING:
            self._let_finish(peer)
        if isinstance(effect, effects.UnknownWorker):
            peer.standing = OWING if peer.standing is WORKING else AWAY
        return []

    def _assign(self, effect: effects.Assign) -> list[Reply]:
        peer = self._named.get(effect.worker)
        if peer is None or peer.standing is not WAITING:
            # It left, or its hands are full: the scheduler will have heard, or hears it now.
            gone = events.WorkerLost(0, effect.worker, b"not waiting", charged=False)
            self._overdue.append(gone)
            return []
        peer.standing = WORKING
        peer.task, peer.attempt = effect.names[0], effect.attempts[0]
        asked_ns = effect.terms[0].lease_ns
        peer.lease_ns = max(self._settings.lease_ns, asked_ns)
        peer.pinging_lease_ns = max(self._settings.expire_ns, asked_ns)
        peer.is_pinging, peer.is_last_sent = False, True
        self._just_given.append(peer)
        return [(peer.route, [b"", _job_of(effect)])]

    def _answer(self, number: int) -> list[Reply]:
        answer = self._answers.pop(number, None)
        if answer is None:
            return []
        peer = self._peers.get(answer[0])
        if peer is not None:
            peer.is_last_sent = False
        return [answer]

    def _on_report_ack(self, effect: effects.ReportAck) -> list[Reply]:
        """A result is answered only if it was too late."""
        if effect.missing:
            self.stale += 1
            return self._answer(effect.request)
        self._answers.pop(effect.request, None)
        return []

    def _let_finish(self, peer: Peer) -> None:
        """Nobody wants its job any more, and it can't be told: it is no worker until it is done."""
        peer.standing = OWING
        lost = events.WorkerLost(0, peer.name, b"at a cancelled task", charged=False)
        self._overdue.append(lost)

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Nothing reaches that route any more: its worker comes back by another, if it does. A job
        that was the last it was told never left."""
        peer = self._peers.get(route)
        if peer is None:
            return []
        self._forget(peer)
        if not peer.is_registered:
            return []
        return [events.WorkerLost(0, peer.name, b"unreachable", charged=not peer.is_last_sent)]

    # Time.

    def wake_at_ns(self) -> int | None:
        """When to call `time_passed`; at once, if effects have brought something about, or to see
        when they were told."""
        if self._overdue or self._just_given:
            return 0
        return self._timeouts[0][0] if self._timeouts else None

    def time_passed(self, now_ns: int) -> list[events.Event]:
        """Give up workers that were silent for too long."""
        told = self._begin(now_ns)
        while self._timeouts and self._timeouts[0][0] <= now_ns:
            at_ns, route = heappop(self._timeouts)
            peer = self._peers.get(route)
            if peer is None or peer.timeout_check_ns != at_ns:
                continue
            peer.timeout_check_ns = 0
            if self._due_ns(peer) <= now_ns:
                told += self._end_wait(peer)
            if route in self._peers:
                self._watch(peer)
        return told

    def _begin(self, now_ns: int) -> list[events.Event]:
        """It is now; and what has to be told before anything else."""
        self._now_ns = now_ns
        for peer in self._just_given:
            peer.given_ns = now_ns
        self._just_given.clear()
        taken, self._overdue = self._overdue, []
        return taken

    def _watch(self, peer: Peer) -> None:
        due_ns = self._due_ns(peer)
        if not peer.timeout_check_ns or due_ns < peer.timeout_check_ns:
            peer.timeout_check_ns = due_ns
            heappush(self._timeouts, (due_ns, peer.route))

    def _due_ns(self, peer: Peer) -> int:
        """When something becomes of its silence."""
        if peer.standing is WAITING:
            return peer.last_seen_ns + self._settings.expire_ns
        if peer.standing is WORKING:
            is_prompt = peer.is_pinging and not peer.is_doubted
            return peer.last_seen_ns + (peer.pinging_lease_ns if is_prompt else peer.lease_ns)
        return peer.last_seen_ns + FORGET_NS

    def _end_wait(self, peer: Peer) -> list[events.Event]:
        if peer.standing is WORKING:
            peer.standing = OWING
            return [events.WorkerLost(0, peer.name)]
        if peer.standing is WAITING:
            peer.standing = AWAY
            # A job that is given to it in this very turn is not to blame.
            return [events.WorkerLost(0, peer.name, charged=False)]
        self._forget(peer)
        return []


#: A ping whose number has a frame of its own.
_COUNTED: Final = (PING, PING.lower())


def is_message(frames: Sequence[bytes]) -> bool:
    """An empty frame and a word; a ping may have its number, and a failure has its reason."""
    if not FRAMES <= len(frames) <= FRAMES_MAX or frames[0]:
        return False
    if len(frames) == FRAMES:
        return True
    return frames[1] == ERROR or (frames[1] in _COUNTED and is_count(frames[2]))


def _job_of(effect: effects.Assign) -> bytes:
    """A task without a payload is its name; what came in by this dialect is what was sent."""
    payload = effect.payloads[0]
    is_own = effect.terms[0].dialect == DIALECT
    return payload if payload or is_own else effect.names[0]


def _chose_its_id(route: bytes) -> bool:
    """ZeroMQ's own ids begin with a zero byte, and no two connections ever share one."""
    return route[1:2] != b"\0"


def name_of(route: bytes, secret: bytes = b"") -> bytes:
    """The socket's number and the connection's id: as it is if one can type it, else as digits, of
    which none tells what the id is."""
    socket, identity = route[:1].hex().encode(), route[1:]
    is_text = identity.isascii() and identity.decode("latin-1").isprintable()
    if identity and is_text:
        return PING_PONG + socket + b"/" + identity
    digits = blake2b(identity, digest_size=8, key=secret).hexdigest() if secret else identity.hex()
    return PING_PONG + socket + b"-" + digits.encode()
