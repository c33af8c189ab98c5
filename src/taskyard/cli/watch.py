"""`taskyard watch`: what happens, as it happens.

A broker tells its decisions record by record, each about many tasks; here is a line a task, or for
programs a document a record.
"""

from __future__ import annotations

import sys
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.connection import connect_client
from taskyard.cli.documents import GapDocument
from taskyard.cli.format import escape_line
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document, print_view
from taskyard.cli.scopes import target_options, to_scope
from taskyard.errors import ExitCode, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.cli.wait import WaitTarget
    from taskyard.client.client import Client
    from taskyard.client.record_stream import RecordBatch

#: With --until-settled: how often to see whether all is settled, while nothing happens.
_LOOK_NS: Final = 500_000_000

#: What has become of tasks, in a word.
RECORD_LABELS: Final = {
    "submitted": "submitted",
    "extended": "waits for more",
    "leased": "leased",
    "finished": "done",
    "failed": "failed",
    "postponed": "put off",
    "returned": "returned",
    "expired": "lost",
    "came_due": "due",
    "aged": "too old",
    "cancelled": "cancelled",
    "retried": "retried",
    "progressed": "progress",
    "stale": "too late",
    "worker_joined": "worker joined",
    "worker_left": "worker left",
    "slots_freed": "slots freed",
    "paused": "paused",
    "resumed": "resumed",
    "moved": "moved",
    "reported": "late",
    "released": "let go",
    "worker_replaced": "replaced",
    "refunded": "refunded",
}
_WIDTH: Final = max(map(len, RECORD_LABELS.values()))


@click.command(
    epilog=example("watch", "watch --campaign thumbs --until-settled", "watch --since 0")
)
@target_options
@click.option(
    "--since",
    metavar="RECORD",
    type=click.IntRange(0),
    help="Begin after this record; 0 is the beginning. Only what is new if not given.",
)
@click.option(
    "--until-settled", is_flag=True, help="End when the campaign, or everything, is settled."
)
@broker_options
@click.pass_obj
def watch(
    cli_context: CliContext,
    /,
    since: int | None,
    *,
    until_settled: bool,
    **values: Any,  # noqa: ANN401  # the options of a scope
) -> ExitCode:
    """Show what happens, as it happens.

    A line a task: the time, what happened, its name, attempt and worker, and the reason. With
    --json a document a line, each a decision of the broker with its number in `record`. A restart
    of the broker is waited for, and nothing is missed or told twice.

    It ends when it is interrupted, with exit code 130; with --until-settled as `taskyard wait`
    does: 0 if all is done, 1 if some failed, 5 if some were cancelled.
    """
    if until_settled and (values["service"] or values["lane"] or values["match"]):
        raise UserError("--until-settled goes with --campaign, or alone: it waits for all of it")
    cli_context.interrupt_message = "interrupted; the tasks go on"
    with connect_client(cli_context) as client:
        if not until_settled:
            _watch(cli_context, client, since, values)
        return _watch_until_settled(cli_context, client, since, values)


def _watch(
    cli_context: CliContext, client: Client, since: int | None, values: dict[str, Any]
) -> None:
    from taskyard.client import record_stream  # noqa: PLC0415  # when it is used

    for batch in record_stream.follow(client, since, to_scope(values)):
        _print_batch(cli_context, batch)


def _watch_until_settled(
    cli_context: CliContext, client: Client, since: int | None, values: dict[str, Any]
) -> ExitCode:
    """What was decided before all was settled is told before it ends: first it is seen that all is
    settled, then that there is nothing more to tell."""
    from taskyard.cli.wait import wait_target  # noqa: PLC0415
    from taskyard.client import record_stream  # noqa: PLC0415

    scope = to_scope(values)
    batch = record_stream.poll_records(client, since, scope=scope)
    target: WaitTarget = wait_target(client, campaign=values["campaign"])
    while True:
        _print_batch(cli_context, batch)
        settled = target.poll(0)
        seen, wait_ns = batch.cursor, 0 if settled else _LOOK_NS
        batch = record_stream.poll_records(
            client, seen, batch.journal, scope=scope, wait_ns=wait_ns
        )
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
    """A line for each task of a record, or one if it names none. Of a task that has only printed
    something there is nothing to say."""
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
            return "  everything"
        lane = "" if record["lane"] is None else f"  lane {escape_line(record['lane']) or '-'}"
        return f"  service {escape_line(record['service'])}{lane}"
    if kind == "worker_joined":
        return f"  {escape_line(', '.join(record['services']))}"
    return f": {escape_line(record['reason'])}" if record.get("reason") else ""


def _details(record: dict[str, Any]) -> Iterator[str | None]:
    """What else there is to say of each task; None: nothing at all."""
    if "percents" in record:
        return (f"  {percent} %" if percent else None for percent in record["percents"])
    if "reasons" in record:
        return (f": {escape_line(reason)}" if reason else "" for reason in record["reasons"])
    if record["kind"] == "returned":
        return repeat(f": {record['reason'].replace('_', ' ')}")
    if record["kind"] == "aged" and record["reason"] != RECORD_LABELS["aged"]:
        return repeat(f": {escape_line(record['reason'])}")
    if record["kind"] == "moved":
        return repeat(_destination(record))
    return repeat("")


def _destination(record: dict[str, Any]) -> str:
    """Where tasks were moved to."""
    service, lane = record["service"], record["lane"]
    to_service = "" if service is None else f"  to service {escape_line(service)}"
    return to_service + ("" if lane is None else f"  to lane {escape_line(lane) or '-'}")
