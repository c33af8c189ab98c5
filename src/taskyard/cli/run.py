"""`taskyard run`: run a campaign file, with its own broker and workers if none is running."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.campaign.formats import FileOptions
from taskyard.campaign.reader import default_campaign_name
from taskyard.campaign.submit_campaign import submit_campaign
from taskyard.campaign.task_spec import resources_of, service_of
from taskyard.cli.connection import broker_location, given_location
from taskyard.cli.failed_tasks import (
    FailedTasks,
    check_journal,
    no_retry_failed_option,
    retry_failed_only_option,
)
from taskyard.cli.file_tasks import UNSETTLED, FileTasks
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.load import format_options, read_or_report, report_rejected
from taskyard.cli.local_service import (
    call_problem,
    check_resources,
    check_workers,
    local_service,
    make_worker_spec,
    service_options,
)
from taskyard.cli.options import CliContext, GroupedCommand, broker_options
from taskyard.cli.output import example
from taskyard.cli.output_directory import OutputDirectory, output_option
from taskyard.cli.progress import ProgressBar
from taskyard.cli.resource_options import machine_if_set, resource_options
from taskyard.cli.run_policy import (
    EarlyStop,
    RunPolicy,
    RunSummary,
    StoppedEarly,
    run_policy_options,
)
from taskyard.cli.run_report import RunEnd, RunOptions, print_report, resume_command
from taskyard.cli.scopes import OnceOption
from taskyard.cli.task_options import environment_options
from taskyard.cli.wait import wait_target
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, TimedOut, UserError
from taskyard.process.machine import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskyard.campaign.reader import LoadedCampaign
    from taskyard.campaign.submit_campaign import SubmitResult
    from taskyard.cli.local_service import LocalService
    from taskyard.client.internal import InternalClient
    from taskyard.core.resources import Resources
    from taskyard.process.supervisor import WorkerSpec

#: How often progress is polled.
POLL_SECONDS: Final = 0.25

#: States of tasks that have ended.
_ENDED: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)

#: Options for tasks that no local worker could run.
_RESOURCES_HINT: Final = (
    "see --cpus, --memory, --gpus and --resource, or start a worker elsewhere and use `taskyard "
    "load`"
)

#: The headings of the help. The options that most users need come first.
_OPTION_GROUPS: Final = {
    "Common options": (
        *(
            "worker_slots",
            "campaign",
            "output",
            "report",
            "max_failures",
            "timeout",
            "retry_failed_only",
        ),
        *("state", "json", "quiet", "progress"),
    ),
    "Input": ("form", "shell", "skip_bad", "replay", "speedup"),
    "Steering": ("no_retry_failed", "finish_running", "bell", "notify"),
    "Where it runs": ("broker", "env", "env_all", "no_env"),
    "Workers, if no broker is running": (
        *("workers", "allow", "allow_pickle", "cpus", "memory", "gpus", "resources"),
    ),
}


@click.command(
    cls=GroupedCommand,
    groups=_OPTION_GROUPS,
    epilog=example("run cmds.txt", "run examples/first.jsonl --workers 2", "why bad"),
)
@click.argument("file", type=click.Path())
@service_options("--slots", "-j", "-P", "--jobs")
@resource_options
@click.option(
    "--campaign",
    cls=OnceOption,
    metavar="NAME",
    help="Name of the campaign. The file name without suffix if omitted.",
)
@no_retry_failed_option
@retry_failed_only_option
@click.option("--skip-bad", is_flag=True, help="Skip rejected lines instead of doing nothing.")
@format_options
@click.option(
    "--replay", is_flag=True, help="WfCommons: sleep for the recorded run time of each task."
)
@click.option("--speedup", type=float, default=1.0, metavar="N", help="Replay N times as fast.")
@output_option
@click.option(
    "--report",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write an HTML report of the campaign to DIR at the end, as `taskyard report` does.",
)
@run_policy_options
@environment_options
@broker_options
@click.pass_obj
def run(cli_context: CliContext, /, file: str, **values: Any) -> ExitCode:  # noqa: ANN401  # options
    """Run a campaign file from start to finish.

    Loads FILE and waits until all tasks have settled. Uses the broker that runs on the state
    directory. If there is none, the command starts one with workers and stops them at the end. Exit
    0 if all tasks are done, 1 if one failed.

    Run it again with the same --state to resume, after Ctrl-C or a crash. Done tasks are kept,
    unless an input has changed or an output is gone. Failed tasks are retried. FILE has a shell
    command per line, or any other format. - is stdin.
    """
    run_options, policy = _run_options(cli_context, file, values), RunPolicy.of(values)
    name, skip_bad = run_options.campaign, run_options.skip_bad
    if values["report"] is not None:
        _check_report(run_options)
    options = FileOptions(run_options.form, values["replay"], values["speedup"], name)
    loaded = read_or_report(cli_context, file, options, skip_bad=skip_bad)
    own = [values[key] for key in ("cpus", "memory", "gpus", "resources")]
    worker_spec = make_worker_spec(values, _services(loaded), machine_if_set(*own))
    cli_context.interrupt_message = f"interrupted; resume with `{resume_command(run_options)}`"
    check_own = partial(_check_own, cli_context, run_options, loaded, worker_spec)
    began = time.monotonic()
    with local_service(
        cli_context, worker_spec, check_own=check_own, finish_running=policy.finish_running
    ) as service:
        report = partial(report_rejected, file, skip_bad=skip_bad)
        submit = partial(submit_campaign, service.client, loaded, name, on_rejected=report)
        tasks = FileTasks(service.client, name, loaded.specs)
        run_one = _retry_failed if run_options.retry_failed_only else _run
        end = run_one(cli_context, run_options, service, submit, policy, tasks=tasks)
        _write_output(cli_context, service.client, values["output"], loaded, name)
        seconds = time.monotonic() - began
        numbers = tasks.run_counts()
        code = print_report(run_options, service.client, seconds, end, numbers, loaded=loaded)
    if values["report"] is not None:
        code = _make_report(cli_context, run_options, values["report"], code)
    stop_reason = str(end.stopped or "")
    policy.announce(
        cli_context, RunSummary(name, code, round(seconds, 3), numbers.counts, stop_reason)
    )
    return code


def _run_options(cli_context: CliContext, file: str, values: dict[str, Any]) -> RunOptions:
    """Return the options of a run. Raises `UserError` if two exclude each other."""
    if values["no_retry_failed"] and values["retry_failed_only"]:
        raise UserError("--no-retry-failed and --retry-failed-only exclude each other")
    return RunOptions(
        *(file, values["campaign"] or default_campaign_name(file), *_location(cli_context)),
        skip_bad=values["skip_bad"],
        retry_failed=not values["no_retry_failed"],
        as_json=cli_context.as_json,
        form=values["form"],
        retry_failed_only=values["retry_failed_only"],
        quiet=cli_context.quiet,
    )


def _location(cli_context: CliContext) -> tuple[str, str]:
    """Return the state directory, and the given options that lead a command to the same broker."""
    location = broker_location(cli_context)
    return "" if location.broker else str(location.state), given_location(cli_context)


@contextmanager
def _stopped_early(
    cli_context: CliContext,
    run_options: RunOptions,
    service: LocalService,
    policy: RunPolicy,
    end: RunEnd,
) -> Iterator[EarlyStop]:
    """Stop the tasks of a block that is stopped early, and note why."""
    try:
        with EarlyStop(policy) as early_stop:
            yield early_stop
    except StoppedEarly as stopped:
        end.stopped, end.is_partial = stopped, True
        cli_context.info(str(stopped))
        service.stop_campaign(
            run_options.campaign, finish_running=policy.finish_running, is_resumable=True
        )


def _run(  # noqa: PLR0913  # parts of one run
    cli_context: CliContext,
    run_options: RunOptions,
    service: LocalService,
    submit: Callable[..., SubmitResult],
    policy: RunPolicy,
    *,
    tasks: FileTasks,
) -> RunEnd:
    """Submit the campaign and wait until it has settled."""
    end = RunEnd()
    with _stopped_early(cli_context, run_options, service, policy, end) as early_stop:
        submitted = submit(restart_changed=True)
        failed_before = _start(cli_context, run_options, service, submitted, tasks)
        if failed_before is not None:
            with ProgressBar(cli_context, run_options.campaign) as bar:
                for counts in _wait(service.client, run_options.campaign, tasks):
                    bar.count(counts, sum(counts.values()))
                    early_stop.count_failures(counts["failed"] - failed_before)
                if cli_context.shows_progress:
                    counts = tasks.run_counts().counts
                    bar.count(counts, sum(counts.values()), counts["blocked"])
    return end


def _retry_failed(  # noqa: PLR0913  # parts of one run
    cli_context: CliContext,
    run_options: RunOptions,
    service: LocalService,
    submit: Callable[..., SubmitResult],
    policy: RunPolicy,
    *,
    tasks: FileTasks,
) -> RunEnd:
    """Retry the failed tasks of the file, and wait for them and the tasks behind them."""
    end = RunEnd()
    with _stopped_early(cli_context, run_options, service, policy, end) as early_stop:
        failed = FailedTasks(service.client, run_options.campaign)
        end.is_partial = bool(failed.runnable)
        found = submit(check_only=True)
        tasks.begin(found.existing.total(), 0)
        is_retried = failed.retry(cli_context, found.failed, found.new)
        end.exit_code = ExitCode.OK
        if is_retried:
            target = wait_target(service.client, [*found.failed, *found.behind])
            service.report_others(run_options.campaign)
            service.start_workers()
            with ProgressBar(cli_context, run_options.campaign) as bar:
                is_settled = False
                while not is_settled:
                    is_settled = target.poll(POLL_SECONDS)
                    bar.count(target.counts, sum(target.counts.values()), target.behind_failure)
                    early_stop.count_failures(target.counts["failed"])
            end.exit_code = target.exit_code()
    return end


def _start(
    cli_context: CliContext,
    run_options: RunOptions,
    service: LocalService,
    submitted: SubmitResult,
    tasks: FileTasks,
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
    ended = sum(submitted.existing[state] for state in _ENDED) - submitted.restarted - retried
    others = tasks.begin(total, total - ended)
    counts = tasks.progress()
    if not total or not any(counts[state] for state in UNSETTLED):
        return None
    if others:
        cli_context.info(
            f"{format_count(others, 'unfinished task')} of the campaign not in the file may run too"
        )
    service.report_others(run_options.campaign)
    service.start_workers()
    return submitted.existing[TaskState.FAILED] - retried


def _write_output(
    cli_context: CliContext,
    client: InternalClient,
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


def _make_report(
    cli_context: CliContext, run_options: RunOptions, out: Path, code: ExitCode
) -> ExitCode:
    """Write the report of the campaign. Return the exit code of the run, unless it is refuted."""
    from taskyard.cli.pipeline.report import HistoryLocation, make_report  # noqa: PLC0415  # an extra
    from taskyard.pipeline.jvm import end_jvm_on_signals  # noqa: PLC0415

    location = HistoryLocation((Path(run_options.state),), are_states=True)
    with end_jvm_on_signals():
        path, facts = make_report(cli_context, location, run_options.campaign, out)
    cli_context.info(f"report: {path}")
    return code if facts.guarantees.is_clean else ExitCode.STATE_DAMAGED


# Checks before the start.


def _check_report(run_options: RunOptions) -> None:
    """Raise `UserError` if no report can be made at the end."""
    from taskyard.cli.pipeline.group import require_spark  # noqa: PLC0415  # not for every run

    if not run_options.state:
        raise UserError("--report: needs the state directory of the broker (use --state)")
    require_spark()


def _services(loaded: LoadedCampaign) -> tuple[str, ...]:
    """Return the services that the tasks of the file need."""
    return tuple(service_of(spec) for spec in loaded.specs if spec.payload is None)


def _check_own(
    cli_context: CliContext,
    run_options: RunOptions,
    loaded: LoadedCampaign,
    worker_spec: WorkerSpec,
) -> None:
    """Raise `UserError` if a task could never run on the workers of this command."""
    if run_options.retry_failed_only:
        check_journal(cli_context, run_options.campaign)
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
            check_resources(place, needed, worker_spec, _RESOURCES_HINT)
            checked[needed] = None
        if spec.call is not None and (problem := call_problem(spec.call, allow)):
            raise UserError(f"{place}: call {escape_line(spec.call)} {problem}")


# While tasks run.


def _wait(client: InternalClient, campaign: str, tasks: FileTasks) -> Iterator[dict[str, int]]:
    """Yield the counts of the tasks while their campaign is unsettled."""
    while True:
        yield tasks.progress()
        try:
            client.wait_campaign(campaign, POLL_SECONDS)
        except TimedOut:
            continue
        return


def _start_line(run_options: RunOptions, submitted: SubmitResult, total: int, retried: int) -> str:
    existing = submitted.existing
    numbers = (
        (existing[TaskState.DONE] - submitted.restarted, "already done"),
        (submitted.restarted, "run again after changes of files"),
        (retried, "failed and retried"),
        (existing[TaskState.FAILED] - retried, "failed and not retried"),
        (existing[TaskState.CANCELLED], "cancelled"),
        (existing.total() - sum(existing[state] for state in _ENDED), "waiting since the last run"),
        (submitted.new if existing else 0, "new"),
    )
    parts = ", ".join(f"{number:,} {word}" for number, word in numbers if number)
    return (
        f"{escape_line(run_options.campaign)}: "
        f"{format_count(total, 'task')}{': ' if parts else ''}{parts}"
    )
