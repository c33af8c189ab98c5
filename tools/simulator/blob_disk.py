"""The simulated disk of blobs: a directory that fails as a real one does.

The product's own `BlobFiles` runs on it. The product's calls are passed on to a real directory in
memory, and the disk notes what was not synced. A killed process loses nothing. A power cut loses or
tears bytes that were not synced, and undoes renames in directories that were not synced. Bytes
whose sync failed are lost with the power, too, whatever is synced later.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Final

from simulator.disk import Crashed
from simulator.mutations.registry import patched
from simulator.plan import chance
from taskyard.journal import blob_files
from taskyard.journal.files import PRIVATE_FILE
from taskyard.journal.store import DISK_RESERVE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from simulator.clock import SimClock

#: The name of a file that is being removed ends so.
REMOVED: Final = ".removed"


class _File:
    """A file: the bytes that the disk has, and the positions of bytes that only the memory has."""

    def __init__(self, content: bytes) -> None:
        self.durable = bytearray(content)
        self.dirty: list[tuple[int, int]] = []


class BlobDisk:
    """The disk of one machine. `installed` gives it to the product."""

    def __init__(self, rng: Random, clock: SimClock, *, has_faults: bool) -> None:
        self.root = Path()
        #: Nearly full.
        self.full: Callable[[], bool] = lambda: False
        #: All faults have ended.
        self.is_healed: Callable[[], bool] = lambda: False
        #: Called with the name of each blob that is removed, and when it was used last.
        self.on_removed: Callable[[str, int], None] = lambda _name, _used_ns: None
        #: Called with each file that loses bytes for good.
        self.on_lost: Callable[[Path], None] = lambda _path: None
        #: The broker may crash at any call now.
        self.is_busy = False
        #: Probabilities of a crash at a call, and at a rename, of a failed sync, a short write.
        self._crash, self._crash_at_rename, self._sync_fails, self._is_short = [0.0] * 4
        if has_faults:
            self._crash = rng.choice((0.0, 0.01, 0.03))
            self._crash_at_rename = rng.choice((0.0, 0.1, 0.4))
            self._sync_fails = rng.choice((0.0, 0.1, 0.3))
            self._is_short = rng.choice((0.0, 0.2))
        self._rng = rng
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._open: dict[int, str] = {}
        #: Renames whose directories are not synced.
        self._renames: list[tuple[Path, Path]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the product's blobs use this disk."""
        path_type = type("DiskPath", (_DiskPath,), {"disk": self})
        with (
            tempfile.TemporaryDirectory(prefix="taskyard-sim-", dir=quick_disk()) as directory,
            patched(blob_files, "os", _DiskOs(self)),
            patched(blob_files, "time", _DiskTime(self._clock)),
            patched(blob_files, "open_regular", self._open_regular),
            patched(blob_files, "sync_directory", self._sync_directory),
            patched(blob_files, "free_bytes", self._free_bytes),
        ):
            self.root = path_type(directory)
            yield

    # Calls of the product.

    def _open_regular(self, path: Path, flags: int) -> int:
        is_new = not os.path.exists(path)  # noqa: PTH110  # called often
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOATIME, PRIVATE_FILE)
        self._open[descriptor] = str(path)
        if is_new:
            self._files[str(path)] = _File(b"")
            self._set_times(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]
        os.close(descriptor)

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        """Write at most as many bytes. Few may fit."""
        self._maybe_crash("before a write of blobs")
        if self.full() and chance(self._rng, 0.5):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(data) > 1 and self._happens(self._is_short):
            data = data[: 1 + self._rng.randrange(len(data) - 1)]
        count = os.pwrite(descriptor, data, offset)
        self._file(descriptor).dirty.append((offset, offset + count))
        self._set_times(descriptor)
        return count

    def sync(self, descriptor: int) -> None:
        """Sync a file. A later sync does not write the bytes of a failed sync."""
        self._maybe_crash("before a sync of blobs")
        file = self._file(descriptor)
        dirty, file.dirty = file.dirty, []
        if dirty and self._happens(self._sync_fails):
            self.on_lost(Path(self._open[descriptor]))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        size = os.fstat(descriptor).st_size
        for start, end in dirty:
            data = os.pread(descriptor, min(end, size) - start, start)
            missing = start - len(file.durable)
            file.durable[start : start + len(data)] = bytes(max(0, missing)) + data
        del file.durable[size:]

    def cut(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)
        self._set_times(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)  # noqa: PTH104  # this is the rename of paths
        known = self._files.pop(str(source), None)
        if known is not None:
            self._files[str(target)] = known
        self._renames.append((source, target))
        if self.is_busy and self._happens(self._crash_at_rename):
            self._note_removed(target)
            raise Crashed("after a rename of a blob")

    def unlink(self, path: Path) -> None:
        self._note_removed(path)
        os.unlink(path)  # noqa: PTH108  # this is the unlink of paths
        self._files.pop(str(path), None)

    def _note_removed(self, path: Path) -> None:
        """Report a blob that is hidden, and not coming back."""
        if path.name.endswith(REMOVED):
            found = path.stat()
            used_ns = max(found.st_atime_ns, found.st_mtime_ns)
            self.on_removed(path.name.removesuffix(REMOVED), used_ns)

    def _sync_directory(self, directory: Path) -> None:
        self._maybe_crash("before a sync of a directory of blobs")
        self._renames = [one for one in self._renames if one[1].parent != directory]

    def _free_bytes(self, _directory: Path) -> int:
        return DISK_RESERVE_BYTES // 2 if self.full() else 2 * DISK_RESERVE_BYTES

    def _file(self, descriptor: int) -> _File:
        return self._files[self._open[descriptor]]

    def _set_times(self, descriptor: int) -> None:
        now_ns = self._clock.wall_ns()
        os.utime(descriptor, ns=(now_ns, now_ns))

    def wall_ns(self) -> int:
        return self._clock.wall_ns()

    # Faults.

    def _maybe_crash(self, where: str) -> None:
        if self.is_busy and self._happens(self._crash):
            raise Crashed(where)

    def _happens(self, probability: float) -> bool:
        return not self.is_healed() and probability > 0 and chance(self._rng, probability)

    def cut_power(self) -> None:
        """Lose what was not synced."""
        for path, file in [*self._files.items()]:
            if self._lose(Path(path), file):
                self.on_lost(Path(path))
        for source, target in reversed(self._renames):
            if chance(self._rng, 0.5) and target.exists() and not source.exists():
                source.parent.mkdir(parents=True, exist_ok=True)
                os.rename(target, source)  # noqa: PTH104  # no call of the product
                known = self._files.pop(str(target), None)
                if known is not None:
                    self._files[str(source)] = known
        self._renames = []

    def _lose(self, path: Path, file: _File) -> bool:
        """Write what the disk has of a file, and some of what it may have. Return the loss."""
        content = read_file(path)
        kept, synced = bytearray(file.durable), len(file.durable)
        if file.dirty and len(content) > synced:
            end = len(content)
            if chance(self._rng, 0.5):
                end = self._rng.randint(synced, end)
            kept += content[synced:end]
            torn = self._rng.randint(synced, end)
            if chance(self._rng, 0.5):  # the length was written, and not all of the bytes
                kept[torn:] = bytes(end - torn)
        file.durable, file.dirty = kept, []
        if kept == content:
            return False
        found = path.stat()
        path.write_bytes(kept)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        return True


class _DiskPath(PosixPath):
    """A path whose renames and removals the disk notes."""

    disk: BlobDisk

    def rename(self, target: Any) -> Any:  # noqa: ANN401  # as in `pathlib`
        self.disk.rename(self, target)
        return target

    def unlink(self, missing_ok: bool = False) -> None:  # noqa: FBT001, FBT002  # as in `pathlib`
        try:
            self.disk.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise


class _DiskOs:
    """Stands for `os`."""

    def __init__(self, disk: BlobDisk) -> None:
        self._disk = disk
        self.pwrite, self.close, self.ftruncate = disk.write, disk.close, disk.cut
        self.fsync = self.fdatasync = disk.sync

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of a module
        return getattr(os, name)

    def utime(self, path: Any, ns: tuple[int, int] | None = None) -> None:  # noqa: ANN401
        now_ns = self._disk.wall_ns()
        os.utime(path, ns=ns or (now_ns, now_ns))


class _DiskTime:
    """Stands for `time`."""

    def __init__(self, clock: SimClock) -> None:
        self.time_ns = clock.wall_ns


def read_file(path: Path) -> bytes:
    """Return the bytes of a file, without a note that it was read: that would be a use."""
    with open(os.open(path, os.O_RDONLY | os.O_NOATIME), "rb") as file:  # noqa: PTH123
        return file.read()


def quick_disk() -> str | None:
    """Return a directory in memory, if there is any: the product syncs each file."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
