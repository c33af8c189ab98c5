"""JSON lines: an object a line, the keys of `tasks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from taskyard.campaign.lines import InvalidRow, text_error, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def jsonl_rows(lines: Iterable[tuple[int, bytes | InvalidRow]]) -> Iterator[tuple[int, object]]:
    """What each line says. Blank lines are passed over."""
    decode = msgspec.json.Decoder().decode
    for number, line in lines:
        if isinstance(line, InvalidRow):
            yield number, line
        elif line and not line.isspace():
            try:
                raw = decode(line)
            except (ValueError, RecursionError) as problem:
                raw = InvalidRow(_json_error(line, problem), text_of(line))
            yield number, raw


def _json_error(line: bytes, problem: Exception) -> str:
    """What is wrong with a line that is no JSON."""
    if trouble := text_error(line):
        return trouble
    if isinstance(problem, RecursionError):
        return "the JSON is nested too deeply"
    if line.lstrip().startswith((b"#", b"//")):
        return "this is no JSON; there are no comments in a campaign"
    if "truncated" in str(problem):
        return "the JSON ends too early; a task is one whole line"
    return str(problem)
