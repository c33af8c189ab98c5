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

from taskyard.client.campaign.read import cycle_text
from taskyard.client.campaign.survey import Graph, Levels, cycles_of, levels_of
from taskyard.client.campaign.values import shown
from taskyard.pipeline.columns import service_in

Numbers = np.ndarray[Any, Any]

#: Where a place is: the file and the line.
Where = Callable[[int], tuple[str, int]]

#: The columns that are needed here.
COLUMNS: Final = ("place", "name", "after", "terms", "seconds", "reason", "row")

#: Unknown names that are listed: more of them are one mistake.
STRANGERS_LISTED_MAX: Final = 1000


class Path(Struct):
    """The chain of tasks that takes longest."""

    names: list[str]
    #: None: not all of them say how long they take.
    seconds: float | None


class Judged(Struct):
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
    critical_path: Path

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
    #: Who waits (a number), and for which name, where it stands in `before` if it is known.
    waiting: Numbers
    before: Numbers
    rejected: dict[int, str] = field(default_factory=dict)

    def place(self, number: int) -> int:
        return int(self.table["place"][number].as_py())

    def name(self, number: int) -> str:
        return str(self.names[number].as_py())


class _Shape(Struct):
    """How the tasks hang together."""

    graph: Graph
    levels: Levels
    #: Groups of tasks that all wait for each other, and one cycle through each.
    cycles: list[tuple[list[int], list[int]]]


def judge(
    table: pa.Table, where: Where, *, known: Iterable[str] = (), strangers_are_bad: bool = False
) -> Judged:
    """Look at all rows. With `strangers_are_bad` so is whoever waits for a name that is neither
    here nor among the `known`."""
    where = lru_cache(maxsize=None)(where)
    table = table.sort_by("place") if not _is_sorted(table) else table
    good = table.filter(pc.is_null(table["reason"]))
    tasks, rejected = _without_doubles(good, where)
    _reject_behind_doubles(tasks, good, rejected, where)
    unknown = _unknown(tasks)
    bad = _bad_names(table, tasks)
    _reject_behind_bad(tasks, unknown, bad, where)
    if strangers_are_bad:
        _reject_strangers(tasks, unknown, dict.fromkeys(known))
    shape = _shape(tasks)
    for group, cycle in shape.cycles:
        text = cycle_text([tasks.name(number) for number in cycle], len(group))
        tasks.rejected |= dict.fromkeys(group, text)
    _reject_dependents(tasks, shape.graph, where)
    rejected |= {tasks.place(number): reason for number, reason in tasks.rejected.items()}
    return _summed_up(tasks, shape, rejected, unknown)


def _is_sorted(table: pa.Table) -> bool:
    places = table["place"].to_numpy()
    return bool(np.all(places[1:] > places[:-1]))


def _without_doubles(good: pa.Table, where: Where) -> tuple[_Tasks, dict[int, str]]:
    """The first row of each name, and what is wrong with the others, by place."""
    names = _whole(good["name"])
    encoded = names.dictionary_encode()
    rejected: dict[int, str] = {}
    if len(encoded.dictionary) < len(names):
        codes = encoded.indices.to_numpy()
        _, first = np.unique(codes, return_index=True)
        is_first = np.zeros(len(codes), bool)
        is_first[first] = True
        for row in np.flatnonzero(~is_first).tolist():
            place, earlier = good["place"][row].as_py(), good["place"][int(first[codes[row]])]
            stands = _stands(place, earlier.as_py(), where)
            rejected[place] = f"the name {shown(names[row].as_py())} stands {stands} already"
        good = good.filter(pa.array(is_first))
    after = _whole(good["after"])
    lengths = pc.fill_null(pc.list_value_length(after), 0).to_numpy(zero_copy_only=False)
    before = pc.index_in(after.flatten(), value_set=encoded.dictionary)
    before = pc.fill_null(before, -1).to_numpy(zero_copy_only=False)
    waiting = np.repeat(np.arange(len(good)), lengths)
    return _Tasks(good, encoded.dictionary, waiting, before), rejected


def _reject_behind_doubles(
    tasks: _Tasks, good: pa.Table, doubles: Mapping[int, str], where: Where
) -> None:
    """Reject tasks that wait for a name of which their own file's row was rejected: the row that
    counts is another file's, and another task."""
    if not doubles:
        return
    is_double = pc.is_in(good["place"], value_set=pa.array([*doubles], pa.int64()))
    rows = good.filter(is_double)
    places = zip(rows["name"].to_pylist(), rows["place"].to_pylist(), strict=True)
    by_file = {(where(place)[0], name): place for name, place in places}
    names = pa.array(dict.fromkeys(name for _, name in by_file), pa.string())
    numbers = pc.index_in(names, value_set=tasks.names).to_numpy(zero_copy_only=False)
    for edge in np.flatnonzero(np.isin(tasks.before, numbers)).tolist():
        number, before = int(tasks.waiting[edge]), int(tasks.before[edge])
        name, file = tasks.name(before), where(tasks.place(number))[0]
        place = by_file.get((file, name))
        if place is not None and where(tasks.place(before))[0] != file:
            tasks.rejected.setdefault(number, _behind(tasks, number, name, place, where))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return (
        combined if not isinstance(combined, pa.ChunkedArray) else pa.concat_arrays(combined.chunks)
    )


def _stands(place: int, earlier: int, where: Where) -> str:
    """Where something else is, seen from a place."""
    (file, _), (other, line) = where(place), where(earlier)
    return f"on line {line}" if file == other else f"in {other}:{line}"


def _unknown(tasks: _Tasks) -> dict[str, list[int]]:
    """Who waits for names that no good row has."""
    strange = np.flatnonzero(tasks.before < 0)
    if not len(strange):
        return {}
    names = _whole(tasks.table["after"]).flatten().take(pa.array(strange)).to_pylist()
    unknown: dict[str, list[int]] = {}
    for name, number in zip(names, tasks.waiting[strange].tolist(), strict=True):
        unknown.setdefault(name, []).append(number)
    return unknown


def _bad_names(table: pa.Table, tasks: _Tasks) -> dict[str, int]:
    """The places of names that were rejected and that no good row has."""
    if len(tasks.table) == len(table):
        return {}
    is_bad = pc.and_(pc.is_valid(table["reason"]), pc.is_valid(table["name"]))
    bad = table.filter(is_bad)
    named: dict[str, int] = {}
    for name, place in zip(bad["name"].to_pylist(), bad["place"].to_pylist(), strict=True):
        named.setdefault(name, place)
    return named


def _reject_behind_bad(
    tasks: _Tasks, unknown: dict[str, list[int]], bad: Mapping[str, int], where: Where
) -> None:
    for name in [name for name in unknown if name in bad]:
        for number in unknown.pop(name):
            tasks.rejected.setdefault(number, _behind(tasks, number, name, bad[name], where))


def _behind(tasks: _Tasks, number: int, name: str, place: int, where: Where) -> str:
    stands = _stands(tasks.place(number), place, where).removeprefix("on ").removeprefix("in ")
    return f"waits for {shown(name)}, which was rejected ({stands})"


def _reject_strangers(
    tasks: _Tasks, unknown: Mapping[str, list[int]], known: Mapping[str, None]
) -> None:
    for name, waiting in unknown.items():
        if name not in known:
            reason = f"waits for {shown(name)}, which neither the file nor the broker has"
            for number in waiting:
                tasks.rejected.setdefault(number, reason)


def _shape(tasks: _Tasks) -> _Shape:
    count = len(tasks.table)
    inside = tasks.before >= 0
    waiting, before = tasks.waiting[inside], tasks.before[inside]
    order = np.argsort(before, kind="stable")
    begins = np.concatenate(([0], np.cumsum(np.bincount(before, minlength=count))))
    waits = np.bincount(waiting, minlength=count)
    graph = Graph(_array(waits), _array(begins), _array(waiting[order]), {}, ordered=False)
    levels = levels_of(graph)
    return _Shape(graph, levels, cycles_of(graph, levels))


def _array(numbers: Numbers) -> array[int]:
    """What plain Python walks faster than numpy's."""
    return array("I", numbers.astype(np.uint32).tobytes())


def _reject_dependents(tasks: _Tasks, graph: Graph, where: Where) -> None:
    """Whoever waits for a rejected task is rejected too."""
    line = list(tasks.rejected)
    for number in line:  # grows while it is walked
        for dependent in graph.dependents_of(number):
            if dependent not in tasks.rejected:
                name, place = tasks.name(number), tasks.place(number)
                tasks.rejected[dependent] = _behind(tasks, dependent, name, place, where)
                line.append(dependent)


def _summed_up(
    tasks: _Tasks, shape: _Shape, rejected: dict[int, str], unknown: Mapping[str, list[int]]
) -> Judged:
    levels = shape.levels
    order = np.frombuffer(levels.order, np.uint32)
    level = np.repeat(np.arange(len(levels.sizes)), levels.sizes)
    if tasks.rejected:
        stays = np.ones(len(tasks.table), bool)
        stays[list(tasks.rejected)] = False
        order, level = order[stays[order]], level[stays[order]]
    lengths = np.bincount(tasks.waiting, minlength=len(tasks.table))
    return Judged(
        places=tasks.table["place"].to_numpy()[order],
        levels=level,
        rejected=rejected,
        tasks=len(tasks.table),
        edges=len(tasks.waiting),
        roots=int(np.count_nonzero(lengths == 0)),
        sizes=levels.sizes,
        services=_services(tasks.table),
        unknown={name: len(waiting) for name, waiting in unknown.items()},
        duplicates=len(rejected) - len(tasks.rejected),
        cycles=[[tasks.name(number) for number in cycle] for _, cycle in shape.cycles],
        critical_path=_critical_path(tasks, shape.graph, levels),
    )


def _services(table: pa.Table) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for found in pc.value_counts(table["terms"]).to_pylist():
        counts[service_in(found["values"])] += found["counts"]
    return dict(counts.most_common())


def _critical_path(tasks: _Tasks, graph: Graph, levels: Levels) -> Path:
    """The longest chain: by time where all tasks say theirs, else by the number of tasks."""
    seconds = tasks.table["seconds"]
    is_timed = bool(levels.order) and not seconds.null_count
    costs = seconds.to_pylist() if is_timed else [1.0] * len(tasks.table)
    begins = [0.0] * len(costs)
    came_from = array("q", [-1]) * len(costs)
    for number in levels.order:
        ends = begins[number] + costs[number]
        for dependent in graph.dependents_of(number):
            if ends > begins[dependent]:
                begins[dependent] = ends
                came_from[dependent] = number
    last = max(levels.order, key=lambda number: begins[number] + costs[number], default=-1)
    total = begins[last] + costs[last] if is_timed else None
    chain: list[str] = []
    while last >= 0:
        chain.append(tasks.name(last))
        last = came_from[last]
    return Path(chain[::-1], total)
