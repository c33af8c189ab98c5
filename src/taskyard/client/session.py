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

from taskyard.campaign.batches import task_bytes
from taskyard.campaign.lanes import LaneTemplates
from taskyard.campaign.values import InvalidValue
from taskyard.client import discovery
from taskyard.client.outage import Outage
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, shown
from taskyard.errors import ClientClosed, NoBroker, Refused, TaskyardError, UserError
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.waker import Waker
from taskyard.wire.native import peer

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from taskyard.client.futures import SettableFuture
    from taskyard.core.events import UnknownPolicy
    from taskyard.net.channel import Transport
    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import Clock
    from taskyard.net.sockets import ZmqSocket
    from taskyard.wire.native.peer import Reply

logger = logging.getLogger("taskyard.client")

#: Submissions under way at once: one travels while the next is gathered.
CREATES_MAX: Final = 2

#: Tasks and bytes in one submission.
TASKS_PER_CREATE_MAX: Final = 2_000
BYTES_PER_CREATE_MAX: Final = 4 * 1024 * 1024

#: A watch that streams shows life more often than this.
STREAM_NS: Final = 20 * SECOND_NS

#: Watches that stream at once whatever they are about, well under what a broker allows.
STREAMS_MAX: Final = 200

#: Late tasks that are worth one more, twice as many after every so many more: however many tasks
#: there are, a small part of them is asked after again and again, and a broker's limit is far.
POLLED_STREAM_TASKS_MIN: Final = 500
POLLED_STREAMS_PER_STEP: Final = 50

#: And so many at most: their names, however long, fit one message.
POLLED_STREAM_TASKS_MAX: Final = 20_000

#: How long an answer about the tasks beyond those may wait for one of them to be settled, and how
#: many tasks it may be about: their results come in one message.
POLL_NS: Final = SECOND_NS // 2
POLL_TASKS_MAX: Final = 1_000

#: How long the thread may take to end when nothing is waited for: a callback may be at work.
ABANDON_SECONDS: Final = 1.0

#: Tasks that wait to be sent. Who submits more waits until there is room.
OUTBOX_MAX: Final = 100_000


class PendingTask(NamedTuple):
    """One task on its way to the broker."""

    #: In the campaign of its terms.
    name: bytes
    payload: bytes
    terms: Terms
    #: None: as the settings of its service say.
    lane: bytes | None
    after: tuple[bytes, ...]
    unknown: UnknownPolicy
    future: SettableFuture | None
    #: The future is settled when the task is, not as soon as it is taken.
    watched: bool = True


class Batch(NamedTuple):
    """Tasks that are submitted together, and how many were handed over before the first of them."""

    before: int
    tasks: list[PendingTask]


class PendingRequest(NamedTuple):
    """Something to ask the broker, when so many tasks are acknowledged."""

    build: Callable[[int], bytes]
    wait_ns: int
    reply_future: AnyFuture[Reply]
    after: int


class ReplyTimeouts(NamedTuple):
    """How long a client waits for a broker that does not answer, in nanoseconds."""

    #: For its first answer.
    first_ns: int
    #: For the next one, once it has answered. None: for ever.
    next_ns: int | None

    @classmethod
    def of(cls, timeout: float | None, connect_timeout: float) -> ReplyTimeouts:
        """Return the limits for a `timeout` in seconds, which stands for both if it is given."""
        if timeout is None:
            return cls(int(connect_timeout * SECOND_NS), None)
        return cls(int(timeout * SECOND_NS), int(timeout * SECOND_NS))


class Session:
    """Runs in its own thread from `start` to `stop`. Its public methods may be called by any."""

    def __init__(  # noqa: PLR0913  # all but two are named
        self,
        endpoint: str,
        limits: ReplyTimeouts,
        *,
        blocking: bool = True,
        key: PeerKey | None = None,
        on_turn: Callable[[], None] | None = None,
        report: Callable[[str], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Without `blocking` nobody ever waits to hand a task over, however many there are.
        `on_turn` is called by the thread when it has settled all that it can for now, `report`
        with a line when the broker stops answering and when it answers again (default: a logged
        warning)."""
        self.endpoint = endpoint
        self._key = key
        #: Done when the thread has ended.
        self.ended: AnyFuture[None] = AnyFuture()
        self.ended.set_running_or_notify_cancel()  # who waits for it can't cancel it
        self._limits = limits
        self.outage = Outage(endpoint, limits.next_ns, report)
        self._blocking = blocking
        self._on_turn = on_turn or (lambda: None)
        self._outbox: deque[PendingTask] = deque()
        #: How many there ever were.
        self._submitted_count = 0
        #: Whoever hands something over holds it, and who ends: nothing comes in after the end.
        self._lock = threading.Lock()
        self._pending_requests: deque[PendingRequest] = deque()
        self._cancelled_requests: deque[AnyFuture[Reply]] = deque()
        self._watch_requests: deque[dict[bytes, SettableFuture]] = deque()
        self._waker = Waker()
        self._awake = False
        self._stopping = False
        self._abandoned = False
        #: Why the thread ended; None: it has not.
        self._end: TaskyardError | None = None
        self._outbox_room = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="taskyard-client", daemon=True)
        self._clock = clock or SystemClock()
        self._init_thread_state()

    def _init_thread_state(self) -> None:
        """What is the thread's alone."""
        self._creates: dict[int, Batch] = {}
        self._batched_count = 0
        self._watches: dict[int, dict[bytes, SettableFuture]] = {}
        #: How many tasks a watch that streams would name, were it asked for again.
        self._watched_count: dict[int, int] = {}
        #: Submissions whose tasks are watched as soon as they are taken.
        self._streaming_creates: dict[int, None] = {}
        #: Those of the watches that do not stream.
        self._poll_requests: dict[int, None] = {}
        #: Tasks to be asked after together.
        self._polled: dict[bytes, SettableFuture] = {}
        self._open_requests: dict[int, AnyFuture[Reply]] = {}
        #: Submissions that were refused as a whole, to be tried again or in parts, in order.
        self._suspects: list[Batch] = []
        self._lane_templates = LaneTemplates()
        #: The request for more of them, and the services that it is about.
        self._rules_request: tuple[int, list[bytes]] = (0, [])

    def start(self) -> None:
        self._thread.start()

    # For callers.

    def submit(self, task: PendingTask) -> None:
        """Take a task along. Waits while too many are waiting already."""
        _bytes_of(task)
        with self._lock:
            self._check_open()
            self._outbox.append(task)
            self._submitted_count += 1
            if not self._awake:
                self._awake = True
                self._waker.wake()
        if len(self._outbox) > OUTBOX_MAX and self._blocking and not self._is_session_thread():
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        with self._outbox_room:
            while len(self._outbox) > OUTBOX_MAX // 2 and self._thread.is_alive():
                self._outbox_room.wait(0.1)

    def request(
        self, build: Callable[[int], bytes], reply_future: AnyFuture[Reply], wait_ns: int = 0
    ) -> None:
        """Ask the broker something; `reply_future` gets its reply."""
        if self._is_session_thread():
            raise UserError(
                "a callback must not wait for the client: it runs in the client's own thread, "
                "which has the answers to fetch; ask from another thread"
            )
        with self._lock:
            self._check_open()
            self._pending_requests.append(
                PendingRequest(build, wait_ns, reply_future, self._submitted_count)
            )
            self._waker.wake()

    def cancel_request(self, reply_future: AnyFuture[Reply]) -> None:
        """Nobody waits for this answer any more."""
        reply_future.cancel()
        with self._lock:
            if self._end is None:
                self._cancelled_requests.append(reply_future)
                self._waker.wake()

    def watch(self, futures: dict[bytes, SettableFuture]) -> None:
        """Watch tasks that were submitted before, by whomever."""
        with self._lock:
            self._check_open()
            self._watch_requests.append(futures)
            self._waker.wake()

    def stop(self, timeout: float | None = None) -> None:
        """Wait until all that was submitted is acknowledged, for so many seconds, then end: what
        is not acknowledged by then is not waited for."""
        self.stop_accepting()
        if self._is_session_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.abandon()
            self._thread.join(ABANDON_SECONDS)

    def stop_accepting(self) -> None:
        """Take nothing more, and end when all that was submitted is acknowledged."""
        with self._lock:
            self._stopping = True
            self._wake()

    def abandon(self) -> None:
        """End at once."""
        with self._lock:
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

    def _is_session_thread(self) -> bool:
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
            self._on_turn()
            wire.check_accepted(self._channel.unanswered_ns())

    def _finish(self, error: TaskyardError) -> None:
        """Nothing comes in any more, and whoever waits is told."""
        with self._lock:
            self._end = error
            self._waker.close()
        self._fail_all(error)
        self._on_turn()
        self.ended.set_result(None)

    def close(self) -> None:
        """End, where no thread does: whoever waits is told."""
        self._finish(ClientClosed("the client is closed; open another"))

    def _is_over(self) -> bool:
        # In this order: what came in before it was stopped is seen.
        return self._abandoned or (
            self._stopping
            and not (self._outbox or self._creates or self._suspects or self._pending_requests)
        )

    # The loop, for the thread, or for a caller that has none and never starts it.

    def use(self, wire: Transport) -> None:
        """Talk to the broker over this wire."""
        self._channel = Channel(wire, self._clock)

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due though nothing arrives."""
        return self._channel.wake_at_ns()

    def turn(self) -> None:
        """Do everything that can be done without waiting."""
        self._waker.clear()
        self._awake = False
        for reply in self._channel.receive():
            self._on_reply(reply)
        while self._cancelled_requests:
            self._drop(self._cancelled_requests.popleft())
        while self._watch_requests:
            self._watch(self._watch_requests.popleft())
        while len(self._creates) < CREATES_MAX and (batch := self._next_batch()) is not None:
            self._submit(batch)
        acknowledged = self._acknowledged()
        while self._pending_requests and self._pending_requests[0].after <= acknowledged:
            self._send_request(self._pending_requests.popleft())
        if self._polled and not self._poll_requests:
            self._poll_late()
        self._channel.turn()
        self._check_timeout()

    def _check_timeout(self) -> None:
        """Report a broker that does not answer, and give up when the limit is reached."""
        unanswered_ns = self._channel.unanswered_ns() if self._channel.open_count else 0
        self.outage.update(unanswered_ns, self._clock.wall_ns())
        self.outage.note_refusal(self._channel.postponed, self._clock.wall_ns())
        limit_ns = self._limits.next_ns if self._channel.was_connected else self._limits.first_ns
        if limit_ns is not None and unanswered_ns > limit_ns:
            self._fail_open_requests(limit_ns)

    def _send_request(self, question: PendingRequest) -> None:
        if not question.reply_future.set_running_or_notify_cancel():
            return  # who asked waits no more
        try:
            number = self._channel.request(question.build, question.wait_ns)
        except Exception as error:  # noqa: BLE001  # it is whoever asked's to see
            question.reply_future.set_exception(error)
        else:
            self._open_requests[number] = question.reply_future

    def _drop(self, reply_future: AnyFuture[Reply]) -> None:
        for number in [
            number for number, asked in self._open_requests.items() if asked is reply_future
        ]:
            del self._open_requests[number]
            self._channel.drop(number)

    def _fail_open_requests(self, limit_ns: int) -> None:
        """Fail all that waits for an answer, and start anew with the next request."""
        self._channel.drop_all()
        self._rules_request = (0, [])
        since = self.outage.since
        self.outage.reset()
        self._fail_all(self._timeout_error(limit_ns / SECOND_NS, since))

    def _timeout_error(self, seconds: float, since: datetime | None) -> NoBroker:
        if not self._channel.was_connected:
            return NoBroker(
                f"no broker answers at {self.endpoint} (waited {seconds:g} s); "
                "start one with `taskyard up` or `taskyard broker`, or say where it is: --broker "
                "or --state, in Python Client(broker=…) or Client(state=…)"
                f"{discovery.connection_hint(self.endpoint, self._key)}"
            )
        when = "" if since is None else f" (since {since:%Y-%m-%d %H:%M:%S})"
        return NoBroker(
            f"broker at {self.endpoint}: no answer for {seconds:g} s{when}; see that it runs. "
            "Tasks that it acknowledged are kept"
        )

    def _fail_all(self, error: TaskyardError) -> None:
        with self._lock:
            waiting = self._take_all_futures()
        for future in waiting:
            if not future.done():
                _settle(future.set_exception, error)

    def _take_all_futures(self) -> list[AnyFuture[Reply] | SettableFuture]:
        """Drop everything. Returns those that somebody waits for."""
        waiting: list[AnyFuture[Reply] | SettableFuture] = [*self._open_requests.values()]
        waiting += [question.reply_future for question in self._pending_requests]
        watched = (*self._watches.values(), *self._watch_requests, self._polled)
        waiting += [future for futures in watched for future in futures.values()]
        batches = (*self._creates.values(), *self._suspects)
        for tasks in (*(batch.tasks for batch in batches), self._outbox):
            waiting += [task.future for task in tasks if task.future is not None]
        for each in (
            self._creates,
            self._watches,
            self._watched_count,
            self._open_requests,
            self._polled,
        ):
            each.clear()
        for numbers in (self._streaming_creates, self._poll_requests):
            numbers.clear()
        for line in (self._pending_requests, self._suspects, self._watch_requests, self._outbox):
            line.clear()
        self._batched_count = self._submitted_count
        return waiting

    # Submissions.

    def _acknowledged(self) -> int:
        """How many of the first tasks are taken or refused, without a gap."""
        open_batches = (*self._creates.values(), *self._suspects)
        return min([batch.before for batch in open_batches], default=self._batched_count)

    def _next_batch(self) -> Batch | None:
        """What to submit next. A suspect goes when all before it is acknowledged: then its answer
        is the last word."""
        if not self._suspects:
            while self._outbox and self._has_lane_template():
                if (batch := self._collect_batch()) is not None:
                    return batch
            return None
        if self._suspects[0].before <= self._acknowledged():
            return self._suspects.pop(0)
        return None

    def _collect_batch(self) -> Batch | None:
        """The next tasks that fit one submission: they agree on what an unknown name means, and
        where they are to go is known."""
        tasks = [self._outbox.popleft()]
        room = BYTES_PER_CREATE_MAX - _bytes_of(tasks[0])
        unknown, has = tasks[0].unknown, self._lane_templates.has
        while self._outbox and len(tasks) < TASKS_PER_CREATE_MAX:
            following = self._outbox[0]
            room -= _bytes_of(following)
            if room < 0 or following.unknown is not unknown:
                break
            if following.lane is None and not has(following.terms.service):
                break
            tasks.append(self._outbox.popleft())
        if len(self._outbox) <= OUTBOX_MAX // 2:
            with self._outbox_room:
                self._outbox_room.notify_all()
        before, self._batched_count = self._batched_count, self._batched_count + len(tasks)
        fit = self._assign_lanes(tasks)
        return Batch(before, fit) if fit else None

    def _has_lane_template(self) -> bool:
        """Whether it is known where the next task is to go; if not, the broker is asked."""
        first = self._outbox[0]
        if first.lane is not None:
            return True
        self._lane_templates.drop_old(self._clock.monotonic_ns())
        if self._lane_templates.has(first.terms.service):
            return True
        if not self._rules_request[0]:
            services = [first.terms.service]
            number = self._channel.request(lambda number: peer.rules(number, services))
            self._rules_request = (number, services)
        return False

    def _assign_lanes(self, tasks: list[PendingTask]) -> list[PendingTask]:
        """Tasks with their lanes; without those that none can be made for."""
        fit: list[PendingTask] = []
        for task in tasks:
            if task.lane is not None:
                fit.append(task)
                continue
            try:
                lane = self._lane_templates.lane_of(task.name, task.payload, task.terms)
            except InvalidValue as bad:
                self._refuse([task], str(bad))
            else:
                fit.append(task._replace(lane=lane) if lane else task)
        return fit

    def _submit(self, batch: Batch) -> None:
        tasks = batch.tasks
        stream = self._may_stream() and all(
            task.watched and task.future is not None for task in tasks
        )
        try:
            submission, unknown = _submission(tasks), tasks[0].unknown
            number = self._channel.request(
                lambda number: peer.create(number, submission, unknown, stream=stream),
                STREAM_NS if stream else 0,
                stream=stream,
            )
        except Exception as error:  # noqa: BLE001  # it is whoever submitted it's to see
            self._bisect(batch, error)
            return
        self._creates[number] = batch
        if stream:
            self._streaming_creates[number] = None

    def _on_reply(self, reply: Reply) -> None:
        number = reply.request
        if number == self._rules_request[0]:
            clauses = [] if reply.kind == peer.ERROR else reply.clauses()
            self._lane_templates.update(self._rules_request[1], clauses, self._clock.monotonic_ns())
            self._rules_request = (0, [])
        elif number in self._creates:
            self._on_create_reply(number, self._creates.pop(number), reply)
        elif number in self._watches:
            self._on_settled(number, reply)
        elif number in self._open_requests:
            reply_future = self._open_requests.pop(number)
            if not reply_future.done():
                _settle(reply_future.set_result, reply)

    def _on_create_reply(self, number: int, batch: Batch, reply: Reply) -> None:
        if reply.kind == peer.OK:
            self._on_accepted(number, batch.tasks)
            return
        self._streaming_creates.pop(number, None)
        if reply.kind != peer.ERROR:
            self._refuse(batch.tasks, "the broker is leaving")
        elif batch.before <= self._acknowledged():
            self._bisect(batch, reply.reason)
        else:
            self._queue_suspect(batch)

    def _queue_suspect(self, batch: Batch) -> None:
        insort(self._suspects, batch, key=_batch_start)

    def _bisect(self, batch: Batch, reason: str | Exception) -> None:
        """It can't be taken: halve it, until one task is left."""
        before, tasks = batch
        if len(tasks) == 1:
            self._refuse(tasks, reason)
            return
        middle = len(tasks) // 2
        self._queue_suspect(Batch(before, tasks[:middle]))
        self._queue_suspect(Batch(before + middle, tasks[middle:]))

    def _on_accepted(self, number: int, tasks: list[PendingTask]) -> None:
        watched: dict[bytes, SettableFuture] = {}
        for task in tasks:
            if task.future is None:
                continue
            if task.watched:
                watched[spelling(task.terms.campaign, task.name)] = task.future
            elif not task.future.done():
                _settle(task.future.set_result, None)
        if number in self._streaming_creates:
            del self._streaming_creates[number]
            self._watches[number] = watched
            self._renew_watch(number)
        else:
            self._watch(watched)

    def _refuse(self, tasks: list[PendingTask], reason: str | Exception) -> None:
        for task in tasks:
            if task.future is not None and not task.future.done():
                full_name = shown(spelling(task.terms.campaign, task.name))
                text = f"task {full_name} was refused: {reason}"
                _settle(task.future.set_exception, Refused(text))

    # Watches.

    def _watch(self, futures: dict[bytes, SettableFuture]) -> None:
        if not futures:
            return
        if self._may_stream() or not self._polled.keys().isdisjoint(futures):
            self._stream(futures)
        else:
            self._polled.update(futures)

    def _may_stream(self) -> bool:
        return self._stream_count() < STREAMS_MAX

    def _stream_count(self) -> int:
        return len(self._watches) - len(self._poll_requests) + len(self._streaming_creates)

    def _stream(self, futures: dict[bytes, SettableFuture]) -> None:
        names = list(futures)
        number = self._channel.request(
            lambda number: peer.watch(number, names, stream=True), STREAM_NS, stream=True
        )
        self._watches[number] = futures
        self._watched_count[number] = len(names)

    def _poll_late(self) -> None:
        late, self._polled = self._polled, {}
        steps = max(0, self._stream_count() - STREAMS_MAX) // POLLED_STREAMS_PER_STEP
        stream = self._may_stream() or len(late) >= POLLED_STREAM_TASKS_MIN << steps
        request, size = (
            (self._stream, POLLED_STREAM_TASKS_MAX) if stream else (self._poll, POLL_TASKS_MAX)
        )
        several = list(late.items())
        for first in range(0, len(several), size):
            request(dict(several[first : first + size]))

    def _poll(self, futures: dict[bytes, SettableFuture]) -> None:
        names = list(futures)
        number = self._channel.request(
            lambda number: peer.watch(number, names, wait_ns=POLL_NS),
            POLL_NS,
        )
        self._watches[number] = futures
        self._poll_requests[number] = None

    def _on_settled(self, number: int, reply: Reply) -> None:
        futures = self._watches[number]
        for name, state, result in zip(reply.names, reply.states, reply.results, strict=True):
            future = futures.pop(name, None)
            if future is not None:
                _settle(future.settle, state, result)
        if not futures or number in self._poll_requests or reply.kind == peer.ERROR:
            del self._watches[number]
            self._watched_count.pop(number, None)
            self._poll_requests.pop(number, None)
            self._channel.drop(number)
            self._watch(futures)
        elif 2 * len(futures) <= self._watched_count[number]:
            self._renew_watch(number)

    def _renew_watch(self, number: int) -> None:
        """Should the broker be another one by then, it is asked for what is left, and need not be
        told payloads again."""
        futures = self._watches[number]
        self._watched_count[number] = len(futures)
        self._channel.replace(number, peer.watch(number, list(futures), stream=True))


def _settle(settle: Callable[..., None], *outcome: object) -> None:
    """Settle a future, and survive its callbacks: one may raise even `SystemExit`."""
    try:
        settle(*outcome)
    except InvalidStateError:  # its owner has given up at the same moment
        pass
    except BaseException:
        logger.exception("a callback of a future raised")


def _batch_start(batch: Batch) -> int:
    return batch.before


def _bytes_of(task: PendingTask) -> int:
    return task_bytes(task.name, task.payload, task.lane or b"", task.after)


def _submission(tasks: list[PendingTask]) -> Submission:
    """Tasks as columns; what they have in common is there once."""
    places: dict[int, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    for task in tasks:
        place = places.get(id(task.terms))
        if place is None:
            place = places[id(task.terms)] = len(terms)
            terms.append(task.terms)
        terms_at.append(place)
    lanes = [task.lane or b"" for task in tasks]
    after = [task.after for task in tasks]
    return Submission(
        names=[task.name for task in tasks],
        payloads=[task.payload for task in tasks],
        terms=terms,
        terms_at=terms_at if len(terms) > 1 else None,
        lanes=lanes if any(lanes) else None,
        after=[list(names) for names in after] if any(after) else None,
    )
