"""Options that choose tasks, and the completion of names in a shell.

The scripts are click's. They call `taskyard` with `COMPLETION_VARIABLE` set. Names come from a
broker on this machine if it replies within `REPLY_SECONDS`. Completion never prints an error: a
failure means no suggestions.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

import click
from msgspec import Struct

from taskyard.cli.commands import Command
from taskyard.cli.entry import COMPLETION_VARIABLE
from taskyard.cli.format import escape_line, escape_pattern, full_name
from taskyard.cli.options import CliContext, gathered
from taskyard.cli.output import example
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.options import CommandFunction
    from taskyard.core.events import Scope
    from taskyard.wire.native.peer import Reply

#: The most services that an error lists.
_SERVICES_LISTED_MAX: Final = 5

_STATES: Final = [state.name.lower() for state in TaskState]

#: The options that choose tasks, for messages.
STATE_FLAGS: Final = "--campaign, --service, --lane, --match or --failed"


class OnceOption(click.Option):
    """An option that is refused with several values, of which click would take the last."""

    def __init__(self, names: Sequence[str], **more: Any) -> None:  # noqa: ANN401  # click options
        super().__init__(names, multiple=True, **more)

    def process_value(self, ctx: click.Context, value: object) -> Any:  # noqa: ANN401  # click's
        """Return the only value, or None."""
        values = list(dict.fromkeys(super().process_value(ctx, value)))
        if len(values) > 1 and not ctx.resilient_parsing:
            given = ", ".join(escape_line(str(one)) for one in values)
            raise click.UsageError(f"{self.opts[0]}: takes one value, got {len(values)} ({given})")
        return values[-1] if values else None


#: How long to wait for the broker.
REPLY_SECONDS: Final = 0.2

#: The most names that are suggested.
NAMES_MAX: Final = 100

#: The most tasks that are searched for a prefix: one page, about 10 ms.
_PAGE: Final = 1000

_SHELLS: Final = ("bash", "zsh", "fish")


@click.command(
    cls=Command, epilog=example("completion bash >> ~/.bashrc", "completion fish | source")
)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell completion script.

    It completes commands, options and the names of campaigns and tasks. For bash and zsh, add the
    script to the startup file.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415  # only for this command

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"unsupported shell {shell!r} (supported: {', '.join(_SHELLS)})")
    root = context.find_root()
    click.echo(kind(root.command, {}, "taskyard", COMPLETION_VARIABLE).source())


def complete_name(context: click.Context, _parameter: click.Parameter, prefix: str) -> list[str]:
    """Return full task names with the prefix, or names within their campaigns."""
    views = _query(context, _tasks(prefix)) or ()
    pairs = [(full_name(view), str(view["name"])) for view in views]
    named = [full if full.startswith(prefix) else name for full, name in pairs]
    return [name for name in dict.fromkeys(named) if name.startswith(prefix)][:NAMES_MAX]


def complete_campaign(
    context: click.Context, _parameter: click.Parameter, prefix: str
) -> list[str]:
    """Return campaigns with the prefix, latest first."""
    return _names_in_stats(context, "campaigns", prefix)


def complete_service(context: click.Context, _parameter: click.Parameter, prefix: str) -> list[str]:
    """Return services with the prefix."""
    return _names_in_stats(context, "services", prefix)


def complete_lane(context: click.Context, _parameter: click.Parameter, prefix: str) -> list[str]:
    """Return lanes with the prefix, of the given service or of all services."""
    from taskyard.wire.native import peer  # noqa: PLC0415  # only when a name is completed

    service = context.params.get("service")
    which = service.encode() if service else None
    pattern = f"{escape_pattern(prefix)}*".encode()
    reply = _query(context, lambda: peer.lanes(1, which, pattern, count=NAMES_MAX)) or ()
    return [*dict.fromkeys(one["lane"] for one in reply if one["lane"])]


def _names_in_stats(context: click.Context, kind: str, prefix: str) -> list[str]:
    from taskyard.wire.native import peer  # noqa: PLC0415  # only when a name is completed

    reply = _query(context, lambda: peer.query(1, peer.STATS)) or {kind: ()}
    names = [one["name"] for one in reversed(reply[kind]) if one["name"]]
    return [name for name in names if name.startswith(prefix)][:NAMES_MAX]


def _tasks(prefix: str) -> Callable[[], bytes]:
    from taskyard.core.events import Scope  # noqa: PLC0415
    from taskyard.wire.native import peer  # noqa: PLC0415

    return lambda: peer.list_tasks(1, Scope(), prefix.encode(), count=_PAGE)


def _query(context: click.Context, build: Callable[[], bytes]) -> Any:  # noqa: ANN401  # JSON
    """Return the broker's JSON reply, or None on any failure."""
    cli_context = context.find_object(CliContext) or CliContext()
    with suppress(Exception):
        reply = _query_local(cli_context, build())
        return None if reply is None else reply.document()
    return None


def _query_local(cli_context: CliContext, body: bytes) -> Reply | None:
    """Send a request to a broker on this machine. `Client` would wait longer and imports slowly."""
    from taskyard.client import discovery  # noqa: PLC0415
    from taskyard.net import options  # noqa: PLC0415
    from taskyard.wire.native.peer import Reply  # noqa: PLC0415

    settings = None if cli_context.state else cli_context.settings()
    location = discovery.locate(cli_context.brokers, cli_context.state, settings=settings)
    endpoint = location.endpoint()
    if not endpoint.startswith("ipc://") or "+" in endpoint:
        return None  # a key and a network take longer than a person waits
    answer = options.query_once(endpoint, body, int(REPLY_SECONDS * 1000))
    return None if answer is None else Reply(answer)


service_option = click.option(
    "--service",
    cls=OnceOption,
    metavar="SERVICE",
    help="Only tasks of this service.",
    shell_complete=complete_service,
)
campaign_option = click.option(
    "--campaign",
    cls=OnceOption,
    metavar="NAME",
    help="Only tasks of this campaign.",
    shell_complete=complete_campaign,
)


class TaskChoice(Struct, frozen=True):
    """The options that choose tasks."""

    campaign: str | None = None
    service: str | None = None
    lane: str | None = None
    match: str | None = None
    failed: bool = False
    #: States.
    only: tuple[str, ...] = ()

    @property
    def is_given(self) -> bool:
        """Return whether any option is given. An empty lane is: it is the open lane."""
        return self != _NO_CHOICE

    @property
    def states(self) -> tuple[str, ...]:
        """The chosen states. Empty: all."""
        return tuple(dict.fromkeys((*self.only, *(("failed",) if self.failed else ()))))

    def scope(self) -> Scope:
        """Return the scope of the tasks that match every option."""
        from taskyard.campaign.batches import encode_text  # noqa: PLC0415  # not for completion
        from taskyard.core.events import Scope  # noqa: PLC0415

        def encoded(value: str | None) -> bytes | None:
            return None if value is None else encode_text(value)

        return Scope(
            campaign=encoded(self.campaign),
            service=encoded(self.service),
            lane=encoded(self.lane),
            states=tuple(TaskState[name.upper()] for name in self.states) or None,
            match=encoded(self.match) or b"",
        )


_NO_CHOICE: Final = TaskChoice()


def scope_options(command: CommandFunction) -> CommandFunction:
    """Add the options that choose tasks, passed as a `TaskChoice` named `chosen`."""
    found: Any = gathered(TaskChoice, "chosen")(command)
    for option in (
        click.option("--failed", is_flag=True, help="Only failed tasks."),
        click.option(
            "--match",
            cls=OnceOption,
            metavar="TEXT",
            help="Only tasks whose name contains this text.",
        ),
        click.option(
            "--lane",
            cls=OnceOption,
            metavar="LANE",
            help="Only tasks of this lane.",
            shell_complete=complete_lane,
        ),
        service_option,
        campaign_option,
    ):
        found = option(found)
    return cast("CommandFunction", found)


only_option = click.option(
    "--only",
    type=click.Choice(_STATES, case_sensitive=False),
    multiple=True,
    metavar="STATE",
    help=f"Only tasks in this state ({', '.join(_STATES)}). Repeatable.",
)


def check_campaign(broker: ReadOnlyClient, campaign: str | None) -> None:
    """Raise `UnknownName` if a campaign is given that has no tasks."""
    from taskyard.campaign.batches import encode_text  # noqa: PLC0415  # not needed by completion
    from taskyard.core.events import Scope  # noqa: PLC0415

    if campaign is None:
        return
    is_listed = next(broker.tasks(Scope(campaign=encode_text(campaign))), None) is not None
    # The broker counts tasks that it has dropped from memory.
    if not is_listed and campaign not in [one["name"] for one in broker.status()["campaigns"]]:
        raise UnknownName(f"unknown campaign {campaign!r} (see `taskyard status`)", campaign)


def service_of_lane(broker: ReadOnlyClient, lane: str | None, service: str | None) -> str | None:
    """Return the given service, else the only service with the lane, if any.

    Raises `UserError` if several services have the lane.
    """
    if lane is None or service is not None:
        return service
    services = services_with(broker, lane)
    if len(services) > 1:
        some = ", ".join(map(escape_line, services[:_SERVICES_LISTED_MAX]))
        more = " and more" if len(services) > _SERVICES_LISTED_MAX else ""
        raise UserError(
            f"lane {escape_line(lane) or '-'}: exists in several services, {some}{more} "
            "(give --service)"
        )
    return services[0] if services else None


def services_with(broker: ReadOnlyClient, lane: str) -> list[str]:
    """Return the services that have tasks in a lane, also failed tasks."""
    from taskyard.campaign.batches import encode_text  # noqa: PLC0415  # not needed by completion
    from taskyard.core.events import Scope  # noqa: PLC0415

    live = (one["service"] for one in broker.lanes(pattern=escape_pattern(lane)))
    scope = Scope(lane=encode_text(lane), states=(TaskState.FAILED,))
    failed = (one["service"] for one in broker.tasks(scope))
    return [*dict.fromkeys([*live, *failed])]
