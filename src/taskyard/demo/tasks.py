"""The work of the demo: functions for a native worker, and an agent that seems to deliver mail.

Workers import it, and a worker host runs it as a program, so it imports almost nothing. Letters
come from a hash of their position, so they are the same in every run. The agent reads a task from
each line, as docs/dialects/hungry.md describes. The name of a destination determines its behaviour.
A file in the current directory records when the destination that is down was first tried.
"""

import hashlib
import sys
import time
from pathlib import Path

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


# The agent.

#: Refuses mail at first, and accepts it later.
DOWN = "down.example"

#: Always refuses mail.
STRICT = "strict.example"

#: How long the first destination is down, from its first mail on.
OUTAGE_SECONDS = 5.0

#: How long a delivery takes.
MAIL_SECONDS = 0.012

OUTAGE_FILE = Path("down-since")

#: An identity, a lane and a payload.
_FIELDS = 3


def main() -> None:
    print("#hungry", flush=True)  # noqa: T201  # the protocol is lines on stdout
    for line in sys.stdin:
        fields = line.rstrip("\n").split("\t")
        if not line.strip():
            return
        if len(fields) == _FIELDS:  # otherwise it is a comment
            identity, host, _mail = fields
            print(f"{identity}\t\t{deliver(host)}", flush=True)  # noqa: T201
            print("#hungry", flush=True)  # noqa: T201


def deliver(host: str) -> str:
    """Deliver one mail, and return the report."""
    if host == STRICT:
        return "error 550 no such user here"
    if host == DOWN and is_down():
        return "deferall 421 connection refused"
    time.sleep(MAIL_SECONDS)
    return "ok 250 accepted"


def is_down() -> bool:
    if not OUTAGE_FILE.exists():
        OUTAGE_FILE.touch()
    return time.time() - OUTAGE_FILE.stat().st_mtime < OUTAGE_SECONDS


if __name__ == "__main__":
    main()
