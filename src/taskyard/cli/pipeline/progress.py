"""The progress of a Spark job: its stage, rows and remaining time, from its first second on.

Jobs call `StageProgress.show` and know nothing of terminals. A terminal has one line that is
rewritten. Elsewhere each stage is a line, and a long stage has further lines with its rows.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

from taskyard.cli.format import format_duration
from taskyard.cli.progress import LINE_SECONDS, ProgressBar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from taskyard.cli.options import CliContext

#: The time of a stage without rows is shown where no bar is drawn, first after this long.
_SILENT_SECONDS_MAX: Final = 3 * LINE_SECONDS


class StageProgress:
    """A context manager that shows the stages of a job. Its methods may be called by any thread."""

    def __init__(self, cli_context: CliContext, stage: str, *, counts: str = "rows") -> None:
        self._cli_context = cli_context
        self._bar = ProgressBar(cli_context, participle=counts)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._stage = ""
        self._begun = self._printed = time.monotonic()
        self._first = stage
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._bar)
        self.show(self._first)
        if self._bar.is_shown and not self._bar.is_drawn:
            thread = threading.Thread(target=self._print_waits, daemon=True)
            thread.start()
            self._stack.callback(thread.join)
        self._stack.callback(self._ended.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, stage: str, rows: int = 0, rows_total: int | None = None) -> None:
        """Show a stage, and how many of its rows are done. A total of None is unknown."""
        with self._lock:
            if stage != self._stage:
                self._stage = stage
                self._begun = self._printed = time.monotonic()
                self._bar.set_label(stage, replaces=True)
                if not self._bar.is_drawn:
                    self._cli_context.info(stage)
            if rows or rows_total is not None or self._bar.is_drawn:
                self._printed = time.monotonic()
                self._bar.update(rows, rows_total)

    def _print_waits(self) -> None:
        """Print the time of a stage that reports no rows."""
        while not self._ended.wait(LINE_SECONDS):
            with self._lock:
                now = time.monotonic()
                if now - self._printed >= _SILENT_SECONDS_MAX:
                    self._printed = now
                    took = format_duration(round(now - self._begun))
                    self._cli_context.info(f"{self._stage}: {took} so far")


def starting_text(master: str) -> str:
    """Return the first stage of every job."""
    return f"starting Spark on {master}"


@contextmanager
def started_session(
    cli_context: CliContext,
    name: str,
    master: str,
    **how: Any,  # noqa: ANN401  # those of `session_scope`
) -> Iterator[SparkSession]:
    """Yield a session, and show progress only until it has started."""
    from taskyard.pipeline.session import session_scope  # noqa: PLC0415  # imports Spark

    with ExitStack() as stack:
        with StageProgress(cli_context, starting_text(master)):
            spark = stack.enter_context(session_scope(name, master, **how))
        yield spark
