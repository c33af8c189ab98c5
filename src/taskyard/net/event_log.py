"""Log events of peers with fields, at a bounded rate. A thousand joins must not flood a log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Lines of one event in an interval. More are counted.
LINES_MAX: Final = 50
INTERVAL_NS: Final = 10 * SECOND_NS


class EventLog:
    """Logs one kind of event: up to `LINES_MAX` lines in `INTERVAL_NS`, then their number."""

    def __init__(self, logger: logging.Logger, event: str, level: int = logging.INFO) -> None:
        self._logger = logger
        self._event = event
        self._level = level
        self._began_ns = -INTERVAL_NS
        self._count = 0

    def is_enabled(self) -> bool:
        return self._logger.isEnabledFor(self._level)

    def log(self, now_ns: int, fields: Callable[[], Mapping[str, object]]) -> None:
        """Log an event, or count it. `fields` is called only for a line."""
        if not self.is_enabled():
            return
        self.log_if_due(now_ns)
        if self._count < LINES_MAX:
            self._write(self._event, fields())
        self._count += 1

    def log_if_due(self, now_ns: int) -> None:
        """End an interval that is over: log the number of events without a line."""
        if now_ns - self._began_ns < INTERVAL_NS:
            return
        more = self._count - LINES_MAX
        if more > 0:
            self._write(f"{self._event}: not logged one by one", {"count": more})
        self._began_ns, self._count = now_ns, 0

    def _write(self, event: str, fields: Mapping[str, object]) -> None:
        # The text is an argument, because a "%" in it would be a place for one.
        self._logger.log(self._level, "%s", event, extra={"fields": fields})
