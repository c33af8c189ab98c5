"""What the verbs that run until they are stopped have in common: their options and their log."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.options import CliContext, CommandFunction, store_option
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.settings.files import InvalidSettings

if TYPE_CHECKING:
    from taskyard.settings.sections import Settings

#: What a broker can listen to, each with how many endpoints it has.
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
    help="Stop also when stdin ends: for programs that start it and must not leave it behind.",
)


def _listen_default(
    context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """What is given is all: then the section of the settings is left aside."""
    cli_context = context.ensure_object(CliContext)
    if context.resilient_parsing or given or cli_context.native_only:
        return given
    return listen_setting(cli_context.settings())


def listen_option(command: CommandFunction) -> CommandFunction:
    """For verbs that start a broker which others can come to."""
    listen = click.option(
        "--listen",
        multiple=True,
        callback=_listen_default,
        metavar="DIALECT=ENDPOINT",
        help="Listen there, too: dwork=tcp://127.0.0.1:6125. Port 0 takes a free one. Repeatable.",
    )
    native_only = click.option(
        "--native-only",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=store_option("native_only"),
        help="Listen nowhere else, whatever the settings say.",
    )
    return listen(native_only(command))


secure_option = click.option(
    "--secure", is_flag=True, help="Demand keys on TCP of this machine, too."
)


def check_dialect(dialect: str) -> str:
    """The dialect, if it is spoken."""
    if dialect in DIALECTS:
        return dialect
    raise UserError(f"there is no dialect {dialect!r}; use one of {', '.join(DIALECTS)}")


def read_listen(listen: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Dialects and endpoints that were given as `DIALECT=ENDPOINT`."""
    pairs: list[tuple[str, str]] = []
    for given in listen:
        dialect, sign, endpoint = given.partition("=")
        if not sign:
            raise UserError(f"--listen {given} must be DIALECT=ENDPOINT: dwork=tcp://127.0.0.1:0")
        pairs.append((check_dialect(dialect), _check_endpoints(dialect, endpoint)))
    return tuple(pairs)


def _check_endpoints(dialect: str, given: str) -> str:
    """In their one spelling."""
    found = [endpoints.listen_endpoint(one) for one in endpoints.split_endpoints(given)]
    if len(found) != DIALECT_SIDES[dialect]:
        form, what = (
            ("BACKEND,FRONTEND", "two") if DIALECT_SIDES[dialect] > 1 else ("ENDPOINT", "one")
        )
        raise UserError(f"{dialect} listens at {what}, not {len(found)}: give {dialect}={form}")
    return ",".join(found)


def listen_setting(settings: Settings) -> tuple[str, ...]:
    """Where to listen by the settings, as it would be given. Raises `InvalidSettings`."""
    return tuple(pair for dialect in settings.listen for pair in listen_pairs(settings, dialect))


def listen_pairs(settings: Settings, dialect: str) -> tuple[str, ...]:
    """The same for one of the dialects that are set."""
    found = settings.listen[dialect]
    # The two of ping-pong belong together; others listen at each by itself.
    values = (",".join(found),) if dialect == "ping-pong" else found
    pairs = tuple(f"{dialect}={value}" for value in values)
    try:
        read_listen(pairs)
    except UserError as wrong:
        path = f"listen.{dialect}"
        raise InvalidSettings(f"{settings.all[path].origin}: {path}: {wrong}") from wrong
    return pairs


def log_to_stderr(cli_context: CliContext, process_name: str) -> None:
    """What goes on inside: warnings always, more with -v, errors alone with -q."""
    level = logging.INFO if cli_context.verbose else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"taskyard {process_name}: %(message)s"))
    logger = logging.getLogger("taskyard")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.ERROR if cli_context.quiet else level)


def usable_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
