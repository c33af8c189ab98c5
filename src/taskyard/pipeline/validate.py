"""A campaign's graph on the driver: what is wrong with it, and in which order to submit the rest.

Names become numbers and edges become arrays (numpy); levels and cycles are found by the code that
`taskyard load` uses. A million tasks with two million edges take some seconds and some hundred
megabytes. Knows nothing of Spark, nor of files beyond what a place is called.
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
from taskyard.campaign.reader import cycle_text
from taskyard.campaign.values import shown
from taskyard.pipeline.arrow_rows import service_of_terms

Numbers = np.ndarray[Any, Any]

#: Where a place is: the file and the line.
PlaceLookup = Callable[[int], tuple[str, int]]

#: The columns that are needed here.
COLUMNS: Final = ("place", "name", "after", "terms", "seconds", "reason", "row")

#: Unknown names that are listed: more of them are one mistake.
UNKNOWN_LISTED_MAX: Final = 1000


class CriticalPath(Struct):
    """The chain of tasks that takes longest."""

    names: list[str]
    #: None: not all of them say how long they take.
    seconds: float | None


class ValidationResult(Struct):
    """What there is to say about a campaign."""

    #: Good rows and what they wait for, in an order in which nobody stands before what it waits
    #: for: their places, and the level of each, from 0 on.
    places: Numbers
    levels: Numbers
    #: What is wrong with rows that were good by themselves.
    rejected: dict[int, str]
    tasks: int
    edges: int
    roots: int
    #: Tasks of each level.
    sizes: list[int]
    services: dict[str, int]
    #: Names that the files do not have, with how many wait for each.
    unknown: dict[str, int]
    duplicates: int
    cycles: list[list[str]]
    critical_path: CriticalPath

    @property
    def width(self) -> int:
        return max(self.sizes, default=0)

    @property
    def widest(self) -> int:
        """The level that has the most, from 1 on."""
        return self.sizes.index(self.width) + 1 if self.sizes else 0


class _Tasks(Struct):
    """The good rows, each name once; a task is its number here."""

    table: pa.Table
    names: pa.Array
    #: Who waits (a number), and for which name, where it stands in `dependencies` if it is known.
    dependents: Numbers
    dependencies: Numbers
    rejected: dict[int, str] = field(default_factory=dict)

    def place(self, number: int) -> int:
        return int(self.table["place"][number].as_py())

    def name(self, number: int) -> str:
        return str(self.names[number].as_py())


class _TaskGraph(Struct):
    """How the tasks hang together."""

    graph: Graph
    levels: Levels
    #: Groups of tasks that all wait for each other, and one cycle through each.
    cycles: list[tuple[list[int], list[int]]]


def validate(
    table: pa.Table,
    locate: PlaceLookup,
    *,
    existing: Iterable[str] = (),
    reject_unknown: bool = False,
) -> ValidationResult:
    """Look at all rows. With `reject_unknown` so is whoever waits for a name that is neither
    here nor among the `existing`."""
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
    """The first row of each name, and what is wrong with the others, by place."""
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
            stands = _describe_place(place, earlier.as_py(), locate)
            rejected[place] = f"duplicate name {shown(names[row].as_py())}, first {stands}"
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
    """Reject tasks that wait for a name of which their own file's row was rejected: the row that
    counts is another file's, and another task."""
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
                number, _rejected_dependency_text(tasks, number, name, place, locate)
            )


def _combined(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return (
        combined if not isinstance(combined, pa.ChunkedArray) else pa.concat_arrays(combined.chunks)
    )


def _describe_place(place: int, earlier: int, locate: PlaceLookup) -> str:
    """Where something else is, seen from a place."""
    (file, _), (other, line) = locate(place), locate(earlier)
    return f"on line {line}" if file == other else f"in {other}:{line}"


def _unknown_dependencies(tasks: _Tasks) -> dict[str, list[int]]:
    """Who waits for names that no good row has."""
    strange = np.flatnonzero(tasks.dependencies < 0)
    if not len(strange):
        return {}
    names = _combined(tasks.table["after"]).flatten().take(pa.array(strange)).to_pylist()
    unknown: dict[str, list[int]] = {}
    for name, number in zip(names, tasks.dependents[strange].tolist(), strict=True):
        unknown.setdefault(name, []).append(number)
    return unknown


def _rejected_names(table: pa.Table, tasks: _Tasks) -> dict[str, int]:
    """The places of names that were rejected and that no good row has."""
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
                number, _rejected_dependency_text(tasks, number, name, bad[name], locate)
            )


def _rejected_dependency_text(
    tasks: _Tasks, number: int, name: str, place: int, locate: PlaceLookup
) -> str:
    stands = (
        _describe_place(tasks.place(number), place, locate).removeprefix("on ").removeprefix("in ")
    )
    return f"waits for {shown(name)}, which was rejected ({stands})"


def _reject_unknown_dependencies(
    tasks: _Tasks, unknown: Mapping[str, list[int]], existing: Mapping[str, None]
) -> None:
    for name, dependents in unknown.items():
        if name not in existing:
            reason = f"waits for {shown(name)}, which neither the file nor the broker has"
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
    """What plain Python walks faster than numpy's."""
    return array("I", numbers.astype(np.uint32).tobytes())


def _reject_dependents(tasks: _Tasks, graph: Graph, locate: PlaceLookup) -> None:
    """Whoever waits for a rejected task is rejected too."""
    line = list(tasks.rejected)
    for number in line:  # grows while it is walked
        for dependent in graph.dependents_of(number):
            if dependent not in tasks.rejected:
                name, place = tasks.name(number), tasks.place(number)
                tasks.rejected[dependent] = _rejected_dependency_text(
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
    """The longest chain: by time where all tasks say theirs, else by the number of tasks."""
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
