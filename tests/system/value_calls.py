"""Functions of calls with large arguments and results."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def anonymous_bytes() -> int:
    """Return the memory of this process that is not of a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def sum_in_place(array: Array) -> tuple[float, int, int]:
    """Return the sum of an array, the memory that this process has, and its id."""
    return float(array.sum()), anonymous_bytes(), os.getpid()


def change(array: Array) -> float:
    """Change an array, as a program does with its own. Return the first number before."""
    first = float(array[0])
    array += 1
    return first


def double(array: Array) -> Array:
    return array * 2


def length(content: bytes) -> int:
    return len(content)


def bytes_at_the_gate(gate: str, count: int) -> bytes:
    while not Path(gate).exists():
        time.sleep(0.02)
    return bytes(count)


def last(array: Array) -> float:
    return float(array[-1])
