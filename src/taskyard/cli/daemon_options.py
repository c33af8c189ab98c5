"""Options of the commands that run in the foreground: their endpoints, logs and workers.

Amounts of workers that are not given are settings, or detected. `worker` has bare words, as in
--cpus. Commands that start local workers have --worker-cpus: their bare words are of tasks.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from taskyard.cli.options import (
    AMOUNT,
    SIZE,
    CliContext,
    CommandFunction,
    SettingOption,
    SettingValue,
    setting_option,
    store_option,
)
from taskyard.errors import UnusableEndpoint, UserError
from taskyard.net import endpoints
from taskyard.process import logs
from taskyard.process.machine import Machine, this_machine, usable_cores
from taskyard.settings import keys
from taskyard.settings.files import InvalidSettings
from taskyard.settings.keys import PAGE_ADDRESS, PROCESSES_MAX, SLOTS_MAX, ListenSection
from taskyard.settings.values import (
    OTHER_RESOURCES_MAX,
    InvalidValue,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from taskyard.core.resources import Resources
    from taskyard.settings.loader import Settings

    #: The tables of listeners in the settings, by name.
    ListenTables = Mapping[str, ListenSection]

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
    """Return the given endpoints, by default the endpoints of the settings."""
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
    help="Address of the page, or none. If the port is taken, a free port is used.",
)


secure_option = click.option("--secure", is_flag=True, help="Require keys on loopback TCP too.")


def check_dialect(dialect: str) -> str:
    """Return the dialect. Raise `UserError` if it is unknown."""
    if dialect in DIALECTS:
        return dialect
    raise UserError(f"unknown dialect {dialect!r} (known: {', '.join(DIALECTS)})")


def read_listen(listen: tuple[str, ...], tables: ListenTables) -> tuple[tuple[str, str], ...]:
    """Parse `DIALECT=ENDPOINT` and `NAME=ENDPOINT` options. `tables` come from the settings."""
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
        return keys.STORE.read(store) if store else ""
    except InvalidValue as error:
        raise UserError(f"--store: {error}") from error


#: Hidden, for supervisors. Users have TASKYARD_LOG_FORMAT and TASKYARD_LOG_LEVEL.
_LOG_OPTIONS: Final = (
    click.option(
        "--log-format",
        type=click.Choice(logs.FORMATS),
        cls=SettingOption,
        envvar="TASKYARD_LOG_FORMAT",
        expose_value=False,
        callback=store_option("log_format"),
        hidden=True,
    ),
    click.option(
        "--log-level",
        type=click.Choice(logs.LEVELS),
        cls=SettingOption,
        envvar="TASKYARD_LOG_LEVEL",
        expose_value=False,
        callback=store_option("log_level"),
        hidden=True,
    ),
)

#: For the broker, whose log is rotated. Other daemons log to stderr.
log_file_option = click.option(
    "--log-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    expose_value=False,
    callback=store_option("log_file"),
    show_default="stderr",
    help="Log to this file. The settings log.format, log.level, log.size and log.files apply.",
)


def log_options(command: CommandFunction) -> CommandFunction:
    """Add the log options of a daemon. They are stored in the `CliContext`."""
    for option in reversed(_LOG_OPTIONS):
        command = option(command)
    return command


def open_log(cli_context: CliContext, process: str) -> logs.LogWriter:
    """Start the log of this process. It ends with the command, before its error is printed."""
    settings = cli_context.settings().log
    log_format = cli_context.log_format or settings.format
    formatter = logs.LineFormatter(process, as_json=log_format == "json")
    path = cli_context.log_file
    rotation = logs.Rotation(settings.size_bytes, settings.files)
    writer = logs.LogWriter(
        formatter, logs.StderrSink() if path is None else logs.RotatedFile(path, rotation)
    )
    logs.start_log(writer, logs.level_number(log_level(cli_context)))
    if path is not None or log_format == "json":
        cli_context.log_info = logging.getLogger("taskyard.daemon").info
    click.get_current_context().call_on_close(lambda: logs.stop_log(writer))
    return writer


def log_level(cli_context: CliContext) -> str:
    """Return the level by --log-level, -q, -v, the settings or where the log is.

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
def children_logged(cli_context: CliContext, writer: logs.LogWriter) -> Iterator[None]:
    """Take the stderr of later children into the log file, if any."""
    if cli_context.log_file is None:
        yield
        return
    with logs.captured_stderr(writer, cli_context.log_file):
        yield


class WorkerResource(SettingOption):
    """An option for a resource of workers. The default is a setting of the section `worker`."""


def _setting_callback(key: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that takes the setting if the option is not given."""

    def choose(context: click.Context, option: click.Parameter, given: Any) -> Any:  # noqa: ANN401  # by option
        if context.resilient_parsing:
            return given
        if not _is_given(context, option):
            given = context.ensure_object(CliContext).settings().value(f"worker.{key}")
        elif key == "resources":
            given = _read_resources(context, option, given)
        return _gpu_ids(given) if key == "gpus" else given

    return choose


def _read_resources(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> Resources:
    """Read pairs `NAME=N`."""
    try:
        return keys.RESOURCES.read(given)
    except InvalidValue as bad:
        raise click.BadParameter(str(bad), context, option) from None


def _is_given(context: click.Context, option: click.Parameter) -> bool:
    return context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE


def _gpu_ids(value: int | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the ids of a number of GPUs, by which the machine names them if it has so many."""
    if not isinstance(value, int):
        return value
    found = this_machine().gpus
    return found[:value] if value <= len(found) else tuple(map(str, range(value)))


#: The options for resources of workers, the last first: name, value, type and help.
_RESOURCES: Final = (
    ("resource", "NAME=N", click.STRING, "Another resource, as in license=2. Repeatable."),
    ("gpus", "N|IDS", SettingValue("gpus", "GPUS"), "GPUs: their number, or their ids, as in 0,3."),
    ("memory", "SIZE", SIZE, "Memory for tasks that ask for some, as in 8G."),
    ("cpus", "N", AMOUNT, "Cores for tasks that ask for some."),
)


def worker_resource_options(command: CommandFunction) -> CommandFunction:
    """Add the options for the resources of local workers, such as --worker-cpus."""
    return resource_options(command, "worker-")


def resource_options(command: CommandFunction, prefix: str = "") -> CommandFunction:
    """Add the options for the resources of workers: cpus, memory, gpus and resources."""
    for flag, metavar, kind, text in _RESOURCES:
        is_other = flag == "resource"
        key = "resources" if is_other else flag
        command = click.option(
            f"--{prefix}{flag}",
            f"{prefix}{key}".replace("-", "_"),
            cls=WorkerResource,
            envvar=f"TASKYARD_WORKER_{key.upper()}",
            callback=_setting_callback(key),
            metavar=metavar,
            type=kind,
            multiple=is_other,
            show_default=None if is_other else "detected",
            help=text,
        )(command)
    return command


def given_resource_options() -> list[str]:
    """Return the options for resources of workers on the command line of this command."""
    context = click.get_current_context()
    return [
        option.opts[0]
        for option in context.command.params
        if isinstance(option, WorkerResource) and _is_given(context, option)
    ]


def local_machine(values: Mapping[str, Any]) -> Machine | None:
    """Return the resources of local workers from `worker_resource_options`. None: detected."""
    keys = ("cpus", "memory", "gpus", "resources")
    cpus, memory, gpus, resources = (values[f"worker_{key}"] for key in keys)
    return machine_if_set(cpus, memory, gpus, resources)


def machine_if_set(
    cpus: int | None,
    memory: int | None,
    gpus: tuple[str, ...] | None,
    resources: tuple[tuple[bytes, int], ...],
) -> Machine | None:
    """Return the resources of workers, or None if all are detected."""
    if not resources and (cpus, memory, gpus) == (None, None, None):
        return None
    return machine_of(cpus, memory, gpus, resources)


def machine_of(
    cpus: int | None,
    memory: int | None,
    gpus: tuple[str, ...] | None,
    resources: tuple[tuple[bytes, int], ...],
) -> Machine:
    """Return the resources of workers from the options, and detect what is not given."""
    found, others = this_machine(), dict(resources)
    if len(others) > OTHER_RESOURCES_MAX:
        raise UserError(
            f"--worker-resource: at most {OTHER_RESOURCES_MAX} names, not {len(others)}"
        )
    return Machine(
        found.cpus if cpus is None else cpus,
        found.memory if memory is None else memory,
        found.gpus if gpus is None else gpus,
        tuple(sorted((name, amount) for name, amount in others.items() if amount)),
    )


# What workers offer, and how much at once.

#: For commands that start workers.
allow_option = setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module. Repeatable.",
)

allow_pickle_option = click.option(
    "--allow-pickle",
    is_flag=True,
    help="Offer the service pickle, which calls any pickled function.",
)


_DIGITS: Final = re.compile(r"\d{1,9}", re.ASCII)


class SlotCount(click.ParamType[int]):
    """A number of slots, or a share of the cores: `4`, `50%`."""

    name = "N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value).strip()
        number = text.removesuffix("%")
        slots = int(number) if _DIGITS.fullmatch(number) else 0
        if slots and number != text:
            slots = max(1, usable_cores() * slots // 100)
        if not 1 <= slots <= SLOTS_MAX:
            self.fail(
                f"expected a number from 1 to {SLOTS_MAX}, or a share of the cores such as 50%, "
                f"not {text!r}",
                param,
                ctx,
            )
        return slots


#: For commands that start workers. The setting `worker.slots` is for each worker.
jobs_option = click.option(
    "-j",
    "-P",
    "--jobs",
    type=SlotCount(),
    metavar="N",
    show_default="one per core",
    help="Tasks to run at once, by all workers: a number, or a share of the cores, as in 50%.",
)


def jobs_of_workers(settings: Settings, jobs: int | None, workers: int) -> int:
    """Return the slots of all workers. Raises `UserError` if there are fewer than workers."""
    if jobs is not None and jobs < workers:
        raise UserError(f"-j {jobs}: fewer slots than workers (--workers {workers})")
    if jobs is None and settings.worker.slots is not None:
        return settings.worker.slots * workers
    return jobs or max(usable_cores(), workers)


def service_options(command: CommandFunction) -> CommandFunction:
    """Add the options of local workers."""
    workers = setting_option(
        "worker.processes",
        "--workers",
        type=click.IntRange(1, PROCESSES_MAX),
        metavar="N",
        show_default="1",
        help="Worker processes, unless a broker is running.",
    )
    for option in (
        allow_pickle_option,
        allow_option,
        worker_resource_options,
        workers,
        jobs_option,
    ):
        command = option(command)
    return command
