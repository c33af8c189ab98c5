"""Rejected rows of campaign files: the reasons, and the files that they are written to.

`taskyard load` and the Spark pipeline find bad rows in different ways. Both word and write them
here. Finds nothing itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.campaign.lines import InvalidCampaign
from taskyard.campaign.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Bad lines after which reading stops: the format is probably wrong, and memory is limited.
REJECTED_MAX: Final = 1_000_000

#: Names of a cycle in a message. A longer one is cut in the middle.
CYCLE_NAMES_SHOWN: Final = 10

REJECTED_SUFFIX: Final = ".rejected.jsonl"


class RejectedRow(Struct, gc=False):
    """A rejected line."""

    file: str
    line: int
    reason: str
    #: The object of a task, or the text of a line that is not one.
    raw: object

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


# Reasons. `file` is the file of another row, if it is not the row's own.


def duplicate_text(name: str, line_first: int, file: str = "") -> str:
    """Return the reason to reject the second row of a name."""
    first = f"in {file}:{line_first}" if file else f"on line {line_first}"
    return f"duplicate name {shown(name)}, first {first}"


def rejected_dependency_text(name: str, line: int, file: str = "") -> str:
    """Return the reason to reject a row that waits for a rejected one."""
    place = f"{file}:{line}" if file else f"line {line}"
    return f"waits for {shown(name)}, which was rejected ({place})"


def unknown_dependency_text(name: str) -> str:
    """Return the reason to reject a row that waits for an unknown name."""
    return f"waits for {shown(name)}, which neither the file nor the broker has"


def cycle_text(cycle: Sequence[str], tasks: int) -> str:
    """Return the reason to reject tasks in a cycle: one cycle, and how many tasks are in it."""
    names = [*map(shown, [*cycle, cycle[0]])]
    if len(names) > CYCLE_NAMES_SHOWN:
        left_out = len(names) - CYCLE_NAMES_SHOWN
        half = CYCLE_NAMES_SHOWN // 2
        names = [*names[:half], f"… {left_out} more …", *names[-half:]]
    more = f" ({tasks} tasks wait for each other)" if tasks > len(cycle) else ""
    return f"is in a cycle{more}: {' after '.join(names)}"


def too_many_error(first: RejectedRow) -> InvalidCampaign:
    """Return the error for a file with too many bad rows. `first` is the first of them."""
    limit = f"more than {REJECTED_MAX:,} bad lines"
    return InvalidCampaign(f"{first.file}: {limit}, the first: {first} (is the format right?)")


# Files.


def write_rejected(rejected: Iterable[RejectedRow], to: Path | None = None) -> list[Path]:
    """Write rejected rows to one file, or beside each input file. Return the paths.

    A line is a JSON object. Replaces the files of an earlier run. Raises `InvalidCampaign`.
    """
    by_path: dict[Path, list[RejectedRow]] = {}
    for one in rejected:
        by_path.setdefault(to or Path(one.file + REJECTED_SUFFIX), []).append(one)
    encoder = msgspec.json.Encoder(enc_hook=repr)
    for path, rows in by_path.items():
        unfinished = path.with_name(f".{path.name}.new")
        try:
            with unfinished.open("wb") as file:
                file.writelines(encoder.encode(row) + b"\n" for row in rows)
            os.replace(unfinished, path)  # noqa: PTH105  # atomic, and named for it
        except OSError as wrong:
            raise InvalidCampaign(f"{path}: {wrong.strerror}") from None
    return list(by_path)
