"""The rows of a file of any format.

A row is `(line, raw)`: a dict for `check_task`, or an `InvalidRow`. Rows are read one by one,
except WfCommons, which is one JSON value. JSON lines and dwork's comma lines are read here, the
other formats in a module each. `detection` chooses the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from taskyard.campaign import other_systems, shell_lines, tables
from taskyard.campaign.detection import (
    Format,
    FormatChoice,
    choose_by_content,
    choose_by_suffix,
)
from taskyard.campaign.lines import (
    STDIN,
    DamagedFile,
    InvalidCampaign,
    InvalidRow,
    PeekedStream,
    Stream,
    file_label,
    numbered_lines,
    open_input,
    text_error,
    text_of,
)
from taskyard.campaign.shell_lines import SkippedLines
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class FileOptions(Struct, frozen=True):
    """Options for reading a file."""

    #: None if it is to be detected.
    format: Format | None = None
    #: WfCommons only: sleep for a task's run time instead of running it.
    replay: bool = False
    #: Speed of a replay, relative to the recorded run.
    speedup: float = 1.0
    #: Value of {campaign} in a lane template.
    campaign: str = ""
    #: Keys of tasks that do not set them.
    defaults: dict[str, object] = {}


class FileReport(Struct):
    """Facts about a file beside its rows. Complete when all rows are read."""

    #: The first row sets it.
    choice: FormatChoice = FormatChoice(Format.JSONL)
    skipped: SkippedLines = field(default_factory=SkippedLines)


def rows(
    path: str, options: FileOptions, report: FileReport | None = None
) -> Iterator[tuple[int, object]]:
    """Yield the rows of a file. Raises `InvalidCampaign` if the file can't be read.

    An error in the content names the format that was assumed, unless an option named it.
    """
    report = FileReport() if report is None else report
    with open_input(path) as file:
        report.choice, stream = choose_format(path, file, options.format)
        check_options(options, report.choice.format)
        try:
            yield from _rows(path, stream, options, report)
        except DamagedFile:
            raise
        except InvalidCampaign as problem:
            explanation = report.choice.explanation()
            raise InvalidCampaign(f"{problem}; {explanation}" if explanation else problem) from None


def _rows(
    path: str, stream: Stream, options: FileOptions, report: FileReport
) -> Iterator[tuple[int, object]]:
    label = file_label(path)
    form = report.choice.format
    if form is Format.PARQUET:
        if path == STDIN:
            raise DamagedFile("stdin: Parquet can only be read from a file")
        return tables.parquet_rows(path)
    if form is Format.WFCOMMONS:
        return other_systems.wfcommons_rows(
            stream, label, replay=options.replay, speedup=options.speedup
        )
    if form is Format.ZMAILER:
        return other_systems.zmailer_rows(stream, path)
    lines = numbered_lines(stream, label)
    if form is Format.SHELL:
        return shell_lines.rows(lines, label, report.skipped)
    if form is Format.CSV:
        return tables.csv_rows(lines, label)
    return dwork_rows(lines) if form is Format.DWORK else jsonl_rows(lines)


def check_options(options: FileOptions, form: Format) -> None:
    """Raise `UserError` for options that do not apply to the format."""
    if not options.speedup > 0:
        raise UserError(f"speedup: must be more than 0, not {options.speedup}")
    if options.replay and form is not Format.WFCOMMONS:
        raise UserError(f"replay: only for WfCommons, not for {form.value}")
    if options.speedup != 1 and not options.replay:
        raise UserError("speedup: only for a replay")


def choose_format(
    path: str, stream: Stream, given: Format | None = None
) -> tuple[FormatChoice, Stream]:
    """Return the format of an open file, and a stream of its whole content.

    The format is the given one, that of the file's suffix, or that of its first lines.
    """
    choice = choose_by_suffix(path) if given is None else FormatChoice(given)
    if choice is not None:
        return choice, stream
    whole = PeekedStream(stream)
    return choose_by_content(path, whole.start, is_whole=whole.is_whole), whole


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
