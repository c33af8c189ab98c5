"""A click group that imports a command when it is called for, not when it is listed.

Knows how a verb is found, not which verbs there are: that is `lazy_commands.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyCommand(NamedTuple):
    """One entry of a table of verbs."""

    #: The click command, as `module:attribute`.
    target: str
    #: Its line in the list of verbs.
    summary: str

    def load(self) -> click.Command:
        module_name, _, attribute = self.target.partition(":")
        command = getattr(import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is not a click command but {command!r}")
        return command


class LazyGroup(click.Group):
    """A group whose commands are a table; the order of the table is the order of the help."""

    def __init__(
        self, *arguments: object, lazy_commands: dict[str, LazyCommand], **settings: object
    ) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]  # click's own signature
        self.lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        verb = self.lazy_commands.get(cmd_name)
        return verb.load() if verb else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that is meant. Click would compare a misspelt one with nothing: it is not told
        of verbs that are not imported."""
        verb = args[0]
        if verb in self.lazy_commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        import difflib  # noqa: PLC0415  # for who mistypes

        close = difflib.get_close_matches(verb, self.lazy_commands)
        if close:
            ctx.fail(f"No such command '{verb}'; did you mean {' or '.join(close)}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Verbs and options that begin so. Click would import every verb to learn its help."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  # for a shell alone

        lazy_commands = [
            CompletionItem(name, help=verb.summary)
            for name, verb in self.lazy_commands.items()
            if name.startswith(incomplete)
        ]
        return lazy_commands + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> object:
        """Call the verb. Click would end the process with 1 where nobody reads the answer on."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise click.exceptions.Exit(0) from None

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        if self.lazy_commands:
            with formatter.section("Verbs"):
                formatter.write_dl(
                    [(name, verb.summary) for name, verb in self.lazy_commands.items()]
                )
