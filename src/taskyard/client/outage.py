"""Outages of the broker as a client sees them: when one begins, and what is reported of it.

Owns the timing and the wording of the reports. Knows no socket and no clock: its owner passes how
long the broker has not answered, and the time.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("taskyard.client")

#: Without an answer for so long, the outage is reported. A healthy broker answers in milliseconds.
REPORT_NS: Final = SECOND_NS

#: Report an outage again this often, so that a log shows that it goes on.
REPEAT_NS: Final = 60 * SECOND_NS


class Outage:
    """Reports when a broker stops answering, once a minute while it lasts, and when it ends."""

    def __init__(
        self, endpoint: str, limit_ns: int | None, report: Callable[[str], object] | None
    ) -> None:
        """Pass each line to `report`, or log it as a warning. `limit_ns` is when the client gives
        up, for the line's end."""
        self._endpoint = endpoint
        self._end = "" if limit_ns is None else f", giving up after {limit_ns / SECOND_NS:g} s"
        self._report = report or logger.warning
        self._next_ns = REPORT_NS
        #: By the wall clock. None while the broker answers.
        self._last_reply_ns: int | None = None
        #: Since when submissions are refused for now; 0: they are taken.
        self._refused_ns = 0
        self._refusal_reported = False

    @property
    def since(self) -> datetime | None:
        """When the broker last answered, or was first asked; None while it answers."""
        since_ns = self._last_reply_ns
        return None if since_ns is None else _local(since_ns)

    def update(self, silent_ns: int, wall_ns: int) -> None:
        """Note that the broker has not answered for `silent_ns`, at the time `wall_ns`."""
        since_ns = self._last_reply_ns
        if silent_ns < REPORT_NS:
            if since_ns is not None:
                self.reset()
                self._send(f"answers again, after {(wall_ns - since_ns) / SECOND_NS:.1f} s")
        elif silent_ns >= self._next_ns:
            self._next_ns = silent_ns + REPEAT_NS
            length = "" if since_ns is None else f" ({silent_ns // SECOND_NS} s)"
            self._last_reply_ns = since_ns = wall_ns - silent_ns if since_ns is None else since_ns
            since = f"{_local(since_ns):%Y-%m-%d %H:%M:%S}"
            self._send(f"no answer since {since}{length}; waiting{self._end}")

    def note_refusal(self, reason: str, wall_ns: int) -> None:
        """Report when submissions are refused for now for longer than a moment, and when they are
        taken again. An empty reason: they are taken."""
        if not reason:
            if self._refusal_reported:
                self._send("takes tasks again")
            self._refused_ns, self._refusal_reported = 0, False
        elif not self._refused_ns:
            self._refused_ns = wall_ns
        elif wall_ns - self._refused_ns >= REPORT_NS and not self._refusal_reported:
            self._refusal_reported = True
            self._send(f"takes no tasks for now: {reason}; trying again")

    def reset(self) -> None:
        """Forget the outage without a report."""
        self._last_reply_ns = None
        self._next_ns = REPORT_NS

    def _send(self, text: str) -> None:
        try:
            self._report(f"broker at {self._endpoint}: {text}")
        except Exception:
            logger.exception("a report of an outage could not be delivered")


def _local(wall_ns: int) -> datetime:
    return datetime.fromtimestamp(wall_ns / SECOND_NS).astimezone()
