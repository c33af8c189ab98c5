"""Options, endpoint parsing and logging of the commands that run in the foreground."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.options import CliContext, CommandFunction, setting_option, store_option
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.process.machine import usable_cores
from taskyard.settings.files import InvalidSettings
from taskyard.settings.keys import SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.settings.sections import Settings

#: Dialects of a broker, with the number of endpoints of each.
DIALECT_SIDES: Final = {"dwork": 1, "ping-pong": 2, "round-robin": 1, "wmp": 1}
DIALECTS: Final = tuple(DIALECT_SIDES)


def _set_until_eof(context: click.Context, _option: click.Parameter, given: bool) -> bool:  # noqa: FBT001  # click's signature
    context.ensure_object(CliContext).is_supervised = given
    return given


until_eof_option = click.option(
    "--until-eof",
    is_flag=True,
    is_eager=True,
    callback=_set_until_eof,
    help="Also stop when stdin is closed. For supervisors.",
)


#: For commands that start workers.
allow_option = setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module. Repeatable.",
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


def slots_option(*names: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option for the slots of workers that a command starts, by these names."""
    return setting_option(
        "worker.slots",
        *names,
        type=SlotCount(),
        metavar="N",
        show_default="one per core",
        help="Tasks to run at once, in each worker: a number, or a share of the cores, as in 50%.",
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
    """Add --listen and --native-only, for commands that start a broker."""
    listen = click.option(
        "--listen",
        multiple=True,
        callback=_listen_default,
        metavar="DIALECT=ENDPOINT",
        help="Listen here too: dwork=tcp://127.0.0.1:6125. Port 0 picks a free port. Repeatable.",
    )
    native_only = click.option(
        "--native-only",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=store_option("native_only"),
        help="Open the native socket only and ignore the settings.",
    )
    return listen(native_only(command))


secure_option = click.option("--secure", is_flag=True, help="Require keys on loopback TCP too.")


def check_dialect(dialect: str) -> str:
    """Return the dialect. Raise `UserError` if it is unknown."""
    if dialect in DIALECTS:
        return dialect
    raise UserError(f"unknown dialect {dialect!r} (known: {', '.join(DIALECTS)})")


def read_listen(listen: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Parse `DIALECT=ENDPOINT` options."""
    pairs: list[tuple[str, str]] = []
    for given in listen:
        dialect, sign, endpoint = given.partition("=")
        if not sign:
            raise UserError(
                f"--listen {given}: expected DIALECT=ENDPOINT, as in dwork=tcp://127.0.0.1:0"
            )
        pairs.append((check_dialect(dialect), _check_endpoints(dialect, endpoint)))
    return tuple(pairs)


def _check_endpoints(dialect: str, given: str) -> str:
    """Return the endpoints of a dialect, normalized and joined by commas."""
    found = [endpoints.listen_endpoint(one) for one in endpoints.split_endpoints(given)]
    if len(found) != DIALECT_SIDES[dialect]:
        form, what = (
            ("BACKEND,FRONTEND", "two endpoints")
            if DIALECT_SIDES[dialect] > 1
            else ("ENDPOINT", "one endpoint")
        )
        raise UserError(f"{dialect}: expected {what}, got {len(found)} ({dialect}={form})")
    return ",".join(found)


def listen_setting(settings: Settings) -> tuple[str, ...]:
    """Return the endpoints of the settings as --listen options. Raises `InvalidSettings`."""
    return tuple(pair for dialect in settings.listen for pair in listen_pairs(settings, dialect))


def listen_pairs(settings: Settings, dialect: str) -> tuple[str, ...]:
    """Return the endpoints of one dialect in the settings as --listen options."""
    found = settings.listen[dialect]
    # Both endpoints of ping-pong make one listener. Other dialects have a listener per endpoint.
    values = (",".join(found),) if dialect == "ping-pong" else found
    pairs = tuple(f"{dialect}={value}" for value in values)
    try:
        read_listen(pairs)
    except UserError as wrong:
        path = f"listen.{dialect}"
        raise InvalidSettings(f"{settings.all[path].origin}: {path}: {wrong}") from wrong
    return pairs


def log_to_stderr(cli_context: CliContext, process_name: str) -> None:
    """Log to stderr: warnings, more with -v, only errors with -q."""
    level = logging.INFO if cli_context.verbose else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"taskyard {process_name}: %(message)s"))
    logger = logging.getLogger("taskyard")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.ERROR if cli_context.quiet else level)
