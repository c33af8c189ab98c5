"""Which format a file has, by its name and by its look, and its rows as numbered dicts.

A row is `(line, raw)`: what `tasks.check` takes, or `Unreadable`. Rows come one by one; only
WfCommons, which is one JSON value, is read whole.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.campaign import csv_rows, parquet, wfcommons
from taskyard.campaign.lines import (
    STDIN,
    InvalidCampaign,
    InvalidRow,
    Stream,
    file_label,
    numbered_lines,
    open_input,
    peek_start,
    text_error,
    text_of,
)
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Format(Enum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    WFCOMMONS = "wfcommons"
    DWORK = "dwork"


#: Endings that leave no doubt. `.json` and `.txt` do: there the look decides.
SUFFIXES: Final = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
    ".tsv": Format.CSV,
    ".parquet": Format.PARQUET,
    ".dwork": Format.DWORK,
}


class FileOptions(Struct, frozen=True):
    """What the user says about a file."""

    #: None: by its name and its look.
    format: Format | None = None
    #: WfCommons only: sleep for as long as a task took instead of running it.
    replay: bool = False
    #: In a replay, how many times faster.
    speedup: float = 1.0
    #: What a lane's template says by {campaign}.
    campaign: str = ""


def rows(path: str, options: FileOptions) -> Iterator[tuple[int, object]]:
    """The rows of a file. Raises `InvalidCampaign` when it can't be read at all."""
    label = file_label(path)
    with open_input(path) as stream:
        form = options.format or format_of(path, stream)
        check_options(options, form)
        if form is Format.PARQUET:
            if path == STDIN:
                raise InvalidCampaign("stdin: Parquet must be a file")
            yield from parquet.rows(path)
        elif form is Format.WFCOMMONS:
            replay, speedup = options.replay, options.speedup
            yield from wfcommons.rows(stream, label, replay=replay, speedup=speedup)
        elif form is Format.CSV:
            yield from csv_rows.rows(numbered_lines(stream, label), label)
        elif form is Format.DWORK:
            yield from dwork_rows(numbered_lines(stream, label))
        else:
            yield from jsonl_rows(numbered_lines(stream, label))


def check_options(options: FileOptions, form: Format) -> None:
    """Refuse options that are not for that format. Raises UserError."""
    if not options.speedup > 0:
        raise UserError(f"the speedup must be more than 0, not {options.speedup}")
    if options.replay and form is not Format.WFCOMMONS:
        raise UserError(
            f"only WfCommons can be replayed, and this is {form.value}; leave the replay out"
        )
    if options.speedup != 1 and not options.replay:
        raise UserError("a speedup is for a replay; ask for one, or leave the speedup out")


def format_of(path: str, stream: Stream) -> Format:
    """The format of a file that was opened, without taking anything from it."""
    if path == STDIN:
        return Format.JSONL
    name = path.lower().removesuffix(".gz")
    return SUFFIXES.get(Path(name).suffix) or _guess_format(peek_start(stream, path), path)


def _guess_format(start: bytes, label: str) -> Format:
    """The format that a file's first bytes look like."""
    if start.startswith(parquet.MAGIC):
        return Format.PARQUET
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    line = text.partition(b"\n")[0].strip()
    if line.startswith(b"{"):
        return _guess_object_format(line, text)
    if line.startswith(b"["):
        raise InvalidCampaign(f"{label}:1: is a JSON list; write one task a line instead (JSONL)")
    cells = re.split(rb"[,;\t]", line)
    return Format.CSV if b"name" in [cell.strip(b' "') for cell in cells] else Format.DWORK


def _guess_object_format(line: bytes, text: bytes) -> Format:
    """A document over many lines, or of one line with a workflow in it, is WfCommons'."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        whole = b'"workflow"' in text or b'"schemaVersion"' in text
        open_ended = line.endswith((b"{", b",", b"["))
        return Format.WFCOMMONS if whole or open_ended else Format.JSONL
    return Format.WFCOMMONS if "workflow" in value else Format.JSONL


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


def dwork_rows(lines: Iterable[tuple[int, bytes | InvalidRow]]) -> Iterator[tuple[int, object]]:
    """The task of each line. Blank lines are passed over."""
    for number, line in lines:
        if isinstance(line, InvalidRow):
            yield number, line
        elif line and not line.isspace():
            yield number, _dwork_task(line)


def _dwork_task(line: bytes) -> object:
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
