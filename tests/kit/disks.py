"""Disks that a test mounts for itself.

They are outside of the directories that pytest removes some runs later. There a disk that a killed
run left behind would make every later run fail.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kit.requirements import need

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def mounted(*options: str) -> Iterator[Path]:
    """Mount a disk at a new directory. Skip the test where that is not permitted."""
    need("mounts")
    with tempfile.TemporaryDirectory(prefix="taskyard-disk-", ignore_cleanup_errors=True) as place:
        subprocess.run(["mount", *options, place], check=True, capture_output=True)  # noqa: S607  # as root
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "-l", place], check=True)  # noqa: S607  # as root


@contextmanager
def small_disk(bytes_total: int) -> Iterator[Path]:
    """Mount a disk of this size."""
    with mounted("-t", "tmpfs", "-o", f"size={bytes_total},mode=700", "tmpfs") as place:
        yield place
