"""An agent's stdin as a pipe that never blocks, and its stderr as lines in the log.

Both have bounded memory. Of tasks they have the keys only.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from selectors import EVENT_WRITE, BaseSelector

from taskyard.core.limits import SECOND_NS
from taskyard.wire.hungry.frames import Key
from taskyard.worker.jobs import AGENT_LOG_LINES_MAX, LAST_LINE_BYTES_MAX, last_line

logger = logging.getLogger("taskyard.worker")


class StdinPipe:
    """A pipe to a process. Never blocks, and buffers bytes that the process has not read."""

    def __init__(self, selector: BaseSelector) -> None:
        self._selector = selector
        self._reading, writing = os.pipe()
        #: None when either side has closed it.
        self._writing: int | None = writing
        os.set_blocking(writing, False)
        #: Lines that are not fully written. Views, so nothing is copied.
        self._unsent: deque[tuple[tuple[Key, ...], memoryview]] = deque()
        #: Part of the first line is written.
        self._is_begun = False
        self._is_polled = False
        self._is_ending = False

    @contextmanager
    def reading_end(self) -> Iterator[int]:
        """Lend the reading end to a process that is being started. Close the pipe if that fails."""
        try:
            yield self._reading
        except BaseException:
            self.close()
            raise
        finally:
            os.close(self._reading)

    def is_open(self) -> bool:
        return self._writing is not None and not self._is_ending

    def send(self, line: bytes, *keys: Key) -> None:
        """Write a line. `keys` are the tasks that the line contains."""
        if line:
            self._unsent.append((keys, memoryview(line)))
            self._write()

    def end(self) -> None:
        """Close the pipe when everything is written."""
        self._is_ending = True
        self._write()

    def close(self) -> None:
        if self._writing is not None:
            self._poll(wanted=False)
            os.close(self._writing)
            self._writing = None

    def unsent_keys(self) -> list[Key]:
        """Return the tasks of which no byte was written."""
        unsent = list(self._unsent)[1 if self._is_begun else 0 :]
        return [key for keys, _ in unsent for key in keys]

    def _write(self) -> None:
        if self._writing is None:
            return
        try:
            while self._unsent:
                keys, line = self._unsent[0]
                written = os.write(self._writing, line)
                self._is_begun = written < len(line)
                if self._is_begun:
                    self._unsent[0] = (keys, line[written:])
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it closed its stdin, or it died and its pidfd is ready
            self.close()
            return
        if self._is_ending and not self._unsent:
            self.close()
        else:
            self._poll(wanted=bool(self._unsent))

    def _poll(self, *, wanted: bool) -> None:
        if self._writing is None or wanted == self._is_polled:
            return
        self._is_polled = wanted
        if wanted:
            self._selector.register(self._writing, EVENT_WRITE, lambda _events: self._write())
        else:
            self._selector.unregister(self._writing)


class LineLogger:
    """Logs the lines of a process. Cuts long lines, and limits the lines per second."""

    def __init__(self, source: str, now_ns: Callable[[], int]) -> None:
        self._source = source
        self._now_ns = now_ns
        self._pending = b""
        self._second = 0
        self._lines = 0
        self._suppressed = 0

    def add(self, chunk: bytes) -> None:
        """Add bytes that may contain several lines or part of one."""
        *lines, rest = (self._pending + chunk).split(b"\n")
        self._pending = rest[: LAST_LINE_BYTES_MAX + 1]
        for line in lines:
            self.log(line)

    def log(self, line: bytes, level: int = logging.WARNING) -> None:
        text = last_line(line[:LAST_LINE_BYTES_MAX]).decode()
        if text and len(line) > LAST_LINE_BYTES_MAX:
            text += " [...]"
        if not text or not logger.isEnabledFor(level):
            return
        second = self._now_ns() // SECOND_NS
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > AGENT_LOG_LINES_MAX:
            self._suppressed += 1
            return
        self._log_suppressed()
        logger.log(level, "%s: %s", self._source, text)

    def end(self) -> None:
        """Log the last line, which may have no line end."""
        self.log(self._pending)
        self._pending = b""
        self._log_suppressed()

    def _log_suppressed(self) -> None:
        if self._suppressed:
            logger.warning("%s: %d more lines not logged", self._source, self._suppressed)
            self._suppressed = 0
