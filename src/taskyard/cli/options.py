"""The context of a call, and the options that every command accepts.

A common option stores its value in the `CliContext`, so it may stand before or after the command.
`command.py` adds them to every command. Their help is the topic `connection`.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from taskyard.cli.format import escape_control
from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.client.discovery import Variables
    from taskyard.net.keys import Invitation
    from taskyard.settings.loader import Settings

INVITE_VARIABLE: Final = "TASKYARD_INVITE"

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., object])


def gathered(kind: type, name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return a decorator that passes the options that are fields of a struct as one argument."""

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)  # keeps the options added before
        def call(*arguments: object, **given: object) -> object:
            fields = kind.__struct_fields__  # type: ignore[attr-defined]  # of a msgspec struct
            values = {field: given.pop(field) for field in fields if field in given}
            return function(*arguments, **given, **{name: kind(**values)})

        return call

    return decorate


class SettingValue(click.ParamType[Any]):
    """A value that is read as a setting of this kind."""

    def __init__(self, name: str, kind: str) -> None:
        """`kind` is the name of a constant in `settings.keys`."""
        self.name = name
        self._kind = kind

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:  # noqa: ANN401  # by kind
        if not isinstance(value, str):
            return value
        from taskyard.settings import keys  # noqa: PLC0415  # few options need it
        from taskyard.settings.values import InvalidValue  # noqa: PLC0415

        kind: keys.Kind[Any] = getattr(keys, self._kind)
        try:
            return kind.read(kind.from_text(value))
        except InvalidValue as bad:
            self.fail(str(bad), param, ctx)


#: A positive duration as nanoseconds: `90s`, `5m`, `1h30m` or plain seconds.
DURATION: Final = SettingValue("duration", "DURATION")
#: A duration, or `auto` as 0.
DURATION_OR_AUTO: Final = SettingValue("duration|auto", "DURATION_OR_AUTO")
#: A size in bytes: `500M`, `10G` or a plain number.
SIZE: Final = SettingValue("size", "SIZE")
#: An amount of a resource: `2`, `0.5`.
AMOUNT: Final = SettingValue("number", "AMOUNT")


class CliContext:
    """The global options of a call, its settings and its messages to the user."""

    def __init__(self, *, is_main_program: bool = False) -> None:
        #: Whether the process runs this command only. Then it may be forked.
        self.is_main_program = is_main_program
        #: Show the traceback of an error, not only its message.
        self.verbose = False
        #: Print nothing but the result.
        self.quiet = False
        #: Show progress always or never. None: unless --quiet is given or a terminal is in use.
        self.shows_progress: bool | None = None
        #: Print a JSON document.
        self.as_json = False
        #: The endpoints of the brokers. Empty: from the settings.
        self.brokers: tuple[str, ...] = ()
        #: The state directory. None: from the settings.
        self.state: Path | None = None
        #: The timeout for a broker that does not reply. None: see `connection`.
        self.broker_timeout: int | None = None
        #: The key files, one for each broker. Empty: from the settings.
        self.keys: tuple[Path, ...] = ()
        #: From --invite: the broker's endpoints and a key for them.
        self.invitation: Invitation | None = None
        #: The file of that invitation. None: it was a line on stdin.
        self.invitation_file: Path | None = None
        #: The variables that commands get from this process. None: the usual variables.
        self.variables: Variables = None
        #: The settings file. None: TASKYARD_CONFIG or the nearest taskyard.toml.
        self.config: Path | None = None
        #: Whether a broker opens its native socket only.
        self.native_only = False
        #: Whether a supervisor started this process. The supervisor prints warnings about settings.
        self.is_supervised = False
        #: The log options of a daemon. None: from the settings, and stderr.
        self.log_format: str | None = None
        self.log_level: str | None = None
        self.log_file: Path | None = None
        #: Logs messages for the user. None: they are printed.
        self.log_info: Callable[[str], None] | None = None
        #: The message when the command is interrupted.
        self.interrupt_message = "interrupted"
        self._settings: Settings | None = None

    @property
    def key(self) -> Path | None:
        """The key file of a command with one key. None: from the settings. Raises `UserError`."""
        if len(self.keys) > 1:
            raise UserError(f"--key: {len(self.keys)} files given, this command uses one key")
        return self.keys[0] if self.keys else None

    def state_directory(self) -> Path:
        """Return the given state directory, or that of the settings. Raises `InvalidSettings`.

        A given settings file must be valid.
        """
        if self.state is not None and self.config is None:
            return self.state
        found = Path(self.settings().value("broker.state"))
        return self.state or found

    def info(self, line: str) -> None:
        """Print a message on stderr unless --quiet is given. Ignores a closed pipe or terminal.

        A daemon that logs to a file or in JSON logs it instead.
        """
        if self.log_info is not None:
            self.log_info(line)
        elif not self.quiet:
            with suppress(OSError):
                click.echo(line, err=True)

    def warn(self, line: str) -> None:
        """Print a warning on stderr, even with --quiet.

        Uses `print` because `click.echo` would write across a progress bar.
        """
        with suppress(BrokenPipeError):
            if sys.stderr is None:  # None in a process that was started with stderr closed
                return
            print(escape_control(f"taskyard: {line}"), file=sys.stderr, flush=True)  # noqa: T201  # see above

    def settings(self) -> "Settings":
        """Return the merged settings. Raises `InvalidSettings`."""
        if self._settings is None:
            from taskyard.settings.loader import load  # noqa: PLC0415  # not needed by `--help`

            self._settings = load(self.config)
            for warning in () if self.is_supervised else self._settings.unknown_variables:
                self.info(f"taskyard: {warning}")
        return self._settings

    def ignore_invalid_settings(self) -> None:
        """Use the defaults if the settings are invalid, with a warning.

        For commands that need a state directory only, when it is given. A given settings file must
        be valid: raises `InvalidSettings`.
        """
        from taskyard.settings.files import InvalidSettings  # noqa: PLC0415
        from taskyard.settings.loader import defaults  # noqa: PLC0415

        try:
            self.settings()
        except InvalidSettings as bad:
            if self.config is not None:
                raise
            self.warn(f"settings ignored: {bad}")
            self._settings = defaults()

    def find_invitation(self) -> "Invitation | None":
        """Return the invitation of --invite or of the settings. Raises `UserError`.

        A line in the environment is removed from it: programs of tasks must not get the secret.
        """
        if self.invitation is not None:
            return self.invitation
        from taskyard.client import discovery  # noqa: PLC0415  # not needed by `--help`

        found = discovery.configured_invitation(self.settings())
        if not isinstance(self.settings().broker.invite, Path):
            os.environ.pop(INVITE_VARIABLE, None)
        return found

    def reload_settings(self) -> "Settings":
        """Read the settings again from the same file. Raises `InvalidSettings`."""
        from taskyard.settings.loader import load  # noqa: PLC0415

        return load(self.config or self.settings().file)


def _set_flag(context: click.Context, option: click.Parameter, given: object) -> object:
    """Store a flag in the `CliContext` by its name."""
    if given:
        setattr(context.ensure_object(CliContext), str(option.name), True)
    return given


def store_option(name: str) -> Callable[[click.Context, click.Parameter, object], None]:
    """Return a click callback that stores the value in the `CliContext`."""

    def store_option(context: click.Context, _option: click.Parameter, given: object) -> None:
        if given:
            setattr(context.ensure_object(CliContext), name, given)

    return store_option


def _set_progress(
    context: click.Context,
    _option: click.Parameter,
    given: bool | None,  # noqa: FBT001  # click's signature
) -> None:
    context.ensure_object(CliContext).shows_progress = given


#: For commands that wait for tasks or submit many.
progress_option = click.option(
    "--progress/--no-progress",
    default=None,
    expose_value=False,
    callback=_set_progress,
    help="Show progress even with -q or beside results, or never. If omitted, a bar on a "
    "terminal, and a line every few seconds in a pipe or log.",
)


class SettingOption(click.Option):
    """An option whose environment variable is shown in the help. The settings read it."""

    def __init__(self, names: Sequence[str], **more: Any) -> None:  # noqa: ANN401  # click options
        super().__init__(names, show_envvar=True, **more)

    def resolve_envvar_value(self, ctx: click.Context) -> None:  # click's signature
        """Leave the variable to the settings, which check it and report its origin."""


def setting_option(
    path: str,
    *names: str,
    **more: Any,  # noqa: ANN401  # click options
) -> Callable[[CommandFunction], CommandFunction]:
    """Return an option whose default is a setting."""

    def choose(context: click.Context, _option: click.Parameter, given: object) -> object:
        if context.resilient_parsing:
            return given
        cli_context = context.ensure_object(CliContext)
        is_given = given not in (None, ())
        if is_given and cli_context.config is None:
            return given
        settings = cli_context.settings()  # a given settings file must be valid
        return given if is_given else settings.value(path)

    more.setdefault("envvar", "TASKYARD_" + re.sub(r"\W", "_", path.upper()))
    return click.option(*names, cls=SettingOption, callback=choose, **more)


# Invitations.


def _accept_invitation(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> None:
    """Use the endpoints and keys of invitations, unless --broker and --key are given."""
    if getattr(context.command, "is_peer", False):
        _join_as_peer(context, option, given)
        return
    if not given or context.resilient_parsing:
        return
    if context.info_name == "web":
        raise click.UsageError("--invite: use --share ROLE for the address of the page", context)
    if "-" in given:
        raise click.BadParameter("give a file", context, option)
    found = _read_invitations(context, option, given)
    if found[0].dialect != "dwork":
        raise click.BadParameter(
            f"{given[0]} is for the dialect {found[0].dialect}, this command needs dwork",
            context,
            option,
        )
    cli_context = context.ensure_object(CliContext)
    if len(found) == 1:
        cli_context.invitation = found[0]
    cli_context.brokers = tuple(one.endpoints[0] for one in found)
    cli_context.keys = tuple(map(Path, given))


def _join_as_peer(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> None:
    """Read the invitations of a worker or relay, which keeps the secret of one in memory."""
    if not given or context.resilient_parsing:
        return
    from taskyard.net.keys import read_invitation  # noqa: PLC0415  # not needed by `--help`

    cli_context = context.ensure_object(CliContext)
    if len(given) == 1:
        cli_context.invitation = read_invitation(given[0])
        cli_context.invitation_file = None if given[0] == "-" else Path(given[0])
        return
    if not any(one.name == "dialect" for one in context.command.params):
        raise click.BadParameter(f"takes one invitation, got {len(given)}", context, option)
    found = _read_invitations(context, option, given)
    cli_context.keys = tuple(map(Path, given))
    cli_context.brokers = tuple(one.endpoints[0] for one in found)
    context.default_map = {"dialect": found[0].dialect}


def _read_invitations(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> "list[Invitation]":
    """Read the invitations of several brokers. All must be files, and of one dialect."""
    from taskyard.net.keys import read_invitation  # noqa: PLC0415  # not needed by `--help`

    if "-" in given:
        raise click.BadParameter("give files", context, option)
    found = [read_invitation(one) for one in given]
    if len(dialects := dict.fromkeys(one.dialect for one in found)) > 1:
        raise click.BadParameter(f"they are for dialects {' and '.join(dialects)}", context, option)
    if len({one.endpoints[0] for one in found}) < len(found):
        raise click.BadParameter(f"two are for {found[0].endpoints[0]}", context, option)
    return found


def _store_state(context: click.Context, option: click.Parameter, given: Path | None) -> None:
    """Store the state directory. Refuse a state of tasks, which is chosen by other options."""
    if given is None:
        return
    if str(given) in _TASK_STATES and not given.exists():
        which = "--failed" if str(given) == "failed" else f"--only {given}"
        raise click.BadParameter(f"names a directory (of {given} tasks: {which})", context, option)
    context.ensure_object(CliContext).state = given


# The options of every command.

_TASK_STATES: Final = ("blocked", "delayed", "ready", "leased", "done", "failed", "cancelled")

#: The default of --state, for the help.
NEAREST_STATE: Final = "nearest .taskyard, here or in a parent"


_COMMON: Final = (
    click.option(
        "--broker",
        cls=SettingOption,
        envvar="TASKYARD_BROKER",
        show_default="in the state directory",
        multiple=True,
        metavar="URL",
        expose_value=False,
        callback=store_option("brokers"),
        help="Endpoint of the broker. `+` joins the endpoints of one broker. Commands that work "
        "with several brokers take it several times, with a --key or --invite for each.",
    ),
    click.option(
        "--state",
        cls=SettingOption,
        envvar="TASKYARD_STATE",
        show_default=NEAREST_STATE,
        type=click.Path(path_type=Path, readable=False),
        metavar="DIR",
        expose_value=False,
        callback=_store_state,
        help="State directory of the broker.",
    ),
    click.option(
        "--invite",
        cls=SettingOption,
        envvar=INVITE_VARIABLE,
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        multiple=True,
        callback=_accept_invitation,
        help="Connect as in this invitation of `taskyard keys invite`. - reads a line of stdin.",
    ),
    click.option(
        "--key",
        cls=SettingOption,
        envvar="TASKYARD_KEY",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
        expose_value=False,
        callback=store_option("keys"),
        help="Key file for a broker that requires keys.",
    ),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        cls=SettingOption,
        envvar="TASKYARD_CONFIG",
        show_default="nearest taskyard.toml, here or in a parent",
        is_eager=True,
        expose_value=False,
        callback=store_option("config"),
        help="Settings file.",
    ),
    click.option(
        "--broker-timeout",
        type=DURATION,
        metavar="D",
        expose_value=False,
        callback=store_option("broker_timeout"),
        help="Exit 3 if the broker does not reply for this long, as in 90s. If omitted, "
        "wait 5s for the first reply and without limit later.",
    ),
    # Eager, so that an error of another option is printed as JSON.
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_flag,
        help="Print a JSON document.",
    ),
    click.option(
        "-q",
        "--quiet",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_flag,
        help="Print no progress messages.",
    ),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_flag,
        help="Print the traceback of an error too.",
    ),
)


@cache
def common_options() -> tuple[click.Option, ...]:
    """Return the options of every command."""

    def holder() -> None: ...

    for option in _COMMON:
        option(holder)
    found: list[click.Option] = holder.__click_params__  # type: ignore[attr-defined]
    return tuple(found)
