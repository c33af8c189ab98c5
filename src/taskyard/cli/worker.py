"""`taskyard worker`: run a worker in the foreground, in one of three dialects."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from msgspec import Struct, structs

from taskyard.calls import current_task
from taskyard.calls.pickled import PICKLE
from taskyard.cli import daemon_options
from taskyard.cli.commands import Command
from taskyard.cli.options import DURATION, DURATION_OR_AUTO, CliContext, gathered, setting_option
from taskyard.cli.output import example
from taskyard.client import discovery
from taskyard.core.limits import HEARTBEATS_PER_LEASE_MIN, NAME_BYTES_MAX, NUMBER_MAX
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.process.machine import usable_cores
from taskyard.settings.keys import SLOTS_MAX, variable_of
from taskyard.settings.loader import Source
from taskyard.worker.agents.rules import AgentSettings
from taskyard.worker.agents.runner import read_command, read_variables
from taskyard.worker.call_process import CallOptions
from taskyard.worker.native_process import BrokerTarget, serve
from taskyard.worker.native_process import WorkerOptions as NativeOptions
from taskyard.worker.runner import ProcessRunner
from taskyard.worker.settings import check_workers_key, name_for_key, worker_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.resources import Resources
    from taskyard.forward.lower import LowerBroker
    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import Clock
    from taskyard.process.machine import Machine
    from taskyard.worker.settings import WorkerSettings

#: The usual endpoints of brokers for workers.
DEFAULT_ENDPOINTS: Final = {"ping-pong": "tcp://127.0.0.1:6002", "wmp": "tcp://127.0.0.1:6014"}


class WorkerOptions(Struct, frozen=True):
    """The options of a worker."""

    slots: int | None
    services: tuple[str, ...]
    allow: tuple[str, ...]
    allow_pickle: bool
    start_children: bool
    pass_output: bool
    calls_max: int
    name: str | None
    heartbeat: int
    lease: int
    #: Empty: that of the invitation, or dwork.
    dialect: str
    command: str | None
    agent: str | None
    env: tuple[str, ...]
    #: The broker that runs the tasks, its key, and a label of the broker that they come from.
    forward_to: str | None
    forward_key: Path | None
    forward_as: str | None
    #: Detected if None.
    cpus: int | None
    memory: int | None
    gpus: tuple[str, ...] | None
    resources: tuple[tuple[bytes, int], ...]
    #: The incarnation of this process and the first that it replaces. Set by a supervisor.
    incarnation: int | None
    replaces: int
    until_eof: bool
    brokers: tuple[str, ...] = ()
    state: Path | None = None

    def argv(self) -> list[str] | None:
        """Return --command split as by a shell, or None."""
        if self.command is None:
            return None
        try:
            argv = shlex.split(self.command)
        except ValueError as error:
            wrong = f"--command {self.command}: {error}"
            raise UserError(wrong) from error
        if not argv:
            raise UserError("--command: empty")
        return argv

    def agent_settings(self) -> AgentSettings | None:
        """Return the settings of --agent."""
        if self.agent is None:
            return None
        return AgentSettings(read_command(self.agent), lines="")

    def variables(self) -> dict[str, str]:
        """Return the environment of agents from --env."""
        return read_variables(self.env, os.environ)

    def settings(
        self, services: Sequence[str], name: str | None, resources: Resources = ()
    ) -> WorkerSettings:
        settings = worker_settings(
            self.slots or usable_cores(),
            services,
            name,
            resources,
            heartbeat_ns=self.heartbeat,
            lease_timeout_ns=self.lease,
            replaces=self.replaces,
        )
        if self.incarnation is None:
            return settings
        return structs.replace(settings, incarnation=self.incarnation)

    def machine(self) -> Machine:
        """Return the resources of this worker."""
        return daemon_options.machine_of(self.cpus, self.memory, self.gpus, self.resources)


@click.command(
    cls=Command,
    is_peer=True,
    groups={
        "Work": ("services", "allow", "allow_pickle", "command", "agent", "env"),
        "Capacity": ("slots", "cpus", "memory", "gpus", "resources"),
        "Broker": ("dialect", "name", "heartbeat", "lease"),
        "Another broker": ("forward_to", "forward_key", "forward_as"),
    },
    most=(
        "services",
        "allow",
        "allow_pickle",
        "command",
        "agent",
        "slots",
        "cpus",
        "memory",
        "gpus",
        "dialect",
    ),
    epilog=example("worker --slots 4 --allow imaging --state ./.taskyard"),
)
@setting_option(
    "worker.slots",
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    metavar="N",
    show_default="one per core",
    help="Tasks at once.",
)
@daemon_options.resource_options
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="S",
    show_default="exec, call; with --agent: default",
    help="Service that the worker offers. Repeatable.",
)
@setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module and its submodules. Repeatable.",
)
@daemon_options.allow_pickle_option
@click.option("--name", metavar="NAME", show_default="HOST-PID", help="Name of the worker.")
@setting_option(
    "lease.heartbeat",
    "--heartbeat",
    type=DURATION_OR_AUTO,
    show_default="auto",
    help="Heartbeat interval. auto: set by the broker, from 1s to a third of --lease, or up to "
    "--lease without tasks.",
)
@setting_option(
    "lease.expire",
    "--lease",
    type=DURATION,
    show_default="15s",
    help="Lease timeout: without a heartbeat for this long, its tasks go to other workers.",
)
@click.option(
    "--dialect",
    metavar="D",
    default="",
    show_default="dwork, or that of --invite",
    help="Dialect: dwork, ping-pong or wmp.",
)
@click.option(
    "--command",
    metavar="COMMAND",
    help="Run this program for tasks of other services than exec and call. It gets "
    "the payload on stdin, and its stdout is the result.",
)
@click.option(
    "--agent",
    metavar="COMMAND",
    help="Send tasks to this long-running program line by line, one program per slot. "
    "{lane} and {service} in it are replaced, for a program per lane. If omitted, use the command "
    "of the service in the broker's settings.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Pass this variable to agents, with the worker's value if none is given. Repeatable.",
)
@click.option(
    "--forward-to",
    metavar="URL|DIR",
    help="Run the tasks on the workers of this broker, given by its endpoint or state directory.",
)
@click.option(
    "--forward-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key for that broker, of a producer.",
)
@click.option(
    "--forward-as",
    metavar="LABEL",
    show_default="from --broker",
    help="Name of this worker's broker in the campaigns there: CAMPAIGN@LABEL.",
)
# For supervisors.
@click.option("--start-children", is_flag=True, hidden=True)
@click.option("--pass-output", is_flag=True, hidden=True)
@click.option("--calls-max", type=click.IntRange(0), default=0, hidden=True)
@click.option("--incarnation", type=click.IntRange(1, NUMBER_MAX), hidden=True)
@click.option("--replaces", type=click.IntRange(0, NUMBER_MAX), default=0, hidden=True)
@daemon_options.log_options
@daemon_options.until_eof_option
@click.pass_obj
@gathered(WorkerOptions, "values")
def worker(cli_context: CliContext, *, values: WorkerOptions) -> None:
    """Run a worker in the foreground.

    Programs (service exec) run in the worker's working directory. Functions (service call) must be
    in a module given by --allow. With --allow-pickle, pickled functions (service pickle) are called
    too: then every peer that can submit tasks can run any code here.

    Payloads of other services go to --command or --agent. An agent is a program that reads tasks
    and writes reports line by line. It starts on demand in the worker's working directory. The
    environment has PATH, HOME, LANG, LC_*, TZ, USER, TMPDIR and the variables of --env.

    Tasks that ask for cores, memory or GPUs get them from what the system shows, unless it is
    given. GPUs are passed to tasks by id in CUDA_VISIBLE_DEVICES.

    With --forward-to the worker submits its tasks to another broker and returns their results. It
    has the slots and resources of that broker's workers, unless --slots is given. With --dialect
    wmp, the tasks of a foreign manager are in the campaign @MANAGER there.

    With --dialect ping-pong or wmp, --broker is the endpoint where the broker listens for that
    dialect, by default that of [listen] in the settings. The worker offers the listener's service.

    With several brokers, the worker shares its slots over all that have tasks. Each broker that
    requires a key needs a --key, in the same order. If no broker is running, the worker waits.

    On SIGTERM or Ctrl-C it finishes its running tasks and exits 0. A second signal kills them and
    returns them to the broker.
    """
    values = _with_brokers(cli_context, values)
    _check(values)
    daemon_options.open_log(cli_context, "worker")
    _RUNNERS_BY_DIALECT[values.dialect](cli_context, values)


def _with_brokers(cli_context: CliContext, values: WorkerOptions) -> WorkerOptions:
    """Add the dialect and the endpoints, where given. `discovery` finds the endpoints of dwork."""
    state, brokers = cli_context.state, cli_context.brokers
    is_given = cli_context.invitation is not None
    is_sought = is_given or state is None
    invitation = cli_context.find_invitation() if is_sought else None
    dialect = values.dialect or ("dwork" if invitation is None else invitation.dialect)
    if is_sought and not is_given and not brokers and dialect != "dwork":
        brokers = _brokers_of_environment(cli_context)
    if invitation is not None and not brokers:
        if dialect != invitation.dialect:
            raise UserError(
                f"--dialect {dialect}: the invitation is for {invitation.dialect} (give --broker)"
            )
        if is_given or dialect != "dwork":
            brokers = invitation.endpoints[: 1 if dialect == "ping-pong" else None]
    return structs.replace(values, dialect=dialect, brokers=brokers, state=state)


def _brokers_of_environment(cli_context: CliContext) -> tuple[str, ...]:
    """Return the endpoints in TASKYARD_BROKER. A file has other dialects in `listen`."""
    settings = cli_context.settings()
    is_there = settings.source("broker.url") is Source.ENVIRONMENT
    return discovery.configured_endpoints(settings) if is_there else ()


def _check(values: WorkerOptions) -> None:
    if daemon_options.check_dialect(values.dialect) not in _RUNNERS_BY_DIALECT:
        raise UserError(
            f"--dialect {values.dialect}: not supported (use "
            f"{', '.join(_RUNNERS_BY_DIALECT)}, or `taskyard rr worker`)"
        )
    if values.agent is not None:
        _check_agent(values)
    _check_forward(values)
    if values.lease < HEARTBEATS_PER_LEASE_MIN * values.heartbeat:
        raise UserError("--lease must be at least three times --heartbeat")
    if (given := daemon_options.given_resource_options()) and values.dialect != "dwork":
        raise UserError(f"{', '.join(given)}: needs --dialect dwork, not {values.dialect}")
    if len(values.brokers) > 1 and values.dialect == "ping-pong":
        raise UserError("--broker, TASKYARD_BROKER: a ping-pong worker has one broker")


def _check_forward(values: WorkerOptions) -> None:
    if values.forward_to is None:
        if values.forward_key is not None or values.forward_as is not None:
            raise UserError("--forward-key and --forward-as need --forward-to")
        return
    if values.dialect not in ("dwork", "wmp"):
        raise UserError(f"--forward-to needs --dialect dwork or wmp, not {values.dialect}")
    excluded = {
        "--agent": values.agent,
        "--command": values.command,
        **dict.fromkeys(daemon_options.given_resource_options(), True),
    }
    for option, given in excluded.items():
        if given:
            raise UserError(f"--forward-to and {option} exclude each other")


def _check_agent(values: WorkerOptions) -> None:
    if values.dialect != "dwork":
        raise UserError(f"--agent needs --dialect dwork, not {values.dialect}")
    if values.command is not None:
        raise UserError("--agent and --command exclude each other")


def _run_native_worker(cli_context: CliContext, values: WorkerOptions) -> None:
    """Run a worker of the native dialect."""
    services = values.services or _default_services(cli_context, values)
    found, keys = _native_brokers(cli_context, values)
    if values.forward_to is not None:
        _forward(cli_context, values, found, keys)
        return
    machine = values.machine()
    resources = machine.resources()
    brokers = [
        BrokerTarget(
            one, key, values.settings(services, name_for_key(key, values.name), resources), env
        )
        for one, key, env in zip(found, keys, _task_variables(cli_context, found), strict=True)
    ]
    options = NativeOptions(
        values.allow,
        allow_pickle=values.allow_pickle,
        starts_children=values.start_children,
        call_options=CallOptions(values.calls_max, values.pass_output),
        command=values.argv(),
        agents=values.agent_settings(),
        env=values.variables(),
        gpus=machine.gpus,
    )
    serve(brokers, options, cli_context.info, until_eof=values.until_eof)


def _native_brokers(
    cli_context: CliContext, values: WorkerOptions
) -> tuple[Sequence[str], Sequence[PeerKey | None]]:
    """Return the endpoints of the brokers, and the key for each."""
    settings = cli_context.settings()
    found = discovery.worker_endpoints(values.brokers, values.state, settings)
    if not cli_context.keys and cli_context.invitation is not None:
        return found, [cli_context.invitation.key] * len(found)
    return found, discovery.keys_for(found, cli_context.keys, settings=settings)


def _task_variables(cli_context: CliContext, found: Sequence[str]) -> list[dict[str, str]]:
    """Return the variables for the tasks of each broker: its endpoint, and the key file if any."""
    keys: Sequence[Path] = cli_context.keys
    if not keys and cli_context.invitation_file is not None:
        keys = [cli_context.invitation_file] * len(found)
    files = discovery.key_files_for(found, keys, cli_context.settings())
    cache = str(cli_context.settings().blobs.cache_bytes)
    return [
        {**current_task.broker_variables(one, file), variable_of("blobs", "cache"): cache}
        for one, file in zip(found, files, strict=True)
    ]


def _forward(
    cli_context: CliContext,
    values: WorkerOptions,
    found: Sequence[str],
    keys: Sequence[PeerKey | None],
) -> None:
    """Run a worker whose tasks run at another broker."""
    from taskyard.forward import runner  # noqa: PLC0415  # only for this option

    is_native = values.dialect == "dwork"
    if len(found) > 1 and is_native:
        raise UserError("--forward-to: a forwarder works for one --broker")
    name = _name_for_keys(keys, values.name)
    services = values.services
    if is_native and not services:
        services = _default_services(cli_context, values)
    lower = _connect_lower(cli_context, values, found)
    capacity = lower.capacity()
    slots, resources = capacity or (usable_cores(), ())
    chosen = structs.replace(values, slots=values.slots or slots)
    target = lower.endpoint.encode(errors="surrogateescape")[:NAME_BYTES_MAX]
    settings = chosen.settings(services, name, resources)
    settings = structs.replace(settings, forwards=True, forwards_to=target)
    if is_native:
        runner.serve(
            found[0],
            settings,
            lower,
            cli_context.info,
            key=keys[0],
            slots=values.slots,
            until_eof=values.until_eof,
        )
    else:
        runner.serve_wmp(
            found,
            settings,
            lower,
            cli_context.info,
            keys=keys,
            slots=values.slots,
            until_eof=values.until_eof,
        )


def _connect_lower(
    cli_context: CliContext, values: WorkerOptions, found: Sequence[str]
) -> LowerBroker:
    """Connect to the broker of --forward-to. Raises `UserError` if it is one of `found`."""
    from taskyard.forward import runner  # noqa: PLC0415  # only for this option

    target = values.forward_to or ""
    is_directory = "://" not in target
    broker = endpoints.native_endpoint(Path(target)) if is_directory else target
    broker = endpoints.peer_endpoint(broker)
    addresses = {address for one in found for address in endpoints.parse_addresses(one)}
    if addresses.intersection(endpoints.parse_addresses(broker)):
        raise UserError(f"--forward-to {target}: the worker's own broker")
    return runner.connect_lower(
        broker, values.forward_key, values.forward_as, found[0], cli_context.info
    )


def _default_services(cli_context: CliContext, values: WorkerOptions) -> tuple[str, ...]:
    """Return the services of the settings, with pickle if it is allowed.

    An agent has no use for the usual services, so it offers the service of plain payloads.
    """
    settings = cli_context.settings()
    if values.agent is not None and settings.source("worker.services") is Source.DEFAULT:
        return ("default",)
    more = (PICKLE.decode(),) if values.allow_pickle else ()
    return tuple(dict.fromkeys(settings.worker.services + more))


def _run_ping_pong_worker(cli_context: CliContext, values: WorkerOptions) -> None:
    """Run a ping-pong worker: one socket per slot, one job at a time on each."""
    from taskyard.worker import ping_pong  # noqa: PLC0415  # only for this dialect

    argv = values.argv()

    def runner_for(clock: Clock) -> ProcessRunner:
        return ProcessRunner(1, values.allow, clock, command=argv, allow_pickle=values.allow_pickle)

    slots = values.slots or usable_cores()
    (endpoint,) = _endpoints(cli_context, values)
    (key,) = _keys(cli_context, [endpoint])
    check_workers_key(key)
    ping_pong.serve(
        endpoint,
        runner_for,
        cli_context.info,
        slots=slots,
        key=key,
        until_eof=values.until_eof,
    )


def _run_wmp_worker(cli_context: CliContext, values: WorkerOptions) -> None:
    """Run a WMP worker, for one or several managers."""
    from taskyard.worker import wmp  # noqa: PLC0415  # only for this dialect

    found = _endpoints(cli_context, values)
    keys = _keys(cli_context, found)
    if values.forward_to is not None:
        _forward(cli_context, values, found, keys)
        return
    settings = values.settings(values.services, _name_for_keys(keys, values.name))
    wmp.serve(
        found,
        settings,
        values.allow,
        cli_context.info,
        keys=keys,
        command=values.argv(),
        allow_pickle=values.allow_pickle,
        until_eof=values.until_eof,
    )


def _name_for_keys(keys: Sequence[PeerKey | None], name: str | None) -> str | None:
    """Return the name under which all keys let this worker run. Raises `UserError`."""
    for key in keys:
        name = name_for_key(key, name)
    return name


def _keys(cli_context: CliContext, found: Sequence[str]) -> list[PeerKey | None]:
    """Return the key for each endpoint over TCP: one for all, or one for each."""
    if not cli_context.keys and cli_context.invitation is not None:
        return [cli_context.invitation.key] * len(found)
    settings = cli_context.settings()
    if len(cli_context.keys) > 1:
        return discovery.keys_for(found, cli_context.keys, settings=settings)
    return [discovery.key_for(one, cli_context.key, settings=settings) for one in found]


def _endpoints(cli_context: CliContext, values: WorkerOptions) -> list[str]:
    """Return the given endpoints, by default the endpoints of the settings."""
    usual = (DEFAULT_ENDPOINTS[values.dialect],)
    found = values.brokers or cli_context.settings().listen.get(values.dialect, usual)[:1]
    return [endpoints.peer_endpoint(one) for one in found]


#: The worker functions by dialect.
_RUNNERS_BY_DIALECT: Final[dict[str, Callable[[CliContext, WorkerOptions], None]]] = {
    "dwork": _run_native_worker,
    "ping-pong": _run_ping_pong_worker,
    "wmp": _run_wmp_worker,
}
