"""The functions that the demo's native worker runs: letter counts of generated samples.

Imported by workers, so it imports almost nothing. Letters come from a hash of their position, so
they are the same in every run.
"""

import hashlib
import time

#: The shortest and the longest duration of a task.
_MILLISECONDS_MIN, _MILLISECONDS_MAX = 4, 24


def fetch(sample: str) -> int:
    """Fetch a sample, and return its size in letters."""
    _sleep_briefly("fetch", sample)
    return len(_letters(sample, 0))


def count(sample: str, part: int) -> dict[str, int]:
    """Count the letters of one part of a sample."""
    _sleep_briefly("count", sample, part)
    letters = _letters(sample, part)
    return {letter: letters.count(letter) for letter in sorted(set(letters))}


def merge(sample: str, parts: int) -> dict[str, int]:
    """Add up the counts of a sample's parts."""
    _sleep_briefly("merge", sample)
    letters = "".join(_letters(sample, part) for part in range(parts))
    return {letter: letters.count(letter) for letter in sorted(set(letters))}


def summary(samples: int) -> str:
    """Summarize all samples."""
    _sleep_briefly("summary")
    return f"{samples} samples"


def receipt(mail: str) -> str:
    """Confirm that a mail has arrived."""
    _sleep_briefly("receipt", mail)
    return f"{mail} has arrived"


def digest(receipts: int) -> str:
    """Summarize all receipts."""
    _sleep_briefly("digest")
    return f"{receipts} receipts"


def square(number: int) -> int:
    """Return the square of a number, after a tenth of a second."""
    time.sleep(0.1)
    return number * number


def _letters(sample: str, part: int) -> str:
    return hashlib.sha256(f"{sample}/{part}".encode()).hexdigest()


def _sleep_briefly(*task: object) -> None:
    """Sleep for the duration of this task, which is the same in every run."""
    byte = hashlib.sha256(repr(task).encode()).digest()[0]
    spread = _MILLISECONDS_MAX - _MILLISECONDS_MIN
    time.sleep((_MILLISECONDS_MIN + spread * byte / 255) / 1000)
