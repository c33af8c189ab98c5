"""`taskyard worker`: does the tasks of a broker, in the foreground."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from taskyard.cli.daemon_options import (
    check_dialect,
    log_to_stderr,
    until_eof_option,
    usable_cores,
)
from taskyard.cli.options import (
    DURATION,
    CliContext,
    broker_state_option,
    config_option,
    key_option,
    quiet_option,
    setting_option,
    verbose_option,
)
from taskyard.cli.output import example
from taskyard.client import discovery
from taskyard.core.limits import NUMBER_MAX
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.settings.keys import SLOTS_MAX
from taskyard.settings.loader import HEARTBEATS_PER_LEASE_MIN
from taskyard.wire.pickled import PICKLE
from taskyard.worker.agents.runner import AgentSettings, read_command, read_variables
from taskyard.worker.native_process import serve
from taskyard.worker.runner import make_runner
from taskyard.worker.settings import name_for_key, worker_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

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


@click.command(epilog=example("worker --slots 4 --allow imaging --state ./.taskyard"))
@click.option(
    "--broker",
    "brokers",
    multiple=True,
    metavar="URL",
    help="The broker's endpoint; that of the state directory if not given. With --dialect wmp "
    "repeatable.",
)
@broker_state_option
@key_option
@config_option
@setting_option(
    "worker.slots",
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    metavar="N",
    help="Tasks at once; one a core.",
)
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="S",
    help="A kind of tasks to do; exec and call if not given. Repeatable.",
)
@setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module and those below it. Repeatable.",
)
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Offer the service pickle: call whatever function is sent along.",
)
@click.option("--name", metavar="NAME", help="What to call it; host and process if not given.")
@setting_option("lease.heartbeat", "--heartbeat", type=DURATION, help="How often to show life; 1s.")
@setting_option(
    "lease.expire",
    "--lease",
    type=DURATION,
    help="Silence after which others get its tasks; 15s.",
)
@click.option(
    "--dialect", default="dwork", metavar="D", help="The language to speak: dwork, ping-pong, wmp."
)
@click.option(
    "--command",
    metavar="COMMAND",
    help="Run this for tasks of other services than exec and call: it reads the payload from "
    "stdin, and what it prints is the result.",
)
@click.option(
    "--agent",
    metavar="COMMAND",
    help="Feed all tasks to this program, a line each, and keep it for the next ones; one a slot. "
    "If not given, the command that the broker's settings name for a service, if they name one.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Give agents this variable, or the worker's own of this name. Repeatable.",
)
# For supervisors: the number of this start, and the first number of those that have ended.
@click.option("--incarnation", type=click.IntRange(1, NUMBER_MAX), hidden=True)
@click.option("--replaces", type=click.IntRange(0, NUMBER_MAX), default=0, hidden=True)
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def worker(cli_context: CliContext, /, **options: Any) -> None:  # noqa: ANN401  # as `WorkerOptions` says
    """Do the tasks of a broker, in the foreground.

    Programs (service exec) run in the directory in which the worker was started. Functions (service
    call) are those of modules that are allowed by name; with --allow-pickle, functions that come
    along (service pickle) are called too: whoever can reach the broker can then do here what you
    can. Payloads of other services are for --command, or for --agent: a program that reads tasks
    and writes reports, line by line. Services for which the broker's settings have a command are
    fed to that; it is started when there is work, in the directory in which the worker was started,
    and finds PATH, HOME, LANG, LC_*, TZ, USER, TMPDIR and what --env gives in its environment.
    Without a broker it waits for one.

    In the dialects ping-pong and wmp it is a worker of the service default, unless wmp is told
    another by --service; --broker is where a broker listens to them.

    SIGTERM and Ctrl-C let it leave: it takes no more, finishes what runs, and exits 0. A second one
    ends what runs and gives it back.
    """
    values = WorkerOptions(**options)
    _check(values)
    log_to_stderr(cli_context, "worker")
    _RUNNERS_BY_DIALECT[values.dialect](cli_context, values)


def _check(values: WorkerOptions) -> None:
    if check_dialect(values.dialect) not in _RUNNERS_BY_DIALECT:
        raise UserError(
            f"this verb does not speak {values.dialect}; use `taskyard rr worker`, or one of "
            f"{', '.join(_RUNNERS_BY_DIALECT)}"
        )
    if values.agent is not None:
        _check_agent(values)
    if values.lease < HEARTBEATS_PER_LEASE_MIN * values.heartbeat:
        raise UserError(
            "--lease must be at least three times --heartbeat, or one lost message costs the tasks"
        )
    if len(values.brokers) > 1 and values.dialect != "wmp":
        raise UserError(f"a worker of {values.dialect} has one broker: give --broker once")


def _check_agent(values: WorkerOptions) -> None:
    if not values.services:
        raise UserError("--agent needs --service: say which tasks the program can do")
    if values.dialect != "dwork":
        raise UserError(f"--agent goes with --dialect dwork, not with {values.dialect}")
    if values.command is not None:
        raise UserError("give --agent or --command, not both: each is for all other services")


def _run_native_worker(cli_context: CliContext, values: WorkerOptions) -> None:
    """In the native dialect."""
    services = values.services or _default_services(cli_context, allow_pickle=values.allow_pickle)
    broker = values.brokers[0] if values.brokers else None
    endpoint = discovery.endpoint(broker, values.state, settings=cli_context.settings())
    key = discovery.key_for(endpoint, cli_context.key, settings=cli_context.settings())
    settings = values.settings(services, name_for_key(key, values.name))
    how = {**values.runner_options(), "agents": values.agent_settings(), "env": values.variables()}
    serve(endpoint, settings, values.allow, cli_context.info, key=key, **how)


def _default_services(cli_context: CliContext, *, allow_pickle: bool) -> tuple[str, ...]:
    """Those that are set; what is allowed besides is served, too."""
    more = (PICKLE.decode(),) if allow_pickle else ()
    return tuple(dict.fromkeys(cli_context.settings().worker.services + more))


def _run_ping_pong_worker(cli_context: CliContext, values: WorkerOptions) -> None:
    """Do the jobs of a broker's backend: one at a time on each of so many sockets."""
    from taskyard.worker import ping_pong  # noqa: PLC0415  # who speaks it pays for it

    argv = values.argv()

    def runner_for(clock: Clock) -> ProcessRunner:
        return make_runner(1, clock, argv, values.allow, allow_pickle=values.allow_pickle)

    slots = values.slots or usable_cores()
    (place,) = _endpoints(cli_context, values)
    ping_pong.serve(place, runner_for, cli_context.info, slots=slots, until_eof=values.until_eof)


def _run_wmp_worker(cli_context: CliContext, values: WorkerOptions) -> None:
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


#: How to work, by dialect.
_RUNNERS_BY_DIALECT: Final[dict[str, Callable[[CliContext, WorkerOptions], None]]] = {
    "dwork": _run_native_worker,
    "ping-pong": _run_ping_pong_worker,
    "wmp": _run_wmp_worker,
}
