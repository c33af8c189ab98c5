"""A task on its way to the broker, and many of them as columns of a message."""

from __future__ import annotations

import threading
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from taskyard.client.results import settle_future
from taskyard.core.events import Scope
from taskyard.core.identity import spelling
from taskyard.core.model import Submission, shown
from taskyard.core.states import TaskState
from taskyard.errors import Refused, UnknownName
from taskyard.wire.native import peer, task_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.client.results import SettableFuture
    from taskyard.client.watches import Watches
    from taskyard.core.events import UnknownPolicy
    from taskyard.core.model import Terms
    from taskyard.net.channel import Channel
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
    #: None: by the lane template of its service.
    lane: bytes | None
    after: tuple[bytes, ...]
    unknown: UnknownPolicy
    future: SettableFuture
    #: Settle the future when the task is settled. False: as soon as it is accepted.
    watched: bool = True
    #: A known task of this name is used, whatever its payload.
    attaches: bool = False
    #: Its size in a message. Set by the session.
    message_bytes: int = 0
    #: Stores its large arguments again. It refers to the caller's objects, until the broker has the
    #: task. None: nothing is large.
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
    places: dict[int, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    for task in tasks:
        place = places.get(id(task.terms))
        if place is None:
            place = places[id(task.terms)] = len(terms)
            terms.append(task.terms)
        terms_at.append(place)
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
    """Tasks whose states are requested, and those that start again. Called by the session."""

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
        # Before the watches: a watched task may wait for one that failed.
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
        """Watch tasks. Those with several futures need several watches."""
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
    #: The tasks whose bytes the broker lacks. Others may wait for these.
    lacking: Sequence[PendingTask]
    #: Why tasks have no bytes, by their places in `lacking`. None: it has not ended.
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
        for place, task in enumerate(upload.lacking):
            try:
                if task.restore is not None:
                    task.restore()
            except Exception as error:  # noqa: BLE001  # raised by the future of the task
                errors[place] = error
        self._end(upload, errors)

    def _end(self, upload: Upload, errors: dict[int, Exception]) -> None:
        upload.errors = errors
        self._wake()
