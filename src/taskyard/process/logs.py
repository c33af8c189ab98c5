"""The log of a daemon: lines of text or JSON, written by a thread, to stderr or a rotated file.

Owns the format of a line, the queue between the loggers and the thread, and the rotation. A logger
never waits for the disk or a terminal: lines without room in the queue are counted and dropped.
Independent of options and of what is logged.
"""

from __future__ import annotations

import fcntl
import json
import logging
import logging.handlers
import os
import queue
import select
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from taskyard.errors import UserError
from taskyard.journal.files import make_private_directory, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

#: Lines between a logger and the thread. At 200 bytes each they are 2 MB.
LINES_MAX: Final = 10_000

#: How long the end of a process waits for a terminal or pipe that takes no more lines.
CLOSE_SECONDS_MAX: Final = 2.0

#: Read from the captured stderr at once.
_READ_BYTES: Final = 1 << 16

#: A line without an end is written in pieces of this size.
_LINE_BYTES_MAX: Final = 1 << 20

#: This package, and libraries that log in its daemons.
_LOGGERS: Final = ("taskyard", "uvicorn", "asyncio")

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LEVELS: Final = tuple(_LEVELS)
FORMATS: Final = ("text", "json")


def level_number(level: str) -> int:
    """Return the number of a level for `logging`."""
    return _LEVELS[level]


# Lines.


class LineFormatter(logging.Formatter):
    """Formats a record as one line, without its end."""

    def __init__(self, process: str, *, as_json: bool) -> None:
        super().__init__()
        self._process = process
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, "fields", {})
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        level, event = record.levelname.lower(), record.getMessage()
        return self.line(time.time_ns(), level, event, fields)

    def line(self, at_ns: int, level: str, event: str, fields: Mapping[str, object]) -> str:
        if self._as_json:
            head = {"ts": timestamp(at_ns), "level": level, "process": self._process}
            # ASCII only: no control character of a name reaches a terminal.
            return json.dumps({**head, "event": event, **fields}, default=_as_text)
        words = [f"{timestamp(at_ns)} {level} {self._process}: {escape(event)}"]
        words += [f"{name}={_word(value)}" for name, value in fields.items()]
        return " ".join(words)

    def wrapped(self, line: str) -> str:
        """Return a line that a child printed, as JSON if the log is. A log line stays as it is."""
        if not self._as_json or line.startswith('{"ts": "'):
            return line
        return self.line(time.time_ns(), "info", "output", {"text": line})


def timestamp(at_ns: int) -> str:
    """Return a time of the wall clock as RFC 3339 in UTC, with milliseconds."""
    seconds, rest_ns = divmod(at_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest_ns // 1_000_000:03}Z"


def escape(text: str) -> str:
    """Return a text on one line, with characters that can't be printed as escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


def _as_text(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return list(value) if isinstance(value, (set, frozenset)) else str(value)


def _word(value: object) -> str:
    """Format a value so that it can be told from the next value."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_word, value))
    text = str(_as_text(value))
    is_plain = text.isprintable() and not set(text) & set(' "=\\') and text
    return text if is_plain else json.dumps(text)


# Files.


class Rotation(Struct, frozen=True):
    """When a log file is replaced, and how many old files are kept."""

    bytes_max: int = 10 << 20
    files: int = 5


class LineSink(Protocol):
    """Writes lines with their ends. May block."""

    def write(self, lines: bytes) -> None: ...

    def close(self) -> None: ...


class RotatedFile:
    """A log file of one process. `up.log` becomes `up.log.1` when it is full, and so on.

    A file that another program has moved away is opened anew.
    """

    def __init__(self, path: Path, rotation: Rotation) -> None:
        """Open the file and lock it. Raises `UserError` if another process logs to it."""
        self._path = path
        self._rotation = rotation
        make_private_directory(path.parent)
        self._descriptor = self._open()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise UserError(
                f"log file {path}: in use by another process (give each its own file)"
            ) from None

    def write(self, lines: bytes) -> None:
        size = self._size()
        if size and size + len(lines) > self._rotation.bytes_max:
            self._rotate()
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _size(self) -> int:
        """Return the bytes in the file. Opens it anew if it was moved or removed."""
        found = os.fstat(self._descriptor)
        with suppress(FileNotFoundError):
            if os.path.samestat(found, self._path.stat()):
                return found.st_size
        self._reopen()
        return 0

    def _rotate(self) -> None:
        for number in range(self._rotation.files - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._numbered(number).replace(self._numbered(number + 1))
        if self._rotation.files:
            self._path.replace(self._numbered(1))
        else:
            self._path.unlink()
        self._reopen()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _reopen(self) -> None:
        opened = self._open()
        with suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(self._descriptor)
        self._descriptor = opened


class StderrSink:
    """Writes to the process's stderr. Drops lines that it does not take."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def write(self, lines: bytes) -> None:
        with suppress(OSError, ValueError):  # closed, or its reader has ended
            self._stream.write(lines.decode())
            self._stream.flush()

    def close(self) -> None:
        """Leave stderr open."""


# The thread.


class LogWriter(logging.handlers.QueueHandler):
    """A handler whose thread writes the lines, from the first line on."""

    def __init__(self, formatter: LineFormatter, sink: LineSink) -> None:
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(LINES_MAX)
        super().__init__(self._waiting)
        self.setFormatter(formatter)
        self._line_formatter, self._sink = formatter, sink
        self._dropped = 0
        self._starting = threading.Lock()
        self._listener: logging.handlers.QueueListener | None = None
        self._is_closed = False

    def enqueue(self, record: logging.LogRecord) -> None:
        """Add a line, or count it if the queue is full."""
        self._start()
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def put_output(self, line: str) -> None:
        """Add a line that a child printed. Waits for room: the child's own queue is behind it."""
        self._start()
        self._waiting.put(logging.makeLogRecord({"msg": self._line_formatter.wrapped(line)}))

    def _start(self) -> None:
        with self._starting:
            if self._listener is None:
                self._listener = logging.handlers.QueueListener(self._waiting, _Printer(self))
                self._listener.start()

    def write(self, line: str) -> None:
        """Write a line, in the thread, and how many were dropped before it."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            fields = {"lines": dropped}
            full = self._line_formatter.line(time.time_ns(), "warning", "log full", fields)
            line = f"{line}\n{full}"
        # A full disk must not end the thread: there may be room later.
        with suppress(OSError):
            self._sink.write(f"{line}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Write the lines that are left. Gives up if nothing takes them."""
        if not self._is_closed:
            self._is_closed = True  # `logging` closes all handlers at the end, too
            with self._waiting.all_tasks_done:
                is_written = self._waiting.all_tasks_done.wait_for(
                    lambda: not self._waiting.unfinished_tasks, CLOSE_SECONDS_MAX
                )
            if is_written:
                if self._listener is not None:
                    self._listener.stop()
                self._sink.close()
        super().close()


class _Printer(logging.Handler):
    """Passes the lines of the queue to their writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(record.getMessage())


def start_log(writer: LogWriter, level: int) -> None:
    """Send the records of all loggers of this package, and of its libraries, to a writer."""
    for name in _LOGGERS:
        logging.getLogger(name).handlers[:] = [writer]
    logging.getLogger("taskyard").setLevel(level)


def leave_log() -> None:
    """Forget the log of the process that forked this process."""
    for name in _LOGGERS:
        logging.getLogger(name).handlers.clear()
    logging.getLogger("taskyard").setLevel(logging.NOTSET)


def stop_log(writer: LogWriter) -> None:
    """Write the lines that are left. Later records are ignored."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if writer in logger.handlers:
            logger.handlers[:] = [logging.NullHandler()]
    writer.close()


# The output of children.


@contextmanager
def captured_stderr(writer: LogWriter, log: Path) -> Iterator[None]:
    """Send stderr of this process and its later children to the log, line by line.

    Also stdout, if it is the log file itself, which rotation would move away.
    """
    reading, writing = os.pipe()
    with suppress(ValueError):
        sys.stderr.flush()
        sys.stdout.flush()
    saved = {number: os.dup(number) for number in _captured(log)}
    for number in saved:
        os.dup2(writing, number)
    os.close(writing)
    capture = _Capture(reading, writer)
    thread = threading.Thread(target=capture.run, name="taskyard-capture", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.stderr.flush()
            sys.stdout.flush()
        for number, descriptor in saved.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        capture.stop()
        thread.join(CLOSE_SECONDS_MAX)


def _captured(log: Path) -> list[int]:
    is_log = os.path.samestat(os.fstat(1), log.stat())
    return [1, 2] if is_log else [2]


class _Capture:
    """Reads a pipe to its end, or until stopped: a child that lives on may hold the other end."""

    def __init__(self, descriptor: int, writer: LogWriter) -> None:
        self._descriptor = descriptor
        self._writer = writer
        self._rest = b""
        self._stop_reading, self._stop_writing = os.pipe()

    def stop(self) -> None:
        os.close(self._stop_writing)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.register(self._stop_reading, select.POLLIN)
        while ready := dict(poll.poll()):
            if self._descriptor not in ready:
                break
            data = os.read(self._descriptor, _READ_BYTES)
            if not data:
                break
            self._take(data)
        if self._rest:
            self._take(b"\n")
        os.close(self._descriptor)
        os.close(self._stop_reading)

    def _take(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            whole.append(self._rest)
            self._rest = b""
        for line in whole:
            self._writer.put_output(line.decode(errors="backslashreplace"))
