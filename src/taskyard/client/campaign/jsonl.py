"""JSON lines: an object a line, the keys of `tasks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from taskyard.client.campaign.lines import Unreadable, text_of, text_trouble

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def rows(lines: Iterable[tuple[int, bytes | Unreadable]]) -> Iterator[tuple[int, object]]:
    """What each line says. Blank lines are passed over."""
    decode = msgspec.json.Decoder().decode
    for number, line in lines:
        if isinstance(line, Unreadable):
            yield number, line
        elif line and not line.isspace():
            try:
                raw = decode(line)
            except (ValueError, RecursionError) as wrong:
                raw = Unreadable(_trouble(line, wrong), text_of(line))
            yield number, raw


def _trouble(line: bytes, wrong: Exception) -> str:
    """What is wrong with a line that is no JSON."""
    if trouble := text_trouble(line):
        return trouble
    if isinstance(wrong, RecursionError):
        return "the JSON is nested too deeply"
    if line.lstrip().startswith((b"#", b"//")):
        return "this is no JSON; there are no comments in a campaign"
    if "truncated" in str(wrong):
        return "the JSON ends too early; a task is one whole line"
    return str(wrong)
