"""`taskyard up` and `taskyard down`: a broker and local workers, until they are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from taskyard.cli.connection import connect_to
from taskyard.cli.daemon_options import listen_option, read_listen
from taskyard.cli.format import escape_line, format_count, full_name
from taskyard.cli.options import (
    DURATION,
    CliContext,
    broker_timeout_option,
    quiet_option,
    setting_option,
    state_option,
    verbose_option,
)
from taskyard.cli.output import example
from taskyard.client.client import Client
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, NoBroker, TaskyardError, TimedOut, UserError
from taskyard.journal.files import check_owner, make_private_directory, open_regular
from taskyard.net import endpoints
from taskyard.process.child import taskyard_command
from taskyard.process.locks import LOCK_FILE, UP_FILE, hold_up_lock, lock_holder
from taskyard.process.supervisor import (
    Supervisor,
    WorkerSpec,
    reload_on_sighup,
    sigterm_as_interrupt,
)
from taskyard.settings.keys import PROCESSES_MAX, SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Reply = TypeVar("Reply")

#: In the state directory: what a detached `up` and its processes have to say.
LOG_FILE: Final = "log/up.log"

#: A detached `up` has to be ready by then: a large state takes a while to recover.
READY_SECONDS: Final = 600.0

#: How often to look whether something is ready, or has ended.
POLL_SECONDS: Final = 0.05

#: Tasks that were cut short and are told by name.
INTERRUPTED_SHOWN_MAX: Final = 10

#: What is sent to end something, and how long it has to follow.
_SIGNALS: Final = ((signal.SIGTERM, 1.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))


@click.command(epilog=example("up --workers 2 --detach"))
@setting_option(
    "worker.processes",
    "--workers",
    type=click.IntRange(0, PROCESSES_MAX),
    help="Worker processes; 1.",
)
@setting_option(
    "worker.slots",
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    help="Tasks at once a worker; one a core.",
)
@state_option
@listen_option
@setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer its functions. Repeatable.",
)
@setting_option(
    "worker.services",
    "--service",
    "services",
    multiple=True,
    metavar="S",
    help="What to do; exec and call. Repeatable.",
)
@click.option("-d", "--detach", is_flag=True, help="Run in the background; log in STATE/log.")
@verbose_option
@quiet_option
@click.pass_obj
def up(  # noqa: PLR0913  # an argument an option
    cli_context: CliContext,
    *,
    workers: int,
    slots: int | None,
    state: Path,
    listen: tuple[str, ...],
    allow: tuple[str, ...],
    services: tuple[str, ...],
    detach: bool,
) -> ExitCode | None:
    """Run a broker and workers until they are stopped.

    In the foreground, until Ctrl-C, SIGTERM or `taskyard down`: then the workers finish what runs,
    and the broker ends. What dies meanwhile is started again. With --detach it returns when all of
    them are ready. SIGHUP, or `taskyard config reload`, has the broker read the settings again.
    """
    read_listen(listen)  # what is wrong with it is better said before anything is started
    if detach:
        arguments = ["up", "--workers", str(workers), "--state", str(state)]
        arguments += _as_arguments(slots=slots, listen=listen, allow=allow, service=services)
        arguments += _as_arguments(config=cli_context.config) + (
            [] if listen else ["--native-only"]
        )
        _detach(cli_context, state, workers, arguments)
        return None
    worker_spec = WorkerSpec(workers, slots, allow, services)
    with sigterm_as_interrupt():
        return _run_until_stopped(cli_context, state, worker_spec, listen)


def _run_until_stopped(
    cli_context: CliContext, state: Path, worker_spec: WorkerSpec, listen: tuple[str, ...]
) -> ExitCode | None:
    supervisor = Supervisor(state, _with_time(cli_context.info), listen, cli_context.config)
    try:
        with hold_up_lock(state), reload_on_sighup(supervisor.reload), supervisor:
            if (status := supervisor.start_broker()) is not None:
                raise click.exceptions.Exit(status)
            supervisor.start_workers(worker_spec)
            for line in supervisor.listening:
                click.echo(line)
            cli_context.info(
                f"{format_count(worker_spec.workers, 'worker')} started; Ctrl-C stops them"
            )
            supervisor.broker.ended.wait()
    except KeyboardInterrupt:
        return None
    status = supervisor.broker.status
    return ExitCode(status) if status in set(ExitCode) else ExitCode.STATE_DAMAGED


def _with_time(info: Callable[[str], None]) -> Callable[[str], None]:
    """In a log it matters when something happened."""
    if sys.stderr.isatty():
        return info
    return lambda line: info(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")


# In the background.


def _as_arguments(**options: object) -> list[str]:
    """Options as they were given on a command line."""
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            words += [] if one is None else [f"--{name}", str(one)]
    return words


def _detach(cli_context: CliContext, state: Path, workers: int, arguments: list[str]) -> None:
    """Start the same command once more, without us, and wait until it is ready."""
    _check_not_running(state)
    make_private_directory(state)
    check_owner(state)
    log = state / LOG_FILE
    make_private_directory(log.parent)
    descriptor = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "ab") as file:
        began = file.tell()
        child = subprocess.Popen(
            taskyard_command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    _await_ready(child, state, workers, lambda: _last_line(log, began))
    cli_context.info(
        f"up: {format_count(workers, 'worker')}, process {child.pid}, log in {log}; "
        f"`taskyard down --state {state}` stops it"
    )


def _check_not_running(state: Path) -> None:
    holder = lock_holder(state / UP_FILE)
    if holder is not None:
        raise UserError(
            f"`taskyard up` runs on {state} already, as process {holder}; "
            f"`taskyard down --state {state}` stops it"
        )


def _await_ready(
    child: subprocess.Popen[bytes], state: Path, workers: int, last_line: Callable[[], str]
) -> None:
    deadline = time.monotonic() + READY_SECONDS
    for _ in _poll_until(deadline):
        status = child.poll()
        if status is not None:
            said = last_line() or f"it ended with exit status {status}"
            raise _startup_error(status, said.removeprefix("taskyard: "))
        if lock_holder(state / UP_FILE) == child.pid and _ready_workers(state) >= workers:
            return
    raise TimedOut(
        f"`up` (process {child.pid}) is not ready after {READY_SECONDS:g} s; see its log in "
        f"{state}; `taskyard down` stops it"
    )


def _startup_error(status: int, said: str) -> TaskyardError:
    """The same error as the process in the background had."""
    error = TaskyardError(said)
    error.exit_code = (  # type: ignore[misc]  # of this one alone
        ExitCode(status) if status in set(ExitCode) else ExitCode.STATE_DAMAGED
    )
    return error


def _ready_workers(state: Path) -> int:
    """How many workers the broker knows; -1 while there is none."""
    try:
        with Client(state=state, timeout=1, report=_ignore_report) as client:
            return int(client.status()["workers"])
    except NoBroker:
        return -1


def _ignore_report(_report: str) -> None:
    """Print nothing of a broker that is being started."""


def _last_line(log: Path, began: int) -> str:
    with log.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="backslashreplace").split("\n")
    return next((line for line in reversed(lines) if line), "")


def _poll_until(deadline: float) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
        time.sleep(POLL_SECONDS)


# Down.


@click.command(epilog=example("down --timeout 5m"))
@state_option
@click.option(
    "--timeout", type=DURATION, default="60s", help="How long running tasks may take; 60s."
)
@broker_timeout_option
@verbose_option
@quiet_option
@click.pass_obj
def down(cli_context: CliContext, *, state: Path, timeout: int) -> ExitCode | None:
    """Stop what runs on a state directory, when running tasks are done.

    Workers get no more tasks, finish what they hold, and leave; then the broker ends. After
    --timeout everything is ended by signal: what ran is given back, and is done again after the
    next start. Then it says what was cut short, and exits 4. If nothing runs there it exits 3.
    """
    cli_context.interrupt_message = (
        "interrupted; it stops when what runs is done: `taskyard down` waits again"
    )
    holders = {name: pid for name in (UP_FILE, LOCK_FILE) if (pid := lock_holder(state / name))}
    if not holders:
        raise NoBroker(f"nothing runs on state directory {state}; give --state if it is another")
    try:
        with connect_to(cli_context, endpoints.native_endpoint(state)) as client:
            return _down(cli_context, client, state, timeout / SECOND_NS)
    except NoBroker:
        cli_context.info("the broker does not answer; ending it by signal")
        _stop_by_signal(cli_context, state)
        return None


def _down(cli_context: CliContext, client: Client, state: Path, seconds: float) -> ExitCode | None:
    out = client.status()["counts"]["leased"]
    workers = client.drain()
    if out:
        cli_context.info(
            f"waiting for {format_count(workers, 'worker')} to finish {format_count(out, 'task')}"
        )
    if _is_free(state, seconds):
        cli_context.info("all is stopped")
        return None
    names = _reply_within(1.0, lambda: _leased_names(client)) or []
    _stop_by_signal(cli_context, state)
    if not names:
        return None
    more = (
        f" and {len(names) - INTERRUPTED_SHOWN_MAX:,} more"
        if len(names) > INTERRUPTED_SHOWN_MAX
        else ""
    )
    raise TimedOut(
        f"{format_count(len(names), 'task')} cut short after {seconds:g} s, to be done again after "
        f"the "
        f"next start: {', '.join(names[:INTERRUPTED_SHOWN_MAX])}{more}"
    )


def _leased_names(client: Client) -> list[str]:
    scope = Scope(states=(TaskState.LEASED,))
    return [escape_line(full_name(task)) for task in client.tasks(scope)]


def _reply_within(seconds: float, ask: Callable[[], Reply]) -> Reply | None:
    """The answer of a broker that may go before it gives one; None if it did."""
    answers: list[Reply] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _is_free(state: Path, seconds: float) -> bool:
    """Wait until nobody holds the state directory."""
    files = (state / UP_FILE, state / LOCK_FILE)
    return any(
        all(lock_holder(file) is None for file in files)
        for _ in _poll_until(time.monotonic() + seconds)
    )


def _stop_by_signal(cli_context: CliContext, state: Path) -> None:
    """By signal: twice for `up`, whose workers then give back what runs; at last by SIGKILL."""
    for number, seconds in _SIGNALS:
        _signal(state, number)
        if _is_free(state, seconds):
            cli_context.info("all is stopped")
            return
    raise TimedOut(f"what runs on {state} does not end; see `ps` for process {_owner_pid(state)}")


def _owner_pid(state: Path) -> int | None:
    """Who is to be told: `up` if it runs, else the broker. Whoever holds the lock is ours."""
    return lock_holder(state / UP_FILE) or lock_holder(state / LOCK_FILE)


def _signal(state: Path, number: int) -> None:
    holder = _owner_pid(state)
    if holder:
        os.kill(holder, number)
