"""Which tasks are meant: options that several verbs choose tasks by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.cli.options import Decorated

_STATES: Final = [state.name.lower() for state in TaskState]


def scope_options(command: Decorated) -> Decorated:
    """Campaign, service, lane and state."""
    for option in (
        click.option("--failed", is_flag=True, help="Only those that failed."),
        click.option(
            "--only",
            type=click.Choice(_STATES, case_sensitive=False),
            multiple=True,
            metavar="STATE",
            help=f"Only in this state: {', '.join(_STATES)}. Repeatable.",
        ),
        click.option("--lane", metavar="LANE", help="Only of this lane."),
        click.option("--service", metavar="SERVICE", help="Only of this service."),
        click.option("--campaign", metavar="NAME", help="Only of this campaign."),
    ):
        command = option(command)
    return command


def states_of(given: dict[str, Any]) -> Sequence[TaskState] | None:
    """The states that were asked for; None: any."""
    names = [*given["only"], *(["failed"] if given["failed"] else [])]
    return [TaskState[name.upper()] for name in dict.fromkeys(names)] or None
