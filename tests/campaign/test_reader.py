"""Whole campaigns: the summary, the order, the rejected rows, and the examples."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.campaign import graph, reader
from taskyard.campaign.graph import (
    Duplicate,
    GraphSummary,
    UnknownDependency,
    graph_of,
    levels_of,
    shortest_cycles,
    strong_components,
)
from taskyard.campaign.lines import InvalidCampaign
from taskyard.campaign.reader import (
    LoadedCampaign,
    RejectedRow,
    read_campaign,
    reject_unknown_dependencies,
    write_rejected,
)
from taskyard.campaign.task_spec import TaskSpec, to_row
from tests.campaign.test_task_spec import task_specs

EXAMPLES = Path(__file__).parents[2] / "examples"

#: The dependencies of each task, by name.
Waits = dict[str, list[str]]


def write(path: Path, *lines: object) -> Path:
    """Encode a text as it is, anything else as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    return path


def plain(name: str, *after: str) -> dict[str, object]:
    return {"name": name, "argv": ["true"], "after": list(after)}


def load(tmp_path: Path, *lines: object) -> LoadedCampaign:
    loaded = read_campaign(write(tmp_path / "c.jsonl", *lines))
    for rejected in loaded.rejected:
        rejected.file = "c"
    return loaded


def load_graph(tmp_path: Path, waits: Waits) -> LoadedCampaign:
    return load(tmp_path, *(plain(name, *after) for name, after in waits.items()))


def names(loaded: LoadedCampaign) -> list[str]:
    return [spec.name for spec in loaded.specs]


def test_summary_counts_tasks_edges_levels_and_services(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        plain("a"),
        plain("b", "a"),
        plain("c", "a"),
        {"name": "d", "call": "m:f", "after": ["a"]},
        {"name": "e", "payload": "", "after": ["b", "c", "d"]},
        {"name": "f", "payload": "", "service": "own"},
    )
    assert loaded.summary == GraphSummary(
        tasks=6,
        edges=6,
        roots=2,
        depth=3,
        width=3,
        widest=2,
        services={"exec": 3, "call": 1, "default": 1, "own": 1},
        unknown=[],
    )
    assert names(loaded) == ["a", "b", "c", "d", "e", "f"]
    json.dumps(msgspec.to_builtins(loaded.summary))


def test_summary_of_an_empty_campaign_is_empty(tmp_path: Path) -> None:
    summary = GraphSummary(
        tasks=0, edges=0, roots=0, depth=0, width=0, widest=0, services={}, unknown=[]
    )
    assert load(tmp_path).summary == summary


def test_second_task_of_a_name_is_rejected_and_the_first_is_kept(tmp_path: Path) -> None:
    loaded = load(tmp_path, plain("a"), plain("b", "a"), "", plain("a", "b"))
    assert names(loaded) == ["a", "b"]
    assert [str(rejected) for rejected in loaded.rejected] == [
        "c:4: duplicate name 'a', first on line 1"
    ]
    assert loaded.summary.duplicates == [Duplicate("a", line_first=1, line=4)]
    assert loaded.summary.cycles == []


def test_cycle_is_named_and_rejected_with_all_behind_it(tmp_path: Path) -> None:
    loaded = load_graph(
        tmp_path,
        {
            "root": [],
            "a": ["c", "root"],
            "b": ["a"],
            "c": ["b"],
            "behind": ["b"],
            "last": ["behind"],
        },
    )
    assert names(loaded) == ["root"]
    assert loaded.summary.cycles == [["a", "c", "b"]]
    around = "is in a cycle: 'a' after 'c' after 'b' after 'a'"
    assert [str(rejected) for rejected in loaded.rejected] == [
        f"c:2: {around}",
        f"c:3: {around}",
        f"c:4: {around}",
        "c:5: waits for 'b', which was rejected (line 3)",
        "c:6: waits for 'behind', which was rejected (line 5)",
    ]


def test_separate_cycles_are_reported_with_their_shortest_path(tmp_path: Path) -> None:
    loaded = load_graph(
        tmp_path,
        # A long cycle a, b, c, d, a short one c, d, and a separate one x, y.
        {"a": ["b"], "b": ["c"], "c": ["d"], "d": ["a", "c"], "x": ["y", "a"], "y": ["x"]},
    )
    assert loaded.summary.cycles == [["c", "d"], ["x", "y"]]
    assert loaded.rejected[0].reason == (
        "is in a cycle (4 tasks wait for each other): 'c' after 'd' after 'c'"
    )


def test_cycle_that_waits_for_another_cycle_is_separate(tmp_path: Path) -> None:
    loaded = load_graph(tmp_path, {"a": ["b", "x"], "b": ["a"], "x": ["y"], "y": ["x"]})
    assert loaded.summary.cycles == [["a", "b"], ["x", "y"]]


def test_long_cycle_is_cut_in_the_message(tmp_path: Path) -> None:
    waits: Waits = {f"t{number}": [f"t{(number + 1) % 1000}"] for number in range(1000)}
    loaded = load_graph(tmp_path, waits)
    assert len(loaded.summary.cycles[0]) == 1000
    assert loaded.rejected[0].reason == (
        "is in a cycle: 't0' after 't1' after 't2' after 't3' after 't4' after … 991 more … "
        "after 't996' after 't997' after 't998' after 't999' after 't0'"
    )


def test_chain_of_many_tasks_is_walked_without_recursion(tmp_path: Path) -> None:
    count = 5000
    waits = {str(number): [str(number + 1)] for number in range(count)}
    loaded = load_graph(tmp_path, {**waits, str(count): []})
    assert (loaded.summary.depth, loaded.summary.width) == (count + 1, 1)
    assert names(loaded) == [str(number) for number in range(count, -1, -1)]
    loaded = load_graph(tmp_path, {**waits, str(count): ["0"]})
    assert [len(cycle) for cycle in loaded.summary.cycles] == [count + 1]


def test_unknown_names_are_reported_and_reject_no_task(tmp_path: Path) -> None:
    loaded = load_graph(tmp_path, {"a": ["x"], "b": ["a", "x", "y"], "c": []})
    assert loaded.summary.unknown == [
        UnknownDependency("x", tasks=2, line=1),
        UnknownDependency("y", 1, 2),
    ]
    assert (names(loaded), loaded.rejected) == (["a", "b", "c"], [])
    assert loaded.summary.roots == 1


def test_tasks_with_unknown_dependencies_can_be_rejected_later(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, "x", *(plain("c", "b"), plain("a", "y"), plain("b", "a"), plain("d", "z"))
    )
    left = reject_unknown_dependencies(loaded, ["y", "q"])
    assert (names(left), list(left.lines)) == (["d"], [5])
    assert [rejected.line for rejected in left.rejected] == [1, 2, 3, 4]
    assert [rejected.reason for rejected in left.rejected[1:]] == [
        "waits for 'b', which was rejected (line 4)",
        "waits for 'y', which neither the file nor the broker has",
        "waits for 'a', which was rejected (line 3)",
    ]
    assert names(loaded) == ["a", "d", "b", "c"]


def test_task_that_waits_for_a_bad_line_is_rejected_with_it(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        plain("late", "behind"),
        {"name": "bad", "argv": "no list"},
        plain("behind", "good", "bad"),
        plain("good"),
    )
    assert names(loaded) == ["good"]
    assert loaded.summary.unknown == []
    assert [str(rejected) for rejected in loaded.rejected] == [
        "c:1: waits for 'behind', which was rejected (line 3)",
        'c:2: "argv" must be a list of words, such as ["sleep", "1"], not \'no list\'',
        "c:3: waits for 'bad', which was rejected (line 2)",
    ]


def test_name_of_a_bad_line_rejects_nothing_if_a_good_line_has_it(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"name": "a"}, plain("a"), plain("b", "a"))
    assert names(loaded) == ["a", "b"]
    assert len(loaded.rejected) == 1


def test_file_in_order_stays_in_its_order(tmp_path: Path) -> None:
    waits: Waits = {"a": [], "b": ["a"], "c": [], "d": ["b", "c"], "e": []}
    assert names(load_graph(tmp_path, waits)) == list(waits)


def test_file_with_too_many_bad_lines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reader, reader):
        monkeypatch.setattr(module, "REJECTED_MAX", 3)
    with pytest.raises(InvalidCampaign, match=r"more than 3 bad lines, the first: .*:1: "):
        load(tmp_path, *["x"] * 9)


# --- rejected rows


def test_rejected_lines_are_written_beside_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", "nonsense", plain("a", "b"), {"name": "b", "due": []})
    (tmp_path / "c.jsonl.rejected.jsonl").write_text("of an earlier run")
    (written,) = write_rejected(read_campaign(path).rejected)
    assert written == tmp_path / "c.jsonl.rejected.jsonl"
    rejected = [json.loads(line) for line in written.read_text().splitlines()]
    assert [list(one) for one in rejected] == [["file", "line", "reason", "raw"]] * 3
    assert [one["raw"] for one in rejected] == [
        "nonsense",
        plain("a", "b"),
        {"name": "b", "due": []},
    ]
    assert {one["file"] for one in rejected} == {str(path)}
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, written.name]


def test_rejected_lines_of_stdin_are_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (written,) = write_rejected([RejectedRow("stdin", 1, "why", b"\xff")])
    assert written.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["stdin.rejected.jsonl"]


def test_rejected_lines_that_can_not_be_written_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidCampaign, match=r"rejected\.jsonl: No such file or directory"):
        write_rejected([RejectedRow(str(tmp_path / "missing" / "c"), 1, "why", "x")])


# --- against a naive implementation


@st.composite
def graphs(draw: st.DrawFn) -> Waits:
    """Draw a graph of a few tasks, with cycles and unknown names."""
    count = draw(st.integers(0, 9))
    ends = st.tuples(st.integers(0, max(count - 1, 0)), st.integers(0, count))
    waits: Waits = {str(number): [] for number in range(count)}
    for task, before in draw(st.lists(ends, max_size=20)) if count else []:
        if task != before and str(before) not in waits[str(task)]:
            waits[str(task)].append(str(before))
    return waits


def ancestors(waits: Waits, name: str) -> set[str]:
    found: set[str] = set()
    left = list(waits.get(name, []))
    while left:
        before = left.pop()
        if before not in found:
            found.add(before)
            left += waits.get(before, [])
    return found


def naive_depth(waits: Waits, name: str) -> int:
    return 1 + max(
        (naive_depth(waits, before) for before in waits[name] if before in waits), default=0
    )


def steps_around(waits: Waits, name: str) -> int:
    """Return the fewest steps from a task back to itself."""
    ring, steps = {name}, 0
    while True:
        ring, steps = {before for one in ring for before in waits.get(one, [])}, steps + 1
        if name in ring:
            return steps


@given(graphs())
def test_summary_agrees_with_a_naive_one(waits: Waits) -> None:
    specs = [TaskSpec(name=name, argv=["x"], after=tuple(waits[name])) for name in waits]
    reading = reader._CampaignReader("c")  # noqa: SLF001  # without a file there is no other way in
    for line, spec in enumerate(specs, start=1):
        reading.add_row(line, to_row(spec))
    loaded = reader._check_graph(reading)  # noqa: SLF001

    cyclic = {name for name in waits if name in ancestors(waits, name)}
    good = {name for name in waits if name not in cyclic and not ancestors(waits, name) & cyclic}
    assert set(names(loaded)) == good
    assert {rejected.line for rejected in loaded.rejected} == {
        int(name) + 1 for name in waits if name not in good
    }
    depths = [naive_depth(waits, name) for name in good]
    assert loaded.summary.depth == max(depths, default=0)
    assert loaded.summary.width == max(map(depths.count, depths), default=0)
    strangers = {before for after in waits.values() for before in after} - set(waits)
    assert {one.name for one in loaded.summary.unknown} == strangers
    check_order(loaded)
    check_cycles(waits, loaded.summary.cycles, cyclic)


def check_order(loaded: LoadedCampaign) -> None:
    """Check that dependencies come first."""
    places = {name: place for place, name in enumerate(names(loaded))}
    for place, spec in enumerate(loaded.specs):
        assert all(places.get(before, -1) < place for before in spec.after)


def check_cycles(waits: Waits, cycles: list[list[str]], cyclic: set[str]) -> None:
    """One real and shortest cycle for each group of tasks that lead to each other."""
    groups = {
        frozenset(
            other
            for other in cyclic
            if other in ancestors(waits, name) and name in ancestors(waits, other)
        )
        for name in cyclic
    }
    assert len(cycles) == len(groups)
    for cycle in cycles:
        for name, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert following in waits[name]
        (group,) = [group for group in groups if cycle[0] in group]
        assert len(cycle) == min(steps_around(waits, name) for name in group)


def test_search_for_shortest_cycles_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "CYCLE_STEPS_MAX", 3000)
    size, groups = 200, [range(200), range(200, 400), range(400, 600)]
    looked = 0

    def followers(number: int) -> list[int]:
        """Return the next ten numbers, cyclically within the group."""
        nonlocal looked
        looked += 10
        return [number // size * size + other % size for other in range(number + 1, number + 11)]

    assert strong_components(followers, bytearray(b"\1") * 600) == [list(group) for group in groups]
    looked = 0
    found = shortest_cycles(followers, groups)
    assert [len(cycle) for cycle in found] == [20, 20, 20]
    assert looked <= 3000 + 3 * 2 * 10 * size


@given(st.lists(task_specs(), max_size=6, unique_by=lambda spec: spec.name))
def test_campaign_that_is_written_as_json_lines_is_read_again(specs: list[TaskSpec]) -> None:
    lines = [msgspec.json.decode(msgspec.json.encode(to_row(spec))) for spec in specs]
    reading = reader._CampaignReader("c")  # noqa: SLF001  # without a file there is no other way in
    for number, line in enumerate(lines, start=1):
        reading.add_row(number, line)
    assert reading.specs == specs
    assert reading.rejected == []


# --- the examples, and the cost of imports


@pytest.mark.parametrize(
    ("name", "tasks", "depth"),
    [
        ("first.jsonl", 12, 6),
        ("failing.jsonl", 5, 3),
        ("first.csv", 6, 4),
        ("first.dwork", 4, 3),
        ("workflow.json", 4, 3),
        ("cmds.txt", 5, 1),
    ],
)
def test_examples_are_good(name: str, tasks: int, depth: int) -> None:
    loaded = read_campaign(EXAMPLES / name)
    assert (loaded.rejected, loaded.summary.unknown) == ([], [])
    assert (loaded.summary.tasks, loaded.summary.depth) == (tasks, depth)


def test_examples_are_all_tested() -> None:
    tested = ["cmds.txt", "failing.jsonl", "first.csv", "first.dwork", "first.jsonl"]
    tested += ["workflow.json"]
    suffixes = (".jsonl", ".csv", ".dwork", ".json", ".parquet", ".txt")
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in suffixes) == tested


def test_pyarrow_is_not_loaded_for_a_file_that_is_not_parquet() -> None:
    code = (
        "import sys; from taskyard.campaign.reader import read_campaign;"
        f"read_campaign({str(EXAMPLES / 'first.csv')!r}); sys.exit('pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_levels_leave_out_tasks_behind_a_cycle() -> None:
    specs = [
        TaskSpec(name="a", argv=["x"], after=("b",)),
        TaskSpec(name="b", argv=["x"], after=("a",)),
        TaskSpec(name="c", argv=["x"], after=("a",)),
        TaskSpec(name="d", argv=["x"]),
    ]
    levels = levels_of(graph_of(specs, {"a": 0, "b": 1, "c": 2, "d": 3}))
    assert (list(levels.order), levels.sizes) == ([3], [1])
