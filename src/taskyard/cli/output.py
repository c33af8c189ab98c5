"""Output of commands: JSON documents, tables and raw bytes, and the directory of --output.

Handles terminals and pipes. Text for people goes through `escape_line`, so that a name can't move
the cursor. `DIR/CAMPAIGN/NAME/ATTEMPT.out` and `.err` have the output of every attempt, as in the
state directory. `@` stands for no campaign. `DIR/joblog.tsv` has the columns of GNU parallel.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TextIO, TypeVar

import click

from taskyard.cli.connection import stream_parts
from taskyard.cli.documents import DOCUMENT_VERSION
from taskyard.cli.format import (
    escape_control_json,
    escape_line,
    format_moment,
    format_utc,
    full_name,
    raw_stream,
)
from taskyard.core.model import Stream, directory_of, file_name
from taskyard.errors import BytesDamaged, BytesMissing, BytesTruncated, ExitCode, UnusableFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from msgspec import Struct

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.options import CliContext
    from taskyard.core.blobs import Result

#: Longer tables are written as plain lines even on a terminal, because drawing takes time and
#: memory. In a pipe these rows determine the widths of the columns.
ROWS_DRAWN_MAX: Final = 1000

#: On narrower terminals optional columns are left out.
WIDE_COLUMNS: Final = 120


def example(*lines: str) -> str:
    """Return the examples at the end of a help text. Click keeps their lines."""
    title = "Example" if len(lines) == 1 else "Examples"
    return "\b\n" + "\n".join([f"{title}:", *(f"  taskyard {line}" for line in lines)])


def encode_json(value: object) -> bytes:
    """Encode a value as JSON without terminal control characters."""
    import msgspec  # noqa: PLC0415  # not needed by `--help`

    return escape_control_json(msgspec.json.encode(value))


def print_document(document: Struct) -> None:
    """Print the JSON document of a command."""
    click.echo(encode_json(document))


def print_view(command: str, view: Mapping[str, Any]) -> None:
    """Print a view as the broker sent it, as the JSON document of a command."""
    click.echo(encode_json({"document": command, **view, "version": DOCUMENT_VERSION}))


def text_or_base64(name: str, value: bytes) -> dict[str, Any]:
    """Return bytes as JSON fields: text if they are UTF-8, else base64 in `NAME_base64`."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": value}  # msgspec encodes bytes as base64


def write_bytes(value: bytes) -> None:
    """Write bytes to stdout: to a pipe as they are, to a terminal escaped."""
    sys.stdout.flush()
    sys.stdout.buffer.write(value)


def write_result(value: bytes) -> None:
    """Write a result to stdout. On a terminal, end its last line."""
    ends_line = not value or value.endswith(b"\n")
    write_bytes(value if ends_line or not sys.stdout.isatty() else value + b"\n")


def write_lines(parts: Iterable[bytes], tag: bytes | None = None) -> None:
    """Write a result that consists of parts to stdout, and end its last line.

    With a tag, every line begins with it and a tab.
    """
    if tag is not None:
        parts = _tagged(parts, tag)
    last = b""
    for part in parts:
        write_bytes(part)
        last = part or last
    if last and not last.endswith(b"\n"):
        write_bytes(b"\n")


def _tagged(parts: Iterable[bytes], tag: bytes) -> Iterator[bytes]:
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield b"".join(b"%s\t%s\n" % (tag, line) for line in lines)
    if rest:
        yield b"%s\t%s" % (tag, rest)


def result_fields(result: Result) -> dict[str, Any]:
    """Return the JSON fields of a result."""
    return {**text_or_base64("result", result.text), "truncated": result.is_truncated}


def warn_if_truncated(name: str, result: Result) -> ExitCode:
    """Warn on stderr if a result is truncated. Return the exit code."""
    if not result.is_truncated:
        return ExitCode.OK
    from taskyard.client.results import truncation_text  # noqa: PLC0415  # not for `taskyard --help`

    sys.stdout.flush()
    click.echo(f"taskyard: {escape_line(truncation_text(name, result))}", err=True)
    return ExitCode.TASK_FAILED


def moment_cell(at: float | None, now: float) -> str:
    """Format a moment in a table: relative to now on a terminal, in UTC in a pipe."""
    if at is None:
        return ""
    return format_moment(at, now) if sys.stdout.isatty() else format_utc(at)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    wrapped: Sequence[str] = (),
    optional: Sequence[str] = (),
    empty: Sequence[str] = (),
) -> None:
    """Print a table: drawn on a terminal, plain lines in a pipe. Numbers are right-aligned.

    On a terminal, long cells of `wrapped` columns continue in the next line, and other cells end in
    an ellipsis. On a narrow terminal, `optional` columns are left out. So are columns of `empty`
    without any value.
    """
    line = iter(rows)
    first = list(islice(line, ROWS_DRAWN_MAX + 1))
    left_out = [index for index, column in enumerate(columns) if column in empty]
    left_out = [index for index in left_out if not any(row[index] for row in first)]
    if left_out:
        columns = _without(columns, left_out)
        first = [_without(row, left_out) for row in first]
        line = (_without(row, left_out) for row in line)
    if sys.stdout.isatty() and len(first) <= ROWS_DRAWN_MAX:
        if optional and shutil.get_terminal_size().columns < WIDE_COLUMNS:
            kept = [index for index, column in enumerate(columns) if column not in optional]
            columns = [columns[index] for index in kept]
            first = [[row[index] for index in kept] for row in first]
        _draw_table(columns, first, wrapped)
    else:
        _write_plain_table(columns, first, line)


_Cell = TypeVar("_Cell")


def _without(row: Sequence[_Cell], left_out: Sequence[int]) -> list[_Cell]:
    """Return a row without the cells at these indexes."""
    return [cell for index, cell in enumerate(row) if index not in left_out]


def _draw_table(
    columns: Sequence[str], rows: list[Sequence[object]], wrapped: Sequence[str]
) -> None:
    from rich import box  # noqa: PLC0415  # slow to import, and not needed for pipes
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # Narrow padding leaves room for generated campaign names at 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        is_number = bool(rows) and all(isinstance(row[index], int) for row in rows)
        side: Literal["left", "right"] = "right" if is_number else "left"
        # Numbers are never cut.
        table.add_column(column, justify=side, min_width=len(column), no_wrap=is_number)
    for row in rows:
        cells = [Text(_cell(value), style=_STYLES.get(str(value), "")) for value in row]
        for column, cell in zip(columns, cells, strict=True):
            cell.no_wrap = column not in wrapped
            cell.overflow = "fold" if column in wrapped else "ellipsis"
        table.add_row(*cells)
    Console(file=raw_stream(sys.stdout), highlight=False).print(table)


#: Colours of states.
_STYLES: Final = {
    "failed": "red",
    "done": "green",
    "leased": "cyan",
    "cancelled": "dim",
}


def _write_plain_table(
    columns: Sequence[str], first: list[Sequence[object]], rest: Iterable[Sequence[object]]
) -> None:
    """Write rows as plain lines. The first rows determine the widths of the columns."""
    cells = [list(columns), *([_cell(value) for value in row] for row in first)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = iter(rest)
    while cells:
        click.echo("\n".join([_row(row, widths) for row in cells]))
        cells = [[_cell(value) for value in row] for row in islice(line, ROWS_DRAWN_MAX)]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}" if sys.stdout.isatty() else str(value)
    return escape_line(str(value)) or "-"


JOBLOG: Final = "joblog.tsv"

#: GNU parallel's columns.
COLUMNS: Final = (
    *("Seq", "Host", "Starttime", "JobRuntime", "Send"),
    *("Receive", "Exitval", "Signal", "Command"),
)

#: Functions print one text, which belongs to no stream.
_FUNCTION_SERVICES: Final = ("call", "pickle")

output_option = click.option(
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Also write stdout and stderr of every task to files in this directory, and a job log.",
)


class OutputDirectory:
    """Writes the output of settled tasks. A context manager."""

    def __init__(self, cli_context: CliContext, broker: ReadOnlyClient, directory: Path) -> None:
        self._cli_context = cli_context
        self._broker = broker
        self._directory = directory
        self._count = 0
        self._joblog: TextIO | None = None

    def __enter__(self) -> Self:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._joblog = (self._directory / JOBLOG).open("w", encoding="utf-8")
        except OSError as error:
            raise UnusableFile(f"--output {self._directory}: {error.strerror}") from error
        self._write_line(COLUMNS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._joblog is not None:
            self._joblog.close()

    def write(self, name: str) -> None:
        """Write all attempts of a settled task, by its full name."""
        view = self._broker.show(name)
        received = 0
        for attempt in range(1, view["attempt"] + 1):
            received = self._write_attempt(view, attempt)
        self._count += 1
        self._write_line(_joblog_row(self._count, view, received))

    def _write_attempt(self, view: dict[str, Any], attempt: int) -> int:
        """Write both streams of an attempt. Return the length of its stdout."""
        names = (view["campaign"].encode(), view["name"].encode(errors="surrogateescape"))
        directory = self._directory.joinpath(*directory_of(*names))
        directory.mkdir(parents=True, exist_ok=True)
        lengths = [
            self._write_stream(view, attempt, stream, directory / file_name(attempt, stream))
            for stream in Stream
        ]
        return lengths[0]

    def _write_stream(self, view: dict[str, Any], attempt: int, stream: Stream, path: Path) -> int:
        length = 0
        with path.open("wb") as file:
            if view["service"] in _FUNCTION_SERVICES and stream is Stream.STDOUT:
                return file.write(self._broker.output_page(full_name(view), attempt=attempt).data)
            try:
                name = stream.name.lower()
                for part in stream_parts(self._broker, full_name(view), name, attempt):
                    length += file.write(part)
            except (BytesDamaged, BytesMissing, BytesTruncated) as error:
                self._cli_context.warn(str(error))
        return length

    def _write_line(self, row: tuple[object, ...]) -> None:
        assert self._joblog is not None  # noqa: S101  # inside `with`
        self._joblog.write("\t".join(map(str, row)) + "\n")
        self._joblog.flush()


def _joblog_row(number: int, view: dict[str, Any], received: int) -> tuple[object, ...]:
    """Return a line of the job log, on the latest attempt that ran."""
    ran = [one for one in view["attempts"] if one["started"] is not None]
    last: dict[str, Any] = ran[-1] if ran else {}
    started, ended = last.get("started") or 0.0, last.get("ended") or 0.0
    status = last.get("exit_status")
    if status is None:
        status = 0 if view["state"] == "done" else -1
    command = " ".join(shlex.join(view["argv"] or [view["name"]]).split("\n"))
    measured = (f"{started:.3f}", f"{max(0.0, ended - started):.3f}", 0, received)
    return (number, last.get("host") or ":", *measured, status, last.get("signal") or 0, command)
