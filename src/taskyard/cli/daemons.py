"""What the verbs that run until they are stopped have in common: their options and their log."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Final

import click

from taskyard.errors import UserError
from taskyard.net import endpoints

if TYPE_CHECKING:
    from taskyard.cli.options import Talk

#: What a broker can listen to, and what it will.
DIALECTS: Final = ("dwork",)
DIALECTS_LATER: Final = ("round-robin", "ping-pong", "wmp")

#: What a worker serves unless told otherwise: programs and functions.
SERVICES: Final = ("exec", "call")

until_eof_option = click.option(
    "--until-eof",
    is_flag=True,
    help="Stop also when stdin ends: for programs that start it and must not leave it behind.",
)

listen_option = click.option(
    "--listen",
    multiple=True,
    metavar="DIALECT=ENDPOINT",
    help="Listen there, too: dwork=tcp://127.0.0.1:6125. Port 0 takes a free one. Repeatable.",
)


def check_dialect(dialect: str) -> str:
    """The dialect, if it is spoken."""
    if dialect in DIALECTS:
        return dialect
    if dialect in DIALECTS_LATER:
        raise UserError(f"the dialect {dialect} comes later; this version speaks dwork")
    known = ", ".join(DIALECTS + DIALECTS_LATER)
    raise UserError(f"there is no dialect {dialect!r}; the dialects are {known}")


def read_listen(listen: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Dialects and endpoints that were given as `DIALECT=ENDPOINT`."""
    pairs: list[tuple[str, str]] = []
    for given in listen:
        dialect, sign, endpoint = given.partition("=")
        if not sign:
            raise UserError(f"--listen {given} must be DIALECT=ENDPOINT: dwork=tcp://127.0.0.1:0")
        pairs.append((check_dialect(dialect), endpoints.check(endpoint)))
    return tuple(pairs)


def log_to_stderr(talk: Talk, who: str) -> None:
    """What goes on inside: warnings always, more with -v, errors alone with -q."""
    level = logging.INFO if talk.verbose else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"taskyard {who}: %(message)s"))
    logger = logging.getLogger("taskyard")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.ERROR if talk.quiet else level)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
