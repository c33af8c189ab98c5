"""What can be said of a task on the command line: options, and the words of its command.

Each option is a key of a task in a file, read and checked by the same code; what was given becomes
a dict that `tasks.check` takes.
"""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from taskyard.campaign.task_spec import KEYS
from taskyard.campaign.values import InvalidValue, from_cell, shown
from taskyard.cli.completion import complete_name
from taskyard.cli.options import CliContext, CommandFunction
from taskyard.errors import UserError


class TaskKey(click.ParamType[object]):
    """The value of a task's key, as a cell of a table has it."""

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
    """`NAME=VALUE`."""

    name = "NAME=VALUE"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, sign, setting = value.partition("=")
        if not sign or not name:
            self.fail(f"must be NAME=VALUE, not {shown(value)}", param, ctx)
        return name, setting


_NAME: Final = TaskKey("name", "NAME")

#: An option, its type, and its line of help; all of them but `after` and `env` are given once.
_OPTIONS: Final[tuple[tuple[str, click.ParamType[Any], str], ...]] = (
    ("--cwd", TaskKey("cwd", "DIR"), "Where to run; where the worker was started if not given."),
    ("--slots", TaskKey("slots", "N"), "How much room it takes in its worker; 1 if not given."),
    ("--time-limit", TaskKey("time_limit", "DURATION"), "How long one attempt may run: 5m."),
    ("--backoff", TaskKey("backoff", "DURATION"), "The interval of --retries; 1s if not given."),
    (
        "--retries",
        TaskKey("retries", "N|LIST"),
        "How often to try again after a failure: 5, or multiples of the backoff: '[1, 2, 5]'.",
    ),
    ("--expiry", TaskKey("expiry", "TIME"), "No longer wanted after this time: 2h, or a date."),
    ("--due", TaskKey("due", "TIME"), "Not before this time: 10m, or 2031-05-04T12:00:00Z."),
    ("--priority", TaskKey("priority", "N"), "Higher goes first; 0 if not given."),
    ("--lane", TaskKey("lane", "LANE"), "One task of a lane is done at a time. {host} is a field."),
    ("--service", TaskKey("service", "SERVICE"), "The kind of worker that it needs."),
    ("--campaign", _NAME, "The campaign that it belongs to."),
)


_ENV: Final = click.option("--env", type=NameValue(), multiple=True, help="A variable. Repeatable.")
_AFTER: Final = click.option(
    "--after",
    type=_NAME,
    multiple=True,
    shell_complete=complete_name,
    help="Wait for a task. Repeatable.",
)
_WAIT_FOR_UNKNOWN: Final = click.option(
    "--wait-for-unknown",
    is_flag=True,
    help="Take --after of a task that is not submitted yet, and wait for it.",
)
_PAYLOAD: Final = click.option(
    "--payload",
    metavar="TEXT|@FILE",
    help="Send this to a worker of your own instead of running a command.",
)
_CALL: Final = click.option(
    "--call",
    type=TaskKey("call", "MODULE:FUNCTION"),
    help="Call this function; the words are its arguments, each as JSON.",
)
_BODY: Final = click.option("--payload", metavar="TEXT|@FILE", help="What all of them get.")


def task_options(command: CommandFunction) -> CommandFunction:
    """The options of a task, but for its name."""
    for flag, kind, text in _OPTIONS:
        command = click.option(flag, type=kind, help=text)(command)
    for option in (_ENV, _AFTER, _WAIT_FOR_UNKNOWN, _PAYLOAD, _CALL):
        command = option(command)
    return command


def bundle_options(command: CommandFunction) -> CommandFunction:
    """The same of tasks that are a payload: they run no command of ours."""
    for flag, kind, text in _OPTIONS:
        if flag != "--cwd":
            command = click.option(flag, type=kind, help=text)(command)
    for option in (_AFTER, _WAIT_FOR_UNKNOWN, _BODY):
        command = option(command)
    return command


def task_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a task that were given, without what it is to do."""
    plain = ("service", "lane", "priority", "due", "expiry", "retries", "backoff", "time_limit")
    raw = {key: values[key] for key in (*plain, "slots", "cwd") if values.get(key) is not None}
    if values["after"]:
        raw["after"] = list(values["after"])
    if values.get("env"):
        raw["env"] = dict(values["env"])
    return raw


def check_one_work(argv: tuple[str, ...], values: dict[str, Any]) -> None:
    """One thing to do."""
    if values["call"] is not None and values["payload"] is not None:
        raise UserError("give --call or --payload, not both")
    if values["payload"] is not None and argv:
        raise UserError(
            f"--payload goes without a command, and there is {shown(argv[0])}; leave one out"
        )
    if values["call"] is None and values["payload"] is None and not argv:
        raise UserError("say what to do: a command after --, or --call, or --payload")


def warn_unused_stdin(cli_context: CliContext, values: dict[str, Any], descriptor: int = 0) -> bool:
    """Warn that input at hand does not reach a command, and return whether that was needed. It may
    be a loop's: it is not read."""
    is_lost = values["call"] is None and values["payload"] is None and _has_input(descriptor)
    if is_lost:
        cli_context.info(
            "taskyard: warning: stdin is not passed to the task: name a file in the command, or "
            "add </dev/null to silence this"
        )
    return is_lost


def _has_input(descriptor: int) -> bool:
    """Whether a pipe has data, or a file is unread. A loop over a file has read some of it."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False  # it is closed
    if stat.S_ISFIFO(found.st_mode):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return any(events & select.POLLIN for _, events in poll.poll(0))
    is_file = stat.S_ISREG(found.st_mode) and found.st_size > 0
    return is_file and os.lseek(descriptor, 0, os.SEEK_CUR) == 0


def read_payload_option(values: str) -> bytes:
    """The bytes of --payload: a text, or what a file has."""
    if values.startswith("@"):
        return Path(values[1:]).read_bytes()
    return values.encode(errors="surrogateescape")


def parse_call_arguments(argv: tuple[str, ...]) -> list[object]:
    """The arguments of a call, each as JSON."""
    return [_json(number, word) for number, word in enumerate(argv, start=1)]


def _json(number: int, word: str) -> object:
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        text = msgspec.json.encode(word).decode(errors="replace")
        raise UserError(
            f"argument {number} of the call, {shown(word)}, is no JSON; write a text '{text}'"
        ) from None
