"""Validation of a campaign's graph on the driver, and the order of its submission.

Names become numbers, and edges become numpy arrays. Levels and cycles are found by the code of
`taskyard load`. A million tasks with two million edges take some seconds and some hundred
megabytes. Knows nothing of Spark, and of files only the names of places.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from taskyard.campaign.graph import Graph, Levels, cycles_of, levels_of
from taskyard.campaign.rejects import (
    cycle_text,
    duplicate_text,
    rejected_dependency_text,
    unknown_dependency_text,
)
from taskyard.pipeline.arrow_rows import service_of_terms

Numbers = np.ndarray[Any, Any]

#: Returns the file and the line of a place.
PlaceLookup = Callable[[int], tuple[str, int]]

#: The columns that validation needs.
COLUMNS: Final = ("place", "name", "after", "terms", "seconds", "reason", "row")


class CriticalPath(Struct):
    """The chain of tasks that takes longest."""

    names: list[str]
    #: None if not all of them have a run time.
    seconds: float | None


class ValidationResult(Struct):
    """The result of validating a campaign."""

    #: Places of valid rows, each after all its dependencies, and the level of each from 0 on.
    places: Numbers
    levels: Numbers
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
    names: pa.Array
    #: Edges as two columns: the dependent's number, and the dependency's, -1 if unknown.
    dependents: Numbers
    dependencies: Numbers
    rejected: dict[int, str] = field(default_factory=dict)

    def place(self, number: int) -> int:
        return int(self.table["place"][number].as_py())

    def name(self, number: int) -> str:
        return str(self.names[number].as_py())


class _TaskGraph(Struct):
    """The dependencies between tasks."""

    graph: Graph
    levels: Levels
    #: Groups of tasks that wait for each other, and one cycle through each.
    cycles: list[tuple[list[int], list[int]]]


def validate(
    table: pa.Table,
    locate: PlaceLookup,
    *,
    existing: Iterable[str] = (),
    reject_unknown: bool = False,
) -> ValidationResult:
    """Validate all rows.

    With `reject_unknown`, also reject dependencies that are neither here nor in `existing`.
    """
    locate = lru_cache(maxsize=None)(locate)
    table = table.sort_by("place") if not _is_sorted(table) else table
    good = table.filter(pc.is_null(table["reason"]))
    tasks, rejected = _first_of_each_name(good, locate)
    _reject_behind_doubles(tasks, good, rejected, locate)
    unknown = _unknown_dependencies(tasks)
    bad = _rejected_names(table, tasks)
    _reject_dependents_of_rejected(tasks, unknown, bad, locate)
    if reject_unknown:
        _reject_unknown_dependencies(tasks, unknown, dict.fromkeys(existing))
    shape = _build_graph(tasks)
    for group, cycle in shape.cycles:
        text = cycle_text([tasks.name(number) for number in cycle], len(group))
        tasks.rejected |= dict.fromkeys(group, text)
    _reject_dependents(tasks, shape.graph, locate)
    rejected |= {tasks.place(number): reason for number, reason in tasks.rejected.items()}
    return _result(tasks, shape, rejected, unknown)


def _is_sorted(table: pa.Table) -> bool:
    places = table["place"].to_numpy()
    return bool(np.all(places[1:] > places[:-1]))


def _first_of_each_name(good: pa.Table, locate: PlaceLookup) -> tuple[_Tasks, dict[int, str]]:
    """Return the first row of each name, and the errors of the others by place."""
    names = _combined(good["name"])
    encoded = names.dictionary_encode()
    rejected: dict[int, str] = {}
    if len(encoded.dictionary) < len(names):
        codes = encoded.indices.to_numpy()
        _, first = np.unique(codes, return_index=True)
        is_first = np.zeros(len(codes), bool)
        is_first[first] = True
        for row in np.flatnonzero(~is_first).tolist():
            place, earlier = good["place"][row].as_py(), good["place"][int(first[codes[row]])]
            location = _other_place(place, earlier.as_py(), locate)
            rejected[place] = duplicate_text(names[row].as_py(), *location)
        good = good.filter(pa.array(is_first))
    after = _combined(good["after"])
    lengths = pc.fill_null(pc.list_value_length(after), 0).to_numpy(zero_copy_only=False)
    dependencies = pc.index_in(after.flatten(), value_set=encoded.dictionary)
    dependencies = pc.fill_null(dependencies, -1).to_numpy(zero_copy_only=False)
    dependents = np.repeat(np.arange(len(good)), lengths)
    return _Tasks(good, encoded.dictionary, dependents, dependencies), rejected


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
    inside = tasks.dependencies >= 0
    dependents, dependencies = tasks.dependents[inside], tasks.dependencies[inside]
    order = np.argsort(dependencies, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(dependencies, minlength=count))))
    dependency_counts = np.bincount(dependents, minlength=count)
    graph = Graph(
        _array(dependency_counts),
        _array(offsets),
        _array(dependents[order]),
        {},
        is_topological=False,
    )
    levels = levels_of(graph)
    return _TaskGraph(graph, levels, cycles_of(graph, levels))


def _array(numbers: Numbers) -> array[int]:
    """Convert to an array that plain Python reads faster than numpy's."""
    return array("I", numbers.astype(np.uint32).tobytes())


def _reject_dependents(tasks: _Tasks, graph: Graph, locate: PlaceLookup) -> None:
    """Reject all dependents of rejected tasks."""
    line = list(tasks.rejected)
    for number in line:  # grows during the walk
        for dependent in graph.dependents_of(number):
            if dependent not in tasks.rejected:
                name, place = tasks.name(number), tasks.place(number)
                tasks.rejected[dependent] = _dependency_reason(
                    tasks, dependent, name, place, locate
                )
                line.append(dependent)


def _result(
    tasks: _Tasks, shape: _TaskGraph, rejected: dict[int, str], unknown: Mapping[str, list[int]]
) -> ValidationResult:
    levels = shape.levels
    order = np.frombuffer(levels.order, np.uint32)
    level = np.repeat(np.arange(len(levels.sizes)), levels.sizes)
    if tasks.rejected:
        stays = np.ones(len(tasks.table), bool)
        stays[list(tasks.rejected)] = False
        order, level = order[stays[order]], level[stays[order]]
    lengths = np.bincount(tasks.dependents, minlength=len(tasks.table))
    return ValidationResult(
        places=tasks.table["place"].to_numpy()[order],
        levels=level,
        rejected=rejected,
        tasks=len(tasks.table),
        edges=len(tasks.dependents),
        roots=int(np.count_nonzero(lengths == 0)),
        sizes=levels.sizes,
        services=_services(tasks.table),
        unknown={name: len(dependents) for name, dependents in unknown.items()},
        duplicates=len(rejected) - len(tasks.rejected),
        cycles=[[tasks.name(number) for number in cycle] for _, cycle in shape.cycles],
        critical_path=_critical_path(tasks, shape.graph, levels),
    )


def _services(table: pa.Table) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for found in pc.value_counts(table["terms"]).to_pylist():
        counts[service_of_terms(found["values"])] += found["counts"]
    return dict(counts.most_common())


def _critical_path(tasks: _Tasks, graph: Graph, levels: Levels) -> CriticalPath:
    """Find the longest chain, by run time if all tasks have one, otherwise by length."""
    seconds = tasks.table["seconds"]
    is_timed = bool(levels.order) and not seconds.null_count
    costs = seconds.to_pylist() if is_timed else [1.0] * len(tasks.table)
    offsets = [0.0] * len(costs)
    came_from = array("q", [-1]) * len(costs)
    for number in levels.order:
        ends = offsets[number] + costs[number]
        for dependent in graph.dependents_of(number):
            if ends > offsets[dependent]:
                offsets[dependent] = ends
                came_from[dependent] = number
    last = max(levels.order, key=lambda number: offsets[number] + costs[number], default=-1)
    total = offsets[last] + costs[last] if is_timed else None
    chain: list[str] = []
    while last >= 0:
        chain.append(tasks.name(last))
        last = came_from[last]
    return CriticalPath(chain[::-1], total)
