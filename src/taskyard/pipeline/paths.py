"""Paths of this machine's files, as Spark takes them.

Spark's paths look like URIs and are none: nothing in them is escaped by per cent. Those that it
reads are patterns.
"""

import re
from pathlib import Path

_SPECIAL = re.compile(r"[\\*?\[\]{}]")


def for_writing(path: Path) -> str:
    """A path to write to."""
    return f"file://{path.absolute()}"


def for_reading(path: Path) -> str:
    """A path to read, and no other that it might be a pattern of."""
    escaped = _SPECIAL.sub(r"\\\g<0>", str(path.absolute()))
    return f"file://{escaped}"
