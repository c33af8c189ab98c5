"""`taskyard show`: everything about one task, with a table of its attempts."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.command import Command
from taskyard.cli.completion import complete_name
from taskyard.cli.connection import connect_read_only
from taskyard.cli.documents import ShowDocument
from taskyard.cli.format import (
    escape_line,
    format_count,
    format_date,
    format_duration,
    format_moment,
    format_progress,
    format_resources,
    format_size,
    full_name,
)
from taskyard.cli.options import CliContext
from taskyard.cli.output import WIDE_COLUMNS, example, moment_cell, print_document, print_table
from taskyard.cli.task_list import exit_cell
from taskyard.errors import BytesMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.cli.connection import ReadOnlyClient

#: The columns of the table of attempts.
_COLUMNS: Final = (
    *("ATTEMPT", "WORKER", "HOST", "STARTED", "RAN", "CPU", "MEMORY", "EXIT", "OUTCOME", "REASON"),
)

#: The width of the labels.
_LABEL_WIDTH: Final = 11


@click.command(cls=Command, epilog=example("show fetch-a"))
@click.argument("name", shell_complete=complete_name)
@click.pass_obj
def show(cli_context: CliContext, name: str) -> None:
    """Show the details of a task.

    Includes its command, its limits, its dependencies, its attempts and an explanation of its
    state. Times of attempts are by the clock of their workers. Only the latest 20 attempts are
    kept, and those of a task that has left the journal are in the history.
    """
    with connect_read_only(cli_context) as broker:
        (name,) = broker.resolve([name])
        view = broker.show(name)
        why = broker.explain(name)["sentence"]
        if cli_context.as_json:
            print_document(ShowDocument(task=view, why=why))
            return
        output = _output_sizes(broker, name, view)
    now = time.time()
    for label, value in (*_lines(view, now), ("output", output), ("why", why)):
        if value:
            click.echo(f"{label:<{_LABEL_WIDTH}} {escape_line(value)}")
    if view["attempts"]:
        click.echo()
        _print_attempts(view["attempts"], now)


def _output_sizes(broker: ReadOnlyClient, name: str, view: dict[str, Any]) -> str:
    """Describe the output of a command's latest attempt. Empty: there is none."""
    if view["service"] in ("call", "pickle") or not view["attempt"]:
        return ""
    try:
        pages = [broker.output_page(name, 0, stream, count=1) for stream in ("stdout", "stderr")]
    except BytesMissing as removed:
        return str(removed).rpartition(": ")[2]
    sizes = [page.bytes_total for page in pages]
    streams = zip(sizes, ("stdout", "stderr"), strict=True)
    return ", ".join(f"{stream} {format_size(size)}" for size, stream in streams if size)


def _print_attempts(attempts: list[dict[str, Any]], now: float) -> None:
    """Print the table of attempts. On a narrow terminal their reasons are below it."""
    rows = [_attempt_row(one, now) for one in attempts]
    print_table(_COLUMNS, rows, wrapped=["REASON"], optional=["HOST", "REASON"])
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDE_COLUMNS:
        for one in attempts:
            if remark := _remark(one):
                click.echo(f"attempt {one['attempt']}: {escape_line(remark)}")


def _lines(view: dict[str, Any], now: float) -> Iterator[tuple[str, str]]:
    """Yield the labels and values of a task. Empty ones are not printed."""
    yield "name", full_name(view)
    yield "command", shlex.join(view["argv"] or [])
    yield "call", view["call"] or ""
    yield "directory", view["cwd"] or ""
    env = view["env"] or {}
    yield "environment", " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items())
    yield "state", _state(view, now)
    yield "campaign", view["campaign"]
    yield "service", view["service"]
    yield "lane", view["lane"]
    yield "priority", str(view["priority"])
    yield "slots", str(view["slots"]) if view["slots"] != 1 else ""
    yield "resources", format_resources(view["resources"])
    yield "limits", ", ".join(_limits(view, now))
    yield "submitted", _moment(view["submitted"], now)
    yield "worker", view["worker"] or ""
    yield "progress", format_progress(view)
    yield "host", view["host"] or ""
    yield "attempt", str(view["attempt"])
    yield "failures", str(view["failures"] or "")
    yield "losses", str(view["losses"] or "")
    yield "waits for", format_count(view["waits_for"], "task") if view["waits_for"] else ""
    yield "after", ", ".join(map(escape_line, view["after"]))
    yield "dependents", str(view["dependents"] or "")
    yield "reason", view["reason"]


def _moment(at: float | None, now: float) -> str:
    """Format a moment, with its date unless that is all there is."""
    if at is None:
        return ""
    date, relative = format_date(at), format_moment(at, now)
    return date if date.startswith(relative) else f"{relative} ({date})"


def _state(view: dict[str, Any], now: float) -> str:
    """Format the state, since when, or until when."""
    state, at = view["state"], view["ended"] or view["leased"] or view["due"]
    if state == "failed" and view["attempts"]:
        at = view["attempts"][-1]["settled"]
    if at is None:
        return str(state)
    due = ", due" if state == "delayed" else ""
    return f"{state}{due} {_moment(at, now)}"


def _limits(view: dict[str, Any], now: float) -> Iterator[str]:
    """Yield the limits that the task itself has."""
    if view["time_limit"]:
        yield f"runs at most {format_duration(view['time_limit'])}"
    delays = view["retry_delays"]
    if delays:
        after = ", ".join(format_duration(delay) for delay in dict.fromkeys(delays))
        yield f"{len(delays)} {'retry' if len(delays) == 1 else 'retries'} after {after}"
    if view["expires"]:
        yield f"expires {_moment(view['expires'], now)} if it was tried"
    if view["expires_hard"]:
        yield f"expires {_moment(view['expires_hard'], now)}"


def _attempt_row(one: dict[str, Any], now: float) -> tuple[object, ...]:
    started, ended = one["started"], one["ended"]
    running = one["outcome"] is None
    until = now if running else ended
    cpu, memory = one["cpu_seconds"], one["memory_max"]
    return (
        one["attempt"],
        one["worker"],
        one["host"] or "",
        moment_cell(started, now),
        "" if started is None or until is None else format_duration(max(0.0, until - started)),
        "" if cpu is None else f"{cpu:.2f} s",
        "" if memory is None else format_size(memory),
        exit_cell(one),
        "running" if running else one["outcome"],
        _remark(one),
    )


def _remark(one: dict[str, Any]) -> str:
    """Return why an attempt failed, or the note of its worker."""
    return str(one["reason"] or one["note"] or "")
