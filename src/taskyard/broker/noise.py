"""Messages that are refused: counted elsewhere, told to the log from here, now and then.

Anybody who can connect can send nonsense as fast as the net allows, so what is logged is a count,
at most once in a while. It must not know what was wrong with a message: its sender is told that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.protocols import Clock

logger = logging.getLogger("taskyard.broker")

#: A person sees it soon enough, and a flood makes six lines a minute.
WARNING_NS: Final = 10 * SECOND_NS

#: What there is to say of some, with how many are new and how many there were.
MALFORMED_TEXT: Final = (
    "%d message(s) made no sense and were refused, %d since the start; "
    "look for a peer that speaks another dialect or version"
)
FORBIDDEN_TEXT: Final = (
    "%d request(s) were refused because of the key that they came by, %d since the start; "
    "`taskyard keys list` says which key is for what"
)
REFUSED_TASKS_TEXT: Final = (
    "%d task(s) of plain dwork peers were refused, %d since the start; "
    "`taskyard status` shows the latest"
)


class RejectionLog:
    """Warns of a count that rises."""

    def __init__(self, count: Callable[[], int], clock: Clock, words: str = MALFORMED_TEXT) -> None:
        self._count = count
        self._clock = clock
        self._words = words
        self._told = count()
        self._told_ns = 0

    def log_if_due(self) -> None:
        """Called every turn: mostly there is nothing to say."""
        count = self._count()
        if count == self._told:
            return
        now_ns = self._clock.monotonic_ns()
        if self._told_ns and now_ns - self._told_ns < WARNING_NS:
            return
        fresh, self._told, self._told_ns = count - self._told, count, now_ns
        logger.warning(self._words, fresh, count)
