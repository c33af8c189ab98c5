"""Calls with large arguments and results: the client that submits them, and the workers' part.

Both store and read blobs over connections of their own, as the product's processes of calls do.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from simulator.models import Violation
from simulator.outputs import (
    CALLS,
    arguments_of,
    body_of,
    headed,
    heading,
    name_of,
    result_of,
    result_text,
)
from simulator.plan import SECOND_NS
from simulator.product_clients import NativeProductClient, SettableFuture, full_name_of
from simulator.values import ValueChannel
from taskyard.client import task_buffer
from taskyard.client.task_buffer import Uploads
from taskyard.core import identity
from taskyard.core.events import Outcome, UnknownPolicy
from taskyard.core.model import Refusal, Terms

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.processes import ProductWorker
    from taskyard.client.task_buffer import Upload
    from taskyard.errors import Refused
    from taskyard.worker.jobs import Job, JobResult

#: Of so many first attempts that have large results, one loses it.
_LOST_SHARE: Final = 4


class _Call(Struct):
    """A call that a worker runs."""

    job: Job
    #: Blobs to read.
    reads: int
    #: Why it failed. Empty: it did not.
    problem: str = ""
    #: The upload of its result: begun, and complete.
    stores: bool = False
    is_stored: bool = False


class Calls:
    """The calls of one worker: each reads its arguments, and stores its result."""

    def __init__(self, worker: ProductWorker) -> None:
        self._worker = worker
        self._checker = worker.world.checker.blobs
        self.channel = ValueChannel(worker, worker.core_name())
        self._calls: dict[tuple[bytes, int], _Call] = {}

    def start(self, job: Job) -> None:
        """Read what a call needs."""
        if not heading(job.payload):
            return
        if job.payload.partition(b"\n")[2] != body_of(job.name):
            raise Violation("payload", f"{job.name!r} has {len(job.payload)} other bytes")
        names = self._checker.values_of(job.name)
        call = self._calls[job.key] = _Call(job, len(names))
        for name in names:
            self.channel.get(name, job.name, partial(self._on_read, call, name))

    def _on_read(self, call: _Call, name: str, found: bytes | str) -> None:
        call.reads -= 1
        if isinstance(found, str):
            self._checker.on_refused(self._worker.core_name(), call.job.key, name, found)
            call.problem = found
        elif name_of(found) != name:
            raise Violation("blobs", f"{call.job.name!r} reads other bytes for {name[:16]}")
        self._worker.wake()

    def is_over(self, job: Job) -> bool:
        """Return whether a job has read and stored everything. Begins to store its result."""
        call = self._calls.get(job.key)
        if call is None or call.problem:
            return True
        if call.reads:
            return False
        content = result_of(job.name)
        if content and is_lost(job):
            self._checker.unstored[job.key] = None
            return True
        if content and not call.stores:
            call.stores = True
            self.channel.put(content, partial(self._on_stored, call))
        return call.is_stored or not content

    def _on_stored(self, call: _Call) -> None:
        call.is_stored = True
        self._worker.wake()

    def end(self, done: JobResult) -> None:
        """Set the result of a job, if it is a call."""
        job = done.job
        call = self._calls.pop(job.key, None)
        if call is None:
            return
        if call.problem:
            done.outcome, done.content = Outcome.FAILED, call.problem.encode()
        elif done.outcome is Outcome.DONE:
            done.content = result_text(job.name)

    def drop(self, key: tuple[bytes, int]) -> None:
        self._calls.pop(key, None)


def is_lost(job: Job) -> bool:
    """Return whether a result is lost on its way to the broker, as if it was removed meanwhile."""
    return job.attempt == 1 and not zlib.crc32(job.name) % _LOST_SHARE


def payload_of(name: bytes, needed: list[str]) -> bytes:
    """Return the payload of a call."""
    return headed([name_of(one) for one in arguments_of(name)], needed, body_of(name))


class CallClient(NativeProductClient):
    """A Python client whose calls have large arguments, which it stores before it submits."""

    def plan_call(self, when_ns: int, campaign: bytes, name: bytes, needed: list[bytes]) -> None:
        """Submit a call at a time. It needs the results of other calls, by their names for it."""
        terms = Terms(campaign=campaign, service=CALLS)
        payload = payload_of(identity.spelling(campaign, name), [one.decode() for one in needed])
        future = SettableFuture(self, name)  # each process has another one
        task = task_buffer.PendingTask(
            name, payload, terms, b"", tuple(needed), UnknownPolicy.REFUSE, future
        )
        task.restore = lambda: None  # see `CallUploads`
        self.pending.append((when_ns, task))

    def build(self) -> None:
        self._values = ValueChannel(self)
        #: Calls whose arguments are on their way.
        self._storing: dict[bytes, None] = {}
        #: Calls whose arguments were stored last after all faults.
        self.stored_calmly: dict[bytes, bool] = {}
        super().build()
        self._session._buffer.uploads = CallUploads(self)  # noqa: SLF001  # threads are not simulated
        self._values.put(b"of no call, " * 500, lambda: None)

    def _submit(self, process: int, task: task_buffer.PendingTask) -> None:
        """Store the arguments of a call, and submit it then."""
        if process != self.process or not self.alive:
            return
        full_name = full_name_of(task)
        self._storing[full_name] = None
        submit = super()._submit

        def on_stored() -> None:
            self._storing.pop(full_name, None)
            submit(process, task)

        self.store([full_name], on_stored)

    def store(self, full_names: list[bytes], on_stored: Callable[[], None]) -> None:
        """Store the arguments of calls."""
        contents = [content for name in full_names for content in arguments_of(name)]
        left = [len(contents)]
        self.stored_calmly |= dict.fromkeys(full_names, self.world.revived and self.world.is_calm)

        def on_one_stored() -> None:
            left[0] -= 1
            if not left[0]:
                on_stored()

        for content in contents:
            self._values.put(content, on_one_stored)
        self.wake()

    def on_refused(self, name: bytes, error: Refused) -> None:
        """Submit a call again if the call that it needs is late."""
        task = next(one for _, one in self.pending if full_name_of(one) == name)
        coming = [*self._storing, *self.open, *self.world.checker.model.tasks]
        campaign = task.terms.campaign
        is_late = error.code == Refusal.UNKNOWN.value and all(
            before in coming or identity.spelling(campaign, before) in coming
            for before in task.after
        )
        if not is_late:
            return
        self._storing[name] = None
        again = partial(self._submit, self.process, task)
        self.world.timeline.after(SECOND_NS // 2, again)

    def turn(self) -> None:
        self._values.turn()
        super().turn()

    def wake_at_ns(self) -> int | None:
        waits = (super().wake_at_ns(), self._values.wake_at_ns())
        return min((one for one in waits if one is not None), default=None)

    def close(self) -> None:
        self._values.close()
        super().close()

    def unsettled(self) -> list[bytes]:
        return [*super().unsettled(), *self._storing]


class CallUploads(Uploads):
    """Stores arguments again that were swept, in simulated time."""

    def __init__(self, client: CallClient) -> None:
        super().__init__(client.wake)
        self._client = client

    def _run(self, upload: Upload) -> None:
        names = [*map(full_name_of, upload.lacking)]
        for task, name in zip(upload.lacking, names, strict=True):
            task.uploads = 0  # sweeps are more frequent here
            if self._client.stored_calmly[name]:
                self._client.world.checker.blobs.on_refused_arguments(name)
        self._client.store(names, lambda: self._end(upload, {}))
