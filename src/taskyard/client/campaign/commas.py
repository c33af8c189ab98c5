"""dwork's comma lines: `task,dep,dep`. Plain tasks without a payload, for workers that know names.

A name is a word: no spaces inside, spaces around it don't count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.client.campaign.lines import Unreadable, text_of, text_trouble

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def rows(lines: Iterable[tuple[int, bytes | Unreadable]]) -> Iterator[tuple[int, object]]:
    """The task of each line. Blank lines are passed over."""
    for number, line in lines:
        if isinstance(line, Unreadable):
            yield number, line
        elif line and not line.isspace():
            yield number, _task(line)


def _task(line: bytes) -> object:
    if trouble := text_trouble(line):
        return Unreadable(trouble, text_of(line))
    text = line.decode()
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        return Unreadable("a name is missing between commas", text, words[0])
    spaced = next((word for word in words if len(word.split()) > 1), None)
    if spaced is not None:
        return Unreadable(f"a name has spaces: {spaced!r}; a line is task,dependency,…", text)
    return {"name": words[0], "payload": "", "after": words[1:]}
