"""The run of files of tasks: from their submission until all are settled.

Uses the running broker, or an own broker with workers. Prints outputs as `map` does.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from taskyard.campaign.formats import Format
from taskyard.campaign.reader import default_campaign_name
from taskyard.campaign.submitter import submit_campaign
from taskyard.campaign.task_spec import resources_of, service_of
from taskyard.cli import local_service, run_report
from taskyard.cli.connection import broker_location, given_location
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.map import MapStop, RowDoor, open_output, print_results
from taskyard.cli.map_output import FutureWindow
from taskyard.cli.options import CliContext
from taskyard.cli.output import OutputDirectory
from taskyard.cli.progress import ProgressBar
from taskyard.cli.run_report import EarlyStop, RunPolicy, StoppedEarly
from taskyard.cli.submit import file_options, read_or_report, report_rejected
from taskyard.cli.templates import InputRow
from taskyard.cli.wait import wait_target
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, TimedOut, UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from taskyard.campaign.reader import LoadedCampaign
    from taskyard.campaign.submitter import SubmitResult
    from taskyard.cli.local_service import LocalService
    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient
    from taskyard.core.resources import Resources
    from taskyard.process.supervisor import WorkerSpec

#: How often progress is polled.
POLL_SECONDS: Final = 0.25

#: How many names one request for futures has.
FUTURES_AT_ONCE: Final = 1000

#: States of tasks that have ended.
_ENDED: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)


def run_files(cli_context: CliContext, files: Sequence[str], values: dict[str, Any]) -> ExitCode:
    """Run the tasks of files, each a campaign, on the running broker or on its own."""
    plans, policy = _plans(cli_context, files, values), RunPolicy.of(values)
    services = [service for plan in plans for service in _services(plan.loaded)]
    worker_spec = local_service.make_worker_spec(cli_context, values, services)
    resume = run_report.resume_command(*[plan.options for plan in plans])
    cli_context.interrupt_message = f"interrupted; resume with `{resume}`"

    def check_own() -> None:
        for plan in plans:
            _check_own(cli_context, plan, worker_spec)

    began = time.monotonic()
    with local_service.open_service(
        cli_context, worker_spec, check_own=check_own, finish_running=policy.finish_running
    ) as service:
        runs = [_FileRun(cli_context, service, plan, values) for plan in plans]
        _run_all(runs, service, policy, began)
        reports: list[run_report.RunReport] = []
        for file_run in runs:
            file_run.write_output()
            reports.append(file_run.report(time.monotonic() - began))
        code = run_report.print_reports(reports, service.client)
    if values["report"] is not None:
        code = _make_report(cli_context, plans[0].options, values["report"], code)
    policy.announce(cli_context, run_report.summary_of(reports, code))
    return code


class _Plan(NamedTuple):
    """A file to run, checked."""

    options: run_report.RunOptions
    loaded: LoadedCampaign


def _plans(cli_context: CliContext, files: Sequence[str], values: dict[str, Any]) -> list[_Plan]:
    """Read and check files. Raises `UserError` before anything is started."""
    if len(files) > 1 and (given := next((one for one in _ONE_FILE if values[one]), None)):
        raise UserError(f"--{given}: needs one FILE, but there are {len(files)}")
    plans: dict[str, _Plan] = {}
    for file in files:
        options = _run_options(cli_context, file, values)
        name = options.campaign
        if name in plans:
            other = plans[name].options.file
            raise UserError(
                f"{file}: its campaign {name} is that of {other} (run one of them with --campaign)"
            )
        if values["report"] is not None:
            _check_report(options)
        skip_bad, how = options.skip_bad, file_options(name, values)
        plans[name] = _Plan(options, read_or_report(cli_context, file, how, skip_bad=skip_bad))
    return [*plans.values()]


#: Options that several files exclude.
_ONE_FILE: Final = ("campaign", "report")


def _run_all(
    runs: Sequence[_FileRun], service: LocalService, policy: RunPolicy, began: float
) -> None:
    """Submit the tasks of all files, and wait for them in this order until a run is stopped."""
    stopped: StoppedEarly | None = None
    for file_run in runs:
        file_run.submit()
    if any(file_run.has_work for file_run in runs):
        service.report_others(*[file_run.campaign for file_run in runs])
        service.start_workers()
    for file_run in runs:
        if stopped is not None:
            file_run.stop(stopped, policy)
        elif file_run.has_work:
            file_run.wait(policy.left_after(time.monotonic() - began))
            stopped = file_run.end.stopped


def _run_options(
    cli_context: CliContext, file: str, values: dict[str, Any]
) -> run_report.RunOptions:
    """Return the options of a run. Raises `UserError` if two exclude each other."""
    if values["no_retry_failed"] and values["retry_failed_only"]:
        raise UserError("--no-retry-failed and --retry-failed-only exclude each other")
    location = broker_location(cli_context)
    return run_report.RunOptions(
        file=file,
        campaign=values["campaign"] or default_campaign_name(file),
        state="" if location.broker else str(location.state),
        location=given_location(cli_context),
        skip_bad=values["skip_bad"],
        retry_failed=not values["no_retry_failed"],
        as_json=cli_context.as_json,
        form=values["form"],
        retry_failed_only=values["retry_failed_only"],
        quiet=cli_context.quiet,
        shows_output=not (cli_context.as_json or values["quiet_output"]),
    )


class _FileRun:
    """The run of one file: its submission, its outputs and its end."""

    def __init__(
        self, cli_context: CliContext, service: LocalService, plan: _Plan, values: dict[str, Any]
    ) -> None:
        self._cli_context = cli_context
        self._service = service
        self._client = service.client
        self._options, self._loaded = plan
        self._values = values
        self.campaign = self._options.campaign
        self.tasks = run_report.FileTasks(service.client, self.campaign, self._loaded.specs)
        self.end = run_report.RunEnd()
        #: Whether some of its tasks have not settled.
        self.has_work = False
        #: Failures of earlier runs that are not retried.
        self._failed_before = 0
        #: Full names of tasks whose outputs are not printed. None to print only `_retried`.
        self._left_out: Collection[str] | None = ()
        #: With --retry-failed-only: full names of failed tasks, and of tasks behind them.
        self._retried: list[str] = []

    def submit(self) -> None:
        """Submit the campaign, or only retry its failed tasks."""
        if self._options.retry_failed_only:
            self._retry_failed()
            return
        submitted = self._submit(restart_changed=True)
        kept = () if self._options.retry_failed else submitted.failed
        self._left_out = submitted.done.union(kept)
        self.has_work = self._start(submitted)

    def _retry_failed(self) -> None:
        failed = run_report.FailedTasks(self._client, self.campaign)
        self.end.is_partial = bool(failed.runnable)
        found = self._submit(check_only=True)
        self.tasks.begin(found.existing.total(), 0)
        self._left_out, self._retried = None, [*found.failed, *found.behind]
        self.has_work = failed.retry(self._cli_context, found.failed, found.new)
        self.end.exit_code = ExitCode.OK

    def wait(self, policy: RunPolicy) -> None:
        """Print outputs, and wait until the tasks have settled or are stopped early."""
        try:
            if self._options.shows_output:
                self._show_outputs(policy)
            if self.end.stopped is None:
                with EarlyStop(RunPolicy() if self._options.shows_output else policy) as early_stop:
                    (self._await_retried if self._retried else self._await)(early_stop)
        except StoppedEarly as stopped:
            self._cli_context.info(str(stopped))
            self.stop(stopped, policy)

    def stop(self, stopped: StoppedEarly, policy: RunPolicy) -> None:
        """Stop the tasks, and keep why."""
        self.end.stopped, self.end.is_partial = stopped, True
        self._service.stop_tasks(
            run_report.TaskGroup(self.campaign),
            finish_running=policy.finish_running,
            is_resumable=True,
        )

    def _await(self, early_stop: EarlyStop) -> None:
        with ProgressBar(self._cli_context, self.campaign) as bar:
            for counts in _wait(self._client, self.campaign, self.tasks):
                bar.count(counts, sum(counts.values()))
                early_stop.count_failures(counts["failed"] - self._failed_before)
            if self._cli_context.shows_progress:
                counts = self.tasks.run_counts().counts
                bar.count(counts, sum(counts.values()), counts["blocked"])

    def _await_retried(self, early_stop: EarlyStop) -> None:
        target = wait_target(self._client, self._retried)
        with ProgressBar(self._cli_context, self.campaign) as bar:
            is_settled = False
            while not is_settled:
                is_settled = target.poll(POLL_SECONDS)
                bar.count(target.counts, sum(target.counts.values()), target.behind_failure)
                early_stop.count_failures(target.counts["failed"])
        self.end.exit_code = target.exit_code()

    def write_output(self) -> None:
        """Write the output of all tasks of the file to a directory, if one is given."""
        _write_output(
            self._cli_context, self._client, self._values["output"], self._loaded, self.campaign
        )

    def report(self, seconds: float) -> run_report.RunReport:
        """Return what is reported of the run."""
        return run_report.RunReport(
            self._options, self._loaded, self.end, self.tasks.run_counts(), seconds
        )

    def _submit(self, *, restart_changed: bool = False, check_only: bool = False) -> SubmitResult:
        skip_bad = self._options.skip_bad
        submitted = submit_campaign(
            self._client,
            self._loaded,
            self._options.campaign,
            unknown=UnknownPolicy.WAIT
            if self._values["wait_for_unknown"]
            else UnknownPolicy.REFUSE,
            on_rejected=partial(report_rejected, self._options.file, skip_bad=skip_bad),
            restart_changed=restart_changed,
            check_only=check_only,
        )
        for warning in submitted.warnings:
            self._cli_context.warn(warning)
        return submitted

    def _start(self, submitted: SubmitResult) -> bool:
        """Retry failed tasks. Return whether some tasks have not settled."""
        total = submitted.new + submitted.existing.total()
        retried = 0
        if self._options.retry_failed and submitted.failed:
            retried = self._client.retry(submitted.failed)
        self._cli_context.info(_start_line(self._options, submitted, total, retried))
        ended = sum(submitted.existing[state] for state in _ENDED) - submitted.restarted - retried
        others = self.tasks.begin(total, total - ended)
        self._failed_before = submitted.existing[TaskState.FAILED] - retried
        counts = self.tasks.progress()
        has_work = bool(total) and any(counts[state] for state in run_report.UNSETTLED)
        if has_work and others:
            self._cli_context.info(
                f"{format_count(others, 'unfinished task')} of the campaign not in the file may "
                "run too"
            )
        return has_work

    def _show_outputs(self, policy: RunPolicy) -> None:
        """Print the outputs of the file's tasks as they settle, until they are stopped early."""
        group, in_order = run_report.TaskGroup(self.campaign), self._values["keep_order"]
        stop = MapStop(self._cli_context, self._service, group, policy, is_named=True)
        with open_output(self._cli_context, self._client, group, self._values, RowDoor()) as answer:
            answer.has_summary = False
            window = FutureWindow(answer.write, answer.flush, in_order=in_order)
            print_results(answer, window, self._futures(), stop)
        if answer.stopped is not None:
            self.end.stopped, self.end.is_partial = answer.stopped, True

    def _futures(self) -> Iterator[tuple[InputRow, Future]]:
        """Yield the tasks of the file whose outputs are printed, with their lines."""
        loaded, rows, retried = self._loaded, [], frozenset(self._retried)
        for spec, line in zip(loaded.specs, loaded.lines, strict=True):
            name = spelling(self.campaign, spec.name)
            if name in retried if self._left_out is None else name not in self._left_out:
                is_shell = loaded.choice.format is Format.SHELL and spec.argv
                text = spec.argv[-1] if spec.argv and is_shell else spec.name
                rows.append((name, InputRow(line, f"{loaded.file}:{line}", text, None)))
        for start in range(0, len(rows), FUTURES_AT_ONCE):
            some = rows[start : start + FUTURES_AT_ONCE]
            # Without tasks that were left out, because they wait for unknown names.
            known = self._client.existing([name for name, _ in some])
            futures = self._client.futures([name for name, _ in some if name in known])
            yield from zip((row for name, row in some if name in known), futures, strict=True)


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
    cli_context: CliContext, run_options: run_report.RunOptions, out: Path, code: ExitCode
) -> ExitCode:
    """Write the report of the campaign. Return the exit code of the run, unless it is refuted."""
    from taskyard.cli.report import HistoryLocation, make_report  # noqa: PLC0415  # an extra
    from taskyard.pipeline.jvm import end_jvm_on_signals  # noqa: PLC0415

    location = HistoryLocation((Path(run_options.state),), are_states=True)
    with end_jvm_on_signals():
        path, facts = make_report(cli_context, location, run_options.campaign, out)
    cli_context.info(f"report: {path}")
    return code if facts.guarantees.is_clean else ExitCode.STATE_DAMAGED


# Checks before the start.


def _check_report(run_options: run_report.RunOptions) -> None:
    """Raise `UserError` if no report can be made at the end."""
    from taskyard.cli.pipeline import require_spark  # noqa: PLC0415  # not for every run

    if not run_options.state:
        raise UserError("--report: needs the state directory of the broker (use --state)")
    require_spark()


def _services(loaded: LoadedCampaign) -> tuple[str, ...]:
    """Return the services that the tasks of the file need."""
    return tuple(service_of(spec) for spec in loaded.specs if spec.payload is None)


def _check_own(cli_context: CliContext, plan: _Plan, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` if a task could never run on the workers of this command."""
    if plan.options.retry_failed_only:
        run_report.check_journal(cli_context, plan.options.campaign)
    local_service.check_workers(cli_context, worker_spec)
    _check_tasks_runnable(plan.loaded, worker_spec)


def _check_tasks_runnable(loaded: LoadedCampaign, worker_spec: WorkerSpec) -> None:
    """Raise `UserError` for tasks that could never run here."""
    allow = worker_spec.allow
    checked: dict[Resources, None] = {}
    for spec, line in zip(loaded.specs, loaded.lines, strict=True):
        place = f"{loaded.file}:{line}: task {escape_line(spec.name)}"
        if spec.payload is not None:
            raise UserError(
                f"{place}: service {escape_line(service_of(spec))} needs your own worker (use "
                "`taskyard up` and `taskyard load`, or `taskyard map` to run a command per line)"
            )
        local_service.check_slots(place, spec.slots, worker_spec)
        if (needed := resources_of(spec)) and needed not in checked:
            local_service.check_resources(place, needed, worker_spec)
            checked[needed] = None
        if spec.call is not None and (problem := local_service.call_problem(spec.call, allow)):
            raise UserError(f"{place}: call {escape_line(spec.call)} {problem}")


# While tasks run.


def _wait(
    client: InternalClient, campaign: str, tasks: run_report.FileTasks
) -> Iterator[dict[str, int]]:
    """Yield the counts of the tasks while their campaign is unsettled."""
    while True:
        yield tasks.progress()
        try:
            client.wait_campaign(campaign, POLL_SECONDS)
        except TimedOut:
            continue
        return


def _start_line(
    run_options: run_report.RunOptions, submitted: SubmitResult, total: int, retried: int
) -> str:
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
