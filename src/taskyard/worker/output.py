"""The end of what a process prints, in bounded memory whatever it prints."""

from typing import Final

from taskyard.core.limits import REASON_BYTES_MAX
from taskyard.core.model import Result
from taskyard.worker.limits import LAST_LINE_BYTES_MAX

_CUT: Final = b" [...]"


class Tail:
    """Takes any number of bytes and keeps the last ones."""

    __slots__ = ("_kept", "bytes_max", "bytes_total")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        #: All that was ever added.
        self.bytes_total = 0
        self._kept = bytearray()

    def add(self, chunk: bytes) -> None:
        self.bytes_total += len(chunk)
        self._kept += chunk[-self.bytes_max :]
        # Cut by halves, not by each chunk: every byte is moved once.
        if len(self._kept) > 2 * self.bytes_max:
            del self._kept[: -self.bytes_max]

    def is_cut(self) -> bool:
        return self.bytes_total > self.bytes_max

    def value(self) -> bytes:
        return bytes(self._kept[-self.bytes_max :])

    def with_size(self) -> Result:
        """Return the value, with its length before it was cut."""
        return Result(self.value(), self.bytes_total if self.is_cut() else 0)

    def clear(self) -> None:
        self.bytes_total = 0
        self._kept.clear()


def last_line(output: bytes) -> bytes:
    """The last line that says something, fit to be quoted: UTF-8, without control characters."""
    line = output.rstrip().rpartition(b"\n")[2].strip()
    text = line[-LAST_LINE_BYTES_MAX:].decode(errors="replace")
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    if text and len(line) > LAST_LINE_BYTES_MAX:
        text = f"[...] {text}"
    return text.encode()


def cut_reason(reason: bytes) -> bytes:
    """As much of the beginning as is kept of a reason, which says what kind of trouble it is."""
    if len(reason) <= REASON_BYTES_MAX:
        return reason
    return reason[: REASON_BYTES_MAX - len(_CUT)].decode(errors="ignore").encode() + _CUT
