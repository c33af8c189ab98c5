"""`taskyard config`: show, check and reload the settings."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from taskyard.cli.connection import connect_to
from taskyard.cli.daemon_options import listen_pairs, listen_setting
from taskyard.cli.documents import ConfigCheckDocument, ConfigDocument, ConfigService, ConfigSetting
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import (
    CliContext,
    broker_options,
    broker_timeout_option,
    json_option,
    quiet_option,
    state_option,
    verbose_option,
)
from taskyard.cli.output import example, print_document, print_table
from taskyard.client import discovery
from taskyard.errors import ExitCode, NoBroker
from taskyard.net import endpoints
from taskyard.process.locks import LOCK_FILE, UP_FILE, lock_holder
from taskyard.settings.files import InvalidSettings
from taskyard.settings.loader import load, problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.settings.loader import Setting, Settings


@click.group(
    invoke_without_command=True,
    epilog=example("config", "config --state ./elsewhere --json", "config check taskyard.toml"),
)
@broker_options
@click.pass_context
def config(context: click.Context) -> None:
    """Show every setting with its value and origin.

    Precedence: option, environment variable, settings file, default. The file is the one named by
    --config or TASKYARD_CONFIG, or the nearest taskyard.toml in the working directory or a parent.
    """
    if context.invoked_subcommand is None:
        _show(context.ensure_object(CliContext))


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
        place=setting.origin.place or None,
        environment=key.environment,
        help=key.help,
    )


@config.command(epilog=example("config check taskyard.toml"))
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def check(cli_context: CliContext, file: Path | None, *, as_json: bool) -> ExitCode:
    """Check the settings and report all errors.

    Checks FILE, or the file that would be used here, and the environment. Prints each error with
    its location. If there are none, prints the services in matching order: the first match applies.
    Exit 0 if the settings are valid, 2 if not.
    """
    wrong, settings = problems(file or cli_context.config)
    sections: list[ConfigService] = []
    if settings is not None:
        _warn_unknown_variables(cli_context, settings)
        wrong += _endpoint_problems(settings)
        sections = _sections(settings)
    if as_json or cli_context.as_json:
        name = str(file or cli_context.config) if settings is None else _name_of(settings)
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


@config.command(epilog=example("config reload", "config reload --state ./elsewhere"))
@state_option
@broker_timeout_option
@verbose_option
@quiet_option
@click.pass_obj
def reload(cli_context: CliContext, state: Path) -> None:
    """Reload the settings of a running broker.

    Rules of services apply at once. For settings that need a restart, the broker logs a warning. If
    the settings are invalid, the command does nothing and exits 2. Same as SIGHUP to `broker` or
    `up`.
    """
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
