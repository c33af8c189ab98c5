"""`taskyard completion`: what lets a shell complete verbs, options, campaigns and tasks' names.

The scripts are click's: they call this very command, which says what could follow. Names come from
the broker, if one answers at once. Whoever presses a key does not want to hear what went wrong, so
nothing here is ever an error, nor takes longer than a moment.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.entry import COMPLETION_VARIABLE
from taskyard.cli.format import escape_pattern, full_name
from taskyard.cli.options import CliContext
from taskyard.cli.output import example

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.keys import PeerKey
    from taskyard.wire.native.peer import Reply

#: A broker that has not answered by then is not waited for.
REPLY_SECONDS: Final = 0.2

#: Names that a shell is told: it shows no more of them at once.
NAMES_MAX: Final = 100

#: Of a broker with millions of tasks, so many are searched for a beginning: one page, some 10 ms.
_PAGE: Final = 1000

_SHELLS: Final = ("bash", "zsh", "fish")


@click.command(epilog=example("completion bash >> ~/.bashrc", "completion fish | source"))
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what lets a shell complete what is typed.

    Verbs and options, and campaigns and tasks by name as the broker knows them. For bash and zsh,
    put it into the file that they read when they start.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415  # when it is used

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"{shell} can't be completed for; give one of {', '.join(_SHELLS)}")
    root = context.find_root()
    click.echo(kind(root.command, {}, "taskyard", COMPLETION_VARIABLE).source())


def complete_name(context: click.Context, _parameter: click.Parameter, prefix: str) -> list[str]:
    """Return full names of tasks that begin so, or names in their campaigns."""
    views = _query(context, _tasks(prefix)) or ()
    pairs = [(full_name(view), str(view["name"])) for view in views]
    named = [full if full.startswith(prefix) else name for full, name in pairs]
    return [name for name in dict.fromkeys(named) if name.startswith(prefix)][:NAMES_MAX]


def complete_campaign(
    context: click.Context, _parameter: click.Parameter, prefix: str
) -> list[str]:
    """Campaigns that begin so, the latest first."""
    return _names_in_stats(context, "campaigns", prefix)


def complete_service(context: click.Context, _parameter: click.Parameter, prefix: str) -> list[str]:
    """Services that begin so."""
    return _names_in_stats(context, "services", prefix)


def complete_lane(context: click.Context, _parameter: click.Parameter, prefix: str) -> list[str]:
    """Lanes that begin so, of the service that was given, or of any."""
    from taskyard.wire.native import peer  # noqa: PLC0415  # only when a name is completed

    service = context.params.get("service")
    which = service.encode() if service else None
    pattern = f"{escape_pattern(prefix)}*".encode()
    told = _query(context, lambda: peer.lanes(1, which, pattern, count=NAMES_MAX)) or ()
    return [*dict.fromkeys(one["lane"] for one in told if one["lane"])]


def _names_in_stats(context: click.Context, kind: str, prefix: str) -> list[str]:
    from taskyard.wire.native import peer  # noqa: PLC0415  # only when a name is completed

    told = _query(context, lambda: peer.query(1, peer.STATS)) or {kind: ()}
    names = [one["name"] for one in reversed(told[kind]) if one["name"]]
    return [name for name in names if name.startswith(prefix)][:NAMES_MAX]


def _tasks(prefix: str) -> Callable[[], bytes]:
    from taskyard.core.events import Scope  # noqa: PLC0415
    from taskyard.wire.native import peer  # noqa: PLC0415

    return lambda: peer.list_tasks(1, Scope(), prefix.encode(), count=_PAGE)


def _query(context: click.Context, build: Callable[[], bytes]) -> Any:  # noqa: ANN401  # JSON
    """What the broker that is meant says; None if it is not there, or slow, or anything else."""
    cli_context = context.find_object(CliContext) or CliContext()
    with suppress(Exception):
        reply = _query_local(cli_context, build())
        return None if reply is None else reply.document()
    return None


def _query_local(cli_context: CliContext, body: bytes) -> Reply | None:
    """The client would wait for longer, and takes longer to import."""
    from taskyard.client import discovery  # noqa: PLC0415
    from taskyard.wire.native.peer import Reply  # noqa: PLC0415

    settings = None if cli_context.state else cli_context.settings()
    endpoint = discovery.locate(cli_context.broker, cli_context.state, settings=settings).endpoint()
    if endpoint.startswith("ipc://"):
        from taskyard.net import quick_query  # noqa: PLC0415

        answer = quick_query.query_once(endpoint, body, int(REPLY_SECONDS * 1000))
        return None if answer is None else Reply(answer)
    return _query_tcp(endpoint, discovery.key_for(endpoint, cli_context.key), body)


def _query_tcp(endpoint: str, key: PeerKey | None, body: bytes) -> Reply | None:
    from taskyard.core.limits import SECOND_NS  # noqa: PLC0415
    from taskyard.net import sockets  # noqa: PLC0415
    from taskyard.net.poller import Poller  # noqa: PLC0415
    from taskyard.wire.native.peer import Reply  # noqa: PLC0415

    ends = time.monotonic() + REPLY_SECONDS
    with closing(sockets.connect(endpoint, key)) as wire:
        poller = Poller()
        poller.add(wire)
        is_sent = False
        while (left := ends - time.monotonic()) > 0:
            is_sent = is_sent or wire.send([b"", body])
            poller.wait(int((left if is_sent else min(left, 0.005)) * SECOND_NS))
            frames = wire.receive()
            if frames is not None:
                return Reply(frames[-1])
    return None
