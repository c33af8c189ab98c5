"""The broker of `map` and `run`: a running broker, or their own with workers until they end.

Owns which of several commands on one state directory starts the broker, and what happens to the
others when that one ends: one of them starts the next broker on the same state and continues. All
tasks are in the journal, so nothing is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from taskyard.calls import current_task
from taskyard.cli.connection import broker_location, connect_client, connect_to, removed_if_unused
from taskyard.cli.daemon_options import given_resource_options, jobs_of_workers, local_machine
from taskyard.cli.format import format_count
from taskyard.cli.options import CliContext
from taskyard.cli.run_report import TaskGroup
from taskyard.core import resources
from taskyard.core.states import TaskState
from taskyard.errors import ClientClosed, Interrupted, NoBroker, UserError
from taskyard.net import endpoints
from taskyard.process import state_files
from taskyard.process.child import can_fork
from taskyard.process.machine import usable_cores
from taskyard.process.supervisor import Supervisor, WorkerSpec, stop_signals_as_interrupt
from taskyard.settings.keys import SERVICES
from taskyard.worker.allow_list import is_module_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.client.internal import InternalClient
    from taskyard.core.resources import Resources

#: How often a command tries to replace the broker of another command.
POLL_SECONDS: Final = 0.1

#: How long to wait for a broker whose command was killed.
ORPHAN_SECONDS: Final = 5.0

#: How long another command may take to start its broker.
START_SECONDS: Final = 60.0

#: How long a command may take to see that its client is closed. Later, it waits for input.
REACTION_SECONDS: Final = 1.0

#: How long to wait until tasks of a stopped command are cancelled.
CANCEL_SECONDS: Final = 5.0

#: States of tasks that workers will run, and of tasks that no worker has yet.
_RUNNABLE: Final = ("delayed", "ready", "leased")
UNSTARTED: Final = (TaskState.BLOCKED, TaskState.DELAYED, TaskState.READY)

#: Begins the mark of a killed run whose tasks belong to no campaign.
_NO_CAMPAIGN: Final = "@"

#: The parameters of `service_options` without resources.
_PARAMETERS: Final = ("workers", "jobs", "allow", "allow_pickle")


def make_worker_spec(
    cli_context: CliContext, values: dict[str, Any], services: Iterable[str]
) -> WorkerSpec:
    """Return the workers of a service from the values of `service_options`."""
    if values["allow_pickle"]:
        from taskyard.calls.pickled import PICKLE  # noqa: PLC0415  # few need it

        services = (PICKLE.decode(), *services)
    return WorkerSpec(
        workers=values["workers"],
        allow=values["allow"],
        services=tuple(dict.fromkeys([*SERVICES, *services])),
        allow_pickle=values["allow_pickle"],
        machine=local_machine(values),
        jobs=jobs_of_workers(cli_context.settings(), values["jobs"], max(1, values["workers"])),
    )


def check_slots(subject: str, slots: int, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` if no worker of this command has the slots of a task."""
    most = worker_spec.slots_of() or usable_cores()
    if slots > most:
        jobs = slots * worker_spec.workers
        raise UserError(
            f"{subject}: needs {slots} slots, but a local worker has {most} (give -j {jobs})"
        )


def check_workers(cli_context: CliContext, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` if the settings have `worker.processes = 0`."""
    if not worker_spec.workers:
        origin = cli_context.settings().all["worker.processes"].origin
        raise UserError(
            f"{origin}: worker.processes is 0, but without a running broker a worker is needed "
            "(give --workers)"
        )


def call_problem(call: str, allow: Sequence[str]) -> str:
    """Return why workers would refuse a call; an empty text if they accept it."""
    module = call.partition(":")[0]
    if is_module_allowed(module, allow):
        return ""
    return f"is not allowed (give --allow {module})"


def check_resources(subject: str, needed: Resources, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` if no worker of this command has the resources of a task."""
    workers = [worker_spec.share(number + 1).resources() for number in range(worker_spec.workers)]
    if any(resources.fits(needed, dict(one)) for one in workers):
        return
    largest = max(workers, key=lambda one: -len(resources.lacking(needed, dict(one))))
    missing = resources.lacking(needed, dict(largest))
    raise UserError(
        f"{subject}: needs {resources.format_resources(missing)}, but a local worker has "
        f"{resources.format_resources(largest)} (give {_worker_option(*missing[0])})"
    )


def _worker_option(name: bytes, amount: int) -> str:
    """Return the option that gives workers an amount of a resource."""
    text = resources.format_amount(name, amount)
    if name == resources.MEMORY:
        text = resources.format_bytes(amount, up=True).replace(" ", "").removesuffix("iB")
    key = name.decode(errors="backslashreplace")
    if name in (resources.CPUS, resources.GPUS, resources.MEMORY):
        return f"--worker-{key} {text}"
    return f"--worker-resource {key}={text}"


class LocalService:
    """A broker on a state directory: a running broker, or a broker that this command starts.

    `open` it before use, and `close` it.
    """

    #: Connected by `open`.
    client: InternalClient

    def __init__(
        self,
        cli_context: CliContext,
        state: Path,
        worker_spec: WorkerSpec,
        *,
        check_own: Callable[[], None],
        early_workers: bool,
    ) -> None:
        """Call `check_own` before an own broker is started: it may raise.

        With `early_workers`, start the workers together with the broker.
        """
        self._cli_context = cli_context
        self._state = state
        self._worker_spec = worker_spec
        self._check_own = check_own
        self._early_workers = early_workers
        #: Whether the broker continues when this and similar commands have ended.
        self.is_lasting = True
        #: Why no task can run any more. Empty while tasks can run.
        self.exit_reason = ""
        #: Whether `close` waits for running tasks of an own broker. They run again otherwise.
        self.finish_running = True
        self._lock: state_files.LocalLock | None = None
        self._map_lock: state_files.MapLock | None = None
        self._supervisor: Supervisor | None = None
        self._closing = threading.Event()
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._follower: threading.Thread | None = None

    def open(self) -> None:
        """Connect to the running broker, or start one. Raises `NoBroker`, `UserError`."""
        while not self._try_open():
            pass  # another command has started or ended at the same time
        if self._supervisor is None:
            report_unused_options(self._cli_context)

    def _try_open(self) -> bool:
        if state_files.lock_holder(self._state / state_files.LOCAL_FILE) is not None:
            self._await_broker_of_other()
            return self._connect_to_running(is_lasting=False)
        if self._is_in_use() and not state_files.is_orphaned(self._state):
            return self._connect_to_running(is_lasting=True)
        return self._open_own()

    def _is_in_use(self) -> bool:
        return state_files.lock_holder(self._state / state_files.LOCK_FILE) is not None

    def start_workers(self) -> None:
        """Start the workers of an own broker, unless they were started early."""
        if self._supervisor is not None and not self._early_workers:
            self._supervisor.start_workers(self._worker_spec)

    def report_others(self, *campaigns: str) -> None:
        """Report unfinished tasks of other campaigns, which the own workers will run as well."""
        if self._supervisor is None:
            return
        status = self.client.status()
        others = sum(status["counts"][state] for state in _RUNNABLE)
        for one in status["campaigns"]:
            if one["name"] in campaigns:
                others -= sum(one["counts"][state] for state in _RUNNABLE)
        if others > 0:
            self._cli_context.info(
                f"{format_count(others, 'other unfinished task')} will run too (see "
                "`taskyard list`)"
            )

    def stop_tasks(self, group: TaskGroup, *, finish_running: bool, is_resumable: bool) -> None:
        """Let no more tasks of a run start, and end running tasks unless they shall finish.

        Tasks of an own broker stay queued if they are resumable, and run when it is started again.
        Other tasks are cancelled. Returns when all tasks that shall finish have settled.
        """
        supervisor = self._supervisor
        self.finish_running = finish_running
        if supervisor is None or not is_resumable:
            states = UNSTARTED if finish_running else (*UNSTARTED, TaskState.LEASED)
            cancelled = self.client.cancel(group.scope(*states), timeout=CANCEL_SECONDS)
            if cancelled:
                self._cli_context.info(f"cancelled {format_count(cancelled, 'task')}")
        if not finish_running:
            return
        if supervisor is None:
            self._await_running(group)
        else:
            supervisor.finish_workers()
            self.client.status()  # futures of tasks that ended before this reply are settled

    def _await_running(self, group: TaskGroup) -> None:
        """Wait for the running tasks of a run on a running broker."""
        is_reported = False
        while any(self.client.tasks(group.scope(TaskState.LEASED))):
            if not is_reported:
                self._cli_context.info("waiting for running tasks (Ctrl-C leaves them)")
            is_reported = True
            time.sleep(POLL_SECONDS)

    def mark_temporary(self, group: TaskGroup) -> None:
        """Have the tasks of a run cancelled by a later command if this command is killed.

        A broker that lasts runs them instead.
        """
        if not self.is_lasting:
            self._map_lock = state_files.MapLock(
                self._state, group.campaign or f"{_NO_CAMPAIGN}{group.match}"
            )

    def unmark_temporary(self) -> None:
        """Undo `mark_temporary`, when no task of the campaign is left."""
        if self._map_lock is not None:
            self._map_lock.release()
            self._map_lock = None

    def close(self) -> None:
        """Stop the own broker and workers."""
        if self._map_lock is not None:
            self._map_lock.close()
        self._closing.set()
        if self._follower is not None:
            self._follower.join()
        self._stop_own()

    # The running broker.

    def _await_broker_of_other(self) -> None:
        """Wait until the command that holds the lock has started its broker, or has ended."""
        deadline = time.monotonic() + START_SECONDS
        files = self._state / state_files.LOCAL_FILE, self._state / state_files.LOCK_FILE
        while time.monotonic() < deadline:
            holder, broker = map(state_files.lock_holder, files)
            if holder is None or broker is not None:
                return
            time.sleep(POLL_SECONDS / 10)

    def _connect_to_running(self, *, is_lasting: bool) -> bool:
        """Connect, and return whether the broker is still there."""
        try:
            self.client = self._connect()
        except NoBroker:
            if self._is_in_use():
                raise
            return False
        self.is_lasting = is_lasting
        if not is_lasting:
            self._follower = threading.Thread(target=self._follow, name="follower", daemon=True)
            self._follower.start()
        return True

    def _connect(self) -> InternalClient:
        return connect_to(self._cli_context, endpoints.native_endpoint(self._state))

    # An own broker.

    def _open_own(self) -> bool:
        """Start a broker and connect. Return False if another command was faster."""
        self._check_own()
        lock = state_files.LocalLock.take(self._state)
        if lock is None:
            return False
        if not self._may_start():
            lock.release()
            return False
        killed = state_files.killed_maps(self._state)
        status = self._start(lock, has_workers=self._early_workers and not killed)
        if status is None:
            self.client, self.is_lasting = self._connect(), False
            self.client.has_own_workers()
            self._cancel_killed(killed)
            self._watch_own()
        elif not self._is_in_use():
            raise click.exceptions.Exit(status)
        return status is None

    def _cancel_killed(self, marks: Sequence[str]) -> None:
        """Cancel the tasks of killed runs before workers start. No process waits for them."""
        if not marks:
            return
        cancelled = 0
        for mark in marks:
            match = mark.removeprefix(_NO_CAMPAIGN)
            group = TaskGroup("", match) if match != mark else TaskGroup(mark)
            scope = group.scope(*UNSTARTED, TaskState.LEASED)
            cancelled += self.client.cancel(scope, timeout=CANCEL_SECONDS)
            state_files.forget_map(self._state, mark)
        if cancelled:
            self._cli_context.info(
                f"cancelled {format_count(cancelled, 'task')} of an interrupted run"
            )
        if self._supervisor is not None and self._early_workers:
            self._supervisor.start_workers(self._worker_spec)

    def _may_start(self) -> bool:
        """Return whether no broker runs. The broker of a killed command ends soon."""
        deadline = time.monotonic() + (
            ORPHAN_SECONDS if state_files.is_orphaned(self._state) else 0.0
        )
        while self._is_in_use():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS / 10)
        return True

    def _start(self, lock: state_files.LocalLock, *, has_workers: bool) -> int | None:
        """Start a broker, perhaps with workers. Return its exit status if it did not start."""
        lock.write_holder()
        context = self._cli_context
        supervisor = Supervisor(self._state, context.info, config=context.config)
        self._lock, self._supervisor = lock, supervisor
        if context.is_main_program and can_fork():
            self._fork(supervisor)
        supervisor.broker.start()
        if has_workers:
            supervisor.start_workers(self._worker_spec)
        status = supervisor.await_broker()
        if status is not None:
            self._stop_own()
        return status

    def _fork(self, supervisor: Supervisor) -> None:
        """Fork the processes, after the import of all that they need."""
        from taskyard.cli import broker, entry, worker  # noqa: F401, PLC0415  # slow to import

        supervisor.fork(partial(entry.run, entry.taskyard), self._worker_spec)

    def _watch_own(self) -> None:
        """Close the client when no task can run any more."""
        supervisor = self._supervisor
        assert supervisor is not None  # noqa: S101 - it was started before
        supervisor.on_over = lambda: self._end(supervisor.exit_reason() or "")
        if (reason := supervisor.exit_reason()) is not None:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Have the command end: its calls of the client fail. Interrupt it if it makes none."""
        self.exit_reason = reason
        self.client.close(0)  # the tasks that it has not sent can't be acknowledged
        if not self._closing.wait(REACTION_SECONDS) and self._is_main_thread:
            self._cli_context.interrupt_message = self.end_message()
            os.kill(os.getpid(), signal.SIGTERM)  # the kernel prefers the main thread

    def end_message(self) -> str:
        """Return why no task can run any more, and the remedy."""
        return f"{self.exit_reason} (run it again to resume)"

    def _stop_own(self) -> None:
        supervisor, lock = self._supervisor, self._lock
        self._supervisor = self._lock = None
        if supervisor is None or lock is None:
            return
        was_stopped = bool(supervisor.listening) and supervisor.broker.ended.is_set()
        try:
            supervisor.stop(finish_running=self.finish_running)
        finally:
            lock.release(stopped=was_stopped)

    # In a thread, while the broker of another command is used.

    def _follow(self) -> None:
        """Start a broker when the other command has ended, unless its broker was stopped."""
        while not self._closing.wait(POLL_SECONDS):
            lock = state_files.LocalLock.take(self._state)
            if lock is None:
                continue
            if lock.was_stopped:
                lock.close()
                self._end("the broker has ended")
            elif self._may_start():
                self._take_over(lock)
            else:
                self.is_lasting = True
                lock.release()
            return

    def _take_over(self, lock: state_files.LocalLock) -> None:
        self._cli_context.info("the broker has ended with its command, starting another")
        self._early_workers = True
        try:
            self._check_own()
        except UserError as error:
            lock.release()
            self._end(str(error))
            return
        status = self._start(lock, has_workers=True)
        if status is None:
            self._watch_own()
        elif self._is_in_use():
            self.is_lasting = True
        else:
            self._end(f"no broker: it exited with status {status}")


def report_unused_options(cli_context: CliContext) -> None:
    """Report given options of workers, which have no effect on a running broker."""
    context = click.get_current_context()
    given = [
        option.opts[-1]
        for option in context.command.params
        if option.name in _PARAMETERS
        and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]
    given += given_resource_options()
    if given:
        cli_context.info(f"using the running broker, without {', '.join(given)}")
    if current_task.TASK_VARIABLE in os.environ:
        cli_context.warn("in a task: it waits for free slots of the workers of the running broker")


@contextmanager
def own_state_in_task(cli_context: CliContext) -> Iterator[None]:
    """In a task, use a temporary state directory unless an option or a setting names one.

    For a command that waits for tasks of its own: the workers around it may all be busy with tasks
    that wait for such commands.
    """
    settings = cli_context.settings()
    sources = [settings.source("broker.state")]
    if not current_task.is_broker_of_worker(os.environ):
        sources.append(settings.source("broker.url"))
    is_given = cli_context.state or cli_context.brokers or any(sources)
    if is_given or current_task.TASK_VARIABLE not in os.environ:
        yield
        return
    with TemporaryDirectory(prefix="taskyard-") as directory:
        cli_context.state = Path(directory)
        yield


@contextmanager
def open_service(
    cli_context: CliContext,
    worker_spec: WorkerSpec,
    *,
    check_own: Callable[[], None],
    early_workers: bool = False,
    finish_running: bool = False,
) -> Iterator[LocalService]:
    """Connect to the running broker, or start one with workers, which end with the block.

    If the block raises, running tasks of own workers are ended and run again later, unless
    `finish_running` is set. See `LocalService` for the other arguments. Raises `Interrupted` when
    no task can run any more.
    """
    location = broker_location(cli_context)
    service = LocalService(
        cli_context,
        location.state,
        worker_spec,
        check_own=check_own,
        early_workers=early_workers,
    )
    if location.broker is not None:
        with connect_client(cli_context) as service.client:
            report_unused_options(cli_context)
            yield service
        return
    try:
        with (
            stop_signals_as_interrupt(),
            removed_if_unused(cli_context, location.state),
            closing(service),
        ):
            service.open()
            try:
                with service.client:
                    yield service
            except BaseException:
                service.finish_running = finish_running
                raise
    except ClientClosed as closed:
        if not service.exit_reason:
            raise
        raise Interrupted(service.end_message()) from closed
