"""`taskyard list`, `taskyard show` and `taskyard watch`: tasks as a table, one task, and events.

Owns the columns. The broker sends pages, so a list in the order of submission takes little memory.
Another order needs all tasks first: then only the rows to print are kept. Measurements of attempts
are requested only for a column or an order that needs them. Events arrive as records, each about
many tasks.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import islice, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from taskyard.campaign.shell_lines import is_line_name
from taskyard.cli import scopes
from taskyard.cli.commands import Command
from taskyard.cli.connection import connect_client, connect_read_only
from taskyard.cli.documents import DOCUMENT_VERSION, GapDocument, ShowDocument
from taskyard.cli.format import (
    escape_line,
    format_count,
    format_date,
    format_duration,
    format_moment,
    format_progress,
    format_resources,
    format_signal,
    format_size,
    full_name,
    shorten_middle,
)
from taskyard.cli.options import CliContext
from taskyard.cli.output import (
    ROWS_DRAWN_MAX,
    WIDE_COLUMNS,
    encode_json,
    example,
    moment_cell,
    print_document,
    print_table,
    print_view,
)
from taskyard.cli.progress import ProgressBar
from taskyard.core.states import TaskState
from taskyard.errors import BytesMissing, ExitCode, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.wait import WaitTarget
    from taskyard.client.internal import InternalClient
    from taskyard.client.results import RecordBatch
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
    "line": Column(lambda view, _now: view.get("line", "")),
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

#: The columns without --columns, and of a list of failed tasks.
_DEFAULT: Final = ("name", "line", "state", "campaign", "service", "lane", "attempt")
_DEFAULT_FAILED: Final = ("name", "line", "campaign", "attempt", "reason")


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
    most=(
        "campaign",
        "service",
        "lane",
        "match",
        "failed",
        "only",
        "columns",
        "sort",
        "limit",
        "all_tasks",
    ),
    epilog=example(
        "list --campaign thumbs --failed",
        "list --match fetch --all",
        "list --sort duration --limit 10 --columns name,duration,memory",
    ),
)
@scopes.scope_options
@scopes.only_option
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
    *,
    chosen: scopes.TaskChoice,
    columns: str | None,
    sort: str | None,
    limit: int,
    reverse: bool,
    all_tasks: bool,
) -> None:
    """List tasks in the order of submission, or sorted.

    With options, only the tasks that match every option. A sorted or reversed list reads all of
    them first. The worker, run time, memory and CPU time are of the latest attempt, as the
    worker measured them. With --json, tasks have all their fields, and measurements if --columns or
    --sort needs them.
    """
    scope = chosen.scope()
    keys = _column_names(columns, scope)
    order = None if sort is None else SORT_KEYS[sort]
    measured = any(COLUMNS[key].measured for key in keys) or (order is not None and order.measured)
    cells = partial(_cells, keys, time.time())
    pack: Callable[[View], Any] = encode_json if cli_context.as_json else cells
    with connect_read_only(cli_context) as broker:
        scopes.check_campaign(broker, chosen.campaign)
        views = broker.tasks(scope, measured=measured)
        if order is not None or reverse:
            first = _TaskOrder(order, is_reversed=reverse)
            views = first.views(cli_context, views, None if all_tasks else limit + 1)
        if "line" in keys and not cli_context.as_json:
            views = _with_lines(broker, views)
        rows = map(pack, views)
        some: Iterator[Any] = rows if all_tasks else islice(rows, limit)
        if cli_context.as_json:
            more = _write_list(some, rows)
        else:
            empty = ["LINE"] if columns is None else []
            print_table([key.upper() for key in keys], some, wrapped=["REASON"], empty=empty)
            more = next(rows, None) is not None
        if more and not cli_context.quiet:
            click.echo(
                f"only the first {limit:,} tasks are listed (use --all or --limit)", err=True
            )


def _column_names(columns: str | None, scope: Scope) -> Sequence[str]:
    """Return the chosen columns. Raises `UserError` for an unknown column."""
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


def _with_lines(broker: ReadOnlyClient, views: Iterable[View]) -> Iterator[View]:
    """Yield tasks with the lines of files that they are."""
    lines: dict[str, dict[str, str]] = {}
    for view in views:
        campaign = view["campaign"]
        if campaign and campaign not in lines and is_line_name(view["name"]):
            lines[campaign] = broker.campaign_lines(campaign)
        view["line"] = lines.get(campaign, {}).get(view["name"], "")
        yield view


class _TaskOrder:
    """Sorts tasks by a key, by default in the order of submission."""

    def __init__(self, key: SortKey | None, *, is_reversed: bool) -> None:
        self._key = key
        self._now = time.time()
        self._is_descending = is_reversed is not (key is not None and key.is_descending)

    def views(
        self, cli_context: CliContext, views: Iterable[View], count: int | None
    ) -> Iterator[View]:
        """Yield the first `count` tasks of the order, or all. Shows progress while it reads."""
        ranked: list[tuple[Any, View]] = []
        rest: list[View] = []
        with ProgressBar(cli_context, "reading tasks", participle="read") as bar:
            for number, view in enumerate(views):
                value = number if self._key is None else self._key.value(view, self._now)
                if value is not None:
                    ranked.append((value, view))
                elif count is None or len(rest) < count:
                    rest.append(view)
                if count is not None and len(ranked) >= 2 * count + ROWS_DRAWN_MAX:
                    ranked = self._sorted(ranked)[:count]
                bar.update(number + 1, None)
        yield from (view for _, view in self._sorted(ranked))
        yield from rest

    def _sorted(self, ranked: list[tuple[Any, View]]) -> list[tuple[Any, View]]:
        """Sort tasks by their values. Equal values stay in the order of submission."""
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


#: The columns of the table of attempts.
_ATTEMPT_COLUMNS: Final = (
    *("ATTEMPT", "WORKER", "HOST", "STARTED", "RAN", "CPU", "MEMORY", "EXIT", "OUTCOME", "REASON"),
)

#: The width of the labels.
_LABEL_WIDTH: Final = 11


@click.command(cls=Command, epilog=example("show fetch-a"))
@click.argument("name", shell_complete=scopes.complete_name)
@click.pass_obj
def show(cli_context: CliContext, name: str) -> None:
    """Show the details of a task.

    Includes its command, its limits, its dependencies, its attempts and an explanation of its
    state. Times of attempts are by the clock of their workers. Only the latest 20 attempts are
    kept, and the attempts of a task that has left the journal are in the history.
    """
    with connect_read_only(cli_context) as broker:
        (name,) = broker.resolve([name])
        view = broker.show(name)
        why = broker.explain(name)["sentence"]
        if cli_context.as_json:
            print_document(ShowDocument(task=view, why=why))
            return
        output = _output_sizes(broker, name, view)
        line = broker.line_labels([view]).get(name, "")
    now = time.time()
    labelled = (*_lines(view, now), ("output", output), ("why", why))
    for label, value in (labelled[0], ("line", line), *labelled[1:]):
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
    print_table(_ATTEMPT_COLUMNS, rows, wrapped=["REASON"], optional=["HOST", "REASON"])
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDE_COLUMNS:
        for one in attempts:
            if remark := _remark(one):
                click.echo(f"attempt {one['attempt']}: {escape_line(remark)}")


def _lines(view: dict[str, Any], now: float) -> Iterator[tuple[str, str]]:
    """Yield the labels and values of a task. Empty values are not printed."""
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
    yield "submitted", _moment_line(view["submitted"], now)
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


def _moment_line(at: float | None, now: float) -> str:
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
    return f"{state}{due} {_moment_line(at, now)}"


def _limits(view: dict[str, Any], now: float) -> Iterator[str]:
    """Yield the limits that the task itself has."""
    if view["time_limit"]:
        yield f"runs at most {format_duration(view['time_limit'])}"
    delays = view["retry_delays"]
    if delays:
        after = ", ".join(format_duration(delay) for delay in dict.fromkeys(delays))
        yield f"{len(delays)} {'retry' if len(delays) == 1 else 'retries'} after {after}"
    if view["expires"]:
        yield f"expires {_moment_line(view['expires'], now)} if it was tried"
    if view["expires_hard"]:
        yield f"expires {_moment_line(view['expires_hard'], now)}"


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


#: The poll interval of --until-settled while nothing happens.
_LOOK_NS: Final = 500_000_000

#: The labels of record kinds.
RECORD_LABELS: Final = {
    "submitted": "submitted",
    "extended": "extended",
    "leased": "leased",
    "finished": "done",
    "failed": "failed",
    "postponed": "postponed",
    "returned": "returned",
    "expired": "lease expired",
    "came_due": "due",
    "aged": "expired",
    "cancelled": "cancelled",
    "retried": "retried",
    "progressed": "progress",
    "stale": "stale result",
    "worker_joined": "worker joined",
    "worker_left": "worker left",
    "slots_freed": "slots freed",
    "paused": "paused",
    "resumed": "resumed",
    "moved": "moved",
    "reported": "late",
    "released": "released",
    "worker_replaced": "replaced",
    "refunded": "refunded",
    "edited": "edited",
    "numbered": "numbered",
}
_WIDTH: Final = max(map(len, RECORD_LABELS.values()))


@click.command(
    cls=Command,
    epilog=example("watch", "watch --campaign thumbs --until-settled", "watch --since 0"),
)
@scopes.campaign_option
@click.option(
    "--since",
    metavar="RECORD",
    type=click.IntRange(0),
    help="Start after this record. 0 is the beginning. If omitted, print new events only.",
)
@click.option(
    "--until-settled", is_flag=True, help="Exit when the campaign, or every task, has settled."
)
@click.pass_obj
def watch(
    cli_context: CliContext,
    campaign: str | None,
    since: int | None,
    *,
    until_settled: bool,
) -> ExitCode:
    """Print events as they happen.

    Prints a line per task with time, event, name, attempt, worker and reason. With --json, prints a
    document per line, each a record of the journal with its number in `record`. Continues after a
    restart of the broker without gaps or repetitions.

    Exits with 130 when interrupted. With --until-settled, exits like `taskyard wait`: 0 if all
    tasks are done, 1 if one failed, 5 if tasks were cancelled.
    """
    cli_context.interrupt_message = "interrupted; the tasks continue"
    with connect_client(cli_context) as client:
        if not until_settled:
            for batch in client.follow(since, scopes.TaskChoice(campaign=campaign).scope()):
                _print_batch(cli_context, batch)
        return _watch_until_settled(cli_context, client, since, campaign)


def _watch_until_settled(
    cli_context: CliContext, client: InternalClient, since: int | None, campaign: str | None
) -> ExitCode:
    """Print events until the target has settled.

    Polls the target first and the records after it, so that the last events are printed before the
    exit.
    """
    from taskyard.cli.wait import wait_target  # noqa: PLC0415

    scope = scopes.TaskChoice(campaign=campaign).scope()
    batch = client.poll_records(since, scope=scope)
    target: WaitTarget = wait_target(client, campaign=campaign)
    while True:
        _print_batch(cli_context, batch)
        settled = target.poll(0)
        seen, wait_ns = batch.cursor, 0 if settled else _LOOK_NS
        batch = client.poll_records(seen, batch.journal, scope=scope, wait_ns=wait_ns)
        if settled and batch.cursor == seen:
            return target.exit_code()


def _print_batch(cli_context: CliContext, batch: RecordBatch) -> None:
    if batch.gap:
        click.echo(f"taskyard: {batch.gap}", err=True)
        if cli_context.as_json:
            print_document(GapDocument(kind="gap", record=batch.cursor, reason=batch.gap))
    for record in batch.records:
        if cli_context.as_json:
            print_view("watch", record)
        elif lines := [*lines_of(record)]:
            click.echo("\n".join(lines))
    sys.stdout.flush()


def lines_of(record: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each task of a record, or one line if it has no tasks.

    Tasks that only printed output are skipped.
    """
    at = datetime.fromtimestamp(record["at"] or 0.0).astimezone()
    head = f"{at:%H:%M:%S}.{at.microsecond // 1000:03}  {RECORD_LABELS[record['kind']]:<{_WIDTH}}"
    worker = f"  worker {escape_line(record['worker'])}" if record.get("worker") else ""
    names = record.get("names")
    if names is None:
        yield f"{head}{worker}{_taskless_line(record)}"
        return
    attempts = record.get("attempts") or repeat(None)
    for name, attempt, more in zip(names, attempts, _details(record), strict=False):
        if more is None:
            continue
        number = "" if attempt is None else f"  attempt {attempt}"
        yield f"{head}  {escape_line(name)}{number}{worker}{more}"


def _taskless_line(record: dict[str, Any]) -> str:
    kind = record["kind"]
    if kind in ("paused", "resumed"):
        if not record["service"]:
            return "  all services"
        lane = "" if record["lane"] is None else f"  lane {escape_line(record['lane']) or '-'}"
        return f"  service {escape_line(record['service'])}{lane}"
    if kind == "worker_joined":
        return f"  {escape_line(', '.join(record['services']))}"
    if kind == "numbered":
        return f"  campaign {escape_line(record['campaign'])}  {escape_line(record['path'])}"
    return f": {escape_line(record['reason'])}" if record.get("reason") else ""


def _details(record: dict[str, Any]) -> Iterator[str | None]:
    """Yield the end of each line. None: skip the task."""
    if "percents" in record:
        return (f"  {percent} %" if percent else None for percent in record["percents"])
    if "reasons" in record:
        return (f": {escape_line(reason)}" if reason else "" for reason in record["reasons"])
    if record["kind"] == "returned":
        return repeat(f": {record['reason'].replace('_', ' ')}")
    if record["kind"] == "aged" and record["requested"]:
        return repeat(f": {escape_line(record['reason'])}")
    more = _CHANGES.get(record["kind"])
    return repeat("" if more is None else more(record))


def _changes(record: dict[str, Any]) -> str:
    """Format the new terms of edited tasks."""
    parts = []
    if record["priority"] is not None:
        parts.append(f"  priority {record['priority']}")
    if record["time_limit"] is not None:
        limit = format_duration(record["time_limit"]) if record["time_limit"] else "none"
        parts.append(f"  time limit {limit}")
    if record["retry_delays"] is not None:
        parts.append(f"  retries {len(record['retry_delays'])}")
    if record["expires_hard"] is not None:
        at = record["expires_hard"]
        parts.append(f"  expiry {format_date(at) if at else 'none'}")
    return "".join(parts)


def _destination(record: dict[str, Any]) -> str:
    """Format the destination of moved tasks."""
    service, lane = record["service"], record["lane"]
    to_service = "" if service is None else f"  to service {escape_line(service)}"
    return to_service + ("" if lane is None else f"  to lane {escape_line(lane) or '-'}")


#: The end of a line on tasks that were changed, by the kind of the record.
_CHANGES: Final = {"moved": _destination, "edited": _changes}
