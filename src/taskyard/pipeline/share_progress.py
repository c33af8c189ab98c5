"""Progress of shares of work, by the files that they leave in a directory.

Not every kind of session reports how many tasks of a Spark job are done. But the driver can count
files wherever the executors write them. Knows nothing of terminals.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct

from taskyard.errors import UserError
from taskyard.pipeline.store.location import Location

#: Called with a stage, the number of its rows that are done, and of all its rows if it is known.
StageCallback = Callable[[str, int, int | None], None]

#: How often files are counted.
COUNT_SECONDS: Final = 0.5


class ShareFiles(Struct, frozen=True):
    """The files that shares leave: one for each, whose name begins with a prefix."""

    directory: Location
    shares: int
    #: Rows of all shares together.
    rows: int
    prefix: str = ""

    def count(self) -> int:
        names = self.directory.names()
        return sum(name.startswith(self.prefix) for name in names)


@contextlib.contextmanager
def shown_shares(on_stage: StageCallback | None, stage: str, files: ShareFiles) -> Iterator[None]:
    """Show the rows of the shares that are done, as long as the context lasts."""
    if on_stage is None:
        yield
        return
    before = files.count()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(COUNT_SECONDS):
            # A store that can't be listed right now only delays the display.
            with contextlib.suppress(UserError):
                done = min(files.count() - before, files.shares)
                on_stage(stage, files.rows * done // files.shares, files.rows)

    on_stage(stage, 0, files.rows)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    on_stage(stage, files.rows, files.rows)
