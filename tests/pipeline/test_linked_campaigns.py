"""Dependencies between campaigns: every column of the graph, compared with plain Python.

A seeded history runs on a real scheduler: five campaigns whose tasks wait for one another, with
failures, cancellations, and names that are submitted later or again. The expected values are
computed from its records by recursion. The scheduler itself names the tasks blocked by a failure.
"""

from __future__ import annotations

import random
from contextlib import closing
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from msgspec import Struct, field

from taskyard.core import graph, records
from taskyard.core.effects import Accepted
from taskyard.core.events import DuplicatePolicy, Outcome, UnknownPolicy
from taskyard.core.identity import spelling, split
from taskyard.core.states import TaskState
from taskyard.journal import compaction, history, history_arrow, recovery
from taskyard.journal.sqlite import SqliteStore
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    CRITICAL_PATH,
    EDGES,
    EVENTS,
    TASKS,
    WORKERS,
)
from taskyard.pipeline.fold.whole import fold_whole
from taskyard.pipeline.jobs import broker_tables, report
from taskyard.pipeline.jobs import history as history_job
from taskyard.pipeline.jobs.history import HistoryJob, HistoryResult
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.tables import TableStore
from tests.journal.scenarios import WritingYard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from taskyard.journal.store import Store

#: Whole runs of `pipeline history`, several times slower on a busy machine.
pytestmark = pytest.mark.timeout(900)

CAMPAIGNS = (b"A", b"B", b"C", b"D", b"")
#: A campaign without links to others.
EXCLUSIVE = b"alone"
#: Campaigns of one task each, written before the first run. Each task waits for that of the
#: campaign before. The first one fails before the second run.
CHAINED = (b"first", b"..=%2F [x] {y}*?", b"2024")
#: A campaign that is never changed after the first run.
UNCHANGED = b"unchanged"
SEED = 29
ROUNDS = 60
WORKER = b"w"
#: A worker of another service, which only the first chained task needs.
LATE_WORKER = b"late worker"
LATE_SERVICE = b"late"
#: Time between records of the chained campaigns.
STEP_SECONDS = 1.25


class Node(Struct):
    """One generation of a name, from the records."""

    campaign: str
    task: str
    generation: int
    submitted_ns: int
    state: str = "open"
    after: dict[int, None] = field(default_factory=dict)
    #: Dependencies that were never submitted.
    unknown: dict[str, None] = field(default_factory=dict)
    leased_ns: int | None = None
    ran_ns: int = 0
    is_leased: bool = False
    was_leased: bool = False
    ended_ns: int | None = None


class Truth:
    """The graph of a journal, built record by record. Nodes are numbers."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.newest: dict[str, int] = {}
        self._generations: dict[tuple[str, str], int] = {}

    def fold(self, record: records.AnyRecord) -> None:
        if isinstance(record, records.Submitted):
            self._submitted(record)
        elif isinstance(record, records.Extended | records.Returned) and record.after is not None:
            for name, after in zip(record.names, record.after, strict=True):
                self._wait(self.newest[name.decode()], after)
        if isinstance(record, records.Leased):
            for node in self._named(record):
                node.leased_ns, node.is_leased, node.was_leased = record.at_ns, True, True
        elif isinstance(record, _SETTLING):
            for node in self._named(record):
                self._settled(node, record)

    def _named(self, record: Any) -> Iterator[Node]:
        return (self.nodes[self.newest[name.decode()]] for name in record.names)

    def _submitted(self, record: records.Submitted) -> None:
        submission = record.submission
        for index, name in enumerate(submission.names):
            key = (submission.terms_of(index).campaign.decode(), name.decode())
            self._generations[key] = self._generations.get(key, 0) + 1
            number = len(self.nodes)
            self.nodes.append(Node(*key, self._generations[key], record.at_ns))
            self.newest[key[1]] = number
            for node in self.nodes:  # tasks that waited for the name before its submission
                if key[1] in node.unknown:
                    del node.unknown[key[1]]
                    node.after[number] = None
        for column in (submission.after, record.after_done):
            for name, after in zip(submission.names, column or [], strict=column is not None):
                self._wait(self.newest[name.decode()], after)

    def _wait(self, number: int, after: list[bytes]) -> None:
        for name in after:
            before = self.newest.get(name.decode())
            if before is None:
                self.nodes[number].unknown[name.decode()] = None
            else:
                self.nodes[number].after[before] = None

    def _settled(self, node: Node, record: records.AnyRecord) -> None:
        if node.is_leased:
            node.ran_ns = record.at_ns - (node.leased_ns or 0)
            node.is_leased = False
        state = _ENDS.get(type(record), "open")
        node.state, node.ended_ns = state, None if state == "open" else record.at_ns

    def level(self, number: int) -> int:
        return max((1 + self._level(before) for before in self.nodes[number].after), default=0)

    def path_ns(self, number: int) -> int:
        node = self.nodes[number]
        return node.ran_ns + max((self._path_ns(before) for before in node.after), default=0)

    def earliest_ns(self, number: int) -> int:
        node = self.nodes[number]
        befores = [self._earliest_ns(before) for before in node.after]
        return node.ran_ns + max([node.submitted_ns // 1000 * 1000, *befores])

    def remember(self) -> None:
        """Compute all columns after the last record."""
        self._level, self._path_ns = cache(self.level), cache(self.path_ns)
        self._earliest_ns = cache(self.earliest_ns)

    def chain(self, campaign: str) -> list[int]:
        own = [number for number, node in enumerate(self.nodes) if node.campaign == campaign]
        begin_us = min(self.nodes[number].submitted_ns for number in own) // 1000
        ends_us = {
            number: (node.ended_ns or 0) // 1000
            for number, node in enumerate(self.nodes)
            if node.ended_ns is not None and node.was_leased
        }
        way: list[int] = []
        candidates = [number for number in own if number in ends_us]
        while candidates:
            last_us = max(ends_us[number] for number in candidates)
            (last,) = [number for number in candidates if ends_us[number] == last_us]
            way.append(last)
            candidates = [
                before
                for before in self.nodes[last].after
                if before in ends_us
                and (self.nodes[before].campaign == campaign or ends_us[before] > begin_us)
            ]
        return way[::-1]


_ENDS: dict[type, str] = {
    records.Finished: "DONE",
    records.Failed: "FAILED",
    records.TaskExpired: "FAILED",
    records.Cancelled: "CANCELLED",
}
_SETTLING: tuple[type, ...] = (
    *_ENDS,
    records.Postponed,
    records.Returned,
    records.LeaseExpired,
    records.Retried,
)


class HistoryWriter:
    """Writes a random history in rounds. No two records have the same time."""

    def __init__(self, store: Store) -> None:
        self.yard = WritingYard(store)
        self._random = random.Random(SEED)
        self._names: list[bytes] = []
        self._promised: list[tuple[bytes, bytes]] = []
        self.yard.join(WORKER)

    def write(self, rounds: int) -> None:
        for _ in range(rounds):
            self._pass_time()
            self._submit()
            for name in self.yard.take(WORKER, self._random.randrange(4)):
                self._pass_time()
                failed = self._random.random() < 0.25
                outcome = Outcome.FAILED_FINAL if failed else Outcome.DONE
                self.yard.report(WORKER, name, outcome, texts=[b"text"])
            self._pass_time()
            self._steer()

    def write_chain(self) -> None:
        """Submit the chained campaigns, and one that stays unchanged."""
        after: list[list[bytes]] = [[]]
        for campaign in CHAINED:
            self.yard.later(STEP_SECONDS)
            self.yard.submit(b"only", after=after, campaign=campaign, service=LATE_SERVICE)
            after = [[spelling(campaign, b"only")]]
        self.yard.later(STEP_SECONDS)
        self.yard.submit(b"only", campaign=UNCHANGED, service=LATE_SERVICE, priority=-1)

    def fail_chain(self) -> None:
        """Let the first chained task fail."""
        self.yard.later(STEP_SECONDS)
        self.yard.join(LATE_WORKER, services=(LATE_SERVICE,))
        (taken,) = self.yard.take(LATE_WORKER)
        self.yard.later(STEP_SECONDS)
        self.yard.report(LATE_WORKER, taken, Outcome.FAILED_FINAL, texts=[b"no"])

    def _pass_time(self) -> None:
        self.yard.later(self._random.randrange(1, 3_000_000_000) / 1e9)

    def _submit(self) -> None:
        rng = self._random
        campaign = rng.choice(CAMPAIGNS)
        name = b"t%d" % len(self._names)
        if self._promised and rng.random() < 0.5:
            campaign, name = self._promised.pop()
        usable = [one for one in self._names[-15:] if self._is_usable(one)]
        after = rng.sample(usable, min(len(usable), rng.choice((0, 1, 1, 2, 3))))
        if rng.random() < 0.1:
            promised = (rng.choice(CAMPAIGNS), b"promised-%d" % len(self._names))
            self._promised.append(promised)
            after.append(spelling(*promised))
        effects = self.yard.submit(
            name, after=[after], campaign=campaign, unknown=UnknownPolicy.WAIT
        )
        if isinstance(effects[0], Accepted):  # otherwise it would have closed a cycle
            self._names.append(spelling(campaign, name))
        self.yard.submit(name + b" alone", campaign=EXCLUSIVE)

    def _is_usable(self, name: bytes) -> bool:
        task = self.yard.scheduler.ledger.tasks[name]
        return task.state is not TaskState.CANCELLED

    def _steer(self) -> None:
        rng = self._random
        name = rng.choice(self._names)
        action = rng.random()
        if action < 0.1:
            self.yard.cancel(name)
        elif action < 0.2:
            self.yard.retry(name)
        elif action < 0.4:  # resubmit it if it has ended, otherwise add a dependency
            campaign = self.yard.scheduler.ledger.tasks[name].terms.campaign
            before = rng.choice(self._names)
            after = [[before]] if self._is_usable(before) else [[b"unknown"]]
            terms = {
                "campaign": campaign,
                "repeat": DuplicatePolicy.EXTEND,
                "unknown": UnknownPolicy.DONE,
            }
            self.yard.submit(split(name, campaign), after=after, **terms)


class Snapshot(Struct):
    """The tables after a run."""

    #: The parts that were new, and the number of campaigns with new events.
    result: HistoryResult
    #: Tasks that are blocked by a failure.
    behind: list[str]
    #: The files of tasks that are final, with their inodes.
    final: dict[Path, int]
    #: The files of all events, with their inodes.
    event_files: dict[Path, int]


class LinkedHistory(Struct):
    state: Path
    truth: Truth
    #: Names of tasks that are stuck, by the scheduler.
    stuck: list[str]
    #: After the first and the second run.
    snapshots: list[Snapshot]


@pytest.fixture(scope="module")
def linked_history(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> LinkedHistory:
    """Return a state and its expected graph, with its tables in `tables`, built in two runs."""
    state = tmp_path_factory.mktemp("linked") / "odd [state] {x} %20"
    state.mkdir()
    snapshots = []
    with closing(SqliteStore(state)) as store:
        writer = HistoryWriter(store)
        for write_more in (writer.write_chain, writer.fail_chain):
            writer.write(ROUNDS // 2)
            write_more()
            compaction.export(state, store)
            snapshots.append(snapshot(spark, state, state.parent / "tables"))
        truth, number = Truth(), 0
        for row in store.rows():
            for record in recovery.records_of(row, number):
                truth.fold(record)
            number = row.record_last
    truth.remember()
    tasks = writer.yard.scheduler.ledger.tasks.values()
    failed = [task for task in tasks if task.state is TaskState.FAILED]
    stuck = sorted(name.decode() for name in graph.stuck(failed))
    return LinkedHistory(state, truth, stuck, snapshots)


def snapshot(spark: SparkSession, state: Path, out: Path) -> Snapshot:
    """Build the tables, and return what the run changed."""
    result = make_tables(state, out)
    rows = tables.read(spark, out, TASKS).where("is_behind_failure").select("task").collect()
    unchanged = (out / TASKS.name).glob("final-*.parquet")
    added = (out / EVENTS.name).glob("*.parquet")
    blocked = sorted(row["task"] for row in rows)
    return Snapshot(result, blocked, inodes(unchanged), inodes(added))


def inodes(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the inode of each file. A file that is written again gets another one."""
    return {path: path.stat().st_ino for path in paths}


def make_tables(state: Path, out: Path, spark: SparkSession | None = None) -> HistoryResult:
    job = HistoryJob(state, out)
    try:
        return job.run(spark)
    finally:
        job.close()


def check_tasks(frame: DataFrame, linked_history: LinkedHistory) -> None:
    """Compare every column of the graph."""
    truth = linked_history.truth
    found = {(row["campaign"], row["task"], row["generation"]): row for row in frame.collect()}
    assert len(found) == len(truth.nodes)
    for number, node in enumerate(truth.nodes):
        row = found[node.campaign, node.task, node.generation]
        waits_for = len(node.after) + len(node.unknown)
        assert (row["waits_for"], row["level"], row["path_ns"]) == (
            waits_for,
            truth.level(number),
            truth.path_ns(number),
        ), node
        earliest_us = truth.earliest_ns(number) // 1000
        assert row["earliest_end"].replace(tzinfo=UTC) == at_us(earliest_us), node
        # A task that was cancelled or has expired did not wait for its predecessors.
        assert row["state"] != "DONE" or row["earliest_end"] <= row["ended"], node
    behind = sorted(task for (_, task, _), row in found.items() if row["is_behind_failure"])
    assert behind == linked_history.stuck


def at_us(time_us: int) -> datetime:
    seconds, micros = divmod(time_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)


def check_paths(frame: DataFrame, linked_history: LinkedHistory, *campaigns: str) -> None:
    truth = linked_history.truth
    chained: dict[str, list[tuple[str, str, int]]] = {name: [] for name in campaigns}
    for row in sorted(frame.collect(), key=lambda row: row["position"]):
        task = (row["task_campaign"], row["task"], row["generation"])
        chained[row["campaign"]].append(task)
    assert chained == {
        name: [
            (truth.nodes[number].campaign, truth.nodes[number].task, truth.nodes[number].generation)
            for number in truth.chain(name)
        ]
        for name in campaigns
    }


def test_scenario_has_the_expected_links(linked_history: LinkedHistory) -> None:
    nodes = linked_history.truth.nodes
    assert {node.state for node in nodes} == {"open", "DONE", "FAILED", "CANCELLED"}
    crossing = {
        (node.campaign, nodes[before].campaign)
        for node in nodes
        for before in node.after
        if node.campaign != nodes[before].campaign
    }
    assert len(crossing) > 10
    assert any(node.generation > 1 for node in nodes)
    assert any(before > number for number, node in enumerate(nodes) for before in node.after)
    foreign = [
        name
        for name in ("A", "B", "C", "D", "")
        if any(nodes[number].campaign != name for number in linked_history.truth.chain(name))
    ]
    assert foreign
    assert len(linked_history.stuck) > 5


#: Columns that identify a row of a table.
KEYS = {
    "attempts": ("campaign", "task", "attempt", "leased_record"),
    "tasks": ("campaign", "task", "generation"),
    "workers": ("worker", "stay"),
    "critical_path": ("campaign", "position"),
}


def test_fold_of_the_whole_makes_the_tables_of_the_job(
    linked_history: LinkedHistory, tmp_path: Path
) -> None:
    files = source.find(linked_history.state, tmp_path)
    events, edges = files.read("events"), files.read("edges")
    out = linked_history.state.parent / "tables"
    folded = fold_whole(events, edges, "broker")
    for name in ("attempts", "tasks", "workers", "critical_path"):
        check_same(name, read_rows(out, name), getattr(folded, name).to_pylist())


def check_same(name: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    """Check that two tables have the same rows, in the columns of the first."""
    assert old
    columns = [one for one in old[0] if one != "broker"]
    tables_by_key = [
        {tuple(row[key] for key in KEYS[name]): [row[one] for one in columns] for row in rows}
        for rows in (old, new)
    ]
    assert len(tables_by_key[0]) == len(old) == len(new)
    assert tables_by_key[0] == tables_by_key[1]


def read_rows(out: Path, table: str) -> list[dict[str, Any]]:
    store = TableStore.open(Location.parse(out))
    return [row for uri in store.uris(table) for row in pq.read_table(uri).to_pylist()]


def test_tables_of_two_runs_follow_dependencies_across_campaigns(
    spark: SparkSession, linked_history: LinkedHistory
) -> None:
    out = linked_history.state.parent / "tables"
    check_tasks(tables.read(spark, out, TASKS), linked_history)
    names = [name.decode() for name in (*CAMPAIGNS, EXCLUSIVE, *CHAINED)]
    check_paths(tables.read(spark, out, CRITICAL_PATH), linked_history, *names)


def test_part_is_added_once(spark: SparkSession, linked_history: LinkedHistory) -> None:
    assert [one.result.parts for one in linked_history.snapshots] == [1, 1]
    state = linked_history.state
    parts = history.parts(state)
    assert len(parts) == 2
    first, second = (one.event_files for one in linked_history.snapshots)
    assert first
    assert first.items() <= second.items()
    for dataset in (EVENTS, EDGES):
        paths = [part.path(state) for part in parts]
        expected = history_arrow.read_table(paths, dataset.name).to_pylist()
        found = tables.read(spark, state.parent / "tables", dataset).toArrow().to_pylist()
        numbers = sorted((row["record"], row["task"] or "") for row in expected)
        assert sorted((row["record"], row["task"] or "") for row in found) == numbers


def test_executors_follow_dependencies_across_campaigns(
    spark: SparkSession,
    linked_history: LinkedHistory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    """Build the tables as for a large history. `test_history_job` does so for two campaigns."""
    if not pytestconfig.getoption("--whole"):
        pytest.skip("only with --whole")
    monkeypatch.setattr(history_job, "STEPS_OF_ONE_SHARE", 0)
    monkeypatch.setattr(history_job, "STEPS_PER_SHARE", 200)
    make_tables(linked_history.state, tmp_path / "tables", spark)
    check_tasks(tables.read(spark, tmp_path / "tables", TASKS), linked_history)


@pytest.mark.parametrize("is_large", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_report_counts_tasks_blocked_by_other_campaigns(
    small_spark: SparkSession,
    linked_history: LinkedHistory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_large: bool,
) -> None:
    """A large history is folded by the job of `pipeline history`, a small one in memory.

    `test_report` compares both ways without --whole.
    """
    monkeypatch.setattr(broker_tables, "FOLDED_BYTES_MAX", 0 if is_large else 1 << 30)
    chosen = report.find_campaign([source.find(linked_history.state, tmp_path)], "C")
    found = report.datasets(small_spark, chosen, tmp_path)
    assert (found.rows(TASKS) is None) == is_large
    facts = report.summarize(found)
    check_paths(found.frame(CRITICAL_PATH), linked_history, "C")
    newest = {truth.task: truth for truth in linked_history.truth.nodes}
    assert (
        facts.number("blocked")
        == sum(newest[name].campaign == "C" for name in linked_history.stuck)
        > 0
    )
    assert facts.guarantees.blocked_behind_failure == len(linked_history.stuck)
    assert facts.guarantees.is_clean
    assert 0 < facts.number("floor_ns") <= facts.makespan_ns
    check_workers(found)


def check_workers(found: report.ReportDatasets) -> None:
    """Check that the numbers of workers are those of the campaign, and less than all of them."""
    attempts = [row for row in found.frame(ATTEMPTS).collect() if row["campaign"] == "C"]
    whole = found.tables[0].arrow(found.spark, WORKERS, ["worker", "stay", "attempts"])
    for stay in found.workers.to_pylist():
        mine = [row for row in attempts if row["worker"] == stay["worker"]]
        assert stay["attempts"] == len(mine)
        assert stay["finished"] == sum(row["outcome"] == "finished" for row in mine)
        assert stay["failed"] == sum(row["outcome"] == "failed" for row in mine)
        assert stay["run_ns"] == sum(row["run_ns"] or 0 for row in mine)
        assert stay["busy_ns"] == stay["run_ns"]  # one slot
    assert 0 < sum(found.workers["attempts"].to_pylist()) < sum(whole["attempts"].to_pylist())


def test_failure_in_one_campaign_blocks_tasks_of_others(linked_history: LinkedHistory) -> None:
    first, second = linked_history.snapshots
    chained = {spelling(name, b"only").decode() for name in CHAINED}
    assert chained.isdisjoint(first.behind)
    assert chained & {*second.behind} == {spelling(name, b"only").decode() for name in CHAINED[1:]}
    assert first.result.campaigns == len((*CAMPAIGNS, EXCLUSIVE, *CHAINED, UNCHANGED))
    assert first.final != {}
    assert first.final.items() <= second.final.items(), "appended"
