"""Adoptions: tasks that an earlier run submitted, for calls that are named by their content.

A broker refuses a call whose name is known with another payload, and every such call has another
one. Then the task of that name is used. If it is done, its result settles the future. If it failed,
it is retried, and a cancelled one starts again. Has no socket and no thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from taskyard.client.pending_tasks import submission_of
from taskyard.client.results import settle_future
from taskyard.core.events import Scope
from taskyard.core.identity import spelling
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.errors import Refused, UnknownName
from taskyard.wire.native import peer, reads

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.pending_tasks import PendingTask
    from taskyard.client.results import SettableFuture
    from taskyard.client.watches import Watches
    from taskyard.net.channel import Channel
    from taskyard.wire.native.peer import Reply

#: Tasks in one request: their names and results fit a message.
_TASKS_MAX: Final = 1_000

#: Tasks by their full names. Several futures may have one task.
_Tasks = dict[bytes, list["PendingTask"]]


class Adoptions:
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
        number = self.channel.request(partial(reads.results, names=[*tasks]))
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
