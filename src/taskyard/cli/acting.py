"""The verbs that act on tasks and workers: `retry`, `cancel`, `drain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.choosing import FLAGS, scope_from, scope_options
from taskyard.cli.completion import complete_name
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document
from taskyard.cli.reaching import connected
from taskyard.cli.words import count
from taskyard.core.states import TaskState
from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.client.client import Client

#: What can still be cancelled.
_NOT_ENDED: Final = [
    *(TaskState.BLOCKED, TaskState.DELAYED, TaskState.READY),
    *(TaskState.LEASED, TaskState.FAILED),
]


@click.command(epilog=example("retry fetch-a", "retry --campaign thumbs --failed"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@scope_options
@broker_options
@click.pass_obj
def retry(talk: Talk, /, names: tuple[str, ...], **given: Any) -> None:  # noqa: ANN401  # a scope
    """Try failed tasks again, and delayed ones now.

    By name, or all that fit what is given; --failed alone means every failed task. What waits
    behind them goes on when they are done.
    """
    from taskyard.client import steering  # noqa: PLC0415  # when it is used

    with connected(talk) as client:
        _check(client, names, given)
        retried = client.retry(names) if names else steering.retry(client, scope_from(given))
    if talk.as_json:
        print_document("retry", retried=retried)
    elif retried:
        click.echo(f"retried {count(retried, 'task')}")
    else:
        click.echo("nothing to retry: none of them has failed or is delayed")


@click.command(epilog=example("cancel fetch-a", "cancel --campaign thumbs"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@scope_options
@click.option(
    "--all", "everything", is_flag=True, help="Every task that is not ended; needs --yes."
)
@click.option("--yes", is_flag=True, help="Yes, all of them.")
@broker_options
@click.pass_obj
def cancel(
    talk: Talk,
    /,
    names: tuple[str, ...],
    *,
    everything: bool,
    yes: bool,
    **given: Any,  # noqa: ANN401  # the options of a scope
) -> None:
    """Cancel tasks, and all that wait for them.

    By name, or all that fit what is given. A task that runs is ended. What is done stays done.
    """
    from taskyard.client import steering  # noqa: PLC0415  # when it is used

    if everything:
        _check_all(names, given, yes=yes)
        given["only"] = [state.name.lower() for state in _NOT_ENDED]
    with connected(talk) as client:
        _check(client, names, given)
        cancelled = client.cancel(names) if names else steering.cancel(client, scope_from(given))
    if talk.as_json:
        print_document("cancel", cancelled=cancelled)
    elif cancelled:
        click.echo(f"cancelled {count(cancelled, 'task')}")
    else:
        click.echo("nothing to cancel: all of them have ended already, or there are none")


def _check_all(names: tuple[str, ...], given: dict[str, Any], *, yes: bool) -> None:
    if names or any(given.values()):
        raise UserError("--all means every task: give it alone, or say which tasks without it")
    if not yes:
        raise UserError("--all cancels every task of the broker; give --yes, too, if you mean it")


def _check(client: Client, names: tuple[str, ...], given: dict[str, Any]) -> None:
    """An act is on names or on a scope. Names have to be known: a mistyped one should not pass."""
    if names and any(given.values()):
        raise UserError(f"names and options both choose tasks: give names, or {FLAGS}")
    if not names and not any(given.values()):
        raise UserError(f"say which tasks: names, {FLAGS}")
    if names:
        client.views(names)


@click.command(epilog=example("drain host-4711", "drain --all"))
@click.argument("names", nargs=-1, metavar="[WORKER]...")
@click.option("--all", "everything", is_flag=True, help="All workers, and then the broker, too.")
@broker_options
@click.pass_obj
def drain(talk: Talk, names: tuple[str, ...], *, everything: bool) -> None:
    """Give workers no more tasks, and send them home.

    They finish what they have. With --all the broker takes no more tasks either, and leaves when
    nothing runs any more; `taskyard down` does that and waits.
    """
    if bool(names) is everything:
        raise UserError("say which workers: names, or --all; `taskyard workers` lists them")
    with connected(talk) as client:
        drained = client.drain() if everything else _drain(client, names)
    if talk.as_json:
        print_document("drain", drained=drained)
    else:
        leaving = ", and the broker leaves when nothing runs any more" if everything else ""
        click.echo(f"drained {count(drained, 'worker')}{leaving}")


def _drain(client: Client, names: tuple[str, ...]) -> int:
    """All of them, or none if one is not known."""
    known = [worker["name"] for worker in client.workers()]
    for name in names:
        if name not in known:
            raise UserError(f"no worker is called {name}; `taskyard workers` lists them")
    return sum(client.drain(name) for name in dict.fromkeys(names))
