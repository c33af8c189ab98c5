"""The history's tables: a row for each task of each record, columns as documented, readable."""

import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from taskyard.core import records
from taskyard.core.apply import apply
from taskyard.core.ledger import Ledger
from taskyard.core.model import Submission, Terms
from taskyard.core.records import AnyRecord
from taskyard.core.runs import RunColumns
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged
from taskyard.journal import compaction, history, history_arrow, history_rows, row_file
from taskyard.journal.history import HistoryPart
from taskyard.journal.history_arrow import EDGES, EVENTS
from taskyard.journal.recovery import decode
from taskyard.journal.row_file import Block, ColumnBuilder
from taskyard.journal.store import MemoryStore, Row
from tests.journal.scenarios import BEGIN_NS, LONG_PAYLOAD, WritingYard, edit, rich_story

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def yard() -> WritingYard:
    return rich_story(MemoryStore())


@pytest.fixture(scope="module")
def exported(yard: WritingYard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("state")
    compaction.export(directory, yard.store)
    return directory


def rows_of(directory: Path, table: str) -> Rows:
    (part,) = history.parts(directory)
    rows: Rows = history_arrow.read_table([part.path(directory)], table).to_pylist()
    return rows


@pytest.fixture(scope="module")
def events(exported: Path) -> Rows:
    return rows_of(exported, "events")


@pytest.fixture(scope="module")
def edges(exported: Path) -> Rows:
    return rows_of(exported, "edges")


def records_in(yard: WritingYard) -> list[tuple[Row, int, AnyRecord]]:
    """Yield every record of the scenario with its row and its number."""
    return [
        (row, number, record)
        for row in yard.store.rows()
        for number, record in enumerate(decode(row.body), start=row.record_first)
    ]


def names_of(record: AnyRecord) -> list[bytes]:
    if isinstance(record, records.Submitted):
        return record.submission.names
    return getattr(record, "names", [])


def text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def as_arrow(block: Block, table: str) -> pa.RecordBatch:
    return history_arrow.to_arrow(block, table)


def of_kind(rows: Rows, kind: str, **values: object) -> Rows:
    return [
        row
        for row in rows
        if row["kind"] == kind and all(row[key] == value for key, value in values.items())
    ]


class TestEvents:
    def test_every_record_has_a_row_for_each_of_its_tasks(
        self, yard: WritingYard, events: Rows
    ) -> None:
        expected = [
            (row.sequence, number, history_rows.KINDS[type(record)].decode(), task)
            for row, number, record in records_in(yard)
            for task in (map(text, names_of(record)) if names_of(record) else [None])
        ]
        own = [row for row in events if row["kind"] != "ready"]
        assert [(row["sequence"], row["record"], row["kind"], row["task"]) for row in own] == (
            expected
        )

    def test_every_kind_of_record_is_in_the_scenario(self, events: Rows) -> None:
        kinds = {kind.decode() for kind in history_rows.KINDS.values()} | {"ready"}
        assert {row["kind"] for row in events} == kinds - {"edited", "numbered"}

    def test_edit_is_an_event_of_its_task(self, tmp_path: Path) -> None:
        yard = WritingYard(MemoryStore())
        edit(yard)
        compaction.export(tmp_path, yard.store)
        found = rows_of(tmp_path, "events")
        assert (found[-1]["kind"], found[-1]["task"]) == ("edited", "edited")

    def test_ready_rows_are_those_tasks_that_a_record_made_ready(
        self, yard: WritingYard, events: Rows
    ) -> None:
        """Find ready tasks the slow way: compare all tasks before and after each record."""
        ledger, expected = Ledger(), []
        for _, number, record in records_in(yard):
            before = {id(task) for task in ledger.tasks.values() if task.state is TaskState.READY}
            kept = list(ledger.tasks.values())  # so that no id is reused
            apply(ledger, record)
            expected += [
                (number, text(name))
                for name, task in ledger.tasks.items()
                if task.state is TaskState.READY and id(task) not in before
            ]
            del kept
        found = [(row["record"], row["task"]) for row in of_kind(events, "ready")]
        assert Counter(found) == Counter(expected)
        assert len(found) > 20

    def test_ready_rows_have_a_reason(self, events: Rows) -> None:
        reasons = {row["reason"] for row in of_kind(events, "ready")}
        assert reasons == {"submitted", "released", "returned", "expired", "due", "retried"}

    def test_times_are_those_of_the_records(self, yard: WritingYard, events: Rows) -> None:
        times = {number: record.at_ns for _, number, record in records_in(yard)}
        assert {row["record"]: row["time_ns"] for row in events} == times
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        for row in events:
            assert row["time"] == epoch + timedelta(microseconds=row["time_ns"] // 1000)

    def test_rows_know_where_their_task_belongs(self, events: Rows) -> None:
        columns = ("campaign", "service", "lane", "priority")
        for kind in ("submitted", "ready", "leased"):
            rows = of_kind(events, kind, task="mail/l3")
            assert rows
            for row in rows:
                assert [row[key] for key in columns] == ["mail", "smtp", "y", 0]
        (row,) = of_kind(events, "submitted", task="first/d")
        assert [row[key] for key in columns] == ["first", "default", "", 3]

    def test_attempts_count_up(self, events: Rows) -> None:
        leased = [row["attempt"] for row in of_kind(events, "leased", task="first/c")]
        assert leased == list(range(1, len(leased) + 1))
        assert [row["attempt"] for row in of_kind(events, "submitted", task="first/a")] == [0, 1]

    def test_submission_tells_sizes_slots_dialect_and_due_time(self, events: Rows) -> None:
        (wide,) = of_kind(events, "submitted", task="wide")
        assert (wide["payload_bytes"], wide["slots"], wide["due"]) == (len(LONG_PAYLOAD), 2, None)
        (later,) = of_kind(events, "submitted", task="later")
        assert later["due"] == datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
        assert {row["dialect"] for row in of_kind(events, "submitted", task="first/b")} == {"dwork"}

    def test_finish_tells_worker_dialect_and_size(self, events: Rows) -> None:
        first, *_ = of_kind(events, "finished", task="first/a")
        assert (first["worker"], first["dialect"], first["result_bytes"]) == (
            "w1",
            "native",
            len(b"result of a"),
        )
        (second,) = of_kind(events, "finished", task="first/b")
        assert second["result_bytes"] == 0

    def test_failures_and_returns_tell_reasons(self, events: Rows) -> None:
        (failed,) = of_kind(events, "failed", task="doomed")
        assert (failed["reason"], failed["own_fault"]) == ("as foretold", True)
        (put_off,) = of_kind(events, "postponed")
        assert (put_off["reason"], put_off["own_fault"]) == ("busy", False)
        assert put_off["due"] == datetime(2026, 1, 1, 0, 0, 10, tzinfo=UTC)
        returned = {row["reason"] for row in of_kind(events, "returned")}
        assert returned == {"transferred", "restarted", "left", "deferred_back"}
        aged = {row["reason"] for row in of_kind(events, "aged")}
        assert aged == {"too old", "expired on request"}

    def test_progress_tells_percent_and_text(self, events: Rows) -> None:
        (row,) = of_kind(events, "progressed")
        assert (row["percent"], row["reason"]) == (40, "almost half")

    def test_worker_rows_have_the_facts(self, events: Rows) -> None:
        joined, *_ = of_kind(events, "worker_joined", worker="w1")
        assert (joined["task"], joined["slots"], joined["services"], joined["dialect"]) == (
            None,
            4,
            ["default", "smtp"],
            "native",
        )
        assert [row["incarnation"] for row in of_kind(events, "worker_joined", worker="w3")] == [
            1,
            2,
        ]
        left = of_kind(events, "worker_left", worker="w2")
        assert [row["dialect"] for row in left] == ["wmp"]
        assert [row["slots"] for row in of_kind(events, "slots_freed")] == [1]

    def test_pause_rows_have_service_and_lane(self, events: Rows) -> None:
        paused = [(row["service"], row["lane"]) for row in of_kind(events, "paused")]
        assert paused == [("smtp", "x"), ("smtp", None), (None, None)]

    def test_stale_report_on_a_forgotten_task_has_no_campaign(self, tmp_path: Path) -> None:
        store = MemoryStore()
        story = WritingYard(store)
        story.handle_stale(b"gone")
        compaction.export(tmp_path, store)
        (row,) = rows_of(tmp_path, "events")
        assert (row["kind"], row["task"], row["campaign"], row["lane"]) == (
            "stale",
            "gone",
            None,
            None,
        )

    def test_tasks_of_one_record_may_differ_in_everything(self) -> None:
        terms = [Terms(campaign=b"x", priority=1, dialect=b"d", due_ns=5), Terms(slots=3)]
        submission = Submission([b"a", b"b"], [b"", b"12"], terms, [0, 1], [b"l", b""])
        ledger, rows, no_edges = Ledger(), ColumnBuilder("events"), ColumnBuilder("edges")
        history_rows.write_rows(ledger, 1, records.Submitted(0, submission), rows, no_edges)
        told_rows = as_arrow(rows.take(), "events").to_pylist()
        columns = ("kind", "task", "campaign", "priority", "dialect", "slots", "lane", "attempt")
        assert [tuple(row[key] for key in columns) for row in told_rows] == [
            ("submitted", "a", "x", 1, "d", 1, "l", 0),
            ("submitted", "b", "", 0, "", 3, "", 0),
            ("ready", "b", "", 0, None, None, "", 0),
        ]
        assert [row["payload_bytes"] for row in told_rows] == [0, 2, None]
        assert no_edges.rows == 0

    def test_environment_and_notes_stay_out_of_the_history(self, tmp_path: Path) -> None:
        yard = WritingYard(MemoryStore())
        yard.join(b"w")
        yard.submit(b"a", environment=b"SECRET")
        yard.take(b"w")
        yard.finish(b"w", b"a", runs=RunColumns(b"h", [1], [1], notes=[b"SECRET"]))
        compaction.export(tmp_path, yard.store)
        for table in history_arrow.TABLES:
            assert "SECRET" not in str(rows_of(tmp_path, table))

    def test_task_that_waits_for_nothing_has_no_edges(self) -> None:
        rows, no_edges = ColumnBuilder("events"), ColumnBuilder("edges")
        submitted = records.Submitted(0, Submission([b"a"], after=[[]]))
        history_rows.write_rows(Ledger(), 1, submitted, rows, no_edges)
        assert (rows.rows, no_edges.rows) == (2, 0)


class TestEdges:
    def test_edges_are_all_dependencies(self, yard: WritingYard, edges: Rows) -> None:
        expected = Counter(
            (row.sequence, number, text(name), text(before))
            for row, number, record in records_in(yard)
            for name, befores in waits_of(record)
            for before in befores
        )
        found = Counter(
            (row["sequence"], row["record"], row["task"], row["after"]) for row in edges
        )
        assert found == expected

    def test_edges_to_tasks_that_were_done_already_are_kept(self, edges: Rows) -> None:
        assert ("first/f", "first/a") in [(row["task"], row["after"]) for row in edges]

    def test_edges_of_returned_and_extended_tasks_are_kept(self, edges: Rows) -> None:
        pairs = [(row["task"], row["after"]) for row in edges]
        assert ("first/f", "mail/l1") in pairs  # extended
        assert [task for task, before in pairs if before == "later"]  # returned


def waits_of(record: AnyRecord) -> list[tuple[bytes, list[bytes]]]:
    if isinstance(record, records.Submitted):
        columns = [record.submission.after, record.after_done]
        names = record.submission.names
        return [pair for column in columns if column for pair in zip(names, column, strict=True)]
    if isinstance(record, records.Extended | records.Returned) and record.after:
        return list(zip(record.names, record.after, strict=True))
    return []


class TestFiles:
    def test_row_files_are_private(self, exported: Path) -> None:
        (part,) = history.parts(exported)
        assert part.path(exported).stat().st_mode & 0o777 == 0o600

    def test_row_files_and_arrow_have_the_same_columns(self) -> None:
        for table, names in row_file.TABLES.items():
            renamed = [
                {"due": "due_ns"}.get(name, name) for name in history_arrow.TABLES[table].names
            ]
            assert [name for name in renamed if name != "time"] == [*names]

    def test_spark_can_read_every_type(self) -> None:
        """Spark has trouble with dictionaries and with nanoseconds."""
        plain = {"int64", "string", "bool", "timestamp[us, tz=UTC]", "list<element: string>"}
        for schema in (EVENTS, EDGES):
            assert {str(field.type) for field in schema} <= plain

    def test_unfinished_files_are_hidden_from_spark(self, tmp_path: Path) -> None:
        writer = history.new_file(tmp_path)
        names = [path.name for path in (tmp_path / history.FOLDER).iterdir()]
        writer.close()
        assert [name for name in names if not name.startswith(".")] == []
        assert history.parts(tmp_path) == []

    def test_strange_files_are_no_parts(self, tmp_path: Path) -> None:
        folder = tmp_path / history.FOLDER
        folder.mkdir()
        for name in ("a.rows", "1-2.rows", "edges-000000000001-000000000002.rows"):
            (folder / name).touch()
        assert history.parts(tmp_path) == []

    def test_gaps_and_overlaps_are_reported(self) -> None:
        parts = [HistoryPart(1, 5), HistoryPart(7, 7), HistoryPart(7, 9)]
        gaps, beyond = history.problems(parts, 9, 8)
        assert gaps.wrong == "rows 6..6 are in no history file; rows 7..7 are in two history files"
        assert beyond.wrong == "the journal ends at row 8, its history at row 9"
        assert list(history.problems(parts[:1], 5, 5)) == []

    def test_trimmed_rows_in_no_file_are_reported(self) -> None:
        parts = [HistoryPart(3, 5), HistoryPart(6, 7)]
        assert [one.wrong for one in history.losses(parts, 9)] == [
            "rows 1..2 are trimmed and in no history file",
            "rows 8..9 are trimmed and in no history file",
        ]
        assert [one.wrong for one in history.losses(parts, 9, first=3)] == [
            "rows 8..9 are trimmed and in no history file"
        ]
        assert len(list(history.losses([], 9))) == 1
        assert list(history.losses([], 0)) == list(history.losses(parts, 7, first=3)) == []

    @pytest.mark.parametrize(
        ("trimmed", "lost"),
        [
            (
                10,
                (
                    "nothing is lost, rows 11..20 are still in the journal: remove this file, then "
                    "compact again"
                ),
            ),
            (15, "the events of rows 11..15 are lost: restore the file from a backup"),
            (30, "the events of rows 11..20 are lost: restore the file from a backup"),
        ],
    )
    def test_loss_by_a_damaged_file_depends_on_the_trimmed_rows(
        self, tmp_path: Path, trimmed: int, lost: str
    ) -> None:
        with pytest.raises(JournalDamaged) as caught:
            history.check_part(tmp_path, HistoryPart(11, 20), trimmed)
        assert caught.value.lost == lost

    def test_file_of_other_rows_is_refused(self, yard: WritingYard, tmp_path: Path) -> None:
        compaction.export(tmp_path, yard.store)
        other = HistoryPart(1, 99)
        (part,) = history.parts(tmp_path)
        part.path(tmp_path).rename(other.path(tmp_path))
        last = yard.store.head.sequence
        with pytest.raises(JournalDamaged, match=rf"-0+99\.rows holds rows 1\.\.{last}: "):
            history.check_part(tmp_path, other)


class TestColumns:
    def test_shared_and_own_values_lie_side_by_side(self) -> None:
        columns = ColumnBuilder("edges")
        columns.add(2, {"sequence": 1, "record": 1, "task": [b"a", b"b"], "after": b"x"})
        columns.add(1, {"sequence": 2, "record": 2, "task": b"c", "after": [b"y"]})
        assert columns.rows == 3
        assert as_arrow(columns.take(), "edges").to_pydict() == {
            "sequence": [1, 1, 2],
            "record": [1, 1, 2],
            "task": ["a", "b", "c"],
            "after": ["x", "x", "y"],
        }
        assert columns.take().rows == 0

    def test_bytes_that_are_not_utf8_are_escaped(self) -> None:
        columns = ColumnBuilder("edges")
        columns.add(1, {"sequence": 1, "record": 1, "task": b"\xc3\xa9\xff", "after": b"\\xff"})
        (row,) = as_arrow(columns.take(), "edges").to_pylist()
        assert (row["task"], row["after"]) == ("é\\xff", "\\xff")

    def test_nulls_survive_where_some_names_are_no_utf8(self) -> None:
        columns = ColumnBuilder("events")
        columns.add(2, {**BEGINNING, "task": [b"\xff", None], "services": (b"\xfe",)})
        batch = as_arrow(columns.take(), "events")
        assert batch.column("task").to_pylist() == ["\\xff", None]
        assert batch.column("services").to_pylist() == [["\\xfe"]] * 2

    def test_numbers_that_are_too_large_stop_at_the_end_of_the_column(self) -> None:
        columns = ColumnBuilder("events")
        huge = [1 << 64, -(1 << 64), None]
        columns.add(3, {**BEGINNING, "priority": huge, "due_ns": huge})
        batch = as_arrow(columns.take(), "events")
        assert batch.column("priority").to_pylist() == [(1 << 63) - 1, -(1 << 63), None]
        assert batch.column("due").cast(pa.int64()).to_pylist()[0] == ((1 << 63) - 1) // 1000


#: The columns that every event has.
BEGINNING = {"sequence": 1, "record": 1, "time_ns": BEGIN_NS, "kind": b"stale"}


@pytest.mark.parametrize(
    "module", ["journal", "journal.recovery", "journal.sqlite", "broker.turn", "cli"]
)
def test_pyarrow_is_not_loaded_before_it_is_needed(module: str) -> None:
    code = f"import sys, taskyard.{module}; sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Measurements of attempts.


def test_measurements_of_a_worker_become_columns(tmp_path: Path) -> None:
    yard = WritingYard(MemoryStore())
    yard.submit(b"a", b"b", b"c")
    yard.join(b"w")
    yard.take(b"w", 3)
    yard.later(10)
    starts = [BEGIN_NS + number for number in (1, 0, 2)]
    starts[1] = 0
    measured = RunColumns(b"host", starts, [5, 0, 6], [3, None, -9], [7, 0, 8], [9, 0, 0])
    yard.finish(b"w", b"a", b"b", b"c", runs=measured)
    compaction.export(tmp_path, yard.store)
    told_rows = rows_of(tmp_path, "events")
    rows = [row for row in told_rows if row["kind"] == "finished"]
    names = ("host", "started_ns", "run_ns", "exit_status", "signal", "cpu_ns", "memory_max_bytes")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("host", starts[0], 5, 3, None, 7, 9),
        (None, None, None, None, None, None, None),
        ("host", starts[2], 6, None, 9, 8, None),
    ]
