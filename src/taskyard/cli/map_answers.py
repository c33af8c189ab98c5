"""What `map` answers: results to stdout as they are told, failures to stderr, counts at the end.

As a document the answer is one, too, but it is written piece by piece: it may have a million tasks.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Self

import click

from taskyard.cli.format import escape_line
from taskyard.cli.output import DOCUMENT_VERSION, encode_json, text_or_base64, write_bytes
from taskyard.cli.progress import ProgressBar, format_counts
from taskyard.errors import ExitCode, OutputTruncated, TaskBlocked, TaskFailed, UserError

if TYPE_CHECKING:
    from taskyard.cli.options import CliContext
    from taskyard.client.futures import Future

#: Failures that are told one by one; the others are counted.
FAILURES_SHOWN: Final = 20


class MapOutput:
    """Writes results to stdout and failures to stderr, and counts them."""

    def __init__(self, cli_context: CliContext, campaign: str) -> None:
        self._cli_context = cli_context
        self._campaign = campaign
        self._counts: Counter[str] = Counter()
        self._truncated = 0
        self._total: int | None = None
        self._added = 0
        self._meter = ProgressBar(cli_context, campaign, drawn=not sys.stdout.isatty())

    def __enter__(self) -> Self:
        if self._cli_context.as_json:
            campaign = encode_json(self._campaign).decode()
            head = f'{{"version":{DOCUMENT_VERSION},"document":"map","campaign":{campaign}'
            click.echo(f'{head},"tasks":[', nl=False)
        self._meter.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._meter.__exit__(None, None, None)
        if kind is None:
            self._close()
        elif self._added and issubclass(kind, UserError):
            look = f"`taskyard list --campaign {escape_line(self._campaign)}`"
            click.echo(f"what was submitted before this goes on: {look}", err=True)

    def _close(self) -> None:
        counts = dict(self._counts)
        if self._cli_context.as_json:
            told = encode_json({"counts": counts, "truncated": self._truncated})
            click.echo(f"\n],{told.decode()[1:]}")
        if self._cli_context.quiet:
            return
        self.flush()  # the last result stands before the summary, also in one pipe
        truncated = f", {self._truncated:,} truncated" if self._truncated else ""
        click.echo(
            f"campaign {escape_line(self._campaign)}: {format_counts(counts)}{truncated}", err=True
        )
        if counts.get("failed"):
            retry = f"`taskyard retry --campaign {escape_line(self._campaign)} --failed`"
            click.echo(f"{retry} tries the failed ones again", err=True)

    # For the reader of the input.

    def submitted(self, added: int, *, is_all: bool = False) -> None:
        """So many tasks were submitted."""
        self._added = added
        if is_all:
            self._total = added

    # For the window.

    def write(self, future: Future) -> None:
        """What has become of the next task."""
        state, value, reason = _outcome(future)
        is_truncated = state == "done" and bool(reason)
        self._counts[state] += 1
        self._truncated += is_truncated
        if self._cli_context.as_json:
            self._write_json(future, state, value, reason)
        elif state == "done":
            write_bytes(value if not value or value.endswith(b"\n") else value + b"\n")
        if reason and not (self._cli_context.as_json and not is_truncated):
            self._report(reason)
        self._meter.count(self._counts, self._total, behind_failure=self._counts["blocked"])

    def _report(self, reason: str) -> None:
        """Write the first failures and truncations to stderr."""
        if self._counts.total() - self._counts["done"] + self._truncated <= FAILURES_SHOWN:
            self.flush()
            self._meter.print_above(f"taskyard: {escape_line(reason)}")

    def _write_json(self, future: Future, state: str, value: bytes, reason: str) -> None:
        names = {"name": future.name, "campaign": future.campaign}
        told: dict[str, Any] = {**names, "state": state}
        if state == "done":
            told |= text_or_base64("result", value) | {"truncated": bool(reason)}
        else:
            told["reason"] = reason
        comma = b"," if self._counts.total() > 1 else b""
        click.echo(comma + b"\n" + encode_json(told), nl=False)

    def flush(self) -> None:
        """Nothing more is at hand: whoever reads should have what there is."""
        sys.stdout.flush()

    def exit_code(self) -> ExitCode:
        if self._counts["failed"] or self._counts["blocked"] or self._truncated:
            return ExitCode.TASK_FAILED
        return ExitCode.CANCELLED if self._counts["cancelled"] else ExitCode.OK


def _outcome(future: Future) -> tuple[str, bytes, str]:
    """The state, the result and the reason of a task; raises what is no ending of a task. The
    reason of a task that is done is that its result is truncated."""
    if future.cancelled():
        return "cancelled", b"", f"task {future.full_name} was cancelled"
    error = future.exception()
    if error is None:
        return "done", future.result() or b"", ""
    if isinstance(error, OutputTruncated):
        return "done", bytes(error.output), str(error)  # type: ignore[arg-type]  # of no service
    if isinstance(error, TaskBlocked):
        return "blocked", b"", str(error)
    if isinstance(error, TaskFailed):
        return "failed", b"", str(error)
    raise error
