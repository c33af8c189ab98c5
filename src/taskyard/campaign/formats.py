"""File formats: how to detect them, and the rows of a file of any format.

A row is `(line, raw)`: a dict for `check_task`, or an `InvalidRow`. Rows are read one by one,
except WfCommons, which is one JSON value. JSON lines and dwork's comma lines are read here, the
other formats in a module each.
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


#: Suffixes that name a format. For others, such as `.json` and `.txt`, the content decides.
SUFFIXES: Final = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
    ".tsv": Format.CSV,
    ".parquet": Format.PARQUET,
    ".dwork": Format.DWORK,
}


class FileOptions(Struct, frozen=True):
    """Options for reading a file."""

    #: None: detect it.
    format: Format | None = None
    #: WfCommons only: sleep for a task's run time instead of running it.
    replay: bool = False
    #: Speed of a replay, relative to the recorded run.
    speedup: float = 1.0
    #: Value of {campaign} in a lane template.
    campaign: str = ""


def rows(path: str, options: FileOptions) -> Iterator[tuple[int, object]]:
    """Yield the rows of a file. Raises `InvalidCampaign` if the file can't be read."""
    label = file_label(path)
    with open_input(path) as stream:
        form = options.format or format_of(path, stream)
        check_options(options, form)
        if form is Format.PARQUET:
            if path == STDIN:
                raise InvalidCampaign("stdin: Parquet can only be read from a file")
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
    """Raise `UserError` for options that do not apply to the format."""
    if not options.speedup > 0:
        raise UserError(f"speedup: must be more than 0, not {options.speedup}")
    if options.replay and form is not Format.WFCOMMONS:
        raise UserError(f"replay: only for WfCommons, not for {form.value}")
    if options.speedup != 1 and not options.replay:
        raise UserError("speedup: only for a replay")


def format_of(path: str, stream: Stream) -> Format:
    """Return the format of an open file, without consuming any of it."""
    if path == STDIN:
        return Format.JSONL
    name = path.lower().removesuffix(".gz")
    return SUFFIXES.get(Path(name).suffix) or _guess_format(peek_start(stream, path), path)


def _guess_format(start: bytes, label: str) -> Format:
    """Return the format that the first bytes of a file suggest."""
    if start.startswith(parquet.MAGIC):
        return Format.PARQUET
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    line = text.partition(b"\n")[0].strip()
    if line.startswith(b"{"):
        return _guess_object_format(line, text)
    if line.startswith(b"["):
        raise InvalidCampaign(f"{label}:1: a JSON list (write one task per line, as JSONL)")
    cells = re.split(rb"[,;\t]", line)
    return Format.CSV if b"name" in [cell.strip(b' "') for cell in cells] else Format.DWORK


def _guess_object_format(line: bytes, text: bytes) -> Format:
    """Return WfCommons for a JSON document over many lines, or with a workflow, else JSONL."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        whole = b'"workflow"' in text or b'"schemaVersion"' in text
        open_ended = line.endswith((b"{", b",", b"["))
        return Format.WFCOMMONS if whole or open_ended else Format.JSONL
    return Format.WFCOMMONS if "workflow" in value else Format.JSONL


def jsonl_rows(lines: Iterable[tuple[int, bytes | InvalidRow]]) -> Iterator[tuple[int, object]]:
    """Yield the JSON object of each line, with its number. Skip blank lines."""
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
    """Return the reason why a line is not JSON."""
    if problem_text := text_error(line):
        return problem_text
    if isinstance(problem, RecursionError):
        return "the JSON is nested too deeply"
    if line.lstrip().startswith((b"#", b"//")):
        return "not JSON; comments are not allowed"
    if "truncated" in str(problem):
        return "the JSON ends too early; a task is one line"
    return str(problem)


def dwork_rows(lines: Iterable[tuple[int, bytes | InvalidRow]]) -> Iterator[tuple[int, object]]:
    """Yield the task of each line `task,dependency,…`, with its number. Skip blank lines.

    A task has no payload: its worker acts on the name. Spaces around a name are ignored.
    """
    for number, line in lines:
        if isinstance(line, InvalidRow):
            yield number, line
        elif line and not line.isspace():
            yield number, _dwork_task(line)


def _dwork_task(line: bytes) -> object:
    if problem_text := text_error(line):
        return InvalidRow(problem_text, text_of(line))
    text = line.decode()
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        return InvalidRow("a name is missing between commas", text, words[0])
    spaced = next((word for word in words if len(word.split()) > 1), None)
    if spaced is not None:
        return InvalidRow(f"a name has spaces: {spaced!r}; a line is task,dependency,…", text)
    return {"name": words[0], "payload": "", "after": words[1:]}
