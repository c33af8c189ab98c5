"""Count the calls of a process, in segments that begin with the call of a marked function.

Python tells a profile function of every call. Calls of our own code, of pyzmq's and of other Python
code are counted apart, and so are calls of C functions and of SQLite's. A segment has labels, such
as the events that it handled, so that segments of one kind can be compared.

Allocations are counted from below: by how many blocks Python's memory grows between two calls or
returns. A block that is freed before the next call is not seen. ZeroMQ's and SQLite's are not among
them.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import msgspec

_OWN: Final = "/taskyard/"
_ZMQ: Final = "/zmq/"
_SQLITE: Final = "sqlite3"

#: The latest segments, which are kept.
SEGMENTS_MAX: Final = 20_000


class Segment(msgspec.Struct):
    """The calls of one segment."""

    labels: list[str] = []
    #: Calls of Python functions: our own, pyzmq's, and other packages'.
    own: int = 0
    zmq: int = 0
    other: int = 0
    #: Calls of C functions, and SQLite's among them.
    c: int = 0
    sqlite: int = 0
    #: Blocks of memory that were allocated, at least.
    allocations: int = 0
    #: Our files that were entered.
    files: int = 0
    #: Our functions that were called, by file and name.
    functions: dict[str, int] = {}

    @property
    def python(self) -> int:
        """All calls of Python functions."""
        return self.own + self.zmq + self.other


class Trace(msgspec.Struct):
    """The calls of a process, in segments, and the calls of all its threads by second."""

    segments: list[Segment] = []
    #: By second of the monotonic clock: calls of Python and of C functions.
    seconds: dict[int, tuple[int, int]] = {}


class Tracer:
    """Counts the calls of this thread, and of threads that start later."""

    def __init__(
        self,
        marks: Mapping[CodeType, str],
        labelled: Mapping[CodeType, str],
        *,
        all_threads: bool = False,
    ) -> None:
        """Begin a segment at each call of a function in `marks`, with its label if it has one.

        A call of a `labelled` function adds the type of the argument with that name as a label.
        With `all_threads`, segments contain the calls of all of them.
        """
        self._marks, self._labelled = marks, labelled
        self._thread = 0 if all_threads else threading.get_ident()
        self._segments: list[Segment] = []
        self._begin()
        self._python: Counter[int] = Counter()
        self._c: Counter[int] = Counter()
        #: Allocated blocks after the last call or return.
        self._blocks = 0

    def start(self) -> None:
        threading.setprofile(self._count)
        self._blocks = sys.getallocatedblocks()
        sys.setprofile(self._count)

    def stop(self) -> Trace:
        """Stop counting, and return the trace without its first and its last segment."""
        sys.setprofile(None)
        threading.setprofile(None)
        seconds = {
            second: (self._python[second], self._c[second])
            for second in sorted(self._python.keys() | self._c.keys())
        }
        return Trace(self._segments[1:], seconds)

    def _begin(self) -> None:
        self._segment = Segment([])
        self._functions: Counter[CodeType] = Counter()

    def _end(self) -> None:
        segment = self._segment
        for code, count in self._functions.items():
            name = code.co_filename.rpartition(_OWN)[2] if _OWN in code.co_filename else ""
            if name:
                key = f"{name} {code.co_qualname}"
                segment.functions[key] = segment.functions.get(key, 0) + count
        segment.files = len({key.partition(" ")[0] for key in segment.functions})
        self._segments.append(segment)
        del self._segments[:-SEGMENTS_MAX]

    def _count(self, frame: FrameType, kind: str, argument: Any) -> None:  # noqa: ANN401
        self._segment.allocations += max(0, sys.getallocatedblocks() - self._blocks)
        self._count_call(frame, kind, argument)
        self._blocks = sys.getallocatedblocks()

    def _count_call(self, frame: FrameType, kind: str, argument: Any) -> None:  # noqa: ANN401
        second = time.monotonic_ns() // 1_000_000_000
        if kind == "call":
            self._python[second] += 1
        elif kind == "c_call":
            self._c[second] += 1
        else:
            return
        if self._thread and threading.get_ident() != self._thread:
            return
        if kind == "call":
            self._count_python(frame)
        else:
            self._segment.c += 1
            self._segment.sqlite += _is_of_sqlite(argument)

    def _count_python(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in self._marks:
            self._end()
            self._begin()
            if self._marks[code]:
                self._segment.labels.append(self._marks[code])
        if code in self._labelled:
            label = type(frame.f_locals[self._labelled[code]]).__name__
            self._segment.labels.append(label)
        self._functions[code] += 1
        path = code.co_filename
        if _OWN in path:
            self._segment.own += 1
        elif _ZMQ in path:
            self._segment.zmq += 1
        else:
            self._segment.other += 1


def _is_of_sqlite(function: Any) -> bool:  # noqa: ANN401
    return type(getattr(function, "__self__", None)).__module__ == _SQLITE


def write(trace: Trace, file: Path) -> None:
    file.write_bytes(msgspec.json.encode(trace))


def read(file: Path) -> Trace:
    return msgspec.json.decode(file.read_bytes(), type=Trace)
