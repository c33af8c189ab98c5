"""The run of a file of tasks: from its submission until all are settled.

Uses the running broker, or an own one with workers. Prints outputs as `map` does.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from taskyard.campaign.detection import Format
from taskyard.campaign.reader import default_campaign_name
from taskyard.campaign.submit_campaign import submit_campaign
from taskyard.campaign.task_spec import resources_of, service_of
from taskyard.cli.connection import broker_location, given_location
from taskyard.cli.file_tasks import (
    UNSETTLED,
    FailedTasks,
    FileTasks,
    check_journal,
)
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.input_rows import InputRow
from taskyard.cli.load import file_options, read_or_report, report_rejected
from taskyard.cli.local_service import (
    call_problem,
    check_resources,
    check_slots,
    check_workers,
    local_service,
    make_worker_spec,
)
from taskyard.cli.map import MapStop, open_output, print_results
from taskyard.cli.map_output import FutureWindow
from taskyard.cli.options import CliContext
from taskyard.cli.output_directory import OutputDirectory
from taskyard.cli.progress import ProgressBar
from taskyard.cli.run_policy import (
    EarlyStop,
    RunPolicy,
    RunSummary,
    StoppedEarly,
)
from taskyard.cli.run_report import RunEnd, RunOptions, print_report, resume_command
from taskyard.cli.wait import wait_target
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, TimedOut, UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from taskyard.campaign.reader import LoadedCampaign
    from taskyard.campaign.submit_campaign import SubmitResult
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


def run_file(cli_context: CliContext, file: str, values: dict[str, Any]) -> ExitCode:
    """Run the tasks of a file, on the running broker or on an own one."""
    run_options, policy = _run_options(cli_context, file, values), RunPolicy.of(values)
    name, skip_bad = run_options.campaign, run_options.skip_bad
    if values["report"] is not None:
        _check_report(run_options)
    options = file_options(name, values)
    loaded = read_or_report(cli_context, file, options, skip_bad=skip_bad)
    worker_spec = make_worker_spec(cli_context, values, _services(loaded))
    cli_context.interrupt_message = f"interrupted; resume with `{resume_command(run_options)}`"
    check_own = partial(_check_own, cli_context, run_options, loaded, worker_spec)
    began = time.monotonic()
    with local_service(
        cli_context, worker_spec, check_own=check_own, finish_running=policy.finish_running
    ) as service:
        file_run = _FileRun(cli_context, run_options, service, policy, loaded, values)
        (file_run.retry_failed if run_options.retry_failed_only else file_run.run)()
        _write_output(cli_context, service.client, values["output"], loaded, name)
        seconds, end = time.monotonic() - began, file_run.end
        numbers = file_run.tasks.run_counts()
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
    location = broker_location(cli_context)
    return RunOptions(
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
    """One run of a file: its submission, its outputs and its end."""

    def __init__(  # noqa: PLR0913, PLR0917  # parts of one run
        self,
        cli_context: CliContext,
        run_options: RunOptions,
        service: LocalService,
        policy: RunPolicy,
        loaded: LoadedCampaign,
        values: dict[str, Any],
    ) -> None:
        self._cli_context = cli_context
        self._options = run_options
        self._service = service
        self._client = service.client
        self._policy = policy
        self._loaded = loaded
        self._values = values
        self.tasks = FileTasks(service.client, run_options.campaign, loaded.specs)
        self.end = RunEnd()
        self._stop = MapStop(cli_context, service, run_options.campaign, policy, is_named=True)

    def run(self) -> None:
        """Submit the campaign and wait until it has settled."""
        with self._stopped_early() as early_stop:
            submitted = self._submit(restart_changed=True)
            failed_before = self._start(submitted)
            if failed_before is None:
                return
            if self._options.shows_output:
                kept = () if self._options.retry_failed else submitted.failed
                self._show_outputs(submitted.done.union(kept))
            if self.end.stopped is None:
                self._wait(early_stop, failed_before)

    def _wait(self, early_stop: EarlyStop, failed_before: int) -> None:
        with ProgressBar(self._cli_context, self._options.campaign) as bar:
            for counts in _wait(self._client, self._options.campaign, self.tasks):
                bar.count(counts, sum(counts.values()))
                early_stop.count_failures(counts["failed"] - failed_before)
            if self._cli_context.shows_progress:
                counts = self.tasks.run_counts().counts
                bar.count(counts, sum(counts.values()), counts["blocked"])

    def retry_failed(self) -> None:
        """Retry the failed tasks of the file, and wait for them and the tasks behind them."""
        with self._stopped_early() as early_stop:
            failed = FailedTasks(self._client, self._options.campaign)
            self.end.is_partial = bool(failed.runnable)
            found = self._submit(check_only=True)
            self.tasks.begin(found.existing.total(), 0)
            is_retried = failed.retry(self._cli_context, found.failed, found.new)
            self.end.exit_code = ExitCode.OK
            if not is_retried:
                return
            target = wait_target(self._client, [*found.failed, *found.behind])
            self._service.report_others(self._options.campaign)
            self._service.start_workers()
            if self._options.shows_output:
                self._show_outputs((), frozenset((*found.failed, *found.behind)))
            if self.end.stopped is not None:
                return
            with ProgressBar(self._cli_context, self._options.campaign) as bar:
                is_settled = False
                while not is_settled:
                    is_settled = target.poll(POLL_SECONDS)
                    bar.count(target.counts, sum(target.counts.values()), target.behind_failure)
                    early_stop.count_failures(target.counts["failed"])
            self.end.exit_code = target.exit_code()

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
        if submitted.unnumbered:
            self._cli_context.warn(submitted.unnumbered)
        return submitted

    @contextmanager
    def _stopped_early(self) -> Iterator[EarlyStop]:
        """Stop the tasks of a block that is stopped early, and note why."""
        policy = RunPolicy() if self._options.shows_output else self._policy
        try:
            with EarlyStop(policy) as early_stop:
                yield early_stop
        except StoppedEarly as stopped:
            self.end.stopped, self.end.is_partial = stopped, True
            self._cli_context.info(str(stopped))
            self._service.stop_campaign(
                self._options.campaign,
                finish_running=self._policy.finish_running,
                is_resumable=True,
            )

    def _start(self, submitted: SubmitResult) -> int | None:
        """Retry failed tasks and start workers.

        Return the failures of earlier runs that are not retried. None if all tasks have settled.
        """
        total = submitted.new + submitted.existing.total()
        retried = 0
        if self._options.retry_failed and submitted.failed:
            retried = self._client.retry(submitted.failed)
        self._cli_context.info(_start_line(self._options, submitted, total, retried))
        ended = sum(submitted.existing[state] for state in _ENDED) - submitted.restarted - retried
        others = self.tasks.begin(total, total - ended)
        counts = self.tasks.progress()
        if not total or not any(counts[state] for state in UNSETTLED):
            return None
        if others:
            self._cli_context.info(
                f"{format_count(others, 'unfinished task')} of the campaign not in the file may "
                "run too"
            )
        self._service.report_others(self._options.campaign)
        self._service.start_workers()
        return submitted.existing[TaskState.FAILED] - retried

    def _show_outputs(self, left_out: Collection[str], only: frozenset[str] | None = None) -> None:
        """Print the outputs of the file's tasks as they settle, until they are stopped early."""
        campaign, in_order = self._options.campaign, self._values["keep_order"]
        with open_output(self._cli_context, self._client, campaign, self._values) as answer:
            answer.has_summary = False
            window = FutureWindow(answer.write, answer.flush, in_order=in_order)
            print_results(answer, window, self._futures(left_out, only), self._stop)
        if answer.stopped is not None:
            self.end.stopped, self.end.is_partial = answer.stopped, True

    def _futures(
        self, left_out: Collection[str], only: frozenset[str] | None
    ) -> Iterator[tuple[InputRow, Future]]:
        """Yield the tasks of the file with their lines. `only` has the full names of some."""
        loaded, rows = self._loaded, []
        for spec, line in zip(loaded.specs, loaded.lines, strict=True):
            name = spelling(self._options.campaign, spec.name)
            if name not in left_out and (only is None or name in only):
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
    allow = worker_spec.allow
    checked: dict[Resources, None] = {}
    for spec, line in zip(loaded.specs, loaded.lines, strict=True):
        place = f"{loaded.file}:{line}: task {escape_line(spec.name)}"
        if spec.payload is not None:
            raise UserError(
                f"{place}: service {escape_line(service_of(spec))} needs your own worker (use "
                "`taskyard up` and `taskyard load`, or `taskyard map` to run a command per line)"
            )
        check_slots(place, spec.slots, worker_spec)
        if (needed := resources_of(spec)) and needed not in checked:
            check_resources(place, needed, worker_spec)
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
