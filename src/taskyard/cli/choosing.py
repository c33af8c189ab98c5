"""Which tasks are meant: options that several verbs choose tasks by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.completion import complete_campaign, complete_service
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from taskyard.cli.options import Decorated
    from taskyard.core.events import Scope

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
        click.option("--lane", metavar="LANE", help="Only of this lane."),
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
