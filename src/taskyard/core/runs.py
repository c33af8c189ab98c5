"""Measurements of attempts by their workers, as columns.

Owns the format of these measurements and how they are fitted into a lease. A worker's wall clock
differs from the broker's, so a start is trusted only as far as the lease allows. Durations come
from the worker's monotonic clock. Nothing here measures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence


class Run(Struct, frozen=True, gc=False):
    """An attempt as its worker measured it."""

    #: By the wall clock.
    started_ns: int
    #: How long it ran, by the monotonic clock.
    run_ns: int
    #: The exit status, or minus the signal that ended it. None: it has none, or it is unknown.
    status: int | None = None
    #: CPU time, including child processes. 0: unknown.
    cpu_ns: int = 0
    #: Peak resident memory. 0: unknown.
    memory_max_bytes: int = 0
    #: A remark of the worker, such as why it did not run the task.
    note: bytes = b""


class RunColumns(Struct, array_like=True, gc=False):
    """Measurements of several attempts, one value for each in every column."""

    #: The machine they ran on. b"": unknown.
    host: bytes
    #: By the wall clock. 0: the attempt did not start, or was not measured.
    started_ns: list[int]
    run_ns: list[int]
    #: Exit statuses, or minus the signals. None: no attempt has one.
    statuses: list[int | None] | None = None
    #: CPU time. 0: unknown. None: unknown for all attempts.
    cpu_ns: list[int] | None = None
    #: Peak resident memory. 0: unknown. None: unknown for all attempts.
    memory_max_bytes: list[int] | None = None
    #: Remarks of the worker. None: no attempt has one.
    notes: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.started_ns)

    def at(self, index: int) -> Run | None:
        """Return one attempt's measurements, or None if it was not measured."""
        if not self.started_ns[index]:
            return None
        return Run(
            self.started_ns[index],
            self.run_ns[index],
            None if self.statuses is None else self.statuses[index],
            0 if self.cpu_ns is None else self.cpu_ns[index],
            0 if self.memory_max_bytes is None else self.memory_max_bytes[index],
            b"" if self.notes is None else self.notes[index],
        )


class Attempt(Struct, array_like=True, gc=False):
    """An attempt at a task, as shown to users. Times are of the wall clock."""

    number: int
    worker: bytes
    #: The kind of the record that ended it, as in the history. b"": it has not ended.
    outcome: bytes = b""
    settled_ns: int = 0
    host: bytes = b""
    #: 0: it did not start, or was not measured.
    started_ns: int = 0
    run_ns: int = 0
    status: int | None = None
    cpu_ns: int = 0
    memory_max_bytes: int = 0
    #: A remark of the worker.
    note: bytes = b""
    leased_ns: int = 0
    #: Why it ended without a result, at most `ATTEMPT_REASON_BYTES_MAX` bytes.
    reason: bytes = b""

    def with_run(self, runs: RunColumns | None, index: int) -> Attempt:
        """Add the measurement at this index, if there is one."""
        run = None if runs is None else runs.at(index)
        if runs is not None and run is not None:
            self.host, self.started_ns, self.run_ns = runs.host, run.started_ns, run.run_ns
            self.status, self.cpu_ns = run.status, run.cpu_ns
            self.memory_max_bytes, self.note = run.memory_max_bytes, run.note
        return self


def run_columns(runs: Sequence[Run | None], host: bytes) -> RunColumns | None:
    """Turn measurements into columns. Return None if nothing was measured."""
    if not any(runs):
        return None
    each = [_NOT_MEASURED if run is None else run for run in runs]
    statuses = [run.status for run in each]
    cpu_ns = [run.cpu_ns for run in each]
    memory_max_bytes = [run.memory_max_bytes for run in each]
    notes = [run.note for run in each]
    return RunColumns(
        host=host,
        started_ns=[run.started_ns for run in each],
        run_ns=[run.run_ns for run in each],
        statuses=statuses if statuses.count(None) < len(statuses) else None,
        cpu_ns=cpu_ns if any(cpu_ns) else None,
        memory_max_bytes=memory_max_bytes if any(memory_max_bytes) else None,
        notes=notes if any(notes) else None,
    )


_NOT_MEASURED = Run(0, 0)


def clamped_to_lease(
    runs: RunColumns, indexes: Sequence[int], leased_ns: Sequence[int], settled_ns: int
) -> RunColumns | None:
    """Select attempts and fit each run between its lease and its settlement.

    A run is never longer than its lease, and it starts and ends within it, whatever the worker's
    wall clock reads.
    """
    started: list[int] = []
    durations: list[int] = []
    for index, begin_ns in zip(indexes, leased_ns, strict=True):
        start_ns, run_ns = runs.started_ns[index], runs.run_ns[index]
        if start_ns:
            run_ns = min(run_ns, max(0, settled_ns - begin_ns))
            start_ns = max(begin_ns, min(start_ns, settled_ns - run_ns))
        started.append(start_ns)
        durations.append(run_ns)
    if not any(started):
        return None
    statuses, cpu_ns, memory = runs.statuses, runs.cpu_ns, runs.memory_max_bytes
    notes = runs.notes
    return RunColumns(
        runs.host,
        started,
        durations,
        None if statuses is None else [statuses[index] for index in indexes],
        None if cpu_ns is None else [cpu_ns[index] for index in indexes],
        None if memory is None else [memory[index] for index in indexes],
        None if notes is None else [notes[index] for index in indexes],
    )
