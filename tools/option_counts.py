"""Counts what a user of the command line has to learn: commands, options and names of the list.

Reads click's commands. An option counts once for each command that explains it, hidden options with
a help text too. The common options are explained once, in `taskyard help connection`, and a thin
name of another command leaves options to that command: `accepted` counts these as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from taskyard.cli.commands import COMMANDS
from taskyard.cli.entry import taskyard
from taskyard.cli.options import common_options

if TYPE_CHECKING:
    from collections.abc import Iterator


class OptionCounts(NamedTuple):
    """The size of the command line."""

    #: Commands, also in groups.
    commands: int
    #: Options that commands explain, beside the common options.
    options: int
    #: Names in the first list of `taskyard --help`.
    listed: int
    #: Options that commands accept, beside the common options.
    accepted: int


def option_counts() -> OptionCounts:
    """Return the counts of all commands."""
    common = {name for option in common_options() for name in option.opts}
    commands = [*_commands(taskyard)]
    own = [
        option
        for command in commands
        for option in command.params
        if isinstance(option, click.Option) and not common.intersection(option.opts)
    ]
    first = next(iter(COMMANDS.values())).heading
    return OptionCounts(
        commands=len(commands),
        options=sum(bool(option.help) for option in own),
        listed=sum(one.heading == first for one in COMMANDS.values()),
        accepted=sum(bool(option.help) or not option.hidden for option in own),
    )


def _commands(group: click.Group) -> Iterator[click.Command]:
    """Yield all commands, and groups that are commands too."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None  # noqa: S101  # it is listed
        if isinstance(command, click.Group):
            yield from _commands(command)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield command
