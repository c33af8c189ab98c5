"""dwork's comma lines: `task,dep,dep`. Plain tasks without a payload, for workers that know names.

A name is a word: no spaces inside, spaces around it don't count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.campaign.lines import InvalidRow, text_error, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def dwork_rows(lines: Iterable[tuple[int, bytes | InvalidRow]]) -> Iterator[tuple[int, object]]:
    """The task of each line. Blank lines are passed over."""
    for number, line in lines:
        if isinstance(line, InvalidRow):
            yield number, line
        elif line and not line.isspace():
            yield number, _task(line)


def _task(line: bytes) -> object:
    if trouble := text_error(line):
        return InvalidRow(trouble, text_of(line))
    text = line.decode()
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        return InvalidRow("a name is missing between commas", text, words[0])
    spaced = next((word for word in words if len(word.split()) > 1), None)
    if spaced is not None:
        return InvalidRow(f"a name has spaces: {spaced!r}; a line is task,dependency,…", text)
    return {"name": words[0], "payload": "", "after": words[1:]}
