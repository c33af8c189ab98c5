"""Options that describe a task.

Each option is a key of a task in a campaign file and is parsed by the same code. The values become
a dict for `check_task`.
"""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from taskyard.campaign.task_spec import KEYS
from taskyard.campaign.values import InvalidValue, from_cell, shown
from taskyard.cli.options import CliContext, CommandFunction
from taskyard.cli.scopes import OnceOption, complete_name
from taskyard.core.model import Refusal
from taskyard.errors import Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.discovery import Variables


class TaskKey(click.ParamType[object]):
    """The value of a task key, written as in a table cell."""

    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.name = name

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        try:
            raw = from_cell(self.key, value)
            if raw is None:
                self.fail("must not be empty", param, ctx)
            KEYS[self.key][1](raw)
        except InvalidValue as bad:
            self.fail(str(bad), param, ctx)
        return raw


class NameValue(click.ParamType[tuple[str, str]]):
    """A pair `NAME=VALUE`."""

    name = "NAME=VALUE"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, sign, setting = value.partition("=")
        if not sign or not name:
            self.fail(f"expected NAME=VALUE, got {shown(value)}", param, ctx)
        return name, setting


class Variable(click.ParamType[tuple[str, str | None]]):
    """An environment variable: `NAME`, or `NAME=VALUE`."""

    name = "NAME[=VALUE]"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str | None]:
        name, sign, setting = value.partition("=")
        if not name:
            self.fail(f"expected {self.name}, got {shown(value)}", param, ctx)
        return name, setting if sign else None


class CampaignName(TaskKey):
    """The name of a campaign, in which `/` would end it."""

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        if "/" in value:
            self.fail(f"must not contain /, but is {shown(value)}", param, ctx)
        return super().convert(value, param, ctx)


_NAME: Final = TaskKey("name", "NAME")

#: The options that are not repeatable: name, type and help.
_OPTIONS: Final[tuple[tuple[str, click.ParamType[Any], str], ...]] = (
    ("--cwd", TaskKey("cwd", "DIR"), "Working directory of the command."),
    ("--gpus", TaskKey("gpus", "N"), "GPUs that the task needs, as in 2 or 0.5."),
    (
        "--memory",
        TaskKey("memory", "SIZE"),
        "Memory that the task needs, as in 512M or 4G. It is killed if it uses more.",
    ),
    ("--cpus", TaskKey("cpus", "N"), "Cores that the task needs, as in 2 or 0.5."),
    (
        "--slots",
        TaskKey("slots", "N"),
        "Slots that the task takes of its worker. For the number of tasks at once, use -j.",
    ),
    (
        "--time-limit",
        TaskKey("time_limit", "DURATION"),
        "Maximum run time of an attempt, as in 5m.",
    ),
    ("--backoff", TaskKey("backoff", "DURATION"), "Interval between retries."),
    (
        "--retries",
        TaskKey("retries", "N|LIST"),
        "Number of retries, or a list of delays in multiples of --backoff: '[1, 2, 5]'.",
    ),
    (
        "--expiry",
        TaskKey("expiry", "TIME"),
        "Fail the task if it still waits then: 2h, or a date.",
    ),
    ("--due", TaskKey("due", "TIME"), "Earliest start: 10m, or 2031-05-04T12:00:00Z."),
    ("--priority", TaskKey("priority", "N"), "Higher runs first."),
    (
        "--lane",
        TaskKey("lane", "LANE"),
        "Tasks of a lane run one at a time. {host} is replaced by a field.",
    ),
    ("--service", TaskKey("service", "SERVICE"), "Service that the worker must offer."),
    (
        "--campaign",
        CampaignName("name", "NAME"),
        "Name of the campaign, to resume it, to add to it or to retry it.",
    ),
)

#: Defaults that apply to omitted options, for the help.
_DEFAULTS: Final = {
    "--cwd": "the current directory, over TCP the worker's",
    "--slots": "1",
    "--backoff": "1s",
    "--priority": "0",
}


def _choose_variables(
    context: click.Context, option: click.Parameter, given: object
) -> dict[str, str]:
    """Store which variables are passed on. Return those that have a value."""
    cli_context = context.ensure_object(CliContext)
    pairs = given if isinstance(given, tuple) else ()
    names = [name for name, value in pairs if value is None]
    choice: Variables = names or None
    if given is True:
        choice = option.name == "env_all"
    if choice is not None:
        if cli_context.variables is not None:
            raise click.UsageError("--env NAME, --env-all and --no-env exclude each other")
        cli_context.variables = choice
    return {name: value for name, value in pairs if value is not None}


_ENV: Final = click.option(
    "--env",
    type=Variable(),
    multiple=True,
    callback=_choose_variables,
    help="Set a variable of the command, or pass on yours of this name. Repeatable.",
)
_ENV_ALL: Final = click.option(
    "--env-all",
    is_flag=True,
    expose_value=False,
    callback=_choose_variables,
    help="Pass on all your variables, not only PATH, HOME and the like.",
)
_NO_ENV: Final = click.option(
    "--no-env",
    is_flag=True,
    expose_value=False,
    callback=_choose_variables,
    help="Pass on no variables: commands get the variables of their worker.",
)
_PATH: Final = TaskKey("cwd", "FILE")
_INPUTS: Final = click.option(
    "--inputs",
    type=_PATH,
    multiple=True,
    help="File that the command needs. The task fails if it is missing. Repeatable.",
)
_OUTPUTS: Final = click.option(
    "--outputs",
    type=_PATH,
    multiple=True,
    help="File that the command makes. If all are newer than the inputs, it does not run. "
    "Repeatable.",
)
_FINAL_EXIT_STATUS: Final = click.option(
    "--final-exit-status",
    type=TaskKey("final_exit_status", "N"),
    multiple=True,
    help="Don't retry the command after this exit status. Repeatable.",
)
_RESOURCE: Final = click.option(
    "--resource",
    "resources",
    type=NameValue(),
    multiple=True,
    help="Amount of another resource that the task needs, as in license=1. Repeatable.",
)
_AFTER: Final = click.option(
    "--after",
    type=_NAME,
    multiple=True,
    shell_complete=complete_name,
    help="Run after this task. Repeatable.",
)
_WAIT_FOR_UNKNOWN: Final = click.option(
    "--wait-for-unknown",
    is_flag=True,
    help="Accept --after of a task that is not submitted yet.",
)
_PAYLOAD: Final = click.option(
    "--payload",
    metavar="TEXT|@FILE",
    help="Payload for a worker of your own, instead of a command.",
)
_CALL: Final = click.option(
    "--call",
    type=TaskKey("call", "MODULE:FUNCTION"),
    help="Call this function. The arguments are JSON values.",
)


def _plain_option(
    flag: str, kind: click.ParamType[Any], text: str
) -> Callable[[CommandFunction], CommandFunction]:
    """Return an option of `_OPTIONS`. A task has one campaign, so a second campaign is refused."""
    cls = OnceOption if flag == "--campaign" else click.Option
    return click.option(flag, cls=cls, type=kind, help=text, show_default=_DEFAULTS.get(flag))


def task_options(command: CommandFunction) -> CommandFunction:
    """Add the options of a task except its name."""
    for option in (_OUTPUTS, _INPUTS, _AFTER, _PAYLOAD, _CALL):
        command = option(command)
    return default_options(command)


def default_options(command: CommandFunction) -> CommandFunction:
    """Add the options that may be defaults of the tasks of a file."""
    for flag, kind, text in _OPTIONS:
        command = _plain_option(flag, kind, text)(command)
    variables = (_NO_ENV, _ENV_ALL, _ENV)
    for option in (_RESOURCE, _FINAL_EXIT_STATUS, *variables, _WAIT_FOR_UNKNOWN):
        command = option(command)
    return command


def task_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the given keys of a task except the keys that define its work."""
    plain = ("service", "lane", "priority", "due", "expiry", "retries", "backoff", "time_limit")
    sizes = ("slots", "cpus", "memory", "gpus")
    raw = {key: values[key] for key in (*plain, *sizes, "cwd") if values.get(key) is not None}
    if values.get("resources"):
        raw["resources"] = dict(values["resources"])
    for key in ("after", "inputs", "outputs"):
        if values.get(key):
            raw[key] = list(values[key])
    if values.get("final_exit_status"):
        raw["final_exit_status"] = [one for given in values["final_exit_status"] for one in given]
    if values.get("env"):
        raw["env"] = values["env"]
    return raw


def check_one_work(argv: tuple[str, ...], values: dict[str, Any]) -> None:
    """Raise `UserError` unless there is exactly one of command, --call and --payload."""
    if values["call"] is not None and values["payload"] is not None:
        raise UserError("--call and --payload exclude each other")
    if values["payload"] is not None and argv:
        raise UserError(f"--payload excludes a command, but {shown(argv[0])} is given")
    if values["call"] is None and values["payload"] is None and not argv:
        raise UserError("missing work: give a command after --, or --call or --payload")


def warn_unused_stdin(cli_context: CliContext, values: dict[str, Any], descriptor: int = 0) -> bool:
    """Warn if unread input will not reach the command. Return whether it warned.

    The input is not read, because it may belong to a shell loop.
    """
    is_lost = values["call"] is None and values["payload"] is None and _has_input(descriptor)
    if is_lost:
        cli_context.info(
            "taskyard: warning: stdin is not passed to the task: name a file in the command, or "
            "add </dev/null to silence this"
        )
    return is_lost


def _has_input(descriptor: int) -> bool:
    """Return whether a pipe has data or a file is at its beginning. A loop has read some of its
    file.
    """
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False  # stdin is closed
    if stat.S_ISFIFO(found.st_mode):
        return is_readable(0, descriptor, select.POLLIN)
    is_file = stat.S_ISREG(found.st_mode) and found.st_size > 0
    return is_file and os.lseek(descriptor, 0, os.SEEK_CUR) == 0


def is_readable(seconds: float, descriptor: int = 0, wanted: int = ~0) -> bool:
    """Return whether a read returns soon: there are bytes, or the end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(events & wanted for _, events in poll.poll(seconds * 1000))


def read_payload_option(values: str) -> bytes:
    """Return the bytes of --payload, read from a file if it starts with @."""
    if values.startswith("@"):
        return Path(values[1:]).read_bytes()
    return values.encode(errors="surrogateescape")


def parse_call_arguments(argv: tuple[str, ...]) -> list[object]:
    """Decode the JSON arguments of a call."""
    return [_json(number, word) for number, word in enumerate(argv, start=1)]


def _json(number: int, word: str) -> object:
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        text = msgspec.json.encode(word).decode(errors="replace")
        raise UserError(
            f"argument {number} of the call: {shown(word)} is not valid JSON (a string is "
            f"written '{text}')"
        ) from None


def explain_refusal(
    refused: Refused, subject: str, options: dict[str, Any], name_option: str
) -> Refused:
    """Return a refusal with the option that avoids it.

    `subject` is the thing whose name may be in use, and `name_option` gives it another name.
    """
    if refused.code == Refusal.CONFLICT.value:
        work = next(
            (kind for kind in ("call", "payload") if options.get(kind) is not None), "command"
        )
        text = f"{subject}: exists with another {work} or campaign (give another {name_option})"
    elif refused.code == Refusal.UNKNOWN.value and refused.names:
        text = f"{refused}; --wait-for-unknown accepts it"
    else:
        return refused
    return Refused(text, refused.code, refused.names)
