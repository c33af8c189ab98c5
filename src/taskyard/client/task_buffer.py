"""The task buffer: tasks from `submit` until the broker has accepted or refused them.

Owns batching, lanes by template, refusals, and tasks that exist already. Tasks that are submitted
while two batches are in flight are gathered into the next batch, so a loop of single calls becomes
a few large messages. The broker refuses a batch as a whole and names the tasks at fault. The
remaining tasks are sent again without them. A refusal counts only when all earlier tasks are
acknowledged: a dependency may still be in flight. Has no socket and no thread.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from taskyard.calls.pickled import is_pickled
from taskyard.campaign.lanes import LaneTemplates
from taskyard.campaign.values import InvalidValue
from taskyard.client.results import SettableFuture, settle_future
from taskyard.client.watches import STREAM_NS
from taskyard.core.events import Scope
from taskyard.core.identity import spelling
from taskyard.core.model import Refusal, Submission, shown
from taskyard.core.states import TaskState
from taskyard.errors import BytesMissing, Refused, UnknownName
from taskyard.wire.native import peer, task_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.client.watches import Watches
    from taskyard.core.events import UnknownPolicy
    from taskyard.core.model import Terms
    from taskyard.net.channel import Channel
    from taskyard.net.protocols import Clock
    from taskyard.process.value_access import Restore
    from taskyard.wire.native.peer import Reply

#: Columns of tasks. They make no call for each task.
_NAME: Final = attrgetter("name")
_PAYLOAD: Final = attrgetter("payload")
_LANE: Final = attrgetter("lane")
_AFTER: Final = attrgetter("after")


class PendingTask(Struct, gc=False):
    """A task that the broker has not acknowledged. Part of no cycle."""

    #: In the campaign of its terms.
    name: bytes
    payload: bytes
    terms: Terms
    #: None stands for the lane template of its service.
    lane: bytes | None
    after: tuple[bytes, ...]
    unknown: UnknownPolicy
    future: SettableFuture
    #: Settle the future when the task is settled. False: as soon as it is accepted.
    watched: bool = True
    #: A known task of this name is used, whatever its payload.
    attaches: bool = False
    #: The size in a message. Set by the session.
    message_bytes: int = 0
    #: Stores its large arguments again. It refers to the caller's objects, until the broker has the
    #: task. None if nothing is large.
    restore: Restore | None = None
    #: How often that was done.
    uploads: int = 0


class Batch(NamedTuple):
    """Tasks that are submitted in one message."""

    #: How many tasks were submitted before the first of them.
    before: int
    tasks: list[PendingTask]


def submission_of(tasks: list[PendingTask]) -> Submission:
    """Return tasks as columns. Shared terms are sent once."""
    indexes: dict[int, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    for task in tasks:
        index = indexes.get(id(task.terms))
        if index is None:
            index = indexes[id(task.terms)] = len(terms)
            terms.append(task.terms)
        terms_at.append(index)
    lanes, after = [*map(_LANE, tasks)], [*map(_AFTER, tasks)]
    return Submission(
        names=[*map(_NAME, tasks)],
        payloads=[*map(_PAYLOAD, tasks)],
        terms=terms,
        terms_at=terms_at if len(terms) > 1 else None,
        lanes=[lane or b"" for lane in lanes] if any(lanes) else None,
        after=[list(names) for names in after] if any(after) else None,
    )


#: Tasks in one request: their names and results fit a message.
_TASKS_MAX: Final = 1_000

#: Tasks by their full names. Several futures may have one task.
_Tasks = dict[bytes, list["PendingTask"]]


class ExistingTasks:
    """Tasks whose states are requested, and tasks that start again. Called by the session."""

    #: Set by the session before the first turn.
    channel: Channel

    def __init__(self, watches: Watches) -> None:
        self._watches = watches
        self.waiting: list[PendingTask] = []
        self.open: dict[int, tuple[_Tasks, Callable[[_Tasks, Reply], None]]] = {}

    def __bool__(self) -> bool:
        """Return whether a task is neither watched nor settled yet."""
        return bool(self.waiting or self.open)

    def add(self, task: PendingTask) -> None:
        """Use the known task of this name."""
        self.waiting.append(task)

    def send(self) -> None:
        """Request the states of all tasks that wait."""
        waiting, self.waiting = self.waiting, []
        for first in range(0, len(waiting), _TASKS_MAX):
            tasks: _Tasks = {}
            for task in waiting[first : first + _TASKS_MAX]:
                tasks.setdefault(spelling(task.terms.campaign, task.name), []).append(task)
            self._request_states(tasks)

    def on_reply(self, reply: Reply) -> None:
        tasks, on_reply = self.open.pop(reply.request)
        on_reply(tasks, reply)

    def take_futures(self) -> list[SettableFuture]:
        """Drop all tasks. Return their futures."""
        waiting, self.waiting = self.waiting, []
        for tasks, _ in self.open.values():
            waiting += [task for some in tasks.values() for task in some]
        self.open.clear()
        return [task.future for task in waiting]

    def _request_states(self, tasks: _Tasks) -> None:
        number = self.channel.request(partial(task_contents.results, names=[*tasks]))
        self.open[number] = tasks, self._on_states

    def _on_states(self, tasks: _Tasks, reply: Reply) -> None:
        if reply.kind == peer.ERROR:
            self._refuse(tasks, Refused(reply.reason, reply.code))
            return
        failed: _Tasks = {}
        cancelled: _Tasks = {}
        unsettled: _Tasks = {}
        for name, state, result in zip(reply.names, reply.states, reply.results, strict=True):
            some = tasks.pop(name, [])
            if state is TaskState.DONE and result.blob is None:
                for task in some:
                    settle_future(task.future.settle, state, result)
            elif state is TaskState.FAILED:
                failed[name] = some
            elif state is TaskState.CANCELLED:
                cancelled[name] = some
            else:
                unsettled[name] = some
        # Before the watches: a watched task may wait for a task that failed.
        self._start_again(failed, cancelled)
        self._watch(unsettled)
        if tasks and reply.count:  # results that did not fit the message
            self._request_states(tasks)
        elif tasks:
            names = [shown(name) for name in tasks]
            self._refuse(tasks, UnknownName(f"task {names[0]} was removed meanwhile", *names))

    def _start_again(self, failed: _Tasks, cancelled: _Tasks) -> None:
        if failed:
            scope = Scope(names=tuple(failed), states=(TaskState.FAILED,))
            number = self.channel.request(partial(peer.command, kind=peer.RETRY, scope=scope))
            self.open[number] = failed, self._on_started
        if cancelled:
            submission = submission_of([some[0] for some in cancelled.values()])
            create = partial(peer.create, submission=submission, restart=True)
            self.open[self.channel.request(create)] = cancelled, self._on_started

    def _on_started(self, tasks: _Tasks, reply: Reply) -> None:
        if reply.kind == peer.ERROR:
            self._refuse(tasks, Refused(reply.reason, reply.code))
        else:
            self._watch(tasks)

    def _watch(self, tasks: _Tasks) -> None:
        """Watch tasks. A task with several futures needs several watches."""
        while tasks:
            self._watches.requested.append(
                {name: some[0].future for name, some in tasks.items() if some}
            )
            tasks = {name: some[1:] for name, some in tasks.items() if len(some) > 1}

    @staticmethod
    def _refuse(tasks: _Tasks, error: Exception) -> None:
        for some in tasks.values():
            for task in some:
                settle_future(task.future.set_exception, error)


#: How often the bytes of one task are stored again. Each time sends them.
UPLOADS_MAX: Final = 3


class Upload(Struct, eq=False):
    """A batch whose bytes are being stored again."""

    batch: Batch
    #: The tasks whose bytes the broker lacks. Other tasks may wait for these.
    lacking: Sequence[PendingTask]
    #: Why tasks have no bytes, by their indexes in `lacking`. None until it has ended.
    errors: dict[int, Exception] | None = None


class Uploads:
    """Batches whose bytes are being stored again. The session calls all methods."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Call `wake` from another thread when a batch is ready."""
        self._wake = wake
        self.open: list[Upload] = []

    def start(self, batch: Batch, lacking: Sequence[PendingTask]) -> None:
        """Store the bytes of some tasks of a batch."""
        upload = Upload(batch, lacking)
        for task in lacking:
            task.uploads += 1
        self.open.append(upload)
        self._run(upload)

    def take(self) -> list[tuple[Batch, list[tuple[PendingTask, Exception]]]]:
        """Return the batches that are ready, each with the tasks that have no bytes, and why."""
        found: list[tuple[Batch, list[tuple[PendingTask, Exception]]]] = []
        for upload in [*self.open]:
            if (errors := upload.errors) is not None:
                self.open.remove(upload)
                found.append((upload.batch, [(upload.lacking[at], errors[at]) for at in errors]))
        return found

    def _run(self, upload: Upload) -> None:
        """Store the bytes of an upload in a thread."""
        thread = threading.Thread(
            target=self._store, args=(upload,), name="taskyard-upload", daemon=True
        )
        thread.start()

    def _store(self, upload: Upload) -> None:
        errors: dict[int, Exception] = {}
        for index, task in enumerate(upload.lacking):
            try:
                if task.restore is not None:
                    task.restore()
            except Exception as error:  # noqa: BLE001  # raised by the future of the task
                errors[index] = error
        self._end(upload, errors)

    def _end(self, upload: Upload, errors: dict[int, Exception]) -> None:
        upload.errors = errors
        self._wake()


#: Batches in flight: one travels while the next is gathered.
CREATES_MAX: Final = 2

#: Tasks and bytes in one batch.
TASKS_PER_CREATE_MAX: Final = 2_000
BYTES_PER_CREATE_MAX: Final = 4 * 1024 * 1024

#: Tasks that wait to be sent. Beyond this, `submit` blocks until half of them are sent.
TASKS_MAX: Final = 100_000

_IS_WATCHED: Final = attrgetter("watched")

_DUPLICATE: Final = Refusal.DUPLICATE.value
_CONFLICT: Final = Refusal.CONFLICT.value
_BYTES_UNKNOWN: Final = Refusal.BYTES_UNKNOWN.value

#: Programs that are run again meet this conflict.
_SAME_CALL: Final = (
    "A pickled call differs in each program, also with equal arguments. The task of that "
    "name is client.future(NAME). With key='content' in place of a name, later runs share the task."
)


class TaskBuffer:
    """Tasks that wait to be sent, and batches in flight.

    Callers append to `tasks` under the session's lock. The thread of the session calls all methods
    but `wait_for_room`.
    """

    #: Set by the session before the first turn.
    channel: Channel

    def __init__(self, watches: Watches, clock: Clock, wake: Callable[[], None]) -> None:
        """Other threads call `wake` when tasks can be sent."""
        self.tasks: deque[PendingTask] = deque()
        self.tasks_max = TASKS_MAX
        #: Sent with every batch that has a command.
        self.environment = b""
        #: Tasks ever submitted, and those of them that left `tasks`.
        self.submitted_count = 0
        self._batched_count = 0
        self._room = threading.Condition()
        self._watches = watches
        self.existing_tasks = ExistingTasks(watches)
        self.uploads = Uploads(wake)
        self._clock = clock
        #: Batches in flight, by request number.
        self.open: dict[int, Batch] = {}
        #: Batches to be sent again, perhaps without the tasks at fault, in order.
        self._refused: list[Batch] = []
        self._lane_templates = LaneTemplates()
        #: The open request for lane templates, and the services that it names. 0: none is open.
        self.rules_request = 0
        self._rules_services: list[bytes] = []

    def __bool__(self) -> bool:
        """Return whether a task is not acknowledged."""
        return bool(
            self.tasks or self.open or self._refused or self.existing_tasks or self.uploads.open
        )

    def wait_for_room(self, is_running: Callable[[], bool]) -> None:
        """Block until half of the buffer is free, or the session has ended."""
        with self._room:
            while len(self.tasks) > self.tasks_max // 2 and is_running():
                self._room.wait(0.1)

    def acknowledged(self) -> int:
        """Return how many of the first tasks are accepted or refused, without a gap."""
        unacknowledged = self._unacknowledged()
        return min([batch.before for batch in unacknowledged], default=self._batched_count)

    def send(self) -> None:
        """Send as many batches as may be in flight."""
        if self.existing_tasks.waiting:
            self.existing_tasks.send()
        if self.uploads.open:
            self._requeue_uploaded()
        while (self.tasks or self._refused) and len(self.open) < CREATES_MAX:
            batch = self._next_batch()
            if batch is None:
                return
            self._send_batch(batch)

    def take_futures(self) -> list[SettableFuture]:
        """Drop all tasks. Return their futures."""
        futures = [
            task.future
            for tasks in (*(batch.tasks for batch in self._unacknowledged()), self.tasks)
            for task in tasks
        ]
        self.open.clear()
        self._refused.clear()
        self.uploads.open.clear()
        self.tasks.clear()
        self._batched_count = self.submitted_count
        self.rules_request = 0
        return futures

    # Batches.

    def _unacknowledged(self) -> list[Batch]:
        uploading = [upload.batch for upload in self.uploads.open]
        return [*self.open.values(), *self._refused, *uploading]

    def _next_batch(self) -> Batch | None:
        """Return the next batch to send, if there is one.

        A refused batch waits until all tasks before it are acknowledged: then its reply is final.
        """
        if not self._refused:
            while self.tasks and self._has_lane_template():
                if (batch := self._collect_batch()) is not None:
                    return batch
            return None
        if self._refused[0].before <= self.acknowledged():
            return self._refused.pop(0)
        return None

    def _collect_batch(self) -> Batch | None:
        """Take the next tasks that fit one message, with one policy and known lane templates."""
        waiting = self.tasks
        tasks = [waiting.popleft()]
        room = BYTES_PER_CREATE_MAX - tasks[0].message_bytes
        unknown, has = tasks[0].unknown, self._lane_templates.has
        while waiting and len(tasks) < TASKS_PER_CREATE_MAX:
            following = waiting[0]
            room -= following.message_bytes
            if room < 0 or following.unknown is not unknown:
                break
            if following.lane is None and not has(following.terms.service):
                break
            tasks.append(waiting.popleft())
        if len(waiting) <= self.tasks_max // 2:
            with self._room:
                self._room.notify_all()
        before, self._batched_count = self._batched_count, self._batched_count + len(tasks)
        fit = self._assign_lanes(tasks)
        return Batch(before, fit) if fit else None

    def _send_batch(self, batch: Batch) -> None:
        tasks = batch.tasks
        stream = self._watches.may_stream() and all(map(_IS_WATCHED, tasks))
        try:
            submission, unknown = submission_of(tasks), tasks[0].unknown
            create = partial(
                peer.create,
                submission=submission,
                unknown=unknown,
                stream=stream,
                environment=self.environment,
            )
            number = self.channel.request(create, STREAM_NS if stream else 0, stream=stream)
        except Exception as error:  # noqa: BLE001  # raised by the future of the bad task
            self._on_encoding_failed(batch, error)
            return
        self.open[number] = batch
        if stream:
            self._watches.reserve(number)

    # Replies.

    def on_reply(self, reply: Reply) -> None:
        """Accept or refuse the tasks of a batch in flight."""
        number = reply.request
        batch = self.open.pop(number)
        if reply.kind == peer.OK:
            self._on_accepted(number, batch.tasks)
            return
        self._watches.release(number)
        if reply.kind != peer.ERROR:
            for task in batch.tasks:
                _refuse(task, "the broker is shutting down", Refusal.SHUTTING_DOWN.value)
        elif batch.before <= self.acknowledged():
            self._on_refused(batch, reply)
        else:
            self._requeue(batch)

    def _on_accepted(self, number: int, tasks: list[PendingTask]) -> None:
        watched: dict[bytes, SettableFuture] = {}
        for task in tasks:
            if task.watched:
                watched[spelling(task.terms.campaign, task.name)] = task.future
            elif not task.future.done():
                settle_future(task.future.set_result, None)
        self._watches.on_accepted(number, watched)

    def _requeue(self, batch: Batch) -> None:
        """Queue a batch again, unless it has no tasks any more."""
        if batch.tasks:
            insort(self._refused, batch, key=attrgetter("before"))

    def _on_refused(self, batch: Batch, reply: Reply) -> None:
        """Refuse the tasks at fault, or all if the reply names none. Queue the remaining tasks."""
        tasks = batch.tasks
        faults = {one.index: one for one in reply.refused_tasks() if one.index < len(tasks)}
        if not faults:
            for task in tasks:
                _refuse(task, reply.reason, reply.code)
            return
        left: list[PendingTask] = []
        lacking: list[PendingTask] = []
        repeats: list[tuple[int, PendingTask]] = []
        for index, task in enumerate(tasks):
            fault = faults.get(index)
            if fault is not None and fault.code == _BYTES_UNKNOWN and _may_upload(task):
                lacking.append(task)
                fault = None
            if fault is None:
                left.append(task)
            elif fault.code == _DUPLICATE and index:  # to be sent after the first of its name
                repeats.append((batch.before + index, task))
            elif fault.code == _CONFLICT and task.attaches:
                self.existing_tasks.add(task)
            else:
                _refuse(task, fault.reason, fault.code)
        again = Batch(batch.before, left)
        if lacking:  # all other tasks may wait for these
            self.uploads.start(again, lacking)
        else:
            self._requeue(again)
        for part in _without_repeats(repeats):
            self._requeue(part)

    def _requeue_uploaded(self) -> None:
        """Queue batches again whose bytes are stored, without the tasks that have none."""
        for batch, errors in self.uploads.take():
            for task, error in errors:
                batch.tasks.remove(task)
                _fail(task, error)
            self._requeue(batch)

    def _on_encoding_failed(self, batch: Batch, error: Exception) -> None:
        """Refuse the tasks that can't be encoded, or all if each can. Queue the remaining tasks."""
        errors = [_encoding_error(task) for task in batch.tasks]
        if not any(errors):
            errors = [error] * len(errors)
        left: list[PendingTask] = []
        for task, own in zip(batch.tasks, errors, strict=True):
            if own is None:
                left.append(task)
            else:
                _refuse(task, str(own), Refusal.MALFORMED.value)
        self._requeue(Batch(batch.before, left))

    # Lanes.

    def _has_lane_template(self) -> bool:
        """Return whether the next task's lane can be set. If not, request the lane templates."""
        first = self.tasks[0]
        if first.lane is not None:
            return True
        self._lane_templates.drop_old(self._clock.monotonic_ns())
        if self._lane_templates.has(first.terms.service):
            return True
        if not self.rules_request:
            services = self._rules_services = [first.terms.service]
            self.rules_request = self.channel.request(lambda number: peer.rules(number, services))
        return False

    def on_rules(self, reply: Reply) -> None:
        """Keep the lane templates of the requested services."""
        now_ns = self._clock.monotonic_ns()
        self._lane_templates.update(self._rules_services, reply.clauses(), now_ns)
        self.rules_request = 0

    def _assign_lanes(self, tasks: list[PendingTask]) -> list[PendingTask]:
        """Return the tasks with their lanes. Refuse tasks that do not fit their template."""
        fit: list[PendingTask] = []
        for task in tasks:
            if task.lane is not None:
                fit.append(task)
                continue
            try:
                lane = self._lane_templates.lane_of(task.name, task.payload, task.terms)
            except InvalidValue as bad:
                _refuse(task, str(bad), Refusal.MALFORMED.value)
            else:
                task.lane = lane or None
                fit.append(task)
        return fit


def _refuse(task: PendingTask, reason: str, code: str) -> None:
    """Settle the future of a task with the reason and the code of its refusal."""
    full_name = shown(spelling(task.terms.campaign, task.name))
    error: Exception = Refused(f"task {full_name} was refused: {reason}", code, (full_name,))
    if code == _BYTES_UNKNOWN:
        error = BytesMissing(f"task {full_name} was refused: {reason}")
    elif code == _CONFLICT and is_pickled(task.payload):
        error.add_note(_SAME_CALL)
    _fail(task, error)


def _fail(task: PendingTask, error: Exception) -> None:
    if not task.future.done():
        settle_future(task.future.set_exception, error)


def _may_upload(task: PendingTask) -> bool:
    """Return whether the bytes of a task can be stored again."""
    return task.restore is not None and task.uploads < UPLOADS_MAX


def _without_repeats(tasks: list[tuple[int, PendingTask]]) -> list[Batch]:
    """Return batches of tasks, given with the number of tasks before, without a name twice."""
    seen: dict[tuple[bytes, bytes], int] = {}
    batches: list[Batch] = []
    for before, task in tasks:
        key = task.terms.campaign, task.name
        index = seen.get(key, 0)
        seen[key] = index + 1
        if index == len(batches):
            batches.append(Batch(before, []))
        batches[index].tasks.append(task)
    return batches


def _encoding_error(task: PendingTask) -> Exception | None:
    """Return why a task can't be encoded, or None if it can."""
    try:
        peer.create(0, submission_of([task]))
    except Exception as error:  # noqa: BLE001  # raised by the future of the task
        return error
    return None
