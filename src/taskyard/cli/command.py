"""The command and the group of every verb: common options, two sizes of help, and usage errors.

A command lists its own options only. The common ones are accepted everywhere and explained once,
in the topic `connection`. `--help` shows the options that most people need, `--help-all` all.
A table has the options of other programs and of earlier versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.options import common_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Set in the context of a call by --help-all.
_ALL: Final = "taskyard.help.all"

#: A command with more options than this shows only those that most people need.
OPTIONS_SHOWN_MAX: Final = 10

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


class _WithCommonOptions(click.Command):
    """Adds the common options, and answers unknown ones."""

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
            lines.insert(0, f"{more} more options: {ctx.command_path} --help-all")
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
            if isinstance(one, click.Option) and one.help and (record := one.get_help_record(ctx))
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
        own = [one.get_help_record(ctx) for one in self.params if isinstance(one, click.Option)]
        if rows := [one for one in own if one]:
            with formatter.section("Options"):
                formatter.write_dl(rows)
        self.format_commands(ctx, formatter)
        self.format_common(ctx, formatter, 0)


def usage_text(error: click.ClickException) -> str:
    """Return a usage error of click as `COMMAND: problem (see ...)`, in one line."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    text = _problem(error)
    if context is None:
        return text
    path = context.command_path.removeprefix("taskyard").strip()
    subject = f"{path}: " if path else ""
    return f"{subject}{text} (see `{context.command_path} --help`)"


def _problem(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).removesuffix(".")
    if isinstance(error, click.NoSuchOption):
        names = " or ".join(sorted(error.possibilities or ()))
        close = f" (did you mean {names}?)" if names else ""
        return f"unknown option {error.option_name}{close}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"missing {_name_of(error.param)}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"{_name_of(error.param)}: {error.message.removesuffix('.')}"
    return text[:1].lower() + text[1:] if text[:2].istitle() else text


def _name_of(param: click.Parameter) -> str:
    """Return an option as it is typed, or an argument as the usage names it."""
    if isinstance(param, click.Option):
        return param.opts[-1] if param.opts[-1].startswith("--") else param.opts[0]
    return param.human_readable_name


#: Options of GNU parallel, xargs, sbatch, hq and earlier versions, with ours.
_ANYWHERE: Final = {
    "--halt": "use --max-failures N",
    "--halt-on-error": "use --max-failures 1",
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
    ("lanes", "--all"): "use --every-lane",
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
    records = [one.get_help_record(context) for one in common_options()]
    with formatter.section("Options"):
        formatter.write_dl([one for one in records if one])
    return formatter.getvalue().rstrip()
