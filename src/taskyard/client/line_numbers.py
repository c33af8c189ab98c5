"""Lines as names of tasks: `cmds.txt:500` and `cmds/500` mean a line of a file that was loaded.

Each load of a file of commands records which task each line is. A number is looked up after all
names. It is refused if the file has changed since, or if it may mean several files.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from taskyard.campaign import shell_lines
from taskyard.campaign.batches import encode_text
from taskyard.client.exchanges import Query, checked_reply
from taskyard.core.identity import spelling
from taskyard.core.limits import NUMBERS_PARTS_MAX
from taskyard.errors import UnknownName, UserError
from taskyard.wire.native import number_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.client.exchanges import Exchange

#: `FILE:N` or `CAMPAIGN/N`.
_NUMBER: Final = re.compile(r"(.+)([:/])([1-9][0-9]{0,8})", re.DOTALL)

#: Characters of a command that an error shows.
_SHOWN_MAX: Final = 60


class NumberedFile(NamedTuple):
    """A file whose last load as a campaign has recorded numbers."""

    campaign: str
    path: str


class NumberedLine(NamedTuple):
    """A line of a file and its task."""

    file: NumberedFile
    line: int
    #: The name of the task in its campaign.
    name: str

    @property
    def full_name(self) -> str:
        return spelling(self.file.campaign, self.name)

    @property
    def label(self) -> str:
        """How users write the line, such as `cmds.txt:500`."""
        return label(self.file.path, self.line)


def label(path: str, line: int) -> str:
    """Return how users write a line of a file."""
    return f"{Path(path).name}:{line}"


def record(campaign: str, path: str, named: Iterable[tuple[int, str]]) -> Exchange[None]:
    """Record which task each line of a file is, in place of those of earlier loads."""
    parts = shell_lines.encode_numbers(named)
    for first in range(0, len(parts), NUMBERS_PARTS_MAX):
        build = partial(
            number_messages.number,
            campaign=encode_text(campaign),
            path=encode_text(path),
            first=first,
            parts=parts[first : first + NUMBERS_PARTS_MAX],
        )
        yield from checked_reply(Query(build))


def path_of(campaign: str) -> Exchange[str]:
    """Return the path of the file that was last loaded as a campaign, "" if none was."""
    files, _ = yield from _names(campaign, "", 0)
    return files[0].path if files else ""


def find(spelled: str) -> Exchange[NumberedLine | None]:
    """Return the line that a text means, or None if it is no number of a file that was loaded.

    Raises `UnknownName` if the file had no task on that line, and `UserError` for a number that is
    ambiguous or of a file that has changed.
    """
    match = _NUMBER.fullmatch(spelled)
    if match is None:
        return None
    where, separator, line = match[1], match[2], int(match[3])
    campaign, path = (where, "") if separator == "/" else ("", _wanted_path(where))
    files, names = yield from _names(campaign, path, shell_lines.part_of(line))
    if not files:
        return None
    local = str(Path(where).resolve()) if separator == ":" else ""
    file = next((one for one in files if one.path == local), files[0])
    if file.path != local and len({one.path for one in files}) > 1:
        raise (yield from _ambiguous(spelled, files, line))
    if file != files[0]:
        _, names = yield from _names(file.campaign, "", shell_lines.part_of(line))
    name = _name_in(names, line)
    from taskyard.campaign.shell_lines import command_on  # noqa: PLC0415  # few lines are looked up

    now = command_on(file.path, line) if Path(file.path).is_absolute() else None
    if not name:
        text = f", it is {_shorten(now)} now (run the file again)" if now else ""
        raise UnknownName(f"{spelled}: no task on that line in the last load{text}", spelled)
    found = NumberedLine(file, line, name)
    if now is not None and not shell_lines.is_name_of(name, now):
        changed = f"to {_shorten(now)}" if now else "and is no command now"
        hint = f"run the file again, or name the task {found.full_name}"
        raise UserError(f"{spelled}: changed since the file was loaded, {changed} ({hint})")
    return found


def _wanted_path(path: str) -> str:
    """Return the end of the paths that a file's name means."""
    parts = [one for one in Path(path).parts if one != "."]
    return str(Path(path).resolve()).lstrip("/") if ".." in parts else "/".join(parts).lstrip("/")


def _names(campaign: str, path: str, index: int) -> Exchange[tuple[list[NumberedFile], list[str]]]:
    """Return the files of a campaign or path, the newest first, and a part of its numbers."""
    build = partial(
        number_messages.numbers,
        campaign=encode_text(campaign),
        path=encode_text(path),
        index=index,
    )
    reply = yield from checked_reply(Query(build))
    files = [NumberedFile(*one) for one in number_messages.files_of(reply)]
    part = reply.part.data
    try:
        return files, shell_lines.decode_part(part) if part else []
    except ValueError:
        return files, []


def _name_in(names: Sequence[str], line: int) -> str:
    """Return the name of a line's task from the part that has the line. Empty: there is none."""
    offset = (line - 1) % shell_lines.LINES_PER_PART
    return names[offset] if offset < len(names) else ""


def _ambiguous(spelled: str, files: Sequence[NumberedFile], line: int) -> Exchange[UserError]:
    """Return the error for a number of several files."""
    meant = []
    for file in {one.path: one for one in reversed(files)}.values():
        _, names = yield from _names(file.campaign, "", shell_lines.part_of(line))
        meant.append(f"{file.campaign}/{line} ({_name_in(names, line) or 'no task'})")
    return UserError(f"{spelled}: several files have that name (give {' or '.join(meant)})")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 1]}…")


def campaign_lines(campaign: str) -> Exchange[dict[str, str]]:
    """Return how users write the lines of a campaign's file, by the names of their tasks."""
    return (yield from _lines_in(campaign, None))


def labels(views: Sequence[dict[str, Any]]) -> Exchange[dict[str, str]]:
    """Return how users write the lines of tasks, by full name, without other tasks.

    Asks the broker only for campaigns of tasks whose names may be those of lines.
    """
    wanted: dict[str, dict[str, None]] = {}
    for view in views:
        if view["campaign"] and shell_lines.is_line_name(view["name"]):
            wanted.setdefault(view["campaign"], {})[view["name"]] = None
    found: dict[str, str] = {}
    for campaign, names in wanted.items():
        lines = yield from _lines_in(campaign, names)
        found |= {spelling(campaign, name): lines[name] for name in names if name in lines}
    return found


def _lines_in(campaign: str, wanted: dict[str, None] | None) -> Exchange[dict[str, str]]:
    """Return the lines of a campaign by the names of their tasks. None: of all tasks."""
    found: dict[str, str] = {}
    for index in count():
        files, names = yield from _names(campaign, "", index)
        start = index * shell_lines.LINES_PER_PART + 1
        for line, name in enumerate(names, start):
            if name and (wanted is None or name in wanted):
                found[name] = label(files[0].path, line)
        if not names or (wanted is not None and len(found) == len(wanted)):
            return found
    return found
