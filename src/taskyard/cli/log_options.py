"""The log options of daemons, and the start of their logs."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.options import CliContext, CommandFunction, SettingOption, store_option
from taskyard.process.logs import (
    FORMATS,
    LEVELS,
    LineFormatter,
    LogWriter,
    RotatedFile,
    Rotation,
    StderrSink,
    captured_stderr,
    level_number,
    start_log,
    stop_log,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The hidden ones are for supervisors. Users have TASKYARD_LOG_FORMAT and TASKYARD_LOG_LEVEL.
_OPTIONS: Final = (
    click.option(
        "--log-format",
        type=click.Choice(FORMATS),
        cls=SettingOption,
        envvar="TASKYARD_LOG_FORMAT",
        expose_value=False,
        callback=store_option("log_format"),
        hidden=True,
    ),
    click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        cls=SettingOption,
        envvar="TASKYARD_LOG_LEVEL",
        expose_value=False,
        callback=store_option("log_level"),
        hidden=True,
    ),
    click.option(
        "--log-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        expose_value=False,
        callback=store_option("log_file"),
        show_default="stderr",
        help="Log to this file. The settings log.format, log.level, log.size and log.files apply.",
    ),
)


def log_options(command: CommandFunction) -> CommandFunction:
    """Add the log options of a daemon. They are stored in the `CliContext`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def open_log(cli_context: CliContext, process: str) -> LogWriter:
    """Start the log of this process. It ends with the command, before its error is printed."""
    settings = cli_context.settings().log
    log_format = cli_context.log_format or settings.format
    formatter = LineFormatter(process, as_json=log_format == "json")
    path = cli_context.log_file
    rotation = Rotation(settings.size_bytes, settings.files)
    writer = LogWriter(formatter, StderrSink() if path is None else RotatedFile(path, rotation))
    start_log(writer, level_number(log_level(cli_context)))
    if path is not None or log_format == "json":
        cli_context.log_info = logging.getLogger("taskyard.daemon").info
    click.get_current_context().call_on_close(lambda: stop_log(writer))
    return writer


def log_level(cli_context: CliContext) -> str:
    """Return the level by --log-level, -q, -v, the settings or the place of the log.

    The settings are for daemons of their own. A supervisor gives its children the level.
    """
    if cli_context.log_level is not None:
        return cli_context.log_level
    if cli_context.quiet or cli_context.verbose:
        return "error" if cli_context.quiet else "info"
    level = None if cli_context.is_supervised else cli_context.settings().log.level
    return level or ("warning" if cli_context.log_file is None else "info")


def log_arguments(cli_context: CliContext) -> list[str]:
    """Return the options by which children log like this process, to their stderr."""
    log_format = cli_context.log_format or cli_context.settings().log.format
    return ["--log-format", log_format, "--log-level", log_level(cli_context)]


@contextmanager
def children_logged(cli_context: CliContext, writer: LogWriter) -> Iterator[None]:
    """Take the stderr of later children into the log file, if there is one."""
    if cli_context.log_file is None:
        yield
        return
    with captured_stderr(writer, cli_context.log_file):
        yield
