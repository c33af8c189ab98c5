"""History files in the directory of `--files`, which may be at another path on each machine.

A file has the name of its upload, which is never used again. So a broker that lost its term writes
the same file again. The directory is never created here: what is written below the mount point of a
directory that is not mounted would be lost.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from taskyard.journal import blobs, history
from taskyard.journal.files import create_private_of, free_bytes, sync_directory
from taskyard.journal.store import DISK_RESERVE_BYTES

#: Of files that are not complete.
_UNFINISHED: Final = "new"

#: The name of an upload, or of its unfinished file.
_UPLOAD: Final = re.compile(rf"\d+-[0-9a-f]+(\.[0-9a-f]+\.{_UNFINISHED})?")


def path_of(files: Path, upload: str) -> Path:
    """Return the path of a file. `files` is the directory of `--files` on this machine."""
    return files / history.FOLDER / upload


def write(files: Path, upload: str, contents: Iterable[bytes], bytes_total: int) -> None:
    """Write a file durably, or nothing if `contents` raises. Raises `OSError`."""
    path = path_of(files, upload)
    for killed in path.parent.glob(f"{upload}.*.{_UNFINISHED}"):
        killed.unlink(missing_ok=True)
    # Blobs need the rest of the disk.
    if free_bytes(path.parent) - bytes_total < DISK_RESERVE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    unfinished = path.with_name(f"{upload}.{secrets.token_hex(4)}.{_UNFINISHED}")
    try:
        create_private_of(unfinished, contents)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def clear(files: Path) -> None:
    """Remove all files that have names of uploads."""
    folder = files / history.FOLDER
    for path in folder.glob("*"):
        if _UPLOAD.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # it has other files, or is missing
        folder.rmdir()


def linked(state: Path) -> Path | None:
    """Return the directory of `--files` that a state directory has links to, if any."""
    link = state / blobs.FOLDER
    return link.readlink().parent if link.is_symlink() else None
