"""Options that choose tasks, shared by several commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.completion import complete_campaign, complete_lane, complete_service
from taskyard.cli.format import escape_line, escape_pattern
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.options import CommandFunction
    from taskyard.core.events import Scope

#: The most services that an error lists.
_SERVICES_LISTED_MAX: Final = 5

_STATES: Final = [state.name.lower() for state in TaskState]

#: The options that choose tasks, for messages.
STATE_FLAGS: Final = "--campaign, --service, --lane, --match, --only or --failed"


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


def scope_options(command: CommandFunction) -> CommandFunction:
    """Add options for campaign, service, lane, name and state."""
    for option in (
        click.option("--failed", is_flag=True, help="Only failed tasks."),
        click.option(
            "--only",
            type=click.Choice(_STATES, case_sensitive=False),
            multiple=True,
            metavar="STATE",
            help=f"Only tasks in this state ({', '.join(_STATES)}). Repeatable.",
        ),
    ):
        command = option(command)
    return target_options(command)


def target_options(command: CommandFunction) -> CommandFunction:
    """Add options for campaign, service, lane and name."""
    for option in (
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
        command = option(command)
    return command


def to_scope(values: dict[str, Any]) -> Scope:
    """Return the scope of the tasks that match every option."""
    from taskyard.campaign.batches import encode_text  # noqa: PLC0415  # not needed by completion
    from taskyard.core.events import Scope  # noqa: PLC0415

    def encoded(key: str) -> bytes | None:
        return None if values[key] is None else encode_text(values[key])

    return Scope(
        campaign=encoded("campaign"),
        service=encoded("service"),
        lane=encoded("lane"),
        states=_states(values),
        match=encoded("match") or b"",
    )


def _states(values: dict[str, Any]) -> tuple[TaskState, ...] | None:
    """Return the chosen states, or None for all."""
    names = [*values.get("only", ()), *(["failed"] if values.get("failed") else [])]
    return tuple(TaskState[name.upper()] for name in dict.fromkeys(names)) or None


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


def with_service_of_lane(broker: ReadOnlyClient, values: dict[str, Any]) -> dict[str, Any]:
    """Add the service of a lane that is given without one.

    Raises `UserError` if several services have the lane.
    """
    if values["lane"] is None or values["service"] is not None:
        return values
    services = services_with(broker, values["lane"])
    if len(services) > 1:
        some = ", ".join(map(escape_line, services[:_SERVICES_LISTED_MAX]))
        more = " and others" if len(services) > _SERVICES_LISTED_MAX else ""
        raise UserError(
            f"lane {escape_line(values['lane']) or '-'}: exists in several services, "
            f"{some}{more} (give --service)"
        )
    return values | {"service": services[0] if services else None}


def services_with(broker: ReadOnlyClient, lane: str) -> list[str]:
    """Return the services that have tasks in a lane, including failed ones."""
    from taskyard.campaign.batches import encode_text  # noqa: PLC0415  # not needed by completion
    from taskyard.core.events import Scope  # noqa: PLC0415

    live = (one["service"] for one in broker.lanes(pattern=escape_pattern(lane)))
    scope = Scope(lane=encode_text(lane), states=(TaskState.FAILED,))
    failed = (one["service"] for one in broker.tasks(scope))
    return [*dict.fromkeys([*live, *failed])]
