"""Which tasks are meant: options that several verbs choose tasks by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.completion import complete_campaign, complete_lane, complete_service
from taskyard.cli.words import as_pattern, plain
from taskyard.core.states import TaskState
from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.cli.connecting import Look
    from taskyard.cli.options import Decorated
    from taskyard.core.events import Scope

#: Services that an error names.
_SERVICES_NAMED: Final = 5

_STATES: Final = [state.name.lower() for state in TaskState]

#: What tasks can be chosen by, for messages.
FLAGS: Final = "--campaign, --service, --lane, --match, --only or --failed"

service_option = click.option(
    "--service", metavar="SERVICE", help="Only of this service.", shell_complete=complete_service
)
campaign_option = click.option(
    "--campaign", metavar="NAME", help="Only of this campaign.", shell_complete=complete_campaign
)


def scope_options(command: Decorated) -> Decorated:
    """Campaign, service, lane, a part of the name, and state."""
    for option in (
        click.option("--failed", is_flag=True, help="Only those that failed."),
        click.option(
            "--only",
            type=click.Choice(_STATES, case_sensitive=False),
            multiple=True,
            metavar="STATE",
            help=f"Only in this state: {', '.join(_STATES)}. Repeatable.",
        ),
    ):
        command = option(command)
    return subject_options(command)


def subject_options(command: Decorated) -> Decorated:
    """The same without the state."""
    for option in (
        click.option("--match", metavar="TEXT", help="Only names that contain this."),
        click.option(
            "--lane", metavar="LANE", help="Only of this lane.", shell_complete=complete_lane
        ),
        service_option,
        campaign_option,
    ):
        command = option(command)
    return command


def scope_from(given: dict[str, Any]) -> Scope:
    """The tasks that fit everything that was given."""
    from taskyard.client.campaign.submitting import encode_text  # noqa: PLC0415  # when a verb runs
    from taskyard.core.events import Scope  # noqa: PLC0415

    def encoded(key: str) -> bytes | None:
        return None if given[key] is None else encode_text(given[key])

    return Scope(
        campaign=encoded("campaign"),
        service=encoded("service"),
        lane=encoded("lane"),
        states=_states(given),
        match=encoded("match") or b"",
    )


def _states(given: dict[str, Any]) -> tuple[TaskState, ...] | None:
    """The states that were asked for; None: any."""
    names = [*given.get("only", ()), *(["failed"] if given.get("failed") else [])]
    return tuple(TaskState[name.upper()] for name in dict.fromkeys(names)) or None


def lane_meant(broker: Look, given: dict[str, Any]) -> dict[str, Any]:
    """The same with a service, where a lane is given without one and a single service has it.
    Raises `UserError` if several do: who acts on a lane means one."""
    if given["lane"] is None or given["service"] is not None:
        return given
    services = services_with(broker, given["lane"])
    if len(services) > 1:
        some = ", ".join(map(plain, services[:_SERVICES_NAMED]))
        more = " and others" if len(services) > _SERVICES_NAMED else ""
        raise UserError(
            f"several services have a lane {plain(given['lane']) or '-'}: {some}{more}; say which "
            "with --service"
        )
    return given | {"service": services[0] if services else None}


def services_with(broker: Look, lane: str) -> list[str]:
    """The services that have a lane of this name, or failed tasks of one."""
    from taskyard.client.campaign.submitting import encode_text  # noqa: PLC0415  # when a verb runs
    from taskyard.core.events import Scope  # noqa: PLC0415

    live = (one["service"] for one in broker.lanes(pattern=as_pattern(lane)))
    scope = Scope(lane=encode_text(lane), states=(TaskState.FAILED,))
    failed = (one["service"] for one in broker.tasks(scope))
    return [*dict.fromkeys([*live, *failed])]
