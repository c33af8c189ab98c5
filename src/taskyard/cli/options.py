"""Options that verbs have in common, each defined once.

An option of this file stores what it was given in the `CliContext` of the call, so that it means
the same before the verb and after it; or it is one that the settings know, who say what it is if
it is not given.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from taskyard.cli.terminal import escape_control, unwrap_stdout

if TYPE_CHECKING:
    from taskyard.settings.sections import Settings

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., object])


class Duration(click.ParamType[int]):
    """`90s`, `5m`, `1h30m` or plain seconds, as nanoseconds; never 0."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        from taskyard.settings.values import InvalidValue, read_positive_duration  # noqa: PLC0415  # when used

        if isinstance(value, int):
            return value
        try:
            return read_positive_duration(value)
        except InvalidValue as bad:
            self.fail(str(bad), param, ctx)


DURATION = Duration()


class CliContext:
    """How one call of the command line talks to its user."""

    def __init__(self) -> None:
        #: Show the traceback of an error, not only its message.
        self.verbose = False
        #: Say nothing but the answer.
        self.quiet = False
        #: Answer with a JSON document.
        self.as_json = False
        #: The endpoint of the broker; None: as the environment says, or the state directory.
        self.broker: str | None = None
        #: The state directory; None: as the environment says, or the usual one.
        self.state: Path | None = None
        #: Nanoseconds to wait for a broker that does not answer; None: see `connecting`.
        self.broker_timeout: int | None = None
        #: The key file; None: as the environment or the settings say.
        self.key: Path | None = None
        #: The settings file; None: as the environment says, or the nearest one.
        self.config: Path | None = None
        #: A broker listens at its native socket alone.
        self.native_only = False
        #: Somebody started it who has told the user what there is to say of the settings.
        self.is_supervised = False
        #: What to say when it is interrupted.
        self.interrupt_message = "interrupted"
        self._settings: Settings | None = None

    def info(self, line: str) -> None:
        """Tell the user what goes on, beside the answer. It goes on where nobody listens, as the
        log of a host that is gone."""
        if not self.quiet:
            with suppress(BrokenPipeError):
                click.echo(line, err=True)

    def warn(self, line: str) -> None:
        """Print a warning on stderr. It is no progress: `--quiet` does not suppress it.

        Not by `click.echo`: that writes past the bar that is drawn there, and this above it.
        """
        with suppress(BrokenPipeError):
            if sys.stderr is None:  # as it is for a process that was started with it closed
                return
            print(escape_control(f"taskyard: {line}"), file=sys.stderr, flush=True)  # noqa: T201  # see above

    def settings(self) -> "Settings":
        """The environment's, the file's and the defaults. Raises `InvalidSettings`."""
        if self._settings is None:
            from taskyard.settings.loader import load  # noqa: PLC0415  # `--help` does without

            self._settings = load(self.config)
            for stranger in () if self.is_supervised else self._settings.unknown_variables:
                self.info(f"taskyard: {stranger}")
        return self._settings

    def reload_settings(self) -> "Settings":
        """The same as they are now, of the file that was read. Raises `InvalidSettings`."""
        from taskyard.settings.loader import load  # noqa: PLC0415

        return load(self.config or self.settings().file)


def _set_verbose(context: click.Context, _option: click.Parameter, given: bool) -> None:  # noqa: FBT001  # click's signature
    if given:
        context.ensure_object(CliContext).verbose = True


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_verbose,
    help="Show where an error came from, too.",
)


def _set_quiet(context: click.Context, _option: click.Parameter, given: bool) -> None:  # noqa: FBT001  # click's signature
    if given:
        context.ensure_object(CliContext).quiet = True


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_quiet,
    help="Show no progress.",
)


def store_option(name: str) -> Callable[[click.Context, click.Parameter, object], None]:
    """Store what an option was given in the `CliContext`, under this name."""

    def store_option(context: click.Context, _option: click.Parameter, given: object) -> None:
        if given:
            setattr(context.ensure_object(CliContext), name, given)

    return store_option


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=store_option("config"),
    help="The settings file; the nearest taskyard.toml, here or above, if not given.",
)


def setting_option(
    path: str,
    *names: str,
    **more: Any,  # noqa: ANN401  # click's
) -> Callable[[CommandFunction], CommandFunction]:
    """An option that is as the settings say where it is not given."""

    def choose(context: click.Context, _option: click.Parameter, given: object) -> object:
        if context.resilient_parsing:
            return given
        settings = context.ensure_object(CliContext).settings()
        return settings.value(path) if given in (None, ()) else given

    return click.option(*names, callback=choose, **more)


def state_option(command: CommandFunction) -> CommandFunction:
    """For verbs that work on a state directory themselves."""
    option = setting_option(
        "broker.state",
        "--state",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="The state directory; ./.taskyard if not given.",
    )
    return config_option(option(command))


#: For verbs that talk to a broker: what is not given is left to `client.discovery`.
broker_option = click.option(
    "--broker",
    metavar="URL",
    help="The broker's endpoint; that of the state directory if not given.",
)

broker_state_option = click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The broker's state directory; ./.taskyard if not given.",
)

key_option = click.option(
    "--key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    expose_value=False,
    callback=store_option("key"),
    help="The key to come with, for a broker that demands one; or TASKYARD_KEY.",
)

broker_timeout_option = click.option(
    "--broker-timeout",
    type=DURATION,
    metavar="D",
    expose_value=False,
    callback=store_option("broker_timeout"),
    help="Stop waiting for a broker that does not answer, and exit 3: 90s, 5m. Without it, wait 5s "
    "for the first answer, and for ever if the broker goes away later.",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Answer with one JSON document, for programs."
)


def _unwrap_stdout(context: click.Context, _option: click.Parameter, given: bool) -> None:  # noqa: FBT001  # click's signature
    if given and not context.resilient_parsing:
        unwrap_stdout()


#: For verbs that print what a task printed.
raw_option = click.option(
    "--raw",
    is_flag=True,
    expose_value=False,
    callback=_unwrap_stdout,
    help="Pass control characters on to a terminal, too. A pipe always gets every byte as it is.",
)


def broker_options(command: CommandFunction) -> CommandFunction:
    """What every verb has that talks to a broker; the verb finds it in its `CliContext`."""
    for option in (
        verbose_option,
        quiet_option,
        config_option,
        key_option,
        broker_timeout_option,
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=store_option("as_json"),
            help="Answer with one JSON document, for programs.",
        ),
        click.option(
            "--state",
            type=click.Path(path_type=Path),
            metavar="DIR",
            expose_value=False,
            callback=store_option("state"),
            help="The broker's state directory; ./.taskyard if not given.",
        ),
        click.option(
            "--broker",
            metavar="URL",
            expose_value=False,
            callback=store_option("broker"),
            help="Where the broker is, if not in the state directory; or TASKYARD_BROKER.",
        ),
    ):
        command = option(command)
    return command
