"""Acknowledged rows survive: after SIGKILL, on a failing disk, on a full disk."""

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskyard.errors import JournalFailed
from taskyard.journal.sqlite import SqliteStore
from tests.journal import failing_disk
from tests.kit import disks
from tests.kit.requirements import need

KILLS = 6
#: With --whole.
KILLS_WHOLE = 20
#: Of calls that may find the disk full one in this many does, or each with --whole.
FULL_AT = 5
HERE = Path(__file__).parent
DISK_BYTES = 4 * 1024 * 1024

COMMIT_UNTIL_KILLED = """
import sys
from pathlib import Path
from taskyard.journal.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
while True:
    body = b"row %d " % (store.head.sequence + 1) * int(sys.argv[2])
    print(store.commit(body, 2).sequence, flush=True)
"""


def rows_in(directory: Path) -> list[int]:
    store = SqliteStore(directory)
    try:
        return [row.sequence for row in store.rows()]
    finally:
        store.close()


def killed_after(directory: Path, reports: int, body_size: int) -> int:
    """Return the last sequence that the child reported before it was killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", COMMIT_UNTIL_KILLED, directory, str(body_size)],
        stdout=subprocess.PIPE,
        bufsize=0,  # read-ahead would be missing from the rest
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(reports)]
    child.kill()
    rest, _ = child.communicate()
    lines += rest.splitlines(keepends=True)
    return int([line for line in lines if line.endswith(b"\n")][-1])


@pytest.mark.slow
def test_every_reported_row_survives_sigkill(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    chance = random.Random(pytestconfig.getoption("--sample-seed"))
    for _ in range(KILLS_WHOLE if pytestconfig.getoption("--whole") else KILLS):
        reported = killed_after(tmp_path, chance.randint(1, 80), chance.choice([10, 1_000, 10_000]))
        kept = rows_in(tmp_path)
        assert kept == list(range(1, len(kept) + 1))
        assert kept[-1] in (reported, reported + 1)  # one may be durable and not reported yet


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = need("cc")
    library = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    source = HERE / "failing_disk.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def runs_on_failing_disk(
    shim: Path, parent: Path, error: int, group: int, seed: int
) -> list[dict[str, object]]:
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    words = (str(parent), str(error), str(group), str(seed))
    program = [sys.executable, failing_disk.__file__, *words]
    lines = subprocess.run(program, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_whichever_call_fails_no_acknowledged_row_is_lost(
    shim: Path, tmp_path: Path, pytestconfig: pytest.Config, error: int
) -> None:
    is_sampled = error == errno.ENOSPC and not pytestconfig.getoption("--whole")
    group = FULL_AT if is_sampled else 1
    seed = pytestconfig.getoption("--sample-seed") + error  # other calls for each error
    runs = runs_on_failing_disk(shim, tmp_path, error, group, seed)
    failed = [run for run in runs if run["ended"]]
    assert len(failed) > 100 // group  # an unnoticed error would make a shorter list
    for run in runs:
        acknowledged = run["acknowledged"]
        assert isinstance(acknowledged, list)
        assert run["ended"] or len(acknowledged) == failing_disk.COMMITS
        assert str(run["ended"]).startswith("6 ") == bool(run["ended"])
        kept = rows_in(Path(str(run["directory"])))
        assert kept[: len(acknowledged)] == acknowledged
        assert len(kept) <= len(acknowledged) + 1
    print(f"{len(runs) - 1} calls failed, {len(failed)} of them noticed")  # noqa: T201


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Mount a separate disk of a few MB."""
    with disks.small_disk(DISK_BYTES) as place:
        yield place


def commit_until_it_fails(store: SqliteStore, acknowledged: list[int]) -> None:
    while True:
        head = store.commit(bytes(10_000), 1)
        acknowledged.append(head.sequence)


def test_full_disk_stops_the_journal_and_loses_nothing(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2_500_000))
    store = SqliteStore(small_disk / "state")
    acknowledged: list[int] = []
    with pytest.raises(JournalFailed, match="nothing more is acknowledged: the disk is full"):
        commit_until_it_fails(store, acknowledged)
    with pytest.raises(JournalFailed, match="the disk is full"):
        store.commit(b"late", 1)
    assert store.disk_free_bytes() < 100_000
    store.close()
    assert len(acknowledged) > 50
    ballast.unlink()
    assert rows_in(small_disk / "state") == acknowledged
