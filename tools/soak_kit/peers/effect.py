"""The work of every peer of the soak: take a little time, then append one line.

The line goes to an append-only file before the task is reported. So the file proves that a task
ran, independently of the broker's journal.
"""

import os
import time
import zlib


def seconds_of(text: bytes) -> float:
    """Return the duration of a task, 20 to 300 ms, derived from its text."""
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
    """Run one task. Blocks for its duration."""
    time.sleep(seconds_of(text))
    record(ledger, worker, text)
