"""Generate docs/reference.md: commands, exit codes, documents.

Reads the help of click's commands, and adds nothing to it. Links to subjects with their own page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Final

import click

from docs import schemas
from taskyard.cli.commands import help_record
from taskyard.cli.entry import taskyard as root
from taskyard.errors import ExitCode

#: The meaning of each exit code, as in operating.md.
EXIT_MEANINGS: Final = {
    ExitCode.OK: "success",
    ExitCode.TASK_FAILED: "some task failed, or waits behind a failure",
    ExitCode.USAGE: "usage or settings: an option, a file, a name, a state directory in use",
    ExitCode.NO_BROKER: "no broker",
    ExitCode.TIMED_OUT: "timed out",
    ExitCode.CANCELLED: "some task was cancelled, and none failed",
    ExitCode.STATE_DAMAGED: "the state is damaged, or writing to it failed",
    ExitCode.STORE_IN_USE: "another broker or command uses the store in PostgreSQL",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.OUTPUT_CLOSED: "the reader of the results of `map` has stopped, as `head` does",
}

_HEAD: Final = """# Reference

Generated from the code by `./yard docs`.

- [Commands](#commands): every command, its options, examples
- [Exit codes](#exit-codes)
- [Settings](settings.md#every-setting), on their own page
- [Errors](errors.md), their codes, causes and remedies, on their own page
- [JSON documents](#json-documents): the output of `--json`
- [Python](api.md): the names that programs import, on their own page

"""

_DOCUMENTS: Final = """## JSON documents

With `--json` a command prints one document on stdout (`watch`: one per line). It starts with
`version` and `document`, the name of the command. If the command fails, the last line on stderr is
the document `error`. The schemas are [JSON Schema](https://json-schema.org). A version may gain
fields. None is removed, and none changes its meaning.

| document | schema |
|---|---|
"""

#: Options of every verb, which are left out of each table.
_COMMON: Final = ("verbose", "quiet", "help", "config")


def page() -> str:
    """Return the page."""
    parts = [_HEAD, *_commands(), *_exit_codes(), *_documents()]
    return "".join(parts).rstrip() + "\n"


# Commands.


def _commands() -> Iterator[str]:
    yield "## Commands\n\nAll of them take `-h`, `-v` (show where an error came from, too)"
    yield " and `--config FILE`; most take `-q` (show no progress).\n\n"
    # Click keeps the first help option that it makes for a command.
    names = root.context_settings["help_option_names"]
    context = click.Context(root, info_name="taskyard", help_option_names=names)
    for command, below in _walk(root, context):
        yield from _command(command, below)


def _walk(
    group: click.Group, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield every command, and after a group its commands."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        below = click.Context(command, context, info_name=name)
        yield command, below
        if isinstance(command, click.Group):
            yield from _walk(command, below)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"### {context.command_path}\n\n```text\n{usage}\n```\n\n"
    yield _prose(inspect.cleandoc(command.help or ""))
    records = [*_options(command, context)]
    if records:
        yield "| option | |\n|---|---|\n"
        yield from (f"| `{_cell(names)}` | {_cell(text)} |\n" for names, text in records)
        yield "\n"
    if command.epilog:
        _, *lines = inspect.cleandoc(command.epilog.replace("\b", "")).strip().splitlines()
        yield "```text\n" + "".join(f"{line.strip()}\n" for line in lines) + "```\n\n"


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        record = help_record(parameter, context)
        if record is not None and record[1] and parameter.name not in _COMMON:
            yield record


def _prose(text: str) -> str:
    """Return a docstring as Markdown: one line per paragraph, unless click is to keep its lines."""
    paragraphs = text.replace("\f", "").split("\n\n")
    return "".join(f"{_paragraph(one)}\n\n" for one in paragraphs if one.strip())


def _paragraph(text: str) -> str:
    if text.startswith("\b"):
        kept = text.removeprefix("\b").strip("\n")
        return f"```text\n{kept}\n```"
    return re.sub(r"([<*])", r"\\\1", " ".join(text.split()))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# Exit codes and documents.


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n\nThey never change.\n\n| code | meaning |\n|---|---|\n"
    yield from (f"| {int(code)} | {meaning} |\n" for code, meaning in EXIT_MEANINGS.items())
    yield "\n"


def _documents() -> Iterator[str]:
    yield _DOCUMENTS
    for name in schemas.DOCUMENTS:
        file = schemas.file_name(name)
        shown = "any error" if name == "error" else f"`taskyard {name} --json`"
        yield f"| {shown} | [{file}](schemas/{file}) |\n"
    yield "\n"
