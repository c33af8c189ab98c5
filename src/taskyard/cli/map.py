"""`taskyard map`: run a task for each row of input.

Submits rows as they arrive. `map_output` writes results as tasks settle.
"""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from taskyard import errors
from taskyard.campaign.task_spec import resources_of
from taskyard.cli import local_service
from taskyard.cli.connection import broker_location, given_location, stream_parts
from taskyard.cli.documents import MapSubmitDocument, RunDocument
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.input_rows import map_input, one_input
from taskyard.cli.map_output import FUTURES_MAX, FailureCounter, FutureWindow, LiveLines, MapOutput
from taskyard.cli.options import CliContext
from taskyard.cli.output import (
    OutputDirectory,
    print_document,
)
from taskyard.cli.progress import ProgressBar
from taskyard.cli.run_report import (
    EarlyStop,
    EndedRows,
    FailedTasks,
    RunPolicy,
    StoppedEarly,
    TaskGroup,
    check_journal,
    run_failure,
)
from taskyard.cli.task_options import (
    explain_refusal,
    is_readable,
    warn_unused_stdin,
)
from taskyard.cli.templates import (
    MapWork,
    kept_options,
    print_commands,
    row_submitter,
    task_pattern,
)
from taskyard.core.identity import spelling
from taskyard.core.model import Refusal
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future as AnyFuture

    from taskyard.cli.local_service import LocalService
    from taskyard.cli.options import CliContext
    from taskyard.cli.templates import InputRow, MapInput
    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient
    from taskyard.process.supervisor import WorkerSpec


#: How long a first line of stdin is waited for before a broker is started.
STDIN_SECONDS: Final = 0.1


class RowDoor(Struct, frozen=True):
    """The defaults of a command that runs rows: `map`, or `run` with a command."""

    #: Tasks get a made-up campaign if none is given. Else they belong to none.
    makes_campaign: bool = False
    #: --json prints the outputs.
    prints_tasks: bool = False
    #: There is one task, of this name if it is given.
    is_one: bool = False
    name: str | None = None

    def group(self, campaign: str | None) -> TaskGroup:
        """Return the tasks of a run."""
        campaign = campaign or ""
        if self.is_one:
            own = self.name or f"task-{secrets.token_hex(8)}"
            return TaskGroup(campaign, own, spelling(campaign, own))
        if campaign:
            return TaskGroup(campaign)
        made = f"{'map' if self.makes_campaign else 'run'}-{secrets.token_hex(5)}"
        return TaskGroup(made) if self.makes_campaign else TaskGroup("", f"{made}-")


def run_rows(
    cli_context: CliContext, argv: Sequence[str], values: dict[str, Any], door: RowDoor
) -> errors.ExitCode:
    """Run a command for each row of the input, or print what would run."""
    if values["retry_failed_only"]:
        _check_retry(values)
        return _retry_failed(cli_context, values, door)
    if door.is_one:
        source = one_input(argv)
    else:
        source = map_input(argv, values, lambda line: cli_context.warn(f"warning: {line}"))
    work = MapWork(source, values)
    if values["dry_run"]:
        return print_commands(cli_context, source, work, values)
    _mention_stdin(cli_context, values, is_input=source.is_stdin)
    if not source.is_stdin or is_readable(STDIN_SECONDS):
        rows = source.rows()
        with EarlyStop(RunPolicy.of(values)):  # the end of the first line may take long
            first = next(rows, None)
        if first is not None:
            work.encode(first)  # an error comes before anything is started
        elif not cli_context.as_json:
            cli_context.info("no input: nothing to run")
            return errors.ExitCode.OK
        given = chain(() if first is None else (first,), rows)
        source = source._replace(rows=lambda: given)
    return _run(cli_context, source, work, values, door)


def _run(
    cli_context: CliContext,
    source: MapInput,
    work: MapWork,
    values: dict[str, Any],
    door: RowDoor,
) -> errors.ExitCode:
    """Submit a task per row of the input, and wait for them."""
    wait, group = values["wait"], door.group(values["campaign"])
    is_named = bool(values["campaign"] or door.name)
    spec = _worker_spec(cli_context, values)
    policy, began = RunPolicy.of(values), time.monotonic()
    is_anonymous = wait and not is_named
    with (
        local_service.own_state_in_task(cli_context) if is_anonymous else nullcontext(),
        local_service.open_service(
            cli_context,
            spec,
            check_own=partial(_check_own, cli_context, values, spec),
            early_workers=True,
            finish_running=policy.finish_running,
        ) as service,
        _refusal_hint(group, values, work),
    ):
        service.report_others(group.campaign)
        if door.makes_campaign and not is_named:
            cli_context.info(f"campaign {group.campaign}")
        stop = MapStop(cli_context, service, group, policy, is_named=is_named)
        cli_context.interrupt_message = stop.message("interrupted")
        ended = EndedRows(service.client, group) if is_named else None
        if values["campaign"]:
            _mention_kept_options(cli_context, service.client, group.campaign, values)
        send = row_submitter(service.client, group, values, ended, watch=wait)
        rows = ((row, send(row, work.encode(row))) for row in source.rows())
        tasks_max = min(source.tasks_max or FUTURES_MAX, FUTURES_MAX)
        if not wait:
            futures = (future for _, future in rows)
            with stop.stopping():
                return _submit(cli_context, service.client, group, futures, tasks_max)
        output = open_output(cli_context, service.client, group, values, door)
        with stop.stopping(), output as answer:
            window = FutureWindow(
                answer.write, answer.flush, in_order=values["keep_order"], futures_max=tasks_max
            )
            print_results(answer, window, rows, stop, ended)
        seconds = time.monotonic() - began
        if cli_context.as_json and not door.prints_tasks:
            _print_run(cli_context, service.client, group, answer, seconds)
    policy.announce(cli_context, answer.summary(seconds))
    return answer.exit_code()


def _print_run(
    cli_context: CliContext,
    client: InternalClient,
    group: TaskGroup,
    answer: MapOutput,
    seconds: float,
) -> None:
    """Print the document of a run, without outputs."""
    summary, location = answer.summary(seconds), broker_location(cli_context)
    failed = client.tasks(group.scope(TaskState.FAILED)) if summary.counts.get("failed") else ()
    states = {state.name.lower(): 0 for state in TaskState}
    document = RunDocument(
        campaign=group.campaign,
        state="" if location.broker else str(location.state),
        seconds=summary.seconds,
        counts=states | {key: summary.counts[key] for key in states if key in summary.counts},
        truncated=answer.truncated,
        failures=[run_failure(task) for task in failed],
        slowest=[],
        others=states,
        stopped=summary.stopped,
    )
    print_document(document)


def _check_retry(values: dict[str, Any]) -> None:
    """Raise `UserError` for options that need the input, or waiting."""
    if not values["campaign"]:
        raise errors.UserError("--retry-failed-only: needs --campaign")
    for option, is_given in (
        ("--dry-run", values["dry_run"]),
        ("--no-wait", not values["wait"]),
        ("--tag", values["tag"]),
        ("--no-retry-failed", values["no_retry_failed"]),
    ):
        if is_given:
            raise errors.UserError(f"--retry-failed-only and {option} exclude each other")


def _retry_failed(
    cli_context: CliContext, values: dict[str, Any], door: RowDoor
) -> errors.ExitCode:
    """Retry the failed tasks of a campaign, and print their results."""
    campaign, policy, began = values["campaign"], RunPolicy.of(values), time.monotonic()
    group = TaskGroup(campaign)
    spec = _worker_spec(cli_context, values)

    def check_own() -> None:
        check_journal(cli_context, campaign)
        local_service.check_workers(cli_context, spec)

    with local_service.open_service(
        cli_context, spec, check_own=check_own, finish_running=policy.finish_running
    ) as service:
        client = service.client
        tasks = FailedTasks(client, campaign)
        failed, behind = tasks.find()
        stop = MapStop(cli_context, service, group, policy, is_named=True)
        cli_context.interrupt_message = stop.message("interrupted")
        futures: list[Future] = []
        if tasks.retry(cli_context, failed):
            futures = client.futures([*failed, *behind])
            service.report_others(campaign)
            service.start_workers()
        with stop.stopping(), open_output(cli_context, client, group, values, door) as answer:
            window = FutureWindow(answer.write, answer.flush, in_order=values["keep_order"])
            rows = ((None, future) for future in futures)
            print_results(answer, window, rows, stop)
        if cli_context.as_json and not door.prints_tasks:
            _print_run(cli_context, client, group, answer, time.monotonic() - began)
    policy.announce(cli_context, answer.summary(time.monotonic() - began))
    return answer.exit_code()


def _worker_spec(cli_context: CliContext, values: dict[str, Any]) -> WorkerSpec:
    """Return the workers of this command."""
    services = [values["service"]] if values["service"] else []
    return local_service.make_worker_spec(cli_context, values, services)


def _mention_kept_options(
    cli_context: CliContext, client: InternalClient, campaign: str, values: dict[str, Any]
) -> None:
    """Print a message if tasks of an earlier map have other options, which they keep."""
    if options := kept_options(client, campaign, values):
        cli_context.info(
            f"campaign {escape_line(campaign)}: {', '.join(options)} of earlier tasks stay as they "
            "were (change waiting ones with `taskyard edit`)"
        )


def _mention_stdin(cli_context: CliContext, values: dict[str, Any], *, is_input: bool) -> None:
    """Print a message if stdin is read from a terminal, or has data and is not read."""
    if not is_input:
        warn_unused_stdin(cli_context, values)
    elif sys.stdin is not None and sys.stdin.isatty():
        cli_context.info("reading lines from the terminal: end them with Ctrl-D")


def _check_own(cli_context: CliContext, values: dict[str, Any], spec: WorkerSpec) -> None:
    """Raise an error if the tasks could never run on a broker and workers of this command."""
    for option, problem in (
        ("--no-wait", "" if values["wait"] else "leaves the tasks to a running broker"),
        ("--payload", "" if values["payload"] is None else "needs a worker of your own"),
    ):
        if problem:
            raise errors.NoBroker(
                f"no broker is running, and {option} {problem} (start `taskyard up`)"
            )
    local_service.check_workers(cli_context, spec)
    call = values["call"]
    if call is not None and (problem := local_service.call_problem(call, spec.allow)):
        raise errors.UserError(f"--call {call}: {problem}")
    slots = int(values["slots"] or 1)
    local_service.check_slots(f"--slots {slots}", slots, spec)
    local_service.check_resources("a task", resources_of(task_pattern("", values)), spec)


@contextmanager
def _refusal_hint(group: TaskGroup, values: dict[str, Any], work: MapWork) -> Iterator[None]:
    """Rephrase a refusal of the broker in terms of options."""
    try:
        yield
    except errors.Refused as refused:
        name = "".join(refused.names[:1])
        option = "--name" if group.name else "--campaign"
        explained = explain_refusal(refused, f"task {name}", values, option)
        if refused.code == Refusal.CONFLICT.value:
            is_numbered = name.startswith(f"{group.campaign}/{group.campaign}-")
            hint = _NUMBERED if is_numbered else _NUMBER_USED if work.uses_number() else ""
            explained = errors.Refused(f"{explained}{hint}", refused.code, refused.names)
        raise explained from refused


#: Reasons for another command under the name of a task.
_NUMBERED: Final = "; tasks of this campaign are numbered, so lines can only be added at the end"
_NUMBER_USED: Final = (
    "; {#} is a part of the command, and changes when lines are inserted, removed or reordered"
)


@contextmanager
def open_output(
    cli_context: CliContext,
    client: InternalClient,
    group: TaskGroup,
    values: dict[str, Any],
    door: RowDoor,
) -> Iterator[MapOutput]:
    """Open the output of a run: live with --line-buffer, and with the directory of --output."""
    parts = partial(stream_parts, client)
    output = MapOutput(cli_context, group, parts, ends_lines=_ends_lines(values))
    output.prints_results, output.has_tags = values["call"] is None, values["tag"]
    output.has_document = cli_context.as_json and door.prints_tasks
    output.is_counted_only = cli_context.as_json and not door.prints_tasks
    output.is_shown = not values["quiet_output"]
    output.has_summary = not (door.is_one or output.is_counted_only)
    output.retry_hint = _retry_hint(cli_context, group, values)
    if values["line_buffer"]:
        if cli_context.as_json:
            raise errors.UserError("--line-buffer: can't be used with --json")
        output.live = LiveLines(client, group.scope(TaskState.LEASED), output.write_live)
    if not values["output"]:
        yield output
        return
    with OutputDirectory(cli_context, client, Path(values["output"])) as copies:
        output.copy_to = copies.write
        yield output


def _retry_hint(cli_context: CliContext, group: TaskGroup, values: dict[str, Any]) -> str:
    """Return how to retry failed tasks, with or without a running broker."""
    if not (values["campaign"] or group.campaign):
        return "give --campaign NAME to retry failed tasks by the same command"
    if not values["campaign"]:
        options = f"{group.options}{given_location(cli_context)} --retry-failed-only"
        return f"retry them with `taskyard map {options}`"
    without = " without --no-retry-failed" if values["no_retry_failed"] else ""
    return f"run the same command again{without} to retry them"


def _ends_lines(values: dict[str, Any]) -> bool:
    """Return whether results end with a newline. Output of commands in a pipe is exact."""
    if values["pipe"]:
        return False
    is_command = values["call"] is None and values["payload"] is None
    return not is_command or values["tag"] or values["line_buffer"] or sys.stdout.isatty()


def print_results(
    answer: MapOutput,
    window: FutureWindow,
    rows: Iterable[tuple[InputRow | None, Future]],
    stop: MapStop,
    ended: EndedRows | None = None,
) -> None:
    """Print the results of futures, which may be submitted meanwhile.

    Calls `stop` if the policy or an interrupt ends it before all are settled. Failures of `ended`
    are from an earlier map, and not counted.
    """
    with answer, answer.live or nullcontext(), window:
        try:
            _deliver(answer, window, rows, stop.policy, ended)
        except (StoppedEarly, KeyboardInterrupt) as error:
            stop.end_output(answer, window, error)
            raise


def _deliver(
    answer: MapOutput,
    window: FutureWindow,
    rows: Iterable[tuple[InputRow | None, Future]],
    policy: RunPolicy,
    ended: EndedRows | None,
) -> None:
    """Pass futures to the window until all are settled. Raises `StoppedEarly`."""
    with EarlyStop(policy) as early_stop:
        failures = FailureCounter(early_stop)
        for row, future in rows:
            if row is not None:
                answer.set_input(future, row)
            answer.count(future)
            if policy.max_failures is not None and future.full_name not in (ended or ()):
                future.add_done_callback(failures.count)
            window.add(future)
        answer.all_submitted(window.added)
        window.finish()


def _submit(
    cli_context: CliContext,
    client: InternalClient,
    group: TaskGroup,
    futures: Iterable[Future],
    tasks_max: int,
) -> errors.ExitCode:
    wrong: list[BaseException] = []

    def taken(future: AnyFuture[Any]) -> None:
        error = future.exception()
        if error is not None:
            wrong.append(error)

    number = 0
    label = f"campaign {group.campaign}" if group.campaign else "tasks"
    with ProgressBar(cli_context, label, participle="submitted") as bar:
        for number, future in enumerate(futures, start=1):
            future.add_done_callback(taken)
            if wrong:
                break
            bar.update(number, None)
            if number % tasks_max == 0:
                client.status()  # as below
        client.status()  # returns after all tasks are acknowledged
    if wrong:
        raise wrong[0]
    if cli_context.as_json:
        print_document(MapSubmitDocument(campaign=group.campaign, submitted=number))
    elif group.name:
        click.echo(group.name)
    else:
        cli_context.info(f"{group.label}{format_count(number, 'task')} submitted")
    return errors.ExitCode.OK


class MapStop:
    """Stops the tasks of a map whose block ends with an error."""

    def __init__(
        self,
        cli_context: CliContext,
        service: LocalService,
        group: TaskGroup,
        policy: RunPolicy,
        *,
        is_named: bool,
    ) -> None:
        self._cli_context = cli_context
        self._service = service
        self._group = group
        self.policy = policy
        #: Whether the user named the campaign or the task.
        self._is_named = is_named
        #: Whether its tasks are stopped.
        self._is_done = False

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the tasks of a block that raises, unless they are stopped.

        Raises `OutputClosed` if the reader of stdout has stopped.
        """
        if not self._is_named:
            self._service.mark_temporary(self._group)
        try:
            yield
            self._service.unmark_temporary()
        except BaseException as error:
            is_input_wrong = isinstance(error, errors.UserError)
            with suppress(errors.TaskyardError):  # the first error is reported
                if not self._service.is_lasting or (is_input_wrong and not self._is_named):
                    self._stop_tasks()
                if is_input_wrong and self._is_named:
                    self._report_unfinished()
            if isinstance(error, BrokenPipeError):
                raise errors.OutputClosed(self.message("stdout was closed")) from None
            raise

    def end_output(self, answer: MapOutput, window: FutureWindow, error: BaseException) -> None:
        """Stop the tasks, and print the results of tasks that have settled by then.

        An interrupt ends the output at once, unless running tasks shall finish.
        """
        stopped = error if isinstance(error, StoppedEarly) else None
        if stopped is None and self._service.is_lasting:
            return
        is_printed = stopped is not None or self.policy.finish_running
        if is_printed:
            answer.stop(stopped)
        self._stop_tasks()
        if is_printed:
            answer.set_unfinished(window.finish_settled())

    def _stop_tasks(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._service.stop_tasks(
            self._group,
            finish_running=self.policy.finish_running,
            is_resumable=self._is_named,
        )
        self._service.unmark_temporary()

    def _report_unfinished(self) -> None:
        """Report the tasks that were submitted before an error of the input, if there are any."""
        scope = self._group.scope(*local_service.UNSTARTED, TaskState.LEASED)
        if unfinished := sum(1 for _ in self._service.client.tasks(scope)):
            tasks = format_count(unfinished, "unfinished task")
            self._cli_context.info(f"{self._group.label}{tasks}: {self._remedy()}")

    def message(self, cause: str) -> str:
        """Return why the map ended, and what happens to its tasks."""
        if self._service.is_lasting:
            return f"{cause}; submitted tasks continue: {self._remedy()}"
        if self._is_named:
            return f"{cause}; unfinished tasks are kept: {self._remedy()}"
        return f"{cause}; unfinished tasks are cancelled (give --campaign to resume them later)"

    def _remedy(self) -> str:
        """Return the commands for tasks that are left."""
        cancel = f"`taskyard cancel {self._group.options}` cancels them"
        resume = "the same command resumes" if self._is_named else ""
        return ", ".join(filter(None, [cancel if self._service.is_lasting else "", resume]))
