"""`taskyard watch`: print events as they happen.

The broker sends records, each about many tasks. Text output has a line per task, --json a document
per record.
"""

from __future__ import annotations

import sys
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.command import Command
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import GapDocument
from taskyard.cli.format import escape_line, format_date, format_duration
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document, print_view
from taskyard.cli.scopes import target_options, to_scope
from taskyard.cli.task_list import list_tasks
from taskyard.errors import ExitCode, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.cli.wait import WaitTarget
    from taskyard.client.internal import InternalClient
    from taskyard.client.reads import RecordBatch

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
    like=list_tasks,
    most=("campaign", "since", "until_settled"),
    epilog=example("watch", "watch --campaign thumbs --until-settled", "watch --since 0"),
)
@target_options
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
    /,
    since: int | None,
    *,
    until_settled: bool,
    **values: Any,  # noqa: ANN401  # scope options
) -> ExitCode:
    """Print events as they happen.

    Prints a line per task with time, event, name, attempt, worker and reason. With --json, prints a
    document per line, each a record of the journal with its number in `record`. Continues after a
    restart of the broker without gaps or repetitions.

    Exits with 130 when interrupted. With --until-settled, exits like `taskyard wait`: 0 if all
    tasks are done, 1 if one failed, 5 if tasks were cancelled.
    """
    if until_settled and (values["service"] or values["lane"] or values["match"]):
        raise UserError("--until-settled excludes --service, --lane and --match")
    cli_context.interrupt_message = "interrupted; the tasks continue"
    with connect_client(cli_context) as client:
        if not until_settled:
            for batch in client.follow(since, to_scope(values)):
                _print_batch(cli_context, batch)
        return _watch_until_settled(cli_context, client, since, values)


def _watch_until_settled(
    cli_context: CliContext, client: InternalClient, since: int | None, values: dict[str, Any]
) -> ExitCode:
    """Print events until the target has settled.

    Polls the target first and the records after it, so that the last events are printed before the
    exit.
    """
    from taskyard.cli.wait import wait_target  # noqa: PLC0415

    scope = to_scope(values)
    batch = client.poll_records(since, scope=scope)
    target: WaitTarget = wait_target(client, campaign=values["campaign"])
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
