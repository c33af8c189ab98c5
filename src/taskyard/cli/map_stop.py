"""The end of a `map` before all its tasks have settled: what happens to them, and its message.

Tasks of a map without a name are cancelled, because no command can resume them. Those of a campaign
that the user names are kept. A broker that lasts continues them, unless their input was wrong.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from taskyard.cli.format import escape_line, format_count
from taskyard.cli.local_service import CANCEL_SECONDS, UNSTARTED
from taskyard.cli.run_policy import StoppedEarly
from taskyard.core.states import TaskState
from taskyard.errors import OutputClosed, TaskyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.cli.local_service import LocalService
    from taskyard.cli.map_output import FutureWindow, MapOutput
    from taskyard.cli.options import CliContext
    from taskyard.cli.run_policy import RunPolicy


class MapStop:
    """Stops the tasks of a map whose block ends with an error."""

    def __init__(
        self,
        cli_context: CliContext,
        service: LocalService,
        campaign: str,
        policy: RunPolicy,
        *,
        is_named: bool,
    ) -> None:
        self._cli_context = cli_context
        self._service = service
        self._campaign = campaign
        self.policy = policy
        #: Whether the user named the campaign.
        self._is_named = is_named
        #: Whether its tasks are stopped.
        self._is_done = False

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the tasks of a block that raises, unless they are stopped.

        Raises `OutputClosed` if the reader of stdout has stopped.
        """
        if not self._is_named:
            self._service.mark_temporary(self._campaign)
        try:
            yield
            self._service.unmark_temporary()
        except BaseException as error:
            is_input_wrong = isinstance(error, UserError)
            with suppress(TaskyardError):  # the first error is reported
                if not self._service.is_lasting or (is_input_wrong and not self._is_named):
                    self._stop_tasks()
                if is_input_wrong and self._is_named:
                    self._report_unfinished()
            if isinstance(error, BrokenPipeError):
                raise OutputClosed(self.message("stdout was closed")) from None
            raise

    def end_output(self, answer: MapOutput, window: FutureWindow, error: BaseException) -> None:
        """Stop the tasks, and print the results of those that have settled by then.

        An interrupt ends the output at once, unless running tasks shall finish.
        """
        stopped = error if isinstance(error, StoppedEarly) else None
        if stopped is None and self._service.is_lasting:
            return
        is_printed = stopped is not None or self.policy.finish_running
        if is_printed:
            answer.stop(stopped)
        self._stop_tasks()
        if is_printed:
            answer.set_unfinished(window.finish_settled())

    def _stop_tasks(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._service.stop_campaign(
            self._campaign,
            finish_running=self.policy.finish_running,
            is_resumable=self._is_named,
        )
        self._service.unmark_temporary()

    def _report_unfinished(self) -> None:
        """Report the tasks that were submitted before an error of the input, if there are any."""
        counts = self._service.client.counts(self._campaign, CANCEL_SECONDS)
        unfinished = sum(counts[state.name.lower()] for state in (*UNSTARTED, TaskState.LEASED))
        if unfinished:
            tasks = format_count(unfinished, "unfinished task")
            campaign = escape_line(self._campaign)
            self._cli_context.info(f"campaign {campaign} has {tasks}: {self._remedy()}")

    def message(self, cause: str) -> str:
        """Return why the map ended, and what happens to its tasks."""
        if self._service.is_lasting:
            return f"{cause}; submitted tasks continue: {self._remedy()}"
        if self._is_named:
            return f"{cause}; unfinished tasks are kept: {self._remedy()}"
        return f"{cause}; unfinished tasks are cancelled (give --campaign to resume them later)"

    def _remedy(self) -> str:
        """Return the commands for tasks that are left."""
        campaign = escape_line(self._campaign)
        resume = f"the same `taskyard map --campaign {campaign}` resumes"
        cancel = f"`taskyard cancel --campaign {campaign}` cancels them, "
        return f"{cancel if self._service.is_lasting else ''}{resume}"
