"""`taskyard worker`: what it was given, and what it does in dialects beside the native one."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.cli.daemon_options import usable_cores
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.worker.agents.runner import AgentSettings, read_command, read_variables
from taskyard.worker.runner import make_runner
from taskyard.worker.settings import worker_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.cli.options import CliContext
    from taskyard.net.protocols import Clock
    from taskyard.worker.runner import ProcessRunner
    from taskyard.worker.settings import WorkerSettings

#: Where a broker's side for workers usually is.
DEFAULT_ENDPOINTS: Final = {"ping-pong": "tcp://127.0.0.1:6002", "wmp": "tcp://127.0.0.1:6014"}


class WorkerOptions(Struct, frozen=True):
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

    def agent_settings(self) -> AgentSettings | None:
        """What --agent says."""
        return None if self.agent is None else AgentSettings(read_command(self.agent))

    def variables(self) -> dict[str, str]:
        """What agents find in their environment by --env."""
        return read_variables(self.env, os.environ)

    def settings(self, services: Sequence[str], name: str | None) -> WorkerSettings:
        more = {"heartbeat_ns": self.heartbeat, "lease_timeout_ns": self.lease}
        more |= {"replaces": self.replaces}
        if self.incarnation is not None:
            more["incarnation"] = self.incarnation
        return worker_settings(self.slots or usable_cores(), services, name, **more)

    def runner_options(self) -> dict[str, Any]:
        """How tasks are run."""
        return {
            "command": self.argv(),
            "allow_pickle": self.allow_pickle,
            "until_eof": self.until_eof,
        }


def run_ping_pong_worker(cli_context: CliContext, values: WorkerOptions) -> None:
    """Do the jobs of a broker's backend: one at a time on each of so many sockets."""
    from taskyard.worker import ping_pong  # noqa: PLC0415  # who speaks it pays for it

    argv = values.argv()

    def runner_for(clock: Clock) -> ProcessRunner:
        return make_runner(1, clock, argv, values.allow, allow_pickle=values.allow_pickle)

    slots = values.slots or usable_cores()
    (place,) = _endpoints(cli_context, values)
    ping_pong.serve(place, runner_for, cli_context.info, slots=slots, until_eof=values.until_eof)


def run_wmp_worker(cli_context: CliContext, values: WorkerOptions) -> None:
    """Work for several managers at once."""
    from taskyard.worker import wmp  # noqa: PLC0415  # likewise

    settings = values.settings(values.services or ("default",), values.name)
    wmp.serve(
        _endpoints(cli_context, values),
        settings,
        values.allow,
        cli_context.info,
        **values.runner_options(),
    )


def _endpoints(cli_context: CliContext, values: WorkerOptions) -> list[str]:
    """Where to go: what is given, else where the settings say that a broker listens."""
    usual = (DEFAULT_ENDPOINTS[values.dialect],)
    found = values.brokers or cli_context.settings().listen.get(values.dialect, usual)[:1]
    return [endpoints.peer_endpoint(one) for one in found]
