"""The walk along the graph, compared with plain recursion on random graphs."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
import pytest

from taskyard.pipeline.fold.columns import Ints, Number
from taskyard.pipeline.fold.graph import Chained, KnownPlaces, Nodes, chains, last_before, place
from taskyard.pipeline.fold.links import Links
from taskyard.pipeline.fold.steps import STATE_NAMES

Pairs = list[tuple[int, int]]


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def links(pairs: Pairs, unknown: list[int] | None = None) -> Links:
    ordered = sorted(pairs)
    return Links(
        ints([node for node, _ in ordered]),
        ints([before for _, before in ordered]),
        ints(unknown or []),
    )


class RandomGraph:
    """A graph without cycles: each node waits for some with a smaller number."""

    def __init__(self, seed: int, count: int = 60) -> None:
        rng = Random(seed)
        self.count = count
        self.states = [rng.choice((*STATE_NAMES, "DONE", "DONE")) for _ in range(count)]
        self.submitted_ns = [rng.randrange(1000) for _ in range(count)]
        self.durations_ns = [rng.randrange(50) for _ in range(count)]
        self.timed = [rng.random() < 0.3 for _ in range(count)]
        pairs = {
            (node, rng.randrange(node))
            for node in range(1, count)
            for _ in range(rng.choice((0, 1, 3)))
        }
        self.pairs = sorted(pairs)
        self.unknown = [node for node in range(count) if rng.random() < 0.05]
        self.befores = [[one for node, one in self.pairs if node == mine] for mine in range(count)]
        self.campaigns = [rng.randrange(3) for _ in range(count)]
        self.ends_ns = [rng.randrange(1, 5000) if rng.random() < 0.8 else -1 for _ in range(count)]

    def nodes(self, known: KnownPlaces | None = None) -> Nodes:
        return Nodes(
            ints([STATE_NAMES.index(state) for state in self.states]),
            ints(self.submitted_ns),
            ints(self.durations_ns),
            np.array(self.timed),
            np.array([state in ("DONE", "CANCELLED") for state in self.states]),
            known,
        )


@pytest.mark.parametrize("seed", range(20))
def test_places_equal_recursion(seed: int) -> None:
    graph = RandomGraph(seed)

    @cache
    def level(node: int) -> int:
        return max((1 + level(one) for one in graph.befores[node]), default=0)

    @cache
    def path_ns(node: int) -> int:
        return graph.durations_ns[node] + max(map(path_ns, graph.befores[node]), default=0)

    @cache
    def earliest_ns(node: int) -> int:
        begins = [graph.submitted_ns[node], *map(earliest_ns, graph.befores[node])]
        return graph.durations_ns[node] + max(begins)

    @cache
    def has_open(node: int) -> bool:
        is_open = [graph.states[one] != "DONE" for one in graph.befores[node]]
        return any(is_open) or node in graph.unknown

    @cache
    def can_run(node: int) -> bool:
        """Return whether the node, or a node that blocks it, can still run."""
        state = graph.states[node]
        if state != "BLOCKED":
            return state in ("DELAYED", "READY", "LEASED")
        is_delayed = graph.timed[node] and not has_open(node)
        return is_delayed or node in graph.unknown or any(map(can_run, graph.befores[node]))

    @cache
    def is_final(node: int) -> bool:
        is_own = graph.states[node] in ("DONE", "CANCELLED") and node not in graph.unknown
        return is_own and all(map(is_final, graph.befores[node]))

    found = place(graph.nodes(), links(graph.pairs, graph.unknown))
    every = range(graph.count)
    assert found.level.is_known.all()
    assert found.level.values.tolist() == [level(node) for node in every]
    assert found.path_ns.tolist() == [path_ns(node) for node in every]
    assert found.earliest_ns.tolist() == [earliest_ns(node) for node in every]
    assert found.is_final.tolist() == [is_final(node) for node in every]
    counts = [len(graph.befores[node]) + graph.unknown.count(node) for node in every]
    assert found.waits_for.tolist() == counts
    delayed = [graph.states[n] == "BLOCKED" and graph.timed[n] and not has_open(n) for n in every]
    assert [STATE_NAMES[state] for state in found.state] == [
        "DELAYED" if is_delayed else state
        for state, is_delayed in zip(graph.states, delayed, strict=True)
    ]
    assert found.is_behind_failure.tolist() == [
        graph.states[n] == "BLOCKED" and not delayed[n] and has_open(n) and not can_run(n)
        for n in every
    ]


@pytest.mark.parametrize("seed", range(10))
def test_places_of_final_tasks_can_be_given(seed: int) -> None:
    """A walk over the tasks behind final ones finds the same places."""
    graph = RandomGraph(seed)
    graph.unknown = []
    graph.states = [
        "DONE" if node < graph.count // 2 else graph.states[node] for node in range(graph.count)
    ]
    whole = place(graph.nodes(), links(graph.pairs))
    final = np.flatnonzero(whole.is_final)
    assert len(final) >= graph.count // 2
    known = KnownPlaces(
        final, whole.level.values[final], whole.path_ns[final], whole.earliest_ns[final]
    )
    rest = [pair for pair in graph.pairs if not whole.is_final[pair[0]]]
    found = place(graph.nodes(known), links(rest))
    for name in ("state", "is_behind_failure", "is_final", "path_ns", "earliest_ns"):
        assert (getattr(found, name) == getattr(whole, name)).all(), name
    assert (found.level.values == whole.level.values).all()


def test_cycle_and_tasks_behind_it_have_no_level() -> None:
    nodes = Nodes(ints([0, 0, 0, 0]), ints([0] * 4), ints([1, 2, 4, 8]), *np.zeros((2, 4), bool))
    found = place(nodes, links([(1, 0), (1, 2), (2, 1), (3, 2)]))
    assert found.level.is_known.tolist() == [True, False, False, False]
    assert not found.is_final.any()


@pytest.mark.parametrize("seed", range(20))
def test_chains_equal_plain_python(seed: int) -> None:
    graph = RandomGraph(seed)
    ends = graph.ends_ns
    expected: list[tuple[int, int, int]] = []
    for campaign in range(3):
        own = [node for node in range(graph.count) if graph.campaigns[node] == campaign]
        begin_ns = min(graph.submitted_ns[node] for node in own)
        way: list[int] = []
        candidates = [node for node in own if ends[node] >= 0]
        while candidates:
            way.append(max(candidates, key=lambda node: (ends[node], -node)))
            lasts = sorted((ends[node], -node) for node in graph.befores[way[-1]])[-1:]
            candidates = [
                -node for end, node in lasts if end >= 0 and (-node in own or end > begin_ns)
            ]
        expected += [(campaign, at, node) for at, node in enumerate(way[::-1], start=1)]
    ended = Number(ints(ends), ints(ends) >= 0)
    begins = [
        min(graph.submitted_ns[node] for node in range(graph.count) if graph.campaigns[node] == one)
        for one in range(3)
    ]

    def first_of(rows: Ints) -> int:
        return int(rows.min())

    before = last_before(links(graph.pairs), ended, first_of)
    tasks = Chained(ints(graph.campaigns), ended, before)
    found = chains(tasks, ints(begins), ints([0, 1, 2]), first_of)
    rows = zip(found.campaign.tolist(), found.position.tolist(), found.node.tolist(), strict=True)
    assert list(rows) == expected
