"""Fetches results of other tasks that a worker's tasks need, before these start.

Tasks wait here until all their inputs are there. Short results stay in memory, long results go to
files, which are removed when the task has ended. The channel resends requests, so a restart of the
broker only delays them. Has no socket. Does not put the results in place: runners do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field, structs

from taskyard.calls.inputs import FILE_MARK, Input
from taskyard.core.blobs import Result, results_needed
from taskyard.core.events import Outcome
from taskyard.core.states import TaskState
from taskyard.errors import BytesDamaged, BytesTruncated
from taskyard.wire.native import peer, task_contents
from taskyard.wire.native.task_contents import Holder, StreamPages
from taskyard.worker.jobs import Job, JobResult, cut_reason

if TYPE_CHECKING:
    from taskyard.net.channel import Channel
    from taskyard.wire.native.peer import Reply
    from taskyard.worker.jobs import Runner
    from taskyard.worker.settings import WorkerSettings

#: Names in one request: a few requests for a task that collects thousands of results.
_NAMES_MAX: Final = 500


class _Waiting(Struct):
    """A task that waits for inputs."""

    job: Job
    #: Names whose results are not there yet, in order.
    names: list[str]
    #: All results go to files.
    needs_files: bool = False
    inputs: list[Input] = field(default_factory=list)
    #: Long results that are fetched part by part.
    long: list[tuple[Input, StreamPages]] = field(default_factory=list)


class _Failed(Exception):
    """The inputs of a task can't be fetched."""

    def __init__(self, text: str, outcome: Outcome = Outcome.FAILED_FINAL) -> None:
        super().__init__(text)
        self.outcome = outcome


class InputFetcher:
    """The tasks of a worker that wait for results of other tasks."""

    def __init__(self, channel: Channel, settings: WorkerSettings, runner: Runner) -> None:
        self._channel = channel
        self._worker = settings.name
        self._runner = runner
        #: Tasks by their requests.
        self.waiting: dict[int, _Waiting] = {}
        self._directory: Path | None = None

    def start(self, job: Job) -> None:
        """Start a task, at once if it needs no inputs."""
        names = results_needed(job.payload)
        if names:
            needs_files = FILE_MARK in job.payload
            self._request(_Waiting(job, [*dict.fromkeys(names)], needs_files))
        else:
            self._runner.start(job)

    def on_reply(self, reply: Reply) -> list[JobResult]:
        """Start a task that has all its inputs. Return its result if it can't start."""
        waiting = self.waiting.pop(reply.request)
        try:
            if waiting.names:
                self._add_results(waiting, reply)
            else:
                self._add_page(waiting, reply)
        except (_Failed, OSError) as error:
            self._remove(waiting.job.key)
            outcome = error.outcome if isinstance(error, _Failed) else Outcome.FAILED
            return [JobResult(waiting.job, outcome, cut_reason(str(error).encode()))]
        if waiting.names or waiting.long:
            self._request(waiting)
        else:
            self._runner.start(structs.replace(waiting.job, inputs=tuple(waiting.inputs)))
        return []

    def stop(self, key: tuple[bytes, int]) -> None:
        """Stop a task, whether it has started or waits for inputs."""
        self._runner.stop(*key)
        self._drop(key)

    def unstarted(self) -> list[Job]:
        """Remove and return all tasks that have not started."""
        jobs = [waiting.job for waiting in self.waiting.values()]
        for job in jobs:
            self._drop(job.key)
        return [*jobs, *self._runner.unstarted()]

    def _drop(self, key: tuple[bytes, int]) -> None:
        for request, waiting in [*self.waiting.items()]:
            if waiting.job.key == key:
                del self.waiting[request]
                self._channel.drop(request)
        self._remove(key)

    def release(self, job: Job) -> None:
        """Remove the files of a task that has ended."""
        if job.inputs:
            self._remove(job.key)

    def _remove(self, key: tuple[bytes, int]) -> None:
        if self._directory is not None:
            shutil.rmtree(self._folder(key), ignore_errors=True)

    def _request(self, waiting: _Waiting) -> None:
        holder = Holder(self._worker, waiting.job.name)
        if waiting.names:
            names = [name.encode() for name in waiting.names[:_NAMES_MAX]]
            build = partial(task_contents.results, names=names, holder=holder)
        else:
            first, pages = waiting.long[0]
            name = first.name.encode()
            build = partial(task_contents.part, name=name, offset=pages.offset, holder=holder)
        self.waiting[self._channel.request(build)] = waiting

    def _add_results(self, waiting: _Waiting, reply: Reply) -> None:
        if reply.kind != peer.READ:
            raise _Failed(f"results of other tasks: {reply.reason or 'not available'}")
        columns = (reply.names, reply.states, reply.results, reply.services)
        asked = dict.fromkeys(waiting.names)
        for name, state, result, service in zip(*columns, strict=True):
            shown = name.decode(errors="replace")
            _check(shown, state, result)
            asked.pop(shown, None)
            is_long = result.blob is not None
            path = self._path(waiting) if is_long or waiting.needs_files else ""
            if is_long:
                waiting.long.append((Input(shown, service, path=path), StreamPages(shown)))
                continue
            if path:
                Path(path).write_bytes(result.text)
            waiting.inputs.append(Input(shown, service, result.text, path))
        if len(asked) == len(waiting.names):
            raise _Failed(f"result of {waiting.names[0]}: unknown task (it may have been removed)")
        waiting.names = [*asked]

    def _add_page(self, waiting: _Waiting, reply: Reply) -> None:
        first, pages = waiting.long[0]
        if reply.kind != peer.READ:
            raise _Failed(f"result of {first.name}: {reply.reason or 'its file is gone'}")
        page = reply.part
        with Path(first.path).open("ab") as file:
            file.write(page.data)
        try:
            is_last = pages.add(page)
        except (BytesDamaged, BytesTruncated) as error:
            raise _Failed(f"result of {first.name}: {error}") from error
        if is_last:
            waiting.inputs.append(first)
            del waiting.long[0]

    def _path(self, waiting: _Waiting) -> str:
        """Return the path of a new file for a long result."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="taskyard-inputs-"))
            # Nothing refers to the directory, so it is not removed too early.
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        folder = self._folder(waiting.job.key)
        folder.mkdir(exist_ok=True)
        descriptor, path = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        return path

    def _folder(self, key: tuple[bytes, int]) -> Path:
        assert self._directory is not None  # noqa: S101  # see its callers
        return self._directory / f"{abs(hash(key)):x}"


def _check(name: str, state: TaskState, result: Result) -> None:
    """Raise `_Failed` unless a task has a whole result."""
    if state is not TaskState.DONE:
        # It was retried or submitted again since. It may be done at the next attempt.
        raise _Failed(f"result of {name}: the task is {state.name.lower()}", Outcome.FAILED)
    if result.is_truncated:
        raise _Failed(f"result of {name}: only the last {len(result.text):,} bytes are kept")
