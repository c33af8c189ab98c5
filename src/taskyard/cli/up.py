"""`taskyard up` and `taskyard down`: start and stop a broker with local workers."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard import errors
from taskyard.calls.pickled import PICKLE
from taskyard.cli import daemon_options
from taskyard.cli.commands import Command
from taskyard.cli.connection import connect_to, removed_if_unused
from taskyard.cli.format import escape_line, format_count, full_name
from taskyard.cli.options import DURATION, CliContext, setting_option
from taskyard.cli.output import example
from taskyard.cli.work import run
from taskyard.client.internal import InternalClient
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.journal.files import check_owner, make_private_directory, open_regular
from taskyard.net import endpoints
from taskyard.process.child import taskyard_command
from taskyard.process.state_files import LOCK_FILE, UP_FILE, hold_up_lock, lock_holder
from taskyard.process.supervisor import (
    Supervisor,
    WorkerSpec,
    reload_on_sighup,
    stop_signals_as_interrupt,
)
from taskyard.settings.keys import NO_PAGE, PROCESSES_MAX
from taskyard.web.address import Role, bind, find_page, published, split_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("taskyard.up")

#: The log of a detached `up` and its processes, in the state directory.
LOG_FILE: Final = "log/up.log"

#: The start timeout of a detached `up`. Recovering a large state takes a while.
READY_SECONDS: Final = 600.0

#: The extra `web`.
_PAGE_PACKAGES: Final = ("jinja2", "numpy", "plotly", "prometheus_client", "starlette", "uvicorn")

#: How often readiness and exits are polled.
POLL_SECONDS: Final = 0.05

#: The most interrupted tasks that are printed by name.
INTERRUPTED_SHOWN_MAX: Final = 10

#: For the names of running tasks, from a broker on a busy machine.
_NAMES_SECONDS: Final = 5.0

#: The signals that stop a process, with the seconds to wait after each.
_SIGNALS: Final = ((signal.SIGTERM, 1.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))


@click.command(
    cls=Command,
    like=run,
    most=("workers", "jobs", "listen", "allow", "allow_pickle", "services", "page", "detach"),
    epilog=example("up --workers 2 --detach"),
)
@setting_option(
    "worker.processes",
    "--workers",
    type=click.IntRange(0, PROCESSES_MAX),
    metavar="N",
    show_default="1",
    help="Worker processes.",
)
@daemon_options.jobs_option
@daemon_options.worker_resource_options
@daemon_options.listen_option
@daemon_options.allow_option
@daemon_options.allow_pickle_option
@setting_option(
    "worker.services",
    "--service",
    "services",
    multiple=True,
    metavar="S",
    show_default="exec, call",
    help="Service that the workers offer. Repeatable.",
)
@daemon_options.page_option
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Run in the background. Without --log-file, the log is STATE/log/up.log.",
)
@daemon_options.log_file_option
@daemon_options.log_options
@click.pass_obj
def up(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    /,
    *,
    workers: int,
    jobs: int | None,
    listen: tuple[str, ...],
    allow: tuple[str, ...],
    services: tuple[str, ...],
    page: str,
    allow_pickle: bool,
    detach: bool,
    worker_cpus: int | None,
    worker_memory: int | None,
    worker_gpus: tuple[str, ...] | None,
    worker_resources: tuple[tuple[bytes, int], ...],
) -> errors.ExitCode | None:
    """Run a broker, workers and a page until stopped.

    Runs in the foreground until Ctrl-C, SIGTERM or `taskyard down`. Then the workers finish their
    running tasks and the broker exits. Processes that die are restarted. With --detach, the command
    returns when all processes are ready. SIGHUP or `taskyard config --reload` reloads the settings.

    The workers share the cores, the memory, the GPUs and the other resources of this machine.

    Prints the address of the page with a token, which is good until the command ends.
    """
    daemon_options.read_listen(
        listen, cli_context.settings().listeners
    )  # fail before anything is started
    state = cli_context.state_directory()
    machine = daemon_options.machine_if_set(
        worker_cpus, worker_memory, worker_gpus, worker_resources
    )
    page = _usable_page(cli_context, page)
    if allow_pickle:
        services = tuple(dict.fromkeys((*services, PICKLE.decode())))
    worker_spec = WorkerSpec(
        workers=workers,
        allow=allow,
        services=services,
        allow_pickle=allow_pickle,
        machine=machine,
        jobs=daemon_options.jobs_of_workers(cli_context.settings(), jobs, workers),
    )
    if detach:
        arguments = ["up", "--workers", str(workers), "--state", str(state)]
        arguments += _as_arguments(jobs=jobs, listen=listen, allow=allow, service=services)
        arguments += _as_arguments(config=cli_context.config, page=page or NO_PAGE)
        arguments += [] if listen else ["--native-only"]
        arguments += ["--allow-pickle"] if allow_pickle else []
        arguments += [] if machine is None else machine.arguments("--worker-")
        arguments += _log_options(cli_context)
        _detach(cli_context, state, workers, arguments)
        return None
    writer = daemon_options.open_log(cli_context, "up")
    with stop_signals_as_interrupt(), daemon_options.children_logged(cli_context, writer):
        return _run_until_stopped(cli_context, state, worker_spec, listen, page)


def _run_until_stopped(
    cli_context: CliContext,
    state: Path,
    worker_spec: WorkerSpec,
    listen: tuple[str, ...],
    page: str,
) -> errors.ExitCode | None:
    info = _info(cli_context)
    log = daemon_options.log_arguments(cli_context)
    supervisor = Supervisor(state, info, listen, cli_context.config, log=log)
    try:
        with (
            removed_if_unused(cli_context, state),
            hold_up_lock(state),
            _open_page(cli_context, state, page) as opened,
            reload_on_sighup(supervisor.reload),
            supervisor,
        ):
            if (status := supervisor.start_broker()) is not None:
                raise click.exceptions.Exit(status)
            supervisor.start_workers(worker_spec)
            for line in supervisor.listening:
                click.echo(line)
            info(f"{format_count(worker_spec.workers, 'worker')} started (Ctrl-C stops)")
            if opened is not None:
                supervisor.start_page(*opened)
            if page:
                _print_page(state)
            supervisor.broker.ended.wait()
    except KeyboardInterrupt:
        return None
    status = supervisor.broker.status
    return (
        errors.ExitCode(status) if status in set(errors.ExitCode) else errors.ExitCode.STATE_DAMAGED
    )


# The page.


def _usable_page(cli_context: CliContext, page: str) -> str:
    """Return the address of the page. Empty if there is to be none, or an extra is missing."""
    if page in ("", NO_PAGE):
        return ""
    split_address(page)  # fail before anything is started
    missing = [name for name in _PAGE_PACKAGES if find_spec(name) is None]
    if not missing:
        return page
    cli_context.info(f"no page: it needs {missing[0]} (`pip install 'taskyard[web]'`)")
    return ""


@contextmanager
def _open_page(
    cli_context: CliContext, state: Path, page: str
) -> Iterator[tuple[int, bytes] | None]:
    """Listen at the page's address, and name it in the state directory.

    Yield the descriptor and the secret. None if there is no page, or if a page is running. A page
    never keeps the broker from starting.
    """
    with ExitStack() as stack:
        opened = None
        try:
            if page:
                bound = stack.enter_context(bind(page))
                made = stack.enter_context(published(state, bound))
                opened = (bound.fileno(), made.secret)
        except errors.UserError as error:
            cli_context.info(f"no page: {error}")
        yield opened


def _print_page(state: Path) -> None:
    if (found := find_page(state)) is not None:
        click.echo(f"page {found.with_token(Role.OPERATOR)}")


def _info(cli_context: CliContext) -> Callable[[str], None]:
    """Return how messages of `up` itself are printed: to a person, or as lines of the log."""
    if sys.stderr.isatty() and cli_context.log_file is None:
        return cli_context.info
    if cli_context.log_level is None and not cli_context.quiet:
        logger.setLevel(logging.INFO)
    return logger.info


# Detached.


def _log_options(cli_context: CliContext) -> list[str]:
    words: list[str] = []
    if cli_context.log_format is not None:
        words += ["--log-format", cli_context.log_format]
    if cli_context.log_level is not None:
        words += ["--log-level", cli_context.log_level]
    return words


def _as_arguments(**options: object) -> list[str]:
    """Return options as command line arguments."""
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            words += [] if one is None else [f"--{name}", str(one)]
    return words


def _detach(cli_context: CliContext, state: Path, workers: int, arguments: list[str]) -> None:
    """Start the command again in the background and wait until it is ready."""
    _check_not_running(state)
    with removed_if_unused(cli_context, state):
        make_private_directory(state)
        check_owner(state)
        log = cli_context.log_file or state / LOG_FILE
        arguments += ["--log-file", str(log)]
        make_private_directory(log.parent)
        descriptor = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(descriptor, "ab") as file:
            offset = file.tell()
            child = subprocess.Popen(
                taskyard_command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        _await_ready(child, state, workers, lambda: _last_line(log, offset))
    cli_context.info(
        f"up: {format_count(workers, 'worker')}, process {child.pid}, log in {log} "
        f"(stop with `taskyard down --state {state}`)"
    )
    _print_page(state)


def _check_not_running(state: Path) -> None:
    holder = lock_holder(state / UP_FILE)
    if holder is not None:
        raise errors.StateLocked(
            f"state directory {state}: in use by `taskyard up`, process {holder} (stop it with "
            f"`taskyard down --state {state}`)"
        )


def _await_ready(
    child: subprocess.Popen[bytes], state: Path, workers: int, last_line: Callable[[], str]
) -> None:
    deadline = time.monotonic() + READY_SECONDS
    for _ in _poll_until(deadline):
        status = child.poll()
        if status is not None:
            message = last_line() or f"exited with status {status}"
            raise errors.ProcessEnded(message.removeprefix("taskyard: "), status)
        if lock_holder(state / UP_FILE) == child.pid and _ready_workers(state) >= workers:
            return
    raise errors.TimedOut(
        f"`up` (process {child.pid}) is not ready after {READY_SECONDS:g} s (see its "
        f"log in {state}, stop it with `taskyard down`)"
    )


def _ready_workers(state: Path) -> int:
    """Return the number of connected workers, or -1 while there is no broker."""
    try:
        with InternalClient(state=state, timeout=1, report=_ignore_report) as client:
            return int(client.status()["workers"])
    except errors.NoBroker:
        return -1


def _ignore_report(_report: str) -> None:
    """Ignore messages about a broker that is starting."""


def _last_line(log: Path, offset: int) -> str:
    """Return the last message since an offset in the log."""
    with log.open("rb") as file:
        file.seek(offset if offset <= os.fstat(file.fileno()).st_size else 0)
        lines = file.read().decode(errors="backslashreplace").split("\n")
    line = next((line for line in reversed(lines) if line), "")
    with suppress(ValueError):
        line = json.loads(line).get("text", line)
    return line


def _poll_until(deadline: float) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
        time.sleep(POLL_SECONDS)


# Down.


@click.command(cls=Command, epilog=example("down --grace 5m"))
@click.option("--grace", type=DURATION, default="60s", help="How long to wait for running tasks.")
@click.pass_obj
def down(cli_context: CliContext, *, grace: int) -> errors.ExitCode | None:
    """Stop the broker and workers of a state directory.

    Workers finish their running tasks and exit, then the broker exits. After --grace, all
    processes are stopped by signals. Interrupted tasks return to the queue and run again after the
    next start. Then their names are printed and the exit code is 4. Exit 3 if no broker is running
    there.
    """
    cli_context.interrupt_message = (
        "interrupted; the broker stops when the running tasks are done (`taskyard "
        "down` waits for it)"
    )
    if cli_context.state is not None:
        cli_context.ignore_invalid_settings()
    state = cli_context.state_directory()
    holders = {name: pid for name in (UP_FILE, LOCK_FILE) if (pid := lock_holder(state / name))}
    if not holders:
        raise errors.NoBroker(f"no broker is running on {state} (give --state)")
    try:
        with connect_to(cli_context, endpoints.native_endpoint(state)) as client:
            return _down(cli_context, client, state, grace / SECOND_NS)
    except errors.NoBroker:
        cli_context.info("the broker does not reply, stopping it by signal")
        _stop_by_signal(cli_context, state)
        return None


def _down(
    cli_context: CliContext, client: InternalClient, state: Path, seconds: float
) -> errors.ExitCode | None:
    out = client.status()["counts"]["leased"]
    workers = client.drain()
    if out:
        cli_context.info(
            f"waiting for {format_count(workers, 'worker')} to finish {format_count(out, 'task')}"
        )
    if _is_free(state, seconds):
        cli_context.info("stopped")
        return None
    names = _leased_names(state)
    _stop_by_signal(cli_context, state)
    if not names:
        return None
    more = (
        f" and {len(names) - INTERRUPTED_SHOWN_MAX:,} more"
        if len(names) > INTERRUPTED_SHOWN_MAX
        else ""
    )
    raise errors.TimedOut(
        f"{format_count(len(names), 'task')} interrupted after {seconds:g} s, to run "
        f"again after the next start: {', '.join(names[:INTERRUPTED_SHOWN_MAX])}{more}"
    )


def _leased_names(state: Path) -> list[str]:
    """Return the running tasks. Empty if the broker exits before it replies."""
    scope = Scope(states=(TaskState.LEASED,))
    with (
        suppress(errors.TaskyardError),
        InternalClient(state=state, timeout=_NAMES_SECONDS, report=_ignore_report) as client,
    ):
        return [escape_line(full_name(task)) for task in client.tasks(scope)]
    return []


def _is_free(state: Path, seconds: float) -> bool:
    """Wait until no process holds the state directory. Return False on timeout."""
    files = (state / UP_FILE, state / LOCK_FILE)
    return any(
        all(lock_holder(file) is None for file in files)
        for _ in _poll_until(time.monotonic() + seconds)
    )


def _stop_by_signal(cli_context: CliContext, state: Path) -> None:
    """Stop the processes by signals.

    A second SIGTERM to `up` makes its workers return their tasks. SIGKILL is the last resort.
    """
    for number, seconds in _SIGNALS:
        _signal(state, number)
        if _is_free(state, seconds):
            cli_context.info("stopped")
            return
    raise errors.TimedOut(f"process {_owner_pid(state)} on {state} does not exit")


def _owner_pid(state: Path) -> int | None:
    """Return the process that holds the lock: `up`, or a broker on its own."""
    return lock_holder(state / UP_FILE) or lock_holder(state / LOCK_FILE)


def _signal(state: Path, number: int) -> None:
    holder = _owner_pid(state)
    if holder:
        os.kill(holder, number)
