"""The tables of docs/journal.md match the code."""

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
import pyarrow as pa
import pytest

from taskyard.core import model, records, runs
from taskyard.core.records import AnyRecord, ReturnReason
from taskyard.core.snapshots import columns as snapshot_columns
from taskyard.core.states import TaskState
from taskyard.errors import StateError, UnknownFormat
from taskyard.journal import (
    archive,
    chain,
    compaction,
    history,
    history_arrow,
    history_rows,
    recovery,
    row_file,
    schema,
    snapshot,
    witness,
)
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import go_on, rich_story

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()

ARRAYS = [
    model.Submission,
    model.Terms,
    model.TermsChanges,
    model.WorkerFacts,
    runs.RunColumns,
    runs.Attempt,
    snapshot_columns.TaskColumns,
    snapshot_columns.Rest,
    snapshot_columns.CampaignRest,
    snapshot_columns.LaneRest,
    snapshot_columns.ServiceSnapshot,
    snapshot_columns.WorkerSnapshot,
    snapshot_columns.LeaseSnapshot,
]


def rows(pattern: str) -> list[list[str]]:
    """Return the cells of table rows that match a pattern."""
    lines = [line for line in PAGE.splitlines() if re.match(pattern, line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`(\w+)`", cell))


def test_records_are_documented_with_their_numbers_and_fields() -> None:
    documented = [
        (int(number), *quoted(name), quoted(fields))
        for number, name, fields, _ in rows(r"\| \d+ \| `[A-Z][a-z]")
    ]
    assert {record.__struct_fields__[0] for record in get_args(AnyRecord)} == {"at_ns"}
    assert documented == [
        (record.__struct_config__.tag, record.__name__, record.__struct_fields__[1:])
        for record in get_args(AnyRecord)
    ]


def test_arrays_are_documented_with_their_fields() -> None:
    documented = {quoted(name)[0]: quoted(fields) for name, fields in rows(r"\| `[A-Z]\w+` \|")}
    expected: dict[str, tuple[str, ...]] = {}
    for array in ARRAYS:
        assert issubclass(array, msgspec.Struct)
        expected[array.__name__] = array.__struct_fields__
    assert documented == expected


@pytest.mark.parametrize(
    ("table", "columns"), history_arrow.TABLES.items(), ids=history_arrow.TABLES
)
def test_columns_of_the_history_are_documented(table: str, columns: pa.Schema) -> None:
    section = PAGE.split(f"### `{table}`")[1].split("\n#")[0]
    lines = re.findall(r"^\| `(\w+)` \| ([^|]+) \| \S", section, re.MULTILINE)
    assert lines == [(field.name, str(field.type)) for field in columns]


def test_columns_that_are_never_null_are_documented() -> None:
    sentence = PAGE.split("Never null\nare ")[1].split(", and all")[0]
    required = [field.name for field in history_arrow.EVENTS if not field.nullable]
    assert list(quoted(sentence)) == required
    assert not any(field.nullable for field in history_arrow.EDGES)


def test_kinds_are_documented() -> None:
    section = PAGE.split("Kinds: ")[1].split(".")[0]
    kinds = [kind.decode() for kind in (*history_rows.KINDS.values(), history_rows.READY)]
    assert sorted(quoted(section)) == sorted(kinds)


def test_reasons_and_states_are_documented() -> None:
    for reason in ReturnReason:
        assert f"{int(reason)} {reason.name.lower()}" in PAGE
    for state in TaskState:
        assert f"{int(state)} {state.name}" in PAGE


def test_tables_are_documented_letter_by_letter() -> None:
    statements = re.findall(r"^CREATE TABLE .*$", PAGE, re.MULTILINE)
    assert statements == [*schema.TABLES.values(), *archive.TABLES.values()]


def test_layouts_are_documented_with_their_sizes() -> None:
    sizes = [int(size) for (size, _) in rows(r"\| \d+ \| (?!`[A-Z][a-z])")]
    label, identity = len(chain.LABEL), chain.IDENTITY_BYTES
    assert sizes[:6] == [label, identity, 8, 8, chain.CHAIN_BYTES, 32]
    assert sum(sizes[:6]) == chain.SEALED_BYTES
    assert row_file.BLOCK_BYTES == 1 + 8 + 4
    assert "kind (1 byte), the length of its body (8 bytes), a CRC-32 (4\nbytes)" in PAGE
    assert sizes[6:11] == [len(snapshot.MAGIC), 4, chain.SEALED_BYTES, 8, 8]
    assert sum(sizes[6:9]) == snapshot.HEADER_BYTES
    assert sizes[11] == len(f"{row_file.MAGIC.decode()}{row_file.FORMAT}\n")
    assert sizes[12:] == [8] * 5
    assert f"up to about {row_file.ROWS_PER_BLOCK:,}" in PAGE
    assert f"at offsets 0 and {witness.SLOT_SPACING_BYTES}" in PAGE


def test_limits_are_documented() -> None:
    assert f"{history.EVENTS_PER_FILE_MAX:,} events" in PAGE
    assert f"up to {model.DIGEST_BYTES} bytes" in PAGE


def test_files_of_sqlite_are_documented() -> None:
    for name in (schema.FILE_NAME, archive.FILE_NAME):
        for suffix in ("", "-wal", "-shm"):
            assert rows(rf"\| .*`{re.escape(name + suffix)}`")


#: A quotation with this many words is a message, not the name of a file or a verb.
WORDS_MIN = 4


class TestDamage:
    """The messages in the page's table of damage are real: for a journal of nine rows."""

    @pytest.fixture(autouse=True)
    def _journal(self, tmp_path: Path) -> None:
        self.state = tmp_path / "state"
        self.yard = rich_story(MemoryStore())
        self.store = self.opened()
        go_on(self.store, self.yard.store, 9)

    def opened(self) -> SqliteStore:
        return SqliteStore(self.state)

    def error_text(self) -> str:
        with pytest.raises(StateError) as caught, closing(self.opened()) as store:
            recovery.open_ledger(self.state, store)
        message = str(caught.value)
        assert message.endswith((RESTORE_HINT, f"{RESTORE_HINT})"))
        return message

    def documented(self) -> bool:
        """Return whether a message of the table is part of the error."""
        table = PAGE.split("## What damage looks like")[1].split("\n## ")[0]
        message = self.error_text()
        quotations = re.findall(r"`([^`\n]+)`", table)
        return any(words in message for words in quotations if words.count(" ") >= WORDS_MIN)

    def change(self, statement: str) -> None:
        self.store.close()
        with closing(sqlite3.connect(self.state / schema.FILE_NAME)) as connection:
            connection.execute(statement)
            connection.commit()

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE journal SET body = x'01' WHERE sequence = 6",
            "DELETE FROM journal WHERE sequence BETWEEN 5 AND 7",
            "DELETE FROM journal WHERE sequence > 7",
        ],
    )
    def test_of_the_rows(self, statement: str) -> None:
        self.change(statement)
        assert self.documented()

    def test_of_a_newer_version(self) -> None:
        self.change("UPDATE meta SET value = '2' WHERE key = 'format'")
        with pytest.raises(UnknownFormat) as caught:
            self.opened()
        assert f"`{caught.value}`" in PAGE

    def test_of_the_witness(self) -> None:
        self.store.close()
        path = self.state / witness.FILE_NAME
        content = path.read_bytes()
        for offset in (0, witness.SLOT_SPACING_BYTES):
            path.write_bytes(content[:offset] + b"?" + content[offset + 1 :])
            self.opened().close()
        path.write_bytes(b"")
        assert "the witness is unreadable: " in self.error_text()
        path.unlink()
        assert self.documented()

    def test_of_a_snapshot_whose_rows_are_trimmed(self) -> None:
        compaction.compact(self.state, self.store)
        self.store.close()
        path = snapshot.path_of(self.state, 9)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert self.documented()

    def test_of_an_index_whose_rows_are_trimmed(self) -> None:
        compaction.compact(self.state, self.store)
        self.store.close()
        (self.state / archive.FILE_NAME).unlink()
        assert self.documented()

    def test_of_an_index_whose_rows_are_kept(self) -> None:
        compaction.export(self.state, self.store)
        (self.state / archive.FILE_NAME).unlink()
        recovery.open_ledger(self.state, self.store)
        compaction.export(self.state, self.store)
        assert (self.state / archive.FILE_NAME).exists()

    def test_of_a_journal_older_than_its_index_and_snapshots(self, tmp_path: Path) -> None:
        self.store.close()
        shutil.rmtree(self.state)
        self.store = self.opened()
        go_on(self.store, self.yard.store, 5)
        self.store.close()
        shutil.copytree(self.state, tmp_path / "older")
        self.store = self.opened()
        go_on(self.store, self.yard.store, 9)
        compaction.export(self.state, self.store)
        self.store.close()
        shutil.copytree(tmp_path / "older", self.state, dirs_exist_ok=True)
        assert self.documented()
        (self.state / archive.FILE_NAME).unlink()
        assert self.documented()

    def test_of_two_journals_mixed(self, tmp_path: Path) -> None:
        compaction.export(self.state, self.store)
        self.store.close()
        other = SqliteStore(tmp_path / "other")
        go_on(other, self.yard.store, 9)
        other.close()
        shutil.copy(tmp_path / "other" / witness.FILE_NAME, self.state)
        assert self.documented()
        shutil.copy(tmp_path / "other" / schema.FILE_NAME, self.state)
        assert self.documented()

    def test_of_a_snapshot_of_another_journal(self, tmp_path: Path) -> None:
        compaction.compact(self.state, self.store)
        self.store.close()
        other = SqliteStore(tmp_path)
        go_on(other, self.yard.store, 9)
        compaction.export(tmp_path, other)
        other.close()
        shutil.copy(snapshot.path_of(tmp_path, 9), self.state / snapshot.FOLDER)
        assert "snapshot 000000000009.snapshot belongs to another journal" in self.error_text()
        assert "`snapshot 000000000009.snapshot belongs to another journal`" in PAGE


def test_every_record_has_a_kind() -> None:
    assert set(history_rows.KINDS) == set(get_args(AnyRecord))
    assert len({*history_rows.KINDS.values(), history_rows.READY}) == len(history_rows.KINDS) + 1


def test_names_of_modules_are_those_of_the_page() -> None:
    files = (schema.FILE_NAME, witness.FILE_NAME, archive.FILE_NAME, snapshot.FOLDER)
    for name in (*files, history.FOLDER):
        assert f"`{name}" in PAGE
    assert records.__doc__
