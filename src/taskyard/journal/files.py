"""Files that are ours alone and there to stay: private from their first byte, synced by name too.

Knows nothing of what is in them.
"""

import os
from pathlib import Path
from typing import Final

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600

#: What is written before it is synced. The disk does one sync after the other: whoever has a small
#: one to make, as a broker in its turn has, waits for the large one of somebody else.
SYNC_BYTES: Final = 4 * 1024 * 1024

#: How a message about damage ends where nothing smaller helps.
PUT_BACK = "put the state directory back from a copy, or give another --state"


def make_private_directory(directory: Path) -> None:
    """Make the directory, if need be, so that it also survives a power cut by its name."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        sync_directory(path.parent)


def create_private(path: Path, content: bytes) -> None:
    """Write and sync a whole new file, in place of what an earlier attempt left there. A long one
    is synced as it grows."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb") as file:
        for start in range(0, len(content), SYNC_BYTES):
            if start:
                os.fdatasync(file.fileno())
            file.write(memoryview(content)[start : start + SYNC_BYTES])
            file.flush()
        os.fsync(file.fileno())


def put_private(path: Path, content: bytes) -> None:
    """A whole, synced file under its name, or whatever was there before: nothing in between."""
    unfinished = path.with_name(f"{path.name}.new")
    create_private(unfinished, content)
    unfinished.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """A new name is on disk only when its directory is synced."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """What the disk under a directory can still take from an ordinary user."""
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize
