"""`taskyard worker --dialect D`: what the verb does in the dialects that are not the native one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.worker.feeding import hire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.cli.options import Talk
    from taskyard.worker.loop import Settings
    from taskyard.worker.ping_pong import Clock
    from taskyard.worker.running import Runner

#: Where a broker's side for workers usually is.
USUAL: Final = {"ping-pong": "tcp://127.0.0.1:6002", "wmp": "tcp://127.0.0.1:6014"}


def words(command: str | None) -> list[str] | None:
    """A program and its arguments, as a shell would read them; none is run."""
    if command is None:
        return None
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--command {command} is no command: {error}; mend its quotes") from error
    if not argv:
        raise UserError("--command is empty: give a program, and its arguments after it")
    return argv


def places(talk: Talk, dialect: str, given: Sequence[str]) -> list[str]:
    """Where to go: what is given, else where the settings say that a broker listens."""
    found = [*given] or [talk.settings().listen.get(dialect, (USUAL[dialect],))[0]]
    return [endpoints.check_peer(one) for one in found]


def work_ping_pong(  # noqa: PLR0913  # an argument an option
    talk: Talk,
    place: str,
    command: Sequence[str] | None,
    allow: Sequence[str],
    slots: int,
    *,
    allow_pickle: bool,
    until_eof: bool,
) -> None:
    """Do the jobs of a broker's backend: one at a time on each of so many sockets."""
    from taskyard.worker import ping_pong  # noqa: PLC0415  # who speaks it pays for it

    def engage(clock: Clock) -> Runner:
        return hire(1, clock, command, allow, allow_pickle=allow_pickle)

    ping_pong.serve(place, engage, talk.say, slots=slots, until_eof=until_eof)


def work_wmp(  # noqa: PLR0913  # an argument an option
    talk: Talk,
    managers: Sequence[str],
    settings: Settings,
    command: Sequence[str] | None,
    allow: Sequence[str],
    *,
    allow_pickle: bool,
    until_eof: bool,
) -> None:
    """Work for several managers at once."""
    from taskyard.worker import wmp  # noqa: PLC0415  # likewise

    how = (managers, settings, allow, talk.say)
    wmp.serve(*how, command=command, allow_pickle=allow_pickle, until_eof=until_eof)
