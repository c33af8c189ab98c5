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

from taskyard.cli.choosing import scope_from, subject_options
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document
from taskyard.cli.reaching import connected
from taskyard.cli.words import plain
from taskyard.errors import ExitCode, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.cli.waiting import Group
    from taskyard.client.client import Client
    from taskyard.client.following import Told

#: With --until-settled: how often to see whether all is settled, while nothing happens.
_LOOK_NS: Final = 500_000_000

#: What has become of tasks, in a word.
WORDS: Final = {
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
_WIDTH: Final = max(map(len, WORDS.values()))


@click.command(
    epilog=example("watch", "watch --campaign thumbs --until-settled", "watch --since 0")
)
@subject_options
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
    talk: Talk,
    /,
    since: int | None,
    *,
    until_settled: bool,
    **given: Any,  # noqa: ANN401  # the options of a scope
) -> ExitCode:
    """Show what happens, as it happens.

    A line a task: the time, what happened, its name, attempt and worker, and the reason. With
    --json a document a line, each a decision of the broker with its number in `record`. A restart
    of the broker is waited for, and nothing is missed or told twice.

    It ends when it is interrupted, with exit code 130; with --until-settled as `taskyard wait`
    does: 0 if all is done, 1 if some failed, 5 if some were cancelled.
    """
    if until_settled and (given["service"] or given["lane"] or given["match"]):
        raise UserError("--until-settled goes with --campaign, or alone: it waits for all of it")
    talk.interrupted = "interrupted; the tasks go on"
    with connected(talk) as client:
        if not until_settled:
            _watch(talk, client, since, given)
        return _watch_until_settled(talk, client, since, given)


def _watch(talk: Talk, client: Client, since: int | None, given: dict[str, Any]) -> None:
    from taskyard.client import following  # noqa: PLC0415  # when it is used

    for told in following.follow(client, since, scope_from(given)):
        _tell(talk, told)


def _watch_until_settled(
    talk: Talk, client: Client, since: int | None, given: dict[str, Any]
) -> ExitCode:
    """What was decided before all was settled is told before it ends: first it is seen that all is
    settled, then that there is nothing more to tell."""
    from taskyard.cli.waiting import group_of  # noqa: PLC0415
    from taskyard.client import following  # noqa: PLC0415

    scope = scope_from(given)
    told = following.look(client, since, scope=scope)
    group: Group = group_of(client, campaign=given["campaign"])
    while True:
        _tell(talk, told)
        settled = group.look(0)
        seen, wait_ns = told.cursor, 0 if settled else _LOOK_NS
        told = following.look(client, seen, told.journal, scope=scope, wait_ns=wait_ns)
        if settled and told.cursor == seen:
            return group.exit_code()


def _tell(talk: Talk, told: Told) -> None:
    if told.gap:
        click.echo(f"taskyard: {told.gap}", err=True)
        if talk.as_json:
            print_document("watch", kind="gap", record=told.cursor, reason=told.gap)
    for record in told.records:
        if talk.as_json:
            print_document("watch", **record)
        elif lines := [*lines_of(record)]:
            click.echo("\n".join(lines))
    sys.stdout.flush()


def lines_of(record: dict[str, Any]) -> Iterator[str]:
    """A line for each task of a record, or one if it names none. Of a task that has only printed
    something there is nothing to say."""
    at = datetime.fromtimestamp(record["at"] or 0.0).astimezone()
    head = f"{at:%H:%M:%S}.{at.microsecond // 1000:03}  {WORDS[record['kind']]:<{_WIDTH}}"
    worker = f"  worker {plain(record['worker'])}" if record.get("worker") else ""
    names = record.get("names")
    if names is None:
        yield f"{head}{worker}{_of_no_task(record)}"
        return
    attempts = record.get("attempts") or repeat(None)
    for name, attempt, more in zip(names, attempts, _details(record), strict=False):
        if more is None:
            continue
        number = "" if attempt is None else f"  attempt {attempt}"
        yield f"{head}  {plain(name)}{number}{worker}{more}"


def _of_no_task(record: dict[str, Any]) -> str:
    kind = record["kind"]
    if kind in ("paused", "resumed"):
        if not record["service"]:
            return "  everything"
        lane = "" if record["lane"] is None else f"  lane {plain(record['lane']) or '-'}"
        return f"  service {plain(record['service'])}{lane}"
    if kind == "worker_joined":
        return f"  {plain(', '.join(record['services']))}"
    return f": {plain(record['reason'])}" if record.get("reason") else ""


def _details(record: dict[str, Any]) -> Iterator[str | None]:
    """What else there is to say of each task; None: nothing at all."""
    if "percents" in record:
        return (f"  {percent} %" if percent else None for percent in record["percents"])
    if "reasons" in record:
        return (f": {plain(reason)}" if reason else "" for reason in record["reasons"])
    if record["kind"] == "returned":
        return repeat(f": {record['reason'].replace('_', ' ')}")
    if record["kind"] == "aged" and record["reason"] != WORDS["aged"]:
        return repeat(f": {plain(record['reason'])}")
    if record["kind"] == "moved":
        return repeat(_where(record))
    return repeat("")


def _where(record: dict[str, Any]) -> str:
    """Where tasks were moved to."""
    service, lane = record["service"], record["lane"]
    to_service = "" if service is None else f"  to service {plain(service)}"
    return to_service + ("" if lane is None else f"  to lane {plain(lane) or '-'}")
