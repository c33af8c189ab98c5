"""The end of a `map` before all its tasks have settled: what happens to them, and its message.

Tasks of a map without a name are cancelled with their own broker, because no command can resume
them. Those of a campaign that the user names are kept. A broker that lasts continues.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from taskyard.cli.format import escape_line
from taskyard.cli.run_policy import StoppedEarly
from taskyard.errors import OutputClosed, TaskyardError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.cli.local_service import LocalService
    from taskyard.cli.run_policy import RunPolicy


class MapStop:
    """Stops the tasks of a map whose block ends with an error."""

    def __init__(
        self, service: LocalService, campaign: str, policy: RunPolicy, *, is_named: bool
    ) -> None:
        self._service = service
        self._campaign = campaign
        self._policy = policy
        #: Whether the user named the campaign.
        self._is_named = is_named

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the tasks of a block that raises. Only `StoppedEarly` is not raised again.

        Raises `OutputClosed` if the reader of stdout has stopped.
        """
        try:
            yield
        except StoppedEarly:
            self._stop_tasks()
        except BaseException as error:
            if not self._service.is_lasting:
                with suppress(TaskyardError):  # the first error is reported
                    self._stop_tasks()
            if isinstance(error, BrokenPipeError):
                raise OutputClosed(self.message("stdout was closed")) from None
            raise

    def _stop_tasks(self) -> None:
        self._service.stop_campaign(
            self._campaign,
            finish_running=self._policy.finish_running,
            is_resumable=self._is_named,
        )

    def message(self, cause: str) -> str:
        """Return why the map ended, and what happens to its tasks."""
        campaign = escape_line(self._campaign)
        resume = f"the same `taskyard map --campaign {campaign}` resumes"
        if self._service.is_lasting:
            cancel = f"`taskyard cancel --campaign {campaign}` cancels them"
            return f"{cause}; submitted tasks continue: {cancel}, {resume}"
        if self._is_named:
            return f"{cause}; unfinished tasks are kept: {resume}"
        return f"{cause}; unfinished tasks are cancelled (give --campaign to resume them later)"
