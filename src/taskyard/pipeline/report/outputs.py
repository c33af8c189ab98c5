"""The last lines that failed tasks printed.

Short output is in the history's events. Long output is in files of the state directory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from taskyard.broker.output_store import FOLDER
from taskyard.core.output import Stream
from taskyard.core.output_paths import directory_of, file_name
from taskyard.errors import UserError
from taskyard.journal.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow as pa

#: Lines of output in the report, and the bytes that are read for them.
LINES_MAX: Final = 12
_BYTES_MAX: Final = 4096


def last_outputs(
    tasks: Iterable[dict[str, Any]], printed: pa.Table, states: dict[str, Path]
) -> dict[str, str]:
    """Return the last lines of some tasks by full name, without those that printed nothing.

    `tasks` are rows with `broker`, `campaign`, `name` and `task`. `printed` are their `progressed`
    events. `states` has the directory of each broker.
    """
    texts: dict[str, str] = {}
    for event in printed.sort_by("record").to_pylist():
        if event["reason"]:
            texts[event["task"]] = _last_lines(event["reason"])
    for row in tasks:
        text = last_output(states[row["broker"]], row["campaign"], row["name"])
        if text:
            texts[row["task"]] = text
    return texts


def last_output(state: Path, campaign: str, name: str) -> str:
    """Return the last lines that the latest attempt of a task printed, of stderr if it has any.

    Empty if the state directory has no file of it.
    """
    directory = state.joinpath(FOLDER, *directory_of(campaign.encode(), name.encode()))
    try:
        attempts = [int(path.stem) for path in directory.iterdir() if path.stem.isdecimal()]
        for stream in (Stream.STDERR, Stream.STDOUT):
            path = directory / file_name(max(attempts, default=0), stream)
            text = _end_of_file(path) if path.exists() else ""
            if text:
                return text
    except (OSError, UserError):  # no such file, or not one of a broker
        return ""
    return ""


def _end_of_file(path: Path) -> str:
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, _BYTES_MAX, max(0, size - _BYTES_MAX))
    finally:
        os.close(descriptor)
    return _last_lines(data.decode(errors="replace"))


def _last_lines(text: str) -> str:
    """Cut a text to its last lines. Control characters become spaces."""
    lines = text[-_BYTES_MAX:].rstrip().splitlines()[-LINES_MAX:]
    return "\n".join(map(_printable, lines)).strip("\n")


def _printable(line: str) -> str:
    return "".join(one if one.isprintable() or one == "\t" else " " for one in line).rstrip()
