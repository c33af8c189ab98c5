"""Every format ever written can be read: golden files of each, and the procedure for new ones."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from taskyard.core import invariants
from taskyard.core.fingerprint import ledger_fingerprint
from taskyard.core.model import Result
from taskyard.core.output import Stream
from taskyard.core.records import AnyRecord, Submitted
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged, StateError
from taskyard.journal import (
    archive,
    compaction,
    history,
    parquet_file,
    recovery,
    row_file,
    snapshot,
    state_check,
)
from taskyard.journal.archive import Archive
from taskyard.journal.recovery import JOURNAL_FORMAT, decode, encode
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore
from tests.journal.make_golden import (
    COMPACTED_AT,
    GOLDEN,
    GOLDEN_INDEXES,
    GOLDEN_ROWS,
    GOLDEN_SNAPSHOTS,
    INDEXED,
    LATEST,
    OUTPUTS,
    RECORDS,
    described,
    record_lines,
)
from tests.journal.row_files import read_rows
from tests.journal.scenarios import rich_story, unfinished

VERSIONS = sorted(GOLDEN.iterdir())

#: From the time when keys were bare names.
BARE = ("format-1", "format-2", "format-3")

#: Formats after the first, which is in the golden state directory.
SNAPSHOTS = sorted(GOLDEN_SNAPSHOTS.iterdir())


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
            if isinstance(record, Submitted):
                assert record.bare is (version.name in BARE)
                record.bare = False
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
        with pytest.raises(StateError, match=r"has format 250, .* \(use a newer Taskyard\)"):
            decode(bytes([250]) + encode(RECORDS)[1:])

    def test_empty_body_is_refused(self) -> None:
        with pytest.raises(JournalDamaged, match="is empty"):
            decode(b"")

    def test_body_that_is_no_record_is_refused(self) -> None:
        with pytest.raises(JournalDamaged, match="can't be read"):
            decode(encode(RECORDS)[:-1])

    def test_every_version_that_has_a_golden_file_has_a_reader(self) -> None:
        golden = [int(path.name.removeprefix("format-")) for path in VERSIONS]
        assert golden == sorted(recovery._READERS)  # noqa: SLF001 - the ritual's other half
        snapshots = [int(path.stem.removeprefix("format-")) for path in SNAPSHOTS]
        assert [1, *snapshots] == [*snapshot.WHOLE_FORMATS, snapshot.FORMAT]
        assert max(snapshots) == snapshot.FORMAT


class TestStateDirectory:
    def test_golden_state_gives_its_ledger(self, version: Path, state: Path) -> None:
        store = SqliteStore(state)
        ledger = recovery.open_ledger(state, store)
        store.close()
        assert described(ledger) == (version / "ledger.txt").read_text()

    def test_golden_snapshot_is_read(self, state: Path) -> None:
        with snapshot.read(state, COMPACTED_AT) as taken:
            assert taken.head.sequence == COMPACTED_AT
            assert b"hopeful" in taken.restore().tasks

    @pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
    def test_golden_snapshot_of_later_formats_is_read(self, path: Path) -> None:
        ledger = snapshot.decode(path.read_bytes(), path.name)
        first, second, other = ledger.named([b"bundle/0", b"bundle/1", b"other"])
        assert first.payload is second.payload
        assert (first.payload, other.payload) == (b"shared" * 100, b"own")

    def test_golden_index_is_read(self, version: Path, state: Path) -> None:
        key = b"a" if version.name in BARE else b"first/a"
        with Archive(state) as index:
            assert index.verify() == index.count() > 0
            (ended,) = index.find([key])
            assert (ended.state, ended.campaign, ended.digest) == (TaskState.DONE, b"first", b"a")
            assert index.result(key) == Result(b"result of a")

    def test_campaigns_of_golden_states_before_format_4_are_bare(
        self, version: Path, state: Path
    ) -> None:
        store = SqliteStore(state)
        ledger = recovery.open_ledger(state, store)
        store.close()
        campaigns = sorted(filter(None, ledger.campaigns))
        assert sorted(ledger.bare) == (campaigns if version.name in BARE else [])
        invariants.check_ledger(ledger)

    def test_golden_index_of_later_formats_is_read(self, tmp_path: Path) -> None:
        for version in GOLDEN_INDEXES.iterdir():
            state = Path(shutil.copytree(version, tmp_path / version.name))
            with Archive(state) as index:
                assert index.verify() == len(INDEXED)
                for ended, result in INDEXED:
                    assert (index.find([ended.name]), index.result(ended.name)) == ([ended], result)
                for name, attempt, *streams in OUTPUTS if version.name != "format-2" else ():
                    assert [index.output(name, attempt, one) for one in Stream] == streams
                assert index.output(b"a", 9, Stream.STDOUT) is None

    def test_every_index_format_has_a_golden_file(self) -> None:
        later = sorted(path.name.removeprefix("format-") for path in GOLDEN_INDEXES.iterdir())
        # The first is in the golden state directories.
        assert ["1", *later] == [version.decode() for version in archive._READABLE]  # noqa: SLF001

    def test_golden_state_is_compacted_to_a_snapshot_of_this_format(self, state: Path) -> None:
        """The old snapshot is the base of the new one."""
        with closing(SqliteStore(state)) as store:
            before = unfinished(ledger_fingerprint(recovery.open_ledger(state, store)))
            assert compaction.compact(state, store).rows > 0
            with snapshot.read(state, store.head.sequence) as taken:
                assert taken.version == snapshot.FORMAT
            assert ledger_fingerprint(recovery.open_ledger(state, store)) == before

    def test_golden_state_is_sound(self, state: Path) -> None:
        findings = state_check.check(state, deep=True)
        assert findings.wrong == []
        assert (findings.trimmed, findings.history_last) == (COMPACTED_AT, COMPACTED_AT)


@pytest.mark.parametrize("path", sorted(GOLDEN_ROWS.iterdir()), ids=lambda path: path.name)
def test_golden_row_files_are_read(path: Path, tmp_path: Path) -> None:
    """Compare with the same story, written by this version: by our reader and by the page's."""
    compaction.export(tmp_path, rich_story(MemoryStore()).store)
    (golden,), (written,) = history.parts(path)[0], history.parts(tmp_path)[0]
    assert golden == written
    assert history.check_part(path, golden, deep=True) > 100
    for table, file in golden.paths(path).items():
        expected = written.paths(tmp_path)[table]
        rows = parquet_file.read_table(file)
        assert rows == parquet_file.read_table(expected)
        assert list(read_rows(file)) == list(read_rows(expected))
        assert rows.num_rows > 0


def test_every_format_of_row_files_has_golden_files() -> None:
    assert f"format-{row_file.FORMAT}" in [path.name for path in GOLDEN_ROWS.iterdir()]
