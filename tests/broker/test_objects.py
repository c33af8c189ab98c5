"""Output and values that are moved from a broker's database to S3."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from taskyard.broker.database_files import OutputRows, StateFiles, open_mover, value_place
from taskyard.broker.output_store import StreamKey
from taskyard.client.client import Client
from taskyard.core.output import OutputChunk, Stream
from taskyard.errors import LeaderLost, UnusableStore
from taskyard.journal.postgres import database
from taskyard.journal.postgres.blobs import VALUE, Blobs, BlobTables
from taskyard.journal.postgres.leader import Term
from taskyard.journal.postgres.move import Files, to_directory
from taskyard.journal.postgres.objects import Mover, Objects
from taskyard.journal.value_files import ValueFiles, name_of
from tests.broker.test_database_files import CONTENT, open_blobs, parts_count
from tests.kit.processes import PATIENCE_SECONDS, Broker, Worker, until
from tests.pipeline import s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kit.postgres import Cluster

PLACE = f"s3://{s3_server.BUCKET}/some/path"
KEY = StreamKey(b"c", b"t", 1, Stream.STDOUT)
NAME = name_of(CONTENT)

LINES = 200_000


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    with s3_server.served() as found:
        yield found


@pytest.fixture(autouse=True)
def _server(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def blobs(url: str) -> Iterator[Blobs]:
    with open_blobs(url) as found:
        found.read_object = Objects().read
        yield found


@pytest.fixture
def mover(blobs: Blobs) -> Iterator[Mover]:
    found = Mover(blobs.copy(), PLACE, Objects())
    yield found
    found._tables.close()  # noqa: SLF001  # its thread was not started


def objects_count() -> int:
    system, path = Objects()._open(f"{PLACE}/x")  # noqa: SLF001
    from pyarrow import fs  # noqa: PLC0415

    selector = fs.FileSelector(path.rpartition("/")[0], allow_not_found=True)
    return len(system.get_file_info(selector))


def test_blobs_are_moved_when_they_are_complete_and_cold(
    blobs: Blobs, mover: Mover, tmp_path: Path
) -> None:
    before = objects_count()
    outputs, values = OutputRows(blobs), value_place(tmp_path, blobs).files
    outputs.write(OutputChunk(*KEY, 0, b"abc"))
    outputs.flush()
    blobs.put(VALUE, NAME.encode(), [CONTENT], 1)
    assert mover.run_round() == 1  # the value: the output may still grow, and is new
    assert mover.run_round(0) == 0
    outputs.write(OutputChunk(*KEY, 3, b"def"))
    outputs.flush()
    assert outputs.end(KEY, 6) == 6
    assert mover.run_round() == 0
    assert mover.run_round(0) == 1
    assert parts_count(blobs) == 0
    assert objects_count() - before == 2
    assert outputs.read(KEY, 2, 100) == (b"cdef", 6)
    assert outputs.read(KEY, 6, 100) == (b"", 6)
    assert values.read(NAME, 5, 10) == CONTENT[5:15]
    assert values.touch(NAME)
    (file,) = outputs.walk()
    outputs.remove(file)
    assert values.remove(NAME, 1 << 62)
    assert mover.run_round() == 2
    assert objects_count() == before
    assert mover.run_round() == 0


def test_blob_that_is_removed_meanwhile_leaves_no_object(
    blobs: Blobs, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, put = objects_count(), Objects.put
    blobs.put(VALUE, NAME.encode(), [CONTENT], 1)

    def put_and_remove(*arguments: object) -> None:
        put(*arguments)  # type: ignore[arg-type]
        blobs.remove(VALUE, [NAME.encode()])

    monkeypatch.setattr(Objects, "put", put_and_remove)
    assert mover.run_round() == 1
    assert objects_count() == before


def test_blob_whose_move_is_repeated_keeps_its_object(
    blobs: Blobs, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply of the first statement was lost with its connection."""
    blobs.put(VALUE, NAME.encode(), [CONTENT], 1)
    execute = BlobTables._execute  # noqa: SLF001

    def execute_twice(
        self: BlobTables, statement: LiteralString, values: dict[str, object]
    ) -> object:
        if "SET place" in statement:
            execute(self, statement, values)
        return execute(self, statement, values)

    with monkeypatch.context() as patch:
        patch.setattr(BlobTables, "_execute", execute_twice)
        assert mover.run_round() == 1
    assert blobs.read(VALUE, NAME.encode(), 0, 9) == (CONTENT[:9], len(CONTENT))


def test_stale_broker_moves_nothing(url: str, blobs: Blobs, mover: Mover) -> None:
    blobs.put(VALUE, NAME.encode(), [CONTENT], 1)
    with open_blobs(url) as newer:
        with pytest.raises(LeaderLost):
            mover.run_round()
        newer.read_object = Objects().read
        with_newer = Mover(newer, PLACE, Objects())
        assert parts_count(newer) > 0
        assert with_newer.run_round() == 1
        assert newer.read(VALUE, NAME.encode(), 0, 9) == (CONTENT[:9], len(CONTENT))


def test_blobs_stay_in_the_database_while_s3_is_down(
    blobs: Blobs,
    mover: Mover,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blobs.put(VALUE, NAME.encode(), [CONTENT], 1)

    def fail(*_: object) -> None:
        raise OSError("S3 is down")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Objects, "put", fail)
        with Mover(blobs.copy(), PLACE, Objects()):
            until(lambda: "stay in the database for now: S3 is down" in caplog.text, "a warning")
    assert blobs.read(VALUE, NAME.encode(), 0, 9) == (CONTENT[:9], len(CONTENT))
    assert mover.run_round() == 1
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "read", fail)
        blobs.read_object = Objects().read
        assert OutputRows(blobs).read(KEY, 0, 9) is None
        with pytest.raises(OSError, match="S3 is down"):
            blobs.read(VALUE, NAME.encode(), 0, 9)


def test_place_that_can_not_be_used_is_refused(url: str) -> None:
    with pytest.raises(UnusableStore, match="s3://other/path"):
        open_mover(url, "s3://other/path", Term(1, "me"))


def test_broker_with_s3_dies_and_leaves_everything(tmp_path: Path, url: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = ("--store", url, "--files", PLACE)
    for directory in (first, second):
        directory.mkdir()
    with Broker(first, *options) as broker, Worker(first, "--allow-pickle"):
        with Client(state=first / ".taskyard") as client:
            expected = client.submit(["seq", str(LINES)], name="long").result(PATIENCE_SECONDS)
            client.submit(bytes, 2 << 20, name="value").result(PATIENCE_SECONDS)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("UPDATE taskyard.blobs SET used_ns = 0")
            query = "SELECT count(*) FROM taskyard.blobs WHERE place = ''"
            until(lambda: connection.execute(query).fetchall() == [(0,)], "the move to S3")
        broker.kill()
    shutil.rmtree(first / ".taskyard")
    with Broker(second, *options), Client(state=second / ".taskyard") as client:
        assert client.result("long") == expected
        assert client.result("value") == bytes(2 << 20)
    with database.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM taskyard.parts").fetchall() == [(0,)]
    to_directory(url, tmp_path / "back", Files(None, StateFiles()))
    (output,) = (tmp_path / "back" / "outputs").rglob("*.out")
    assert output.read_text() == expected
    (value,) = ValueFiles(tmp_path / "back" / "values").walk()
    assert value.bytes_total > 2 << 20
