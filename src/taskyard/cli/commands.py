"""The table of commands, and a click group that imports a command only when it runs.

To add a command, write it in a module and name it here as `module:attribute`. Its
summary is here as well, so that `taskyard --help` imports no command. The order is that in which a
newcomer meets them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from taskyard.cli.command import Group
from taskyard.cli.interrupts import raise_interrupts

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: The headings of commands that few need every day.
_OPERATE: Final = "Operate"
_CHANGE: Final = "Change what waits"


class LazyCommand(NamedTuple):
    """An entry of a command table."""

    #: The click command, as `module:attribute`.
    target: str
    #: The line in the list of commands.
    summary: str
    #: The heading of its list.
    heading: str = "Commands"

    def load(self) -> click.Command:
        module_name, _, attribute = self.target.partition(":")
        command = getattr(import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is a {type(command).__name__}, not a click command")
        return command


class LazyGroup(Group):
    """A click group that imports a command when it is called, listed in the table's order."""

    def __init__(
        self,
        *arguments: object,
        lazy_commands: dict[str, LazyCommand],
        suggestions: dict[str, tuple[str, ...]] | None = None,
        **settings: object,
    ) -> None:
        """`suggestions` maps names that are no commands to commands that are meant."""
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]  # click's own signature
        self.lazy_commands = lazy_commands
        self.suggestions = suggestions or {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = self.lazy_commands.get(cmd_name)
        command = entry.load() if entry else None
        if not isinstance(command, LazyGroup):
            raise_interrupts()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command name, with suggestions for an unknown one.

        Click suggests only imported commands, and here none is.
        """
        name = args[0] = _ALIASES.get(args[0], args[0])
        if name == "help" and ctx.parent is None:
            from taskyard.cli.command import help_command  # noqa: PLC0415  # few need it

            return name, help_command, args[1:]
        if name in self.lazy_commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        import difflib  # noqa: PLC0415  # only for misspelt commands

        close = self.suggestions.get(name) or difflib.get_close_matches(name, self.lazy_commands)
        kind = "option" if name.startswith("-") else "command"
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        return ctx.fail(f"unknown {kind} {name}{meant}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete commands and options without importing the commands."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  # only for shell completion

        lazy_commands = [
            CompletionItem(name, help=entry.summary)
            for name, entry in self.lazy_commands.items()
            if name.startswith(incomplete)
        ]
        return lazy_commands + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Exit 0 on a broken pipe, where click would exit 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise click.exceptions.Exit(0) from None

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        headings = dict.fromkeys(entry.heading for entry in self.lazy_commands.values())
        for heading in headings:
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name, entry.summary)
                        for name, entry in self.lazy_commands.items()
                        if entry.heading == heading
                    ]
                )


#: Other names of commands. They are accepted, and not listed.
_ALIASES: Final = {"result": "results"}

COMMANDS: dict[str, LazyCommand] = {
    "demo": LazyCommand(
        "taskyard.cli.demo:demo", "Run a demonstration: a campaign, a broker crash and a report."
    ),
    "run": LazyCommand(
        "taskyard.cli.work:run",
        "Run a file of commands, values or one command, and print the outputs.",
    ),
    "map": LazyCommand(
        "taskyard.cli.work:map_rows",
        "Run a command for every line of stdin, or for lists of values.",
    ),
    "submit": LazyCommand(
        "taskyard.cli.work:submit", "Submit one task to a running broker, and print its name."
    ),
    "load": LazyCommand("taskyard.cli.work:load", "Load a file of tasks into a running broker."),
    "up": LazyCommand("taskyard.cli.up:up", "Run a broker, workers and a page until stopped."),
    "down": LazyCommand(
        "taskyard.cli.up:down", "Stop the broker and workers of a state directory."
    ),
    "join": LazyCommand("taskyard.cli.join:join", "Start what an invitation is for."),
    "wait": LazyCommand("taskyard.cli.wait:wait", "Wait until tasks have settled."),
    "watch": LazyCommand("taskyard.cli.watch:watch", "Print events as they happen."),
    "status": LazyCommand("taskyard.cli.inspect:status", "Count the tasks in each state."),
    "list": LazyCommand(
        "taskyard.cli.task_list:list_tasks", "List tasks in the order of submission, or sorted."
    ),
    "show": LazyCommand("taskyard.cli.task_list:show", "Show the details of a task."),
    "why": LazyCommand("taskyard.cli.inspect:why", "Explain the state of tasks or lanes."),
    "results": LazyCommand(
        "taskyard.cli.task_output:results", "Print the results of tasks or of a campaign."
    ),
    "log": LazyCommand(
        "taskyard.cli.task_output:log", "Print the output of a task, live while it runs."
    ),
    "retry": LazyCommand("taskyard.cli.control:retry", "Retry failed tasks, and delayed ones now."),
    "cancel": LazyCommand("taskyard.cli.control:cancel", "Cancel tasks and their dependents."),
    "top": LazyCommand(
        "taskyard.cli.web:top", "Show counters, lanes, workers, tasks and output in the terminal."
    ),
    "report": LazyCommand(
        "taskyard.cli.pipeline.report:report", "Write an HTML report with charts, and tables."
    ),
    "workers": LazyCommand("taskyard.cli.inspect:workers", "List the workers.", _OPERATE),
    "services": LazyCommand(
        "taskyard.cli.inspect:services",
        "List the services with their workers and waiting tasks.",
        _OPERATE,
    ),
    "lanes": LazyCommand(
        "taskyard.cli.inspect:lanes", "List the lanes and why they wait.", _OPERATE
    ),
    "broker": LazyCommand(
        "taskyard.cli.broker:broker", "Run a broker in the foreground.", _OPERATE
    ),
    "worker": LazyCommand(
        "taskyard.cli.worker:worker", "Run a worker in the foreground.", _OPERATE
    ),
    "relay": LazyCommand(
        "taskyard.cli.relay:relay",
        "Relay messages between peers on this machine and a broker on another one.",
        _OPERATE,
    ),
    "rr": LazyCommand(
        "taskyard.cli.round_robin:rr",
        "Run a round-robin server, worker or client with a prompt.",
        _OPERATE,
    ),
    "web": LazyCommand("taskyard.cli.web:web", "Serve a page about a state directory.", _OPERATE),
    "config": LazyCommand(
        "taskyard.cli.config:config",
        "Show every setting with its value and origin.",
        _OPERATE,
    ),
    "keys": LazyCommand("taskyard.cli.keys:keys", "Create, list and revoke access keys.", _OPERATE),
    "clean": LazyCommand(
        "taskyard.cli.clean:clean",
        "Remove long output, large arguments and large results of settled tasks.",
        _OPERATE,
    ),
    "journal": LazyCommand(
        "taskyard.cli.journal:journal", "Check, export or compact a state directory.", _OPERATE
    ),
    "store": LazyCommand(
        "taskyard.cli.journal:store", "Create a store in PostgreSQL, or move a state.", _OPERATE
    ),
    "failover": LazyCommand(
        "taskyard.cli.control:failover", "Hand over from the broker to its standby.", _OPERATE
    ),
    "pipeline": LazyCommand(
        "taskyard.cli.pipeline.group:pipeline", "Run Spark jobs: history, sweep, fleet.", _OPERATE
    ),
    "completion": LazyCommand(
        "taskyard.cli.scopes:completion", "Print a shell completion script.", _OPERATE
    ),
    "move": LazyCommand(
        "taskyard.cli.control:move", "Move tasks to another lane or service.", _CHANGE
    ),
    "edit": LazyCommand(
        "taskyard.cli.control:edit", "Change the priority and limits of tasks that wait.", _CHANGE
    ),
    "expire": LazyCommand(
        "taskyard.cli.control:expire", "Expire tasks, as if their expiry had passed.", _CHANGE
    ),
    "pause": LazyCommand(
        "taskyard.cli.control:pause",
        "Stop assigning tasks of a service, of a lane, or all tasks.",
        _CHANGE,
    ),
    "resume": LazyCommand("taskyard.cli.control:resume", "Undo a pause.", _CHANGE),
    "drain": LazyCommand(
        "taskyard.cli.control:drain",
        "Stop assigning tasks and shut workers down when they are idle.",
        _CHANGE,
    ),
}

#: Commands of other programs, with those of ours that do the same.
SUGGESTIONS: dict[str, tuple[str, ...]] = {
    "bundle": ("submit",),
    "abort": ("cancel",),
    "add": ("submit",),
    "delete": ("cancel",),
    "events": ("watch",),
    "exec": ("submit", "run", "map"),
    "info": ("status", "show"),
    "jobs": ("list",),
    "kill": ("cancel", "down"),
    "logs": ("log", "watch"),
    "ls": ("list",),
    "parallel": ("map",),
    "ps": ("list", "workers"),
    "queue": ("list", "status"),
    "rm": ("cancel",),
    "start": ("up", "run"),
    "stop": ("down", "cancel"),
    "tasks": ("list",),
    "version": ("--version",),
    "xargs": ("map",),
}
