"""Options of the commands that run in the foreground: their endpoints and their logs."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.options import (
    CliContext,
    CommandFunction,
    SettingOption,
    setting_option,
    store_option,
)
from taskyard.errors import UnusableEndpoint, UserError
from taskyard.net import endpoints
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
from taskyard.settings import kinds
from taskyard.settings.files import InvalidSettings
from taskyard.settings.keys import PAGE_ADDRESS, ListenSection
from taskyard.settings.values import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskyard.settings.loader import Settings

    #: The tables of listeners in the settings, by name.
    ListenTables = Mapping[str, ListenSection]
    from collections.abc import Iterator

#: Dialects of a broker, with the number of endpoints of each.
DIALECT_SIDES: Final = {"dwork": 1, "ping-pong": 2, "round-robin": 1, "wmp": 1}
DIALECTS: Final = tuple(DIALECT_SIDES)


def _set_until_eof(context: click.Context, _option: click.Parameter, given: bool) -> bool:  # noqa: FBT001  # click's signature
    context.ensure_object(CliContext).is_supervised = given
    return given


#: For supervisors: also stop when stdin is closed.
until_eof_option = click.option(
    "--until-eof",
    is_flag=True,
    is_eager=True,
    hidden=True,
    callback=_set_until_eof,
)


def _listen_default(
    context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the given endpoints, or those of the settings if none is given."""
    cli_context = context.ensure_object(CliContext)
    if context.resilient_parsing or given or cli_context.native_only:
        return given
    return listen_setting(cli_context.settings())


def listen_option(command: CommandFunction) -> CommandFunction:
    """Add --listen, and for supervisors --native-only: open no endpoint of the settings."""
    listen = click.option(
        "--listen",
        multiple=True,
        callback=_listen_default,
        metavar="DIALECT=ENDPOINT",
        help="Listen here too: dwork=tcp://127.0.0.1:6125. Port 0 picks a free port. Instead of a "
        "dialect also NAME of a table [listen.NAME] in the settings. Repeatable.",
    )
    native_only = click.option(
        "--native-only",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        hidden=True,
        callback=store_option("native_only"),
    )
    return listen(native_only(command))


page_option = setting_option(
    "broker.page",
    "--page",
    metavar="HOST:PORT",
    show_default=PAGE_ADDRESS,
    help="Address of the page, or none. If the port is taken, a free one is used.",
)


secure_option = click.option("--secure", is_flag=True, help="Require keys on loopback TCP too.")


def check_dialect(dialect: str) -> str:
    """Return the dialect. Raise `UserError` if it is unknown."""
    if dialect in DIALECTS:
        return dialect
    raise UserError(f"unknown dialect {dialect!r} (known: {', '.join(DIALECTS)})")


def read_listen(listen: tuple[str, ...], tables: ListenTables) -> tuple[tuple[str, str], ...]:
    """Parse `DIALECT=ENDPOINT` and `NAME=ENDPOINT` options. `tables` are those of the settings."""
    pairs: list[tuple[str, str]] = []
    for given in listen:
        name, sign, endpoint = given.partition("=")
        if not sign:
            raise UserError(
                f"--listen {given}: expected DIALECT=ENDPOINT, as in dwork=tcp://127.0.0.1:0"
            )
        section = tables.get(name) or ListenSection(dialect=_check_listener(name, tables))
        pairs.append((name, _check_endpoints(name, section, endpoint)))
    return tuple(pairs)


def _check_listener(name: str, tables: ListenTables) -> str:
    """Return a name that is a dialect's. Raise `UserError` if no table has it either."""
    if name in DIALECTS or not tables:
        return check_dialect(name)
    known = ", ".join((*DIALECTS, *(one for one in tables if one not in DIALECTS)))
    raise UserError(f"unknown dialect or listener {name!r} (known: {known})")


def _check_endpoints(name: str, section: ListenSection, given: str) -> str:
    """Return the endpoints of a listener, normalized and joined by commas."""
    found = [endpoints.listen_endpoint(one) for one in endpoints.split_endpoints(given)]
    if len(found) != DIALECT_SIDES[section.dialect]:
        form, what = (
            ("BACKEND,FRONTEND", "two endpoints")
            if DIALECT_SIDES[section.dialect] > 1
            else ("ENDPOINT", "one endpoint")
        )
        raise UserError(f"{name}: expected {what}, got {len(found)} ({name}={form})")
    if section.dialect == "round-robin" and not section.identity:
        _check_identifies(name, found[0])
    return ",".join(found)


def _check_identifies(name: str, endpoint: str) -> None:
    """Raise `UserError` if peers can't address the broker by this endpoint."""
    if endpoints.is_wildcard(endpoints.parse(endpoint)):
        example = f'[listen.{name}] identity = "tcp://HOST:PORT"'
        raise UnusableEndpoint(
            f"{name} at {endpoint}: peers address the broker by the endpoint that they connect to, "
            f"and no peer connects to this one (set {example} in the settings)"
        )


def listen_setting(settings: Settings) -> tuple[str, ...]:
    """Return the endpoints of the settings as --listen options. Raises `InvalidSettings`."""
    return tuple(pair for name in settings.listen for pair in listen_pairs(settings, name))


def listen_pairs(settings: Settings, name: str) -> tuple[str, ...]:
    """Return the endpoints of one listener in the settings as --listen options."""
    found, section = settings.listen[name], settings.listeners.get(name)
    # Both endpoints of ping-pong belong together. Other dialects have a socket per option.
    dialect = name if section is None else section.dialect
    values = (",".join(found),) if dialect == "ping-pong" else found
    pairs = tuple(f"{name}={value}" for value in values)
    try:
        read_listen(pairs, settings.listeners)
    except UserError as wrong:
        path = f"listen.{name}" if section is None else f"listen.{name}.endpoint"
        raise InvalidSettings(f"{settings.all[path].origin}: {path}: {wrong}") from wrong
    return pairs


def read_store(store: str) -> str:
    """Return the URL of a journal in PostgreSQL. Empty: in SQLite."""
    try:
        return kinds.STORE.read(store) if store else ""
    except InvalidValue as error:
        raise UserError(f"--store: {error}") from error


#: The hidden ones are for supervisors. Users have TASKYARD_LOG_FORMAT and TASKYARD_LOG_LEVEL.
_LOG_OPTIONS: Final = (
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
    for option in reversed(_LOG_OPTIONS):
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
