"""The client's courier: one thread that owns the line to the broker.

Callers leave what they want in the outbox and go on; the courier takes all that is there when it
comes by. Tasks are gathered: while submissions are under way, later ones wait and leave together,
so a loop of single calls becomes a few large messages. A submission that is refused is taken apart
until the task that is to blame is found; the others are taken. A refusal counts only when all that
was submitted before is acknowledged: what a task waits for may still be on its way. A question
waits until all that was submitted before it is acknowledged: who submits a task and then asks for
it finds it.

Tasks that somebody has a future of are watched, a submission at a time, as soon as they are
acknowledged. A broker lets one peer watch a limited number of times: where tasks trickle in one by
one, the later ones are asked after together, again and again, until there are enough of them for a
watch of their own.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import deque
from concurrent.futures import Future as AnyFuture
from concurrent.futures import InvalidStateError
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from taskyard.client import finding
from taskyard.client.campaign.submitting import task_bytes
from taskyard.client.campaign.values import InvalidValue
from taskyard.client.lane_rules import LaneRules
from taskyard.client.outage import Outage
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.tasks import Submission, Terms, shown
from taskyard.errors import ClientClosed, NoBroker, Refused, TaskyardError, UserError
from taskyard.net import sockets
from taskyard.net.clock import SystemClock
from taskyard.net.line import Channel
from taskyard.net.poller import Poller
from taskyard.net.waker import Waker
from taskyard.wire import dwork_peer as peer

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from taskyard.client.futures import Promise
    from taskyard.core.events import UnknownPolicy
    from taskyard.net.clock import Clock
    from taskyard.net.keys import PeerKey
    from taskyard.net.line import Transport
    from taskyard.net.sockets import ZmqSocket
    from taskyard.wire.dwork_peer import Reply

logger = logging.getLogger("taskyard.client")

#: Submissions under way at once: one travels while the next is gathered.
CREATES_MAX: Final = 2

#: Tasks and bytes in one submission.
TASKS_A_CREATE_MAX: Final = 2_000
BYTES_A_CREATE_MAX: Final = 4 * 1024 * 1024

#: A watch that streams shows life more often than this.
STREAM_NS: Final = 20 * SECOND_NS

#: Watches that stream at once whatever they are about, well under what a broker allows.
STREAMS_MAX: Final = 200

#: Late tasks that are worth one more, twice as many after every so many more: however many tasks
#: there are, a small part of them is asked after again and again, and a broker's limit is far.
LATE_STREAM_TASKS_MIN: Final = 500
LATE_STREAMS_A_STEP: Final = 50

#: And so many at most: their names, however long, fit one message.
LATE_STREAM_TASKS_MAX: Final = 20_000

#: How long an answer about the tasks beyond those may wait for one of them to be settled, and how
#: many tasks it may be about: their results come in one message.
LATE_NS: Final = SECOND_NS // 2
LATE_TASKS_MAX: Final = 1_000

#: How long the thread may take to end when nothing is waited for: a callback may be at work.
ABANDON_SECONDS: Final = 1.0

#: Tasks that wait to be sent. Who submits more waits until there is room.
OUTBOX_MAX: Final = 100_000


class Parcel(NamedTuple):
    """One task on its way to the broker."""

    #: In the campaign of its terms.
    name: bytes
    payload: bytes
    terms: Terms
    #: None: as the settings of its service say.
    lane: bytes | None
    after: tuple[bytes, ...]
    unknown: UnknownPolicy
    future: Promise | None
    #: The future is settled when the task is, not as soon as it is taken.
    watched: bool = True


class Batch(NamedTuple):
    """Tasks that are submitted together, and how many were handed over before the first of them."""

    before: int
    parcels: list[Parcel]


class Question(NamedTuple):
    """Something to ask the broker, when so many tasks are acknowledged."""

    build: Callable[[int], bytes]
    wait_ns: int
    answer: AnyFuture[Reply]
    after: int


class AnswerLimits(NamedTuple):
    """How long a client waits for a broker that does not answer, in nanoseconds."""

    #: For its first answer.
    first_ns: int
    #: For the next one, once it has answered. None: for ever.
    later_ns: int | None

    @classmethod
    def of(cls, timeout: float | None, first_answer: float) -> AnswerLimits:
        """Return the limits for a `timeout` in seconds, which stands for both if it is given."""
        if timeout is None:
            return cls(int(first_answer * SECOND_NS), None)
        return cls(int(timeout * SECOND_NS), int(timeout * SECOND_NS))


class Courier:
    """Runs in its own thread from `start` to `stop`. Its public methods may be called by any."""

    def __init__(  # noqa: PLR0913  # all but two are named
        self,
        endpoint: str,
        limits: AnswerLimits,
        *,
        patient: bool = True,
        key: PeerKey | None = None,
        turned: Callable[[], None] | None = None,
        report: Callable[[str], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Without `patient` nobody ever waits to hand a task over, however many there are. `turned`
        is called by the thread when it has settled all that it can for now, `report` with a line
        when the broker stops answering and when it answers again (default: a logged warning)."""
        self.endpoint = endpoint
        self._key = key
        #: Done when the thread has ended.
        self.ended: AnyFuture[None] = AnyFuture()
        self.ended.set_running_or_notify_cancel()  # who waits for it can't cancel it
        self._limits = limits
        self.outage = Outage(endpoint, limits.later_ns, report)
        self._patient = patient
        self._turned = turned or (lambda: None)
        self._parcels: deque[Parcel] = deque()
        #: How many there ever were.
        self._handed_over = 0
        #: Whoever hands something over holds it, and who ends: nothing comes in after the end.
        self._handing = threading.Lock()
        self._questions: deque[Question] = deque()
        self._taken_back: deque[AnyFuture[Reply]] = deque()
        self._wishes: deque[dict[bytes, Promise]] = deque()
        self._waker = Waker()
        self._awake = False
        self._stopping = False
        self._abandoned = False
        #: Why the thread ended; None: it has not.
        self._end: TaskyardError | None = None
        self._room = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="taskyard-client", daemon=True)
        self._clock = clock or SystemClock()
        self._prepare()

    def _prepare(self) -> None:
        """What is the thread's alone."""
        self._creates: dict[int, Batch] = {}
        self._gathered = 0
        self._watches: dict[int, dict[bytes, Promise]] = {}
        #: How many tasks a watch that streams would name, were it asked for again.
        self._named: dict[int, int] = {}
        #: Submissions whose tasks are watched as soon as they are taken.
        self._streaming: dict[int, None] = {}
        #: Those of the watches that do not stream.
        self._late_watches: dict[int, None] = {}
        #: Tasks to be asked after together.
        self._late: dict[bytes, Promise] = {}
        self._asked: dict[int, AnyFuture[Reply]] = {}
        #: Submissions that were refused as a whole, to be tried again or in parts, in order.
        self._suspects: list[Batch] = []
        self._lane_rules = LaneRules()
        #: The request for more of them, and the services that it is about.
        self._rules_asked: tuple[int, list[bytes]] = (0, [])

    def start(self) -> None:
        self._thread.start()

    # For callers.

    def send(self, parcel: Parcel) -> None:
        """Take a task along. Waits while too many are waiting already."""
        _bytes_of(parcel)
        with self._handing:
            self._check_open()
            self._parcels.append(parcel)
            self._handed_over += 1
            if not self._awake:
                self._awake = True
                self._waker.wake()
        if len(self._parcels) > OUTBOX_MAX and self._patient and not self._is_here():
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        with self._room:
            while len(self._parcels) > OUTBOX_MAX // 2 and self._thread.is_alive():
                self._room.wait(0.1)

    def ask(
        self, build: Callable[[int], bytes], answer: AnyFuture[Reply], wait_ns: int = 0
    ) -> None:
        """Ask the broker something; `answer` gets its reply."""
        if self._is_here():
            raise UserError(
                "a callback must not wait for the client: it runs in the client's own thread, "
                "which has the answers to fetch; ask from another thread"
            )
        with self._handing:
            self._check_open()
            self._questions.append(Question(build, wait_ns, answer, self._handed_over))
            self._waker.wake()

    def take_back(self, answer: AnyFuture[Reply]) -> None:
        """Nobody waits for this answer any more."""
        answer.cancel()
        with self._handing:
            if self._end is None:
                self._taken_back.append(answer)
                self._waker.wake()

    def watch(self, futures: dict[bytes, Promise]) -> None:
        """Watch tasks that were submitted before, by whomever."""
        with self._handing:
            self._check_open()
            self._wishes.append(futures)
            self._waker.wake()

    def stop(self, timeout: float | None = None) -> None:
        """Wait until all that was submitted is acknowledged, for so many seconds, then end: what
        is not acknowledged by then is not waited for."""
        self.begin_to_stop()
        if self._is_here():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.abandon()
            self._thread.join(ABANDON_SECONDS)

    def begin_to_stop(self) -> None:
        """Take nothing more, and end when all that was submitted is acknowledged."""
        with self._handing:
            self._stopping = True
            self._wake()

    def abandon(self) -> None:
        """End at once."""
        with self._handing:
            self._abandoned = True
            self._wake()

    def _wake(self) -> None:
        if self._end is None:
            self._waker.wake()

    def _check_open(self) -> None:
        if self._stopping:
            raise ClientClosed("the client is closed; open another")
        if self._end is not None:
            raise self._end

    def _is_here(self) -> bool:
        """Whether the caller is the thread itself, that is, a future's callback."""
        return threading.current_thread() is self._thread

    # The thread.

    def _run(self) -> None:
        try:
            wire = sockets.connect(self.endpoint, self._key, counts=True)
        except Exception as error:  # noqa: BLE001  # it is whoever made the client's to see
            if not isinstance(error, TaskyardError):
                text = (
                    f"can't connect to {self.endpoint}: {error}; see that this is where it listens"
                )
                error = NoBroker(text)
            self._finish(error)
            return
        try:
            with closing(wire):
                self._loop(wire)
        except Refused as refused:
            self._finish(refused)
            return
        except BaseException as error:  # whoever waits must learn of it
            text = f"the client ended by a mistake of its own: {error!r}; make another, and tell us"
            self._finish(ClientClosed(text))
            raise
        text = (
            "the client was closed before this was settled; ask another client for it by its name"
        )
        self._finish(ClientClosed(text))

    def _loop(self, wire: ZmqSocket) -> None:
        self.use(wire)
        poller = Poller()
        poller.add(wire)
        poller.add(self._waker.fileno())
        while not self._is_over():
            wake_at_ns = self.wake_at_ns()
            wait_ns = None if wake_at_ns is None else wake_at_ns - self._clock.monotonic_ns()
            poller.wait(wait_ns)
            self.turn()
            self._turned()
            wire.check_accepted(self._line.unanswered_ns())

    def _finish(self, error: TaskyardError) -> None:
        """Nothing comes in any more, and whoever waits is told."""
        with self._handing:
            self._end = error
            self._waker.close()
        self._fail_all(error)
        self._turned()
        self.ended.set_result(None)

    def close(self) -> None:
        """End, where no thread does: whoever waits is told."""
        self._finish(ClientClosed("the client is closed; open another"))

    def _is_over(self) -> bool:
        # In this order: what came in before it was stopped is seen.
        return self._abandoned or (
            self._stopping
            and not (self._parcels or self._creates or self._suspects or self._questions)
        )

    # The loop, for the thread, or for a caller that has none and never starts it.

    def use(self, wire: Transport) -> None:
        """Talk to the broker over this wire."""
        self._line = Channel(wire, self._clock)

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due though nothing arrives."""
        return self._line.wake_at_ns()

    def turn(self) -> None:
        """Do everything that can be done without waiting."""
        self._waker.clear()
        self._awake = False
        for reply in self._line.receive():
            self._hear(reply)
        while self._taken_back:
            self._drop(self._taken_back.popleft())
        while self._wishes:
            self._watch(self._wishes.popleft())
        while len(self._creates) < CREATES_MAX and (batch := self._next_batch()) is not None:
            self._submit(batch)
        acknowledged = self._acknowledged()
        while self._questions and self._questions[0].after <= acknowledged:
            self._put(self._questions.popleft())
        if self._late and not self._late_watches:
            self._ask_after_late()
        self._line.turn()
        self._check_answers()

    def _check_answers(self) -> None:
        """Report a broker that does not answer, and give up when the limit is reached."""
        unanswered_ns = self._line.unanswered_ns() if self._line.open_count else 0
        self.outage.update(unanswered_ns, self._clock.wall_ns())
        self.outage.note_refusal(self._line.postponed, self._clock.wall_ns())
        limit_ns = self._limits.later_ns if self._line.was_connected else self._limits.first_ns
        if limit_ns is not None and unanswered_ns > limit_ns:
            self._give_up(limit_ns)

    def _put(self, question: Question) -> None:
        if not question.answer.set_running_or_notify_cancel():
            return  # who asked waits no more
        try:
            number = self._line.request(question.build, question.wait_ns)
        except Exception as error:  # noqa: BLE001  # it is whoever asked's to see
            question.answer.set_exception(error)
        else:
            self._asked[number] = question.answer

    def _drop(self, answer: AnyFuture[Reply]) -> None:
        for number in [number for number, asked in self._asked.items() if asked is answer]:
            del self._asked[number]
            self._line.drop(number)

    def _give_up(self, limit_ns: int) -> None:
        """Fail all that waits for an answer, and start anew with the next request."""
        self._line.drop_all()
        self._rules_asked = (0, [])
        since = self.outage.since
        self.outage.reset()
        self._fail_all(self._no_answer(limit_ns / SECOND_NS, since))

    def _no_answer(self, seconds: float, since: datetime | None) -> NoBroker:
        if not self._line.was_connected:
            return NoBroker(
                f"no broker answers at {self.endpoint} (waited {seconds:g} s); "
                "start one with `taskyard up` or `taskyard broker`, or say where it is: --broker "
                "or --state, in Python Client(broker=…) or Client(state=…)"
                f"{finding.hint(self.endpoint, self._key)}"
            )
        when = "" if since is None else f" (since {since:%Y-%m-%d %H:%M:%S})"
        return NoBroker(
            f"broker at {self.endpoint}: no answer for {seconds:g} s{when}; see that it runs. "
            "Tasks that it acknowledged are kept"
        )

    def _fail_all(self, error: TaskyardError) -> None:
        with self._handing:
            waiting = self._clear()
        for future in waiting:
            if not future.done():
                _settle(future.set_exception, error)

    def _clear(self) -> list[AnyFuture[Reply] | Promise]:
        """Drop everything. Returns those that somebody waits for."""
        waiting: list[AnyFuture[Reply] | Promise] = [*self._asked.values()]
        waiting += [question.answer for question in self._questions]
        watched = (*self._watches.values(), *self._wishes, self._late)
        waiting += [future for futures in watched for future in futures.values()]
        batches = (*self._creates.values(), *self._suspects)
        for parcels in (*(batch.parcels for batch in batches), self._parcels):
            waiting += [parcel.future for parcel in parcels if parcel.future is not None]
        for each in (self._creates, self._watches, self._named, self._asked, self._late):
            each.clear()
        for numbers in (self._streaming, self._late_watches):
            numbers.clear()
        for line in (self._questions, self._suspects, self._wishes, self._parcels):
            line.clear()
        self._gathered = self._handed_over
        return waiting

    # Submissions.

    def _acknowledged(self) -> int:
        """How many of the first tasks are taken or refused, without a gap."""
        open_batches = (*self._creates.values(), *self._suspects)
        return min([batch.before for batch in open_batches], default=self._gathered)

    def _next_batch(self) -> Batch | None:
        """What to submit next. A suspect goes when all before it is acknowledged: then its answer
        is the last word."""
        if not self._suspects:
            while self._parcels and self._knows_lanes():
                if (batch := self._gather()) is not None:
                    return batch
            return None
        if self._suspects[0].before <= self._acknowledged():
            return self._suspects.pop(0)
        return None

    def _gather(self) -> Batch | None:
        """The next tasks that fit one submission: they agree on what an unknown name means, and
        where they are to go is known."""
        parcels = [self._parcels.popleft()]
        room = BYTES_A_CREATE_MAX - _bytes_of(parcels[0])
        unknown, knows = parcels[0].unknown, self._lane_rules.knows
        while self._parcels and len(parcels) < TASKS_A_CREATE_MAX:
            following = self._parcels[0]
            room -= _bytes_of(following)
            if room < 0 or following.unknown is not unknown:
                break
            if following.lane is None and not knows(following.terms.service):
                break
            parcels.append(self._parcels.popleft())
        if len(self._parcels) <= OUTBOX_MAX // 2:
            with self._room:
                self._room.notify_all()
        before, self._gathered = self._gathered, self._gathered + len(parcels)
        fit = self._in_lanes(parcels)
        return Batch(before, fit) if fit else None

    def _knows_lanes(self) -> bool:
        """Whether it is known where the next task is to go; if not, the broker is asked."""
        first = self._parcels[0]
        if first.lane is not None:
            return True
        self._lane_rules.forget_old(self._clock.monotonic_ns())
        if self._lane_rules.knows(first.terms.service):
            return True
        if not self._rules_asked[0]:
            services = [first.terms.service]
            number = self._line.request(lambda number: peer.rules(number, services))
            self._rules_asked = (number, services)
        return False

    def _in_lanes(self, parcels: list[Parcel]) -> list[Parcel]:
        """Tasks with their lanes; without those that none can be made for."""
        fit: list[Parcel] = []
        for parcel in parcels:
            if parcel.lane is not None:
                fit.append(parcel)
                continue
            try:
                lane = self._lane_rules.lane_of(parcel.name, parcel.payload, parcel.terms)
            except InvalidValue as bad:
                self._refuse([parcel], str(bad))
            else:
                fit.append(parcel._replace(lane=lane) if lane else parcel)
        return fit

    def _submit(self, batch: Batch) -> None:
        parcels = batch.parcels
        stream = self._may_stream() and all(
            parcel.watched and parcel.future is not None for parcel in parcels
        )
        try:
            submission, unknown = _submission(parcels), parcels[0].unknown
            number = self._line.request(
                lambda number: peer.create(number, submission, unknown, stream=stream),
                STREAM_NS if stream else 0,
                stream=stream,
            )
        except Exception as error:  # noqa: BLE001  # it is whoever submitted it's to see
            self._blame(batch, error)
            return
        self._creates[number] = batch
        if stream:
            self._streaming[number] = None

    def _hear(self, reply: Reply) -> None:
        number = reply.request
        if number == self._rules_asked[0]:
            clauses = [] if reply.kind == peer.ERROR else reply.clauses()
            self._lane_rules.learn(self._rules_asked[1], clauses, self._clock.monotonic_ns())
            self._rules_asked = (0, [])
        elif number in self._creates:
            self._submitted(number, self._creates.pop(number), reply)
        elif number in self._watches:
            self._told(number, reply)
        elif number in self._asked:
            answer = self._asked.pop(number)
            if not answer.done():
                _settle(answer.set_result, reply)

    def _submitted(self, number: int, batch: Batch, reply: Reply) -> None:
        if reply.kind == peer.OK:
            self._taken(number, batch.parcels)
            return
        self._streaming.pop(number, None)
        if reply.kind != peer.ERROR:
            self._refuse(batch.parcels, "the broker is leaving")
        elif batch.before <= self._acknowledged():
            self._blame(batch, reply.reason)
        else:
            self._suspect(batch)

    def _suspect(self, batch: Batch) -> None:
        insort(self._suspects, batch, key=_place)

    def _blame(self, batch: Batch, reason: str | Exception) -> None:
        """It can't be taken: halve it, until one task is left."""
        before, parcels = batch
        if len(parcels) == 1:
            self._refuse(parcels, reason)
            return
        middle = len(parcels) // 2
        self._suspect(Batch(before, parcels[:middle]))
        self._suspect(Batch(before + middle, parcels[middle:]))

    def _taken(self, number: int, parcels: list[Parcel]) -> None:
        watched: dict[bytes, Promise] = {}
        for parcel in parcels:
            if parcel.future is None:
                continue
            if parcel.watched:
                watched[spelling(parcel.terms.campaign, parcel.name)] = parcel.future
            elif not parcel.future.done():
                _settle(parcel.future.set_result, None)
        if number in self._streaming:
            del self._streaming[number]
            self._watches[number] = watched
            self._name_anew(number)
        else:
            self._watch(watched)

    def _refuse(self, parcels: list[Parcel], reason: str | Exception) -> None:
        for parcel in parcels:
            if parcel.future is not None and not parcel.future.done():
                full_name = shown(spelling(parcel.terms.campaign, parcel.name))
                text = f"task {full_name} was refused: {reason}"
                _settle(parcel.future.set_exception, Refused(text))

    # Watches.

    def _watch(self, futures: dict[bytes, Promise]) -> None:
        if not futures:
            return
        if self._may_stream() or not self._late.keys().isdisjoint(futures):
            self._stream(futures)
        else:
            self._late.update(futures)

    def _may_stream(self) -> bool:
        return self._streams() < STREAMS_MAX

    def _streams(self) -> int:
        return len(self._watches) - len(self._late_watches) + len(self._streaming)

    def _stream(self, futures: dict[bytes, Promise]) -> None:
        names = list(futures)
        number = self._line.request(
            lambda number: peer.watch(number, names, stream=True), STREAM_NS, stream=True
        )
        self._watches[number] = futures
        self._named[number] = len(names)

    def _ask_after_late(self) -> None:
        late, self._late = self._late, {}
        steps = max(0, self._streams() - STREAMS_MAX) // LATE_STREAMS_A_STEP
        stream = self._may_stream() or len(late) >= LATE_STREAM_TASKS_MIN << steps
        ask, size = (
            (self._stream, LATE_STREAM_TASKS_MAX) if stream else (self._ask_after, LATE_TASKS_MAX)
        )
        several = list(late.items())
        for first in range(0, len(several), size):
            ask(dict(several[first : first + size]))

    def _ask_after(self, futures: dict[bytes, Promise]) -> None:
        names = list(futures)
        number = self._line.request(
            lambda number: peer.watch(number, names, wait_ns=LATE_NS),
            LATE_NS,
        )
        self._watches[number] = futures
        self._late_watches[number] = None

    def _told(self, number: int, reply: Reply) -> None:
        futures = self._watches[number]
        for name, state, result in zip(reply.names, reply.states, reply.results, strict=True):
            future = futures.pop(name, None)
            if future is not None:
                _settle(future.settle, state, result)
        if not futures or number in self._late_watches or reply.kind == peer.ERROR:
            del self._watches[number]
            self._named.pop(number, None)
            self._late_watches.pop(number, None)
            self._line.drop(number)
            self._watch(futures)
        elif 2 * len(futures) <= self._named[number]:
            self._name_anew(number)

    def _name_anew(self, number: int) -> None:
        """Should the broker be another one by then, it is asked for what is left, and need not be
        told payloads again."""
        futures = self._watches[number]
        self._named[number] = len(futures)
        self._line.replace(number, peer.watch(number, list(futures), stream=True))


def _settle(settle: Callable[..., None], *outcome: object) -> None:
    """Settle a future, and survive its callbacks: one may raise even `SystemExit`."""
    try:
        settle(*outcome)
    except InvalidStateError:  # its owner has given up at the same moment
        pass
    except BaseException:
        logger.exception("a callback of a future raised")


def _place(batch: Batch) -> int:
    return batch.before


def _bytes_of(parcel: Parcel) -> int:
    return task_bytes(parcel.name, parcel.payload, parcel.lane or b"", parcel.after)


def _submission(parcels: list[Parcel]) -> Submission:
    """Tasks as columns; what they have in common is there once."""
    places: dict[int, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    for parcel in parcels:
        place = places.get(id(parcel.terms))
        if place is None:
            place = places[id(parcel.terms)] = len(terms)
            terms.append(parcel.terms)
        terms_at.append(place)
    lanes = [parcel.lane or b"" for parcel in parcels]
    after = [parcel.after for parcel in parcels]
    return Submission(
        names=[parcel.name for parcel in parcels],
        payloads=[parcel.payload for parcel in parcels],
        terms=terms,
        terms_at=terms_at if len(terms) > 1 else None,
        lanes=lanes if any(lanes) else None,
        after=[list(names) for names in after] if any(after) else None,
    )
