"""`taskyard config`: show, check and reload the settings."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from taskyard.cli.commands import Command
from taskyard.cli.connection import connect_to
from taskyard.cli.daemon_options import listen_pairs, listen_setting
from taskyard.cli.documents import ConfigCheckDocument, ConfigDocument, ConfigService, ConfigSetting
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document, print_table
from taskyard.client import discovery
from taskyard.errors import ExitCode, NoBroker, UserError
from taskyard.net import endpoints
from taskyard.process.state_files import LOCK_FILE, UP_FILE, lock_holder
from taskyard.settings.files import InvalidSettings
from taskyard.settings.loader import load, problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.settings.loader import Setting, Settings


@click.command(
    cls=Command,
    epilog=example("config", "config --state ./elsewhere --json", "config --check taskyard.toml"),
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Check the settings of FILE, and report all errors.")
@click.option("--reload", is_flag=True, help="Have the running broker read its settings again.")
@click.pass_obj
def config(
    cli_context: CliContext, file: Path | None, *, check: bool, reload: bool
) -> ExitCode | None:
    """Show every setting with its value and origin.

    Precedence: option, environment variable, settings file, default. FILE is by default that of
    --config or TASKYARD_CONFIG, or the nearest taskyard.toml in the working directory or a parent.

    With --check, prints each error with its location. If there are none, prints the services in
    matching order: the first match applies. Exit 0 if the settings are valid, 2 if not.

    With --reload, rules of services apply at once. For settings that need a restart, the broker
    logs a warning. If the settings are invalid, the command does nothing and exits 2. Same as
    SIGHUP to `broker` or `up`.
    """
    if str(file) in ("check", "reload") and not Path(str(file)).exists():
        raise click.UsageError(f"{file}: use --{file}")
    if check and reload:
        raise UserError("--check and --reload exclude each other")
    if file is not None:
        cli_context.config = file
    if check:
        return _check(cli_context)
    act = _reload if reload else _show
    act(cli_context)
    return None


def _show(cli_context: CliContext) -> None:
    flags: dict[str, tuple[str, object]] = {}
    if cli_context.state is not None:
        flags["broker.state"] = ("--state", str(cli_context.state))
    if cli_context.brokers:
        flags["broker.url"] = ("--broker", [*cli_context.brokers])
    settings = load(cli_context.config, flags)
    _warn_unknown_variables(cli_context, settings)
    if cli_context.as_json:
        listed = [_setting_document(one) for one in settings.all.values()]
        print_document(ConfigDocument(file=_name_of(settings), settings=listed))
        return
    cli_context.info(f"settings file: {escape_line(_name_of(settings) or 'none')}")
    rows = [(path, one.key.text(one.value), one.origin) for path, one in settings.all.items()]
    print_table(("setting", "value", "from"), rows, wrapped=("value", "from"))


def _warn_unknown_variables(cli_context: CliContext, settings: Settings) -> None:
    for warning in settings.unknown_variables:
        cli_context.info(f"taskyard: {warning}")


def _name_of(settings: Settings) -> str | None:
    return None if settings.file is None else str(settings.file)


def _setting_document(setting: Setting) -> ConfigSetting:
    key, value = setting.key, setting.value
    return ConfigSetting(
        key=key.path,
        value=None if value is None else key.kind.to_file(value),
        source=setting.origin.source.name.lower(),
        place=setting.origin.location or None,
        environment=key.environment,
        help=key.help,
    )


def _check(cli_context: CliContext) -> ExitCode:
    """Check the settings and the environment, and report all errors."""
    wrong, settings = problems(cli_context.config)
    sections: list[ConfigService] = []
    if settings is not None:
        _warn_unknown_variables(cli_context, settings)
        wrong += _endpoint_problems(settings)
        sections = _sections(settings)
    if cli_context.as_json:
        name = str(cli_context.config) if settings is None else _name_of(settings)
        print_document(
            ConfigCheckDocument(file=name, valid=not wrong, problems=wrong, services=sections)
        )
    elif wrong:
        for line in wrong:
            click.echo(escape_line(line))
        cli_context.info(f"taskyard: {format_count(len(wrong), 'error')} in the settings")
    else:
        cli_context.info("the settings are valid")
        _print_sections(sections)
    return ExitCode.USAGE if wrong else ExitCode.OK


def _sections(settings: Settings) -> list[ConfigService]:
    """Return the services of the file in matching order."""
    return [
        ConfigService(
            name=name,
            match=section.match_for(name),
            sets=[key for key in _keys_set(settings, f"service.{name}") if key != "match"],
        )
        for name, section in settings.services.items()
    ]


def _keys_set(settings: Settings, section: str) -> list[str]:
    return [one.key.name for one in settings.all.values() if one.key.section == section]


def _print_sections(sections: list[ConfigService]) -> None:
    if sections:
        rows = [(one.name, one.match, ", ".join(one.sets)) for one in sections]
        print_table(("service", "match", "sets"), rows, wrapped=("sets",))


def _reload(cli_context: CliContext) -> None:
    """Send SIGHUP to the broker of the state directory, if the settings are valid."""
    state = cli_context.state_directory()
    listen_setting(cli_context.settings())  # raises if invalid
    holder = lock_holder(state / UP_FILE) or lock_holder(state / LOCK_FILE)
    if not holder:
        raise NoBroker(
            f"no broker is running on {state} (start one with `taskyard up`, or give --state)"
        )
    with connect_to(
        cli_context, endpoints.native_endpoint(state)
    ):  # a process that only reads the state must not get the signal
        os.kill(holder, signal.SIGHUP)
    cli_context.info(f"asked the broker (process {holder}) to reload the settings (see its log)")


def _endpoint_problems(settings: Settings) -> list[str]:
    """Return the errors in endpoints, which only `net` can parse."""
    checks: list[Callable[[], object]] = [partial(discovery.configured_endpoints, settings)]
    checks += [partial(listen_pairs, settings, dialect) for dialect in settings.listen]
    wrong = []
    for check_endpoint in checks:
        try:
            check_endpoint()
        except InvalidSettings as bad:
            wrong.append(str(bad))
    return wrong
