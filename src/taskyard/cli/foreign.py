"""`taskyard worker`: what it was given, and what it does in dialects beside the native one."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.cli.daemons import cores
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.worker.agents import AgentSettings, read_command
from taskyard.worker.environment import read_variables
from taskyard.worker.feeding import hire
from taskyard.worker.serve import settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.cli.options import Talk
    from taskyard.worker.loop import Settings
    from taskyard.worker.running import Clock, Runner

#: Where a broker's side for workers usually is.
USUAL: Final = {"ping-pong": "tcp://127.0.0.1:6002", "wmp": "tcp://127.0.0.1:6014"}


class Given(Struct, frozen=True):
    """The options of a worker."""

    brokers: tuple[str, ...]
    state: Path | None
    slots: int | None
    services: tuple[str, ...]
    allow: tuple[str, ...]
    allow_pickle: bool
    name: str | None
    heartbeat: int
    lease: int
    dialect: str
    command: str | None
    agent: str | None
    env: tuple[str, ...]
    #: Of this process, and the first that it replaces: given by its supervisor.
    incarnation: int | None
    replaces: int
    until_eof: bool

    def argv(self) -> list[str] | None:
        """The program of --command and its arguments, as a shell would read them; none is run."""
        if self.command is None:
            return None
        try:
            argv = shlex.split(self.command)
        except ValueError as error:
            wrong = f"--command {self.command} is no command: {error}; mend its quotes"
            raise UserError(wrong) from error
        if not argv:
            raise UserError("--command is empty: give a program, and its arguments after it")
        return argv

    def agents(self) -> AgentSettings | None:
        """What --agent says."""
        return None if self.agent is None else AgentSettings(read_command(self.agent))

    def variables(self) -> dict[str, str]:
        """What agents find in their environment by --env."""
        return read_variables(self.env, os.environ)

    def settings(self, services: Sequence[str], name: str | None) -> Settings:
        more = {"heartbeat_ns": self.heartbeat, "silence_ns": self.lease}
        more |= {"replaces": self.replaces}
        if self.incarnation is not None:
            more["incarnation"] = self.incarnation
        return settings_of(self.slots or cores(), services, name, **more)

    def running(self) -> dict[str, Any]:
        """How tasks are run."""
        return {
            "command": self.argv(),
            "allow_pickle": self.allow_pickle,
            "until_eof": self.until_eof,
        }


def work_ping_pong(talk: Talk, given: Given) -> None:
    """Do the jobs of a broker's backend: one at a time on each of so many sockets."""
    from taskyard.worker import ping_pong  # noqa: PLC0415  # who speaks it pays for it

    argv = given.argv()

    def engage(clock: Clock) -> Runner:
        return hire(1, clock, argv, given.allow, allow_pickle=given.allow_pickle)

    slots = given.slots or cores()
    (place,) = _places(talk, given)
    ping_pong.serve(place, engage, talk.say, slots=slots, until_eof=given.until_eof)


def work_wmp(talk: Talk, given: Given) -> None:
    """Work for several managers at once."""
    from taskyard.worker import wmp  # noqa: PLC0415  # likewise

    settings = given.settings(given.services or ("default",), given.name)
    wmp.serve(_places(talk, given), settings, given.allow, talk.say, **given.running())


def _places(talk: Talk, given: Given) -> list[str]:
    """Where to go: what is given, else where the settings say that a broker listens."""
    usual = (USUAL[given.dialect],)
    found = given.brokers or talk.settings().listen.get(given.dialect, usual)[:1]
    return [endpoints.peer_endpoint(one) for one in found]
