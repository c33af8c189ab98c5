"""Every format ever written can be read: golden files of each, and the procedure for new ones."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from simulator import invariants
from taskyard.core.blobs import Blob, blob_name
from taskyard.core.records import AnyRecord
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged, UnknownFormat
from taskyard.journal import compaction, history, history_arrow, recovery, snapshot, state_check
from taskyard.journal.archive import Archive
from taskyard.journal.recovery import JOURNAL_FORMAT, decode, encode
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import ledger_fingerprint
from tests.journal.make_golden import GOLDEN, LATEST, RECORDS, described, make_state, record_lines
from tests.journal.row_files import read_rows
from tests.journal.scenarios import unfinished

VERSIONS = sorted(GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def version(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def state(version: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(version / "state", tmp_path / "state"))


def lines_of(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    assert lines
    return lines


def unpacked(body: str) -> object:
    """Return the arrays of a row's body, without their classes."""
    return msgspec.msgpack.decode(bytes.fromhex(body)[1:])


def extends(new: object, old: object) -> bool:
    """Return whether arrays are equal, except for new fields at their ends."""
    if isinstance(new, list) and isinstance(old, list):
        return len(new) >= len(old) and all(map(extends, new, old))
    return new == old


class TestRecords:
    def test_every_record_comes_back_as_it_was(self) -> None:
        assert decode(encode(RECORDS)) == RECORDS
        for record in RECORDS:
            assert decode(encode([record])) == [record]

    def test_every_record_is_among_the_golden_ones(self) -> None:
        assert {type(record) for record in RECORDS} == set(get_args(AnyRecord))

    def test_golden_bytes_of_any_version_give_the_records(self, version: Path) -> None:
        for line in [line for path in version.glob("records*.txt") for line in lines_of(path)]:
            name, body = line.split()
            (record,) = decode(bytes.fromhex(body))
            assert type(record).__name__ == name
            assert record in RECORDS

    def test_records_are_written_as_the_golden_bytes_of_this_version(self) -> None:
        assert record_lines() == lines_of(GOLDEN / f"format-{JOURNAL_FORMAT}" / LATEST)

    def test_records_are_written_as_the_golden_bytes_of_this_version_and_more_at_the_end(
        self,
    ) -> None:
        golden = (GOLDEN / f"format-{JOURNAL_FORMAT}" / "records.txt").read_text().splitlines()
        for old, new in zip(golden, record_lines(), strict=False):
            (old_name, old_body), (new_name, new_body) = old.split(), new.split()
            assert new_name == old_name
            assert extends(unpacked(new_body), unpacked(old_body))

    def test_tags_are_numbers_that_are_used_once(self) -> None:
        tags = [record.__struct_config__.tag for record in get_args(AnyRecord)]
        assert tags == list(range(1, len(tags) + 1))


class TestDecoding:
    def test_body_of_an_unknown_version_is_refused_with_a_hint(self) -> None:
        with pytest.raises(UnknownFormat, match=r"has format 250, .* \(use the version that"):
            decode(bytes([250]) + encode(RECORDS)[1:])

    def test_empty_body_is_refused(self) -> None:
        with pytest.raises(JournalDamaged, match="is empty"):
            decode(b"")

    def test_body_that_is_no_record_is_refused(self) -> None:
        with pytest.raises(JournalDamaged, match="can't be read"):
            decode(encode(RECORDS)[:-1])


class TestStateDirectory:
    def test_golden_state_gives_its_ledger(self, version: Path, state: Path) -> None:
        with closing(SqliteStore(state)) as store:
            ledger = recovery.open_ledger(state, store)
        assert described(ledger) == (version / "ledger.txt").read_text()
        invariants.check_ledger(ledger)

    def test_golden_snapshot_is_read(self, state: Path) -> None:
        with snapshot.read(state, snapshot.sequences(state)[0]) as taken:
            ledger = taken.restore()
        first, second = ledger.named([b"bundle/0", b"bundle/1"])
        assert first.payload is second.payload
        assert first.payload == b"shared" * 100
        assert b"hopeful" in ledger.tasks

    def test_golden_index_is_read(self, state: Path) -> None:
        with Archive(state) as index:
            assert index.verify() == index.count() > 0
            (ended,) = index.find([b"first/a"])
            assert (ended.state, ended.campaign, ended.digest) == (TaskState.DONE, b"first", b"a")
            assert index.streams(b"first/a") == (b"result of a", b"")
            long = Blob(bytes(range(32)), 2_000_000, b"ends")
            assert index.streams(b"long") == (long, b"")
            assert [*index.all_blobs()] == [(blob_name(long), b"long")]
            assert index.streams(b"long", 1) == (b"", Blob(b"", 300_000, b"err"))
            assert index.streams(b"long", 2) is None

    def test_golden_row_files_are_read(self, state: Path, tmp_path: Path) -> None:
        """Compare with the same rows, written by this version: by our reader and by the page's."""
        make_state(tmp_path / "new")
        (golden,) = history.parts(state)
        assert [golden] == history.parts(tmp_path / "new")
        assert history.check_part(state, golden, deep=True) > 30
        file, expected = golden.path(state), golden.path(tmp_path / "new")
        for table in history_arrow.TABLES:
            rows = history_arrow.read_table([file], table)
            assert rows == history_arrow.read_table([expected], table)
            assert list(read_rows(file, table)) == list(read_rows(expected, table))
            assert rows.num_rows > 0

    def test_golden_state_is_compacted(self, state: Path) -> None:
        """The golden snapshot is the base of the new one."""
        with closing(SqliteStore(state)) as store:
            before = unfinished(ledger_fingerprint(recovery.open_ledger(state, store)))
            assert compaction.compact(state, store).rows > 0
            assert ledger_fingerprint(recovery.open_ledger(state, store)) == before

    def test_golden_state_is_sound(self, state: Path) -> None:
        findings = state_check.check(state, deep=True)
        assert findings.wrong == []
        assert findings.trimmed == findings.history_last > 0
