"""Which tasks name a value, in their payloads or their results: a value lives as long as they do.

Every name is in a log beside the values, which is on disk before the commit of the record with that
name. So the log has every name that the journal has. It may have more: those of tasks that have
ended meanwhile. A task that needs the result of another one counts as if its payload named the
values of that result. Knows neither the values' files nor when they are removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from taskyard.core import identity
from taskyard.core.records import Finished, Submitted
from taskyard.core.states import TASK_STATES_ENDED, TaskState
from taskyard.core.task_inputs import needed
from taskyard.journal.files import open_regular, replace_private
from taskyard.wire.value_names import MARK, values_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from taskyard.core.entities import Task
    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord

logger = logging.getLogger("taskyard.broker")

#: The file beside the values.
LOG_FILE: Final = "references"

#: The log is written again if it has this many lines, and most of them are of no use.
REWRITE_LINES_MIN: Final = 10_000

#: A line: whether the task's result names the value, the value, and the task's key as Latin-1.
_Line = tuple[bool, str, str]

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(_Line)


def references_in(records: Iterable[AnyRecord]) -> Iterator[tuple[bool, str, bytes]]:
    """Yield each value that records name: whether it is of a result, its name, and the task."""
    for record in records:
        if type(record) is Submitted:
            submission = record.submission
            if len(submission.payloads) == 1:
                for value in values_in(submission.payloads[0]):
                    for name in submission.names:
                        yield False, value, name
                continue
            columns, is_result = (submission.names, submission.payloads), False
        elif type(record) is Finished and record.results is not None:
            columns, is_result = (record.names, record.results), True
        else:
            continue
        for name, text in zip(*columns, strict=True):
            if text.startswith(MARK):
                for value in values_in(text):
                    yield is_result, value, name


class ReferenceLog(Protocol):
    """Keeps the lines of references."""

    @property
    def name(self) -> str:
        """Return where the lines are, for the log of the broker."""

    def load(self) -> list[bytes]:
        """Return all lines."""

    def append(self, lines: list[bytes]) -> None:
        """Add lines, durably. Raises `OSError`."""

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace all lines, durably. Raises `OSError`."""


class ReferenceFile:
    """Implements `ReferenceLog` in a file."""

    def __init__(self, path: Path, *, repairs: bool = True) -> None:
        """`repairs`: remove a last line that was cut, when the file is read."""
        self._path = path
        self._repairs = repairs

    @property
    def name(self) -> str:
        return str(self._path)

    def load(self) -> list[bytes]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content) and self._repairs:
            os.truncate(self._path, len(whole))
        return whole.splitlines(keepends=True)

    def append(self, lines: list[bytes]) -> None:
        descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            data = memoryview(b"".join(lines))
            while data:
                data = data[os.write(descriptor, data) :]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, lines: Iterable[bytes]) -> None:
        replace_private(self._path, b"".join(lines))


class ValueReferences:
    """The tasks of each value."""

    def __init__(self, log: ReferenceLog) -> None:
        """Read the log."""
        self._log = log
        #: The keys of tasks whose payloads name a value, and of those whose results do.
        self._payloads: dict[str, set[bytes]] = {}
        self._results: dict[str, set[bytes]] = {}
        #: The values of each result.
        self._values_of: dict[bytes, list[str]] = {}
        #: Tasks that need the result of a task which is not done. None: not known since the start.
        self._waiting: dict[bytes, list[bytes]] | None = None
        #: Lines can't be read, so that references may be missing.
        self.is_damaged = False
        self._lines = self._load()

    def __contains__(self, value: str) -> bool:
        return value in self._payloads or value in self._results

    def note(self, records: Sequence[AnyRecord], ledger: Ledger) -> list[str]:
        """Write the references in records to the log, before their commit. Raises `OSError`.

        The ledger has the records. Returns the values of results that tasks need from now on.
        """
        lines: list[bytes] = []
        for is_result, value, name in references_in(records):
            if self._add(value, name, is_result=is_result):
                lines.append(_line(value, name, is_result=is_result))
        values = []
        for value, name in self._needs_in(records, ledger):
            if self._add(value, name, is_result=False):
                lines.append(_line(value, name, is_result=False))
                values.append(value)
        self._write(lines)
        return values

    def _needs_in(
        self, records: Sequence[AnyRecord], ledger: Ledger
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the values of results that tasks need, and these tasks."""
        tasks: Iterable[Task]
        if self._waiting is None:
            self._waiting, tasks = {}, ledger.tasks.values()
        else:
            tasks = _tasks_with_needs(records, ledger)
        for task in tasks:
            yield from self._needs_of(task, ledger, self._waiting)
        for record in records if self._waiting else ():
            if type(record) is Finished:
                for name in record.names:
                    found = self._values_of.get(name, ())
                    yield from product(found, self._waiting.pop(name, ()))

    def _needs_of(
        self, task: Task, ledger: Ledger, waiting: dict[bytes, list[bytes]]
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the values that a task needs. Note the tasks that it waits for."""
        names = [] if task.state in TASK_STATES_ENDED else needed(task.payload)
        for key in _keys(ledger, task, names):
            if key in self._values_of:
                for value in self._values_of[key]:
                    yield value, task.name
            elif key in ledger.awaited.tasks or _may_run(ledger, key):
                waiting.setdefault(key, []).append(task.name)

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._log.append(lines)
            self._lines += len(lines)

    def is_result_of(self, value: str, tasks: Iterable[str]) -> bool:
        """Return whether the result of one of these tasks names a value."""
        names = self._results.get(value, ())
        return any(task.encode() in names for task in tasks)

    def tasks(self, value: str) -> set[bytes]:
        """Return the tasks that name a value, as far as they are known."""
        return self._payloads.get(value, set()) | self._results.get(value, set())

    def may_run(self, value: str, ledger: Ledger) -> bool:
        """Return whether a task names a value that may still run. Forgets the others."""
        return _any_left(self._payloads, value, partial(_may_run, ledger))

    def has_result(self, value: str, ledger: Ledger, is_archived: Callable[[bytes], bool]) -> bool:
        """Return whether the result of a task names a value. Forgets tasks without a result."""

        def has_result(name: bytes) -> bool:
            task = ledger.tasks.get(name)
            return is_archived(name) if task is None else task.state is TaskState.DONE

        return _any_left(self._results, value, has_result)

    def forget_missing(self, values: Iterable[str]) -> None:
        """Forget values that are removed. Write the log again if it is mostly of no use."""
        for value in values:
            self._payloads.pop(value, None)
            for name in self._results.pop(value, ()):
                self._values_of.pop(name, None)
        left = sum(map(len, self._payloads.values())) + sum(map(len, self._results.values()))
        if self._lines >= max(REWRITE_LINES_MIN, 2 * left):
            self._log.replace(self._all_lines())
            self._lines = left

    def known(self) -> list[str]:
        """Return the values that tasks name."""
        return [*self._payloads.keys() | self._results.keys()]

    def _all_lines(self) -> Iterator[bytes]:
        for is_result, users in ((False, self._payloads), (True, self._results)):
            for value, names in users.items():
                for name in names:
                    yield _line(value, name, is_result=is_result)

    def _add(self, value: str, name: bytes, *, is_result: bool) -> bool:
        """Add a reference. Return whether it is new."""
        names = (self._results if is_result else self._payloads).setdefault(value, set())
        if name in names:
            return False
        names.add(name)
        if is_result:
            self._values_of.setdefault(name, []).append(value)
        return True

    def _load(self) -> int:
        """Read the log. Return the number of lines."""
        lines = self._log.load()
        try:
            for is_result, value, name in map(_decoder.decode, lines):
                self._add(value, name.encode("latin-1"), is_result=is_result)
        except (msgspec.MsgspecError, ValueError) as error:
            self.is_damaged = True
            logger.warning("%s is damaged, so no values are removed: %s", self._log.name, error)
        return len(lines)


def _line(value: str, name: bytes, *, is_result: bool) -> bytes:
    return _encoder.encode((is_result, value, name.decode("latin-1"))) + b"\n"


def _tasks_with_needs(records: Iterable[AnyRecord], ledger: Ledger) -> Iterator[Task]:
    """Yield the tasks of submissions that need results."""
    for record in records:
        if type(record) is Submitted:
            names, payloads = record.submission.names, record.submission.payloads
            if len(payloads) == 1:
                found = names if needed(payloads[0]) else []
            else:
                found = [name for name, text in zip(names, payloads, strict=True) if needed(text)]
            yield from (ledger.tasks[name] for name in found if name in ledger.tasks)


def _may_run(ledger: Ledger, name: bytes) -> bool:
    task = ledger.tasks.get(name)
    return task is not None and task.state not in TASK_STATES_ENDED


def _keys(ledger: Ledger, task: Task, names: Iterable[str]) -> Iterator[bytes]:
    """Yield the keys of tasks whose results a task needs. Names that mean no task are skipped."""
    for name in names:
        with contextlib.suppress(identity.OtherTask):
            yield from identity.predecessors(ledger, task, [name.encode()])


def _any_left(users: dict[str, set[bytes]], value: str, is_left: Callable[[bytes], bool]) -> bool:
    """Return whether one of a value's tasks is left. Those before it are forgotten."""
    names = users.get(value)
    while names:
        name = names.pop()
        if is_left(name):
            names.add(name)
            return True
    users.pop(value, None)
    return False
