"""The simulated disk of blobs keeps what was synced, and may lose everything else."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from simulator.blob_disk import BlobDisk
from simulator.clock import SimClock, Timeline
from simulator.outputs import name_of
from taskyard.core.model import Stream
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import StreamKey

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = StreamKey(b"", b"a", 1, Stream.STDOUT)
CONTENT = b"0123456789" * 100
NAME = name_of(CONTENT)
SEEDS = range(20)


@pytest.fixture(params=SEEDS)
def disk(request: pytest.FixtureRequest) -> Iterator[BlobDisk]:
    made = BlobDisk(Random(request.param), SimClock(Timeline()), has_faults=False)
    with made.installed():
        yield made


def opened(disk: BlobDisk) -> BlobFiles:
    return BlobFiles(disk.root / "blobs")


def test_killed_process_loses_nothing(disk: BlobDisk) -> None:
    files = opened(disk)
    files.append(KEY, 0, CONTENT)
    files.close()
    assert opened(disk).read(KEY, 0, 1_000) == (CONTENT, 1_000)


def test_power_cut_loses_no_sealed_blob(disk: BlobDisk) -> None:
    files = opened(disk)
    files.append(KEY, 0, CONTENT)
    assert files.seal(KEY, NAME)
    files.close()
    disk.cut_power()
    assert opened(disk).read(NAME, 0, 1_000) == (CONTENT, 1_000)


def outcomes(*, syncs: bool, fails: bool = False, renames: bool = False) -> dict[bytes, None]:
    """Return the contents that a file may have after a power cut."""
    found: dict[bytes, None] = {}
    for seed in SEEDS:
        disk = BlobDisk(Random(seed), SimClock(Timeline()), has_faults=False)
        with disk.installed():
            files = opened(disk)
            files.append(KEY, 0, CONTENT[:500])
            stream = files._stream(KEY)  # noqa: SLF001  # the descriptor
            if syncs:
                disk.sync(stream.descriptor)
            files.append(KEY, 500, CONTENT[500:])
            if fails:
                disk._sync_fails = 1.0  # noqa: SLF001  # a fault
                with pytest.raises(OSError, match="Input/output error"):
                    disk.sync(stream.descriptor)
                disk._sync_fails = 0.0  # noqa: SLF001
                disk.sync(stream.descriptor)
            path = files.path(KEY)
            if renames:
                disk.sync(stream.descriptor)
                path.rename(path.with_name("new"))
            files.close()
            disk.cut_power()
            new = path.with_name("new")
            is_new = new.exists()
            found[(new if is_new else path).read_bytes() + b"new" * is_new] = None
    return found


def test_power_cut_loses_or_tears_what_was_not_synced() -> None:
    found = outcomes(syncs=True)
    assert all(one.startswith(CONTENT[:500]) for one in found)
    assert CONTENT in found
    assert any(len(one) < len(CONTENT) for one in found)
    assert any(len(one) == len(CONTENT) and b"\0" in one for one in found)
    assert any(len(one) < 500 for one in outcomes(syncs=False))


def test_bytes_of_a_failed_sync_are_lost_though_a_later_one_succeeds() -> None:
    assert [*outcomes(syncs=True, fails=True)] == [CONTENT[:500]]


def test_rename_may_be_undone_until_its_directory_is_synced() -> None:
    assert sorted(outcomes(syncs=True, renames=True)) == [CONTENT, CONTENT + b"new"]


def test_removal_is_reported_with_the_time_of_the_last_use(disk: BlobDisk) -> None:
    removed: list[tuple[str, int]] = []
    disk.on_removed = lambda *found: removed.append(found)
    files = opened(disk)
    files.append(KEY, 0, CONTENT)
    assert files.seal(KEY, NAME)
    assert files.remove(NAME, disk.wall_ns())
    files.close()
    assert removed == [(NAME, disk.wall_ns())]
