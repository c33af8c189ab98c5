"""History files in the directory of `--files`, which may be at another path on each machine.

A file has the name of its upload. So a broker that lost its term writes the same file again.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from taskyard.journal import history, value_files
from taskyard.journal.files import (
    PRIVATE_FILE,
    SYNC_BYTES,
    free_bytes,
    make_private_directory,
    sync_directory,
)
from taskyard.journal.postgres.objects import check_size
from taskyard.journal.store import DISK_RESERVE_BYTES

#: Of files that are not complete.
_UNFINISHED: Final = "new"

#: The name of an upload, or of its unfinished file.
_UPLOAD: Final = re.compile(rf"\d+-[0-9a-f]+(\.[0-9a-f]+\.{_UNFINISHED})?")


class SharedDirectory:
    """Files by a URL. Only its last word counts. Implements `ObjectStore`."""

    def __init__(self, files: Path) -> None:
        """`files` is the directory of `--files` on this machine."""
        self._folder = files / history.FOLDER

    def path(self, url: str) -> Path:
        """Return the path of a file."""
        return self._folder / url.rpartition("/")[2]

    def put(self, url: str, contents: Iterable[bytes], bytes_total: int) -> None:
        """Write a file. Raises `OSError` unless all of it is there, and durable."""
        path = self.path(url)
        make_private_directory(self._folder)
        for killed in self._folder.glob(f"{path.name}.*.{_UNFINISHED}"):
            killed.unlink(missing_ok=True)
        # Output and values need the rest of the disk.
        if free_bytes(self._folder) - bytes_total < DISK_RESERVE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.{_UNFINISHED}")
        try:
            _write(unfinished, contents)
            check_size(str(path), unfinished.stat().st_size, bytes_total)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_directory(self._folder)

    def read(self, url: str, offset: int, count: int) -> bytes:
        """Return some bytes of a file. Raises `OSError`."""
        with self.path(url).open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def remove(self, url: str) -> None:
        """Remove a file, if it is there. Raises `OSError`."""
        self.path(url).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all files that have names of uploads."""
        for path in self._folder.glob("*"):
            if _UPLOAD.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # it has other files, or is missing
            self._folder.rmdir()


def linked(state: Path) -> Path | None:
    """Return the directory of `--files` that a state directory has links to, if any."""
    link = state / value_files.FOLDER
    return link.readlink().parent if link.is_symlink() else None


def _write(path: Path, contents: Iterable[bytes]) -> None:
    """Write and sync a new file, in portions, as a large sync delays those of others."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb") as file:
        synced = 0
        for content in contents:
            file.write(content)
            if file.tell() - synced >= SYNC_BYTES:
                file.flush()
                os.fdatasync(file.fileno())
                synced = file.tell()
        file.flush()
        os.fsync(file.fileno())
