"""`taskyard edit`: change the terms of tasks that wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.campaign.task_spec import BACKOFF_NS, KEYS
from taskyard.cli.completion import complete_name
from taskyard.cli.connection import connect_client
from taskyard.cli.control import check_targets, resolve_targets
from taskyard.cli.documents import EditDocument
from taskyard.cli.format import format_count
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.scopes import scope_options, to_scope
from taskyard.cli.task_options import TaskKey
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.client.internal import InternalClient
    from taskyard.core.events import Scope

#: The value of an option that removes a limit.
_NONE: Final = "none"


class _Removable(TaskKey):
    """The value of a task key, or `none`."""

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        return _NONE if value == _NONE else super().convert(value, param, ctx)


@click.command(
    epilog=example(
        "edit fetch-a --priority 10",
        "edit --campaign thumbs --time-limit 5m --retries 3",
        "edit --campaign thumbs --expiry none",
    )
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@click.option("--priority", type=TaskKey("priority", "N"), help="Higher runs first.")
@click.option(
    "--time-limit",
    type=_Removable("time_limit", "DURATION"),
    help="Maximum run time of an attempt, as in 5m, or none.",
)
@click.option(
    "--retries",
    type=TaskKey("retries", "N|LIST"),
    help="Number of retries, or a list of delays in multiples of --backoff: '[1, 2, 5]'.",
)
@click.option(
    "--backoff",
    type=TaskKey("backoff", "DURATION"),
    show_default="1s",
    help="Interval between retries. Needs --retries.",
)
@click.option(
    "--expiry",
    type=_Removable("expiry", "TIME"),
    help="Fail the tasks if they still wait then: 2h from now, or a date, or none.",
)
@scope_options
@broker_options
@click.pass_obj
def edit(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    /,
    names: tuple[str, ...],
    *,
    priority: object,
    time_limit: object,
    retries: object,
    backoff: object,
    expiry: object,
    **values: Any,  # noqa: ANN401  # scope options
) -> None:
    """Change tasks that wait.

    Choose tasks by name, or by options: then all tasks that match every option. Blocked, delayed
    and ready tasks are changed. Leased and ended tasks are not, and are counted in the output. A
    ready task with a new priority goes behind the ready tasks of that priority.
    """
    changes = _changes(priority, time_limit, retries, backoff, expiry)
    check_targets(names, values)
    with connect_client(cli_context) as client:
        names, values = resolve_targets(client, names, values)
        edited = client.edit(names or to_scope(values), **changes)
        leased, ended = _unchanged(client, names, to_scope(values))
    if cli_context.as_json:
        print_document(EditDocument(edited=edited, leased=leased, ended=ended))
        return
    click.echo(f"edited {format_count(edited, 'task')}")
    if leased and not cli_context.quiet:
        click.echo(f"not changed: {format_count(leased, 'leased task')}", err=True)
    if ended and not cli_context.quiet:
        click.echo(f"not changed: {format_count(ended, 'ended task')}", err=True)


def _changes(
    priority: object, time_limit: object, retries: object, backoff: object, expiry: object
) -> dict[str, Any]:
    """Return the changes as keywords of `Client.edit`. Raises `UserError` if there are none."""
    changes: dict[str, Any] = {}
    if priority is not None:
        changes["priority"] = _read("priority", priority)
    if time_limit is not None:
        limit_ns = 0 if time_limit == _NONE else _read("time_limit", time_limit)
        changes["time_limit"] = limit_ns / SECOND_NS
    if retries is not None:
        interval_ns = BACKOFF_NS if backoff is None else _read("backoff", backoff)
        multiples = _read("retries", retries)
        changes["retry_delays"] = [one * interval_ns / SECOND_NS for one in multiples]
    elif backoff is not None:
        raise UserError("--backoff needs --retries")
    if expiry is not None:
        now_ns = time.time_ns()
        at_ns = 0 if expiry == _NONE else _read("expiry", expiry).at_ns(now_ns)
        if expiry != _NONE and at_ns <= now_ns:
            raise UserError("--expiry is in the past (see `taskyard expire`)")
        changes["expires"] = at_ns / SECOND_NS
    if not changes:
        raise UserError("nothing to change (give --priority, --time-limit, --retries or --expiry)")
    return changes


def _read(key: str, value: object) -> Any:  # noqa: ANN401  # by key
    """Return the value of a task key as a task has it."""
    return KEYS[key][1](value)


def _unchanged(client: InternalClient, names: tuple[str, ...], scope: Scope) -> tuple[int, int]:
    """Return how many of the tasks are leased, and how many of the named ones have ended."""
    from msgspec import structs  # noqa: PLC0415  # not needed by `--help`

    if not names:
        leased = client.tasks(structs.replace(scope, states=(TaskState.LEASED,)))
        return (sum(1 for _ in leased) if _may_be_leased(scope) else 0), 0
    states = [view["state"] for view in client.existing(names).values()]
    ended = sum(states.count(state) for state in ("done", "failed", "cancelled"))
    return states.count("leased"), ended


def _may_be_leased(scope: Scope) -> bool:
    return scope.states is None or TaskState.LEASED in scope.states
