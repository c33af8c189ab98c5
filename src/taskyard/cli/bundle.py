"""`taskyard bundle`: one payload for many recipients."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document
from taskyard.cli.reaching import connected
from taskyard.cli.refusals import in_words
from taskyard.cli.rows import rows
from taskyard.cli.task_options import TaskKey, bundle_options, payload_of, terms_of
from taskyard.cli.waiting import group_of, report, wait_for
from taskyard.cli.words import count, plain
from taskyard.client import bundles
from taskyard.client.campaign.lines import label_of
from taskyard.client.campaign.tasks import BadTask
from taskyard.core.events import UnknownPolicy
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.cli.rows import Row
    from taskyard.client.client import Client

#: Endings of files in which a recipient is more than a line.
_KINDS: Final = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@click.command(
    epilog=example(
        "bundle --name news-7 --service smtp --to addresses.txt --payload @news.txt",
        "bundle --service smtp --to people.csv --lane '{host}' --payload @news.txt --wait",
    )
)
@click.option(
    "--to",
    required=True,
    metavar="FILE",
    help="The recipients: a line each, a row of .csv, an object of .jsonl; - is stdin.",
)
@click.option("--wait", is_flag=True, help="Wait until all of it is settled.")
@bundle_options
@click.option("--name", type=TaskKey("name", "NAME"), help="Its name; made up if not given.")
@broker_options
@click.pass_obj
def bundle(
    talk: Talk,
    /,
    to: str,
    name: str | None,
    *,
    wait: bool,
    **given: Any,  # noqa: ANN401  # the options of a task
) -> ExitCode:
    """Submit one payload for many recipients, and print the bundle's name.

    There is a task for each recipient, NAME/0, NAME/1 and so on, in a lane of its own. The payload
    is sent and stored once: a JSON object with the "body", which is what was given, and the
    "recipients". The campaign is called as the bundle is, unless one is given.

    --lane is a template: {recipient} is the line, {column} a field of a table or an object. The
    bundle is taken whole or not at all; to submit it again with the same name is harmless.
    """
    recipients = list(rows(_kind(to), to))
    order = _order(recipients, to, name, given)
    with connected(talk) as client:
        new = _create(client, order, recipients)
        if not new and not talk.quiet:
            told = f"bundle {plain(order.name)} is known already: nothing was submitted"
            click.echo(told, err=True)
        tasks = len(order.specs)
        if wait:
            return _wait(talk, client, order, new=new)
    if talk.as_json:
        names = {"name": order.name, "campaign": order.campaign}
        print_document("bundle", **names, tasks=tasks, new=new)
    else:
        talk.say(f"{count(tasks, 'task')}, {new:,} new")
        click.echo(order.name)
    return ExitCode.GOOD


def _kind(path: str) -> str:
    """How a file says who they are, by its ending."""
    return _KINDS.get(Path(path.lower().removesuffix(".gz")).suffix, "lines")


def _order(
    recipients: Sequence[Row], path: str, name: str | None, given: dict[str, Any]
) -> bundles.Order:
    if given["payload"] is None:
        raise UserError("say what they get: --payload TEXT, or --payload @FILE")
    if not recipients:
        raise UserError(f"{label_of(path)} has no recipients; give a line for each")
    values = [row.text if row.fields is None else row.fields for row in recipients]
    payload = payload_of(given["payload"])
    with _placed(recipients):
        order = bundles.order(payload, values, name, given["campaign"], terms_of(given))
    order.unknown = UnknownPolicy.WAIT if given["wait_for_unknown"] else UnknownPolicy.REFUSE
    return order


@contextmanager
def _placed(recipients: Sequence[Row]) -> Iterator[None]:
    """What is wrong with a recipient is told with the line where it stands."""
    try:
        yield
    except BadTask as bad:
        place = "the bundle" if bad.offset is None else recipients[bad.offset].place
        raise UserError(f"{place}: {bad}") from bad


def _create(client: Client, order: bundles.Order, recipients: Sequence[Row]) -> int:
    try:
        with _placed(recipients):
            return bundles.create(client, order)
    except Refused as refused:
        known = f"bundle {order.name} is known with another {{}}; give another --name"
        raise in_words(refused, {"call": None, "payload": ""}, known) from refused


def _wait(talk: Talk, client: Client, order: bundles.Order, *, new: int) -> ExitCode:
    campaign, names = plain(order.campaign), [*order.tasks()]
    talk.interrupted = f"interrupted; it goes on: `taskyard wait --campaign {campaign}`"
    is_own = order.campaign == order.name
    group = group_of(client, campaign=order.name) if is_own else group_of(client, names)
    settled = wait_for(talk, group)
    more = {"name": order.name, "campaign": order.campaign, "tasks": len(names), "new": new}
    report(talk, "bundle", group, settled=settled, **more)
    return group.exit_code()
