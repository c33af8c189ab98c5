"""`taskyard list`: tasks as a table or a document, with columns and an order of choice.

Owns the columns. The broker sends pages, so a list in the order of submission takes little memory.
Another order needs all tasks first: then only the rows to print are kept. Measurements of attempts
are requested only for a column or an order that needs them.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from taskyard.cli.command import Command
from taskyard.cli.connection import connect_read_only
from taskyard.cli.documents import DOCUMENT_VERSION
from taskyard.cli.format import (
    format_duration,
    format_progress,
    format_signal,
    format_size,
    full_name,
    shorten_middle,
)
from taskyard.cli.options import CliContext
from taskyard.cli.output import ROWS_DRAWN_MAX, encode_json, example, moment_cell, print_table
from taskyard.cli.progress import ProgressBar
from taskyard.cli.scopes import check_campaign, scope_options, to_scope
from taskyard.core.states import TaskState
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from taskyard.core.events import Scope

#: The default of --limit: a few screens.
LIST_LIMIT: Final = 100

#: The share of a terminal's width that a name may take, and at least so much.
_NAME_SHARE: Final = 0.4
_NAME_WIDTH_MIN: Final = 24

View = dict[str, Any]


class Column(NamedTuple):
    """A column of the table."""

    #: Returns the cell of a task at a time.
    cell: Callable[[View, float], object]
    #: It needs the measurements of the latest attempt.
    measured: bool = False


def seconds_run(view: View, now: float) -> float | None:
    """Return how long the latest attempt ran, or has run until now."""
    if view["state"] == "leased" and view["started"] is not None:
        return max(0.0, now - float(view["started"]))
    seconds: float | None = view["duration"]
    return seconds


def _field(name: str) -> Column:
    return Column(lambda view, _now: "" if view[name] is None else view[name])


def _moment(name: str, *, measured: bool = False) -> Column:
    return Column(lambda view, now: moment_cell(view[name], now), measured)


def _name_cell(view: View, _now: float) -> str:
    name = full_name(view)
    if not sys.stdout.isatty():
        return name
    width = int(shutil.get_terminal_size().columns * _NAME_SHARE)
    return shorten_middle(name, max(_NAME_WIDTH_MIN, width))


def _duration_cell(view: View, now: float) -> str:
    seconds = seconds_run(view, now)
    return "" if seconds is None else format_duration(seconds)


def _cpu_cell(view: View, _now: float) -> str:
    seconds = view["cpu_seconds"]
    return "" if seconds is None else format_duration(seconds)


def _memory_cell(view: View, _now: float) -> str:
    memory = view["memory_max"]
    return "" if memory is None else format_size(memory)


def exit_cell(view: View, _now: float = 0) -> str:
    """Format how a process ended: `0`, `4`, `SIGKILL`."""
    if view["signal"] is not None:
        return format_signal(view["signal"])
    return "" if view["exit_status"] is None else str(view["exit_status"])


def _worker_cell(view: View, _now: float) -> str:
    """Return the worker of the latest attempt, which may have ended."""
    return view["worker"] or view["worker_last"] or ""


COLUMNS: Final = {
    "name": Column(_name_cell),
    "state": _field("state"),
    "campaign": _field("campaign"),
    "service": _field("service"),
    "lane": _field("lane"),
    "priority": _field("priority"),
    "slots": _field("slots"),
    "attempt": _field("attempt"),
    "failures": _field("failures"),
    "losses": _field("losses"),
    "waits_for": _field("waits_for"),
    "dependents": _field("dependents"),
    "worker": Column(_worker_cell, measured=True),
    "progress": Column(lambda view, _now: format_progress(view)),
    "submitted": _moment("submitted"),
    "due": _moment("due"),
    "leased": _moment("leased"),
    "ended": _moment("ended"),
    "started": _moment("started", measured=True),
    "duration": Column(_duration_cell, measured=True),
    "cpu": Column(_cpu_cell, measured=True),
    "memory": Column(_memory_cell, measured=True),
    "exit": Column(exit_cell, measured=True),
    "host": Column(lambda view, _now: view["host"] or "", measured=True),
    "reason": _field("reason"),
}

#: The columns without --columns, and those of a list of failed tasks.
_DEFAULT: Final = ("name", "state", "campaign", "service", "lane", "attempt")
_DEFAULT_FAILED: Final = ("name", "campaign", "attempt", "reason")


class SortKey(NamedTuple):
    """An order of tasks. Tasks without a value come last."""

    value: Callable[[View, float], Any]
    #: The largest value comes first.
    is_descending: bool = False
    measured: bool = True


SORT_KEYS: Final = {
    "duration": SortKey(seconds_run, is_descending=True),
    "memory": SortKey(lambda view, _now: view["memory_max"], is_descending=True),
    "cpu": SortKey(lambda view, _now: view["cpu_seconds"], is_descending=True),
    "name": SortKey(lambda view, _now: full_name(view), measured=False),
    "started": SortKey(lambda view, _now: view["started"]),
}


@click.command(
    "list",
    cls=Command,
    epilog=example(
        "list --campaign thumbs --failed",
        "list --match fetch --all",
        "list --sort duration --limit 10 --columns name,duration,memory",
    ),
)
@scope_options
@click.option(
    "--columns",
    metavar="NAMES",
    help=f"Columns of the table, separated by commas: {', '.join(COLUMNS)}.",
)
@click.option(
    "--sort",
    type=click.Choice([*SORT_KEYS]),
    help="Order by name, by start, or by the run time, memory or CPU time of the latest attempt, "
    "the largest first. Without it, in the order of submission.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1),
    default=LIST_LIMIT,
    help="Maximum number of tasks.",
)
@click.option("--all", "all_tasks", is_flag=True, help="List all tasks.")
@click.pass_obj
def list_tasks(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    /,
    columns: str | None,
    sort: str | None,
    limit: int,
    *,
    reverse: bool,
    all_tasks: bool,
    **given: Any,  # noqa: ANN401  # scope options
) -> None:
    """List tasks in the order of submission, or sorted.

    With options, only the tasks that match every option. A sorted or reversed list reads all of
    them first. The worker, run time, memory and CPU time are those of the latest attempt, as the
    worker measured them. With --json, tasks have all their fields, and measurements if --columns or
    --sort needs them.
    """
    scope = to_scope(given)
    keys = _column_names(columns, scope)
    order = None if sort is None else SORT_KEYS[sort]
    measured = any(COLUMNS[key].measured for key in keys) or (order is not None and order.measured)
    pack = encode_json if cli_context.as_json else partial(_cells, keys, time.time())
    with connect_read_only(cli_context) as broker:
        check_campaign(broker, given["campaign"])
        views = broker.tasks(scope, measured=measured)
        rows: Iterator[Any]
        if order is None and not reverse:
            rows = map(pack, views)
        else:
            first = _TaskOrder(order, is_reversed=reverse)
            rows = first.rows(cli_context, views, pack, None if all_tasks else limit + 1)
        some = rows if all_tasks else islice(rows, limit)
        if cli_context.as_json:
            more = _write_list(some, rows)
        else:
            print_table([key.upper() for key in keys], some, wrapped=["REASON"])
            more = next(rows, None) is not None
        if more and not cli_context.quiet:
            click.echo(
                f"only the first {limit:,} tasks are listed (use --all or --limit)", err=True
            )


def _column_names(columns: str | None, scope: Scope) -> Sequence[str]:
    """Return the chosen columns. Raises `UserError` for an unknown one."""
    if columns is None:
        return _DEFAULT_FAILED if scope.states == (TaskState.FAILED,) else _DEFAULT
    names = [name.strip().lower() for name in columns.split(",")]
    for name in names:
        if name not in COLUMNS:
            raise UserError(f"unknown column {name!r} (columns: {', '.join(COLUMNS)})")
    return [*dict.fromkeys(names)]


def _cells(keys: Sequence[str], now: float, view: View) -> list[object]:
    """Return the cells of a task's row."""
    return [COLUMNS[key].cell(view, now) for key in keys]


class _TaskOrder:
    """Sorts tasks by a key. Without one, by submission."""

    def __init__(self, key: SortKey | None, *, is_reversed: bool) -> None:
        self._key = key
        self._now = time.time()
        self._is_descending = is_reversed is not (key is not None and key.is_descending)

    def rows(
        self,
        cli_context: CliContext,
        views: Iterable[View],
        pack: Callable[[View], Any],
        count: int | None,
    ) -> Iterator[Any]:
        """Yield the first `count` rows of the order, or all. Shows progress while it reads."""
        ranked: list[tuple[Any, Any]] = []
        rest: list[Any] = []
        with ProgressBar(cli_context, "reading tasks", participle="read") as bar:
            for number, view in enumerate(views):
                value = number if self._key is None else self._key.value(view, self._now)
                if value is not None:
                    ranked.append((value, pack(view)))
                elif count is None or len(rest) < count:
                    rest.append(pack(view))
                if count is not None and len(ranked) >= 2 * count + ROWS_DRAWN_MAX:
                    ranked = self._sorted(ranked)[:count]
                bar.update(number + 1, None)
        yield from (row for _, row in self._sorted(ranked))
        yield from rest

    def _sorted(self, ranked: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Sort rows by their values. Equal ones stay in the order of submission."""
        return sorted(ranked, key=itemgetter(0), reverse=self._is_descending)


def _write_list(rows: Iterable[bytes], rest: Iterator[object]) -> bool:
    """Write the document while tasks arrive. Return whether there are more tasks."""
    click.echo('{"document":"list","tasks":[', nl=False)
    line = iter(rows)
    comma = b""
    while some := list(islice(line, ROWS_DRAWN_MAX)):
        click.echo(comma + b"\n" + b",\n".join(some), nl=False)
        comma = b","
    more = next(rest, None) is not None
    click.echo(f'\n],"more":{"true" if more else "false"},"version":{DOCUMENT_VERSION}}}')
    return more
