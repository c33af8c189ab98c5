"""`taskyard config`: the settings with their origins, and whether a file of them is good."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taskyard.cli.daemons import listen_pairs
from taskyard.cli.options import Talk, broker_options, json_option, quiet_option, verbose_option
from taskyard.cli.printing import example, print_document, print_table
from taskyard.cli.words import count, plain
from taskyard.client import finding
from taskyard.errors import ExitCode
from taskyard.settings.files import BadSettings
from taskyard.settings.load import load, problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.settings.sections import Setting, Settings


@click.group(
    invoke_without_command=True,
    epilog=example("config", "config --state ./elsewhere --json", "config check taskyard.toml"),
)
@broker_options
@click.pass_context
def config(context: click.Context) -> None:
    """Show every setting, its value and where that came from.

    A flag goes before an environment variable, that before the settings file, that before the
    default. The file is the one of --config, else of TASKYARD_CONFIG, else the nearest
    taskyard.toml in the working directory or above it.
    """
    if context.invoked_subcommand is None:
        _show(context.ensure_object(Talk))


def _show(talk: Talk) -> None:
    flags: dict[str, tuple[str, object]] = {}
    if talk.state is not None:
        flags["broker.state"] = ("--state", str(talk.state))
    if talk.broker is not None:
        flags["broker.url"] = ("--broker", talk.broker)
    settings = load(talk.config, flags)
    _tell_strangers(talk, settings)
    if talk.as_json:
        listed = [_as_document(one) for one in settings.all.values()]
        print_document("config", file=_name_of(settings), settings=listed)
        return
    talk.say(f"settings file: {plain(_name_of(settings) or 'none')}")
    rows = [(path, one.key.text(one.value), one.origin) for path, one in settings.all.items()]
    print_table(("setting", "value", "from"), rows, prose=("value", "from"))


def _tell_strangers(talk: Talk, settings: Settings) -> None:
    for stranger in settings.strangers:
        talk.say(f"taskyard: {stranger}")


def _name_of(settings: Settings) -> str | None:
    return None if settings.file is None else str(settings.file)


def _as_document(setting: Setting) -> dict[str, Any]:
    key, value = setting.key, setting.value
    return {
        "key": key.path,
        "value": None if value is None else key.kind.written(value),
        "source": setting.origin.source.name.lower(),
        "place": setting.origin.place or None,
        "environment": key.environment,
        "help": key.help,
    }


@config.command(epilog=example("config check taskyard.toml"))
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def check(talk: Talk, file: Path | None, *, as_json: bool) -> ExitCode:
    """Say whether the settings are good, and all that is wrong with them.

    Those of FILE, or of the file that would be used here, and those of the environment. A line for
    each thing that is wrong, with its place. Exit 0 if all is good, 2 if not.
    """
    wrong, settings = problems(file or talk.config)
    if settings is not None:
        _tell_strangers(talk, settings)
        wrong = _wrong_endpoints(settings)
    if as_json or talk.as_json:
        name = str(file or talk.config) if settings is None else _name_of(settings)
        print_document("config check", file=name, good=not wrong, problems=wrong)
    elif wrong:
        for line in wrong:
            click.echo(plain(line))
        talk.say(f"taskyard: {count(len(wrong), 'thing')} wrong in the settings")
    else:
        talk.say("the settings are good")
    return ExitCode.USAGE if wrong else ExitCode.GOOD


def _wrong_endpoints(settings: Settings) -> list[str]:
    """What can't be listened at or connected to: only sockets know."""
    looks: list[Callable[[], object]] = [partial(finding.url_of, settings)]
    looks += [partial(listen_pairs, settings, dialect) for dialect in settings.listen]
    wrong = []
    for look in looks:
        try:
            look()
        except BadSettings as bad:
            wrong.append(str(bad))
    return wrong
