"""The reader of row files that docs/journal.md shows, for tests: it shares no code with ours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "journal.md"

Read = Callable[[Path, str], Iterator[dict[str, Any]]]


def documented_reader() -> Read:
    """Return the function `read` of the page's Python block."""
    (code,) = (block.partition("\n```")[0] for block in PAGE.read_text().split("```python\n")[1:])
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102  # our own page
    read: Read = names["read"]
    return read


read_rows = documented_reader()
