"""`format("taskyard")`: write rows as tasks, and read tables of a state or a broker."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from pyspark_taskyard.options import OPTIONS
from pyspark_taskyard.tables import results_batch
from taskyard import testing
from taskyard.core.blobs import Blob
from taskyard.journal import compaction, history, history_arrow
from taskyard.journal.sqlite import SqliteStore
from taskyard.pipeline.sources.history import identity
from tests.journal.scenarios import WritingYard
from tests.kit.clients import internal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from taskyard.testing import InMemoryBroker


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with testing.broker() as broker:
        yield broker


class State:
    """A state directory with compacted rows and later ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = SqliteStore(directory)
        self.yard = WritingYard(self.store)
        self.yard.join(b"w", slots_total=4, dialect=b"native")
        self.yard.submit(b"a", b"b", campaign=b"one")
        self.yard.submit(b"c", after=[[b"one/a"]], campaign=b"two", priority=3)
        self.yard.take(b"w", 1)
        self.yard.finish(b"w", b"one/a", texts=[b"result of a"])
        compaction.compact(directory, self.store)
        self.go_on(b"d")

    def go_on(self, name: bytes) -> None:
        self.yard.submit(name, campaign=b"one")
        (taken,) = self.yard.take(b"w", 1)
        self.yard.finish(b"w", taken, texts=[b"result of " + taken])

    @property
    def record(self) -> int:
        return self.store.head.record


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    state = State(tmp_path / "state")
    yield state
    state.store.close()


def _read(spark: SparkSession, table: str, **options: str) -> DataFrame:
    return spark.read.format("taskyard").option("table", table).options(**options).load()


def _write(frame: DataFrame, broker: InMemoryBroker, **options: str) -> None:
    writer = frame.write.format("taskyard").option("broker", broker.endpoint).options(**options)
    writer.mode("append").save()


def _exported(state: State, table: str) -> list[dict[str, Any]]:
    compaction.export(state.directory, state.store)
    files = [part.path(state.directory) for part in history.parts(state.directory)]
    assert len(files) == 2
    rows = history_arrow.read_table(files, table).to_pylist()
    return sorted(rows, key=repr)


def _rows(frame: DataFrame) -> list[dict[str, Any]]:
    return sorted(frame.toArrow().to_pylist(), key=repr)


class TestWriting:
    def test_rows_written_twice_are_submitted_once(
        self, spark: SparkSession, broker: InMemoryBroker
    ) -> None:
        name = F.concat(F.lit("t"), "id")
        argv = F.array(F.lit("echo"), F.col("id").cast("string"))
        frame = spark.range(0, 300, 1, 3).select(name.alias("name"), argv.alias("argv"))
        _write(frame, broker, campaign="c")
        _write(frame, broker, campaign="c")
        with internal(broker.client()) as client:
            assert client.counts("c")["ready"] == 300
            broker.run_all()
            assert client.result("c/t299") == "299\n"

    def test_dependency_may_be_submitted_later(
        self, spark: SparkSession, broker: InMemoryBroker
    ) -> None:
        rows = [(f"t{n}", f"p{n}", [f"t{n + 1}"] if n < 9 else [], n) for n in range(10)]
        frame = spark.createDataFrame(
            rows, "name string, payload string, after array<string>, n int"
        )
        spread = frame.repartition(3, "n").drop("n")
        _write(spread, broker, service="work")
        done = broker.run_all({"work": lambda payload: payload})
        assert done == [f"t{n}" for n in range(9, -1, -1)]

    def test_invalid_row_raises_with_its_reason(
        self, spark: SparkSession, broker: InMemoryBroker
    ) -> None:
        frame = spark.createDataFrame([("a", "x", -1)], "name string, payload string, slots long")
        with pytest.raises(Exception, match=r"task 'a' \"slots\" must be at least 1"):
            _write(frame, broker)
        odd = spark.createDataFrame([("a", "x")], "name string, colour string")
        with pytest.raises(Exception, match="has an unknown column 'colour'"):
            _write(odd, broker)

    def test_invalid_options_are_refused(self, spark: SparkSession, broker: InMemoryBroker) -> None:
        frame = spark.createDataFrame([("a", "x")], "name string, payload string")
        with pytest.raises(Exception, match="unknown option 'campain'"):
            _write(frame, broker, campain="c")
        with pytest.raises(Exception, match="tasks can't be overwritten"):
            frame.write.format("taskyard").mode("overwrite").save()
        with pytest.raises(Exception, match="unknown table 'jobs'"):
            _read(spark, "jobs", broker=broker.endpoint)


class TestStateAsTables:
    def test_events_and_edges_equal_those_of_an_export(
        self, spark: SparkSession, state: State
    ) -> None:
        where = {"state": str(state.directory)}
        events = _rows(_read(spark, "events", **where))
        edges = _rows(_read(spark, "edges", **where))
        assert {row["kind"] for row in events} >= {"submitted", "leased", "finished", "ready"}
        broker = identity(state.directory)
        assert {row.pop("broker") for row in (*events, *edges)} == {broker}
        assert sorted(events, key=repr) == _exported(state, "events")
        assert sorted(edges, key=repr) == _exported(state, "edges")

    def test_tasks_include_archived_ones(self, spark: SparkSession, state: State) -> None:
        tasks = _read(spark, "tasks", state=str(state.directory)).collect()
        assert {task["name"]: task["state"] for task in tasks} == {
            "a": "done",
            "c": "done",
            "b": "ready",
            "d": "ready",
        }
        assert {task["name"]: task["campaign"] for task in tasks}["c"] == "two"

    def test_results_have_every_ended_task(self, spark: SparkSession, state: State) -> None:
        results = _read(spark, "results", state=str(state.directory)).collect()
        assert {one["name"]: bytes(one["result"]) for one in results} == {
            "a": b"result of a",
            "c": b"result of two/c",
        }

    def test_one_campaign_can_be_read(self, spark: SparkSession, state: State) -> None:
        where = {"state": str(state.directory), "campaign": "two"}
        assert {row["task"] for row in _read(spark, "events", **where).collect()} == {"two/c"}
        with pytest.raises(Exception, match="edges have no campaign"):
            _read(spark, "edges", **where).collect()

    def test_several_states_are_one_table(
        self, spark: SparkSession, state: State, tmp_path: Path
    ) -> None:
        other = State(tmp_path / "other")
        other.go_on(b"e")
        other.store.close()
        places = [str(state.directory), str(other.directory)]

        def rows(table: str) -> Counter[str]:
            frame = spark.read.format("taskyard").option("table", table).load(places)
            return Counter(row["broker"] for row in frame.collect())

        brokers = [identity(one.directory) for one in (state, other)]
        assert rows("tasks") == dict(zip(brokers, (4, 5), strict=True))
        assert rows("events").keys() == set(brokers)
        with pytest.raises(Exception, match="histories of the same broker"):
            spark.read.format("taskyard").load([places[0], places[0]]).collect()
        with pytest.raises(Exception, match="excludes the options state and broker"):
            spark.read.format("taskyard").option("state", places[0]).load(places[0])


class TestBrokerAsTables:
    def test_broker_serves_tasks_results_events_and_edges(
        self, spark: SparkSession, broker: InMemoryBroker
    ) -> None:
        with internal(broker.client()) as client:
            client.submit(["echo", "hi"], name="a", campaign="c", lane="l")
            client.submit(["false"], name="b", campaign="c", after=["a"])
            broker.run_all()
        where = {"broker": broker.endpoint}
        tasks = {one["name"]: one for one in _read(spark, "tasks", **where).collect()}
        assert {name: task["state"] for name, task in tasks.items()} == {"a": "done", "b": "failed"}
        results = {one["name"]: one for one in _read(spark, "results", **where).collect()}
        assert bytes(results["a"]["result"]) == b"hi\n"
        assert results["b"]["result"] is None
        assert results["b"]["reason"].startswith("exit status 1")
        events = _read(spark, "events", **where).orderBy("record").collect()
        kinds = [(one["kind"], one["task"]) for one in events if one["task"]]
        assert kinds == [
            *(("submitted", "c/a"), ("submitted", "c/b")),
            *(("leased", "c/a"), ("finished", "c/a"), ("leased", "c/b"), ("failed", "c/b")),
        ]
        own = [(e["campaign"], e["lane"]) for e in events if e["task"] == "c/a"]
        assert own == [("c", "l")] * 3
        with internal(broker.client()) as client:
            assert {one["broker"] for one in events} == {client.poll_records(None).journal.hex()}
        edges = _read(spark, "edges", **where).collect()
        assert [(one["task"], one["after"]) for one in edges] == [("c/b", "c/a")]


#: The most restarts of a stream.
RESTARTS_MAX = 5


def run_stream(writer: DataStreamWriter) -> None:
    """Run a stream to its end, and restart it if its Python process did not start in time.

    Spark's limit is 10 s, which may be too short on a busy machine. A restarted stream continues
    from its checkpoint.
    """
    for _ in range(RESTARTS_MAX):
        try:
            writer.start().awaitTermination()
        except StreamingQueryException as error:
            if "connect back" not in str(error):
                raise
        else:
            return
    pytest.fail("Spark's Python process never started in time")


class TestStream:
    def test_each_record_is_streamed_once_over_runs_and_compactions(
        self, spark: SparkSession, state: State, tmp_path: Path
    ) -> None:
        seen: list[tuple[int, list[tuple[int, str]]]] = []

        def keep(frame: DataFrame, batch: int) -> None:
            rows = frame.select("record", "kind").collect()
            seen.append((batch, [(row["record"], row["kind"]) for row in rows]))

        def follow() -> list[int]:
            seen.clear()
            stream = spark.readStream.format("taskyard").option("state", str(state.directory))
            writer = stream.load().writeStream.foreachBatch(keep).trigger(availableNow=True)
            writer = writer.option("checkpointLocation", str(tmp_path / "at"))
            run_stream(writer)
            return sorted({record for _, rows in seen for record, _ in rows})

        first = state.record
        assert follow() == list(range(1, first + 1))
        state.go_on(b"e")
        compaction.compact(state.directory, state.store)
        state.go_on(b"f")
        assert follow() == list(range(first + 1, state.record + 1))
        assert follow() == []


def test_page_has_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    table = [f"| `{option}` | {meaning} |" for option, meaning in OPTIONS.items()]
    assert [line for line in table if line not in page] == []


def test_results_have_the_end_of_a_truncated_result_and_a_reason() -> None:
    view = {"campaign": "", "service": "exec", "attempt": 1, "reason": "", "ended": 1.0}
    views = [{"name": name, "state": "done", **view} for name in ("whole", "cut")]
    batch = results_batch(views, [b"all", Blob(b"", 9, b"end")])
    assert batch["result"].to_pylist() == [b"all", b"end"]
    assert batch["reason"].to_pylist() == [
        "",
        "result truncated: only the last 3 of 9 bytes are kept",
    ]
