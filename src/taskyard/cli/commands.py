"""The table of commands, and a click group that imports a command only when it runs.

To add a command, write it in a module of its own and name it here as `module:attribute`. Its
summary is here as well, so that `taskyard --help` imports no command. The order is that in which a
newcomer meets them.
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


COMMANDS: dict[str, LazyCommand] = {
    "demo": LazyCommand(
        "taskyard.cli.demo:demo",
        "Show everything once: a campaign, a broker that is killed, and what is left of it.",
    ),
    "run": LazyCommand("taskyard.cli.run:run", "Run a campaign's file from beginning to end."),
    "map": LazyCommand(
        "taskyard.cli.map:map_rows", "Run a command for every line of a file, or of stdin."
    ),
    "up": LazyCommand("taskyard.cli.up:up", "Run a broker and workers until they are stopped."),
    "down": LazyCommand(
        "taskyard.cli.up:down",
        "Stop what runs on a state directory, when running tasks are done.",
    ),
    "submit": LazyCommand("taskyard.cli.submit:submit", "Submit one task, and print its name."),
    "bundle": LazyCommand(
        "taskyard.cli.bundle:bundle",
        "Submit one payload for many recipients, and print the bundle's name.",
    ),
    "load": LazyCommand("taskyard.cli.load:load", "Load a graph of tasks from a file."),
    "wait": LazyCommand(
        "taskyard.cli.wait:wait",
        "Wait until tasks are settled: some by name, a campaign, or all that there are.",
    ),
    "watch": LazyCommand("taskyard.cli.watch:watch", "Show what happens, as it happens."),
    "list": LazyCommand(
        "taskyard.cli.inspect:list_tasks", "List tasks, in the order of their submission."
    ),
    "show": LazyCommand("taskyard.cli.inspect:show", "Show all that is known of a task."),
    "result": LazyCommand(
        "taskyard.cli.inspect:result", "Print the result of a task, byte for byte."
    ),
    "log": LazyCommand("taskyard.cli.inspect:log", "Print the end of what a task printed."),
    "why": LazyCommand("taskyard.cli.inspect:why", "Say why a task is where it is, in a sentence."),
    "status": LazyCommand(
        "taskyard.cli.inspect:status", "Say how many tasks there are in each state."
    ),
    "workers": LazyCommand("taskyard.cli.inspect:workers", "List the workers."),
    "services": LazyCommand(
        "taskyard.cli.lanes:services", "List the services, with what waits and who works."
    ),
    "lanes": LazyCommand(
        "taskyard.cli.lanes:lanes", "List the lanes, with what waits in them and why."
    ),
    "retry": LazyCommand(
        "taskyard.cli.control:retry", "Try failed tasks again, and delayed ones now."
    ),
    "cancel": LazyCommand(
        "taskyard.cli.control:cancel", "Cancel tasks, and all that wait for them."
    ),
    "move": LazyCommand(
        "taskyard.cli.control:move", "Put tasks into another lane, or another service."
    ),
    "expire": LazyCommand("taskyard.cli.control:expire", "Give up tasks, as if they were too old."),
    "pause": LazyCommand(
        "taskyard.cli.control:pause", "Give workers nothing more of a service, a lane, or at all."
    ),
    "resume": LazyCommand("taskyard.cli.control:resume", "Undo a pause."),
    "drain": LazyCommand(
        "taskyard.cli.control:drain", "Give workers no more tasks, and send them home."
    ),
    "broker": LazyCommand("taskyard.cli.broker:broker", "Run a broker in the foreground."),
    "worker": LazyCommand(
        "taskyard.cli.worker:worker", "Do the tasks of a broker, in the foreground."
    ),
    "relay": LazyCommand(
        "taskyard.cli.relay:relay", "Hand messages on between WMP workers and their managers."
    ),
    "rr": LazyCommand(
        "taskyard.cli.round_robin:rr",
        "Run a round-robin server, its workers and its clients, each with a prompt.",
    ),
    "config": LazyCommand(
        "taskyard.cli.config:config", "Show every setting, its value and where that came from."
    ),
    "keys": LazyCommand(
        "taskyard.cli.keys:keys", "Make keys for guests of a broker, list and revoke them."
    ),
    "journal": LazyCommand(
        "taskyard.cli.journal:journal", "Care for a state directory: check, export, compact."
    ),
    "pipeline": LazyCommand(
        "taskyard.cli.pipeline.group:pipeline",
        "Run bulk data work on Spark: campaigns in, history to tables, reports, planning, fleets.",
    ),
    "completion": LazyCommand(
        "taskyard.cli.completion:completion", "Print what lets a shell complete what is typed."
    ),
}
