"""Validation of a campaign's graph on the driver, and the order of its submission.

Names become numbers, and edges become numpy arrays. Levels and the longest chain come from the walk
of the history's tables, cycles from the code of `taskyard load`. A million tasks with two million
edges take two seconds and some hundred megabytes. Knows nothing of Spark, and of files only the
names of places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import groupby
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from taskyard.campaign.graph import cycles_among
from taskyard.campaign.reader import (
    cycle_text,
    duplicate_text,
    rejected_dependency_text,
    unknown_dependency_text,
)
from taskyard.core.limits import SECOND_NS
from taskyard.pipeline.arrow_rows import PREPARED_SCHEMA, service_of_terms
from taskyard.pipeline.fold.columns import Array, Ints
from taskyard.pipeline.fold.graph import Neighbours, levels, neighbours
from taskyard.pipeline.fold.links import Links

#: Returns the file and the line of a place.
PlaceLookup = Callable[[int], tuple[str, int]]

#: The columns that validation needs.
COLUMNS: Final = ("place", "name", "after", "terms", "seconds", "reason", "row")
SCHEMA: Final = pa.schema([PREPARED_SCHEMA.field(name) for name in COLUMNS])


class CriticalPath(Struct):
    """The chain of tasks that takes longest."""

    names: list[str]
    #: None if not all of them have a run time.
    seconds: float | None


class ValidationResult(Struct):
    """The result of validating a campaign."""

    #: Numbers of valid rows, each after all its dependencies, and the level of each from 0 on.
    rows: Array
    levels: Array
    #: Every dependency comes before its dependents in the files.
    is_topological: bool
    #: Errors of rows that are valid on their own, by place.
    rejected: dict[int, str]
    tasks: int
    edges: int
    roots: int
    #: Tasks of each level.
    sizes: list[int]
    services: dict[str, int]
    #: Dependencies that the files do not have, with the number of their dependents.
    unknown: dict[str, int]
    duplicates: int
    cycles: list[list[str]]
    critical_path: CriticalPath

    @property
    def width(self) -> int:
        return max(self.sizes, default=0)

    @property
    def widest(self) -> int:
        """The number of the largest level, from 1 on."""
        return self.sizes.index(self.width) + 1 if self.sizes else 0


class _Tasks(Struct):
    """The valid rows, each name once. A task is its row number."""

    table: pa.Table
    #: The number of each in the table with invalid rows and duplicates.
    rows: Array
    names: pa.Array
    #: Edges as two columns: the dependent's number, and the dependency's, -1 if unknown.
    dependents: Array
    dependencies: Array
    rejected: dict[int, str] = field(default_factory=dict)

    def place(self, number: int) -> int:
        return int(self.table["place"][number].as_py())

    def name(self, number: int) -> str:
        return str(self.names[number].as_py())


class _TaskGraph(Struct):
    """The dependencies between tasks, and the places of tasks in the graph."""

    #: The links between tasks of the files, sorted by the waiting task.
    links: Links
    #: The dependencies of each task.
    dependencies: Neighbours
    #: -1 for a task that is in a cycle or behind one.
    level: Ints
    #: The run time of each task, or 1 if not all are known, and that of the longest chain to it.
    cost_ns: Ints
    path_ns: Ints

    def dependents(self) -> Neighbours:
        """Return the dependents of each task."""
        return neighbours(self.links.before, self.links.waiting, len(self.level))

    def cycles(self) -> list[tuple[list[int], list[int]]]:
        """Return groups of tasks that wait for each other, and one cycle through each."""
        is_behind = self.level < 0
        if not is_behind.any():
            return []
        return cycles_among(partial(_neighbours_of, self.dependents()), bytearray(is_behind))


def validate(
    table: pa.Table,
    locate: PlaceLookup,
    *,
    existing: Iterable[str] = (),
    reject_unknown: bool = False,
) -> ValidationResult:
    """Validate all rows, which are in the order of places.

    With `reject_unknown`, also reject dependencies that are neither here nor in `existing`.
    """
    locate = lru_cache(maxsize=None)(locate)
    is_good = pc.is_null(table["reason"])
    good = table if pc.all(is_good).as_py() else table.filter(is_good)
    rows = np.flatnonzero(is_good.to_numpy())
    tasks, rejected = _first_of_each_name(good, rows, locate)
    _reject_behind_doubles(tasks, good, rejected, locate)
    unknown = _unknown_dependencies(tasks)
    bad = _rejected_names(table, tasks)
    _reject_dependents_of_rejected(tasks, unknown, bad, locate)
    if reject_unknown:
        _reject_unknown_dependencies(tasks, unknown, dict.fromkeys(existing))
    shape = _build_graph(tasks)
    cycles = shape.cycles()
    for group, cycle in cycles:
        text = cycle_text([tasks.name(number) for number in cycle], len(group))
        tasks.rejected |= dict.fromkeys(group, text)
    if tasks.rejected:
        _reject_dependents(tasks, shape.dependents(), locate)
    rejected |= {tasks.place(number): reason for number, reason in tasks.rejected.items()}
    result = _result(tasks, shape, rejected, unknown)
    result.cycles = [[tasks.name(number) for number in cycle] for _, cycle in cycles]
    return result


def _first_of_each_name(
    good: pa.Table, rows: Array, locate: PlaceLookup
) -> tuple[_Tasks, dict[int, str]]:
    """Return the first row of each name, and the errors of the others by place.

    A place with several rows is a bundle, and is rejected as a whole.
    """
    names = _combined(good["name"])
    encoded = names.dictionary_encode()
    rejected: dict[int, str] = {}
    if len(encoded.dictionary) < len(names):
        places = good["place"].to_numpy()
        is_first = np.ones(len(names), bool)
        for row, first in _repeated(encoded.indices.to_pylist(), places.tolist()):
            location = _other_place(int(places[row]), int(places[first]), locate)
            rejected[int(places[row])] = duplicate_text(names[row].as_py(), *location)
            begin, end = np.searchsorted(places, [places[row], places[row] + 1])
            is_first[begin:end] = False
        good, rows = good.filter(pa.array(is_first)), rows[is_first]
        encoded = _combined(good["name"]).dictionary_encode()
    after = _combined(good["after"])
    lengths = pc.fill_null(pc.list_value_length(after), 0).to_numpy(zero_copy_only=False)
    dependencies = pc.index_in(after.flatten(), value_set=encoded.dictionary)
    dependencies = pc.fill_null(dependencies, -1).to_numpy(zero_copy_only=False)
    dependents = np.repeat(np.arange(len(good)), lengths)
    return _Tasks(good, rows, encoded.dictionary, dependents, dependencies), rejected


def _repeated(names: list[int], places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield a row of each place that has the name of an earlier valid row, and that row."""
    first: dict[int, int] = {}
    for _, rows in groupby(range(len(names)), places.__getitem__):
        own = [*rows]
        repeated = next((row for row in own if names[row] in first), None)
        if repeated is None:
            first |= {names[row]: row for row in own}
        else:
            yield repeated, first[names[repeated]]


def _reject_behind_doubles(
    tasks: _Tasks, good: pa.Table, doubles: Mapping[int, str], locate: PlaceLookup
) -> None:
    """Reject tasks that wait for a name whose row in their own file was rejected as a duplicate.

    The valid row of that name is in another file, and is another task.
    """
    if not doubles:
        return
    is_double = pc.is_in(good["place"], value_set=pa.array([*doubles], pa.int64()))
    rows = good.filter(is_double)
    places = zip(rows["name"].to_pylist(), rows["place"].to_pylist(), strict=True)
    by_file = {(locate(place)[0], name): place for name, place in places}
    names = pa.array(dict.fromkeys(name for _, name in by_file), pa.string())
    numbers = pc.index_in(names, value_set=tasks.names).to_numpy(zero_copy_only=False)
    for edge in np.flatnonzero(np.isin(tasks.dependencies, numbers)).tolist():
        number, dependencies = int(tasks.dependents[edge]), int(tasks.dependencies[edge])
        name, file = tasks.name(dependencies), locate(tasks.place(number))[0]
        place = by_file.get((file, name))
        if place is not None and locate(tasks.place(dependencies))[0] != file:
            tasks.rejected.setdefault(
                number, _dependency_reason(tasks, number, name, place, locate)
            )


def _combined(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return (
        combined if not isinstance(combined, pa.ChunkedArray) else pa.concat_arrays(combined.chunks)
    )


def _other_place(place: int, other: int, locate: PlaceLookup) -> tuple[int, str]:
    """Return the line of another row, and its file if that is not the file of `place`."""
    (file, _), (other_file, line) = locate(place), locate(other)
    return line, "" if file == other_file else other_file


def _unknown_dependencies(tasks: _Tasks) -> dict[str, list[int]]:
    """Find the dependents of names that no valid row has."""
    unknown_edges = np.flatnonzero(tasks.dependencies < 0)
    if not len(unknown_edges):
        return {}
    names = _combined(tasks.table["after"]).flatten().take(pa.array(unknown_edges)).to_pylist()
    unknown: dict[str, list[int]] = {}
    for name, number in zip(names, tasks.dependents[unknown_edges].tolist(), strict=True):
        unknown.setdefault(name, []).append(number)
    return unknown


def _rejected_names(table: pa.Table, tasks: _Tasks) -> dict[str, int]:
    """Find the places of rejected names that no valid row has."""
    if len(tasks.table) == len(table):
        return {}
    is_bad = pc.and_(pc.is_valid(table["reason"]), pc.is_valid(table["name"]))
    bad = table.filter(is_bad)
    named: dict[str, int] = {}
    for name, place in zip(bad["name"].to_pylist(), bad["place"].to_pylist(), strict=True):
        named.setdefault(name, place)
    return named


def _reject_dependents_of_rejected(
    tasks: _Tasks, unknown: dict[str, list[int]], bad: Mapping[str, int], locate: PlaceLookup
) -> None:
    for name in [name for name in unknown if name in bad]:
        for number in unknown.pop(name):
            tasks.rejected.setdefault(
                number, _dependency_reason(tasks, number, name, bad[name], locate)
            )


def _dependency_reason(
    tasks: _Tasks, number: int, name: str, place: int, locate: PlaceLookup
) -> str:
    return rejected_dependency_text(name, *_other_place(tasks.place(number), place, locate))


def _reject_unknown_dependencies(
    tasks: _Tasks, unknown: Mapping[str, list[int]], existing: Mapping[str, None]
) -> None:
    for name, dependents in unknown.items():
        if name not in existing:
            reason = unknown_dependency_text(name)
            for number in dependents:
                tasks.rejected.setdefault(number, reason)


def _build_graph(tasks: _Tasks) -> _TaskGraph:
    count = len(tasks.table)
    is_inside = tasks.dependencies >= 0
    waiting, before = tasks.dependents[is_inside], tasks.dependencies[is_inside].astype(np.int64)
    links = Links(waiting, before, np.empty(0, np.int64))
    level = np.full(count, -1)
    cost_ns = _costs_ns(tasks)
    path_ns = cost_ns.copy()
    for number, (nodes, source, target) in enumerate(levels(links, count)):
        level[nodes] = number
        np.maximum.at(path_ns, target, path_ns[source] + cost_ns[target])
    starts = np.concatenate(([0], np.cumsum(np.bincount(waiting, minlength=count))))
    dependencies = Neighbours(starts, before)  # they are in the order of the waiting tasks
    return _TaskGraph(links, dependencies, level, cost_ns, path_ns)


def _neighbours_of(neighbours: Neighbours, number: int) -> list[int]:
    first, last = neighbours.starts[number], neighbours.starts[number + 1]
    found: list[int] = neighbours.found[first:last].tolist()
    return found


def _costs_ns(tasks: _Tasks) -> Ints:
    """Return the run time of each task, or 1 for each if a run time is missing."""
    seconds = tasks.table["seconds"]
    if seconds.null_count or not len(seconds):
        return np.ones(len(seconds), np.int64)
    costs_ns: Ints = np.rint(seconds.to_numpy() * SECOND_NS).astype(np.int64)
    return costs_ns


def _reject_dependents(tasks: _Tasks, dependents: Neighbours, locate: PlaceLookup) -> None:
    """Reject all dependents of rejected tasks."""
    line = list(tasks.rejected)
    for number in line:  # grows during the walk
        for dependent in _neighbours_of(dependents, number):
            if dependent not in tasks.rejected:
                name, place = tasks.name(number), tasks.place(number)
                tasks.rejected[dependent] = _dependency_reason(
                    tasks, dependent, name, place, locate
                )
                line.append(dependent)


def _result(
    tasks: _Tasks, shape: _TaskGraph, rejected: dict[int, str], unknown: Mapping[str, list[int]]
) -> ValidationResult:
    is_valid = shape.level >= 0
    sizes = np.bincount(shape.level[is_valid]).tolist()
    is_valid[list(tasks.rejected)] = False
    order = np.flatnonzero(is_valid)
    order = order[np.argsort(shape.level[order], kind="stable")]
    lengths = np.bincount(tasks.dependents, minlength=len(tasks.table))
    return ValidationResult(
        rows=tasks.rows[order],
        levels=shape.level[order],
        is_topological=bool(np.all(tasks.dependencies < tasks.dependents)),
        rejected=rejected,
        tasks=len(tasks.table),
        edges=len(tasks.dependents),
        roots=int(np.count_nonzero(lengths == 0)),
        sizes=sizes,
        services=_services(tasks.table),
        unknown={name: len(dependents) for name, dependents in unknown.items()},
        duplicates=len(rejected) - len(tasks.rejected),
        cycles=[],
        critical_path=_critical_path(tasks, shape),
    )


def _services(table: pa.Table) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for found in pc.value_counts(table["terms"]).to_pylist():
        counts[service_of_terms(found["values"])] += found["counts"]
    return dict(counts.most_common())


def _critical_path(tasks: _Tasks, shape: _TaskGraph) -> CriticalPath:
    """Find the longest chain, by run time if all tasks have one, otherwise by length."""
    path_ns = np.where(shape.level < 0, -1, shape.path_ns)
    number = int(np.argmax(path_ns)) if np.any(path_ns >= 0) else -1
    is_timed = number >= 0 and not tasks.table["seconds"].null_count
    total = float(path_ns[number]) / SECOND_NS if is_timed else None
    chain: list[str] = []
    while number >= 0:
        chain.append(tasks.name(number))
        left_ns = path_ns[number] - shape.cost_ns[number]
        before = _neighbours_of(shape.dependencies, number)
        number = min((one for one in before if path_ns[one] == left_ns), default=-1)
    return CriticalPath(chain[::-1], total)
