"""`taskyard rr`: server, worker and client of the round-robin dialect, each with a prompt.

The server is the ordinary broker. Owns the commands of server and client. The worker's are in
`worker.round_robin`.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import shlex
import shutil
import signal
import threading
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.broker.broker_settings import BrokerSettings
from taskyard.broker.server import serve
from taskyard.cli.daemon_options import open_log, read_listen
from taskyard.cli.format import format_count
from taskyard.cli.options import (
    CliContext,
    config_option,
    single_invite_option,
    single_key_option,
    state_option,
)
from taskyard.cli.output import example
from taskyard.cli.prompt import QUIT, Console, read_commands, run_command, run_prompt
from taskyard.client import discovery
from taskyard.client.client import Client
from taskyard.core.limits import SECOND_NS
from taskyard.errors import TaskyardError, UserError
from taskyard.net import endpoints, sockets
from taskyard.net.host import Host
from taskyard.net.round_robin import RoundRobinLoop
from taskyard.wire.dialect import ROUND_ROBIN
from taskyard.wire.round_robin.client import Client as RoundRobinClient
from taskyard.wire.round_robin.frames import DIALECT, ENDPOINT, KEY_BYTES_MAX, SLOTS_MAX
from taskyard.wire.round_robin.frames import logger as message_logger
from taskyard.wire.round_robin.peer import BASIC, RESERVED_KEYS, SLOTS, SUMMARIES
from taskyard.worker import round_robin as worker_program
from taskyard.worker.runner import ProcessRunner
from taskyard.worker.settings import check_workers_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from taskyard.cli.options import CommandFunction
    from taskyard.net.invitations import Invitation
    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import MonotonicClock
    from taskyard.net.zmq_socket import ZmqSocket

_NAME: Final = DIALECT.decode()

#: Lines about messages that wait for a slow terminal. Further ones are left out.
_LINES_MAX: Final = 1000

#: How long to wait at the end until they are printed.
_PRINT_SECONDS_MAX: Final = 1.0


def _choose_listen(context: click.Context, _option: click.Parameter, given: str | None) -> str:
    """Return the endpoint of the server: the given one, or that of the settings."""
    if given is not None or context.resilient_parsing:
        return given or ""
    return context.ensure_object(CliContext).settings().listen.get(_NAME, (ENDPOINT,))[0]


def _choose_peer(context: click.Context, option: click.Parameter, given: str | None) -> str:
    """Return the endpoint to connect to: also that of an invitation, or a listener's identity."""
    if given is not None or context.resilient_parsing:
        return given or ""
    cli_context = context.ensure_object(CliContext)
    settings = cli_context.settings()
    invitation = cli_context.find_invitation()
    if invitation is not None:
        return _invited_endpoint(invitation)
    for section in settings.listeners.values():
        if section.dialect == _NAME and section.endpoint and section.identity is not None:
            with suppress(UserError):  # it may be any text
                return endpoints.peer_endpoint(section.identity)
    return _choose_listen(context, option, given)


def _endpoint_option(command: CommandFunction, choose: Callable[..., str]) -> CommandFunction:
    """Add --endpoint and -d."""
    endpoint = click.option(
        "--endpoint",
        callback=choose,
        metavar="E",
        show_default=ENDPOINT,
        help="Endpoint of the server.",
    )
    debug = click.option(
        "-d",
        "debug",
        type=click.IntRange(min=0),
        default=1,
        metavar="N",
        help="Verbosity: 0 prints errors and replies, 1 also events, 5 also summaries.",
    )
    return debug(endpoint(command))


def _listen_option(command: CommandFunction) -> CommandFunction:
    """Add --endpoint and -d, for the server."""
    return _endpoint_option(command, _choose_listen)


def _peer_option(command: CommandFunction) -> CommandFunction:
    """Add --endpoint and -d, for a worker or client."""
    return _endpoint_option(command, _choose_peer)


@click.group(no_args_is_help=True)
def rr() -> None:
    """Run a round-robin server, worker or client with a prompt.

    They use the LMQ protocol (docs/dialects/round-robin.md). Commands are read from a terminal or a
    pipe, one per line. The end of the input means `quit`.
    """


@rr.command(epilog=example("rr server -d 1"))
@_listen_option
@state_option
@click.pass_obj
def server(cli_context: CliContext, endpoint: str, state: Path, debug: int) -> None:
    """Run a broker that listens for round-robin peers.

    It is the ordinary broker with its state directory. Port 0 picks a free port. From `-d 1` on it
    prints the messages that it receives and passes on.

    Commands: `workers` lists the workers with their free slots, `quit` stops the server.
    """
    cli_context.quiet, cli_context.verbose = not debug, debug >= SUMMARIES
    open_log(cli_context, "rr server")
    console = Console("server", debug)
    server_prompt = _ServerPrompt(console, endpoints.native_endpoint(state))

    def print_line(line: str) -> None:
        console.print_line(1, line)
        if line.startswith(f"listening {_NAME}"):
            threading.Thread(target=server_prompt.run, daemon=True).start()

    tables = cli_context.settings().listeners
    listen = read_listen((f"{_NAME}={endpoint}",), tables)
    with _printed_messages(console, debug):
        serve(BrokerSettings(state, listen, tables=tables), print_line)
    console.end_prompt()


class _PrintedLog(logging.Handler):
    """Prints log records on a console in a thread, because a stopped terminal must not stop the
    broker. Records that it has no room for are counted, and the count is printed."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._lines: queue.Queue[str | None] = queue.Queue(_LINES_MAX)
        self._left_out = 0
        self._thread = threading.Thread(target=self._print_lines, daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(record.getMessage())
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Wait a little until all lines are printed."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_PRINT_SECONDS_MAX)
        super().close()

    def _print_lines(self) -> None:
        with suppress(BrokenPipeError):
            while (line := self._lines.get()) is not None:
                self._console.print_line(BASIC, line)
                if self._left_out and self._lines.empty():
                    left_out, self._left_out = self._left_out, 0
                    self._console.print_line(BASIC, f"{left_out} more messages, not printed")


@contextmanager
def _printed_messages(console: Console, debug: int) -> Iterator[None]:
    """Print the messages that the server receives and passes on, from debug level 1 on."""
    if debug < BASIC:
        yield
        return
    with closing(_PrintedLog(console)) as handler:
        message_logger.handlers[:] = [handler]
        message_logger.propagate = False
        message_logger.setLevel(logging.DEBUG)
        yield
        message_logger.handlers.clear()


class _ServerPrompt:
    """The prompt of the server, in a thread beside the broker."""

    def __init__(self, console: Console, endpoint: str) -> None:
        self._console = console
        self._endpoint = endpoint
        self._commands: dict[str, Callable[[], None]] = {"workers": self._list, QUIT: _stop}

    def run(self) -> None:
        self._console.prompt()
        for line in read_commands():
            self._console.command_read(line)
            with suppress(BrokenPipeError):
                run_command(line, self._commands, {}, self._console)
            if line == QUIT:
                return
            self._console.prompt()
        _stop()

    def _list(self) -> None:
        try:
            with Client(self._endpoint) as client:
                workers = [one for one in client.workers() if one["dialect"] == _NAME]
        except TaskyardError as error:
            self._console.print_line(0, f"can't list the workers: {error}")
            return
        for one in workers:
            self._console.print_line(0, _row(one))
        self._console.print_line(0, format_count(len(workers), "worker"))


def _row(worker: dict[str, Any]) -> str:
    peer = worker["name"].removeprefix(ROUND_ROBIN.decode())
    return f"{peer}  {worker['slots'] - worker['slots_used']} of {worker['slots']} slots free"


def _stop() -> None:
    """Stop the broker with SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


@rr.command(epilog=example("rr worker -d 5", "rr worker --command 'count=wc -c' --slots 4"))
@_peer_option
@click.option(
    "--command",
    "installed",
    multiple=True,
    callback=lambda _context, _option, given: _parse_commands(given),
    metavar="NAME=PROGRAM",
    help="Run PROGRAM for messages with the key NAME: arguments on stdin, result from stdout. May "
    "be repeated.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    default=SLOTS,
    metavar="N",
    help="Messages that the worker may hold at once.",
)
@single_key_option
@single_invite_option
@config_option
@click.pass_obj
def worker(
    cli_context: CliContext,
    endpoint: str,
    debug: int,
    installed: dict[bytes, list[str]],
    slots: int,
) -> None:
    """Run a worker that replies to PING and STREAM, and runs programs.

    A program starts anew for each message with the key of its command, without a shell. It reads
    the argument of the message from stdin, or several as a MessagePack array. Its stdout is the
    response, or an error if it fails.

    Commands: `register`, `deregister`, `bulk` (start child workers, ten with this one), `endbulk`
    (stop them) and `quit`.
    """
    address, console = endpoints.peer_endpoint(endpoint), Console("worker", debug)
    key = _key(cli_context, address)
    check_workers_key(key)

    def open_socket(suffix: str) -> ZmqSocket:
        return sockets.connect_by_name(address, suffix, key)

    with Host() as host:
        slots_all = slots * worker_program.BULK_WORKERS
        runners = {
            name: host.add_resource(ProcessRunner(slots_all, (), host.clock, command=argv))
            for name, argv in installed.items()
        }
        program = worker_program.RoundRobinProgram(
            *(open_socket, host.poller, host.clock, console.print_line),
            slots=slots,
            commands=worker_program.InstalledCommands(runners),
        )
        host.callback(program.close)
        run_prompt(program, host, console)


def _parse_commands(given: Sequence[str]) -> dict[bytes, list[str]]:
    """Return the argv of each command by its key. Raises `UserError`."""
    commands: dict[bytes, list[str]] = {}
    for text in given:
        name, equals, program = text.partition("=")
        key = name.encode(errors="surrogateescape")
        try:
            argv = shlex.split(program)
        except ValueError as error:
            raise UserError(f"--command {text!r}: {error}") from None
        if not (equals and key and argv) or len(key) > KEY_BYTES_MAX:
            raise UserError(f"--command {text!r}: expected NAME=PROGRAM (as in count='wc -c')")
        if key in RESERVED_KEYS or key in commands:
            reason = "is given twice" if key in commands else "is a key of the protocol"
            raise UserError(f"--command {text!r}: {name!r} {reason}")
        if shutil.which(argv[0]) is None:
            raise UserError(f"--command {text!r}: no program {argv[0]!r}")
        commands[key] = argv
    return commands


@rr.command(epilog=example("rr client -d 1"))
@_peer_option
@single_key_option
@single_invite_option
@config_option
@click.pass_obj
def client(cli_context: CliContext, endpoint: str, debug: int) -> None:
    """Send messages to a round-robin server.

    Commands: `ping` (no reply), `pingt` (with reply), `data` (1024 bytes), `bulkping N` and
    `bulkdata N` (N messages, ten at a time, counting replies) and `quit`.
    """
    address, console = endpoints.peer_endpoint(endpoint), Console("client", debug)
    suffix = f"client-{os.getpid()}-{secrets.token_hex(4)}"
    with Host() as host:
        key = _key(cli_context, address)
        wire = host.add_socket(sockets.connect_by_name(address, suffix, key))
        run_prompt(_ClientProgram(wire, host.clock, console.print_line), host, console)


def _invited_endpoint(invitation: Invitation) -> str:
    if invitation.dialect != _NAME:
        raise UserError(f"invitation: it is for the dialect {invitation.dialect}, not {_NAME}")
    return invitation.endpoints[0]


def _key(cli_context: CliContext, address: str) -> PeerKey | None:
    if cli_context.key is None and cli_context.invitation is not None:
        return cli_context.invitation.key
    return discovery.key_for(address, cli_context.key, settings=cli_context.settings())


class _ClientProgram(RoundRobinLoop):
    """A client at one server, and its commands."""

    def __init__(
        self, wire: ZmqSocket, clock: MonotonicClock, print_line: Callable[[int, str], None]
    ) -> None:
        self._client = RoundRobinClient(wire.endpoint)
        super().__init__(self._client, wire, clock, print_line)
        self._socket = wire
        self.is_finished = False
        self.commands: dict[str, Callable[[], None]] = {
            "ping": lambda: self.run_actions(self._client.ping()),
            "pingt": lambda: self._ping("pingt", 1),
            "data": lambda: self._stream("data", 1),
            "quit": self._quit,
        }
        #: Commands that take a number.
        self.counted_commands: dict[str, Callable[[int], None]] = {
            "bulkping": lambda total: self._ping("bulkping", total),
            "bulkdata": lambda total: self._stream("bulkdata", total),
        }

    @property
    def is_busy(self) -> bool:
        """Return whether the last command is unfinished."""
        return self._client.is_busy

    def turn(self) -> None:
        """Receive, handle and send. Raises `Refused` if the server refuses the key."""
        super().turn()
        self._socket.check_accepted(SECOND_NS)

    def _ping(self, command: str, total: int) -> None:
        self.run_actions(self._client.start_pings(command, total, self.now_ns()))

    def _stream(self, command: str, total: int) -> None:
        self.run_actions(self._client.start_streams(command, total, self.now_ns()))

    def _quit(self) -> None:
        self.is_finished = True
