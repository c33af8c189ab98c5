"""The commands: how each is called, shown in help and imported, and the table of all.

To add a command, write it in a module and name it in `COMMANDS` as `module:attribute`, with its
summary, so that `taskyard --help` imports no command. The common options are accepted everywhere
and explained once, in the topic `connection`. Options of other programs are answered with ours.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from taskyard.cli.interrupts import raise_interrupts
from taskyard.cli.options import common_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from click.shell_completion import CompletionItem


#: Set in the context of a call by --help-all.
_ALL: Final = "taskyard.help.all"

#: The heading of options that are in no group.
_OTHER: Final = "Other options"


def _show_all(context: click.Context, _option: click.Parameter, given: bool) -> None:  # noqa: FBT001  # click's signature
    if given and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def _help_all() -> click.Option:
    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all
    )


#: Click's parentheses around a default, and the bounds of a number, in the help of an option.
_BOUNDS: Final = re.compile(r"; [\d<=>x]+\]$|  \[[\d<=>x]+\]$")
_PARENTHESES: Final = re.compile(r"default: \((.*)\)(?=[;\]])")


def help_record(option: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    """Return how an option is typed, and its help."""
    record = option.get_help_record(ctx)
    if record is None:
        return None
    text = _BOUNDS.sub(lambda found: "]" if found[0].startswith(";") else "", record[1])
    return record[0], _PARENTHESES.sub(r"default: \1", text)


class _WithCommonOptions(click.Command):
    """Adds the common options, and answers unknown options."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with common options that the command does not replace."""
        params = super().get_params(ctx)
        taken = {name for one in params for name in one.opts}
        common = [one for one in common_options() if not taken.intersection(one.opts)]
        return [*params, *common, _help_all()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. Answer a spelling of another program, or of an earlier version."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            answer = other_spelling(ctx.info_name or "", error.option_name)
            if answer is None:
                raise
            raise click.UsageError(f"{error.option_name}: {answer}", ctx) from None

    def format_common(self, ctx: click.Context, formatter: click.HelpFormatter, more: int) -> None:
        """Name the commands that explain the options which are not listed."""
        lines = ["Connection and output: taskyard help connection"]
        if more:
            options = "option" if more == 1 else "options"
            lines.insert(0, f"{more} more {options}: {ctx.command_path} --help-all")
        formatter.write_paragraph()
        for line in lines:
            formatter.write_text(line)


class Command(_WithCommonOptions):
    """A command whose help lists its options by subject."""

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401  # click's own signature
        groups: Mapping[str, Sequence[str]] | None = None,
        most: Sequence[str] = (),
        is_peer: bool = False,
        like: click.Command | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        """Make a command.

        `groups` has the names of the options under each heading, `most` the options of the short
        help. `is_peer`: an invitation is for the process itself, not for a client. `like` is a
        command that explains the other options, which mean the same there.
        """
        super().__init__(*arguments, **settings)
        self.groups = groups or {}
        self.most = most
        self.is_peer = is_peer
        self.like = like
        explained = {one.name for one in like.params} - {*most} if like else ()
        for one in self.params:
            if isinstance(one, click.Option) and one.name in explained:
                one.help = None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that most people need, or all, under their headings."""
        records = {
            str(one.name): record
            for one in (*self._explained(), *self.params)
            if isinstance(one, click.Option) and one.help and (record := help_record(one, ctx))
        }
        shown = [*records]
        if self.most and _ALL not in ctx.meta:
            shown = [name for name in shown if name in self.most]
        grouped = {name for names in self.groups.values() for name in names}
        rest = [name for name in records if name not in grouped]
        other = _OTHER if self.groups else "Options"
        for heading, names in {**self.groups, other: rest}.items():
            if rows := [records[name] for name in names if name in shown and name in records]:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        self.format_common(ctx, formatter, len(records) - len(shown))

    def _explained(self) -> list[click.Parameter]:
        """Return the options that another command explains."""
        names = {one.name for one in self.params}
        return [one for one in self.like.params if one.name in names] if self.like else []


class Group(_WithCommonOptions, click.Group):
    """A group whose commands accept the common options."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the group itself, and the list of commands."""
        own = [help_record(one, ctx) for one in self.params if isinstance(one, click.Option)]
        if rows := [one for one in own if one]:
            with formatter.section("Options"):
                formatter.write_dl(rows)
        self.format_commands(ctx, formatter)
        self.format_common(ctx, formatter, 0)


def usage_text(error: click.ClickException) -> str:
    """Return a usage error of click as `COMMAND: problem (hint)`, in one line."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    text = _problem(error)
    if context is None:
        return text
    path = context.command_path.removeprefix("taskyard").strip()
    subject = f"{path}: " if path else ""
    hint = "" if text.endswith("?)") else f" (see `{context.command_path} --help`)"
    return f"{subject}{text}{hint}"


def _problem(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).removesuffix(".")
    if isinstance(error, click.NoSuchOption):
        names = " or ".join(sorted(error.possibilities or ()))
        close = f" (did you mean {names}?)" if names else ""
        return f"unknown option {error.option_name}{close}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"missing {_name_of(error.param)}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        problem = _OUT_OF_RANGE.sub(_bounds, error.message).removesuffix(".")
        return f"{_name_of(error.param)}: {problem}"
    return text[:1].lower() + text[1:] if text[:2].istitle() else text


#: Click's text about a number.
_OUT_OF_RANGE: Final = re.compile(r"(\S+) is not in the range (?:(\d+)<=)?x(?:(<=|>=)(\d+))?\.?")


def _bounds(found: re.Match[str]) -> str:
    given, low, sign, high = found.groups()
    if sign == ">=" or high is None:
        return f"must be at least {high or low}, not {given}"
    return f"must be {f'from {low} to' if low else 'at most'} {high}, not {given}"


def _name_of(param: click.Parameter) -> str:
    """Return an option as it is typed, or an argument as the usage names it."""
    if isinstance(param, click.Option):
        return param.opts[-1] if param.opts[-1].startswith("--") else param.opts[0]
    return param.human_readable_name


#: Options of GNU parallel, xargs, sbatch, hq and earlier versions, with ours.
_ANYWHERE: Final = {
    "--halt": "use --max-failures N",
    "--halt-on-error": "use --max-failures 1",
    "--raw": "a pipe gets the exact bytes: `| cat`",
    "--bar": "use --progress",
    "--eta": "use --progress",
    "--delay": "use a service with `rate` in the settings (see docs/settings.md)",
    "--joblog": "use --output DIR, which has joblog.tsv",
    "--results": "use --output DIR",
    "--resume": "run the same command again: it resumes",
    "--resume-failed": "run the same command again: failed tasks are retried",
    "--retry-failed": "failed tasks are retried (--no-retry-failed leaves them)",
    "--keep-going": "all tasks run unless --max-failures is given",
    "--load": "use --cpus N for each task",
    "--memfree": "use --memory SIZE for each task",
    "--timelimit": "use --time-limit D",
    "--time": "use --time-limit D",
    "--crash-limit": "use --retries N",
    "--ntasks": "use -j N for the tasks at once",
    "--cpus-per-task": "use --cpus N",
    "--mem": "use --memory SIZE",
    "--mem-per-cpu": "use --memory SIZE",
    "--gres": "use --gpus N or --resource NAME=N",
    "--dependency": "use --after NAME",
    "--job-name": "use --name NAME or --campaign NAME",
    "--chdir": "use --cwd DIR",
    "--workdir": "use --cwd DIR",
    "--wd": "use --cwd DIR",
    "--export": "use --env NAME",
    "--begin": "use --due TIME",
    "--deadline": "use --expiry TIME",
    "--nice": "use --priority N, where higher runs first",
    "--partition": "use --service NAME",
    "--each-line": "use --lines FILE",
    "--from-json": "use --jsonl FILE",
    "--arg-file": "use --lines FILE, or :::: FILE after the command",
    "--max-procs": "use -j N",
    "--max-lines": "use -n N",
    "--delimiter": "lines end with a newline, or with -0 with NUL",
    "--sshlogin": "start `taskyard worker` on that machine (see docs/machines.md)",
    "--sshloginfile": "start `taskyard worker` on those machines (see docs/machines.md)",
    "--transfer": "name the files with --inputs on a shared file system",
    "--stream": "use --line-buffer",
    "--ungroup": "use --line-buffer",
    "--group": "the output of each task is printed together",
    "--xapply": "use :::+ before the list",
    "--link": "use :::+ before the list",
    "--bell": "use --notify 'printf \"\\a\" > /dev/tty'",
    "-S": "start `taskyard worker` on that machine (see docs/machines.md)",
    "-I": "write {} where the line goes",
    "-L": "use -n N",
    "-a": "use --lines FILE",
    "-d": "lines end with a newline, or with -0 with NUL",
    "-k": "results are in the order of the input already",
    "-u": "use --line-buffer",
    "-X": "use -n N",
    "-t": "use --dry-run to see the commands",
    "-r": "no task is made for empty input",
}

#: Spellings that mean something in one command only.
_IN_COMMAND: Final = {
    ("broker", "--memory"): "use --in-memory",
    ("down", "--timeout"): "use --grace D",
    ("drain", "--all"): "use --every-worker",
    ("lanes", "--all"): "a pipe gets all lanes: `taskyard lanes | less`",
    ("clean", "--all"): "use --every-file",
    ("submit", "--array"): "use `taskyard map --array` or `taskyard run --array`",
    ("submit", "-j"): "use `taskyard run -j N -- COMMAND`",
    ("submit", "--jobs"): "use `taskyard run -j N -- COMMAND`",
    ("up", "--slots"): "use -j N: slots of all workers",
    ("up", "--cpus"): "use --worker-cpus N",
    ("up", "--memory"): "use --worker-memory SIZE",
    ("up", "--gpus"): "use --worker-gpus N",
    ("up", "--resource"): "use --worker-resource NAME=N",
    ("up", "--no-page"): "use --page none",
    ("worker", "-j"): "use --slots N",
    ("worker", "--jobs"): "use --slots N",
}


def other_spelling(command: str, option: str) -> str | None:
    """Return what to use in place of an option that is unknown. None: no idea."""
    return _IN_COMMAND.get((command, option)) or _ANYWHERE.get(option)


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
    records = [help_record(one, context) for one in common_options()]
    with formatter.section("Options"):
        formatter.write_dl([one for one in records if one])
    return formatter.getvalue().rstrip()


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
        """Resolve a command name, with suggestions for an unknown name.

        Click suggests only imported commands, and here none is.
        """
        name = args[0] = _ALIASES.get(args[0], args[0])
        if name == "help" and ctx.parent is None:
            return name, help_command, args[1:]
        if name in self.lazy_commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        import difflib  # noqa: PLC0415  # only for misspelt commands

        close = self.suggestions.get(name) or difflib.get_close_matches(name, self.lazy_commands)
        kind = "option" if name.startswith("-") else "command"
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        return ctx.fail(f"unknown {kind} {name}{meant}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
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
    "join": LazyCommand(
        "taskyard.cli.keys:join", "Start what an invitation is for: a worker or a gateway."
    ),
    "wait": LazyCommand("taskyard.cli.wait:wait", "Wait until tasks have settled."),
    "watch": LazyCommand("taskyard.cli.task_list:watch", "Print events as they happen."),
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
    "retry": LazyCommand(
        "taskyard.cli.control:retry", "Retry failed tasks, and make delayed tasks due."
    ),
    "cancel": LazyCommand("taskyard.cli.control:cancel", "Cancel tasks and their dependents."),
    "top": LazyCommand(
        "taskyard.cli.web:top", "Show counters, lanes, workers, tasks and output in the terminal."
    ),
    "report": LazyCommand(
        "taskyard.cli.report:report", "Write an HTML report with charts, and tables."
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
        "Relay messages between peers on this machine and a broker on another machine.",
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
        "taskyard.cli.pipeline:pipeline", "Run Spark jobs: history, sweep, fleet.", _OPERATE
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

#: Commands of other programs, and what does the same here.
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
