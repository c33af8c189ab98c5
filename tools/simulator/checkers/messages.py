"""Messages of the broker to workers that their receivers can't check alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from simulator.codecs.dialects import DO, argument_of
from simulator.listeners import Listener
from simulator.models import READY, Violation
from taskyard.core import events, records
from taskyard.wire.ping_pong import server as ping_pong_backend
from taskyard.wire.round_robin import workers as round_robin_leases

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from simulator.checkers.submissions import SubmissionChecker
    from simulator.reference_model import ReferenceModel
    from taskyard.core.events import Event
    from taskyard.core.records import AnyRecord

#: WMP's WAKE and TAKE, the commands that end a WAKE (TAKE and NO answer a GIVE, BYE dismisses the
#: worker), and the positions of commands and headers in a message.
_WAKE: Final = b"\x02"
_TAKE: Final = b"\x04"
_END_OF_WAKE: Final = (b"\x04", b"\x05", b"\x0b")
_COMMAND_AT, _HEADERS_AT = 2, 3

#: LMQ's TRACKEXEC has its command at the same position, and its arguments from here on.
_TRACKEXEC: Final = b"\x04"
_ARGUMENTS_AT: Final = 4


class MessageChecker:
    """Notes the tasks that were sent in dialects without leases, and counts woken workers."""

    def __init__(self, model: ReferenceModel, submissions: SubmissionChecker) -> None:
        self._model = model
        self._submissions = submissions
        self._turn: Sequence[Event] = ()
        #: Workers that were woken for each service in this turn, by their routes.
        self._woken: dict[bytes, dict[bytes, None]] = {}
        #: Tasks of each service that were ready in this turn and no longer are.
        self._were_ready: dict[bytes, int] = {}
        #: Workers of each service that wait for a WAKE, and left or were lost in this turn.
        self._left: dict[bytes, list[bytes]] = {}
        #: (worker, task) sent to workers whose dialects have a timeout of their own.
        self._jobs: dict[tuple[bytes, bytes], None] = {}
        #: Tasks that each WMP worker without slots may get: a task, and a task for each READY in a
        #: turn.
        self._requested: dict[bytes, int] = {}

    def on_received(self, turn: Sequence[Event]) -> None:
        """Begin a turn with the events that the broker received."""
        self._turn = turn
        self._woken, self._were_ready, self._left = {}, {}, {}
        self._requested = {worker: min(1, count) for worker, count in self._requested.items()}
        for event in turn:
            if isinstance(event, events.WorkerRegistered) and event.facts.wants_wake:
                requests = 0 if event.facts.slots_total else 1
                self._requested[event.worker] = self._requested.get(event.worker, 0) + requests

    def on_record(self, record: AnyRecord) -> None:
        """Note the tasks of a record that are ready before it is applied, and a worker that
        leaves."""
        if isinstance(record, records.WorkerLeft):
            self._on_left(record.worker)
        names: Iterable[bytes] = getattr(record, "names", ())
        for name in names:
            task_model = self._model.tasks.get(name)
            if task_model is not None and task_model.state is READY:
                service = task_model.terms.service
                self._were_ready[service] = self._were_ready.get(service, 0) + 1

    def _on_left(self, worker: bytes) -> None:
        worker_model = self._model.workers.get(worker)
        if worker_model is not None and worker_model.facts.wants_wake:
            for service in worker_model.facts.services:
                self._left.setdefault(service, []).append(worker)

    def on_end(self, worker: bytes, name: bytes) -> None:
        """Forget a task that a worker no longer holds."""
        self._jobs.pop((worker, name), None)

    def on_cancelled(self, names: Sequence[bytes]) -> None:
        """Forget cancelled tasks."""
        for key in [key for key in self._jobs if key[1] in names]:
            del self._jobs[key]

    def was_sent(self, worker: bytes, names: Sequence[bytes]) -> bool:
        """Return whether a task was sent to the worker, which may be busy or gone."""
        return any((worker, name) in self._jobs for name in names)

    def on_sent(self, route: bytes, frames: Sequence[bytes]) -> None:
        """Check messages of the broker that peers can't check alone."""
        if route[0] == Listener.PING_BACKEND:
            what = self._submissions.task_name(frames[1].removeprefix(DO))
            self._jobs[ping_pong_backend.name_of(route), what] = None
        elif route[0] == Listener.ROUND_ROBIN and frames[_COMMAND_AT] == _TRACKEXEC:
            what = self._submissions.task_name(argument_of(frames[_ARGUMENTS_AT:]))
            self._jobs[round_robin_leases.name_of(route[1:]), what] = None
        elif route[0] == Listener.WMP:
            self._sent_wmp(route, frames)

    def _sent_wmp(self, route: bytes, frames: Sequence[bytes]) -> None:
        path = [*frames].index(b"")  # the routes of relays come first
        way = b" ".join([route, *frames[:path]])
        command = frames[path + _COMMAND_AT]
        if command == _WAKE:
            headers = msgspec.json.decode(frames[path + _HEADERS_AT])
            self._check_wake_count(way, headers["service"].encode())
        elif command in _END_OF_WAKE:
            for woken in self._woken.values():
                woken.pop(way, None)
        if command == _TAKE:
            headers = msgspec.json.decode(frames[path + _HEADERS_AT])
            self._check_requested(headers["task"].encode())

    def _check_requested(self, name: bytes) -> None:
        """Require a READY for each task of a worker without slots."""
        task_model = self._model.tasks.get(name)
        worker = None if task_model is None else self._model.workers.get(task_model.worker)
        if task_model is None or worker is None or worker.facts.slots_total:
            return
        left = self._requested.get(task_model.worker, 0) - 1
        self._requested[task_model.worker] = left
        if left < 0:
            raise Violation("unrequested", f"{name!r} to {task_model.worker!r} without a READY")

    def _check_wake_count(self, way: bytes, service: bytes) -> None:
        """Require that no more workers are woken than tasks are ready."""
        woken = self._woken.setdefault(service, {})
        woken[way] = None
        task_models = self._model.tasks.values()
        ready = sum(one.state is READY and one.terms.service == service for one in task_models)
        ready += self._were_ready.get(service, 0)
        if len(woken) > ready + self._cancelled_wakes(service):
            raise Violation("herd", f"{len(woken)} workers are woken for {ready} tasks")

    def _cancelled_wakes(self, service: bytes) -> int:
        """Count the READYs of this turn, and the workers that it drains or that leave or are lost
        in it. Each may cancel a WAKE that left before, or in the same turn, and then another worker
        is woken: a worker that does not answer must not keep a task from the other workers."""
        drains = [one for one in self._turn if isinstance(one, events.DrainRequested)]
        if any(one.worker is None for one in drains):
            return len(self._model.workers)
        requests = [one for one in self._turn if isinstance(one, events.TasksRequested)]
        requesting = [one.worker for one in requests if one.parks]
        left = [worker for worker in self._left.get(service, ()) if worker not in requesting]
        return len(drains) + len(requesting) + len(left)
