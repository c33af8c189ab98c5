"""The index of ended tasks: the newest end of every name, sound or refused."""

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from taskyard.core.blobs import Blob
from taskyard.core.model import EndedTask
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged, JournalFailed, StateError, UnknownFormat
from taskyard.journal import archive
from taskyard.journal.archive import (
    Archive,
    ArchiveWriter,
    IndexRow,
    Streams,
    row_of_end,
    row_of_output,
)
from taskyard.journal.blobs import name_of
from taskyard.journal.store import Head

IDENTITY = b"sixteen bytes .."
HEAD = Head(5, 9, b"c" * 32)


NONE = b""


def ended(name: bytes, record: int = 1) -> EndedTask:
    return EndedTask(name, TaskState.DONE, b"campaign", b"service", 2, b"digest", record, 1000)


def done(name: bytes, record: int = 1, result: bytes = b"result") -> IndexRow:
    return row_of_end(ended(name, record), result)


def add(directory: Path, *some: IndexRow, head: Head = HEAD) -> None:
    with closing(ArchiveWriter(directory, IDENTITY)) as writer:
        writer.add([*some])
        writer.commit(head)


def change(directory: Path, statement: str) -> None:
    with closing(sqlite3.connect(directory / archive.FILE_NAME)) as connection, connection:
        connection.execute(statement)


class TestLookingUp:
    def test_index_without_a_file_is_empty(self, tmp_path: Path) -> None:
        with Archive(tmp_path) as index:
            assert index.covered() is None
            assert (index.find([b"a"]), index.streams(b"a")) == ([], None)
            assert (index.count(), index.verify()) == (0, 0)
        assert list(tmp_path.iterdir()) == []

    def test_ended_tasks_come_back_as_they_were(self, tmp_path: Path) -> None:
        cancelled = EndedTask(b"c", TaskState.CANCELLED, b"", b"default", 0, b"", 7, 8)
        rows = [done(b"a"), done(b"\xff\0", result=b""), row_of_end(cancelled, b"a")]
        add(tmp_path, *rows)
        with Archive(tmp_path) as index:
            found = index.find([b"a", b"nobody", b"c", b"\xff\0"])
            assert sorted(found, key=lambda one: one.name) == [
                ended(b"a"),
                cancelled,
                ended(b"\xff\0"),
            ]
            assert [index.streams(name) for name in (b"a", b"\xff\0", b"c", b"nobody")] == [
                (b"result", NONE),
                (NONE, NONE),
                (b"a", NONE),
                None,
            ]
            assert index.count() == index.verify() == 3

    def test_output_of_attempts_is_beside_the_end(self, tmp_path: Path) -> None:
        streams: Streams = (Blob(bytes(32), 20_000, b"out"), b"err")
        add(tmp_path, done(b"a"), row_of_output(b"a", 1, 1, streams))
        with Archive(tmp_path) as index:
            assert index.streams(b"a") == (b"result", NONE)
            assert index.streams(b"a", 1) == streams
            assert index.streams(b"a", 2) is None
            assert (index.names(None, 9), index.count(), index.verify()) == ([b"a"], 1, 1)
            assert index.count_stored() == 2

    def test_more_names_than_a_statement_takes_are_found(self, tmp_path: Path) -> None:
        names = [b"%d" % number for number in range(1200)]
        add(tmp_path, *map(done, names))
        with Archive(tmp_path) as index:
            assert len(index.find(names)) == 1200

    def test_index_that_appears_later_is_seen(self, tmp_path: Path) -> None:
        with Archive(tmp_path) as index:
            assert index.find([b"a"]) == []
            add(tmp_path, done(b"a"))
            assert index.find([b"a"]) == [ended(b"a")]

    def test_truncated_result_keeps_its_length(self, tmp_path: Path) -> None:
        add(tmp_path, row_of_end(ended(b"a"), Blob(b"", 2_000_000, b"end")), done(b"b"))
        with Archive(tmp_path) as index:
            assert index.streams(b"a") == (Blob(b"", 2_000_000, b"end"), NONE)
            assert index.streams(b"b") == (b"result", NONE)
            assert index.verify() == 2

    def test_covered_row_is_stored(self, tmp_path: Path) -> None:
        add(tmp_path, done(b"a"))
        with Archive(tmp_path) as index:
            assert index.covered() == (IDENTITY, HEAD)


class TestAdding:
    def test_newer_end_replaces_the_older(self, tmp_path: Path) -> None:
        add(tmp_path, done(b"a", 1, b"old"), done(b"a", 2, b"new"))
        add(tmp_path, done(b"a", 1, b"old"))  # a repeated compaction
        with Archive(tmp_path) as index:
            assert [one.record for one in index.find([b"a"])] == [2]
            assert index.streams(b"a") == (b"new", NONE)
            assert index.verify() == 1

    def test_added_tasks_are_covered_only_after_commit(self, tmp_path: Path) -> None:
        add(tmp_path, done(b"a"))
        later = Head(6, 10, b"d" * 32)
        with closing(ArchiveWriter(tmp_path, IDENTITY)) as writer, Archive(tmp_path) as index:
            writer.add([done(b"b")])
            assert index.covered() == (IDENTITY, HEAD)
            assert index.verify() == index.count_stored() == 2
            writer.commit(later)
            assert index.covered() == (IDENTITY, later)

    def test_reader_works_while_a_compaction_writes(self, tmp_path: Path) -> None:
        add(tmp_path, done(b"a"))
        with Archive(tmp_path) as index, closing(ArchiveWriter(tmp_path, IDENTITY)) as writer:
            assert index.count() == 1
            writer.add([done(b"b")])
            assert len(index.find([b"a", b"b"])) == 2
            writer.commit(HEAD)
            assert len(index.find([b"a", b"b"])) == 2

    def test_no_transaction_is_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        write = ArchiveWriter.write

        def counted(self: ArchiveWriter, some: Sequence[IndexRow]) -> None:
            sizes.append(len(some))
            write(self, some)

        monkeypatch.setattr(ArchiveWriter, "write", counted)
        monkeypatch.setattr(archive, "ROWS_PER_TRANSACTION", 3)
        monkeypatch.setattr(archive, "SYNC_BYTES", 130)
        long = [done(b"long %d" % number, result=b"x" * 60) for number in range(4)]
        add(tmp_path, *[done(b"%d" % number) for number in range(7)], *long)
        assert sizes == [3, 3, 3, 2]  # by number, by number, one short and two long ones, the rest
        with Archive(tmp_path) as index:
            assert index.verify() == 11

    def test_log_is_cut_back_when_all_is_added(self, tmp_path: Path) -> None:
        with Archive(tmp_path) as index:
            add(tmp_path, *[done(b"%d" % number) for number in range(1000)])
            assert index.count() == 1000  # it is open, so that the log stays
            add(tmp_path, *[done(b"more %d" % number) for number in range(1000)])
            assert (tmp_path / f"{archive.FILE_NAME}-wal").stat().st_size == 0

    def test_names_are_walked_in_their_order(self, tmp_path: Path) -> None:
        names = [b"", b"\0", b"a", b"b", b"\xff"]
        add(tmp_path, *map(done, reversed(names)))
        with Archive(tmp_path) as index:
            assert index.names(None, 2) == names[:2]
            assert index.names(names[1], 2) == names[2:4]
            assert index.names(names[3], 2) == names[4:]
            assert index.names(names[4], 2) == []

    def test_tasks_of_a_campaign_are_walked(self, tmp_path: Path) -> None:
        def of(campaign: bytes, key: bytes) -> IndexRow:
            one = EndedTask(key, TaskState.DONE, campaign, b"exec", 1, b"", 1, 1)
            return row_of_end(one, NONE)

        others = [
            of(b"", b"c/odd"),
            of(b"c0", b"c0/x"),
            of(b"c", b"c0"),
            of(b"", b"c."),
        ]
        add(tmp_path, of(b"c", b"c/b"), of(b"c", b"c/a/0"), *others)
        with Archive(tmp_path) as index:
            walked = {
                campaign: [one.name for one in index.ended_in(campaign)]
                for campaign in (b"c", b"c0", b"", b"none")
            }
        assert walked == {
            b"c": [b"c/a/0", b"c/b"],
            b"c0": [b"c0/x"],
            b"": [b"c.", b"c/odd"],
            b"none": [],
        }
        with Archive(tmp_path / "empty") as index:
            assert [*index.ended_in(b"c")] == []

    def test_index_is_private(self, tmp_path: Path) -> None:
        add(tmp_path / "state", done(b"a"))
        modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "state").rglob("*")]
        assert modes == [0o600]

    def test_unfinished_creation_is_repeated(self, tmp_path: Path) -> None:
        (tmp_path / f"{archive.FILE_NAME}.new").write_bytes(b"half")
        (tmp_path / f"{archive.FILE_NAME}.new-wal").write_bytes(b"half")
        add(tmp_path, done(b"a"))
        assert [path.name for path in tmp_path.iterdir()] == [archive.FILE_NAME]

    @pytest.mark.parametrize("call", ["open", "add", "commit"])
    def test_failing_disk_raises(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        def fail(*_: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        if call == "open":
            monkeypatch.setattr(archive, "connect", fail)
            with pytest.raises(JournalFailed, match="adding to the index of finished tasks failed"):
                ArchiveWriter(tmp_path, IDENTITY)
            return
        with closing(ArchiveWriter(tmp_path, IDENTITY)) as writer:
            failing = SimpleNamespace(execute=fail, close=writer._connection.close)  # noqa: SLF001
            monkeypatch.setattr(writer, "_connection", failing)
            with pytest.raises(JournalFailed, match="disk I/O error"):
                writer.add([done(b"a")]) if call == "add" else writer.commit(HEAD)


class TestDamage:
    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("name", "X'62'"),
            ("record", "3"),
            ("record", "X'00'"),
            ("head", "X'00'"),
            ("head", "content"),
            ("head", "'text'"),
            ("head", "NULL"),
        ],
    )
    def test_changed_column_is_refused_when_it_is_read(
        self, tmp_path: Path, column: str, value: str
    ) -> None:
        add(tmp_path, done(b"a"))
        change(tmp_path, f"UPDATE ended SET {column} = {value}")  # noqa: S608 - ours
        with Archive(tmp_path) as index:
            with pytest.raises(JournalDamaged, match="does not match its checksum"):
                index.find([b"a", b"b"])
            with pytest.raises(JournalDamaged, match="does not match its checksum"):
                index.verify()

    @pytest.mark.parametrize("value", ["X'00'", "head", "'text'", "NULL"])
    def test_changed_result_is_refused(self, tmp_path: Path, value: str) -> None:
        add(tmp_path, done(b"a"))
        change(tmp_path, f"UPDATE ended SET content = {value}")  # noqa: S608 - ours
        with Archive(tmp_path) as index:
            with pytest.raises(JournalDamaged, match="does not match its checksum"):
                index.streams(b"a")
            with pytest.raises(JournalDamaged, match="does not match its checksum"):
                index.verify()

    def test_lost_row_is_noticed_by_a_whole_look(self, tmp_path: Path) -> None:
        add(tmp_path, done(b"a"), done(b"b"))
        change(tmp_path, "DELETE FROM ended WHERE name = X'61'")
        words = "finished.sqlite has 1 rows, but 2 were written"
        with Archive(tmp_path) as index, pytest.raises(JournalDamaged, match=words):
            index.verify()

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE meta SET value = X'00' WHERE key = 'covered'",
            "UPDATE meta SET value = 'text' WHERE key = 'covered'",
            "DELETE FROM meta WHERE key = 'covered'",
        ],
    )
    def test_index_with_a_damaged_covered_row_is_refused(
        self, tmp_path: Path, statement: str
    ) -> None:
        add(tmp_path, done(b"a"))
        change(tmp_path, statement)
        words = "the covered row is damaged"
        with Archive(tmp_path) as index, pytest.raises(JournalDamaged, match=words):
            index.covered()

    @pytest.mark.parametrize(
        "statement",
        ["UPDATE meta SET value = X'FF' WHERE key = 'format'", "DELETE FROM meta"],
    )
    def test_invalid_format_number_is_damage(self, tmp_path: Path, statement: str) -> None:
        add(tmp_path, done(b"a"))
        change(tmp_path, statement)
        words = "finished.sqlite: the format number is damaged"
        with Archive(tmp_path) as index, pytest.raises(JournalDamaged, match=words):
            index.find([b"a"])
        with pytest.raises(JournalDamaged, match=words):
            ArchiveWriter(tmp_path, IDENTITY)

    def test_newer_format_is_refused(self, tmp_path: Path) -> None:
        add(tmp_path, done(b"a"))
        change(tmp_path, "UPDATE meta SET value = X'39' WHERE key = 'format'")
        with (
            Archive(tmp_path) as index,
            pytest.raises(UnknownFormat, match="use the version"),
        ):
            index.find([b"a"])
        with pytest.raises(UnknownFormat):
            ArchiveWriter(tmp_path, IDENTITY)

    def test_other_tables_are_refused(self, tmp_path: Path) -> None:
        add(tmp_path, done(b"a"))
        change(tmp_path, "CREATE TABLE more(a)")
        words = "the list of tables in .* is damaged"
        with Archive(tmp_path) as index, pytest.raises(JournalDamaged, match=words):
            index.find([b"a"])

    @pytest.mark.slow
    def test_flipped_bytes_and_lost_ends_never_give_another_answer(
        self, tmp_path: Path, sample: Callable[[Sequence[int]], list[int]]
    ) -> None:
        """Lookups give the right result or an error. A full verification gives an error."""
        some = [done(b"name %d" % number, number + 1) for number in range(40)]
        add(tmp_path, *some)
        path = tmp_path / archive.FILE_NAME
        content = path.read_bytes()
        expected = [ended(b"name %d" % number, number + 1) for number in range(40)]
        for place in sample(range(0, len(content), 29)):
            flipped = bytearray(content)
            flipped[place] ^= 0x5A
            path.write_bytes(flipped)
            assert_sound_or_refused(tmp_path, expected)
        for length in range(0, len(content), 997):
            path.write_bytes(content[:length])
            assert_sound_or_refused(tmp_path, expected)


def assert_sound_or_refused(directory: Path, expected: list[EndedTask]) -> None:
    """Compare an index that passes the full verification with the written tasks."""
    index = Archive(directory)
    try:
        index.covered()
        sound = index.verify() == len(expected)
        found = index.find([one.name for one in expected])
    except StateError:
        return
    finally:
        index.close()
        for suffix in ("-wal", "-shm"):
            Path(f"{directory / archive.FILE_NAME}{suffix}").unlink(missing_ok=True)
    assert sound
    assert sorted(found, key=lambda one: one.record) == expected


def test_index_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / archive.FILE_NAME).write_bytes(os.urandom(8192))
    with Archive(tmp_path) as index, pytest.raises(JournalDamaged, match="can't be read"):
        index.covered()


def test_blobs_of_results_and_output_are_listed_with_their_tasks(tmp_path: Path) -> None:
    names = [name_of(bytes([number])) for number in range(3)]
    own = Blob(bytes.fromhex(names[0].partition("-")[0]), 1, b"ends")
    call = b'{"pickle":1,"values":["%s"]}\n' % names[1].encode() + b"rest"
    add(
        tmp_path,
        row_of_end(ended(b"a"), call),
        row_of_output(b"b", 1, 3, (b"", own)),
        row_of_output(b"c", 1, 3, (own, Blob(b"", 9, b"cut"))),
        row_of_end(ended(b"d"), b"x" * 100),
    )
    with Archive(tmp_path) as index:
        assert index.blobs_named(names) == {*names[:2]}
        expected = [(names[0], b"b"), (names[0], b"c"), (names[1], b"a")]
        assert sorted(index.all_blobs()) == sorted(expected)
