"""`taskyard run`: run a campaign file, with its own broker and workers if none is running."""

from __future__ import annotations

import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from taskyard.campaign.detection import Format
from taskyard.campaign.formats import FileOptions
from taskyard.campaign.reader import default_campaign_name
from taskyard.campaign.submit_campaign import submit_campaign
from taskyard.campaign.task_spec import resources_of, service_of
from taskyard.cli.connection import broker_location
from taskyard.cli.documents import RunDocument, RunFailure, SlowTask
from taskyard.cli.format import escape_line, format_count, format_duration
from taskyard.cli.load import format_options, read_or_report, report_rejected
from taskyard.cli.local_service import (
    call_problem,
    check_workers,
    local_service,
    make_worker_spec,
    service_options,
)
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.output_directory import OutputDirectory, output_option
from taskyard.cli.progress import ProgressBar
from taskyard.cli.run_policy import (
    EarlyStop,
    RunPolicy,
    RunSummary,
    StoppedEarly,
    run_policy_options,
)
from taskyard.cli.slow_tasks import SLOWEST_SEARCHED_MAX, format_slowest, slowest_tasks
from taskyard.cli.task_options import environment_options
from taskyard.core.events import Scope
from taskyard.core.identity import spelling
from taskyard.core.resources import fits, format_resources, lacking
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, TimedOut, UserError
from taskyard.process.machine import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskyard.campaign.reader import LoadedCampaign
    from taskyard.campaign.submit_campaign import SubmitResult
    from taskyard.cli.local_service import LocalService
    from taskyard.client.client import Client
    from taskyard.core.resources import Resources
    from taskyard.process.supervisor import WorkerSpec

#: How often progress is polled.
POLL_SECONDS: Final = 0.25

#: The most failures that are printed. `taskyard list --failed` has all.
FAILURES_SHOWN_MAX: Final = 20


class RunOptions(Struct, frozen=True):
    """The options of a run."""

    file: str
    campaign: str
    #: The state directory. Empty if the broker is named by its endpoint.
    state: str
    #: The options that lead to the same broker, for commands that are printed.
    location: str
    skip_bad: bool
    retry_failed: bool
    as_json: bool
    #: None: detected.
    form: Format | None = None


@click.command(epilog=example("run cmds.txt", "run examples/first.jsonl --workers 2", "why bad"))
@click.argument("file", type=click.Path())
@service_options("--slots", "-j", "--jobs")
@click.option(
    "--campaign",
    metavar="NAME",
    help="Name of the campaign. The file name without suffix if omitted.",
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
@output_option
@run_policy_options
@environment_options
@broker_options
@click.pass_obj
def run(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    /,
    *,
    file: str,
    campaign: str | None,
    no_retry_failed: bool,
    skip_bad: bool,
    form: Format | None,
    replay: bool,
    speedup: float,
    output: str | None,
    **values: Any,  # noqa: ANN401  # options of workers and of a `RunPolicy`
) -> ExitCode:
    """Run a campaign file from start to finish.

    Loads FILE and waits until all tasks have settled. Uses the broker that runs on the state
    directory. If there is none, the command starts one with workers and stops them at the end. Exit
    0 if all tasks are done, 1 if one failed.

    Run it again with the same --state to resume, after Ctrl-C or a crash. Done tasks are kept,
    unless an input has changed or an output is gone. Failed tasks are retried. FILE has a shell
    command per line, or any other format. - is stdin.
    """
    name = campaign or default_campaign_name(file)
    policy = RunPolicy.of(values)
    options = FileOptions(form, replay, speedup, name)
    loaded = read_or_report(cli_context, file, options, skip_bad=skip_bad)
    worker_spec = make_worker_spec(values, _services(loaded))
    as_json, location = cli_context.as_json, _location(cli_context)
    run_options = RunOptions(
        file, name, *location, skip_bad, not no_retry_failed, as_json=as_json, form=form
    )
    cli_context.interrupt_message = f"interrupted; resume with `{_resume_command(run_options)}`"
    check_own = partial(_check_own, cli_context, loaded, worker_spec)
    began = time.monotonic()
    with local_service(
        cli_context, worker_spec, check_own=check_own, finish_running=policy.finish_running
    ) as service:
        report = partial(report_rejected, file, skip_bad=skip_bad)
        submit = partial(submit_campaign, service.client, loaded, name, on_rejected=report)
        stopped = _run(cli_context, run_options, service, submit, policy)
        _write_output(cli_context, service.client, output, loaded, name)
        seconds = time.monotonic() - began
        numbers = _counts_and_truncated(service.client, name)
        code = _report(run_options, service.client, seconds, stopped, numbers)
    policy.announce(
        cli_context, RunSummary(name, code, round(seconds, 3), numbers[0], str(stopped or ""))
    )
    return code


def _location(cli_context: CliContext) -> tuple[str, str]:
    """Return the state directory, and the given options that lead a command to the same broker."""
    location = broker_location(cli_context)
    given = {"--state": cli_context.state, "--broker": cli_context.broker}
    options = [f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value]
    return "" if location.broker else str(location.state), "".join(options)


def _run(
    cli_context: CliContext,
    run_options: RunOptions,
    service: LocalService,
    submit: Callable[..., SubmitResult],
    policy: RunPolicy,
) -> StoppedEarly | None:
    """Submit the campaign and wait until it has settled. Return why it was stopped early."""
    try:
        with EarlyStop(policy) as early_stop:
            submitted = submit(restart_changed=True)
            failed_before = _start(cli_context, run_options, service, submitted)
            if failed_before is not None:
                with ProgressBar(cli_context, run_options.campaign) as bar:
                    for counts in _wait(service.client, run_options.campaign):
                        bar.count(counts, sum(counts.values()))
                        early_stop.count_failures(counts["failed"] - failed_before)
                    if cli_context.shows_progress:
                        counts = _counts(service.client, run_options.campaign)
                        bar.count(counts, sum(counts.values()), counts["blocked"])
    except StoppedEarly as stopped:
        cli_context.info(str(stopped))
        service.stop_campaign(
            run_options.campaign, finish_running=policy.finish_running, is_resumable=True
        )
        return stopped
    return None


def _start(
    cli_context: CliContext,
    run_options: RunOptions,
    service: LocalService,
    submitted: SubmitResult,
) -> int | None:
    """Retry failed tasks and start workers.

    Return the failures of earlier runs that are not retried. None if all tasks have settled.
    """
    client = service.client
    total = submitted.new + submitted.existing.total()
    retried = 0
    if run_options.retry_failed and submitted.failed:
        retried = client.retry(submitted.failed)
    cli_context.info(_start_line(run_options, submitted, total, retried))
    counts = _counts(client, run_options.campaign)
    if not total or not any(counts[state] for state in _UNSETTLED):
        return None
    service.report_others(run_options.campaign)
    service.start_workers()
    return submitted.existing[TaskState.FAILED] - retried


def _write_output(
    cli_context: CliContext,
    client: Client,
    output: str | None,
    loaded: LoadedCampaign,
    campaign: str,
) -> None:
    """Write the output of all tasks of the file to a directory, if one is given."""
    if output is None:
        return
    names = [spelling(campaign, spec.name) for spec in loaded.specs]
    known = client.existing(names)
    with OutputDirectory(cli_context, client, Path(output)) as directory:
        for name in names:
            if name in known and known[name]["attempt"]:
                directory.write(name)


#: States from which a task may still run.
_UNSETTLED: Final = ("blocked", "delayed", "ready", "leased")


# Checks before the start.


def _services(loaded: LoadedCampaign) -> tuple[str, ...]:
    """Return the services that the tasks of the file need."""
    return tuple(service_of(spec) for spec in loaded.specs if spec.payload is None)


def _check_own(cli_context: CliContext, loaded: LoadedCampaign, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` if a task could never run on the workers of this command."""
    check_workers(cli_context, worker_spec)
    _check_tasks_runnable(loaded, worker_spec)


def _check_tasks_runnable(loaded: LoadedCampaign, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` for tasks that could never run here."""
    slots, allow = worker_spec.slots or usable_cores(), worker_spec.allow
    checked: dict[Resources, None] = {}
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
        if (needed := resources_of(spec)) and needed not in checked:
            _check_resources(place, needed, worker_spec)
            checked[needed] = None
        if spec.call is not None and (problem := call_problem(spec.call, allow)):
            raise UserError(f"{place}: call {escape_line(spec.call)} {problem}")


def _check_resources(place: str, needed: Resources, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` if no local worker has the resources of a task."""
    workers = [worker_spec.share(number + 1).resources() for number in range(worker_spec.workers)]
    if any(fits(needed, dict(one)) for one in workers):
        return
    largest = max(workers, key=lambda one: -len(lacking(needed, dict(one))))
    missing = format_resources(lacking(needed, dict(largest)))
    own = format_resources(largest)
    raise UserError(
        f"{place}: needs {missing}, but a local worker has {own} (start a larger one with "
        "`taskyard up`, and use `taskyard load`)"
    )


# While tasks run.


def _counts(client: Client, campaign: str) -> dict[str, int]:
    return _counts_and_truncated(client, campaign)[0]


def _counts_and_truncated(client: Client, campaign: str) -> tuple[dict[str, int], int]:
    """Return the number of tasks in each state, and of those with a truncated result."""
    for one in client.status()["campaigns"]:
        if one["name"] == campaign:
            counts: dict[str, int] = one["counts"]
            # A task that ran again after it was done counts once here.
            return counts | {"done": counts["done"] - one["restarted"]}, one["truncated"]
    return {state.name.lower(): 0 for state in TaskState}, 0


def _wait(client: Client, campaign: str) -> Iterator[dict[str, int]]:
    """Yield the counts of a campaign's tasks while it is unsettled."""
    while True:
        yield _counts(client, campaign)
        try:
            client.wait_campaign(campaign, POLL_SECONDS)
        except TimedOut:
            continue
        return


def _start_line(run_options: RunOptions, submitted: SubmitResult, total: int, retried: int) -> str:
    existing = submitted.existing
    ended = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)
    numbers = (
        (existing[TaskState.DONE] - submitted.restarted, "already done"),
        (submitted.restarted, "run again after changes of files"),
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


def _report(
    run_options: RunOptions,
    client: Client,
    seconds: float,
    stopped: StoppedEarly | None,
    numbers: tuple[dict[str, int], int],
) -> ExitCode:
    """Print the outcome and return the exit code. `numbers` are of `_counts_and_truncated`."""
    counts, truncated = numbers
    failures: list[RunFailure] = []
    if counts["failed"]:
        scope = Scope(campaign=run_options.campaign.encode(), states=(TaskState.FAILED,))
        failures = [
            RunFailure(**{field: task[field] for field in RunFailure.__struct_fields__})
            for task in client.tasks(scope)
        ]
    code = _exit_code(counts, truncated) if stopped is None else stopped.exit_code
    slowest: list[SlowTask] = []
    if (total := sum(counts.values())) <= SLOWEST_SEARCHED_MAX:
        slowest = slowest_tasks(client, Scope(campaign=run_options.campaign.encode()))
    if run_options.as_json:
        document = RunDocument(
            campaign=run_options.campaign,
            state=run_options.state,
            seconds=round(seconds, 3),
            counts=counts,
            truncated=truncated,
            failures=failures,
            stopped=str(stopped or ""),
            slowest=slowest,
        )
        print_document(document)
    else:
        click.echo(
            f"{escape_line(run_options.campaign)}: {_outcome(counts, truncated, stopped)} "
            f"({format_duration(seconds)})"
        )
        if truncated:
            click.echo("truncated: only the last 1 MiB of stdout is kept")
        if total > SLOWEST_SEARCHED_MAX:
            click.echo(f"slowest:  taskyard list --sort duration{run_options.location}")
        elif slowest:
            click.echo(format_slowest(slowest))
        _print_failures(run_options, failures)
    return code


def _exit_code(counts: dict[str, int], truncated: int) -> ExitCode:
    if counts["failed"] or counts["blocked"] or truncated:
        return ExitCode.TASK_FAILED
    return ExitCode.CANCELLED if counts["cancelled"] else ExitCode.OK


def _outcome(counts: dict[str, int], truncated: int, stopped: StoppedEarly | None) -> str:
    unfinished = 0
    if stopped is not None:
        unfinished = sum(counts[state] for state in _UNSETTLED)
        counts = counts | {"blocked": 0}
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
    if unfinished:
        parts.append(f"{unfinished:,} unfinished")
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
        click.echo(f"  … and {more:,} more: taskyard list --failed{run_options.location}")
    name = shlex.quote(escape_line(spelling(failures[0].campaign, failures[0].name)))
    click.echo(f"explain:  taskyard why {name}{run_options.location}")
    click.echo(f"retry:    {_resume_command(run_options)}")


def _resume_command(run_options: RunOptions) -> str:
    own = (
        ""
        if run_options.campaign == default_campaign_name(run_options.file)
        else f" --campaign {run_options.campaign}"
    )
    form = "" if run_options.form is None else f" --format {run_options.form.value}"
    file = shlex.quote(run_options.file)
    return f"taskyard run {file}{form}{own}{run_options.location}"
