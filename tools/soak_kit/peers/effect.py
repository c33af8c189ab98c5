"""What every peer of the soak does with a task: take a little time, then write one line.

The line goes to a file that is only ever appended to, before the task is reported. So the file
proves what ran, independently of the broker's journal.
"""

import os
import time
import zlib


def seconds_of(text: bytes) -> float:
    """Return how long a task takes, 20 to 300 ms, by what it is called."""
    return 0.02 + zlib.crc32(text) % 280 / 1000


def record(ledger: str, worker: str, text: bytes) -> None:
    """Append one line: a single write, so that lines of many processes never mix."""
    line = f"{time.time():.3f}\t{worker}\t".encode() + text + b"\n"
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def work(ledger: str, worker: str, text: bytes) -> None:
    """Run one task: blocks for as long as it takes."""
    time.sleep(seconds_of(text))
    record(ledger, worker, text)
