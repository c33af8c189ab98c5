"""`--output DIR`: stdout and stderr of every attempt in files, and a log of all tasks.

The files have the layout of the state directory: `DIR/CAMPAIGN/NAME/ATTEMPT.out` and `.err`, with
`@` for tasks outside any campaign. `DIR/joblog.tsv` has the columns of GNU parallel.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

import click

from taskyard.cli.connection import stream_parts
from taskyard.cli.format import full_name
from taskyard.core.output import Stream, directory_of, file_name
from taskyard.errors import BytesDamaged, BytesMissing, BytesTruncated, UnusableFile

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.options import CliContext

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
        self._write_line(_row(self._count, view, received))

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


def _row(number: int, view: dict[str, Any], received: int) -> tuple[object, ...]:
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
