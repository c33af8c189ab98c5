"""The readers of streams, without Spark: batches, their limits, their cost, and results."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pyspark_taskyard import state_tables
from pyspark_taskyard.options import parse_options
from pyspark_taskyard.streams import RecordStream
from taskyard import testing
from taskyard.calls import payloads
from taskyard.core.events import Outcome
from taskyard.core.model import Submission, Terms
from taskyard.journal import compaction, history_arrow, recovery
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import WritingYard, rich_story
from tests.kit.clients import internal
from tests.pipeline.test_history_source import EXPORTED, write_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.testing import InMemoryBroker

Row = dict[str, Any]

ALL = ReadAllAvailable()


class Query:
    """Plans and reads the batches of a stream, in the order of Spark's calls."""

    def __init__(self, **options: str) -> None:
        self.stream = RecordStream(parse_options(options))
        self.offsets = [self.stream.initialOffset()]
        #: The partitions of each batch.
        self.partitions: list[int] = []

    def batch(self, limit: Any = None) -> list[Row]:
        """Read the next batch. Empty if there is nothing new."""
        start = self.offsets[-1]
        end = self.stream.latestOffset(start, limit or self.stream.getDefaultReadLimit())
        if end == start:
            return []
        rows = self.between(start, end)
        self.offsets.append(end)
        self.stream.commit(end)
        return rows

    def between(self, start: dict[str, int], end: dict[str, int]) -> list[Row]:
        parts = self.stream.partitions(start, end)
        self.partitions.append(len(parts))
        batches = [batch for part in parts for batch in self.stream.read(part)]
        return [row for batch in batches for row in batch.to_pylist()]

    def batches(self) -> list[list[Row]]:
        """Read all batches. Those without rows are left out."""
        found: list[list[Row]] = []
        count = 0
        while len(self.offsets) > count:
            count = len(self.offsets)
            found.append(self.batch())
        return [rows for rows in found if rows]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state with every kind of record, the first ones in history files."""
    state = tmp_path_factory.mktemp("state")
    write_rows(rich_story(MemoryStore()), state, EXPORTED)
    return state


def events_of(state: Path) -> list[Row]:
    files, last = state_tables.files(state)
    batches = history_arrow.read_table(files, "events").to_batches()
    batches += state_tables.read_tail(state, "events", last)
    return [row for batch in batches for row in batch.to_pylist()]


def without_broker(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key != "broker"} for row in rows]


@pytest.mark.parametrize("rows_max", [1, 7, 1000])
def test_batches_of_any_size_are_the_events_in_order(state: Path, rows_max: int) -> None:
    query = Query(state=str(state), rows_max=str(rows_max))
    batches = query.batches()
    assert without_broker([row for rows in batches for row in rows]) == events_of(state)
    whole = [rows for rows in batches if len({row["record"] for row in rows}) > 1]
    assert all(len(rows) <= rows_max for rows in whole)
    again = Query(state=str(state))
    pairs = zip(pairwise(query.offsets), batches, strict=True)
    assert all(again.between(*offsets) == rows for offsets, rows in pairs)


def test_rows_of_the_journal_are_read_once(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    records_of = recovery.records_of

    def counted(row: Any, before: int) -> Any:
        read.append(row.sequence)
        return records_of(row, before)

    monkeypatch.setattr(recovery, "records_of", counted)
    assert len(Query(state=str(state), rows_max="3").batches()) > 20
    assert len(read) == len(set(read))


def test_new_rows_are_split_into_partitions(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark_taskyard.record_ranges.ROWS_PER_PARTITION", 10)
    query = Query(state=str(state))
    assert len(query.batch(ALL)) == len(events_of(state))
    assert query.partitions[0] > 5


class Yard:
    """A state whose journal grows while it is streamed."""

    def __init__(self, state: Path) -> None:
        self.state, self.store = state, SqliteStore(state)
        self.yard = WritingYard(self.store)
        self.yard.join(b"w", slots_total=4)

    def run(self, *names: bytes) -> None:
        self.yard.submit(*names, campaign=b"c")
        for name in self.yard.take(b"w", len(names)):
            self.yard.finish(b"w", name, texts=[b"result of " + name])


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path / "state")
    yield yard
    yard.store.close()


def test_stream_goes_on_over_compactions(yard: Yard) -> None:
    query = Query(state=str(yard.state), rows_max="2")
    seen: list[Row] = []
    for number in range(4):
        yard.run(b"a%d" % number, b"b%d" % number)
        seen += query.batch()
        if number in {1, 2}:
            compaction.compact(yard.state, yard.store)
    seen += [row for rows in query.batches() for row in rows]
    assert [row["record"] for row in seen] == sorted(row["record"] for row in seen)
    assert without_broker(seen) == events_of(yard.state)


def results(rows: list[Row]) -> list[tuple[str, str, bytes | None, str]]:
    return [(row["name"], row["state"], row["result"], row["reason"]) for row in rows]


def test_results_are_streamed_as_tasks_end(yard: Yard) -> None:
    query = Query(state=str(yard.state), table="results")
    yard.run(b"a")
    assert results(query.batch()) == [("a", "done", b"result of c/a", "")]
    yard.yard.submit(b"bad", campaign=b"c")
    yard.yard.take(b"w", 1)
    yard.yard.report(b"w", b"c/bad", Outcome.FAILED_FINAL, texts=[b"broken"])
    assert results(query.batch()) == [("bad", "failed", None, "broken")]
    yard.yard.retry(b"c/bad")
    assert query.batch() == []
    yard.yard.take(b"w", 1)
    yard.yard.finish(b"w", b"c/bad", texts=[b"mended"])
    assert results(query.batch()) == [("bad", "done", b"mended", "")]
    compaction.compact(yard.state, yard.store)
    replayed = Query(state=str(yard.state), table="results").batch(ALL)
    assert [row[0] for row in results(replayed)] == ["a", "bad", "bad"]
    assert [row["result"] for row in replayed] == [b"result of c/a", None, b"mended"]


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with testing.broker() as broker:
        yield broker


def test_broker_streams_events_and_results_in_limited_batches(broker: InMemoryBroker) -> None:
    commands = [*(["echo", str(number)] for number in range(6)), ["false"]]
    names = [*(b"t%d" % number for number in range(6)), b"bad"]
    terms = [Terms(campaign=b"c", service=payloads.EXEC)]
    with internal(broker.client()) as client:  # one message, so one record
        client.create(Submission(names, [*map(payloads.encode_command, commands)], terms))
        broker.run_all()
    events = [row for rows in Query(broker=broker.endpoint).batches() for row in rows]
    limited = Query(broker=broker.endpoint, rows_max="4").batches()
    assert [len(rows) for rows in limited[:3]] == [7, 4, 4]  # the first is one record
    kinds = [(row["record"], row["kind"], row["task"]) for row in events]
    assert [(r["record"], r["kind"], r["task"]) for rows in limited for r in rows] == kinds
    ended = [
        row
        for rows in Query(broker=broker.endpoint, table="results", rows_max="4").batches()
        for row in rows
    ]
    assert {row["name"]: row["result"] for row in ended} == {
        **{f"t{number}": b"%d\n" % number for number in range(6)},
        "bad": None,
    }
    assert {(row["campaign"], row["service"], row["attempt"]) for row in ended} == {
        ("c", "exec", 1)
    }
