"""`taskyard help`: the help of a command, or of options that every command accepts."""

from __future__ import annotations

from typing import Final

import click

from taskyard.cli.command import Command
from taskyard.cli.options import common_options

_CONNECTION: Final = """The options of every command

They may stand before or after the command. Each has a variable or a setting too, so that scripts
need none of them: see `taskyard config`.
"""


@click.command("help", cls=Command)
@click.argument("words", nargs=-1, metavar="[connection | COMMAND]")
@click.pass_context
def help_command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, or of the options that all commands accept."""
    root = context.find_root()
    if words == ("connection",):
        click.echo(_connection(context))
        return
    command, above = root.command, root
    for word in words:
        found = command.get_command(above, word) if isinstance(command, click.Group) else None
        if found is None:
            raise click.UsageError(f"no command {' '.join(words)!r}", context)
        command, above = found, click.Context(found, above, info_name=word)
    click.echo(command.get_help(above))


def _connection(context: click.Context) -> str:
    """Return the topic of the common options."""
    formatter = context.make_formatter()
    formatter.write(_CONNECTION)
    records = [one.get_help_record(context) for one in common_options()]
    with formatter.section("Options"):
        formatter.write_dl([one for one in records if one])
    return formatter.getvalue().rstrip()
