"""`taskyard` that SIGKILL ends at one step of its blobs: before a call, or after it.

The first word names the step, as in `append.before`, and the others are those of `taskyard`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from taskyard.broker.turn import Broker
from taskyard.cli.entry import main
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import blobs_named
from taskyard.postgresql.blobs import BlobRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.journal.blobs import StreamKey

#: The name of a file that is about to be removed ends so.
REMOVED: Final = ".removed"


def _always(*_: object) -> bool:
    return True


def _names_a_blob(_broker: Broker, records: Any) -> bool:
    return any([*blobs_named(record)] for record in records)


def _has_bytes(files: BlobFiles, key: StreamKey) -> bool:
    return files.length(key) > 0


def _is_hidden(path: Path) -> bool:
    return path.name.endswith(REMOVED)


def _hides(_path: Path, target: Path) -> bool:
    return _is_hidden(target)


def _hides_used(path: Path, target: Path) -> bool:
    """Use a blob at the moment before it is hidden, as another process may."""
    if _is_hidden(target):
        os.utime(path)
    return _is_hidden(target)


#: Each step: what has the function, its name, and which calls count.
STEPS: Final[dict[str, tuple[Any, str, Callable[..., bool]]]] = {
    "flush": (BlobRows, "flush", lambda rows: bool(rows._parts)),  # noqa: SLF001  # nothing tells
    "seal": (BlobRows, "seal", _always),
    "append": (BlobFiles, "append", _always),
    "sync": (BlobFiles, "_sync", _always),
    "publish": (BlobFiles, "publish", _always),
    "folder": (BlobFiles, "_sync_folder", _always),
    "commit": (Broker, "_commit", _names_a_blob),
    "drop": (BlobFiles, "drop", _has_bytes),
    "hide": (Path, "rename", _hides),
    "hide-used": (Path, "rename", _hides_used),
    "remove": (Path, "unlink", _is_hidden),
}


def arm(step: str, moment: str) -> None:
    """Let this process end at the first call of a step."""
    owner, name, counts = STEPS[step]
    sound = getattr(owner, name)

    def last(*args: Any, **more: Any) -> Any:
        is_last = counts(*args)
        if is_last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = sound(*args, **more)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, last)


if __name__ == "__main__":
    arm(*sys.argv[1].split("."))
    main(sys.argv[2:])
