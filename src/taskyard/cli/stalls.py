"""A warning, printed once, if only tasks are left that no worker could ever run."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from taskyard.cli.format import escape_line, format_count, full_name
from taskyard.core.effects import Reason
from taskyard.core.events import Scope
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskyard.cli.options import CliContext
    from taskyard.client.client import Client

#: Time with ready tasks and none running, after which one of them is explained.
STALL_SECONDS: Final = 2.0

#: Reasons why a task waits that end only if the user acts.
_NEVER_REASONS: Final = (Reason.NO_ROOM.value, Reason.NO_RESOURCES.value)


class StallWarning:
    """Explains one of the ready tasks of a campaign if none has run for a while."""

    def __init__(self, cli_context: CliContext, client: Client, campaign: str) -> None:
        self._cli_context = cli_context
        self._client = client
        self._campaign = campaign
        self._checked_at = time.monotonic()
        self._is_printed = False

    def check(self, counts: Mapping[str, int]) -> None:
        """Print the warning if tasks have been ready for a while and none runs."""
        now = time.monotonic()
        if counts["leased"] or not counts["ready"]:
            self._checked_at = now
        elif now - self._checked_at >= STALL_SECONDS and not self._is_printed:
            self._checked_at = now
            scope = Scope(campaign=self._campaign.encode(), states=(TaskState.READY,))
            for view in islice(self._client.tasks(scope), 1):
                why = self._client.explain(full_name(view))
                if why["reason"] in _NEVER_REASONS:
                    self._is_printed = True
                    waiting = format_count(counts["ready"], "ready task")
                    task = escape_line(f"{full_name(view)}: {why['sentence']}")
                    hint = "start a larger worker with `taskyard worker`"
                    self._cli_context.warn(f"warning: {waiting}, none running: {task} ({hint})")
