"""Text for people: counts, durations, moments, sizes, names, and escaped control characters.

Moments are relative on a terminal (`12 min ago`, `yesterday 14:03`), in the local time zone. Tables
in a pipe have them in UTC (`2026-11-16T14:03:05Z`), so that output is stable. `--json` has numbers.
All output to a terminal is escaped, so that names can't control it. Pipes get the exact bytes.
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from taskyard.core.durations import HOUR_SECONDS, duration_text, rough_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import TextIO

#: Durations read the same in the broker's sentences.
format_duration: Final = duration_text

#: Moments further away are shown by day and time.
_RELATIVE_SECONDS_MAX: Final = 12 * HOUR_SECONDS

#: Units of sizes, 1,024 of each in the next.
_SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE_STEP: Final = 1024
#: Smaller numbers have one decimal.
_SIZE_TENTHS_MAX: Final = 10

#: Replaces the middle of a shortened name.
_ELLIPSIS: Final = "…"

#: Characters with a meaning in a pattern.
_SPECIAL: Final = re.compile(r"[*?[]")


def escape_pattern(text: str) -> str:
    """Return a pattern that matches only this text."""
    return _SPECIAL.sub(lambda found: f"[{found[0]}]", text)


def escape_line(text: str) -> str:
    """Return a text on one line, with non-printable characters as escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


def format_count(number: int, thing: str) -> str:
    """Format a count: `1 task`, `2,000 tasks`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def format_slots(slots: int, used: int) -> str:
    """Format the used slots as `3 of 4`. Prefetched tasks use none."""
    return f"{min(used, slots)} of {slots}" if slots else str(used)


def format_moment(at: float, now: float) -> str:
    """Format a moment relative to now: `in 59 min`, `12 min ago`, `yesterday 14:03`."""
    if abs(at - now) < 1:
        return "now"
    if abs(at - now) < _RELATIVE_SECONDS_MAX:
        distance = rough_duration(abs(at - now))
        return f"in {distance}" if at > now else f"{distance} ago"
    when, today = _local(at), _local(now).date()
    for days, name in ((0, "today"), (-1, "yesterday"), (1, "tomorrow")):
        if when.date() == today + timedelta(days=days):
            return f"{name} {when:%H:%M}"
    return f"{when:%Y-%m-%d %H:%M}"


def format_date(at: float) -> str:
    """Format a moment as local date and time: `2026-11-16 14:03:05`."""
    return f"{_local(at):%Y-%m-%d %H:%M:%S}"


def format_utc(at: float) -> str:
    """Format a moment for programs: `2026-11-16T14:03:05Z`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _local(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC).astimezone()


def format_progress(view: Mapping[str, Any]) -> str:
    """Format the progress of a running task: `40 %, copying`. Empty: none was reported."""
    percent = view["percent"]
    parts = ["" if percent is None else f"{percent} %", view["progress"]]
    return ", ".join(part for part in parts if part)


def format_size(size_bytes: float) -> str:
    """Format a size: `512 B`, `4.2 GiB`."""
    size, unit = float(size_bytes), 0
    while round(size) >= _SIZE_STEP and unit < len(_SIZE_UNITS) - 1:
        size, unit = size / _SIZE_STEP, unit + 1
    digits = 1 if unit and round(size, 1) < _SIZE_TENTHS_MAX else 0
    return f"{size:,.{digits}f} {_SIZE_UNITS[unit]}"


def format_signal(number: int) -> str:
    """Return the name of a signal: `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shorten_middle(text: str, width: int) -> str:
    """Replace the middle of a text that is longer than `width` with an ellipsis."""
    if len(text) <= width:
        return text
    kept = max(0, width - len(_ELLIPSIS))
    end = kept // 2
    return text[: kept - end] + _ELLIPSIS + text[len(text) - end :]


def format_resources(amounts: Mapping[str, float]) -> str:
    """Format the resources of a document: `2 gpus and 4 GiB of memory`."""
    from taskyard.core import resources  # noqa: PLC0415  # not needed by `--help`

    return resources.format_resources(_read_amounts(amounts))


def format_free_resources(total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Format free resources as `3 of 4 cpus, 6 GiB of 8 GiB memory`."""
    from taskyard.core.resources import format_amount  # noqa: PLC0415  # not needed by `--help`

    left = dict(_read_amounts(free))
    words = [
        f"{format_amount(name, max(0, left.get(name, 0)))} of {format_amount(name, amount)} "
        f"{escape_line(name.decode())}"
        for name, amount in _read_amounts(total)
    ]
    return ", ".join(words)


def _read_amounts(amounts: Mapping[str, float]) -> list[tuple[bytes, int]]:
    """Return the resources of a document as names and integer amounts."""
    from taskyard.core.resources import MEMORY, UNIT  # noqa: PLC0415  # not needed by `--help`

    units = {name: 1 if name.encode() == MEMORY else UNIT for name in amounts}
    return [(name.encode(), round(amount * units[name])) for name, amount in amounts.items()]


def full_name(view: Mapping[str, Any]) -> str:
    """Return the full name of a task, CAMPAIGN/NAME."""
    from taskyard.core.identity import spelling  # noqa: PLC0415  # not needed by `--help`

    return spelling(str(view["campaign"]), str(view["name"]))


def task_name_fields(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that name a task in a document."""
    return {"name": view["name"], "campaign": view["campaign"]}


#: Direction marks and overrides, which reorder text.
_BIDI: Final = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"

#: C0 except tab and newline, DEL, C1, directions, and bytes that are not UTF-8.
_CONTROL_CHARACTERS: Final = re.compile(f"[\0-\x08\x0b-\x1f\x7f-\x9f{_BIDI}\ud800-\udfff]")

#: Characters that JSON does not escape: DEL, C1, directions, line and paragraph separators. In
#: UTF-8.
_JSON_CONTROL_CHARACTERS: Final = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)

_LAST_OF_ONE_BYTE: Final = 0xFF
#: The offset of `surrogateescape` for bytes that are not UTF-8.
_SURROGATE: Final = 0xDC00


def escape_control(text: str) -> str:
    """Escape control characters. Tabs and newlines stay."""
    return _CONTROL_CHARACTERS.sub(_escape_control, text)


def escape_control_bytes(value: bytes) -> bytes:
    """Escape control characters and bytes that are not UTF-8."""
    return escape_control(value.decode(errors="surrogateescape")).encode()


def escape_control_json(document: bytes) -> bytes:
    r"""Escape C1 and direction controls as `\uXXXX` in a JSON document."""
    return _JSON_CONTROL_CHARACTERS.sub(_escape_in_json, document)


def _escape_control(found: re.Match[str]) -> str:
    code = ord(found[0])
    if _SURROGATE < code <= _SURROGATE + _LAST_OF_ONE_BYTE:
        code -= _SURROGATE
    return f"\\x{code:02x}" if code <= _LAST_OF_ONE_BYTE else f"\\u{code:04x}"


def _escape_in_json(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


class _EscapingStream:
    """A text stream to a terminal that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.buffer = _EscapingByteStream(stream.buffer)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of the stream
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.stream.write(escape_control(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


class _EscapingByteStream:
    """A binary stream that escapes control characters."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401  # a binary stream
        self.stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of the stream
        return getattr(self.stream, name)

    def write(self, value: bytes) -> int:
        self.stream.write(escape_control_bytes(bytes(value)))
        return len(value)


@contextmanager
def escaping_output() -> Iterator[None]:
    """Escape output to stdout and stderr, as far as they are terminals."""
    before = sys.stdout, sys.stderr
    guards = [_wrap_terminal(stream) for stream in before]
    if not any(isinstance(guard, _EscapingStream) for guard in guards):
        yield
        return
    sys.stdout, sys.stderr = guards
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _wrap_terminal(stream: Any) -> Any:  # noqa: ANN401  # None in a process that was started with it closed
    is_guarded = stream is None or stream.closed or isinstance(stream, _EscapingStream)
    return stream if is_guarded or not stream.isatty() else _EscapingStream(stream)


def raw_stream(stream: Any) -> TextIO:  # noqa: ANN401  # a stream or its wrapper
    """Return the stream behind the wrapper, for drawing code."""
    found: TextIO = stream.stream if isinstance(stream, _EscapingStream) else stream
    return found
