"""`taskyard run`: run a campaign file with its own broker and workers."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click
from msgspec import Struct

from taskyard.campaign.detection import Format
from taskyard.campaign.formats import FileOptions
from taskyard.campaign.reader import default_campaign_name
from taskyard.campaign.submit_campaign import submit_campaign
from taskyard.campaign.task_spec import service_of
from taskyard.cli.connection import connect_to
from taskyard.cli.daemon_options import usable_cores
from taskyard.cli.documents import RunDocument, RunFailure
from taskyard.cli.format import escape_line, format_count, format_duration
from taskyard.cli.load import format_options, read_or_report, report_rejected
from taskyard.cli.options import (
    CliContext,
    broker_timeout_option,
    json_option,
    quiet_option,
    setting_option,
    state_option,
    verbose_option,
)
from taskyard.cli.output import example, print_document
from taskyard.cli.progress import ProgressBar
from taskyard.core.events import Scope
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ClientClosed, ExitCode, Interrupted, StateLocked, TimedOut, UserError
from taskyard.net import endpoints
from taskyard.process.locks import LOCK_FILE, lock_holder
from taskyard.process.supervisor import Supervisor, WorkerSpec, sigterm_as_interrupt
from taskyard.settings.keys import PROCESSES_MAX, SERVICES, SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.campaign.reader import LoadedCampaign
    from taskyard.campaign.submit_campaign import SubmitResult
    from taskyard.client.client import Client

#: How often progress is polled.
POLL_SECONDS: Final = 0.25

#: The most failures that are printed. `taskyard list --failed` has all.
FAILURES_SHOWN_MAX: Final = 20

#: How long to wait for a process that is about to release the state directory.
LOCK_WAIT_SECONDS: Final = 2.0


class RunOptions(Struct, frozen=True):
    """The options of a run."""

    file: str
    campaign: str
    state: Path
    skip_bad: bool
    retry_failed: bool
    as_json: bool
    #: None: detected.
    form: Format | None = None


class RunResources(NamedTuple):
    """The processes of a run and the client."""

    supervisor: Supervisor
    worker_spec: WorkerSpec
    client: Client


@click.command(epilog=example("run cmds.txt", "run examples/first.jsonl --workers 2", "why bad"))
@click.argument("file", type=click.Path())
@setting_option(
    "worker.processes",
    "--workers",
    type=click.IntRange(1, PROCESSES_MAX),
    metavar="N",
    show_default="1",
    help="Worker processes.",
)
@setting_option(
    "worker.slots",
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    metavar="N",
    show_default="one per core",
    help="Tasks at once per worker.",
)
@state_option
@click.option(
    "--campaign",
    metavar="NAME",
    help="Name of the campaign. The file name without suffix if omitted.",
)
@setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module. Repeatable.",
)
@click.option(
    "--no-retry-failed", is_flag=True, help="Don't retry tasks that failed in an earlier run."
)
@click.option("--skip-bad", is_flag=True, help="Skip rejected lines instead of doing nothing.")
@format_options
@click.option(
    "--replay", is_flag=True, help="WfCommons: sleep for the recorded run time of each task."
)
@click.option("--speedup", type=float, default=1.0, metavar="N", help="Replay N times as fast.")
@broker_timeout_option
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def run(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    *,
    file: str,
    workers: int,
    slots: int | None,
    state: Path,
    campaign: str | None,
    allow: tuple[str, ...],
    no_retry_failed: bool,
    skip_bad: bool,
    form: Format | None,
    replay: bool,
    speedup: float,
    as_json: bool,
) -> ExitCode:
    """Run a campaign file from start to finish.

    Starts a broker and workers, loads FILE, waits until all tasks have settled, and stops them.
    Exit 0 if all tasks are done, 1 if one failed. Only the last 1 MiB of a task's stdout is kept.
    If one was longer, the command warns and exits 1.

    Run it again with the same --state to resume, after Ctrl-C or a crash. Done tasks are kept and
    failed tasks are retried. FILE has a shell command per line, or any other format. - is stdin.
    """
    name = campaign or default_campaign_name(file)
    options = FileOptions(form, replay, speedup, name)
    loaded = read_or_report(cli_context, file, options, skip_bad=skip_bad)
    slots = slots or usable_cores()
    worker_spec = WorkerSpec(workers, slots, allow, _services(loaded))
    _check_workers(cli_context, workers)
    _check_tasks_runnable(loaded, slots, allow)
    _check_state_unused(state, file)
    run_options = RunOptions(file, name, state, skip_bad, not no_retry_failed, as_json, form)
    cli_context.interrupt_message = f"interrupted; resume with `{_resume_command(run_options)}`"
    with (
        sigterm_as_interrupt(),
        Supervisor(state, cli_context.info, config=cli_context.config) as supervisor,
    ):
        if (status := supervisor.start_broker()) is not None:
            raise click.exceptions.Exit(status)
        with (
            connect_to(cli_context, endpoints.native_endpoint(state)) as client,
            _close_with_broker(supervisor, client),
        ):
            began = time.monotonic()
            report = partial(report_rejected, file, skip_bad=skip_bad)
            submitted = submit_campaign(client, loaded, name, on_rejected=report)
            _run(cli_context, run_options, submitted, RunResources(supervisor, worker_spec, client))
            return _report(run_options, client, time.monotonic() - began)


def _run(
    cli_context: CliContext,
    run_options: RunOptions,
    submitted: SubmitResult,
    resources: RunResources,
) -> None:
    """Run the campaign if it has unsettled tasks."""
    client = resources.client
    total = submitted.new + submitted.existing.total()
    retried = 0
    if run_options.retry_failed and submitted.failed:
        retried = client.retry(submitted.failed)
    cli_context.info(_start_line(run_options, submitted, total, retried))
    counts = _counts(client, run_options.campaign)
    if total and any(counts[state] for state in _UNSETTLED):
        resources.supervisor.start_workers(resources.worker_spec)
        with ProgressBar(cli_context, run_options.campaign) as bar:
            _wait(client, run_options.campaign, resources.supervisor, bar)


#: States from which a task may still run.
_UNSETTLED: Final = ("blocked", "delayed", "ready", "leased")


# Checks before the start.


def _services(loaded: LoadedCampaign) -> tuple[str, ...]:
    """Return the services that the tasks of the file need."""
    named = (service_of(spec) for spec in loaded.specs if spec.payload is None)
    return tuple(dict.fromkeys([*SERVICES, *named]))


def _check_workers(cli_context: CliContext, workers: int) -> None:
    """Raise `UserError` if the settings have `worker.processes = 0`."""
    if not workers:
        origin = cli_context.settings().all["worker.processes"].origin
        raise UserError(
            f"{origin}: worker.processes is 0, but `run` needs a worker (give --workers)"
        )


def _check_tasks_runnable(loaded: LoadedCampaign, slots: int, allow: Sequence[str]) -> None:
    """Raise `UserError` for tasks that could never run here."""
    for spec, line in zip(loaded.specs, loaded.lines, strict=True):
        place = f"{loaded.file}:{line}: task {escape_line(spec.name)}"
        if spec.payload is not None:
            raise UserError(
                f"{place}: service {escape_line(service_of(spec))} needs your own worker (use "
                "`taskyard up` and `taskyard load`, or `taskyard map` to run a command per line)"
            )
        if spec.slots > slots:
            raise UserError(
                f"{place}: needs {spec.slots} slots, but a worker has {slots} "
                f"(give --slots {spec.slots})"
            )
        if spec.call is not None:
            module = spec.call.partition(":")[0]
            if not any(module == one or module.startswith(f"{one}.") for one in allow):
                raise UserError(
                    f"{place}: call {escape_line(spec.call)} is not allowed (give --allow {module})"
                )


def _check_state_unused(state: Path, file: str) -> None:
    """Raise `StateLocked` if another process uses the state directory."""
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while (holder := lock_holder(state / LOCK_FILE)) is not None:
        if time.monotonic() > deadline:
            raise StateLocked(
                f"state directory {state}: in use by process {holder} (give another --state, or "
                f"use its broker with `taskyard load {file} --state {state}`)"
            )
        time.sleep(LOCK_WAIT_SECONDS / 20)


# While tasks run.


@contextmanager
def _close_with_broker(supervisor: Supervisor, client: Client) -> Iterator[None]:
    """Close the client when the broker has ended for good, and raise `Interrupted`."""
    supervisor.broker.on_end = client.close
    try:
        yield
    except ClientClosed as closed:
        raise Interrupted(
            f"{supervisor.exit_reason() or closed} (run it again to resume)"
        ) from closed


def _counts(client: Client, campaign: str) -> dict[str, int]:
    return _counts_and_truncated(client, campaign)[0]


def _counts_and_truncated(client: Client, campaign: str) -> tuple[dict[str, int], int]:
    """Return the number of tasks in each state, and of those with a truncated result."""
    for one in client.status()["campaigns"]:
        if one["name"] == campaign:
            return one["counts"], one["truncated"]
    return {state.name.lower(): 0 for state in TaskState}, 0


def _wait(client: Client, campaign: str, supervisor: Supervisor, bar: ProgressBar) -> None:
    """Wait until the campaign has settled. Raise `Interrupted` if its processes have ended."""
    while (over := supervisor.exit_reason()) is None:
        counts = _counts(client, campaign)
        bar.count(counts, sum(counts.values()))
        try:
            client.wait_campaign(campaign, POLL_SECONDS)
        except TimedOut:
            continue
        return
    raise Interrupted(f"{over} (run it again to resume)")


def _start_line(run_options: RunOptions, submitted: SubmitResult, total: int, retried: int) -> str:
    existing = submitted.existing
    ended = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)
    numbers = (
        (existing[TaskState.DONE], "already done"),
        (retried, "failed and retried"),
        (existing[TaskState.FAILED] - retried, "failed and not retried"),
        (existing[TaskState.CANCELLED], "cancelled"),
        (existing.total() - sum(existing[state] for state in ended), "waiting since the last run"),
        (submitted.new if existing else 0, "new"),
    )
    parts = ", ".join(f"{number:,} {word}" for number, word in numbers if number)
    return (
        f"{escape_line(run_options.campaign)}: "
        f"{format_count(total, 'task')}{': ' if parts else ''}{parts}"
    )


# The report.


def _report(run_options: RunOptions, client: Client, seconds: float) -> ExitCode:
    """Print the outcome and return the exit code."""
    counts, truncated = _counts_and_truncated(client, run_options.campaign)
    failures: list[RunFailure] = []
    if counts["failed"]:
        scope = Scope(campaign=run_options.campaign.encode(), states=(TaskState.FAILED,))
        failures = [
            RunFailure(**{field: task[field] for field in RunFailure.__struct_fields__})
            for task in client.tasks(scope)
        ]
    code = _exit_code(counts, truncated)
    if run_options.as_json:
        document = RunDocument(
            campaign=run_options.campaign,
            state=str(run_options.state),
            seconds=round(seconds, 3),
            counts=counts,
            truncated=truncated,
            failures=failures,
        )
        print_document(document)
    else:
        click.echo(
            f"{escape_line(run_options.campaign)}: {_outcome(counts, truncated)} "
            f"({format_duration(seconds)})"
        )
        if truncated:
            click.echo("truncated: only the last 1 MiB of stdout is kept")
        _print_failures(run_options, failures)
    return code


def _exit_code(counts: dict[str, int], truncated: int) -> ExitCode:
    if counts["failed"] or counts["blocked"] or truncated:
        return ExitCode.TASK_FAILED
    return ExitCode.CANCELLED if counts["cancelled"] else ExitCode.OK


def _outcome(counts: dict[str, int], truncated: int) -> str:
    parts = [
        f"{counts[state]:,} {word}"
        for state, word in (
            ("done", "done"),
            ("failed", "failed"),
            ("blocked", "behind a failure"),
            ("cancelled", "cancelled"),
        )
        if counts[state] or state == "done"
    ]
    if truncated:
        parts.append(f"{truncated:,} with truncated output")
    return ", ".join(parts)


def _print_failures(run_options: RunOptions, failures: list[RunFailure]) -> None:
    if not failures:
        return
    for one in failures[:FAILURES_SHOWN_MAX]:
        reason = escape_line(one.reason) or "no reason given"
        attempts = format_count(one.attempt, "attempt")
        click.echo(
            f"  {escape_line(spelling(one.campaign, one.name))} failed after {attempts}: {reason}"
        )
    if len(failures) > FAILURES_SHOWN_MAX:
        more = len(failures) - FAILURES_SHOWN_MAX
        click.echo(
            f"  … and {more:,} more: taskyard list --failed{_state_option(run_options.state)}"
        )
    name = shlex.quote(escape_line(spelling(failures[0].campaign, failures[0].name)))
    click.echo(f"explain:  taskyard why {name}{_state_option(run_options.state)}")
    click.echo(f"retry:    {_resume_command(run_options)}")


def _resume_command(run_options: RunOptions) -> str:
    own = (
        ""
        if run_options.campaign == default_campaign_name(run_options.file)
        else f" --campaign {run_options.campaign}"
    )
    form = "" if run_options.form is None else f" --format {run_options.form.value}"
    file = shlex.quote(run_options.file)
    return f"taskyard run {file}{form}{own}{_state_option(run_options.state)}"


def _state_option(state: Path) -> str:
    return "" if str(state) == ".taskyard" else f" --state {shlex.quote(str(state))}"
