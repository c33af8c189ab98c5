"""How much output is kept in files: a quota that holds back submissions, and removal by age.

Counts the bytes of all files at the start, in steps between turns. Later the writes are counted,
and the files again while they are over the quota, because `taskyard clean` removes some. Never
removes output of a task that may still run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TASK_STATES_ENDED, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskyard.broker.output_store import CountedStore, OutputFile
    from taskyard.core.ledger import Ledger
    from taskyard.net.protocols import Clock

logger = logging.getLogger("taskyard.broker")

#: Files looked at in one step: a millisecond or two.
FILES_PER_STEP: Final = 200

#: How often files are counted over the quota, and how often old ones are removed.
FULL_CHECK_NS: Final = 5 * SECOND_NS
AGE_CHECK_NS: Final = 600 * SECOND_NS


class OutputLimits(Struct, frozen=True):
    """How much output is kept, and how long."""

    #: 0: no limit.
    quota_bytes: int = 0
    #: None: for ever.
    keep_ns: int | None = None


class OutputRetention:
    """Counts and removes files of output, one step after each turn."""

    def __init__(
        self,
        files: CountedStore,
        ledger: Ledger,
        clock: Clock,
        limits: Callable[[], OutputLimits],
    ) -> None:
        """`limits` returns the current limits, which a reload may change."""
        self._files = files
        self._ledger = ledger
        self._clock = clock
        self._limits = limits
        self._scan: Iterator[None] | None = self._scanned()
        self._scan_ended_ns = 0

    def problem(self) -> str:
        """Return why no tasks are accepted. Empty: they are."""
        quota, used = self._limits().quota_bytes, self._files.bytes_used
        if not quota or used < quota:
            return ""
        return (
            f"output: {used:,} bytes in files reach the quota of {quota:,} "
            "(remove some with `taskyard clean`, or raise output.quota)"
        )

    def run_step(self) -> int | None:
        """Run one step. Return the time until the next one, or None."""
        if self._scan is None:
            interval_ns = self._interval_ns()
            if interval_ns is None:
                return None
            now_ns = self._clock.monotonic_ns()
            wait_ns = self._scan_ended_ns + interval_ns - now_ns
            if wait_ns > 0:
                return wait_ns
            self._scan = self._scanned()
        if next(self._scan, self) is self:
            self._scan, self._scan_ended_ns = None, self._clock.monotonic_ns()
        return 0

    def _interval_ns(self) -> int | None:
        if self.problem():
            return FULL_CHECK_NS
        return None if self._limits().keep_ns is None else AGE_CHECK_NS

    def _scanned(self) -> Iterator[None]:
        """Count all files, and remove old ones, in steps."""
        used_before, found_bytes, removed = self._files.bytes_used, 0, 0
        keep_ns = self._limits().keep_ns
        since_ns = 0 if keep_ns is None else self._clock.wall_ns() - keep_ns
        for count, file in enumerate(self._files.walk()):
            if file.written_ns < since_ns and self._is_settled(file):
                removed += self._remove(file)
            else:
                found_bytes += file.bytes_total
            if count % FILES_PER_STEP == FILES_PER_STEP - 1:
                yield
        written = max(0, self._files.bytes_used - used_before)
        self._files.bytes_used = found_bytes + written
        if removed:
            logger.info("removed %d files of output that are older than output.keep", removed)

    def _remove(self, file: OutputFile) -> bool:
        try:
            self._files.remove(file)
        except OSError as error:
            logger.warning("%s: %s", file.path, error.strerror)
            return False
        return True

    def _is_settled(self, file: OutputFile) -> bool:
        """Return whether a file's task has ended or failed. Tasks not in memory have ended."""
        known = self._ledger.tasks
        task = known.get(spelling(file.campaign, file.name)) or known.get(file.name)
        if task is None or task.state is TaskState.FAILED:
            return True
        return task.state in TASK_STATES_ENDED
