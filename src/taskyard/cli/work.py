"""The commands that make tasks: `run`, `map`, `load` and `submit`.

They have one set of options, which `run` explains. `map`, `load` and `submit` are thin names with
other defaults. Owns the options and the choice of what is run, which other modules do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.campaign.formats import Format
from taskyard.cli.commands import Command
from taskyard.cli.daemon_options import service_options
from taskyard.cli.input_rows import SEPARATORS, input_options
from taskyard.cli.output import example, output_option
from taskyard.cli.run_report import run_policy_options
from taskyard.cli.scopes import complete_campaign
from taskyard.cli.task_options import TaskKey, default_options, task_options
from taskyard.errors import ExitCode, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.cli.options import CliContext, CommandFunction

#: The headings of the help.
_GROUPS: Final = {
    "Input": (
        *("lines", "csv", "jsonl", "array", "null", "colsep", "max_args", "pipe", "block", "stdin"),
        *("json_lines", "form", "shell", "skip_bad", "replay", "speedup", "spark", "rejects"),
        *("to", "to_file", "name", "campaign", "dry_run", "wait"),
    ),
    "Each task": (
        *("cpus", "memory", "gpus", "resources", "slots", "time_limit", "retries", "backoff"),
        *("final_exit_status", "cwd", "env", "env_all", "no_env", "inputs", "outputs", "after"),
        *("after_campaign", "wait_for_unknown", "lane", "service", "priority", "due", "expiry"),
        *("call", "payload"),
    ),
    "Output": (
        *("output", "tag", "keep_order", "line_buffer", "quiet_output", "progress"),
        "report",
    ),
    "When to stop": (
        *("max_failures", "timeout", "finish_running", "no_retry_failed", "retry_failed_only"),
        "notify",
    ),
    "Workers, if no broker is running": (
        *("jobs", "workers", "worker_cpus", "worker_memory", "worker_gpus", "worker_resources"),
        *("allow", "allow_pickle"),
    ),
}

#: Runs a value as a shell command. A value that is the script itself can't be a template.
_SHELL_COMMAND: Final = ("/bin/sh", "-c", 'eval "$1"', "sh", "{}")

#: Where --shell is kept until --format is read.
_SHELL: Final = "taskyard.cli.shell"


def _read_shell(context: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001  # click's order
    context.meta[_SHELL] = value


def _read_format(context: click.Context, _: click.Parameter, value: str | None) -> Format | None:
    form = Format(value) if value else None
    if not context.meta.get(_SHELL):
        return form
    if form not in (None, Format.SHELL):
        raise UserError(f"--shell and --format {value} exclude each other")
    return Format.SHELL


#: Of campaigns in files.
_FILE: Final = (
    click.option(
        "--format",
        "form",
        type=click.Choice([one.value for one in Format]),
        callback=_read_format,
        help="Format of FILE. Detected if omitted.",
    ),
    click.option(
        "--shell",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_read_shell,
        help="FILE has a shell command per line. Short for --format shell.",
    ),
    click.option(
        "--skip-bad",
        is_flag=True,
        help="Skip bad lines of FILE, and write them to a file beside it.",
    ),
    click.option(
        "--replay", is_flag=True, help="WfCommons: sleep for the recorded run time of each task."
    ),
    click.option("--speedup", type=float, metavar="N", help="With --replay: N times as fast."),
)
_SPARK: Final = (
    click.option(
        "--spark",
        metavar="MASTER",
        help="Check and submit with Spark on this master, as in local[*]. FILE may be a pattern "
        "or a directory.",
    ),
    click.option(
        "--rejects",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="With --spark: JSONL file for bad rows. Beside each input file if omitted.",
    ),
)
_DRY_RUN: Final = click.option(
    "--dry-run", is_flag=True, help="Check the input, print what would run, and run nothing."
)


def _wait_option(*, default: bool) -> Callable[[CommandFunction], CommandFunction]:
    return click.option(
        "--wait/--no-wait",
        default=default,
        help="Wait for the tasks, or only submit them to a running broker.",
    )


_RETRY: Final = (
    click.option(
        "--no-retry-failed", is_flag=True, help="Don't retry tasks that failed in an earlier run."
    ),
    click.option(
        "--retry-failed-only",
        is_flag=True,
        help="Only retry the failed tasks of the campaign, and wait for them. Submit nothing.",
    ),
)
_OUTPUT: Final = (
    click.option(
        "--keep-order/--as-completed",
        default=True,
        help="Print outputs in the order of the input or as tasks settle.",
    ),
    click.option(
        "--tag", is_flag=True, help="Begin every line of output with its input and a tab."
    ),
    click.option(
        "--line-buffer", is_flag=True, help="Print lines of running tasks as they arrive."
    ),
)
_QUIET_OUTPUT: Final = click.option(
    "--quiet-output", is_flag=True, help="Print no outputs, only the summary."
)
_REPORT: Final = click.option(
    "--report",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write an HTML report of the campaign to DIR at the end, as `taskyard report` does.",
)


_TASK_NAME: Final = click.option(
    "--name", type=TaskKey("name", "NAME"), help="Name of the task. Generated if omitted."
)


def _add(command: CommandFunction, options: Sequence[Any]) -> CommandFunction:
    for option in reversed(options):
        command = option(command)
    return command


def _row_options(command: CommandFunction) -> CommandFunction:
    """Add the options of tasks that are made of lines or values, and run until they settle."""
    more = (_DRY_RUN, _wait_option(default=True), *_OUTPUT, _QUIET_OUTPUT, output_option)
    last = (service_options, *_RETRY, run_policy_options, task_options)
    return _add(command, (input_options, *more, *last))


class _RunCommand(Command):
    """A command whose options end at `--` or at a list of values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words from `--` or `:::` on, which are a command and its lists."""
        ends = [index for index, word in enumerate(args) if word == "--" or word in SEPARATORS]
        end = min(ends, default=len(args))
        ctx.meta["taskyard.cli.commands"] = tuple(args[end + (args[end:][:1] == ["--"]) :])
        ctx.meta["taskyard.cli.has_command"] = args[end:][:1] == ["--"]
        return super().parse_args(ctx, args[:end])


@click.command(
    cls=_RunCommand,
    groups=_GROUPS,
    most=(
        *("jobs", "campaign", "dry_run", "retries", "time_limit", "cpus", "memory", "output"),
        *("quiet_output", "max_failures"),
    ),
    epilog=example(
        "run cmds.txt",
        "run workflow.jsonl -j 4 --quiet-output",
        "run -- gzip -k {} ::: *.txt",
        "run --csv jobs.csv --campaign week-7 -- resize {file} --width {width}",
        "run -- make all",
    ),
)
@click.argument("files", nargs=-1, metavar="[FILE... | ::: VALUE... | -- COMMAND...]")
@_row_options
@lambda command: _add(command, (*_FILE, _REPORT, _TASK_NAME))
@click.pass_context
def run(context: click.Context, /, files: tuple[str, ...], **values: Any) -> ExitCode:  # noqa: ANN401  # the options above
    """Run a file of commands, values or one command, and print the outputs.

    FILE has a shell command per line, or a campaign in another format. - is stdin. Each file is a
    campaign of its name, and cmds.txt:500 names the task of its line 500. With -- COMMAND, one
    task, or one for each value after ::: and each line of --lines, --csv and --jsonl: {} is the
    value (see `taskyard map --help`). ::: alone has a shell command in each value. These tasks
    belong to no campaign unless --campaign is given.

    Waits until all tasks have settled. Outputs are in the order of the input. Uses the broker that
    runs on the state directory, or starts its own with workers and stops them at the end.

    Run it again with the same --state to resume, after Ctrl-C or a crash: done tasks are kept,
    failed ones are retried. Options of tasks are defaults for tasks of FILE that set none.

    Exit 0 if all tasks are done, 1 if one failed, 5 if some were cancelled and none failed.
    """
    words: tuple[str, ...] = context.meta["taskyard.cli.commands"]
    cli_context: CliContext = context.obj
    if context.meta["taskyard.cli.has_command"]:
        if files:
            raise click.UsageError(f"{files[0]}: FILE and -- COMMAND exclude each other")
        return _run_command(cli_context, words, values)
    if words and files:
        raise click.UsageError(f"{files[0]}: write -- before a command: run -- {files[0]} …")
    if words:
        return _run_command(cli_context, (*_SHELL_COMMAND, *words), values)
    if not files:
        raise click.UsageError("missing FILE (or give -- COMMAND, or ::: VALUES)")
    _refuse(context, (*_OF_ROWS, "name"), "needs -- COMMAND, not FILE")
    return _run_files(cli_context, files, values)


#: Options that a file excludes, and options that only a file has.
_OF_ROWS: Final = (
    *("lines", "csv", "jsonl", "array", "null", "colsep", "max_args", "json_lines", "pipe"),
    *("block", "stdin", "call", "payload", "after", "inputs", "outputs"),
)
_OF_FILES: Final = ("form", "skip_bad", "replay", "speedup", "report")


def _refuse(context: click.Context, names: Sequence[str], reason: str) -> None:
    """Raise `UserError` if an option of these names is given."""
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name in names and source is click.core.ParameterSource.COMMANDLINE:
            raise UserError(f"{option.opts[-1]}: {reason}")


def _run_command(
    cli_context: CliContext, words: tuple[str, ...], values: dict[str, Any]
) -> ExitCode:
    """Run one command, or one for each value or row."""
    _refuse(click.get_current_context(), _OF_FILES, "needs FILE")
    from taskyard.cli import map as rows  # noqa: PLC0415  # not needed by `--help`

    has_rows = any(values[key] is not None for key in ("lines", "csv", "jsonl", "array"))
    has_rows = has_rows or values["pipe"] or any(word in SEPARATORS for word in words)
    if values["pipe"] and values["lines"] is None:
        raise UserError("--pipe: needs --lines FILE (`taskyard map --pipe` reads stdin)")
    if has_rows and values["name"] is not None:
        raise UserError("--name: names one task (give --campaign for tasks of values or lines)")
    return rows.run_rows(
        cli_context, words, values, rows.RowDoor(is_one=not has_rows, name=values["name"])
    )


def _run_files(cli_context: CliContext, files: Sequence[str], values: dict[str, Any]) -> ExitCode:
    if values["dry_run"] or not values["wait"]:
        return _load_files(cli_context, files, values)
    from taskyard.cli.run import run_files  # noqa: PLC0415

    return run_files(cli_context, files, values)


def _load_files(cli_context: CliContext, files: Sequence[str], values: dict[str, Any]) -> ExitCode:
    """Load files into a running broker, or only check them. Each is a campaign."""
    from taskyard.cli.submit import load_file  # noqa: PLC0415  # not needed by `--help`

    if len(files) > 1 and values["campaign"] is not None:
        raise UserError(f"--campaign: needs one FILE, but there are {len(files)}")
    return max(load_file(cli_context, file, values) for file in files)


@click.command(
    "map",
    cls=Command,
    like=run,
    groups=_GROUPS,
    most=(
        *("lines", "csv", "jobs", "campaign", "dry_run", "tag", "output", "retries"),
        *("time_limit", "max_failures"),
    ),
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
    epilog=example(
        "map gzip -k ::: *.txt",
        "map --lines photos.txt -- convert {} {.}.png",
        "map --csv jobs.csv --campaign week-7 -- resize {file} --width {width}",
        "map ./simulate --seed {1} --size {2} ::: 1 2 3 ::: small large",
        "map --pipe -- wc -l < access.log",
    ),
)
@click.argument("argv", nargs=-1, metavar="[--] COMMAND... [::: VALUE...]...")
@_row_options
@click.pass_obj
def map_rows(cli_context: CliContext, /, argv: tuple[str, ...], **values: Any) -> ExitCode:  # noqa: ANN401  # the options above
    """Run a command for every line of stdin, or for lists of values.

    It is `taskyard run -- COMMAND`, with stdin as the input if no other is given.

    \b
    {}   the line, or all values       {1} {2} {-1}  a value: first, second, last
    {#}  its number                    {column}      a column or field
    {.}  the line without extension    {//}          its directory
    {/}  its base name                 {/.}          base name without extension

    {1/} is a part of a value. {{name}} is a literal {name}. Any other {name} is an error. Other
    braces, as in awk '{print $1}', are left alone. --lane, --cwd, --env, --after,
    --inputs and --outputs take templates too. Without a template the line or the values are
    appended.

    ::: VALUES and :::: FILES after the command are lists, as in GNU parallel: several give all
    combinations, :::+ and ::::+ link a list to the one before.

    With --campaign, a line is recognised by its text: add, remove or reorder lines, run it again,
    and only new lines run, and those whose tasks failed or were cancelled.
    """  # noqa: D301  # click's mark for lines that it keeps
    from taskyard.cli import map as rows  # noqa: PLC0415  # not needed by `--help`

    door = rows.RowDoor(makes_campaign=True, prints_tasks=True)
    return rows.run_rows(cli_context, argv, values, door)


@click.command(
    cls=Command,
    like=run,
    groups=_GROUPS,
    most=(
        *("dry_run", "campaign", "wait", "form", "skip_bad", "spark", "cpus", "memory", "slots"),
        "env",
    ),
    epilog=example(
        "load cmds.txt --dry-run",
        "load campaign.jsonl --wait",
        "load workflow.json --replay --speedup 100",
        "load 'campaigns/*.jsonl.gz' --campaign november --spark 'local[*]'",
    ),
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@lambda command: _add(command, (_DRY_RUN, _wait_option(default=False), *_FILE, *_SPARK))
@default_options
@click.pass_context
def load(context: click.Context, /, files: tuple[str, ...], **values: Any) -> ExitCode:  # noqa: ANN401  # the options above
    """Load a file of tasks into a running broker.

    It is `taskyard run FILE --no-wait`, and prints counts.

    Reads shell commands, one per line, or JSONL, CSV, Parquet, WfCommons, dwork's comma lines or a
    transport control file of ZMailer. The format is detected by the file's suffix or first lines.
    - is stdin. The whole file is checked first. If a line is rejected, the command prints
    `FILE:LINE: reason`, submits nothing and exits 2. Loading the same file again has no effect.
    """
    if values["spark"] is not None:
        from taskyard.cli.spark_load import load_with_spark  # noqa: PLC0415  # an extra

        _refuse(context, ("wait", *_TERMS), "can't be used with --spark")
        return load_with_spark(context.obj, files, values)
    if values["rejects"] is not None:
        raise UserError("--rejects: needs --spark")
    return _load_files(context.obj, files, values)


#: Options that are defaults for the tasks of a file.
_TERMS: Final = (
    *("cpus", "memory", "gpus", "resources", "slots", "time_limit", "retries", "backoff", "env"),
    *("final_exit_status", "cwd", "lane", "service", "priority", "due", "expiry"),
)


@click.command(
    cls=Command,
    like=run,
    groups=_GROUPS,
    most=(
        *("name", "campaign", "wait", "after", "cpus", "memory", "retries", "time_limit"),
        *("due", "priority"),
    ),
    context_settings={"allow_interspersed_args": False},
    epilog=example(
        "submit --name a --retries 3 -- convert a.png a.jpg",
        "submit --after a --wait -- wc -c a.jpg",
        "submit --call imaging:thumbnail '\"a.png\"' 200",
        "submit --service smtp --to-file people.csv --lane '{host}' --payload @news.txt",
    ),
)
@click.argument("argv", nargs=-1, metavar="[--] COMMAND...")
@_TASK_NAME
@click.option(
    "--to",
    multiple=True,
    metavar="RECIPIENT",
    help="The same --payload for this recipient, in a task of its own. Repeatable.",
)
@click.option(
    "--to-file",
    metavar="FILE",
    help="Recipients: one per line, per row of a .csv or per object of a .jsonl file. - is stdin.",
)
@_wait_option(default=False)
@click.option(
    "--after-campaign",
    type=TaskKey("name", "NAME"),
    multiple=True,
    shell_complete=complete_campaign,
    help="Run after all tasks of this campaign that have not ended yet. Repeatable.",
)
@output_option
@task_options
@click.pass_obj
def submit(cli_context: CliContext, /, argv: tuple[str, ...], **values: Any) -> ExitCode:  # noqa: ANN401  # the options above
    """Submit one task to a running broker, and print its name.

    It is `taskyard run --no-wait -- COMMAND`. The command runs without a shell and with empty
    stdin. The name is printed once the broker has written the task to disk. Submitting the same
    command again under the same name has no effect.

    With --wait, prints the task's stdout or return value. Exit 0 if the task is done, 1 if it
    failed or is behind a failure, 5 if it was cancelled.

    With --to and --to-file, submits --payload for many recipients (fan-out). Each recipient gets a
    task, NAME/0, NAME/1 and so on, in its own lane: --lane is a template of {recipient}, or of the
    fields of a row or object. The payload is sent and stored once, as a JSON object with "body" and
    "recipients". The campaign has the name of the bundle unless --campaign is given.
    """
    if values["to"] or values["to_file"] is not None:
        from taskyard.cli.submit import submit_bundle  # noqa: PLC0415

        return submit_bundle(cli_context, argv, values)
    from taskyard.cli.submit import submit_task  # noqa: PLC0415

    return submit_task(cli_context, argv, values)
