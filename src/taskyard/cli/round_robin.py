"""`taskyard rr`: server, worker and client of the round-robin dialect, each with a prompt.

Owns their commands, stdin and stdout. The server is the ordinary broker. A pipe does not echo
input, so each command is printed after its prompt, and the output looks as on a terminal. The end
of stdin means `quit`.
"""

from __future__ import annotations

import cmd
import io
import logging
import os
import queue
import secrets
import shlex
import shutil
import signal
import sys
import threading
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

import click

from taskyard.broker.server import BrokerSettings, serve
from taskyard.cli.commands import Group
from taskyard.cli.daemon_options import open_log, read_listen
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext
from taskyard.cli.output import example
from taskyard.client import discovery
from taskyard.client.internal import InternalClient
from taskyard.core.limits import SECOND_NS
from taskyard.errors import TaskyardError, UserError
from taskyard.net import endpoints, sockets
from taskyard.net.host import Host, Waker
from taskyard.process.logs import LineFormatter, LogWriter
from taskyard.wire.dialect import ROUND_ROBIN
from taskyard.wire.round_robin.frames import DIALECT, ENDPOINT, KEY_BYTES_MAX, SLOTS_MAX
from taskyard.wire.round_robin.frames import logger as message_logger
from taskyard.wire.round_robin.peer import BASIC, RESERVED_KEYS, SLOTS, SUMMARIES
from taskyard.wire.round_robin.peer import Client as RoundRobinClient
from taskyard.worker import round_robin as worker_program
from taskyard.worker.round_robin import RoundRobinLoop
from taskyard.worker.runner import ProcessRunner
from taskyard.worker.settings import check_workers_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from taskyard.cli.options import CommandFunction
    from taskyard.net.keys import Invitation, PeerKey
    from taskyard.net.protocols import MonotonicClock
    from taskyard.net.zmq_socket import ZmqSocket

_STDIN: Final = 0

#: The most digits of a number argument.
NUMBER_DIGITS_MAX: Final = 6

#: How long the end of a program waits for the terminal.
_END_SECONDS_MAX: Final = 1.0


class Prompt(cmd.Cmd):
    """Reads and runs commands, which are the methods `do_NAME`. Prints from any thread."""

    use_rawinput = False
    #: Commands that take a number.
    counted: tuple[str, ...] = ()

    def __init__(self, name: str, debug: int) -> None:
        super().__init__(stdin=_open_stdin())
        self.prompt = ""  # `print_line` and `postcmd` print it
        self._shown, self._debug = f"{name}> ", debug
        self._is_prompting = False
        self._printing = threading.Lock()
        self._echoes = not os.isatty(_STDIN)

    def print_line(self, level: int, text: str) -> None:
        """Print a line if the debug level is at least `level`."""
        if level <= self._debug:
            with self._printing:
                before, after = ("\n", self._shown) if self._is_prompting else ("", "")
                _write(f"{before}{escape_line(text)}\n{after}")  # the user may be typing

    def end_prompt(self) -> None:
        """End the line of the prompt, unless another thread waits for a stopped terminal."""
        if self._printing.acquire(timeout=_END_SECONDS_MAX):
            try:
                if self._is_prompting:
                    _write("\n")
                self._is_prompting = False
            finally:
                self._printing.release()

    # The loop of `cmd.Cmd`.

    def start(self) -> None:
        """Read commands in a thread. It ends with the process if stdin does not end before."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(BrokenPipeError):
            try:
                self.cmdloop()
            except OSError:  # the terminal was closed
                self.onecmd("EOF")

    def preloop(self) -> None:
        with self._printing:
            _write(self._shown)
            self._is_prompting = True

    def precmd(self, line: str) -> str:
        if line == "EOF":
            self.end_prompt()
            return line
        with self._printing:
            self._is_prompting = False
            if self._echoes:
                _write(f"{escape_line(line.strip())}\n")
        return line

    def postcmd(self, stop: bool, line: str) -> bool:  # noqa: ARG002, FBT001  # of `cmd.Cmd`
        if not stop:
            self.preloop()
        return stop

    def onecmd(self, line: str) -> bool:
        """Run a command. Return whether it is the last command."""
        word, argument, _ = self.parseline(line)
        if argument and word not in (*self.counted, "help"):
            self.default(line)
            return False
        return bool(super().onecmd(line))

    def emptyline(self) -> bool:
        return False

    def default(self, line: str) -> None:
        names = [name.removeprefix("do_") for name in self.get_names() if name.startswith("do_")]
        known = [f"{one} N" if one in self.counted else one for one in names if one != "EOF"]
        self.print_line(0, f"unknown command {line.strip()!r} (known: {', '.join(known)})")

    def read_number(self, command: str, text: str) -> int:
        """Return the number of a command. 0 if it is invalid, which is printed."""
        if text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX and int(text):
            return int(text)
        example = f"a number up to {'9' * NUMBER_DIGITS_MAX}, as in {command} 100"
        self.print_line(0, f"{command}: expected {example}")
        return 0

    def do_quit(self, _: str) -> bool:
        """End the program."""
        raise NotImplementedError

    def do_EOF(self, _: str) -> bool:  # noqa: N802  # of `cmd.Cmd`
        """End the program, as `quit` does."""
        return self.do_quit("")


def _open_stdin() -> TextIO:
    """Open stdin without a buffer, whose lock a thread would still hold when the process ends."""
    try:
        return io.TextIOWrapper(io.FileIO(_STDIN, closefd=False), errors="replace")
    except OSError:  # it is closed
        return io.StringIO()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class PromptProgram(Protocol):
    """A program that runs commands."""

    @property
    def is_busy(self) -> bool:
        """Return whether the last command is in progress."""

    @property
    def is_finished(self) -> bool: ...

    def turn(self) -> None: ...

    def wake_at_ns(self) -> int | None: ...


class HostedPrompt(Prompt):
    """A prompt whose commands run in the thread of a host, one after the other."""

    def __init__(self, name: str, debug: int, host: Host) -> None:
        super().__init__(name, debug)
        self._host = host
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._waker = Waker()
        host.poller.add(self._waker.fileno())
        host.callback(self._waker.close)
        self._is_running = self._is_quitting = self._is_aborted = False
        self._program: PromptProgram

    def run(self, program: PromptProgram) -> None:
        """Run the program with commands until it is finished.

        A signal means `quit`. A second one ends the program at once.
        """
        self._program = program
        self.start()
        self._host.run(self)
        self.end_prompt()

    def onecmd(self, line: str) -> bool:
        """Let the thread of the host run a command, and wait until it is done."""
        self._commands.put(lambda: self._begin(line))
        self._waker.wake()
        return self._done.get()

    def _begin(self, line: str) -> None:
        self._is_running = True
        self._is_quitting = super().onecmd(line) or self._is_quitting

    @property
    def has_exited(self) -> bool:
        return self._is_aborted or self._program.is_finished

    def turn(self) -> bool:
        self._waker.clear()
        self._program.turn()
        while not (self._program.is_busy or self._is_quitting):
            if self._is_running:
                self._is_running = False
                self._done.put(self._is_quitting)
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
        return False

    def wake_at_ns(self) -> int | None:
        return self._program.wake_at_ns()

    def shut_down(self) -> None:
        """Quit. Called again, end the program at once."""
        self._is_aborted = self._is_quitting
        if not self._is_quitting:
            self._is_quitting = True
            self.end_prompt()
            self.do_quit("")


_NAME: Final = DIALECT.decode()


def _choose_listen(context: click.Context, _option: click.Parameter, given: str | None) -> str:
    """Return the given endpoint of the server, by default from the settings."""
    if given is not None or context.resilient_parsing:
        return given or ""
    cli_context = context.ensure_object(CliContext)
    if cli_context.brokers:
        raise click.UsageError("--broker: use --endpoint", context)
    return cli_context.settings().listen.get(_NAME, (ENDPOINT,))[0]


def _choose_peer(context: click.Context, option: click.Parameter, given: str | None) -> str:
    """Return the endpoint to connect to: also that of an invitation, or a listener's identity."""
    if given is not None or context.resilient_parsing:
        return given or ""
    cli_context = context.ensure_object(CliContext)
    settings = cli_context.settings()
    invitation = cli_context.find_invitation()
    if invitation is not None and not cli_context.brokers:
        return _invited_endpoint(invitation)
    for section in settings.listeners.values():
        if section.dialect == _NAME and section.endpoint and section.identity:
            with suppress(UserError):  # it may be any text
                return endpoints.peer_endpoint(section.identity)
    return _choose_listen(context, option, given)


def _endpoint_option(
    choose: Callable[..., str],
) -> Callable[[CommandFunction], CommandFunction]:
    return click.option(
        "--endpoint",
        callback=choose,
        metavar="E",
        show_default=ENDPOINT,
        help="Endpoint of the server.",
    )


_listen_option = _endpoint_option(_choose_listen)
_peer_option = _endpoint_option(_choose_peer)

_debug_option = click.option(
    "-d",
    "debug",
    type=click.IntRange(min=0),
    default=1,
    metavar="N",
    help="Verbosity: 0 prints errors and replies, 1 also events, 5 also summaries.",
)


@click.group(cls=Group, no_args_is_help=True)
def rr() -> None:
    """Run a round-robin server, worker or client with a prompt.

    They use the LMQ protocol (docs/dialects/round-robin.md). Commands are read from a terminal or a
    pipe, one per line. The end of the input means `quit`. Output is lines, also with --json.
    """


@rr.command(epilog=example("rr server -d 1"))
@_debug_option
@_listen_option
@click.pass_obj
def server(cli_context: CliContext, endpoint: str, debug: int) -> None:
    """Run a broker that listens for round-robin peers.

    It is the ordinary broker with its state directory. Port 0 picks a free port. From `-d 1` on it
    prints the messages that it receives and passes on.

    Commands: `workers` lists the workers with their free slots, `quit` stops the server.
    """
    cli_context.quiet, cli_context.verbose = not debug, debug >= SUMMARIES
    state = cli_context.state_directory()
    open_log(cli_context, "rr server")
    prompt = _ServerPrompt(endpoints.native_endpoint(state), debug)

    def print_line(line: str) -> None:
        prompt.print_line(1, line)
        if line.startswith(f"listening {_NAME}"):
            prompt.start()

    tables = cli_context.settings().listeners
    listen = read_listen((f"{_NAME}={endpoint}",), tables)
    with _printed_messages(prompt, debug):
        serve(BrokerSettings(state, listen, tables=tables), print_line)
    prompt.end_prompt()


class _MessageFormatter(LineFormatter):
    """Formats the records of messages without time and level."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()

    def line(self, at_ns: int, level: str, event: str, fields: Mapping[str, object]) -> str:  # noqa: ARG002  # of `LineFormatter`
        return f"{fields['lines']} more messages, not printed"


class _PromptSink:
    """Prints log lines beside a prompt."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def write(self, lines: bytes) -> None:
        for line in lines.decode().splitlines():
            self._prompt.print_line(BASIC, line)

    def close(self) -> None:
        """Leave stdout open."""


@contextmanager
def _printed_messages(prompt: Prompt, debug: int) -> Iterator[None]:
    """Print the messages that the server receives and passes on, from debug level 1 on."""
    if debug < BASIC:
        yield
        return
    formatter = _MessageFormatter("rr server", as_json=False)
    with closing(LogWriter(formatter, _PromptSink(prompt))) as handler:
        message_logger.handlers[:] = [handler]
        message_logger.propagate = False
        message_logger.setLevel(logging.DEBUG)
        yield
        message_logger.handlers.clear()


class _ServerPrompt(Prompt):
    """The prompt of the server, in a thread beside the broker."""

    def __init__(self, endpoint: str, debug: int) -> None:
        super().__init__("server", debug)
        self._endpoint = endpoint

    def do_workers(self, _: str) -> None:
        """List the workers with their free slots."""
        try:
            with InternalClient(self._endpoint) as client:
                workers = [one for one in client.workers() if one["dialect"] == _NAME]
        except TaskyardError as error:
            self.print_line(0, f"can't list the workers: {error}")
            return
        for one in workers:
            self.print_line(0, _row(one))
        self.print_line(0, format_count(len(workers), "worker"))

    def do_quit(self, _: str) -> bool:
        """Stop the server."""
        os.kill(os.getpid(), signal.SIGTERM)
        return True


def _row(worker: dict[str, Any]) -> str:
    peer = worker["name"].removeprefix(ROUND_ROBIN.decode())
    return f"{peer}  {worker['slots'] - worker['slots_used']} of {worker['slots']} slots free"


@rr.command(
    is_peer=True, epilog=example("rr worker -d 5", "rr worker --command 'count=wc -c' --slots 4")
)
@_debug_option
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
    the argument of the message from stdin, or several as a MessagePack array. The output is the
    response, or an error if it fails.

    Commands: `register`, `deregister`, `bulk` (start child workers, ten with this one), `endbulk`
    (stop them) and `quit`.
    """
    address = endpoints.peer_endpoint(endpoint)
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
        prompt = _WorkerPrompt("worker", debug, host)
        prompt.worker = worker_program.RoundRobinProgram(
            open_socket,
            host.poller,
            host.clock,
            prompt.print_line,
            slots=slots,
            commands=worker_program.InstalledCommands(runners),
        )
        host.callback(prompt.worker.close)
        prompt.run(prompt.worker)


class _WorkerPrompt(HostedPrompt):
    """The prompt of the worker."""

    worker: worker_program.RoundRobinProgram

    def do_register(self, _: str) -> None:
        """Offer slots to the server."""
        self.worker.register()

    def do_deregister(self, _: str) -> None:
        """Leave the server."""
        self.worker.deregister()

    def do_bulk(self, _: str) -> None:
        """Start child workers, ten with this one."""
        self.worker.bulk()

    def do_endbulk(self, _: str) -> None:
        """Stop the child workers."""
        self.worker.end_bulk()

    def do_quit(self, _: str) -> bool:
        """Leave the server and end."""
        self.worker.quit()
        return True


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


@rr.command(is_peer=True, epilog=example("rr client -d 1"))
@_debug_option
@_peer_option
@click.pass_obj
def client(cli_context: CliContext, endpoint: str, debug: int) -> None:
    """Send messages to a round-robin server.

    Commands: `ping` (no reply), `pingt` (with reply), `data` (1024 bytes), `bulkping N` and
    `bulkdata N` (N messages, ten at a time, counting replies) and `quit`.
    """
    address = endpoints.peer_endpoint(endpoint)
    suffix = f"client-{os.getpid()}-{secrets.token_hex(4)}"
    with Host() as host:
        key = _key(cli_context, address)
        wire = host.add_socket(sockets.connect_by_name(address, suffix, key))
        prompt = _ClientPrompt("client", debug, host)
        prompt.client = _ClientProgram(wire, host.clock, prompt.print_line)
        prompt.run(prompt.client)


class _ClientPrompt(HostedPrompt):
    """The prompt of the client."""

    counted = ("bulkping", "bulkdata")
    client: _ClientProgram

    def do_ping(self, _: str) -> None:
        """Send a PING without a reply."""
        self.client.ping()

    def do_pingt(self, _: str) -> None:
        """Send a PING with a reply."""
        self.client.start_pings("pingt", 1)

    def do_data(self, _: str) -> None:
        """Send 1024 bytes."""
        self.client.start_streams("data", 1)

    def do_bulkping(self, number: str) -> None:
        """Send N PINGs, ten at a time, and count the replies."""
        if total := self.read_number("bulkping", number):
            self.client.start_pings("bulkping", total)

    def do_bulkdata(self, number: str) -> None:
        """Send N times 1024 bytes, ten at a time, and count the replies."""
        if total := self.read_number("bulkdata", number):
            self.client.start_streams("bulkdata", total)

    def do_quit(self, _: str) -> bool:
        """End the client."""
        self.client.is_finished = True
        return True


def _invited_endpoint(invitation: Invitation) -> str:
    if invitation.dialect != _NAME:
        raise UserError(f"invitation: it is for the dialect {invitation.dialect}, not {_NAME}")
    return invitation.endpoints[0]


def _key(cli_context: CliContext, address: str) -> PeerKey | None:
    if cli_context.key is None and cli_context.invitation is not None:
        return cli_context.invitation.key
    return discovery.key_for(address, cli_context.key, settings=cli_context.settings())


class _ClientProgram(RoundRobinLoop):
    """A client at one server."""

    def __init__(
        self, wire: ZmqSocket, clock: MonotonicClock, print_line: Callable[[int, str], None]
    ) -> None:
        self._client = RoundRobinClient(wire.endpoint)
        super().__init__(self._client, wire, clock, print_line)
        self._socket = wire
        self.is_finished = False

    @property
    def is_busy(self) -> bool:
        """Return whether the last command is unfinished."""
        return self._client.is_busy

    def turn(self) -> None:
        """Receive, handle and send. Raises `Refused` if the server refuses the key."""
        super().turn()
        self._socket.check_accepted(SECOND_NS)

    def ping(self) -> None:
        self.run_actions(self._client.ping())

    def start_pings(self, command: str, total: int) -> None:
        self.run_actions(self._client.start_pings(command, total, self.now_ns()))

    def start_streams(self, command: str, total: int) -> None:
        self.run_actions(self._client.start_streams(command, total, self.now_ns()))
