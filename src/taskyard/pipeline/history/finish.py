"""The last steps of a run, which need all shares: places, stays and metrics."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from taskyard.pipeline.fold.columns import number
from taskyard.pipeline.history.days import MetricDays
from taskyard.pipeline.history.fold_files import FoldedFiles
from taskyard.pipeline.history.memory import STEPS, Files, Memory, selected
from taskyard.pipeline.history.stays import write_stays
from taskyard.pipeline.history.walk import GraphWalk
from taskyard.pipeline.store.data_file import DataFile


class FinishedFiles(Struct):
    """New files of all derived tables and of the memory, by table."""

    files: dict[str, list[DataFile]]
    #: Names of files that they replace. Where a table is missing, all open files are replaced.
    replaced: dict[str, set[str]]
    campaigns: list[str]
    #: The last record of a task, and the time of the last event.
    record: int
    time_ns: int
    #: Names of small files that were merged, by table.
    merged: dict[str, set[str]] = {}


class Finish(Struct, frozen=True):
    """Makes all tables that depend on several shares."""

    broker: str
    memory: Memory
    #: The tables as they were: tasks and workers that are final, metrics, critical paths.
    tasks: Files
    workers: Files
    metrics: Files
    paths: Files
    #: New events and edges.
    events: Files
    edges: Files
    #: The time of the last event before.
    time_ns: int

    def __call__(self, folded: Sequence[FoldedFiles]) -> FinishedFiles:
        record, time_ns = self._last()
        files = {"attempts": [file for one in folded for file in one.attempts + one.attempts_open]}
        for table in ("_steps", "_generations"):
            files[table] = [file for one in folded for file in one.memory[table]]
        stays = write_stays(self.broker, self.memory, self.workers, self.events, folded)
        files |= {"workers": stays.workers + stays.workers_open, **stays.memory}
        names = tuple(file.name for file in files["workers"])
        workers = Files(self.workers.directory, (*self.workers.names, *names))
        days = MetricDays(self.memory, self.metrics, workers, time_ns).write(
            folded, stays.slots_since_ns
        )
        files |= {"metrics": days.metrics, **days.memory}
        walked = GraphWalk(self.memory, self.tasks, self.paths, folded, self.edges).write()
        files |= {
            "tasks": walked.tasks + walked.tasks_open,
            "critical_path": walked.critical_path,
            **walked.memory,
        }
        campaigns = sorted({name for one in folded for name in one.campaigns})
        return FinishedFiles(files, days.replaced, campaigns, record, time_ns)

    def _last(self) -> tuple[int, int]:
        """Return the last record and the time of the last event."""
        record, time_ns = 0, self.time_ns
        schema = selected(STEPS, ("record", "time_ns"))
        for name in self.events.names:
            table = self.events.read_one(name, schema)
            if len(table):
                record = max(record, int(number(table["record"]).values.max()))
                time_ns = max(time_ns, int(number(table["time_ns"]).values.max()))
        return record, time_ns
